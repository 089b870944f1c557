package image

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// BenchmarkPull pulls and unpacks an image of 150 MB in 8,000 files, gzip to about half, from a registry on the loopback.
func BenchmarkPull(b *testing.B) {
	testenv.NeedsRoot(b)
	const n, size = 8000, 19_000
	r := rand.NewChaCha8([32]byte{1})
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	content := make([]byte, size)
	for i := range n {
		r.Read(content[:size/2]) // the other half are zeros
		if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("usr/lib/d%d/f%d", i/50, i), Size: size, Mode: 0o644}); err != nil {
			b.Fatal(err)
		}
		w.Write(content)
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data.Bytes())), nil })
	if err != nil {
		b.Fatal(err)
	}
	h := newHub(b)
	h.push(b, "big:1", imageOf(b, l))
	b.SetBytes(int64(data.Len()))
	for b.Loop() {
		s := openStore(b, b.TempDir())
		if _, err := s.Pull(b.Context(), h.ref("big:1"), PullOptions{}); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := s.Delete(b.Context(), h.ref("big:1")); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
