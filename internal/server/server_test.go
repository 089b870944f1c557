package server_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/server"
	"github.com/warren-sandbox/warren/internal/server/servertest"
	"github.com/warren-sandbox/warren/internal/testenv"
	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
	"github.com/warren-sandbox/warren/proto/warren/v1/warrenv1connect"
)

var _ server.Engine = (*engine.Engine)(nil)

const childEnv = "WARREN_SERVER_TEST_SOCKET"

func TestMain(m *testing.M) {
	if socket := os.Getenv(childEnv); socket != "" {
		os.Exit(asOtherUser(socket))
	}
	os.Exit(m.Run())
}

// asOtherUser is the part of TestUnixPeer that runs as another user. It prints the status of an answer.
func asOtherUser(socket string) int {
	c := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", socket) }}}
	res, err := c.Post("http://localhost"+warrenv1connect.SystemServiceGetVersionProcedure, "application/json", strings.NewReader("{}"))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Print(res.StatusCode)
	return 0
}

func TestUnixPeer(t *testing.T) {
	testenv.NeedsRoot(t)
	s := servertest.New(t)
	for _, test := range []struct {
		mode os.FileMode
		want string
	}{
		{0o600, "permission denied"},
		{0o666, "403"}, // whoever opens the socket all the same is asked who it is
	} {
		if err := os.Chmod(s.Socket, test.mode); err != nil {
			t.Fatal(err)
		}
		// The directories above must not be what stops it.
		for dir := filepath.Dir(s.Socket); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
			os.Chmod(dir, 0o755)
		}
		exe := filepath.Join(filepath.Dir(s.Socket), "child")
		data, err := os.ReadFile(os.Args[0])
		if err != nil {
			t.Fatal(err)
		}
		if err := testenv.WriteProgram(exe, data); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), childEnv+"="+s.Socket)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		out, _ := cmd.CombinedOutput()
		if !strings.Contains(string(out), test.want) {
			t.Errorf("socket with mode %v: another user gets %q; want %q", test.mode, out, test.want)
		}
	}
}

// post sends a JSON call.
func post(t *testing.T, url, token, body string, header ...string) *http.Response {
	t.Helper()
	return do(t, "POST", url, token, body, append([]string{"Content-Type", "application/json"}, header...)...)
}

func do(t *testing.T, method, url, token, body string, header ...string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		} else {
			req.Header.Add(header[i], header[i+1])
		}
	}
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	return res
}

func text(res *http.Response) string {
	b, _ := io.ReadAll(res.Body)
	return string(b)
}

// TestEveryRouteAuthenticates asks for all there is, and for what looks like it, without a token.
func TestEveryRouteAuthenticates(t *testing.T) {
	s := servertest.New(t, func(o *server.Options) { o.Metrics = http.NotFoundHandler() })
	base := s.TCP()
	sb := s.Sandbox(warren.Spec{})
	paths := []string{
		"/metrics", "/", "/v1", "/v1/sandboxes/", "//", "/v1//sandboxes/x", "/../v1/sandboxes/x", "/%2e%2e/metrics", "/METRICS", "/metrics/", "/metrics.", "/metrics;x", "/healthz/", "/healthz%2f", "//healthz",
		"/v1/sandboxes/" + string(sb.ID) + "/ports/49983/health", "/v1/sandboxes/" + string(sb.ID) + "/dial/22", "/v1/%73andboxes/x/ports/1/", "/v1/sandboxes/x/ports/1/..%2f..%2fhealthz", "/debug/pprof/",
	}
	services := warrenv1.File_warren_v1_warren_proto.Services()
	for i := range services.Len() {
		methods := services.Get(i).Methods()
		for j := range methods.Len() {
			paths = append(paths, "/"+string(services.Get(i).FullName())+"/"+string(methods.Get(j).Name()))
		}
	}
	if len(paths) < 45 {
		t.Fatalf("only %d paths: the contract has more calls", len(paths))
	}
	for _, path := range paths {
		for _, method := range []string{"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PROPFIND"} {
			for _, contentType := range []string{"", "application/json", "application/proto"} {
				res := do(t, method, base+path, "", "{}", "Content-Type", contentType)
				if res.StatusCode != http.StatusUnauthorized {
					t.Errorf("%s %s (%s) without a token: %s", method, path, contentType, res.Status)
				}
				res.Body.Close()
			}
		}
		// Protocols that put their errors elsewhere.
		for _, contentType := range []string{"application/connect+json", "application/grpc"} {
			res := do(t, "POST", base+path, "", "", "Content-Type", contentType)
			body := text(res)
			if res.Header.Get("Warren-Error") != "denied" || !strings.Contains(body+res.Header.Get("Grpc-Status")+res.Trailer.Get("Grpc-Status"), "unauthenticated") && res.Header.Get("Grpc-Status")+res.Trailer.Get("Grpc-Status") != "16" {
				t.Errorf("%s as %s without a token: %s %v %q", path, contentType, res.Status, res.Header, body)
			}
		}
		if res := do(t, "GET", base+path, "not-a-token", ""); res.StatusCode != http.StatusUnauthorized && res.StatusCode != http.StatusTooManyRequests {
			t.Errorf("%s with a bad token: %s", path, res.Status)
		}
	}
	// One that is no path, which net/http would answer by itself.
	for _, header := range []string{"", "Origin: https://evil.lab\r\nAccess-Control-Request-Method: POST\r\n"} {
		c, err := net.Dial("tcp", strings.TrimPrefix(base, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "OPTIONS * HTTP/1.1\r\nHost: localhost\r\n%s\r\n", header)
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || res.StatusCode != 401 && header == "" || res.StatusCode != 403 && header != "" {
			t.Errorf("OPTIONS * with %q: %v, %v", header, res, err)
		}
	}
	if res := do(t, "GET", base+"/healthz", "", ""); res.StatusCode != http.StatusNoContent {
		t.Errorf("/healthz: %s", res.Status)
	}
}

// TestMetricsForOperator keeps what is counted of all users from each of them.
func TestMetricsForOperator(t *testing.T) {
	s := servertest.New(t, func(o *server.Options) {
		o.Metrics = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "counters") })
	})
	base := s.TCP()
	s.Engine.AddToken("good", "alice")
	res := do(t, "GET", base+"/metrics", "good", "")
	if body := text(res); res.StatusCode != 403 || strings.Contains(body, "counters") {
		t.Errorf("a user gets %s %s", res.Status, body)
	}
	c := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", s.Socket) }}}
	defer c.CloseIdleConnections()
	res, err := c.Get("http://localhost/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if body := text(res); res.StatusCode != 200 || body != "counters" {
		t.Errorf("the operator gets %s %s", res.Status, body)
	}
}

