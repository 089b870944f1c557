//go:build linux

package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/system"
	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/testenv"
)

func TestFindHost(t *testing.T) {
	config := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(config, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	meta := func(name string) string {
		sum := sha256.Sum256([]byte(name))
		return "contexts/meta/" + hex.EncodeToString(sum[:]) + "/meta.json"
	}
	tls := func(name string) string {
		return strings.Replace(filepath.Dir(meta(name)), "meta", "tls", 1) + "/docker/"
	}
	write("config.json", `{"currentContext":"team","auths":{}}`)
	write(meta("team"), `{"Name":"team","Endpoints":{"docker":{"Host":"unix:///run/team.sock"}}}`)
	write(meta("far"), `{"Name":"far","Endpoints":{"docker":{"Host":"ssh://user@far"}}}`)
	write(meta("keys"), `{"Name":"keys","Endpoints":{"docker":{"Host":"tcp://far:2376","SkipTLSVerify":false}}}`)
	write(tls("keys")+"ca.pem", "")
	write(meta("trusting"), `{"Name":"trusting","Endpoints":{"docker":{"Host":"tcp://far:2376","SkipTLSVerify":true}}}`)
	write(meta("plain"), `{"Name":"plain","Endpoints":{"docker":{"Host":"tcp://far:2375"}}}`)
	for name, tt := range map[string]struct {
		configured string
		env        map[string]string
		want       string
		certs      string
		err        error
	}{
		"configured":       {configured: "unix:///a", env: map[string]string{"DOCKER_HOST": "unix:///b"}, want: "unix:///a"},
		"variable":         {env: map[string]string{"DOCKER_HOST": "unix:///b"}, want: "unix:///b"},
		"current context":  {want: "unix:///run/team.sock"},
		"named context":    {env: map[string]string{"DOCKER_CONTEXT": "far"}, want: "ssh://user@far"},
		"context with TLS": {env: map[string]string{"DOCKER_CONTEXT": "keys"}, want: "tcp://far:2376", certs: filepath.Join(config, tls("keys"))},
		"variable wins":    {env: map[string]string{"DOCKER_CONTEXT": "far", "DOCKER_HOST": "unix:///b"}, want: "unix:///b"},
		"unverified":       {env: map[string]string{"DOCKER_CONTEXT": "trusting"}, err: errors.ErrUnsupported},
		"context in clear": {env: map[string]string{"DOCKER_CONTEXT": "plain"}, want: "tcp://far:2375", err: errors.ErrUnsupported},
		"lost context":     {env: map[string]string{"DOCKER_CONTEXT": "lost"}, err: warren.ErrInvalid},
		"in clear":         {env: map[string]string{"DOCKER_HOST": "tcp://10.0.0.1:2375"}, want: "tcp://10.0.0.1:2375", err: errors.ErrUnsupported},
		"loopback":         {env: map[string]string{"DOCKER_HOST": "tcp://127.0.0.1:2375"}, want: "tcp://127.0.0.1:2375"},
		"with TLS":         {env: map[string]string{"DOCKER_HOST": "tcp://10.0.0.1:2376", "DOCKER_TLS_VERIFY": "1"}, want: "tcp://10.0.0.1:2376", certs: config},
		"with keys":        {env: map[string]string{"DOCKER_HOST": "tcp://10.0.0.1:2376", "DOCKER_CERT_PATH": "/keys"}, want: "tcp://10.0.0.1:2376", certs: "/keys"},
		"ssh":              {configured: "ssh://ada@far:2222/run/docker.sock", want: "ssh://ada@far:2222/run/docker.sock"},
		"ssh, a password":  {configured: "ssh://ada:secret@far", want: "ssh://ada:secret@far", err: warren.ErrInvalid},
		"ssh, an option":   {configured: "ssh://-oProxyCommand=x", want: "ssh://-oProxyCommand=x", err: warren.ErrInvalid},
		"ssh, a command":   {configured: "ssh://far/run/$(x)", want: "ssh://far/run/$(x)", err: warren.ErrInvalid},
		"a password":       {configured: "tcp://ada:secret@127.0.0.1:2375", want: "tcp://ada:secret@127.0.0.1:2375", err: warren.ErrInvalid},
		"one in clear":     {env: map[string]string{"DOCKER_HOST": "tcp://ada:secret@far:2375"}, want: "tcp://ada:secret@far:2375", err: warren.ErrInvalid},
		"one of no scheme": {configured: "http://ada:secret@far", want: "http://ada:secret@far", err: errors.ErrUnsupported},
		"one in nonsense":  {configured: "tcp://ada:secret@far:port%", want: "tcp://ada:secret@far:port%", err: warren.ErrInvalid},
		"one in a word":    {configured: "tcp:ada:secret@far", want: "tcp:ada:secret@far", err: errors.ErrUnsupported},
		"unknown":          {configured: "npipe:////./pipe/x", want: "npipe:////./pipe/x", err: errors.ErrUnsupported},
	} {
		getenv := func(k string) string {
			if k == "DOCKER_CONFIG" {
				return config
			}
			return tt.env[k]
		}
		got, err := findHost(tt.configured, getenv)
		if got.host != tt.want || strings.TrimSuffix(got.certs, "/") != strings.TrimSuffix(tt.certs, "/") || !errors.Is(err, tt.err) {
			t.Errorf("%s: %+v, %v; want %q, %q, %v", name, got, err, tt.want, tt.certs, tt.err)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error has a password: %v", name, err)
		}
	}
}

// goodEngine is one that gives everything.
func goodEngine() system.Info {
	return system.Info{
		ServerVersion: "27.0", Driver: "zfs", DockerRootDir: "/var/lib/docker/100000.100000", CgroupVersion: "2",
		MemoryLimit: true, PidsLimit: true, CPUCfsPeriod: true, CPUCfsQuota: true, DefaultRuntime: "runc",
		SecurityOptions: []string{"name=seccomp,profile=builtin", "name=userns", "name=cgroupns"},
		Runtimes:        map[string]system.RuntimeWithStatus{"runc": {}, "runsc": {}},
	}
}

// TestProfile takes one protection after the other from an engine: each time a sandbox has to be refused.
func TestProfile(t *testing.T) {
	without := func(f func(*system.Info)) system.Info { i := goodEngine(); f(&i); return i }
	noUserns := without(func(i *system.Info) { i.SecurityOptions = i.SecurityOptions[:1] })
	noQuota := without(func(i *system.Info) {
		i.Driver, i.DriverStatus = "overlay2", [][2]string{{"Backing Filesystem", "extfs"}}
	})
	for name, tt := range map[string]struct {
		info    system.Info
		version string
		options map[string]string
		accept  []string
		err     error
		says    string
	}{
		"all there":          {info: goodEngine()},
		"another runtime":    {info: goodEngine(), options: map[string]string{"runtime": "runsc"}},
		"runtime not there":  {info: goodEngine(), options: map[string]string{"runtime": "kata"}, err: warren.ErrInvalid, says: "runc, runsc"},
		"old":                {info: goodEngine(), version: "1.39", err: errors.ErrUnsupported, says: "1.41"},
		"no seccomp":         {info: without(func(i *system.Info) { i.SecurityOptions = i.SecurityOptions[1:] }), err: errors.ErrUnsupported, says: "seccomp"},
		"seccomp off":        {info: without(func(i *system.Info) { i.SecurityOptions[0] = "name=seccomp,profile=unconfined" }), err: errors.ErrUnsupported, says: "switched off"},
		"no pids limit":      {info: without(func(i *system.Info) { i.PidsLimit = false }), err: errors.ErrUnsupported, says: "pids"},
		"no memory limit":    {info: without(func(i *system.Info) { i.MemoryLimit = false }), err: errors.ErrUnsupported, says: "memory"},
		"no processor limit": {info: without(func(i *system.Info) { i.CPUCfsQuota = false }), err: errors.ErrUnsupported, says: "cpu"},
		"rootless":           {info: without(func(i *system.Info) { i.SecurityOptions = append(i.SecurityOptions, "name=rootless") }), err: errors.ErrUnsupported, says: "rootless"},
		"rootless accepted": {info: without(func(i *system.Info) {
			i.SecurityOptions = []string{"name=seccomp,profile=builtin", "name=rootless"}
		}), accept: []string{AcceptNoUserNamespace}},
		"ids unknown":        {info: without(func(i *system.Info) { i.DockerRootDir = "/var/lib/docker" }), err: errors.ErrUnsupported, says: "which ids"},
		"no userns":          {info: noUserns, err: errors.ErrUnsupported, says: "WARREN_DOCKER_ACCEPT=no-user-namespace"},
		"no userns accepted": {info: noUserns, accept: []string{AcceptNoUserNamespace}},
		"no userns, runsc":   {info: noUserns, options: map[string]string{"runtime": "runsc"}},
		"no quota":           {info: noQuota, err: errors.ErrUnsupported, says: "WARREN_DOCKER_ACCEPT=no-disk-limit"},
		"no quota accepted":  {info: noQuota, accept: []string{AcceptNoDiskLimit}},
		"the wrong accepted": {info: noQuota, accept: []string{AcceptNoUserNamespace}, err: errors.ErrUnsupported, says: "disk"},
		"btrfs":              {info: without(func(i *system.Info) { i.Driver = "btrfs" }), err: errors.ErrUnsupported, says: "btrfs"},
		"overlay2 on xfs": {info: without(func(i *system.Info) {
			i.Driver, i.DriverStatus = "overlay2", [][2]string{{"Backing Filesystem", "xfs"}}
		})},
	} {
		t.Run(name, func(t *testing.T) {
			version := tt.version
			if version == "" {
				version = "1.47"
			}
			e := &engine{info: tt.info, version: version}
			e.ids()
			e.judge()
			d := &Driver{opts: Options{Accept: tt.accept}}
			p, err := d.plan(e, tt.options)
			if !errors.Is(err, tt.err) || err != nil && !strings.Contains(err.Error(), tt.says) {
				t.Fatalf("%v; want %v that says %q", err, tt.err, tt.says)
			}
			if err == nil && p.base != map[bool]uint32{true: 100000, false: 0}[e.userns] {
				t.Errorf("a container's root is %d", p.base)
			}
			for _, f := range e.findings {
				if f.Status != "ok" && f.Hint == "" {
					t.Errorf("%s is %s without a hint", f.Name, f.Status)
				}
			}
		})
	}
}

// TestContainer looks at what the engine is asked for: nothing may widen the boundary.
func TestContainer(t *testing.T) {
	spec := &driver.Spec{
		ID: "s1", Hostname: "box", Limits: driver.Limits{CPUMillis: 1500, Memory: 1 << 30, Disk: 5 << 30, PIDs: 77},
		Env: []string{"A=b"}, Labels: map[string]string{"team": "x", labelInstallation: "forged"},
	}
	own := ownership{"0123456789abcdef"}
	config, host := containerOf(spec, &plan{runtime: "runsc", quota: true, filter: "F"}, "sha256:x", &stage{}, own.of(spec, "try"))
	if host.Privileged || host.PublishAllPorts || len(host.PortBindings) > 0 || len(host.Devices) > 0 || len(host.Binds) > 0 || len(host.VolumesFrom) > 0 ||
		host.PidMode != "" || host.UTSMode != "" || host.UsernsMode != "" || host.NetworkMode != "none" || host.IpcMode != "private" || host.CgroupnsMode != "private" {
		t.Errorf("the container shares something with the host: %+v", host)
	}
	if !slices.Equal(host.CapDrop, []string{"ALL"}) || !slices.Equal(host.SecurityOpt, []string{"no-new-privileges", "seccomp=F"}) {
		t.Errorf("capabilities %v, security options %v", host.CapDrop, host.SecurityOpt)
	}
	for _, c := range []string{"SYS_ADMIN", "NET_ADMIN", "NET_RAW", "SYS_MODULE", "MKNOD", "DAC_READ_SEARCH", "SYS_RAWIO", "BPF"} {
		if slices.Contains(host.CapAdd, c) {
			t.Errorf("the container has CAP_%s", c)
		}
	}
	if host.CPUQuota != 150_000 || host.CPUPeriod != 100_000 || *host.PidsLimit != 77 || host.Memory < 1<<30 || host.MemorySwap != host.Memory ||
		host.StorageOpt["size"] != "5368709120" {
		t.Errorf("limits %+v, %v", host.Resources, host.StorageOpt)
	}
	if config.Labels[labelInstallation] != own.installation || config.Labels["team"] != "x" || config.Labels[labelSandbox] != "s1" {
		t.Errorf("labels %v", config.Labels)
	}
}

// TestSystemCallFilter wants the filter to be a list of what is allowed, without what has no place in a sandbox.
func TestSystemCallFilter(t *testing.T) {
	var p struct {
		DefaultAction string
		Syscalls      []struct {
			Names    []string
			Action   string
			Args     []struct{ Index, Value uint64 }
			Includes *struct{ Caps []string }
		}
	}
	if err := json.Unmarshal([]byte(systemCallFilter()), &p); err != nil {
		t.Fatal(err)
	}
	if p.DefaultAction != "SCMP_ACT_ERRNO" {
		t.Errorf("what is not named is %s", p.DefaultAction)
	}
	allowed := map[string]bool{}
	sockets := 0
	for _, s := range p.Syscalls {
		for _, name := range s.Names {
			if s.Action == "SCMP_ACT_ALLOW" && (s.Includes == nil || len(s.Includes.Caps) == 0) {
				allowed[name] = true
			}
			if name == "socket" {
				sockets++
				if len(s.Args) == 0 || s.Args[0].Index != 0 {
					t.Errorf("sockets of any kind are allowed: %+v", s)
				}
			}
		}
	}
	for _, name := range []string{"read", "openat", "execve", "clone", "epoll_wait", "socket", "ptrace"} {
		if !allowed[name] {
			t.Errorf("%s is not allowed", name)
		}
	}
	for _, name := range []string{"io_uring_setup", "bpf", "userfaultfd", "keyctl", "mount", "unshare", "setns", "kexec_load", "init_module", "socketcall", "open_by_handle_at"} {
		if allowed[name] {
			t.Errorf("%s is allowed", name)
		}
	}
	if sockets != len(allowedSockets) {
		t.Errorf("%d rules for sockets, want %d", sockets, len(allowedSockets))
	}
}

func TestOwns(t *testing.T) {
	own := ownership{"0123456789abcdef"}
	labels := func(installation, id string) map[string]string {
		return map[string]string{labelInstallation: installation, labelSandbox: id}
	}
	for name, tt := range map[string]struct {
		name   string
		labels map[string]string
		want   bool
	}{
		"ours":                 {"/warren-01234567-s1", labels(own.installation, "s1"), true},
		"another installation": {"/warren-01234567-s1", labels("0123456700000000", "s1"), false},
		"another sandbox":      {"/warren-01234567-s1", labels(own.installation, "s2"), false},
		"another name":         {"/web", labels(own.installation, "s1"), false},
		"only the name":        {"/warren-01234567-s1", nil, false},
		"no id":                {"/warren-01234567-", labels(own.installation, ""), false},
	} {
		if _, got := own.owns(tt.name, tt.labels); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestExit(t *testing.T) {
	for _, tt := range []struct {
		state container.State
		want  string
	}{
		{container.State{Status: "exited", ExitCode: 137, OOMKilled: true}, "oom"},
		{container.State{Status: "exited", ExitCode: 137}, "killed"},
		{container.State{Status: "exited", ExitCode: 143}, "killed"},
		{container.State{Status: "exited", ExitCode: 1}, "exited"},
		{container.State{Status: "exited", ExitCode: 0, OOMKilled: true}, "exited"}, // one of its processes was
		{container.State{Status: "dead", ExitCode: 0}, "lost"},
	} {
		if got := exitOf(&tt.state); got.Reason != tt.want || got.Time.IsZero() {
			t.Errorf("%+v: %+v, want %s", tt.state, got, tt.want)
		}
	}
}

// TestEnded looks at containers that end as a guest does that was asked to: whether the engine went away says who asked.
func TestEnded(t *testing.T) {
	at := func(minute int) time.Time { return time.Date(2030, 1, 1, 12, minute, 0, 0, time.UTC) }
	for name, tt := range map[string]struct {
		host  string
		code  int
		at    time.Time
		asked bool
		want  string
	}{
		"by itself":                      {code: 0, at: at(5), want: "exited"},
		"while the engine was away":      {code: 0, at: at(15), want: "lost"},
		"killed then":                    {code: 137, at: at(15), want: "lost"},
		"failed then":                    {code: 3, at: at(15), want: "exited"},
		"between":                        {code: 0, at: at(25), want: "exited"},
		"the engine is still away":       {code: 0, at: at(35), want: "lost"},
		"asked to":                       {code: 0, at: at(5), asked: true, want: "killed"},
		"found dead":                     {code: 255, at: at(5), want: "lost"},
		"by another clock":               {host: "ssh://far", code: 0, at: at(15), want: "exited"},
		"by another clock, asked to end": {host: "ssh://far", code: 143, at: at(15), asked: true, want: "killed"},
	} {
		host := tt.host
		if host == "" {
			host = "unix:///x"
		}
		d := &Driver{at: endpoint{host: host}, signalled: map[string]bool{"c": tt.asked}, absences: []absence{{at(10), at(20)}, {from: at(30)}}}
		got := d.ended(&container.InspectResponse{ID: "c", State: &container.State{Status: "exited", ExitCode: tt.code, FinishedAt: tt.at.Format(time.RFC3339Nano)}})
		if got.Reason != tt.want || (got.Reason == "lost" || tt.asked) && !strings.Contains(got.Message, "live-restore") {
			t.Errorf("%s: %+v, want %s", name, got, tt.want)
		}
	}
}

func TestExecStream(t *testing.T) {
	piece := func(kind byte, text string) []byte {
		b := make([]byte, execHeader, execHeader+len(text))
		b[0] = kind
		binary.BigEndian.PutUint32(b[4:], uint32(len(text)))
		return append(b, text...)
	}
	all := slices.Concat(piece(1, "one "), piece(2, "noise"), piece(1, ""), piece(1, "two"))
	s := &execStream{r: bytes.NewReader(all)}
	if got, err := io.ReadAll(s); string(got) != "one two" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := io.ReadAll(&execStream{r: bytes.NewReader(piece(7, "x"))}); err == nil {
		t.Error("a piece of unknown kind passes")
	}
	if _, err := io.ReadAll(&execStream{r: bytes.NewReader(all[:len(all)-1])}); err == nil {
		t.Error("a piece that is cut off passes")
	}
}

func FuzzExecStream(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 2, 'h', 'i'})
	f.Add([]byte{2, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		got, _ := io.ReadAll(io.LimitReader(&execStream{r: bytes.NewReader(b)}, int64(len(b))+1))
		if len(got) > len(b) {
			t.Errorf("%d bytes came of %d", len(got), len(b))
		}
	})
}

// TestWriteLayer writes a layer with everything that a layer can have, twice with the same result.
func TestWriteLayer(t *testing.T) {
	testenv.NeedsRoot(t)
	dir := filepath.Join(t.TempDir(), "layer")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(filepath.Join(dir, "etc/opaque"), 0o755))
	must(os.WriteFile(filepath.Join(dir, "etc/file"), []byte("text"), 0o644))
	must(os.Chmod(filepath.Join(dir, "etc/file"), 0o755|os.ModeSetuid))
	must(os.Link(filepath.Join(dir, "etc/file"), filepath.Join(dir, "etc/hard")))
	must(os.Symlink("file", filepath.Join(dir, "etc/link")))
	must(unix.Mknod(filepath.Join(dir, "etc/gone"), unix.S_IFCHR, 0))
	must(unix.Mkfifo(filepath.Join(dir, "etc/fifo"), 0o600))
	must(unix.Setxattr(filepath.Join(dir, "etc/opaque"), "trusted.overlay.opaque", []byte("y"), 0))
	must(unix.Setxattr(filepath.Join(dir, "etc/file"), "user.note", []byte("v"), 0))
	l, err := net.Listen("unix", filepath.Join(dir, "etc/socket"))
	must(err)
	defer l.Close()
	must(filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, driver.DiskIDBase+7, driver.DiskIDBase+8))
	}))
	must(os.Chmod(filepath.Join(dir, "etc/file"), 0o755|os.ModeSetuid)) // which the change of owner took
	must(os.Lchown(filepath.Join(dir, "etc/link"), 5, 5))

	var first, second bytes.Buffer
	layer := driver.Layer{Dir: dir, IDBase: driver.DiskIDBase}
	must(writeLayer(t.Context(), &first, layer))
	must(writeLayer(t.Context(), &second, layer))
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("the same directory gave two tars")
	}
	type entry struct {
		Kind     byte
		Mode     int64
		UID, GID int
		Link     string
		Note     string
	}
	got := map[string]entry{}
	for r := tar.NewReader(&first); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		must(err)
		got[h.Name] = entry{h.Typeflag, h.Mode, h.Uid, h.Gid, h.Linkname, h.PAXRecords["SCHILY.xattr.user.note"]}
	}
	want := map[string]entry{
		"./":                      {Kind: tar.TypeDir, Mode: 0o755, UID: 7, GID: 8},
		"etc/":                    {Kind: tar.TypeDir, Mode: 0o755, UID: 7, GID: 8},
		"etc/file":                {Kind: tar.TypeReg, Mode: 0o4755, UID: 7, GID: 8, Note: "v"},
		"etc/hard":                {Kind: tar.TypeLink, Mode: 0o4755, UID: 7, GID: 8, Link: "etc/file"},
		"etc/link":                {Kind: tar.TypeSymlink, Mode: 0o777, UID: 65534, GID: 65534, Link: "file"},
		"etc/.wh.gone":            {Kind: tar.TypeReg, Mode: 0o600, UID: 7, GID: 8},
		"etc/fifo":                {Kind: tar.TypeFifo, Mode: 0o600, UID: 7, GID: 8},
		"etc/opaque/":             {Kind: tar.TypeDir, Mode: 0o755, UID: 7, GID: 8},
		"etc/opaque/.wh..wh..opq": {Kind: tar.TypeReg, Mode: 0o600},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := writeLayer(gone, io.Discard, layer); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
}

