package main

import (
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
	var follow bool
	cmd := &cobra.Command{
		Use:   "events [ID] [flags]",
		Short: "Print what happened to sandboxes and workspaces",
		Example: `  warren events
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
			for e, err := range c.Events(ctx, opts) {
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
	cmd.Flags().Int64Var(&opts.After, "after", 0, "only those after this number")
	return cmd
}

func (a *app) printEvent(e *warren.Event) error {
	if a.json {
		return a.printJSON(e)
	}
	parts := []string{fmt.Sprint(e.Seq), e.Time.Local().Format("2006-01-02 15:04:05.000"), e.Action}
	for _, s := range []string{string(e.Sandbox), string(e.Workspace), e.Message, labelList(e.Fields)} {
		if s != "" {
			parts = append(parts, s)
		}
	}
	_, err := fmt.Fprintln(a.out, escape(strings.Join(parts, "  ")))
	return err
}
