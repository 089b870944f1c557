//go:build linux

package keeper

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// The states of a sandbox on disk, which are those of driver.State.
const (
	stateCreating = "creating"
	stateRunning  = "running"
	stateDead     = "dead"
)

// sandboxesDir holds a directory for each sandbox.
var sandboxesDir = filepath.Join(stateDir, "sandboxes")

// meta is what the keeper must know of a sandbox after it was killed. It holds the channel token, so the file is 0600.
type meta struct {
	ID      string            `json:"id"`
	State   string            `json:"state"`
	Range   int               `json:"range"`
	Token   string            `json:"token"`
	Limits  protocol.Limits   `json:"limits"`
	Labels  map[string]string `json:"labels,omitempty"`
	Created time.Time         `json:"created"`
	// The host processes, each with its start time so that a number used again is not taken for it.
	Sandbox process        `json:"sandbox"`
	Gofer   process        `json:"gofer"`
	Group   cgroup         `json:"group,omitempty"`
	Exit    *protocol.Exit `json:"exit,omitempty"`
	// Frozen says whether the sandbox stands still. On disk it is a mark of its own, see [meta.mark].
	Frozen frozen `json:"-"`
	// Container is the id that gVisor knows, when it is not the sandbox's: one made before it was asked for.
	Container string `json:"container,omitempty"`
	// Base is what an image of the sandbox relies on.
	Base base `json:"base"`
}

func sandboxDir(id string) string { return filepath.Join(sandboxesDir, id) }

// save writes m in one step. It is not synced: after a crash of the machine no sandbox lives, and its directory,
// readable or not, is all that Delete needs.
func (m *meta) save() error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	path := filepath.Join(sandboxDir(m.ID), "meta.json")
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// loadMeta reads the record of a sandbox. A directory without a record, or with a broken one, is a create cut short.
func loadMeta(id string) *meta {
	m := &meta{}
	b, err := os.ReadFile(filepath.Join(sandboxDir(id), "meta.json"))
	if err == nil {
		err = json.Unmarshal(b, m)
	}
	if err != nil || validID(m.ID) != nil {
		return &meta{ID: id, State: stateCreating, Range: -1}
	}
	m.Frozen = markOf(id)
	if m.ID != id { // one of the pool that was about to get this id
		m.Container, m.ID, m.State = m.container(), id, stateCreating
	}
	return m
}

// mark writes down whether the sandbox stands still: by the name of an empty file, for names can be changed and taken away on a full disk too, on which a sandbox has to be
// let run on. None is that it runs.
func (m *meta) mark(f frozen) error {
	switch f {
	case changing:
		err := os.Rename(markPath(m.ID, stands), markPath(m.ID, changing))
		if errors.Is(err, fs.ErrNotExist) {
			err = os.WriteFile(markPath(m.ID, changing), nil, 0o600)
		}
		return err
	case stands:
		return os.Rename(markPath(m.ID, changing), markPath(m.ID, stands))
	}
	for _, f := range []frozen{changing, stands} {
		if err := os.Remove(markPath(m.ID, f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

func markPath(id string, f frozen) string { return filepath.Join(sandboxDir(id), "frozen."+string(f)) }

// markOf reads what mark has written.
func markOf(id string) frozen {
	for _, f := range []frozen{changing, stands} {
		if _, err := os.Lstat(markPath(id, f)); err == nil {
			return f
		}
	}
	return runs
}

// container returns the id that gVisor knows.
func (m *meta) container() string {
	if m.Container != "" {
		return m.Container
	}
	return m.ID
}

// process names a process of the host for good.
type process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks after boot
}

func processOf(pid int) process {
	start, err := startTime(pid)
	if err != nil {
		return process{}
	}
	return process{PID: pid, Start: start}
}

// alive says whether the process runs; a zombie does not.
func (p process) alive() bool {
	if p.PID <= 0 {
		return false
	}
	start, err := startTime(p.PID)
	return err == nil && start == p.Start
}

// zombie returns how a process ended that its parent has not reaped yet, as /proc tells it of any process.
func (p process) zombie() (ws unix.WaitStatus, ok bool) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID) + "/stat")
	if err != nil {
		return 0, false
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	// Fields 3, 22 and 52.
	if len(f) < 50 || f[0] != "Z" || f[19] != strconv.FormatUint(p.Start, 10) {
		return 0, false
	}
	n, err := strconv.ParseUint(f[49], 10, 32)
	return unix.WaitStatus(n), err == nil
}

// startTime reads field 22 of /proc/PID/stat; a zombie counts as gone.
func startTime(pid int) (uint64, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	// The name in parentheses may hold anything, so count from its end.
	i := strings.LastIndexByte(string(b), ')')
	f := strings.Fields(string(b[i+1:]))
	if i < 0 || len(f) < 20 {
		return 0, errors.New("unexpected form of /proc/PID/stat")
	}
	if f[0] == "Z" || f[0] == "X" {
		return 0, fs.ErrNotExist
	}
	return strconv.ParseUint(f[19], 10, 64)
}

// validID keeps an id from being a path.
func validID(id string) error {
	if id == "" || len(id) > 64 {
		return protocol.Errorf(protocol.KindInvalid, "sandbox id %q must have 1 to 64 characters", id)
	}
	for _, r := range id {
		if !(r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-') {
			return protocol.Errorf(protocol.KindInvalid, "sandbox id %q: only a-z, 0-9 and - may stand in it", id)
		}
	}
	if id[0] == '-' {
		return fmt.Errorf("sandbox id %q begins with a dash: %w", id, protocol.Errorf(protocol.KindInvalid, "invalid"))
	}
	return nil
}
