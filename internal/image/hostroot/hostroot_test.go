package hostroot

import (
	"context"
	"encoding/pem"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/image/imagetest"
	"github.com/warren-sandbox/warren/internal/testenv"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { imagetest.Main(m) }

const canary = "canary-5f2c8b1e9d"

// plant writes a file of a made-up host; a value that begins with "->" makes a symbolic link.
func plant(t testing.TB, root, name, content string, mode fs.FileMode) {
	t.Helper()
	p := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if target, ok := strings.CutPrefix(content, "->"); ok {
		if err := os.Symlink(target, p); err != nil {
			t.Fatal(err)
		}
		return
	}
	if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(p, mode); err != nil {
		t.Fatal(err)
	}
}

func certificate(note string) string {
	return note + string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("public")}))
}

// madeUpHost is a small Debian with people and secrets on it.
func madeUpHost(t testing.TB) string {
	t.Helper()
	root := t.TempDir()
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"usr/bin/bash": "bash", "usr/bin/sudo": "sudo", "usr/lib/libc.so": "libc", "usr/local/go/bin/go": "go",
		"usr/share/ca-certificates/a.crt": certificate(""), "usr/share/zoneinfo/UTC": "UTC", "usr/lib/os-release": "ID=debian\nVERSION_CODENAME=bookworm\n",
		"opt/tool/run": "tool", "var/lib/dpkg/status": "Package: bash\n",
		"bin": "->usr/bin", "sbin": "->usr/sbin", "lib": "->usr/lib", "lib64": "->/usr/lib", "usr/sbin/x": "x",
		"etc/passwd": "root:x:0:0::/root:/bin/bash\ndaemon:x:1:1:a person:/x:/bin/sh\npostgres:x:101:104:PostgreSQL,,,:/var/lib/postgresql:/bin/bash\n" +
			"alice:x:1000:1000:Alice:/home/alice:/bin/zsh\nbad name:x:50:50:::\n+nis::::::\nsvc-" + canary + "-x:x:20000:20000:::\n",
		"etc/group":                          "root:x:0:\nsudo:x:27:alice\npostgres:x:104:alice\nalice:x:1000:\ndocker:x:998:alice\n",
		"etc/alternatives/editor":            "->/usr/bin/bash",
		"etc/alternatives/home":              "->/home/alice/bin/x",
		"etc/localtime":                      "->/usr/share/zoneinfo/UTC",
		"etc/os-release":                     "->../usr/lib/os-release",
		"etc/ld.so.conf":                     "/usr/lib\n",
		"etc/mime.types":                     "text/plain txt\n",
		"etc/ssl/certs/a.pem":                "->/usr/share/ca-certificates/a.crt",
		"etc/ssl/certs/b.pem":                certificate(""),
		"etc/ssl/certs/site.pem":             "->/srv/site.pem",
		"srv/site.pem":                       certificate(""),
		"etc/java-17-openjdk/security/x.cfg": "java",
		"etc/java-17-openjdk/home":           "->/home/alice/jdk",
	} {
		plant(t, root, name, content, 0o755)
	}
	return root
}

