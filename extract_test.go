package warren

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// archive packs headers; a regular file holds its own name.
func archive(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		if h.Typeflag == 0 || h.Typeflag == tar.TypeReg {
			h.Typeflag, h.Size = tar.TypeReg, int64(len(h.Name))
		}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			io.WriteString(w, h.Name)
		}
	}
	w.Close()
	return b.Bytes()
}

// extractInto unpacks into a directory that has a canary beside it, and reports what is outside afterwards.
func extractInto(t testing.TB, data []byte, o CopyOptions) (dir string, n *Copied, err error) {
	t.Helper()
	base := t.TempDir()
	dir = filepath.Join(base, "dst")
	os.Mkdir(dir, 0o755)
	os.WriteFile(filepath.Join(base, "canary"), []byte("canary"), 0o600)
	root, rerr := os.OpenRoot(dir)
	if rerr != nil {
		t.Fatal(rerr)
	}
	defer root.Close()
	n = new(Copied)
	err = extractTar(root, bytes.NewReader(data), n, o)
	entries, _ := os.ReadDir(base)
	canary, _ := os.ReadFile(filepath.Join(base, "canary"))
	info, _ := os.Stat(filepath.Join(base, "canary"))
	if len(entries) != 2 || string(canary) != "canary" || info.Mode() != 0o600 {
		t.Errorf("something happened outside: %v, canary %q %v", entries, canary, info.Mode())
	}
	filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, _ := d.Info()
		switch {
		case info.Mode()&(fs.ModeSetuid|fs.ModeSetgid|fs.ModeSticky|fs.ModeDevice|fs.ModeNamedPipe) != 0:
			t.Errorf("%s has mode %v", p, info.Mode())
		case info.Mode()&fs.ModeSymlink != 0:
			if at, err := filepath.EvalSymlinks(p); err == nil && at != dir && !strings.HasPrefix(at, dir+"/") {
				t.Errorf("%s leads to %s", p, at)
			}
		}
		return nil
	})
	return dir, n, err
}

func TestExtractHostile(t *testing.T) {
	link := func(name, to string) tar.Header {
		return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink}
	}
	hard := func(name, to string) tar.Header {
		return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeLink}
	}
	dir := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeDir} }
	file := func(name string) tar.Header { return tar.Header{Name: name} }
	for _, test := range []struct {
		name    string
		headers []tar.Header
		want    error
		skipped int
	}{
		{"plain", []tar.Header{dir("."), dir("./a"), file("./a/b"), link("./a/l", "b"), hard("./a/h", "a/b")}, nil, 0},
		{"up", []tar.Header{file("../evil")}, ErrInvalid, 0},
		{"up from below", []tar.Header{dir("a"), file("a/../../evil")}, ErrInvalid, 0},
		{"absolute", []tar.Header{file("/tmp/evil")}, ErrInvalid, 0},
		{"link up", []tar.Header{link("l", ".."), file("l/canary")}, nil, 1},
		{"absolute link", []tar.Header{link("l", "/etc"), file("l/passwd")}, nil, 1},
		{"file through a link", []tar.Header{dir("d"), link("l", "d"), file("l/x")}, ErrInvalid, 0},
		{"file over a link", []tar.Header{link("l", "x"), file("l")}, nil, 0},
		{"link over a file", []tar.Header{file("l"), link("l", "x")}, nil, 0},
		{"link over a directory", []tar.Header{dir("d"), link("d", "x")}, fs.ErrExist, 0},
		{"directory over a link", []tar.Header{link("d", "."), dir("d")}, nil, -1},
		{"link below a link to its own directory", []tar.Header{dir("p"), link("p/q", "."), link("p/q/l", "../../x")}, ErrInvalid, 0},
		{"link that goes down a link and up", []tar.Header{dir("a"), link("a/self", "."), link("out", "a/self/../../..")}, nil, 1},
		{"link that goes down and up", []tar.Header{link("out", "a/../..")}, nil, 1},
		{"hard link outside", []tar.Header{hard("h", "../canary")}, ErrInvalid, 0},
		{"absolute hard link", []tar.Header{hard("h", "/etc/passwd")}, ErrInvalid, 0},
		{"hard link to a link", []tar.Header{link("l", "x"), hard("h", "l")}, nil, 1},
		{"hard link to nothing", []tar.Header{hard("h", "nothing")}, nil, 1},
		{"hard link to itself", []tar.Header{file("h"), hard("h", "h")}, nil, -1},
		{"device", []tar.Header{{Name: "dev", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}}, nil, 1},
		{"pipe", []tar.Header{{Name: "pipe", Typeflag: tar.TypeFifo}}, nil, 1},
		{"set-uid", []tar.Header{{Name: "su", Mode: 0o6755}, {Name: "sd", Mode: 0o7777, Typeflag: tar.TypeDir}}, nil, 0},
		{"twice", []tar.Header{file("x"), file("x")}, nil, 0},
		{"directory over a file", []tar.Header{file("x"), dir("x")}, nil, -1},
		{"file below a file", []tar.Header{file("x"), file("x/y")}, ErrInvalid, 0},
		{"closed directory", []tar.Header{{Name: "d", Mode: 0o1, Typeflag: tar.TypeDir}, file("d/x")}, nil, 0},
		{"empty link", []tar.Header{link("l", "")}, nil, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, n, err := extractInto(t, archive(t, test.headers...), CopyOptions{})
			if test.skipped >= 0 && (!errors.Is(err, test.want) || (err == nil) != (test.want == nil)) {
				t.Errorf("%v; want %v", err, test.want)
			}
			if test.skipped >= 0 && n.Skipped != test.skipped && err == nil {
				t.Errorf("%d left out; want %d", n.Skipped, test.skipped)
			}
		})
	}
	if _, _, err := extractInto(t, archive(t, tar.Header{Name: "a"})[:700], CopyOptions{}); err == nil {
		t.Log("a cut archive is whole enough") // tar has no end that must be there
	}
	if _, n, err := extractInto(t, archive(t, tar.Header{Name: "abcdef"}), CopyOptions{MaxBytes: 3}); !errors.Is(err, ErrExhausted) {
		t.Errorf("beyond MaxBytes: %+v, %v", n, err)
	}
}

// FuzzExtract puts three entries together; a fuzzer that changed bytes would only find that checksums are wrong.
func FuzzExtract(f *testing.F) {
	f.Add("d", byte(tar.TypeDir), "", "d/x", byte(tar.TypeReg), "", "h", byte(tar.TypeLink), "d/x")
	f.Add("l", byte(tar.TypeSymlink), "..", "l/x", byte(tar.TypeReg), "", "l", byte(tar.TypeDir), "")
	f.Add("a", byte(tar.TypeSymlink), "b", "b", byte(tar.TypeSymlink), "../b", "a/c", byte(tar.TypeFifo), "")
	f.Fuzz(func(t *testing.T, n1 string, t1 byte, l1, n2 string, t2 byte, l2, n3 string, t3 byte, l3 string) {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range []tar.Header{{Name: n1, Typeflag: t1, Linkname: l1}, {Name: n2, Typeflag: t2, Linkname: l2}, {Name: n3, Typeflag: t3, Linkname: l3}} {
			h.Mode = 0o6755
			if h.Typeflag == tar.TypeReg {
				h.Size = 4
			}
			if w.WriteHeader(&h) == nil && h.Typeflag == tar.TypeReg {
				io.WriteString(w, "data")
			}
		}
		w.Close()
		extractInto(t, b.Bytes(), CopyOptions{MaxBytes: 1 << 20, MaxFiles: 100})
	})
}
