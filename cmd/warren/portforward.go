package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/warren-sandbox/warren"
)

func portForwardCommand(a *app) *cobra.Command {
	var address string
	cmd := &cobra.Command{
		Use:   "port-forward ID [LOCAL:]PORT... [flags]",
		Short: "Reach TCP ports of a sandbox at ports of this machine",
		Long: `Listen on ports of this machine's loopback and carry each connection to a port inside the sandbox, until interrupted.
LOCAL 0 takes a free port.`,
		Example: `  warren port-forward fix 8080
  warren port-forward fix 9000:80 0:5432`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 2 {
				return exactly("ID", "PORT")(cmd, args)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			c, err := a.client(ctx)
			if err != nil {
				return err
			}
			defer c.Close()
			// What does not exist shows now, not at the first connection.
			sb, err := c.Sandbox(ctx, args[0])
			if err != nil {
				return err
			}
			group, ctx := errgroup.WithContext(ctx)
			for _, arg := range args[1:] {
				local, remote, err := parsePorts(arg)
				if err != nil {
					return err
				}
				l, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort(address, strconv.Itoa(local)))
				if err != nil {
					return err
				}
				defer l.Close()
				if err := a.printForward(l.Addr().String(), remote); err != nil {
					return err
				}
				group.Go(func() error { return a.forward(ctx, l, sb, remote) })
			}
			return group.Wait()
		},
	}
	cmd.Flags().StringVar(&address, "address", "127.0.0.1", "address to listen on; others than loopback let other machines in")
	return cmd
}

func (a *app) printForward(local string, remote int) error {
	if a.json {
		return a.printJSON(struct {
			Address string `json:"address"`
			Port    int    `json:"port"`
		}{local, remote})
	}
	_, err := fmt.Fprintf(a.out, "%s -> %d\n", local, remote)
	return err
}

// parsePorts reads LOCAL:PORT or PORT.
func parsePorts(s string) (local, remote int, err error) {
	l, r, ok := strings.Cut(s, ":")
	if !ok {
		r = l
	}
	remote, err = strconv.Atoi(r)
	if err == nil {
		local, err = strconv.Atoi(l)
	}
	if err != nil || remote < 1 || remote > 65535 || local < 0 || local > 65535 {
		return 0, 0, fmt.Errorf("port %q: %w: want PORT or LOCAL:PORT", s, warren.ErrInvalid)
	}
	return local, remote, nil
}

// forward carries connections until ctx ends.
func (a *app) forward(ctx context.Context, l net.Listener, sb *warren.Sandbox, port int) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	for {
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		go func() {
			defer conn.Close()
			in, err := sb.Dial(ctx, port)
			if err != nil {
				if ctx.Err() == nil {
					a.notice("port %d: %s", port, describe(err))
				}
				return
			}
			defer in.Close()
			stop := context.AfterFunc(ctx, func() { conn.Close(); in.Close() })
			defer stop()
			splice(conn, in)
		}()
	}
}

// splice copies both ways and passes on the end of each.
func splice(a, b net.Conn) {
	done := make(chan struct{}, 2)
	half := func(dst, src net.Conn) {
		_, err := io.Copy(dst, src)
		if w, ok := dst.(interface{ CloseWrite() error }); ok && (err == nil || errors.Is(err, io.EOF)) {
			_ = w.CloseWrite()
		} else {
			dst.Close()
		}
		done <- struct{}{}
	}
	go half(a, b)
	go half(b, a)
	<-done
	<-done
}
