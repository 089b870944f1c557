//go:build linux

// Package protocol is what the gVisor driver and its keeper say to each other over a unix socket.
//
// Each call is a connection of its own: one line of JSON from the driver, with file descriptors attached where the
// call needs some, then one line of JSON back. Closing the connection before the answer cancels the call. After the
// answer to OpDial the connection carries the bytes of the dialled port; after the answer to OpAttach and OpWatch it
// stays open, and OpWatch sends further lines.
//
// The keeper links neither the root package nor the driver package, so the types stand here again.
package protocol

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"
)

// Version is the version of the protocol. A keeper of another version is replaced.
const Version = 7

// Name is the process's, see package companion, and the others are files in a driver's state directory.
const (
	Name    = "keeper"
	Socket  = Name + ".sock"
	PIDFile = Name + ".pid"
)

// The calls.
const (
	// OpAttach tells version and build, and counts as a client until the connection ends.
	OpAttach = "attach"
	OpCreate = "create"
	OpDelete = "delete"
	OpList   = "list"
	OpDial   = "dial"
	OpWatch  = "watch"
	OpStats  = "stats"
	// OpWarm keeps Count executions ready for specs like Spec; OpPooled tells how many there are of all.
	OpWarm   = "warm"
	OpPooled = "pooled"
	OpCheck  = "check"
	// OpSnapshot writes an image into the directory that is the message's only descriptor.
	OpSnapshot = "snapshot"
	// OpSeal makes the transient image in the directory that is the message's first descriptor one that lasts, which shares what it can
	// with the image in that of the second, if there is one.
	OpSeal = "seal"
	// OpSaveRoot answers with a size, and then so many bytes of a layer follow on the connection.
	OpSaveRoot = "saveRoot"
	// OpVerify says what a create of the spec from its image would say of the image.
	OpVerify = "verify"
	OpFreeze = "freeze"
	OpThaw   = "thaw"
	// OpCard answers with the outer end of a sandbox's card; OpKeepCard brings it, as the message's only descriptor.
	OpCard     = "card"
	OpKeepCard = "keepCard"
	// OpRetire makes the keeper finish what it does and exit; sandboxes go on.
	OpRetire = "retire"
	// OpShutdown makes the keeper exit when it has no sandbox.
	OpShutdown = "shutdown"
)

// Request is a call.
type Request struct {
	Op   string `json:"op"`
	ID   string `json:"id,omitempty"`
	Port uint16 `json:"port,omitempty"`
	Spec *Spec  `json:"spec,omitempty"`
	// Freeze says that a snapshot leaves the sandbox standing still.
	Freeze bool `json:"freeze,omitempty"`
	// Count of OpWarm.
	Count int `json:"count,omitempty"`
	// Transient says that a snapshot is restored while this keeper lives, or never.
	Transient bool `json:"transient,omitempty"`
	// Tell makes the keeper say when the sandbox of OpSnapshot stands still, with an answer before the last one. Stood is what the driver does then.
	Tell  bool   `json:"tell,omitempty"`
	Stood func() `json:"-"`
	// Packing of the image that is written or read.
	Packing Packing `json:"packing,omitzero"`
}

// Packing says how images are written. Any image can be read with its key.
type Packing struct {
	// Key, when set, encrypts images; it has KeySize bytes.
	Key []byte `json:"key,omitempty"`
	// Compress is CompressAlways, CompressNever, or "": only small images are, for which it takes next to no time.
	Compress string `json:"compress,omitempty"`
}

// The values of Packing.Compress.
const (
	CompressAlways = "always"
	CompressNever  = "never"
)

// KeySize is the length of a key in bytes.
const KeySize = 32

// Response is an answer.
type Response struct {
	OK    bool   `json:"ok"`
	Error *Error `json:"error,omitempty"`

	Version  int      `json:"version,omitempty"`
	Build    string   `json:"build,omitempty"`
	PID      int      `json:"pid,omitempty"`
	Statuses []Status `json:"statuses,omitempty"`
	Stats    *Stats   `json:"stats,omitempty"`
	Checks   []Check  `json:"checks,omitempty"`
	// Count of OpPooled.
	Count int `json:"count,omitempty"`
	// Pooled says that OpCreate has taken an execution of the pool.
	Pooled bool `json:"pooled,omitempty"`
	// Stands says that another answer follows, see Request.Tell.
	Stands bool `json:"stands,omitempty"`
	// Files came with the answer to OpCard; they are the caller's.
	Files []*os.File `json:"-"`
	// Size of a snapshot's image or of a layer, in bytes.
	Size int64 `json:"size,omitempty"`
}

