package main

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func snapshotCommand(a *app) *cobra.Command {
	var o warren.SnapshotOptions
	cmd := &cobra.Command{
		Use:   "snapshot [flags] ID",
		Short: "Keep this instant of a sandbox; list, inspect, remove such instants",
		Long: `Keep one instant of a sandbox: memory, processes, open files, root and workspace. The sandbox runs on; one that is paused
can be kept too. warren rollback takes it back there, warren create --snapshot makes another that goes on from there.

Each snapshot is whole by itself, and shares on disk what has not changed: removing one harms no other. Where the driver
cannot keep memory, or with --files-only, it has the files alone, and what is made of it starts cold.`,
		Example: `  warren snapshot fix                                prints the snapshot's id
  warren snapshot --name before-upgrade fix
  warren rollback fix before-upgrade
  warren create --snapshot before-upgrade
  warren snapshot ls --size
  warren snapshot rm before-upgrade`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			o.Progress = a.progressNotes()
			p, err := c.Ref(args[0]).Snapshot(cmd.Context(), o)
			if err != nil {
				return err
			}
			a.progress.clear()
			if a.json {
				return a.printJSON(p)
			}
			_, err = fmt.Fprintln(a.out, p.ID)
			return err
		},
	}
	cmd.Flags().StringVar(&o.Name, "name", "", "name of the snapshot, unique among yours")
	cmd.Flags().BoolVar(&o.FilesOnly, "files-only", false, "leave the memory out: root and workspace, for a cold start; of a sandbox that runs")
	cmd.AddCommand(snapshotListCommand(a), snapshotInspectCommand(a), snapshotRemoveCommand(a))
	return cmd
}

// progressNotes shows progress, and says on the error output what a caller should know, such as that memory is left out.
func (a *app) progressNotes() func(warren.Progress) {
	return func(p warren.Progress) {
		if strings.HasSuffix(p.Step, "files only") {
			a.progress.clear()
			fmt.Fprintln(a.err, a.errorStyle("warren:"), escape(p.Message))
			return
		}
		a.showProgress(p)
	}
}

func snapshotListCommand(a *app) *cobra.Command {
	var o warren.SnapshotListOptions
	cmd := &cobra.Command{
		Use: "ls [flags]", Aliases: []string{"list"}, Short: "List snapshots",
		Example: `  warren snapshot ls
  warren snapshot ls --of fix --size`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			head := []string{"ID", "NAME", "SANDBOX", "AFTER", "KIND", "MEMORY", "FILES", "AGE"}
			if o.Size {
				head = slices.Insert(head, 7, "SHARED")
			}
			return list(a, cmd, head, func(c *warren.Client) iter.Seq2[*warren.Snapshot, error] {
				return c.Snapshots(cmd.Context(), o)
			}, func(p *warren.Snapshot) (string, []string) {
				row := []string{short(string(p.ID)), p.Name, sandboxName(p), short(string(p.Parent)), string(p.Kind), bytesOf(p.Memory), bytesOf(p.Files), ago(p.Created)}
				if o.Size {
					row = slices.Insert(row, 7, bytesOf(p.Shared))
				}
				return string(p.ID), row
			})
		},
	}
	cmd.Flags().StringVar(&o.Sandbox, "of", "", "only those of this sandbox")
	cmd.Flags().BoolVar(&o.Size, "size", false, "measure memory and files of each, and how much of both it shares with other snapshots")
	return cmd
}

func sandboxName(p *warren.Snapshot) string {
	if p.SandboxName != "" {
		return p.SandboxName
	}
	return short(string(p.Sandbox))
}

func snapshotInspectCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "inspect ID", Short: "Show all about a snapshot",
		Example: `  warren snapshot inspect before-upgrade`,
		Args:    exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			p, err := c.Snapshot(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(p)
			}
			return a.fields(
				"ID", string(p.ID), "Name", p.Name, "Kind", string(p.Kind), "Sandbox", string(p.Sandbox), "Sandbox name", p.SandboxName, "After", string(p.Parent),
				"Driver", p.Driver, "Image", p.Image, "Digest", p.ImageDigest, "Memory", bytesOf(p.Memory), "Files", bytesOf(p.Files),
				"Shared", bytesOf(p.Shared), "Owner", p.Owner, "Created", rfc3339(p.Created),
			)
		},
	}
}

func snapshotRemoveCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "rm ID...", Aliases: []string{"remove"}, Short: "Remove snapshots",
		Long:    "Remove snapshots. Other snapshots, and sandboxes that were made of them, stay as they are.",
		Example: `  warren snapshot rm before-upgrade`,
		Args:    atLeastOne("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			return a.each(cmd.Context(), args, func(ctx context.Context, id string) error {
				return c.DeleteSnapshot(ctx, id, warren.DeleteOptions{})
			})
		},
	}
}

