//go:build linux

package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"slices"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/image/unpack"
)

// SaveRoot writes what a sandbox has changed of its root as a layer, see [driver.RootSaver]. A running sandbox stands still
// while the engine collects it.
//
// Only the engine knows the overlay, and it hands out whole images: the container is committed to an image that nobody else
// sees, whose last layer is what is looked for, and which is removed again. Of extended attributes engines keep
// security.capability.
func (d *Driver) SaveRoot(ctx context.Context, id warren.SandboxID, w io.Writer) error {
	if err := d.saveRoot(ctx, id, w); err != nil {
		return fmt.Errorf("save the root of sandbox %s: %w", id, err)
	}
	return nil
}

func (d *Driver) saveRoot(ctx context.Context, id warren.SandboxID, w io.Writer) (err error) {
	if !validID(id) {
		return warren.ErrNotFound
	}
	unlock, err := d.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	c, err := d.findAlive(ctx, id)
	if err != nil {
		return err
	}
	e, err := d.askEngine(ctx)
	if err != nil {
		return err
	}
	if name := runtimeOf(c, e); e.hidesRoot(name) {
		return fmt.Errorf(`runtime %s keeps what is written to the root to itself, where the engine cannot read it; add "--overlay2=none" to its runtimeArgs in the engine's configuration: %w`, name, errors.ErrUnsupported)
	}
	base, err := d.api.ImageInspect(ctx, c.Image)
	if err != nil {
		return d.callError(ctx, err)
	}
	late, cancel := grace(ctx)
	res, err := d.api.ContainerCommit(late, c.ID, client.ContainerCommitOptions{
		Changes: []string{"LABEL " + labelSave + "=" + string(id)}, Config: &container.Config{}, // Podman wants one
	})
	cancel()
	if err != nil {
		return d.callError(ctx, err)
	}
	defer func() {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*graceTime)
		defer cancel()
		if _, rerr := d.api.ImageRemove(undo, res.ID, client.ImageRemoveOptions{Force: true, PruneChildren: true}); rerr != nil && !cerrdefs.IsNotFound(rerr) {
			d.log.Warn("the image of a saved root stays in the engine until it is looked over", "image", res.ID, "err", rerr)
		}
	}()
	if err := ctx.Err(); err != nil {
		return err
	}
	saved, err := d.api.ImageInspect(ctx, res.ID)
	if err != nil {
		return d.callError(ctx, err)
	}
	layers := saved.RootFS.Layers
	out := &layerFilter{out: tar.NewWriter(w), hide: mountPoints(c)}
	if len(layers) <= len(base.RootFS.Layers) || layers[len(layers)-1] == emptyLayer { // there was nothing to be made a layer of
		return out.out.Close()
	}
	archive, err := d.api.ImageSave(ctx, []string{res.ID})
	if err != nil {
		return d.callError(ctx, err)
	}
	defer archive.Close()
	if err := findLayer(ctx, archive, base.RootFS.Layers, layers[len(layers)-1], out.copy); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return err
	}
	return out.out.Close()
}

// emptyLayer is the digest of a tar without entries.
const emptyLayer = "sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"

// runtimeOf is the name of the runtime of a container.
func runtimeOf(c *container.InspectResponse, e *engine) string {
	if c.HostConfig != nil && c.HostConfig.Runtime != "" {
		return c.HostConfig.Runtime
	}
	return e.info.DefaultRuntime
}

// hidesRoot says whether the engine does not see what containers of a runtime write to their root. Of a gVisor that is not in
// the engine's list nobody can tell how it runs, and by default it hides.
func (e *engine) hidesRoot(name string) bool {
	_, listed := e.info.Runtimes[name]
	return slices.Contains(e.runsc(), name) || !listed && strings.Contains(name, "runsc")
}

// mountPoints are the names in a container's root, without the first slash, at which something else shows.
func mountPoints(c *container.InspectResponse) []string {
	points := []string{strings.TrimPrefix(path.Dir(guestPath), "/")}
	for _, m := range c.Mounts {
		points = append(points, strings.TrimPrefix(path.Clean(m.Destination), "/"))
	}
	return points
}

