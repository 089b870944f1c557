package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/docker"
	"github.com/warren-sandbox/warren/driver/gvisor"
	"github.com/warren-sandbox/warren/internal/audit"
	"github.com/warren-sandbox/warren/internal/config"
	"github.com/warren-sandbox/warren/internal/engine"
	"github.com/warren-sandbox/warren/internal/image"
	"github.com/warren-sandbox/warren/internal/repo"
	"github.com/warren-sandbox/warren/internal/server"
	"github.com/warren-sandbox/warren/internal/store"
	"github.com/warren-sandbox/warren/internal/workspace"
)

// driverEntry is one kind of driver.
type driverEntry struct {
	name string
	// open opens it on its own directory below the data directory.
	open func(dir string, cfg config.Config, log *slog.Logger) (driver.Driver, error)
	// check looks at the host without a daemon.
	check func(ctx context.Context, cfg config.Config) []check
}

// drivers are all that this program knows.
var drivers = []driverEntry{
	{name: "gvisor", open: openGVisor, check: checkGVisor},
	{name: "docker", open: openDocker, check: checkDocker},
}

func openGVisor(dir string, cfg config.Config, log *slog.Logger) (driver.Driver, error) {
	runtime, err := findProgram("warren-runtime", "WARREN_RUNTIME")
	if err != nil {
		return nil, err
	}
	guest, err := findProgram("warren-guest", "WARREN_GUEST")
	if err != nil {
		return nil, err
	}
	key, err := imageKey(cfg.Snapshots.Key)
	if err != nil {
		return nil, err
	}
	if key != nil {
		log.Info("snapshots.key encrypts memory images; workspaces, and the layers of snapshots that have files alone, stay plain files")
	}
	return gvisor.New(gvisor.Options{
		StateDir: dir, RuntimePath: runtime, GuestPath: guest, Logger: log, ImageKey: key, CompressImages: cfg.Snapshots.Compress,
	})
}

