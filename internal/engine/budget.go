package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/store"
)

// Budget bounds what may be in use at the same time. Zero fields bound nothing. A failed sandbox counts with its disk, a paused
// one also with the memory that it has on disk; processors and memory count while an execution exists.
type Budget struct {
	Sandboxes int
	CPUMillis int64
	Memory    int64
	Disk      int64
}

// Budgets of the users and of all together.
type Budgets struct {
	// PerUser bounds each user that Users does not name.
	PerUser Budget
	Users   map[string]Budget
	Total   Budget
}

func (b *Budgets) of(user string) Budget {
	if x, ok := b.Users[user]; ok {
		return x
	}
	return b.PerUser
}

// usage is what is in use.
type usage struct {
	sandboxes         int
	cpu, memory, disk int64
}

func (u *usage) add(v usage, sign int) {
	u.sandboxes += sign * v.sandboxes
	u.cpu += int64(sign) * v.cpu
	u.memory += int64(sign) * v.memory
	u.disk += int64(sign) * v.disk
}

// cost is what a sandbox counts for, with an execution or without.
func cost(l driver.Limits, executing bool) usage {
	u := usage{sandboxes: 1, disk: l.Disk}
	if executing {
		u.cpu, u.memory = int64(l.CPUMillis), l.Memory
	}
	return u
}

// cost is what sb counts for: for disk also with the memory image of a paused one, whatever the budgets say.
func (sb *sandbox) cost() usage {
	u := cost(sb.limits(), sb.executing())
	u.disk += sb.image
	return u
}

// countImage makes the memory image of a sandbox count with its size. It can put its owner above the budget, which then allows
// nothing more; not to pause would save nothing. The caller holds mu.
func (e *Engine) countImage(sb *sandbox, size int64) {
	if more := size - sb.image; more != 0 && !sb.gone {
		e.usageOf(sb.row.Owner).disk += more
		e.total.disk += more
	}
	sb.image = size
}

// reserve takes more from the budgets, all of it or nothing. The caller holds mu.
func (e *Engine) reserve(user string, more usage) error {
	u := e.usage[user]
	if u == nil {
		u = &usage{}
	}
	if err := within(u, more, e.opts.Budgets.of(user), "per user"); err != nil {
		return err
	}
	err := within(&e.total, more, e.opts.Budgets.Total, "of this server")
	if err != nil {
		// Standbys go for what fits without them, and stay for what would not.
		without := e.total
		without.add(e.standbyUsage(), -1)
		if within(&without, more, e.opts.Budgets.Total, "of this server") != nil {
			return err
		}
	}
	for err != nil && e.yieldStandby() {
		err = within(&e.total, more, e.opts.Budgets.Total, "of this server")
	}
	if err != nil {
		return err
	}
	u.add(more, 1)
	e.total.add(more, 1)
	e.usage[user] = u
	return nil
}

// usageOf returns what a user has in use. The caller holds mu.
func (e *Engine) usageOf(user string) *usage {
	u := e.usage[user]
	if u == nil {
		u = &usage{}
		e.usage[user] = u
	}
	return u
}

// unreserve gives back. The caller holds mu.
func (e *Engine) unreserve(user string, less usage) {
	u := e.usageOf(user) // none, where all that is in use takes nothing
	u.add(less, -1)
	e.total.add(less, -1)
	if *u == (usage{}) {
		delete(e.usage, user)
	}
}

