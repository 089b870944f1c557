package engine

import (
	"context"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/warren-sandbox/warren/driver"
)

// pooling is a driver that takes down what it is to keep ready.
type pooling struct {
	driver.Driver

	mu   sync.Mutex
	want map[string]int // by image
}

func (p *pooling) Unwrap() driver.Driver { return p.Driver }

func (p *pooling) Warm(_ context.Context, spec *driver.Spec, n int) error {
	for _, m := range spec.Mounts {
		if m.Dir == nil {
			panic("a mount without a directory")
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.want[spec.Root.Digest] = n
	return nil
}

func (p *pooling) Pooled(context.Context) (int, error) { return 0, nil }

func (p *pooling) PoolUse() (hits, misses uint64) { return 7, 3 }

func (p *pooling) total() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range p.want {
		n += w
	}
	return n
}

func TestPool(t *testing.T) {
	var p *pooling
	reg := prometheus.NewRegistry()
	r := newRig(t, func(o *Options) {
		p = &pooling{Driver: o.Drivers["fake"], want: map[string]int{}}
		o.Drivers["fake"], o.Pool, o.Registerer = p, 2, reg
	})
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	uses := map[string]float64{}
	for _, f := range all {
		for _, m := range f.GetMetric() {
			if f.GetName() == "warren_pool_starts_total" {
				for _, l := range m.GetLabel() {
					if l.GetName() == "ready" {
						uses[l.GetValue()] = m.GetCounter().GetValue()
					}
				}
			}
		}
	}
	if uses["true"] != 7 || uses["false"] != 3 {
		t.Errorf("the pool was used %v, want as the driver says", uses)
	}
	ctx := t.Context()
	r.create(alice, Spec{Name: "named"})
	eventually(t, "one is kept ready", func() bool { return p.total() == 1 })
	first := r.create(alice, Spec{})
	for range 3 {
		r.create(alice, Spec{})
	}
	eventually(t, "as many as may be are kept ready", func() bool { return p.total() == 2 })
	// Another kind takes the place of the first.
	for range 3 {
		r.create(alice, Spec{Resources: Resources{CPUMillis: 500}})
	}
	eventually(t, "no more than may be", func() bool { return p.total() <= 2 })
	// A fork asks for what it goes on from.
	if _, err := r.Fork(ctx, alice, ForkRequest{ID: string(first.ID)}, nil); err != nil {
		t.Fatal(err)
	}
	r.coolPool(true, "")
	eventually(t, "all are let go", func() bool { return p.total() == 0 })
	r.mu.Lock()
	for key, c := range r.pool {
		if c.want != 0 {
			t.Errorf("%s is still wanted", key)
		}
	}
	r.mu.Unlock()
	r.sizePoolNow()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pool) != 0 {
		t.Errorf("%d kinds are remembered", len(r.pool))
	}
}

func (e *Engine) sizePoolNow() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.sizePool(func(*poolClass) {})
}
