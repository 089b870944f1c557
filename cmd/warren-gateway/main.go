//go:build linux

// Warren-gateway is the process in which every packet of every sandbox ends. The daemon starts it; it is not meant to be called by
// people.
package main

import (
	"context"
	"crypto/x509"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/audit"
	"github.com/warren-sandbox/warren/internal/companion"
	"github.com/warren-sandbox/warren/internal/gateway"
	"github.com/warren-sandbox/warren/internal/gateway/control"
	"github.com/warren-sandbox/warren/internal/secret"
)

// readyFD is where a gateway that starts says "ok" or why not.
const readyFD = 3

// leastMemory is what a gateway may hold on a small machine: less would be full with a hundred connections.
const leastMemory = 256 << 20

func main() { os.Exit(run(os.Args[1:], os.Stderr)) }

func run(args []string, stderr io.Writer) int {
	fs := flag.NewFlagSet("warren-gateway", flag.ContinueOnError)
	fs.SetOutput(stderr)
	dir := fs.String("dir", "", "`directory` of the socket and the log")
	state := fs.String("state", "", "`directory` of what is kept: certificate authority and evidence")
	resolver := fs.String("resolver", "", "`address` of the name server that is asked, instead of the host's")
	roots := fs.String("roots", "", "`file` of certificates to trust besides the host's")
	near := fs.String("near", "", "`networks` that count as this machine's own addresses, with commas")
	secrets := fs.String("secrets", "", "`where` the key of secrets is: file:PATH, env:VARIABLE or kms:ID=COMMAND")
	connections := fs.Int("connections", 0, "`number` of connections and requests that all sandboxes together may have open; 0 for the default")
	memory := fs.Int64("memory", 0, "`bytes` that may be held for all sandboxes together; 0 for a quarter of the machine's memory")
	records := fs.Int("records", 0, "`number` of records a second that a sandbox may write one by one; 0 for the default")
	idle := fs.Duration("idle", 3*time.Second, "how long to stay with no sandbox and no daemon")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	if *dir == "" || *state == "" {
		fmt.Fprintln(stderr, "warren-gateway: started by warren; -dir and -state are needed")
		return 2
	}
	ready := os.NewFile(readyFD, "ready")
	unix.CloseOnExec(readyFD)
	fail := func(err error) int {
		fmt.Fprintf(ready, "%v\n", err)
		fmt.Fprintf(stderr, "warren-gateway: %v\n", err)
		return 1
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))
	// No core file of this process may hold what it knows.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fail(err)
	}
	l, lock, err := companion.Become(*dir, control.Name)
	if err != nil {
		return fail(err)
	}
	defer lock.Close()
	authority, err := gateway.OpenAuthority(filepath.Join(*state, "authority"))
	if err != nil {
		return fail(err)
	}
	build, err := companion.BuildID("/proc/self/exe")
	if err != nil {
		return fail(err)
	}
	evidence, err := audit.OpenAside(filepath.Join(*state, "events"), "gateway", audit.Options{}, log)
	if err != nil {
		return fail(fmt.Errorf("the record of flows: %w", err))
	}
	defer evidence.Close()
	if *memory == 0 {
		var machine unix.Sysinfo_t
		if err := unix.Sysinfo(&machine); err != nil {
			return fail(err)
		}
		*memory = max(int64(machine.Totalram)*int64(machine.Unit)/4, leastMemory)
	}
	// What is garbage is not held for anybody.
	debug.SetMemoryLimit(*memory)
	opts := gateway.Options{
		Authority: authority, Evidence: gateway.Record(evidence), Logger: log,
		Connections: *connections, Memory: *memory, Records: *records,
	}
	if *resolver != "" {
		opts.Resolver = &net.Resolver{PreferGo: true, StrictErrors: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, *resolver)
		}}
	}
	if *near != "" {
		for s := range strings.SplitSeq(*near, ",") {
			p, err := netip.ParsePrefix(s)
			if err != nil {
				return fail(err)
			}
			opts.Near = append(opts.Near, p)
		}
	}
	if *roots != "" {
		if opts.Roots, err = trusted(*roots); err != nil {
			return fail(err)
		}
	}
	if *secrets != "" {
		if opts.Secrets, err = secret.ParseSource(*secrets); err != nil {
			return fail(err)
		}
	}
	g := gateway.New(opts)
	s := gateway.NewServer(g, l, build, *idle, log)
	signal.Ignore(unix.SIGHUP, unix.SIGPIPE)
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, unix.SIGTERM, unix.SIGINT)
	go func() {
		<-stop
		s.Retire()
	}()
	io.WriteString(ready, "ok\n")
	ready.Close()
	s.Serve()
	g.Settle()
	return 0
}

// trusted returns the host's certificates and those of a file.
func trusted(file string) (*x509.CertPool, error) {
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, err
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	if !pool.AppendCertsFromPEM(b) {
		return nil, fmt.Errorf("%s has no certificate in PEM form", file)
	}
	return pool, nil
}
