package workspace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
)

// DiffOptions of Diff.
type DiffOptions struct {
	// All shows ignored files too.
	All bool
	// Stat writes a summary of changed files instead of the patch.
	Stat bool
	// SinceMark compares with what [Store.Mark] remembered, not with what the workspace was cut from.
	SinceMark bool
}

// A file of more than these is not in a patch, and not in a commit: git would take minutes for it, and for a patch as much memory.
// A sparse file is as large as it says.
const (
	maxDiffFile   = 128 << 20
	maxCommitFile = 1 << 30
)

// Diff writes all changes since the workspace was cut, as a patch that `git apply` takes, binary files included. It shows
// the files as they are on disk now, whatever was committed inside. A sandbox may be writing meanwhile: each file is shown
// as it was at one moment. A file of more than 128 MiB is named in a line before the patch instead.
func (s *Store) Diff(ctx context.Context, id warren.WorkspaceID, o DiffOptions, w io.Writer) error {
	m, err := s.ready(id)
	if err != nil {
		return err
	}
	base := ""
	so := snapOptions{all: o.All, most: maxDiffFile}
	if o.SinceMark {
		// So that nobody takes away what a mark holds that is being read.
		leave, err := s.marks.take(ctx, id)
		if err != nil {
			return err
		}
		defer leave()
		if so.since, err = s.marked(id); err != nil {
			return err
		}
		base, so.budget = so.since.tree, s.budget()
	}
	sc, err := s.scratch(id)
	if err != nil {
		return fmt.Errorf("diff of workspace %s: %w", id, plain(err))
	}
	defer sc.close()
	snap, err := s.snapshot(ctx, id, m, sc, so)
	if err != nil {
		return fmt.Errorf("diff of workspace %s: %w", id, plain(s.blame(ctx, m, err)))
	}
	// What git ignores before the first file of a patch is where a patch can say something.
	if n := len(snap.large); o.SinceMark && n > 0 {
		for _, l := range snap.large[:min(n, maxNotes)] {
			snap.notes = append(snap.notes, fmt.Sprintf("%s has changed since the mark and is not compared: it is large, or there is much of its kind; its size, its times or its inode differ", l))
		}
		// The SDK counts by this line.
		snap.notes = append(snap.notes, fmt.Sprintf("files that changed and are too large to compare: %d", n))
		snap.large = nil
	}
	for _, l := range snap.large {
		snap.notes = append(snap.notes, fmt.Sprintf("%s is not in the patch: it is large, and a patch carries at most %d MiB of a file", l, maxDiffFile>>20))
	}
	for _, n := range snap.notes {
		if _, err := fmt.Fprintf(w, "# warren: %s\n", n); err != nil {
			return err
		}
	}
	if base == "" {
		if base, err = s.baseTree(ctx, id, m, sc); err != nil {
			return err
		}
	}
	// Without a work tree git reads no attributes, so that no file can have itself shown as binary.
	diff := s.confined(id, m, sc, "diff-tree", "-r", "-M", "--no-ext-diff", "--no-textconv", "--no-color", "--full-index", "--src-prefix=a/", "--dst-prefix=b/")
	if o.Stat {
		diff.Args = append(diff.Args, "--stat=120", "--summary")
	} else {
		diff.Args = append(diff.Args, "-p", "--binary")
	}
	if base == snap.tree {
		return nil
	}
	if o.SinceMark {
		diff.Alternates = append(diff.Alternates, so.since.objects)
	}
	diff.Args = append(diff.Args, "--end-of-options", base, snap.tree)
	// Lines of more cost gigabytes to count. In a patch git looks at what is in a file all the same.
	diff.Config = []git.Setting{{Key: "core.bigFileThreshold", Value: "16m"}}
	diff.Stdout = w
	limited, cancel := withLimit(ctx)
	defer cancel()
	if err := diff.Run(limited); err != nil {
		return fmt.Errorf("diff of workspace %s: %w", id, plain(s.blame(ctx, m, err)))
	}
	return nil
}

// ready returns the record of a workspace whose checkout is complete.
func (s *Store) ready(id warren.WorkspaceID) (*meta, error) {
	m, err := s.load(id)
	if err != nil {
		return nil, err
	}
	if !m.Populated {
		return nil, fmt.Errorf("workspace %s is not checked out yet: %w", id, warren.ErrState)
	}
	return m, nil
}

// baseTree returns what the workspace is compared with.
func (s *Store) baseTree(ctx context.Context, id warren.WorkspaceID, m *meta, sc *scratch) (string, error) {
	if m.Commit != "" {
		return m.Commit, nil
	}
	c := s.confined(id, m, sc, "mktree")
	c.Stdin = strings.NewReader("")
	return c.Line(ctx)
}

