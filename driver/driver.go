// Package driver defines what runs sandboxes.
//
// A driver boots a sandbox from a resolved [Spec], lists and deletes it, and dials ports inside it. Everything
// that happens in a sandbox (commands, terminals, files, previews) is bytes on such a connection, so a driver
// needs to know nothing of them. What a driver can do beyond that is an optional interface beside [Driver], found
// by [As]; package drivertest holds a test for each sentence of the contract.
package driver

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/warren-sandbox/warren"
)

// Driver runs sandboxes by one mechanism. Sandboxes are named by id, never held as handles: a driver opened anew
// on the same state finds those that an earlier process created. All methods may be called at the same time.
//
// Errors match the sentinels of package warren.
type Driver interface {
	// Create boots a sandbox. When it returns nil the sandbox exists and its guest is booting or has booted; when it
	// returns an error nothing of the sandbox is left. Creating an id that exists returns [warren.ErrExists] and
	// changes nothing. A spec that the driver cannot honour in full is refused with [warren.ErrInvalid] or
	// [errors.ErrUnsupported] before anything is made. When ctx ends, Create stops soon and leaves nothing.
	Create(ctx context.Context, spec *Spec) error

	// Delete ends every process of the sandbox and removes all that the driver made for it, also of a create that
	// was cut short, whoever started it. What the spec mounted stays. Deleting what does not exist returns nil.
	// Delete may be repeated until it returns nil.
	Delete(ctx context.Context, id warren.SandboxID) error

	// List returns every sandbox of this driver's state, dead ones included, in any order.
	List(ctx context.Context) ([]Status, error)

	// Dial connects to a TCP port inside the sandbox, on its loopback. For [warren.GuestPort] it waits until the guest
	// accepts or ctx ends; for another port on which nothing listens it returns [warren.ErrUnavailable] at once. A
	// sandbox that does not exist gives [warren.ErrNotFound], one that has died [warren.ErrState]. The
	// connection carries bytes both ways, knows half-close (CloseWrite), and ends when either side or the sandbox does.
	Dial(ctx context.Context, id warren.SandboxID, port uint16) (net.Conn, error)

	// Close releases what this process holds. Sandboxes keep running.
	Close() error
}

// Spec is a resolved sandbox: every default is filled in and every path exists. The user's wish is another type.
type Spec struct {
	ID       warren.SandboxID
	Hostname string
	Root     Root
	// Mounts of host directories, in order; Target is absolute and clean.
	Mounts []Mount
	Limits Limits
	// Env of the guest itself. Processes get theirs from the guest's API.
	Env []string
	// Options of this driver, such as "runtime"; an unknown key is refused.
	Options map[string]string
	// Labels for people who look at the driver's own tools.
	Labels map[string]string
	// Card is the sandbox's network card; nil means that it has no network but its loopback.
	Card *Card
}

// Card is a network card, whose packets are IP packets without a link header. For a [CardKeeper] it is made of two sockets
// (SOCK_SEQPACKET) that are each other's far end, and each message on them is one packet; the caller closes both after Create returns. A
// [CardMaker] makes it, and is given no ends.
type Card struct {
	// Inside is the sandbox's end.
	Inside *os.File
	// Outside is the end of whoever serves the card, who has begun before Create is called.
	Outside *os.File
	// MTU is the longest packet.
	MTU uint32
	// Addrs are the card's addresses inside. Everything else is reached through the card.
	Addrs []netip.Addr
	// DNS are the name servers that the sandbox asks.
	DNS []netip.Addr
}

// Carder is a driver whose sandboxes can have a network card: a [CardKeeper] or a [CardMaker]. Other drivers refuse a spec that has one with
// [errors.ErrUnsupported].
type Carder interface {
	// Card returns the end of a sandbox's card that is to be served, for when whoever served it is gone; the caller closes it. Of a sandbox without a
	// card it returns [warren.ErrState]. A sandbox that does not exist gives [warren.ErrNotFound].
	Card(ctx context.Context, id warren.SandboxID) (*os.File, error)
}

