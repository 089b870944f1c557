package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/config"
)

// hostChecks looks at this host.
func (a *app) hostChecks(ctx context.Context) ([]check, error) {
	dir, err := a.home()
	if err != nil {
		return nil, err
	}
	checks := []check{
		checkDataDir(dir), checkConfig(dir), checkDisk(dir), checkCopy(dir), checkGit(ctx), checkBootstrap(),
		checkPrograms(), checkDaemon(ctx, dir),
	}
	cfg, err := config.Load(config.Source{DataDir: dir})
	if err != nil { // which is told above
		cfg = config.Default(runtime.NumCPU(), 0)
	}
	checks = append(checks, askDaemon(ctx, dir)...)
	for _, d := range drivers {
		checks = append(checks, d.check(ctx, cfg)...)
	}
	return checks, nil
}

// askDaemon returns what only a daemon can know that runs, and nothing where none does. Of the rest this program sees as much.
func askDaemon(ctx context.Context, dir string) []check {
	if !answers(ctx, dir) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, daemonWait)
	defer cancel()
	var all []check
	c, err := warren.Connect(ctx, warren.Options{URL: "unix://" + config.Socket(dir)})
	if err == nil {
		defer c.Close()
		all, err = c.Doctor(ctx)
	}
	if err != nil {
		return []check{{Name: "daemon", Status: "warn", Message: "it does not say how it is: " + err.Error(), Hint: "the log is " + logPath(dir)}}
	}
	return slices.DeleteFunc(all, func(c check) bool { return c.Name != "store" && c.Name != "gateway" })
}

// daemonWait is for how long the doctor waits for the daemon, which may wait for its gateway.
const daemonWait = 20 * time.Second

func fromDriver(list []driver.Check) []check {
	out := make([]check, len(list))
	for i, c := range list {
		out[i] = check(c)
	}
	return out
}

