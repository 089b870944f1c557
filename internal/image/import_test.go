package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/klauspost/compress/zstd"
	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/image/imagetest"
	"github.com/warren-sandbox/warren/internal/testenv"
	"golang.org/x/sys/unix"
)

// tarDir packs a directory, names in the order that find would give.
func tarDir(t testing.TB, dir string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func ociLayout(t testing.TB, images ...v1.Image) []byte {
	t.Helper()
	dir := t.TempDir()
	p, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	for _, im := range images {
		if err := p.AppendImage(im, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "named:1"})); err != nil {
			t.Fatal(err)
		}
	}
	return tarDir(t, dir)
}

func dockerSave(t testing.TB, im v1.Image) []byte {
	t.Helper()
	ref, err := name.NewTag("saved:1")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := tarball.Write(ref, im, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// oldDockerSave is in the form of before 2017's: a directory for each layer, an equal one as a link, the manifest last.
func oldDockerSave(t testing.TB, im v1.Image) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	put := func(name string, content []byte) {
		if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		w.Write(content)
	}
	layers, err := im.Layers()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for i, l := range layers {
		id := strings.Repeat(fmt.Sprintf("%02x", i), 32)
		rc, err := l.Uncompressed()
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(rc)
		if err != nil {
			t.Fatal(err)
		}
		rc.Close()
		put(id+"/VERSION", []byte("1.0"))
		put(id+"/layer.tar", content)
		names = append(names, id+"/layer.tar")
	}
	again := strings.Repeat("ff", 32)
	if err := w.WriteHeader(&tar.Header{Name: again + "/layer.tar", Typeflag: tar.TypeSymlink, Linkname: "../" + names[0]}); err != nil {
		t.Fatal(err)
	}
	names[0] = again + "/layer.tar"
	raw, err := im.RawConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config := strings.TrimPrefix(digestOf(raw), "sha256:") + ".json"
	put(config, raw)
	m, _ := json.Marshal([]map[string]any{{"Config": config, "RepoTags": []string{"old:1"}, "Layers": names}})
	put("manifest.json", m)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func gzipped(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	z.Write(b)
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func zstded(t testing.TB, b []byte) []byte {
	t.Helper()
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return z.EncodeAll(b, nil)
}

func TestImport(t *testing.T) {
	testenv.NeedsRoot(t)
	im := imageOf(t, layerOf(t, files{"etc/passwd": "root:x:0:0::/root:/bin/sh\n", "f": "one"}), layerOf(t, files{"f": "two", "g": "three"}))
	digest, _ := im.Digest()
	configDigest, _ := im.ConfigName()
	rootfs := tarOf(t, files{"./": "", "./etc/": "", "./etc/passwd": "root:x:0:0::/root:/bin/sh\n", "./f": "two", "./g": "three"})
	for _, c := range []struct {
		form             string
		data             []byte
		kind, name, want string
	}{
		{"root file system", rootfs, "tar", "", digestOf(rootfs)},
		{"OCI layout", ociLayout(t, im), "oci", "named:1", digest.String()},
		{"docker save", dockerSave(t, im), "oci", "saved:1", configDigest.String()},
		{"old docker save", oldDockerSave(t, im), "oci", "old:1", configDigest.String()},
	} {
		for pack, f := range map[string]func(testing.TB, []byte) []byte{"plain": func(_ testing.TB, b []byte) []byte { return b }, "gzip": gzipped, "zstd": zstded} {
			t.Run(c.form+" "+pack, func(t *testing.T) {
				s := openStore(t, t.TempDir())
				// The wrapping keeps readers from seeking: the stream is read once.
				got, err := s.Import(t.Context(), "mine:1", struct{ io.Reader }{bytes.NewReader(f(t, c.data))}, ImportOptions{})
				if err != nil {
					t.Fatal(err)
				}
				if got.Kind != c.kind || got.Digest != c.want {
					t.Errorf("kind %s digest %s, want %s %s", got.Kind, got.Digest, c.kind, c.want)
				}
				if text := content(t, s, got, "f") + content(t, s, got, "g"); text != "twothree" {
					t.Errorf("content %q", text)
				}
				if c.kind == "oci" && got.Config.User != "app" {
					t.Errorf("config %+v", got.Config)
				}
				for _, ref := range []string{"mine:1", got.Digest} {
					if again, err := s.Resolve(t.Context(), ref); err != nil || again.Digest != got.Digest {
						t.Errorf("Resolve(%s): %v, %v", ref, again, err)
					}
				}
				for _, f := range left(t, s.dir) {
					if strings.Contains(f, "/.") || strings.HasPrefix(f, "blobs/") {
						t.Errorf("left behind: %s", f)
					}
				}
				// Without a name, the archive's own counts.
				got, err = s.Import(t.Context(), "", bytes.NewReader(f(t, c.data)), ImportOptions{})
				if c.name == "" {
					if !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), "name") {
						t.Errorf("a root file system without a name: %v", err)
					}
				} else if err != nil || got.Name != c.name {
					t.Errorf("without a name: %v, %v; want %s", got, err, c.name)
				}
			})
		}
	}
}

func TestImportRefuses(t *testing.T) {
	testenv.NeedsRoot(t)
	im := imageOf(t, layerOf(t, files{"f": "content"}))
	other := imageOf(t, layerOf(t, files{"f": "other"}))
	// rewrite changes the files of a tar.
	rewrite := func(b []byte, change func(h *tar.Header, content []byte) []byte) []byte {
		var out bytes.Buffer
		r, w := tar.NewReader(bytes.NewReader(b)), tar.NewWriter(&out)
		for {
			h, err := r.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			c, _ := io.ReadAll(r)
			if c = change(h, c); c == nil && h.Typeflag == tar.TypeReg {
				continue
			}
			h.Size = int64(len(c))
			w.WriteHeader(h)
			w.Write(c)
		}
		w.Close()
		return out.Bytes()
	}
	layers, _ := im.Layers()
	layer, _ := layers[0].Digest()
	config, _ := im.ConfigName()
	for _, c := range []struct {
		name  string
		data  []byte
		as    string
		want  error
		words string
	}{
		{name: "empty", data: nil, want: warren.ErrInvalid, words: "empty"},
		{name: "text", data: []byte(strings.Repeat("hello ", 500)), want: warren.ErrInvalid, words: "not a tar"},
		{name: "an empty tar", data: make([]byte, 1024), want: warren.ErrInvalid, words: "empty"},
		{name: "cut off", data: tarOf(t, files{"a": strings.Repeat("x", 5000), "b": "x"})[:3000], want: warren.ErrInvalid, words: "cut off"},
		{name: "docker save cut off", data: dockerSave(t, im)[:2500], want: warren.ErrInvalid},
		{name: "reserved name", as: "host", data: tarOf(t, files{"a": "x"}), want: warren.ErrInvalid, words: "another name"},
		{name: "bad name", as: "../x", data: tarOf(t, files{"a": "x"}), want: warren.ErrInvalid, words: "looks like"},
		{name: "climbing root file system", data: tarOf(t, files{"../../refs/x.json": "{}"}), want: warren.ErrInvalid, words: `".."`},
		{name: "two images", data: ociLayout(t, im, other), want: warren.ErrInvalid, words: "one by one"},
		{name: "layout without its layer", data: rewrite(ociLayout(t, im), func(h *tar.Header, c []byte) []byte {
			if strings.HasSuffix(h.Name, layer.Hex) {
				return nil
			}
			return c
		}), want: warren.ErrInvalid, words: "lacks"},
		{name: "layout with a changed layer", data: rewrite(ociLayout(t, im), func(h *tar.Header, c []byte) []byte {
			if strings.HasSuffix(h.Name, layer.Hex) {
				return append(c, 0)
			}
			return c
		}), want: warren.ErrInvalid, words: "not what its name says"},
		{name: "layout with a changed configuration", data: rewrite(ociLayout(t, im), func(h *tar.Header, c []byte) []byte {
			if strings.HasSuffix(h.Name, config.Hex) {
				return append(c, '\n')
			}
			return c
		}), want: warren.ErrInvalid, words: "not what its name says"},
		{name: "layout for another machine", data: ociLayout(t, foreign(t)), want: errors.ErrUnsupported, words: "riscv64"},
		{name: "docker save with another layer", data: rewrite(dockerSave(t, im), func(h *tar.Header, c []byte) []byte {
			if strings.HasSuffix(h.Name, ".tar.gz") {
				return gzipped(t, tarOf(t, files{"f": "changed"}))
			}
			return c
		}), want: warren.ErrInvalid},
		{name: "docker save whose manifest climbs", data: rewrite(oldDockerSave(t, im), func(h *tar.Header, c []byte) []byte {
			if h.Name == "manifest.json" {
				return []byte(`[{"Config":"../../../etc/passwd","RepoTags":["a:1"],"Layers":["/etc/passwd"]}]`)
			}
			return c
		}), want: warren.ErrInvalid, words: "lacks"},
		{name: "a name twice", data: twice(t, oldDockerSave(t, im)), want: warren.ErrInvalid, words: "twice"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := openStore(t, t.TempDir())
			as := c.as
			if as == "" {
				as = "mine"
			}
			_, err := s.Import(t.Context(), as, bytes.NewReader(c.data), ImportOptions{})
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.words) {
				t.Errorf("error %v, want one like %v with %q", err, c.want, c.words)
			}
			if err != nil && strings.Contains(err.Error(), s.dir) {
				t.Errorf("the error shows a path of the host: %v", err)
			}
			if got := left(t, s.dir); len(got) != 0 {
				t.Errorf("left behind: %v", got)
			}
		})
	}
}

