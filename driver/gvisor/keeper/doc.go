// Package keeper is the process that holds the sandboxes of the gVisor driver.
//
// A daemon that is replaced or killed must not take its sandboxes with it, so it does not hold them: it asks the
// keeper, one process per state directory, which creates sandboxes by gVisor as a library, is the parent of their
// processes, holds the host end of each sandbox's channel and sees how each ends. The keeper itself may be killed
// too. What it knows stands in the state directory, and a new keeper finds the sandboxes again and opens a new channel
// to each through gVisor's port forwarding.
//
// The keeper lives in a mount namespace of its own whose root is a small tmpfs: the state directory at /state, /proc,
// /sys, five devices, and /stage, where the mounts of a sandbox stand while it starts. Nothing else of the host's
// files is there, so that neither gVisor's file server nor its kernel process ever sees them, and a killed keeper
// leaves no mount behind. Layers, binds and mounts arrive as descriptors of detached mounts.
package keeper
