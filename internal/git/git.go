// Package git is the one way in which Warren's host side runs git.
//
// Repositories and workspaces are hostile ground: their content, configuration, hooks and attributes come from
// strangers and from agents. So a [Cmd] names its git directory itself and never lets git look for one; it reads no
// configuration of the system, of a user or of a work tree; it inherits no GIT_*, LD_* or pager variable; hooks,
// the fsmonitor, external diffs, text conversions, filters and submodules are off; and what may be reached over a
// network is named per command.
//
// A command that touches bytes an agent wrote runs confined ([Confine]): as a user that owns nothing but
// workspaces, in a user namespace in which it can read them all whatever their modes, with a root directory that
// holds the named directories, the system's programs and nothing else, and without new privileges. A symbolic link
// that is swapped in while git works leads nowhere.
package git

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren"
)

// Setting is one line of configuration.
type Setting struct{ Key, Value string }

// Cmd is one run of git.
type Cmd struct {
	// Dir is the git directory; it is required, and git is told so, whatever lies around it.
	Dir string
	// WorkTree is the directory of checked out files, if the command needs one.
	WorkTree string
	// WriteTree lets a confined command change it.
	WriteTree bool
	// Index, Objects and Alternates replace the index, the object directory and add object directories to read from.
	Index      string
	Objects    string
	Alternates []string
	// Args after "git". What comes from outside must stand behind "--" or "--end-of-options", and refs must have
	// passed [CheckRef] or [CheckRevision].
	Args []string
	// Config is added to what every command gets, and wins over it.
	Config []Setting
	// Env is added to the environment.
	Env []string
	// Protocols that git may use, such as "https"; none by default.
	Protocols []string
	Stdin     io.Reader
	// Stdout receives the output; when nil, Output collects at most MaxOutput bytes.
	Stdout io.Writer
	// Progress is called with each line or progress update that git writes to stderr.
	Progress func(line string)
	// Secrets are taken out of errors and progress.
	Secrets []string
	// Confine makes the command run confined when the process is root, see the package comment. Without it, the
	// command runs as this process's own user.
	Confine *Confine
	// Background gives way to all else that the machine does.
	Background bool
	// Owner, when the process is root, is the user and group to run as instead, for repositories of another user.
	Owner *Owner
}

// Owner is a user and group of the host.
type Owner struct{ UID, GID uint32 }

// Confine says what a confined command sees and as whom it runs. The directories of the Cmd are what it sees:
// Objects and the directory of Index for writing, WorkTree if WriteTree is set, all others for reading only.
type Confine struct {
	// IDBase is the host id that stands for 0; 65536 ids from there on are the command's.
	IDBase uint32
	// UID within that range; the group is the same.
	UID uint32
	// Memory is how many bytes it may keep in memory of its own, which mapped packs are not; 0 is no limit.
	Memory uint64
}

// MaxOutput is how much Output collects.
const MaxOutput = 64 << 20

// maxStderr is how much of git's messages is kept for the error.
const maxStderr = 16 << 10

// Error is a failed run of git.
type Error struct {
	// Verb is git's subcommand.
	Verb string
	// Code is the exit status, or -1 when a signal ended git.
	Code int
	// Message is the last that git said.
	Message string
	err     error
}

// Error names the verb and says what git said.
func (e *Error) Error() string {
	if e.Message != "" {
		return "git " + e.Verb + ": " + e.Message
	}
	return "git " + e.Verb + ": " + e.err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.err }

// ExitCode returns the exit status of a failed run of git, or -1.
func ExitCode(err error) int {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return -1
}

var lookGit = sync.OnceValues(func() (string, error) {
	p, err := exec.LookPath("git")
	if err != nil {
		return "", fmt.Errorf("git is not installed on the host: %w", warren.ErrUnavailable)
	}
	if p, err = filepath.Abs(p); err != nil {
		return "", err
	}
	return p, nil
})

