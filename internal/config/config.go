// Package config holds the settings of Warren's daemon and where they come from: flags, then WARREN_* variables, then
// warren.yaml, then the defaults, which stand here and nowhere else.
//
// Each setting has one key, such as defaults.memory. In the file it is nested as the dots say; its variable is the key in capitals
// with WARREN_ before it and underscores for dots: WARREN_DEFAULTS_MEMORY.
package config

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/secret"
)

// Config is what a daemon runs with.
type Config struct {
	// DataDir holds everything durable. It is not a setting of the file, which lies in it.
	DataDir string
	// Listen is a TCP address besides the unix socket; empty means none.
	Listen string
	// TLSCert and TLSKey are files in PEM form; with them the TCP address speaks TLS.
	TLSCert, TLSKey string
	// Hosts are the names that a request may call the server by, besides loopback names and the address it listens on.
	Hosts []string
	// Origins are the web origins whose pages may call the server.
	Origins []string
	// AllowMounts are host directories that every user may mount from; the daemon's own user may mount any.
	AllowMounts []AllowedMount
	// Driver and Image are for sandboxes that name none.
	Driver, Image string
	// Docker is how the docker driver finds and takes its engine.
	Docker Docker
	// Defaults are the limits of a sandbox that names none.
	Defaults Limits
	// Budgets limit what one user may hold at a time; 0 means no limit.
	Budgets Budgets
	// IdleTimeout is for sandboxes that name none; 0 means none.
	IdleTimeout time.Duration
	// MaxLifetime is the longest that any sandbox lives, 0 for ever. EvictPaused is how long a sandbox has been paused and unused whose memory
	// may be taken when the disk runs short; 0 means never.
	MaxLifetime, EvictPaused time.Duration
	// LowMemory and LowDisk are what has to stay free of the host's; 0 means 5%, but no more than 512 MiB and 1 GiB.
	LowMemory, LowDisk Size
	// Policy is for sandboxes that name none.
	Policy string
	// Gateway says how the gateway finds the world.
	Gateway Gateway
	// Secrets says where their key is.
	Secrets Secrets
	// Preview says where ports of sandboxes are shown to browsers.
	Preview Preview
	// Snapshots says how memory images are written.
	Snapshots Snapshots
	// Pool is how many executions at most are kept ready.
	Pool uint32
	// Standby is how many sandboxes of templates at most are restored beforehand.
	Standby uint32
	// LogLevel is debug, info, warn or error.
	LogLevel string
	// LogFormat is text or json; empty means text on a terminal and json elsewhere.
	LogFormat string
}

// Docker configures the docker driver.
type Docker struct {
	// Host is the engine's address; empty means DOCKER_HOST, the current docker context, or the usual one.
	Host string
	// Runtime is for sandboxes that name none; empty means the engine's default.
	Runtime string
	// Accept names protections that the engine may lack.
	Accept []string
}

// Gateway says how the gateway finds the world.
type Gateway struct {
	// Resolver is the address of the name server that it asks, HOST:PORT; empty means the host's.
	Resolver string
	// Roots is a file of certificates in PEM form that it trusts besides the host's, for connections that it inspects.
	Roots string
	// Connections is how many connections and requests all sandboxes together may have open, Memory how many bytes may be held for them, and Records how many
	// records a second one may write one by one; 0 means the gateway's own.
	Connections, Records uint32
	Memory               Size
	// Own are networks, in canonical form, whose addresses count as the machine's own: only a rule that names them opens them.
	Own []netip.Prefix
}

// Secrets says where the key of secrets is.
type Secrets struct {
	// Key is file:PATH, env:VARIABLE or kms:ID=COMMAND, see [secret.ParseSource]; empty means a file in the data directory.
	Key string
}

// Preview says where ports of sandboxes are shown to browsers.
type Preview struct {
	// Listen is a TCP address; empty means a free port of loopback, the same each time if it can be, and off none.
	Listen string
	// Domain is what previews are named below; empty means localhost. Cert and Key are files in PEM form for *.Domain.
	Domain, Cert, Key string
	// Plaintext allows an address that other machines reach to be without TLS, for a proxy in front that has it.
	Plaintext bool
}