// twice repeats every entry of a tar.
func twice(t testing.TB, b []byte) []byte {
	entries := bytes.TrimSuffix(b, make([]byte, 1024))
	return slices.Concat(entries, b)
}

func foreign(t testing.TB) v1.Image {
	im := imageOf(t, layerOf(t, files{"f": "x"}))
	c, err := im.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c = c.DeepCopy()
	c.Architecture = "riscv64"
	im, err = mutate.ConfigFile(im, c)
	if err != nil {
		t.Fatal(err)
	}
	return im
}

// Our own layer: the account, the mount points and sudo, whatever the image has there.
func TestAdapt(t *testing.T) {
	testenv.NeedsRoot(t)
	const root = "root:x:0:0:root:/root:/bin/sh\n"
	outside := t.TempDir()
	if err := os.WriteFile(filepath.Join(outside, "passwd"), []byte("evil:x:0:0::/:/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		layers []files
		want   map[string]string
		dirs   []string
	}{
		{"nothing at all", []files{{"app": "x"}}, map[string]string{
			"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n", "etc/group": "root:x:0:\nuser:x:1000:\n",
			"etc/hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n", "etc/shadow": "missing", "etc/sudoers": "missing", ".warren/guest": ""},
			[]string{"workspace", "home/user", ".warren/repo/objects", "proc", "sys", "dev", "tmp", "run"}},
		{"an ordinary one", []files{{"etc/passwd": root, "etc/group": "root:x:0:\nsudo:x:27:bob\n", "etc/shadow": "root:*:1::::::\n", "bin/bash": "", "usr/bin/sudo": "", "etc/sudoers": "root ALL=(ALL) ALL\n", "etc/hosts": "1.2.3.4 x\n"}}, map[string]string{
			"etc/passwd": root + "user:x:1000:1000::/home/user:/bin/bash\n", "etc/group": "root:x:0:\nsudo:x:27:user,bob\nuser:x:1000:\n",
			"etc/shadow": "root:*:1::::::\nuser:*:19000:0:99999:7:::\n", "etc/sudoers": "root ALL=(ALL) ALL\n\nuser ALL=(ALL:ALL) NOPASSWD: ALL\n", "etc/hosts": "1.2.3.4 x\n"}, nil},
		{"uid 1000 has another name", []files{{"etc/passwd": root + "node:x:1000:1000::/home/node:/bin/bash\n", "etc/group": "root:x:0:\nnode:x:1000:\n"}}, map[string]string{
			"etc/passwd": root + "user:x:1000:1000::/home/user:/bin/sh\nnode:x:1000:1000::/home/node:/bin/bash\n", "etc/group": "root:x:0:\nuser:x:1000:\nnode:x:1000:\n"}, nil},
		{"user has another uid", []files{{"etc/passwd": root + "user:x:33:33::/var/www:/bin/false\n", "etc/group": "root:x:0:\nuser:x:33:\n"}}, map[string]string{
			"etc/passwd": root + "user:x:1000:1000::/home/user:/bin/sh\n", "etc/group": "root:x:0:\nuser:x:1000:\n"}, nil},
		{"the upper passwd wins", []files{{"etc/passwd": "old:x:5:5:::\n"}, {"etc/passwd": root}}, map[string]string{
			"etc/passwd": root + "user:x:1000:1000::/home/user:/bin/sh\n"}, nil},
		{"a removed passwd stays removed", []files{{"etc/passwd": "old:x:5:5:::\n", "etc/shadow": "old:*:::::::\n"}, {"etc/.wh.passwd": "", "etc/.wh.shadow": ""}}, map[string]string{
			"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n", "etc/shadow": "missing"}, nil},
		{"an opaque etc", []files{{"etc/passwd": "old:x:5:5:::\n"}, {"etc/.wh..wh..opq": "", "etc/x": ""}}, map[string]string{
			"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"}, nil},
		{"passwd leads out", []files{{"etc/passwd": "->" + outside + "/passwd", "etc/group": "->../../../../../../../../etc/group"}}, map[string]string{
			"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n", "etc/group": "root:x:0:\nuser:x:1000:\n"}, nil},
		{"etc leads out", []files{{"etc": "->" + outside}}, map[string]string{
			"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"}, []string{"etc"}},
		{"etc is elsewhere inside", []files{{"etc": "->/usr/etc", "usr/etc/passwd": root}}, map[string]string{
			"usr/etc/passwd": root + "user:x:1000:1000::/home/user:/bin/sh\n", "etc/passwd": root + "user:x:1000:1000::/home/user:/bin/sh\n"}, []string{"usr/etc"}},
		{"passwd is elsewhere inside", []files{{"etc/passwd": "->/usr/lib/passwd", "usr/lib/passwd": root}}, map[string]string{
			"etc/passwd": root + "user:x:1000:1000::/home/user:/bin/sh\n", "usr/lib/passwd": root}, nil},
		{"mount points that lead out", []files{{"workspace": "->" + outside, "home": "->/data", "tmp": "->" + outside, ".warren": "->" + outside, "proc": "a file"}}, map[string]string{".warren/guest": ""},
			[]string{"workspace", "home", "home/user", "tmp", ".warren/repo/objects", "proc"}},
		{"a guest of its own", []files{{".warren/guest": "evil", ".warren/extra": "evil"}}, map[string]string{".warren/guest": "", ".warren/extra": "missing"}, nil},
		{"passwd is a directory", []files{{"etc/passwd/x": "x"}}, map[string]string{
			"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"}, nil},
		{"links in a circle", []files{{"etc/passwd": "->group", "etc/group": "->passwd"}}, map[string]string{
			"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := openStore(t, t.TempDir())
			var layers []v1.Layer
			for _, f := range c.layers {
				layers = append(layers, layerOf(t, f))
			}
			im, err := s.Import(t.Context(), "x", bytes.NewReader(ociLayout(t, imageOf(t, layers...))), ImportOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for name, want := range c.want {
				got := content(t, s, im, name)
				if strings.HasPrefix(got, "error:") {
					got = "missing"
				}
				if got != want {
					t.Errorf("%s:\n%s\nwant:\n%s", name, got, want)
				}
			}
			var diffs []string
			for _, l := range im.Root.Layers {
				diffs = append(diffs, filepath.Base(l.Dir))
			}
			v, err := s.openView(diffs)
			if err != nil {
				t.Fatal(err)
			}
			defer v.close()
			for _, d := range c.dirs {
				if n, err := v.lookup(d, false); err != nil || n.kind() != unix.S_IFDIR {
					t.Errorf("%s is no directory: %v", d, err)
				}
			}
			// The kernel's overlay agrees with our own reading.
			for name, want := range c.want {
				if want == "missing" || want == "" {
					continue
				}
				line, _, _ := strings.Cut(want, "\n")
				if got := imagetest.Find(t, im.Root, line); !slices.Contains(got, "/"+name) && !strings.HasPrefix(c.name, "etc is elsewhere") {
					t.Errorf("overlayfs does not show %q in %s, only in %q", line, name, got)
				}
			}
		})
	}
	if b, err := os.ReadFile(filepath.Join(outside, "passwd")); err != nil || string(b) != "evil:x:0:0::/:/bin/sh\n" {
		t.Errorf("the file outside: %q, %v", b, err)
	}
}

// Images that need the same share the layer of ours.
func TestAdaptShares(t *testing.T) {
	testenv.NeedsRoot(t)
	s := openStore(t, t.TempDir())
	var tops []driver.Layer
	for i := range 2 {
		im, err := s.Import(t.Context(), fmt.Sprint("x", i), bytes.NewReader(tarOf(t, files{"f": fmt.Sprint(i), "etc/passwd": "root:x:0:0::/:/bin/sh\n"})), ImportOptions{})
		if err != nil {
			t.Fatal(err)
		}
		tops = append(tops, im.Root.Layers[1])
	}
	if tops[0] != tops[1] {
		t.Errorf("two layers: %v", tops)
	}
}

func TestBootstrapRefuses(t *testing.T) {
	s := openStore(t, t.TempDir())
	nothing := t.TempDir()
	for _, c := range []struct {
		name string
		o    BootstrapOptions
		path string
		want error
		says string
	}{
		{"no name", BootstrapOptions{}, "", warren.ErrInvalid, "name"},
		{"host", BootstrapOptions{Name: "host"}, "", warren.ErrInvalid, "another name"},
		{"a distribution", BootstrapOptions{Name: "x", Distribution: "gentoo"}, "", errors.ErrUnsupported, "debian"},
		{"an option as a package", BootstrapOptions{Name: "x", Packages: []string{"--setup-hook=touch /x"}}, "", warren.ErrInvalid, "package"},
		{"two packages in one", BootstrapOptions{Name: "x", Packages: []string{"git,curl"}}, "", warren.ErrInvalid, "package"},
		{"a path as a package", BootstrapOptions{Name: "x", Packages: []string{"./x.deb"}}, "", warren.ErrInvalid, "package"},
		{"an option as a release", BootstrapOptions{Name: "x", Release: "--help"}, "", warren.ErrInvalid, "release"},
		{"a path as a release", BootstrapOptions{Name: "x", Release: "/etc"}, "", warren.ErrInvalid, "release"},
		{"no mmdebstrap", BootstrapOptions{Name: "x"}, nothing, warren.ErrUnavailable, "apt-get install mmdebstrap"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.path != "" {
				t.Setenv("PATH", c.path)
			}
			_, err := s.Bootstrap(t.Context(), c.o)
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v, want one like %v with %q", err, c.want, c.says)
			}
		})
	}
}

