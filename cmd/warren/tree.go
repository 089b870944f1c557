package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func treeCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "tree",
		Short: "Draw sandboxes, forks and snapshots and what came of what",
		Long: `Draw sandboxes, forks and snapshots. Snapshots stand below the sandbox they were taken of, each below the one before it; a fork, and
what was created from a snapshot, below the snapshot that it came after, else below its source. "at" says which snapshot a
sandbox was last taken to, or kept as. What came of something that is gone moves up, and says of what it was.`,
		Example: `  warren tree
  warren tree --json | jq`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			t, err := readTree(cmd.Context(), c)
			if err != nil {
				return err
			}
			if a.json {
				for _, n := range t {
					if err := a.printJSON(n); err != nil {
						return err
					}
				}
				return nil
			}
			for _, n := range t {
				if err := n.draw(a, "", "", true, true); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

// node is a sandbox or a snapshot in the tree.
type node struct {
	ID      string `json:"id"`
	Name    string `json:"name,omitempty"`
	What    string `json:"what"` // "sandbox" or "snapshot"
	State   string `json:"state,omitempty"`
	Kind    string `json:"kind,omitempty"`
	Created string `json:"created"`
	// Source is the sandbox that a sandbox was forked from, or that a snapshot was taken of, and Gone says that it is no more.
	Source string `json:"sourceId,omitempty"`
	Gone   bool   `json:"sourceGone,omitempty"`
	// At is the snapshot at which a sandbox is, but for what it has done since.
	At string `json:"atSnapshotId,omitempty"`

	Children []*node `json:"children,omitempty"`
	at       time.Time
	source   string // what Source is called
	where    string // what At is called
}

func readTree(ctx context.Context, c *warren.Client) ([]*node, error) {
	var snaps []*warren.Snapshot
	for p, err := range c.Snapshots(ctx, warren.SnapshotListOptions{PageSize: 1000}) {
		if err != nil {
			return nil, err
		}
		snaps = append(snaps, p)
	}
	var sandboxes []*warren.Sandbox
	for sb, err := range c.Sandboxes(ctx, warren.ListOptions{PageSize: 1000}) {
		if err != nil {
			return nil, err
		}
		sandboxes = append(sandboxes, sb)
	}
	return growTree(snaps, sandboxes), nil
}

// growTree hangs each on what it came of, see the command's help. Nothing hangs on what is younger, such as a sandbox on the snapshot
// of its own fork that it was rolled back to: so there is no circle, in which nothing would be drawn.
func growTree(snaps []*warren.Snapshot, sandboxes []*warren.Sandbox) []*node {
	byID := map[warren.SnapshotID]*warren.Snapshot{}
	nodes := map[string]*node{}
	var all []*node
	add := func(n *node, at time.Time) *node {
		n.Created, n.at = rfc3339(at), at
		nodes[n.ID] = n
		all = append(all, n)
		return n
	}
	for _, sb := range sandboxes {
		n := add(&node{ID: string(sb.ID), Name: sb.Name, What: "sandbox", State: string(sb.State), Source: string(sb.Source)}, sb.Created)
		n.source = short(n.Source)
	}
	for _, p := range snaps {
		byID[p.ID] = p
		n := add(&node{ID: string(p.ID), Name: p.Name, What: "snapshot", Kind: string(p.Kind), Source: string(p.Sandbox)}, p.Created)
		n.source = sandboxName(p)
	}
	parent := map[*node]*node{}
	hang := func(n *node, id string) {
		if p := nodes[id]; p != nil && parent[n] == nil && p.at.Before(n.at) {
			parent[n] = p
		}
	}
	for _, p := range snaps {
		n := nodes[string(p.ID)]
		if before := byID[p.Parent]; before != nil && before.Sandbox == p.Sandbox {
			hang(n, string(p.Parent))
		}
		hang(n, string(p.Sandbox))
		hang(n, string(p.Parent))
	}
	for _, sb := range sandboxes {
		n := nodes[string(sb.ID)]
		if at := byID[sb.LastSnapshot]; at != nil {
			n.At, n.where = string(at.ID), nodes[string(at.ID)].called()
		}
		// Its own snapshots came after it; what is before them is where it comes from.
		from := byID[sb.LastSnapshot]
		for range snaps {
			if from == nil || from.Sandbox != sb.ID {
				break
			}
			from = byID[from.Parent]
		}
		if from != nil {
			hang(n, string(from.ID))
		}
		hang(n, n.Source)
	}
	var roots []*node
	for _, n := range all {
		if n.Source != "" {
			if s := nodes[n.Source]; s != nil {
				n.source = s.called()
			} else {
				n.Gone = true
			}
		}
		if p := parent[n]; p != nil {
			p.Children = append(p.Children, n)
		} else {
			roots = append(roots, n)
		}
	}
	order := func(a, b *node) int { return a.at.Compare(b.at) }
	for _, n := range all {
		slices.SortStableFunc(n.Children, order)
	}
	slices.SortStableFunc(roots, order)
	return roots
}

// called is the name, or the short id.
func (n *node) called() string {
	if n.Name != "" {
		return n.Name
	}
	return short(n.ID)
}

// text is the node in a line.
func (n *node) text() string {
	label := short(n.ID)
	if n.Name != "" {
		label = n.Name + " " + label
	}
	words := []string{n.State}
	of := "fork of "
	if n.What == "snapshot" {
		words, of = []string{"snapshot", n.Kind}, "of "
	}
	words = append(words, ago(n.at))
	switch {
	case n.Gone:
		words = append(words, of+n.source+", which is gone")
	case n.Source != "" && n.What == "sandbox":
		words = append(words, of+n.source)
	}
	if n.At != "" {
		words = append(words, "at "+n.where)
	}
	return label + "  " + strings.Join(words, ", ")
}

func (n *node) draw(a *app, indent, branch string, last, root bool) error {
	_, err := fmt.Fprintf(a.out, "%s%s%s\n", indent, branch, escape(n.text()))
	next := indent
	if !root {
		next += map[bool]string{true: "   ", false: "│  "}[last]
	}
	for i, ch := range n.Children {
		end := i == len(n.Children)-1
		err = errors.Join(err, ch.draw(a, next, map[bool]string{true: "└─ ", false: "├─ "}[end], end, false))
	}
	return err
}