// Snapshots says how memory images are written.
type Snapshots struct {
	// Key is a file with the key that they are encrypted with; empty leaves them in the clear.
	Key string
	// Compress is always, never, or empty: only small ones are.
	Compress string
}

// Limits of one sandbox.
type Limits struct {
	CPU    CPUs
	Memory Size
	Disk   Size
	PIDs   uint32
}

// AllowedMount is a host directory that every user may mount from, written DIR or DIR:ro, or DIR:rw where they may also write.
type AllowedMount struct {
	Dir      string
	Writable bool
}

func allowedMount(v string) AllowedMount {
	if dir, ok := strings.CutSuffix(v, ":rw"); ok {
		return AllowedMount{Dir: dir, Writable: true}
	}
	return AllowedMount{Dir: strings.TrimSuffix(v, ":ro")}
}

// Budgets of one user.
type Budgets struct {
	Sandboxes uint32
	CPU       CPUs
	Memory    Size
	Disk      Size
}

// pooled is what an execution that is kept ready takes, about.
const pooled = 18 << 20

// Default returns the settings of a host with this many processors and bytes of memory that is told nothing else.
//
// A sandbox gets two processors and 2 GiB, or less where the host has less, so that one sandbox never takes all of a small machine.
// Executions that are kept ready take up to 1% of the memory.
func Default(processors int, memory int64) Config {
	limit := 2 * GiB
	if half := Size(memory / 2); memory > 0 && half < limit {
		limit = max(half/MiB*MiB, 64*MiB)
	}
	return Config{
		Driver: "gvisor",
		Image:  "host",
		Defaults: Limits{
			CPU:    CPUs(1000 * min(2, max(1, processors))),
			Memory: limit,
			Disk:   10 * GiB,
			PIDs:   1024,
		},
		Pool:     uint32(min(max(memory/100/pooled, 2), 10)),
		Standby:  uint32(min(memory/8e9, 2)),
		LogLevel: "info",
	}
}

// setting is one key and how its value is read. A list is written as a YAML list or, in a variable, with commas.
type setting struct {
	key  string
	help string
	set  func(c *Config, values []string) error
	list bool
}

func one(key, help string, set func(c *Config, v string) error) setting {
	return setting{key: key, help: help, set: func(c *Config, vs []string) error { return set(c, vs[0]) }}
}

func text(key, help string, field func(*Config) *string) setting {
	return one(key, help, func(c *Config, v string) error { *field(c) = v; return nil })
}

func list(key, help string, field func(*Config) *[]string) setting {
	return setting{key: key, help: help, list: true, set: func(c *Config, vs []string) error { *field(c) = vs; return nil }}
}

func count(key, help string, field func(*Config) *uint32) setting {
	return one(key, help, func(c *Config, v string) error {
		n, err := strconv.ParseUint(v, 10, 32)
		if err != nil {
			return fmt.Errorf("%q: %w: want a whole number", v, warren.ErrInvalid)
		}
		*field(c) = uint32(n)
		return nil
	})
}

func span(key, help string, field func(*Config) *time.Duration) setting {
	return one(key, help, func(c *Config, v string) error {
		d, err := time.ParseDuration(v)
		if err != nil || d < 0 || d > 0 && d < time.Second {
			return fmt.Errorf("%q: %w: want a duration of a second or more, such as 30m or 12h, or 0 for none", v, warren.ErrInvalid)
		}
		*field(c) = d
		return nil
	})
}

