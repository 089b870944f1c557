package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

// check is one finding of the doctor.
type check = warren.Check

func doctorCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Check the host of sandboxes and say how to mend it",
		Long: `Check what sandboxes need of their host, and say how to mend what is wrong. No daemon is needed, nor started; with WARREN_URL
or --url the server checks its own host. Exits with 1 when a check failed.`,
		Example: `  warren doctor
  warren doctor --json | jq 'select(.status != "ok")'`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			checks, err := a.checks(cmd.Context())
			if err != nil {
				return err
			}
			failed := false
			for _, c := range checks {
				failed = failed || c.Status == "fail"
				if err := a.printCheck(c); err != nil {
					return err
				}
			}
			if failed {
				return exitError(1)
			}
			return nil
		},
	}
}

func (a *app) checks(ctx context.Context) ([]check, error) {
	if a.remote() == "" {
		return a.hostChecks(ctx)
	}
	c, err := a.client(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.Doctor(ctx)
}

func (a *app) printCheck(c check) error {
	if a.json {
		return a.printJSON(c)
	}
	status := fmt.Sprintf("%-4s", c.Status)
	if colours(a.out) {
		status = map[string]string{"ok": "\x1b[32m", "warn": "\x1b[33m", "fail": "\x1b[31m"}[c.Status] + status + "\x1b[0m"
	}
	_, err := fmt.Fprintf(a.out, "%s  %-18s  %s\n", status, escape(c.Name), escape(c.Message))
	if c.Hint != "" && err == nil {
		_, err = fmt.Fprintf(a.out, "      %-18s  -> %s\n", "", escape(c.Hint))
	}
	return err
}