// secrets are where people and programs keep what nobody else may see, each with the mode it is found with.
func secrets(t testing.TB, root string) {
	t.Helper()
	for name, mode := range map[string]fs.FileMode{
		"etc/shadow": 0o640, "etc/shadow-": 0o600, "etc/gshadow": 0o640, "root/.ssh/id_ed25519": 0o600, "root/.bash_history": 0o644, "home/alice/.aws/credentials": 0o644,
		"home/alice/.config/gcloud/key.json": 0o644, "var/lib/postgresql/data": 0o644, "var/log/auth.log": 0o644, "var/spool/cron/root": 0o644,
		"opt/app/secret": 0o600, "opt/app/group-secret": 0o640, "usr/local/etc/key": 0o600, "usr/lib/x/y/z/deep": 0o660,
		"etc/ssl/private/key": 0o600, "etc/ssl/private/readable": 0o644, "etc/environment": 0o644, "etc/profile": 0o644, "etc/profile.d/proxy.sh": 0o644, "etc/bash.bashrc": 0o644,
		"etc/npmrc": 0o644, "etc/pip.conf": 0o644, "etc/gitconfig": 0o644, "etc/wgetrc": 0o644, "etc/hosts": 0o644, "etc/hostname": 0o644, "etc/machine-id": 0o644,
		"etc/resolv.conf": 0o644, "etc/apt/sources.list": 0o644, "etc/apt/sources.list.d/private.list": 0o644, "etc/apt/auth.conf.d/a.conf": 0o644, "etc/apt/apt.conf.d/99proxy": 0o644,
		"etc/ssh/ssh_host_ed25519_key": 0o600, "etc/ssh/sshd_config": 0o644, "etc/maven/settings.xml": 0o644, "etc/docker/daemon.json": 0o644,
		"etc/sudoers": 0o440, "etc/sudoers.d/alice": 0o440, "etc/skel/.netrc": 0o644, "etc/pam.d/common-auth": 0o644, "etc/security/pam_env.conf": 0o644,
		"etc/java-17-openjdk/management/jmxremote.password": 0o600, "etc/python3.11/secret": 0o640, "etc/krb5.conf": 0o644, "etc/fstab": 0o644,
		"srv/data": 0o644, "mnt/usb/x": 0o644, "secret-at-the-top": 0o644, "run/secrets/token": 0o644, "tmp/x": 0o644, "boot/config": 0o644,
		"etc/alternatives/not-a-link": 0o644, "etc/ld.so.conf.d/unreadable.conf": 0o600,
	} {
		plant(t, root, name, canary+" in "+name, mode)
	}
	// A readable file in a directory that others may not enter or list, or of a kind that talks to the host.
	for name, mode := range map[string]fs.FileMode{"opt/closed/readable": 0o700, "opt/listless/readable": 0o711, "usr/share/group/readable": 0o750} {
		plant(t, root, name, canary, 0o644)
		if err := os.Chmod(filepath.Join(root, filepath.Dir(name)), mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(root, "opt/tool/fifo"), 0o666); err != nil {
		t.Fatal(err)
	}
	// Keys in the clothes of certificates.
	plant(t, root, "etc/ssl/certs/with-key.pem", certificate("")+"-----BEGIN PRIVATE KEY-----\n"+canary+"\n-----END PRIVATE KEY-----\n", 0o644)
	plant(t, root, "etc/ssl/certs/text.pem", canary, 0o644)
	plant(t, root, "etc/ssl/certs/home.pem", "->/home/alice/.aws/credentials", 0)
	plant(t, root, "etc/terminfo/"+"key", "-----BEGIN OPENSSH PRIVATE KEY-----\n"+canary, 0o644)
	plant(t, root, "etc/terminfo/link", "->/home/"+canary, 0)
	plant(t, root, "etc/alternatives/link", "->/root/"+canary, 0)
}

func resolve(t testing.TB, h *Host) *Image {
	t.Helper()
	im, err := h.Resolve(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return im
}

func open(t testing.TB, host, dir string, base uint32) *Host {
	t.Helper()
	h, err := Open(Options{Host: host, Dir: dir, IDBase: base})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h
}

func TestCanary(t *testing.T) {
	testenv.NeedsRoot(t)
	host := madeUpHost(t)
	secrets(t, host)
	im := resolve(t, open(t, host, t.TempDir(), driver.DiskIDBase))
	if got := imagetest.Find(t, im.Root, canary); len(got) != 0 {
		t.Errorf("secrets of the host show in the image:\n%s", strings.Join(got, "\n"))
	}
	if got := imagetest.Find(t, im.Root, "alice"); len(got) != 0 {
		t.Errorf("people of the host show in the image:\n%s", strings.Join(got, "\n"))
	}
	// What belongs there is there, so the search sees what it should.
	for _, name := range []string{"/usr/bin/bash", "/opt/tool/run", "/etc/mime.types"} {
		if got := imagetest.Find(t, im.Root, filepath.Base(name)); !slices.Contains(got, name) {
			t.Errorf("the search does not find %s", name)
		}
	}
}

// TestCanaryTwin shows that the search finds the secrets in a root that is put together without care.
func TestCanaryTwin(t *testing.T) {
	testenv.NeedsRoot(t)
	host := madeUpHost(t)
	secrets(t, host)
	im := resolve(t, open(t, host, t.TempDir(), driver.DiskIDBase))
	shown := slices.DeleteFunc(slices.Clone(im.Root.Binds), func(b driver.Bind) bool { return b.Hide })
	for name, root := range map[string]driver.Root{
		"everything":      {Layers: []driver.Layer{{Dir: host}}},
		"nothing hidden":  {Layers: im.Root.Layers, Binds: shown},
		"the host's /etc": {Layers: im.Root.Layers, Binds: append(shown, driver.Bind{Source: host + "/etc", Target: "/etc"})},
	} {
		got := imagetest.Find(t, root, canary)
		t.Logf("%s: %d found", name, len(got))
		if want := map[string]int{"everything": 50, "nothing hidden": 6, "the host's /etc": 30}[name]; len(got) < want {
			t.Errorf("%s: the search finds only %d secrets, want %d: %q", name, len(got), want, got)
		}
	}
}

func TestSkeleton(t *testing.T) {
	testenv.NeedsRoot(t)
	host := madeUpHost(t)
	im := resolve(t, open(t, host, t.TempDir(), driver.DiskIDBase))
	dir := im.Root.Layers[0].Dir
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err.Error()
		}
		return string(b)
	}
	wantPasswd := `root:x:0:0:root:/root:/bin/bash
daemon:x:1:1::/usr/sbin:/usr/sbin/nologin
postgres:x:101:104::/nonexistent:/usr/sbin/nologin
_apt:x:42:65534::/nonexistent:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
user:x:1000:1000::/home/user:/bin/bash
`
	if d := cmp.Diff(wantPasswd, read("etc/passwd")); d != "" {
		t.Errorf("passwd (-want +got):\n%s", d)
	}
	wantGroup := "root:x:0:\nsudo:x:27:user\npostgres:x:104:\ndocker:x:998:\nnogroup:x:65534:\nuser:x:1000:\n"
	if d := cmp.Diff(wantGroup, read("etc/group")); d != "" {
		t.Errorf("group (-want +got):\n%s", d)
	}
	for _, line := range strings.Split(strings.TrimSpace(read("etc/shadow")), "\n") {
		if f := strings.Split(line, ":"); len(f) != 9 || f[1] != "*" {
			t.Errorf("shadow has %q", line)
		}
	}
	for name, want := range map[string]string{"bin": "usr/bin", "lib64": "/usr/lib", "etc/localtime": "/usr/share/zoneinfo/UTC", "etc/alternatives/editor": "/usr/bin/bash",
		"etc/ssl/certs/a.pem": "/usr/share/ca-certificates/a.crt", "var/run": "/run", "etc/mtab": "../proc/self/mounts"} {
		if got, err := os.Readlink(filepath.Join(dir, name)); err != nil || got != want {
			t.Errorf("%s leads to %q, %v; want %q", name, got, err, want)
		}
	}
	if got := read("etc/ssl/certs/site.pem"); got != certificate("") {
		t.Errorf("a certificate from elsewhere: %q", got)
	}
	if got := read("etc/apt/sources.list.d/debian.sources"); !strings.Contains(got, "Suites: bookworm bookworm-updates") {
		t.Errorf("apt sources %q", got)
	}
	if !strings.Contains(im.Env["PATH"], "/usr/local/go/bin") || !strings.Contains(read("etc/profile"), im.Env["PATH"]) || !strings.Contains(read("etc/environment"), im.Env["PATH"]) {
		t.Errorf("PATH %q", im.Env["PATH"])
	}
	const base = driver.DiskIDBase
	for name, want := range map[string]string{
		".": "40755 0", "tmp": "41777 0", "var/tmp": "41777 0", "root": "40700 0", "home/user": "40755 1000", "workspace": "40755 1000", "home/user/.bashrc": "100644 1000",
		"etc/shadow": "100600 0", "etc/gshadow": "100600 0", "etc/sudoers": "100440 0", ".warren/guest": "100755 0", ".warren/repo/objects": "40755 0",
		"usr": "40755 0", "opt": "40755 0", "proc": "40555 0", "bin": "120777 0", "etc/ssl/private": "40710 0",
	} {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(dir, name), &st); err != nil {
			t.Error(err)
			continue
		}
		if got := fmt.Sprintf("%o %d", st.Mode, int64(st.Uid)-base); got != want || st.Gid != st.Uid {
			t.Errorf("%s: %s (gid %d), want %s", name, got, int64(st.Gid)-base, want)
		}
	}
	wantBinds := []driver.Bind{{Source: host + "/usr", Target: "/usr"}, {Source: host + "/opt", Target: "/opt"}, {Source: host + "/var/lib/dpkg", Target: "/var/lib/dpkg"}}
	if d := cmp.Diff(wantBinds, im.Root.Binds); d != "" {
		t.Errorf("binds (-want +got):\n%s", d)
	}
	if im.Digest != im.Root.Digest || !strings.HasPrefix(im.Digest, "host:") {
		t.Errorf("digests %q and %q", im.Digest, im.Root.Digest)
	}
}