// A stand-in for mmdebstrap shows how it is called and how its end is taken.
func TestBootstrapStandIn(t *testing.T) {
	testenv.NeedsRoot(t)
	bin := t.TempDir()
	data := filepath.Join(bin, "rootfs.tar")
	if err := os.WriteFile(data, tarOf(t, files{"etc/debian_version": "12\n", "bin/sh": "sh"}), 0o644); err != nil {
		t.Fatal(err)
	}
	stand := func(end string) {
		script := "#!/bin/sh\necho \"args: $* tmp: $TMPDIR\" >&2\ncat " + data + "\n" + end + "\n"
		if err := testenv.WriteProgram(filepath.Join(bin, "mmdebstrap"), []byte(script)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	s := openStore(t, t.TempDir())
	stand("exit 0")
	var out bytes.Buffer
	var steps []string
	im, err := s.Bootstrap(t.Context(), BootstrapOptions{Name: "deb", Release: "bookworm", Packages: []string{"git", "libc6:amd64"}, Output: &out,
		Progress: func(p Progress) { steps = append(steps, p.Step) }})
	if err != nil {
		t.Fatal(err)
	}
	if im.Kind != "bootstrap" || content(t, s, im, "etc/debian_version") != "12\n" {
		t.Errorf("image %+v", im)
	}
	if got := out.String(); !strings.Contains(got, "args: --variant=minbase --format=tar --include=git,libc6:amd64 -- bookworm - tmp: "+tmp) {
		t.Errorf("mmdebstrap was called with %q", got)
	}
	if !slices.Contains(steps, "bootstrap") || !slices.Contains(steps, "adapt") {
		t.Errorf("progress %q", steps)
	}
	// One that writes a whole tar and fails all the same makes no image.
	stand("echo E: no such package >&2; exit 25")
	_, err = s.Bootstrap(t.Context(), BootstrapOptions{Name: "deb2", Output: io.Discard})
	if !errors.Is(err, warren.ErrUnavailable) || !strings.Contains(err.Error(), "no such package") {
		t.Errorf("a failing mmdebstrap: %v", err)
	}
	if _, err := s.Resolve(t.Context(), "deb2"); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("the image of a failing mmdebstrap: %v", err)
	}
	if list, _ := os.ReadDir(tmp); len(list) != 0 {
		t.Errorf("left in the temporary directory: %v", list)
	}
}

// TestBootstrapDebian builds a real Debian and becomes root in it. It needs a package mirror.
func TestBootstrapDebian(t *testing.T) {
	testenv.NeedsRoot(t)
	testenv.NeedsTool(t, "mmdebstrap")
	s, err := Open(Options{Dir: t.TempDir(), HostRoot: fakeHost(t)}) // ids as they are, to run programs without a user namespace
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var out bytes.Buffer
	im, err := s.Bootstrap(t.Context(), BootstrapOptions{Name: "deb", Packages: []string{"sudo"}, Output: &out})
	if err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	t.Logf("%d MB in %d layers", im.Size>>20, len(im.Root.Layers))
	env := []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/home/user"}
	for _, c := range []struct {
		uid  uint32
		argv []string
		want string
	}{
		{1000, []string{"/usr/bin/id", "-un"}, "user\n"},
		{1000, []string{"/usr/bin/sudo", "-n", "id", "-un"}, "root\n"},
		{0, []string{"/bin/su", "-", "user", "-c", "pwd"}, "/home/user\n"},
	} {
		if got, err := imagetest.Run(t, im.Root, c.uid, env, c.argv...); err != nil || !strings.HasSuffix(got, c.want) {
			t.Errorf("%q: %v, says %q, want %q", c.argv, err, got, c.want)
		}
	}
}

// A19: what one sandbox does to its root is its overlay's; the layers stay as they were, and so does an image that shares them.
func TestLayersStayPristine(t *testing.T) {
	testenv.NeedsRoot(t)
	s := openStore(t, t.TempDir())
	im, err := s.Import(t.Context(), "x", bytes.NewReader(tarOf(t, files{"bin/tool": "pristine", "etc/passwd": "root:x:0:0::/:/bin/sh\n"})), ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range im.Root.Layers {
		var st unix.Stat_t
		if err := unix.Lstat(l.Dir, &st); err != nil {
			t.Fatal(err)
		}
		// No id of a host's user, nor that of another sandbox's user, can write: all belongs to the shifted root.
		if st.Uid != driver.DiskIDBase || st.Mode&0o022 != 0 {
			t.Errorf("%s: owner %d mode %o", l.Dir, st.Uid, st.Mode)
		}
	}
	if fi, err := os.Stat(s.dir); err != nil || fi.Mode().Perm()&0o077 != 0 {
		t.Logf("the store's directory is %v (its children are closed)", fi.Mode())
	}
	for _, d := range []string{"layers", "refs", "blobs", "host"} {
		if fi, err := os.Stat(filepath.Join(s.dir, d)); err != nil || fi.Mode().Perm() != 0o700 {
			t.Errorf("%s: mode %v, %v", d, fi.Mode(), err)
		}
	}
}
