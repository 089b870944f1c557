// Package imagetest shows tests what a sandbox would see of a root file system, by mounting it.
//
// A test package that uses it calls [Main] from its TestMain.
package imagetest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/testenv"
	"golang.org/x/sys/unix"
)

const helperVar = "WARREN_TEST_IMAGE_VIEW"

// request is what the helper process reads.
type request struct {
	Root driver.Root
	Dir  string
	// Find lists the files that contain this, if set.
	Find string
	// Argv is run in the root as this user, if set.
	Argv []string
	UID  uint32
	Env  []string
}

// Main runs the tests, or the helper process that mounts.
func Main(m *testing.M) {
	if os.Getenv(helperVar) == "" {
		os.Exit(m.Run())
	}
	if err := help(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(125)
	}
	os.Exit(0)
}

// Find mounts the root in a mount namespace of its own and returns every file whose content, name or link target has the given
// string in it, as the host's root sees it, from which no mode hides anything.
func Find(t testing.TB, root driver.Root, needle string) []string {
	t.Helper()
	out, err := run(t, request{Root: root, Find: needle})
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return slices.Collect(func(yield func(string) bool) {
		for l := range strings.Lines(out) {
			if !yield(strings.TrimSuffix(l, "\n")) {
				return
			}
		}
	})
}

// Run runs a program in the root as a user, with the root writable only below /tmp, /run and /home/user, and returns what it says.
func Run(t testing.TB, root driver.Root, uid uint32, env []string, argv ...string) (string, error) {
	t.Helper()
	return run(t, request{Root: root, Argv: argv, UID: uid, Env: env})
}

func run(t testing.TB, r request) (string, error) {
	t.Helper()
	testenv.NeedsRoot(t)
	testenv.NeedsMountNamespace(t)
	r.Dir = t.TempDir()
	in, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Stdin = bytes.NewReader(in)
	cmd.Env = append(os.Environ(), helperVar+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func help() error {
	var r request
	if err := json.NewDecoder(os.Stdin).Decode(&r); err != nil {
		return err
	}
	if err := mount(r); err != nil {
		return err
	}
	root := filepath.Join(r.Dir, "root")
	if r.Find != "" {
		return find(root, r.Find)
	}
	cmd := exec.Command(r.Argv[0], r.Argv[1:]...)
	cmd.Path = r.Argv[0] // inside
	cmd.Dir, cmd.Env = "/", r.Env
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Credential: &syscall.Credential{Uid: r.UID, Gid: r.UID}}
	return cmd.Run()
}

// mount puts the root together as a driver does, all of it in this process's own mount namespace.
func mount(r request) error {
	root, empty := filepath.Join(r.Dir, "root"), filepath.Join(r.Dir, "empty")
	for _, d := range []string{root, filepath.Join(r.Dir, "lower"), empty} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(empty+".file", nil, 0o644); err != nil {
		return err
	}
	lower := []string{filepath.Join(r.Dir, "lower")}
	for _, l := range r.Root.Layers {
		lower = slices.Insert(lower, 0, l.Dir)
	}
	if err := unix.Mount("overlay", root, "overlay", unix.MS_RDONLY, "lowerdir="+strings.Join(lower, ":")); err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	for _, b := range r.Root.Binds {
		source, target := b.Source, filepath.Join(root, b.Target)
		if b.Hide {
			fi, err := os.Lstat(target)
			if err != nil {
				return err
			}
			if source = empty; !fi.IsDir() {
				source = empty + ".file"
			}
		}
		if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s: %w", b.Target, err)
		}
	}
	if r.Find != "" {
		return nil
	}
	for _, d := range []string{"tmp", "run", "home/user"} {
		if err := unix.Mount("tmpfs", filepath.Join(root, d), "tmpfs", 0, "mode=1777"); err != nil {
			return err
		}
	}
	if err := unix.Mount("proc", filepath.Join(root, "proc"), "proc", 0, ""); err != nil {
		return err
	}
	return unix.Mount("/dev", filepath.Join(root, "dev"), "", unix.MS_BIND, "")
}

func find(root, needle string) error {
	return filepath.WalkDir(root, func(p string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel := strings.TrimPrefix(p, root)
		hit := strings.Contains(rel, needle)
		switch {
		case e.Type() == fs.ModeSymlink:
			target, err := os.Readlink(p)
			if err != nil {
				return err
			}
			hit = hit || strings.Contains(target, needle)
		case e.Type().IsRegular():
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			hit = hit || bytes.Contains(b, []byte(needle))
		}
		if hit {
			fmt.Println(rel)
		}
		return nil
	})
}