func TestHostAndOrigin(t *testing.T) {
	s := servertest.New(t, func(o *server.Options) {
		o.AllowedHosts = []string{"warren.example.com"}
		o.AllowedOrigins = []string{"https://console.example.com"}
	})
	base := s.TCP()
	s.Engine.AddToken("good", "alice")
	for _, test := range []struct {
		header []string
		want   int
	}{
		{nil, 200},
		{[]string{"Host", "localhost"}, 200},
		{[]string{"Host", "LocalHost:1234"}, 200},
		{[]string{"Host", "127.0.0.1:80"}, 200},
		{[]string{"Host", "[::1]:80"}, 200},
		{[]string{"Host", "warren.example.com"}, 200},
		{[]string{"Host", "rebind.evil.lab"}, 421},
		{[]string{"Host", "localhost.evil.lab"}, 421},
		{[]string{"Host", "localhost."}, 421},
		{[]string{"Host", "evil.warren.example.com"}, 421},
		{[]string{"Host", "10.0.0.1"}, 421},
		{[]string{"Host", "2130706433"}, 421},
		{[]string{"Host", "localhost:80:80"}, 421},
		{[]string{"Origin", "https://console.example.com"}, 200},
		{[]string{"Origin", "https://console.example.com", "Origin", "https://evil.lab"}, 403},
		{[]string{"Origin", "https://evil.lab"}, 403},
		{[]string{"Origin", "http://localhost"}, 403},
		{[]string{"Origin", "null"}, 403},
		{[]string{"Origin", ""}, 403},
		{[]string{"Sec-Fetch-Site", "cross-site"}, 403},
		{[]string{"Sec-Fetch-Site", "none"}, 200},
	} {
		// Before authentication: a good token changes nothing, and a bad one neither.
		for _, token := range []string{"good", ""} {
			want := test.want
			if token == "" && want == 200 {
				want = 401
			}
			res := post(t, base+warrenv1connect.SystemServiceGetVersionProcedure, token, "{}", test.header...)
			if res.StatusCode != want {
				t.Errorf("%q with token %q: %s; want %d", test.header, token, res.Status, want)
			}
		}
	}
	for _, origin := range []string{"https://console.example.com", "https://evil.lab"} {
		res := do(t, "OPTIONS", base+"/v1/sandboxes/x/ports/80/", "", "", "Origin", origin, "Access-Control-Request-Method", "POST", "Access-Control-Request-Private-Network", "true")
		if res.StatusCode != 403 || res.Header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("preflight from %s: %s %v", origin, res.Status, res.Header)
		}
	}
	if _, err := server.New(server.Options{Engine: s.Engine, AllowedOrigins: []string{"*"}}); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("an origin of *: %v", err)
	}
	if _, err := server.New(server.Options{Engine: s.Engine, AllowedHosts: []string{"*.example.com"}}); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("a host with *: %v", err)
	}
}

