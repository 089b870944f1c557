package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/config"
)

func lsCommand(a *app) *cobra.Command {
	var labels, states []string
	var full bool
	cmd := &cobra.Command{
		Use:     "ls [flags]",
		Aliases: []string{"list"},
		Short:   "List sandboxes",
		Example: `  warren ls
  warren ls --label job=nightly --state failed
  warren ls -q                                       ids only
  warren ls --json | jq -r .name`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts := warren.ListOptions{}
			var err error
			if opts.Labels, err = pairs("label", labels); err != nil {
				return err
			}
			for _, s := range states {
				opts.States = append(opts.States, warren.SandboxState(s))
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			var rows [][]string
			for sb, err := range c.Sandboxes(cmd.Context(), opts) {
				if err != nil {
					return err
				}
				switch {
				case a.json:
					if err := a.printJSON(sb); err != nil {
						return err
					}
				case a.quiet:
					fmt.Fprintln(a.out, sb.ID)
				default:
					rows = append(rows, sandboxRow(sb, full))
				}
			}
			if a.json || a.quiet {
				return nil
			}
			return a.table([]string{"ID", "NAME", "STATE", "IMAGE", "WORKSPACE", "CPU", "MEMORY", "AGE", "POLICY", "NETWORK", "LABELS"}, rows)
		},
	}
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "only those with this label, as K=V")
	cmd.Flags().StringArrayVar(&states, "state", nil, "only creating, running, pausing, paused, resuming, failed or deleting")
	cmd.Flags().BoolVar(&full, "full", false, "whole ids")
	return cmd
}

func sandboxRow(sb *warren.Sandbox, full bool) []string {
	state := string(sb.State)
	if sb.Failure != nil {
		state += " (" + sb.Failure.Reason + ")"
	}
	if sb.MemoryImage > 0 {
		state += " (" + bytesOf(sb.MemoryImage) + ")"
	}
	id, workspace := string(sb.ID), string(sb.Workspace)
	if !full {
		id, workspace = short(id), short(workspace)
	}
	return []string{
		id, sb.Name, state, sb.Image, workspace,
		config.CPUs(sb.Resources.CPUMillis).String(), bytesOf(sb.Resources.Memory), ago(sb.Created), sb.Network, sb.PrivateNetwork, labelList(sb.Spec.Labels),
	}
}

// short cuts an id to a length that is unique in practice.
func short(id string) string {
	if len(id) > 12 {
		return id[:12]
	}
	return id
}

func labelList(labels map[string]string) string {
	var out []string
	for _, k := range sortedKeys(labels) {
		out = append(out, k+"="+labels[k])
	}
	return strings.Join(out, ",")
}
