package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
)

func TestParseSize(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want Size
	}{
		{"0", 0}, {"12", 12}, {"12b", 12}, {"1k", 1024}, {"512MiB", 512 * MiB}, {"512m", 512 * MiB},
		{"2G", 2 * GiB}, {"1.5GiB", GiB + 512*MiB}, {"1GB", 1e9}, {" 3 TiB ", 3 * TiB}, {"9223372036854775807", 9223372036854775807},
	} {
		got, err := ParseSize(tt.in)
		if err != nil || got != tt.want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", tt.in, got, err, tt.want)
		}
	}
	for _, in := range []string{"", "MiB", "-1", "1.5", "12 parsecs", "99999999999T", "9223372036854775808", "1e3", "1..5G"} {
		if got, err := ParseSize(in); !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("ParseSize(%q) = %d, %v; want ErrInvalid", in, got, err)
		}
	}
}

func TestSizeString(t *testing.T) {
	for size, want := range map[Size]string{0: "0B", 1023: "1023B", KiB: "1KiB", 512 * MiB: "512MiB", GiB + 512*MiB: "1.5GiB", 3 * TiB: "3TiB"} {
		if got := size.String(); got != want {
			t.Errorf("Size(%d).String() = %q, want %q", int64(size), got, want)
		}
	}
}

func TestParseCPUs(t *testing.T) {
	for in, want := range map[string]CPUs{"1": 1000, "0.5": 500, "1.25": 1250, " 2 ": 2000} {
		if got, err := ParseCPUs(in); err != nil || got != want {
			t.Errorf("ParseCPUs(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "0", "-1", "x", "NaN", "Inf", "1e9"} {
		if _, err := ParseCPUs(in); !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("ParseCPUs(%q): %v, want ErrInvalid", in, err)
		}
	}
}

func TestDefaultFitsTheHost(t *testing.T) {
	small, large := Default(1, int64(GiB)), Default(64, int64(256*GiB))
	if small.Defaults.CPU != 1000 || small.Defaults.Memory != 512*MiB || small.Pool != 2 || small.Standby != 0 {
		t.Errorf("on a small host: %+v, a pool of %d", small.Defaults, small.Pool)
	}
	if large.Defaults.CPU != 2000 || large.Defaults.Memory != 2*GiB || large.Defaults.Disk != 10*GiB || large.Defaults.PIDs != 1024 || large.Pool != 10 || large.Standby != 2 {
		t.Errorf("on a large host: %+v, a pool of %d", large.Defaults, large.Pool)
	}
}

func env(m map[string]string) func(string) string { return func(k string) string { return m[k] } }

func TestPrecedence(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "warren.yaml"), "driver: file\nimage: file\nidle_timeout: 30m\ndefaults:\n  memory: 1GiB\n  pids: 5\nallow_mounts: [/a, /b]\n")
	c, err := Load(Source{
		DataDir: dir,
		Getenv:  env(map[string]string{"WARREN_IMAGE": "env", "WARREN_BUDGETS_CPU": "0", "WARREN_DEFAULTS_PIDS": "6", "WARREN_ALLOW_MOUNTS": "/c,/d:rw,/e:ro,/f:rw:ro"}),
		Flags:   map[string][]string{"defaults.pids": {"7"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if c.Driver != "file" || c.Image != "env" || c.Defaults.PIDs != 7 || c.Defaults.Memory != GiB || c.IdleTimeout != 30*time.Minute {
		t.Errorf("got %+v", c)
	}
	if want := []AllowedMount{{"/c", false}, {"/d", true}, {"/e", false}, {"/f:rw", false}}; !slices.Equal(c.AllowMounts, want) {
		t.Errorf("AllowMounts = %v, want %v", c.AllowMounts, want)
	}
	if c.Defaults.Disk != 10*GiB {
		t.Errorf("the default is gone: disk %v", c.Defaults.Disk)
	}
}

func TestBadConfiguration(t *testing.T) {
	for _, tt := range []struct{ name, file, want string }{
		{"unknown key", "drivr: x\n", `:1: invalid: unknown key "drivr"`},
		{"unknown nested key", "defaults:\n  memry: 1G\n", `:2: invalid: unknown key "defaults.memry"`},
		{"duplicate", "driver: a\ndriver: b\n", "driver"},
		{"bad size", "defaults:\n  memory: lots\n", "defaults.memory"},
		{"list for one", "driver: [a, b]\n", "want a single value"},
		{"scalar for section", "defaults: 5\n", "want keys and values"},
		{"no YAML", "a: [\n", "invalid"},
		{"zero limit", "defaults:\n  pids: 0\n", "no limit may be 0"},
		{"clear text on a network", "listen: 0.0.0.0:7420\n", "needs TLS"},
		{"clear text on all interfaces", "listen: \":7420\"\n", "needs TLS"},
		{"no port", "listen: 127.0.0.1\n", "want ADDRESS:PORT"},
		{"half of TLS", "listen: 127.0.0.1:1\ntls: {cert: /x}\n", "needed together"},
		{"relative mount", "allow_mounts: [x]\n", "not an absolute path"},
		{"relative writable mount", "allow_mounts: [\"x:rw\"]\n", `"x" is not an absolute path`},
		{"level", "log: {level: loud}\n", "want debug"},
		{"format", "log: {format: xml}\n", "want text or json"},
		{"own network", "gateway: {own: [203.0.113.0/24, here]}\n", `"here": invalid: want an address or a network`},
		{"own address as a network", "gateway: {own: 203.0.113.7/24}\n", "within 203.0.113.0/24; write that, or the address alone"},
		{"mapped network", "gateway: {own: [\"::ffff:1.2.3.0/120\"]}\n", "want an address or a network"},
		{"duration", "idle_timeout: soon\n", "want a duration"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, filepath.Join(dir, "warren.yaml"), tt.file)
			_, err := Load(Source{DataDir: dir, Getenv: env(nil)})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			if !errors.Is(err, warren.ErrInvalid) {
				t.Errorf("%v does not match ErrInvalid", err)
			}
		})
	}
}

// TestPreviewSettings refuses what would show links to a network, and what cannot work.
func TestPreviewSettings(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"listen: off", ""}, {"listen: 127.0.0.1:7080", ""}, {"listen: '[::1]:80'", ""}, {"listen: localhost:7080", ""},
		{"listen: 0.0.0.0:7080", "needs TLS"}, {"listen: ':7080'", "needs TLS"}, {"listen: 192.0.2.1:7080", "needs TLS"}, {"listen: '7080'", "want ADDRESS:PORT"},
		{"listen: 127.0.0.1:0", "want ADDRESS:PORT"}, {"listen: 127.0.0.1:http", "want ADDRESS:PORT"}, {"listen: 127.0.0.1:99999", "want ADDRESS:PORT"},
		{"plaintext: true, listen: 0.0.0.0:7080", ""}, {"plaintext: maybe", "want true or false"},
		{"domain: p.example.com", "needs a certificate for *.p.example.com"}, {"domain: p.example.com, plaintext: true", ""},
		{"domain: p.example.com, cert: /c, key: /k, listen: ':443'", ""}, {"domain: p.example.com, cert: /c", "needed together"}, {"cert: /c, key: /k", "set preview.domain"},
		{"domain: p.example.com, cert: c, key: /k", "absolute path"}, {"domain: P.example.com, plaintext: true", "small letters"}, {"domain: localhost, plaintext: true", "want a name"},
		{"domain: 192.0.2.1, plaintext: true", "want a name"}, {"domain: .example.com, plaintext: true", "want a name"}, {"domain: example.com., plaintext: true", "want a name"},
		{"domain: -x.example.com, plaintext: true", "want a name"}, {"domain: '*.example.com', plaintext: true", "want a name"}, {"port: 1", "unknown key"},
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "warren.yaml"), []byte("preview: {"+tt.text+"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Load(Source{DataDir: dir, Getenv: func(string) string { return "" }})
		if tt.want == "" && err != nil || tt.want != "" && (!errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v; want %q", tt.text, err, tt.want)
		}
	}
}

