//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// TestDoors tries the doors of a daemon as those do who are not to come in: its API over TCP and over its socket, its previews, its files and its
// records, with real sandboxes of two users behind. Each case of section E of the project's list runs in each state that a daemon and its sandboxes
// come into, with tries that must come right beside those that must be refused, so that none is refused for another reason than its case's. With WARREN_SOAK there are two states more: after
// a kill of the gateway, and in forks.
//
// What does not depend on a state is in TestDoorsAtStart, and what takes a daemon of its own.
func TestDoors(t *testing.T) {
	d := newDoors(t)
	table := &doorTable{}
	states := []doorState{
		{"fresh", func() {}},
		{"daemon killed", d.killUnderWay},
		{"resumed", d.pauseAndResume},
		{"reloaded", func() {
			d.h.policy("doors", fmt.Sprintf(doorPolicy, d.web)+"  - {name: one more, host: more.lab}\n")
			d.waitRecord("policy.change")
		}},
	}
	if testenv.Soak() {
		states = append(states, doorState{"gateway killed", func() { d.h.killGateway(); d.fetch("/back") }}, doorState{"forked", d.fork})
	}
	for _, s := range states {
		t.Run(s.name, func(t *testing.T) {
			d.h.t, d.t, d.state = t, t, d.state+1
			d.lab.t = t
			s.enter()
			for i, c := range doorCases {
				t.Run(c.id, func(t *testing.T) {
					p := &probe{doors: d, t: t, source: fmt.Sprintf("127.%d.%d.1", 10+d.state, i+1)}
					c.run(p)
					if p.tries == 0 || p.controls == 0 {
						t.Errorf("%d tries and %d that have to come right", p.tries, p.controls)
					}
					table.add(c.id, s.name, p)
				})
			}
		})
	}
	d.h.t = t
	table.print(t)
}

// doorState is one that the daemon and its sandboxes come into.
type doorState struct {
	name  string
	enter func()
}

// doorCases are the cases, in the order in which they run: the last ones change what others look at.
var doorCases = []struct {
	id  string
	run func(*probe)
}{
	{"E01", previewStrangers}, {"E02", everyRoute}, {"E03", otherUsers}, {"E04", headersIn}, {"E05", tokensStayOut}, {"E06", fetchers},
	{"E07", cookiesOut}, {"E10", answersOut}, {"E11", linkExchange}, {"E12", previewPorts}, {"E14", previewHosts},
	{"E15", rebinding}, {"E16", foreignPages}, {"E17", preflights}, {"E18", listening}, {"E20", otherUIDs}, {"E21", bruteForce}, {"E22", revocation},
	{"E23", filePaths}, {"E24", workspaceLinks}, {"E25", swappedDirectories}, {"E26", likeNames},
	{"G10", tampering}, {"G11", chainsWhole}, {"G12", masking},
}

// doors is a daemon with two users, each with a sandbox.
type doors struct {
	t     *testing.T
	h     *home
	lab   *doorLab
	serve *exec.Cmd
	// addr and web are the daemon's TCP address, and the port of a web server that sandboxes may reach; previews is the address of the previews.
	addr, previews, web string
	op                  *warren.Client
	alice, bob          *tenant
	// state counts them.
	state int
	// canary is a file of the host that no sandbox has, in a directory of its own; secret is what it holds.
	canary, secret string
	// pledges are changes that the daemon has said yes to: the last is what a label of the sandbox pledged says.
	pledges int
	pledged string
	// pledgedFrom and pledgedTo are the events between which nothing else changed it.
	pledgedFrom, pledgedTo int64
}

// tenant is a user, with what is theirs.
type tenant struct {
	name, token, tokenID string
	c                    *warren.Client
	box                  *warren.Sandbox
	snapshot, template   string
	// link is one to port 8000, made in the first state, and passed is what was exchanged for it.
	link string
}

const doorPolicy = "allow:\n  - {name: web, host: web.lab, cidr: " + labAddr + "/32, ports: [%s], protocol: http}\n"

