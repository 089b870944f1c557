package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/bench/hostproc"
)

// Targets of the design for the gateway.
const (
	targetInspectedMedian = 1.10 // of the same request passed through
	targetInspectedP99    = 2.0
	targetFlow            = 200e6 // bytes a second on one flow
)

// benchAddr is where the server listens: an address of the loopback that the bench's policies open by name.
const benchAddr = "127.0.0.9"

// programInside is where the client lies in sandboxes.
const programInside = "/tmp/warren-bench-client"

// route is one way to the server.
type route struct {
	name string
	// raw and secure are the server's addresses there; without one, that is not measured.
	raw, secure string
	// own has each client be its own server.
	own   bool
	start func(ctx context.Context) (*client, error)
}

// can says whether a task can be done there.
func (r *route) can(t task) bool { return t.TLS && r.secure != "" || !t.TLS && r.raw != "" }

// gateway says whether it is one through the gateway.
func (r *route) gateway() bool { return r.name == passed || r.name == inspected }

// client is a client program that runs.
type client struct {
	in   io.WriteCloser
	out  io.Reader
	wait func() error
}

// gatewayBench is one run.
type gatewayBench struct {
	*session
	server *benchServer
	routes []*route
	// rawPort and securePort are those of the server on the loopback.
	rawPort, securePort string
}

// Gateway measures connections and requests through the gateway, from a sandbox to a server on the loopback of this machine, beside
// the same client and the same server without it. It needs a daemon of its own, which asks a name server of the bench's.
func Gateway(ctx context.Context, o Options, w io.Writer) (err error) {
	if o.Client != nil {
		return fmt.Errorf("the gateway is measured with a daemon that asks the bench's own name server: leave the url out: %w", warren.ErrInvalid)
	}
	server, err := serveBench()
	if err != nil {
		return err
	}
	defer server.close()
	raw, secure, err := server.listen(benchAddr+":0", net.Listen)
	if err != nil {
		return err
	}
	names, err := benchNameServer(benchAddr+":0", net.ParseIP(benchAddr))
	if err != nil {
		return err
	}
	defer names.Close()
	b := &gatewayBench{server: server}
	b.rawPort, b.securePort = portOf(raw), portOf(secure)
	b.session, err = o.openWith(ctx, func(data string) ([]string, error) {
		roots := filepath.Join(data, "bench-roots.pem")
		if err := os.WriteFile(roots, []byte(server.roots), 0o600); err != nil {
			return nil, err
		}
		dir := filepath.Join(data, "policies")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
		for _, n := range []int{fewRules, manyRules} {
			if err := os.WriteFile(filepath.Join(dir, policyOf(n)+".yaml"), b.policy(n), 0o600); err != nil {
				return nil, err
			}
		}
		return []string{"WARREN_GATEWAY_RESOLVER=" + names.LocalAddr().String(), "WARREN_GATEWAY_ROOTS=" + roots}, nil
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	sb, err := b.withClient(ctx, policyOf(fewRules))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove(ctx, sb)) }()
	b.routes = []*route{{name: native, raw: raw, secure: secure, start: b.beside(nil)}}
	wire, noNAT, err := newWire(ctx, server)
	switch {
	case err != nil:
		b.lack(w, vethNAT, err)
	case noNAT != nil:
		b.lack(w, vethNAT, noNAT)
		b.routes = append(b.routes, &route{name: "veth pair", raw: wire.raw, secure: wire.secure, start: b.beside(wire.client)})
	default:
		b.routes = append(b.routes, &route{name: vethNAT, raw: wire.raw, secure: wire.secure, start: b.beside(wire.client)})
	}
	if wire != nil {
		defer wire.close()
	}
	inside := b.inside(sb)
	b.routes = append(b.routes,
		&route{name: "gVisor's loopback", raw: "own", secure: "own", own: true, start: inside},
		&route{name: passed, raw: "raw.bench.test:" + b.rawPort, secure: "web.bench.test:" + b.securePort, start: inside},
		&route{name: inspected, secure: "seen.bench.test:" + b.securePort, start: inside})
	if err := b.timesAndSpeeds(ctx, w); err != nil {
		return err
	}
	if err := b.idleFlows(ctx, w); err != nil {
		return err
	}
	return b.rules(ctx, w, sb)
}