var settings = []setting{
	text("listen", "TCP address besides the unix socket, such as 127.0.0.1:7420", func(c *Config) *string { return &c.Listen }),
	text("tls.cert", "certificate file of the TCP address", func(c *Config) *string { return &c.TLSCert }),
	text("tls.key", "key file of the TCP address", func(c *Config) *string { return &c.TLSKey }),
	list("hosts", "names by which requests may call the server", func(c *Config) *[]string { return &c.Hosts }),
	list("origins", "web origins whose pages may call the server", func(c *Config) *[]string { return &c.Origins }),
	{key: "allow_mounts", help: "host directories that every user may mount from, read-only; with DIR:rw also to write", list: true, set: func(c *Config, vs []string) error {
		c.AllowMounts = nil
		for _, v := range vs {
			c.AllowMounts = append(c.AllowMounts, allowedMount(v))
		}
		return nil
	}},
	text("driver", "driver of sandboxes that name none", func(c *Config) *string { return &c.Driver }),
	text("image", "image of sandboxes that name none", func(c *Config) *string { return &c.Image }),
	text("docker.host", "docker's engine: unix://, ssh:// or tcp:// with TLS (DOCKER_HOST, docker context)", func(c *Config) *string { return &c.Docker.Host }),
	text("docker.runtime", "the engine's runtime for sandboxes that name none, such as runsc", func(c *Config) *string { return &c.Docker.Runtime }),
	list("docker.accept", "protections that the engine may lack: no-user-namespace, no-disk-limit, copied-mounts", func(c *Config) *[]string { return &c.Docker.Accept }),
	one("defaults.cpu", "processors of a sandbox", func(c *Config, v string) error { return c.Defaults.CPU.Set(v) }),
	one("defaults.memory", "memory of a sandbox", func(c *Config, v string) error { return c.Defaults.Memory.Set(v) }),
	one("defaults.disk", "bytes that a sandbox may write outside its workspace", func(c *Config, v string) error { return c.Defaults.Disk.Set(v) }),
	count("defaults.pids", "processes and threads of a sandbox", func(c *Config) *uint32 { return &c.Defaults.PIDs }),
	count("budgets.sandboxes", "sandboxes of one user", func(c *Config) *uint32 { return &c.Budgets.Sandboxes }),
	one("budgets.cpu", "processors of all sandboxes of one user", func(c *Config, v string) error {
		if v == "0" {
			c.Budgets.CPU = 0 // no limit; elsewhere it would be none at all
			return nil
		}
		return c.Budgets.CPU.Set(v)
	}),
	one("budgets.memory", "memory of all sandboxes of one user", func(c *Config, v string) error { return c.Budgets.Memory.Set(v) }),
	one("budgets.disk", "disk of all sandboxes of one user", func(c *Config, v string) error { return c.Budgets.Disk.Set(v) }),
	span("idle_timeout", "pause idle sandboxes that name no time; where that cannot be, remove them", func(c *Config) *time.Duration { return &c.IdleTimeout }),
	span("max_lifetime", "the longest that any sandbox lives (for ever)", func(c *Config) *time.Duration { return &c.MaxLifetime }),
	span("evict_paused", "when half of low.disk is gone, take the memory of sandboxes paused for so long (never)", func(c *Config) *time.Duration { return &c.EvictPaused }),
	one("low.memory", "pause idle sandboxes when the host has less memory (5%, at most 512MiB)", func(c *Config, v string) error { return c.LowMemory.Set(v) }),
	one("low.disk", "make and pause no sandbox when the host has less disk (5%, at most 1GiB)", func(c *Config, v string) error { return c.LowDisk.Set(v) }),
	text("policy", "what sandboxes that name no policy may reach", func(c *Config) *string { return &c.Policy }),
	text("gateway.resolver", "name server that the gateway asks, HOST:PORT (the host's)", func(c *Config) *string { return &c.Gateway.Resolver }),
	text("gateway.roots", "file of certificates that inspected connections trust besides the host's", func(c *Config) *string { return &c.Gateway.Roots }),
	count("gateway.connections", "connections of all sandboxes together, at most (16384)", func(c *Config) *uint32 { return &c.Gateway.Connections }),
	one("gateway.memory", "memory for connections of all sandboxes together (a quarter of the host's)", func(c *Config, v string) error { return c.Gateway.Memory.Set(v) }),
	count("gateway.records", "records a second that one sandbox may write one by one (50)", func(c *Config) *uint32 { return &c.Gateway.Records }),
	{key: "gateway.own", help: "networks that count as this machine's own addresses: only rules that name them open them", list: true,
		set: func(c *Config, vs []string) error {
			c.Gateway.Own = nil
			for _, v := range vs {
				p, err := ownNetwork(v)
				if err != nil {
					return err
				}
				c.Gateway.Own = append(c.Gateway.Own, p)
			}
			return nil
		}},
	text("secrets.key", "key of secrets: file:PATH, env:VARIABLE or kms:ID=COMMAND (secrets/key)", func(c *Config) *string { return &c.Secrets.Key }),
	text("preview.listen", "TCP address of previews, or off (a port of 127.0.0.1: 7080 if it is free)", func(c *Config) *string { return &c.Preview.Listen }),
	text("preview.domain", "previews are PORT-ID.DOMAIN (localhost); needs a certificate for *.DOMAIN", func(c *Config) *string { return &c.Preview.Domain }),
	text("preview.cert", "certificate file of previews", func(c *Config) *string { return &c.Preview.Cert }),
	text("preview.key", "key file of previews", func(c *Config) *string { return &c.Preview.Key }),
	one("preview.plaintext", "true lets previews go without TLS, behind a proxy that has it", func(c *Config, v string) error {
		b, err := strconv.ParseBool(v)
		if err != nil {
			return fmt.Errorf("%q: %w: want true or false", v, warren.ErrInvalid)
		}
		c.Preview.Plaintext = b
		return nil
	}),
	text("snapshots.key", "file with the key, 64 hex digits, that memory images are encrypted with", func(c *Config) *string { return &c.Snapshots.Key }),
	text("snapshots.compress", "compress memory images: always or never (up to 8MiB)", func(c *Config) *string { return &c.Snapshots.Compress }),
	count("pool", "executions kept ready for sandboxes like the last, at most (2 to 10, in 1% of memory)", func(c *Config) *uint32 { return &c.Pool }),
	count("standby", "sandboxes of templates restored beforehand, at most (0 to 2, one for 8 GB of memory)", func(c *Config) *uint32 { return &c.Standby }),
	text("log.level", "debug, info, warn or error", func(c *Config) *string { return &c.LogLevel }),
	text("log.format", "text or json", func(c *Config) *string { return &c.LogFormat }),
}

