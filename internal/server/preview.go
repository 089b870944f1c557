package server

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/engine"
	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// Previews are where ports of sandboxes are shown to browsers.
type Previews interface {
	// URL is that of a port, and Link the same with what lets in until it expires.
	URL(id warren.SandboxID, port uint16) string
	Link(p engine.Preview, ttl time.Duration) (link string, expires time.Time)
}

const (
	defaultLink = time.Hour
	maxLink     = 24 * time.Hour
)

func (h sandboxService) PreviewPort(ctx context.Context, req *connect.Request[warrenv1.PreviewPortRequest]) (*connect.Response[warrenv1.PreviewPortResponse], error) {
	m := req.Msg
	h.s.note(ctx, m.GetId())
	if err := engine.CheckPreviewPort(uint64(m.GetPort())); err != nil {
		return nil, err
	}
	ttl, err := duration("ttl", m.GetTtl())
	switch {
	case err != nil:
		return nil, err
	case m.GetTtl() == nil:
		ttl = defaultLink
	case ttl < time.Second || ttl > maxLink:
		return nil, invalid("ttl is %s; a link works for 1s to %s", ttl, maxLink)
	}
	tell(ctx, "port", strconv.FormatUint(uint64(m.GetPort()), 10))
	if m.Public != nil {
		tell(ctx, "public", strconv.FormatBool(*m.Public))
	}
	if m.GetRevoke() {
		tell(ctx, "revoke", "true")
	}
	// What only closes is let through, and what only asks where a preview is.
	if !m.GetNoLink() || m.GetPublic() || m.KeepHost != nil {
		if err := h.s.recordable(); err != nil {
			return nil, err
		}
	}
	r := engine.PreviewRequest{ID: m.GetId(), Port: uint16(m.GetPort()), Public: m.Public, KeepHost: m.KeepHost, Revoke: m.GetRevoke()}
	if h.s.opts.Previews == nil {
		if _, err := h.s.engine.Resolve(callerOf(ctx), m.GetId()); err != nil {
			return nil, err
		}
		// What is open can be closed all the same.
		if r.Revoke || r.Public != nil && !*r.Public {
			if _, err := h.s.engine.SetPreview(ctx, callerOf(ctx), r); err != nil {
				return nil, err
			}
		}
		return nil, fmt.Errorf("this server shows no previews: preview.listen is off, or its address was not to be had; `warren port-forward` reaches the port: %w", warren.ErrUnavailable)
	}
	if !m.GetNoLink() && (m.Public == nil || !*m.Public) {
		r.Link = ttl
	}
	p, err := h.s.engine.SetPreview(ctx, callerOf(ctx), r)
	if err != nil {
		return nil, err
	}
	tell(ctx, "public", strconv.FormatBool(p.Public))
	v := &warrenv1.Preview{SandboxId: string(p.SandboxID), Port: uint32(p.Port), Url: h.s.opts.Previews.URL(p.SandboxID, p.Port), Public: p.Public, KeepHost: p.KeepHost}
	switch {
	case m.GetNoLink():
	case p.Public:
		v.Link = v.Url
	default:
		link, expires := h.s.opts.Previews.Link(*p, ttl)
		v.Link, v.Expires = link, timeTo(expires)
	}
	return connect.NewResponse(&warrenv1.PreviewPortResponse{Preview: v}), nil
}