// The routes.
const (
	native    = "native loopback"
	vethNAT   = "veth pair with NAT"
	passed    = "passed through"
	inspected = "inspected"
)

func portOf(address string) string {
	_, port, _ := net.SplitHostPort(address)
	return port
}

func (b *gatewayBench) lack(w io.Writer, name string, why error) {
	fmt.Fprintf(w, "not measured: %s (%s)\n", name, firstLine(why.Error()))
	b.record(Row{Benchmark: benchmarkGateway, Name: name, Absent: firstLine(why.Error())})
}

const benchmarkGateway = "gateway"

const (
	fewRules  = 10
	manyRules = 10_000
)

func policyOf(rules int) string { return "bench-" + strconv.Itoa(rules) }

// policy has the three names of the server as its last rules, and others before them.
func (b *gatewayBench) policy(rules int) []byte {
	var y bytes.Buffer
	y.WriteString("allow:\n")
	for i := range rules - 3 {
		switch i % 4 {
		case 0:
			fmt.Fprintf(&y, "  - {name: r%d, host: h%d.example.com}\n", i, i)
		case 1:
			fmt.Fprintf(&y, "  - {name: r%d, host: \"*.d%d.example.com\", ports: [443, %d]}\n", i, i, 1024+i)
		case 2:
			fmt.Fprintf(&y, "  - {name: r%d, host: p%d.example.org, methods: [GET], paths: [/v%d/**]}\n", i, i, i)
		default:
			fmt.Fprintf(&y, "  - {name: r%d, cidr: 10.%d.%d.0/24, protocol: tcp, ports: [%d]}\n", i, i>>8, i&255, 1024+i)
		}
	}
	for _, r := range []string{
		"name: raw, host: raw.bench.test, protocol: tcp, ports: [" + b.rawPort + "]",
		"name: web, host: web.bench.test, ports: [" + b.securePort + "]",
		"name: seen, host: seen.bench.test, inspect: true, ports: [" + b.securePort + "]",
	} {
		fmt.Fprintf(&y, "  - {%s, cidr: %s/32}\n", r, benchAddr)
	}
	return y.Bytes()
}

// withClient makes a sandbox that has the client.
func (b *gatewayBench) withClient(ctx context.Context, policy string) (*warren.Sandbox, error) {
	sb, err := b.sandboxOf(ctx, warren.Spec{Image: b.Image, Policy: policy})
	if err != nil {
		return nil, err
	}
	f, err := os.Open(b.Program)
	if err == nil {
		defer f.Close()
		cmd := sb.Command("/bin/sh", "-c", "cat >"+programInside+" && chmod 755 "+programInside)
		cmd.Stdin = f
		err = cmd.Run(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("copy the client into the sandbox: %w", err), remove(ctx, sb))
	}
	return sb, nil
}

// clientArgs are what the program is started with as the client.
var clientArgs = []string{"bench", "gateway-client"}

// beside starts clients outside of sandboxes, in a namespace if there is one.
func (b *gatewayBench) beside(r *room) func(context.Context) (*client, error) {
	return func(ctx context.Context) (*client, error) {
		cmd := exec.CommandContext(ctx, b.Program, clientArgs...)
		return start(cmd, &cmd.Stderr, func() error {
			if r != nil {
				return r.in(cmd.Start)
			}
			return cmd.Start()
		})
	}
}

// inside starts clients in a sandbox.
func (b *gatewayBench) inside(sb *warren.Sandbox) func(context.Context) (*client, error) {
	return func(ctx context.Context) (*client, error) {
		cmd := sb.Command(programInside, clientArgs...)
		return start(cmd, &cmd.Stderr, func() error { return cmd.Start(ctx) })
	}
}

// command is one outside or in a sandbox.
type command[Out io.Reader] interface {
	StdinPipe() (io.WriteCloser, error)
	StdoutPipe() (Out, error)
	Wait() error
}

