// Package image keeps the read-only root file systems that sandboxes start from.
//
// An image is one of three things: "host", the host's own programs with a clean /etc (package hostroot); an OCI image
// pulled from a registry; or a tar that was imported or bootstrapped. All but the first consist of layers, directories that
// hold one tar each, unpacked once under the SHA-256 of that tar (its DiffID) and shared by every image that has it, in
// overlayfs's own form. On top of an image's layers comes a thin one of ours, which adds what a sandbox needs: mount points,
// the account of the sandbox's user, a rule for sudo.
//
// Below the store's directory:
//
//	blobs/sha256/     compressed layers while they are downloaded; an interrupted download goes on from there
//	layers/<hex>/     an unpacked layer, and <hex>.json with its size
//	refs/<hex>.json   a name: the digest, the configuration and the layers of an image
//	host/             the skeletons of the image host
//	locks/            one lock per layer, and one for the store
//
// Every id on disk is shifted by [Options.IDBase], so no file of an image belongs to a user of the host. Several processes may
// use one store. What an interrupted process has left half-made has a temporary name, which nothing reads and Open removes.
package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/image/hostroot"
	"github.com/warren-sandbox/warren/internal/image/unpack"
)

// HostName is the name of the image that shows the host's own programs.
const HostName = "host"

// Options of a [Store]. Dir is required.
type Options struct {
	Dir string
	// IDBase is the host id that stands for 0 in unpacked layers.
	IDBase uint32
	Logger *slog.Logger
	// HostRoot is what the image host is made from, "/" when empty. Tests give a made-up tree.
	HostRoot string
	// Limits of each layer that is unpacked; zeros mean the defaults.
	Limits unpack.Limits
	// Keychain has the credentials for registries; nil means the user's Docker configuration and its helpers.
	Keychain authn.Keychain
}

// Store keeps images below one directory.
type Store struct {
	dir    string
	base   uint32
	log    *slog.Logger
	host   *hostroot.Host
	limits unpack.Limits
	keys   authn.Keychain
	// pause is how long a download that broke off waits for its first retry.
	pause time.Duration
	hook  func(step string)
}

// Image is a root file system that a sandbox can start from.
type Image struct {
	// Name as it was given to Pull, Import or Bootstrap; "host" for the host's.
	Name string
	// Digest of the manifest that was pulled, of the image that was imported, or of the host's skeleton.
	Digest string
	// Kind is "host", "oci", "tar" or "bootstrap".
	Kind string
	// Size in bytes on disk. Layers that other images share are counted for each.
	Size    int64
	Created time.Time
	Config  Config
	Root    driver.Root
}

// Config is what an image says about the processes in it.
type Config struct {
	User, WorkingDir string
	Env              map[string]string
	Cmd, Entrypoint  []string
}

// Open opens a store, makes its directories, and removes what interrupted processes left.
func Open(o Options) (*Store, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Store{dir: o.Dir, base: o.IDBase, log: o.Logger, limits: o.Limits, keys: o.Keychain, pause: 200 * time.Millisecond}
	for _, d := range []string{"", "blobs", "blobs/sha256", "layers", "refs", "locks", "host"} {
		if err := os.MkdirAll(filepath.Join(o.Dir, d), 0o700); err != nil {
			return nil, fmt.Errorf("open the image store: %w", storeError(err))
		}
	}
	var err error
	s.host, err = hostroot.Open(hostroot.Options{Host: o.HostRoot, Dir: filepath.Join(o.Dir, "host"), IDBase: o.IDBase, Logger: o.Logger})
	if err != nil {
		return nil, fmt.Errorf("open the image store: %w", storeError(err))
	}
	if err := s.collect(true); err != nil {
		return nil, fmt.Errorf("open the image store: %w", err)
	}
	return s, nil
}

// Close ends what runs in the background. Images stay.
func (s *Store) Close() error {
	s.host.Close()
	return nil
}

// Prepare starts in the background what the first Resolve of the host's image needs, so that the first sandbox of a new data
// directory does not wait for it.
func (s *Store) Prepare() { s.host.Prepare() }

// minPrefix is how many digits of a digest name an image.
const minPrefix = 6

// Resolve finds an image: "host", a name with or without its tag, name@digest, a digest, or a prefix of at least six
// hexadecimal digits that only one image has. One that is not there gives [warren.ErrNotFound].
func (s *Store) Resolve(ctx context.Context, ref string) (*Image, error) {
	if ref == HostName || strings.HasPrefix(ref, HostName+":") {
		return s.resolveHost(ctx, ref)
	}
	r, err := s.find(ref)
	if errors.Is(err, warren.ErrNotFound) {
		return nil, fmt.Errorf("%w; run `warren image pull %s` first, or `warren image import` it", err, ref)
	}
	if err != nil {
		return nil, err
	}
	return s.image(r)
}