// existing returns dir, or its nearest parent that exists.
func existing(dir string) string {
	for {
		if _, err := os.Stat(dir); err == nil || dir == filepath.Dir(dir) {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

func checkDataDir(dir string) check {
	c := check{Name: "data directory", Status: "ok", Message: dir}
	at := existing(dir)
	if err := unix.Access(at, unix.W_OK); err != nil {
		c.Status, c.Message, c.Hint = "fail", fmt.Sprintf("%s: %v", at, err), "set WARREN_HOME to a directory that can be written"
		return c
	}
	if err := config.CheckDataDir(dir); err != nil {
		c.Status, c.Message, c.Hint = "fail", err.Error(), "set WARREN_HOME to a shorter path"
		return c
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(at, &fs); err == nil && fs.Flags&unix.ST_NOSUID != 0 {
		c.Message += " (nosuid)"
	}
	return c
}

func checkConfig(dir string) check {
	c := check{Name: "configuration", Status: "ok", Message: "no warren.yaml; defaults"}
	if _, err := os.Stat(filepath.Join(dir, "warren.yaml")); err == nil {
		c.Message = filepath.Join(dir, "warren.yaml")
	}
	if _, err := config.Load(config.Source{DataDir: dir}); err != nil {
		c.Status, c.Message, c.Hint = "fail", err.Error(), "correct the file or the variable"
	}
	return c
}

func checkDisk(dir string) check {
	var fs unix.Statfs_t
	if err := unix.Statfs(existing(dir), &fs); err != nil {
		return check{Name: "disk", Status: "warn", Message: err.Error()}
	}
	free := config.Size(fs.Bavail * uint64(fs.Bsize))
	c := check{Name: "disk", Status: "ok", Message: fmt.Sprintf("%v free, %d inodes free", free, fs.Ffree)}
	switch {
	case free < config.GiB || fs.Files > 0 && fs.Ffree < 10_000:
		c.Status, c.Hint = "fail", "free some space, or set WARREN_HOME to another file system"
	case free < 10*config.GiB || fs.Files > 0 && fs.Ffree < 200_000:
		c.Status, c.Hint = "warn", "images and workspaces need room; remove what is not used with `warren workspace rm` and `warren image rm`"
	}
	return c
}

// checkCopy tells how a workspace would be copied.
func checkCopy(dir string) check {
	at := existing(dir)
	var fs unix.Statfs_t
	method, hint := "copy", "on btrfs or xfs a workspace is copied without copying its bytes"
	if err := unix.Statfs(at, &fs); err == nil && int64(fs.Type) == unix.BTRFS_SUPER_MAGIC {
		method, hint = "btrfs snapshot", ""
	} else if reflinks(at) {
		method, hint = "reflink", ""
	}
	return check{Name: "workspace copies", Status: "ok", Message: method, Hint: hint}
}

// reflinks tries to clone a file.
func reflinks(dir string) bool {
	from, err := os.CreateTemp(dir, ".warren-doctor-*")
	if err != nil {
		return false
	}
	defer os.Remove(from.Name())
	defer from.Close()
	to, err := os.CreateTemp(dir, ".warren-doctor-*")
	if err != nil {
		return false
	}
	defer os.Remove(to.Name())
	defer to.Close()
	if _, err := from.Write(make([]byte, 4096)); err != nil {
		return false
	}
	return unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) == nil
}

func checkGit(ctx context.Context) check {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "git", "--version").Output()
	if err != nil {
		return check{Name: "git", Status: "fail", Message: err.Error(), Hint: "apt-get install git"}
	}
	return check{Name: "git", Status: "ok", Message: strings.TrimSpace(string(out))}
}

func checkBootstrap() check {
	if path, err := exec.LookPath("mmdebstrap"); err == nil {
		return check{Name: "mmdebstrap", Status: "ok", Message: path}
	}
	return check{Name: "mmdebstrap", Status: "warn", Message: "not found; `warren image bootstrap` needs it", Hint: "apt-get install mmdebstrap"}
}

// checkPrograms looks for the other three programs.
func checkPrograms() check {
	c := check{Name: "programs", Status: "ok"}
	var found []string
	for _, p := range []struct{ name, variable string }{{"warren-runtime", "WARREN_RUNTIME"}, {"warren-guest", "WARREN_GUEST"}, {"warren-gateway", "WARREN_GATEWAY"}} {
		path, err := findProgram(p.name, p.variable)
		if err != nil {
			return check{Name: "programs", Status: "fail", Message: err.Error(), Hint: "put it beside warren, or set " + p.variable}
		}
		found = append(found, path)
	}
	c.Message = strings.Join(found, ", ")
	return c
}

// findProgram returns the path of one of Warren's programs: what the variable says, else beside this one.
func findProgram(name, variable string) (string, error) {
	path := os.Getenv(variable)
	if path == "" {
		exe, err := os.Executable()
		if err != nil {
			return "", err
		}
		if exe, err = filepath.EvalSymlinks(exe); err != nil {
			return "", err
		}
		path = filepath.Join(filepath.Dir(exe), name)
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if err := unix.Access(path, unix.X_OK); err != nil {
		return "", fmt.Errorf("%s: %w; it belongs beside warren, or %s names it", path, err, variable)
	}
	return path, nil
}

func checkDaemon(ctx context.Context, dir string) check {
	pid, err := daemonPID(dir)
	switch {
	case errors.Is(err, os.ErrPermission):
		return check{Name: "daemon", Status: "warn", Message: "the data directory is another user's", Hint: "set WARREN_HOME, or become that user"}
	case err != nil:
		return check{Name: "daemon", Status: "warn", Message: err.Error()}
	case pid == 0:
		return check{Name: "daemon", Status: "ok", Message: "not running; the next command starts it"}
	case !answers(ctx, dir):
		return check{Name: "daemon", Status: "warn", Message: fmt.Sprintf("process %d does not answer", pid), Hint: "if it stays so: warren shutdown; the log is " + logPath(dir)}
	}
	return check{Name: "daemon", Status: "ok", Message: fmt.Sprintf("process %d", pid)}
}
