package unpack

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/image/tree"
)

// maxWindow is how much memory a zstd frame may ask for; what zstd makes without --long stays below 8 MiB, with it at 128.
const maxWindow = 128 << 20

// Layer unpacks a tar that may be compressed with gzip or zstd, and returns the SHA-256 of what it held uncompressed, to its very
// end: the layer's DiffID, in hexadecimal. See [Tar].
func Layer(ctx context.Context, t *tree.Tree, r io.Reader, o Options) (diffID string, stats Stats, err error) {
	d, err := Decompress(ctx, r, o.Limits)
	if err != nil {
		return "", Stats{}, err
	}
	defer d.Close()
	stats, err = Tar(ctx, t, d, o)
	if err != nil {
		return "", stats, err
	}
	if _, err := io.Copy(io.Discard, d); err != nil { // what follows the tar's end counts in the digest
		return "", stats, err
	}
	return d.DiffID(), stats, nil
}

// Stream is the uncompressed content of a layer. It is decompressed and hashed ahead of its reader, by a goroutine of its own.
type Stream struct {
	cancel context.CancelFunc
	full   chan []byte
	empty  chan []byte
	rest   []byte
	last   []byte
	err    error
	sum    []byte
	wg     sync.WaitGroup
}

// ahead is how many buffers of chunk bytes are decompressed before they are read.
const (
	ahead = 4
	chunk = 256 << 10
)

// Decompress starts to read a layer: gzip, zstd or plain, told by its first bytes. The caller closes it, which does not close r
// but waits until nothing reads it any more.
func Decompress(ctx context.Context, r io.Reader, l Limits) (*Stream, error) {
	l = l.withDefaults()
	in := &counter{r: r}
	plain, err := decompressor(in)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	s := &Stream{cancel: cancel, full: make(chan []byte, ahead), empty: make(chan []byte, ahead)}
	for range ahead {
		s.empty <- make([]byte, chunk)
	}
	s.wg.Go(func() {
		defer close(s.full)
		defer plain.Close()
		s.err = s.fill(ctx, plain, in, l)
	})
	return s, nil
}

// fill decompresses until the end.
func (s *Stream) fill(ctx context.Context, r io.Reader, in *counter, l Limits) error {
	hash := sha256.New()
	var total int64
	for {
		var b []byte
		select {
		case <-ctx.Done():
			return ctx.Err()
		case b = <-s.empty:
		}
		n, err := readChunk(r, b)
		hash.Write(b[:n])
		total += int64(n)
		switch {
		case total > l.Bytes:
			return fmt.Errorf("%w: the layer unpacks to more than %d bytes", warren.ErrExhausted, l.Bytes)
		case in.compressed && total > ratioFrom && total/l.Ratio > in.n.Load():
			return fmt.Errorf("%w: the layer unpacks to more than %d times its size, as a bomb does", warren.ErrExhausted, l.Ratio)
		}
		if n > 0 {
			s.full <- b[:n] // never blocks: there is room for every buffer
		}
		switch {
		case err == io.EOF:
			s.sum = hash.Sum(nil)
			return nil
		case err != nil && in.err != nil:
			return in.err
		case err != nil:
			return fmt.Errorf("%w: the compressed layer is damaged or cut off: %w", warren.ErrInvalid, err)
		}
	}
}

// readChunk fills b unless an error, io.EOF among them, ends the reading.
func readChunk(r io.Reader, b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		var m int
		m, err = r.Read(b[n:])
		n += m
	}
	return n, err
}

// Read returns what has been decompressed.
func (s *Stream) Read(p []byte) (int, error) {
	for len(s.rest) == 0 {
		if s.last != nil {
			s.empty <- s.last[:cap(s.last)]
			s.last = nil
		}
		b, ok := <-s.full
		if !ok {
			if s.err != nil {
				return 0, s.err
			}
			return 0, io.EOF
		}
		s.last, s.rest = b, b
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

// DiffID is the SHA-256 of the whole stream in hexadecimal, known when Read has returned io.EOF.
func (s *Stream) DiffID() string { return hex.EncodeToString(s.sum) }

// Close ends the decompression.
func (s *Stream) Close() error {
	s.cancel()
	s.wg.Wait()
	return nil
}

// counter counts what is read of the compressed layer and keeps the error of its source apart from those of decompression.
type counter struct {
	r          io.Reader
	n          atomic.Int64
	err        error
	compressed bool
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n.Add(int64(n))
	if err != nil && err != io.EOF {
		c.err = err
	}
	return n, err
}

// decompressor tells the compression by the first bytes.
func decompressor(in *counter) (io.ReadCloser, error) {
	b := bufio.NewReaderSize(in, chunk)
	magic, err := b.Peek(4)
	if err != nil && err != io.EOF {
		return nil, err
	}
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		in.compressed = true
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, fmt.Errorf("%w: the gzip header is damaged: %w", warren.ErrInvalid, err)
		}
		return z, nil
	case bytes.Equal(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		in.compressed = true
		z, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderMaxMemory(1<<40))
		if err != nil {
			return nil, err
		}
		return z.IOReadCloser(), nil
	}
	return io.NopCloser(b), nil
}
