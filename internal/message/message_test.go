//go:build linux

package message

import (
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
)

type request struct {
	Op  string   `json:"op"`
	Env []string `json:"env"`
}

func pair(t testing.TB) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		conns[i] = c.(*net.UnixConn)
		t.Cleanup(func() { c.Close() })
	}
	return conns[0], conns[1]
}

func TestFilesAndStream(t *testing.T) {
	a, b := pair(t)
	name := t.TempDir() + "/f"
	if err := os.WriteFile(name, []byte("passed on"), 0o600); err != nil {
		t.Fatal(err)
	}
	var files []*os.File
	for range MaxFiles {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		files = append(files, f)
	}
	long := strings.Repeat("x", 1<<20) // more than a socket's buffer
	go func() {
		if err := Write(a, &request{Op: "create", Env: []string{long}}, files...); err != nil {
			t.Error(err)
		}
		a.Write([]byte("stream"))
		a.CloseWrite()
	}()
	var req request
	got, err := Read(b, &req)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != MaxFiles || req.Env[0] != long {
		t.Fatalf("%d files, environment of %d", len(got), len(req.Env[0]))
	}
	if s, err := io.ReadAll(got[MaxFiles-1]); err != nil || string(s) != "passed on" {
		t.Errorf("last file: %q, %v", s, err)
	}
	for _, f := range got {
		f.Close()
	}
	if s, err := io.ReadAll(b); err != nil || string(s) != "stream" {
		t.Errorf("after the line: %q, %v", s, err)
	}
	if err := Write(a, &req, append(files, files[0])...); err == nil {
		t.Error("too many files were taken")
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte("{\"op\":\"list\"}\nrest"))
	f.Add([]byte("\n"))
	f.Add([]byte("{"))
	f.Fuzz(func(t *testing.T, data []byte) {
		a, b := pair(t)
		go func() {
			a.Write(data)
			a.Close()
		}()
		var req request
		files, err := Read(b, &req)
		if err != nil && len(files) > 0 {
			t.Error("files and an error")
		}
		io.Copy(io.Discard, b)
	})
}
