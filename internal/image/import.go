package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/image/tree"
	"github.com/warren-sandbox/warren/internal/image/unpack"
)

// ImportOptions change an import; the zero value is the usual one.
type ImportOptions struct {
	// Platform, such as "linux/amd64", to choose from an index; empty means this machine's.
	Platform string
	// Progress is called now and then; Done counts bytes that were read.
	Progress func(Progress)
	// kind is "bootstrap" for what Bootstrap imports.
	kind string
}

const (
	// maxArchive is how many entries an OCI layout or a docker save file may have.
	maxArchive = 10_000
	// lookAhead is how much of a tar may be looked at to tell what it is.
	lookAhead = 1 << 20
)

// Import takes an image out of a tar: a root file system, an OCI layout, or what docker save writes, each plain or compressed
// with gzip or zstd. It reads r once, from front to back, and holds no more than buffers of it in memory. An empty name means the
// one that the archive gives. Reads of r must end when ctx does.
func (s *Store) Import(ctx context.Context, name string, r io.Reader, o ImportOptions) (*Image, error) {
	im, err := s.importTar(ctx, name, r, o)
	s.tidy(true)
	if err != nil {
		return nil, fmt.Errorf("import image %s: %w", or(name, "without a name"), err)
	}
	return im, nil
}

func (s *Store) importTar(ctx context.Context, name string, r io.Reader, o ImportOptions) (*Image, error) {
	if name != "" {
		if _, err := newName(name); err != nil {
			return nil, err
		}
	}
	platform, err := parsePlatform(o.Platform)
	if err != nil {
		return nil, err
	}
	progress := (&reporter{report: o.Progress}).tell
	lock, err := s.lock(ctx, storeLock, false)
	if err != nil {
		return nil, err
	}
	defer lock.unlock()

	plain, err := unpack.Decompress(ctx, &countingReader{r: r, tell: progress}, s.limits)
	if err != nil {
		return nil, err
	}
	defer plain.Close()
	var seen bytes.Buffer
	isArchive, err := sniff(io.TeeReader(io.LimitReader(plain, lookAhead), &seen))
	if err != nil {
		return nil, err
	}
	whole := io.MultiReader(&seen, plain)
	rec := &record{Name: name, Kind: "tar", Created: time.Now()}
	if o.kind != "" {
		rec.Kind = o.kind
	}
	if isArchive {
		rec.Kind = "oci"
		err = s.importArchive(ctx, rec, whole, platform)
	} else {
		var diffID string
		diffID, err = s.addLayer(ctx, whole)
		rec.Layers, rec.Digest = []string{diffID}, "sha256:"+diffID
	}
	if err != nil {
		return nil, err
	}
	if rec.Name == "" {
		return nil, fmt.Errorf("%w: the archive gives the image no name; give one", warren.ErrInvalid)
	}
	if rec.Key, err = newName(rec.Name); err != nil {
		return nil, err
	}
	return s.finish(ctx, rec, progress)
}

// countingReader reports every few megabytes.
type countingReader struct {
	r       io.Reader
	n, told int64
	tell    func(Progress)
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	if c.n-c.told >= 4<<20 || err == io.EOF {
		c.told = c.n
		c.tell(Progress{Step: "import", Done: c.n})
	}
	return n, err
}

// archiveName matches the files of OCI layouts and docker save: those of today, the directories of layers that older ones have,
// and the flat names that other tools write in its place.
var archiveName = regexp.MustCompile(`^(oci-layout|index\.json|manifest\.json|repositories|blobs/sha256/[0-9a-f]{64}|(sha256:)?[0-9a-f]{64}(\.json|\.tar|\.tar\.gz)?|[0-9a-f]{64}/(layer\.tar|json|VERSION))$`)

// sniff tells an archive of layers from a root file system by its first file.
func sniff(r io.Reader) (bool, error) {
	tr := tar.NewReader(r)
	for first := true; ; first = false {
		h, err := tr.Next()
		switch {
		case err == nil:
		case err == io.EOF && first:
			return false, fmt.Errorf("%w: it is empty, or not a tar", warren.ErrInvalid)
		case err == io.EOF, errors.Is(err, io.ErrUnexpectedEOF) && !first:
			return false, nil // nothing but directories as far as one can see
		case errors.Is(err, tar.ErrHeader), errors.Is(err, io.ErrUnexpectedEOF):
			return false, fmt.Errorf("%w: it is not a tar; a root file system, an OCI layout or a docker save file is, plain or compressed with gzip or zstd", warren.ErrInvalid)
		default:
			return false, err
		}
		if h.Typeflag == tar.TypeDir || h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		name, err := tree.Clean(h.Name)
		return err == nil && archiveName.MatchString(name), nil
	}
}

