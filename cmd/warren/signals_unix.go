//go:build unix

package main

import (
	"errors"
	"io"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// forwardedSignals are those that a command in a sandbox gets in place of this program.
func forwardedSignals() chan os.Signal {
	c := make(chan os.Signal, 8)
	signal.Notify(c, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2)
	return c
}

// linuxSignal is the number that a signal of this system has in a sandbox.
func linuxSignal(sig os.Signal) syscall.Signal {
	switch sig {
	case unix.SIGUSR1:
		return 10
	case unix.SIGUSR2:
		return 12
	}
	s, _ := sig.(syscall.Signal)
	return s
}

// watchTerminal tells when the size of the terminal may have changed.
func watchTerminal(io.Writer) (<-chan struct{}, func()) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, unix.SIGWINCH)
	out, done := make(chan struct{}, 1), make(chan struct{})
	go func() {
		for {
			select {
			case <-c:
				select {
				case out <- struct{}{}:
				default:
				}
			case <-done:
				return
			}
		}
	}()
	return out, func() { signal.Stop(c); close(done) }
}

// keepBrokenPipes makes a write to a closed pipe an error instead of the end of this program, which may have a sandbox to
// remove. Programs that are started from here get the default again.
func keepBrokenPipes() { signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE) }

func brokenPipe(err error) bool { return errors.Is(err, unix.EPIPE) }
