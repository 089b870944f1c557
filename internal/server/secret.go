package server

import (
	"context"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren/internal/engine"
	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

type secretService struct{ s *Server }

func secretTo(i engine.SecretInfo) *warrenv1.Secret {
	return &warrenv1.Secret{Name: i.Name, Version: i.Version, Created: timeTo(i.Created), Updated: timeTo(i.Updated), Policies: i.Policies}
}

func (h secretService) SetSecret(ctx context.Context, req *connect.Request[warrenv1.SetSecretRequest]) (*connect.Response[warrenv1.SetSecretResponse], error) {
	h.s.note(ctx, req.Msg.GetName())
	i, err := h.s.engine.SetSecret(ctx, callerOf(ctx), req.Msg.GetName(), req.Msg.GetValue())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.SetSecretResponse{Secret: secretTo(i)}), nil
}

func (h secretService) ListSecrets(ctx context.Context, _ *connect.Request[warrenv1.ListSecretsRequest]) (*connect.Response[warrenv1.ListSecretsResponse], error) {
	list, err := h.s.engine.Secrets(callerOf(ctx))
	if err != nil {
		return nil, err
	}
	res := &warrenv1.ListSecretsResponse{}
	for _, i := range list {
		res.Secrets = append(res.Secrets, secretTo(i))
	}
	return connect.NewResponse(res), nil
}

func (h secretService) DeleteSecret(ctx context.Context, req *connect.Request[warrenv1.DeleteSecretRequest]) (*connect.Response[warrenv1.DeleteSecretResponse], error) {
	h.s.note(ctx, req.Msg.GetName())
	if err := h.s.engine.DeleteSecret(ctx, callerOf(ctx), req.Msg.GetName()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&warrenv1.DeleteSecretResponse{}), nil
}