// imageKey reads the key for memory images from its file, which must be its owner's alone.
func imageKey(file string) ([]byte, error) {
	if file == "" {
		return nil, nil
	}
	bad := func(format string, args ...any) error {
		return fmt.Errorf("snapshots.key %s: %s: %w", file, fmt.Sprintf(format, args...), warren.ErrInvalid)
	}
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, bad("there is no such file; make one with `(umask 077; openssl rand -hex 32 >%s)`, and keep it as long as its images", file)
	}
	if err != nil {
		return nil, bad("%v", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	switch {
	case err != nil:
		return nil, bad("%v", err)
	case !fi.Mode().IsRegular():
		return nil, bad("it is no regular file")
	case fi.Mode().Perm()&0o077 != 0:
		return nil, bad("others than its owner may open it (mode %04o); `chmod 600` it", fi.Mode().Perm())
	}
	text, err := io.ReadAll(io.LimitReader(f, 1024))
	if err != nil {
		return nil, bad("%v", err)
	}
	key, err := hex.DecodeString(strings.TrimSpace(string(text)))
	if err != nil || len(key) != gvisor.ImageKeySize {
		return nil, bad("want %d hexadecimal digits, as `openssl rand -hex %d` prints", 2*gvisor.ImageKeySize, gvisor.ImageKeySize)
	}
	return key, nil
}

// checkGVisor opens the driver on a directory that is gone afterwards, so that it disturbs no daemon and leaves nothing.
func checkGVisor(ctx context.Context, cfg config.Config) []check {
	failed := func(err error) []check {
		return []check{{Name: "gvisor", Status: "fail", Message: err.Error(), Hint: "run as root, with warren-runtime and warren-guest beside warren"}}
	}
	dir, err := os.MkdirTemp("", "warren-doctor-")
	if err != nil {
		return failed(err)
	}
	defer os.RemoveAll(dir)
	d, err := openGVisor(dir, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return failed(err)
	}
	defer closeDriver(context.WithoutCancel(ctx), d)
	if c, ok := driver.As[driver.Checker](d); ok {
		return fromDriver(c.Check(ctx))
	}
	return nil
}

func openDocker(dir string, cfg config.Config, log *slog.Logger) (driver.Driver, error) {
	guest, err := findProgram("warren-guest", "WARREN_GUEST")
	if err != nil {
		return nil, err
	}
	c := cfg.Docker
	return docker.New(docker.Options{StateDir: dir, GuestPath: guest, Host: c.Host, Runtime: c.Runtime, Accept: c.Accept, Logger: log})
}

// checkDocker asks the engine that the driver would use. A machine without one lacks nothing that it needs, unless the
// driver is what its sandboxes run on.
func checkDocker(ctx context.Context, cfg config.Config) []check {
	wanted := cfg.Driver == "docker"
	// In the data directory where there is one, since that is what the engine has to see.
	dir, err := os.MkdirTemp(cfg.DataDir, "warren-doctor-")
	if err != nil {
		dir, err = os.MkdirTemp("", "warren-doctor-")
	}
	if err != nil {
		return []check{{Name: "docker engine", Status: "fail", Message: err.Error(), Hint: "free some space for temporary files"}}
	}
	defer os.RemoveAll(dir)
	d, err := openDocker(dir, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		c := check{Name: "docker engine", Status: "fail", Message: err.Error(), Hint: "start Docker or Podman, or set docker.host or DOCKER_HOST to its socket"}
		if !wanted && errors.Is(err, errors.ErrUnsupported) {
			c.Status, c.Hint = "ok", ""
			c.Message = "not used: " + c.Message
		}
		return []check{c}
	}
	defer d.Close()
	c, _ := driver.As[driver.Checker](d)
	out := fromDriver(c.Check(ctx))
	for i := range out {
		if out[i].Status == "fail" && !wanted {
			out[i].Status = "warn"
		}
	}
	return out
}

// closeDriver closes a driver, and ends the processes that it keeps for later when it has no sandbox.
func closeDriver(ctx context.Context, d driver.Driver) error {
	type shutdowner interface{ Shutdown(context.Context) error }
	if s, ok := driver.As[shutdowner](d); ok {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil && !errors.Is(err, warren.ErrState) {
			return errors.Join(err, d.Close())
		}
	}
	return d.Close()
}

func serveCommand(a *app) *cobra.Command {
	var file string
	var hosts, origins, mounts []string
	values := map[string]*string{}
	cmd := &cobra.Command{
		Use:   "serve [flags]",
		Short: "Run the daemon in the foreground",
		Long: `Run the daemon of a data directory in the foreground. It answers on a unix socket that only its own user can open and, with --listen, on
a TCP address where every caller needs a token. An address that other machines reach needs TLS.

Sandboxes run on when the daemon ends, however it ends; the next one finds them.

Settings come from flags, WARREN_* variables, and warren.yaml in the data directory, in this order:
` + settingsHelp(),
		Example: `  warren serve
  warren serve --listen 127.0.0.1:7420 --allow-mount /srv/data
  warren serve --listen :7420 --tls-cert cert.pem --tls-key key.pem
  WARREN_HOME=/srv/warren warren serve --log-level debug`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			given := map[string][]string{}
			for key, v := range values {
				if cmd.Flags().Changed(strings.ReplaceAll(key, ".", "-")) {
					given[key] = []string{*v}
				}
			}
			for key, list := range map[string][]string{"hosts": hosts, "origins": origins, "allow_mounts": mounts} {
				if len(list) > 0 {
					given[key] = list
				}
			}
			cfg, err := config.Load(config.Source{DataDir: a.dataDir, File: file, Flags: given})
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			// A terminal that goes away is no reason to stop.
			signal.Ignore(syscall.SIGHUP)
			err = serve(ctx, cfg, a.err)
			if errors.Is(err, errLocked) {
				fmt.Fprintln(a.err, a.errorStyle("warren:"), describe(err))
				return exitError(exitLocked)
			}
			return err
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.StringVar(&file, "config", "", "configuration file instead of warren.yaml in the data directory")
	for _, f := range []struct{ key, help string }{
		{"listen", "TCP address besides the unix socket, such as 127.0.0.1:7420"},
		{"tls.cert", "certificate file of the TCP address"},
		{"tls.key", "key file of the TCP address"},
		{"driver", "driver of sandboxes that name none"},
		{"image", "image of sandboxes that name none"},
		{"log.level", "debug, info, warn or error"},
		{"log.format", "text or json"},
	} {
		values[f.key] = flags.String(strings.ReplaceAll(f.key, ".", "-"), "", f.help)
	}
	flags.StringArrayVar(&hosts, "host", nil, "name by which requests may call the server")
	flags.StringArrayVar(&origins, "origin", nil, "web origin whose pages may call the server")
	flags.StringArrayVar(&mounts, "allow-mount", nil, "host directory that every user may mount from, read-only; DIR:rw lets them write, unless it belongs to root")
	return cmd
}

func settingsHelp() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	for _, s := range config.Settings() {
		fmt.Fprintf(w, "  %s\t%s\t%s\n", s.Key, s.Variable, s.Help)
	}
	_ = w.Flush()
	return strings.TrimRight(b.String(), "\n")
}

// daemon is what serve opens and closes again, in order.
type daemon struct {
	cfg     config.Config
	log     *slog.Logger
	closers []func() error
}

func (d *daemon) onClose(f func() error) { d.closers = append(d.closers, f) }

// close closes what was opened last first.
func (d *daemon) close() error {
	var errs []error
	for i := len(d.closers) - 1; i >= 0; i-- {
		errs = append(errs, d.closers[i]())
	}
	return errors.Join(errs...)
}

// serve runs a daemon until ctx ends.
func serve(ctx context.Context, cfg config.Config, logTo io.Writer) (err error) {
	// Whatever the mask of who started it: directories of images and workspaces are passed through by other ids.
	syscall.Umask(0o022)
	if err := makeDataDir(cfg.DataDir); err != nil {
		return fmt.Errorf("make the data directory: %w", err)
	}
	lock, err := lockDataDir(cfg.DataDir)
	if err != nil {
		if pid, e := daemonPID(cfg.DataDir); errors.Is(err, errLocked) && e == nil && pid != 0 {
			return fmt.Errorf("%w (process %d); `warren shutdown` ends it", err, pid)
		}
		return err
	}
	d := &daemon{cfg: cfg, log: newLogger(cfg, logTo)}
	d.onClose(lock.Close)
	defer func() {
		if e := d.close(); e != nil {
			d.log.Error("end", "err", e)
			err = errors.Join(err, e)
		}
		if err == nil {
			d.log.Info("ended")
		}
	}()
	pidFile := filepath.Join(cfg.DataDir, "daemon.pid")
	if err := os.WriteFile(pidFile, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o600); err != nil {
		return err
	}
	d.onClose(func() error { return os.Remove(pidFile) })
	return d.run(ctx)
}

func newLogger(cfg config.Config, to io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(cfg.LogLevel)) // config has checked it
	opts := &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		// The JSON handler would write a duration as a bare number of nanoseconds.
		if a.Value.Kind() == slog.KindDuration {
			a.Value = slog.StringValue(a.Value.Duration().String())
		}
		return a
	}}
	if cfg.LogFormat == "text" || cfg.LogFormat == "" && isTerminal(to) {
		return slog.New(slog.NewTextHandler(to, opts))
	}
	return slog.New(slog.NewJSONHandler(to, opts))
}

