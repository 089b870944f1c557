package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/config"
)

func statsCommand(a *app) *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "stats [ID...] [flags]",
		Short: "Show what sandboxes use",
		Long: `Show what sandboxes use: processor time, memory, what was written outside the workspace, and processes ("-" when the guest of a sandbox
does not say).`,
		Example: `  warren stats
  warren stats fix --follow                          every second
  warren stats --json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt)
			defer stop()
			c, err := a.client(ctx)
			if err != nil {
				return err
			}
			defer c.Close()
			for {
				if err := a.printStats(ctx, c, args, follow); err != nil {
					if ctx.Err() != nil {
						return nil
					}
					return err
				}
				if !follow {
					return nil
				}
				select {
				case <-ctx.Done():
					return nil
				case <-time.After(time.Second):
				}
			}
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "again every second")
	return cmd
}

// sandboxStats is a line of stats --json.
type sandboxStats struct {
	ID   warren.SandboxID `json:"id"`
	Name string           `json:"name,omitempty"`
	*warren.Stats
}

func (a *app) printStats(ctx context.Context, c *warren.Client, ids []string, clear bool) error {
	var sandboxes []*warren.Sandbox
	if len(ids) == 0 {
		for sb, err := range c.Sandboxes(ctx, warren.ListOptions{States: []warren.SandboxState{warren.StateRunning}}) {
			if err != nil {
				return err
			}
			sandboxes = append(sandboxes, sb)
		}
	}
	for _, id := range ids {
		sb, err := c.Sandbox(ctx, id)
		if err != nil {
			return err
		}
		sandboxes = append(sandboxes, sb)
	}
	var rows [][]string
	for _, sb := range sandboxes {
		s, err := sb.Stats(ctx)
		if err != nil {
			if len(ids) == 0 {
				continue // one of the list may be gone by now
			}
			return err
		}
		if a.json {
			if err := a.printJSON(sandboxStats{sb.ID, sb.Name, s}); err != nil {
				return err
			}
			continue
		}
		rows = append(rows, []string{
			short(string(sb.ID)), sb.Name, s.CPUTime.Round(time.Millisecond).String(),
			usedOf(s.Memory, s.MemoryLimit), usedOf(s.Disk, s.DiskLimit), countOf(s.PIDs),
		})
	}
	if a.json {
		return nil
	}
	if clear && isTerminal(a.out) {
		fmt.Fprint(a.out, "\x1b[H\x1b[2J")
	}
	return a.table([]string{"ID", "NAME", "CPU TIME", "MEMORY", "DISK", "PIDS"}, rows)
}

// usedOf writes how much of a limit is used; of no limit nothing is said.
func usedOf(n, limit int64) string {
	used := config.Size(n).String()
	if limit == 0 {
		return used
	}
	return used + " / " + config.Size(limit).String()
}

// countOf writes a number that 0 stands in for when it is not known.
func countOf(n uint32) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprint(n)
}