func start[Out io.Reader](cmd command[Out], stderr *io.Writer, begin func() error) (*client, error) {
	var complaint bytes.Buffer
	*stderr = &complaint
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := begin(); err != nil {
		return nil, err
	}
	return &client{in, out, func() error {
		err := cmd.Wait()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, firstLine(complaint.String()))
		}
		return err
	}}, nil
}

// begin starts a client on a task and returns its answer, while it still runs. end ends it.
func (b *gatewayBench) begin(ctx context.Context, r *route, t task) (o outcome, end func() error, err error) {
	t.Own, t.Roots, t.Addr = r.own, b.server.roots, r.raw
	if t.TLS {
		t.Addr = r.secure
	}
	t.Name, _, _ = net.SplitHostPort(t.Addr)
	if net.ParseIP(t.Name) != nil || r.own {
		t.Name = benchNames[1]
	}
	c, err := r.start(ctx)
	if err != nil {
		return o, nil, err
	}
	text, err := json.Marshal(t)
	if err == nil {
		_, err = c.in.Write(append(text, '\n'))
	}
	if err == nil {
		err = json.NewDecoder(c.out).Decode(&o)
	}
	end = func() error {
		c.in.Close()
		io.Copy(io.Discard, c.out)
		return c.wait()
	}
	if err != nil {
		return o, nil, fmt.Errorf("%s, %s: %w", r.name, t.Op, errors.Join(end(), err))
	}
	return o, end, nil
}

// once has a task done.
func (b *gatewayBench) once(ctx context.Context, r *route, t task) (outcome, error) {
	o, end, err := b.begin(ctx, r, t)
	if err != nil {
		return o, err
	}
	return o, end()
}

// measure is one thing that is measured on all routes.
type measure struct {
	name string
	task task
	// speed says that bytes or requests a second are the result, not the times of each.
	speed bool
}

func (b *gatewayBench) measures() []measure {
	connects, requests, slow, size := 200, 4000, 200, int64(512<<20)
	if b.Quick {
		connects, requests, slow, size = 10, 40, 10, 4<<20
	}
	const workers = 8
	return []measure{
		{"connection over TCP and one byte each way", task{Op: "connect", Count: connects}, false},
		{"connection over TLS and one answer", task{Op: "connect", TLS: true, Count: connects}, false},
		{fmt.Sprintf("requests on %d kept connections", workers), task{Op: "requests", TLS: true, Count: requests, Workers: workers}, true},
		{slowRequest, task{Op: "slow", TLS: true, Count: slow}, false},
		{downRaw, task{Op: "down", Bytes: size}, true},
		{upRaw, task{Op: "up", Bytes: size}, true},
		{downSecure, task{Op: "down", TLS: true, Bytes: size}, true},
		{upSecure, task{Op: "up", TLS: true, Bytes: size}, true},
	}
}

const (
	slowRequest = "request that takes the server 5 ms"
	downRaw     = "one flow down, TCP"
	upRaw       = "one flow up, TCP"
	downSecure  = "one flow down, TLS"
	upSecure    = "one flow up, TLS"
)

func (o Options) gatewayRounds() int {
	if o.Quick {
		return 1
	}
	return max(o.rounds()/4, 3)
}