// run opens all parts, from the bottom up, and answers until ctx ends.
func (d *daemon) run(ctx context.Context) error {
	began := time.Now()
	// First, so that a mistake in what to listen on has started nothing.
	var tcp net.Listener
	if d.cfg.Listen != "" {
		var err error
		if tcp, err = server.ListenTCP(d.cfg.Listen, server.TCPOptions{CertFile: d.cfg.TLSCert, KeyFile: d.cfg.TLSKey}); err != nil {
			return err
		}
		defer tcp.Close()
	}
	shown, err := d.listenPreviews()
	if err != nil {
		return err
	}
	for _, l := range shown {
		defer l.Close()
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	tracer, err := d.tracer(ctx)
	if err != nil {
		return err
	}
	calls, err := audit.OpenAside(d.callDir(), "warren", audit.Options{Lost: "warren"}, d.log)
	if err != nil {
		return fmt.Errorf("the record of calls: %w", err)
	}
	d.onClose(calls.Close)
	eng, err := d.engine(ctx, registry, tracer, calls)
	if err != nil {
		return err
	}
	// One count for all doors: who guesses at one is no stranger at the other.
	tries := server.NewTries()
	previews, err := d.previews(eng, shown, calls, tries)
	if err != nil {
		return err
	}
	srv, err := server.New(server.Options{
		Previews: previews, Tries: tries, Engine: eng, Calls: calls, Logger: d.log, Tracer: tracer, Registerer: registry,
		Metrics:      promhttp.HandlerFor(registry, promhttp.HandlerOpts{}),
		AllowedHosts: d.cfg.Hosts, AllowedOrigins: d.cfg.Origins, HidePaths: []string{d.cfg.DataDir}, Version: versionString(),
	})
	if err != nil {
		return err
	}
	return d.answer(ctx, srv, tcp, began)
}

// callDir is where the record of calls is.
func (d *daemon) callDir() string { return filepath.Join(d.cfg.DataDir, "calls") }

// answer serves on the unix socket, and on tcp if there is one, until ctx ends or a listener fails.
func (d *daemon) answer(ctx context.Context, srv *server.Server, tcp net.Listener, began time.Time) error {
	socket := config.Socket(d.cfg.DataDir)
	unixListener, err := srv.ListenUnix(socket)
	if err != nil {
		return err
	}
	listeners := []net.Listener{unixListener}
	attrs := []any{"socket", socket, "version", versionString(), "took", time.Since(began)}
	if tcp != nil {
		listeners = append(listeners, tcp)
		attrs = append(attrs, "address", tcp.Addr().String())
	}
	failed := make(chan error, len(listeners))
	for _, l := range listeners {
		go func() { failed <- srv.Serve(l) }()
	}
	d.log.Info("serving", attrs...)
	select {
	case err = <-failed:
	case <-ctx.Done():
		d.log.Info("ending; sandboxes run on")
	}
	quit, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	// Calls that last longer are cut; their callers come back to the next daemon.
	if e := srv.Shutdown(quit); e != nil && !errors.Is(e, context.DeadlineExceeded) {
		err = errors.Join(err, e)
	}
	return err
}

// engine opens what the engine stands on, and the engine.
func (d *daemon) engine(ctx context.Context, registry prometheus.Registerer, tracer trace.Tracer, calls engine.Recorder) (*engine.Engine, error) {
	below := func(name string) string { return filepath.Join(d.cfg.DataDir, name) }
	if err := recordsFor(d.cfg.DataDir); err != nil {
		return nil, err
	}
	records, err := store.Open(ctx, store.Options{Path: below("warren.db"), Logger: d.log})
	if err != nil {
		return nil, err
	}
	d.onClose(records.Close)
	imageStore, err := image.Open(image.Options{Dir: below("images"), IDBase: driver.DiskIDBase, Logger: d.log})
	if err != nil {
		return nil, err
	}
	d.onClose(imageStore.Close)
	// The first sandbox should not have to wait for it.
	imageStore.Prepare()
	var workspaceStore *workspace.Store
	cache, err := repo.Open(repo.Options{
		Dir: below("repos"), UID: driver.DiskIDBase + driver.SandboxUID, GID: driver.DiskIDBase + driver.SandboxUID, Logger: d.log,
		BorrowedBy: func(id warren.RepoID) (warren.WorkspaceID, error) { return workspaceStore.BorrowedBy(id) },
	})
	if err != nil {
		return nil, err
	}
	workspaceStore, err = workspace.Open(workspace.Options{Dir: below("workspaces"), IDBase: driver.DiskIDBase, Repos: cache, Logger: d.log})
	if err != nil {
		return nil, err
	}
	d.tend(ctx, cache)
	opened, unavailable := map[string]driver.Driver{}, map[string]string{}
	for _, entry := range drivers {
		dr, err := entry.open(filepath.Join(d.cfg.DataDir, "run", entry.name), d.cfg, d.log.With("driver", entry.name))
		if err != nil {
			if entry.name == d.cfg.Driver {
				return nil, err
			}
			level := slog.LevelWarn
			if errors.Is(err, errors.ErrUnsupported) {
				level = slog.LevelInfo // nobody has asked for it
			}
			d.log.Log(ctx, level, "a driver is not available", "driver", entry.name, "err", err)
			unavailable[entry.name] = err.Error()
			continue
		}
		opened[entry.name] = dr
		d.onClose(func() error { return closeDriver(context.Background(), dr) })
	}
	var allowed []engine.AllowedMount
	for _, m := range d.cfg.AllowMounts {
		allowed = append(allowed, engine.AllowedMount(m))
	}
	secrets, err := d.secrets()
	if err != nil {
		return nil, err
	}
	network, err := d.network(secrets)
	if err != nil {
		return nil, err
	}
	eng, err := engine.Open(ctx, engine.Options{
		Network: network, Secrets: secrets, CallDir: d.callDir(), Calls: calls, FlowDir: filepath.Join(below("gateway"), "events"), PolicyDir: below("policies"), DefaultPolicy: d.cfg.Policy,
		Store: records, Images: images{imageStore}, Repos: repos{cache}, Workspaces: workspaces{workspaceStore},
		Drivers: opened, Unavailable: unavailable, DefaultDriver: d.cfg.Driver, DefaultImage: d.cfg.Image,
		Defaults: driver.Limits{
			CPUMillis: uint32(d.cfg.Defaults.CPU), Memory: int64(d.cfg.Defaults.Memory), Disk: int64(d.cfg.Defaults.Disk), PIDs: d.cfg.Defaults.PIDs,
		},
		Max: hostLimits(d.cfg.DataDir),
		Budgets: engine.Budgets{PerUser: engine.Budget{
			Sandboxes: int(d.cfg.Budgets.Sandboxes), CPUMillis: int64(d.cfg.Budgets.CPU), Memory: int64(d.cfg.Budgets.Memory), Disk: int64(d.cfg.Budgets.Disk),
		}},
		AllowMounts: allowed, DefaultIdleTimeout: d.cfg.IdleTimeout, MaxLifetime: d.cfg.MaxLifetime, EvictPaused: d.cfg.EvictPaused,
		PauseDir: filepath.Join(d.cfg.DataDir, "paused"), SnapshotDir: filepath.Join(d.cfg.DataDir, "snapshots"),
		Pool:      int(d.cfg.Pool),
		Standby:   int(d.cfg.Standby),
		LowMemory: int64(d.cfg.LowMemory), LowDisk: int64(d.cfg.LowDisk),
		Logger: d.log, Tracer: tracer, Registerer: registry,
	})
	if err != nil {
		return nil, err
	}
	d.onClose(eng.Close)
	tend := eng.TendNetwork
	network.lost.Store(&tend)
	wake := eng.WakePeer
	network.wake.Store(&wake)
	return eng, nil
}

// tendEvery is how often the cached repositories are looked over, for the first time this long after the start.
const tendEvery = time.Hour

// tend maintains the repositories in the background until the daemon closes.
func (d *daemon) tend(ctx context.Context, cache *repo.Cache) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(tendEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				cache.MaintainAll(ctx)
			case <-ctx.Done():
				return
			}
		}
	}()
	d.onClose(func() error {
		cancel()
		<-done
		return nil
	})
}