// ownNetwork reads an address, or a network such as 203.0.113.0/24.
func ownNetwork(v string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(v); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(v)
	switch {
	case err != nil || p.Addr().Is4In6():
		return p, fmt.Errorf("%q: %w: want an address or a network, such as 203.0.113.7 or 203.0.113.0/24", v, warren.ErrInvalid)
	case p != p.Masked():
		return p, fmt.Errorf("%q: %w: it is an address within %s; write that, or the address alone", v, warren.ErrInvalid, p.Masked())
	}
	return p, nil
}

// Variable returns the environment variable of a key.
func Variable(key string) string {
	return "WARREN_" + strings.ToUpper(strings.ReplaceAll(key, ".", "_"))
}

// Setting describes one key, for help texts.
type Setting struct{ Key, Variable, Help string }

// Settings lists every key in the order of the documentation.
func Settings() []Setting {
	out := make([]Setting, len(settings))
	for i, s := range settings {
		out[i] = Setting{s.key, Variable(s.key), s.help}
	}
	return out
}

// Source says where to look besides the defaults.
type Source struct {
	// DataDir is the data directory; empty means [DataDir] of Getenv.
	DataDir string
	// File is a configuration file that must exist; empty means warren.yaml in the data directory, if there is one.
	File string
	// Getenv looks up a variable; nil means os.Getenv.
	Getenv func(string) string
	// Flags holds the values of flags that were given, by key.
	Flags map[string][]string
}

