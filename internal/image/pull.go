package image

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/warren-sandbox/warren"
	"golang.org/x/sync/errgroup"
)

const (
	// parallel is how many layers are downloaded and unpacked at the same time.
	parallel = 3
	// maxLayers is how many layers an image may have; Docker's own limit is 127.
	maxLayers = 250
)

// PullOptions change a pull; the zero value is the usual one.
type PullOptions struct {
	// Name is the local name; empty means the reference as it was given.
	Name string
	// Platform, such as "linux/amd64", to choose from an index; empty means this machine's.
	Platform string
	// Insecure allows plain HTTP. A registry on this machine's loopback may always speak it.
	Insecure bool
	// Progress is called now and then, never by two goroutines at once.
	Progress func(Progress)
}

// Progress tells how far a pull, an import or a bootstrap is.
type Progress struct {
	// Step is "resolve", "pull", "import", "bootstrap" or "adapt".
	Step, Message string
	// Done of Total, in bytes; Total is 0 when it is not known.
	Done, Total int64
}

// Pull fetches an image from a registry, with the credentials of the user's Docker configuration. What is there already is not
// fetched again. Every manifest and blob is checked against its digest before it is used, every layer against its DiffID
// before it gets its name. When Pull fails no half-made layer and no name is left; a download that broke off for the network's
// sake is kept for a day, and the next Pull goes on with it.
func (s *Store) Pull(ctx context.Context, ref string, o PullOptions) (*Image, error) {
	im, err := s.pull(ctx, ref, o)
	s.tidy(err == nil || again(err))
	if err != nil {
		return nil, fmt.Errorf("pull image %s: %w", ref, err)
	}
	return im, nil
}

func (s *Store) pull(ctx context.Context, ref string, o PullOptions) (*Image, error) {
	if o.Name == "" {
		o.Name = ref
	}
	k, err := newName(o.Name)
	if err != nil {
		return nil, err
	}
	platform, err := parsePlatform(o.Platform)
	if err != nil {
		return nil, err
	}
	var nameOptions []name.Option
	if o.Insecure {
		nameOptions = append(nameOptions, name.Insecure)
	}
	from, err := name.ParseReference(ref, nameOptions...)
	if err != nil {
		return nil, fmt.Errorf("%w: a reference looks like debian:12, ghcr.io/owner/name:tag or name@sha256:…", warren.ErrInvalid)
	}
	progress := (&reporter{report: o.Progress}).tell
	progress(Progress{Step: "resolve", Message: from.Name()})
	keys := s.keys
	if keys == nil {
		keys = authn.DefaultKeychain
	}
	reg, err := dialRegistry(ctx, from.Context(), o.Insecure, keys)
	if err != nil {
		return nil, err
	}
	defer reg.close()
	m, digest, pins, err := reg.choose(ctx, from.Identifier(), platform)
	if err != nil {
		return nil, err
	}
	raw, err := reg.config(ctx, m.Config)
	if err != nil {
		return nil, err
	}
	conf, layers, err := parseConfig(raw, m.Layers, platform)
	if err != nil {
		return nil, err
	}

	lock, err := s.lock(ctx, storeLock, false)
	if err != nil {
		return nil, err
	}
	defer lock.unlock()
	if err := s.fetchLayers(ctx, reg, layers, progress); err != nil {
		return nil, err
	}
	rec := &record{Name: o.Name, Key: k, Digest: digest, Pins: pins, Kind: "oci", Created: time.Now(), Config: conf}
	for _, l := range layers {
		rec.Layers = append(rec.Layers, l.diffID)
	}
	return s.finish(ctx, rec, progress)
}

// finish adds our own layer and names the image. The caller holds the store's lock.
func (s *Store) finish(ctx context.Context, rec *record, progress func(Progress)) (*Image, error) {
	progress(Progress{Step: "adapt", Message: rec.Name})
	var err error
	if rec.Top, err = s.adapt(ctx, rec.Layers); err != nil {
		return nil, err
	}
	im, err := s.image(rec)
	if err != nil {
		return nil, err
	}
	s.step("before the name")
	return im, s.saveRecord(rec)
}

// tidy collects after something was added or failed to be; what it cannot do waits for the next time.
func (s *Store) tidy(keep bool) {
	if err := s.collect(keep); err != nil {
		s.log.Warn("clean the image store", "err", err)
	}
}

// reporter passes progress on, one call at a time.
type reporter struct {
	mu     sync.Mutex
	report func(Progress)
}

func (r *reporter) tell(p Progress) {
	if r.report == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report(p)
}

// pulled is a layer that a manifest and a configuration name.
type pulled struct {
	diffID string
	blob   v1.Descriptor
}

