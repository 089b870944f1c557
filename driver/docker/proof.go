//go:build linux

package docker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/client"
	"golang.org/x/sys/unix"
)

// seesMounts finds out whether the engine sees what this process mounts below the state directory: whether its file system is
// ours. It goes by no address. A directory whose name nobody can guess is made in a file system mounted for the purpose, and the
// engine is asked for a container that mounts it, of an image that does not exist: an engine looks for the directory first, and
// says which of the two it misses. Nothing is made.
func (d *Driver) seesMounts(ctx context.Context) (bool, error) {
	name := proofPrefix + strings.ToLower(rand.Text())
	s := &stage{dir: filepath.Join(d.opts.StateDir, stageDir, name)}
	if err := os.Mkdir(s.dir, 0o711); err != nil {
		return false, err
	}
	defer s.close()
	if err := unix.Mount("warren-stage", s.dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=711,size=64k"); err != nil {
		return false, fmt.Errorf("make a place for mounts: %w", err)
	}
	at := filepath.Join(s.dir, name)
	if err := os.Mkdir(at, 0o755); err != nil {
		return false, err
	}
	res, err := d.api.ContainerCreate(ctx, client.ContainerCreateOptions{
		Config:     &container.Config{Image: d.labels.repository() + ":" + name},
		HostConfig: &container.HostConfig{Mounts: []mount.Mount{{Type: mount.TypeBind, Source: at, Target: "/proof", ReadOnly: true}}},
	})
	switch {
	case err == nil: // an image of that name, which cannot be
		_, err = d.api.ContainerRemove(ctx, res.ID, client.ContainerRemoveOptions{Force: true})
		return false, errors.Join(fmt.Errorf("the engine has an image whose name was just made up"), err)
	case strings.Contains(err.Error(), sourceMissing), strings.Contains(err.Error(), mountSourceMissing):
		return false, nil
	case cerrdefs.IsNotFound(err):
		return true, nil
	}
	return false, d.engineError(ctx, err)
}

// proofPrefix begins the names of proofs on the stage.
const proofPrefix = "proof-"

// collectProofs takes down what a process has left that was killed meanwhile. Others may be at work on young ones.
func (d *Driver) collectProofs() error {
	names, err := filepath.Glob(filepath.Join(d.opts.StateDir, stageDir, proofPrefix+"*"))
	for _, name := range names {
		if fi, serr := os.Lstat(name); serr == nil && time.Since(fi.ModTime()) > collectEvery {
			err = errors.Join(err, (&stage{dir: name}).close())
		}
	}
	return err
}

// How engines say that they do not see a directory.
const (
	sourceMissing      = "bind source path does not exist"
	mountSourceMissing = "bind mount source path does not exist"
)
