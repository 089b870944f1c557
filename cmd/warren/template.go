package main

import (
	"context"
	"fmt"
	"io"
	"iter"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/recipe"
)

func templateCommand(a *app) *cobra.Command {
	return parent("template", "Build templates, which sandboxes are made from with all set up", `  warren template build
  warren create --template app
  warren template ls`,
		templateBuildCommand(a), templateListCommand(a), templateInspectCommand(a), templateRemoveCommand(a))
}

func templateBuildCommand(a *app) *cobra.Command {
	var name string
	var o warren.BuildOptions
	cmd := &cobra.Command{
		Use:   "build [flags] [DIR|FILE]",
		Short: "Build a template from a project's warren.yaml or devcontainer.json",
		Long: `Build a template, or its next version. The project's warren.yaml, else its .devcontainer/devcontainer.json, says what is in
it: image, repository, setup and services. A sandbox is made, the steps of the setup run in it, the services are started, and when all
are ready a snapshot is taken, which warren create --template goes on from: what was installed is there, and the services answer.

What a step made is kept by its content: the next build begins after the last step whose image, commit, variables and steps before
it are the same. The output of the steps is shown as it comes, on the error output. A new version takes the place of the old at one
instant; sandboxes stay as they are. A build that fails leaves the template as it was. README.md has an example of a warren.yaml.`,
		Example: `  warren template build
  warren template build --name app ~/src/app
  warren template build --no-cache app/.devcontainer/devcontainer.json`,
		Args: atMostOne,
		RunE: func(cmd *cobra.Command, args []string) error {
			path := "."
			if len(args) > 0 {
				path = args[0]
			}
			r, err := recipe.Load(path)
			if err != nil {
				return err
			}
			if err := a.templateName(r, name); err != nil {
				return err
			}
			if err := a.templateRepo(r); err != nil {
				return err
			}
			for _, note := range r.Notes {
				a.notice("%s: %s", r.Path, escape(note))
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			o.Output, o.Report, o.Progress = &belowProgress{a, plainOutput(a.err)}, a.buildNotes, a.progressNotes()
			t, err := c.BuildTemplate(ctx, r.Spec, o)
			if err != nil {
				return err
			}
			a.progress.clear()
			if a.json {
				return a.printJSON(t)
			}
			_, err = fmt.Fprintln(a.out, t.Name)
			return err
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "name of the template, if not the recipe's or the directory's")
	cmd.Flags().BoolVar(&o.NoCache, "no-cache", false, "run every step, also those that an earlier build has kept")
	cmd.Flags().BoolVar(&o.Keep, "keep", false, "keep the snapshots of the versions before and of steps that are gone, until a build without this")
	return cmd
}

// interruptible returns a context that ends with the first signal, so that what was begun is undone.
func interruptible(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	signals := forwardedSignals()
	go func() {
		select {
		case <-signals:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, func() { signal.Stop(signals); cancel() }
}

// belowProgress writes output where the line of progress was.
type belowProgress struct {
	a  *app
	to io.Writer
}

func (w *belowProgress) Write(b []byte) (int, error) {
	w.a.progress.clear()
	return w.to.Write(b)
}

// buildNotes tells people the milestones of a build.
func (a *app) buildNotes(e warren.BuildEvent) {
	what := e.What
	if e.Step > 0 {
		what = fmt.Sprintf("step %d/%d", e.Step, e.Steps)
		if _, word, ok := strings.Cut(e.What, "step "); ok {
			what += " " + word
		} else if e.What != "step" {
			what += " " + e.What
		}
	}
	for _, part := range []string{e.Name, e.Message} {
		if part != "" {
			what += ": " + escape(part)
		}
	}
	if e.Took > 0 {
		what += fmt.Sprintf(" (%v)", e.Took.Round(10*time.Millisecond))
	}
	a.notice("%s", what)
}

var notInName = regexp.MustCompile(`[^a-z0-9]+`)

// templateName decides the name: that of the flag, of the recipe, or of the project's directory.
func (a *app) templateName(r *recipe.Recipe, name string) error {
	if name != "" {
		r.Spec.Name = name
	}
	if r.Spec.Name != "" {
		return nil
	}
	dir, err := filepath.Abs(r.Dir)
	if err != nil {
		return err
	}
	base := notInName.ReplaceAllString(strings.ToLower(filepath.Base(dir)), "-")
	if len(base) > 40 {
		base = base[:40]
	}
	if r.Spec.Name = strings.Trim(base, "-"); r.Spec.Name == "" {
		return fmt.Errorf("%s: %w: its directory gives no name for the template; give --name", r.Path, warren.ErrInvalid)
	}
	return nil
}

// templateRepo resolves the repository of a recipe. A path is relative to the recipe.
func (a *app) templateRepo(r *recipe.Recipe) error {
	if r.Repo == "" {
		return nil
	}
	repo := r.Repo
	if strings.HasPrefix(repo, ".") {
		dir, err := filepath.Abs(r.Dir)
		if err != nil {
			return err
		}
		repo = filepath.Join(dir, filepath.FromSlash(repo))
	}
	source, err := parseRepo(repo, a.remote() == "")
	if err != nil {
		return fmt.Errorf("%s: %w", r.Path, err)
	}
	r.Spec.Repo = source
	return nil
}

func templateListCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List templates", Example: "  warren template ls", Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return list(a, cmd, []string{"NAME", "VERSION", "SNAPSHOT", "STANDBY", "BUILT", "AGE"}, func(c *warren.Client) iter.Seq2[*warren.Template, error] {
				return c.Templates(cmd.Context())
			}, func(t *warren.Template) (string, []string) {
				return t.Name, []string{t.Name, fmt.Sprint(t.Version), short(string(t.Snapshot)), fmt.Sprint(t.Standby), ago(t.Updated), ago(t.Created)}
			})
		},
	}
}

func templateInspectCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "inspect NAME", Short: "Show all about a template", Example: "  warren template inspect app", Args: exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			t, err := c.Template(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(t)
			}
			idle := ""
			if t.IdleTimeout > 0 {
				idle = t.IdleTimeout.String()
			}
			standby := fmt.Sprint(t.Standby)
			if t.StandbyNote != "" {
				standby += ": " + t.StandbyNote
			}
			return a.fields("ID", t.ID, "Name", t.Name, "Version", fmt.Sprint(t.Version), "Snapshot", string(t.Snapshot), "Idle timeout", idle, "Standby", standby,
				"Owner", t.Owner, "Created", rfc3339(t.Created), "Built", rfc3339(t.Updated), "Recipe", string(t.Recipe))
		},
	}
}

func templateRemoveCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME...", Aliases: []string{"remove"}, Short: "Remove templates",
		Long:    "Remove templates, with their snapshots and what their builds have kept. Sandboxes that were made of them stay as they are.",
		Example: "  warren template rm app", Args: atLeastOne("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			return a.each(cmd.Context(), args, func(ctx context.Context, name string) error {
				return c.DeleteTemplate(ctx, name, warren.DeleteOptions{})
			})
		},
	}
}
