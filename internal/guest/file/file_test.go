package file

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/wire"
	"github.com/warren-sandbox/warren/internal/testenv"
)

func me() *account.User {
	return &account.User{Name: "me", UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()), Home: "/home/me"}
}

func code(err error) wire.Code {
	var e *wire.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

func TestResolve(t *testing.T) {
	for in, want := range map[string]string{"/a/../b//c/.": "/b/c", "x/y": "/home/me/x/y", "~": "/home/me", "~/x": "/home/me/x", "": "/work", "../..": "/", "/": "/"} {
		if got, err := Resolve(in, me(), "/work"); err != nil || got != want {
			t.Errorf("%q: %q %v, want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"~other", "~other/x", "a\x00b"} {
		if _, err := Resolve(in, me(), "/work"); code(err) != wire.InvalidArgument {
			t.Errorf("%q: %v", in, err)
		}
	}
	if got, err := Resolve("", me(), ""); err != nil || got != "/home/me" {
		t.Errorf("%q %v", got, err)
	}
}

func TestWrap(t *testing.T) {
	for errno, want := range map[syscall.Errno]wire.Code{syscall.ENOENT: wire.NotFound, syscall.EACCES: wire.PermissionDenied, syscall.EPERM: wire.PermissionDenied,
		syscall.EROFS: wire.PermissionDenied, syscall.EEXIST: wire.AlreadyExists, syscall.ENOTDIR: wire.InvalidArgument, syscall.ENOSPC: wire.ResourceExhausted,
		syscall.EDQUOT: wire.ResourceExhausted, syscall.EBUSY: wire.FailedPrecondition, syscall.EIO: wire.Internal} {
		if err := Wrap(&os.PathError{Op: "op", Path: "/secret", Err: errno}, "/p"); code(err) != want || strings.Contains(err.Error(), "secret") {
			t.Errorf("%v: %v", errno, err)
		}
	}
	if Wrap(nil, "/p") != nil {
		t.Error("nil is an error")
	}
}

// TestMoveBetweenFileSystems is what a sandbox does all the time: /workspace and /home/user are mounts of their own.
func TestMoveBetweenFileSystems(t *testing.T) {
	testenv.NeedsRoot(t)
	other := testenv.SmallFS(t, 8<<20, 100)
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(dir+"/a/b", 0o750))
	must(os.WriteFile(dir+"/a/f", []byte("text"), 0o640))
	must(os.Chown(dir+"/a/f", 1000, 1000))
	must(os.Symlink("f", dir+"/a/l"))
	then := time.Unix(1e9, 0)
	must(os.Chtimes(dir+"/a/f", then, then))
	e, err := Move(me(), dir+"/a", other+"/new/a")
	if err != nil || e.Path != other+"/new/a" || e.Type != wire.FileTypeDirectory || e.Mode != 0o750 {
		t.Fatalf("%+v %v", e, err)
	}
	f, err := Stat(me(), other+"/new/a/f")
	if err != nil || f.Mode != 0o640 || f.Size != 4 || !f.ModifiedTime.Equal(then) {
		t.Errorf("%+v %v", f, err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(other+"/new/a/f", &st); err != nil || st.Uid != 1000 {
		t.Errorf("owner %d %v", st.Uid, err)
	}
	if target, err := os.Readlink(other + "/new/a/l"); err != nil || target != "f" {
		t.Errorf("%q %v", target, err)
	}
	if _, err := os.Lstat(dir + "/a"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the original is still there: %v", err)
	}
	// What does not fit leaves both sides as they were.
	must(os.WriteFile(dir+"/big", make([]byte, 16<<20), 0o600))
	if _, err := Move(me(), dir+"/big", other+"/new/big"); code(err) != wire.ResourceExhausted {
		t.Errorf("%v", err)
	}
	entries, _ := os.ReadDir(other + "/new")
	if st, err := os.Stat(dir + "/big"); err != nil || st.Size() != 16<<20 || len(entries) != 1 {
		t.Errorf("%v %v", err, entries)
	}
}

// events reads a watch until ok says that enough has come.
func events(t *testing.T, w *Watch, ok func([]wire.FilesystemEvent) bool) []wire.FilesystemEvent {
	t.Helper()
	var all []wire.FilesystemEvent
	deadline := time.After(20 * time.Second)
	for {
		e, err := w.Take()
		all = append(all, e...)
		if ok(all) {
			return all
		}
		if err != nil {
			t.Fatalf("%v after %+v", err, all)
		}
		select {
		case <-w.Changed():
		case <-deadline:
			t.Fatalf("never came; got %+v", all)
		}
	}
}

func has(typ wire.EventType, name string) func([]wire.FilesystemEvent) bool {
	return func(all []wire.FilesystemEvent) bool {
		return slices.ContainsFunc(all, func(e wire.FilesystemEvent) bool { return e.Type == typ && e.Name == name })
	}
}

func TestWatchFollowsMovedDirectories(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	if err := os.MkdirAll(dir+"/a/b", 0o755); err != nil {
		t.Fatal(err)
	}
	w, err := NewWatch(me(), dir, WatchOptions{Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	write := func(path string) {
		t.Helper()
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	move := func(from, to string) {
		t.Helper()
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	move(dir+"/a", dir+"/c")
	events(t, w, has(wire.EventCreate, "c"))
	write(dir + "/c/b/f")
	events(t, w, has(wire.EventCreate, "c/b/f"))
	move(dir+"/c", outside+"/c") // gone: what happens there is not told
	events(t, w, has(wire.EventRename, "c"))
	write(outside + "/c/b/g")
	write(dir + "/last")
	all := events(t, w, has(wire.EventCreate, "last"))
	if slices.ContainsFunc(all, func(e wire.FilesystemEvent) bool { return strings.Contains(e.Name, "g") }) {
		t.Errorf("%+v", all)
	}
	move(outside+"/c", dir+"/d") // and back again, with all that is in it
	events(t, w, has(wire.EventCreate, "d/b/g"))
	write(dir + "/d/b/h")
	events(t, w, has(wire.EventCreate, "d/b/h"))
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	events(t, w, has(wire.EventRemove, "."))
}

// TestNewDirectoriesAreWatchedBeforeTheyAreTold: whoever hears of a directory and then writes into it is heard.
func TestNewDirectoriesAreWatchedBeforeTheyAreTold(t *testing.T) {
	dir := t.TempDir()
	w, err := NewWatch(me(), dir, WatchOptions{Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	path := ""
	for range 30 {
		path = filepath.Join(path, "d")
		if err := os.Mkdir(filepath.Join(dir, path), 0o755); err != nil {
			t.Fatal(err)
		}
		events(t, w, has(wire.EventCreate, path))
		if err := os.WriteFile(filepath.Join(dir, path, "f"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		events(t, w, has(wire.EventCreate, path+"/f"))
	}
}

func TestWatchIsBounded(t *testing.T) {
	dir := t.TempDir()
	w, err := NewWatch(me(), dir, WatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	w.mu.Lock() // events for a reader who never comes
	w.queue = make([]wire.FilesystemEvent, maxPending)
	w.mu.Unlock()
	if err := os.WriteFile(dir+"/f", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	<-w.Changed()
	if e, err := w.Take(); len(e) != maxPending || err != nil {
		t.Errorf("%d events, %v", len(e), err)
	}
	if _, err := w.Take(); code(err) != wire.ResourceExhausted {
		t.Errorf("%v", err)
	}
}
