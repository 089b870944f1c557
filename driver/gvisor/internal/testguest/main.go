//go:build linux

// Testguest is the smallest guest that the driver's own tests need: the channel, dialling, and an HTTP server that
// runs shell commands. The real one is cmd/warren-guest.
package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/warren-sandbox/warren/internal/guest/channel"
)

const guestPort = 49983

func main() {
	token := os.Getenv("WARREN_CHANNEL_TOKEN")
	os.Unsetenv("WARREN_CHANNEL_TOKEN")
	trusted := &listener{conns: make(chan net.Conn)}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(204) })
	mux.HandleFunc("POST /run", run)
	mux.HandleFunc("POST /warren/oom", oom)
	go http.Serve(trusted, mux)

	streams := channel.Config{Port: guestPort, Accept: func(c net.Conn) { go func() { trusted.conns <- c }() }}
	go channel.ServeRenewed(inherited(3), inherited(4), streams)

	tcp, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", guestPort))
	if err != nil {
		os.Exit(1)
	}
	http.Serve(tcp, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/warren/channel" || r.Header.Get("X-Channel-Token") != token || token == "" {
			http.Error(w, "no", http.StatusForbidden)
			return
		}
		c, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: warren-channel\r\n\r\n")
		channel.Serve(c, streams)
	}))
}

func run(w http.ResponseWriter, r *http.Request) {
	script, _ := io.ReadAll(r.Body)
	if code, ok := strings.CutPrefix(string(script), "exit-guest "); ok {
		n, _ := strconv.Atoi(code)
		os.Exit(n)
	}
	cmd := exec.Command("/bin/sh", "-c", string(script))
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		out = append(out, err.Error()...)
	}
	w.Header().Set("Exit", fmt.Sprint(cmd.ProcessState.ExitCode()))
	w.Write(out)
}

// oom kills the process with the most memory, or with TESTGUEST_STUBBORN set does nothing for ever.
func oom(w http.ResponseWriter, r *http.Request) {
	if os.Getenv("TESTGUEST_STUBBORN") != "" {
		select {}
	}
	most, victim := 0, 0
	files, _ := filepath.Glob("/proc/[0-9]*/statm")
	for _, f := range files {
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		b, _ := os.ReadFile(f)
		if fields := strings.Fields(string(b)); pid != 1 && len(fields) > 1 {
			if n, _ := strconv.Atoi(fields[1]); n > most {
				most, victim = n, pid
			}
		}
	}
	if victim > 0 {
		syscall.Kill(victim, syscall.SIGKILL)
	}
	w.WriteHeader(204)
}

type listener struct{ conns chan net.Conn }

func (l *listener) Accept() (net.Conn, error) { return <-l.conns, nil }
func (l *listener) Close() error              { return nil }
func (l *listener) Addr() net.Addr            { return &net.TCPAddr{} }

func inherited(fd uintptr) *net.UnixConn {
	f := os.NewFile(fd, "channel")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return c.(*net.UnixConn)
}
