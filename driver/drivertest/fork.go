package drivertest

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/testenv"
	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
	"github.com/warren-sandbox/warren/proto/warren/guest/v1/guestv1connect"
)

var forkCases = []testCase{
	{name: "fork-states", sentence: "each kind of state goes on in a copy under another id as in its source, which notices nothing", commands: true, optional: freezes, run: testForkStates},
	{name: "fork-guest", sentence: "the guest's processes, output, sessions, terminals and services go on in a copy; connections from outside end there", commands: true, optional: freezes, run: testForkGuest},
	{name: "fork-identity", sentence: "a copy has its own id, host name, token, generation and random bytes, and runs its hooks", commands: true, optional: freezes, run: testForkIdentity},
	{name: "fork-random", sentence: "with the guest's modules, programs that keep a generator in memory draw other numbers in each copy", commands: true, optional: freezes, run: testForkRandom},
	{name: "fork-deleted-mount", sentence: "a deleted file that is open on a mount goes on in a copy, or the copy is refused", commands: true, optional: freezes, run: testForkDeletedMount},
}

// origin is a sandbox with a mount that copies are made of.
type origin struct {
	spec *driver.Spec
	data string
	g    *Guest
}

// origin makes a sandbox with a writable mount at /mnt/data and the probe.
func (c *ctx) origin() *origin {
	c.t.Helper()
	data := c.t.TempDir()
	if err := os.Chown(data, driver.DiskIDBase, driver.DiskIDBase); err != nil {
		c.t.Fatal(err)
	}
	o := &origin{data: data}
	o.spec = c.spec(c.dataMount(data), withProbe(c.t))
	o.spec.Hostname = "origin"
	c.createSpec(o.spec)
	o.g = NewGuest(c.t, c.d, o.spec.ID)
	o.g.Init(c, c.initBody(o.spec, "start", "origin-token", ""))
	return o
}

func (c *ctx) dataMount(dir string) func(*driver.Spec) {
	return func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(c.t, dir, "/mnt/data", true, driver.Owner{IDBase: driver.DiskIDBase}))
	}
}

// initBody is what the engine would tell the guest.
func (c *ctx) initBody(s *driver.Spec, event, token string, parent warren.SandboxID) string {
	c.mu.Lock()
	delete(c.untold, s.ID)
	c.mu.Unlock()
	body, err := json.Marshal(map[string]any{
		"defaultUser": "user", "defaultWorkdir": "/", "sandboxId": s.ID, "memoryLimitBytes": s.Limits.Memory, "envVars": map[string]string{"HELD": s.Hostname},
		"hostname": s.Hostname, "event": event, "accessToken": token, "parentId": parent, "entropy": base64.StdEncoding.EncodeToString(make([]byte, 32)),
	})
	if err != nil {
		c.t.Fatal(err)
	}
	return string(body)
}

// image writes an image of the sandbox and copies its mount while it stands still, then lets it run on.
func (c *ctx) image(o *origin) (image, data string) {
	c.t.Helper()
	image, _ = c.snapshot(o.spec.ID, true)
	data = filepath.Join(c.t.TempDir(), "data")
	if out, err := exec.CommandContext(c, "cp", "-a", o.data, data).CombinedOutput(); err != nil {
		c.t.Fatalf("copy the mount: %v: %s", err, out)
	}
	if err := c.freezer().Thaw(c, o.spec.ID); err != nil {
		c.t.Fatalf("Thaw: %v", err)
	}
	return image, data
}

// fork makes a sandbox of an image, with a copy of the mount. The guest has not been told.
func (c *ctx) fork(image, data, hostname string) *origin {
	c.t.Helper()
	f := &origin{data: data}
	f.spec = c.spec(c.dataMount(data), withProbe(c.t))
	f.spec.Hostname = hostname
	c.restore(f.spec, image)
	f.g = NewGuest(c.t, c.d, f.spec.ID)
	return f
}

// told is fork with a guest that knows what happened.
func (c *ctx) told(o *origin, image, data, hostname string) *origin {
	c.t.Helper()
	f := c.fork(image, data, hostname)
	f.g.Init(c, c.initBody(f.spec, "fork", hostname+"-token", o.spec.ID))
	return f
}

// found is what the probe found of its states.
type found struct{ Results, Values map[string]string }

// states is where the probe keeps what it holds.
const states = "/var/tmp/states"

