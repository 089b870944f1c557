package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func psCommand(a *app) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "ps ID [flags]",
		Short: "List the commands that were started in a sandbox",
		Example: `  warren ps fix
  warren ps fix --all                                also those that ended lately
  warren exec fix -- ps aux                          every process`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			list, err := c.Ref(args[0]).Processes(cmd.Context(), all)
			if err != nil {
				return err
			}
			var rows [][]string
			for _, p := range list {
				switch {
				case a.json:
					if err := a.printJSON(p); err != nil {
						return err
					}
				case a.quiet:
					fmt.Fprintln(a.out, p.PID)
				default:
					rows = append(rows, processRow(p))
				}
			}
			if a.json || a.quiet {
				return nil
			}
			return a.table([]string{"PID", "TAG", "USER", "STATE", "AGE", "OUTPUT", "COMMAND"}, rows)
		},
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also those that ended lately")
	return cmd
}

func processRow(p warren.ProcessInfo) []string {
	state := "running"
	if !p.Running {
		state = p.Status
	}
	tag := p.Tag
	if strings.HasPrefix(tag, "cmd-") {
		tag = "" // one that the SDK made up
	}
	return []string{fmt.Sprint(p.PID), tag, p.User, state, ago(p.Started), bytesOf(p.Seq), strings.Join(append([]string{p.Path}, p.Args...), " ")}
}
