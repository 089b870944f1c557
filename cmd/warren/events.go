package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func eventsCommand(a *app) *cobra.Command {
	var opts warren.EventOptions
	var follow, flows, calls, verify bool
	cmd := &cobra.Command{
		Use:   "events [ID] [flags]",
		Short: "Print what happened to sandboxes and workspaces",
		Long: `Print what happened to sandboxes and workspaces: who did what, and what came of it. With --flows it is what the gateway has recorded
instead: each connection, name and request of sandboxes, the rule that decided on it, and bytes; with --calls each call of the API, who
made it, and what came of it. These two records are chained by hash, and --verify reads all of both and names the first record that was
changed; the exit code is 1 if there is one.`,
		Example: `  warren events
  warren events fix --flows
  warren events --calls
  warren events --verify
  warren events fix --follow
  warren events --after 1200 --json`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				opts.Sandbox = args[0]
			}
			opts.NoFollow = !follow
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt)
			defer stop()
			c, err := a.client(ctx)
			if err != nil {
				return err
			}
			defer c.Close()
			if verify {
				return a.verifyRecords(ctx, c)
			}
			list := c.Events(ctx, opts)
			switch {
			case (flows || calls) && follow:
				return fmt.Errorf("--flows, --calls and --follow: %w: these records are printed up to now; repeat it with --after", warren.ErrInvalid)
			case flows && calls:
				return fmt.Errorf("--flows and --calls: %w: want one of them", warren.ErrInvalid)
			case flows:
				list = c.Flows(ctx, opts.Sandbox, opts.After)
			case calls && opts.Sandbox != "":
				return fmt.Errorf("--calls and %s: %w: the record of calls is of the whole server", opts.Sandbox, warren.ErrInvalid)
			case calls:
				list = c.Calls(ctx, opts.After)
			}
			for e, err := range list {
				if err != nil {
					if follow && (ctx.Err() != nil || errors.Is(err, context.Canceled)) {
						return nil
					}
					return err
				}
				if err := a.printEvent(e); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "wait for more")
	cmd.Flags().BoolVar(&flows, "flows", false, "print what the gateway has recorded")
	cmd.Flags().BoolVar(&verify, "verify", false, "compare the chains of hashes of flows and of calls")
	cmd.Flags().BoolVar(&calls, "calls", false, "print the calls of the API")
	cmd.Flags().Int64Var(&opts.After, "after", 0, "only those after this number")
	return cmd
}

func (a *app) printEvent(e *warren.Event) error {
	if a.json {
		return a.printJSON(e)
	}
	parts := []string{fmt.Sprint(e.Seq), e.Time.Local().Format("2006-01-02 15:04:05.000"), e.Action}
	if e.Action == "call" || e.Action == "preview" {
		parts = append(parts, cmp.Or(e.Actor, "-"))
	}
	for _, s := range []string{string(e.Sandbox), string(e.Workspace), e.Message, labelList(e.Fields)} {
		if s != "" {
			parts = append(parts, s)
		}
	}
	_, err := fmt.Fprintln(a.out, escape(strings.Join(parts, "  ")))
	return err
}

// verifyRecords has the chained records verified and tells the result.
func (a *app) verifyRecords(ctx context.Context, c *warren.Client) error {
	bad := false
	for _, what := range []struct {
		name   string
		verify func(context.Context) (*warren.FlowReport, error)
	}{{"flows", c.VerifyFlows}, {"calls", c.VerifyCalls}} {
		r, err := what.verify(ctx)
		if err != nil {
			return err
		}
		bad = bad || r.Problem != ""
		switch {
		case a.json:
			err = a.printJSON(struct {
				Record string `json:"record"`
				*warren.FlowReport
			}{what.name, r})
		case r.Problem != "":
			_, err = fmt.Fprintf(a.out, "%s: bad: %s; %d records before it are good\n", what.name, escapeLine(r.Problem), r.Records)
		default:
			_, err = fmt.Fprintf(a.out, "%s: good: %d records; the last is %d, hash %s\n", what.name, r.Records, r.Last, r.Hash)
		}
		if err != nil {
			return err
		}
	}
	if bad {
		return exitError(1)
	}
	return nil
}
