package engine

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/store"
)

// token is a record in memory, guarded by Engine.mu.
type token struct {
	row  store.Token
	used bool // since it was last saved
}

// tokenPrefix makes tokens easy to find for scanners of leaked secrets.
const tokenPrefix = "warren_"

func (e *Engine) loadTokens(ctx context.Context) error {
	all, err := e.store.Tokens(ctx)
	if err != nil {
		return err
	}
	for _, row := range all {
		e.addToken(&token{row: row})
	}
	return nil
}

func (e *Engine) addToken(t *token) {
	e.tokens[[32]byte(t.row.Hash)] = t
	e.tokenIDs[t.row.ID] = t
}

// CreateToken issues a token that acts as user. It is returned this once and kept only as a hash.
func (e *Engine) CreateToken(ctx context.Context, c Caller, user, description string, ttl time.Duration) (id, secret string, err error) {
	if err := operatorOnly(c, "issue tokens"); err != nil {
		return "", "", err
	}
	if user == "" {
		return "", "", invalid("user", user, "a token needs a user to act as")
	}
	if err := text("user", user, 128); err != nil {
		return "", "", err
	}
	if err := text("description", description, 256); err != nil {
		return "", "", err
	}
	if err := checkTimeout("ttl", ttl); err != nil {
		return "", "", err
	}
	var raw [32]byte
	rand.Read(raw[:])
	secret = tokenPrefix + hex.EncodeToString(raw[:])
	sum := sha256.Sum256([]byte(secret))
	row := store.Token{ID: newID('t'), User: user, Description: description, Hash: sum[:], Created: e.clock.Now()}
	if ttl > 0 {
		row.Expires = row.Created.Add(ttl)
	}
	if err := e.store.Update(ctx, func(tx *store.Tx) error {
		if err := tx.InsertToken(row); err != nil {
			return err
		}
		return tx.AppendEvent(&store.Event{Time: row.Created, Owner: c.User, Actor: c.User, Action: "token.create", Message: "for " + user, Fields: map[string]string{"token": row.ID}})
	}); err != nil {
		return "", "", err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.addToken(&token{row: row})
	return row.ID, secret, nil
}

func (t *token) view() Token {
	return Token{ID: t.row.ID, User: t.row.User, Description: t.row.Description, Created: t.row.Created, Expires: t.row.Expires, LastUsed: t.row.LastUsed}
}

// ListTokens returns the tokens, oldest first: all to an operator, to others those that act as them.
func (e *Engine) ListTokens(_ context.Context, c Caller) ([]Token, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []Token
	for _, t := range e.tokenIDs {
		if c.may(t.row.User) {
			all = append(all, t.view())
		}
	}
	slices.SortFunc(all, func(a, b Token) int {
		if n := a.Created.Compare(b.Created); n != 0 {
			return n
		}
		return strings.Compare(a.ID, b.ID)
	})
	return all, nil
}

// DeleteToken revokes a token, from the next call on.
func (e *Engine) DeleteToken(ctx context.Context, c Caller, id string) error {
	e.mu.Lock()
	t := e.tokenIDs[id]
	e.mu.Unlock()
	if t == nil || !c.may(t.row.User) {
		return notFound("token", id)
	}
	if err := e.store.Update(ctx, func(tx *store.Tx) error {
		if err := tx.DeleteToken(id); err != nil {
			return err
		}
		return tx.AppendEvent(&store.Event{Time: e.clock.Now(), Owner: c.User, Actor: c.User, Action: "token.delete", Fields: map[string]string{"token": id}})
	}); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.tokenIDs, id)
	delete(e.tokens, [32]byte(t.row.Hash))
	return nil
}

// Authenticate returns whom a secret acts as, or [warren.ErrDenied]. What is looked up is the hash of the secret, so
// neither the lookup nor the comparison tells anything about a secret that is there.
func (e *Engine) Authenticate(_ context.Context, secret string) (Caller, error) {
	denied := fmt.Errorf("the token is not valid or has expired; ask the operator for one (`warren token create`): %w", warren.ErrDenied)
	sum := sha256.Sum256([]byte(secret))
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.tokens[sum]
	if t == nil || subtle.ConstantTimeCompare(t.row.Hash, sum[:]) != 1 {
		return Caller{}, denied
	}
	now := e.clock.Now()
	if !t.row.Expires.IsZero() && !now.Before(t.row.Expires) {
		return Caller{}, denied
	}
	t.row.LastUsed, t.used = now, true
	return Caller{User: t.row.User}, nil
}

// usedTokens returns the tokens that were used since the last call.
func (e *Engine) usedTokens() map[string]time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := map[string]time.Time{}
	for id, t := range e.tokenIDs {
		if t.used {
			t.used = false
			out[id] = t.row.LastUsed
		}
	}
	return out
}