// Spec is a sandbox. Every FD is an index into the descriptors of the message; each is a detached mount
// (open_tree(2)) that the driver made in its own mount namespace, so that the keeper needs no path of the host.
type Spec struct {
	ID       string            `json:"id"`
	Hostname string            `json:"hostname"`
	Layers   []Layer           `json:"layers"`
	Binds    []Bind            `json:"binds,omitempty"`
	Mounts   []Mount           `json:"mounts,omitempty"`
	Guest    int               `json:"guest"`
	Limits   Limits            `json:"limits"`
	Env      []string          `json:"env,omitempty"`
	Labels   map[string]string `json:"labels,omitempty"`
	// Debug makes gVisor write its debug log into the sandbox's directory.
	Debug bool `json:"debug,omitempty"`
	// Root names the content of the layers and binds, and GuestBuild that of the guest: an image needs the same ones.
	Root       string `json:"root"`
	GuestBuild string `json:"guestBuild"`
	// Image, when set, is the directory of an image to go on from.
	Image *int `json:"image,omitempty"`
	// Card, when set, is the network card.
	Card *Card `json:"card,omitempty"`
}

// Card as in driver.Card.
type Card struct {
	Inside  int          `json:"inside"`
	Outside int          `json:"outside"`
	MTU     uint32       `json:"mtu"`
	Addrs   []netip.Addr `json:"addrs"`
	DNS     []netip.Addr `json:"dns"`
}

// Layer of the root, lowest first.
type Layer struct {
	FD     int    `json:"fd"`
	IDBase uint32 `json:"idBase"`
}

// Bind over the root. With Hide no descriptor is used. Flat is a clone without the mounts below it, for when one of
// these cannot be idmapped.
type Bind struct {
	FD     int    `json:"fd"`
	Flat   int    `json:"flat"`
	Target string `json:"target"`
	IDBase uint32 `json:"idBase"`
	Dir    bool   `json:"dir"`
	Hide   bool   `json:"hide,omitempty"`
}

// Mount of a host directory. With User the ids UID and GID stand for the sandbox's user, else IDBase for 0.
type Mount struct {
	FD       int    `json:"fd"`
	Target   string `json:"target"`
	Writable bool   `json:"writable,omitempty"`
	IDBase   uint32 `json:"idBase"`
	User     bool   `json:"user,omitempty"`
	UID      uint32 `json:"uid,omitempty"`
	GID      uint32 `json:"gid,omitempty"`
	// Later is set for what the pool makes: the directory is put there when the sandbox is used.
	Later bool `json:"-"`
}

// Limits as in driver.Limits.
type Limits struct {
	CPUMillis uint32 `json:"cpuMillis"`
	Memory    int64  `json:"memory"`
	Disk      int64  `json:"disk"`
	PIDs      uint32 `json:"pids"`
}

// Status as in driver.Status.
type Status struct {
	ID    string `json:"id"`
	State string `json:"state"`
	Exit  *Exit  `json:"exit,omitempty"`
}

// Exit as in driver.Exit.
type Exit struct {
	Reason  string    `json:"reason"`
	Message string    `json:"message"`
	Time    time.Time `json:"time"`
}

// Stats as in driver.Stats.
type Stats struct {
	CPUTime time.Duration `json:"cpuTime"`
	Memory  int64         `json:"memory"`
	Disk    int64         `json:"disk"`
	PIDs    uint32        `json:"pids"`
}

// Check as in driver.Check.
type Check struct {
	Name    string `json:"name"`
	Status  string `json:"status"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

// The kinds of error; each stands for a sentinel of package warren or the standard library.
const (
	KindNotFound    = "not_found"
	KindExists      = "exists"
	KindInvalid     = "invalid"
	KindState       = "state"
	KindExhausted   = "exhausted"
	KindUnavailable = "unavailable"
	KindUnsupported = "unsupported"
	KindCanceled    = "canceled"
	KindImage       = "image"
	KindInternal    = "internal"
)

// Error is an error that crosses the socket.
type Error struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
}

// Error returns the message.
func (e *Error) Error() string { return e.Message }

// Errorf returns an Error of a kind.
func Errorf(kind, format string, args ...any) *Error {
	return &Error{Kind: kind, Message: fmt.Errorf(format, args...).Error()}
}

// AsError returns err as an Error; what is none becomes KindInternal.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return &Error{Kind: e.Kind, Message: err.Error()}
	}
	return &Error{Kind: KindInternal, Message: err.Error()}
}
