package secret

import (
	"bufio"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
)

// sameHeader compares names as careless servers do: in any case, and with _ for -.
func sameHeader(a, b string) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range len(a) {
		x, y := a[i]|0x20, b[i]|0x20
		if a[i] == '_' {
			x = '-' | 0x20
		}
		if b[i] == '_' {
			y = '-' | 0x20
		}
		if x != y {
			return false
		}
	}
	return true
}

func deleteHeader(h http.Header, name string) {
	for key := range h {
		if sameHeader(strings.TrimSpace(key), name) {
			delete(h, key)
		}
	}
}

// contentCoding returns how a body is coded: "" for not at all.
func contentCoding(h http.Header) string {
	var list []string
	for key, values := range h {
		if !sameHeader(strings.TrimSpace(key), "Content-Encoding") {
			continue
		}
		for part := range strings.SplitSeq(strings.Join(values, ","), ",") {
			if part = strings.ToLower(strings.TrimSpace(part)); part != "" && part != "identity" {
				list = append(list, strings.TrimPrefix(part, "x-"))
			}
		}
	}
	return strings.Join(list, ",")
}

// lazyGzip reads the header of a gzip stream when the first byte is asked for, so that it does not keep an answer waiting. It ends one that
// becomes far larger than it was.
type lazyGzip struct {
	src io.Reader
	gz  io.Reader
	err error
}

func (l *lazyGzip) Read(p []byte) (int, error) {
	if l.gz == nil && l.err == nil {
		in := &counter{r: l.src}
		gz, err := gzip.NewReader(in)
		l.gz, l.err = &bounded{r: gz, in: in}, err
	}
	if l.err != nil {
		return 0, l.err
	}
	return l.gz.Read(p)
}

// inflater looks into a compressed stream that passes: what is read from it are the bytes of src as they are, and what they
// decompress to goes to look. An error of look, or of a stream that is not what it says, ends it.
type inflater struct {
	src     io.Reader
	feed    *io.PipeWriter
	result  chan error
	err     error
	settled bool
}

// maxInflate is how many times its own size a compressed body may have, above a megabyte: what is larger is an attack.
const maxInflate = 200

func newInflater(src io.Reader, coding string, look func(io.Reader) error) *inflater {
	r, w := io.Pipe()
	f := &inflater{src: src, feed: w, result: make(chan error, 1)}
	go func() {
		in := &counter{r: r}
		err := func() error {
			plain, err := decompress(in, coding)
			if err != nil {
				return err
			}
			return look(&bounded{r: plain, in: in})
		}()
		if in.n == 0 && errors.Is(err, io.EOF) {
			err = nil // an empty body
		}
		if err != nil && !errors.Is(err, ErrMisplaced) && !errors.Is(err, ErrOpaque) {
			err = fmt.Errorf("%w: it is no sound %s: %v", ErrOpaque, coding, err)
		}
		if err != nil {
			r.CloseWithError(err)
		} else {
			// What follows the compressed stream's end is not part of it, and a server might read on.
			if n, _ := io.Copy(io.Discard, r); n > 0 {
				err = ErrOpaque
			}
		}
		f.result <- err
	}()
	return f
}

func decompress(in io.Reader, coding string) (io.Reader, error) {
	if coding == "gzip" {
		return gzip.NewReader(in)
	}
	// deflate is zlib, or what some clients take it for, raw.
	b := bufio.NewReader(in)
	head, err := b.Peek(2)
	if err != nil {
		return nil, err
	}
	if head[0]&0x0f == 8 && (int(head[0])<<8|int(head[1]))%31 == 0 {
		return zlib.NewReader(b)
	}
	return flate.NewReader(b), nil
}

var errBomb = fmt.Errorf("%w: it unpacks to more than %d times its size", ErrOpaque, maxInflate)

type counter struct {
	r io.Reader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

type bounded struct {
	r  io.Reader
	in *counter
	n  int64
}

func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if b.n += int64(n); b.n > 1<<20+maxInflate*b.in.n {
		return n, errBomb
	}
	return n, err
}

// Read implements [io.Reader]. Bytes are handed on after they were looked at.
func (f *inflater) Read(p []byte) (int, error) {
	if f.err != nil {
		return 0, f.err
	}
	n, err := f.src.Read(p)
	if n > 0 {
		if _, werr := f.feed.Write(p[:n]); werr != nil {
			f.err = f.settle()
			return 0, f.err
		}
	}
	if err != nil {
		f.err = err
		if errors.Is(err, io.EOF) {
			f.feed.Close()
			if serr := f.settle(); serr != nil {
				f.err = serr
				return 0, f.err
			}
		} else {
			f.feed.CloseWithError(err)
		}
	}
	return n, f.err
}

func (f *inflater) settle() error {
	if f.settled {
		return f.err
	}
	f.settled = true
	if err := <-f.result; err != nil {
		return err
	}
	return nil
}

// stop ends the looking when nobody reads on.
func (f *inflater) stop() { f.feed.CloseWithError(io.ErrClosedPipe) }
