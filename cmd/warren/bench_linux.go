package main

import (
	"context"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren/internal/bench"
)

func benchCommand(a *app) *cobra.Command {
	return parent("bench", "Measure sandboxes on this machine, beside what else runs here",
		`  warren bench start
  warren bench io`,
		benchPart(a, "start", "Create, first command, round trip, throughput and idle memory", bench.Start),
		benchPart(a, "io", "Work with many files in a sandbox, as a ratio to the same work outside", bench.IO))
}

func benchPart(a *app, name, short string, measure func(context.Context, bench.Options, io.Writer) error) *cobra.Command {
	var opts bench.Options
	cmd := &cobra.Command{
		Use: name + " [flags]", Short: short,
		Long:    short + ".\n\nA daemon of its own is started on a data directory that is removed afterwards; --url measures a server of this machine that runs.",
		Example: "  warren bench " + name + "\n  warren bench " + name + " --rounds 50",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			ctx := cmd.Context()
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
			var report strings.Builder
			if err := measure(ctx, opts, &report); err != nil {
				return err
			}
			return a.printJSON(struct {
				Benchmark string `json:"benchmark"`
				Report    string `json:"report"`
			}{name, report.String()})
		},
	}
	cmd.Flags().IntVar(&opts.Rounds, "rounds", 0, "how often each way is measured (default 20)")
	cmd.Flags().StringVar(&opts.Image, "image", "", "image to start from (default the server's)")
	if name == "start" {
		cmd.Flags().IntSliceVar(&opts.Idle, "idle", nil, "numbers of idle sandboxes at which memory is measured (default 1,50,100)")
	}
	return cmd
}