// Load reads the settings of this host.
func Load(src Source) (Config, error) {
	if src.Getenv == nil {
		src.Getenv = os.Getenv
	}
	c := Default(runtime.NumCPU(), totalMemory())
	c.DataDir = src.DataDir
	if c.DataDir == "" {
		dir, err := DataDir(src.Getenv)
		if err != nil {
			return Config{}, err
		}
		c.DataDir = dir
	}
	abs, err := filepath.Abs(c.DataDir)
	if err != nil {
		return Config{}, err
	}
	c.DataDir = abs
	if err := CheckDataDir(abs); err != nil {
		return Config{}, err
	}

	file, must := src.File, true
	if file == "" {
		file, must = filepath.Join(c.DataDir, "warren.yaml"), false
	}
	data, err := os.ReadFile(file)
	switch {
	case err == nil:
		if err := c.apply(file, data); err != nil {
			return Config{}, err
		}
	case must || !errors.Is(err, fs.ErrNotExist):
		return Config{}, fmt.Errorf("read configuration: %w", err)
	}
	for _, s := range settings {
		name := Variable(s.key)
		v := src.Getenv(name)
		if v == "" {
			continue
		}
		values := []string{v}
		if s.list {
			values = strings.Split(v, ",")
		}
		if err := s.set(&c, values); err != nil {
			return Config{}, fmt.Errorf("%s: %w", name, err)
		}
	}
	for _, s := range settings {
		if v := src.Flags[s.key]; len(v) > 0 {
			if err := s.set(&c, v); err != nil {
				return Config{}, fmt.Errorf("%s: %w", s.key, err)
			}
		}
	}
	return c, c.validate()
}

// apply sets what a file says. A key that nobody knows is an error, because a misspelt limit is no limit.
func (c *Config) apply(name string, data []byte) error {
	var root yaml.Node
	if err := yaml.Unmarshal(data, &root); err != nil {
		return fmt.Errorf("%s: %w: %v", name, warren.ErrInvalid, err)
	}
	if len(root.Content) == 0 {
		return nil
	}
	seen := map[string]bool{}
	return c.walk(name, "", root.Content[0], seen)
}

func (c *Config) walk(name, prefix string, n *yaml.Node, seen map[string]bool) error {
	if n.Kind != yaml.MappingNode {
		return fmt.Errorf("%s:%d: %w: want keys and values", name, n.Line, warren.ErrInvalid)
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		key := k.Value
		if prefix != "" {
			key = prefix + "." + key
		}
		if seen[key] {
			return fmt.Errorf("%s:%d: %w: %s stands here twice", name, k.Line, warren.ErrInvalid, key)
		}
		seen[key] = true
		if err := c.assign(name, key, v, seen); err != nil {
			return err
		}
	}
	return nil
}

func (c *Config) assign(name, key string, v *yaml.Node, seen map[string]bool) error {
	for _, s := range settings {
		if s.key == key {
			values, err := scalars(v, s.list)
			if err == nil {
				err = s.set(c, values)
			}
			if err != nil {
				return fmt.Errorf("%s:%d: %s: %w", name, v.Line, key, err)
			}
			return nil
		}
		if strings.HasPrefix(s.key, key+".") {
			return c.walk(name, key, v, seen)
		}
	}
	return fmt.Errorf("%s:%d: %w: unknown key %q; `warren serve --help` lists all keys", name, v.Line, warren.ErrInvalid, key)
}

func scalars(v *yaml.Node, list bool) ([]string, error) {
	if v.Kind == yaml.ScalarNode {
		return []string{v.Value}, nil
	}
	if !list || v.Kind != yaml.SequenceNode {
		return nil, fmt.Errorf("%w: want a single value", warren.ErrInvalid)
	}
	var out []string
	for _, e := range v.Content {
		if e.Kind != yaml.ScalarNode {
			return nil, fmt.Errorf("%w: want a list of values", warren.ErrInvalid)
		}
		out = append(out, e.Value)
	}
	return out, nil
}

