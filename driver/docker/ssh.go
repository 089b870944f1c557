//go:build linux

package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren"
)

// sshArguments is how ssh reaches an engine: it runs docker's own relay there, which copies between its standard streams and
// the engine's socket. It asks for nothing, as the daemon has no terminal.
func sshArguments(u *url.URL) ([]string, error) {
	bad := func(why string) error {
		return fmt.Errorf("the engine %s: %s; want ssh://USER@HOST[:PORT]: %w", u.Redacted(), why, warren.ErrInvalid)
	}
	_, password := u.User.Password()
	switch {
	case u.Hostname() == "" || strings.HasPrefix(u.Hostname(), "-") || strings.HasPrefix(u.User.Username(), "-"):
		return nil, bad("no host")
	case password:
		return nil, bad("a password is of no use, set up a key")
	case u.RawQuery != "" || u.Fragment != "":
		return nil, bad("there is something after the path")
	}
	args := []string{"-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30"}
	if name := u.User.Username(); name != "" {
		args = append(args, "-l", name)
	}
	if port := u.Port(); port != "" {
		args = append(args, "-p", port)
	}
	args = append(args, "--", u.Hostname(), "docker")
	if u.Path != "" && u.Path != "/" {
		if strings.ContainsFunc(u.Path, func(r rune) bool {
			return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("/._-", r))
		}) {
			return nil, bad("the socket's path has characters that a shell would take")
		}
		args = append(args, "--host", "unix://"+u.Path)
	}
	return append(args, "system", "dial-stdio"), nil
}

// dialCommand makes connections of programs' standard streams.
func dialCommand(name string, args []string) func(context.Context, string, string) (net.Conn, error) {
	return func(context.Context, string, string) (net.Conn, error) {
		// Not bound to the context, which is that of the dial alone.
		cmd := exec.Command(name, args...)
		// A signal to the daemon's terminal must not reach it, nor may it outlive the daemon.
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		c := &commandConn{cmd: cmd}
		var theirIn, theirOut *os.File
		var err error
		if theirIn, c.in, err = os.Pipe(); err != nil {
			return nil, err
		}
		if c.out, theirOut, err = os.Pipe(); err != nil {
			return nil, errors.Join(err, theirIn.Close(), c.in.Close())
		}
		cmd.Stdin, cmd.Stdout, cmd.Stderr = theirIn, theirOut, &c.said
		err = cmd.Start()
		theirIn.Close()
		theirOut.Close()
		if err != nil {
			c.in.Close()
			c.out.Close()
			return nil, err
		}
		c.ended = make(chan struct{})
		go func() {
			cmd.Wait()
			close(c.ended)
		}()
		return c, nil
	}
}

// commandConn is a connection through a program. It ends with its streams: a program that was left alone by the daemon's death
// reads the end of its input.
type commandConn struct {
	cmd     *exec.Cmd
	in, out *os.File
	said    tail
	ended   chan struct{}
	once    sync.Once
}

// Read implements net.Conn. The end of a program that has said why is an error.
func (c *commandConn) Read(p []byte) (int, error) {
	n, err := c.out.Read(p)
	if errors.Is(err, io.EOF) {
		err = c.why(err)
	}
	return n, err
}

// why returns what the program has said, once its streams have ended, else err.
func (c *commandConn) why(err error) error {
	select {
	case <-c.ended:
	case <-time.After(time.Second):
	}
	if why := c.said.String(); why != "" {
		return fmt.Errorf("%s ended: %s", c.cmd.Args[0], why)
	}
	return err
}

// Write implements net.Conn.
func (c *commandConn) Write(p []byte) (int, error) {
	n, err := c.in.Write(p)
	if errors.Is(err, syscall.EPIPE) {
		err = c.why(err)
	}
	return n, err
}

// CloseWrite ends the program's input.
func (c *commandConn) CloseWrite() error { return c.in.Close() }

// Close ends the program.
func (c *commandConn) Close() error {
	c.once.Do(func() {
		c.in.Close()
		c.out.Close()
		go func() {
			select {
			case <-c.ended:
			case <-time.After(5 * time.Second):
				c.cmd.Process.Kill()
			}
		}()
	})
	return nil
}

// LocalAddr implements net.Conn.
func (c *commandConn) LocalAddr() net.Addr { return commandAddr{} }

// RemoteAddr implements net.Conn.
func (c *commandConn) RemoteAddr() net.Addr { return commandAddr{} }

// SetDeadline implements net.Conn.
func (c *commandConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *commandConn) SetReadDeadline(t time.Time) error { return c.out.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn.
func (c *commandConn) SetWriteDeadline(t time.Time) error { return c.in.SetWriteDeadline(t) }

type commandAddr struct{}

// Network implements net.Addr.
func (commandAddr) Network() string { return "command" }

// String implements net.Addr.
func (commandAddr) String() string { return "command" }

// tail keeps the last of what a program says.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

// Write implements io.Writer.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	t.buf = t.buf[max(0, len(t.buf)-1000):]
	return len(p), nil
}

// String returns it on one line.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(strings.Fields(string(t.buf)), " ")
}