// doorServer is what listens in the sandboxes: it tells all that it is asked, and sends what no browser should act on.
const doorServer = `
import http.server, socketserver, sys, time
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def log_message(self, *a): pass
    def any(self):
        n = int(self.headers.get('Content-Length') or 0)
        got = self.rfile.read(n)
        if self.path.startswith('/hold') or self.headers.get('Upgrade') == 'websocket':
            self.send_response(101 if 'Upgrade' in self.headers else 200)
            if 'Upgrade' in self.headers:
                self.send_header('Upgrade', 'websocket'); self.send_header('Connection', 'Upgrade')
            else:
                self.send_header('Content-Type', 'text/event-stream'); self.send_header('Connection', 'close')
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b'data: still here\n\n'); self.wfile.flush(); time.sleep(0.05)
            except OSError:
                pass
            self.close_connection = True
            return
        body = ('inside\n%s %s\n%s\n' % (self.command, self.path, self.headers)).encode() + got
        self.send_response(200)
        if self.path.startswith('/bad'):
            for k, v in [('Set-Cookie', 'tossed=1; Domain=localhost; Path=/'), ('Set-Cookie', '__Host-warren=1; Path=/; Secure'), ('Set-Cookie', 'warren_preview=1'), ('Set-Cookie', '=warren_preview=1'),
                ('Strict-Transport-Security', 'max-age=9'), ('Alt-Svc', 'h3=":9"'), ('Service-Worker-Allowed', '/'), ('Access-Control-Allow-Origin', 'http://evil.lab'), ('Access-Control-Allow-Credentials', 'true'),
                ('Access-Control-Allow-Private-Network', 'true'), ('Nel', '{}'), ('Warren-Preview', 'denied'), ('Warren-Error', 'denied'), ('Refresh', '0;url=http://evil.lab'), ('Link', '<http://evil.lab>;rel=preload'), ('Clear-Site-Data', '"*"')]:
                self.send_header(k, v)
        self.send_header('Content-Type', 'text/html')
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        if self.command != 'HEAD': self.wfile.write(body)
    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = any
class S(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 128
S(('127.0.0.1', int(sys.argv[1])), H).serve_forever()
`

// plantedVariable holds a word in the memory of what runs in a sandbox, which who looks through that memory has to find.
const plantedVariable = "PLANTED"

