// Package peer is the far end of the connections that package drivertest dials: a listener in a sandbox whose client says
// with its first line what it shall do.
package peer

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
)

// Commands of the first line.
const (
	// Echo sends back what comes, until the client half-closes, then closes.
	Echo = "echo"
	// Sink reads until the client half-closes and then answers with [Sum] of what came.
	Sink = "sink"
	// Source, followed by a space and a number, sends that many bytes of [Pattern], half-closes, reads to the end and closes.
	Source = "source"
	// Drain half-closes at once, then reads to the end, and answers nothing.
	Drain = "drain"
	// Bye sends "bye" and closes at once.
	Bye = "bye"
)

// closeWriter is a connection that can end one direction, as those of TCP can.
type closeWriter interface{ CloseWrite() error }

// Serve answers one connection and closes it.
func Serve(conn net.Conn) {
	defer conn.Close()
	r := bufio.NewReader(conn)
	line, err := r.ReadString('\n')
	if err != nil {
		return
	}
	verb, arg, _ := strings.Cut(strings.TrimSpace(line), " ")
	switch verb {
	case Echo:
		io.Copy(conn, r)
	case Sink:
		sum, n, err := Sum(r)
		if err == nil {
			fmt.Fprintf(conn, "%d %s\n", n, sum)
		}
	case Source:
		n, err := strconv.ParseInt(arg, 10, 64)
		if err != nil {
			return
		}
		if _, err := io.Copy(conn, Pattern(n)); err != nil {
			return
		}
		halfClose(conn)
		io.Copy(io.Discard, r)
	case Drain:
		halfClose(conn)
		io.Copy(io.Discard, r)
	case Bye:
		io.WriteString(conn, "bye")
	}
}

func halfClose(conn net.Conn) {
	if c, ok := conn.(closeWriter); ok {
		c.CloseWrite()
	}
}

// Sum reads to the end and returns the SHA-256 and the number of bytes.
func Sum(r io.Reader) (sum string, n int64, err error) {
	h := sha256.New()
	n, err = io.Copy(h, r)
	return hex.EncodeToString(h.Sum(nil)), n, err
}

// Pattern returns n bytes, the same each time, in which a lost, doubled or swapped piece shows.
func Pattern(n int64) io.Reader { return io.LimitReader(&pattern{}, n) }

// block has a prime length, so that no buffer's size is a multiple of it.
var block = func() (b [4099]byte) {
	x := uint64(88172645463325252)
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x)
	}
	return b
}()

type pattern struct{ offset int }

func (p *pattern) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = block[p.offset%len(block)] ^ byte(p.offset/len(block))
		p.offset++
	}
	return len(b), nil
}