func TestBruteForce(t *testing.T) {
	s := servertest.New(t)
	base := s.TCP() + warrenv1connect.SystemServiceGetVersionProcedure
	s.Engine.AddToken("good", "alice")
	for range 50 {
		if res := post(t, base, "good", "{}"); res.StatusCode != 200 {
			t.Fatalf("good tokens are counted: %s", res.Status)
		}
	}
	for i := range 20 {
		if res := post(t, base, fmt.Sprint("bad", i), "{}"); res.StatusCode != 401 {
			t.Fatalf("try %d: %s", i, res.Status)
		}
	}
	res := post(t, base, "bad", "{}")
	if res.StatusCode != 429 || res.Header.Get("Retry-After") == "" {
		t.Errorf("after 20 bad tokens: %s, Retry-After %q", res.Status, res.Header.Get("Retry-After"))
	}
	// Others have good tokens at the same address.
	if res := post(t, base, "good", "{}"); res.StatusCode != 200 {
		t.Errorf("a good token after 20 bad ones: %s", res.Status)
	}
	// The socket has nothing to do with it.
	if _, err := s.Client().Version(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestRevokedTokenCutsStreams(t *testing.T) {
	s := servertest.New(t)
	url := s.TCP()
	ctx := t.Context()
	id, value, err := s.Client().CreateToken(ctx, warren.TokenSpec{User: "alice"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := warren.Connect(ctx, warren.Options{URL: url, Token: value, RetryFor: -1})
	if err != nil {
		t.Fatal(err)
	}
	sb, err := c.Create(ctx, warren.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	l := listen(t, func(c net.Conn) { io.Copy(io.Discard, c) })
	conn, err := sb.Dial(ctx, l)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	cmd := sb.Command("sh", "-c", "echo ready; read x")
	in, _ := cmd.StdinPipe()
	defer in.Close()
	out, _ := cmd.StdoutPipe()
	if err := cmd.Start(ctx); err != nil {
		t.Fatal(err)
	}
	io.ReadFull(out, make([]byte, 6))
	began := time.Now()
	if err := s.Client().DeleteToken(ctx, id); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the raw connection goes on")
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the command's stream goes on")
	}
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("cut after %v", d)
	}
}

// listen serves each connection on loopback and returns the port.
func listen(t *testing.T, serve func(net.Conn)) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c)
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

// web serves HTTP on loopback and returns the port.
func web(t *testing.T, h http.HandlerFunc) int {
	t.Helper()
	w := httptest.NewServer(h)
	t.Cleanup(w.Close)
	return w.Listener.Addr().(*net.TCPAddr).Port
}

func TestProxyHeaders(t *testing.T) {
	s := servertest.New(t)
	base := s.TCP()
	s.Engine.AddToken("secret-token", "alice")
	sb, err := s.User(base, "alice").Create(t.Context(), warren.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var got *http.Request
	var gotURI string
	port := web(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		got, gotURI = r.Clone(context.Background()), r.RequestURI
		mu.Unlock()
		for _, h := range []string{"Set-Cookie", "Strict-Transport-Security", "Clear-Site-Data", "Service-Worker-Allowed", "Alt-Svc", "Refresh", "Link", "Access-Control-Allow-Origin", "Access-Control-Allow-Credentials", "Www-Authenticate", "Warren-Error", "Content-Security-Policy"} {
			w.Header().Set(h, "from the sandbox")
		}
		w.Header().Set("X-Fine", "yes")
		w.Header().Set("Content-Type", "text/html")
		w.WriteHeader(http.StatusEarlyHints)
		io.WriteString(w, "hi")
	})
	url := fmt.Sprintf("%s/v1/sandboxes/%s/ports/%d", base, sb.ID, port)
	res := do(t, "GET", url+"/x?q=1;2&%zz", "secret-token", "", "Cookie", "a=b", "X-Api-Key", "k", "X-Forwarded-For", "1.2.3.4", "X-Forwarded-Anything", "x", "Forwarded", "for=x",
		"Proxy-Authorization", "Basic x", "Warren-User", "root", "Warren-Anything", "x", "X-Access-Token", "t", "X-Warren-Token", "secret-token", "X-Real-Ip", "1.2.3.4", "X-Mine", "yes", "Referer", base)
	body := text(res)
	mu.Lock()
	defer mu.Unlock()
	for name, v := range got.Header {
		switch name {
		case "X-Mine", "User-Agent", "Accept-Encoding":
		default:
			t.Errorf("the sandbox sees %s: %q", name, v)
		}
	}
	dump, _ := json.Marshal(got.Header)
	if bytes.Contains(dump, []byte("secret-token")) {
		t.Error("the sandbox sees the token")
	}
	if got.Header.Get("X-Mine") != "yes" || gotURI != "/x?q=1;2&%zz" || got.Host != fmt.Sprintf("localhost:%d", port) {
		t.Errorf("the sandbox got %s %s %v", got.Host, gotURI, got.Header)
	}
	if body != "hi" || res.Header.Get("X-Fine") != "yes" {
		t.Errorf("answer: %q %v", body, res.Header)
	}
	for name, v := range res.Header {
		if strings.Contains(strings.Join(v, " "), "from the sandbox") {
			t.Errorf("the caller sees %s: %q", name, v)
		}
	}
	if res.Header.Get("Content-Security-Policy") != "sandbox" || res.Header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("answer without protection: %v", res.Header)
	}
}

func TestProxyPaths(t *testing.T) {
	s := servertest.New(t)
	base := s.TCP()
	s.Engine.AddToken("good", "alice")
	sb, err := s.User(base, "alice").Create(t.Context(), warren.Spec{Name: "named"})
	if err != nil {
		t.Fatal(err)
	}
	port := web(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.Method+" "+r.RequestURI) })
	for _, path := range []string{"", "/", "/a%2fb", "//double//slash", "/a/../b/./c", "/..%2f..", "/%2e%2e/x", "/sp%20ace?x=a+b&y=%26", "/?", "/a;b=c", "/%C3%BC"} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(base, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "GET /v1/sandboxes/named/ports/%d%s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer good\r\nConnection: close\r\n\r\n", port, path)
		s.Engine.AddToken("good", "alice")
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		want := "GET " + path
		if path == "" {
			want = "GET /"
		}
		if got := text(res); got != want {
			t.Errorf("%q arrives as %q", path, got)
		}
		conn.Close()
	}
	ports := "/v1/sandboxes/" + string(sb.ID) + "/ports/"
	for _, test := range []struct {
		path string
		want int
		kind string
	}{
		{ports + "0/", 400, "invalid"},
		{ports + "65536/", 400, "invalid"},
		{ports + "+80/", 400, "invalid"},
		{ports + "080/", 400, "invalid"},
		{ports + "x/", 400, "invalid"},
		{ports + fmt.Sprint(closedPort(t)) + "/", 502, "unavailable"},
		{"/v1/sandboxes/" + string(sb.ID) + "/", 404, "not_found"},
		{"/v1/sandboxes/" + string(sb.ID) + "/other/80/", 404, "not_found"},
		{"/v1/sandboxes//ports/80/", 400, "invalid"},
		{"/v1/sandboxes/..%2fx/ports/80/", 400, "invalid"},
		{"/v1/sandboxes/UPPER/ports/80/", 400, "invalid"},
		{"/v1/sandboxes/unknown/ports/80/", 404, "not_found"},
		{"/v1/sandboxes/" + string(sb.ID) + "/dial/80", 426, "invalid"},
		{"/v1/sandboxes/" + string(sb.ID) + "/dial/49983", 403, "denied"},
		{ports + "49983/health", 204, ""},
		{ports + "49983/init", 403, "denied"},
		{ports + "49983/%69nit", 403, "denied"},
		{ports + "49983//init", 403, "denied"},
		{ports + "49983/files/../init", 403, "denied"},
		{ports + "49983/warren/channel", 403, "denied"},
		{ports + "49983/freeze", 403, "denied"},
		{ports + "49983/unfreeze", 403, "denied"},
		{ports + "49983/", 403, "denied"},
	} {
		res := do(t, "GET", base+test.path, "good", "")
		body := text(res)
		if res.StatusCode != test.want || res.Header.Get("Warren-Error") != test.kind {
			t.Errorf("%s: %s, kind %q: %s", test.path, res.Status, res.Header.Get("Warren-Error"), body)
		}
		if test.kind != "" && !json.Valid([]byte(body)) {
			t.Errorf("%s: %q is not JSON", test.path, body)
		}
	}
}