// timesAndSpeeds measures all on all routes, which take turns.
func (b *gatewayBench) timesAndSpeeds(ctx context.Context, w io.Writer) error {
	type key struct{ measure, route string }
	times, speeds := map[key]sample{}, map[key][]float64{}
	rounds := b.gatewayRounds()
	for range rounds {
		for _, m := range b.measures() {
			for _, r := range b.routes {
				if !r.can(m.task) {
					continue
				}
				o, err := b.once(ctx, r, m.task)
				if err != nil {
					return err
				}
				k := key{m.name, r.name}
				if !m.speed {
					times[k] = append(times[k], o.Times...)
				} else if m.task.Bytes > 0 {
					speeds[k] = append(speeds[k], float64(m.task.Bytes)/o.Times.median().Seconds())
				} else {
					speeds[k] = append(speeds[k], float64(len(o.Times))/o.Took.Seconds())
				}
			}
		}
	}
	fmt.Fprintf(w, "Through the gateway from a gVisor sandbox, to a server on this machine's loopback (%d rounds, taking turns)\n", rounds)
	for _, m := range b.measures() {
		fmt.Fprintf(w, "\n%s\n", m.name)
		tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
		unit, value, scale := "requests/s", "requestsPerSecond", 1.0
		if m.task.Bytes > 0 {
			unit, value, scale = "MB/s", "bytesPerSecond", 1e6
		}
		if m.speed {
			fmt.Fprintf(tw, "\t%s\tof native\t\n", unit)
		} else {
			fmt.Fprintln(tw, "\tp50\tof native\tp99\tof native\t")
		}
		base := key{m.name, native}
		for _, r := range b.routes {
			k := key{m.name, r.name}
			var values map[string]float64
			switch {
			case !r.can(m.task):
				continue
			case m.speed:
				v, than := middle(speeds[k]), middle(speeds[base])
				fmt.Fprintf(tw, "%s\t%.0f\t%.2f\t\n", r.name, v/scale, v/than)
				values = map[string]float64{value: v, "ofNative": v / than, "runs": float64(len(speeds[k]))}
			default:
				t, than := times[k], times[base]
				values = t.values()
				values["p99Ms"], values["ofNative"], values["p99OfNative"] = inMs(t.at(0.99)), ratio(t.median(), than.median()), ratio(t.at(0.99), than.at(0.99))
				fmt.Fprintf(tw, "%s\t%.2f ms\t%.2f\t%.2f ms\t%.2f\t\n", r.name, inMs(t.median()), values["ofNative"], values["p99Ms"], values["p99OfNative"])
			}
			b.record(Row{Benchmark: benchmarkGateway, Name: m.name + ": " + r.name, Values: values})
		}
		if err := tw.Flush(); err != nil {
			return err
		}
	}
	fmt.Fprintln(w)
	seen := times[key{slowRequest, inspected}]
	for _, beside := range []string{passed, native} {
		than := times[key{slowRequest, beside}]
		half, most := ratio(seen.median(), than.median()), ratio(seen.at(0.99), than.at(0.99))
		b.verdict(w, benchmarkGateway, fmt.Sprintf("p50 of a request of 5 ms, inspected, is %.2f of %s:", half, beside), half <= targetInspectedMedian, fmt.Sprintf("%.2f", targetInspectedMedian))
		b.verdict(w, benchmarkGateway, fmt.Sprintf("p99 of a request of 5 ms, inspected, is %.2f of %s:", most, beside), most <= targetInspectedP99, fmt.Sprintf("%.2f", targetInspectedP99))
	}
	for _, k := range []key{{downRaw, passed}, {upRaw, passed}, {downSecure, passed}, {upSecure, passed}, {downSecure, inspected}, {upSecure, inspected}} {
		v := middle(speeds[k])
		b.verdictAtLeast(w, benchmarkGateway, fmt.Sprintf("%s, %s, is %.0f MB/s:", k.measure, k.route, v/1e6), v >= targetFlow, fmt.Sprintf("%.0f MB/s", targetFlow/1e6))
	}
	return nil
}

func ratio(a, b time.Duration) float64 { return float64(a) / float64(b) }

// middle is the median.
func middle(v []float64) float64 {
	s := make(sample, len(v))
	for i := range v {
		s[i] = time.Duration(v[i] * 1e3)
	}
	return float64(s.median()) / 1e3
}