// A host whose /bin and /lib are directories of their own has them bound.
func TestNotMerged(t *testing.T) {
	testenv.NeedsRoot(t)
	host := t.TempDir()
	plant(t, host, "bin/sh", "sh", 0o755)
	plant(t, host, "lib/libc.so", "libc", 0o755)
	plant(t, host, "usr/bin/env", "env", 0o755)
	plant(t, host, "lib64", "->/data/lib", 0) // leads out of what the image shows
	im := resolve(t, open(t, host, t.TempDir(), 0))
	var targets []string
	for _, b := range im.Root.Binds {
		targets = append(targets, b.Target)
	}
	if d := cmp.Diff([]string{"/usr", "/bin", "/lib"}, targets); d != "" {
		t.Errorf("binds (-want +got):\n%s", d)
	}
	if _, err := os.Lstat(filepath.Join(im.Root.Layers[0].Dir, "lib64")); !os.IsNotExist(err) {
		t.Errorf("lib64: %v", err)
	}
}

// The image changes with what it is made from, and only then.
func TestChanges(t *testing.T) {
	testenv.NeedsRoot(t)
	host, dir := madeUpHost(t), t.TempDir()
	h := open(t, host, dir, 7)
	first := resolve(t, h)
	if again := resolve(t, h); again.Digest != first.Digest || !again.Created.Equal(first.Created) {
		t.Error("an unchanged host gives a new image")
	}
	// Another process finds it on disk.
	if again := resolve(t, open(t, host, dir, 7)); !again.Created.Equal(first.Created) {
		t.Error("another process makes the image again")
	}
	last := first
	for _, c := range []struct {
		name   string
		change func()
		same   bool
	}{
		{"a file of /etc changes", func() { plant(t, host, "etc/mime.types", "other\n", 0o644) }, false},
		{"a file of /etc appears", func() { plant(t, host, "etc/services", "ssh 22/tcp\n", 0o644) }, false},
		{"an alternative changes", func() {
			os.Remove(filepath.Join(host, "etc/alternatives/editor"))
			plant(t, host, "etc/alternatives/editor", "->/usr/bin/sudo", 0)
		}, false},
		{"a system user appears", func() {
			b, _ := os.ReadFile(filepath.Join(host, "etc/passwd"))
			plant(t, host, "etc/passwd", string(b)+"redis:x:102:105::/:/bin/sh\n", 0o644)
		}, false},
		{"a person appears", func() {
			b, _ := os.ReadFile(filepath.Join(host, "etc/passwd"))
			plant(t, host, "etc/passwd", string(b)+"bob:x:1001:1001::/home/bob:/bin/sh\n", 0o644)
		}, true},
		{"a secret appears near the top", func() { plant(t, host, "usr/local/key", "x", 0o600) }, false},
		{"a program appears", func() { plant(t, host, "usr/bin/new", "x", 0o755) }, true},
		{"sudo vanishes", func() { os.Remove(filepath.Join(host, "usr/bin/sudo")) }, false},
		{"the skeleton vanishes", func() { os.RemoveAll(last.Root.Layers[0].Dir) }, true},
		{"the skeleton is emptied", func() {
			names, err := filepath.Glob(filepath.Join(last.Root.Layers[0].Dir, "*"))
			if err != nil || len(names) == 0 {
				t.Fatal(names, err)
			}
			for _, name := range append(names, filepath.Join(last.Root.Layers[0].Dir, ".warren")) {
				os.RemoveAll(name)
			}
		}, true},
	} {
		c.change()
		next := resolve(t, h)
		if (next.Digest == last.Digest) != c.same {
			t.Errorf("%s: digest the same: %t, want %t", c.name, next.Digest == last.Digest, c.same)
		}
		if _, err := os.Lstat(filepath.Join(next.Root.Layers[0].Dir, "etc/passwd")); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		last = next
	}
	// A file that promises sudo is there where sudo is.
	for im, want := range map[*Image]bool{first: true, last: false} {
		if _, err := os.Lstat(filepath.Join(im.Root.Layers[0].Dir, "etc/sudoers")); (err == nil) != want {
			t.Errorf("etc/sudoers is there: %t, want %t", err == nil, want)
		}
	}
	if _, err := os.Lstat(first.Root.Layers[0].Dir); err != nil {
		t.Errorf("the skeleton that a sandbox may run on: %v", err)
	}
	all, err := h.Skeletons()
	if err != nil || len(all) < 5 {
		t.Errorf("skeletons %v, %v", all, err)
	}
	// Another process that has not resolved it yet knows the one in use as well.
	other := open(t, host, dir, 7)
	for _, d := range all {
		if err := other.Delete(d); err != nil {
			t.Error(err)
		}
	}
	if all, _ = h.Skeletons(); len(all) != 1 || all[0] != last.Digest {
		t.Errorf("after Delete: %v, want the one in use", all)
	}
}

