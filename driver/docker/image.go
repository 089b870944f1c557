//go:build linux

package docker

import (
	"archive/tar"
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// load is the loading of one image, which all that want it wait for.
type load struct {
	done chan struct{}
	id   string
	err  error
}

// imageKey names a root's content in the engine. Equal digests have equal layers, but a root may have more layers than its
// digest says; their directories are part of the key.
func imageKey(root *driver.Root) string {
	h := sha256.New()
	fmt.Fprintf(h, "%q", root.Digest)
	for _, l := range root.Layers {
		fmt.Fprintf(h, " %q %d", l.Dir, l.IDBase)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// image returns the engine's id of a root, loading it if it is not there. Each is loaded once, and goes on being loaded when
// the caller that began it gives up.
func (d *Driver) image(ctx context.Context, root *driver.Root) (string, error) {
	key := imageKey(root)
	d.mu.Lock()
	l := d.loads[key]
	if l == nil {
		l = &load{done: make(chan struct{})}
		d.loads[key] = l
		own := &driver.Root{Digest: root.Digest, Layers: append([]driver.Layer(nil), root.Layers...)}
		go func() {
			l.id, l.err = d.ensureImage(d.ctx, key, own)
			d.mu.Lock()
			delete(d.loads, key)
			d.mu.Unlock()
			close(l.done)
		}()
	}
	d.mu.Unlock()
	select {
	case <-l.done:
		return l.id, l.err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (d *Driver) ensureImage(ctx context.Context, key string, root *driver.Root) (string, error) {
	ref := d.labels.repository() + ":" + key
	id, err := d.ownImage(ctx, ref, key)
	if err != nil || id != "" {
		return id, err
	}
	began := time.Now()
	if err := d.loadImage(ctx, ref, key, root); err != nil {
		return "", fmt.Errorf("load image %.40s into the engine: %w", root.Digest, err)
	}
	if id, err = d.ownImage(ctx, ref, key); err != nil || id != "" {
		d.log.Info("loaded an image into the engine", "digest", root.Digest, "took", time.Since(began))
		return id, err
	}
	return "", fmt.Errorf("the engine has not kept image %s that it took: %w", ref, warren.ErrUnavailable)
}

// ownImage returns the id of an image that this installation loaded, "" when there is none.
func (d *Driver) ownImage(ctx context.Context, ref, key string) (string, error) {
	res, err := d.api.ImageInspect(ctx, ref)
	if cerrdefs.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", d.engineError(ctx, err)
	}
	if res.Config == nil || res.Config.Labels[labelInstallation] != d.labels.installation || res.Config.Labels[labelImage] != key {
		return "", nil // a stranger's under our name; loading takes the name
	}
	return res.ID, nil
}

// loadImage writes the layers as an archive of the form of `docker save`, which every engine reads.
func (d *Driver) loadImage(ctx context.Context, ref, key string, root *driver.Root) error {
	// What a layer is named for, its digest and its size, stand before it in the archive: each is made twice.
	layers := make([]archived, len(root.Layers))
	for i, l := range root.Layers {
		a := &layers[i]
		sum := sha256.New()
		n := &counter{w: sum}
		if err := writeLayer(ctx, n, l); err != nil {
			return fmt.Errorf("read layer %d: %w", i+1, err)
		}
		a.digest, a.size = hex.EncodeToString(sum.Sum(nil)), n.n
	}
	config, err := json.Marshal(imageConfig(d.labels.installation, key, root, layers))
	if err != nil {
		return err
	}
	sum := sha256.Sum256(config)
	name := hex.EncodeToString(sum[:]) + ".json"
	r, w := io.Pipe()
	go func() {
		b := bufio.NewWriterSize(w, 1<<20)
		err := writeArchive(ctx, b, ref, name, config, root.Layers, layers)
		if err == nil {
			err = b.Flush()
		}
		w.CloseWithError(err)
	}()
	res, err := d.api.ImageLoad(ctx, r, client.ImageLoadWithQuiet(true))
	r.Close()
	if err != nil {
		return d.engineError(ctx, err)
	}
	defer res.Close()
	return d.loadResult(ctx, res)
}

// loadResult reads the engine's report, in which a failure is a line like any other.
func (d *Driver) loadResult(ctx context.Context, r io.Reader) error {
	dec := json.NewDecoder(io.LimitReader(r, 1<<20))
	for {
		var line struct {
			Error string `json:"error"`
		}
		err := dec.Decode(&line)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return d.engineError(ctx, err)
		}
		if line.Error != "" {
			return d.engineError(ctx, errors.New(line.Error))
		}
	}
}

type archived struct {
	digest string
	size   int64
}

func imageConfig(installation, key string, root *driver.Root, layers []archived) any {
	dirs := make([]string, len(root.Layers))
	ids := make([]string, len(layers))
	history := make([]any, len(layers))
	for i := range layers {
		dirs[i] = root.Layers[i].Dir
		ids[i] = "sha256:" + layers[i].digest
		history[i] = map[string]any{"created": epoch, "created_by": "warren"}
	}
	return map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "created": epoch,
		"config": map[string]any{"Labels": map[string]string{
			labelInstallation: installation, labelImage: key, labelLayers: strings.Join(dirs, "\n"), labelPrefix + "digest": root.Digest,
		}},
		"rootfs":  map[string]any{"type": "layers", "diff_ids": ids},
		"history": history,
	}
}

const epoch = "1970-01-01T00:00:00Z"

func writeArchive(ctx context.Context, w io.Writer, ref, configName string, config []byte, dirs []driver.Layer, layers []archived) error {
	t := tar.NewWriter(w)
	file := func(name string, size int64) error {
		return t.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size, ModTime: time.Unix(0, 0)})
	}
	names := make([]string, len(layers))
	seen := map[string]bool{}
	for i, l := range layers {
		names[i] = l.digest + "/layer.tar"
		if seen[names[i]] {
			continue
		}
		seen[names[i]] = true
		if err := file(names[i], l.size); err != nil {
			return err
		}
		if err := writeLayer(ctx, t, dirs[i]); err != nil {
			return fmt.Errorf("read layer %d: %w", i+1, err)
		}
	}
	manifest, err := json.Marshal([]any{map[string]any{"Config": configName, "RepoTags": []string{ref}, "Layers": names}})
	if err != nil {
		return err
	}
	for name, text := range map[string][]byte{configName: config, "manifest.json": manifest} {
		if err := file(name, int64(len(text))); err != nil {
			return err
		}
		if _, err := t.Write(text); err != nil {
			return err
		}
	}
	return t.Close()
}