func (c *Config) validate() error {
	if (c.TLSCert == "") != (c.TLSKey == "") {
		return fmt.Errorf("tls: %w: a certificate and a key are needed together; give --tls-cert and --tls-key", warren.ErrInvalid)
	}
	if c.TLSCert != "" && c.Listen == "" {
		return fmt.Errorf("tls: %w: a certificate without an address has no use; give --listen ADDRESS", warren.ErrInvalid)
	}
	if c.Listen != "" {
		if err := c.validateListen(); err != nil {
			return err
		}
	}
	for _, m := range c.AllowMounts {
		if !filepath.IsAbs(m.Dir) {
			return fmt.Errorf("allow_mounts: %w: %q is not an absolute path; want DIR, DIR:ro or DIR:rw", warren.ErrInvalid, m.Dir)
		}
	}
	switch {
	case c.Defaults.CPU == 0 || c.Defaults.Memory == 0 || c.Defaults.Disk == 0 || c.Defaults.PIDs == 0:
		return fmt.Errorf("defaults: %w: no limit may be 0", warren.ErrInvalid)
	case c.Driver == "" || c.Image == "":
		return fmt.Errorf("driver and image: %w: neither may be empty", warren.ErrInvalid)
	}
	if r := c.Gateway.Resolver; r != "" {
		if a, err := netip.ParseAddrPort(r); err != nil || a.Port() == 0 {
			return fmt.Errorf("gateway.resolver %q: %w: want the address of a name server with its port, such as 192.0.2.53:53", r, warren.ErrInvalid)
		}
	}
	if f := c.Gateway.Roots; f != "" && !filepath.IsAbs(f) {
		return fmt.Errorf("gateway.roots %q: %w: want an absolute path", f, warren.ErrInvalid)
	}
	if m := c.Gateway.Memory; m != 0 && m < 64<<20 {
		return fmt.Errorf("gateway.memory %d: %w: want 64MiB or more: a gateway without a connection holds some", int64(m), warren.ErrInvalid)
	}
	if n := c.Gateway.Connections; n != 0 && n < 64 || n > 1<<20 {
		return fmt.Errorf("gateway.connections %d: %w: want from 64 to 1048576", n, warren.ErrInvalid)
	}
	if n := c.Gateway.Records; n > 100_000 {
		return fmt.Errorf("gateway.records %d: %w: want at most 100000", n, warren.ErrInvalid)
	}
	if k := c.Secrets.Key; k != "" {
		if _, err := secret.ParseSource(k); err != nil {
			return fmt.Errorf("secrets.key: %w: %w", err, warren.ErrInvalid)
		}
	}
	if err := c.Preview.validate(); err != nil {
		return err
	}
	if k := c.Snapshots.Key; k != "" && !filepath.IsAbs(k) {
		return fmt.Errorf("snapshots.key %q: %w: want an absolute path: the server has another working directory than you", k, warren.ErrInvalid)
	}
	switch c.Snapshots.Compress {
	case "", "always", "never":
	default:
		return fmt.Errorf("snapshots.compress %q: %w: want always, never, or nothing", c.Snapshots.Compress, warren.ErrInvalid)
	}
	switch c.LogLevel {
	case "debug", "info", "warn", "error":
	default:
		return fmt.Errorf("log.level %q: %w: want debug, info, warn or error", c.LogLevel, warren.ErrInvalid)
	}
	switch c.LogFormat {
	case "", "text", "json":
	default:
		return fmt.Errorf("log.format %q: %w: want text or json", c.LogFormat, warren.ErrInvalid)
	}
	return nil
}

// validateListen refuses what would send bearer tokens over a network in the clear.
func (c *Config) validateListen() error {
	host, _, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return fmt.Errorf("listen %q: %w: want ADDRESS:PORT, such as 127.0.0.1:7420", c.Listen, warren.ErrInvalid)
	}
	ip := net.ParseIP(host)
	if host == "localhost" || ip != nil && ip.IsLoopback() || c.TLSCert != "" {
		return nil
	}
	return fmt.Errorf("listen %q: %w: an address that other machines reach needs TLS, or tokens could be read on the way; give --tls-cert and --tls-key, or listen on 127.0.0.1", c.Listen, warren.ErrInvalid)
}

