//go:build linux

package boot

import (
	"slices"

	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
)

// A program that goes on finds its memory as after its start, with nothing of it mapped, and faults for each piece that it touches. A fault is 100 us, in
// which the program, the sandbox and who maps for both take turns; a guest had a dozen before it could read what it was asked. To map a piece
// is 7 us while no program runs.

// mostMapped is how many pieces are mapped before the programs go on.
const mostMapped = 256

// mapper is a program's memory. MapAhead maps so many pieces at most, with text also those of the program's own text that have to be looked for in its file,
// and returns how many it mapped.
type mapper interface {
	MapAhead(ctx context.Context, most int, text bool) int
}

// mapAhead maps what the programs of a kernel have that is about to go on. The first is the guest, whose text is a file of the host's; to look for that of others may
// take long.
func mapAhead(k *kernel.Kernel) {
	all := k.TaskSet().Root
	tasks := all.Tasks()
	slices.SortFunc(tasks, func(a, b *kernel.Task) int { return int(all.IDOfTask(a)) - int(all.IDOfTask(b)) })
	var programs []mapper
	for _, t := range tasks {
		if m, ok := any(t.MemoryManager()).(mapper); ok && t.MemoryManager() != nil && !slices.Contains(programs, m) {
			programs = append(programs, m)
		}
	}
	if len(tasks) > 0 {
		mapEach(tasks[0].AsyncContext(), programs)
	}
}

func mapEach(ctx context.Context, programs []mapper) {
	left := mostMapped
	for i, m := range programs {
		if left -= m.MapAhead(ctx, left, i == 0); left <= 0 {
			break
		}
	}
}

var _ = mapAhead // whose caller is gVisor's