type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}

// collectEvery is how often images are looked over that Warren's store no longer has.
const collectEvery = time.Hour

// collectImages removes images of this installation whose layers are gone from the image store, now and then.
func (d *Driver) collectImages(ctx context.Context) {
	for {
		if err := errors.Join(d.collectOnce(ctx), d.collectSaves(ctx), d.collectProofs()); err != nil && ctx.Err() == nil {
			d.log.Debug("old images in the engine", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(collectEvery):
		}
	}
}

func (d *Driver) collectOnce(ctx context.Context) error {
	list, err := d.api.ImageList(ctx, client.ImageListOptions{Filters: client.Filters{}.Add("label", labelInstallation+"="+d.labels.installation)})
	if err != nil {
		return d.engineError(ctx, err)
	}
	for _, im := range list.Items {
		if im.Labels[labelInstallation] != d.labels.installation || im.Labels[labelLayers] == "" || layersExist(im.Labels[labelLayers]) {
			continue
		}
		// Not by force: one that a container uses stays until that is gone.
		if _, err := d.api.ImageRemove(ctx, im.ID, client.ImageRemoveOptions{PruneChildren: true}); err != nil && !cerrdefs.IsConflict(err) && !cerrdefs.IsNotFound(err) {
			return d.engineError(ctx, err)
		}
	}
	return nil
}

func layersExist(dirs string) bool {
	for dir := range strings.SplitSeq(dirs, "\n") {
		if _, err := os.Lstat(dir); errors.Is(err, os.ErrNotExist) {
			return false
		}
	}
	return true
}
