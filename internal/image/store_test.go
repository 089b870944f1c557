package image

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// files are the content of a layer: a name that ends in a slash is a directory, a value that begins with "->" a symbolic link.
type files map[string]string

func tarOf(t testing.TB, f files) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, n := range slices.Sorted(func(yield func(string) bool) {
		for n := range f {
			if !yield(n) {
				return
			}
		}
	}) {
		h := &tar.Header{Name: n, Mode: 0o644, Typeflag: tar.TypeReg, Size: int64(len(f[n]))}
		if target, ok := strings.CutPrefix(f[n], "->"); ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeSymlink, target, 0
		}
		if strings.HasSuffix(n, "/") {
			h.Typeflag, h.Mode = tar.TypeDir, 0o755
		}
		if strings.Contains(n, "bin/") {
			h.Mode = 0o755
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			io.WriteString(w, f[n])
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func layerOf(t testing.TB, f files) v1.Layer {
	t.Helper()
	b := tarOf(t, f)
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func imageOf(t testing.TB, layers ...v1.Layer) v1.Image {
	t.Helper()
	im, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		t.Fatal(err)
	}
	c, err := im.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", runtime.GOARCH
	c.Config = v1.Config{User: "app", WorkingDir: "/srv", Env: []string{"A=1", "B=x=y", "bad"}, Cmd: []string{"run"}, Entrypoint: []string{"/bin/sh"}}
	im, err = mutate.ConfigFile(im, c)
	if err != nil {
		t.Fatal(err)
	}
	return im
}

// hub is a registry whose answers a test can change.
type hub struct {
	*httptest.Server
	// wrap, when set, answers instead; it may call the registry.
	wrap  atomic.Pointer[func(next http.Handler, w http.ResponseWriter, r *http.Request)]
	blobs atomic.Int64
}

func newHub(t testing.TB) *hub {
	t.Helper()
	h := &hub{}
	reg := registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, 0)))
	h.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			h.blobs.Add(1)
		}
		if f := h.wrap.Load(); f != nil {
			(*f)(reg, w, r)
			return
		}
		reg.ServeHTTP(w, r)
	}))
	t.Cleanup(h.Close)
	return h
}

func (h *hub) answer(f func(next http.Handler, w http.ResponseWriter, r *http.Request)) {
	h.wrap.Store(&f)
}

func (h *hub) ref(s string) string { return strings.TrimPrefix(h.URL, "http://") + "/" + s }

func (h *hub) push(t testing.TB, ref string, im v1.Image) string {
	t.Helper()
	r, err := name.ParseReference(h.ref(ref))
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(r, im); err != nil {
		t.Fatal(err)
	}
	d, err := im.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return d.String()
}

func openStore(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(Options{Dir: dir, IDBase: driver.DiskIDBase, HostRoot: fakeHost(t)})
	if err != nil {
		t.Fatal(err)
	}
	s.pause = time.Millisecond
	t.Cleanup(func() { s.Close() })
	return s
}