func closedPort(t *testing.T) int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// TestProxyDrained ends the server while a sandbox has yet to answer: its client has given nothing up, and is told to come back.
func TestProxyDrained(t *testing.T) {
	s := servertest.New(t)
	base := s.TCP()
	s.Engine.AddToken("secret-token", "alice")
	sb, err := s.User(base, "alice").Create(t.Context(), warren.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	arrived := make(chan struct{})
	port := web(t, func(_ http.ResponseWriter, r *http.Request) {
		close(arrived)
		<-r.Context().Done()
	})
	go func() {
		<-arrived
		s.Stop()
	}()
	req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("%s/v1/sandboxes/%s/ports/%d/", base, sb.ID, port), nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer secret-token")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, _ := io.ReadAll(res.Body)
	if res.StatusCode != http.StatusBadGateway || !strings.Contains(string(body), "unavailable") || !strings.Contains(string(body), "the server is stopping") {
		t.Errorf("%d %s", res.StatusCode, body)
	}
}

// TestProxyUpgrade carries an upgraded protocol, as WebSocket is, in both directions.
func TestProxyUpgrade(t *testing.T) {
	s := servertest.New(t)
	sb := s.Sandbox(warren.Spec{})
	port := listen(t, func(c net.Conn) {
		r := bufio.NewReader(c)
		req, err := http.ReadRequest(r)
		if err != nil || !strings.EqualFold(req.Header.Get("Upgrade"), "websocket") {
			return
		}
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSet-Cookie: a=b\r\n\r\nwelcome")
		io.Copy(c, r)
	})
	conn, err := net.Dial("unix", s.Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET /v1/sandboxes/%s/ports/%d/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", sb.ID, port)
	r := bufio.NewReader(conn)
	res, err := http.ReadResponse(r, nil)
	if err != nil || res.StatusCode != 101 || res.Header.Get("Set-Cookie") != "" {
		t.Fatalf("%v, %v", res, err)
	}
	io.WriteString(conn, "ping")
	buf := make([]byte, len("welcomeping"))
	if _, err := io.ReadFull(r, buf); err != nil || string(buf) != "welcomeping" {
		t.Errorf("read %q, %v", buf, err)
	}
}

// TestProxyStreams answers while the request still comes, and is cut, not ended, when the sandbox dies.
func TestProxyStreams(t *testing.T) {
	s := servertest.New(t)
	sb := s.Sandbox(warren.Spec{})
	port := web(t, func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		rc.EnableFullDuplex()
		b := bufio.NewReader(r.Body)
		for {
			line, err := b.ReadString('\n')
			if err != nil {
				return
			}
			io.WriteString(w, "echo "+line)
			rc.Flush()
		}
	})
	client := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", s.Socket) }}}
	pr, pw := io.Pipe()
	req, _ := http.NewRequestWithContext(t.Context(), "POST", fmt.Sprintf("http://localhost/v1/sandboxes/%s/ports/%d/", sb.ID, port), pr)
	go io.WriteString(pw, "one\n")
	res, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(res.Body)
	for _, word := range []string{"one", "two", "three"} {
		if line, err := r.ReadString('\n'); err != nil || line != "echo "+word+"\n" {
			t.Fatalf("%q, %v", line, err)
		}
		if word != "three" {
			go io.WriteString(pw, map[string]string{"one": "two\n", "two": "three\n"}[word])
		}
	}
	if s.Engine.Held(sb.ID) != 1 {
		t.Errorf("the sandbox is held %d times during a request", s.Engine.Held(sb.ID))
	}
	s.Engine.Kill(sb.ID)
	if _, err := r.ReadByte(); err == nil || err == io.EOF {
		t.Errorf("when the sandbox dies the answer ends with %v; want a broken connection", err)
	}
	for deadline := time.Now().Add(5 * time.Second); s.Engine.Held(sb.ID) != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the use of the sandbox does not end")
		}
	}
}