// A secret deep in /usr that appears after the scan is hidden from the sandboxes after the next one.
func TestRescan(t *testing.T) {
	testenv.NeedsRoot(t)
	host, dir := madeUpHost(t), t.TempDir()
	h := open(t, host, dir, 7)
	first := resolve(t, h)
	plant(t, host, "usr/lib/x", "dir", 0o755)
	second := resolve(t, h) // the new name is near the top, so this scans
	if first.Digest != second.Digest {
		t.Error("a file that everybody may read makes a new image")
	}
	deep := filepath.Join(host, "usr/share/a/b/c/key")
	os.MkdirAll(filepath.Dir(deep), 0o755)
	resolve(t, h)
	plant(t, host, "usr/share/a/b/c/key", "x", 0o600)
	if again := resolve(t, h); again.Digest != first.Digest {
		t.Log("the change was seen at once")
	}
	h2 := open(t, host, dir, 7) // another process: its first Resolve starts a scan
	resolve(t, h2)
	deadline := time.Now().Add(20 * time.Second)
	for resolve(t, h2).Digest == first.Digest {
		if time.Now().After(deadline) {
			t.Fatal("the secret is never hidden")
		}
		time.Sleep(5 * time.Millisecond)
	}
	hides := slices.ContainsFunc(resolve(t, h2).Root.Binds, func(b driver.Bind) bool { return b.Hide && b.Target == "/usr/share/a/b/c/key" })
	if !hides {
		t.Error("the secret is not hidden")
	}
}