// findLayer looks through the archive of an image for its last layer and hands it, uncompressed, to read. Engines name what is
// in such an archive in different ways: by the layer's own digest, by that of its compressed form, or by a description before it,
// of which the last layer's has the image's labels.
func findLayer(ctx context.Context, archive io.Reader, below []string, want string, read func(io.Reader) error) error {
	known := map[string]bool{}
	for _, l := range below {
		known[strings.TrimPrefix(l, "sha256:")] = true
	}
	want = strings.TrimPrefix(want, "sha256:")
	described := ""
	t := tar.NewReader(archive)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("the engine's archive of the root lacks layer %.12s: %w", want, warren.ErrUnavailable)
		}
		if err != nil {
			return fmt.Errorf("read the engine's archive of the root: %w (%s)", warren.ErrUnavailable, err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		name := strings.TrimSuffix(path.Base(h.Name), ".tar")
		switch {
		case name == want:
		case known[name]:
			continue
		case path.Base(h.Name) == "json":
			if text, err := io.ReadAll(io.LimitReader(t, 1<<20)); err == nil && bytes.Contains(text, []byte(labelSave)) {
				described = path.Dir(h.Name)
			}
			continue
		case path.Base(h.Name) == "layer.tar":
			if path.Dir(h.Name) != described {
				continue
			}
		case path.Base(path.Dir(h.Name)) == "sha256":
			var magic [4]byte
			n, _ := io.ReadFull(t, magic[:])
			if !compressed(magic[:n]) {
				continue
			}
			return readLayer(ctx, io.MultiReader(strings.NewReader(string(magic[:n])), t), want, read)
		default:
			continue
		}
		return readLayer(ctx, t, want, read)
	}
}

// compressed tells gzip and zstd from what else is in an image.
func compressed(begin []byte) bool {
	return len(begin) == 4 && (begin[0] == 0x1f && begin[1] == 0x8b || string(begin) == "\x28\xb5\x2f\xfd")
}

// readLayer hands a layer to read, and wants all of it to have been the one that was wanted.
func readLayer(ctx context.Context, r io.Reader, want string, read func(io.Reader) error) error {
	// What an engine says is believed as to its size; the sandbox's own disk limit bounds it.
	s, err := unpack.Decompress(ctx, r, unpack.Limits{Entries: math.MaxInt64, Bytes: math.MaxInt64, Ratio: math.MaxInt32})
	if err != nil {
		return err
	}
	defer s.Close()
	if err := read(s); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, s); err != nil {
		return err
	}
	if s.DiffID() != want {
		return fmt.Errorf("the engine's archive of the root has layer %.12s where %.12s was wanted: %w", s.DiffID(), want, warren.ErrUnavailable)
	}
	return nil
}

// layerFilter copies a layer and leaves out what only stands for mounts.
type layerFilter struct {
	out  *tar.Writer
	hide []string
}

func (f *layerFilter) copy(r io.Reader) error {
	t := tar.NewReader(r)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the saved layer: %w (%s)", warren.ErrUnavailable, err)
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		if slices.ContainsFunc(f.hide, func(dir string) bool { return name == dir || strings.HasPrefix(name, dir+"/") }) {
			continue
		}
		h.Format = tar.FormatPAX
		if err := f.out.WriteHeader(h); err != nil {
			return err
		}
		if _, err := io.Copy(f.out, t); err != nil {
			return err
		}
	}
}

// collectSaves removes the images of saved roots that were cut short. Others of this installation may be at work on young ones.
func (d *Driver) collectSaves(ctx context.Context) error {
	list, err := d.api.ImageList(ctx, client.ImageListOptions{Filters: client.Filters{}.Add("label", labelSave, labelInstallation+"="+d.labels.installation)})
	if err != nil {
		return d.engineError(ctx, err)
	}
	for _, im := range list.Items {
		if im.Labels[labelInstallation] != d.labels.installation || im.Labels[labelSave] == "" || time.Since(time.Unix(im.Created, 0)) < collectEvery {
			continue
		}
		if _, err := d.api.ImageRemove(ctx, im.ID, client.ImageRemoveOptions{Force: true, PruneChildren: true}); err != nil && !cerrdefs.IsConflict(err) && !cerrdefs.IsNotFound(err) {
			return d.engineError(ctx, err)
		}
	}
	return nil
}