func newDoors(t *testing.T) *doors {
	t.Helper()
	d := &doors{t: t, lab: newDoorLab(t)}
	canary := t.TempDir()
	d.canary, d.secret = filepath.Join(canary, "held", "secret.txt"), "the host's own "+randomWord()
	if err := os.MkdirAll(filepath.Dir(d.canary), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.canary, []byte(d.secret), 0o644); err != nil {
		t.Fatal(err)
	}
	for dir := canary; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	d.h = newHome(t)
	d.h.env = []string{"WARREN_GATEWAY_RESOLVER=" + d.lab.names}
	d.web = d.lab.port
	if err := os.MkdirAll(filepath.Join(d.h.dir, "policies"), 0o755); err != nil {
		t.Fatal(err)
	}
	d.h.policy("doors", fmt.Sprintf(doorPolicy, d.web))
	d.addr = freeAddr(t)
	d.start()
	t.Cleanup(func() { d.stop() })
	ctx := t.Context()
	connect := func(url, token string) *warren.Client {
		c, err := warren.Connect(ctx, warren.Options{URL: url, Token: token})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	d.op = connect("unix://"+filepath.Join(d.h.dir, "warren.sock"), "")
	for i, name := range []string{"alice", "bob"} {
		u := &tenant{name: name}
		var err error
		if u.tokenID, u.token, err = d.op.CreateToken(ctx, warren.TokenSpec{User: name}); err != nil {
			t.Fatal(err)
		}
		u.c = connect("http://"+d.addr, u.token)
		u.box, err = u.c.Create(ctx, warren.Spec{Name: name + "s-box", Policy: "doors", Env: map[string]string{plantedVariable: "planted-" + randomWord()}})
		if err != nil {
			t.Fatal(err)
		}
		if err := u.box.FS().WriteFile("workspace/server.py", []byte(doorServer), 0o644); err != nil {
			t.Fatal(err)
		}
		d.servePorts(u, u.box)
		if i == 0 {
			d.alice = u
			p, err := u.box.Snapshot(ctx, warren.SnapshotOptions{Name: name + "s-snapshot", FilesOnly: true})
			if err != nil {
				t.Fatal(err)
			}
			u.snapshot, u.template = string(p.ID), name+"s-template"
			res := d.probe(t).call(u.token, "TemplateService/PutTemplate", fmt.Sprintf(`{"name":%q,"snapshot":%q,"recipe":"{}"}`, u.template, u.snapshot))
			if res.status != 200 {
				t.Fatalf("put a template: %v", res)
			}
		} else {
			d.bob = u
		}
		u.link = d.newLink(u, 8000, time.Hour)
	}
	u, err := url.Parse(d.alice.link)
	if err != nil {
		t.Fatal(err)
	}
	d.previews = "127.0.0.1:" + u.Port()
	return d
}

// servePorts starts what listens in a sandbox and waits for it.
func (d *doors) servePorts(u *tenant, box *warren.Sandbox) {
	d.t.Helper()
	for _, port := range []string{"8000", "8001"} {
		cmd := box.Command("python3", "/workspace/server.py", port)
		if err := cmd.Start(d.t.Context()); err != nil {
			d.t.Fatal(err)
		}
		cmd.Detach()
		d.until("port "+port+" of "+u.name, func() bool {
			return d.probe(d.t).api("GET", "/v1/sandboxes/"+string(box.ID)+"/ports/"+port+"/", "", bearer(u.token)).status == 200
		})
	}
}

// start runs a daemon in the foreground.
func (d *doors) start() {
	d.t.Helper()
	d.serve = d.h.command("serve", "--listen", d.addr)
	out, err := os.OpenFile(filepath.Join(d.h.dir, "serve.out"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		d.t.Fatal(err)
	}
	defer out.Close()
	d.serve.Stdout, d.serve.Stderr = out, out
	if err := d.serve.Start(); err != nil {
		d.t.Fatal(err)
	}
	d.until("the daemon", func() bool {
		c, err := net.Dial("unix", filepath.Join(d.h.dir, "warren.sock"))
		if err != nil {
			return false
		}
		c.Close()
		return true
	})
}

// stop ends the daemon, as a person does.
func (d *doors) stop() {
	if d.serve == nil {
		return
	}
	d.serve.Process.Signal(os.Interrupt)
	d.serve.Wait()
	d.serve = nil
}

// kill ends the daemon with SIGKILL.
func (d *doors) kill() {
	d.t.Helper()
	if err := d.serve.Process.Kill(); err != nil {
		d.t.Fatal(err)
	}
	d.serve.Wait()
}

// killUnderWay kills the daemon three times while calls are made that change something, and one that was said yes to must be done (G11).
func (d *doors) killUnderWay() {
	d.pledged, d.pledgedFrom = string(d.alice.box.ID), d.lastEvent()
	defer func() { d.pledgedTo = d.lastEvent() }()
	for range 3 {
		ctx, cancel := context.WithCancel(d.t.Context())
		done, begun := make(chan error, 1), make(chan bool)
		c, err := warren.Connect(ctx, warren.Options{URL: "http://" + d.addr, Token: d.alice.token, RetryFor: -1})
		if err != nil {
			d.t.Fatal(err)
		}
		go func() {
			box := c.Ref(d.pledged)
			for i := 0; ; i++ {
				if err := box.Update(ctx, warren.Change{SetLabels: map[string]string{"pledge": fmt.Sprint(d.pledges + 1)}}); err != nil {
					done <- err
					return
				}
				if d.pledges++; i == 20 {
					close(begun)
				}
			}
		}()
		<-begun
		d.kill()
		<-done
		cancel()
		c.Close()
		d.start()
	}
}

// lastEvent is the number of the last event.
func (d *doors) lastEvent() (last int64) {
	d.t.Helper()
	for e, err := range d.op.Events(d.t.Context(), warren.EventOptions{NoFollow: true}) {
		if err != nil {
			d.t.Fatal(err)
		}
		last = e.Seq
	}
	return last
}

// pauseAndResume does both to both sandboxes, and looks in between for tokens in what their memory has become (E05).
func (d *doors) pauseAndResume() {
	for _, u := range []*tenant{d.alice, d.bob} {
		if err := u.box.Pause(d.t.Context()); err != nil {
			d.t.Fatal(err)
		}
	}
	d.memoryWithout("paused")
	for _, u := range []*tenant{d.alice, d.bob} {
		if err := u.box.Resume(d.t.Context()); err != nil {
			d.t.Fatal(err)
		}
	}
}

// fork has children take the places of the sandboxes.
func (d *doors) fork() {
	for _, u := range []*tenant{d.alice, d.bob} {
		f, err := u.box.Fork(d.t.Context(), warren.ForkOptions{Name: u.name + "s-child"})
		if err != nil || f.Children[0].Err != nil {
			d.t.Fatal(err, f)
		}
		u.box = f.Children[0].Sandbox
		u.link = d.newLink(u, 8000, time.Hour)
	}
}

// newLink makes a link to a port.
func (d *doors) newLink(u *tenant, port int, ttl time.Duration) string {
	d.t.Helper()
	p, err := u.c.Ref(string(u.box.ID)).Preview(d.t.Context(), port, warren.PreviewOptions{TTL: ttl})
	if err != nil {
		d.t.Fatal(err)
	}
	return p.Link
}

// fetch has Alice's sandbox ask the web server that it may reach, until it answers.
func (d *doors) fetch(path string) {
	d.t.Helper()
	d.until("an answer from outside", func() bool {
		out, _ := d.alice.box.Command("curl", "-sS", "-m", "5", "http://web.lab:"+d.web+path).CombinedOutput(d.t.Context())
		return strings.HasPrefix(string(out), "outside")
	})
}

// waitRecord waits until something is on record.
func (d *doors) waitRecord(what string) {
	d.t.Helper()
	d.until(what+" on record", func() bool { return strings.Contains(d.h.warren("events", "--json"), what) })
}

// until waits, for a minute at most.
func (d *doors) until(what string, f func() bool) {
	d.t.Helper()
	for end := time.Now().Add(time.Minute); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			log, _ := os.ReadFile(filepath.Join(d.h.dir, "serve.out"))
			d.t.Fatalf("%s does not come\n%s", what, log[max(0, len(log)-4000):])
		}
	}
}