func TestThin(t *testing.T) {
	many := func(n int, format string) (out []string) {
		for i := range n {
			out = append(out, fmt.Sprintf(format, i))
		}
		return out
	}
	for _, c := range []struct {
		name string
		in   []string
		want []string
		err  bool
	}{
		{"few", []string{"usr/b", "usr/a/x"}, []string{"usr/a/x", "usr/b"}, false},
		{"a crowd in one directory", many(crowd+1, "usr/lib/keys/%d"), []string{"usr/lib/keys"}, false},
		{"below a hidden one", []string{"opt/a", "opt/a/b"}, []string{"opt/a"}, false},
		{"a crowd right below a bound directory", many(crowd+1, "opt/%02d"), many(crowd+1, "opt/%02d"), false},
		{"many directories", many(maxHide+1, "opt/app/%03d/key"), []string{"opt/app"}, false},
		{"too many right below a bound directory", many(maxHide+1, "opt/%d"), nil, true},
	} {
		got, err := thin(c.in, []string{"usr", "opt"})
		if (err != nil) != c.err {
			t.Errorf("%s: error %v", c.name, err)
		}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, d)
		}
	}
}

func TestResolveCancelled(t *testing.T) {
	testenv.NeedsRoot(t)
	dir := t.TempDir()
	h := open(t, madeUpHost(t), dir, 7)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := h.Resolve(ctx); err == nil {
		t.Error("Resolve with a cancelled context succeeds")
	}
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		if e.Name() != ".lock" {
			t.Errorf("left behind: %s", e.Name())
		}
	}
}

