package warren

import (
	"context"
	"iter"
	"time"

	"connectrpc.com/connect"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// Version describes a server.
type Version struct {
	Version   string `json:"version"`
	Commit    string `json:"commit,omitempty"`
	GoVersion string `json:"goVersion"`
	// Platform such as "linux/amd64".
	Platform string   `json:"platform"`
	Drivers  []string `json:"drivers"`
	// Instance changes at each start of the server.
	Instance string `json:"instance"`
}

// Version describes the server as it is now.
func (c *Client) Version(ctx context.Context) (*Version, error) {
	res, err := c.system.GetVersion(ctx, connect.NewRequest(&warrenv1.GetVersionRequest{}))
	if err != nil {
		return nil, fromWire("get version", err)
	}
	return versionFrom(res.Msg), nil
}

// ServerVersion describes the server as it was when Connect returned, without asking.
func (c *Client) ServerVersion() Version { return *c.version }

// Check is one finding about the server's host.
type Check struct {
	Name string `json:"name"`
	// Status is "ok", "warn" or "fail".
	Status  string `json:"status"`
	Message string `json:"message"`
	// Hint says how to mend it.
	Hint string `json:"hint,omitempty"`
}

// Doctor checks the server's host.
func (c *Client) Doctor(ctx context.Context) ([]Check, error) {
	res, err := c.system.Doctor(ctx, connect.NewRequest(&warrenv1.DoctorRequest{}))
	if err != nil {
		return nil, fromWire("doctor", err)
	}
	var checks []Check
	for _, p := range res.Msg.GetChecks() {
		checks = append(checks, Check{Name: p.GetName(), Status: p.GetStatus(), Message: p.GetMessage(), Hint: p.GetHint()})
	}
	return checks, nil
}

// Token is a bearer token without its value, which only its creation shows.
type Token struct {
	ID string `json:"id"`
	// User that the token acts as.
	User        string    `json:"user"`
	Description string    `json:"description,omitempty"`
	Created     time.Time `json:"created,omitzero"`
	// Expires is zero when it does not.
	Expires  time.Time `json:"expires,omitzero"`
	LastUsed time.Time `json:"lastUsed,omitzero"`
}

// TokenSpec is the wish for a token.
type TokenSpec struct {
	// User that the token acts as.
	User        string
	Description string
	// TTL ends it this long after its creation; 0 means never.
	TTL time.Duration
}

// CreateToken issues a token. Its value cannot be had again: the server keeps a hash.
func (c *Client) CreateToken(ctx context.Context, spec TokenSpec) (id, value string, err error) {
	res, err := c.system.CreateToken(ctx, connect.NewRequest(&warrenv1.CreateTokenRequest{User: spec.User, Description: spec.Description, Ttl: durationTo(spec.TTL)}))
	if err != nil {
		return "", "", fromWire("create token", err)
	}
	return res.Msg.GetId(), res.Msg.GetToken(), nil
}

// Tokens lists the tokens.
func (c *Client) Tokens(ctx context.Context) iter.Seq2[*Token, error] {
	return func(yield func(*Token, error) bool) {
		res, err := c.system.ListTokens(ctx, connect.NewRequest(&warrenv1.ListTokensRequest{}))
		if err != nil {
			yield(nil, fromWire("list tokens", err))
			return
		}
		for _, p := range res.Msg.GetTokens() {
			t := &Token{ID: p.GetId(), User: p.GetUser(), Description: p.GetDescription(), Created: timeFrom(p.GetCreated()), Expires: timeFrom(p.GetExpires()), LastUsed: timeFrom(p.GetLastUsed())}
			if !yield(t, nil) {
				return
			}
		}
	}
}

// DeleteToken revokes a token. Streams that it opened are cut within seconds.
func (c *Client) DeleteToken(ctx context.Context, id string) error {
	_, err := c.system.DeleteToken(ctx, connect.NewRequest(&warrenv1.DeleteTokenRequest{Id: id}))
	return fromWire("delete token", err)
}
