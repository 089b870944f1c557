//go:build linux

package keeper

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// TestLoans has a control group in which somebody says for 200 ms that he waits for memory, and a guest that answers then. What is lent is used up
// at once, by and by, or not at all because the processors are busy.
func TestLoans(t *testing.T) {
	const memory = 128 << 20
	limit := int64(memory + memoryHeadroom(memory))
	for _, c := range []struct {
		name  string
		taken func(have int64) int64 // what is in use where this much may be
		err   string
	}{
		{"used up", func(have int64) int64 { return have }, "8 loans are used up"},
		{"but for a large page", func(have int64) int64 { return have - 2<<20 }, "8 loans are used up"},
		{"two of them", func(have int64) int64 { return min(have, limit+2*oomLoan(memory)-oomSlack) }, ""},
		{"nobody ran", func(int64) int64 { return limit }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			file := func(name string) string { return filepath.Join(dir, "memory."+name) }
			write := func(name, content string) {
				t.Helper()
				if err := os.WriteFile(file(name)+".new", []byte(content), 0o600); err != nil {
					t.Error(err)
				}
				if err := os.Rename(file(name)+".new", file(name)); err != nil {
					t.Error(err)
				}
			}
			have := func() int64 {
				b, _ := os.ReadFile(file("limit_in_bytes"))
				n, _ := strconv.ParseInt(string(b), 10, 64)
				return n
			}
			write("limit_in_bytes", fmt.Sprint(limit))
			write("usage_in_bytes", fmt.Sprintln(limit))
			write("oom_control", "oom_kill_disable 1\nunder_oom 1\n")

			k := &Keeper{log: slog.New(slog.DiscardHandler)}
			s := &sandbox{died: make(chan struct{})}
			s.meta.Limits = protocol.Limits{Memory: memory}
			asked := make(chan struct{})
			err := k.relieve(s, &oomGuard{dir: dir}, func(*sandbox) error {
				defer close(asked)
				for end := time.Now().Add(200 * time.Millisecond); time.Now().Before(end); time.Sleep(time.Millisecond) {
					if n := have(); n > 0 { // it is being written otherwise
						write("usage_in_bytes", fmt.Sprintln(c.taken(n)))
					}
				}
				write("oom_control", "oom_kill_disable 1\nunder_oom 0\n")
				write("usage_in_bytes", "1\n")
				return nil
			})
			<-asked // also when it was not waited for
			switch {
			case c.err == "" && err != nil:
				t.Error(err)
			case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)):
				t.Errorf("error %v, want %q", err, c.err)
			case c.err == "" && have() != limit:
				t.Errorf("the limit is %d in the end, want %d", have(), limit)
			}
		})
	}
}
