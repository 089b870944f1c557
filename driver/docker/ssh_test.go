//go:build linux

package docker_test

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren/driver/docker"
	"github.com/warren-sandbox/warren/driver/docker/dockertest"
)

// socketVariable names the socket that this program relays to when it is called as ssh.
const socketVariable = "WARREN_TEST_SSH_SOCKET"

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "ssh" {
		os.Exit(relaySSH())
	}
	os.Exit(m.Run())
}

// relaySSH does what `docker system dial-stdio` does at the other end of an ssh.
func relaySSH() int {
	if want := []string{"-l", "ada", "-p", "2222", "--", "far", "docker", "system", "dial-stdio"}; len(os.Args) < len(want) || !slices.Equal(os.Args[len(os.Args)-len(want):], want) {
		io.WriteString(os.Stderr, "unexpected arguments: "+strings.Join(os.Args, " ")+"\n")
		return 255
	}
	conn, err := net.Dial("unix", os.Getenv(socketVariable))
	if err != nil {
		io.WriteString(os.Stderr, "ssh: connect to host far: refused\n")
		return 255
	}
	go func() {
		io.Copy(conn, os.Stdin)
		conn.(*net.UnixConn).CloseWrite()
	}()
	io.Copy(os.Stdout, conn)
	return 0
}

// TestSSH reaches an engine through a program called ssh. It is on this machine after all, and sees the driver's mounts: that is
// found out, and not told by the address.
func TestSSH(t *testing.T) {
	bin := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, filepath.Join(bin, "ssh")); err != nil {
		t.Fatal(err)
	}
	e := newEnv(t, dockertest.Config{})
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	t.Setenv(socketVariable, strings.TrimPrefix(e.opts.Host, "unix://"))
	e.opts.Host = "ssh://ada@far:2222"
	e.d.Close()
	e.d = e.open()
	if e.d.Copies(e.ctx()) {
		t.Error("the driver goes by the address")
	}
	dir := e.work()
	spec := e.specOn(dir)
	if err := e.d.Create(e.ctx(), spec); err != nil {
		t.Fatal(err)
	}
	if got := e.run(spec.ID, "cat /workspace/file; echo -n at once > /workspace/new"); got != "first file" {
		t.Errorf("inside: %q", got)
	}
	e.want(filepath.Join(dir, "new"), "at once")
	e.clean()
	// A program that fails says why.
	t.Setenv(socketVariable, "/nonexistent")
	e.opts.Host = "ssh://ada@far:2222"
	d, err := docker.New(e.opts)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if _, err := d.List(e.ctx()); err == nil || !strings.Contains(err.Error(), "connect to host far: refused") {
		t.Errorf("List without the other machine: %v", err)
	}
}
