package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func killCommand(a *app) *cobra.Command {
	var name string
	var group bool
	cmd := &cobra.Command{
		Use:   "kill ID PID... [flags]",
		Short: "Send a signal to processes in a sandbox",
		Example: `  warren kill fix 17
  warren kill fix 17 --signal HUP
  warren kill fix 17 --signal KILL --group           it and all that it started`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 2 {
				return exactly("ID", "PID")(cmd, args)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			sig, err := parseSignal(name)
			if err != nil {
				return err
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			sb := c.Ref(args[0])
			return a.each(cmd.Context(), args[1:], func(ctx context.Context, arg string) error {
				pid, err := strconv.ParseUint(arg, 10, 31)
				if err != nil || pid == 0 {
					return fmt.Errorf("process %q: %w: want a number, as `warren ps` shows", arg, warren.ErrInvalid)
				}
				p := sb.FindProcess(int(pid))
				if group {
					err = p.SignalGroup(ctx, sig)
				} else {
					err = p.Signal(ctx, sig)
				}
				if err != nil {
					return fmt.Errorf("process %d: %w", pid, err)
				}
				return nil
			})
		},
	}
	cmd.Flags().StringVarP(&name, "signal", "s", "TERM", "signal, by name or number")
	cmd.Flags().BoolVar(&group, "group", false, "also the processes that it started")
	return cmd
}

// signalNumbers are the numbers of signals in a sandbox, which runs Linux whatever this program runs on.
var signalNumbers = map[string]int{
	"HUP": 1, "INT": 2, "QUIT": 3, "ILL": 4, "TRAP": 5, "ABRT": 6, "BUS": 7, "FPE": 8, "KILL": 9, "USR1": 10, "SEGV": 11, "USR2": 12,
	"PIPE": 13, "ALRM": 14, "TERM": 15, "CHLD": 17, "CONT": 18, "STOP": 19, "TSTP": 20, "TTIN": 21, "TTOU": 22, "WINCH": 28,
}

func parseSignal(s string) (syscall.Signal, error) {
	if n, err := strconv.Atoi(s); err == nil && n > 0 && n <= 64 {
		return syscall.Signal(n), nil
	}
	if n, ok := signalNumbers[strings.TrimPrefix(strings.ToUpper(s), "SIG")]; ok {
		return syscall.Signal(n), nil
	}
	return 0, fmt.Errorf("signal %q: %w: want a name such as TERM or a number", s, warren.ErrInvalid)
}

// pidOrTag tells the id of a process from its tag.
func pidOrTag(s string) (pid int, tag string) {
	if n, err := strconv.ParseUint(s, 10, 31); err == nil && n > 0 {
		return int(n), ""
	}
	return 0, s
}
