//go:build linux

package keeper

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"path"
	"strings"
	"testing"
)

// index is a tar as gVisor writes it.
func index(entries ...tar.Header) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		body := h.Uname // of a test
		h.Uname = ""
		h.Size = int64(len(body))
		if err := w.WriteHeader(&h); err != nil {
			panic(err)
		}
		io.WriteString(w, body)
	}
	w.Close()
	return b.Bytes()
}

// parts is the content of a file in an index: its size, and start, end and place of each part.
func parts(n ...uint64) string {
	var b []byte
	for _, v := range n {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return string(b)
}

func convert(b []byte, most int64) ([]byte, error) {
	var out bytes.Buffer
	l := &layerWriter{
		in: tar.NewReader(bytes.NewReader(b)), size: int64(len(b)), out: tar.NewWriter(&out), data: strings.NewReader(strings.Repeat("content.", 100)),
		most: most, removed: make(map[string]bool),
	}
	err := l.convert(context.Background())
	return out.Bytes(), err
}

// TestLayerHostile converts what a kernel that was taken over might say.
func TestLayerHostile(t *testing.T) {
	for name, h := range map[string]tar.Header{
		"a name outside":        {Typeflag: tar.TypeReg, Name: "./../../etc/passwd", Uname: parts(0)},
		"an absolute name":      {Typeflag: tar.TypeReg, Name: "/etc/passwd", Uname: parts(0)},
		"a link outside":        {Typeflag: tar.TypeLink, Name: "./a", Linkname: "../../etc/shadow"},
		"too many bytes":        {Typeflag: tar.TypeReg, Name: "./a", Uname: parts(1 << 62)},
		"a negative size":       {Typeflag: tar.TypeReg, Name: "./a", Uname: parts(1 << 63)},
		"half a part":           {Typeflag: tar.TypeReg, Name: "./a", Uname: parts(8, 1)},
		"parts over each other": {Typeflag: tar.TypeReg, Name: "./a", Uname: parts(80, 0, 50, 0, 40, 60, 0)},
		"a part backwards":      {Typeflag: tar.TypeReg, Name: "./a", Uname: parts(80, 50, 0, 0)},
		"a place beyond":        {Typeflag: tar.TypeReg, Name: "./a", Uname: parts(80, 0, 80, 1<<63)},
		"no data there":         {Typeflag: tar.TypeReg, Name: "./a", Uname: parts(80, 0, 80, 1<<40)},
	} {
		if out, err := convert(index(h), 1<<20); err == nil {
			t.Errorf("%s is taken, and gives %d bytes", name, len(out))
		}
	}
	if _, err := convert(index(tar.Header{Typeflag: tar.TypeReg, Name: "./a", Uname: parts(20, 4, 8, 0, 16, 40, 8)}), 1<<20); err != nil {
		t.Error(err)
	}
}

// FuzzLayer converts anything: it must end, stay within its bound and name nothing outside of the root.
func FuzzLayer(f *testing.F) {
	f.Add(index(tar.Header{Typeflag: tar.TypeReg, Name: "./a/b", Uname: parts(20, 4, 8, 0, 16, 40, 8)}))
	f.Add(index(tar.Header{Typeflag: tar.TypeChar, Name: "./a"}, tar.Header{Typeflag: tar.TypeLink, Name: "./b", Linkname: "./a"}))
	f.Add(index(tar.Header{Typeflag: tar.TypeDir, Name: "./a/", PAXRecords: map[string]string{
		xattrRecord + "trusted.overlay.opaque": "y", xattrRecord + "system.posix_acl_access": "AgAAAA"}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		const most = 1 << 16
		out, err := convert(b, most)
		if err != nil {
			return
		}
		if len(out) > most+20*len(b)+2048 {
			t.Errorf("%d bytes of %d", len(out), len(b))
		}
		r := tar.NewReader(bytes.NewReader(out))
		for {
			h, err := r.Next()
			if err != nil {
				if err != io.EOF {
					t.Error(err)
				}
				return
			}
			for _, name := range []string{h.Name, map[bool]string{true: h.Linkname}[h.Typeflag == tar.TypeLink]} {
				if path.IsAbs(name) || strings.HasPrefix(path.Clean(name), "..") && !strings.HasPrefix(path.Clean(name), "...") && (path.Clean(name) == ".." || path.Clean(name)[2] == '/') {
					t.Errorf("the name %q", name)
				}
			}
		}
	})
}