// fakeHost is the least that the host's image can be made of.
func fakeHost(t testing.TB) string {
	t.Helper()
	root := t.TempDir()
	for _, d := range []string{"usr/bin", "etc"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// left lists what is in a store, without locks and the host's part.
func left(t testing.TB, dir string) []string {
	t.Helper()
	var out []string
	for _, d := range []string{"layers", "refs", "blobs", "blobs/sha256"} {
		list, err := os.ReadDir(filepath.Join(dir, d))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range list {
			if d != "blobs" || e.Name() != "sha256" {
				out = append(out, d+"/"+e.Name())
			}
		}
	}
	return out
}

// content reads a file of an image as a sandbox would see it.
func content(t testing.TB, s *Store, im *Image, file string) string {
	t.Helper()
	var diffs []string
	for _, l := range im.Root.Layers {
		diffs = append(diffs, filepath.Base(l.Dir))
	}
	v, err := s.openView(diffs)
	if err != nil {
		t.Fatal(err)
	}
	defer v.close()
	b, _, err := v.readFile(file)
	if err != nil {
		return "error: " + err.Error()
	}
	return string(b)
}

func TestPull(t *testing.T) {
	testenv.NeedsRoot(t)
	h := newHub(t)
	bottom := layerOf(t, files{"etc/passwd": "root:x:0:0::/root:/bin/sh\n", "bin/sh": "sh", "data/old": "old", "data/keep": "keep"})
	digest := h.push(t, "app:1", imageOf(t, bottom, layerOf(t, files{"data/.wh.old": "", "data/new": "new"})))
	s := openStore(t, t.TempDir())
	var last Progress
	im, err := s.Pull(t.Context(), h.ref("app:1"), PullOptions{Name: "app:1", Progress: func(p Progress) { last = p }})
	if err != nil {
		t.Fatal(err)
	}
	if im.Digest != digest || im.Kind != "oci" || im.Name != "app:1" || im.Size == 0 || last.Step != "adapt" {
		t.Errorf("image %+v, last progress %+v", im, last)
	}
	want := Config{User: "app", WorkingDir: "/srv", Env: map[string]string{"A": "1", "B": "x=y"}, Cmd: []string{"run"}, Entrypoint: []string{"/bin/sh"}}
	if d := cmp.Diff(want, im.Config); d != "" {
		t.Errorf("config (-want +got):\n%s", d)
	}
	if len(im.Root.Layers) != 3 {
		t.Fatalf("layers %+v", im.Root.Layers)
	}
	if got := content(t, s, im, "data/new") + content(t, s, im, "data/keep"); got != "newkeep" {
		t.Errorf("data %q", got)
	}
	if got := content(t, s, im, "data/old"); !strings.Contains(got, "not exist") {
		t.Errorf("a removed file shows: %q", got)
	}
	for _, ref := range []string{"app:1", "docker.io/library/app:1", digest, strings.TrimPrefix(digest, "sha256:"), digest[7:19], "app@" + digest} {
		got, err := s.Resolve(t.Context(), ref)
		if err != nil || got.Digest != digest {
			t.Errorf("Resolve(%q): %v, %v", ref, got, err)
		}
	}
	for _, ref := range []string{"app", "app:2", "other@" + digest, "app@sha256:" + strings.Repeat("0", 64), "sha256:" + strings.Repeat("0", 64)} {
		if got, err := s.Resolve(t.Context(), ref); !errors.Is(err, warren.ErrNotFound) || !strings.Contains(err.Error(), "warren image pull") {
			t.Errorf("Resolve(%q): %v, %v; want not found and what to do", ref, got, err)
		}
	}
	if _, err := s.Resolve(t.Context(), strings.TrimPrefix(im.Digest, "sha256:")[:4]); !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), "at least 6 digits") || !strings.Contains(err.Error(), "app:1") {
		t.Errorf("four digits: %v", err)
	}
	if _, err := s.Resolve(t.Context(), "NOT A NAME"); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("a bad name: %v", err)
	}
	if blobs, _ := os.ReadDir(filepath.Join(s.dir, "blobs/sha256")); len(blobs) != 0 {
		t.Errorf("blobs are left: %v", blobs)
	}

	// Another image with the same bottom, and the first again: nothing is fetched or unpacked twice.
	h.push(t, "app:2", imageOf(t, bottom, layerOf(t, files{"two": "2"})))
	before, err := os.Stat(im.Root.Layers[0].Dir)
	if err != nil {
		t.Fatal(err)
	}
	h.blobs.Store(0)
	two, err := s.Pull(t.Context(), h.ref("app:2"), PullOptions{Name: "app:2"})
	if err != nil {
		t.Fatal(err)
	}
	if n := h.blobs.Load(); n != 2 {
		t.Errorf("%d blobs were fetched, want the configuration and the new layer", n)
	}
	if two.Root.Layers[0] != im.Root.Layers[0] || two.Root.Layers[2] != im.Root.Layers[2] {
		t.Errorf("equal layers are not shared: %v and %v", two.Root.Layers, im.Root.Layers)
	}
	if after, err := os.Stat(im.Root.Layers[0].Dir); err != nil || !os.SameFile(before, after) {
		t.Errorf("the shared layer was unpacked again (%v)", err)
	}
	list, err := s.List(t.Context())
	if err != nil || len(list) != 3 || list[0].Name != "host" || list[1].Name != "app:1" || list[2].Name != "app:2" {
		t.Errorf("List: %v, %v", list, err)
	}

	// Deleting one leaves what the other needs; deleting both leaves nothing.
	if err := s.Delete(t.Context(), "app:1"); err != nil {
		t.Fatal(err)
	}
	if got := content(t, s, two, "data/keep"); got != "keep" {
		t.Errorf("after the other's Delete: %q", got)
	}
	if _, err := os.Stat(im.Root.Layers[1].Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the layer that nobody needs: %v", err)
	}
	if err := s.Delete(t.Context(), two.Digest); err != nil {
		t.Fatal(err)
	}
	if got := left(t, s.dir); len(got) != 0 {
		t.Errorf("after the last Delete: %v", got)
	}
	if err := s.Delete(t.Context(), "app:1"); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("a second Delete: %v", err)
	}
	if err := s.Delete(t.Context(), "host"); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("Delete of host: %v", err)
	}
}