// TestProxyPools asks two sandboxes and the same one twice, and counts connections.
func TestProxyPools(t *testing.T) {
	s := servertest.New(t)
	a, b := s.Sandbox(warren.Spec{}), s.Sandbox(warren.Spec{})
	for _, sb := range []*warren.Sandbox{a, b, a, b} {
		if _, err := sb.FS().Stat("tmp"); err != nil {
			t.Fatal(err)
		}
	}
	if s.Engine.Dials != 2 {
		t.Errorf("%d connections for two sandboxes; want one each", s.Engine.Dials)
	}
	for range 10 {
		if err := a.Command("true").Run(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// The end of one command's stream and the start of the next may cross, so that there are some more.
	if s.Engine.Dials > 9 {
		t.Errorf("%d connections after ten commands in a row", s.Engine.Dials)
	}
	if err := a.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := a.FS().Stat("tmp"); err != nil {
		t.Errorf("after a restart: %v", err)
	}
}

func TestDial(t *testing.T) {
	s := servertest.New(t)
	url := s.TCP()
	for _, c := range []*warren.Client{s.Client(), s.User(url, "alice")} {
		sb, err := c.Create(t.Context(), warren.Spec{})
		if err != nil {
			t.Fatal(err)
		}
		// The whole of what comes, then an answer: the half-close has to get through.
		port := listen(t, func(c net.Conn) {
			b, _ := io.ReadAll(c)
			fmt.Fprintf(c, "%d bytes", len(b))
		})
		conn, err := sb.Dial(t.Context(), port)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(bytes.Repeat([]byte("x"), 1<<20)); err != nil {
			t.Fatal(err)
		}
		if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(conn); err != nil || string(b) != "1048576 bytes" {
			t.Errorf("read %q, %v", b, err)
		}
		conn.Close()
		if _, err := sb.Dial(t.Context(), closedPort(t)); !errors.Is(err, warren.ErrUnavailable) {
			t.Errorf("closed port: %v", err)
		}
		if _, err := sb.Dial(t.Context(), warren.GuestPort); !errors.Is(err, warren.ErrDenied) {
			t.Errorf("the guest's port: %v", err)
		}
		if _, err := sb.Dial(t.Context(), 70_000); !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("port 70000: %v", err)
		}
		if _, err := c.Ref("unknown").Dial(t.Context(), 80); !errors.Is(err, warren.ErrNotFound) {
			t.Errorf("unknown sandbox: %v", err)
		}
	}
}

// TestTLS goes the ways of TCP with TLS: HTTP/2, and HTTP/1.1 for raw bytes.
func TestTLS(t *testing.T) {
	s := servertest.New(t)
	cert, key, pool := selfSigned(t)
	l, err := server.ListenTCP("127.0.0.1:0", server.TCPOptions{CertFile: cert, KeyFile: key})
	if err != nil {
		t.Fatal(err)
	}
	go s.Serve(l)
	s.Engine.AddToken("good", "alice")
	url := "https://" + l.Addr().String()
	if _, err := warren.Connect(t.Context(), warren.Options{URL: url, Token: "good"}); !errors.Is(err, warren.ErrUnavailable) {
		t.Errorf("a certificate that nobody vouches for: %v", err)
	}
	c, err := warren.Connect(t.Context(), warren.Options{URL: url, Token: "good", TLS: &tls.Config{RootCAs: pool}})
	if err != nil {
		t.Fatal(err)
	}
	sb, err := c.Create(t.Context(), warren.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	cmd := sb.Command("cat")
	cmd.Stdin = bytes.NewReader(make([]byte, 1<<20))
	if out, err := cmd.Output(t.Context()); err != nil || len(out) != 1<<20 {
		t.Errorf("cat: %d bytes, %v", len(out), err)
	}
	port := listen(t, func(c net.Conn) {
		b, _ := io.ReadAll(c)
		fmt.Fprintf(c, "%d bytes", len(b))
	})
	conn, err := sb.Dial(t.Context(), port)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "hello")
	if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(conn); err != nil || string(b) != "5 bytes" {
		t.Errorf("read %q, %v", b, err)
	}
	// Dies in the middle: the stream is cut, over HTTP/2 too.
	cmd = sb.Command("sh", "-c", "echo ready; read x")
	in, _ := cmd.StdinPipe()
	defer in.Close()
	out, _ := cmd.StdoutPipe()
	if err := cmd.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	io.ReadFull(out, make([]byte, 6))
	s.Engine.Kill(sb.ID)
	if err := cmd.Wait(); !errors.Is(err, warren.ErrState) {
		t.Errorf("Wait: %v", err)
	}
}

// selfSigned writes a certificate for 127.0.0.1.
func selfSigned(t *testing.T) (cert, key string, pool *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	pool = x509.NewCertPool()
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	pool.AppendCertsFromPEM(certPEM)
	os.WriteFile(cert, certPEM, 0o600)
	os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}), 0o600)
	return cert, key, pool
}

