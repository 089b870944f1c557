package unpack

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/image/tree"
	"github.com/warren-sandbox/warren/internal/testenv"
	"golang.org/x/sys/unix"
)

const base = 0x60000000

// entry is one header and its content; the size is the content's unless the header says otherwise.
type entry struct {
	tar.Header
	content string
}

func dir(name string) entry {
	return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}}
}

func file(name, content string) entry {
	return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, content: content}
}

func symlink(name, target string) entry {
	return entry{Header: tar.Header{Name: name, Linkname: target, Typeflag: tar.TypeSymlink, Mode: 0o777}}
}

func link(name, target string) entry {
	return entry{Header: tar.Header{Name: name, Linkname: target, Typeflag: tar.TypeLink}}
}

func node(name string, typ byte) entry {
	return entry{Header: tar.Header{Name: name, Typeflag: typ, Mode: 0o666, Devmajor: 8, Devminor: 0}}
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := e.Header
		h.Size = int64(len(e.content))
		if h.ModTime.IsZero() {
			h.ModTime = time.Unix(1_000_000_000, 0)
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatalf("header %q: %v", h.Name, err)
		}
		if _, err := io.WriteString(w, e.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// place is a directory to unpack into, beside which lies what must not change.
type place struct {
	root, layer, outside string
	before               map[string]string
}

func newPlace(t testing.TB) *place {
	t.Helper()
	root := t.TempDir()
	p := &place{root: root, layer: filepath.Join(root, "store", "layer"), outside: filepath.Join(root, "outside")}
	for _, d := range []string{p.layer, filepath.Join(p.outside, "dir")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string]string{"outside/passwd": "root", "outside/dir/secret": "canary", "store/beside": "beside"} {
		if err := os.WriteFile(filepath.Join(root, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p.before = snapshot(t, root, p.layer)
	return p
}

// snapshot describes a tree, without what is below skip, down to inode, link count and change time.
func snapshot(t testing.TB, root, skip string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(root, func(p string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if p == skip {
			return fs.SkipDir
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		out[p] = fmt.Sprintf("%o %d %d:%d %d %d %d", st.Mode, st.Nlink, st.Uid, st.Gid, st.Size, st.Ino, st.Ctim.Nano())
		if e.Type().IsRegular() {
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			out[p] += " " + string(b)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (p *place) unchanged(t testing.TB) {
	t.Helper()
	if d := cmp.Diff(p.before, snapshot(t, p.root, p.layer)); d != "" {
		t.Errorf("the tree outside of the layer has changed:\n%s", d)
	}
}

func (p *place) unpack(ctx context.Context, b []byte, l Limits) (Stats, error) {
	t, err := tree.Open(p.layer)
	if err != nil {
		return Stats{}, err
	}
	defer t.Close()
	_, s, err := Layer(ctx, t, bytes.NewReader(b), Options{IDBase: base, Limits: l})
	return s, err
}

// list describes the layer in short: name, type, and content or target.
func (p *place) list(t testing.TB) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(p.layer, func(name string, e fs.DirEntry, err error) error {
		if err != nil || name == p.layer {
			return err
		}
		rel, _ := filepath.Rel(p.layer, name)
		switch e.Type() {
		case fs.ModeDir:
			rel += "/"
			buf := make([]byte, 8)
			if n, err := unix.Lgetxattr(name, "trusted.overlay.opaque", buf); err == nil {
				rel += " opaque=" + string(buf[:n])
			}
		case fs.ModeSymlink:
			target, err := os.Readlink(name)
			if err != nil {
				return err
			}
			rel += " -> " + target
		case 0:
			b, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			rel += "=" + string(b[:min(len(b), 40)])
		case fs.ModeDevice | fs.ModeCharDevice:
			var st unix.Stat_t
			if err := unix.Lstat(name, &st); err != nil {
				return err
			}
			rel += fmt.Sprintf(" char %d", st.Rdev)
		default:
			rel += " " + e.Type().String()
		}
		out = append(out, rel)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestTricks(t *testing.T) {
	testenv.NeedsRoot(t)
	long := strings.Repeat("l", 200)
	deep := strings.Repeat("d/", 2000)
	var stacked []entry // each link stands for 100 directories, so ten of them would be 1,000 deep
	hundred := strings.TrimSuffix(strings.Repeat("d/", 100), "/")
	stacked = append(stacked, dir(hundred), symlink("l0", hundred))
	for i := range 9 {
		stacked = append(stacked, dir(fmt.Sprintf("l%d/%s", i, hundred)), symlink(fmt.Sprintf("l%d", i+1), fmt.Sprintf("l%d/%s", i, hundred)))
	}
	for _, c := range []struct {
		name    string
		entries func(p *place) []entry
		// refused is what the error matches; nil means accepted, with these names as the result.
		refused error
		words   string
		want    []string
	}{
		{name: "plain", entries: func(*place) []entry { return []entry{dir("./"), dir("./a"), file("./a/f", "x")} }, want: []string{"a/", "a/f=x"}},
		{name: "absolute name", entries: func(p *place) []entry { return []entry{file(p.outside+"/passwd", "evil")} },
			want: nil /* below the layer, checked by confined */},
		{name: "dot dot in front", entries: func(*place) []entry { return []entry{file("../beside", "evil")} }, refused: warren.ErrInvalid, words: `".."`},
		{name: "dot dot inside", entries: func(*place) []entry { return []entry{dir("a"), file("a/../../beside", "evil")} }, refused: warren.ErrInvalid, words: `".."`},
		{name: "file named dot dot", entries: func(*place) []entry { return []entry{file("..", "evil")} }, refused: warren.ErrInvalid},
		{name: "dot dot behind a slash", entries: func(*place) []entry { return []entry{file("/..", "evil")} }, refused: warren.ErrInvalid},
		{name: "hard link named dot dot", entries: func(*place) []entry { return []entry{link("../l", "a")} }, refused: warren.ErrInvalid},
		{name: "absolute symlink then file through it", entries: func(p *place) []entry {
			return []entry{symlink("a", p.outside), file("a/passwd", "evil")}
		}, refused: warren.ErrInvalid}, // inside the layer that directory does not exist: the link dangles
		{name: "absolute symlink to a directory of the layer", entries: func(*place) []entry {
			return []entry{dir("etc"), symlink("a", "/etc"), file("a/passwd", "inside")}
		}, want: []string{"a -> /etc", "etc/", "etc/passwd=inside"}},
		{name: "relative symlink upwards", entries: func(*place) []entry {
			return []entry{symlink("a", "../../../.."), file("a/b", "inside")}
		}, want: []string{"a -> ../../../..", "b=inside"}},
		{name: "symlink replaced below a cached directory", entries: func(p *place) []entry {
			return []entry{dir("a"), file("a/1", "1"), symlink("a", p.outside), file("a/passwd", "evil")}
		}, refused: warren.ErrInvalid},
		{name: "symlink to itself", entries: func(*place) []entry { return []entry{symlink("a", "a"), file("a/b", "x")} }, refused: warren.ErrInvalid},
		{name: "file over a symlink to outside", entries: func(p *place) []entry {
			return []entry{symlink("a", p.outside+"/passwd"), file("a", "inside")}
		}, want: []string{"a=inside"}},
		{name: "directory over a symlink to outside", entries: func(p *place) []entry {
			return []entry{symlink("a", p.outside), dir("a"), file("a/passwd", "inside")}
		}, want: []string{"a/", "a/passwd=inside"}},
		{name: "symlink over a full directory", entries: func(p *place) []entry {
			return []entry{dir("a"), file("a/b", "x"), symlink("a", p.outside)}
		}, want: []string{"a -> OUTSIDE"}},
		{name: "hard link to outside", entries: func(p *place) []entry { return []entry{link("l", p.outside+"/passwd")} }, refused: warren.ErrInvalid, words: "does not have"},
		{name: "hard link upwards", entries: func(*place) []entry { return []entry{link("l", "../beside")} }, refused: warren.ErrInvalid},
		{name: "hard link through a symlink", entries: func(p *place) []entry {
			return []entry{symlink("s", p.outside), link("l", "s/passwd")}
		}, refused: warren.ErrInvalid, words: "symbolic link"},
		{name: "hard link through a symlink inside", entries: func(*place) []entry {
			return []entry{dir("d"), file("d/f", "x"), symlink("s", "d"), link("l", "s/f")}
		}, refused: warren.ErrInvalid, words: "symbolic link"},
		{name: "hard link to a symlink to outside, then written", entries: func(p *place) []entry {
			return []entry{symlink("s", p.outside+"/passwd"), link("l", "s"), file("l", "inside")}
		}, want: []string{"l=inside", "s -> OUTSIDE/passwd"}},
		{name: "hard link to a directory", entries: func(*place) []entry { return []entry{dir("d"), link("l", "d")} }, refused: warren.ErrInvalid},
		{name: "hard link to the top", entries: func(*place) []entry { return []entry{link("l", "/")} }, refused: warren.ErrInvalid},
		{name: "hard link to a lower layer's file", entries: func(*place) []entry { return []entry{link("l", "bin/sh")} }, refused: warren.ErrInvalid, words: "does not have"},
		{name: "hard link to a whiteout", entries: func(*place) []entry { return []entry{file(".wh.w", ""), link("l", "w")} }, refused: warren.ErrInvalid},
		{name: "hard link over the directory of its target", entries: func(*place) []entry {
			return []entry{dir("d"), file("d/f", "x"), link("d", "d/f")}
		}, refused: warren.ErrInvalid},
		{name: "hard link to itself", entries: func(*place) []entry { return []entry{file("f", "x"), link("f", "f")} }, want: []string{"f=x"}},
		{name: "hard link", entries: func(*place) []entry { return []entry{file("f", "x"), link("d/l", "/f")} }, want: []string{"d/", "d/l=x", "f=x"}},
		{name: "a name twice, written through a hard link", entries: func(*place) []entry {
			return []entry{file("f", "first"), link("l", "f"), file("f", "second")}
		}, want: []string{"f=second", "l=first"}},
		{name: "a name twice", entries: func(*place) []entry { return []entry{file("f", "first"), file("f", "second"), file("./f", "third")} }, want: []string{"f=third"}},
		{name: "device nodes and a FIFO", entries: func(*place) []entry {
			return []entry{node("sda", tar.TypeBlock), node("mem", tar.TypeChar), node("fifo", tar.TypeFifo), file("f", "x")}
		}, want: []string{"f=x"}},
		{name: "character device 0:0", entries: func(*place) []entry {
			e := node("w", tar.TypeChar)
			e.Devmajor = 0
			return []entry{e}
		}, want: []string{}},
		{name: "file below a file", entries: func(*place) []entry { return []entry{file("a", "x"), file("a/b", "x")} }, refused: warren.ErrInvalid},
		{name: "the top as a file", entries: func(*place) []entry { return []entry{file("./.", "x")} }, refused: warren.ErrInvalid},
		{name: "the top as a symlink", entries: func(p *place) []entry { return []entry{symlink(".", p.outside)} }, refused: warren.ErrInvalid},
		{name: "whiteout", entries: func(*place) []entry { return []entry{file("d/.wh.gone", "")} }, want: []string{"d/", "d/gone char 0"}},
		{name: "whiteout of the top", entries: func(*place) []entry { return []entry{file(".wh.", "")} }, refused: warren.ErrInvalid},
		{name: "whiteout of dot", entries: func(*place) []entry { return []entry{file("a/.wh..", "")} }, refused: warren.ErrInvalid},
		{name: "whiteout of dot dot", entries: func(*place) []entry { return []entry{file("a/.wh...", "")} }, refused: warren.ErrInvalid},
		{name: "whiteout through a symlink", entries: func(p *place) []entry {
			return []entry{symlink("s", p.outside), file("s/.wh.passwd", "")}
		}, refused: warren.ErrInvalid},
		{name: "whiteout as a directory", entries: func(*place) []entry { return []entry{file(".wh.a/b", "x")} }, refused: warren.ErrInvalid},
		{name: "whiteout and the same name, before", entries: func(*place) []entry { return []entry{file(".wh.a", ""), file("a", "new")} }, want: []string{"a=new"}},
		{name: "whiteout and the same name, after", entries: func(*place) []entry { return []entry{file("a", "new"), file(".wh.a", "")} }, want: []string{"a=new"}},
		{name: "whiteout and a directory, before", entries: func(*place) []entry { return []entry{file(".wh.a", ""), dir("a"), file("a/b", "x")} }, want: []string{"a/ opaque=y", "a/b=x"}},
		{name: "whiteout and an unannounced directory", entries: func(*place) []entry { return []entry{file(".wh.a", ""), file("a/b", "x")} }, want: []string{"a/ opaque=y", "a/b=x"}},
		{name: "whiteout and a directory, after", entries: func(*place) []entry { return []entry{file("a/b", "x"), file(".wh.a", "")} }, want: []string{"a/ opaque=y", "a/b=x"}},
		{name: "opaque", entries: func(*place) []entry { return []entry{file("a/.wh..wh..opq", ""), file("a/b", "x")} }, want: []string{"a/ opaque=y", "a/b=x"}},
		{name: "bookkeeping of aufs", entries: func(*place) []entry { return []entry{file(".wh..wh.plnk/1", ""), file(".wh..wh.aufs", "")} }, refused: warren.ErrInvalid},
		{name: "files of aufs", entries: func(*place) []entry { return []entry{file(".wh..wh.aufs", ""), file("f", "x")} }, want: []string{"f=x"}},
		{name: "long names", entries: func(*place) []entry { return []entry{file(long+"/"+long, "x")} }, want: []string{long + "/", long + "/" + long + "=x"}},
		{name: "a part too long", entries: func(*place) []entry { return []entry{file(long+long, "x")} }, refused: warren.ErrInvalid},
		{name: "a name too long", entries: func(*place) []entry { return []entry{file(strings.Repeat(long+"/", 30)+"f", "x")} }, refused: warren.ErrInvalid},
		{name: "too deep", entries: func(*place) []entry { return []entry{dir(deep)} }, refused: warren.ErrInvalid, words: "deep"},
		{name: "too deep by links", entries: func(*place) []entry { return stacked }, refused: warren.ErrInvalid, words: "deep"},
		{name: "PAX path over a harmless name", entries: func(*place) []entry {
			e := file("harmless", "evil")
			e.PAXRecords, e.Format = map[string]string{"path": "../beside"}, tar.FormatPAX
			e.Name = "../beside"
			return []entry{e}
		}, refused: warren.ErrInvalid},
		{name: "PAX link path over a harmless one", entries: func(p *place) []entry {
			e := link("l", p.outside+"/"+strings.Repeat("x/", 60)+"../passwd")
			e.Format = tar.FormatPAX
			return []entry{e}
		}, refused: warren.ErrInvalid},
		{name: "GNU long name with dot dot", entries: func(*place) []entry {
			e := file(strings.Repeat("x/", 80)+"../../../"+"beside", "evil")
			e.Format = tar.FormatGNU
			return []entry{e}
		}, refused: warren.ErrInvalid},
		{name: "a name with odd bytes", entries: func(*place) []entry {
			e := file("a\nb\x1b[31m\xff", "x")
			e.Format = tar.FormatGNU
			return []entry{e}
		}, want: []string{"a\nb\x1b[31m\xff=x"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPlace(t)
			_, err := p.unpack(t.Context(), archive(t, c.entries(p)...), Limits{})
			p.unchanged(t)
			if c.refused != nil {
				if !errors.Is(err, c.refused) || !strings.Contains(err.Error(), c.words) {
					t.Fatalf("error %v, want one like %v with %q", err, c.refused, c.words)
				}
				if strings.Contains(err.Error(), p.layer) {
					t.Errorf("the error shows a path of the host: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got := p.list(t)
			if c.want == nil {
				if len(got) == 0 {
					t.Error("nothing was unpacked")
				}
				return
			}
			for i := range got {
				got[i] = strings.ReplaceAll(got[i], p.outside, "OUTSIDE")
			}
			if d := cmp.Diff(c.want, got, cmp.Transformer("sorted", func(l []string) []string { return slices.Sorted(slices.Values(l)) })); d != "" {
				t.Errorf("unpacked (-want +got):\n%s", d)
			}
		})
	}
}

// TestTricksHurtWithoutCare shows that the probes of TestTricks find what they look for: joining names to a path, as a careless
// unpacker does, changes the tree outside.
func TestTricksHurtWithoutCare(t *testing.T) {
	for _, c := range []struct {
		name    string
		entries func(p *place) []entry
	}{
		{"dot dot", func(*place) []entry { return []entry{file("../beside", "evil")} }},
		{"symlink then file", func(p *place) []entry { return []entry{symlink("a", p.outside), file("a/passwd", "evil")} }},
		{"hard link", func(p *place) []entry { return []entry{link("l", p.outside+"/passwd")} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPlace(t)
			for _, e := range c.entries(p) {
				name := filepath.Join(p.layer, e.Name)
				switch e.Typeflag {
				case tar.TypeReg:
					os.WriteFile(name, []byte(e.content), 0o644)
				case tar.TypeSymlink:
					os.Symlink(e.Linkname, name)
				case tar.TypeLink:
					os.Link(e.Linkname, name)
				}
			}
			if cmp.Equal(p.before, snapshot(t, p.root, p.layer)) {
				t.Error("the probe sees no change")
			}
		})
	}
}

func TestMetadata(t *testing.T) {
	testenv.NeedsRoot(t)
	p := newPlace(t)
	when := time.Unix(1_234_567_890, 0)
	setuid := file("su", "x")
	setuid.Mode, setuid.Uid, setuid.Gid, setuid.ModTime = 0o4755, 0, 42, when
	v2 := make([]byte, 20)
	binary.LittleEndian.PutUint32(v2, 0x02000001)
	binary.LittleEndian.PutUint32(v2[4:], 1<<10)
	capable := file("ping", "x")
	capable.PAXRecords = map[string]string{
		"SCHILY.xattr.security.capability":    string(v2),
		"SCHILY.xattr.user.note":              "kept",
		"SCHILY.xattr.user.overlay.opaque":    "y",
		"SCHILY.xattr.trusted.overlay.opaque": "y",
		"SCHILY.xattr.security.selinux":       "x",
		"SCHILY.xattr.system.posix_acl":       "x",
	}
	big := file("big", "x")
	big.Uid, big.Gid, big.Format = 1_000_660_000, 70000, tar.FormatPAX
	d := dir("d")
	d.ModTime, d.Mode, d.Uid, d.Gid = when, 0o1770, 1000, 1000
	s, err := p.unpack(t.Context(), archive(t, setuid, capable, big, d, file("d/late", "x")), Limits{})
	if err != nil {
		t.Fatal(err)
	}
	stat := func(name string) unix.Stat_t {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(p.layer, name), &st); err != nil {
			t.Fatal(err)
		}
		return st
	}
	if st := stat("su"); st.Mode&0o7777 != 0o4755 || st.Uid != base || st.Gid != base+42 || st.Mtim.Sec != when.Unix() {
		t.Errorf("su: mode %o owner %d:%d time %d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec)
	}
	if st := stat("d"); st.Mode&0o7777 != 0o1770 || st.Uid != base+1000 || st.Mtim.Sec != when.Unix() {
		t.Errorf("d: mode %o owner %d time %d", st.Mode, st.Uid, st.Mtim.Sec)
	}
	if st := stat("big"); st.Uid != base+65534 || st.Gid != base+65534 {
		t.Errorf("big: owner %d:%d", st.Uid, st.Gid)
	}
	if s.Clamped != 1 || s.Xattrs != 4 || s.Entries != 5 {
		t.Errorf("stats %+v", s)
	}
	buf := make([]byte, 64)
	n, err := unix.Lgetxattr(filepath.Join(p.layer, "ping"), "security.capability", buf)
	if err != nil || n != 24 || binary.LittleEndian.Uint32(buf) != 0x03000001 || binary.LittleEndian.Uint32(buf[20:]) != base {
		t.Errorf("capability %x, %v: want one whose root is %#x", buf[:max(n, 0)], err, base)
	}
	size, err := unix.Llistxattr(filepath.Join(p.layer, "ping"), buf)
	if err != nil {
		t.Fatal(err)
	}
	names := strings.Split(strings.TrimRight(string(buf[:size]), "\x00"), "\x00")
	slices.Sort(names)
	if d := cmp.Diff([]string{"security.capability", "user.note"}, names); d != "" {
		t.Errorf("attributes (-want +got):\n%s", d)
	}
}

func TestLimits(t *testing.T) {
	testenv.NeedsRoot(t)
	zeros := strings.Repeat("\x00", 1<<20)
	for _, c := range []struct {
		name  string
		data  func(t *testing.T) []byte
		l     Limits
		want  error
		words string
	}{
		{"entries", func(t *testing.T) []byte { return archive(t, dir("a"), dir("b"), dir("c")) }, Limits{Entries: 2}, warren.ErrExhausted, "more than 2 entries"},
		{"bytes", func(t *testing.T) []byte { return archive(t, file("a", zeros), file("b", zeros)) }, Limits{Bytes: 1 << 20}, warren.ErrExhausted, "bytes"},
		{"sparse", func(t *testing.T) []byte { return sparse(t, 4<<40) }, Limits{}, warren.ErrExhausted, "bytes"},
		{"gzip bomb", func(t *testing.T) []byte { return bomb(t, gzipWriter) }, Limits{}, warren.ErrExhausted, "times its size"},
		{"zstd bomb", func(t *testing.T) []byte { return bomb(t, zstdWriter) }, Limits{}, warren.ErrExhausted, "times its size"},
		{"zstd window", func(t *testing.T) []byte {
			// A frame header that asks for a window of 2 GiB.
			return append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa8}, make([]byte, 64)...)
		}, Limits{}, warren.ErrInvalid, ""},
		{"cut off", func(t *testing.T) []byte { b := archive(t, file("a", zeros)); return b[:len(b)/2] }, Limits{}, warren.ErrInvalid, "cut off"},
		{"gzip cut off", func(t *testing.T) []byte {
			b := compress(t, gzipWriter, archive(t, file("a", random(1<<20))))
			return b[:len(b)/2]
		}, Limits{}, warren.ErrInvalid, "cut off"},
		{"zstd cut off", func(t *testing.T) []byte {
			b := compress(t, zstdWriter, archive(t, file("a", random(1<<20))))
			return b[:len(b)/2]
		}, Limits{}, warren.ErrInvalid, "cut off"},
		{"gzip with a wrong sum", func(t *testing.T) []byte {
			b := compress(t, gzipWriter, archive(t, file("a", random(1<<10))))
			b[len(b)-8] ^= 1
			return b
		}, Limits{}, warren.ErrInvalid, "damaged"},
		{"a size that lies", func(t *testing.T) []byte {
			b := archive(t, file("a", "short"))
			copy(b[124:], "77777777777\x00") // 8 GiB, with its sum made right again
			sum := 0
			copy(b[148:156], "        ")
			for _, c := range b[:512] {
				sum += int(c)
			}
			copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
			return b
		}, Limits{}, warren.ErrInvalid, "cut off"},
		{"not a tar", func(*testing.T) []byte { return []byte(strings.Repeat("not a tar ", 200)) }, Limits{}, warren.ErrInvalid, "damaged"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPlace(t)
			_, err := p.unpack(t.Context(), c.data(t), c.l)
			p.unchanged(t)
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.words) {
				t.Errorf("error %v, want one like %v with %q", err, c.want, c.words)
			}
		})
	}
}

// TestManyEntries unpacks up to the limit and not beyond (a million takes half a minute; the limit is what counts).
func TestManyEntries(t *testing.T) {
	testenv.NeedsRoot(t)
	const limit = 5000
	for extra, want := range []error{nil, warren.ErrExhausted} {
		p := newPlace(t)
		var list []entry
		for i := range limit + extra {
			list = append(list, file(fmt.Sprintf("d%d/f%d", i%100, i), ""))
		}
		if _, err := p.unpack(t.Context(), archive(t, list...), Limits{Entries: limit}); !errors.Is(err, want) {
			t.Errorf("%d entries: error %v, want %v", limit+extra, err, want)
		}
	}
}

func TestCancel(t *testing.T) {
	testenv.NeedsRoot(t)
	p := newPlace(t)
	tr, err := tree.Open(p.layer)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	go func() { // half a file, and then nothing until the reader goes
		b := archive(t, file("a", strings.Repeat("x", 4<<20)))
		w.Write(b[:2<<20])
		cancel()
		w.CloseWithError(context.Canceled)
	}()
	if _, _, err := Layer(ctx, tr, r, Options{IDBase: base}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
}

func TestDiskFull(t *testing.T) {
	testenv.NeedsRoot(t)
	small := testenv.SmallFS(t, 4<<20, 64)
	for name, data := range map[string][]byte{
		"bytes": archive(t, file("a", random(8<<20))),
		"inodes": archive(t, slices.Collect(func(yield func(entry) bool) {
			for i := range 100 {
				if !yield(file(fmt.Sprint(i), "")) {
					return
				}
			}
		})...),
	} {
		dir := filepath.Join(small, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		tr, err := tree.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = Layer(t.Context(), tr, bytes.NewReader(data), Options{IDBase: base})
		tr.Close()
		if !errors.Is(err, warren.ErrExhausted) || !strings.Contains(err.Error(), "full") {
			t.Errorf("%s: error %v, want that the disk is full", name, err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDiffID(t *testing.T) {
	testenv.NeedsRoot(t)
	plain := append(archive(t, file("a", "x")), make([]byte, 10<<10)...) // what follows the end counts as well
	sum := sha256.Sum256(plain)
	for name, b := range map[string][]byte{"plain": plain, "gzip": compress(t, gzipWriter, plain), "zstd": compress(t, zstdWriter, plain)} {
		tr, err := tree.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		got, _, err := Layer(t.Context(), tr, bytes.NewReader(b), Options{IDBase: base})
		tr.Close()
		if err != nil || got != hex.EncodeToString(sum[:]) {
			t.Errorf("%s: %s, %v; want %x", name, got, err, sum)
		}
	}
}

func gzipWriter(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) }

func zstdWriter(w io.Writer) io.WriteCloser {
	z, err := zstd.NewWriter(w)
	if err != nil {
		panic(err)
	}
	return z
}

func compress(t testing.TB, with func(io.Writer) io.WriteCloser, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	z := with(&out)
	if _, err := z.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// bomb is 10 GB of zeros as far as its tar header says, and 256 MB in truth: it must be stopped long before.
func bomb(t *testing.T, with func(io.Writer) io.WriteCloser) []byte {
	var out bytes.Buffer
	z := with(&out)
	w := tar.NewWriter(z)
	if err := w.WriteHeader(&tar.Header{Name: "zeros", Size: 10 << 30, Mode: 0o644}); err != nil {
		t.Fatal(err)
	}
	for range 256 {
		if _, err := w.Write(make([]byte, 1<<20)); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// sparse is a file of that size in the PAX 1.0 form, all of it a hole.
func sparse(t *testing.T, size int64) []byte {
	t.Helper()
	var b bytes.Buffer
	data := fmt.Sprintf("1\n%d\n0\n", size)
	data += strings.Repeat("\x00", 512-len(data))
	records := map[string]string{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "huge", "GNU.sparse.realsize": fmt.Sprint(size)}
	var pax string
	for _, k := range slices.Sorted(maps.Keys(records)) {
		rest := " " + k + "=" + records[k] + "\n"
		n := len(rest) + 2
		pax += fmt.Sprint(n) + rest
	}
	block := func(name string, typ byte, size int) []byte {
		var one bytes.Buffer
		w := tar.NewWriter(&one)
		if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(size), Typeflag: tar.TypeReg, Mode: 0o644, Format: tar.FormatUSTAR}); err != nil {
			t.Fatal(err)
		}
		h := one.Bytes()[:512]
		h[156] = typ
		copy(h[148:156], "        ")
		sum := 0
		for _, c := range h {
			sum += int(c)
		}
		copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
		return h
	}
	b.Write(block("pax", 'x', len(pax)))
	b.WriteString(pax + strings.Repeat("\x00", (512-len(pax)%512)%512))
	b.Write(block("huge", '0', 512))
	b.WriteString(data)
	b.Write(make([]byte, 1024))
	return b.Bytes()
}

func random(n int) string {
	b := make([]byte, n)
	x := uint64(88172645463325252)
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x)
	}
	return string(b)
}

// FuzzTar unpacks whatever it is given; nothing outside of the layer may change and nothing may panic or hang.
func FuzzTar(f *testing.F) {
	if os.Geteuid() != 0 {
		testenv.NeedsRoot(f)
	}
	f.Add(archive(f, dir("a"), file("a/b", "x"), symlink("s", "../../outside"), file("s/passwd", "evil"), link("l", "a/b")))
	f.Add(archive(f, file("a/.wh.b", ""), file(".wh.a", ""), file("a/.wh..wh..opq", ""), dir("a")))
	f.Add(archive(f, symlink("a", "/"), dir("a/a"), symlink("a/b", ".."), file("a/b/c", "x"), node("n", tar.TypeFifo)))
	f.Add(compress(f, gzipWriter, archive(f, file("../x", "x"))))
	f.Add(compress(f, zstdWriter, archive(f, file("x", "x"))))
	p := newPlace(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := os.MkdirAll(p.layer, 0o755); err != nil {
			t.Fatal(err)
		}
		p.before = snapshot(t, p.root, p.layer)
		_, err := p.unpack(t.Context(), b, Limits{Entries: 200, Bytes: 1 << 20})
		p.unchanged(t)
		if err != nil && !errors.Is(err, warren.ErrInvalid) && !errors.Is(err, warren.ErrExhausted) {
			t.Errorf("an error that blames neither the tar nor a limit: %v", err)
		}
		if err := os.RemoveAll(p.layer); err != nil {
			t.Fatal(err)
		}
	})
}