// A name that moves to another image leaves the old one in place under its digest: sandboxes may run on it.
func TestPullMovedTag(t *testing.T) {
	testenv.NeedsRoot(t)
	h := newHub(t)
	s := openStore(t, t.TempDir())
	h.push(t, "app", imageOf(t, layerOf(t, files{"v": "1"})))
	one, err := s.Pull(t.Context(), h.ref("app"), PullOptions{Name: "app"})
	if err != nil {
		t.Fatal(err)
	}
	h.push(t, "app", imageOf(t, layerOf(t, files{"v": "2"})))
	two, err := s.Pull(t.Context(), h.ref("app"), PullOptions{Name: "app"})
	if err != nil {
		t.Fatal(err)
	}
	if got := content(t, s, one, "v") + content(t, s, two, "v"); got != "12" {
		t.Errorf("versions %q", got)
	}
	for ref, want := range map[string]string{"app": two.Digest, one.Digest: one.Digest, "app@" + one.Digest: one.Digest} {
		if got, err := s.Resolve(t.Context(), ref); err != nil || got.Digest != want {
			t.Errorf("Resolve(%s): %v, %v", ref, got, err)
		}
	}
	if err := s.Delete(t.Context(), "app@"+one.Digest); err != nil {
		t.Fatal(err)
	}
	if got := content(t, s, two, "v"); got != "2" {
		t.Errorf("after the Delete of the old one: %q", got)
	}
	if _, err := os.Stat(one.Root.Layers[0].Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old layer: %v", err)
	}
}

func TestPullIndexAndPins(t *testing.T) {
	testenv.NeedsRoot(t)
	h := newHub(t)
	own := imageOf(t, layerOf(t, files{"arch": "own"}))
	foreign := imageOf(t, layerOf(t, files{"arch": "foreign"}))
	add := func(im v1.Image, arch string) mutate.IndexAddendum {
		return mutate.IndexAddendum{Add: im, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}}
	}
	index := mutate.AppendManifests(empty.Index, add(foreign, "riscv64"), add(own, runtime.GOARCH))
	ref, err := name.ParseReference(h.ref("multi:1"))
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(ref, index); err != nil {
		t.Fatal(err)
	}
	only := mutate.AppendManifests(empty.Index, add(foreign, "riscv64"))
	ref, _ = name.ParseReference(h.ref("foreign:1"))
	if err := remote.WriteIndex(ref, only); err != nil {
		t.Fatal(err)
	}
	pin, err := index.Digest()
	if err != nil {
		t.Fatal(err)
	}
	s := openStore(t, t.TempDir())
	im, err := s.Pull(t.Context(), h.ref("multi@"+pin.String()), PullOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := content(t, s, im, "arch"); got != "own" {
		t.Errorf("arch %q", got)
	}
	for _, r := range []string{h.ref("multi@" + pin.String()), h.ref("multi@" + im.Digest), pin.String()} {
		if got, err := s.Resolve(t.Context(), r); err != nil || got.Digest != im.Digest {
			t.Errorf("Resolve(%s): %v, %v", r, got, err)
		}
	}
	_, err = s.Pull(t.Context(), h.ref("foreign:1"), PullOptions{})
	if !errors.Is(err, warren.ErrNotFound) || !strings.Contains(err.Error(), "riscv64") {
		t.Errorf("no such platform: %v", err)
	}
	_, err = s.Pull(t.Context(), h.ref("multi:1"), PullOptions{Platform: "linux/riscv64"})
	if !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("a platform that cannot run here: %v", err)
	}
	_, err = s.Pull(t.Context(), h.ref("multi:1"), PullOptions{Platform: "amd64"})
	if !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("a platform that is none: %v", err)
	}
}

