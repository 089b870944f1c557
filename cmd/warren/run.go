package main

import (
	"context"
	"errors"
	"os/signal"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func runCommand(a *app) *cobra.Command {
	var spec specFlags
	var f execFlags
	remove, keep := true, false
	cmd := &cobra.Command{
		Use:   "run [flags] -- COMMAND [ARG...]",
		Short: "Run a command in a new sandbox",
		Long: `Make a sandbox, run a command in it, remove the sandbox, and exit as the command did: with its exit code, or 128 and the
number of the signal that ended it; 127 when there is no such command, 126 when it cannot be run. Warren's own failures exit with 125.

When this program ends without having removed the sandbox (it was killed, its machine is gone), the server does a minute later, and
the command ends with it: the sandbox has an idle timeout of 1m, which a command that this program follows, silent or not, never reaches.
Give another with --idle-timeout. A sandbox that is kept has none of its own.`,
		Example: `  warren run -- echo hello
  warren run -it -- bash
  warren run --repo https://example.com/org/app@main -- make test
  warren run --repo . --dirty --keep --name fix -- go test ./...
  warren run --mount "$(go env GOMODCACHE):/home/user/go/pkg/mod" --repo . -- go vet ./...
  warren run --network shop -- curl http://db.shop.internal:8000/
  warren run --image debian:12 --cpu 0.5 --memory 256MiB --timeout 1m -- ./job`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return &usageError{errors.New("missing COMMAND"), cmd.CommandPath()}
			}
			wish, err := spec.spec(a)
			if err != nil {
				return err
			}
			keep := keep || !remove
			if !keep {
				// Nobody comes back to it.
				if wish.IdleTimeout == 0 && !cmd.Flags().Changed("idle-timeout") {
					wish.IdleTimeout = orphanTimeout
				}
				if wish.IdleAction == "" {
					wish.IdleAction = warren.IdleDelete
				}
			}
			return a.runOnce(cmd.Context(), wish, args, f, keep)
		},
	}
	f.register(cmd)
	spec.register(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&remove, "rm", true, "remove the sandbox when the command has ended")
	flags.BoolVar(&keep, "keep", false, "keep the sandbox; same as --rm=false")
	return cmd
}

// orphanTimeout is the idle timeout of a sandbox that run is going to remove: who follows a command uses its sandbox, so that
// it only counts once nobody is there to remove it. It is long enough for a client to come back after the end of a daemon.
const orphanTimeout = time.Minute

// runOnce makes a sandbox, runs a command in it and removes it, whatever happens in between.
func (a *app) runOnce(ctx context.Context, wish warren.Spec, argv []string, f execFlags, keep bool) (err error) {
	c, err := a.client(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	sb, err := a.createInterruptibly(ctx, c, wish)
	if err != nil {
		return err
	}
	a.progress.clear()
	if keep {
		name := string(sb.ID)
		if sb.Name != "" {
			name = sb.Name
		}
		a.notice("sandbox %s stays; `warren exec %s -- …` runs more in it, `warren rm %s` removes it", name, name, name)
	} else {
		defer func() {
			quit, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
			defer cancel()
			if e := sb.Delete(quit); e != nil && !errors.Is(e, warren.ErrNotFound) {
				a.notice("sandbox %s could not be removed: %s", sb.ID, describe(e))
				if err == nil {
					err = exitError(exitFailure)
				}
			}
		}()
	}
	// The variables of the spec are those of every process already.
	return a.execute(ctx, f.command(sb, argv, nil), f)
}

// createInterruptibly gives up a create at the first signal, and the server then undoes it.
func (a *app) createInterruptibly(ctx context.Context, c *warren.Client, wish warren.Spec) (*warren.Sandbox, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	signals := forwardedSignals()
	defer signal.Stop(signals)
	go func() {
		select {
		case <-signals:
			cancel()
		case <-ctx.Done():
		}
	}()
	return c.Create(ctx, wish)
}
