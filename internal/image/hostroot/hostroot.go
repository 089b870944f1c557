// Package hostroot makes the image "host": the host's own programs, read-only, in a root file system that shows nothing of
// the host's users.
//
// The image is a small directory of our own, the skeleton, with a synthesised /etc, an empty /home/user and mount points, and
// a list of binds: /usr, /opt, the host's list of installed packages, and /bin, /lib and so on where they are not links into
// /usr. Of /etc only the names in an explicit list are copied, each with its reason, and only files that every user of the
// host can read; passwords, keys, tokens and people are never read.
//
// Files below the bound directories that not every user of the host may read are covered ([driver.Bind.Hide]), for the
// sandbox's root could read them. They are looked for once per process, and again when a directory near the top or the list
// of packages changes, and at the latest with the first Resolve after [rescan]: a file that appears deep below /usr with a mode
// that forbids reading is hidden from the sandboxes that are created after that, not from those that run.
package hostroot

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/image/tree"
	"golang.org/x/sys/unix"
)

// rescan is how old the list of hidden files may get before a Resolve starts another look in the background.
const rescan = 10 * time.Minute

// Options of a [Host]; Dir is required.
type Options struct {
	// Host is the root of the host, "/" when empty. Tests give a made-up tree.
	Host string
	// Dir holds the skeletons, one directory for each digest, and a note of the newest.
	Dir string
	// IDBase is the host id that stands for 0 in the skeleton.
	IDBase uint32
	Logger *slog.Logger
}

// Host makes and remembers the image.
type Host struct {
	o  Options
	mu sync.Mutex
	// now is what the last Resolve returned, nil at first.
	now *state
	// scanning is true while a look in the background is under way, and done when it ends.
	scanning bool
	done     sync.WaitGroup
	stop     context.CancelFunc
	ctx      context.Context
}

// Image is the image as it is now.
type Image struct {
	// Digest is "host:" and a SHA-256 in hexadecimal over the skeleton's names, owners, modes and content and the binds.
	Digest string
	Root   driver.Root
	Env    map[string]string
	// Size of the skeleton in bytes; what is bound takes no room of ours.
	Size    int64
	Created time.Time
}

// state is what is remembered on disk.
type state struct {
	Digest string
	Binds  []driver.Bind
	Env    map[string]string
	Size   int64
	// Boot is the boot of the machine in which the skeleton was written. It is not synced to the disk, so one of an earlier boot
	// is written anew.
	Boot    string
	Created time.Time
	Scanned time.Time
	// Inputs are the stamps of what the skeleton was made from, Watch those of what the scan depends on.
	Inputs map[string]stamp
	Watch  map[string]stamp
	Tops   []string
	Hide   []string
}

// stamp tells one state of a file from another; the zero stamp is that of a name that does not exist.
type stamp struct {
	Dev, Ino     uint64
	Mode         uint32
	Size         int64
	MTime, CTime int64
}

// Open prepares; it reads nothing of the host.
func Open(o Options) (*Host, error) {
	if o.Host == "" {
		o.Host = "/"
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, err
	}
	h := &Host{o: o}
	h.ctx, h.stop = context.WithCancel(context.Background())
	return h, nil
}

// Close ends what runs in the background.
func (h *Host) Close() {
	h.stop()
	h.done.Wait()
}

// Resolve returns the image, made anew when the host's inputs have changed. Skeletons of earlier states stay for the
// sandboxes that run on them.
func (h *Host) Resolve(ctx context.Context) (*Image, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.now == nil {
		h.now = h.load()
		if h.now != nil {
			h.refresh() // the list on disk may be old: look again, but do not wait
		}
	}
	if s := h.now; s != nil && h.fresh(s.Inputs) && h.fresh(s.Watch) && h.exists(s) {
		if time.Since(s.Scanned) > rescan {
			h.refresh()
		}
		return h.image(s), nil
	}
	s, err := h.make(ctx)
	if err != nil {
		return nil, fmt.Errorf("image host: %w", err)
	}
	h.now = s
	return h.image(s), nil
}

