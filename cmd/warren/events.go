package main

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func eventsCommand(a *app) *cobra.Command {
	var opts warren.EventOptions
	var follow, flows, calls, verify, accept bool
	var since []string
	cmd := &cobra.Command{
		Use:   "events [ID] [flags]",
		Short: "Print what happened to sandboxes and workspaces",
		Long: `Print what happened to sandboxes and workspaces: who did what, and what came of it. With --flows it is what the gateway has recorded
instead: each connection, name and request of sandboxes, the rule that decided on it, and bytes; with --calls each call of the API, who
made it, and what came of it. These two records are chained by hash. --verify reads all of both, or of the one that is named, and names the
first record that was changed or is missing; the exit code is 1 if there is one. The server keeps how far it has seen each record go; who
keeps the number and hash that --verify prints elsewhere gives them back by --since. --accept takes records that are shorter than
they were, or others, as they are from now on.`,
		Example: `  warren events
  warren events fix --flows --follow
  warren events --calls
  warren events --verify
  warren events --verify --calls --since 1200:9f2d4c1be07a5683f1d2c3b4a5968778695a4b3c2d1e0f00112233445566778a
  warren events fix --follow
  warren events --after 1200 --json`,
		Args: atMostOne,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				opts.Sandbox = args[0]
			}
			opts.NoFollow = !follow
			heads, err := recordHeads(since)
			switch {
			case err != nil:
				return err
			case (len(since) > 0 || accept) && !verify:
				return fmt.Errorf("--since and --accept: %w: they go with --verify", warren.ErrInvalid)
			case len(since) > 0 && flows == calls:
				return fmt.Errorf("--since: %w: say by --flows or --calls of which record it is", warren.ErrInvalid)
			case len(since) > 0 && accept:
				return fmt.Errorf("--since and --accept: %w: want one of them", warren.ErrInvalid)
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt)
			defer stop()
			c, err := a.client(ctx)
			if err != nil {
				return err
			}
			defer c.Close()
			if verify {
				return a.verifyRecords(ctx, c, flows || !calls, calls || !flows, accept, heads)
			}
			list := c.Events(ctx, opts)
			switch {
			case flows && calls:
				return fmt.Errorf("--flows and --calls: %w: want one of them", warren.ErrInvalid)
			case flows:
				list = chained(ctx, follow, opts.After, func(after int64) iter.Seq2[*warren.Event, error] { return c.Flows(ctx, opts.Sandbox, after) })
			case calls && opts.Sandbox != "":
				return fmt.Errorf("--calls and %s: %w: the record of calls is of the whole server", opts.Sandbox, warren.ErrInvalid)
			case calls:
				list = chained(ctx, follow, opts.After, func(after int64) iter.Seq2[*warren.Event, error] { return c.Calls(ctx, after) })
			}
			for e, err := range list {
				if err != nil {
					if follow && (ctx.Err() != nil || errors.Is(err, context.Canceled)) {
						return nil
					}
					return err
				}
				if err := a.printEvent(e); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "wait for more")
	cmd.Flags().BoolVar(&flows, "flows", false, "print what the gateway has recorded")
	cmd.Flags().BoolVar(&verify, "verify", false, "compare the chains of hashes of flows and of calls")
	cmd.Flags().StringArrayVar(&since, "since", nil, "with --verify: NUMBER:HASH of a record as --verify has printed it, which has to be there")
	cmd.Flags().BoolVar(&accept, "accept", false, "with --verify: take records that are whole for what is compared with from now on")
	cmd.Flags().BoolVar(&calls, "calls", false, "print the calls of the API")
	cmd.Flags().Int64Var(&opts.After, "after", 0, "only those after this number")
	return cmd
}

// followEvery is how often records are looked for that have come meanwhile.
const followEvery = time.Second

// chained are the records that list has after a number, and with follow those that come until ctx ends.
func chained(ctx context.Context, follow bool, after int64, list func(after int64) iter.Seq2[*warren.Event, error]) iter.Seq2[*warren.Event, error] {
	return func(yield func(*warren.Event, error) bool) {
		for {
			for e, err := range list(after) {
				if err == nil {
					after = e.Seq
				}
				if !yield(e, err) || err != nil {
					return
				}
			}
			if !follow {
				return
			}
			select {
			case <-time.After(followEvery):
			case <-ctx.Done():
				return
			}
		}
	}
}

func (a *app) printEvent(e *warren.Event) error {
	if a.json {
		return a.printJSON(e)
	}
	parts := []string{fmt.Sprint(e.Seq), e.Time.Local().Format("2006-01-02 15:04:05.000"), e.Action}
	if e.Action == "call" || e.Action == "preview" {
		parts = append(parts, cmp.Or(e.Actor, "-"))
	}
	for _, s := range []string{string(e.Sandbox), string(e.Workspace), e.Message, labelList(e.Fields)} {
		if s != "" {
			parts = append(parts, s)
		}
	}
	_, err := fmt.Fprintln(a.out, escape(strings.Join(parts, "  ")))
	return err
}

// recordHeads reads what --since was given.
func recordHeads(texts []string) (heads []warren.RecordHead, err error) {
	for _, s := range texts {
		number, hash, _ := strings.Cut(s, ":")
		seq, err := strconv.ParseInt(number, 10, 64)
		if _, herr := hex.DecodeString(hash); err != nil || seq < 1 || herr != nil || len(hash) != 64 {
			return nil, fmt.Errorf("--since %s: %w: want the number of a record, a colon and its hash of 64 hex digits, as --verify prints them", s, warren.ErrInvalid)
		}
		heads = append(heads, warren.RecordHead{Seq: seq, Hash: strings.ToLower(hash)})
	}
	return heads, nil
}

// verifyRecords has chained records verified, or accepted, and tells the result.
func (a *app) verifyRecords(ctx context.Context, c *warren.Client, flows, calls, accept bool, since []warren.RecordHead) error {
	bad := false
	for _, what := range []struct {
		name   string
		asked  bool
		verify func(context.Context, ...warren.RecordHead) (*warren.FlowReport, error)
		accept func(context.Context) (*warren.FlowReport, error)
	}{{"flows", flows, c.VerifyFlows, c.AcceptFlows}, {"calls", calls, c.VerifyCalls, c.AcceptCalls}} {
		if !what.asked {
			continue
		}
		var r *warren.FlowReport
		var err error
		if accept {
			r, err = what.accept(ctx)
		} else {
			r, err = what.verify(ctx, since...)
		}
		if err != nil {
			return err
		}
		bad = bad || r.Problem != ""
		switch {
		case a.json:
			err = a.printJSON(struct {
				Record string `json:"record"`
				*warren.FlowReport
			}{what.name, r})
		case r.Problem != "":
			_, err = fmt.Fprintf(a.out, "%s: bad: %s; %d records before it are good\n", what.name, escapeLine(r.Problem), r.Records)
		default:
			_, err = fmt.Fprintf(a.out, "%s: good: %d records; the last is %d, hash %s\n", what.name, r.Records, r.Last, r.Hash)
		}
		if err != nil {
			return err
		}
		for _, h := range since {
			// That one itself is known from the first that is kept, which continues it.
			if h.Seq < r.First-1 && r.Problem == "" {
				fmt.Fprintf(a.err, "%s: records before %d are kept no longer, so that --since %d proves nothing\n", what.name, r.First, h.Seq)
			}
		}
	}
	if bad {
		return exitError(1)
	}
	return nil
}