// CardKeeper is a [Carder] that is given both ends of a card and keeps a copy of its Outside, which Card returns; of a sandbox whose driver was
// killed since it was made, Card returns [warren.ErrState].
type CardKeeper interface {
	Carder

	// KeepCard gives the driver a copy of the Outside again, which Card returns from then on. The caller closes the file.
	KeepCard(ctx context.Context, id warren.SandboxID, outside *os.File) error
}

// CardMaker is a [Carder] whose sandboxes have the host's kernel, and in it a device for a card (TUN), which Create makes. It is there when Create
// returns, and goes with the sandbox, once nobody has it open. Card opens it, whoever made it; nothing passes while nobody has it open, and
// while another has, Card returns [warren.ErrUnavailable].
type CardMaker interface {
	Carder

	// CheckCard returns nil if a sandbox with these options can have a card, and else an error that says why not and matches
	// [errors.ErrUnsupported]. Create refuses such a spec in the same way.
	CheckCard(ctx context.Context, options map[string]string) error
}

// Root is a read-only root file system. The sandbox writes to an overlay of its own, of at most Limits.Disk bytes.
type Root struct {
	// Digest names the content, such as "sha256:…" or "host:…"; equal digests have equal layers.
	Digest string
	// Layers are directories, lowest first, with overlayfs's own marks for removed names.
	Layers []Layer
	// Binds are host directories and files put over the layers, read-only, in order.
	Binds []Bind
}

// Layer is a directory of a [Root].
type Layer struct {
	Dir string
	// IDBase is the host uid and gid that stands for 0 on disk; ids from IDBase to IDBase+65535 are the sandbox's.
	IDBase uint32
}

// Bind is a host file or directory that shows in a [Root] as it is on the host.
type Bind struct {
	// Source is absolute. A file bound over a name hides what was there.
	Source string
	Target string
	IDBase uint32
	// Hide covers Target with an empty file or directory; Source is not used.
	Hide bool
}

// Mount is a host directory that shows in a sandbox.
type Mount struct {
	// Dir is the directory itself, opened with O_PATH or for reading, so that no later rename or symbolic link changes what
	// is mounted. The caller closes it after Create returns. Source is its path, for drivers that cannot take a
	// descriptor and for messages.
	Dir    *os.File
	Source string
	Target string
	// Writable mounts take writes that are on the host when they return, but for those of a [Syncer]. Others refuse them.
	Writable bool
	// Owner says how ids on disk relate to ids in the sandbox.
	Owner Owner
}

// Owner relates ids on disk to ids in a sandbox.
type Owner struct {
	// IDBase is the host id that stands for 0; 65536 ids from there on are mapped one to one.
	IDBase uint32
	// User, when set, instead maps the single host ids UID and GID to the sandbox's user. The sandbox's root stands for
	// DiskIDBase on disk, since a kernel may make a file as root before it gives it away; everything else is nobody.
	User     bool
	UID, GID uint32
}

// SandboxUID is the uid and gid of the user that works in a sandbox.
const SandboxUID = 1000

// DiskIDBase is the host id that stands for a sandbox's 0 in workspaces and unpacked images: no file that a
// sandbox made belongs to a user of the host, so a set-uid file is harmless outside.
const DiskIDBase = 0x60000000

// IDCount is how many ids a sandbox has.
const IDCount = 65536

// Limits of a sandbox; none is zero.
type Limits struct {
	// CPUMillis is thousandths of a processor.
	CPUMillis uint32
	// Memory, in bytes, that the processes in the sandbox may use together. The driver adds what its own kernel or
	// monitor needs.
	Memory int64
	// Disk, in bytes, that may be written to the root overlay.
	Disk int64
	// PIDs is how many processes and threads the sandbox may have.
	PIDs uint32
}

// State of a sandbox as its driver sees it.
type State string

const (
	// Creating means that a Create has begun and neither returned nor been undone.
	Creating State = "creating"
	// Running means that the guest's processes run.
	Running State = "running"
	// Dead means that they have ended, for the reason in Exit; Delete removes the rest.
	Dead State = "dead"
)

// Status is one line of List.
type Status struct {
	ID    warren.SandboxID
	State State
	// Exit is set when State is Dead.
	Exit *Exit
}

// Exit says how a sandbox ended.
type Exit struct {
	// Reason is "oom" when the host's kernel ended it for memory, "killed" when a signal did, "exited" when the guest
	// ended by itself, and "lost" when nobody saw.
	Reason string
	// Message adds what is known, for people; it holds no host path.
	Message string
	Time    time.Time
}

