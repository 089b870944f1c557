package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/policy"
	"github.com/warren-sandbox/warren/internal/secret"
	"github.com/warren-sandbox/warren/internal/store"
)

// Sealer seals values. The engine opens none: that is the gateway's.
type Sealer interface {
	Box() (*secret.Box, error)
}

// SecretInfo tells of a secret, and nothing of its value.
type SecretInfo struct {
	Name string
	// Version counts from 1.
	Version          uint32
	Created, Updated time.Time
	// Policies are those that grant it.
	Policies []string
}

var secretForm = regexp.MustCompile(`^[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?$`)

// maxSecrets is how many a server keeps.
const maxSecrets = 10000

func (e *Engine) loadSecrets(ctx context.Context) error {
	all, err := e.store.Secrets(ctx)
	if err != nil {
		return err
	}
	for _, s := range all {
		e.secrets[s.Name] = s
	}
	return nil
}

// secret returns one, or nil.
func (e *Engine) secret(name string) *store.Secret {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.secrets[name]
}

// SetSecret stores a value, which counts from the next request on, in place of one of that name. value is cleared.
func (e *Engine) SetSecret(ctx context.Context, c Caller, name string, value []byte) (SecretInfo, error) {
	defer clear(value)
	if err := operatorOnly(c, "set secrets"); err != nil {
		return SecretInfo{}, err
	}
	if !secretForm.MatchString(name) {
		return SecretInfo{}, invalid("secret", name, "want 1 to 64 of a-z, 0-9, dots, hyphens and underscores, a letter or digit first and last")
	}
	if err := secret.CheckValue(value); err != nil {
		return SecretInfo{}, fmt.Errorf("secret %s: %w: %w", quote(name), err, warren.ErrInvalid)
	}
	if e.opts.Secrets == nil {
		return SecretInfo{}, fmt.Errorf("secret %s: this server has no gateway, which alone could use it: %w", quote(name), errors.ErrUnsupported)
	}
	box, err := e.opts.Secrets.Box()
	if err != nil {
		return SecretInfo{}, fmt.Errorf("secret %s: %w: %w", quote(name), err, warren.ErrUnavailable)
	}
	sealed, err := box.Seal(ctx, name, value)
	if err != nil {
		return SecretInfo{}, fmt.Errorf("%w: %w", err, warren.ErrUnavailable)
	}
	e.secretMu.Lock()
	defer e.secretMu.Unlock()
	now := e.clock.Now()
	row := &store.Secret{Name: name, Sealed: sealed, Version: 1, Created: now, Updated: now}
	e.mu.Lock()
	have, n := e.secrets[name], len(e.secrets)
	e.mu.Unlock()
	if have != nil {
		row.Version, row.Created = have.Version+1, have.Created
	} else if n >= maxSecrets {
		return SecretInfo{}, fmt.Errorf("the server keeps %d secrets, which is the most; remove some: %w", n, warren.ErrExhausted)
	}
	if err := e.store.Update(ctx, func(tx *store.Tx) error {
		if err := tx.PutSecret(row); err != nil {
			return err
		}
		return tx.AppendEvent(&store.Event{Time: now, Owner: c.User, Actor: c.User, Action: "secret.set", Message: name, Fields: map[string]string{"secret": name}})
	}); err != nil {
		return SecretInfo{}, err
	}
	e.mu.Lock()
	e.secrets[name] = row
	e.mu.Unlock()
	return e.secretInfo(row), e.rearm(ctx, name)
}

// DeleteSecret removes a secret. From then on requests that need it fail.
func (e *Engine) DeleteSecret(ctx context.Context, c Caller, name string) error {
	if err := operatorOnly(c, "remove secrets"); err != nil {
		return err
	}
	e.secretMu.Lock()
	defer e.secretMu.Unlock()
	if e.secret(name) == nil {
		return notFound("secret", name)
	}
	if err := e.store.Update(ctx, func(tx *store.Tx) error {
		if err := tx.DeleteSecret(name); err != nil {
			return err
		}
		return tx.AppendEvent(&store.Event{Time: e.clock.Now(), Owner: c.User, Actor: c.User, Action: "secret.delete", Message: name, Fields: map[string]string{"secret": name}})
	}); err != nil {
		return err
	}
	e.mu.Lock()
	delete(e.secrets, name)
	e.mu.Unlock()
	return e.rearm(ctx, name)
}

// Secrets lists the secrets by name.
func (e *Engine) Secrets(c Caller) ([]SecretInfo, error) {
	if err := operatorOnly(c, "list secrets"); err != nil {
		return nil, err
	}
	e.mu.Lock()
	rows := make([]*store.Secret, 0, len(e.secrets))
	for _, s := range e.secrets {
		rows = append(rows, s)
	}
	e.mu.Unlock()
	slices.SortFunc(rows, func(a, b *store.Secret) int { return strings.Compare(a.Name, b.Name) })
	users, err := e.secretUsers()
	if err != nil {
		return nil, err
	}
	list := make([]SecretInfo, 0, len(rows))
	for _, s := range rows {
		i := e.secretInfo(s)
		i.Policies = users[s.Name]
		list = append(list, i)
	}
	return list, nil
}

func (e *Engine) secretInfo(s *store.Secret) SecretInfo {
	return SecretInfo{Name: s.Name, Version: s.Version, Created: s.Created, Updated: s.Updated}
}

