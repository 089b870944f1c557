package server_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/server"
	"github.com/warren-sandbox/warren/internal/server/servertest"
	"github.com/warren-sandbox/warren/proto/warren/v1/warrenv1connect"
)

const versionPath = warrenv1connect.SystemServiceGetVersionProcedure

// raw opens a connection, sends text, and goes on sending nothing.
func raw(t *testing.T, base, text string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(base, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	return c
}

// ends fails unless the other side ends the connection in time.
func ends(t *testing.T, c net.Conn, within time.Duration) {
	t.Helper()
	began := time.Now()
	c.SetReadDeadline(began.Add(within))
	_, err := io.Copy(io.Discard, c)
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		t.Errorf("the connection still stands after %v", time.Since(began))
	}
}

// TestRefusedAtOnce sends the beginning of a body without a token. The answer waits for no more of it, and neither does the connection.
func TestRefusedAtOnce(t *testing.T) {
	s := servertest.New(t)
	base := s.TCP()
	s.Engine.AddToken("good", "alice")
	for name, test := range map[string]struct {
		path, header string
		want         int
	}{
		"no token":          {"/x", "Host: localhost\r\nContent-Length: 100000\r\n", 401},
		"chunked":           {"/x", "Host: localhost\r\nTransfer-Encoding: chunked\r\n", 401},
		"huge":              {versionPath, "Host: localhost\r\nContent-Length: 100000000\r\n", 401},
		"bad token":         {versionPath, "Host: localhost\r\nAuthorization: Bearer bad\r\nContent-Length: 1000\r\n", 401},
		"foreign host":      {versionPath, "Host: evil.lab\r\nContent-Length: 1000\r\n", 421},
		"health":            {"/healthz", "Host: localhost\r\nContent-Length: 1000\r\n", 204},
		"nowhere":           {"/x", "Host: localhost\r\nAuthorization: Bearer good\r\nContent-Length: 1000\r\n", 404},
		"no sandbox":        {"/v1/sandboxes/none/ports/80/", "Host: localhost\r\nAuthorization: Bearer good\r\nContent-Length: 1000\r\n", 404},
		"no body, no token": {"/x", "Host: localhost\r\n", 401},
	} {
		t.Run(name, func(t *testing.T) {
			body := "{"
			if strings.Contains(test.header, "chunked") {
				body = "ff\r\n{"
			} else if !strings.Contains(test.header, "Content-Length") {
				body = ""
			}
			began := time.Now()
			c := raw(t, base, "POST "+test.path+" HTTP/1.1\r\n"+test.header+"\r\n"+body)
			res, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil {
				t.Fatalf("no answer after %v: %v", time.Since(began), err)
			}
			if res.StatusCode != test.want || !res.Close {
				t.Errorf("%s, connection: close is %v; want %d and true", res.Status, res.Close, test.want)
			}
			ends(t, c, 5*time.Second)
		})
	}
}

