package workspace_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/repo"
	"github.com/warren-sandbox/warren/internal/workspace"
)

// manyFiles makes a repository of n files of 3 KB in directories of 50.
func manyFiles(t testing.TB, n int) string {
	dir := t.TempDir()
	runGit(t, dir, "init", "-q")
	r := rand.New(rand.NewPCG(1, 2))
	buf := make([]byte, 3000)
	for i := range n {
		for j := range buf {
			buf[j] = "abcdefghijklmnopqrstuvwxyz     \n"[r.IntN(32)]
		}
		write(t, dir, fmt.Sprintf("d%03d/s%d/f%05d.txt", i/200, i/50%4, i), string(buf))
	}
	runGit(t, dir, "add", "-A")
	runGit(t, dir, "commit", "-q", "-m", "many")
	return dir
}

// bigBlobs makes a repository with about mb megabytes of objects, which do not compress, in a few files.
func bigBlobs(t testing.TB, mb int) string {
	dir := t.TempDir()
	runGit(t, dir, "init", "-q")
	runGit(t, dir, "config", "core.bigFileThreshold", "1m")
	runGit(t, dir, "config", "core.compression", "0")
	var seed [32]byte
	r := rand.NewChaCha8(seed)
	buf := make([]byte, 32<<20)
	write(t, dir, "README", "big history\n")
	for i := 0; i*32 < mb; i++ {
		r.Read(buf)
		must(t, os.WriteFile(filepath.Join(dir, "blob"), buf, 0o644))
		runGit(t, dir, "add", "-A")
		runGit(t, dir, "commit", "-q", "-m", "blob "+strconv.Itoa(i))
	}
	runGit(t, dir, "rm", "-q", "blob")
	runGit(t, dir, "commit", "-q", "-m", "no blob")
	return dir
}

// BenchmarkCut measures what stands between a cached repository of 6,000 files and a workspace, beside stock git.
func BenchmarkCut(b *testing.B) {
	f := newFixture(b)
	src := manyFiles(b, 6000)
	ctx := context.Background()
	r, err := f.repos.Fetch(ctx, src, repo.FetchOptions{})
	must(b, err)
	commit, branch, err := f.repos.ResolveRef(ctx, r.ID, "")
	must(b, err)
	s := workspace.Source{Repo: r, URL: r.URL, Commit: commit, Branch: branch}
	b.Run("Fetch/unchanged", func(b *testing.B) {
		for b.Loop() {
			_, err := f.repos.Fetch(ctx, src, repo.FetchOptions{})
			must(b, err)
		}
	})
	b.Run("ResolveRef", func(b *testing.B) {
		for b.Loop() {
			_, _, err := f.repos.ResolveRef(ctx, r.ID, "main")
			must(b, err)
		}
	})
	n := 0
	next := func() warren.WorkspaceID { n++; return warren.WorkspaceID("b" + strconv.Itoa(n)) }
	var prepared []warren.WorkspaceID
	b.Run("Prepare", func(b *testing.B) {
		for b.Loop() {
			id := next()
			_, err := f.store.Prepare(ctx, id, s)
			must(b, err)
			prepared = append(prepared, id)
		}
	})
	for _, id := range prepared {
		must(b, f.store.Delete(ctx, id))
	}
	b.Run("Populate", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			id := next()
			_, err := f.store.Prepare(ctx, id, s)
			must(b, err)
			b.StartTimer()
			must(b, f.store.Populate(ctx, id))
			b.StopTimer()
			must(b, f.store.Delete(ctx, id))
			b.StartTimer()
		}
	})
	id := next()
	w, err := f.store.Prepare(ctx, id, s)
	must(b, err)
	must(b, f.store.Populate(ctx, id))
	b.Run("Diff/clean", func(b *testing.B) {
		for b.Loop() {
			must(b, f.store.Diff(ctx, id, workspace.DiffOptions{}, discard{}))
		}
	})
	write(b, w.Files, "d000/s0/f00001.txt", "changed\n")
	b.Run("Diff/one_file", func(b *testing.B) {
		for b.Loop() {
			must(b, f.store.Diff(ctx, id, workspace.DiffOptions{}, discard{}))
		}
	})
	b.Run("Commit", func(b *testing.B) {
		i := 0
		for b.Loop() {
			i++
			write(b, w.Files, "d000/s0/f00001.txt", strconv.Itoa(i))
			_, err := f.store.Commit(ctx, id, workspace.CommitOptions{Message: "x"})
			must(b, err)
		}
	})
	b.Run("Copy", func(b *testing.B) {
		for b.Loop() {
			to := next()
			_, err := f.store.Copy(ctx, id, to)
			must(b, err)
			b.StopTimer()
			must(b, f.store.Delete(ctx, to))
			b.StartTimer()
		}
	})
	b.Run("git_clone_--local", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			dir := filepath.Join(b.TempDir(), "c")
			b.StartTimer()
			runGit(b, "/", "clone", "-q", "--local", src, dir)
		}
	})
	b.Run("git_worktree_add", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			dir := filepath.Join(b.TempDir(), "c")
			b.StartTimer()
			runGit(b, src, "worktree", "add", "-q", "--detach", dir)
		}
	})
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// TestNoSecondGigabyte cuts a workspace from a repository of many megabytes: before checkout it costs milliseconds and
// a few kilobytes. WARREN_TEST_BIG=1024 makes it a gigabyte.
func TestNoSecondGigabyte(t *testing.T) {
	mb := 32
	if v, err := strconv.Atoi(os.Getenv("WARREN_TEST_BIG")); err == nil {
		mb = v
	}
	f := newFixture(t)
	src := bigBlobs(t, mb)
	ctx := t.Context()
	began := time.Now()
	r, err := f.repos.Fetch(ctx, src, repo.FetchOptions{})
	must(t, err)
	t.Logf("first fetch of %d MB: %v", mb, time.Since(began))
	began = time.Now()
	_, err = f.repos.Fetch(ctx, src, repo.FetchOptions{})
	must(t, err)
	t.Logf("second: %v", time.Since(began))
	r, err = f.repos.Get(ctx, string(r.ID))
	must(t, err)
	commit, branch, err := f.repos.ResolveRef(ctx, r.ID, "")
	must(t, err)
	began = time.Now()
	_, err = f.store.Prepare(ctx, "wbig", workspace.Source{Repo: r, Commit: commit, Branch: branch})
	must(t, err)
	t.Logf("prepare: %v", time.Since(began))
	size, err := f.store.Size(ctx, "wbig")
	must(t, err)
	t.Logf("cache %d MB, workspace before checkout %d KB", r.Size>>20, size>>10)
	if size > 256<<10 {
		t.Errorf("a workspace of a repository of %d MB takes %d bytes before checkout", mb, size)
	}
	if int64(mb)<<20 > r.Size || r.Size > int64(mb)<<20*11/10+4<<20 {
		t.Errorf("the cache takes %d bytes for %d MB", r.Size, mb)
	}
	began = time.Now()
	must(t, f.store.Populate(ctx, "wbig"))
	t.Logf("populate (1 file): %v", time.Since(began))
}