func TestPullRefuses(t *testing.T) {
	testenv.NeedsRoot(t)
	good := func(t *testing.T) v1.Image {
		return imageOf(t, layerOf(t, files{"f": strings.Repeat("content ", 10000)}))
	}
	setConfig := func(t *testing.T, im v1.Image, change func(*v1.ConfigFile)) v1.Image {
		c, err := im.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		c = c.DeepCopy()
		change(c)
		im, err = mutate.ConfigFile(im, c)
		if err != nil {
			t.Fatal(err)
		}
		return im
	}
	layerDigest := func(t *testing.T, im v1.Image) string {
		l, err := im.Layers()
		if err != nil {
			t.Fatal(err)
		}
		d, err := l[0].Digest()
		if err != nil {
			t.Fatal(err)
		}
		return d.String()
	}
	// body answers requests that end so with these bytes.
	body := func(suffix string, b []byte, h http.Header) func(http.Handler, http.ResponseWriter, *http.Request) {
		return func(next http.Handler, w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, suffix) {
				for k, v := range h {
					w.Header()[k] = v
				}
				w.Write(b)
				return
			}
			next.ServeHTTP(w, r)
		}
	}
	status := func(code int) func(http.Handler, http.ResponseWriter, *http.Request) {
		return func(_ http.Handler, w http.ResponseWriter, r *http.Request) { w.WriteHeader(code) }
	}
	for _, c := range []struct {
		name   string
		image  func(t *testing.T) v1.Image
		answer func(t *testing.T, im v1.Image) func(http.Handler, http.ResponseWriter, *http.Request)
		ref    string
		want   error
		words  string
	}{
		{name: "unknown image", ref: "nothing:1", want: warren.ErrNotFound, words: "check the name"},
		{name: "bad reference", ref: "UPPER:1", want: warren.ErrInvalid, words: "looks like"},
		{name: "unauthorised", answer: func(*testing.T, v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			return func(next http.Handler, w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/v2/" {
					w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
				}
				w.WriteHeader(http.StatusUnauthorized)
			}
		}, want: warren.ErrDenied, words: "docker login"},
		{name: "too many requests", answer: func(*testing.T, v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			return status(http.StatusTooManyRequests)
		}, want: warren.ErrUnavailable, words: "wait"},
		{name: "server error", answer: func(*testing.T, v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			return status(http.StatusBadGateway)
		}, want: warren.ErrUnavailable, words: "502"},
		{name: "manifest that its digest does not fit", ref: "pinned", answer: func(t *testing.T, im v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			d, _ := im.Digest()
			other, _ := good(t).RawManifest()
			return body("/manifests/"+d.String(), append(other, '\n'), http.Header{"Content-Type": {string(types.DockerManifestSchema2)}})
		}, want: warren.ErrInvalid, words: "has the digest"},
		{name: "configuration that its digest does not fit", answer: func(t *testing.T, im v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			d, _ := im.ConfigName()
			return body("/blobs/"+d.String(), []byte("{}"), nil)
		}, want: warren.ErrInvalid, words: "has the digest"},
		{name: "layer that its digest does not fit", answer: func(t *testing.T, im v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			l, _ := im.Layers()
			n, _ := l[0].Size()
			return body("/blobs/"+layerDigest(t, im), make([]byte, n), nil)
		}, want: warren.ErrInvalid, words: "is not what its digest says"},
		{name: "layer that is longer than it says", answer: func(t *testing.T, im v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			return body("/blobs/"+layerDigest(t, im), make([]byte, 1<<20), nil)
		}, want: warren.ErrInvalid, words: "is not what its digest says"},
		{name: "layer cut off for ever", answer: func(t *testing.T, im v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			return body("/blobs/"+layerDigest(t, im), []byte("short"), nil)
		}, want: warren.ErrUnavailable, words: "broke off"},
		{name: "DiffID that does not fit", image: func(t *testing.T) v1.Image {
			return setConfig(t, good(t), func(c *v1.ConfigFile) { c.RootFS.DiffIDs[0].Hex = strings.Repeat("ab", 32) })
		}, want: warren.ErrInvalid, words: "not what the image's configuration says"},
		{name: "fewer DiffIDs than layers", image: func(t *testing.T) v1.Image {
			return setConfig(t, good(t), func(c *v1.ConfigFile) { c.RootFS.DiffIDs = nil })
		}, want: warren.ErrInvalid, words: "1 layers"},
		{name: "a DiffID that is a path", image: func(t *testing.T) v1.Image {
			return setConfig(t, good(t), func(c *v1.ConfigFile) { c.RootFS.DiffIDs[0] = v1.Hash{Algorithm: "sha256", Hex: "../../../etc"} })
		}, want: warren.ErrInvalid},
		{name: "another architecture", image: func(t *testing.T) v1.Image {
			return setConfig(t, good(t), func(c *v1.ConfigFile) { c.Architecture = "riscv64" })
		}, want: errors.ErrUnsupported, words: "linux/riscv64"},
		{name: "another system", image: func(t *testing.T) v1.Image {
			return setConfig(t, good(t), func(c *v1.ConfigFile) { c.OS = "windows" })
		}, want: errors.ErrUnsupported, words: "windows"},
		{name: "schema 1", answer: func(*testing.T, v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			return body("/manifests/1", []byte(`{"schemaVersion":1,"fsLayers":[]}`), http.Header{"Content-Type": {string(types.DockerManifestSchema1Signed)}})
		}, want: errors.ErrUnsupported, words: "schema 1"},
		{name: "manifest that is no JSON", answer: func(*testing.T, v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			return body("/manifests/1", []byte(`<html>`), nil)
		}, want: warren.ErrInvalid},
		{name: "manifest without an end", answer: func(*testing.T, v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			return body("/manifests/1", make([]byte, maxJSON+10), nil)
		}, want: warren.ErrInvalid, words: "larger"},
		{name: "foreign layer", answer: func(t *testing.T, im v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			m, _ := im.RawManifest()
			m = bytes.Replace(m, []byte(`"layers":[{`), []byte(`"layers":[{"urls":["http://169.254.169.254/"],`), 1)
			return body("/manifests/1", m, nil)
		}, want: errors.ErrUnsupported, words: "URL"},
		{name: "an artifact", answer: func(t *testing.T, im v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			m, _ := im.RawManifest()
			m = bytes.Replace(m, []byte(types.DockerConfigJSON), []byte("application/vnd.cncf.helm.config.v1+json"), 1)
			return body("/manifests/1", m, nil)
		}, want: warren.ErrInvalid, words: "artifact"},
		{name: "redirect to a metadata service", answer: func(t *testing.T, im v1.Image) func(http.Handler, http.ResponseWriter, *http.Request) {
			return func(next http.Handler, w http.ResponseWriter, r *http.Request) {
				if strings.HasSuffix(r.URL.Path, layerDigest(t, im)) {
					http.Redirect(w, r, "http://169.254.169.254/latest", http.StatusFound)
					return
				}
				next.ServeHTTP(w, r)
			}
		}, want: warren.ErrInvalid, words: "plain HTTP"},
		{name: "a layer that climbs out", image: func(t *testing.T) v1.Image {
			return imageOf(t, layerOf(t, files{"../../../refs/evil": "x"}))
		}, want: warren.ErrInvalid, words: `".."`},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHub(t)
			im := good(t)
			if c.image != nil {
				im = c.image(t)
			}
			digest := h.push(t, "app:1", im)
			ref := h.ref("app:1")
			switch c.ref {
			case "":
			case "pinned":
				ref = h.ref("app@" + digest)
			default:
				ref = h.ref(c.ref)
			}
			if c.answer != nil {
				h.answer(c.answer(t, im))
			}
			s := openStore(t, t.TempDir())
			got, err := s.Pull(t.Context(), ref, PullOptions{})
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.words) {
				t.Fatalf("Pull: %v, %v; want an error like %v with %q", got, err, c.want, c.words)
			}
			if strings.Contains(err.Error(), s.dir) {
				t.Errorf("the error shows a path of the host: %v", err)
			}
			var rest []string
			for _, f := range left(t, s.dir) {
				if !strings.HasPrefix(f, "blobs/sha256/") || !again(err) {
					rest = append(rest, f)
				}
			}
			if len(rest) != 0 {
				t.Errorf("left behind: %v", rest)
			}
			if list, err := s.List(t.Context()); err != nil || len(list) != 1 {
				t.Errorf("List: %v, %v", list, err)
			}
		})
	}
}

