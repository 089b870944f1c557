// Command warren gives every coding agent its own computer: it is the command line, and with the verb serve the daemon behind it.
//
// Each verb has a file of its own. Errors go to standard error and say what to do; a failure of Warren's own exits with 125, and run
// and exec otherwise exit as the command in the sandbox did.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// exitFailure is the exit code of Warren's own failures, which commands rarely use themselves.
const exitFailure = 125

func main() {
	keepBrokenPipes()
	os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run runs one command line and returns its exit code.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := newApp(stdin, stdout, stderr)
	root := newRoot(a)
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	// Cobra shows help without looking at words that name no command, and calls that a success.
	var unknown error
	help := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		if words := cmd.Flags().Args(); cmd.HasSubCommands() && len(words) > 0 {
			unknown = unknownCommand(cmd, words[0])
			return
		}
		help(cmd, args)
	})
	err := root.ExecuteContext(ctx)
	if err == nil {
		err = unknown
	}
	a.progress.clear()
	var exit exitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return int(exit)
	case brokenPipe(err):
		return 128 + 13 // whoever read the output, such as head, has seen enough
	}
	fmt.Fprintln(stderr, a.errorStyle("warren:"), describe(err))
	return exitFailure
}

// exitError ends the program with this code and without a message: whoever returns it has said what there was to say.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// usageError is a command line that cannot be right.
type usageError struct {
	err     error
	command string
}

func (e *usageError) Error() string {
	return fmt.Sprintf("%v; see %s --help", e.err, e.command)
}

func (e *usageError) Unwrap() error { return e.err }

// flagError says what a flag takes where the standard library would tell which of its functions refused.
func flagError(err error) error {
	var bad *pflag.InvalidValueError
	if !errors.As(err, &bad) {
		return err
	}
	var want string
	switch kind := bad.GetFlag().Value.Type(); kind {
	case "bool":
		want = "true or false"
	case "duration":
		want = "a time with its unit, such as 90s or 2h"
	case "int", "int32", "int64", "uint16", "uint32", "uint64", "intSlice":
		want = "a whole number"
		if errors.Is(bad, strconv.ErrRange) {
			want += " that is not so large"
		}
	default:
		return err
	}
	return fmt.Errorf("invalid argument %.100q for --%s: want %s", bad.GetValue(), bad.GetFlag().Name, want)
}

func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "warren",
		Short: "Every coding agent gets its own computer",
		Long: `Warren runs commands in sandboxes, each with a kernel, files and a network of its own.

The files in /workspace and /home/user of a sandbox are on the host at once and outlive it;
everything else in a sandbox can be thrown away. With no daemon running, a verb starts one.
An ID may be a name or any unique beginning of an id.`,
		Example: `  warren run -- echo hello                          a command in a new sandbox
  warren run -it --repo . --keep --name fix -- bash a shell in a copy of this repository
  warren exec fix -- go test ./...                  another command in the same sandbox
  warren diff fix                                   what changed, as a patch
  warren commit fix -m "fix the parser"             ... as a commit on a branch of the cached repository
  warren rm fix                                     remove the sandbox`,
		SilenceErrors: true,

		SuggestionsMinimumDistance: 2,
		SilenceUsage:               true,
		CompletionOptions:          cobra.CompletionOptions{DisableDefaultCmd: true},
		Args:                       cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return unknownCommand(cmd, args[0])
		},
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return &usageError{flagError(err), cmd.CommandPath()}
	})
	flags := root.PersistentFlags()
	flags.BoolVar(&a.json, "json", false, "print JSON, one object a line")
	flags.BoolVarP(&a.quiet, "quiet", "q", false, "no progress and no notices")
	flags.StringVar(&a.url, "url", "", "server to talk to, such as https://host:7420 (WARREN_URL); token in WARREN_TOKEN")
	flags.StringVar(&a.dataDir, "data", "", "data directory (WARREN_HOME)")
	root.AddGroup(
		&cobra.Group{ID: groupSandbox, Title: "Sandboxes:"},
		&cobra.Group{ID: groupResult, Title: "Results:"},
		&cobra.Group{ID: groupDurable, Title: "Images, templates, repositories and workspaces:"},
		&cobra.Group{ID: groupSystem, Title: "System:"},
	)
	for _, group := range []struct {
		id    string
		verbs []func(*app) *cobra.Command
	}{
		{groupSandbox, []func(*app) *cobra.Command{
			runCommand, createCommand, execCommand, shellCommand, lsCommand, inspectCommand, updateCommand, rmCommand, restartCommand, pauseCommand, resumeCommand,
			snapshotCommand, rollbackCommand, forkCommand, raceCommand, treeCommand, cpCommand,
			logsCommand, psCommand, killCommand, statsCommand, eventsCommand, searchCommand, portsCommand, previewCommand, portForwardCommand,
		}},
		{groupResult, []func(*app) *cobra.Command{diffCommand, commitCommand, pushCommand, patchCommand}},
		{groupDurable, []func(*app) *cobra.Command{imageCommand, templateCommand, policyCommand, secretCommand, repoCommand, workspaceCommand}},
		{groupSystem, []func(*app) *cobra.Command{
			serveCommand, shutdownCommand, doctorCommand, tokenCommand, benchCommand, versionCommand, completionCommand,
		}},
	} {
		for _, verb := range group.verbs {
			cmd := verb(a)
			cmd.GroupID = group.id
			root.AddCommand(cmd)
		}
	}
	root.SetHelpCommand(helpCommand(root))
	wrapArgs(root)
	addCompletion(a, root)
	return root
}

const (
	groupSandbox = "sandbox"
	groupResult  = "result"
	groupDurable = "durable"
	groupSystem  = "system"
)

// wrapArgs makes every complaint about arguments say where to read on.
func wrapArgs(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return &usageError{err, cmd.CommandPath()}
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		wrapArgs(sub)
	}
}

// unknownCommand says that a command has none of that name, and which comes near.
func unknownCommand(cmd *cobra.Command, name string) error {
	msg := fmt.Sprintf("unknown command %q", name)
	if near := cmd.SuggestionsFor(name); len(near) > 0 {
		msg += fmt.Sprintf("; did you mean %q?", near[0])
	}
	return &usageError{errors.New(msg), cmd.CommandPath()}
}

// helpCommand is `warren help COMMAND`, which is `warren COMMAND --help`.
func helpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND...]", Short: "Show the help of a command", Example: "  warren help run\n  warren help image pull",
		RunE: func(_ *cobra.Command, args []string) error {
			cmd, rest, err := root.Find(args)
			if err != nil {
				return &usageError{err, root.CommandPath()}
			}
			if len(rest) > 0 {
				return unknownCommand(cmd, rest[0])
			}
			cmd.InitDefaultHelpFlag()
			return cmd.Help()
		},
	}
}

// parent makes a command that only holds others.
func parent(use, short, example string, subs ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short, Example: example,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return unknownCommand(cmd, args[0])
		},
	}
	cmd.AddCommand(subs...)
	return cmd
}