// TestSyncWithoutEngine syncs a sandbox that has the directories themselves while the engine is down.
func TestSyncWithoutEngine(t *testing.T) {
	testenv.NeedsRoot(t)
	dir := t.TempDir()
	d, err := New(Options{StateDir: dir, GuestPath: filepath.Join(dir, "guest"), Host: "unix://" + filepath.Join(dir, "none.sock")})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := d.Sync(t.Context(), "local"); err != nil {
		t.Error(err)
	}
}

// TestStageTakenDownTwice takes down a stage of which another process has taken the file system away while it was built: nothing of it
// stays, and what was mounted keeps its files.
func TestStageTakenDownTwice(t *testing.T) {
	testenv.NeedsRoot(t)
	testenv.NeedsMountNamespace(t)
	users := t.TempDir()
	if err := os.WriteFile(filepath.Join(users, "kept"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	s := &stage{dir: filepath.Join(t.TempDir(), "s1")}
	for _, dir := range []string{s.dir, filepath.Join(s.dir, "0")} {
		if err := os.Mkdir(dir, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(s.dir, "1"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(users, filepath.Join(s.dir, "0"), "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	if err := s.close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(s.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the stage is still there: %v", err)
	}
	if _, err := os.Stat(filepath.Join(users, "kept")); err != nil {
		t.Error(err)
	}
	if err := s.close(); err != nil {
		t.Errorf("again: %v", err)
	}
}

func TestProcessOf(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	for text, want := range map[string]bool{
		"0::/docker/" + id + "\n":                                         true,
		"12:cpu:/other\n4:memory:/warren-wdk1/" + id + "\n0::/\n":         true,
		"0::/system.slice/docker-" + id + ".scope\n":                      true,
		"0::/docker/" + id + "/inner\n":                                   false,
		"0::/docker/x" + id + "\n":                                        false,
		"0::/docker/" + id[:12] + "\n":                                    false,
		"0::/docker/" + strings.Repeat("f", 64) + "\n3:name=" + id + ":/": false,
		"": false,
	} {
		if got := inGroup(text, id); got != want {
			t.Errorf("%q has the container: %v", text, got)
		}
	}
	for text, want := range map[string]bool{
		"Name:\tx\nNSpid:\t4711\t1\nThreads:\t1\n": true,
		"NSpid:\t4711\t52\t1\n":                    true,
		"NSpid:\t1\n":                              false,
		"NSpid:\t4711\t7\n":                        false,
		"Pid:\t1\n":                                false,
	} {
		if got := isFirst(text); got != want {
			t.Errorf("%q is a container's first process: %v", text, got)
		}
	}
	// This process is in no container of that name.
	if f, err := namespaceOf(&container.InspectResponse{ID: id, State: &container.State{Pid: os.Getpid()}}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a container that is not there: %v, %v", f, err)
	}
	if f, err := namespaceOf(&container.InspectResponse{ID: "", State: &container.State{Pid: os.Getpid()}}); err == nil {
		t.Errorf("a container without an id: %v", f)
	}
}

// TestHidden looks at sockets whose listener is in this process namespace, and in one that is not to be seen.
func TestHidden(t *testing.T) {
	const variable = "WARREN_TEST_HIDDEN"
	if host := os.Getenv(variable); host != "" {
		t.Logf("hidden: %v", (&endpoint{host: host}).hidden())
		return
	}
	testenv.NeedsRoot(t)
	name := filepath.Join(t.TempDir(), "seen")
	l, err := net.Listen("unix", name)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for host, want := range map[string]bool{"unix://" + name: false, "unix://" + name + "-not": false, "tcp://127.0.0.1:1": false} {
		if got := (&endpoint{host: host}).hidden(); got != want {
			t.Errorf("%s is hidden: %v", host, got)
		}
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestHidden$", "-test.v")
	cmd.Env = append(os.Environ(), variable+"=unix://"+name)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "hidden: true") {
		t.Errorf("from a process namespace of its own: %v\n%s", err, out)
	}
}