func rollbackCommand(a *app) *cobra.Command {
	force := false
	cmd := &cobra.Command{
		Use:   "rollback [flags] ID SNAPSHOT",
		Short: "Take a sandbox back to a snapshot",
		Long: `Take a sandbox back to a snapshot: memory, processes, root and workspace. It keeps its id, name and settings; processes of
then are found again. What happened since is lost, but for commits. A sandbox that is paused or has failed can be
taken back too. To a snapshot that has files alone it starts cold, and a line on the error output says so.

A snapshot of another sandbox, of which neither came from the other, needs --force: it is not a past of this one.`,
		Example: `  warren rollback fix before-upgrade
  warren rollback --force fix snapshot-of-another`,
		Args: exactly("ID", "SNAPSHOT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			sb := c.Ref(args[0])
			if !force {
				if err := related(cmd.Context(), c, args[0], args[1]); err != nil {
					return err
				}
			}
			if err := sb.Rollback(cmd.Context(), args[1]); err != nil {
				return err
			}
			if p, err := c.Snapshot(cmd.Context(), string(sb.LastSnapshot)); err != nil {
				fmt.Fprintln(a.err, a.errorStyle("warren:"), "rolled back; whether with memory is not known:", describe(err))
			} else if p.Kind == warren.SnapshotFiles {
				fmt.Fprintln(a.err, a.errorStyle("warren:"), "snapshot", escape(args[1]), "has files alone: files only, started cold")
			}
			if a.json {
				return a.printJSON(sb)
			}
			_, err = fmt.Fprintln(a.out, sb.ID)
			return err
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "also to a snapshot of an unrelated sandbox")
	return cmd
}

// related refuses a snapshot of a sandbox that has nothing to do with another. What cannot be found out here the rollback says.
func related(ctx context.Context, c *warren.Client, sandbox, snapshot string) error {
	sb, err := c.Sandbox(ctx, sandbox)
	if err != nil {
		return nil // the rollback says it better
	}
	snaps := map[warren.SnapshotID]*warren.Snapshot{}
	var to *warren.Snapshot
	for p, err := range c.Snapshots(ctx, warren.SnapshotListOptions{PageSize: 1000}) {
		if err != nil {
			return err
		}
		if snaps[p.ID] = p; string(p.ID) == snapshot || p.Name == snapshot {
			to = p
		}
	}
	if to == nil { // a prefix
		if to, err = c.Snapshot(ctx, snapshot); err != nil {
			return nil // the rollback says it better
		}
	}
	if to.Sandbox == sb.ID {
		return nil
	}
	// It comes from there, whether or not the sandboxes in between are still there, or both come from one.
	past := func(id warren.SnapshotID) map[warren.SnapshotID]bool {
		line := map[warren.SnapshotID]bool{}
		for p := snaps[id]; p != nil && !line[p.ID]; p = snaps[p.Parent] {
			line[p.ID] = true
		}
		return line
	}
	mine := past(sb.LastSnapshot)
	for id := range past(to.ID) {
		if mine[id] {
			return nil
		}
	}
	// Forks of one another, or of one source.
	line := func(id warren.SandboxID) map[warren.SandboxID]bool {
		seen := map[warren.SandboxID]bool{}
		for id != "" && !seen[id] {
			seen[id] = true
			s, err := c.Sandbox(ctx, string(id))
			if err != nil {
				break
			}
			id = s.Source
		}
		return seen
	}
	own := line(sb.ID)
	for id := range line(to.Sandbox) {
		if own[id] {
			return nil
		}
	}
	return fmt.Errorf("snapshot %s is of sandbox %s, which has nothing to do with %s: all that is in %s would be lost for what was in another; "+
		"`warren create --snapshot %s` makes a sandbox of its own of it, --force takes this one there: %w",
		snapshot, sandboxName(to), sandbox, sandbox, snapshot, warren.ErrDenied)
}

func forkCommand(a *app) *cobra.Command {
	var o warren.ForkOptions
	var env, labels []string
	cmd := &cobra.Command{
		Use:   "fork [flags] ID",
		Short: "Make sandboxes that go on from where a running one is",
		Long: `Make sandboxes that go on from where a running one is, which runs on: same memory, processes, open files, root and
workspace, each from then on by itself. Each child has an id, a host name, tokens and a workspace of its own;
docs/FORK.md says what continues and what differs. Prints the ids of the children.

Where the driver cannot keep memory, the children start cold on copies of the files, and a line on the error output says so.`,
		Example: `  warren fork fix                                    one child
  warren fork -n 3 --name try fix                    try-1, try-2 and try-3
  warren fork -n 3 --all fix                         three, or none and an error`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if o.Env, err = environment(nil, env); err != nil {
				return err
			}
			if o.Labels, err = pairs("label", labels); err != nil {
				return err
			}
			if o.Count < 1 {
				return &usageError{fmt.Errorf("-n %d: want at least 1", o.Count), cmd.CommandPath()}
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			o.Progress = a.progressNotes()
			f, err := c.Ref(args[0]).Fork(cmd.Context(), o)
			if err != nil {
				return err
			}
			a.progress.clear()
			var failed error
			for _, ch := range f.Children {
				switch {
				case ch.Err != nil:
					if failed != nil {
						fmt.Fprintln(a.err, a.errorStyle("warren:"), describe(failed))
					}
					failed = ch.Err
				case a.json:
					if err := a.printJSON(ch.Sandbox); err != nil {
						return err
					}
				default:
					fmt.Fprintln(a.out, ch.Sandbox.ID)
				}
			}
			return failed
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.IntVarP(&o.Count, "count", "n", 1, "how many children")
	flags.StringVar(&o.Name, "name", "", `name of the child; of several the beginning, which "-1" and so on follow`)
	flags.BoolVar(&o.All, "all", false, "when one child fails, keep none")
	flags.StringArrayVarP(&env, "env", "e", nil, "set a variable of processes that start in the children, as K=V")
	flags.StringArrayVarP(&labels, "label", "l", nil, "label to find the children by, as K=V")
	flags.DurationVar(&o.IdleTimeout, "idle-timeout", 0, "idle timeout of the children, if not the source's")
	flags.DurationVar(&o.TTL, "ttl", 0, "remove the children this long after the fork, or pause them, if not as the source")
	return cmd
}