func TestNamedFileMustExist(t *testing.T) {
	if _, err := Load(Source{DataDir: t.TempDir(), File: "/nonexistent.yaml", Getenv: env(nil)}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	if _, err := Load(Source{DataDir: t.TempDir(), Getenv: env(nil)}); err != nil {
		t.Errorf("without a file: %v", err)
	}
}

func TestDataDir(t *testing.T) {
	if dir, err := DataDir(env(map[string]string{"WARREN_HOME": "/x/y/.."})); err != nil || dir != "/x" {
		t.Errorf("WARREN_HOME: %q, %v", dir, err)
	}
	if os.Geteuid() == 0 {
		if dir, err := DataDir(env(nil)); err != nil || dir != "/var/lib/warren" {
			t.Errorf("root: %q, %v", dir, err)
		}
	}
}

func TestLongDataDirIsRefused(t *testing.T) {
	long := "/" + strings.Repeat("x", maxDataDir)
	if _, err := Load(Source{DataDir: long, Getenv: env(nil)}); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("got %v", err)
	}
}

func TestSettingsHaveVariablesAndHelp(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range Settings() {
		if s.Help == "" || seen[s.Variable] {
			t.Errorf("setting %+v has no help or a taken variable", s)
		}
		seen[s.Variable] = true
	}
}

func FuzzApply(f *testing.F) {
	f.Add("driver: x\ndefaults: {memory: 1G}\n")
	f.Add("a: &a [*a]")
	f.Fuzz(func(t *testing.T, file string) {
		c := Default(2, int64(GiB))
		_ = c.apply("warren.yaml", []byte(file))
	})
}

func write(t *testing.T, name, content string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestOwnNetworks(t *testing.T) {
	c, err := Load(Source{DataDir: t.TempDir(), Getenv: env(map[string]string{"WARREN_GATEWAY_OWN": "203.0.113.7,198.51.100.0/24,2001:db8::/32,::ffff:192.0.2.1"})})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(c.Gateway.Own), "[203.0.113.7/32 198.51.100.0/24 2001:db8::/32 192.0.2.1/32]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
