// Package session keeps shells alive between commands, so that a change of directory, a variable or a function of one
// command is there for the next, while each command's output and exit code are its own.
//
// The shell is bash, reading commands from a pipe. What it says about itself (that a command has ended, its exit code
// and directory) comes over a descriptor of its own, with a word that only the guest and the shell know, so that no
// output can be taken for it. Where output of a command ends is told by the pipes: when the shell has said that the
// command ended, everything it wrote is in them.
package session

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/account"
	"github.com/warren-sandbox/warren/internal/guest/process"
)

// Errors of this package.
var (
	ErrNotFound = errors.New("no such session")
	ErrExists   = errors.New("there is a session of that name")
	ErrTooMany  = errors.New("too many sessions")
	ErrBusy     = errors.New("the session is busy with a command")
	ErrInvalid  = errors.New("invalid")
	ErrStart    = errors.New("the shell did not start")
)

const (
	maxSessions = 64
	maxCommand  = 1 << 20
	// inlineCommand is how long a command may be to be sent over the pipe, of which bash reads a byte at a time.
	inlineCommand = 4 << 10
	startTime     = 30 * time.Second
	// A command whose time is up is interrupted this often, then its processes are killed as well, then the shell is.
	interrupts     = 8
	killTries      = 8
	interruptEvery = 250 * time.Millisecond
	// controlFD is the shell's descriptor for what it tells the guest, above those that scripts use.
	controlFD = 61
	// maxRecord bounds one record: a word, a number and a directory.
	maxRecord = 16 << 10
)

// Table is the open sessions.
type Table struct {
	procs *process.Table

	mu   sync.Mutex
	byID map[string]*Session
}

// NewTable returns an empty table whose shells are processes of procs.
func NewTable(procs *process.Table) *Table {
	return &Table{procs: procs, byID: make(map[string]*Session)}
}

// Session is a shell that waits for commands, or runs one.
type Session struct {
	ID   string
	User *account.User
	p    *process.Process
	out  *bufio.Reader // what the shell tells
	tell chan record
	gone chan struct{} // closed when the table knows it no more

	mu   sync.Mutex
	busy bool
	base map[int]bool // the shell's descendants before the command
}

type record struct {
	word string
	pid  int
	code int
	dir  string
}

// validID is checked by hand: compiling an expression took a part of every sandbox's start.
func validID(id string) bool {
	for _, c := range []byte(id) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("._-", rune(c)) {
			return false
		}
	}
	return id != "" && len(id) <= 64
}

// Open starts a session; an empty id is replaced by one of the table's own.
func (t *Table) Open(ctx context.Context, id string, u *account.User, dir string, env []string) (*Session, error) {
	if id == "" {
		id = "s" + strings.ToLower(rand.Text())
	}
	if !validID(id) {
		return nil, fmt.Errorf("%w: session id %.70q: use up to 64 letters, digits, dots, dashes and underscores", ErrInvalid, id)
	}
	s := &Session{ID: id, User: u, tell: make(chan record, 64), gone: make(chan struct{}), busy: true}
	t.mu.Lock()
	switch {
	case t.byID[id] != nil:
		t.mu.Unlock()
		return nil, fmt.Errorf("%w: %q", ErrExists, id)
	case len(t.byID) >= maxSessions:
		t.mu.Unlock()
		return nil, fmt.Errorf("%w: %d are open already; close some", ErrTooMany, maxSessions)
	}
	t.byID[id] = s
	t.mu.Unlock()
	if err := s.start(ctx, t.procs, dir, env); err != nil {
		t.remove(s)
		return nil, err
	}
	go func() {
		<-s.p.Ended()
		t.remove(s)
	}()
	return s, nil
}

func (t *Table) remove(s *Session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byID[s.ID] == s {
		delete(t.byID, s.ID)
		close(s.gone)
	}
}

// Get returns an open session.
func (t *Table) Get(id string) (*Session, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.byID[id]; s != nil && s.p != nil {
		return s, nil
	}
	return nil, fmt.Errorf("%w: %.70q", ErrNotFound, id)
}

// List returns the open sessions by id.
func (t *Table) List() []*Session {
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []*Session
	for _, s := range t.byID {
		if s.p != nil {
			list = append(list, s)
		}
	}
	slices.SortFunc(list, func(a, b *Session) int { return strings.Compare(a.ID, b.ID) })
	return list
}

