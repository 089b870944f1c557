package repo

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
)

// Local is a repository on this host, seen through a git directory of ours: HEAD is copied, objects and refs
// are symbolic links, and the configuration and hooks are ours. So git reads the repository without ever
// reading its configuration, and nothing that it names can run. (git's own guards, such as the owner check of
// safe.directory, differ from version to version; this needs none of them.)
type Local struct {
	// Dir is the git directory of ours.
	Dir string
	// Work is the work tree, or "" of a bare repository.
	Work string
	// Format is the object format.
	Format string

	index string // the repository's own index, if it has one
}

// OpenLocal makes a view of the repository at path in a new directory below tmp. Close removes it.
func OpenLocal(ctx context.Context, path, tmp string) (*Local, error) {
	gitDir, work := path, ""
	if fi, err := os.Lstat(filepath.Join(path, ".git")); err == nil {
		work = path
		gitDir = filepath.Join(path, ".git")
		if fi.Mode().IsRegular() {
			to, err := readLine(gitDir)
			if err != nil {
				return nil, err
			}
			to, ok := strings.CutPrefix(to, "gitdir: ")
			if !ok {
				return nil, fmt.Errorf("%s is not a git file: %w", gitDir, warren.ErrInvalid)
			}
			if !filepath.IsAbs(to) {
				to = filepath.Join(path, to)
			}
			gitDir = to
		}
	}
	gitDir, err := filepath.EvalSymlinks(gitDir)
	if err != nil {
		return nil, fmt.Errorf("open repository %s: %w", path, warren.ErrNotFound)
	}
	common := gitDir
	if to, err := readLine(filepath.Join(gitDir, "commondir")); err == nil {
		if !filepath.IsAbs(to) {
			to = filepath.Join(gitDir, to)
		}
		if common, err = filepath.EvalSymlinks(to); err != nil {
			return nil, fmt.Errorf("open repository %s: its common directory is missing: %w", path, warren.ErrNotFound)
		}
	}
	head, err := readLine(filepath.Join(gitDir, "HEAD"))
	if err != nil {
		return nil, fmt.Errorf("open repository %s: it has no HEAD: %w", path, warren.ErrNotFound)
	}
	if ref, ok := strings.CutPrefix(head, "ref: "); ok {
		if err := git.CheckRef(strings.TrimSpace(ref)); err != nil {
			return nil, fmt.Errorf("open repository %s: %w", path, err)
		}
	} else if !git.IsObjectID(head) {
		return nil, fmt.Errorf("open repository %s: HEAD is neither a ref nor a commit: %w", path, warren.ErrInvalid)
	}
	format, refs := extensions(filepath.Join(common, "config"))
	if refs != "files" || format != "sha1" && format != "sha256" {
		return nil, fmt.Errorf("open repository %s: object format %q with ref storage %q is not supported: %w", path, format, refs, errors.ErrUnsupported)
	}

	dir, err := os.MkdirTemp(tmp, tmpPrefix+"view-")
	if err != nil {
		return nil, err
	}
	l := &Local{Dir: dir, Work: work, Format: format}
	if err := l.build(gitDir, common, head); err != nil {
		l.Close()
		return nil, fmt.Errorf("open repository %s: %w", path, err)
	}
	return l, nil
}