// TestBadJSON sends what a strict reader refuses.
func TestBadJSON(t *testing.T) {
	s := servertest.New(t)
	base := s.TCP()
	s.Engine.AddToken("good", "alice")
	for name, body := range map[string]string{
		"unknown field": `{"id":"x","nope":1}`,
		"twice":         `{"id":"x","id":"y"}`,
		"wrong type":    `{"id":7}`,
		"not JSON":      `id=x`,
		"empty":         ``,
		"two values":    `{} {}`,
		"deep":          `{"id":` + strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000) + `}`,
		"not UTF-8":     "{\"id\":\"\xff\"}",
	} {
		if res := post(t, base+warrenv1connect.SandboxServiceGetSandboxProcedure, "good", body); res.StatusCode != 400 {
			t.Errorf("%s: %s %s", name, res.Status, text(res))
		}
	}
	if res := post(t, base+warrenv1connect.SandboxServiceGetSandboxProcedure, "good", `{"id":"`+strings.Repeat("x", 5<<20)+`"}`); res.StatusCode != 429 {
		t.Errorf("5 MiB: %s", res.Status)
	}
	if res := post(t, base+warrenv1connect.SandboxServiceUpdateSandboxProcedure, "good", `{"id":"x","ttl":"1e999s"}`); res.StatusCode != 400 {
		t.Errorf("1e999: %s", res.Status)
	}
	for name, body := range map[string]string{"negative": `{"id":"x","ttl":"-5s"}`, "long": `{"id":"x","idleTimeout":"315576000000s"}`} {
		if res := post(t, base+warrenv1connect.SandboxServiceUpdateSandboxProcedure, "good", body); res.StatusCode != 400 {
			t.Errorf("%s duration: %s", name, res.Status)
		}
	}
}

// TestGRPC speaks gRPC, over HTTP/2 without TLS.
func TestGRPC(t *testing.T) {
	s := servertest.New(t)
	base := s.TCP()
	s.Engine.AddToken("good", "alice")
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	h2 := &http.Client{Transport: &http.Transport{Protocols: &protocols}}
	c := warrenv1connect.NewSandboxServiceClient(h2, base, connect.WithGRPC())
	req := connect.NewRequest(&warrenv1.GetSandboxRequest{Id: "unknown"})
	if _, err := c.GetSandbox(t.Context(), req); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("without a token: %v", err)
	}
	req.Header().Set("Authorization", "Bearer good")
	if _, err := c.GetSandbox(t.Context(), req); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("unknown id: %v", err)
	}
}

