package warren

import (
	"context"
	"time"

	"connectrpc.com/connect"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// Secret is a value that sandboxes use without having it: a policy grants it to requests, into which the gateway puts it. Nothing returns
// the value.
type Secret struct {
	Name string `json:"name"`
	// Version counts from 1 with each value that was set.
	Version uint32    `json:"version"`
	Created time.Time `json:"created"`
	Updated time.Time `json:"updated"`
	// Policies are those that grant it; only of a list.
	Policies []string `json:"policies,omitempty"`
}

func secretFrom(s *warrenv1.Secret) *Secret {
	return &Secret{Name: s.GetName(), Version: s.GetVersion(), Created: timeFrom(s.GetCreated()), Updated: timeFrom(s.GetUpdated()), Policies: s.GetPolicies()}
}

// SetSecret stores a value, in place of one of that name: 8 bytes to 16 KiB of printable ASCII, on one line. It counts from the next
// request of a sandbox on.
func (c *Client) SetSecret(ctx context.Context, name string, value []byte) (*Secret, error) {
	res, err := c.secrets.SetSecret(ctx, connect.NewRequest(&warrenv1.SetSecretRequest{Name: name, Value: value}))
	if err != nil {
		return nil, fromWire("set secret", err)
	}
	return secretFrom(res.Msg.GetSecret()), nil
}

// Secrets lists the secrets by name.
func (c *Client) Secrets(ctx context.Context) ([]*Secret, error) {
	res, err := c.secrets.ListSecrets(ctx, connect.NewRequest(&warrenv1.ListSecretsRequest{}))
	if err != nil {
		return nil, fromWire("list secrets", err)
	}
	list := make([]*Secret, 0, len(res.Msg.GetSecrets()))
	for _, s := range res.Msg.GetSecrets() {
		list = append(list, secretFrom(s))
	}
	return list, nil
}

// DeleteSecret removes a secret. Requests that need it fail from then on.
func (c *Client) DeleteSecret(ctx context.Context, name string) error {
	_, err := c.secrets.DeleteSecret(ctx, connect.NewRequest(&warrenv1.DeleteSecretRequest{Name: name}))
	return fromWire("delete secret", err)
}