// TestBodyTimeout cuts a call whose message does not come, and nothing that lasts for other reasons.
func TestBodyTimeout(t *testing.T) {
	const limit = 300 * time.Millisecond
	var slow atomic.Value // the name of a call
	s := servertest.New(t, func(o *server.Options) {
		o.BodyTimeout, o.IdleTimeout = limit, limit
		o.Engine.(*servertest.Engine).Fail = func(call string) error {
			if call == slow.Load() {
				time.Sleep(3 * limit)
			}
			return nil
		}
	})
	base := s.TCP()
	ctx := t.Context()
	alice := s.User(base, "alice")
	sb, err := alice.Create(ctx, warren.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{versionPath, warrenv1connect.SandboxServiceDeleteSandboxProcedure, warrenv1connect.SandboxServiceCreateSandboxProcedure} {
		contentType := "application/json"
		if path == warrenv1connect.SandboxServiceCreateSandboxProcedure {
			contentType = "application/connect+json"
		}
		c := raw(t, base, "POST "+path+" HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer token-of-alice\r\nContent-Type: "+contentType+"\r\nContent-Length: 1000\r\n\r\n{")
		ends(t, c, 5*time.Second)
	}

	t.Run("a long call", func(t *testing.T) {
		slow.Store("Get")
		res := do(t, "POST", base+warrenv1connect.SandboxServiceGetSandboxProcedure, "token-of-alice", `{"id":"`+string(sb.ID)+`"}`, "Content-Type", "application/json")
		if body := text(res); res.StatusCode != 200 {
			t.Errorf("%s %s", res.Status, body)
		}
	})
	t.Run("over HTTP/2", func(t *testing.T) {
		transport := &http.Transport{Protocols: new(http.Protocols)}
		transport.Protocols.SetUnencryptedHTTP2(true)
		defer transport.CloseIdleConnections()
		call := func(path string, body io.Reader) string {
			req, err := http.NewRequestWithContext(ctx, "POST", base+path, body)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer token-of-alice")
			req.Header.Set("Content-Type", "application/json")
			res, err := transport.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			return fmt.Sprint(res.ProtoMajor, " ", res.StatusCode, " ", text(res))
		}
		if got := call(warrenv1connect.SandboxServiceGetSandboxProcedure, strings.NewReader(`{"id":"`+string(sb.ID)+`"}`)); !strings.HasPrefix(got, "2 200 ") {
			t.Error(got)
		}
		r, w := io.Pipe()
		defer w.Close()
		began := time.Now()
		if got := call(versionPath, r); strings.HasPrefix(got, "2 200 ") || time.Since(began) > 5*time.Second {
			t.Errorf("a body that does not come, after %v: %s", time.Since(began), got)
		}
	})
	t.Run("a long answer", func(t *testing.T) {
		slow.Store("Create")
		if _, err := alice.Create(ctx, warren.Spec{}); err != nil {
			t.Error(err)
		}
	})
	slow.Store("")
	t.Run("a watch", func(t *testing.T) {
		// Its context ends when net/http takes the client for gone.
		res := do(t, "POST", base+warrenv1connect.SandboxServiceWatchEventsProcedure, "token-of-alice", "\x00\x00\x00\x00\x02{}", "Content-Type", "application/connect+json")
		end := make(chan string, 1)
		go func() { end <- text(res) }()
		select {
		case all := <-end:
			t.Errorf("the stream ended: %s %q", res.Status, all)
		case <-time.After(4 * limit):
		}
	})
	t.Run("an upload", func(t *testing.T) {
		r, w := io.Pipe()
		go func() {
			for range 6 {
				time.Sleep(limit / 2)
				w.Write(make([]byte, 256<<10))
			}
			w.Close()
		}()
		img, err := s.Client().ImportImage(ctx, "slow", r)
		if err != nil || img.Size != 6*256<<10 {
			t.Errorf("%+v, %v", img, err)
		}
		ur, uw := io.Pipe()
		go func() {
			for range 6 {
				time.Sleep(limit / 2)
				uw.Write([]byte("x"))
			}
			uw.Close()
		}()
		port := web(t, func(w http.ResponseWriter, r *http.Request) {
			b, err := io.ReadAll(r.Body)
			fmt.Fprint(w, len(b), err)
		})
		req, _ := http.NewRequestWithContext(ctx, "POST", fmt.Sprintf("%s/v1/sandboxes/%s/ports/%d/", base, sb.ID, port), ur)
		req.Header.Set("Authorization", "Bearer token-of-alice")
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if got := text(res); got != "6 <nil>" {
			t.Errorf("the sandbox got %s", got)
		}
	})
	t.Run("a command", func(t *testing.T) {
		cmd := sb.Command("sh", "-c", "cat; echo end")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(ctx); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * limit)
		io.WriteString(in, "late ")
		in.Close()
		b, err := io.ReadAll(out)
		if err != nil || string(b) != "late end\n" {
			t.Errorf("%q, %v", b, err)
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	t.Run("a raw connection", func(t *testing.T) {
		port := listen(t, func(c net.Conn) { io.Copy(c, c) })
		c, err := sb.Dial(ctx, port)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		time.Sleep(3 * limit)
		if _, err := io.WriteString(c, "late"); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 4)
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "late" {
			t.Errorf("%q, %v", b, err)
		}
	})
	t.Run("an idle connection", func(t *testing.T) {
		c := raw(t, base, "POST "+versionPath+" HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer token-of-alice\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
		ends(t, c, 5*time.Second)
	})
}

// TestConnLimits opens more connections than there may be. What is above the limit is closed at once, others go on, and the socket
// answers.
func TestConnLimits(t *testing.T) {
	s := servertest.New(t)
	s.Engine.AddToken("good", "alice")
	l, err := server.ListenTCP("127.0.0.1:0", server.TCPOptions{MaxConns: 8, MaxPending: 4})
	if err != nil {
		t.Fatal(err)
	}
	go s.Serve(l)
	base := "http://" + l.Addr().String()
	ask := "POST " + versionPath + " HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer good\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
	good := func(c net.Conn) error {
		c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := io.WriteString(c, ask); err != nil {
			return err
		}
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		io.Copy(io.Discard, res.Body)
		if res.StatusCode != 200 {
			return errors.New(res.Status)
		}
		return nil
	}
	var known, silent []net.Conn
	for range 4 {
		c := raw(t, base, "")
		if err := good(c); err != nil {
			t.Fatal(err)
		}
		known = append(known, c)
	}
	for range 4 {
		silent = append(silent, raw(t, base, "POST /x HTTP/1.1\r\nHost: loc"))
	}
	for range 20 {
		ends(t, raw(t, base, ""), 2*time.Second)
	}
	for i, c := range known {
		if err := good(c); err != nil {
			t.Errorf("connection %d, whose token was good: %v", i, err)
		}
	}
	if _, err := s.Client().Version(t.Context()); err != nil {
		t.Errorf("the socket: %v", err)
	}
	// In all there are eight, of which four may be silent.
	known[0].Close()
	time.Sleep(100 * time.Millisecond)
	ends(t, raw(t, base, ""), 2*time.Second)
	silent[0].Close()
	var late error
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		late = good(c)
		c.Close()
		if late == nil {
			break
		}
	}
	if late != nil {
		t.Errorf("after one has left: %v", late)
	}
}
