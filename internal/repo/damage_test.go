package repo_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/repo"
)

// A damaged repository is said to be one, with its name and the way out, and can be removed and fetched again.
func TestDamaged(t *testing.T) {
	truncate := func(name string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) { must(t, os.Truncate(filepath.Join(dir, name), 0)) }
	}
	remove := func(name string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) { must(t, os.RemoveAll(filepath.Join(dir, name))) }
	}
	for _, tt := range []struct {
		name   string
		damage func(t *testing.T, dir string)
	}{
		{"HEAD of the mirror", truncate("mirror.git/HEAD")},
		{"HEAD of the origin's directory", truncate("origin.git/HEAD")},
		{"no mirror", remove("mirror.git")},
		{"no objects", remove("origin.git/objects")},
		{"no object files", func(t *testing.T, dir string) {
			// Packs and loose objects alike.
			objects := filepath.Join(dir, "origin.git", "objects")
			must(t, os.RemoveAll(objects))
			must(t, os.MkdirAll(filepath.Join(objects, "pack"), 0o755))
			must(t, os.MkdirAll(filepath.Join(objects, "info"), 0o755))
		}},
		{"record", truncate("meta.json")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			src := newRepo(t)
			dir := filepath.Join(t.TempDir(), "repos")
			c := open(t, dir)
			ctx := t.Context()
			r, err := c.Fetch(ctx, src, repo.FetchOptions{})
			must(t, err)
			tt.damage(t, filepath.Join(dir, string(r.ID)))
			commit(t, src, "second") // so that there is something to fetch
			_, err = c.Fetch(ctx, src, repo.FetchOptions{})
			if err == nil {
				_, _, err = c.ResolveOrigin(ctx, r.ID, "")
			}
			if !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), "damaged") || !strings.Contains(err.Error(), "warren repo rm "+string(r.ID)) {
				t.Errorf("%v, want that it is damaged and how to remove it", err)
			}
			must(t, c.Delete(ctx, string(r.ID)))
			_, err = c.Fetch(ctx, src, repo.FetchOptions{})
			must(t, err)
		})
	}
}

func TestCheckFindsLostObjectsOfACommit(t *testing.T) {
	src := newRepo(t)
	dir := filepath.Join(t.TempDir(), "repos")
	c := open(t, dir)
	ctx := t.Context()
	r, err := c.Fetch(ctx, src, repo.FetchOptions{})
	must(t, err)
	head := runGit(t, src, "rev-parse", "HEAD")
	must(t, c.Check(ctx, r.ID, head))
	// As loose objects one of them can be taken away.
	objects := filepath.Join(dir, string(r.ID), "origin.git", "objects")
	packs, err := filepath.Glob(filepath.Join(objects, "pack", "*.pack"))
	must(t, err)
	for _, p := range packs {
		b, err := os.ReadFile(p)
		must(t, err)
		for _, ext := range []string{".pack", ".idx", ".rev"} {
			must(t, os.RemoveAll(strings.TrimSuffix(p, ".pack")+ext))
		}
		unpack(t, filepath.Dir(objects), b)
	}
	blob := runGit(t, src, "rev-parse", "HEAD:a.txt")
	must(t, os.Remove(filepath.Join(objects, blob[:2], blob[2:])))
	if err := c.Check(ctx, r.ID, head); !errors.Is(err, warren.ErrState) || !strings.Contains(err.Error(), head[:12]) {
		t.Errorf("%v, want that objects of the commit are gone", err)
	}
}

// unpack writes the objects of a pack as files.
func unpack(t *testing.T, dir string, pack []byte) {
	t.Helper()
	cmd := exec.Command("git", "unpack-objects", "-q")
	cmd.Dir, cmd.Stdin = dir, bytes.NewReader(pack)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "GIT_DIR=" + dir, "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null"}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
