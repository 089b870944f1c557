package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

// cardLog is what happened to the cards of a rig, in order.
type cardLog struct {
	mu    sync.Mutex
	lines []string
	fail  map[string]error // by call
}

func (l *cardLog) note(call string, args ...any) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, strings.TrimSpace(fmt.Sprintln(append([]any{call}, args...)...)))
	return l.fail[call]
}

// take returns what happened since the last time, without repetitions of a line, and without dials before anything else: whoever watches over
// sandboxes may ask a guest at any time.
func (l *cardLog) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for _, line := range l.lines {
		if len(out) == 0 && line != "dial" || len(out) > 0 && out[len(out)-1] != line {
			out = append(out, line)
		}
	}
	l.lines = nil
	return strings.Join(out, ", ")
}

// cardMaker is a driver whose sandboxes have cards of its own making.
type cardMaker struct {
	driver.Driver
	log *cardLog
}

func (d cardMaker) Unwrap() driver.Driver { return d.Driver }

func (d cardMaker) CheckCard(_ context.Context, options map[string]string) error {
	return d.log.fail["check"]
}

func (d cardMaker) Create(ctx context.Context, s *driver.Spec) error {
	what := "without a card"
	if s.Card != nil {
		what = fmt.Sprintf("with a card of MTU %d", s.Card.MTU)
		if s.Card.Inside != nil || s.Card.Outside != nil {
			what += " that has ends"
		}
	}
	d.log.note("create", what)
	return d.Driver.Create(ctx, s)
}

func (d cardMaker) Dial(ctx context.Context, id warren.SandboxID, port uint16) (net.Conn, error) {
	d.log.note("dial")
	return d.Driver.Dial(ctx, id, port)
}

func (d cardMaker) Delete(ctx context.Context, id warren.SandboxID) error {
	d.log.note("delete")
	return d.Driver.Delete(ctx, id)
}

func (d cardMaker) Card(context.Context, warren.SandboxID) (*os.File, error) {
	if err := d.log.note("open"); err != nil {
		return nil, err
	}
	return os.Open(os.DevNull)
}

// cardNetwork is a gateway that serves whatever it gets.
type cardNetwork struct{ log *cardLog }

func (n cardNetwork) Attach(context.Context, warren.SandboxID, NetworkPolicy, warren.SandboxID) (*driver.Card, error) {
	n.log.note("attach")
	return nil, errors.New("the driver makes the card itself")
}

func (n cardNetwork) Plan(context.Context) (*driver.Card, error) {
	return &driver.Card{MTU: 9000}, n.log.note("plan")
}

func (n cardNetwork) Adopt(_ context.Context, _ warren.SandboxID, f *os.File, p NetworkPolicy, from warren.SandboxID) error {
	if from != "" {
		from = "a fork's"
	}
	return n.log.note("adopt", p.Name, string(from))
}

func (n cardNetwork) Detach(context.Context, warren.SandboxID) error { return n.log.note("detach") }

func (n cardNetwork) SetPolicy(context.Context, warren.SandboxID, NetworkPolicy) error { return nil }

func (n cardNetwork) Attached(context.Context) (map[warren.SandboxID]string, error) {
	return nil, errors.New("it is not asked")
}

func (n cardNetwork) Card(context.Context, warren.SandboxID) (*os.File, error) {
	return nil, warren.ErrNotFound
}

func (n cardNetwork) Quiet(context.Context, warren.SandboxID) (time.Duration, error) {
	return time.Hour, nil
}

func (n cardNetwork) SetPeers(context.Context, PeerNetwork) error { return nil }

func (n cardNetwork) PeerNetworks(context.Context) (map[string]string, error) { return nil, nil }

func (n cardNetwork) Authority() []byte { return nil }

// TestCardMaker follows the card that a driver makes through the life of a sandbox: it is served, under its policy, before anybody speaks to
// the guest, and let go of when the sandbox is gone.
func TestCardMaker(t *testing.T) {
	log := &cardLog{fail: map[string]error{}}
	r := newRig(t, func(o *Options) {
		o.Drivers["fake"] = cardMaker{o.Drivers["fake"], log}
		o.Network, o.DefaultPolicy = cardNetwork{log}, "locked"
	})
	want := func(when, want string) {
		t.Helper()
		if got := log.take(); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", when, got, want)
		}
	}
	r.create(alice, Spec{Name: "one"})
	want("create", "plan, create with a card of MTU 9000, open, adopt locked, dial")
	if one, err := r.Get(t.Context(), alice, "one"); err != nil || one.Network != "locked" {
		t.Errorf("its network is %q, %v", one.Network, err)
	}
	r.delete(alice, "one")
	want("delete", "delete, detach")

	r.create(alice, Spec{Name: "none", Policy: NoNetwork})
	want("create without a network", "create without a card, dial")
	r.delete(alice, "none")
	want("delete without a network", "delete")

	// What cannot be served is not left running.
	for call, before := range map[string]string{"plan": "plan", "open": "plan, create with a card of MTU 9000, open", "adopt": "plan, create with a card of MTU 9000, open, adopt locked"} {
		log.fail[call] = fmt.Errorf("no %s: %w", call, warren.ErrUnavailable)
		if _, err := r.Create(t.Context(), alice, CreateRequest{Spec: Spec{Name: "two"}}, nil); !errors.Is(err, warren.ErrUnavailable) {
			t.Errorf("create, although there is no %s: %v", call, err)
		}
		want("create, although there is no "+call, before+", delete, detach")
		delete(log.fail, call)
	}

	// Where there can be no card there is none, unless one was asked for.
	log.fail["check"] = fmt.Errorf("this runtime has no cards: %w", errors.ErrUnsupported)
	r.create(alice, Spec{Name: "three"})
	if three, err := r.Get(t.Context(), alice, "three"); err != nil || three.Network != NoNetwork {
		t.Errorf("where there is no card the network is %q, %v", three.Network, err)
	}
	want("create where there is no card", "create without a card, dial")
	r.delete(alice, "three")
	if _, err := r.Create(t.Context(), alice, CreateRequest{Spec: Spec{Policy: "locked"}}, nil); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "this runtime has no cards") {
		t.Errorf("a policy where there is no card: %v", err)
	}
	log.fail["check"] = fmt.Errorf("the engine does not answer: %w", warren.ErrUnavailable)
	if _, err := r.Create(t.Context(), alice, CreateRequest{}, nil); !errors.Is(err, warren.ErrUnavailable) {
		t.Errorf("create while nobody knows: %v", err)
	}
	delete(log.fail, "check")
	log.take()
	r.empty()
}