// fetchLayers downloads and unpacks what is not there, a few at a time.
func (s *Store) fetchLayers(ctx context.Context, reg *repository, layers []pulled, progress func(Progress)) error {
	var mu sync.Mutex
	done := map[string]int64{}
	var total int64
	sizes := map[string]int64{}
	for _, l := range layers {
		sizes[l.blob.Digest.Hex] = l.blob.Size
	}
	for _, n := range sizes {
		total += n
	}
	if limit := s.limits.MaxBytes(); total > limit || total < 0 {
		return fmt.Errorf("%w: the image's layers take %d bytes compressed; at most %d are allowed", warren.ErrExhausted, total, limit)
	}
	tell := func(l pulled, n int64) {
		mu.Lock()
		done[l.blob.Digest.Hex] = n
		var sum int64
		for _, n := range done {
			sum += n
		}
		mu.Unlock()
		progress(Progress{Step: "pull", Message: short(l.blob.Digest.Hex), Done: sum, Total: total})
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(parallel)
	for _, l := range layers {
		g.Go(func() error {
			var f *os.File
			err := s.ensureLayer(ctx, l.diffID, func(ctx context.Context) (io.ReadCloser, error) {
				// A blob may stand for two DiffIDs in a manifest that lies, so the layer's lock is not enough.
				lock, err := s.lock(ctx, "blob-"+l.blob.Digest.Hex, true)
				if err != nil {
					return nil, err
				}
				defer lock.unlock()
				f, err = s.blob(ctx, reg, l.blob, func(n int64) { tell(l, n) })
				if err != nil {
					return nil, err
				}
				return f, nil
			})
			if f != nil && (err == nil || !again(err)) {
				os.Remove(f.Name()) // its content is in the layer, or is of no use
			}
			if err == nil {
				tell(l, l.blob.Size)
			}
			return err
		})
	}
	return g.Wait()
}

// parsePlatform reads "os/arch[/variant]".
func parsePlatform(p string) (v1.Platform, error) {
	own := v1.Platform{OS: "linux", Architecture: runtime.GOARCH}
	if p == "" {
		return own, nil
	}
	got, err := v1.ParsePlatform(p)
	if err != nil || got.OS == "" || got.Architecture == "" {
		return own, fmt.Errorf("platform %q: %w: it looks like linux/amd64", p, warren.ErrInvalid)
	}
	return *got, runnable(got.OS, got.Architecture)
}

// runnable refuses what this machine cannot run.
func runnable(os, arch string) error {
	if os != "linux" || arch != runtime.GOARCH {
		return fmt.Errorf("the image is for %s/%s, but sandboxes on this machine run linux/%s: %w", or(os, "unknown"), or(arch, "unknown"), runtime.GOARCH, errors.ErrUnsupported)
	}
	return nil
}

func or(s, fallback string) string {
	if s == "" {
		return fallback
	}
	return s
}

// choose reads the manifest of an image, out of an index if the reference leads to one.
func (r *repository) choose(ctx context.Context, id string, platform v1.Platform) (m *v1.Manifest, digest string, pins []string, err error) {
	for range 4 { // an index of an index is allowed, a chain without an end is not
		body, mt, err := r.manifest(ctx, id)
		if err != nil {
			return nil, "", nil, err
		}
		digest = digestOf(body)
		m, next, err := parseManifest(body, mt, platform)
		if err != nil {
			return nil, "", nil, err
		}
		if m != nil {
			return m, digest, pins, nil
		}
		pins = append(pins, digest)
		id = next.String()
	}
	return nil, "", nil, fmt.Errorf("%w: the image's indexes lead to each other", warren.ErrInvalid)
}

// parseManifest reads a manifest, or chooses from an index the digest of the manifest for a platform.
func parseManifest(body []byte, mt types.MediaType, platform v1.Platform) (*v1.Manifest, *v1.Hash, error) {
	var head struct {
		SchemaVersion int             `json:"schemaVersion"`
		MediaType     types.MediaType `json:"mediaType"`
		Manifests     json.RawMessage `json:"manifests"`
		Layers        json.RawMessage `json:"layers"`
	}
	if err := json.Unmarshal(body, &head); err != nil {
		return nil, nil, fmt.Errorf("%w: the manifest is not JSON: %w", warren.ErrInvalid, err)
	}
	if head.MediaType != "" {
		mt = head.MediaType
	}
	switch {
	case head.SchemaVersion == 1 || mt == types.DockerManifestSchema1 || mt == types.DockerManifestSchema1Signed:
		return nil, nil, fmt.Errorf("the image has a manifest of Docker's schema 1, which cannot be verified and is not supported: %w; "+
			"push it again with a current Docker, or pull it there and import what `docker save` writes", errors.ErrUnsupported)
	case head.SchemaVersion != 2:
		return nil, nil, fmt.Errorf("%w: a manifest of schema version %d", warren.ErrInvalid, head.SchemaVersion)
	case head.Manifests != nil && head.Layers != nil:
		return nil, nil, fmt.Errorf("%w: a manifest that is an index as well", warren.ErrInvalid)
	case head.Manifests != nil:
		index, err := v1.ParseIndexManifest(bytes.NewReader(body))
		if err != nil {
			return nil, nil, fmt.Errorf("%w: the index is damaged: %w", warren.ErrInvalid, err)
		}
		h, err := fromIndex(index, platform)
		return nil, h, err
	}
	m, err := v1.ParseManifest(bytes.NewReader(body))
	if err != nil {
		return nil, nil, fmt.Errorf("%w: the manifest is damaged: %w", warren.ErrInvalid, err)
	}
	return m, nil, checkManifest(m)
}

// fromIndex chooses the entry for a platform.
func fromIndex(index *v1.IndexManifest, platform v1.Platform) (*v1.Hash, error) {
	var have []string
	for _, d := range index.Manifests {
		if !d.MediaType.IsImage() && !d.MediaType.IsIndex() || d.Annotations["vnd.docker.reference.type"] != "" {
			continue
		}
		if d.Platform == nil || d.Platform.Satisfies(platform) {
			return &d.Digest, checkHash(d.Digest)
		}
		have = append(have, d.Platform.String())
	}
	slices.Sort(have)
	return nil, fmt.Errorf("the image has nothing for %s, only for %s: %w", platform, or(strings.Join(have, ", "), "no platform at all"), warren.ErrNotFound)
}

// checkManifest refuses what cannot be fetched from the registry itself or checked.
func checkManifest(m *v1.Manifest) error {
	if len(m.Layers) > maxLayers {
		return fmt.Errorf("%w: the image has %d layers; at most %d are possible", warren.ErrInvalid, len(m.Layers), maxLayers)
	}
	if !m.Config.MediaType.IsConfig() {
		return fmt.Errorf("%w: it is not an image but an artifact of type %q", warren.ErrInvalid, m.Config.MediaType)
	}
	for _, d := range append([]v1.Descriptor{m.Config}, m.Layers...) {
		if err := checkHash(d.Digest); err != nil {
			return err
		}
		if d.Size < 0 {
			return fmt.Errorf("%w: blob %s has the size %d", warren.ErrInvalid, d.Digest, d.Size)
		}
		if len(d.URLs) > 0 || d.MediaType == types.DockerForeignLayer || strings.Contains(string(d.MediaType), "nondistributable") {
			return fmt.Errorf("layer %s is kept outside of the registry, by a URL in the manifest: %w; such layers are not fetched", short(d.Digest.Hex), errors.ErrUnsupported)
		}
	}
	for _, d := range m.Layers {
		if !d.MediaType.IsLayer() && d.MediaType != "application/vnd.oci.image.layer.v1.tar+zstd" {
			return fmt.Errorf("layer %s is of type %q: %w", short(d.Digest.Hex), d.MediaType, errors.ErrUnsupported)
		}
	}
	return nil
}

// checkHash makes sure that a digest can be checked and used in the name of a file.
func checkHash(h v1.Hash) error {
	if !isHex(h.Hex) || h.Algorithm != "sha256" {
		return fmt.Errorf("%w: digest %q; only sha256 is supported", warren.ErrInvalid, h.String())
	}
	return nil
}

func isHex(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// parseConfig reads an image's configuration and joins its DiffIDs with the layers of the manifest.
func parseConfig(raw []byte, blobs []v1.Descriptor, platform v1.Platform) (Config, []pulled, error) {
	c, err := v1.ParseConfigFile(bytes.NewReader(raw))
	if err != nil {
		return Config{}, nil, fmt.Errorf("%w: the image's configuration is damaged: %w", warren.ErrInvalid, err)
	}
	if err := runnable(c.OS, c.Architecture); err != nil {
		return Config{}, nil, err
	}
	if platform.Architecture != c.Architecture {
		return Config{}, nil, fmt.Errorf("%w: the index promises %s, the image is for %s", warren.ErrInvalid, platform.Architecture, c.Architecture)
	}
	if len(c.RootFS.DiffIDs) != len(blobs) {
		return Config{}, nil, fmt.Errorf("%w: the image's manifest has %d layers and its configuration %d", warren.ErrInvalid, len(blobs), len(c.RootFS.DiffIDs))
	}
	var layers []pulled
	for i, d := range c.RootFS.DiffIDs {
		if err := checkHash(d); err != nil {
			return Config{}, nil, err
		}
		layers = append(layers, pulled{d.Hex, blobs[i]})
	}
	conf := Config{User: c.Config.User, WorkingDir: c.Config.WorkingDir, Cmd: c.Config.Cmd, Entrypoint: c.Config.Entrypoint}
	for _, e := range c.Config.Env {
		if k, v, ok := strings.Cut(e, "="); ok && k != "" {
			if conf.Env == nil {
				conf.Env = map[string]string{}
			}
			conf.Env[k] = v
		}
	}
	return conf, layers, nil
}