// idleFlows measures what the gateway takes for connections on which nothing happens.
func (b *gatewayBench) idleFlows(ctx context.Context, w io.Writer) error {
	flows := 1000
	if b.Quick {
		flows = 50
	}
	fmt.Fprintf(w, "\nMemory of the gateway with %d idle connections of one sandbox (PSS)\n", flows)
	pid, err := b.gatewayPID()
	if err != nil {
		return err
	}
	if hostproc.PSS(pid) == 0 {
		b.lack(w, "memory of the gateway", errors.New("only root may look at it"))
		return nil
	}
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "\tbefore\twith them\teach\tafter them\t")
	for _, r := range b.routes {
		for _, secure := range []bool{false, true} {
			held := task{Op: "hold", TLS: secure, Count: flows}
			if !r.gateway() || !r.can(held) {
				continue
			}
			// What the last load has left behind would be used again, and hide what this one takes.
			pid, err := b.freshGateway(ctx, r)
			if err != nil {
				return err
			}
			before := b.settledPSS(pid)
			_, end, err := b.begin(ctx, r, held)
			if err != nil {
				return err
			}
			with := b.settledPSS(pid)
			if err := end(); err != nil {
				return err
			}
			after := b.settledPSS(pid)
			name := r.name + ", TCP"
			if secure {
				name = r.name + ", TLS"
			}
			each := (with - before) / int64(flows)
			fmt.Fprintf(tw, "%s\t%s\t%s\t%.1f KiB\t%s\t\n", name, mib(before), mib(with), float64(each)/1024, mib(after))
			b.record(Row{Benchmark: "gateway, idle connections", Name: name, Values: map[string]float64{
				"connections": float64(flows), "beforeBytes": float64(before), "withBytes": float64(with), "eachBytes": float64(each), "afterBytes": float64(after),
			}})
		}
	}
	return tw.Flush()
}

// gatewayPID returns the process of the daemon's gateway.
func (b *gatewayBench) gatewayPID() (int, error) {
	text, err := os.ReadFile(filepath.Join(b.data, "run", "gateway", "gateway.pid"))
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("the gateway's process: %w", err)
	}
	return pid, nil
}

// freshGateway has the gateway end, and waits until the next one serves a route.
func (b *gatewayBench) freshGateway(ctx context.Context, r *route) (int, error) {
	old, err := b.gatewayPID()
	if err != nil {
		return 0, err
	}
	if err := syscall.Kill(old, syscall.SIGTERM); err != nil {
		return 0, fmt.Errorf("end the gateway: %w", err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		pid, err := b.gatewayPID()
		if err == nil && pid != old {
			if _, err = b.once(ctx, r, task{Op: "connect", TLS: r.raw == "", Count: 1}); err == nil {
				return pid, nil
			}
		}
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		if time.Now().After(deadline) {
			return 0, fmt.Errorf("no new gateway serves after a minute: %w", err)
		}
	}
}

// settledPSS gives garbage a moment to be collected.
func (b *gatewayBench) settledPSS(pid int) int64 {
	wait := 3 * time.Second
	if b.Quick {
		wait = 100 * time.Millisecond
	}
	time.Sleep(wait)
	return hostproc.PSS(pid)
}

// rules compares connections under a policy of a few rules and one of very many.
func (b *gatewayBench) rules(ctx context.Context, w io.Writer, few *warren.Sandbox) (err error) {
	many, err := b.withClient(ctx, policyOf(manyRules))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove(ctx, many)) }()
	places := []struct {
		rules int
		sb    *warren.Sandbox
	}{{fewRules, few}, {manyRules, many}}
	measures := b.measures()[:2]
	times := map[string]sample{}
	name := func(m measure, r *route, rules int) string {
		return fmt.Sprintf("%s, %s: %s rules", m.name, r.name, thousands(rules))
	}
	for range b.gatewayRounds() {
		for _, m := range measures {
			for _, r := range b.routes {
				if !r.gateway() || !r.can(m.task) {
					continue
				}
				for _, p := range places {
					there := *r
					there.start = b.inside(p.sb)
					o, err := b.once(ctx, &there, m.task)
					if err != nil {
						return fmt.Errorf("%d rules: %w", p.rules, err)
					}
					n := name(m, r, p.rules)
					times[n] = append(times[n], o.Times...)
				}
			}
		}
	}
	fmt.Fprintln(w, "\nConnections under a policy of many rules, of which the last one allows them")
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "\tp50\tp99\t")
	for _, m := range measures {
		for _, r := range b.routes {
			for _, p := range places {
				n := name(m, r, p.rules)
				if t := times[n]; len(t) > 0 {
					v := t.values()
					v["p99Ms"] = inMs(t.at(0.99))
					fmt.Fprintf(tw, "%s\t%.2f ms\t%.2f ms\t\n", n, inMs(t.median()), v["p99Ms"])
					b.record(Row{Benchmark: "gateway, rules", Name: n, Values: v})
				}
			}
		}
	}
	return tw.Flush()
}