// secretUsers returns the policies that grant each secret.
func (e *Engine) secretUsers() (map[string][]string, error) {
	list, err := e.Policies()
	if err != nil {
		return nil, err
	}
	users := map[string][]string{}
	for _, p := range list {
		parsed, err := e.parse(NetworkPolicy{Name: p.Name, Source: p.Source})
		if err != nil {
			continue // it grants nothing
		}
		for _, g := range parsed.Grants() {
			if !slices.Contains(users[g.Secret], p.Name) {
				users[g.Secret] = append(users[g.Secret], p.Name)
			}
		}
	}
	return users, nil
}

// issuePlaceholders gives a new sandbox a placeholder of its own for each secret that its policy grants.
func (e *Engine) issuePlaceholders(s *Spec, p *policy.Policy) error {
	grants := p.Grants()
	if len(grants) == 0 && len(s.Placeholders) == 0 {
		return nil
	}
	old := s.Placeholders
	s.Placeholders = map[string][]string{}
	for name, list := range old {
		s.Placeholders[name] = list[:min(len(list), maxPlaceholders-1)]
	}
	issued := map[string]bool{}
	for _, g := range grants {
		if e.secret(g.Secret) == nil {
			return fmt.Errorf("policy %s grants secret %s, which is not set; `warren secret set %s` first: %w", quote(s.Policy), g.Secret, g.Secret, warren.ErrInvalid)
		}
		if _, ok := s.Env[g.Env]; ok && g.Env != "" {
			return invalid("env", g.Env, fmt.Sprintf("policy %s gives it the placeholder of secret %s; leave it out", quote(s.Policy), g.Secret))
		}
		if issued[g.Secret] {
			continue
		}
		issued[g.Secret] = true
		ph, err := secret.NewPlaceholder("")
		if err != nil {
			return err
		}
		s.Placeholders[g.Secret] = append([]string{ph}, s.Placeholders[g.Secret]...)
	}
	return nil
}

// maxPlaceholders is how many of one secret a sandbox has at most: its own, and those of the sandboxes that it was forked from.
const maxPlaceholders = 16

// placeholderEnv is the environment that a policy gives to a sandbox.
func (e *Engine) placeholderEnv(s *Spec) map[string]string {
	if len(s.Placeholders) == 0 || s.Policy == "" || s.Policy == NoNetwork {
		return nil
	}
	p, err := e.loadPolicy(s.Policy)
	if err != nil {
		return nil
	}
	parsed, err := e.parse(p)
	if err != nil {
		return nil
	}
	env := map[string]string{}
	for _, g := range parsed.Grants() {
		if list := s.Placeholders[g.Secret]; g.Env != "" && len(list) > 0 {
			env[g.Env] = list[0]
		}
	}
	return env
}

// armed adds to a policy what its grants need.
func (e *Engine) armed(p NetworkPolicy, placeholders map[string][]string) (NetworkPolicy, error) {
	parsed, err := e.parse(p)
	if err != nil {
		return p, err
	}
	p.Digest = parsed.Digest()
	names := sortedKeys(placeholders)
	for _, g := range parsed.Grants() {
		if !slices.Contains(names, g.Secret) {
			names = append(names, g.Secret)
		}
	}
	if len(names) == 0 {
		return p, nil
	}
	slices.Sort(names)
	for _, name := range names {
		s := NetworkSecret{Name: name, Placeholders: placeholders[name]}
		if have := e.secret(name); have != nil {
			s.Sealed = have.Sealed
		}
		p.Secrets = append(p.Secrets, s)
	}
	text, err := json.Marshal(p.Secrets)
	if err != nil {
		return p, err
	}
	sum := sha256.Sum256(append([]byte(p.Digest+"\n"), text...))
	p.Digest = hex.EncodeToString(sum[:])
	return p, nil
}

// rearm has the gateway know at once that a secret has changed, of all sandboxes that have it side by side. What cannot be reached now gets it
// when it is looked after, and the caller hears that it has the old one until then.
func (e *Engine) rearm(ctx context.Context, name string) error {
	defer e.TendNetwork()
	// One sandbox hears how silent the gateway is; the others need not wait for that too.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var mu sync.Mutex
	var failed []warren.SandboxID
	var why error
	var g errgroup.Group
	g.SetLimit(8)
	// An engine that has just started does not know yet what its sandboxes have.
	if err := e.findPolicies(ctx); err != nil {
		return fmt.Errorf("secret %s: it is written, and sandboxes have what it was before until the gateway can be told: %w", name, err)
	}
	for _, sb := range e.carded() {
		p, err := e.armed(e.effective(sb.id, sb.policy), sb.placeholders)
		if err != nil || !slices.ContainsFunc(p.Secrets, func(s NetworkSecret) bool { return s.Name == name }) {
			continue
		}
		g.Go(func() error {
			err := e.putPolicy(ctx, sb, nil)
			if err == nil || errors.Is(err, warren.ErrNotFound) {
				return nil
			}
			e.log.Error("change a secret of a sandbox", "sandbox", sb.id, "secret", name, "error", err)
			mu.Lock()
			defer mu.Unlock()
			if why == nil {
				why = err
			}
			failed = append(failed, sb.id)
			if errors.Is(err, warren.ErrUnavailable) {
				cancel()
			}
			return nil
		})
	}
	g.Wait()
	if why == nil {
		return nil
	}
	return fmt.Errorf("secret %s: it is written, and sandboxes have what it was before until the gateway can be told (%s): %w", name, listed(failed), why)
}

// listed names the first few of some sandboxes.
func listed(ids []warren.SandboxID) string {
	const most = 3
	var b strings.Builder
	for i, id := range ids {
		if i == most {
			fmt.Fprintf(&b, " and %d more", len(ids)-most)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(string(id))
	}
	return b.String()
}