// Info describes a driver.
type Info struct {
	// Name as users write it, such as "gvisor".
	Name string
	// Isolation in a few words, such as "kernel in user space (gVisor)".
	Isolation string
	// Boundary is the class by which escape tests judge: "kernel" (a kernel of its own), "namespace" (the host's
	// kernel with namespaces and seccomp) or "none".
	Boundary string
}

// Describer says what a driver is. Every driver of this module has it.
type Describer interface {
	Info() Info
}

// Watcher reports deaths as they happen.
type Watcher interface {
	// Watch sends a status for each sandbox that dies from now on until ctx ends, then closes the channel. A slow
	// reader loses none. A death may be told twice, and one id can die again after it was created again.
	Watch(ctx context.Context) (<-chan Status, error)
}

// Stats is what a sandbox uses.
type Stats struct {
	CPUTime time.Duration
	// Memory in bytes, kernel or monitor of the sandbox included.
	Memory int64
	// Disk is bytes written to the root overlay.
	Disk int64
	// PIDs is how many tasks of the host there are for it, which may be more than the processes in it.
	PIDs uint32
}

// Statser measures a sandbox.
type Statser interface {
	Stats(ctx context.Context, id warren.SandboxID) (Stats, error)
}

// Image describes what a snapshot wrote.
type Image struct {
	// Size is the bytes of disk that it takes.
	Size int64
}

// Syncer is a driver whose sandboxes may run where this machine's directories cannot be mounted, and then work on copies of them.
type Syncer interface {
	// Copies says whether a sandbox that is created now works on copies. Such a sandbox sees what a directory held when Create
	// was called, and what it writes to a writable mount is in the directory after Sync, Freeze or Delete has returned nil, and
	// not before. Deleting keeps what could not be brought back, says so, and tries again when it is repeated.
	Copies(ctx context.Context) bool

	// Sync brings what a sandbox has written to its mounts into their directories, for good. It does nothing when the sandbox has
	// the directories themselves, also when what runs it does not answer. What changed in a directory meanwhile stays where the
	// sandbox has not changed it. A sandbox that does not exist gives nil or [warren.ErrNotFound]; one that has died is synced
	// as well.
	Sync(ctx context.Context, id warren.SandboxID) error
}

// Freezer makes a running sandbox stand still, which frees no memory.
type Freezer interface {
	// Freeze returns when nothing in the sandbox runs any more, until Thaw; freezing a frozen sandbox does nothing. A frozen
	// sandbox can be deleted. A sandbox that does not exist gives [warren.ErrNotFound], one that has died [warren.ErrState].
	Freeze(ctx context.Context, id warren.SandboxID) error

	// Thaw lets a frozen sandbox run on; one that runs is left alone.
	Thaw(ctx context.Context, id warren.SandboxID) error
}

// RootSaver reads what a sandbox has changed of its root.
type RootSaver interface {
	// SaveRoot writes the root overlay of a running or frozen sandbox as a layer of an OCI image, an uncompressed tar with
	// whiteouts for what was removed. Ids in it are those of the sandbox; mounts are left out.
	SaveRoot(ctx context.Context, id warren.SandboxID, w io.Writer) error
}

// Snapshotter keeps an instant of a running sandbox on disk: memory, processes with what they have open, terminals and
// the root overlay, but nothing of what the spec mounted. A driver without it can only start sandboxes cold.
type Snapshotter interface {
	Freezer

	// Snapshot writes an image of a sandbox, running or frozen, into dir, an empty directory, and returns when it is on disk
	// for good. With freeze the sandbox stands still from the instant of the image on, so that its mounts can be kept along
	// with it, until Thaw lets it run on or Delete ends it. Else, and whenever Snapshot fails or ctx ends, the sandbox
	// is as before, and after a failure dir is empty. Connections into it go on, unless the driver was killed and opened
	// since the sandbox was made: then a snapshot may end them. A sandbox that does not exist gives [warren.ErrNotFound],
	// one that has died [warren.ErrState].
	Snapshot(ctx context.Context, id warren.SandboxID, dir string, freeze bool) (Image, error)

	// Restore is Create, but the sandbox goes on from the image in dir instead of booting. Before anything of it runs, the
	// whole image is compared with its checksums; what differs returns an error that matches [ErrImage]. The spec must
	// have the root and the mount targets of the snapshotted sandbox, on whose files the image relies; it may name another
	// id, other directories and other limits than that of the disk. An image that this host or this build of the driver
	// cannot go on from is refused with [errors.ErrUnsupported]. The image stays, and may be restored any number of times.
	// Connections into the sandbox are not restored: they have ended for both sides.
	Restore(ctx context.Context, spec *Spec, dir string) error
}