// snap is the state of a workspace's files.
type snap struct {
	// tree is a tree in the scratch directory's objects, or the base commit when nothing changed.
	tree  string
	notes []string // about what git cannot carry
	large []string // files left out for their size, and that; since a mark only those that changed
	// held are the stamps of files that are told by these instead of their content.
	held map[string]string
}

// snapOptions say what a snapshot takes.
type snapOptions struct {
	all bool
	// most is how many bytes a file may have. Of files that git does not know as they are, it reads no more than budget, the small ones
	// first; 0 is no bound.
	most, budget int64
	// marking takes along .gitignore files that are themselves ignored, for they say what else is.
	marking bool
	// since, when set, is where it begins: what is there is compared in any case, and its .gitignore files say what else is new.
	since *mark
}

// unchanged reports whether the files are those of the base.
func (c *changes) unchanged() bool { return len(c.add)+len(c.gone)+len(c.nested) == 0 }

// maxNotes bounds what is said of directories that cannot be opened.
const maxNotes = 20

// clipEnds shortens in the middle: a path's end says why it was passed over.
func clipEnds(s string) string {
	if len(s) <= 200 {
		return s
	}
	return s[:80] + "..." + s[len(s)-80:]
}

// maxReading is how long git may read files, or compare them. Who writes them may make them grow while it does.
const maxReading = 10 * time.Minute

func withLimit(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, maxReading, fmt.Errorf("reading its files took longer than %v; what is large or much of it can be named in .gitignore: %w", maxReading, warren.ErrExhausted))
}

// attempts is how often a snapshot is begun anew because files changed or vanished under it.
const attempts = 4

// snapshot records the files as a tree, but for those of more than most bytes. It starts from the index of the base commit, so
// that only what changed is read.
func (s *Store) snapshot(ctx context.Context, id warren.WorkspaceID, m *meta, sc *scratch, o snapOptions) (*snap, error) {
	ctx, cancel := withLimit(ctx)
	defer cancel()
	for i := 1; ; i++ {
		sn, err := s.trySnapshot(ctx, id, m, sc, o)
		if err != nil && !sc.there() {
			return nil, fmt.Errorf("it was replaced meanwhile, by a rollback or a delete; try again: %w", warren.ErrState)
		}
		if err == nil || i == attempts || ctx.Err() != nil || git.ExitCode(err) == 0 {
			return sn, err
		}
		var ge *git.Error
		if !errors.As(err, &ge) {
			return nil, err
		}
		s.o.Logger.DebugContext(ctx, "files changed while they were read, again", "workspace", id, "err", err)
	}
}

