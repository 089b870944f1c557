// Package hold lets software inside keep its sandbox awake: work that neither a client nor the processor shows, such as
// waiting for a remote build, would else be taken for idleness.
//
// A hold is a file in a directory where everybody in the sandbox may make one. It lasts for the time that is written in
// it, counted from when it was written, or an hour. The program warren-hold makes one for as long as a command runs: its
// name ends with ".run", and it ends with the lock that the program has on it, however the program ends.
package hold

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// Default is how long a hold lasts that does not say.
	Default = time.Hour
	// Most is how long one lasts at most.
	Most = 24 * time.Hour
	// Command is the name of the program.
	Command = "warren-hold"
	// running ends the names of holds that last while a lock does.
	running = ".run"
	// unready ends the names of those that are being made.
	unready = ".new"
	// maxHolds bounds how many files are looked at.
	maxHolds = 1000
)

// Dir is a directory of holds.
type Dir string

// Make makes the directory, in which everybody may make files and remove their own.
func (d Dir) Make() error {
	if err := os.MkdirAll(string(d), 0o755); err != nil {
		return err
	}
	return os.Chmod(string(d), 0o777|os.ModeSticky)
}

// Now returns how many holds there are and until when the longest lasts. Those that are over are removed.
func (d Dir) Now(now time.Time) (n int, until time.Time) {
	f, err := os.Open(string(d))
	if err != nil {
		return 0, until
	}
	defer f.Close()
	names, _ := f.Readdirnames(maxHolds) // what was read counts
	for _, name := range names {
		path := filepath.Join(string(d), name)
		if strings.HasSuffix(name, running+unready) {
			// It is being made, and is no hold yet, or whoever made it was killed.
			if st, err := os.Lstat(path); err == nil && now.Sub(st.ModTime()) > time.Minute {
				_ = os.Remove(path)
			}
			continue
		}
		u, ok := held(path)
		if !ok || !u.After(now) {
			_ = os.Remove(path)
			continue
		}
		n++
		if u.After(until) {
			until = u
		}
	}
	return n, until
}

// held returns until when a file holds. Anybody may have put it there: only a regular file counts, and little of it is read.
func held(path string) (until time.Time, ok bool) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return until, false
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return until, false
	}
	if strings.HasSuffix(path, running) && unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB) == nil {
		return until, false // whoever made it has ended
	}
	text, _ := io.ReadAll(io.LimitReader(f, 64)) // none is fine
	from := st.ModTime()
	until = from.Add(Default)
	if word := strings.TrimSpace(string(text)); word != "" {
		if t, err := time.Parse(time.RFC3339, word); err == nil {
			until = t
		} else if d, err := time.ParseDuration(word); err == nil {
			until = from.Add(d)
		}
	}
	// Neither a date in the future nor a file that was touched into it lasts longer.
	if last := min(time.Since(from), 0); until.Sub(from) > Most || last < 0 {
		until = from.Add(min(until.Sub(from), Most) + last)
	}
	return until, true
}

const usage = `usage: warren-hold [--for DURATION] COMMAND [ARGUMENT...]
       warren-hold --for DURATION

Keeps the sandbox awake while the command runs, or without one for the duration. DURATION is like 90s, 30m or 2h; a
command holds for an hour unless it says otherwise, and nothing holds longer than 24h.
`

// Main is the program warren-hold; args[0] is its name. It returns the exit code.
func (d Dir) Main(args []string, stderr io.Writer) int {
	length, command, err := parse(args[1:])
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n%s", Command, err, usage)
		return 2
	}
	if len(command) == 0 {
		err = d.plain(length)
	} else {
		var code int
		if code, err = d.run(length, command); err == nil {
			return code
		}
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", Command, err)
		if errors.Is(err, os.ErrNotExist) {
			return 127
		}
		return 125
	}
	return 0
}

func parse(args []string) (length time.Duration, command []string, err error) {
	given := false
	for len(args) > 0 {
		word, value, joined := strings.Cut(args[0], "=")
		switch {
		case word == "--":
			args = args[1:]
		case word == "--for" || word == "-for":
			if !joined {
				if len(args) < 2 {
					return 0, nil, errors.New("--for needs a duration")
				}
				value, args = args[1], args[1:]
			}
			if length, err = time.ParseDuration(value); err != nil || length <= 0 {
				return 0, nil, fmt.Errorf("--for %s is no duration such as 30m", value)
			}
			given = true
			args = args[1:]
			continue
		case strings.HasPrefix(word, "-"):
			return 0, nil, fmt.Errorf("there is no option %s", word)
		}
		break
	}
	if !given {
		length = Default
		if len(args) == 0 {
			return 0, nil, errors.New("say how long, or while which command")
		}
	}
	return min(length, Most), args, nil
}

// plain leaves a hold that lasts by itself.
func (d Dir) plain(length time.Duration) error {
	f, err := os.CreateTemp(string(d), "for-*")
	if err != nil {
		return err
	}
	_, err = f.WriteString(length.String() + "\n")
	return errors.Join(err, f.Close())
}

// run runs a command and holds while it does. The lock is this program's and not the command's, which may close what it
// does not know.
func (d Dir) run(length time.Duration, command []string) (code int, err error) {
	// What a terminal sends comes to the command as well; the rest is handed on, as soon as it runs.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGHUP)
	f, err := os.CreateTemp(string(d), "*"+running+unready)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	name := strings.TrimSuffix(f.Name(), unready)
	_, err = f.WriteString(length.String() + "\n")
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	}
	if err == nil {
		// Only now: a file of that name without a lock is removed.
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return 0, errors.Join(err, os.Remove(f.Name()))
	}
	defer os.Remove(name)
	path, err := lookPath(command[0])
	if err != nil {
		return 0, err
	}
	p, err := os.StartProcess(path, command, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		return 0, err
	}
	go func() {
		for s := range signals {
			if s == syscall.SIGTERM || s == syscall.SIGHUP {
				_ = p.Signal(s)
			}
		}
	}()
	state, err := p.Wait()
	if err != nil {
		return 0, err
	}
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal()), nil
	}
	return state.ExitCode(), nil
}

// lookPath finds a program as a shell does.
func lookPath(name string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		p := filepath.Join(dir, name)
		if st, err := os.Stat(p); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s is not in PATH: %w", name, os.ErrNotExist)
}
