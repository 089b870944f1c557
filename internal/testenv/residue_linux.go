package testenv

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// residueGrace is how long what is on its way out may take; a leftover is only one that stays.
const residueGrace = 10 * time.Second

// Residue fails the test if, at its end, anything is left that came since this call and belongs to one of dirs:
//   - processes that name one of dirs in their arguments, environment, directory, root or open files;
//   - mounts on, of or below dirs; loop devices on files in them; names of network namespaces;
//   - control groups of the data directories' sandboxes that hold no process;
//   - files in dirs.
//
// Call it before what starts things registers its clean-ups, so that this check runs after them. What other tests do
// at the same time with other directories is not seen.
func Residue(t testing.TB, dirs ...string) {
	t.Helper()
	before, err := TakeSnapshot(dirs...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if left := before.WaitClean(residueGrace); len(left) > 0 {
			t.Errorf("left behind:\n  %s", strings.Join(left, "\n  "))
		}
	})
}

// Snapshot is what exists at one moment for a set of directories; see [Residue].
type Snapshot struct {
	dirs  []string
	items map[string]string // key → what it is, for people
	// groups are the control groups that hold no process, by directory.
	groups map[string]bool
	// own are the names of the control groups of state directories that were seen in dirs.
	own map[string]bool
}

// TakeSnapshot looks at processes, mounts, loop devices, network namespaces, cgroups and files.
func TakeSnapshot(dirs ...string) (*Snapshot, error) {
	s := &Snapshot{items: map[string]string{}, groups: map[string]bool{}, own: map[string]bool{}}
	for _, dir := range dirs {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return nil, err
		}
		s.dirs = append(s.dirs, abs)
	}
	for _, collect := range []func() error{s.processes, s.mounts, s.loops, s.netns, s.cgroups, s.files} {
		if err := collect(); err != nil {
			return nil, fmt.Errorf("residue: %w", err)
		}
	}
	s.Note()
	return s, nil
}

// Note remembers which control groups belong to the state directories that are in the directories now: a keeper names them by
// its state directory's inode. Call it before the directories are removed; otherwise every group counts that no living
// keeper has.
func (s *Snapshot) Note() {
	for _, dir := range s.dirs {
		for _, pattern := range []string{".", "*", "run/*"} {
			locks, _ := filepath.Glob(filepath.Join(dir, pattern, "keeper.lock"))
			for _, lock := range locks {
				if name, err := groupName(filepath.Dir(lock)); err == nil {
					s.own[name] = true
				}
			}
		}
	}
}

// groupName is what the keeper of a state directory calls the parent of its sandboxes' control groups.
func groupName(state string) (string, error) {
	var st syscall.Stat_t
	if err := syscall.Stat(state, &st); err != nil {
		return "", err
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%d:%d", st.Dev, st.Ino))
	return "warren-" + hex.EncodeToString(sum[:4]), nil
}

// keepersGroups returns the names of the control groups of all keepers that live on this machine.
func keepersGroups() map[string]bool {
	names := map[string]bool{}
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(line, []byte("\x00keeper\x00-inside\x00")) {
			continue
		}
		if name, err := groupName(filepath.Join(filepath.Dir(file), "root", "state")); err == nil {
			names[name] = true
		}
	}
	return names
}

// Left returns what is there now and was not when s was taken, one line each, sorted.
func (s *Snapshot) Left() ([]string, error) {
	now, err := TakeSnapshot(s.dirs...)
	if err != nil {
		return nil, err
	}
	var left []string
	for key, what := range now.items {
		if _, ok := s.items[key]; !ok {
			left = append(left, what)
		}
	}
	for name := range now.own {
		s.own[name] = true
	}
	var others map[string]bool
	if len(s.own) == 0 {
		others = keepersGroups()
	}
	for path := range now.groups {
		if !s.groups[path] && inGroups(path, s.own, others) {
			left = append(left, "cgroup "+path)
		}
	}
	sort.Strings(left)
	return left, nil
}

// inGroups says whether a control group lies in one of own, or, when these are not known, in none of others.
func inGroups(path string, own, others map[string]bool) bool {
	for name := range strings.SplitSeq(path, "/") {
		if !strings.HasPrefix(name, "warren-") {
			continue
		}
		if len(own) > 0 {
			return own[name]
		}
		return !others[name]
	}
	return false
}