func TestPullUnreachable(t *testing.T) {
	testenv.NeedsRoot(t)
	s := openStore(t, t.TempDir())
	for _, c := range []struct {
		ref   string
		want  error
		words string
	}{
		{"127.0.0.1:1/app", warren.ErrUnavailable, "cannot be reached"},
		{"10.255.255.1:1/app", nil, ""},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		if c.want == nil { // a private address without --insecure: HTTPS is tried, plain HTTP never
			g := &plainGuard{inner: &http.Transport{}}
			r := httptest.NewRequest("GET", "http://10.255.255.1:1/v2/", nil)
			if _, err := g.RoundTrip(r); !errors.Is(err, errPlain) {
				t.Errorf("plain HTTP to a private address: %v", err)
			}
			cancel()
			continue
		}
		_, err := s.Pull(ctx, c.ref, PullOptions{})
		cancel()
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s: %v", c.ref, err)
		}
	}
}

// A download that breaks off goes on where it stopped, in the same pull and in a later one.
func TestPullResumes(t *testing.T) {
	testenv.NeedsRoot(t)
	h := newHub(t)
	big := make([]byte, 2<<20)
	for i := range big {
		big[i] = byte(i * i >> 7)
	}
	plain := imageOf(t, layerOf(t, files{"big": string(big)}))
	h.push(t, "app:1", plain)
	ls, _ := plain.Layers()
	d, _ := ls[0].Digest()
	var ranges []string
	var mu sync.Mutex
	var broken atomic.Int64
	h.answer(func(next http.Handler, w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, d.String()) {
			next.ServeHTTP(w, r)
			return
		}
		mu.Lock()
		ranges = append(ranges, r.Header.Get("Range"))
		mu.Unlock()
		if broken.Add(-1) >= 0 {
			rec := httptest.NewRecorder()
			next.ServeHTTP(rec, r)
			b := rec.Body.Bytes()
			for k, v := range rec.Header() {
				w.Header()[k] = v
			}
			w.WriteHeader(rec.Code)
			w.Write(b[:len(b)/2])
			panic(http.ErrAbortHandler)
		}
		next.ServeHTTP(w, r)
	})
	s := openStore(t, t.TempDir())
	broken.Store(2)
	if _, err := s.Pull(t.Context(), h.ref("app:1"), PullOptions{Name: "app"}); err != nil {
		t.Fatal(err)
	}
	if len(ranges) != 3 || ranges[0] != "" || !strings.HasPrefix(ranges[1], "bytes=") || !strings.HasPrefix(ranges[2], "bytes=") || ranges[1] == ranges[2] {
		t.Errorf("ranges %q", ranges)
	}
	if err := s.Delete(t.Context(), "app"); err != nil {
		t.Fatal(err)
	}
	// Now it breaks off for good, and a later pull goes on.
	ranges = nil
	broken.Store(tries)
	if _, err := s.Pull(t.Context(), h.ref("app:1"), PullOptions{Name: "app"}); !errors.Is(err, warren.ErrUnavailable) {
		t.Fatalf("a download that breaks off for good: %v", err)
	}
	s.Close()
	s = openStore(t, s.dir)
	ranges = nil
	got, err := s.Pull(t.Context(), h.ref("app:1"), PullOptions{Name: "app"})
	if err != nil {
		t.Fatal(err)
	}
	if len(ranges) != 1 || !strings.HasPrefix(ranges[0], "bytes=") {
		t.Errorf("ranges of the later pull %q", ranges)
	}
	if content(t, s, got, "big") != string(big) {
		t.Error("the content is not what was pushed")
	}
}

