package image

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/image/tree"
	"github.com/warren-sandbox/warren/internal/image/unpack"
	"golang.org/x/sys/unix"
)

// Names in the store that begin with a dot are half-made or on their way out: nothing reads them.
const (
	newPrefix = ".new-"
	oldPrefix = ".old-"
)

// keepParts is how long an interrupted download may wait for a retry.
const keepParts = 24 * time.Hour

func (s *Store) layerDir(diffID string) string { return filepath.Join(s.dir, "layers", diffID) }

// layer returns what is known of an unpacked layer, nil when it is not there.
func (s *Store) layer(diffID string) (*layerInfo, error) {
	b, err := os.ReadFile(s.layerDir(diffID) + ".json")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("image store: %w", err)
	}
	var info layerInfo
	if err := json.Unmarshal(b, &info); err != nil {
		return nil, nil // damaged: as if it were not there, so that a pull mends it
	}
	if _, err := os.Lstat(s.layerDir(diffID)); err != nil {
		return nil, nil
	}
	return &info, nil
}

// ensureLayer unpacks a layer unless it is there. The caller holds the store's lock; several may ask for one layer at the
// same time, and one of them does it.
func (s *Store) ensureLayer(ctx context.Context, diffID string, open func(context.Context) (io.ReadCloser, error)) error {
	l, err := s.lock(ctx, "layer-"+diffID, true)
	if err != nil {
		return err
	}
	defer l.unlock()
	if info, err := s.layer(diffID); err != nil || info != nil {
		return err
	}
	r, err := open(ctx)
	if err != nil {
		return err
	}
	defer r.Close()
	tmp, got, err := s.unpack(ctx, r)
	if err != nil {
		return fmt.Errorf("layer %s: %w", short(diffID), err)
	}
	defer os.RemoveAll(tmp.dir)
	if got != diffID {
		return fmt.Errorf("layer %s: %w: it unpacks to %s, which is not what the image's configuration says", short(diffID), warren.ErrInvalid, short(got))
	}
	return s.place(tmp, diffID)
}

// addLayer unpacks a layer whose DiffID is not known before.
func (s *Store) addLayer(ctx context.Context, r io.Reader) (diffID string, err error) {
	tmp, diffID, err := s.unpack(ctx, r)
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp.dir)
	l, err := s.lock(ctx, "layer-"+diffID, true)
	if err != nil {
		return "", err
	}
	defer l.unlock()
	if info, err := s.layer(diffID); err != nil || info != nil {
		return diffID, err
	}
	return diffID, s.place(tmp, diffID)
}

// unpacked is a layer under its temporary name.
type unpacked struct {
	dir  string
	info layerInfo
}

// unpack writes a layer to a temporary name, all on disk when it returns.
func (s *Store) unpack(ctx context.Context, r io.Reader) (*unpacked, string, error) {
	u := &unpacked{dir: filepath.Join(s.dir, "layers", newPrefix+rand.Text())}
	diffID, err := u.fill(ctx, r, s.base, s.limits)
	if err != nil {
		return nil, "", errors.Join(storeError(err), os.RemoveAll(u.dir))
	}
	return u, diffID, nil
}

func (u *unpacked) fill(ctx context.Context, r io.Reader, base uint32, limits unpack.Limits) (string, error) {
	if err := os.Mkdir(u.dir, 0o755); err != nil {
		return "", err
	}
	if err := os.Lchown(u.dir, int(base), int(base)); err != nil {
		return "", err
	}
	t, err := tree.Open(u.dir)
	if err != nil {
		return "", err
	}
	defer t.Close()
	diffID, stats, err := unpack.Layer(ctx, t, r, unpack.Options{IDBase: base, Limits: limits})
	if err != nil {
		return "", err
	}
	u.info = layerInfo{Size: stats.Bytes, Entries: stats.Entries}
	// Tens of thousands of small files: one call for the file system costs less than one for each.
	return diffID, unix.Syncfs(int(t.Dir().Fd()))
}

// place gives an unpacked layer its name. The caller holds the layer's lock.
func (s *Store) place(u *unpacked, diffID string) error {
	dir := s.layerDir(diffID)
	if err := s.discard(dir); err != nil { // an earlier process may have stopped between the two steps
		return err
	}
	if err := os.Rename(u.dir, dir); err != nil {
		return storeError(err)
	}
	s.step("layer renamed")
	if err := syncDir(filepath.Dir(dir)); err != nil {
		return storeError(err)
	}
	return writeFile(dir+".json", &u.info)
}

// discard takes a directory out of the way at once and then removes it.
func (s *Store) discard(dir string) error {
	old := filepath.Join(filepath.Dir(dir), oldPrefix+rand.Text())
	err := os.Rename(dir, old)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return storeError(err)
	}
	return storeError(os.RemoveAll(old))
}

// collect removes what no reference names. It does nothing while another adds to the store, for whoever adds collects in
// the end. Unfinished downloads are kept for a while when keep is true.
func (s *Store) collect(keep bool) error {
	l, err := s.tryLock(storeLock, true)
	if err != nil || l == nil {
		return err
	}
	defer l.unlock()
	recs, whole, err := s.records()
	if err != nil {
		return err
	}
	used := map[string]bool{}
	for _, r := range recs {
		for _, d := range append(r.Layers, r.Top) {
			used[d] = true
		}
	}
	var errs []error
	layers, err := os.ReadDir(filepath.Join(s.dir, "layers"))
	errs = append(errs, err)
	for _, e := range layers {
		name := strings.TrimSuffix(e.Name(), ".json")
		path := filepath.Join(s.dir, "layers", e.Name())
		switch {
		case strings.HasPrefix(name, newPrefix), strings.HasPrefix(name, oldPrefix):
			errs = append(errs, os.RemoveAll(path))
		case used[name], !whole: // a record that cannot be read may need it
		case e.IsDir():
			errs = append(errs, s.discard(path))
		default:
			errs = append(errs, os.Remove(path))
		}
	}
	for _, dir := range []string{"refs", "blobs", "blobs/sha256", "locks"} {
		list, err := os.ReadDir(filepath.Join(s.dir, dir))
		errs = append(errs, err)
		for _, e := range list {
			stale := strings.HasPrefix(e.Name(), newPrefix) || dir == "locks" && e.Name() != storeLock
			if dir == "blobs/sha256" && !stale {
				fi, err := e.Info()
				stale = !keep || err == nil && time.Since(fi.ModTime()) > keepParts
			}
			if stale {
				errs = append(errs, os.RemoveAll(filepath.Join(s.dir, dir, e.Name())))
			}
		}
	}
	return storeError(errors.Join(errs...))
}

// storeError sorts errors of the store's own disk.
func storeError(err error) error {
	switch {
	case err == nil, errors.Is(err, warren.ErrExhausted), errors.Is(err, warren.ErrDenied):
		return err
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fmt.Errorf("%w: the disk of the image store is full (%w); free some space, or remove images with `warren image rm`", warren.ErrExhausted, err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: %w; the files of images belong to ids of their own, which only root can give", warren.ErrDenied, err)
	}
	return err
}

// step is where tests stop.
func (s *Store) step(name string) {
	if s.hook != nil {
		s.hook(name)
	}
}
