package main

import (
	"context"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren/internal/bench"
	"github.com/warren-sandbox/warren/internal/engine/fleet"
)

func benchCommand(a *app) *cobra.Command {
	return parent("bench", "Measure sandboxes on this machine, beside what else runs here",
		`  warren bench start
  warren bench io
  warren bench state
  warren bench drivers
  warren bench gateway
  warren bench fleet`,
		benchPart(a, "start", "Create, first command, round trip, throughput and idle memory", bench.Start),
		benchPart(a, "io", "Work with many files in a sandbox, as a ratio to the same work outside", bench.IO),
		benchPart(a, "state", "Pause and resume, snapshot, fork and template, idle and with servers and files", bench.State),
		benchDrivers(a),
		benchPart(a, "gateway", "Connections and requests through the gateway, passed through and inspected, beside none", bench.Gateway),
		benchGatewayClient(a),
		benchFleet(a))
}

// benchGatewayClient is what bench gateway starts in sandboxes and beside them.
func benchGatewayClient(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "gateway-client", Short: "Be the client of bench gateway", Hidden: true, Args: exactly(),
		Long:    "Be the client of bench gateway, which starts it and tells it what to do.",
		Example: "  warren bench gateway",
		RunE:    func(cmd *cobra.Command, _ []string) error { return bench.GatewayClient(cmd.Context(), a.in, a.out) },
	}
}

// benchDrivers takes the drivers from the command line besides.
func benchDrivers(a *app) *cobra.Command {
	var names []string
	cmd := benchPart(a, "drivers", "Set the drivers of the server side by side, with bwrap and docker run beside them", func(ctx context.Context, o bench.Options, w io.Writer) error {
		return bench.Drivers(ctx, o, names, w)
	})
	cmd.Example += "\n  warren bench drivers --compare gvisor,docker,docker:runsc"
	cmd.Flags().StringSliceVar(&names, "compare", nil, "drivers to measure, each DRIVER or DRIVER:RUNTIME (default all of the server's)")
	return cmd
}

// benchFleet needs no host of sandboxes: it is about the engine and its store alone.
func benchFleet(a *app) *cobra.Command {
	var n, concurrency int
	cmd := &cobra.Command{
		Use: "fleet [flags]", Short: "Fill the engine with records of sandboxes that do not run",
		Long: `Fill an engine with sandboxes of a driver that runs nothing, and print creates per second, their latency, the time of a restart and the
memory of each record. The store is a real one, in a directory that is removed afterwards.`,
		Example: "  warren bench fleet\n  warren bench fleet --sandboxes 1000 --concurrency 4",
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := a.out
			if a.json {
				out = io.Discard
			}
			result, err := fleet.Bench(cmd.Context(), os.TempDir(), n, concurrency, out)
			if err != nil || !a.json {
				return err
			}
			return a.printJSON(result)
		},
	}
	cmd.Flags().IntVar(&n, "sandboxes", 50_000, "how many")
	cmd.Flags().IntVar(&concurrency, "concurrency", 16, "creates at a time")
	return cmd
}

func benchPart(a *app, name, short string, measure func(context.Context, bench.Options, io.Writer) error) *cobra.Command {
	var opts bench.Options
	cmd := &cobra.Command{
		Use: name + " [flags]", Short: short,
		Long:    short + ".\n\nA daemon of its own is started on a data directory that is removed afterwards; --url measures a server of this machine that runs.\nWith --json each row is an object.",
		Example: "  warren bench " + name + "\n  warren bench " + name + " --rounds 50",
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			// What was started is ended and removed also when it is broken off.
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			if opts.Program, err = os.Executable(); err != nil {
				return err
			}
			if a.url != "" {
				if opts.Client, err = a.client(ctx); err != nil {
					return err
				}
				defer opts.Client.Close()
			}
			if !a.json {
				return measure(ctx, opts, a.out)
			}
			var failed error
			opts.Record = func(r bench.Row) {
				if err := a.printJSON(r); failed == nil {
					failed = err
				}
			}
			if err := measure(ctx, opts, io.Discard); err != nil {
				return err
			}
			return failed
		},
	}
	cmd.Flags().IntVar(&opts.Rounds, "rounds", 0, "how often each way is measured (default 20)")
	cmd.Flags().BoolVar(&opts.Quick, "quick", false, "a fraction of the work in each round: to see that all of it works, not for figures")
	cmd.Flags().StringVar(&opts.Image, "image", "", "image to start from (default the server's)")
	if name == "start" {
		cmd.Flags().IntSliceVar(&opts.Idle, "idle", nil, "numbers of idle sandboxes at which memory is measured (default 1,50,100)")
	}
	if name == "state" {
		cmd.Example += "\n  warren bench state --loads agent,python --forks 1,10 --rounds 4"
		cmd.Flags().StringSliceVar(&opts.Loads, "loads", nil, "what the sandboxes hold (default "+strings.Join(bench.Loads(), ",")+")")
		cmd.Flags().IntSliceVar(&opts.Forks, "forks", nil, "numbers of children (default 1,3,10)")
	}
	return cmd
}