// validate refuses what could not work, and what would send links and cookies over a network in the clear.
func (p *Preview) validate() error {
	if p.Listen == "off" {
		return nil
	}
	bad := func(key, value, what string) error {
		return fmt.Errorf("preview.%s %q: %w: %s", key, value, warren.ErrInvalid, what)
	}
	secure := p.Cert != "" || p.Key != ""
	if secure && (p.Cert == "" || p.Key == "") {
		return bad("cert", p.Cert, "a certificate and a key are needed together; set preview.cert and preview.key")
	}
	for _, f := range []struct{ key, file string }{{"cert", p.Cert}, {"key", p.Key}} {
		if f.file != "" && !filepath.IsAbs(f.file) {
			return bad(f.key, f.file, "want an absolute path: the server has another working directory than you")
		}
	}
	if d := p.Domain; d != "" {
		if len(d) > 200 || strings.Trim(d, "abcdefghijklmnopqrstuvwxyz0123456789-.") != "" || !strings.Contains(d, ".") || strings.Contains("."+d+".", "..") || strings.Contains("."+d+".", ".-") || strings.Contains("."+d+".", "-.") {
			return bad("domain", d, "want a name in small letters, such as preview.example.com")
		}
		if _, err := netip.ParseAddr(d); err == nil {
			return bad("domain", d, "want a name, below which each preview has one of its own")
		}
		if !secure && !p.Plaintext {
			return bad("domain", d, "it needs a certificate for *."+d+"; set preview.cert and preview.key, or preview.plaintext behind a proxy that has one")
		}
	} else if secure {
		return bad("cert", p.Cert, "a certificate is for a domain; set preview.domain")
	}
	if p.Listen == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(p.Listen)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 {
		return bad("listen", p.Listen, "want ADDRESS:PORT, such as 127.0.0.1:7080, or off")
	}
	ip := net.ParseIP(host)
	if host == "localhost" || ip != nil && ip.IsLoopback() || secure || p.Plaintext {
		return nil
	}
	return bad("listen", p.Listen, "an address that other machines reach needs TLS, or links could be read on the way; set preview.domain, preview.cert and preview.key, or listen on 127.0.0.1")
}

// DataDir returns the data directory: WARREN_HOME, else /var/lib/warren for root, else warren in the XDG data
// directory. Elsewhere than on Linux, where no daemon runs, it is below the user's configuration directory.
func DataDir(getenv func(string) string) (string, error) {
	if dir := getenv("WARREN_HOME"); dir != "" {
		return filepath.Abs(dir)
	}
	if runtime.GOOS == "linux" && os.Geteuid() == 0 {
		return "/var/lib/warren", nil
	}
	if dir := getenv("XDG_DATA_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "warren"), nil
	}
	if runtime.GOOS != "linux" {
		dir, err := os.UserConfigDir()
		if err != nil {
			return "", fmt.Errorf("find a data directory: %w; set WARREN_HOME", err)
		}
		return filepath.Join(dir, "warren"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("find a data directory: %w; set WARREN_HOME", err)
	}
	return filepath.Join(home, ".local", "share", "warren"), nil
}

// maxDataDir bounds the length of a data directory's path: the longest socket below it has to fit into the 107 bytes of a
// unix address.
const maxDataDir = 80

// CheckDataDir refuses a path below which sockets cannot lie.
func CheckDataDir(dir string) error {
	if len(dir) > maxDataDir {
		return fmt.Errorf("data directory %s: %w: its path is longer than %d bytes, and sockets lie below it; set WARREN_HOME to a shorter one", dir, warren.ErrInvalid, maxDataDir)
	}
	return nil
}

// Socket is the path of the daemon's unix socket in a data directory.
func Socket(dataDir string) string { return filepath.Join(dataDir, "warren.sock") }