func TestPullCancel(t *testing.T) {
	testenv.NeedsRoot(t)
	h := newHub(t)
	h.push(t, "app:1", imageOf(t, layerOf(t, files{"f": "x"})))
	ctx, cancel := context.WithCancel(t.Context())
	h.answer(func(next http.Handler, w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/blobs/") {
			cancel()
			<-r.Context().Done()
			return
		}
		next.ServeHTTP(w, r)
	})
	s := openStore(t, t.TempDir())
	if _, err := s.Pull(ctx, h.ref("app:1"), PullOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if got := left(t, s.dir); len(got) != 0 {
		t.Errorf("left behind: %v", got)
	}
}

// login writes a Docker configuration as `docker login` does, and makes it this test's.
func login(t *testing.T, registry, user, password string) {
	t.Helper()
	dir := t.TempDir()
	auth := base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
	config := fmt.Sprintf(`{"auths": {%q: {"auth": %q}}}`, registry, auth)
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DOCKER_CONFIG", dir)
}

// A registry that wants to know who pulls, by basic authentication or by a token for it, and the user's Docker configuration.
func TestPullLogin(t *testing.T) {
	testenv.NeedsRoot(t)
	const user, password, token = "ada", "correct-horse", "token-of-ada"
	for _, kind := range []string{"basic", "token"} {
		t.Run(kind, func(t *testing.T) {
			h := newHub(t)
			h.push(t, "private/app:1", imageOf(t, layerOf(t, files{"f": "private"})))
			host := strings.TrimPrefix(h.URL, "http://")
			var passed atomic.Int64
			h.answer(func(next http.Handler, w http.ResponseWriter, r *http.Request) {
				u, p, basic := r.BasicAuth()
				right := basic && u == user && p == password
				if r.URL.Path == "/token" {
					if !right || !strings.Contains(r.URL.Query().Get("scope"), "private/app") {
						w.WriteHeader(http.StatusUnauthorized)
						return
					}
					fmt.Fprintf(w, `{"token": %q}`, token)
					return
				}
				challenge := `Basic realm="test"`
				if kind == "token" {
					challenge = fmt.Sprintf(`Bearer realm="%s/token",service="test"`, h.URL)
					right = r.Header.Get("Authorization") == "Bearer "+token
				}
				if !right {
					w.Header().Set("WWW-Authenticate", challenge)
					w.WriteHeader(http.StatusUnauthorized)
					return
				}
				passed.Add(1)
				next.ServeHTTP(w, r)
			})
			s := openStore(t, t.TempDir())
			refused := func(what string, secrets ...string) {
				t.Helper()
				_, err := s.Pull(t.Context(), h.ref("private/app:1"), PullOptions{Name: "app"})
				if !errors.Is(err, warren.ErrDenied) || !strings.Contains(err.Error(), "docker login "+host) {
					t.Errorf("%s: %v", what, err)
				}
				for _, secret := range secrets {
					if err != nil && strings.Contains(err.Error(), secret) {
						t.Errorf("%s: the message has the secret %q: %v", what, secret, err)
					}
				}
			}
			t.Setenv("DOCKER_CONFIG", t.TempDir())
			refused("nobody is logged in")
			login(t, "registry.example.com", user, password)
			refused("a login elsewhere", password)
			login(t, host, user, "wrong-pony")
			refused("a wrong password", "wrong-pony", base64.StdEncoding.EncodeToString([]byte(user+":wrong-pony")))
			if n := passed.Load(); n != 0 {
				t.Fatalf("%d requests passed without the password", n)
			}
			if got := left(t, s.dir); len(got) != 0 {
				t.Errorf("left behind: %v", got)
			}
			login(t, host, user, password)
			im, err := s.Pull(t.Context(), h.ref("private/app:1"), PullOptions{Name: "app"})
			if err != nil {
				t.Fatal(err)
			}
			if got := content(t, s, im, "f"); got != "private" || passed.Load() == 0 {
				t.Errorf("content %q after %d requests", got, passed.Load())
			}
		})
	}
}

