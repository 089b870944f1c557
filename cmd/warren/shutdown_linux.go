package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/config"
	"github.com/warren-sandbox/warren/internal/gateway/control"
)

// stopTimeout is how long a daemon may take to end: it finishes what it is writing, and no more.
const stopTimeout = 30 * time.Second

func shutdownCommand(a *app) *cobra.Command {
	var sandboxes bool
	cmd := &cobra.Command{
		Use:   "shutdown [flags]",
		Short: "End the local daemon",
		Long: `End the daemon of this data directory. Sandboxes and what runs in them go on, and the next command starts a daemon that finds
them again; with --sandboxes they are removed first and no process of Warren is left.`,
		Example: `  warren shutdown                                    to start a newer daemon, for example
  warren shutdown --sandboxes                        leave nothing running`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if a.remote() != "" {
				return fmt.Errorf("shutdown: %w: only a daemon of this machine can be ended; unset WARREN_URL", warren.ErrInvalid)
			}
			dir, err := a.home()
			if err != nil {
				return err
			}
			if sandboxes {
				if err := a.removeAll(cmd.Context(), dir); err != nil {
					return err
				}
			}
			if err := stopDaemon(cmd.Context(), dir); err != nil || !sandboxes {
				return err
			}
			// The daemon has ended it, unless it does not answer.
			if err := control.Retire(cmd.Context(), filepath.Join(dir, "run", "gateway")); err != nil {
				return fmt.Errorf("end the gateway: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&sandboxes, "sandboxes", false, "remove all sandboxes first, those of every user included")
	return cmd
}

// removeAll removes every sandbox, by a daemon, which is started if there is none but something to remove.
func (a *app) removeAll(ctx context.Context, dir string) error {
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	c, err := a.client(ctx)
	if err != nil {
		if pid, e := daemonPID(dir); e != nil || pid != 0 {
			return err
		}
		// A daemon that cannot start, such as for damaged records, must not keep what runs from being ended.
		if e := removeUnrecorded(ctx, dir); e != nil {
			return errors.Join(err, e)
		}
		a.notice("%v", err)
		a.notice("what ran was ended without a daemon; workspaces are as they were")
		return nil
	}
	defer c.Close()
	var ids []string
	for sb, err := range c.Sandboxes(ctx, warren.ListOptions{}) {
		if err != nil {
			return err
		}
		ids = append(ids, string(sb.ID))
	}
	quiet := *a
	quiet.quiet = true
	return quiet.each(ctx, ids, func(ctx context.Context, id string) error {
		return c.DeleteSandbox(ctx, id, warren.DeleteOptions{AllowMissing: true})
	})
}

// removeUnrecorded removes every sandbox that the drivers of a data directory have, without a daemon and its records.
func removeUnrecorded(ctx context.Context, dir string) (err error) {
	lock, err := lockDataDir(dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	cfg, err := config.Load(config.Source{DataDir: dir})
	if err != nil {
		return err
	}
	for _, entry := range drivers {
		state := filepath.Join(dir, "run", entry.name)
		if _, err := os.Stat(state); err != nil {
			continue // it never ran one
		}
		d, err := entry.open(state, cfg, slog.New(slog.DiscardHandler))
		if err != nil {
			return fmt.Errorf("driver %s: %w", entry.name, err)
		}
		all, err := d.List(ctx)
		for _, s := range all {
			err = errors.Join(err, d.Delete(ctx, s.ID))
		}
		err = errors.Join(err, closeDriver(context.WithoutCancel(ctx), d))
		if err != nil {
			return fmt.Errorf("driver %s: %w", entry.name, err)
		}
	}
	// Of sandboxes that have no daemon nobody tells it that they are gone.
	if err := control.Retire(ctx, filepath.Join(dir, "run", "gateway")); err != nil {
		return fmt.Errorf("end the gateway: %w", err)
	}
	return nil
}

// stopDaemon ends the daemon that holds the lock of a data directory and waits until its process is gone.
func stopDaemon(ctx context.Context, dir string) error {
	pid, err := daemonPID(dir)
	if err != nil || pid == 0 {
		return err
	}
	// The handle is of this very process; that it still holds the lock is looked at after it was opened.
	p, err := os.FindProcess(pid)
	if err != nil {
		return err
	}
	defer func() { _ = p.Release() }()
	if again, err := daemonPID(dir); err != nil || again != pid {
		return err
	}
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("end the daemon (process %d): %w", pid, err)
	}
	deadline := time.After(stopTimeout)
	var freed time.Time
	for {
		// The lock is given up a moment before the process is gone, and "ended" means gone; but a process that nobody
		// waits for stays as a zombie.
		now, err := daemonPID(dir)
		if err != nil {
			return err
		}
		if now != pid {
			if freed.IsZero() {
				freed = time.Now()
			}
			if errors.Is(p.Signal(syscall.Signal(0)), os.ErrProcessDone) || time.Since(freed) > time.Second {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-deadline:
			return fmt.Errorf("the daemon (process %d) does not end: %w; look into %s, or kill -9 it, which loses nothing", pid, warren.ErrUnavailable, logPath(dir))
		case <-time.After(5 * time.Millisecond):
		}
	}
}
