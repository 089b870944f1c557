//go:build linux

package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/warren-sandbox/warren/internal/testenv"
)

// killDuring runs a command and kills the daemon with SIGKILL as soon as when says so, and then the command, which would
// otherwise start the next daemon and ask again. It returns whether the command had ended before.
func (h *home) killDuring(when func() bool, args ...string) (over bool) {
	h.t.Helper()
	h.warren("ls") // a daemon runs
	pid := h.daemon()
	cmd := h.command(args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	deadline := time.Now().Add(time.Minute)
	for !when() {
		select {
		case err := <-done:
			if err != nil {
				h.t.Fatalf("warren %s: %v\n%s", strings.Join(args, " "), err, out.Bytes())
			}
			return true
		default:
		}
		if time.Now().After(deadline) {
			cmd.Process.Kill()
			<-done
			h.t.Fatalf("warren %s never came to the point", strings.Join(args, " "))
		}
		time.Sleep(time.Millisecond)
	}
	cmd.Process.Signal(syscall.SIGSTOP)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		h.t.Fatal(err)
	}
	for now := pid; now == pid; time.Sleep(time.Millisecond) {
		var err error
		if now, err = daemonPID(h.dir); err != nil {
			h.t.Fatal(err)
		}
	}
	cmd.Process.Kill()
	<-done
	return false
}

// entries lists a directory of the data directory.
func (h *home) entries(dir string) (names []string) {
	list, err := os.ReadDir(filepath.Join(h.dir, dir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		h.t.Fatal(err)
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

// halfMade returns what begins like the name of something unfinished.
func (h *home) halfMade(dirs ...string) (names []string) {
	for _, dir := range dirs {
		for _, n := range h.entries(dir) {
			if strings.HasPrefix(n, ".new-") || strings.HasPrefix(n, ".old-") || strings.HasPrefix(n, ".tmp-") {
				names = append(names, dir+"/"+n)
			}
		}
	}
	return names
}

// sameFiles compares the files below a directory with what must be there.
func sameFiles(t *testing.T, dir string, want map[string]string) {
	t.Helper()
	seen := 0
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && d.Name() == ".git" {
			return fs.SkipDir
		}
		rel, _ := filepath.Rel(dir, path)
		if text, ok := want[rel]; ok {
			seen++
			if b, err := os.ReadFile(path); err != nil || string(b) != text {
				t.Errorf("%s is wrong (%d bytes of %d, %v)", rel, len(b), len(text), err)
			}
		}
		return nil
	})
	if err != nil || seen != len(want) {
		t.Errorf("%d of %d files are there (%v)", seen, len(want), err)
	}
}

// slowRegistry serves one image, its blobs slowly, and counts their bytes.
func slowRegistry(t *testing.T, im v1.Image) (ref string, served *atomic.Int64) {
	t.Helper()
	served = &atomic.Int64{}
	inner := registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, 0)))
	slow := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/") {
			inner.ServeHTTP(w, r)
			return
		}
		rec := httptest.NewRecorder()
		inner.ServeHTTP(rec, r)
		for k, v := range rec.Header() {
			w.Header()[k] = v
		}
		w.WriteHeader(rec.Code)
		for b := rec.Body.Bytes(); len(b) > 0; {
			n, err := w.Write(b[:min(len(b), 32<<10)])
			if err != nil {
				return
			}
			w.(http.Flusher).Flush()
			served.Add(int64(n))
			b = b[n:]
			time.Sleep(2 * time.Millisecond)
		}
	})
	server := httptest.NewServer(slow)
	t.Cleanup(server.Close)
	ref = strings.TrimPrefix(server.URL, "http://") + "/app:1"
	to, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(to, im); err != nil {
		t.Fatal(err)
	}
	return ref, served
}

