package account

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/warren-sandbox/warren/internal/testenv"
)

func database(t *testing.T, passwd, group string) *Database {
	t.Helper()
	dir := t.TempDir()
	d := &Database{Passwd: filepath.Join(dir, "passwd"), Group: filepath.Join(dir, "group")}
	for path, text := range map[string]string{d.Passwd: passwd, d.Group: group} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func TestLookup(t *testing.T) {
	d := database(t, "# comment\nroot:x:0:0:root:/root:/bin/bash\nnode:x:1000:1000::/home/node:/bin/sh\nbroken\nbad:x:-1:0::/:/bin/sh\nnoid:x:4294967295:0::/:/bin/sh\nrel:x:7:8::home:\n",
		"root:x:0:\nwheel:x:10:root,node\nnode:x:1000:node\nbad:x:x:node\ndocker:x:11:node\n")
	for name, want := range map[string]User{
		"root": {Name: "root", UID: 0, GID: 0, Groups: []uint32{0, 10}, Home: "/root", Shell: "/bin/bash"},
		"node": {Name: "node", UID: 1000, GID: 1000, Groups: []uint32{1000, 10, 11}, Home: "/home/node", Shell: "/bin/sh"},
		"rel":  {Name: "rel", UID: 7, GID: 8, Groups: []uint32{8}, Home: "/", Shell: "/bin/sh"},
		"user": {Name: "user", UID: 1000, GID: 1000, Groups: []uint32{1000}, Home: "/home/user", Shell: "/bin/bash"}, // in every sandbox
	} {
		u, err := d.Lookup(name)
		if err != nil || u.Name != want.Name || u.UID != want.UID || u.GID != want.GID || u.Home != want.Home || u.Shell != want.Shell || !slices.Equal(u.Groups, want.Groups) {
			t.Errorf("%s: %+v %v", name, u, err)
		}
	}
	for number, name := range map[string]string{"0": "root", "1000": "node", "7": "rel"} {
		if u, err := d.Lookup(number); err != nil || u.Name != name {
			t.Errorf("%s: %+v %v", number, u, err)
		}
	}
	for _, name := range []string{"", "8", "-1", "4294967295", "bad", "noid", "broken", "# comment", "nobody"} {
		if u, err := d.Lookup(name); !errors.Is(err, ErrUnknown) {
			t.Errorf("%q: %+v %v", name, u, err)
		}
	}
	if d.UserName(1000) != "node" || d.UserName(5) != "5" || d.GroupName(10) != "wheel" || d.GroupName(5) != "5" {
		t.Errorf("%s %s %s %s", d.UserName(1000), d.UserName(5), d.GroupName(10), d.GroupName(5))
	}
	// A change is seen.
	if err := os.WriteFile(d.Passwd, []byte("late:x:5:5::/:/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if u, err := d.Lookup("late"); err != nil || u.UID != 5 {
		t.Errorf("%+v %v", u, err)
	}
	if _, err := d.Lookup("node"); err == nil {
		t.Error("node is still there")
	}
}

func TestLookupWithoutFiles(t *testing.T) {
	d := &Database{Passwd: "/no/such/file", Group: "/no/such/file"}
	if u, err := d.Lookup("root"); err != nil || u.UID != 0 {
		t.Errorf("%+v %v", u, err)
	}
}

func TestDo(t *testing.T) {
	testenv.NeedsRoot(t)
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	if err := os.WriteFile(secret, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	u := &User{Name: "nobody", UID: 65534, GID: 65534, Groups: []uint32{65534, 12}}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			for range 50 {
				err := u.Do(func() error {
					if os.Geteuid() == 0 {
						return nil // Geteuid asks the kernel about this thread
					}
					status, err := os.ReadFile("/proc/thread-self/status")
					if err != nil {
						return err
					}
					for _, want := range []string{"Uid:\t0\t65534\t0\t65534", "Gid:\t0\t65534\t0\t65534", "Groups:\t12 65534", "CapEff:\t0000000000000000"} {
						if !strings.Contains(string(status), want) {
							return errors.New(want + " is missing in " + string(status))
						}
					}
					_, err = os.Open(secret)
					return err
				})
				if !errors.Is(err, os.ErrPermission) {
					t.Errorf("as nobody: %v", err)
					return
				}
				if _, err := os.ReadFile(secret); err != nil {
					t.Errorf("as root: %v", err)
					return
				}
				runtime.Gosched()
			}
		})
	}
	wg.Wait()
	// A panic leaves no thread with the user's identity either.
	func() {
		defer func() { _ = recover() }()
		_ = u.Do(func() error { panic("in between") })
	}()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		status, err := os.ReadFile("/proc/self/task/" + task.Name() + "/status")
		if err == nil && !strings.Contains(string(status), "Uid:\t0\t0\t0\t0") {
			t.Errorf("thread %s: %s", task.Name(), status)
		}
	}
}

// TestDoWithoutRoot runs this test's own binary as another user, who can act as nobody else.
func TestDoWithoutRoot(t *testing.T) {
	if os.Getenv("ACCOUNT_TEST_UID") != "" {
		me, other := &User{Name: "me", UID: uint32(os.Geteuid())}, &User{Name: "other", UID: 1}
		if err := me.Do(func() error { return nil }); err != nil {
			t.Error(err)
		}
		if err := other.Do(func() error { t.Error("ran"); return nil }); !errors.Is(err, syscall.EPERM) {
			t.Error(err)
		}
		return
	}
	testenv.NeedsRoot(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("/tmp", "account") // t.TempDir is not open to others
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	exe = filepath.Join(dir, "test")
	if err := errors.Join(os.Chmod(dir, 0o755), testenv.WriteProgram(exe, data)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^TestDoWithoutRoot$")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "ACCOUNT_TEST_UID="+strconv.Itoa(65534))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("root:x:0:0:root:/root:/bin/bash\n")
	f.Add("wheel:x:10:root,node\n::::::\n")
	f.Fuzz(func(t *testing.T, data string) {
		for _, u := range parsePasswd(data) {
			if u.Name == "" || !strings.HasPrefix(u.Home, "/") || u.UID == noID || u.GID == noID {
				t.Errorf("%+v", u)
			}
		}
		for _, g := range parseGroup(data) {
			if g.name == "" || g.gid == noID {
				t.Errorf("%+v", g)
			}
		}
	})
}