func (d *doors) probe(t *testing.T) *probe {
	return &probe{doors: d, t: t, source: "127.0.0.1"}
}

// doorLab is one name and one web server that sandboxes may reach.
type doorLab struct {
	t           *testing.T
	names, port string
	seen        chan string
}

func newDoorLab(t *testing.T) *doorLab {
	t.Helper()
	l := &doorLab{t: t, seen: make(chan string, 10000)}
	packets, err := net.ListenPacket("udp", labAddr+":0")
	if err != nil {
		t.Fatal(err)
	}
	l.names = packets.LocalAddr().String()
	go (&dns.Server{PacketConn: packets, Handler: dns.HandlerFunc((&scriptLab{}).resolve)}).ActivateAndServe()
	listener, err := net.Listen("tcp", labAddr+":0")
	if err != nil {
		t.Fatal(err)
	}
	_, l.port, _ = net.SplitHostPort(listener.Addr().String())
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var b bytes.Buffer
		fmt.Fprintf(&b, "%s %s\n", r.Method, r.URL)
		r.Header.Write(&b)
		select {
		case l.seen <- b.String():
		default:
		}
		fmt.Fprintln(w, "outside")
	})}
	go s.Serve(listener)
	t.Cleanup(func() { packets.Close(); s.Close() })
	return l
}

// take returns what the web server was asked since the last time.
func (l *doorLab) take() (all []string) {
	for {
		select {
		case s := <-l.seen:
			all = append(all, s)
		default:
			return all
		}
	}
}

// probe is one case in one state.
type probe struct {
	*doors
	t *testing.T
	// source is the address that requests come from.
	source string
	// tries are what must be refused, controls what must come right, and wrong those of both that did not.
	tries, controls, wrong int
}

// refused counts a try that must not come right.
func (p *probe) refused(ok bool, format string, args ...any) {
	p.t.Helper()
	p.tries++
	p.judge(ok, format, args...)
}

// right counts a try that has to come right.
func (p *probe) right(ok bool, format string, args ...any) {
	p.t.Helper()
	p.controls++
	p.judge(ok, "what has to come right does not: "+format, args...)
}

func (p *probe) judge(ok bool, format string, args ...any) {
	p.t.Helper()
	if !ok {
		if p.wrong++; p.wrong < 30 {
			p.t.Errorf(format, args...)
		}
	}
}