func (s *Store) trySnapshot(ctx context.Context, id warren.WorkspaceID, m *meta, sc *scratch, o snapOptions) (*snap, error) {
	onTree := func(args ...string) *git.Cmd {
		c := s.confined(id, m, sc, args...)
		c.WorkTree = s.files(id)
		if o.since != nil {
			c.Alternates = append(c.Alternates, o.since.objects)
		}
		return c
	}
	ch := &changes{s: s, id: id, most: o.most, since: o.since, held: map[string]string{}, sizes: map[string]int64{}}
	if err := ch.open(); err != nil {
		return nil, err
	}
	defer ch.close()
	ours := filepath.Join(s.dir(id), "git")
	x := &index{}
	var fresh []byte
	raw, err := os.ReadFile(filepath.Join(ours, "index"))
	if o.since != nil {
		if raw, err = o.since.index, nil; len(raw) == 0 {
			err = fs.ErrNotExist // there was no file
		}
	}
	if err == nil {
		if x, err = parseIndex(raw, m.Format); err != nil {
			return nil, err
		}
		passed, err := ch.passOver(x, o)
		if err != nil {
			return nil, err
		}
		if err := s.writeIndex(sc, x.assume(passed)); err != nil {
			return nil, err
		}
		// Exit 1 says that files differ; their entries stay as they are.
		if err := onTree("update-index", "-q", "--refresh", "--ignore-submodules").Run(ctx); err != nil && git.ExitCode(err) != 1 {
			return nil, err
		}
		if fresh, err = sc.readIndex(); err != nil {
			return nil, err
		}
		if x, err = parseIndex(fresh, m.Format); err != nil {
			return nil, err
		}
		if clean := x.assume(nil); o.since == nil && !bytes.Equal(clean, raw) {
			// The next call need not read these files again. Entries tell of the same commit, whoever is last.
			if err := writeFile(ours, "index", clean, 0o644, false); err != nil {
				return nil, err
			}
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	list := func(c *git.Cmd) error {
		// Git passes over a directory that it cannot open, such as one whose path is too long, and that is no failure to it.
		c.Progress = func(line string) {
			if what, ok := strings.CutPrefix(line, "warning: could not open directory "); ok && len(ch.notes) < maxNotes {
				ch.note("a directory is not in the patch, for it cannot be opened: %s", clipEnds(what))
			}
		}
		out, err := c.Output(ctx)
		if err != nil {
			return err
		}
		for name := range strings.SplitSeq(string(out), "\x00") {
			if err := ch.take(name); err != nil {
				return err
			}
		}
		return nil
	}
	ls := onTree("ls-files", "-z", "--modified", "--deleted", "--others")
	switch {
	case o.since != nil && !o.all:
		if err := s.listSince(ctx, onTree, sc, x, fresh, m.Format, list); err != nil {
			return nil, err
		}
	case o.all:
		err = list(ls)
	default:
		ls.Args = append(ls.Args, "--exclude-standard")
		err = list(ls)
	}
	if err == nil && o.marking {
		c := onTree("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--", ":(glob)**/.gitignore")
		c.Env = []string{"GIT_LITERAL_PATHSPECS=0"}
		err = list(c)
	}
	if err != nil {
		return nil, err
	}
	for _, e := range x.entries {
		if e.mode&unix.S_IFMT == 0o160000 {
			if err := ch.submodule(e.name); err != nil {
				return nil, err
			}
		}
	}
	if len(ch.gone) > 0 {
		var in bytes.Buffer
		zero := strings.Repeat("0", 40)
		if m.Format == "sha256" {
			zero = strings.Repeat("0", 64)
		}
		for _, n := range ch.gone {
			in.WriteString("0 " + zero + "\t" + n + "\x00")
		}
		c := onTree("update-index", "-z", "--index-info")
		c.Stdin = &in
		if err := c.Run(ctx); err != nil {
			return nil, err
		}
	}
	// After the removals: in a submodule git would say nothing of ignored files.
	if len(ch.nested) > 0 && !o.all && o.since == nil {
		if err := s.dropIgnored(ctx, onTree, ch); err != nil {
			return nil, err
		}
	}
	ch.afford(o.budget)
	if o.since != nil {
		ch.compareHeld()
	}
	if add := append(ch.add, ch.nested...); len(add) > 0 {
		slices.Sort(add)
		c := onTree("update-index", "-z", "--add", "--remove", "--replace", "--stdin")
		c.Stdin = strings.NewReader(strings.Join(add, "\x00") + "\x00")
		c.Config = []git.Setting{{Key: "core.compression", Value: "1"}, {Key: "core.bigFileThreshold", Value: "32m"}}
		c.Progress = func(line string) {
			if name, ok := strings.CutPrefix(line, "Ignoring path "); ok && len(ch.notes) < maxNotes {
				ch.note("%s is not in the patch: git refuses to carry a file of its kind or name", name)
			}
		}
		if err := c.Run(ctx); err != nil {
			return nil, err
		}
	}
	if ch.unchanged() && m.Commit != "" && !o.marking && o.since == nil {
		return &snap{tree: m.Commit, notes: ch.notes, large: ch.large}, nil
	}
	write := onTree("write-tree")
	write.WorkTree = ""
	tree, err := write.Line(ctx)
	if err != nil {
		return nil, err
	}
	return &snap{tree: tree, notes: ch.notes, large: ch.large, held: ch.held}, nil
}

// changes sorts what git lists into files to record and files that are gone.
type changes struct {
	s    *Store
	id   warren.WorkspaceID
	root *os.Root
	walk *walker
	seen map[string]bool
	add  []string
	gone []string
	// nested are files of repositories inside the workspace.
	nested []string
	notes  []string
	// most is how large a file may be; larger ones stay as the base has them.
	most  int64
	large []string
	since *mark
	// held are the stamps of files that are not read, sizes the sizes of those that are.
	held  map[string]string
	sizes map[string]int64
}

func (c *changes) open() (err error) {
	c.seen = map[string]bool{}
	if c.root, err = os.OpenRoot(c.s.files(c.id)); err != nil {
		return err
	}
	c.walk, err = newWalker(c.s.files(c.id))
	if err != nil {
		c.root.Close()
	}
	return err
}

func (c *changes) close() {
	c.walk.close()
	c.root.Close()
}

// take sorts one name from git ls-files; one that ends with a slash is a repository of its own.
func (c *changes) take(name string) error {
	if name == "" || c.seen[name] {
		return nil
	}
	c.seen[name] = true
	if dir, ok := strings.CutSuffix(name, "/"); ok {
		return c.repository(dir, 0)
	}
	if c.since != nil && c.since.held[name] != "" {
		return nil // see compareHeld
	}
	if hasDotGit(name) {
		c.note("%s is not in the patch: git cannot carry files named .git", name)
		return nil
	}
	mode, size, err := c.stat(name)
	if err != nil {
		return err
	}
	switch mode {
	case unix.S_IFREG, unix.S_IFLNK:
		if c.tooLarge(name, size) {
			return nil
		}
		c.add, c.sizes[name] = append(c.add, name), size
	default:
		c.gone = append(c.gone, name)
		if mode != unix.S_IFDIR {
			break
		}
		// Of a repository where a file was git lists nothing.
		if dotGit, err := c.mode(name + "/.git"); err != nil || dotGit == 0 {
			return err
		}
		return c.repository(name, 0)
	}
	return nil
}

// tooLarge notes a file that is left out for its size.
func (c *changes) tooLarge(name string, size int64) bool {
	if size <= c.most {
		return false
	}
	return c.hold(name, size)
}

// hold leaves a file out, and remembers it by its stamp.
func (c *changes) hold(name string, size int64) bool {
	c.held[name], _ = c.stamp(name)
	c.large = append(c.large, fmt.Sprintf("%s (%d MiB)", printable(name), size>>20))
	return true
}

// mode returns the type of a file, 0 when it is not there or a part of its path is not a directory.
func (c *changes) mode(name string) (uint32, error) {
	mode, _, err := c.stat(name)
	return mode, err
}

func (c *changes) stat(name string) (mode uint32, size int64, err error) {
	st, err := c.lstat(name)
	if vanished(err) {
		return 0, 0, nil
	}
	return st.Mode & unix.S_IFMT, st.Size, err
}

func (c *changes) lstat(name string) (st unix.Stat_t, err error) {
	dir, err := c.walk.dir(path.Dir(name))
	if err == nil {
		err = unix.Fstatat(dir, path.Base(name), &st, unix.AT_SYMLINK_NOFOLLOW)
	}
	return st, err
}

// repository takes the files of a repository inside the workspace as plain files.
func (c *changes) repository(dir string, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("%.80s...: directories are nested more than %d deep: %w", dir, maxDepth, warren.ErrInvalid)
	}
	f, err := c.root.Open(dir)
	if err != nil {
		if vanished(err) || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	entries, err := f.ReadDir(-1)
	f.Close()
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := dir + "/" + e.Name()
		switch {
		case strings.EqualFold(e.Name(), ".git"):
		case e.IsDir():
			if err := c.repository(name, depth+1); err != nil {
				return err
			}
		case c.seen[name]:
		case e.Type().IsRegular() || e.Type()&fs.ModeSymlink != 0:
			c.seen[name] = true
			if c.since != nil && c.since.held[name] != "" {
				continue
			}
			if fi, err := e.Info(); err == nil {
				if c.tooLarge(name, fi.Size()) {
					continue
				}
				c.sizes[name] = fi.Size()
			}
			c.nested = append(c.nested, name)
		}
	}
	return nil
}

// submodule looks at a submodule of the base commit. Git leaves out what is in its directory.
func (c *changes) submodule(name string) error {
	mode, err := c.mode(name)
	if err != nil || mode != unix.S_IFDIR {
		return err
	}
	if git, err := c.mode(name + "/.git"); err != nil {
		return err
	} else if git != 0 {
		c.note("%s is a submodule with a repository of its own: its files are not in the patch", name)
		return nil
	}
	before := len(c.nested)
	if err := c.repository(name, 0); err != nil {
		return err
	}
	if len(c.nested) > before {
		c.gone = append(c.gone, name)
	}
	return nil
}

func (c *changes) note(format, name string) {
	c.notes = append(c.notes, fmt.Sprintf(format, printable(name)))
}

// dropIgnored takes out of the nested files what .gitignore files name.
func (s *Store) dropIgnored(ctx context.Context, onTree func(...string) *git.Cmd, ch *changes) error {
	c := onTree("check-ignore", "-z", "--no-index", "--stdin")
	// This verb knows no literal names: a prefix keeps a name from being a pattern.
	c.Env = []string{"GIT_LITERAL_PATHSPECS=0"}
	c.Stdin = strings.NewReader("./" + strings.Join(ch.nested, "\x00./") + "\x00")
	out, err := c.Output(ctx)
	if err != nil && git.ExitCode(err) != 1 { // 1: none
		return err
	}
	ignored := map[string]bool{}
	for n := range strings.SplitSeq(string(out), "\x00") {
		ignored[strings.TrimPrefix(n, "./")] = true
	}
	ch.nested = slices.DeleteFunc(ch.nested, func(n string) bool { return ignored[n] })
	return nil
}

func hasDotGit(name string) bool {
	for part := range strings.SplitSeq(name, "/") {
		if strings.EqualFold(part, ".git") {
			return true
		}
	}
	return false
}

// printable quotes a name for a line of text.
func printable(name string) string {
	q := fmt.Sprintf("%q", name)
	if q == `"`+name+`"` {
		return name
	}
	return q
}