// look lets the probe look at its states.
func (g *Guest) look(c *ctx) (f found) {
	g.t.Helper()
	g.Output(c, "touch", states+"/go")
	for begin := time.Now(); g.Run(c, "test", "-e", states+"/out").Code != 0; {
		if time.Since(begin) > time.Minute {
			g.t.Fatalf("the probe never says what it found; it looked at\n%s", g.Shell(c, "root", "cat "+states+"/looked; ps ax").Stdout)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err := json.Unmarshal([]byte(g.Output(c, "cat", states+"/out")), &f); err != nil {
		g.t.Fatal(err)
	}
	return f
}

// lacking is what the kernel of the drivers that take images does not offer; its limits are tested like the rest.
var lacking = map[string]string{
	"POSIX message queue": "function not implemented",
	"mount made inside":   "operation not permitted",
}

func testForkStates(t *testing.T, c *ctx) {
	began := time.Now()
	step := func(what string) { t.Logf("%s after %v", what, time.Since(began).Round(time.Millisecond)) }
	o := c.origin()
	step("created")
	p := o.g.start(c, Command{Args: []string{probePath, "states", states, "/mnt/data"}})
	if line, err := p.line(); line != "ready" {
		p.cancel()
		t.Fatalf("the probe says %q, %v, %+v", line, err, <-p.result)
	}
	step("set up")
	image, data := c.image(o)
	step("image written")
	f := c.told(o, image, data, "copy")
	step("restored")
	source, child := o.g.look(c), f.g.look(c)
	step("looked at")
	if slow := source.Values["slow"]; slow != "" {
		t.Log(slow)
	}

	var names []string
	for name := range source.Results {
		names = append(names, name)
	}
	slices.Sort(names)
	var table strings.Builder
	doc, err := os.ReadFile(filepath.Join(testenv.Repo(t), "docs", "FORK.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if !strings.Contains(string(doc), "\n| "+name+" |") {
			t.Errorf("docs/FORK.md has no row %q", name)
		}
		want := "continues"
		if why := lacking[name]; why != "" {
			want = "missing: " + why
		}
		fmt.Fprintf(&table, "  %-34s %-22s source: %-12s child: %s\n", name, want, source.Results[name], child.Results[name])
		if source.Results[name] != want {
			t.Errorf("%s in the source: %s; want it %s", name, source.Results[name], want)
		}
		if child.Results[name] != want {
			t.Errorf("%s in the child: %s; want it %s", name, child.Results[name], want)
		}
	}
	t.Logf("%d states\n%s", len(names), table.String())
	if len(names) < 50 {
		t.Errorf("the probe holds %d states only", len(names))
	}

	differ := func(name string, want bool) {
		t.Helper()
		if a, b := source.Values[name], child.Values[name]; a == "" || (a != b) != want {
			t.Errorf("%s: %q in the source, %q in the child; different should be %v", name, a, b, want)
		}
	}
	differ("random", true)
	// What a program computed from its memory goes on alike in both; nothing outside of it can change that.
	differ("generator", false)
	for who, f := range map[string]found{"source": source, "child": child} {
		number := func(name string) time.Duration {
			n, err := strconv.ParseInt(f.Values[name], 10, 64)
			if err != nil {
				t.Errorf("%s of the %s: %v", name, who, err)
			}
			return time.Duration(n)
		}
		if d := time.Since(time.Unix(0, int64(number("wall")))); d < -time.Second || d > 2*time.Minute {
			t.Errorf("the wall clock of the %s is %v behind", who, d)
		}
		if d := number("elapsed") - number("monotonic"); d < -time.Second || d > time.Second {
			t.Errorf("in the %s the monotonic clock went %v, the wall clock %v", who, number("monotonic"), number("elapsed"))
		}
	}
	// What either wrote on its mount is in its own directory only.
	mark := func(g *Guest, who string) { g.Output(c, "sh", "-c", "echo "+who+" >/mnt/data/mark") }
	mark(o.g, "source")
	mark(f.g, "child")
	for dir, want := range map[string]string{o.data: "source\n", f.data: "child\n"} {
		for file, want := range map[string]string{"mark": want, "offset": "0123xy6789"} {
			if got, err := os.ReadFile(filepath.Join(dir, file)); err != nil || string(got) != want {
				t.Errorf("%s holds %q, %v; want %q", file, got, err, want)
			}
		}
	}
}

func (c *ctx) service(g *Guest) guestv1connect.GuestServiceClient {
	return guestv1connect.NewGuestServiceClient(g.http, guestURL, connect.WithProtoJSON())
}

func testForkGuest(t *testing.T, c *ctx) {
	o := c.origin()
	const count = `n=0; while :; do n=$((n+1)); echo $n; sleep 0.01; done`
	p := o.g.start(c, Command{Args: []string{"/bin/sh", "-c", count}})
	if _, err := p.line(); err != nil {
		t.Fatal(err)
	}
	term := o.g.terminal(c)
	o.g.typeIn(c, term, "secret=4711; stty cols 101 rows 37; cd /var/tmp; echo ready >/var/tmp/ready\n")
	for o.g.Run(c, "test", "-s", "/var/tmp/ready").Code != 0 && c.Err() == nil {
		time.Sleep(10 * time.Millisecond)
	}
	session, err := c.service(o.g).OpenSession(c, connect.NewRequest(&guestv1.OpenSessionRequest{Cwd: "/"}))
	if err != nil {
		t.Fatal(err)
	}
	inSession := func(g *Guest, command string) string {
		t.Helper()
		st, err := c.service(g).RunInSession(c, connect.NewRequest(&guestv1.RunInSessionRequest{Id: session.Msg.GetId(), Command: command}))
		if err != nil {
			t.Error(err)
			return ""
		}
		defer st.Close()
		var out strings.Builder
		for st.Receive() {
			out.Write(st.Msg().GetStdout())
		}
		if st.Err() != nil {
			t.Error(st.Err())
		}
		return out.String()
	}
	inSession(o.g, "f() { echo $x in $PWD; }; x=kept; cd /usr")

	// A service that the guest keeps going.
	const servicePort = port + 1
	if _, err := c.service(o.g).PutServices(c, connect.NewRequest(&guestv1.PutServicesRequest{Services: []*guestv1.Service{{
		Name: "echo", Command: []string{probePath, "serve", fmt.Sprintf("127.0.0.1:%d", servicePort)}, User: "root",
		Port: servicePort, Check: &guestv1.ServiceCheck{Tcp: true, IntervalMs: 100}, Restart: "always"}}})); err != nil {
		t.Fatal(err)
	}
	echo := func(g *Guest) *guestv1.ServiceStatus {
		t.Helper()
		res, err := c.service(g).ListServices(c, connect.NewRequest(&guestv1.ListServicesRequest{WaitMs: 30000}))
		if err != nil || len(res.Msg.GetServices()) != 1 {
			t.Fatalf("services: %v, %v", res, err)
		}
		return res.Msg.GetServices()[0]
	}
	before := echo(o.g)
	if before.GetState() != "ready" {
		t.Errorf("the service is %v", before)
	}

	// A process that keeps its sandbox awake, as anybody may.
	o.g.start(c, Command{User: "user", Args: []string{"warren-hold", "--for", "2h", "--", "/bin/sh", "-c", "echo holds; exec sleep 1000"}}).line()

	// A connection from outside.
	c.serveOn(o, port)
	outside := c.dial(o.spec.ID, port)
	roundTrip(t, outside, "before")

	image, data := c.image(o)
	f := c.told(o, image, data, "copy")
	io.WriteString(outside, "after")
	if got := make([]byte, 5); true {
		if _, err := io.ReadFull(outside, got); err != nil || string(got) != "after" {
			t.Errorf("the connection from outside to the source: %q, %v", got, err)
		}
	}
	table := f.g.Shell(c, "root", "cat /proc/net/tcp").Stdout
	for range 200 {
		if !established(table, port) {
			break
		}
		time.Sleep(20 * time.Millisecond)
		table = f.g.Shell(c, "root", "cat /proc/net/tcp").Stdout
	}
	if established(table, port) {
		t.Errorf("the connection from outside goes on in the child:\n%s", table)
	}
	roundTrip(t, c.dial(f.spec.ID, port), "new in the child")

	// In the child the service is the same, and is kept going as before.
	if now := echo(f.g); now.GetState() != "ready" || now.GetPid() != before.GetPid() || now.GetRestarts() != 0 {
		t.Errorf("the service in the child is %v", now)
	}
	f.g.Output(c, "kill", "-KILL", fmt.Sprint(before.GetPid()))
	for echo(f.g).GetRestarts() == 0 && c.Err() == nil {
		time.Sleep(20 * time.Millisecond)
	}
	if now := echo(f.g); now.GetState() != "ready" || now.GetPid() == before.GetPid() {
		t.Errorf("the service that was killed in the child is %v", now)
	}
	roundTrip(t, c.dial(f.spec.ID, servicePort), "the service in the child")
	if now := echo(o.g); now.GetState() != "ready" || now.GetPid() != before.GetPid() || now.GetRestarts() != 0 {
		t.Errorf("the service in the source is %v", now)
	}

	for who, g := range map[string]*Guest{"source": o.g, "child": f.g} {
		if n, until := g.holds(c); n != 1 || time.Until(until) < time.Hour || time.Until(until) > 2*time.Hour {
			t.Errorf("the %s has %d holds until %v", who, n, until)
		}
		if got := inSession(g, "f"); got != "kept in /usr\n" {
			t.Errorf("the session in the %s says %q", who, got)
		}
		g.typeIn(c, term, "echo $secret $(stty size) $PWD >/var/tmp/said\n")
		for g.Run(c, "test", "-s", "/var/tmp/said").Code != 0 && c.Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
		if got := g.Output(c, "cat", "/var/tmp/said"); got != "4711 37 101 /var/tmp" {
			t.Errorf("the terminal in the %s says %q", who, got)
		}
		if got := g.Output(c, "sh", "-c", "echo $HELD"); got != map[string]string{"source": "origin", "child": "copy"}[who] {
			t.Errorf("a variable of the sandbox in the %s is %q", who, got)
		}
		// All output is there from its first byte on, without a gap, and goes on.
		list, err := c.service(g).ListProcesses(c, connect.NewRequest(&guestv1.ListProcessesRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		want := 0
		for _, p2 := range list.Msg.GetProcesses() {
			if p2.GetPid() == p.pid {
				want = int(p2.GetSeq()) + 50
			}
		}
		ctx, cancel := context.WithTimeout(c, 30*time.Second)
		st, err := c.service(g).Attach(ctx, connect.NewRequest(&guestv1.AttachRequest{
			Process: &guestv1.ProcessSelector{Selector: &guestv1.ProcessSelector_Pid{Pid: p.pid}}}))
		if err != nil {
			t.Fatal(err)
		}
		var text strings.Builder
		for text.Len() < want && st.Receive() {
			out := st.Msg().GetOutput()
			if out != nil && out.GetSeq() != int64(text.Len()) {
				t.Errorf("output of the %s jumps to byte %d after %d", who, out.GetSeq(), text.Len())
			}
			text.Write(out.GetStdout())
		}
		cancel()
		st.Close()
		lines := strings.Split(text.String(), "\n")
		if want == 0 || text.Len() < want {
			t.Errorf("the %s counts to %d only: %v", who, len(lines), st.Err())
		}
		for i, l := range lines[:len(lines)-1] {
			if l != strconv.Itoa(i+1) {
				t.Errorf("line %d of the %s is %q", i+1, who, l)
				break
			}
		}
	}
}

// holds asks the guest what keeps its sandbox awake.
func (g *Guest) holds(ctx context.Context) (n int, until time.Time) {
	g.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, guestURL+"/metrics", nil)
	if err != nil {
		g.t.Fatal(err)
	}
	resp, err := g.http.Do(req)
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	var m struct {
		Holds     int
		HoldUntil time.Time
	}
	if err := json.NewDecoder(resp.Body).Decode(&m); err != nil {
		g.t.Fatal(err)
	}
	return m.Holds, m.HoldUntil
}

// serveOn runs the probe as a listener in a sandbox that has been told who it is.
func (c *ctx) serveOn(o *origin, port uint16) {
	c.t.Helper()
	p := o.g.start(c, Command{Args: []string{probePath, "serve", fmt.Sprintf("127.0.0.1:%d", port)}})
	if line, err := p.line(); line != "listening" {
		c.t.Fatalf("the listener says %q, %v", line, err)
	}
}

func testForkIdentity(t *testing.T, c *ctx) {
	o := c.origin()
	o.g.Output(c, "sh", "-c", `mkdir -p /etc/warren/hooks/fork.d && cat >/etc/warren/hooks/fork.d/10-note <<'END'
#!/bin/sh
echo "$WARREN_EVENT $WARREN_SANDBOX_ID $WARREN_PARENT_ID $(id -u) $(od -An -tx1 -v | tr -d ' \n')" >/var/tmp/noted
END
chmod 755 /etc/warren/hooks/fork.d/10-note; printf '#!/bin/sh\nexit 1\n' >/etc/warren/hooks/fork.d/20-fails; chmod 755 /etc/warren/hooks/fork.d/20-fails`)
	image, data := c.image(o)
	second := filepath.Join(t.TempDir(), "data")
	if out, err := exec.CommandContext(c, "cp", "-a", data, second).CombinedOutput(); err != nil {
		t.Fatalf("copy the mount: %v: %s", err, out)
	}
	one, two := c.told(o, image, data, "one"), c.told(o, image, second, "two")
	seen := map[string]map[string]string{}
	for name, s := range map[string]*origin{"origin": o, "one": one, "two": two} {
		sh := func(line string) string { return s.g.Output(c, "sh", "-c", line) }
		id := string(s.spec.ID)
		for what, want := range map[string]string{
			"hostname": name, "cat /etc/hostname": name, "cat /proc/sys/kernel/hostname": name,
			"cat /run/warren/sandbox-id": id, "echo $WARREN_SANDBOX_ID": id,
			"grep -c -w origin /etc/hosts || true": map[bool]string{true: "1", false: "0"}[name == "origin"],
			"grep -c -w " + name + " /etc/hosts":   "1",
		} {
			if got := sh(what); got != want {
				t.Errorf("%s: %s says %q, want %q", name, what, got, want)
			}
		}
		seen[name] = map[string]string{
			"generation": sh("cat /run/warren/generation"), "boot-id": sh("cat /run/warren/boot-id"),
			"random": sh("head -c 16 /dev/urandom | od -An -tx1"), "uuid": sh("cat /proc/sys/kernel/random/uuid"),
			"noted": sh("cat /var/tmp/noted 2>/dev/null || true"),
		}
		for token, want := range map[string]int{"origin-token": 0, name + "-token": http.StatusOK} {
			if want == 0 {
				want = map[bool]int{true: http.StatusOK, false: http.StatusUnauthorized}[name == "origin"]
			}
			if got := c.tokenStatus(s.spec.ID, token); got != want {
				t.Errorf("%s answers %s with %d, want %d", name, token, got, want)
			}
		}
	}
	for what := range seen["origin"] {
		for _, pair := range [][2]string{{"origin", "one"}, {"origin", "two"}, {"one", "two"}} {
			if a, b := seen[pair[0]][what], seen[pair[1]][what]; a == b {
				t.Errorf("%s is %q in %s and in %s", what, a, pair[0], pair[1])
			}
		}
	}
	for name, s := range map[string]*origin{"one": one, "two": two} {
		f := strings.Fields(seen[name]["noted"])
		if len(f) != 5 || f[0] != "fork" || f[1] != string(s.spec.ID) || f[2] != string(o.spec.ID) || f[3] != "0" || len(f[4]) != 64 {
			t.Errorf("the hook of %s noted %q", name, f)
		}
		if log := s.g.Output(c, "cat", "/run/warren/hooks.log"); !strings.Contains(log, "fork.d/20-fails: exit status 1") {
			t.Errorf("the log of %s: %s", name, log)
		}
	}
	if got := seen["origin"]["noted"]; got != "" {
		t.Errorf("the hook ran in the source: %q", got)
	}
}

// tokenStatus asks the guest over the sandbox's own loopback, where it wants a token, and returns the status.
func (c *ctx) tokenStatus(id warren.SandboxID, token string) int {
	c.t.Helper()
	g := NewGuest(c.t, c.d, id)
	out := g.Output(c, probePath, "status", fmt.Sprintf("http://127.0.0.1:%d/metrics", warren.GuestPort), token)
	n, err := strconv.Atoi(out)
	if err != nil {
		c.t.Fatal(err)
	}
	return n
}

// drawers print random numbers when the file "go" appears; each kind of number on a line of its own.
var drawers = []struct {
	name, program string
	args          []string
	env           map[string]string
	// apart says of each line whether it must be another in each copy; a line that need not be is the proof that the
	// module is what makes the difference.
	apart []bool
}{
	{"python", "/usr/bin/python3", []string{"-c", pythonDraw}, nil, []bool{false, false}},
	{"python with the module", "/usr/bin/python3", []string{"-c", "import warren_fork; warren_fork.watch()\n" + pythonDraw},
		map[string]string{"PYTHONPATH": "/run/warren/lib/python"}, []bool{true, true}},
	{"python with the module for all", "/usr/bin/python3", []string{"-c", pythonDraw}, map[string]string{"PYTHONPATH": "/run/warren/lib/python"}, []bool{true, false}},
	{"node", "/usr/bin/node", []string{"-e", nodeDraw}, nil, []bool{false, false, false}},
	{"node with the module", "/usr/bin/node", []string{"-e", nodeDraw},
		map[string]string{"NODE_OPTIONS": "--require=/run/warren/lib/node/warren-fork.cjs"}, []bool{true, true, true}},
}

const pythonDraw = `
import random, ssl, sys, os, time
random.random(); ssl.RAND_bytes(8)
print("ready", flush=True)
while not os.path.exists("/var/tmp/go"): time.sleep(0.01)
out = open(sys.argv[1] + ".new", "w")
print(random.random(), file=out)
print(ssl.RAND_bytes(8).hex(), file=out)
out.close(); os.rename(sys.argv[1] + ".new", sys.argv[1])
`

const nodeDraw = `
const crypto = require('crypto'), fs = require('fs');
Math.random(); crypto.randomBytes(8); crypto.randomUUID();
console.log('ready');
const t = setInterval(() => {
  if (!fs.existsSync('/var/tmp/go')) return;
  clearInterval(t);
  const f = process.argv[1];
  fs.writeFileSync(f + '.new', [Math.random(), crypto.randomBytes(8).toString('hex'), crypto.randomUUID()].join('\n') + '\n');
  fs.renameSync(f + '.new', f);
}, 10);
`

func testForkRandom(t *testing.T, c *ctx) {
	o := c.origin()
	running := map[int]bool{}
	for i, d := range drawers {
		if o.g.Run(c, "test", "-x", d.program).Code != 0 {
			t.Logf("%s: the image has no %s", d.name, d.program)
			continue
		}
		p := o.g.start(c, Command{Args: append(append([]string{d.program}, d.args...), fmt.Sprintf("/var/tmp/drawn-%d", i)), Env: d.env})
		if line, err := p.line(); line != "ready" {
			p.cancel()
			t.Fatalf("%s says %q, %v, %+v", d.name, line, err, <-p.result)
		}
		running[i] = true
	}
	image, data := c.image(o)
	second := filepath.Join(t.TempDir(), "data")
	if out, err := exec.CommandContext(c, "cp", "-a", data, second).CombinedOutput(); err != nil {
		t.Fatalf("copy the mount: %v: %s", err, out)
	}
	one, two := c.told(o, image, data, "one"), c.told(o, image, second, "two")
	time.Sleep(500 * time.Millisecond) // the thread of the Python module looks ten times a second
	drawn := func(f *origin, i int) []string {
		t.Helper()
		name := fmt.Sprintf("/var/tmp/drawn-%d", i)
		for f.g.Run(c, "test", "-e", name).Code != 0 {
			if c.Err() != nil {
				t.Fatalf("%s never draws", drawers[i].name)
			}
			time.Sleep(20 * time.Millisecond)
		}
		return strings.Fields(f.g.Output(c, "cat", name))
	}
	one.g.Output(c, "touch", "/var/tmp/go")
	two.g.Output(c, "touch", "/var/tmp/go")
	for i, d := range drawers {
		if !running[i] {
			continue
		}
		a, b := drawn(one, i), drawn(two, i)
		if len(a) != len(d.apart) || len(b) != len(d.apart) {
			t.Errorf("%s drew %q and %q", d.name, a, b)
			continue
		}
		for k, apart := range d.apart {
			t.Logf("%s, number %d: %s and %s", d.name, k+1, a[k], b[k])
			if (a[k] != b[k]) != apart {
				t.Errorf("%s, number %d: %s and %s; different should be %v", d.name, k+1, a[k], b[k], apart)
			}
		}
	}
}

func testForkDeletedMount(t *testing.T, c *ctx) {
	o := c.origin()
	p := o.g.start(c, Command{Args: []string{"/bin/sh", "-c", "exec 6<>/mnt/data/gone; echo kept >&6; rm /mnt/data/gone; echo ready; while :; do sleep 1; done"}})
	if line, err := p.line(); line != "ready" {
		t.Fatalf("%q, %v", line, err)
	}
	image, data := c.image(o)
	f := &origin{data: data}
	f.spec = c.spec(c.dataMount(data), withProbe(t))
	if err := c.freezer().Restore(c, f.spec, image); err != nil {
		t.Logf("refused: %v", err)
		c.nothingLeft(f.spec.ID)
	} else {
		f.g = NewGuest(t, c.d, f.spec.ID)
		if got := f.g.Output(c, "cat", fmt.Sprintf("/proc/%d/fd/6", p.pid)); got != "kept" {
			t.Errorf("in the child the file holds %q", got)
		}
	}
	if got := o.g.Output(c, "cat", fmt.Sprintf("/proc/%d/fd/6", p.pid)); got != "kept" {
		t.Errorf("in the source the file holds %q", got)
	}
}
