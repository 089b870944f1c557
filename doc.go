// Package warren is the Go SDK of Warren, which gives every coding agent its own computer, and the vocabulary
// that all of Warren shares.
//
// # Words
//
// A sandbox is one execution environment: a kernel, processes, a root file system and a network of its own,
// replaceable at any time. A workspace is the durable files an agent works on, at /workspace and /home/user of
// the sandbox; it outlives every sandbox that mounts it. A repo is a git repository cached once on the host,
// from which workspaces are cut. An image is a read-only root file system. A driver runs sandboxes by one
// mechanism; the guest is Warren's agent inside, PID 1. The engine owns every lifecycle.
//
// # Verbs
//
// One word per idea: create and delete a sandbox, start and wait for a process, open and close a driver,
// dial a port, cut and copy a workspace, fetch a repo, pull and import an image, pause and resume a sandbox. A driver
// snapshots a sandbox into a memory image and restores it from one; freeze and thaw is to stop it in place.
package warren

// SandboxID names a sandbox for ever: "s" and 19 characters of [a-z0-9]. It is never used again.
type SandboxID string

// WorkspaceID names a workspace: "w" and 19 characters of [a-z0-9].
type WorkspaceID string

// SnapshotID names a snapshot for ever.
type SnapshotID string

// RepoID names a repository in the cache, derived from its URL.
type RepoID string

// GuestPort is the port on which the guest of every sandbox answers.
const GuestPort = 49983
