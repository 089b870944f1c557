package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func policyCommand(a *app) *cobra.Command {
	return parent("policy", "What sandboxes may reach: list, show, check, test, explain",
		`  warren policy ls
  warren policy check team.yaml
  warren policy why mybox https://example.com/
  warren create --policy locked`,
		policyListCommand(a), policyShowCommand(a), policyCheckCommand(a, "check", true), policyCheckCommand(a, "test", false), policyWhyCommand(a))
}

func policyListCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List policies: presets, and the server's files",
		Long: `List the policies that a sandbox can be given by --policy: the presets, and the files NAME.yaml in the directory "policies" of the
server's data directory. A file that is changed counts at once, also for sandboxes that run, while the
server does (any command starts it). A file that cannot be used lets nothing pass.`,
		Example: `  warren policy ls`,
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return list(a, cmd, []string{"NAME", "KIND", "PROBLEM"}, func(c *warren.Client) iter.Seq2[*warren.Policy, error] {
				return each(c.Policies(cmd.Context()))
			}, func(p *warren.Policy) (string, []string) {
				kind := "file"
				if p.Preset {
					kind = "preset"
				}
				return p.Name, []string{p.Name, kind, p.Problem}
			})
		},
	}
}

func policyShowCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Print a policy",
		Example: `  warren policy show team`,
		Args:    exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			p, err := c.Policy(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(p)
			}
			_, err = io.WriteString(a.out, p.Source)
			return err
		},
	}
}

// policyFile reads a policy from a file, or from the standard input for "-".
func policyFile(a *app, path string) (name, source string, err error) {
	var b []byte
	if path == "-" {
		b, err = io.ReadAll(a.in)
		name = "policy"
	} else {
		b, err = os.ReadFile(path)
		name = strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))
	}
	if errors.Is(err, fs.ErrNotExist) && name == path {
		err = fmt.Errorf("%w; a policy that the server has is shown by warren policy show %s", err, path)
	}
	return name, string(b), err
}

// policyCheckCommand makes the two verbs that read a policy's file: check shows all that is found, test what fails of its tests.
func policyCheckCommand(a *app, verb string, all bool) *cobra.Command {
	cmd := &cobra.Command{
		Use: verb + " FILE", Short: "Run the tests that a policy has",
		Long: `Run the tests that a policy's file has under "tests:", and print those that fail. The exit code is 1 if there are some.`,
		Args: exactly("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, source, err := policyFile(a, args[0])
			if err != nil {
				return err
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			findings, tests, err := c.CheckPolicy(cmd.Context(), name, source)
			if err != nil {
				return err
			}
			if !all && tests == 0 && len(findings) == 0 {
				return fmt.Errorf("%s has no tests; add some under \"tests:\", such as `- deny: GET https://example.com/`: %w", args[0], warren.ErrInvalid)
			}
			if all && !a.json {
				if err := a.describePolicy(cmd.Context(), c, name, source); err != nil {
					return err
				}
			}
			bad, failed := 0, 0
			for _, f := range findings {
				switch f.Severity {
				case "error":
					bad++
				case "failure":
					failed++
				default:
					if !all {
						continue
					}
				}
				if err := a.printFinding(args[0], f); err != nil {
					return err
				}
			}
			if !a.json {
				fmt.Fprintf(a.out, "%s: %d errors, %d of %d tests fail\n", escape(args[0]), bad, failed, tests)
			}
			if bad+failed > 0 {
				return exitError(1)
			}
			return nil
		},
	}
	cmd.Example = "  warren policy " + verb + " team.yaml"
	if all {
		cmd.Short = "Read a policy and say what is wrong or doubtful in it"
		cmd.Long = `Read a policy's file, tell it in words, rule by rule, say what is wrong or doubtful in it, with line, rule and remedy, and run its tests.
FILE may be "-" for the standard input. Nothing is changed. The exit code is 1 if the policy cannot be used or a test fails.`
	}
	return cmd
}

// describePolicy prints a policy in words.
func (a *app) describePolicy(ctx context.Context, c *warren.Client, name, source string) error {
	steps, err := c.DescribePolicy(ctx, name, source)
	if err != nil {
		return err
	}
	for _, s := range steps {
		if _, err := fmt.Fprintf(a.out, "  %s\n", escapeLine(ruleAt(s)+s.Reason)); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) printFinding(file string, f warren.PolicyFinding) error {
	if a.json {
		return a.printJSON(f)
	}
	var b strings.Builder
	b.WriteString(file)
	if f.Line > 0 {
		fmt.Fprintf(&b, ":%d", f.Line)
	}
	b.WriteString(": " + f.Severity + ": ")
	if f.Rule != "" {
		b.WriteString(f.Rule + ": ")
	}
	b.WriteString(f.Message)
	if f.Remedy != "" {
		b.WriteString("; " + f.Remedy)
	}
	_, err := fmt.Fprintln(a.out, escapeLine(b.String()))
	return err
}

func policyWhyCommand(a *app) *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use: "why [flags] ID TARGET", Short: "Say whether a sandbox may reach something, which rule decides, and how",
		Long: `Say whether a sandbox may reach something, and go through the rules of its policy. TARGET is a host (https on 443), a URL, a
method and a URL in one argument, or tcp://HOST:PORT or udp://HOST:PORT. With --policy it is asked of a policy, and ID is left out.
The address of a name is not looked up: it is judged when the sandbox connects, and a private or special one, or one of this machine,
is denied then unless a rule names it (cidr).
The exit code is 1 if it may not.`,
		Example: `  warren policy why mybox example.com
  warren policy why mybox 'POST https://api.example.com/v1/x'
  warren policy why mybox tcp://db.shop.internal:5432          a sandbox of its private network
  warren policy why --policy registries tcp://10.0.0.1:22`,
		Args: func(_ *cobra.Command, args []string) error {
			if want := map[bool]int{true: 1, false: 2}[name != ""]; len(args) != want {
				return errors.New("want ID TARGET, or --policy NAME TARGET")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			var ans *warren.PolicyAnswer
			if name != "" {
				ans, err = c.ExplainPolicy(cmd.Context(), name, args[0])
			} else {
				ans, err = c.ExplainSandbox(cmd.Context(), args[0], args[1])
			}
			if err != nil {
				return err
			}
			if err := a.printAnswer(ans); err != nil {
				return err
			}
			if !ans.Allow {
				return exitError(1)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&name, "policy", "", "ask this policy instead of a sandbox's")
	return cmd
}

// ruleAt is what stands before what is said of a rule.
func ruleAt(s warren.PolicyStep) string {
	at := ""
	if s.Line > 0 {
		at = fmt.Sprintf(" (line %d)", s.Line)
	}
	if s.Rule != "" {
		at = s.Rule + at + ": "
	}
	return at
}

func (a *app) printAnswer(ans *warren.PolicyAnswer) error {
	if a.json {
		return a.printJSON(ans)
	}
	for _, s := range ans.Steps {
		mark := " "
		if s.Matched {
			mark = "*"
		}
		if _, err := fmt.Fprintf(a.out, "%s %s\n", mark, escapeLine(ruleAt(s)+s.Reason)); err != nil {
			return err
		}
	}
	word := "denied"
	if ans.Allow {
		word = "allowed"
	}
	_, err := fmt.Fprintf(a.out, "%s by %s: %s\n", word, escapeLine(ans.Policy+" "+ans.Rule), escapeLine(ans.Reason))
	return err
}