// TestLogs looks for secrets and for lines that are not one line.
func TestLogs(t *testing.T) {
	var mu sync.Mutex
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(writerFunc(func(b []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return out.Write(b)
	}), nil))
	s := servertest.New(t, func(o *server.Options) { o.Logger = log })
	base := s.TCP()
	s.Engine.AddToken("secret-token", "alice")
	do(t, "GET", base+"/v1/sandboxes/x/ports/80/%0a%1b[31mevil?signature=secret-signature", "secret-token", "", "Cookie", "secret-cookie")
	post(t, base+warrenv1connect.SandboxServiceGetSandboxProcedure, "secret-token", "{\"id\":\"a\\u001b[31m\\nb\"}")
	post(t, base+warrenv1connect.SandboxServiceGetSandboxProcedure, "secret-bad-token", "{}")
	s.Stop()
	mu.Lock()
	defer mu.Unlock()
	if strings.Contains(out.String(), "secret-") {
		t.Errorf("the log holds a secret:\n%s", out.String())
	}
	if strings.ContainsAny(out.String(), "\x1b") || strings.Count(out.String(), "msg=request") != 3 || strings.Count(out.String(), "\n") != 3 {
		t.Errorf("want 3 lines, one a request:\n%s", out.String())
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestPanicsAndInternalErrors(t *testing.T) {
	var mu sync.Mutex
	var out bytes.Buffer
	s := servertest.New(t, func(o *server.Options) {
		o.HidePaths = []string{"/var/lib/warren"}
		o.Logger = slog.New(slog.NewJSONHandler(writerFunc(func(b []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return out.Write(b)
		}), nil))
	})
	c := s.User(s.TCP(), "alice")
	var fail error
	s.Engine.Fail = func(call string) error {
		if call == "Authenticate" {
			return nil
		}
		if fail == nil {
			panic("told to")
		}
		return fail
	}
	for _, test := range []struct {
		err  error
		kind string
	}{
		{nil, "internal"},
		{errors.New("disk /dev/sda1 is odd"), "internal"},
		{&os.PathError{Op: "open", Path: "/dev/sda1", Err: syscall.ENOENT}, "internal"},
		{fmt.Errorf("write: %w: %w", &os.PathError{Op: "write", Path: "/dev/sda1/x", Err: syscall.ENOSPC}, warren.ErrExhausted), "exhausted"},
		{fmt.Errorf("see /var/lib/warren/dev/sda1: %w", warren.ErrState), "state"},
	} {
		fail = test.err
		calls := map[string]func() error{
			"unary":  func() error { _, err := c.Sandbox(t.Context(), "x"); return err },
			"stream": func() error { _, err := c.Create(t.Context(), warren.Spec{}); return err },
			"proxy":  func() error { _, err := c.Ref("x").FS().ReadFile("x"); return err },
		}
		for name, call := range calls {
			err := call()
			var e *warren.Error
			if !errors.As(err, &e) || e.Kind != test.kind || strings.Contains(err.Error(), "sda1") || strings.Contains(err.Error(), "told to") {
				t.Errorf("%s, %v: the caller sees %v", name, test.err, err)
				continue
			}
			_, reference, _ := strings.Cut(err.Error(), "(reference ")
			reference, _, _ = strings.Cut(reference, ")")
			mu.Lock()
			if test.err != nil && (len(reference) != 12 || !strings.Contains(out.String(), reference)) {
				t.Errorf("%s, %v: reference %q is not in the log", name, test.err, reference)
			}
			mu.Unlock()
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if !strings.Contains(out.String(), "sda1") || !strings.Contains(out.String(), "told to") {
		t.Error("the log does not hold the details")
	}
}

func TestConcurrencyLimit(t *testing.T) {
	s := servertest.New(t, func(o *server.Options) { o.MaxRequests = 2 })
	url := s.TCP()
	c := s.User(url, "alice")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	sb, err := c.Create(ctx, warren.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan bool, 2)
	for range 2 {
		wg.Go(func() {
			for range c.Events(ctx, warren.EventOptions{Sandbox: string(sb.ID)}) {
				started <- true
			}
		})
	}
	<-started
	<-started
	if _, err := c.Sandbox(t.Context(), string(sb.ID)); !errors.Is(err, warren.ErrExhausted) {
		t.Errorf("a third request: %v", err)
	}
	if _, err := s.User(url, "bob").Version(t.Context()); err != nil {
		t.Errorf("another user: %v", err)
	}
}

func TestHeartbeat(t *testing.T) {
	s := servertest.New(t, func(o *server.Options) { o.Heartbeat = 5 * time.Millisecond })
	release := make(chan struct{})
	s.Engine.Fail = func(call string) error {
		if call == "Create" {
			<-release
		}
		return nil
	}
	n := 0
	_, err := s.Client().Create(t.Context(), warren.Spec{Progress: func(p warren.Progress) {
		if p.Step == "create" {
			if n++; n == 4 {
				close(release)
			}
		}
	}})
	if err != nil || n < 4 {
		t.Errorf("%d signs of life, %v", n, err)
	}
}

func TestListen(t *testing.T) {
	s := servertest.New(t)
	for _, test := range []struct {
		address string
		o       server.TCPOptions
		want    error
	}{
		{"0.0.0.0:0", server.TCPOptions{}, warren.ErrInvalid},
		{":0", server.TCPOptions{}, warren.ErrInvalid},
		{"[::]:0", server.TCPOptions{}, warren.ErrInvalid},
		{"192.0.2.1:0", server.TCPOptions{}, warren.ErrInvalid},
		{"nonsense", server.TCPOptions{}, warren.ErrInvalid},
		{"127.0.0.1:0", server.TCPOptions{CertFile: "x"}, warren.ErrInvalid},
		{"127.0.0.1:0", server.TCPOptions{CertFile: "/no/x", KeyFile: "/no/y"}, os.ErrNotExist},
		{"127.0.0.1:0", server.TCPOptions{}, nil},
		{"0.0.0.0:0", server.TCPOptions{Plaintext: true}, nil},
	} {
		l, err := server.ListenTCP(test.address, test.o)
		if !errors.Is(err, test.want) || (err == nil) != (test.want == nil) {
			t.Errorf("ListenTCP(%q, %+v): %v; want %v", test.address, test.o, err, test.want)
		}
		if l != nil {
			l.Close()
		}
	}
	if _, err := s.ListenUnix(s.Socket); !errors.Is(err, warren.ErrExists) {
		t.Errorf("a second server on a socket: %v", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	os.WriteFile(file, nil, 0o600)
	if _, err := s.ListenUnix(file); !errors.Is(err, warren.ErrExists) {
		t.Errorf("in place of a file: %v", err)
	}
	// What a killed server leaves.
	stale := filepath.Join(t.TempDir(), "stale.sock")
	old, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	old.SetUnlinkOnClose(false)
	old.Close()
	l, err := s.ListenUnix(stale)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if info, err := os.Stat(stale); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the socket has mode %v, %v", info.Mode(), err)
	}
}

// TestSilentGuest calls a guest that takes connections and nothing else, as one that was stopped does.
func TestSilentGuest(t *testing.T) {
	s := servertest.New(t, func(o *server.Options) { o.GuestWait = 100 * time.Millisecond })
	sb := s.Sandbox(warren.Spec{Name: "ice"})
	s.Engine.Freeze()
	began := time.Now()
	for name, call := range map[string]func() error{
		"list":    func() error { _, err := sb.Processes(t.Context(), false); return err },
		"command": func() error { return sb.Command("true").Run(t.Context()) },
		"attach":  func() error { _, err := sb.Attach(t.Context(), warren.AttachOptions{PID: 7}); return err },
		"stat":    func() error { _, err := sb.FS().Stat("tmp"); return err },
	} {
		t.Run(name, func(t *testing.T) {
			err := call()
			if !errors.Is(err, warren.ErrUnavailable) || !strings.Contains(err.Error(), "does not answer") || !strings.Contains(err.Error(), "`warren restart ") {
				t.Errorf("got %v", err)
			}
		})
	}
	client := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", s.Socket) }}}
	res, err := client.Post(fmt.Sprintf("http://localhost/v1/sandboxes/%s/ports/%d/files?path=/tmp/x", sb.ID, warren.GuestPort), "application/octet-stream", strings.NewReader(strings.Repeat("x", 8<<20)))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if body := text(res); res.StatusCode != http.StatusGatewayTimeout || !strings.Contains(body, "does not answer") {
		t.Errorf("upload: %s %s", res.Status, body)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("it took %v to give up", took)
	}
	if !s.Engine.Silent(sb.ID) || s.Engine.Held(sb.ID) != 0 {
		t.Errorf("silent %v, held %d times", s.Engine.Silent(sb.ID), s.Engine.Held(sb.ID))
	}
}

// TestPatience makes calls that last longer than a guest is waited for, of a guest that is there.
func TestPatience(t *testing.T) {
	const wait = 20 * time.Millisecond
	s := servertest.New(t, func(o *server.Options) { o.GuestWait = wait })
	sb := s.Sandbox(warren.Spec{})
	// A process that takes its input late.
	cmd := sb.Command("sh", "-c", "sleep 0.5; wc -c")
	cmd.Stdin = bytes.NewReader(make([]byte, 1<<20))
	if out, err := cmd.Output(t.Context()); err != nil || strings.TrimSpace(string(out)) != "1048576" {
		t.Errorf("late input: %q, %v", out, err)
	}
	// A client that sends slowly.
	pr, pw := io.Pipe()
	go func() {
		for range 10 {
			time.Sleep(3 * wait)
			io.WriteString(pw, "x")
		}
		pw.Close()
	}()
	file := filepath.Join(t.TempDir(), "slow")
	client := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", s.Socket) }}}
	res, err := client.Post(fmt.Sprintf("http://localhost/v1/sandboxes/%s/ports/%d/files?path=%s", sb.ID, warren.GuestPort, file), "application/octet-stream", pr)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if b, _ := os.ReadFile(file); res.StatusCode != http.StatusOK || len(b) != 10 {
		t.Errorf("slow upload: %s, %d bytes", res.Status, len(b))
	}
	if s.Engine.Silent(sb.ID) {
		t.Error("the guest counts as silent")
	}
}
