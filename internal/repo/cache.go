// Package repo caches git repositories on the host, so that workspaces can be cut from them without cloning again.
//
// A repository in the cache has two bare git directories:
//
//	<id>/origin.git   exactly what the origin has: its branches under refs/remotes/origin, its tags, their objects.
//	<id>/mirror.git   what people look at and push from: the same refs, and Warren's commits on refs/heads/warren/*.
//	<id>/meta.json    the URL without credentials, the default branch, when it was fetched.
//
// mirror.git borrows the objects of origin.git. Sandboxes are shown origin.git/objects alone, read-only, so that no
// sandbox sees what was committed from another. Objects of origin.git are never dropped, because workspaces borrow
// them: there is no gc and no prune, and packs are only ever merged with everything in them kept.
package repo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
)

// Options of a cache.
type Options struct {
	// Dir holds the repositories; it is made when it does not exist.
	Dir string
	// UID and GID are the host ids as which git handles bytes that come from a sandbox: workspaces' own
	// (driver.DiskIDBase + driver.SandboxUID). They count only when the process is root.
	UID, GID uint32
	Logger   *slog.Logger
	// BorrowedBy, when set, names a workspace that borrows objects of the repository, or returns "". Delete
	// refuses a repository that is borrowed.
	BorrowedBy func(warren.RepoID) (warren.WorkspaceID, error)
}

// Cache is a directory of repositories. Several processes may use one.
type Cache struct {
	o Options
}

// Repo is a repository in the cache.
type Repo struct {
	ID warren.RepoID
	// URL of the origin, without credentials.
	URL string
	// Dir is mirror.git, for the host's git. Objects is the directory that workspaces borrow from.
	Dir, Objects string
	// DefaultBranch of the origin; empty when its HEAD names no branch.
	DefaultBranch string
	// Format of object ids: "sha1" or "sha256".
	Format string
	// Size on disk in bytes; set by Get and List.
	Size int64
	// Fetched is when the origin was last asked.
	Fetched time.Time
}

// meta is meta.json.
type meta struct {
	Version       int       `json:"version"`
	URL           string    `json:"url"`
	DefaultBranch string    `json:"default_branch"`
	Format        string    `json:"format"`
	Fetched       time.Time `json:"fetched"`
	// Refs is a fingerprint of the refs of a local origin.
	Refs string `json:"refs,omitempty"`
}

// sandboxUID is driver.SandboxUID.
const sandboxUID = 1000

const (
	tmpPrefix = ".tmp-"
	lockDir   = ".locks"
	// maintainLock ends the name of the lock of a repository's maintenance.
	maintainLock = "~maintain"
)

// Open opens the cache and removes what interrupted clones left.
func Open(o Options) (*Cache, error) {
	if !filepath.IsAbs(o.Dir) {
		return nil, fmt.Errorf("repository cache: %q is not an absolute path: %w", o.Dir, warren.ErrInvalid)
	}
	if os.Geteuid() == 0 && o.UID < sandboxUID {
		return nil, fmt.Errorf("repository cache: uid %d is no sandbox's user: %w", o.UID, warren.ErrInvalid)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	c := &Cache{o: o}
	// Nobody else may pass through: a repository's directory has a name that its URL gives away, and git makes files in it that
	// everybody may read. Sandboxes and confined git get what they see by descriptor. The mode is set for directories of before, too.
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.Chmod(o.Dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(o.Dir, lockDir), 0o700); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(o.Dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), tmpPrefix) {
			continue
		}
		// Another process may be at work in it: its directory is younger than any clone may last.
		if fi, err := e.Info(); err != nil || time.Since(fi.ModTime()) < time.Minute && c.busy(e.Name()) {
			continue
		}
		if err := os.RemoveAll(filepath.Join(o.Dir, e.Name())); err != nil {
			return nil, fmt.Errorf("remove an interrupted clone: %w", err)
		}
	}
	return c, nil
}

// busy reports whether the lock that a temporary directory's name ends with is held.
func (c *Cache) busy(name string) bool {
	i := strings.LastIndexByte(name, '~')
	if i < 0 {
		return false
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	unlock, err := LockFile(ctx, c.lockName(warren.RepoID(name[i+1:])))
	if err != nil {
		return true
	}
	unlock()
	return false
}

func (c *Cache) lockName(id warren.RepoID) string {
	return filepath.Join(c.o.Dir, lockDir, filepath.Base(string(id)))
}

func (c *Cache) dir(id warren.RepoID) string { return filepath.Join(c.o.Dir, string(id)) }

// load reads a repository's record.
func (c *Cache) load(id warren.RepoID) (*Repo, *meta, error) {
	if !idOK.MatchString(string(id)) {
		return nil, nil, fmt.Errorf("repository id %q: %w", clip(string(id)), warren.ErrInvalid)
	}
	b, err := os.ReadFile(filepath.Join(c.dir(id), "meta.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("repository %s is not in the cache: %w", id, warren.ErrNotFound)
	}
	if err != nil {
		return nil, nil, err
	}
	var m meta
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, nil, damaged(&Repo{ID: id, URL: "of an unknown origin"}, "its record cannot be read")
	}
	return &Repo{
		ID: id, URL: m.URL, Dir: c.Mirror(id), Objects: c.Objects(id),
		DefaultBranch: m.DefaultBranch, Format: m.Format, Fetched: m.Fetched,
	}, &m, nil
}

// Objects returns the directory that workspaces of a repository borrow from, whether or not it is there.
func (c *Cache) Objects(id warren.RepoID) string {
	return filepath.Join(c.dir(id), "origin.git", "objects")
}

// Mirror returns the git directory for people, whether or not it is there.
func (c *Cache) Mirror(id warren.RepoID) string { return filepath.Join(c.dir(id), "mirror.git") }

// DefaultBranch returns the default branch of a repository in the cache, or "".
func (c *Cache) DefaultBranch(id warren.RepoID) string {
	r, _, err := c.load(id)
	if err != nil {
		return ""
	}
	return r.DefaultBranch
}

// writeMeta replaces meta.json in dir at once.
func writeMeta(dir string, m *meta) error {
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, tmpPrefix+"meta-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(append(b, '\n'))
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, "meta.json"))
	}
	return err
}