// always is the configuration of every command. Command scope wins over any file.
var always = []Setting{
	{"core.hooksPath", "/dev/null"},
	{"core.fsmonitor", "false"},
	{"core.untrackedCache", "false"},
	{"core.pager", "cat"},
	{"core.editor", "false"},
	{"core.askPass", ""},
	{"core.sshCommand", "false"},
	{"core.alternateRefsCommand", "true"},
	{"core.attributesFile", "/dev/null"},
	{"core.excludesFile", "/dev/null"},
	{"core.quotePath", "true"},
	{"core.autocrlf", "false"},
	{"core.symlinks", "true"},
	{"core.fileMode", "true"},
	{"core.protectNTFS", "false"},
	{"core.protectHFS", "false"},
	{"core.splitIndex", "false"},
	{"core.sparseCheckout", "false"},
	{"index.version", "2"},
	{"index.sparse", "false"},
	{"credential.helper", ""},
	{"credential.interactive", "never"},
	{"protocol.allow", "never"},
	{"protocol.ext.allow", "never"},
	{"safe.directory", "*"},
	{"safe.bareRepository", "all"},
	{"gc.auto", "0"},
	{"gc.autoDetach", "false"},
	{"maintenance.auto", "false"},
	{"submodule.recurse", "false"},
	{"fetch.recurseSubmodules", "false"},
	{"push.recurseSubmodules", "no"},
	{"diff.ignoreSubmodules", "all"},
	{"diff.submodule", "short"},
	{"diff.external", ""},
	{"diff.noprefix", "false"},
	{"diff.mnemonicPrefix", "false"},
	{"color.ui", "false"},
	{"commit.gpgSign", "false"},
	{"tag.gpgSign", "false"},
	{"push.gpgSign", "false"},
	{"log.showSignature", "false"},
	{"advice.detachedHead", "false"},
	{"init.templateDir", ""},
	{"transfer.fsckObjects", "false"},
	{"receive.autogc", "false"},
	{"uploadpack.packObjectsHook", ""},
	{"trace2.eventTarget", "0"},
	{"trace2.normalTarget", "0"},
	{"trace2.perfTarget", "0"},
}

// inherited are the only variables that come from this process's environment, and only for commands that may use a
// network: certificates, proxies and where the system's programs are.
var inherited = []string{"PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"}