// find looks for the record that a reference means.
func (s *Store) find(ref string) (*record, error) {
	k, kerr := key(ref)
	if kerr == nil {
		if r, err := s.loadRecord(k); err != nil || r != nil {
			return r, err
		}
	}
	recs, _, err := s.records()
	if err != nil {
		return nil, err
	}
	repo, digest, pinned := strings.Cut(k, "@")
	hex := strings.TrimPrefix(ref, "sha256:")
	var hits, short []*record
	for _, r := range recs {
		for _, d := range append([]string{r.Digest}, r.Pins...) {
			byPrefix := len(hex) >= minPrefix/2 && strings.HasPrefix(d, "sha256:"+hex)
			if byPrefix && len(hex) < minPrefix {
				short = append(short, r)
				break
			}
			if byPrefix || pinned && d == digest && withoutTag(r.Key) == repo {
				hits = append(hits, r)
				break
			}
		}
	}
	for _, r := range hits {
		if r.Digest != hits[0].Digest {
			return nil, fmt.Errorf("image %q: %w: it is ambiguous, the digests of %s begin so; give more digits", ref, warren.ErrInvalid, labels(hits))
		}
	}
	if len(hits) == 0 && len(short) > 0 {
		return nil, fmt.Errorf("image %q: %w: too short for a digest, though that of %s begins so; give at least %d digits, or the name", ref, warren.ErrInvalid, labels(short), minPrefix)
	}
	switch {
	case len(hits) > 0:
		return hits[0], nil
	case kerr != nil && hex == ref:
		return nil, kerr
	}
	return nil, fmt.Errorf("image %q: %w", ref, warren.ErrNotFound)
}

// labels lists images by name and digest, the first eight.
func labels(list []*record) string {
	var s []string
	for _, r := range list[:min(len(list), 8)] {
		s = append(s, fmt.Sprintf("%s (%.19s)", r.Name, r.Digest))
	}
	return strings.Join(s, ", ")
}

// withoutTag is a canonical name without its tag or digest.
func withoutTag(key string) string {
	key, _, _ = strings.Cut(key, aside)
	key, _, _ = strings.Cut(key, "@")
	if i := strings.LastIndexByte(key, ':'); i > strings.LastIndexByte(key, '/') {
		key = key[:i]
	}
	return key
}

// resolveHost resolves the host's image, and its digest as long as the host has not changed.
func (s *Store) resolveHost(ctx context.Context, ref string) (*Image, error) {
	h, err := s.host.Resolve(ctx)
	if err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return nil, fmt.Errorf("image host: %w; the files of images belong to ids of their own, which only root can give", warren.ErrDenied)
		}
		return nil, err
	}
	if ref != HostName && ref != h.Digest {
		return nil, fmt.Errorf("image %q: %w: the host has changed since; use image host", ref, warren.ErrNotFound)
	}
	return &Image{Name: HostName, Digest: h.Digest, Kind: "host", Size: h.Size, Created: h.Created, Config: Config{Env: h.Env}, Root: h.Root}, nil
}

// List returns all images, the host's first, then by name. One whose layers are damaged is left out and told to the log.
func (s *Store) List(ctx context.Context) ([]*Image, error) {
	h, err := s.resolveHost(ctx, HostName)
	if err != nil {
		return nil, err
	}
	recs, _, err := s.records()
	if err != nil {
		return nil, err
	}
	list := []*Image{h}
	for _, r := range recs {
		im, err := s.image(r)
		if err != nil {
			s.log.Error("list images", "image", r.Name, "err", err)
			continue
		}
		list = append(list, im)
	}
	return list, nil
}

// Delete removes an image, by the references that Resolve takes, and the layers that no other image needs. It does not ask
// whether a sandbox uses it: the engine does before. A digest that has several names loses the first of them only.
func (s *Store) Delete(ctx context.Context, ref string) error {
	if ref == HostName || strings.HasPrefix(ref, HostName+":") {
		return fmt.Errorf("image %q: %w: the host's image cannot be deleted", ref, warren.ErrInvalid)
	}
	r, err := s.find(ref)
	if err != nil {
		return err
	}
	if err := os.Remove(s.refPath(r.Key)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("image %q: %w", ref, err)
	}
	s.step("name removed")
	return s.collect(true)
}

// Skeletons returns the digests ("host:…") of the host image's directories, the one in use and those of earlier states of the
// host. PruneHost removes all that keep does not name, save the current one; the engine names those of running sandboxes.
func (s *Store) Skeletons() ([]string, error) { return s.host.Skeletons() }

// PruneHost removes the host image's directories that keep does not name; the current one always stays.
func (s *Store) PruneHost(keep map[string]bool) error {
	list, err := s.host.Skeletons()
	if err != nil {
		return err
	}
	for _, d := range list {
		if !keep[d] {
			if err := s.host.Delete(d); err != nil {
				return err
			}
		}
	}
	return nil
}