// Two stores on one directory, as two processes have them, pull one image at the same time.
func TestPullConcurrently(t *testing.T) {
	testenv.NeedsRoot(t)
	h := newHub(t)
	var layers []v1.Layer
	for i := range 5 {
		layers = append(layers, layerOf(t, files{fmt.Sprintf("f%d", i): strings.Repeat(fmt.Sprint(i), 1<<16)}))
	}
	layers = append(layers, layers[0]) // a layer twice in one image
	h.push(t, "app:1", imageOf(t, layers...))
	dir := t.TempDir()
	stores := []*Store{openStore(t, dir), openStore(t, dir)}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			im, err := stores[i%2].Pull(t.Context(), h.ref("app:1"), PullOptions{Name: "app"})
			if err != nil {
				t.Error(err)
				return
			}
			if len(im.Root.Layers) != 6 {
				t.Errorf("%d layers", len(im.Root.Layers))
			}
		})
	}
	wg.Wait()
	if n := h.blobs.Load(); n != 8+5 {
		t.Errorf("%d blobs were fetched; want 8 configurations and 5 layers", n)
	}
	for _, f := range left(t, dir) {
		if strings.Contains(f, "/.") || strings.HasPrefix(f, "blobs") {
			t.Errorf("left behind: %s", f)
		}
	}
}