// environ builds the whole environment; path maps a host path to what the command sees.
func (c *Cmd) environ(path func(string) string) []string {
	env := []string{
		"LC_ALL=C", "LANG=C", "TZ=UTC", "TERM=dumb", "HOME=/nonexistent", "XDG_CONFIG_HOME=/nonexistent",
		"GIT_DIR=" + path(c.Dir),
		"GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_SYSTEM=/dev/null", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_ATTR_NOSYSTEM=1",
		"GIT_TERMINAL_PROMPT=0", "GIT_NO_LAZY_FETCH=1", "GIT_NO_REPLACE_OBJECTS=1", "GIT_OPTIONAL_LOCKS=0",
		"GIT_LITERAL_PATHSPECS=1", "GIT_PAGER=cat", "GIT_EDITOR=false", "GIT_PROTOCOL_FROM_USER=0",
		"GIT_ADVICE=0",
		// An empty list would mean "the default": a name that is no protocol allows none.
		"GIT_ALLOW_PROTOCOL=" + strings.Join(append([]string{"none"}, c.Protocols...), ":"),
	}
	if len(c.Protocols) > 0 {
		for _, k := range inherited {
			if v, ok := os.LookupEnv(k); ok {
				env = append(env, k+"="+v)
			}
		}
	} else {
		env = append(env, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	}
	if c.WorkTree != "" {
		env = append(env, "GIT_WORK_TREE="+path(c.WorkTree))
	}
	if c.Index != "" {
		env = append(env, "GIT_INDEX_FILE="+path(c.Index))
	}
	if c.Objects != "" {
		env = append(env, "GIT_OBJECT_DIRECTORY="+path(c.Objects))
	}
	if len(c.Alternates) > 0 {
		var alt []string
		for _, a := range c.Alternates {
			alt = append(alt, quoteAlternate(path(a)))
		}
		env = append(env, "GIT_ALTERNATE_OBJECT_DIRECTORIES="+strings.Join(alt, ":"))
	}
	config := always
	for _, p := range c.Protocols {
		config = append(slices.Clip(config), Setting{"protocol." + p + ".allow", "always"})
	}
	config = append(slices.Clip(config), c.Config...)
	env = append(env, "GIT_CONFIG_COUNT="+strconv.Itoa(len(config)))
	for i, s := range config {
		n := strconv.Itoa(i)
		env = append(env, "GIT_CONFIG_KEY_"+n+"="+s.Key, "GIT_CONFIG_VALUE_"+n+"="+s.Value)
	}
	return append(env, c.Env...)
}

// quoteAlternate writes a path for a colon-separated list, in git's C style where it has to be.
func quoteAlternate(p string) string {
	if !strings.ContainsAny(p, ":\"\\\n") {
		return p
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(p) + `"`
}

// Run runs git to its end. When ctx ends, git and all that it started are killed.
func (c *Cmd) Run(ctx context.Context) error {
	p, err := c.Start(ctx)
	if err != nil {
		return err
	}
	return p.Wait()
}

// Output runs git and returns what it wrote to stdout.
func (c *Cmd) Output(ctx context.Context) ([]byte, error) {
	if c.Stdout != nil {
		return nil, errors.New("git: Stdout is already set")
	}
	out := &limitedBuffer{max: MaxOutput}
	d := *c
	d.Stdout = out
	if err := d.Run(ctx); err != nil {
		return nil, err
	}
	if out.over {
		return nil, fmt.Errorf("git %s wrote more than %d bytes: %w", c.verb(), MaxOutput, warren.ErrExhausted)
	}
	return out.Bytes(), nil
}

// Line runs git and returns its output without the final newline.
func (c *Cmd) Line(ctx context.Context) (string, error) {
	b, err := c.Output(ctx)
	return strings.TrimSuffix(string(b), "\n"), err
}

func (c *Cmd) verb() string {
	if len(c.Args) == 0 {
		return ""
	}
	return c.Args[0]
}

// Process is a git that runs.
type Process struct {
	cmd    *exec.Cmd
	verb   string
	stderr *messages
	ctx    context.Context
	ended  chan struct{} // see onThread
}

// Start starts git. The caller must call Wait.
func (c *Cmd) Start(ctx context.Context) (*Process, error) {
	bin, err := lookGit()
	if err != nil {
		return nil, err
	}
	if c.Dir == "" || len(c.Args) == 0 {
		return nil, errors.New("git: a command needs a git directory and arguments")
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, bin, c.Args...)
	cmd.Dir = "/"
	cmd.Stdin = c.Stdin
	cmd.Stdout = c.Stdout
	stderr := &messages{progress: c.Progress, secrets: c.Secrets}
	cmd.Stderr = stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	ended := make(chan struct{})
	if err := c.start(cmd, ended); err != nil {
		return nil, fmt.Errorf("start git %s: %w", c.verb(), err)
	}
	if err := c.bound(cmd.Process.Pid); err != nil {
		cmd.Cancel()
		cmd.Wait()
		close(ended)
		return nil, fmt.Errorf("limit git %s: %w", c.verb(), err)
	}
	if c.Background {
		// Of the group, for git starts others. One that has ended is no loss.
		_ = syscall.Setpriority(syscall.PRIO_PGRP, cmd.Process.Pid, 19)
	}
	return &Process{cmd: cmd, verb: c.verb(), stderr: stderr, ctx: ctx, ended: ended}, nil
}

// Wait waits until git has ended and returns an [Error] when it failed.
func (p *Process) Wait() error {
	err := p.cmd.Wait()
	close(p.ended)
	if err == nil {
		return nil
	}
	if cerr := context.Cause(p.ctx); cerr != nil {
		return fmt.Errorf("git %s: %w", p.verb, cerr)
	}
	code := -1
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		code = exit.ExitCode()
	}
	return &Error{Verb: p.verb, Code: code, Message: p.stderr.last(), err: err}
}

// limitedBuffer keeps the first max bytes.
type limitedBuffer struct {
	bytes.Buffer
	max  int
	over bool
}

func (b *limitedBuffer) Write(p []byte) (int, error) {
	if room := b.max - b.Len(); len(p) > room {
		b.over = true
		b.Buffer.Write(p[:room])
		return len(p), nil
	}
	return b.Buffer.Write(p)
}