// check ends the case when something other than what it tries goes wrong.
func (p *probe) check(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// answer is what a server said.
type answer struct {
	status int
	header http.Header
	body   string
	err    error
}

// String shows all of it but what differs from one answer to the next.
func (a answer) String() string {
	if a.err != nil {
		return "error: " + a.err.Error()
	}
	h := a.header.Clone()
	for _, name := range []string{"Date", "Warren-Request-Id"} {
		h.Del(name)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d\n", a.status)
	h.Write(&b)
	return b.String() + "\n" + a.body
}

func bearer(token string) string { return "Authorization: Bearer " + token }

// api asks the daemon's TCP address.
func (p *probe) api(method, target, body string, header ...string) answer {
	return p.send(p.addr, method, target, body, header...)
}

// call makes a call of the API with JSON.
func (p *probe) call(token, procedure, body string, header ...string) answer {
	return p.api("POST", "/warren.v1."+procedure, body, append([]string{bearer(token), "Content-Type: application/json"}, header...)...)
}

// shown asks the previews for a URL.
func (p *probe) shown(method, link, body string, header ...string) answer {
	u, err := url.Parse(link)
	if err != nil {
		return answer{err: err}
	}
	return p.send(p.previews, method, u.RequestURI(), body, append([]string{"Host: " + u.Host}, header...)...)
}

// send writes a request as it is given, and reads one answer. A header without a Host gets that of addr.
func (p *probe) send(addr, method, target, body string, header ...string) answer {
	c, first, a := p.open(addr, method, target, body, header...)
	if a.err != nil {
		return a
	}
	defer c.Close()
	b, err := io.ReadAll(io.LimitReader(first.Body, 8<<20))
	a.body = string(b)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		a.err = err
	}
	return a
}

// open is send that leaves the connection open after the head of the answer.
func (p *probe) open(addr, method, target, body string, header ...string) (net.Conn, *http.Response, answer) {
	dialer := net.Dialer{Timeout: 30 * time.Second}
	if strings.HasPrefix(addr, "127.") {
		dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP(p.source)}
	}
	c, err := dialer.Dial("tcp", addr)
	if err != nil {
		return nil, nil, answer{err: err}
	}
	c.SetDeadline(time.Now().Add(time.Minute))
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\n", method, target)
	has := func(name string) bool {
		return slices.ContainsFunc(header, func(h string) bool { return strings.HasPrefix(strings.ToLower(h), strings.ToLower(name)+":") })
	}
	if !has("Host") {
		b.WriteString("Host: " + addr + "\r\n")
	}
	if !has("Connection") {
		b.WriteString("Connection: close\r\n")
	}
	if body != "" || method == "POST" || method == "PUT" {
		fmt.Fprintf(&b, "Content-Length: %d\r\n", len(body))
	}
	for _, h := range header {
		b.WriteString(h + "\r\n")
	}
	b.WriteString("\r\n" + body)
	if _, err := io.WriteString(c, b.String()); err != nil {
		c.Close()
		return nil, nil, answer{err: err}
	}
	res, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: method})
	if err != nil {
		c.Close()
		return nil, nil, answer{err: err}
	}
	return c, res, answer{status: res.StatusCode, header: res.Header}
}

// doorTable is what came of each case in each state.
type doorTable struct {
	states, cases []string
	rows          map[string]map[string]string
}

func (s *doorTable) add(id, state string, p *probe) {
	if s.rows == nil {
		s.rows = map[string]map[string]string{}
	}
	if !slices.Contains(s.states, state) {
		s.states = append(s.states, state)
	}
	if s.rows[id] == nil {
		s.cases, s.rows[id] = append(s.cases, id), map[string]string{}
	}
	s.rows[id][state] = fmt.Sprintf("%d of %d + %d", p.wrong, p.tries, p.controls)
}

// print prints the table: what went wrong of how many tries that are to be refused, and of how many that are to come right.
func (s *doorTable) print(t *testing.T) {
	var b strings.Builder
	fmt.Fprintf(&b, "%-4s", "case")
	for _, state := range s.states {
		fmt.Fprintf(&b, "  %16s", state)
	}
	for _, id := range s.cases {
		fmt.Fprintf(&b, "\n%-4s", id)
		for _, state := range s.states {
			fmt.Fprintf(&b, "  %16s", s.rows[id][state])
		}
	}
	t.Logf("what went wrong of each case in each state:\n%s", b.String())
}
