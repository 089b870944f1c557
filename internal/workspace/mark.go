package workspace

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
)

// markDir holds the mark of a workspace: the name of a tree, and its objects that the repository lacks. A copy of the workspace
// has no mark.
const markDir = "mark"

// treeName is what git calls a tree.
var treeName = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})$`)

// mark is what was remembered of a workspace.
type mark struct {
	tree, objects string
	// index has an entry, with what the file system said, for each file of the tree; of files that changed so shortly before that
	// it might say the same after another change, it has none of that.
	index []byte
	// held are the stamps of files that were not read.
	held map[string]string
}

// markBudget is how many bytes a mark, or a diff since one, reads of files that git does not know as they are. A sparse file is as
// large as it says, and costs who made it nothing.
const markBudget = 1 << 30

func (s *Store) budget() int64 {
	if s.readAtMost > 0 {
		return s.readAtMost
	}
	return markBudget
}

// turns lets users of one workspace's mark follow each other. Those who change the workspace itself wait for none of them.
type turns struct {
	mu    sync.Mutex
	taken map[warren.WorkspaceID]chan struct{}
}

func (t *turns) take(ctx context.Context, id warren.WorkspaceID) (leave func(), err error) {
	for {
		t.mu.Lock()
		other := t.taken[id]
		if other == nil {
			mine := make(chan struct{})
			if t.taken == nil {
				t.taken = map[warren.WorkspaceID]chan struct{}{}
			}
			t.taken[id] = mine
			t.mu.Unlock()
			return func() {
				t.mu.Lock()
				delete(t.taken, id)
				t.mu.Unlock()
				close(mine)
			}, nil
		}
		t.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// Mark remembers the files as they are, for a diff since then. A workspace has one mark: the next takes its place, in one step. What
// a diff leaves out, ignored files, is not remembered either; of large files, and of all but the smallest when there is much to read,
// it remembers size, times and inode. The workspace is locked only for that step.
func (s *Store) Mark(ctx context.Context, id warren.WorkspaceID) (err error) {
	m, err := s.ready(id)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("mark workspace %s: %w", id, plain(s.blame(ctx, m, err)))
		}
	}()
	leave, err := s.marks.take(ctx, id)
	if err != nil {
		return err
	}
	defer leave()
	sc, err := s.scratch(id)
	if err != nil {
		return err
	}
	// Of what was the mark before, too, when the two have changed places.
	defer sc.close()
	begun := time.Now()
	snap, err := s.snapshot(ctx, id, m, sc, snapOptions{most: maxDiffFile, budget: s.budget(), marking: true})
	if err != nil {
		return err
	}
	var raw []byte
	if raw, err = sc.readIndex(); errors.Is(err, fs.ErrNotExist) {
		raw, err = nil, nil // no files
	}
	if err == nil && raw != nil {
		raw, err = unsure(raw, m.Format, begun)
	}
	held, jerr := json.Marshal(snap.held)
	if err = errors.Join(err, jerr); err != nil {
		return err
	}
	if err := removeAll(filepath.Dir(sc.index)); err != nil {
		return err
	}
	for name, b := range map[string][]byte{"index": raw, "held": held, "tree": []byte(snap.tree + "\n")} {
		if err := os.WriteFile(filepath.Join(sc.dir, name), b, 0o600); err != nil {
			return err
		}
	}
	unlock, err := s.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	at := filepath.Join(s.dir(id), markDir)
	err = unix.Renameat2(unix.AT_FDCWD, sc.dir, unix.AT_FDCWD, at, unix.RENAME_EXCHANGE)
	if errors.Is(err, fs.ErrNotExist) && sc.there() {
		err = os.Rename(sc.dir, at)
	}
	if err != nil && !sc.there() {
		return fmt.Errorf("it was replaced meanwhile, by a rollback or a delete; try again: %w", warren.ErrState)
	}
	return err
}

// unsure takes what the file system said out of the entries of files that changed so late that another change might look the same.
func unsure(raw []byte, format string, begun time.Time) ([]byte, error) {
	x, err := parseIndex(raw, format)
	if err != nil {
		return nil, err
	}
	x.raw = bytes.Clone(x.raw)
	for _, e := range x.entries {
		b := x.raw[e.at:]
		// The change time is the one that nobody inside can set.
		if int64(binary.BigEndian.Uint32(b)) >= begun.Unix()-2 {
			clear(b[:24])
			clear(b[28:40])
		}
	}
	return x.seal(), nil
}

// marked returns the mark of the workspace.
func (s *Store) marked(id warren.WorkspaceID) (*mark, error) {
	dir := filepath.Join(s.dir(id), markDir)
	k := &mark{objects: filepath.Join(dir, "objects")}
	b, err := os.ReadFile(filepath.Join(dir, "tree"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("workspace %[1]s has no mark to compare with; set one with `warren workspace mark %[1]s`: %[2]w", id, warren.ErrState)
	}
	k.tree = strings.TrimSpace(string(b))
	if err == nil && !treeName.MatchString(k.tree) {
		err = errors.New("it names no tree")
	}
	if err == nil {
		k.index, err = os.ReadFile(filepath.Join(dir, "index"))
	}
	if err == nil {
		b, err = os.ReadFile(filepath.Join(dir, "held"))
	}
	if err == nil {
		err = json.Unmarshal(b, &k.held)
	}
	if err != nil {
		return nil, fmt.Errorf("the mark of workspace %s is damaged, or of an earlier version (%v); mark it again: %w", id, plain(err), warren.ErrState)
	}
	return k, nil
}

// maxRounds is how deep repositories within repositories are looked into for what is ignored.
const maxRounds = 10

// listSince lists what differs from a mark, by the .gitignore files of the mark: those that are there now, and what they ignore, were
// written by whoever is to be compared. Git is told a name for such files that nobody inside knows; where there is no such file it
// reads what the index has by that name.
func (s *Store) listSince(ctx context.Context, onTree func(...string) *git.Cmd, sc *scratch, x *index, fresh []byte, format string, list func(*git.Cmd) error) error {
	name := ".ignore-" + rand.Text()
	var add, names bytes.Buffer
	put := func(mode, oid, file string) {
		fmt.Fprintf(&add, "%s %s 0\t%s\x00", mode, oid, file)
		names.WriteString(file + "\x00")
	}
	size := 20
	if format == "sha256" {
		size = 32
	}
	for _, e := range x.entries {
		if path.Base(e.name) == ".gitignore" && e.mode&unix.S_IFMT == unix.S_IFREG {
			put("100644", hex.EncodeToString(x.raw[e.at+40:e.at+40+size]), path.Join(path.Dir(e.name), name))
		}
	}
	nothing := onTree("hash-object", "-w", "--no-filters", "--stdin")
	nothing.Stdin = strings.NewReader("")
	empty, err := nothing.Line(ctx)
	if err != nil {
		return err
	}
	for range maxRounds {
		if add.Len() > 0 {
			c := onTree("update-index", "-z", "--add", "--index-info")
			c.Stdin = &add
			if err := c.Run(ctx); err != nil {
				return err
			}
			c = onTree("update-index", "-z", "--skip-worktree", "--stdin")
			c.Stdin = &names
			if err := c.Run(ctx); err != nil {
				return err
			}
			add.Reset()
			names.Reset()
		}
		out, err := onTree("ls-files", "-z", "--others", "--exclude-per-directory="+name).Output(ctx)
		if err != nil {
			return err
		}
		// A repository inside is looked into as soon as the index has something there.
		for n := range strings.SplitSeq(string(out), "\x00") {
			if dir, ok := strings.CutSuffix(n, "/"); ok && !hasDotGit(dir) {
				put("100644", empty, dir+"/"+name)
			}
		}
		if add.Len() == 0 {
			break
		}
	}
	if err := list(onTree("ls-files", "-z", "--modified", "--deleted", "--others", "--exclude-per-directory="+name)); err != nil {
		return err
	}
	if fresh == nil {
		if err := os.Remove(sc.index); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	return s.writeIndex(sc, fresh)
}

// stamp tells a file without its content, or says "gone".
func (c *changes) stamp(name string) (string, int64) {
	st, err := c.lstat(name)
	if err != nil {
		return "gone", 0
	}
	return fmt.Sprintf("%o %d %d %d.%d %d.%d", st.Mode, st.Size, st.Ino, st.Mtim.Sec, st.Mtim.Nsec, st.Ctim.Sec, st.Ctim.Nsec), st.Size
}

// passOver holds the files of an index that git would read whole just to learn whether they changed, and that are too large for it: a file
// whose size the index does not have, or has in 32 bits, is read by git however large it has become. It returns their names.
func (c *changes) passOver(x *index, o snapOptions) (map[string]bool, error) {
	passed := map[string]bool{}
	var unsure []string
	for _, e := range x.entries {
		if e.mode&unix.S_IFMT != unix.S_IFREG {
			continue
		}
		if c.since != nil && c.since.held[e.name] != "" {
			passed[e.name] = true // see compareHeld
			continue
		}
		st, err := c.lstat(e.name)
		if vanished(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		is := x.stat(e)
		switch {
		case st.Mode&unix.S_IFMT != unix.S_IFREG || is.same(&st):
		case st.Size > c.most && (is.size == 0 || int64(is.size) != st.Size):
			passed[e.name] = c.hold(e.name, st.Size)
		case is.size == 0:
			unsure, c.sizes[e.name] = append(unsure, e.name), st.Size
		}
	}
	maps.Copy(passed, c.over(unsure, o.budget))
	for name := range passed {
		c.seen[name] = true
	}
	return passed, nil
}

// afford leaves out the largest of the files that are more than budget together.
func (c *changes) afford(budget int64) {
	over := c.over(append(slices.Clone(c.add), c.nested...), budget)
	out := func(n string) bool { return over[n] }
	c.add, c.nested = slices.DeleteFunc(c.add, out), slices.DeleteFunc(c.nested, out)
}

// over holds the largest of the files that are more than budget together, and returns their names; 0 is no bound.
func (c *changes) over(names []string, budget int64) map[string]bool {
	over := map[string]bool{}
	if budget == 0 {
		return over
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(cmp.Compare(c.sizes[a], c.sizes[b]), cmp.Compare(a, b)) })
	for _, n := range names {
		if budget -= c.sizes[n]; budget < 0 {
			over[n] = c.hold(n, c.sizes[n])
		}
	}
	return over
}

// compareHeld finds out which of the files changed that the mark has by their stamps.
func (c *changes) compareHeld() {
	for _, name := range slices.Sorted(maps.Keys(c.since.held)) {
		if now, size := c.stamp(name); now != c.since.held[name] {
			c.large = append(c.large, fmt.Sprintf("%s (%d MiB)", printable(name), size>>20))
		}
	}
}

// there reports whether the directory still is where it was made.
func (sc *scratch) there() bool {
	_, err := os.Lstat(sc.dir)
	return err == nil
}

// plain says of an error what failed and not where on this host, and of a full disk that it is one.
func plain(err error) error {
	var p *fs.PathError
	var l *os.LinkError
	switch {
	case errors.As(err, &p):
		err = fmt.Errorf("%s: %w", p.Op, p.Err)
	case errors.As(err, &l):
		err = fmt.Errorf("%s: %w", l.Op, l.Err)
	}
	var ge *git.Error
	if errors.As(err, &ge) && !errors.Is(err, warren.ErrExhausted) && (strings.Contains(ge.Message, "No space left on device") || strings.Contains(ge.Message, "Disk quota exceeded")) {
		return fmt.Errorf("%w: %w", err, warren.ErrExhausted)
	}
	return noRoom(err)
}
