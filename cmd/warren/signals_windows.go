package main

import (
	"errors"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/term"
)

// forwardedSignals are those that a command in a sandbox gets in place of this program.
func forwardedSignals() chan os.Signal {
	c := make(chan os.Signal, 8)
	signal.Notify(c, os.Interrupt, syscall.SIGTERM)
	return c
}

// linuxSignal is the number that a signal of this system has in a sandbox.
func linuxSignal(sig os.Signal) syscall.Signal {
	s, _ := sig.(syscall.Signal)
	return s
}

// watchTerminal tells when the size of the terminal may have changed; Windows has no signal for it.
func watchTerminal(out io.Writer) (<-chan struct{}, func()) {
	c, done := make(chan struct{}, 1), make(chan struct{})
	f, ok := out.(*os.File)
	if !ok {
		return nil, func() {}
	}
	go func() {
		tick := time.NewTicker(250 * time.Millisecond)
		defer tick.Stop()
		cols, rows, _ := term.GetSize(int(f.Fd()))
		for {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			if w, h, err := term.GetSize(int(f.Fd())); err == nil && (w != cols || h != rows) {
				cols, rows = w, h
				select {
				case c <- struct{}{}:
				default:
				}
			}
		}
	}()
	return c, func() { close(done) }
}

// keepBrokenPipes has nothing to do: Windows has no SIGPIPE.
func keepBrokenPipes() {}

func brokenPipe(err error) bool {
	return errors.Is(err, syscall.ERROR_BROKEN_PIPE) || errors.Is(err, syscall.Errno(232)) // ERROR_NO_DATA
}