// recordsFor refuses to begin new records where sandboxes or workspaces are: without their records the sandboxes would be
// removed as leftovers, and the workspaces could not be found.
func recordsFor(dataDir string) error {
	if info, err := os.Stat(filepath.Join(dataDir, "warren.db")); err == nil && info.Size() > 0 {
		return nil
	}
	for _, name := range []string{"workspaces", filepath.Join("run", "gvisor", "sandboxes")} {
		entries, err := os.ReadDir(filepath.Join(dataDir, name))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), ".") {
				return fmt.Errorf("warren.db is missing or empty, but %s has %s: put warren.db back, or move the whole data directory away to begin empty: %w", name, e.Name(), warren.ErrUnavailable)
			}
		}
	}
	return nil
}

// hostLimits is the most that one sandbox can have: what the machine has. A limit beyond that would be none.
func hostLimits(dataDir string) driver.Limits {
	most := driver.Limits{PIDs: 1 << 18}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		most.Memory = int64(info.Totalram) * int64(info.Unit)
	}
	var fs unix.Statfs_t
	if unix.Statfs(dataDir, &fs) == nil {
		most.Disk = int64(fs.Blocks) * int64(fs.Bsize)
	}
	return most
}

// tracer sends spans where OTEL_EXPORTER_OTLP_ENDPOINT says, and nowhere when it says nothing.
func (d *daemon) tracer(ctx context.Context) (trace.Tracer, error) {
	if os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") == "" && os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") == "" {
		return noop.NewTracerProvider().Tracer("warren"), nil
	}
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("open the trace exporter: %w", err)
	}
	res, err := resource.New(ctx, resource.WithAttributes(attribute.String("service.name", "warren"), attribute.String("service.version", versionString())), resource.WithFromEnv())
	if err != nil {
		return nil, err
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(res))
	d.onClose(func() error {
		// A collector that does not answer must not hold up the end.
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			d.log.Warn("send the last spans", "err", err)
		}
		return nil
	})
	return provider.Tracer("warren"), nil
}