// Prepare resolves in the background.
func (h *Host) Prepare() {
	h.done.Go(func() {
		if _, err := h.Resolve(h.ctx); err != nil && h.ctx.Err() == nil {
			h.o.Logger.Warn("prepare the image host", "err", err)
		}
	})
}

// Skeletons returns the digests of all skeletons on disk, and Delete removes one of them.
func (h *Host) Skeletons() ([]string, error) {
	list, err := os.ReadDir(h.o.Dir)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range list {
		if e.IsDir() && !strings.HasPrefix(e.Name(), ".") {
			out = append(out, "host:"+e.Name())
		}
	}
	return out, nil
}

// Delete removes the skeleton of a digest that no sandbox uses. The one that is in use by the next Resolve is kept.
func (h *Host) Delete(digest string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.now
	if now == nil {
		now = h.load() // what the first Resolve of this process is going to return
	}
	hex, ok := strings.CutPrefix(digest, "host:")
	if !ok || hex == "" || strings.ContainsAny(hex, "./") || now != nil && now.Digest == hex {
		return nil
	}
	return errors.Join(os.RemoveAll(filepath.Join(h.o.Dir, hex)), os.RemoveAll(filepath.Join(h.o.Dir, hex+".boot")))
}

func (h *Host) image(s *state) *Image {
	return &Image{
		Digest: "host:" + s.Digest,
		Root: driver.Root{
			Digest: "host:" + s.Digest,
			Layers: []driver.Layer{{Dir: filepath.Join(h.o.Dir, s.Digest), IDBase: h.o.IDBase}},
			Binds:  slices.Clone(s.Binds),
		},
		Env: s.Env, Size: s.Size, Created: s.Created,
	}
}

func (h *Host) exists(s *state) bool { return intact(filepath.Join(h.o.Dir, s.Digest)) }

// intact says whether a skeleton is there and was not emptied: it looks for the first and the last that is written.
func intact(dir string) bool {
	for _, name := range []string{"etc/passwd", ".warren/guest"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err != nil {
			return false
		}
	}
	return true
}

// fresh says whether every name still has its stamp.
func (h *Host) fresh(stamps map[string]stamp) bool {
	for name, was := range stamps {
		if h.stamp(name) != was {
			return false
		}
	}
	return true
}

// stamp looks at a name of the host, or at an absolute path outside of it when it begins with "//".
func (h *Host) stamp(name string) stamp {
	p := filepath.Join(h.o.Host, name)
	if outside, ok := strings.CutPrefix(name, "/"); ok {
		p = outside
	}
	var st unix.Stat_t
	if unix.Lstat(p, &st) != nil {
		return stamp{}
	}
	return stampOf(&st)
}

func stampOf(st *unix.Stat_t) stamp {
	return stamp{uint64(st.Dev), st.Ino, st.Mode, st.Size, st.Mtim.Nano(), st.Ctim.Nano()}
}

// load reads the note of an earlier process, nil when there is none that holds in this boot.
func (h *Host) load() *state {
	b, err := os.ReadFile(filepath.Join(h.o.Dir, "state.json"))
	if err != nil {
		return nil
	}
	var s state
	if json.Unmarshal(b, &s) != nil || s.Boot != bootID() || s.Digest == "" {
		return nil
	}
	// Another version of this program may make another skeleton of the same host.
	if _, ok := s.Inputs[self()]; !ok {
		return nil
	}
	return &s
}

// self is the name under which the running program is among the inputs.
func self() string {
	exe, err := os.Executable()
	if err != nil {
		return "//proc/self/exe"
	}
	return "/" + exe
}

func (h *Host) save(s *state) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	tmp := filepath.Join(h.o.Dir, ".state-"+rand.Text())
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		os.Remove(tmp)
		return err
	}
	return os.Rename(tmp, filepath.Join(h.o.Dir, "state.json"))
}

func bootID() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b))
}

