package warren

import (
	"context"
	"errors"
	"io"
	"iter"
	"time"

	"connectrpc.com/connect"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// Image is a read-only root file system.
type Image struct {
	Name   string `json:"name"`
	Digest string `json:"digest"`
	// Kind is "host", "oci", "tar" or "bootstrap".
	Kind    string    `json:"kind"`
	Size    int64     `json:"sizeBytes"`
	Created time.Time `json:"created,omitzero"`
	// User, WorkingDir and Env are the image's own defaults.
	User       string            `json:"user,omitempty"`
	WorkingDir string            `json:"workingDir,omitempty"`
	Env        map[string]string `json:"env,omitempty"`
	Layers     int               `json:"layers"`
}

// PullOptions change a pull.
type PullOptions struct {
	// Name to store it under. Empty means the reference as given.
	Name string
	// Platform such as "linux/amd64". Empty means the server's own.
	Platform string
	// Insecure speaks plain HTTP; loopback registries always may.
	Insecure bool
	// Progress, when set, is told each step.
	Progress func(Progress)
}

// PullImage fetches an OCI image from a registry to the server.
func (c *Client) PullImage(ctx context.Context, ref string, o PullOptions) (*Image, error) {
	var got *warrenv1.Image
	err := c.again(ctx, func() error {
		stream, err := c.images.PullImage(ctx, connect.NewRequest(&warrenv1.PullImageRequest{Ref: ref, Name: o.Name, Insecure: o.Insecure, Platform: o.Platform}))
		if err != nil {
			return fromWire("pull image", err)
		}
		defer stream.Close()
		for stream.Receive() {
			switch e := stream.Msg().GetEvent().(type) {
			case *warrenv1.PullImageResponse_Progress:
				if o.Progress != nil {
					o.Progress(progressFrom(e.Progress))
				}
			case *warrenv1.PullImageResponse_Image:
				got = e.Image
			}
		}
		if got != nil {
			return nil
		}
		return streamEnd("pull image", stream.Err())
	})
	if err != nil {
		return nil, err
	}
	return imageFrom(got), nil
}

// ImportImage stores a tar of a root file system, of an OCI layout, or of docker save under a name. It reads r to
// its end, as fast as the server stores it.
func (c *Client) ImportImage(ctx context.Context, name string, r io.Reader) (*Image, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream := c.images.ImportImage(ctx)
	// After a failed Send the answer tells why.
	sendErr := stream.Send(&warrenv1.ImportImageRequest{Name: name})
	buf := make([]byte, 256<<10)
	for sendErr == nil {
		n, err := io.ReadFull(r, buf)
		if n > 0 {
			sendErr = stream.Send(&warrenv1.ImportImageRequest{Chunk: buf[:n]})
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			break
		}
		if err != nil {
			cancel() // before the server takes the part for the whole
			stream.CloseAndReceive()
			return nil, &Error{Kind: "invalid", Op: "import image", ID: name, Message: "read the archive: " + err.Error(), Err: err}
		}
	}
	res, err := stream.CloseAndReceive()
	if err != nil {
		return nil, fromWire("import image", err)
	}
	if sendErr != nil && !errors.Is(sendErr, io.EOF) {
		return nil, fromWire("import image", sendErr)
	}
	return imageFrom(res.Msg.GetImage()), nil
}

// BootstrapOptions describe a root file system built from packages.
type BootstrapOptions struct {
	// Name to store it under.
	Name string
	// Distribution is "debian".
	Distribution string
	// Release such as "bookworm". Empty means the stable one.
	Release string
	// Packages besides the essential ones.
	Packages []string
	// Progress, when set, is told each step.
	Progress func(Progress)
}

// BootstrapImage builds a root file system from packages on the server.
func (c *Client) BootstrapImage(ctx context.Context, o BootstrapOptions) (*Image, error) {
	stream, err := c.images.BootstrapImage(ctx, connect.NewRequest(&warrenv1.BootstrapImageRequest{Name: o.Name, Distribution: o.Distribution, Release: o.Release, Packages: o.Packages}))
	if err != nil {
		return nil, fromWire("bootstrap image", err)
	}
	defer stream.Close()
	var got *warrenv1.Image
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().(type) {
		case *warrenv1.BootstrapImageResponse_Progress:
			if o.Progress != nil {
				o.Progress(progressFrom(e.Progress))
			}
		case *warrenv1.BootstrapImageResponse_Image:
			got = e.Image
		}
	}
	if got == nil {
		return nil, streamEnd("bootstrap image", stream.Err())
	}
	return imageFrom(got), nil
}

// Image returns the image with this name or digest.
func (c *Client) Image(ctx context.Context, name string) (*Image, error) {
	res, err := c.images.GetImage(ctx, connect.NewRequest(&warrenv1.GetImageRequest{Name: name}))
	if err != nil {
		return nil, fromWire("get image", err)
	}
	return imageFrom(res.Msg.GetImage()), nil
}

// Images lists the server's images.
func (c *Client) Images(ctx context.Context) iter.Seq2[*Image, error] {
	return func(yield func(*Image, error) bool) {
		res, err := c.images.ListImages(ctx, connect.NewRequest(&warrenv1.ListImagesRequest{}))
		if err != nil {
			yield(nil, fromWire("list images", err))
			return
		}
		for _, p := range res.Msg.GetImages() {
			if !yield(imageFrom(p), nil) {
				return
			}
		}
	}
}

// DeleteImage removes an image that no sandbox uses.
func (c *Client) DeleteImage(ctx context.Context, name string, o DeleteOptions) error {
	_, err := c.images.DeleteImage(ctx, connect.NewRequest(&warrenv1.DeleteImageRequest{Name: name, AllowMissing: o.AllowMissing}))
	return fromWire("delete image", err)
}
