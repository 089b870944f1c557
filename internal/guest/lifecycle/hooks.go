package lifecycle

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/guest/small"
)

// HookDir is where the image has its hooks, in the directories fork.d and resume.d.
const HookDir = "/etc/warren/hooks"

// What hooks may take. The sandbox is there for its callers only when they have ended, or their time has.
const (
	hookTime  = 2 * time.Second
	hooksTime = 5 * time.Second
	maxHooks  = 64
	// maxLog bounds the log; the older half goes when it is full.
	maxLog = 256 << 10
	// maxHookOutput bounds what one hook adds to it.
	maxHookOutput = 16 << 10
)

// Hooks runs the programs of the image that want to know of an event.
type Hooks struct {
	// Dir holds fork.d and resume.d.
	Dir string
	// Log is the file that output goes to; empty means none.
	Log string
	// Time and Total bound one hook and all of them; 0 means 2 s and 5 s.
	Time, Total time.Duration
	// Run runs a program as root with its environment and its input, until ctx ends, when it is killed with its group. It returns
	// what the program printed, at most max bytes of it, and how it ended; ok says that it ended well.
	Run func(ctx context.Context, path string, env []string, input []byte, max int) (output []byte, status string, ok bool)
}

// Result is how one hook ended.
type Result struct {
	Hook   string
	OK     bool
	Status string
	Took   time.Duration
}

// For runs the hooks for an event, in the order of their names, and returns how they ended. Nothing that a hook does is an
// error of the sandbox's.
func (h Hooks) For(e Event, entropy []byte) []Result {
	dir := "resume.d"
	switch e.Name {
	case Fork:
		dir = "fork.d"
	case Resume, Rollback:
	default:
		return nil
	}
	each, total := h.Time, h.Total
	if each == 0 {
		each = hookTime
	}
	if total == 0 {
		total = hooksTime
	}
	paths, refused := findHooks(filepath.Join(h.Dir, dir))
	if len(paths)+len(refused) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), total)
	defer cancel()
	results := refused
	var log strings.Builder
	for _, r := range refused {
		logResult(&log, e, r, nil)
	}
	for _, path := range paths {
		r := Result{Hook: filepath.Join(dir, filepath.Base(path))}
		var out []byte
		if ctx.Err() != nil {
			r.Status = fmt.Sprintf("not run: the time for all hooks, %v, is used up", total)
		} else {
			begin := time.Now()
			one, stop := context.WithTimeout(ctx, each)
			env := []string{"WARREN_EVENT=" + e.Name, "WARREN_SANDBOX_ID=" + e.SandboxID, "WARREN_GENERATION=" + e.Generation}
			if e.ParentID != "" {
				env = append(env, "WARREN_PARENT_ID="+e.ParentID)
			}
			out, r.Status, r.OK = h.Run(one, path, env, own(entropy, r.Hook, e.Generation), maxHookOutput)
			if one.Err() != nil && !r.OK {
				r.Status = "killed: it ran longer than " + min(each, total).String()
			}
			stop()
			r.Took = time.Since(begin)
		}
		results = append(results, r)
		logResult(&log, e, r, out)
	}
	appendLog(h.Log, log.String())
	return results
}

// own returns the entropy for one hook: two programs must not get the same.
func own(entropy []byte, hook, generation string) []byte {
	d := sha256.New()
	if len(entropy) == 0 {
		entropy = make([]byte, 32)
		_, _ = rand.Read(entropy) // it never fails
	}
	for _, part := range [][]byte{entropy, []byte(generation), []byte(hook)} {
		_, _ = d.Write(append(part[:len(part):len(part)], 0))
	}
	return d.Sum(nil)
}

// findHooks returns the programs of a directory. What others than root may write is not run as root, and told instead.
func findHooks(dir string) (paths []string, refused []Result) {
	var st unix.Stat_t
	if unix.Stat(dir, &st) != nil {
		return nil, nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil
	}
	me := uint32(os.Geteuid())
	safe := func(st *unix.Stat_t) bool { return (st.Uid == 0 || st.Uid == me) && st.Mode&0o022 == 0 }
	dirSafe := safe(&st)
	for _, e := range entries {
		name := e.Name()
		path := filepath.Join(dir, name)
		// As run-parts does: what an editor or a package manager leaves lying there is no hook.
		if strings.HasPrefix(name, ".") || strings.HasSuffix(name, "~") || unix.Stat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o111 == 0 {
			continue
		}
		switch {
		case !dirSafe || !safe(&st):
			refused = append(refused, Result{Hook: filepath.Join(filepath.Base(dir), name), Status: "not run: others than root may write it or its directory"})
		case len(paths) == maxHooks:
			refused = append(refused, Result{Hook: filepath.Join(filepath.Base(dir), name), Status: fmt.Sprintf("not run: there are more than %d hooks", maxHooks)})
		default:
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	return paths, refused
}

func logResult(b *strings.Builder, e Event, r Result, out []byte) {
	fmt.Fprintf(b, "%s %s %s: %s (%d ms)\n", time.Now().UTC().Format(time.RFC3339), e.Name, r.Hook, r.Status, r.Took.Milliseconds())
	for line := range strings.Lines(string(out)) {
		b.WriteString("  " + strings.TrimRight(line, "\n") + "\n")
	}
}

// appendLog adds to the log and keeps it within its bound.
func appendLog(path, text string) {
	if path == "" || text == "" {
		return
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o644)
	if err != nil {
		return
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size()+int64(len(text)) > maxLog {
		keep := make([]byte, maxLog/2)
		n, err := f.ReadAt(keep, max(st.Size()-int64(len(keep)), 0))
		if err != nil && !errors.Is(err, io.EOF) {
			n = 0
		}
		_ = f.Truncate(0)
		text = string(keep[:n]) + text
	}
	_, _ = f.WriteString(text)
}

// Stir hands entropy to the kernel, where a kernel takes it.
func Stir(entropy []byte) {
	if len(entropy) == 0 {
		return
	}
	_ = small.Write("/dev/urandom", 0, 0, entropy)
}
