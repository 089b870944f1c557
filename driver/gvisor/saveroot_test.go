//go:build linux

package gvisor_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// layer reads what SaveRoot wrote: each entry with its content.
func layer(t *testing.T, b []byte) map[string]savedFile {
	t.Helper()
	all := make(map[string]savedFile)
	r := tar.NewReader(bytes.NewReader(b))
	for {
		h, err := r.Next()
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, twice := all[h.Name]; twice {
			t.Errorf("%s is there twice", h.Name)
		}
		all[h.Name] = savedFile{h, string(body)}
	}
}

type savedFile struct {
	*tar.Header
	body string
}

// TestSaveRoot changes the root in every way and reads the layer, of a running and of a frozen sandbox.
func TestSaveRoot(t *testing.T) {
	e := newEnv(t)
	skeleton := e.root.Layers[0].Dir
	for _, d := range []string{"/var/gone/deep", "/var/replaced"} {
		if err := os.MkdirAll(skeleton+d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"/var/removed", "/var/gone/deep/file", "/var/replaced/old", "/var/changed", "/var/untouched"} {
		if err := os.WriteFile(skeleton+f, []byte("of the image"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(skeleton+f, driver.DiskIDBase, driver.DiskIDBase); err != nil {
			t.Fatal(err)
		}
	}
	data := t.TempDir()
	spec := e.spec()
	dir, err := os.Open(data)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := os.Chown(data, driver.DiskIDBase, driver.DiskIDBase); err != nil {
		t.Fatal(err)
	}
	spec.Mounts = []driver.Mount{{Dir: dir, Target: "/workspace", Writable: true, Owner: driver.Owner{IDBase: driver.DiskIDBase}}}
	id := e.create(spec)
	e.run(id, `
		set -e
		umask 022
		rm /var/removed; rm -r /var/gone /var/replaced
		mkdir -p /var/replaced /opt/new/deep; echo fresh >/var/replaced/new
		echo more >>/var/changed
		echo hello >/opt/new/deep/file; chown 1000:1000 /opt/new/deep/file; chmod 4750 /opt/new/deep/file
		ln /opt/new/deep/file /opt/new/link; ln -s deep/file /opt/new/symlink; mkfifo /opt/new/fifo
		head -c 300000 /dev/zero | tr '\0' x >/opt/new/large
		truncate -s 100000 /opt/new/sparse; echo end >>/opt/new/sparse
		echo here >/workspace/file; echo gone >/opt/deleted; rm /opt/deleted
		touch -d '2001-02-03 04:05:06 UTC' /opt/new/deep/file
		mkdir /opt/new/.wh.dir; : >/opt/new/.wh.dir/file; : >/opt/new/.wh.large; ln -s .wh.large /opt/new/odd
		: >"/opt/new/$(printf %0150d 0)"`)
	want := map[string]struct {
		kind byte
		body string
	}{
		"var/.wh.removed":                     {tar.TypeReg, ""},
		"var/.wh.gone":                        {tar.TypeReg, ""},
		"var/replaced/":                       {tar.TypeDir, ""},
		"var/replaced/.wh..wh..opq":           {tar.TypeReg, ""},
		"var/replaced/new":                    {tar.TypeReg, "fresh\n"},
		"var/changed":                         {tar.TypeReg, "of the imagemore\n"},
		"opt/new/deep/":                       {tar.TypeDir, ""},
		"opt/new/symlink":                     {tar.TypeSymlink, ""},
		"opt/new/odd":                         {tar.TypeSymlink, ""},
		"opt/new/fifo":                        {tar.TypeFifo, ""},
		"opt/new/large":                       {tar.TypeReg, strings.Repeat("x", 300000)},
		"opt/new/sparse":                      {tar.TypeReg, strings.Repeat("\x00", 100000) + "end\n"},
		"opt/new/" + strings.Repeat("0", 150): {tar.TypeReg, ""},
	}
	for _, frozen := range []bool{false, true} {
		if frozen {
			if err := e.d.Freeze(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		var b bytes.Buffer
		if err := e.d.SaveRoot(t.Context(), id, &b); err != nil {
			t.Fatal(err)
		}
		got := layer(t, b.Bytes())
		for name, w := range want {
			g, ok := got[name]
			if !ok || g.Typeflag != w.kind || g.body != w.body {
				t.Errorf("frozen %v: %s: %v, %+v with %d bytes", frozen, name, ok, g.Header, len(g.body))
			}
		}
		file, link := got["opt/new/deep/file"], got["opt/new/link"]
		if link.Header != nil && link.Typeflag != tar.TypeLink { // whichever of the two came first
			file, link = link, file
		}
		if file.Header == nil || link.Header == nil || file.body != "hello\n" || link.Typeflag != tar.TypeLink || link.Linkname != file.Name {
			t.Errorf("the file with two names: %+v, %+v", file, link)
		} else if file.Mode != 0o4750 || file.Uid != 1000 || file.Gid != 1000 || file.ModTime.Unix() != 981173106 {
			t.Errorf("its mode %o, owner %d:%d, time %v", file.Mode, file.Uid, file.Gid, file.ModTime)
		}
		for name, f := range got {
			if strings.HasPrefix(name, "workspace/") || strings.Contains(name, "untouched") || strings.Contains(name, "deleted") ||
				strings.Contains(name, ".wh.dir") || strings.Contains(name, ".wh.large") || strings.HasPrefix(name, "/") || strings.HasPrefix(name, ".") || f.Uid >= driver.IDCount {
				t.Errorf("%s, of %d:%d, does not belong there", name, f.Uid, f.Gid)
			}
			for key := range f.PAXRecords {
				if strings.Contains(key, "overlay") {
					t.Errorf("%s has gVisor's own mark %s", name, key)
				}
			}
		}
		if t.Failed() {
			t.Logf("entries: %q", slices.Sorted(maps.Keys(got)))
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if c, err := e.d.Dial(ctx, id, warren.GuestPort); err == nil {
		c.Close()
		t.Error("a sandbox that was frozen runs on")
	}
	if err := e.d.Thaw(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	e.run(id, "true")
	if err := e.d.SaveRoot(t.Context(), newID(), io.Discard); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("of a missing sandbox: %v", err)
	}
}

// TestSaveRootHoles refuses a file that is nearly all holes, and saves a root larger than the sandbox's memory; either way the
// sandbox lives.
func TestSaveRootHoles(t *testing.T) {
	e := newEnv(t)
	spec := e.spec()
	spec.Limits.Memory = 64 << 20
	id := e.create(spec)
	e.run(id, "head -c 200000000 /dev/urandom >/var/large; truncate -s 1T /var/huge")
	err := e.d.SaveRoot(t.Context(), id, io.Discard)
	if !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "huge") {
		t.Errorf("a terabyte of holes: %v", err)
	}
	want, _, _ := strings.Cut(e.run(id, "rm /var/huge; sha256sum /var/large"), " ")
	var b bytes.Buffer
	t0 := time.Now()
	if err := e.d.SaveRoot(t.Context(), id, &b); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes in %v", b.Len(), time.Since(t0))
	if got := sum(layer(t, b.Bytes())["var/large"].body); got != want {
		t.Errorf("the large file has checksum %s, and %s inside", got, want)
	}
	e.run(id, "true")
	// A reader that goes away, and one that stops the sandbox by being slow.
	ctx, cancel := context.WithCancel(t.Context())
	if err := e.d.SaveRoot(ctx, id, writerFunc(func(p []byte) (int, error) {
		e.run(id, "true")
		cancel()
		return len(p), nil
	})); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled by its reader: %v", err)
	}
	e.run(id, "true")
}

func sum(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