// start starts the shell and waits until it is ready for commands.
func (s *Session) start(ctx context.Context, procs *process.Table, dir string, env []string) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	// An interactive shell is what returns to its prompt on an interrupt instead of ending. It has no terminal, so it
	// has no job control either and its commands stay in its process group.
	p, err := procs.Start(process.Spec{Cmd: "bash", Args: []string{"--noediting", "-l", "-i"}, Env: env, Dir: dir, User: s.User,
		Stdin: true, Files: []*os.File{w}, Hidden: true})
	w.Close()
	if err != nil {
		r.Close()
		return err
	}
	s.out = bufio.NewReaderSize(r, 512)
	go s.listen(r)
	word := rand.Text()
	line := fmt.Sprintf("exec %[1]d>&3 3>&-; set +o history; set +H; PS1= PS2= PROMPT_COMMAND=; %[2]s\n", controlFD, report(word, "$?"))
	if err := p.Write(ctx, []byte(line), false); err != nil {
		_ = p.Kill()
		return fmt.Errorf("%w: %w", ErrStart, err)
	}
	timer := time.NewTimer(startTime)
	defer timer.Stop()
	for {
		select {
		case rec := <-s.tell:
			if rec.word != word {
				continue
			}
			p.Sync() // what the shell's start-up files print is nobody's output
			s.mu.Lock()
			s.p, s.busy = p, false
			s.mu.Unlock()
			return nil
		case <-p.Ended():
			err = errors.New("it ended")
		case <-timer.C:
			err = errors.New("it took too long")
		case <-ctx.Done():
			err = ctx.Err()
		}
		_ = p.Kill()
		return fmt.Errorf("%w: %w", ErrStart, err)
	}
}

// report is the shell code that tells the guest that what came before has ended.
func report(word, code string) string {
	return fmt.Sprintf(`builtin printf '%%s %%s %%s %%s\0' %s $BASHPID %s "$PWD" >&%d`, word, code, controlFD)
}

// listen reads the shell's records until it closes its end.
func (s *Session) listen(r *os.File) {
	defer r.Close()
	for {
		var text []byte
		for {
			b, err := s.out.ReadByte()
			if err != nil {
				return
			}
			if b == 0 {
				break
			}
			if len(text) < maxRecord {
				text = append(text, b)
			}
		}
		rec, ok := parseRecord(string(text))
		if !ok {
			continue
		}
		select {
		case s.tell <- rec:
		default: // a shell that tells what nobody asked is not listened to
		}
	}
}

func parseRecord(text string) (record, bool) {
	f := strings.SplitN(text, " ", 4)
	if len(f) != 4 {
		return record{}, false
	}
	pid, err := strconv.Atoi(f[1])
	if err != nil || pid <= 0 {
		return record{}, false
	}
	code, err := strconv.Atoi(f[2])
	if err != nil || code < 0 || code > 255 {
		return record{}, false
	}
	return record{word: f[0], pid: pid, code: code, dir: f[3]}, true
}

// PID returns the shell's.
func (s *Session) PID() int { return s.p.PID }

// Busy says whether a command runs.
func (s *Session) Busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.busy
}