// bigImage is an image of several layers with many files, and what is in each layer.
func bigImage(t *testing.T) (v1.Image, map[string]string, int64) {
	t.Helper()
	rnd := rand.NewChaCha8([32]byte{1})
	want := map[string]string{}
	var size int64
	im := empty.Image
	for l := range 4 {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for f := range 400 {
			text := make([]byte, 4000)
			rnd.Read(text)
			file := fmt.Sprintf("layer%d-%d", l, f)
			want[file] = string(text)
			err := w.WriteHeader(&tar.Header{Name: file, Mode: 0o644, Size: int64(len(text)), Typeflag: tar.TypeReg})
			if _, werr := w.Write(text); err != nil || werr != nil {
				t.Fatal(err, werr)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
		if err != nil {
			t.Fatal(err)
		}
		n, err := layer.Size()
		if err != nil {
			t.Fatal(err)
		}
		size += n
		if im, err = mutate.AppendLayers(im, layer); err != nil {
			t.Fatal(err)
		}
	}
	c, err := im.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", runtime.GOARCH
	if im, err = mutate.ConfigFile(im, c); err != nil {
		t.Fatal(err)
	}
	return im, want, size
}

// TestKillDuringPull kills the daemon at any point of a pull: the next one lists no half image, has no half layer, and pulls it whole.
func TestKillDuringPull(t *testing.T) {
	h := newHome(t)
	im, want, size := bigImage(t)
	ref, served := slowRegistry(t, im)
	layers := func() string { return filepath.Join(h.dir, "images", "layers") }
	unpacking := func(files int) bool {
		news, _ := filepath.Glob(filepath.Join(layers(), ".new-*", "layer*"))
		deeper, _ := filepath.Glob(filepath.Join(layers(), ".new-*", "*", "layer*"))
		return len(news)+len(deeper) >= files
	}
	complete := func() (n int) {
		for _, name := range h.entries("images/layers") {
			if !strings.HasPrefix(name, ".") {
				n++
			}
		}
		return n
	}
	kills := 0
	for point, when := range map[string]func() bool{
		"a tenth is downloaded": func() bool { return served.Load() > size/10 },
		"half is downloaded":    func() bool { return served.Load() > size/2 },
		"nearly all is":         func() bool { return served.Load() > size*95/100 },
		"a layer is unpacked":   func() bool { return unpacking(1) },
		"half a layer is":       func() bool { return unpacking(200) },
		"one layer is complete": func() bool { return complete() >= 1 },
		"all layers are":        func() bool { return complete() >= 4 },
	} {
		t.Run(strings.ReplaceAll(point, " ", "-"), func(t *testing.T) {
			h := &home{t: t, bin: h.bin, dir: h.dir}
			served.Store(0)
			if h.killDuring(when, "image", "pull", ref) {
				t.Log("the pull was faster than the kill")
			} else {
				kills++
			}
			if list := h.warren("image", "ls", "-q"); strings.Contains(list, ref) {
				// It was named just before the kill, so it must be whole, as is checked below.
				t.Logf("the image is there: %s", list)
			}
			if left := h.halfMade("images/layers", "images/refs", "images/blobs"); len(left) > 0 {
				t.Errorf("half made after the next start: %v", left)
			}
			h.warren("image", "pull", ref)
			found := map[string]string{}
			for _, layer := range h.entries("images/layers") {
				filepath.WalkDir(filepath.Join(layers(), layer), func(path string, d fs.DirEntry, err error) error {
					if err == nil && d.Type().IsRegular() {
						b, _ := os.ReadFile(path)
						found[filepath.Base(path)] = string(b)
					}
					return nil
				})
			}
			for file, text := range want {
				if found[file] != text {
					t.Fatalf("%s has %d bytes and is not what was pushed", file, len(found[file]))
				}
			}
			if left := append(h.halfMade("images/layers", "images/refs", "images/blobs"), h.entries("images/blobs/sha256")...); len(left) > 0 {
				t.Errorf("left after the second pull: %v", left)
			}
			h.warren("image", "rm", ref)
			if n := complete(); n != 0 {
				t.Errorf("%d layers are left of the image that was removed: %v", n, h.entries("images/layers"))
			}
		})
	}
	if kills < 5 {
		t.Errorf("only %d kills hit a pull", kills)
	}
}

// TestKillDuringPopulate kills the daemon while it checks a repository out into a workspace: the create is undone by the next one,
// and can be made again under the same name.
func TestKillDuringPopulate(t *testing.T) {
	testenv.NeedsTool(t, "git")
	h := newHome(t)
	const dirs = 100
	each := 10
	if testenv.Soak() {
		each = 40
	}
	source := filepath.Join(t.TempDir(), "source")
	want := map[string]string{}
	for d := range dirs {
		sub := fmt.Sprintf("d%02d", d)
		if err := os.MkdirAll(filepath.Join(source, sub), 0o755); err != nil {
			t.Fatal(err)
		}
		for f := range each {
			name := fmt.Sprintf("%s/f%d", sub, f)
			want[name] = strings.Repeat(name+"\n", 50)
			if err := os.WriteFile(filepath.Join(source, name), []byte(want[name]), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, args := range [][]string{{"init", "-q"}, {"add", "."}, {"-c", "user.name=Ada", "-c", "user.email=ada@example.com", "commit", "-q", "-m", "all"}} {
		cmd := exec.Command("git", args...)
		cmd.Dir = source
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	h.warren("repo", "fetch", source)

	files := func() string {
		found, _ := filepath.Glob(filepath.Join(h.dir, "workspaces", "*", "files"))
		if len(found) == 0 {
			return ""
		}
		return found[0]
	}
	// Git writes the directories in order.
	populated := func(n int) bool {
		dir := files()
		if dir == "" {
			return false
		}
		_, err := os.Stat(filepath.Join(dir, fmt.Sprintf("d%02d", n)))
		return err == nil
	}
	kills := 0
	for point, when := range map[string]func() bool{
		"begun":   func() bool { return len(h.entries("workspaces")) > 0 },
		"files":   func() bool { return files() != "" },
		"some":    func() bool { return populated(2) },
		"half":    func() bool { return populated(dirs / 2) },
		"nearly":  func() bool { return populated(dirs - 5) },
		"sandbox": func() bool { return len(h.entries("run/gvisor/sandboxes")) > 0 },
	} {
		t.Run(point, func(t *testing.T) {
			h := &home{t: t, bin: h.bin, dir: h.dir}
			over := h.killDuring(when, "create", "--name", "box", "--repo", source)
			if over {
				t.Log("the create was faster than the kill")
			} else {
				kills++
			}
			// What was under way is undone, or was done just before the kill.
			deadline := time.Now().Add(30 * time.Second)
			for {
				if h.warren("ls", "-q", "--state", "running") != "" {
					h.warren("rm", "box")
				}
				boxes := h.warren("ls", "-q")
				if boxes == "" && h.warren("workspace", "ls", "-q") == "" && len(h.visible("workspaces"))+len(h.visible("run/gvisor/sandboxes")) == 0 {
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("half made: sandboxes %q, workspaces %q, on disk %v", boxes, h.warren("workspace", "ls", "-q"), h.entries("workspaces"))
				}
				time.Sleep(20 * time.Millisecond)
			}
			if left := h.halfMade("workspaces", "repos"); len(left) > 0 {
				t.Errorf("half made after the next start: %v", left)
			}
			h.warren("create", "--name", "box", "--repo", source)
			if out := h.warren("exec", "box", "--", "git", "status", "--short"); out != "" {
				t.Errorf("git sees in the second try:\n%.300s", out)
			}
			sameFiles(t, files(), want)
			h.warren("rm", "box")
			if left := h.visible("workspaces"); len(left) > 0 {
				t.Errorf("left of the second try: %v", left)
			}
		})
	}
	if kills < 4 {
		t.Errorf("only %d kills hit a create", kills)
	}
}

// visible lists what a directory of the data directory has but for files of the store's own, which begin with a dot.
func (h *home) visible(dir string) (names []string) {
	for _, n := range h.entries(dir) {
		if !strings.HasPrefix(n, ".") {
			names = append(names, n)
		}
	}
	return names
}
