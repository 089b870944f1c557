package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func searchCommand(a *app) *cobra.Command {
	var q warren.Query
	cmd := &cobra.Command{
		Use:   "search ID PATTERN [PATH] [flags]",
		Short: "Find lines in the files of a sandbox",
		Long: `Find lines that match a regular expression (RE2) below a path, by default /workspace, without files that .gitignore
names. Exits with 1 when none matches.`,
		Example: `  warren search fix 'func \w+Error'
  warren search fix TODO --include '*.go' --context 2
  warren search fix --fixed 'a[0]' /workspace/src`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 3 {
				return nil
			}
			return exactly("ID", "PATTERN")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			q.Pattern = args[1]
			if len(args) == 3 {
				q.Path = args[2]
			}
			var summary warren.SearchSummary
			q.Summary = &summary
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			found := false
			for m, err := range c.Ref(args[0]).Search(cmd.Context(), q) {
				if err != nil {
					return err
				}
				found = true
				if err := a.printMatch(m); err != nil {
					return err
				}
			}
			if summary.Truncated {
				a.notice("there are more matches; raise --max")
			}
			if !found {
				return exitError(1)
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.BoolVarP(&q.Fixed, "fixed", "F", false, "the pattern is text, not an expression")
	flags.BoolVarP(&q.IgnoreCase, "ignore-case", "I", false, "capitals do not matter")
	flags.StringArrayVar(&q.Include, "include", nil, `only files like this, such as "*.go"`)
	flags.StringArrayVar(&q.Exclude, "exclude", nil, "no files like this")
	flags.BoolVar(&q.All, "all", false, "also hidden files and those that .gitignore names")
	flags.IntVar(&q.MaxMatches, "max", 0, "at most this many lines (default 1000)")
	flags.IntVarP(&q.Context, "context", "C", 0, "lines around each match")
	flags.StringVarP(&q.User, "user", "u", "", "user to search as")
	return cmd
}

func (a *app) printMatch(m *warren.Match) error {
	if a.json {
		return a.printJSON(m)
	}
	path := escape(m.Path)
	for i, line := range m.Before {
		fmt.Fprintf(a.out, "%s-%d-%s\n", path, m.Line-len(m.Before)+i, escapeLine(line))
	}
	_, err := fmt.Fprintf(a.out, "%s:%d:%s\n", path, m.Line, escapeLine(m.Text))
	for i, line := range m.After {
		_, err = fmt.Fprintf(a.out, "%s-%d-%s\n", path, m.Line+1+i, escapeLine(line))
	}
	return err
}