// archive is what an OCI layout or a docker save file held, each file under a number in a directory of ours: no name of the
// archive is ever a path.
type archive struct {
	dir   string
	files map[string]string
	links map[string]string
}

func (s *Store) importArchive(ctx context.Context, rec *record, r io.Reader, platform v1.Platform) error {
	dir := filepath.Join(s.dir, "blobs", newPrefix+rand.Text())
	if err := os.Mkdir(dir, 0o700); err != nil {
		return storeError(err)
	}
	defer os.RemoveAll(dir)
	a := &archive{dir: dir, files: map[string]string{}, links: map[string]string{}}
	if err := a.read(ctx, r); err != nil {
		return storeError(err)
	}
	var raw []byte
	var blobs []v1.Descriptor
	var err error
	open := func(d v1.Descriptor) (*os.File, error) { return a.open("blobs/sha256/" + d.Digest.Hex) }
	if a.has("index.json") {
		raw, blobs, err = a.layout(rec, platform)
	} else {
		raw, open, blobs, err = a.dockerSave(rec)
	}
	if err != nil {
		return err
	}
	conf, layers, err := parseConfig(raw, blobs, platform)
	if err != nil {
		return err
	}
	rec.Config = conf
	for _, l := range layers {
		err := s.ensureLayer(ctx, l.diffID, func(context.Context) (io.ReadCloser, error) { return open(l.blob) })
		if err != nil {
			return err
		}
		rec.Layers = append(rec.Layers, l.diffID)
	}
	return nil
}

// read takes the files of the archive.
func (a *archive) read(ctx context.Context, r io.Reader) error {
	tr := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return damaged(err)
		}
		if n >= maxArchive {
			return fmt.Errorf("%w: the archive has more than %d entries", warren.ErrExhausted, maxArchive)
		}
		name, err := tree.Clean(h.Name)
		if err != nil {
			return err
		}
		if !archiveName.MatchString(name) {
			continue
		}
		switch h.Typeflag {
		case tar.TypeReg:
			err = a.take(ctx, name, tr)
		case tar.TypeSymlink: // older docker save files name an equal layer twice so
			a.links[name] = strings.TrimPrefix(tree.Target(name, h.Linkname), "/")
		case tar.TypeLink:
			a.links[name] = strings.TrimPrefix(path.Join("/", h.Linkname), "/")
		}
		if err != nil {
			return err
		}
	}
}

func (a *archive) take(ctx context.Context, name string, r io.Reader) error {
	p := filepath.Join(a.dir, fmt.Sprint(len(a.files)))
	f, err := os.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		if _, dup := a.files[name]; dup {
			return fmt.Errorf("%w: the archive has %s twice", warren.ErrInvalid, name)
		}
		return err
	}
	_, err = io.Copy(f, &ctxReader{ctx, r})
	if err != nil {
		err = damaged(err)
	}
	if _, dup := a.files[name]; dup {
		err = errors.Join(err, fmt.Errorf("%w: the archive has %s twice", warren.ErrInvalid, name))
	}
	a.files[name] = p
	return errors.Join(err, f.Close())
}

// damaged tells an archive's faults from those of reading it.
func damaged(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: the tar is damaged or cut off: %w", warren.ErrInvalid, err)
	}
	return err
}

type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c *ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

func (a *archive) has(name string) bool { _, ok := a.files[name]; return ok }

// open opens a file of the archive, through one of its links if need be.
func (a *archive) open(name string) (*os.File, error) {
	p, ok := a.files[name]
	if !ok {
		p, ok = a.files[a.links[name]]
	}
	if !ok {
		return nil, fmt.Errorf("%w: the archive lacks %s", warren.ErrInvalid, tree.Quote(name))
	}
	return os.Open(p)
}

func (a *archive) readJSON(name string) ([]byte, error) {
	f, err := a.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readLimited(f, name)
}

// blob reads a small file by digest and checks it.
func (a *archive) blob(h v1.Hash) ([]byte, error) {
	if err := checkHash(h); err != nil {
		return nil, err
	}
	b, err := a.readJSON("blobs/sha256/" + h.Hex)
	if err == nil && digestOf(b) != h.String() {
		err = fmt.Errorf("%w: blob %s of the archive is not what its name says", warren.ErrInvalid, short(h.Hex))
	}
	return b, err
}

