//go:build !linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"

	"github.com/spf13/cobra"
)

// errNoServer says that daemons run on Linux.
var errNoServer = fmt.Errorf("a server runs on Linux, this is %s: %w; set WARREN_URL and WARREN_TOKEN to use one elsewhere", runtime.GOOS, errors.ErrUnsupported)

// dialDaemon refuses: there is no local daemon here.
func (a *app) dialDaemon(string) func(context.Context) (net.Conn, error) {
	return func(context.Context) (net.Conn, error) { return nil, errNoServer }
}

// answers is false: there is no local daemon here.
func answers(context.Context, string) bool { return false }

func notHere(use, short string) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short + " (on Linux)", Example: "  WARREN_URL=https://host:7420 WARREN_TOKEN=… warren ls",
		DisableFlagParsing: true,
		RunE:               func(*cobra.Command, []string) error { return errNoServer },
	}
}

func serveCommand(*app) *cobra.Command    { return notHere("serve", "Run the daemon in the foreground") }
func shutdownCommand(*app) *cobra.Command { return notHere("shutdown", "End the local daemon") }
func benchCommand(*app) *cobra.Command    { return notHere("bench", "Measure this machine") }

// hostChecks has nothing to look at: the host of sandboxes is elsewhere.
func (a *app) hostChecks(context.Context) ([]check, error) { return nil, errNoServer }