// Close ends the session and what runs in it.
func (s *Session) Close() {
	down := descendants(s.p.PID)
	_ = s.p.Kill() // it may have ended by itself
	for pid := range down {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	<-s.gone
}

// End is how a command ended.
type End struct {
	// Code is the exit code, -1 when a signal ended the shell.
	Code int
	// Dir is the directory of the session after the command.
	Dir string
	// TimedOut says that the command was interrupted because its time was up, Closed that the shell has ended.
	TimedOut, Closed bool
}

// Run is a command that runs in a session.
type Run struct {
	// Output follows what the session writes; it belongs to the command up to the sequence number that Ended tells.
	Output *process.Follower

	done chan struct{}
	end  End
	seq  int64
}

// Done returns a channel that closes when the command has ended.
func (r *Run) Done() <-chan struct{} { return r.done }

// End returns how the command ended and the sequence number after its last output. Done must be closed.
func (r *Run) End() (End, int64) { return r.end, r.seq }

// Run starts a command. It goes on when ctx ends; a timeout above 0 interrupts it.
func (s *Session) Run(ctx context.Context, command string, timeout time.Duration) (*Run, error) {
	if strings.IndexByte(command, 0) >= 0 || len(command) > maxCommand {
		return nil, fmt.Errorf("%w: a command must not hold a zero byte or be longer than %d bytes", ErrInvalid, maxCommand)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.busy {
		return nil, ErrBusy
	}
	select {
	case <-s.p.Ended():
		return nil, fmt.Errorf("%w: %q has ended", ErrNotFound, s.ID)
	default:
	}
	word := rand.Text()
	code, cleanup, err := s.quote(command)
	if err != nil {
		return nil, err
	}
	for len(s.tell) > 0 {
		<-s.tell // said while nobody asked
	}
	s.base = nil
	if timeout > 0 {
		s.base = descendants(s.p.PID)
	}
	r := &Run{Output: s.p.Output.Follow(-1), done: make(chan struct{})}
	// The redirections give the command an empty input, and keep the shell's own descriptors from it.
	line := fmt.Sprintf("PS1= PS2= PROMPT_COMMAND=; { eval %s; } </dev/null %d>&-; %s\n", code, controlFD, report(word, "$?"))
	if err := s.p.Write(ctx, []byte(line), false); err != nil {
		r.Output.Close()
		cleanup()
		if ctx.Err() != nil {
			s.Close() // half a line may have been written
		}
		return nil, err
	}
	s.busy = true
	go func() {
		defer cleanup()
		s.wait(r, word, timeout)
	}()
	return r, nil
}

// quote returns the command as one shell word. A long one goes through a file of the user's.
func (s *Session) quote(command string) (word string, cleanup func(), err error) {
	quoted := "'" + strings.ReplaceAll(command, "'", `'\''`) + "'"
	if len(quoted) <= inlineCommand {
		return quoted, func() {}, nil
	}
	var name string
	err = s.User.Do(func() error {
		f, err := os.CreateTemp("/tmp", ".warren-command-")
		if err != nil {
			return err
		}
		name = f.Name()
		_, err = f.WriteString(command)
		return errors.Join(err, f.Close())
	})
	remove := func() { _ = s.User.Do(func() error { return os.Remove(name) }) }
	if err != nil {
		if name != "" {
			remove()
		}
		return "", nil, fmt.Errorf("%w: keep the command: %w", ErrInvalid, err)
	}
	return `"$(< ` + name + `)"`, remove, nil
}

// wait waits for the end of a command, or brings it about when its time is up.
func (s *Session) wait(r *Run, word string, timeout time.Duration) {
	words := []string{word}
	var timer <-chan time.Time
	if timeout > 0 {
		t := time.NewTimer(timeout)
		defer t.Stop()
		timer = t.C
	}
	// ask has the shell tell that it waits for the next line, once it does.
	ask := func() {
		probe := rand.Text()
		words = append(words, probe)
		ctx, cancel := context.WithTimeout(context.Background(), interruptEvery)
		defer cancel()
		_ = s.p.Write(ctx, []byte("\n"+report(probe, "124")+"\n"), false)
	}
	for stage := 0; ; {
		select {
		case rec := <-s.tell:
			switch {
			case !slices.Contains(words, rec.word):
			case rec.pid != s.p.PID:
				// An interrupt between its fork and its exec makes a child of the shell take itself for the shell.
				_ = syscall.Kill(rec.pid, syscall.SIGKILL)
				ask()
			default:
				s.p.Sync()
				s.finish(r, End{Code: rec.code, Dir: rec.dir, TimedOut: stage > 0})
				return
			}
			continue
		case <-s.gone: // so that whoever is told that the session has ended finds it so
			end, _ := s.p.End()
			s.finish(r, End{Code: end.Code, TimedOut: stage > 0, Closed: true})
			return
		case <-timer:
		}
		stage++
		if stage > interrupts+killTries {
			_ = s.p.Kill()
			timer = nil
			continue
		}
		if stage > interrupts {
			// What ignores the interrupt is killed, but not what earlier commands left running.
			for pid := range descendants(s.p.PID) {
				if !s.base[pid] {
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			}
		}
		// As a terminal does on ^C: the shell gives up the line and its children end. Then it reads the next line. It is
		// said again until it is heard, since a child between its fork and its exec takes it for its own, and the shell
		// goes on when a child did not end of it.
		_ = s.p.Signal(syscall.SIGINT, true)
		ask()
		timer = time.After(interruptEvery)
	}
}

func (s *Session) finish(r *Run, e End) {
	r.end, r.seq = e, s.p.Output.Seq()
	s.mu.Lock()
	s.busy = false
	s.mu.Unlock()
	close(r.done)
}

// descendants returns the processes below pid.
func descendants(pid int) map[int]bool {
	children := make(map[int][]int)
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1) // what can be read counts
	for _, n := range names {
		p, err := strconv.Atoi(n)
		if err != nil {
			continue
		}
		if parent, ok := parentOf(n); ok {
			children[parent] = append(children[parent], p)
		}
	}
	down := make(map[int]bool)
	for next := []int{pid}; len(next) > 0; next = next[1:] {
		for _, c := range children[next[0]] {
			if !down[c] {
				down[c] = true
				next = append(next, c)
			}
		}
	}
	return down
}

func parentOf(pid string) (int, bool) {
	f, err := os.Open("/proc/" + pid + "/stat")
	if err != nil {
		return 0, false
	}
	defer f.Close()
	buf := make([]byte, 512)
	n, err := io.ReadFull(f, buf)
	if n == 0 {
		return 0, err == nil
	}
	return parseParent(string(buf[:n]))
}

// parseParent reads the parent from a process's stat file.
func parseParent(stat string) (int, bool) {
	i := strings.LastIndexByte(stat, ')') // the name may hold anything
	f := strings.Fields(stat[i+1:])
	if i < 0 || len(f) < 2 {
		return 0, false
	}
	parent, err := strconv.Atoi(f[1])
	return parent, err == nil && parent >= 0
}
