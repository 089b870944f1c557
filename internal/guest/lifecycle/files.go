package lifecycle

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/guest/small"
)

// Files are the files by which software inside knows which sandbox it is in.
//
// The file generation holds a UUID and a line end, always so many bytes, and is written in place: a program may watch it
// (inotify tells of a change), or map it and compare before each use of what must not be used twice. It changes last,
// when the other files are right already.
type Files struct {
	// Dir is where they are; empty means there are none.
	Dir string
}

// Write makes the files say what the event says.
func (f Files) Write(e Event) error {
	if f.Dir == "" {
		return nil
	}
	put := create // a start is when nobody reads yet, and when time matters
	if Again(e.Name) {
		put = replace
	}
	id := filepath.Join(f.Dir, "sandbox-id")
	err := put(id, e.SandboxID+"\n")
	if errors.Is(err, os.ErrNotExist) {
		if err := f.make(); err != nil {
			return err
		}
		err = put(id, e.SandboxID+"\n")
	}
	err = errors.Join(err, put(filepath.Join(f.Dir, "boot-id"), NewUUID()+"\n"))
	return errors.Join(err, overwrite(filepath.Join(f.Dir, "generation"), e.Generation+"\n"))
}

// make makes the directory, which is root's and readable for all, whatever the umask.
func (f Files) make() error {
	err := os.Mkdir(f.Dir, 0o755)
	switch {
	case errors.Is(err, os.ErrExist):
		return nil
	case errors.Is(err, os.ErrNotExist):
		err = os.MkdirAll(f.Dir, 0o755)
	}
	if err != nil {
		return err
	}
	return os.Chmod(f.Dir, 0o755)
}

// create makes a file with its content, or replaces the one that is there.
func create(path, content string) error {
	err := small.Write(path, unix.O_CREAT|unix.O_EXCL, 0o644, []byte(content))
	if errors.Is(err, os.ErrExist) {
		return replace(path, content)
	}
	return err
}

// replace gives a file its content at once.
func replace(path, content string) error {
	tmp := path + ".new"
	if err := small.Write(tmp, unix.O_CREAT|unix.O_TRUNC, 0o644, []byte(content)); err != nil {
		return err
	}
	if err := unix.Rename(tmp, path); err != nil {
		return &os.LinkError{Op: "rename", Old: tmp, New: path, Err: err}
	}
	return nil
}

// overwrite writes a file of constant length in place.
func overwrite(path, content string) error {
	return small.Write(path, unix.O_CREAT|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o644, []byte(content))
}

// Names sets the host name where files have it.
type Names struct {
	// Hostname and Hosts are the paths of the two files.
	Hostname, Hosts string
}

// SystemNames are the files of the running system.
var SystemNames = Names{Hostname: "/etc/hostname", Hosts: "/etc/hosts"}

// maxHosts bounds how much of /etc/hosts is rewritten: it is the image's and may hold anything.
const maxHosts = 1 << 20

// Set writes the name into the file hostname and, in hosts, in the place of the names that the sandbox had before.
// Names that nobody gave it stay. Files are written in place: a container has them mounted.
func (n Names) Set(name string, before ...string) error {
	old := map[string]bool{}
	had, readErr := small.ReadRegular(n.Hostname, 256)
	if readErr == nil {
		before = append(before, strings.TrimSpace(string(had)))
	}
	for _, b := range before {
		if b != "" && b != "localhost" && b != name {
			old[b] = true
		}
	}
	var errs []error
	if len(old) > 0 {
		if hosts, err := small.ReadRegular(n.Hosts, maxHosts); err == nil {
			if text := rename(string(hosts), old, name); text != string(hosts) {
				errs = append(errs, rewrite(n.Hosts, text))
			}
		} else if !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if readErr != nil || string(had) != name+"\n" {
		errs = append(errs, rewrite(n.Hostname, name+"\n"))
	}
	return errors.Join(errs...)
}

// rename replaces whole names in the lines of a hosts file; addresses, comments and the space between stay.
func rename(hosts string, old map[string]bool, name string) string {
	var b strings.Builder
	for line := range strings.Lines(hosts) {
		text, comment, hasComment := strings.Cut(line, "#")
		fields := strings.Fields(text)
		found := false
		for i, f := range fields {
			if i > 0 && old[f] {
				fields[i], found = name, true
			}
		}
		if !found {
			b.WriteString(line)
			continue
		}
		b.WriteString(fields[0] + "\t" + strings.Join(fields[1:], " "))
		if hasComment {
			b.WriteString(" #" + comment)
		} else {
			b.WriteString("\n")
		}
	}
	return b.String()
}

// rewrite gives a file another content in place.
func rewrite(path, content string) error {
	return small.Write(path, unix.O_CREAT|unix.O_TRUNC|unix.O_NONBLOCK, 0o644, []byte(content))
}
