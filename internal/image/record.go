package image

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// record is a file below refs: one name of an image.
type record struct {
	Name   string
	Key    string
	Digest string
	// Pins are further digests by which the image may be asked for: that of the index it was chosen from.
	Pins    []string `json:",omitempty"`
	Kind    string
	Created time.Time
	Config  Config
	// Layers are DiffIDs in hexadecimal, lowest first, without ours.
	Layers []string
	// Top is our own layer.
	Top string
}

// layerInfo is a file beside an unpacked layer; a directory without one was not finished.
type layerInfo struct {
	// Size of the files in it, in bytes.
	Size    int64
	Entries int64
}

// key makes a name canonical, so that debian, debian:latest and docker.io/library/debian:latest are one.
func key(ref string) (string, error) {
	r, err := name.ParseReference(ref)
	if err != nil || !repositoryName.MatchString(r.Context().RepositoryStr()) || strings.HasPrefix(r.Context().RegistryStr(), ".") {
		return "", fmt.Errorf("image name %q: %w: a name looks like debian:12, ghcr.io/owner/name:tag or name@sha256:…", ref, warren.ErrInvalid)
	}
	return r.Name(), nil
}

// repositoryName is Docker's own rule, which go-containerregistry does not hold to in full.
var repositoryName = regexp.MustCompile(`^[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$`)

// newName checks a name that an image is to get.
func newName(n string) (string, error) {
	if n == HostName || strings.HasPrefix(n, HostName+":") || strings.HasPrefix(n, HostName+"@") {
		return "", fmt.Errorf("image name %q: %w: %s is the host's own image; choose another name", n, warren.ErrInvalid, HostName)
	}
	return key(n)
}

func (s *Store) refPath(key string) string {
	sum := sha256.Sum256([]byte(key))
	return filepath.Join(s.dir, "refs", hex.EncodeToString(sum[:16])+".json")
}

// saveRecord names an image; a record of the same name is replaced at once and as a whole. What the name meant before stays in
// the store under its digest, for sandboxes may run on it; it goes when it is deleted.
func (s *Store) saveRecord(r *record) error {
	old, err := s.loadRecord(r.Key)
	if err != nil {
		s.log.Error("read the record that is replaced", "err", err)
	}
	if old != nil && (old.Digest != r.Digest || old.Top != r.Top) {
		old.Name = strings.TrimSuffix(old.Name, "@"+old.Digest) + "@" + old.Digest
		old.Key += aside + old.Top
		if err := writeFile(s.refPath(old.Key), old); err != nil {
			return err
		}
	}
	return writeFile(s.refPath(r.Key), r)
}

// aside ends the canonical name in the key of a record that lost its name to a newer image.
const aside = "#"

// loadRecord reads one record, nil when there is none of that name.
func (s *Store) loadRecord(key string) (*record, error) {
	return readRecord(s.refPath(key))
}

func readRecord(path string) (*record, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("image store: %w", err)
	}
	var r record
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("image store: the record %s is damaged (%w); remove it and pull the image again", filepath.Base(path), err)
	}
	return &r, nil
}

// records reads all, by name. One that is damaged is told to the log and left out, for it must not stop the others; whole is
// false then.
func (s *Store) records() (out []*record, whole bool, err error) {
	list, err := os.ReadDir(filepath.Join(s.dir, "refs"))
	if err != nil {
		return nil, false, fmt.Errorf("image store: %w", err)
	}
	whole = true
	for _, e := range list {
		if strings.HasPrefix(e.Name(), ".") || !strings.HasSuffix(e.Name(), ".json") {
			continue
		}
		r, err := readRecord(filepath.Join(s.dir, "refs", e.Name()))
		if err != nil {
			s.log.Error("read an image's record", "err", err)
			whole = false
			continue
		}
		if r != nil {
			out = append(out, r)
		}
	}
	slices.SortFunc(out, func(a, b *record) int { return strings.Compare(a.Name, b.Name) })
	return out, whole, nil
}

// image makes a record into what callers see.
func (s *Store) image(r *record) (*Image, error) {
	im := &Image{Name: r.Name, Digest: r.Digest, Kind: r.Kind, Created: r.Created, Config: r.Config}
	sum := sha256.New()
	// A layer that an image has twice counts where it is on top: there it brings everything that it brings below, and
	// overlayfs takes no directory twice.
	var layers []string
	for i, l := range append(slices.Clone(r.Layers), r.Top) {
		if i < len(r.Layers) && slices.Contains(r.Layers[i+1:], l) {
			continue
		}
		layers = append(layers, l)
	}
	for _, l := range layers {
		info, err := s.layer(l)
		if err != nil {
			return nil, err
		}
		if info == nil {
			return nil, fmt.Errorf("image %q: %w: its layer %s is missing; pull or import it again", r.Name, warren.ErrNotFound, short(l))
		}
		im.Size += info.Size
		im.Root.Layers = append(im.Root.Layers, driver.Layer{Dir: s.layerDir(l), IDBase: s.base})
		fmt.Fprintln(sum, l)
	}
	im.Root.Digest = "sha256:" + hex.EncodeToString(sum.Sum(nil))
	return im, nil
}

func short(hex string) string { return hex[:min(12, len(hex))] }

// writeFile writes JSON so that the file is there whole or not at all, also after a crash.
func writeFile(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "\t")
	if err != nil {
		return err
	}
	tmp := filepath.Join(filepath.Dir(path), ".new-"+rand.Text())
	err = func() error {
		f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		_, err = f.Write(append(b, '\n'))
		err = errors.Join(err, f.Sync(), f.Close())
		if err != nil {
			return err
		}
		if err := os.Rename(tmp, path); err != nil {
			return err
		}
		return syncDir(filepath.Dir(path))
	}()
	if err != nil {
		os.Remove(tmp)
		return storeError(err)
	}
	return nil
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
