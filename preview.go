package warren

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// Preview is a port of a sandbox as browsers see it: an origin of its own, whose cookies and storage no other has.
type Preview struct {
	Sandbox SandboxID `json:"sandbox"`
	Port    int       `json:"port"`
	// URL is where it is. Who opens it has to be let in: by Link, by an API token, or because it is public.
	URL string `json:"url"`
	// Link is the URL with a token that lets in whoever has it until Expires. That of a public preview is its URL.
	Link    string    `json:"link,omitempty"`
	Expires time.Time `json:"expires,omitzero"`
	Public  bool      `json:"public,omitempty"`
	// KeepHost says that the sandbox is told the preview's name in Host; otherwise it sees localhost and its port.
	KeepHost bool `json:"keepHost,omitempty"`
}

// PreviewOptions ask for a preview and change it.
type PreviewOptions struct {
	// TTL is how long the link works, from 1 second to 24 hours; 0 means 1 hour.
	TTL time.Duration
	// Public and KeepHost change the preview; nil leaves it as it is.
	Public, KeepHost *bool
	// Revoke ends what links to all ports of the sandbox have opened so far.
	Revoke bool
	// NoLink makes no link.
	NoLink bool
}

// Preview returns where a port of the sandbox is shown to browsers, with a link. Nothing needs to listen there yet. A server without
// previews returns [ErrUnavailable].
func (s *Sandbox) Preview(ctx context.Context, port int, o PreviewOptions) (*Preview, error) {
	if port < 1 || port > 65535 {
		return nil, &Error{Kind: "invalid", Op: "preview port", ID: string(s.ID), Message: "a port is from 1 to 65535"}
	}
	req := &warrenv1.PreviewPortRequest{Id: string(s.ID), Port: uint32(port), Public: o.Public, KeepHost: o.KeepHost, Revoke: o.Revoke, NoLink: o.NoLink}
	if o.TTL != 0 {
		req.Ttl = durationpb.New(o.TTL)
	}
	res, err := s.c.sandboxes.PreviewPort(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, fromWire("preview port", err)
	}
	m := res.Msg.GetPreview()
	p := &Preview{Sandbox: SandboxID(m.GetSandboxId()), Port: int(m.GetPort()), URL: m.GetUrl(), Link: m.GetLink(), Public: m.GetPublic(), KeepHost: m.GetKeepHost()}
	if m.GetExpires() != nil {
		p.Expires = m.GetExpires().AsTime()
	}
	return p, nil
}
