//go:build linux

package docker

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// tarOf is a tar of headers, whose files hold their own names.
func tarOf(t *testing.T, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		if h.Typeflag == tar.TypeReg && h.Size == 0 {
			h.Size = int64(len(h.Name))
		}
		h.ModTime = time.Unix(1_700_000_000, 0)
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			io.WriteString(w, h.Name)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestMirrorHostile reads back what an engine, or a sandbox, has made up: nothing outside the directory is touched.
func TestMirrorHostile(t *testing.T) {
	testenv.NeedsRoot(t)
	top := tar.Header{Name: "0/", Typeflag: tar.TypeDir}
	for name, tt := range map[string]struct {
		tar  []byte
		err  error
		file string // that is there afterwards
	}{
		"parent":              {tar: tarOf(t, top, tar.Header{Name: "0/../../out", Typeflag: tar.TypeReg}), err: warren.ErrUnavailable},
		"absolute":            {tar: tarOf(t, top, tar.Header{Name: "/out", Typeflag: tar.TypeReg}), err: warren.ErrUnavailable},
		"another prefix":      {tar: tarOf(t, top, tar.Header{Name: "1/out", Typeflag: tar.TypeReg}), err: warren.ErrUnavailable},
		"through a link":      {tar: tarOf(t, top, tar.Header{Name: "0/a", Typeflag: tar.TypeSymlink, Linkname: "../aside"}, tar.Header{Name: "0/a/out", Typeflag: tar.TypeReg}, tar.Header{Name: "0/x", Typeflag: tar.TypeReg}), file: "x"},
		"through one of old":  {tar: tarOf(t, top, tar.Header{Name: "0/old/out", Typeflag: tar.TypeReg}, tar.Header{Name: "0/x", Typeflag: tar.TypeReg}), file: "x"},
		"hard link outside":   {tar: tarOf(t, top, tar.Header{Name: "0/a", Typeflag: tar.TypeLink, Linkname: "0/../../secret"}), err: warren.ErrUnavailable},
		"hard link by a link": {tar: tarOf(t, top, tar.Header{Name: "0/b", Typeflag: tar.TypeSymlink, Linkname: "../secret"}, tar.Header{Name: "0/a", Typeflag: tar.TypeLink, Linkname: "0/b"}), file: "b"},
		"devices":             {tar: tarOf(t, top, tar.Header{Name: "0/null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}, tar.Header{Name: "0/x", Typeflag: tar.TypeReg}), file: "x"},
		"nothing":             {tar: tarOf(t), err: warren.ErrUnavailable},
		"cut off":             {tar: tarOf(t, top, tar.Header{Name: "0/x", Typeflag: tar.TypeReg})[:1030], err: warren.ErrUnavailable},
		"its own file":        {tar: tarOf(t, top, tar.Header{Name: "0/" + testStage, Typeflag: tar.TypeReg}, tar.Header{Name: "0/x", Typeflag: tar.TypeReg}), file: "x"},
		"a directory of it":   {tar: tarOf(t, top, tar.Header{Name: "0/" + testStage, Typeflag: tar.TypeDir}, tar.Header{Name: "0/" + testStage + "/y", Typeflag: tar.TypeReg}, tar.Header{Name: "0/x", Typeflag: tar.TypeReg}), file: "x"},
		"a twin of it":        {tar: tarOf(t, top, tar.Header{Name: "0/" + testStage, Typeflag: tar.TypeReg}, tar.Header{Name: "0/y", Typeflag: tar.TypeLink, Linkname: "0/" + testStage}, tar.Header{Name: "0/x", Typeflag: tar.TypeReg}), file: "x"},
		"a name like it":      {tar: tarOf(t, top, tar.Header{Name: "0/.warren-sync", Typeflag: tar.TypeReg}), file: ".warren-sync"},
		"twin of a pipe":      {tar: tarOf(t, top, tar.Header{Name: "0/a", Typeflag: tar.TypeFifo}, tar.Header{Name: "0/b", Typeflag: tar.TypeLink, Linkname: "0/a"}, tar.Header{Name: "0/c", Typeflag: tar.TypeLink, Linkname: "0/b"}, tar.Header{Name: "0/x", Typeflag: tar.TypeReg}), file: "x"},
		"below a file":        {tar: tarOf(t, top, tar.Header{Name: "0/file/y", Typeflag: tar.TypeReg}, tar.Header{Name: "0/x", Typeflag: tar.TypeReg}), file: "x"},
		"a long name":         {tar: tarOf(t, top, tar.Header{Name: "0/" + strings.Repeat("n", 300), Typeflag: tar.TypeReg}, tar.Header{Name: "0/x", Typeflag: tar.TypeReg}), file: "x"},
	} {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			dir := filepath.Join(base, "dir")
			for _, d := range []string{dir, filepath.Join(base, "aside")} {
				if err := os.Mkdir(d, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(os.WriteFile(filepath.Join(base, "secret"), []byte("secret"), 0o600), os.WriteFile(filepath.Join(dir, "kept"), []byte("kept"), 0o600), os.WriteFile(filepath.Join(dir, "file"), nil, 0o600),
				os.Symlink("../aside", filepath.Join(dir, "old"))); err != nil {
				t.Fatal(err)
			}
			root, err := os.OpenRoot(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			fi, err := root.Lstat("kept")
			if err != nil {
				t.Fatal(err)
			}
			m := &mirror{root: root, prefix: "0", owner: driver.Owner{IDBase: driver.DiskIDBase}, was: map[string]seen{"kept": seenOf(fi)}, log: slog.New(slog.DiscardHandler), stage: testStage}
			_, err = m.read(context.Background(), bytes.NewReader(tt.tar))
			if (err != nil) != (tt.err != nil) || tt.err != nil && !errors.Is(err, tt.err) {
				t.Errorf("%v, want %v", err, tt.err)
			}
			if _, lerr := os.Lstat(filepath.Join(dir, "kept")); (lerr == nil) != (err != nil) {
				t.Errorf("the file that the copy lacks: %v after %v; it goes only when all has been read", lerr, err)
			}
			if tt.file != "" {
				if _, err := os.Lstat(filepath.Join(dir, tt.file)); err != nil {
					t.Error(err)
				}
			}
			if _, err := os.Lstat(filepath.Join(dir, testStage)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the staged file: %v", err)
			}
			if text, err := os.ReadFile(filepath.Join(base, "secret")); string(text) != "secret" {
				t.Errorf("the secret: %q, %v", text, err)
			}
			for _, d := range []string{base, filepath.Join(base, "aside")} {
				entries, _ := os.ReadDir(d)
				for _, e := range entries {
					if e.Name() == "out" {
						t.Errorf("a file was made in %s", filepath.Base(d))
					}
				}
			}
		})
	}
}

const testStage = ".warren-sync-test"

// TestMirrorFull wants a disk that is full to fail the whole: what was not written must not be taken for read.
func TestMirrorFull(t *testing.T) {
	testenv.NeedsMountNamespace(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	text := bytes.Repeat([]byte("x"), 1<<20)
	err = errors.Join(w.WriteHeader(&tar.Header{Name: "0/", Typeflag: tar.TypeDir, Mode: 0o755}),
		w.WriteHeader(&tar.Header{Name: "0/big", Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(text))}))
	w.Write(text)
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	m := &mirror{root: root, prefix: "0", owner: driver.Owner{IDBase: driver.DiskIDBase}, log: slog.New(slog.DiscardHandler)}
	if _, err := m.read(t.Context(), &b); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("%v, want ENOSPC", err)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestMirrorHoles wants a file of zeros to take no room.
func TestMirrorHoles(t *testing.T) {
	testenv.NeedsRoot(t)
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	text := make([]byte, 8<<20+10)
	copy(text[3<<20:], "in the middle")
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err = errors.Join(w.WriteHeader(&tar.Header{Name: "0/", Typeflag: tar.TypeDir, Mode: 0o755}),
		w.WriteHeader(&tar.Header{Name: "0/sparse", Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(text))}))
	w.Write(text)
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	m := &mirror{root: root, prefix: "0", owner: driver.Owner{IDBase: driver.DiskIDBase}, log: slog.New(slog.DiscardHandler)}
	if _, err := m.read(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, "sparse")
	if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, text) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	var st unix.Stat_t
	if err := unix.Stat(name, &st); err != nil || st.Blocks*512 > 2*holeSize {
		t.Errorf("it takes %d bytes, %v", st.Blocks*512, err)
	}
}

// TestMirrorOthers wants what is others' in a user's directory to stay, whatever the sandbox makes of what it is in, and no
// program of the sandbox's to be one that runs as the user.
func TestMirrorOthers(t *testing.T) {
	testenv.NeedsRoot(t)
	const uid = 23456
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, d := range []string{"link", "file", "mine"} {
		if err := errors.Join(os.MkdirAll(at(d+"/sub"), 0o755), os.WriteFile(at(d+"/sub/x"), []byte("x"), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.WriteFile(at("given"), []byte("0/given"), 0o755), filepath.WalkDir(dir, func(p string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Chown(p, uid, uid))
	})); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chown(at("link/sub/x"), 0, 0), os.Chown(at("file/sub/x"), 24999, uid), os.Chmod(at("given"), os.ModeSetuid|0o755)); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	owner := driver.Owner{User: true, UID: uid, GID: uid}
	was, err := writeTree(t.Context(), io.Discard, root, "0", owner)
	if err != nil {
		t.Fatal(err)
	}
	m := &mirror{root: root, prefix: "0", owner: owner, was: was, log: slog.New(slog.DiscardHandler)}
	of := func(name string, kind byte, mode int64) tar.Header {
		return tar.Header{Name: "0/" + name, Typeflag: kind, Mode: mode, Uid: driver.SandboxUID, Gid: driver.SandboxUID, Linkname: "x"}
	}
	if _, err := m.read(t.Context(), bytes.NewReader(tarOf(t, of("", tar.TypeDir, 0), of("link", tar.TypeSymlink, 0), of("file", tar.TypeReg, 0),
		of("mine", tar.TypeReg, 0), of("suid", tar.TypeReg, 0o6755), of("given", tar.TypeReg, 0o4755), of("sgid", tar.TypeDir, 0o2755)))); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"link/sub/x", "file/sub/x"} {
		if _, err := os.Lstat(at(name)); err != nil {
			t.Errorf("a file of others: %v", err)
		}
	}
	for name, want := range map[string]os.FileMode{"mine": 0o755, "suid": 0o755, "sgid": os.ModeDir | 0o755, "given": os.ModeSetuid | 0o755} {
		if fi, err := os.Lstat(at(name)); err != nil || fi.Mode() != want {
			t.Errorf("%s: %+v, %v; want mode %v", name, fi, err, want)
		}
	}
}

// TestMirrorUser reads back the copy of a user's own directory: the files of others in it stay what they are.
func TestMirrorUser(t *testing.T) {
	testenv.NeedsRoot(t)
	const uid, gid = 23456, 23457
	dir := t.TempDir()
	for name, id := range map[string]int{"mine": uid, "theirs": 24999} {
		if err := errors.Join(os.WriteFile(filepath.Join(dir, name), []byte("first"), 0o644), os.Chown(filepath.Join(dir, name), id, id+1)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(dir, uid, gid); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	owner := driver.Owner{User: true, UID: uid, GID: gid}
	var b bytes.Buffer
	was, err := writeTree(t.Context(), &b, root, "0", owner)
	if err != nil || len(was) != 3 {
		t.Fatalf("%v, %v", was, err)
	}
	ids := map[string][2]int{}
	for r := tar.NewReader(&b); ; {
		h, err := r.Next()
		if err != nil {
			break
		}
		ids[h.Name] = [2]int{h.Uid, h.Gid}
	}
	if ids["0/mine"] != [2]int{1000, 1000} || ids["0/theirs"] != [2]int{nobody, nobody} {
		t.Errorf("ids inside: %v", ids)
	}
	m := &mirror{root: root, prefix: "0", owner: owner, base: 0x68000000, was: was, log: slog.New(slog.DiscardHandler)}
	if _, err := m.read(t.Context(), bytes.NewReader(tarOf(t,
		tar.Header{Name: "0/", Typeflag: tar.TypeDir, Uid: 0x68000000 + 1000, Gid: 0x68000000 + 1000},
		tar.Header{Name: "0/theirs", Typeflag: tar.TypeReg, Uid: 0x68000000},
		tar.Header{Name: "0/mine", Typeflag: tar.TypeReg, Uid: 0x68000000 + 1000, Gid: 1000},
		tar.Header{Name: "0/of-root", Typeflag: tar.TypeReg, Uid: 0, Gid: 0x68000000},
	))); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]struct {
		text     string
		uid, gid uint32
	}{"mine": {"0/mine", uid, gid}, "theirs": {"first", 24999, 25000}, "of-root": {"0/of-root", driver.DiskIDBase, driver.DiskIDBase}} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		fi, serr := os.Stat(filepath.Join(dir, name))
		if err != nil || serr != nil {
			t.Fatal(err, serr)
		}
		st, _ := statOf(fi)
		if string(text) != want.text || st.Uid != want.uid || st.Gid != want.gid {
			t.Errorf("%s: %q of %d:%d, want %+v", name, text, st.Uid, st.Gid, want)
		}
	}
}

// TestFindLayer takes the last layer out of an image as engines of all kinds archive it.
func TestFindLayer(t *testing.T) {
	layer := tarOf(t, tar.Header{Name: "x", Typeflag: tar.TypeReg})
	lower := tarOf(t, tar.Header{Name: "y", Typeflag: tar.TypeReg})
	digest := func(b []byte) string { sum := sha256.Sum256(b); return hex.EncodeToString(sum[:]) }
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	z.Write(layer)
	z.Close()
	type file struct {
		name string
		data []byte
	}
	archive := func(files ...file) []byte {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, f := range files {
			w.WriteHeader(&tar.Header{Name: f.name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(f.data))})
			w.Write(f.data)
		}
		w.Close()
		return b.Bytes()
	}
	described := []byte(`{"config":{"Labels":{"` + labelSave + `":"s"}}}`)
	for name, tt := range map[string]struct {
		archive []byte
		found   bool
	}{
		"old, in order":     {archive(file{"aa/json", []byte("{}")}, file{"aa/layer.tar", lower}, file{"bb/json", described}, file{"bb/layer.tar", layer}), true},
		"old, out of order": {archive(file{"aa/json", described}, file{"aa/layer.tar", layer}, file{"bb/json", []byte("{}")}, file{"bb/layer.tar", lower}), true},
		"by digest":         {archive(file{"blobs/sha256/" + digest(lower), lower}, file{"blobs/sha256/" + digest(layer), layer}), true},
		"Podman's":          {archive(file{digest(lower) + ".tar", lower}, file{digest(layer) + ".tar", layer}), true},
		"compressed":        {archive(file{"blobs/sha256/" + digest([]byte("{}")), []byte("{}")}, file{"blobs/sha256/" + digest(lower), lower}, file{"blobs/sha256/" + digest(packed.Bytes()), packed.Bytes()}), true},
		"missing":           {archive(file{"blobs/sha256/" + digest(lower), lower}), false},
		"another":           {archive(file{"aa/json", described}, file{"aa/layer.tar", lower}), false},
		"cut off":           {archive(file{digest(layer) + ".tar", layer})[:700], false},
	} {
		var got []byte
		err := findLayer(t.Context(), bytes.NewReader(tt.archive), []string{"sha256:" + digest(lower)}, "sha256:"+digest(layer), func(r io.Reader) (err error) {
			got, err = io.ReadAll(r)
			return err
		})
		if tt.found && (err != nil || !bytes.Equal(got, layer)) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
		if !tt.found && err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if e := (&engine{}); !e.hidesRoot("io.containerd.runsc.v1") || e.hidesRoot("runc") || strings.Contains(emptyLayer, digest(layer)) {
		t.Error("hidesRoot is wrong")
	}
}
