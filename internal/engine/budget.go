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
// Each file that several snapshots have, of a workspace or of a memory image, counts for one of them: for the first, for a later one counts without what it shares. So the counts of all
// together are what is on the disk. When one goes, what counted for it and is not freed goes over to those that count for less than they have, and what is
// freed beyond that comes off those that count for more than is theirs alone.
func (e *Engine) release(ctx context.Context, p *snapshot) error {
	e.sharing.Lock()
	defer e.sharing.Unlock()
	e.mu.Lock()
	row := p.row
	handed := p.handed || row.State != snapReady // else a crash came after the transaction, or it never counted
	others := e.counting(row.ID)
	e.mu.Unlock()
	row.State = snapDeleting
	var heirs []*store.Snapshot // with what they count for from now on
	var files memoryFiles
	if !handed {
		near := func(q *store.Snapshot) int {
			switch {
			case q.SandboxID == row.SandboxID:
				return 0
			case q.Owner == row.Owner:
				return 1
			}
			return 2
		}
		slices.SortFunc(others, func(a, b *store.Snapshot) int { return cmp.Or(near(a)-near(b), cmp.Compare(a.Num, b.Num)) })
		for _, part := range []share{
			{
				what: "files",
				of:   func(q *store.Snapshot) *int64 { return &q.FilesSize },
				may:  func(q *store.Snapshot) bool { return q.RepoID == row.RepoID },
				usage: func(q *store.Snapshot) (total, shared int64, err error) {
					return e.opts.Workspaces.Usage(ctx, q.FilesID)
				},
			},
			{
				what: "memory",
				of:   func(q *store.Snapshot) *int64 { return &q.MemorySize },
				may:  func(q *store.Snapshot) bool { return shareMemory(&row, q) },
				usage: func(q *store.Snapshot) (total, shared int64, err error) {
					if files == nil {
						if files, err = e.memoryFilesOf(&row, append(others, &row)); err != nil {
							return 0, 0, err
						}
					}
					return memoryUsage(e.memoryDir(q.ID), files.several)
				},
			},
		} {
			more, err := e.handOver(ctx, &row, others, part)
			if err != nil {
				return err
			}
			heirs = append(heirs, more...)
		}
	}
	err := e.store.UpdateFreeing(ctx, func(tx *store.Tx) error {
		for _, q := range heirs {
			if err := tx.UpdateSnapshot(q); err != nil {
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
	for _, now := range append(heirs, &row) {
		if q := e.snaps[now.ID]; q != nil {
			more := now.FilesSize - q.row.FilesSize + now.MemorySize - q.row.MemorySize
			q.row.FilesSize, q.row.MemorySize = now.FilesSize, now.MemorySize
			e.usageOf(q.row.Owner).disk += more // whatever the budget says: it is there
			e.total.disk += more
		}
	}
	p.handed = true
	return err
}

// counting returns copies of the snapshots that count, but for one. The caller holds mu.
func (e *Engine) counting(but warren.SnapshotID) (all []*store.Snapshot) {
	for _, q := range e.snaps {
		if q.row.ID != but && q.row.State == snapReady && !q.row.Transient && !q.handed {
			row := q.row
			all = append(all, &row)
		}
	}
	return all
}

// share is a part of what snapshots count for, which they may have in common.
type share struct {
	what string
	// of is where the record says what a snapshot counts for, and may says which others can have any of it.
	of    func(*store.Snapshot) *int64
	may   func(*store.Snapshot) bool
	usage func(*store.Snapshot) (total, shared int64, err error)
}

// handOver makes one part of what a snapshot counts for, which is about to go, count for those of the others that have it. It returns which these are.
func (e *Engine) handOver(ctx context.Context, row *store.Snapshot, others []*store.Snapshot, part share) (heirs []*store.Snapshot, err error) {
	if !part.may(row) {
		return nil, nil // it has none
	}
	total, shared, err := part.usage(row)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err != nil {
		if !errors.Is(err, warren.ErrNotFound) {
			e.log.Warn("snapshot that is deleted cannot be measured; what others share of it counts no more", "snapshot", row.ID, "part", part.what, "error", err)
		}
		return nil, nil
	}
	stays := *part.of(row) - (total - shared)
	*part.of(row) = total - shared
	for _, q := range others {
		if stays == 0 {
			break
		}
		if !part.may(q) {
			continue
		}
		total, shared, err := part.usage(q)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err != nil {
			continue
		}
		counts := part.of(q)
		more := min(stays, max(total-*counts, 0))
		if stays < 0 {
			more = max(stays, min(total-shared-*counts, 0))
		}
		if more != 0 {
			*counts += more
			heirs = append(heirs, q)
			stays -= more
		}
	}
	return heirs, nil
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
