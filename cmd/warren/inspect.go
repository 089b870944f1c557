package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/config"
)

func inspectCommand(a *app) *cobra.Command {
	var timing bool
	cmd := &cobra.Command{
		Use:   "inspect ID... [flags]",
		Short: "Show all about a sandbox",
		Example: `  warren inspect fix
  warren inspect fix --timing                        how long each step of the create took
  warren inspect fix --json | jq .resources`,
		Args: atLeastOne("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			for i, id := range args {
				sb, err := c.Sandbox(cmd.Context(), id)
				if err != nil {
					return err
				}
				if i > 0 && !a.json {
					fmt.Fprintln(a.out)
				}
				switch {
				case a.json:
					err = a.printJSON(sb)
				case timing:
					err = a.printTiming(sb)
				default:
					err = a.printSandbox(sb)
				}
				if err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&timing, "timing", false, "the steps of the create and their times")
	return cmd
}

func (a *app) printSandbox(sb *warren.Sandbox) error {
	failure, expires, pauses, repo, image := "", "", "", "", ""
	if sb.MemoryImage > 0 {
		image = bytesOf(sb.MemoryImage) + " on disk"
	}
	idle, state := "", string(sb.State)
	if t := sb.Spec.IdleTimeout; t > 0 {
		idle = fmt.Sprintf("%s after %s", sb.Spec.IdleAction, t)
	}
	if sb.PauseReason != "" {
		state += " (" + map[string]string{"asked": "asked for", "idle": "it was idle", "ttl": "its time was over", "memory": "the host's memory ran short"}[sb.PauseReason] + ")"
	}
	resume := ""
	if sb.Spec.NoAutoResume {
		resume = "by warren resume alone"
	}
	if f := sb.Failure; f != nil {
		failure = fmt.Sprintf("%s %s (%s ago)", f.Reason, f.Message, ago(f.Time))
	}
	if !sb.Expires.IsZero() {
		expires = sb.Expires.Local().Format(time.RFC3339)
	}
	if !sb.Pauses.IsZero() {
		pauses = sb.Pauses.Local().Format(time.RFC3339)
	}
	if r := sb.Spec.Repo; r != nil {
		repo = r.URL
		if r.Ref != "" {
			repo += "@" + r.Ref
		}
	}
	if err := a.fields(
		"ID", string(sb.ID), "Name", sb.Name, "State", state, "Failure", failure, "Memory image", image,
		"Image", sb.Image, "Digest", sb.ImageDigest, "Repository", repo, "Workspace", string(sb.Workspace),
		"Snapshot", string(sb.LastSnapshot), "Forked from", string(sb.Source),
		"Driver", sb.Driver, "Isolation", sb.Isolation, "Network", sb.Network, "Private network", sb.PrivateNetwork,
		"Processors", config.CPUs(sb.Resources.CPUMillis).String(), "Memory", bytesOf(sb.Resources.Memory),
		"Disk", bytesOf(sb.Resources.Disk), "Processes", fmt.Sprint(sb.Resources.PIDs),
		"Restart", string(sb.Spec.Restart), "When idle", idle, "Resumed", resume, "Labels", labelList(sb.Spec.Labels), "Owner", sb.Owner,
		"Executions", fmt.Sprint(sb.Generation), "Created", sb.Created.Local().Format(time.RFC3339),
		"Last active", sb.LastActive.Local().Format(time.RFC3339), "Pauses", pauses, "Expires", expires,
	); err != nil {
		return err
	}
	for _, m := range sb.Spec.Mounts {
		mode := "ro"
		if m.Writable {
			mode = "rw"
		}
		fmt.Fprintf(a.out, "Mount  %s:%s:%s\n", escape(m.Source), escape(m.Target), mode)
	}
	return nil
}

func (a *app) printTiming(sb *warren.Sandbox) error {
	rows := make([][]string, len(sb.Timing))
	var total time.Duration
	for i, m := range sb.Timing {
		rows[i] = []string{m.Name, milliseconds(m.Start), milliseconds(m.Duration)}
		total = max(total, m.Start+m.Duration)
	}
	rows = append(rows, []string{"all", milliseconds(0), milliseconds(total)})
	return a.table([]string{"STEP", "BEGAN AT", "TOOK"}, rows)
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.1fms", float64(d.Microseconds())/1000)
}
