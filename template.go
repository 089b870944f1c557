package warren

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// Template is a name for a snapshot that sandboxes are made from, as the server last described it.
type Template struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	// Snapshot is what it stands for now. It cannot be deleted meanwhile.
	Snapshot SnapshotID `json:"snapshotId"`
	// IdleTimeout of sandboxes made of it that ask for none.
	IdleTimeout time.Duration `json:"idleTimeout,omitempty"`
	// Version counts from 1 with each build.
	Version uint32    `json:"version"`
	Created time.Time `json:"created"`
	Updated time.Time `json:"updated"`
	Owner   string    `json:"owner,omitempty"`
	// Standby is how many sandboxes of it are restored already: the next creates take these over.
	Standby int `json:"standby,omitempty"`
	// StandbyNote is why there is none.
	StandbyNote string `json:"standbyNote,omitempty"`
	// Recipe is the JSON of the [TemplateSpec] that it was built from.
	Recipe json.RawMessage `json:"recipe,omitempty"`
}

func templateFrom(p *warrenv1.Template) *Template {
	return &Template{
		ID: p.GetId(), Name: p.GetName(), Snapshot: SnapshotID(p.GetSnapshotId()), IdleTimeout: p.GetIdleTimeout().AsDuration(), Version: p.GetVersion(),
		Created: timeFrom(p.GetCreated()), Updated: timeFrom(p.GetUpdated()), Owner: p.GetOwner(), Standby: int(p.GetStandby()), StandbyNote: p.GetStandbyNote(), Recipe: json.RawMessage(p.GetRecipe()),
	}
}

// Template returns the template with this name or id.
func (c *Client) Template(ctx context.Context, name string) (*Template, error) {
	res, err := c.templates.GetTemplate(ctx, connect.NewRequest(&warrenv1.GetTemplateRequest{Id: name}))
	if err != nil {
		return nil, fromWire("get template", err)
	}
	return templateFrom(res.Msg.GetTemplate()), nil
}

// Templates lists the caller's templates by name. The first error ends the list.
func (c *Client) Templates(ctx context.Context) iter.Seq2[*Template, error] {
	return func(yield func(*Template, error) bool) {
		res, err := c.templates.ListTemplates(ctx, connect.NewRequest(&warrenv1.ListTemplatesRequest{}))
		if err != nil {
			yield(nil, fromWire("list templates", err))
			return
		}
		for _, p := range res.Msg.GetTemplates() {
			if !yield(templateFrom(p), nil) {
				return
			}
		}
	}
}

// DeleteTemplate removes a template, its snapshot, and the snapshots that builds of it keep for the next build. Sandboxes that were
// made of it stay.
func (c *Client) DeleteTemplate(ctx context.Context, name string, o DeleteOptions) error {
	t, err := c.Template(ctx, name)
	switch {
	case isNotFound(err):
		// The first build may have failed, and have kept what it could.
		n, derr := c.dropRemains(ctx, name)
		if derr != nil {
			return derr
		}
		if n > 0 || o.AllowMissing {
			return nil
		}
		return err
	case err != nil:
		return err
	}
	if _, err := c.templates.DeleteTemplate(ctx, connect.NewRequest(&warrenv1.DeleteTemplateRequest{Id: t.ID, AllowMissing: o.AllowMissing})); err != nil {
		return fromWire("delete template", err)
	}
	if err := c.dropUnused(ctx, t.Snapshot); err != nil {
		return err
	}
	_, err = c.dropBuilt(ctx, t.Name, t.Owner, nil, time.Now())
	return err
}

// dropRemains deletes what builds of a template have made that is not there. As a template's name may, this one may be for an operator that
// of another user, but of one only.
func (c *Client) dropRemains(ctx context.Context, template string) (int, error) {
	steps, versions, err := c.built(ctx, template)
	if err != nil {
		return 0, err
	}
	var owners []string
	for _, p := range slices.Concat(steps, versions) {
		if !slices.Contains(owners, p.Owner) {
			owners = append(owners, p.Owner)
		}
	}
	switch len(owners) {
	case 0:
		return 0, nil
	case 1:
		return c.dropBuilt(ctx, template, owners[0], nil, time.Now())
	}
	return 0, fmt.Errorf("there is no template %s, and %d users (%s) have snapshots of builds of one; remove those that are meant with `warren snapshot rm`: %w",
		template, len(owners), strings.Join(owners, ", "), ErrInvalid)
}
