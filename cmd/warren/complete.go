package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

// completeTimeout bounds how long a press of the tab key takes.
const completeTimeout = 2 * time.Second

// completable are the verbs whose arguments are sandboxes, and how many of them; 0 means any number.
var completable = map[string]int{
	"exec": 1, "shell": 1, "inspect": 0, "update": 1, "rm": 0, "restart": 0, "logs": 1, "ps": 1, "kill": 1, "stats": 0, "events": 1, "search": 1,
	"port-forward": 1, "preview": 1, "ports": 1, "diff": 1, "commit": 1, "push": 1, "patch": 1, "race": 1,
}

// addCompletion completes names of sandboxes. A shell that asks starts no daemon.
func addCompletion(a *app, root *cobra.Command) {
	for _, cmd := range root.Commands() {
		most, ok := completable[cmd.Name()]
		if !ok {
			continue
		}
		cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if most > 0 && len(args) >= most {
				return nil, cobra.ShellCompDirectiveDefault
			}
			return a.sandboxNames(cmd.Context()), cobra.ShellCompDirectiveNoFileComp
		}
	}
}

// sandboxNames returns the names of sandboxes, or ids of those without.
func (a *app) sandboxNames(ctx context.Context) []string {
	ctx, cancel := context.WithTimeout(ctx, completeTimeout)
	defer cancel()
	a.quiet = true
	if a.remote() == "" {
		if dir, err := a.home(); err != nil || !answers(ctx, dir) {
			return nil
		}
	}
	c, err := a.client(ctx)
	if err != nil {
		return nil
	}
	defer c.Close()
	var names []string
	for sb, err := range c.Sandboxes(ctx, warren.ListOptions{}) {
		if err != nil {
			break
		}
		name := sb.Name
		if name == "" {
			name = short(string(sb.ID))
		}
		names = append(names, escape(name)+"\t"+string(sb.State))
	}
	return names
}
