package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

const (
	// hostImage is the name of the image that shows the host's own programs.
	hostImage = "host"
	// HostStandIn is the image that takes its place with drivers that cannot show them. It is bootstrapped when it is first
	// needed; one that an operator has made or imported under this name is taken as it is.
	HostStandIn = "host-bootstrap"
)

// standInPackages are what an agent looks for first.
var standInPackages = []string{"ca-certificates", "curl", "git", "less", "procps", "python3"}

// imageRef returns the image that a create shall use, which for "host" depends on the driver.
func (m *making) imageRef(ctx context.Context) (string, error) {
	replacer, ok := driver.As[driver.HostReplacer](m.e.opts.Drivers[m.spec.Driver])
	if !ok || m.spec.Image != hostImage {
		return m.spec.Image, nil
	}
	m.flight.tell(Progress{Step: "resolve image", Message: fmt.Sprintf("image %s stands for %s with driver %s: %s", HostStandIn, hostImage, m.spec.Driver, replacer.ReplaceHost())})
	return HostStandIn, m.e.ensureStandIn(ctx, m.flight.tell)
}

// ensureStandIn bootstraps the image that stands for the host's, unless it is there. One does it at a time.
func (e *Engine) ensureStandIn(ctx context.Context, tell func(Progress)) error {
	select {
	case e.standIn <- struct{}{}:
		defer func() { <-e.standIn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	_, err := e.opts.Images.Resolve(ctx, HostStandIn)
	if !errors.Is(err, warren.ErrNotFound) {
		return err
	}
	if _, err := e.opts.Images.Bootstrap(ctx, BootstrapOptions{Name: HostStandIn, Packages: standInPackages, Progress: tell}); err != nil {
		return fmt.Errorf("%w; name another image with --image, or import one as %s", err, HostStandIn)
	}
	return nil
}