// Verifier looks at images before anything depends on them.
type Verifier interface {
	// Verify says what Restore would say of the spec and the image in dir, as far as that can be said without making
	// anything: nil, [ErrImage], or [errors.ErrUnsupported]. The id may be that of a sandbox that exists, and directories
	// are not looked at.
	Verify(ctx context.Context, spec *Spec, dir string) error
}

// Copier is a [Snapshotter] that writes an image faster when it need not last: for copies of a running sandbox, which are made at
// once.
type Copier interface {
	Snapshotter

	// SnapshotTransient is Snapshot, but the image is for this driver alone and may be gone after a crash of the driver or the
	// host: then its restore returns an error that matches [ErrImage]. Its bytes are not compared with checksums. If stood is not
	// nil, it is called once when the sandbox stands still, while the image is yet to be written; it must not block. With freeze what
	// is mounted can be kept from then on, unless SnapshotTransient fails.
	SnapshotTransient(ctx context.Context, id warren.SandboxID, dir string, freeze bool, stood func()) (Image, error)

	// Seal makes an image of SnapshotTransient one of Snapshot, with checksums and on disk for good when it returns, so that
	// a sandbox need not stand still for that. After a failure the image is of no use. If like is not "", it names the directory of
	// an image of Seal, of which the driver may link files into dir instead of writing the same again, if the directories are
	// on one file system; Size then is that of the files that it wrote. Neither image needs the other's directory afterwards.
	Seal(ctx context.Context, dir, like string) (Image, error)
}

// Pooler does the slow part of a start before it is asked for.
type Pooler interface {
	// Warm makes the driver keep n executions in which nothing runs yet ready for specs like this one: with the same root,
	// limits, options, and mounts on the same targets; of each mount only Target and Writable count. A Restore that fits
	// takes one, and so does a Create whose Env is the same too; the driver makes another when there is time. What has another
	// Hostname then has this one in its kernel until its guest is told its own. What does not fit, or finds none, is as without. Executions that are ready are no sandboxes: no List shows them. With n 0 those for
	// this spec go. All go when nobody has a driver open on their state any more.
	Warm(ctx context.Context, spec *Spec, n int) error

	// Pooled says how many executions of all kinds are ready.
	Pooled(ctx context.Context) (int, error)

	// PoolUse says of how many creates and restores, since the driver was opened, there was an execution ready, and of how many not.
	PoolUse() (hits, misses uint64)
}

// ErrImage is matched by the error of a restore whose image is damaged or incomplete.
var ErrImage = errors.New("the image is damaged")

// Checker looks at the host.
type Checker interface {
	// Check returns what a user would have to know or mend; a driver that cannot run here has a check that failed.
	Check(ctx context.Context) []Check
}

// Check is one finding about the host.
type Check struct {
	Name string
	// Status is "ok", "warn" or "fail".
	Status  string
	Message string
	// Hint says how to mend it.
	Hint string
}

// HostReplacer is a driver whose sandboxes cannot start from the host's own programs, so that another image stands for the
// image "host".
type HostReplacer interface {
	// ReplaceHost says why, for people.
	ReplaceHost() string
}

// Unwrapper is a driver around another, such as one that counts calls.
type Unwrapper interface {
	Unwrap() Driver
}

// As returns the first of d and the drivers that it wraps which implements T, so that a wrapper hides no capability.
func As[T any](d Driver) (T, bool) {
	for d != nil {
		if t, ok := d.(T); ok {
			return t, true
		}
		u, ok := d.(Unwrapper)
		if !ok {
			break
		}
		d = u.Unwrap()
	}
	var zero T
	return zero, false
}