// refresh looks for hidden files in the background and takes the result over when it differs.
func (h *Host) refresh() {
	if h.scanning || h.ctx.Err() != nil {
		return
	}
	h.scanning = true
	tops := h.now.Tops
	h.done.Go(func() {
		before := time.Now()
		f, err := scan(h.ctx, h.o.Host, tops)
		h.mu.Lock()
		defer h.mu.Unlock()
		h.scanning = false
		if err != nil {
			if h.ctx.Err() == nil {
				h.o.Logger.Warn("look for files of the host that must not show in sandboxes", "err", err)
			}
			return
		}
		if h.now == nil || !slices.Equal(h.now.Tops, tops) {
			return
		}
		next := *h.now
		if slices.Equal(f.hide, next.Hide) {
			next.Scanned, next.Watch = before, f.watch
			h.now = &next
			if err := h.save(&next); err != nil {
				h.o.Logger.Warn("note the state of the image host", "err", err)
			}
			return
		}
		h.now.Inputs = map[string]stamp{"": {}} // never fresh: the next Resolve makes it anew
	})
}

// make writes a skeleton and scans at the same time. The caller holds the mutex; a lock on disk keeps other processes away.
func (h *Host) make(ctx context.Context) (*state, error) {
	lock, err := os.OpenFile(filepath.Join(h.o.Dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return nil, err
	}
	h.clean()

	in, err := tree.Open(h.o.Host)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	tmp, err := os.MkdirTemp(h.o.Dir, ".new-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	out, err := os.Open(tmp)
	if err != nil {
		return nil, err
	}
	sk := &skeleton{host: in, fds: map[string]*os.File{".": out}, base: h.o.IDBase, seen: map[string]stamp{}, stamp: h.stamp, made: map[string]bool{}}
	defer sk.close()
	if err := sk.tops(); err != nil {
		return nil, err
	}

	type result struct {
		found
		err error
	}
	scanned := make(chan result, 1)
	scanCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	before := time.Now()
	go func() {
		f, err := scan(scanCtx, h.o.Host, sk.binds)
		scanned <- result{f, err}
	}()
	content, err := sk.build()
	if err != nil {
		cancel()
		<-scanned
		return nil, err
	}
	r := <-scanned
	if r.err != nil {
		return nil, r.err
	}

	s := &state{Env: map[string]string{"PATH": sk.searchPath(), "LANG": "C.UTF-8"}, Boot: bootID(), Created: time.Now(), Scanned: before,
		Tops: sk.binds, Hide: r.hide, Size: sk.copied}
	for _, b := range sk.binds {
		s.Binds = append(s.Binds, driver.Bind{Source: path.Join(h.o.Host, b), Target: "/" + b})
	}
	for _, name := range r.hide {
		s.Binds = append(s.Binds, driver.Bind{Target: "/" + name, Hide: true})
	}
	s.Inputs, s.Watch = sk.seen, r.watch
	s.Inputs[self()] = h.stamp(self())
	binds, err := json.Marshal(s.Binds)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(append([]byte(content+"\n"), binds...))
	s.Digest = hex.EncodeToString(sum[:])

	if err := h.place(tmp, s.Digest); err != nil {
		return nil, err
	}
	return s, h.save(s)
}

// place gives the finished skeleton its name. One of the same digest that this boot has made stays, for sandboxes may run on it.
func (h *Host) place(tmp, digest string) error {
	dir := filepath.Join(h.o.Dir, digest)
	mark := filepath.Join(h.o.Dir, digest+".boot")
	if b, err := os.ReadFile(mark); err == nil && string(b) == bootID() {
		if intact(dir) {
			return nil
		}
	}
	if err := os.Rename(dir, filepath.Join(h.o.Dir, ".old-"+rand.Text())); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Rename(tmp, dir); err != nil {
		return err
	}
	h.clean()
	return os.WriteFile(mark, []byte(bootID()), 0o600)
}

// clean removes what an interrupted process has left. The caller holds the lock on disk.
func (h *Host) clean() {
	list, err := os.ReadDir(h.o.Dir)
	if err != nil {
		return
	}
	for _, e := range list {
		if strings.HasPrefix(e.Name(), ".old-") || strings.HasPrefix(e.Name(), ".new-") || strings.HasPrefix(e.Name(), ".state-") {
			os.RemoveAll(filepath.Join(h.o.Dir, e.Name()))
		}
	}
}
