package guest

import (
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// relayWait is how long a relay waits for a guest that has only begun to boot.
const relayWait = 30 * time.Second

// relay carries a channel between a pair of streams and the socket on which the guest takes channels, until one of
// them ends. It is for hosts that reach into a sandbox by starting a program in it and in no other way.
func relay(socket string, in io.Reader, out io.Writer) error {
	conn, err := dialSocket(socket, relayWait)
	if err != nil {
		return fmt.Errorf("the guest's socket: %w", err)
	}
	defer conn.Close()
	ended := make(chan error, 2)
	pass := func(to io.Writer, from io.Reader) {
		_, err := io.Copy(to, from)
		ended <- err
	}
	go pass(conn, in)
	go pass(out, conn)
	// A channel without one of its directions is of no use to either side.
	if err := <-ended; err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("relay the channel: %w", err)
	}
	return nil
}

func dialSocket(socket string, patience time.Duration) (net.Conn, error) {
	for until := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		conn, err := net.Dial("unix", socket)
		if err == nil || time.Now().After(until) {
			return conn, err
		}
	}
}
