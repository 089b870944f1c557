package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func updateCommand(a *app) *cobra.Command {
	var name string
	var labels, unlabel []string
	var idle, ttl time.Duration
	var action, ttlAction string
	var keep, autoResume bool
	var network string
	cmd := &cobra.Command{
		Use:   "update ID [flags]",
		Short: "Change the name, labels, limits of time or private network of a sandbox",
		Example: `  warren update 3f2 --name fix
  warren update fix --label job=review --unlabel draft
  warren update fix --idle-timeout 5m                keep it on disk when it is idle for so long
  warren update fix --auto-resume=false              what is paused stays so until warren resume
  warren update fix --network shop                   from now on in this private network; none: in none
  warren update fix --ttl 2h                         two more hours from now; 0 removes the limit`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := pairs("label", labels)
			if err != nil {
				return err
			}
			change := warren.Change{SetLabels: set, RemoveLabels: unlabel}
			flags := cmd.Flags()
			if flags.Changed("name") {
				change.Name = &name
			}
			if flags.Changed("idle-timeout") {
				change.IdleTimeout = &idle
			}
			change.IdleAction, change.TTLAction = warren.IdleAction(action), warren.IdleAction(ttlAction)
			if flags.Changed("auto-resume") {
				change.AutoResume = &autoResume
			}
			if flags.Changed("ttl") {
				change.TTL = &ttl
			}
			if flags.Changed("network") {
				change.PrivateNetwork = &network
			}
			if flags.Changed("keep-workspace") {
				change.KeepWorkspace = &keep
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			sb := c.Ref(args[0])
			if err := sb.Update(cmd.Context(), change); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(sb)
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&name, "name", "", "new name; empty removes it")
	flags.StringArrayVarP(&labels, "label", "l", nil, "set a label, as K=V")
	flags.StringArrayVar(&unlabel, "unlabel", nil, "remove a label")
	flags.DurationVar(&idle, "idle-timeout", 0, "pause when idle for this long; 0 means never")
	choiceVar(flags, &action, "idle-action", `what the idle timeout does: "pause" or "delete"`, "pause", "delete")
	flags.BoolVar(&autoResume, "auto-resume", true, "let the next call resume it when it is paused")
	flags.DurationVar(&ttl, "ttl", 0, "remove this long from now, or pause; 0 means never")
	choiceVar(flags, &ttlAction, "ttl-action", `what the TTL does: "delete" or "pause"`, "pause", "delete")
	flags.StringVar(&network, "network", "", `private network to be in from now on; "none" for none`)
	flags.BoolVar(&keep, "keep-workspace", false, "keep the workspace when the sandbox is removed")
	return cmd
}
