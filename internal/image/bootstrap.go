package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren"
)

// BootstrapOptions say what to build. Name is required.
type BootstrapOptions struct {
	Name string
	// Distribution is "debian", also when empty.
	Distribution string
	// Release such as "bookworm"; empty means the host's own when the host is Debian, else bookworm.
	Release string
	// Packages beside the essential ones and apt.
	Packages []string
	Progress func(Progress)
	// Output gets what mmdebstrap says.
	Output io.Writer
}

const defaultRelease = "bookworm"

var (
	releaseName = regexp.MustCompile(`^[a-z][a-z0-9.-]{0,31}$`)
	packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]{1,126}(:[a-z0-9-]{1,32})?$`)
)

// Bootstrap builds a Debian root file system with mmdebstrap, out of the distribution's packages, and imports it. It runs in a
// mount namespace of its own, so that nothing it mounts outlives it.
func (s *Store) Bootstrap(ctx context.Context, o BootstrapOptions) (*Image, error) {
	im, err := s.bootstrap(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("bootstrap image %s: %w", o.Name, err)
	}
	return im, nil
}

func (s *Store) bootstrap(ctx context.Context, o BootstrapOptions) (*Image, error) {
	if _, err := newName(o.Name); err != nil {
		return nil, err
	}
	if o.Distribution != "" && o.Distribution != "debian" {
		return nil, fmt.Errorf("distribution %q: %w; debian can be bootstrapped, others can be pulled", o.Distribution, errors.ErrUnsupported)
	}
	if o.Release == "" {
		o.Release = hostRelease()
	}
	if !releaseName.MatchString(o.Release) {
		return nil, fmt.Errorf("release %q: %w: it looks like bookworm", o.Release, warren.ErrInvalid)
	}
	for _, p := range o.Packages {
		if !packageName.MatchString(p) {
			return nil, fmt.Errorf("package %q: %w: a package's name has lower-case letters, digits, and + - . in it", p, warren.ErrInvalid)
		}
	}
	tool, err := exec.LookPath("mmdebstrap")
	if err != nil {
		return nil, fmt.Errorf("%w: mmdebstrap, which builds it, is not installed; run `apt-get install mmdebstrap`", warren.ErrUnavailable)
	}
	tmp, err := os.MkdirTemp("", "warren-bootstrap-")
	if err != nil {
		return nil, storeError(err)
	}
	defer os.RemoveAll(tmp)
	if err := os.Chmod(tmp, 0o755); err != nil { // apt downloads as a user of its own
		return nil, err
	}
	args := []string{"--variant=minbase", "--format=tar"}
	if len(o.Packages) > 0 {
		args = append(args, "--include="+strings.Join(o.Packages, ","))
	}
	// Without a mirror named, mmdebstrap takes the distribution's public ones.
	args = append(args, "--", o.Release, "-")
	p, err := startBuilder(ctx, tool, args, tmp, o)
	if err != nil {
		return nil, err
	}
	defer p.end()
	return s.Import(ctx, o.Name, p, ImportOptions{kind: "bootstrap", Progress: o.Progress})
}

// hostRelease is the host's own release if it is Debian.
func hostRelease() string {
	b, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return defaultRelease
	}
	lines := strings.Split(string(b), "\n")
	if !slices.Contains(lines, "ID=debian") {
		return defaultRelease
	}
	for _, l := range lines {
		if code, ok := strings.CutPrefix(l, "VERSION_CODENAME="); ok && releaseName.MatchString(code) {
			return code
		}
	}
	return defaultRelease
}

// builder is mmdebstrap at work. It reads as the tar that it writes, and ends with io.EOF only when it has succeeded.
type builder struct {
	cmd  *exec.Cmd
	out  io.ReadCloser
	log  *lastLines
	wait func() error
}

func startBuilder(ctx context.Context, tool string, args []string, tmp string, o BootstrapOptions) (*builder, error) {
	b := &builder{cmd: exec.CommandContext(ctx, tool, args...), log: &lastLines{to: o.Output, progress: (&reporter{report: o.Progress}).tell}}
	b.cmd.Dir = tmp
	b.cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "HOME=" + tmp, "TMPDIR=" + tmp}
	for _, k := range []string{"http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE"} {
		if v, ok := os.LookupEnv(k); ok {
			b.cmd.Env = append(b.cmd.Env, k+"="+v)
		}
	}
	b.cmd.Stderr = b.log
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGTERM}
	// It removes what it made when it is asked to end, and so do its children.
	b.cmd.Cancel = func() error { return syscall.Kill(-b.cmd.Process.Pid, syscall.SIGTERM) }
	b.cmd.WaitDelay = 20 * time.Second
	var err error
	if b.out, err = b.cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	if err := b.cmd.Start(); err != nil {
		if errors.Is(err, syscall.EPERM) {
			return nil, fmt.Errorf("%w: only root can bootstrap an image", warren.ErrDenied)
		}
		return nil, err
	}
	b.wait = sync.OnceValue(func() error {
		err := b.cmd.Wait()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("%w: mmdebstrap failed (%w): %s", warren.ErrUnavailable, err, b.log.last())
	})
	return b, nil
}

func (b *builder) Read(p []byte) (int, error) {
	n, err := b.out.Read(p)
	if err == nil {
		return n, nil
	}
	if werr := b.wait(); werr != nil {
		return n, werr
	}
	return n, err
}

// end stops the builder if it still runs, with all its children.
func (b *builder) end() {
	b.out.Close()
	syscall.Kill(-b.cmd.Process.Pid, syscall.SIGTERM)
	b.wait()
	syscall.Kill(-b.cmd.Process.Pid, syscall.SIGKILL)
}

// lastLines passes output on and remembers the end of it, for the message of an error.
type lastLines struct {
	mu       sync.Mutex
	to       io.Writer
	progress func(Progress)
	tail     []byte
}

// keptTail is how much of the output an error shows.
const keptTail = 800

func (l *lastLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tail = append(l.tail, p...)
	if n := len(l.tail) - keptTail; n > 0 {
		l.tail = slices.Delete(l.tail, 0, n)
	}
	for line := range strings.Lines(string(p)) {
		if line = strings.TrimSpace(line); line != "" {
			l.progress(Progress{Step: "bootstrap", Message: line})
		}
	}
	if l.to != nil {
		l.to.Write(p) // a reader that has gone is no reason to stop
	}
	return len(p), nil
}

func (l *lastLines) last() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.TrimSpace(string(l.tail))
}