// A process that dies between any two steps leaves nothing that a later one trips over.
func TestCrash(t *testing.T) {
	testenv.NeedsRoot(t)
	h := newHub(t)
	h.push(t, "app:1", imageOf(t, layerOf(t, files{"f": "x"}), layerOf(t, files{"g": "y"})))
	for _, step := range []string{"layer renamed", "before the name", "name removed"} {
		t.Run(step, func(t *testing.T) {
			dir := t.TempDir()
			s := openStore(t, dir)
			s.hook = func(at string) {
				if at == step {
					runtime.Goexit() // its deferred calls run, so what is left is made by hand below
				}
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				if step == "name removed" {
					if _, err := s.Pull(t.Context(), h.ref("app:1"), PullOptions{Name: "app"}); err != nil {
						t.Error(err)
					}
					s.Delete(t.Context(), "app")
					return
				}
				// One layer at a time, in this goroutine, for Goexit to end it.
				b := tarOf(t, files{"f": "x"})
				diffID, err := s.addLayer(t.Context(), bytes.NewReader(b))
				if err == nil {
					s.finish(t.Context(), &record{Name: "app", Key: "app", Layers: []string{diffID}}, func(Progress) {})
				}
			}()
			<-done
			for _, f := range []string{"layers/" + newPrefix + "x", "layers/" + oldPrefix + "x", "blobs/" + newPrefix + "x"} {
				if err := os.MkdirAll(filepath.Join(dir, f, "sub"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(filepath.Join(dir, "refs", newPrefix+"x"), []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
			s = openStore(t, dir)
			if got := left(t, dir); len(got) != 0 {
				t.Errorf("left after Open: %v", got)
			}
			im, err := s.Pull(t.Context(), h.ref("app:1"), PullOptions{Name: "app"})
			if err != nil {
				t.Fatal(err)
			}
			if got := content(t, s, im, "f") + content(t, s, im, "g"); got != "xy" {
				t.Errorf("content %q", got)
			}
		})
	}
}

// A record that is damaged is told, does not stop the others, and does not cost the layers that it may name.
func TestDamagedRecord(t *testing.T) {
	testenv.NeedsRoot(t)
	h := newHub(t)
	h.push(t, "a:1", imageOf(t, layerOf(t, files{"f": "a"})))
	h.push(t, "b:1", imageOf(t, layerOf(t, files{"f": "b"})))
	s := openStore(t, t.TempDir())
	for _, n := range []string{"a:1", "b:1"} {
		if _, err := s.Pull(t.Context(), h.ref(n), PullOptions{Name: n}); err != nil {
			t.Fatal(err)
		}
	}
	k, err := key("a:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.refPath(k), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	before := len(left(t, s.dir))
	s = openStore(t, s.dir)
	if n := len(left(t, s.dir)); n != before {
		t.Errorf("%d files, %d before", n, before)
	}
	if _, err := s.Resolve(t.Context(), "a:1"); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("the damaged one: %v", err)
	}
	if _, err := s.Resolve(t.Context(), "b:1"); err != nil {
		t.Errorf("the other: %v", err)
	}
	if _, err := s.Pull(t.Context(), h.ref("a:1"), PullOptions{Name: "a:1"}); err != nil {
		t.Errorf("a pull mends it: %v", err)
	}
}

func TestDiskFull(t *testing.T) {
	testenv.NeedsRoot(t)
	h := newHub(t)
	h.push(t, "app:1", imageOf(t, layerOf(t, files{"f": strings.Repeat("0123456789abcdef", 1<<20)})))
	s := openStore(t, testenv.SmallFS(t, 4<<20, 512))
	_, err := s.Pull(t.Context(), h.ref("app:1"), PullOptions{})
	if !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "full") {
		t.Errorf("error %v", err)
	}
	if got := left(t, s.dir); len(got) != 0 {
		t.Errorf("left behind: %v", got)
	}
	if _, err := s.List(t.Context()); err != nil {
		t.Error(err)
	}
}
