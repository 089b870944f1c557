package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func logsCommand(a *app) *cobra.Command {
	var follow, raw bool
	var from int64
	cmd := &cobra.Command{
		Use:   "logs ID [PID|TAG] [flags]",
		Short: "Print the output of a command, also of one that has ended",
		Long: `Print the kept output of a command that was started in a sandbox, by default of the last one. Terminal sequences are
left out unless --raw is given. "warren ps ID --all" lists commands.`,
		Example: `  warren logs fix
  warren logs fix 17 --follow
  warren logs fix server --from 4096                 from this byte of output on`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 2 {
				return nil
			}
			return exactly("ID")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt)
			defer stop()
			c, err := a.client(ctx)
			if err != nil {
				return err
			}
			defer c.Close()
			sb := c.Ref(args[0])
			opts := warren.AttachOptions{From: from, NoFollow: !follow, Stdout: a.logWriter(raw, a.out, "stdout"), Stderr: a.logWriter(raw, a.err, "stderr"), RolledBack: a.rolledBack(false)}
			if len(args) == 2 {
				opts.PID, opts.Tag = pidOrTag(args[1])
			} else if opts.PID, err = lastProcess(ctx, sb); err != nil {
				return err
			}
			log, err := sb.Attach(ctx, opts)
			if err != nil {
				return err
			}
			err = log.Wait()
			if log.ProcessState != nil || ctx.Err() != nil {
				return nil // how the command ended is no failure of this one
			}
			return err
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "wait for more until the command ends")
	cmd.Flags().BoolVar(&raw, "raw", false, "every byte as it was written")
	cmd.Flags().Int64Var(&from, "from", 0, "the byte of output to begin with; -1 means now")
	return cmd
}

func (a *app) logWriter(raw bool, to io.Writer, stream string) io.Writer {
	switch {
	case a.json:
		return &jsonOutput{a: a, stream: stream}
	case raw:
		return to
	}
	return plainOutput(to)
}

// lastProcess returns the command that was started last.
func lastProcess(ctx context.Context, sb *warren.Sandbox) (int, error) {
	list, err := sb.Processes(ctx, true)
	if err != nil {
		return 0, err
	}
	var last *warren.ProcessInfo
	for i, p := range list {
		if last == nil || p.Started.After(last.Started) {
			last = &list[i]
		}
	}
	if last == nil {
		return 0, fmt.Errorf("logs of %s: %w: no command was started in it yet", sb.ID, warren.ErrNotFound)
	}
	return last.PID, nil
}