// layout reads an OCI layout and returns the configuration and the layers of its image. Layers are checked by their digests, and
// once more by their DiffIDs when they are unpacked.
func (a *archive) layout(rec *record, platform v1.Platform) ([]byte, []v1.Descriptor, error) {
	b, err := a.readJSON("index.json")
	if err != nil {
		return nil, nil, err
	}
	index, err := v1.ParseIndexManifest(bytes.NewReader(b))
	if err != nil {
		return nil, nil, fmt.Errorf("%w: index.json is damaged: %w", warren.ErrInvalid, err)
	}
	if rec.Name == "" && len(index.Manifests) > 0 {
		notes := index.Manifests[0].Annotations
		rec.Name = or(notes["io.containerd.image.name"], notes["org.opencontainers.image.ref.name"])
	}
	images := 0
	for _, d := range index.Manifests {
		if d.Platform == nil || d.Platform.Satisfies(platform) {
			images++
		}
	}
	if images > 1 {
		return nil, nil, fmt.Errorf("%w: the archive holds %d images; save and import them one by one", warren.ErrInvalid, images)
	}
	h, err := fromIndex(index, platform)
	if err != nil {
		return nil, nil, err
	}
	for range 4 {
		body, err := a.blob(*h)
		if err != nil {
			return nil, nil, err
		}
		m, next, err := parseManifest(body, "", platform)
		if err != nil {
			return nil, nil, err
		}
		if m == nil {
			rec.Pins = append(rec.Pins, h.String())
			h = next
			continue
		}
		rec.Digest = h.String()
		for _, d := range m.Layers {
			if err := a.check(d.Digest); err != nil {
				return nil, nil, err
			}
		}
		raw, err := a.blob(m.Config.Digest)
		return raw, m.Layers, err
	}
	return nil, nil, fmt.Errorf("%w: the archive's indexes lead to each other", warren.ErrInvalid)
}

// check compares a layer with its digest.
func (a *archive) check(h v1.Hash) error {
	f, err := a.open("blobs/sha256/" + h.Hex)
	if err != nil {
		return err
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return err
	}
	if hex.EncodeToString(sum.Sum(nil)) != h.Hex {
		return fmt.Errorf("%w: layer %s of the archive is not what its name says", warren.ErrInvalid, short(h.Hex))
	}
	return nil
}

// dockerSave reads what docker save wrote before it wrote OCI layouts.
func (a *archive) dockerSave(rec *record) (raw []byte, open func(v1.Descriptor) (*os.File, error), blobs []v1.Descriptor, err error) {
	b, err := a.readJSON("manifest.json")
	if err != nil {
		return nil, nil, nil, err
	}
	var list []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(b, &list); err != nil {
		return nil, nil, nil, fmt.Errorf("%w: manifest.json is damaged: %w", warren.ErrInvalid, err)
	}
	if len(list) != 1 {
		return nil, nil, nil, fmt.Errorf("%w: the archive holds %d images; save and import them one by one", warren.ErrInvalid, len(list))
	}
	m := list[0]
	if len(m.Layers) > maxLayers {
		return nil, nil, nil, fmt.Errorf("%w: the image has %d layers; at most %d are possible", warren.ErrInvalid, len(m.Layers), maxLayers)
	}
	if raw, err = a.readJSON(m.Config); err != nil {
		return nil, nil, nil, err
	}
	rec.Digest = digestOf(raw)
	if name := strings.TrimPrefix(strings.TrimSuffix(path.Base(m.Config), ".json"), "sha256:"); isHex(name) && "sha256:"+name != rec.Digest {
		return nil, nil, nil, fmt.Errorf("%w: the image's configuration %s is not what its name says", warren.ErrInvalid, short(name))
	}
	if rec.Name == "" && len(m.RepoTags) > 0 {
		rec.Name = m.RepoTags[0]
	}
	// Layers are found by their place; their DiffIDs, which the configuration holds, are what checks them.
	byPlace := map[int64]string{}
	for i, l := range m.Layers {
		byPlace[int64(i)] = l
		blobs = append(blobs, v1.Descriptor{Size: int64(i)})
	}
	return raw, func(d v1.Descriptor) (*os.File, error) { return a.open(byPlace[d.Size]) }, blobs, nil
}