func (l *Local) build(gitDir, common, head string) error {
	root, err := os.OpenRoot(l.Dir)
	if err != nil {
		return err
	}
	defer root.Close()
	// On one host, looking for smaller deltas costs more than the bytes it saves; those that are there are kept.
	const config = "\tbigFileThreshold = 8m\n[pack]\n\twindow = 0\n\tcompression = 0\n"
	if err := git.Init(root, git.Layout{Head: head, Format: l.Format, Bare: l.Work == "", Config: config}, git.Unowned); err != nil {
		return err
	}
	for _, d := range []string{"objects", "refs", "packed-refs", "shallow"} {
		if _, err := os.Lstat(filepath.Join(common, d)); err != nil {
			if d == "packed-refs" || d == "shallow" {
				continue
			}
			return fmt.Errorf("it has no %s: %w", d, warren.ErrNotFound)
		}
		if err := root.RemoveAll(d); err != nil {
			return err
		}
		if err := root.Symlink(filepath.Join(common, d), d); err != nil {
			return err
		}
	}
	if _, err := os.Lstat(filepath.Join(gitDir, "index")); err == nil {
		l.index = filepath.Join(gitDir, "index")
		shared, _ := filepath.Glob(filepath.Join(gitDir, "sharedindex.*"))
		for _, s := range shared {
			if err := root.Symlink(s, filepath.Base(s)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Close removes the view.
func (l *Local) Close() error { return os.RemoveAll(l.Dir) }

// DefaultBranch returns the branch that HEAD names, or "" when it names none.
func (l *Local) DefaultBranch() string {
	head, _ := readLine(filepath.Join(l.Dir, "HEAD"))
	b, _ := strings.CutPrefix(head, "ref: refs/heads/")
	if b == head {
		return ""
	}
	return b
}

// fingerprint changes when a ref does.
func (l *Local) fingerprint(ctx context.Context) (sum string, refs int, err error) {
	c := &git.Cmd{Dir: l.Dir, Args: []string{"for-each-ref", "--format=%(objectname) %(refname)", "refs/heads", "refs/tags"}}
	out, err := c.Output(ctx)
	if err != nil {
		return "", 0, err
	}
	head, err := os.ReadFile(filepath.Join(l.Dir, "HEAD"))
	if err != nil {
		return "", 0, err
	}
	h := sha256.Sum256(append(head, out...))
	return hex.EncodeToString(h[:]), strings.Count(string(out), "\n"), nil
}

// extensions reads the object format and the ref storage out of a repository's configuration. It is a reader for these two
// lines, not for git's whole syntax: git itself is not shown a stranger's configuration.
func extensions(config string) (format, refs string) {
	format, refs = "sha1", "files"
	f, err := os.Open(config)
	if err != nil {
		return
	}
	defer f.Close()
	in := false
	for s := bufio.NewScanner(f); s.Scan(); {
		line := strings.ToLower(strings.TrimSpace(s.Text()))
		if strings.HasPrefix(line, "[") {
			in = strings.HasPrefix(line, "[extensions]")
			continue
		}
		if !in {
			continue
		}
		k, v, _ := strings.Cut(line, "=")
		switch v = strings.Trim(strings.TrimSpace(v), `"`); strings.TrimSpace(k) {
		case "objectformat":
			format = v
		case "refstorage":
			refs = v
		}
	}
	return
}

// readLine returns the first line of a small file.
func readLine(name string) (string, error) {
	fi, err := os.Stat(name)
	if err != nil {
		return "", err
	}
	if !fi.Mode().IsRegular() || fi.Size() > 64<<10 {
		return "", fmt.Errorf("%s is not a small file: %w", name, warren.ErrInvalid)
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return "", err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimSpace(line), nil
}

// Changes lists the files of the work tree that differ from a commit, or that git neither tracks nor ignores. A
// repository inside the work tree is one name that ends with a slash; submodules are left out.
func (l *Local) Changes(ctx context.Context, commit string) ([]string, error) {
	index := filepath.Join(l.Dir, "index")
	if l.index != "" {
		b, err := os.ReadFile(l.index)
		if err != nil {
			return nil, err
		}
		if err := os.WriteFile(index, b, 0o600); err != nil {
			return nil, err
		}
	}
	run := func(args ...string) ([]byte, error) {
		c := &git.Cmd{Dir: l.Dir, WorkTree: l.Work, Index: index, Args: args}
		return c.Output(ctx)
	}
	// Exit 1 says that files differ.
	if _, err := run("update-index", "-q", "--refresh", "--ignore-submodules"); err != nil && git.ExitCode(err) != 1 {
		return nil, err
	}
	changed, err := run("diff-index", "-z", "--name-only", "--no-renames", "--ignore-submodules=all", "--end-of-options", commit)
	if err != nil {
		return nil, err
	}
	others, err := run("ls-files", "-z", "--others", "--exclude-standard")
	if err != nil {
		return nil, err
	}
	var out []string
	seen := map[string]bool{}
	for n := range strings.SplitSeq(string(changed)+string(others), "\x00") {
		if n != "" && !seen[n] {
			seen[n] = true
			out = append(out, n)
		}
	}
	return out, nil
}