// WaitClean calls Left until it returns nothing or the time is over, and returns what was left then, without what may stay.
func (s *Snapshot) WaitClean(grace time.Duration, mayStay ...func(left string) bool) []string {
	deadline := time.Now().Add(grace)
	for {
		left, err := s.Left()
		if err != nil {
			left = []string{err.Error()}
		}
		for _, may := range mayStay {
			left = slices.DeleteFunc(left, may)
		}
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// within reports whether path is one of the directories or below it.
func (s *Snapshot) within(path string) bool {
	path = strings.TrimSuffix(path, " (deleted)")
	for _, dir := range s.dirs {
		if path == dir || strings.HasPrefix(path, dir+"/") {
			return true
		}
	}
	return false
}

// names reports whether text, such as a command line, holds the path of one of the directories.
func (s *Snapshot) names(text []byte) bool {
	for _, dir := range s.dirs {
		for rest := text; ; {
			i := bytes.Index(rest, []byte(dir))
			if i < 0 {
				break
			}
			rest = rest[i+len(dir):]
			// "/tmp/x1" is not named by "/tmp/x12".
			if len(rest) == 0 || strings.IndexByte("/\x00,:;= \n", rest[0]) >= 0 {
				return true
			}
		}
	}
	return false
}

func (s *Snapshot) processes() error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		// A process may end while it is looked at; then it is not left.
		start, state, ok := processStat(pid)
		if !ok || !s.ownsProcess(pid) {
			continue
		}
		cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		line := strings.TrimSpace(string(bytes.ReplaceAll(cmdline, []byte{0}, []byte{' '})))
		if len(line) > 200 {
			line = line[:200] + "…"
		}
		s.items[fmt.Sprintf("process %d %s", pid, start)] = fmt.Sprintf("process %d (state %s): %s", pid, state, line)
	}
	return nil
}

func (s *Snapshot) ownsProcess(pid int) bool {
	proc := fmt.Sprintf("/proc/%d/", pid)
	for _, name := range []string{"cmdline", "environ"} {
		if text, err := os.ReadFile(proc + name); err == nil && s.names(text) {
			return true
		}
	}
	for _, name := range []string{"exe", "cwd", "root"} {
		if target, err := os.Readlink(proc + name); err == nil && s.within(target) {
			return true
		}
	}
	fds, err := os.ReadDir(proc + "fd")
	if err != nil {
		return false
	}
	for _, fd := range fds {
		if target, err := os.Readlink(proc + "fd/" + fd.Name()); err == nil && s.within(target) {
			return true
		}
	}
	return false
}

// processStat returns the start time and state of a process; ok is false when it has ended.
func processStat(pid int) (start, state string, ok bool) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", "", false
	}
	// The name, in parentheses, may hold anything.
	_, rest, found := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " ")
	fields := strings.Fields(rest)
	if !found || len(fields) < 20 {
		return "", "", false
	}
	return fields[19], fields[0], true
}

type mount struct{ id, root, point, source, fsType string }

func readMounts() ([]mount, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var mounts []mount
	for line := range strings.Lines(string(text)) {
		head, tail, ok := strings.Cut(line, " - ")
		h, t := strings.Fields(head), strings.Fields(tail)
		if !ok || len(h) < 5 || len(t) < 2 {
			continue
		}
		mounts = append(mounts, mount{id: h[0], root: unescape(h[3]), point: unescape(h[4]), fsType: t[0], source: unescape(t[1])})
	}
	return mounts, nil
}

// unescape undoes mountinfo's octal escapes.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

func (s *Snapshot) mounts() error {
	mounts, err := readMounts()
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if s.within(m.point) || s.within(m.root) || s.within(m.source) {
			s.items["mount "+m.id+" "+m.point] = fmt.Sprintf("mount of %s %s on %s", m.fsType, m.source, m.point)
		}
	}
	return nil
}

func (s *Snapshot) loops() error {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	for _, name := range files {
		file, err := os.ReadFile(name)
		if err != nil {
			continue // released meanwhile
		}
		if backing := strings.TrimSpace(string(file)); s.within(backing) {
			s.items["loop "+name] = fmt.Sprintf("loop device %s on %s", strings.Split(name, "/")[3], backing)
		}
	}
	return nil
}

func (s *Snapshot) netns() error {
	for _, dir := range []string{"/run/netns", "/var/run/docker/netns"} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			if strings.Contains(e.Name(), "warren") {
				s.items["netns "+e.Name()] = "network namespace " + e.Name()
			}
		}
	}
	return nil
}

// cgroups collects those of Warren that are empty: one with processes is either another test's or told by its processes.
func (s *Snapshot) cgroups() error {
	return filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}
		if !d.IsDir() || !strings.Contains(path, "warren") {
			return nil
		}
		if occupied(path) {
			return nil
		}
		s.groups[path] = true
		return nil
	})
}

// occupied reports whether a cgroup or one below it holds a process.
func occupied(cgroup string) bool {
	found := false
	filepath.WalkDir(cgroup, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" {
			return nil
		}
		if procs, err := os.ReadFile(path); err == nil && len(procs) > 0 {
			found = true
			return filepath.SkipAll
		}
		return nil
	})
	return found
}

func (s *Snapshot) files() error {
	for _, dir := range s.dirs {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				if errors.Is(err, fs.ErrNotExist) {
					return nil
				}
				return err
			}
			if path != dir {
				s.items["file "+path] = "file " + path
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
