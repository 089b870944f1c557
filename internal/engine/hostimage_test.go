package engine

import (
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/warren-sandbox/warren/driver"
)

// imageOnly is a driver that cannot show the host's programs.
type imageOnly struct{ driver.Driver }

func (imageOnly) ReplaceHost() string     { return "it has images of its own" }
func (d imageOnly) Unwrap() driver.Driver { return d.Driver }

func TestHostStandIn(t *testing.T) {
	r := newRig(t, func(o *Options) {
		o.Drivers["images"] = imageOnly{o.Drivers["fake"]}
	})
	var mu sync.Mutex
	var said []string
	tell := func(p Progress) {
		mu.Lock()
		defer mu.Unlock()
		said = append(said, p.Message)
	}
	for driver, want := range map[string]string{"images": HostStandIn, "fake": hostImage} {
		sb, err := r.Create(t.Context(), alice, CreateRequest{Spec: Spec{Driver: driver, Image: hostImage}}, tell)
		if err != nil {
			t.Fatal(err)
		}
		if sb.Image != want {
			t.Errorf("with driver %s the image is %q, want %q", driver, sb.Image, want)
		}
	}
	if !slices.ContainsFunc(said, func(s string) bool {
		return strings.Contains(s, HostStandIn) && strings.Contains(s, "images of its own")
	}) {
		t.Errorf("nobody was told: %q", said)
	}
	// Another image is nobody's business.
	r.images.add("other", "oci")
	if sb, err := r.Create(t.Context(), alice, CreateRequest{Spec: Spec{Driver: "images", Image: "other"}}, nil); err != nil || sb.Image != "other" {
		t.Errorf("%+v, %v", sb, err)
	}
}
