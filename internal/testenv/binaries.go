package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// Binaries are the paths of Warren's programs. They lie in one directory, so that each finds the others.
type Binaries struct {
	// Dir holds them.
	Dir string
	// Warren is the command line and daemon, Runtime what runs gVisor's sandboxes, Guest the sandbox's PID 1.
	Warren, Runtime, Guest string
}

// NeedsBinaries returns Warren's programs, built from this checkout's sources. WARREN_BIN=DIR names a directory that
// holds them instead; nothing is built then.
func NeedsBinaries(t testing.TB) Binaries {
	t.Helper()
	b := Binaries{
		Warren:  NeedsBinary(t, "warren"),
		Runtime: NeedsBinary(t, "warren-runtime"),
		Guest:   NeedsBinary(t, "warren-guest"),
	}
	NeedsBinary(t, "warren-gateway") // which the daemon finds beside it
	b.Dir = filepath.Dir(b.Warren)
	return b
}

// NeedsBinary is [NeedsBinaries] for one program, such as "warren-guest"; the others are not built.
func NeedsBinary(t testing.TB, name string) string {
	t.Helper()
	setDefaults()
	builds.Lock()
	b := builds.byName[name]
	if b == nil {
		b = &build{}
		builds.byName[name] = b
	}
	builds.Unlock()
	b.once.Do(func() { b.path, b.err = findOrBuild(name) })
	if b.err != nil {
		t.Fatal(b.err)
	}
	return b.path
}

// NoEngine is an address that no driver takes for an engine's. A daemon that a test starts has no business with an engine of
// the user's; NeedsBinary sets DOCKER_HOST to it, and tests that make up an environment of their own do.
const NoEngine = "tcp://192.0.2.1:1"

// Pool is the pool of daemons that tests start, unless they ask for another: hundreds of them would fill more for nobody.
const Pool = "1"

var setDefaults = sync.OnceFunc(func() {
	os.Setenv("DOCKER_HOST", NoEngine)
	if os.Getenv("WARREN_POOL") == "" {
		os.Setenv("WARREN_POOL", Pool)
	}
})

type build struct {
	once sync.Once
	path string
	err  error
}

var builds = struct {
	sync.Mutex
	byName map[string]*build
}{byName: map[string]*build{}}

func findOrBuild(name string) (string, error) {
	if dir := os.Getenv("WARREN_BIN"); dir != "" {
		path, err := filepath.Abs(filepath.Join(dir, name))
		if err != nil {
			return "", err
		}
		if _, err := os.Stat(path); err != nil {
			return "", fmt.Errorf("WARREN_BIN: %w; run make build, or unset it", err)
		}
		return path, nil
	}
	root, err := repoRoot()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(root, ".cache", "testbin")
	if name == "warren-runtime" {
		return BuildRuntime(dir, name)
	}
	return Build(dir, name, "./cmd/"+name)
}

// BuildRuntime is [Build] for the runtime, with the patched gVisor that make builds it with.
func BuildRuntime(dir, name string, flags ...string) (string, error) {
	root, err := repoRoot()
	if err != nil {
		return "", err
	}
	var stderr strings.Builder
	patch := exec.Command("go", "run", "./driver/gvisor/patch", filepath.Join(".cache", "gvisor"))
	patch.Dir, patch.Stderr = root, &stderr
	gomod, err := patch.Output()
	if err != nil {
		return "", fmt.Errorf("patch gVisor: %w\n%s", err, &stderr)
	}
	return Build(dir, name, "./cmd/warren-runtime", append([]string{"-modfile=" + strings.TrimSpace(string(gomod))}, flags...)...)
}

// Build compiles a main package of this checkout, without cgo, to DIR/NAME and returns that path. The go command
// itself decides what is out of date. Test processes that run at the same time take turns; one that already runs a
// program keeps the file it runs. Flags are added to those of every build; the last of a kind counts.
func Build(dir, name, pkg string, flags ...string) (string, error) {
	root, err := repoRoot()
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	lock, err := os.OpenFile(filepath.Join(dir, name+".lock"), os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	path := filepath.Join(dir, name)
	// go build leaves an up-to-date file alone and replaces an old one by a rename.
	args := append([]string{"build", "-buildvcs=false", "-ldflags", "-s -w"}, flags...)
	cmd := exec.Command("go", append(args, "-o", path, pkg)...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build %s: %w\n%s", pkg, err, out)
	}
	return path, nil
}

// WriteProgram writes a file that the test then runs. A process that another goroutine starts meanwhile would inherit the descriptor
// until its own exec, and the kernel runs no file that somebody can write to (ETXTBSY): none is started while it is open.
func WriteProgram(path string, data []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, data, 0o755)
}
