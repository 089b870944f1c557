package engine

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/store"
)

// Preview says how a port of a sandbox may be looked at from outside. It is there for every port: of those that nobody has spoken
// of, all fields but the names are zero.
type Preview struct {
	SandboxID warren.SandboxID
	Port      uint16
	Owner     string
	State     State
	// Public lets everybody in.
	Public bool
	// KeepHost tells the sandbox the name under which it is looked at, instead of localhost.
	KeepHost bool
	// Epoch is part of what links are signed for.
	Epoch uint64
}

// PreviewRequest asks for the preview of a port and changes it; nil fields stay.
type PreviewRequest struct {
	ID               string
	Port             uint16
	Public, KeepHost *bool
	// Revoke makes the links to all ports of the sandbox that were given out invalid.
	Revoke bool
	// Link, if not zero, is how long the link works that the caller is about to be given; the event tells.
	Link time.Duration
}

// noPreview are ports of protocols that a request could be made to speak by mistake: those which browsers refuse as well (the
// Fetch standard's bad ports), since here the port is not where a browser looks for it.
var noPreview = []uint16{
	1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104, 109, 110, 111, 113, 115, 117, 119, 123,
	135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513, 514, 515, 526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995,
	1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080,
}

// CheckPreviewPort refuses ports that have no preview.
func CheckPreviewPort(port uint64) error {
	text := fmt.Sprint(port)
	switch {
	case port == 0 || port > 65535:
		return invalid("port", text, "a port is from 1 to 65535")
	case port == warren.GuestPort:
		return invalid("port", text, "it is the guest's own, which has no preview")
	case slices.Contains(noPreview, uint16(port)):
		return invalid("port", text, "it belongs to another protocol than HTTP, and browsers refuse it; let the program listen elsewhere, or use `warren port-forward`")
	}
	return nil
}

// PreviewOf returns the preview of a port, for whoever: to let anybody in is for its caller to decide. It is false for a sandbox that is
// not there.
func (e *Engine) PreviewOf(id warren.SandboxID, port uint16) (Preview, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb := e.boxes[id]
	// Of a damaged record nobody knows which links were revoked.
	if sb == nil || sb.gone || sb.state() == Deleting || sb.row.Damaged != "" {
		return Preview{}, false
	}
	return sb.preview(port), true
}

// preview is the preview of a port. The caller holds mu.
func (sb *sandbox) preview(port uint16) Preview {
	p := Preview{SandboxID: sb.row.ID, Port: port, Owner: sb.row.Owner, State: sb.state()}
	if all := sb.row.Previews; all != nil {
		p.Epoch, p.Public, p.KeepHost = all.Epoch, all.Ports[port].Public, all.Ports[port].KeepHost
	}
	return p
}

// SetPreview changes the preview of a port as asked for and returns it. When nothing is to be changed it waits for nothing.
func (e *Engine) SetPreview(ctx context.Context, c Caller, r PreviewRequest) (*Preview, error) {
	if err := CheckPreviewPort(uint64(r.Port)); err != nil {
		return nil, err
	}
	e.mu.Lock()
	sb, err := e.find(c, r.ID)
	var p Preview
	if err == nil {
		p = sb.preview(r.Port)
		if sb.row.Damaged != "" {
			err = failedError(sb)
		}
	}
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	change := r.Revoke || r.Public != nil && *r.Public != p.Public || r.KeepHost != nil && *r.KeepHost != p.KeepHost
	if !change && r.Link == 0 {
		return &p, nil
	}
	// As an update, which hinders no use of the sandbox.
	op, err := e.hold(ctx, sb, "update", nil)
	if err != nil {
		return nil, err
	}
	got, err := e.setPreview(ctx, c, sb, r)
	e.finish(sb, op, err)
	return got, err
}

func (e *Engine) setPreview(ctx context.Context, c Caller, sb *sandbox, r PreviewRequest) (*Preview, error) {
	e.mu.Lock()
	row, was := sb.row, sb.preview(r.Port)
	e.mu.Unlock()
	next := &store.Previews{Ports: map[uint16]store.PortPreview{}}
	if row.Previews != nil {
		next.Epoch = row.Previews.Epoch
		maps.Copy(next.Ports, row.Previews.Ports)
	}
	port := next.Ports[r.Port]
	var events []*store.Event
	note := func(action, message string) {
		ev := e.event(c.User, action, &row, message)
		ev.Fields = map[string]string{"port": fmt.Sprint(r.Port)}
		events = append(events, ev)
	}
	if r.Revoke {
		next.Epoch++
		note("preview.revoke", "links to all its ports that were given out are invalid")
	}
	if r.Public != nil && *r.Public != was.Public {
		port.Public = *r.Public
		if port.Public {
			note("preview.public", "everybody who reaches the server's previews may open it")
		} else {
			note("preview.private", "")
		}
	}
	if r.KeepHost != nil && *r.KeepHost != was.KeepHost {
		port.KeepHost = *r.KeepHost
		note("preview.host", map[bool]string{true: "the sandbox is told the name of the preview", false: "the sandbox is told localhost"}[port.KeepHost])
	}
	if r.Link > 0 {
		note("preview.link", "a link for "+r.Link.String())
	}
	if next.Ports[r.Port] = port; port == (store.PortPreview{}) {
		delete(next.Ports, r.Port)
	}
	if err := e.store.Update(ctx, func(tx *store.Tx) error {
		if err := tx.SetPreviews(row.ID, next); err != nil {
			return err
		}
		for _, ev := range events {
			if err := tx.AppendEvent(ev); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	sb.row.Previews = next
	p := sb.preview(r.Port)
	return &p, nil
}