// Get returns a repository by its id, a unique beginning of it, or its URL in any spelling, with its size. Of one whose record is damaged only the id and
// the directories are known.
func (c *Cache) Get(ctx context.Context, idOrURL string) (*Repo, error) {
	id, err := c.find(idOrURL)
	if err != nil {
		return nil, err
	}
	r, _, err := c.load(id)
	if errors.Is(err, warren.ErrState) {
		r, err = &Repo{ID: id, Dir: c.Mirror(id), Objects: c.Objects(id)}, nil
	}
	if err != nil {
		return nil, err
	}
	r.Size = size(c.dir(id))
	return r, nil
}

// find turns an id or URL into an id.
func (c *Cache) find(idOrURL string) (warren.RepoID, error) {
	if idOK.MatchString(idOrURL) {
		return warren.RepoID(idOrURL), nil
	}
	o, err := ParseOrigin(idOrURL)
	if err == nil {
		return o.ID(), nil
	}
	if id, err := c.byPrefix(idOrURL); id != "" || err != nil {
		return id, err
	}
	// The directory of a local origin may be gone; its record still has the path.
	if errors.Is(err, warren.ErrNotFound) {
		p := filepath.Clean(strings.TrimPrefix(idOrURL, "file://"))
		return (&Origin{key: "file://" + p}).ID(), nil
	}
	return "", err
}

// minPrefix is how much of an id names a repository.
const minPrefix = 3

// byPrefix finds the one repository whose id begins with s; "" when there is none.
func (c *Cache) byPrefix(s string) (warren.RepoID, error) {
	if !prefixOK.MatchString(s) {
		return "", nil
	}
	entries, err := os.ReadDir(c.o.Dir)
	if err != nil {
		return "", err
	}
	var ids, list []string
	for _, e := range entries {
		if !idOK.MatchString(e.Name()) || !strings.HasPrefix(e.Name(), s) {
			continue
		}
		ids = append(ids, e.Name())
		if r, _, err := c.load(warren.RepoID(e.Name())); err == nil {
			list = append(list, fmt.Sprintf("%s (%s)", r.ID, r.URL))
		} else {
			list = append(list, e.Name())
		}
	}
	switch {
	case len(ids) == 0:
		return "", nil
	case len(ids) == 1 && len(s) >= minPrefix:
		return warren.RepoID(ids[0]), nil
	case len(ids) == 1:
		return "", fmt.Errorf("%q is too short for the id of repository %s; give at least %d characters: %w", s, list[0], minPrefix, warren.ErrInvalid)
	}
	return "", fmt.Errorf("%q is ambiguous, it names %d repositories: %s; give more of the id: %w", s, len(ids), strings.Join(list[:min(len(list), 8)], ", "), warren.ErrInvalid)
}

// List returns all repositories, ordered by URL, with their sizes.
func (c *Cache) List(ctx context.Context) ([]*Repo, error) {
	entries, err := os.ReadDir(c.o.Dir)
	if err != nil {
		return nil, err
	}
	var out []*Repo
	for _, e := range entries {
		if !idOK.MatchString(e.Name()) {
			continue
		}
		r, _, err := c.load(warren.RepoID(e.Name()))
		if errors.Is(err, warren.ErrNotFound) {
			continue // deleted meanwhile
		}
		if err != nil {
			c.o.Logger.WarnContext(ctx, "repository left out", "repo", e.Name(), "err", err)
			continue
		}
		r.Size = size(c.dir(r.ID))
		out = append(out, r)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].URL < out[j].URL })
	return out, nil
}

// Delete removes a repository. It is refused while a workspace borrows from it. Deleting what does not exist
// returns warren.ErrNotFound.
func (c *Cache) Delete(ctx context.Context, idOrURL string) error {
	id, err := c.find(idOrURL)
	if err != nil {
		return err
	}
	unlock, err := LockFile(ctx, c.lockName(id))
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Lstat(c.dir(id)); err != nil {
		return fmt.Errorf("repository %s is not in the cache: %w", redactURL(idOrURL), warren.ErrNotFound)
	}
	if c.o.BorrowedBy != nil {
		w, err := c.o.BorrowedBy(id)
		if err != nil {
			return err
		}
		if w != "" {
			return fmt.Errorf("repository %s is in use by workspace %s; delete that first: %w", id, w, warren.ErrState)
		}
	}
	// First out of sight at once, then away.
	tmp := filepath.Join(c.o.Dir, tmpPrefix+"gone~"+string(id))
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := os.Rename(c.dir(id), tmp); err != nil {
		return err
	}
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	os.Remove(c.lockName(id + maintainLock))
	os.Remove(c.lockName(id)) // it is held here
	return nil
}

// size adds up the disk use below dir.
func size(dir string) (n int64) {
	filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil {
			if fi, err := d.Info(); err == nil {
				n += diskUse(fi)
			}
		}
		return nil
	})
	return n
}

// command returns a command on a git directory of the repository as this process's own user.
func command(dir string, args ...string) *git.Cmd { return &git.Cmd{Dir: dir, Args: args} }

func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}
