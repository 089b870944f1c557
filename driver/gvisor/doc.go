// Package gvisor is the driver that runs each sandbox on a kernel of its own in user space (gVisor), without KVM.
//
// The driver does not link gVisor. It talks to a keeper, a process of the runtime binary that it starts when none
// answers, and that outlives it; see package keeper. What a sandbox looks like from the host:
//
//   - Its processes run in a user namespace with 65536 ids of their own, from 0x70000000 upwards, that own nothing
//     else; they have no capability on the host, no_new_privs and gVisor's seccomp filters, an empty network namespace, and
//     mount, PID, IPC and UTS namespaces.
//   - Its root is the image's layers under a read-only overlay with the binds over it, idmapped into its range. What
//     it writes goes to a file without a name that the gVisor kernel lays over it, of exactly Limits.Disk bytes.
//   - Its mounts are clones of the very directories that the caller opened, idmapped too. A writable mount that cannot
//     be idmapped is refused.
//   - Its network is a stack of its own with a loopback and nothing else.
//
// Inside, the guest is PID 1 as root with roughly Docker's capabilities; set-uid programs such as sudo work, because
// no_new_privs is off inside. None of this exists on the host.
//
// /tmp and /run belong to the root overlay, so that large temporary files count against the disk limit and not the
// memory limit; /dev/shm is memory, at most half of its limit.
package gvisor