// TestRealHost runs programs of this machine in the image of this machine.
func TestRealHost(t *testing.T) {
	testenv.NeedsRoot(t)
	t0 := time.Now()
	h := open(t, "/", t.TempDir(), 0)
	im := resolve(t, h)
	cold := time.Since(t0)
	t0 = time.Now()
	resolve(t, h)
	t.Logf("resolved in %v, then in %v (%d binds, %s/%s)", cold, time.Since(t0), len(im.Root.Binds), runtime.GOOS, runtime.GOARCH)
	env := []string{"PATH=" + im.Env["PATH"], "HOME=/home/user", "LANG=C.UTF-8"}
	for _, c := range []struct {
		needs string
		uid   uint32
		argv  []string
		want  string
	}{
		{"sh", 1000, []string{"/bin/sh", "-c", "id -un; id -gn; echo ~; cat /etc/shadow 2>&1; true"}, "user\nuser\n/home/user\ncat: /etc/shadow: Permission denied\n"},
		{"su", 0, []string{"/usr/bin/env", "su", "-", "user", "-c", "id -un; pwd"}, "user\n/home/user\n"},
		{"sudo", 1000, []string{"/usr/bin/env", "sudo", "-n", "id", "-un"}, "root\n"},
		{"bash", 1000, []string{"/bin/bash", "-lc", "echo $PATH"}, im.Env["PATH"] + "\n"},
		{"python3", 1000, []string{"/usr/bin/python3", "-c", "import ssl, pwd, mimetypes; print(pwd.getpwuid(1000).pw_name, mimetypes.guess_type('a.png')[0])"}, "user image/png\n"},
		{"perl", 1000, []string{"/usr/bin/perl", "-e", "print scalar getpwuid(1000)"}, "user"},
		{"node", 1000, []string{"/usr/bin/env", "node", "-e", "console.log(require('os').userInfo().username)"}, "user\n"},
		{"git", 1000, []string{"/usr/bin/env", "git", "config", "--list", "--system"}, ""},
		{"java", 1000, []string{"/usr/bin/env", "java", "-XshowSettings:none", "-version"}, "*"},
		{"dpkg-query", 1000, []string{"/usr/bin/env", "dpkg-query", "-W", "-f", "${Status}", "bash"}, "install ok installed"},
		{"openssl", 1000, []string{"/usr/bin/env", "sh", "-c", "openssl version -d; ls /etc/ssl/private 2>&1 | grep -c denied"}, "*"},
	} {
		if _, err := os.Stat("/usr/bin/" + c.needs); err != nil {
			t.Logf("this machine has no %s", c.needs) // what the host lacks, its image lacks as well
			continue
		}
		got, err := imagetest.Run(t, im.Root, c.uid, env, c.argv...)
		if err != nil || c.want != "*" && got != c.want {
			t.Errorf("%q: %v, says %q, want %q", c.argv, err, got, c.want)
		}
	}
}

func BenchmarkResolve(b *testing.B) {
	testenv.NeedsRoot(b)
	h := open(b, "/", b.TempDir(), driver.DiskIDBase)
	resolve(b, h)
	for b.Loop() {
		resolve(b, h)
	}
}

func BenchmarkResolveFirst(b *testing.B) {
	testenv.NeedsRoot(b)
	for b.Loop() {
		h := open(b, "/", b.TempDir(), driver.DiskIDBase)
		resolve(b, h)
		h.Close()
	}
}