// release writes that a snapshot is being deleted, and makes what stays on the disk of that for which it counted count for others.
//
// Each file that several snapshots have counts for one of them: for the first, for a later one counts without what it shares. So the counts of all
// together are what is on the disk. When one goes, what counted for it and is not freed goes over to those that count for less than they have, and what is
// freed beyond that comes off those that count for more than is theirs alone.
func (e *Engine) release(ctx context.Context, p *snapshot) error {
	e.sharing.Lock()
	defer e.sharing.Unlock()
	e.mu.Lock()
	row := p.row
	handed := p.handed || row.State != snapReady // else a crash came after the transaction, or it never counted
	var others []store.Snapshot
	for _, q := range e.snaps {
		if q != p && q.row.State == snapReady && !q.row.Transient && !q.handed && q.row.RepoID == row.RepoID {
			others = append(others, q.row)
		}
	}
	e.mu.Unlock()
	row.State = snapDeleting
	var heirs []store.Snapshot // with what they count for from now on
	if !handed {
		near := func(q store.Snapshot) int {
			switch {
			case q.SandboxID == row.SandboxID:
				return 0
			case q.Owner == row.Owner:
				return 1
			}
			return 2
		}
		slices.SortFunc(others, func(a, b store.Snapshot) int { return cmp.Or(near(a)-near(b), cmp.Compare(a.Num, b.Num)) })
		total, shared, err := e.opts.Workspaces.Usage(ctx, row.FilesID)
		if err := ctx.Err(); err != nil {
			return err
		}
		if err == nil {
			stays := row.FilesSize - (total - shared)
			row.FilesSize = total - shared
			for _, q := range others {
				if stays == 0 {
					break
				}
				total, shared, err := e.opts.Workspaces.Usage(ctx, q.FilesID)
				if err := ctx.Err(); err != nil {
					return err
				}
				if err != nil {
					continue
				}
				more := min(stays, max(total-q.FilesSize, 0))
				if stays < 0 {
					more = max(stays, min(total-shared-q.FilesSize, 0))
				}
				if more != 0 {
					q.FilesSize += more
					heirs = append(heirs, q)
					stays -= more
				}
			}
		} else if !errors.Is(err, warren.ErrNotFound) {
			e.log.Warn("snapshot that is deleted cannot be measured; what others share of it counts no more", "snapshot", row.ID, "error", err)
		}
	}
	err := e.store.UpdateFreeing(ctx, func(tx *store.Tx) error {
		for i := range heirs {
			if err := tx.UpdateSnapshot(&heirs[i]); err != nil {
				return err
			}
		}
		return tx.UpdateSnapshot(&row)
	})
	if err != nil && !errors.Is(err, warren.ErrExhausted) || handed {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, now := range append(heirs, row) {
		if q := e.snaps[now.ID]; q != nil {
			more := now.FilesSize - q.row.FilesSize
			q.row.FilesSize = now.FilesSize
			e.usageOf(q.row.Owner).disk += more // whatever the budget says: it is there
			e.total.disk += more
		}
	}
	p.handed = true
	return err
}

// BudgetError says which budget is used up. It matches [warren.ErrExhausted].
type BudgetError struct {
	// Resource names the budget with its limit, such as "sandboxes per user (limit 20)".
	Resource string
	message  string
}

// Error names the budget.
func (b *BudgetError) Error() string { return b.message }

// Unwrap returns [warren.ErrExhausted].
func (b *BudgetError) Unwrap() error { return warren.ErrExhausted }

func within(have *usage, more usage, b Budget, whose string) error {
	check := func(what string, have, more, limit int64, show func(int64) string) error {
		if limit == 0 || more == 0 || more <= limit-have {
			return nil
		}
		r := fmt.Sprintf("%s %s (limit %s)", what, whose, show(limit))
		if more > limit {
			return &BudgetError{Resource: r, message: fmt.Sprintf("the request is larger than the budget of %s: %s asked for; ask for less: %v", r, show(more), warren.ErrExhausted)}
		}
		return &BudgetError{Resource: r, message: fmt.Sprintf("the budget of %s is used up: %s in use, %s more asked for; delete a sandbox (`warren rm`) or ask for less: %v",
			r, show(have), show(more), warren.ErrExhausted)}
	}
	count := func(n int64) string { return fmt.Sprint(n) }
	cpus := func(n int64) string { return processors(n) + " CPU" }
	if err := check("sandboxes", int64(have.sandboxes), int64(more.sandboxes), int64(b.Sandboxes), count); err != nil {
		return err
	}
	if err := check("processors", have.cpu, more.cpu, b.CPUMillis, cpus); err != nil {
		return err
	}
	if err := check("memory", have.memory, more.memory, b.Memory, size); err != nil {
		return err
	}
	return check("disk", have.disk, more.disk, b.Disk, size)
}

// processors writes thousandths of a processor for people.
func processors(millis int64) string { return strconv.FormatFloat(float64(millis)/1000, 'f', -1, 64) }

// size writes bytes for people.
func size(n int64) string {
	for _, u := range []struct {
		n    int64
		name string
	}{{1 << 60, "EiB"}, {1 << 50, "PiB"}, {1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.n {
			if n%u.n == 0 {
				return fmt.Sprintf("%d %s", n/u.n, u.name)
			}
			return fmt.Sprintf("%.1f %s", float64(n)/float64(u.n), u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}
