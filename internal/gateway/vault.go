//go:build linux

package gateway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/warren-sandbox/warren/internal/policy"
	"github.com/warren-sandbox/warren/internal/secret"
)

// Rules are what a sandbox may do, and what it needs for that.
type Rules struct {
	*policy.Policy
	// Secrets are those that the policy grants, and those of which the sandbox has a placeholder from before.
	Secrets []Secret
	// Digest tells rules apart, for whoever set them; empty means the policy's.
	Digest string
}

// Secret is a sealed value.
type Secret struct {
	Name string
	// Sealed is empty for a secret that there is not: what needs it fails.
	Sealed string
	// Placeholders stand for it in the sandbox; the first is what the sandbox is shown in place of the value.
	Placeholders []string
}

// Opener opens what is sealed. The caller clears the value.
type Opener interface {
	Open(ctx context.Context, name, sealed string) ([]byte, error)
}

// openTime is how long a value may take to be opened, which a program may have to be asked for.
const openTime = 15 * time.Second

// vault holds the secrets of one card, under one policy. With another policy, or other values, there is another vault.
type vault struct {
	opener  Opener
	secrets map[string]Secret
	// former are values that secrets had before, while the card lives: a server may still tell of them.
	former []Secret
	// near is how often each value came back but for its end, by what it is sealed as.
	near map[string]*atomic.Int64

	mu        sync.Mutex
	injectors map[string]*secret.Injector // by grant, "" for none
	scrubber  *scrubber
}

// scrubber takes values out of what comes back.
type scrubber struct {
	*secret.Scrubber
	of []Secret // in the order of its pairs
}

const (
	// maxFormer bounds the values of before that a card remembers.
	maxFormer = 32
	// maxNear is how often a value may come back but for its end. What may be the beginning of a value is held back, which the sandbox can see, and
	// the end is held back whole: whoever guesses comes by here with each wrong guess at all of it.
	maxNear = 64
)

// newVault returns a vault that knows what the one before it, if any, knew of the same values.
func newVault(opener Opener, secrets []Secret, before *vault) *vault {
	v := &vault{opener: opener, secrets: map[string]Secret{}, injectors: map[string]*secret.Injector{}, near: map[string]*atomic.Int64{}}
	for _, s := range secrets {
		v.secrets[s.Name] = s
	}
	if before != nil {
		for _, s := range slices.Concat(slices.Collect(maps.Values(before.secrets)), before.former) {
			if s.Sealed != "" && v.secrets[s.Name].Sealed != s.Sealed && len(v.former) < maxFormer {
				v.former = append(v.former, s)
			}
		}
	}
	for _, s := range slices.Concat(secrets, v.former) {
		v.near[s.Sealed] = &atomic.Int64{}
		if before != nil && before.near[s.Sealed] != nil {
			v.near[s.Sealed] = before.near[s.Sealed]
		}
	}
	return v
}

// withheld is shown in place of a value of which the sandbox has no placeholder.
const withheld = secret.PlaceholderPrefix + "withheld-by-the-gateway"

func (s Secret) shown() string {
	if len(s.Placeholders) > 0 {
		return s.Placeholders[0]
	}
	return withheld
}

// secretError says that a secret could not be used, so that nothing was sent.
type secretError struct{ err error }

func (e *secretError) Error() string { return "a secret cannot be used: " + e.err.Error() }

// told is what the sandbox is told of it: why a key cannot be had is the operator's to know, who finds it on record.
func (e *secretError) told() string {
	if errors.Is(e.err, errUnset) || errors.Is(e.err, errGuessed) || errors.Is(e.err, errFormerGuessed) {
		return e.Error()
	}
	return "a secret that the request needs cannot be used at the moment; the operator of the server finds the reason in its events"
}
func (e *secretError) Unwrap() error { return e.err }

var errUnset = errors.New("it is not set on the server; `warren secret set` sets it")

var (
	errGuessed = fmt.Errorf("its value came back %d times with another end, as if someone guessed: what secrets are granted for is withheld from the sandbox "+
		"until it is set to another value (`warren secret set`)", maxNear)
	errFormerGuessed = fmt.Errorf("a value that it had before came back %d times with another end, as if someone guessed: what secrets are granted for is withheld from the sandbox "+
		"until that is paused and resumed", maxNear)
)

// guessed says that a value which the sandbox's answers are searched for is being guessed. All answers would tell of a right guess, so that all that are
// searched are withheld.
func (v *vault) guessed() error {
	for _, s := range v.secrets {
		if v.near[s.Sealed].Load() >= maxNear {
			return &secretError{fmt.Errorf("secret %q: %w", s.Name, errGuessed)}
		}
	}
	for _, s := range v.former {
		if v.near[s.Sealed].Load() >= maxNear {
			return &secretError{fmt.Errorf("secret %q: %w", s.Name, errFormerGuessed)}
		}
	}
	return nil
}

// open returns a secret's value.
func (v *vault) open(s Secret) ([]byte, error) {
	if s.Sealed == "" {
		return nil, errUnset
	}
	if v.opener == nil {
		return nil, errors.New("the gateway has no key for secrets")
	}
	ctx, cancel := context.WithTimeout(context.Background(), openTime)
	defer cancel()
	return v.opener.Open(ctx, s.Name, s.Sealed)
}

// injector returns what puts the secret of a grant into requests, or, without a grant, only looks for placeholders.
func (v *vault) injector(g *policy.Grant) (*secret.Injector, error) {
	key := ""
	if g != nil {
		key = g.Name
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if in := v.injectors[key]; in != nil {
		return in, nil
	}
	var bindings []secret.Binding
	if g != nil {
		bindings = []secret.Binding{{
			Grant: g.Name, Placeholder: v.secrets[g.Secret].shown(), Place: placeOf(g.Place),
			Value: func() ([]byte, error) { return v.open(v.secrets[g.Secret]) },
		}}
	}
	others := map[string]string{}
	for name, s := range v.secrets {
		for i, p := range s.Placeholders {
			switch {
			case g != nil && g.Secret == name && i == 0:
			case i == 0:
				others[name] = p
			default:
				// Memory that the sandbox was forked from has it.
				others[fmt.Sprintf("%s (an earlier one, %d)", name, i)] = p
			}
		}
	}
	in, err := secret.NewInjector(bindings, others)
	if err == nil {
		v.injectors[key] = in
	}
	return in, err
}

func placeOf(p policy.Place) secret.Place {
	switch {
	case p.Header != "":
		return secret.Place{Kind: secret.Header, Name: p.Header, Format: p.Format}
	case p.Query != "":
		return secret.Place{Kind: secret.Query, Name: p.Query}
	}
	return secret.Place{Kind: secret.Basic, Username: p.Basic}
}

// clean returns what takes all values of the sandbox's secrets out of what comes back.
func (v *vault) clean() (*scrubber, error) {
	if err := v.guessed(); err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.scrubber != nil {
		return v.scrubber, nil
	}
	var of []Secret
	var pairs []secret.Pair
	defer func() {
		for _, p := range pairs {
			clear(p.Value)
		}
	}()
	add := func(s Secret) error {
		value, err := v.open(s)
		if err == nil {
			of, pairs = append(of, s), append(pairs, secret.Pair{Value: value, Placeholder: s.shown()})
		}
		return err
	}
	for name, s := range v.secrets {
		if s.Sealed == "" {
			continue
		}
		if err := add(s); err != nil {
			return nil, &secretError{fmt.Errorf("secret %q: %w", name, err)}
		}
	}
	for _, s := range v.former {
		if len(pairs) < secret.MaxPairs {
			add(s) // the key for it may be gone with it
		}
	}
	// Where one value holds another, the longest that begins first counts; their order does not.
	sc, err := secret.NewScrubber(pairs...)
	if err != nil {
		return nil, err
	}
	v.scrubber = &scrubber{sc, of}
	return v.scrubber, nil
}

// covered says whether a grant is for the host of a flow, whatever is asked there, and however: a server shows over http, or on another port, what it was told.
func covered(p *policy.Policy, f policy.Flow) bool {
	return slices.ContainsFunc(p.Grants(), func(g policy.Grant) bool { return g.Names(f.Host) })
}

// use is what a request has to do with secrets.
type use struct {
	v     *vault
	grant *policy.Grant // nil when none applies
	clean *scrubber
}

// secrets prepares a request's use of them: nil if the sandbox has none. The value is put in when it is sent.
func (c *card) secrets(r *Rules, v *vault, ask policy.Request) (*use, error) {
	if len(v.secrets) == 0 && len(r.Grants()) == 0 {
		return nil, nil
	}
	u := &use{v: v}
	if g, ok := r.Grant(ask); ok {
		u.grant = &g
	}
	if !covered(r.Policy, ask.Flow) {
		return u, nil
	}
	var err error
	u.clean, err = v.clean()
	return u, err
}

// still says whether a request that was to get a secret would get the same value now.
func (u *use) still(c *card) bool {
	if u.grant == nil {
		return true
	}
	now := c.vault.Load().secrets[u.grant.Secret]
	return now.Sealed == u.v.secrets[u.grant.Secret].Sealed && slices.ContainsFunc(c.policy().Grants(), func(g policy.Grant) bool {
		return g.Name == u.grant.Name && g.Secret == u.grant.Secret
	})
}

// send puts the secret into a request, records that, and sends it.
func (u *use) send(f *flow, r *http.Request, next http.RoundTripper) (*http.Response, error) {
	in, err := u.v.injector(u.grant)
	if err != nil {
		return nil, err
	}
	if u.clean != nil {
		// Since the request was entered, whoever finds that a value is guessed ends it.
		if err := u.v.guessed(); err != nil {
			return nil, err
		}
	}
	used, err := in.Inject(r)
	var misplaced *secret.MisplacedError
	switch {
	case errors.As(err, &misplaced) || errors.Is(err, secret.ErrOpaque):
		return nil, err
	case err != nil:
		return nil, &secretError{err}
	}
	f.used = strings.Join(used, ", ")
	if err := f.opens(r); err != nil {
		return nil, err
	}
	res, err := next.RoundTrip(r)
	if err != nil || u.clean == nil {
		return res, err
	}
	if err := u.clean.Response(res, secret.Tell{Found: f.shown, Near: u.near(f)}); err != nil {
		res.Body.Close()
		return nil, err
	}
	return res, nil
}

// opens records that a request is about to be sent, and with which secrets. One that cannot be recorded is over.
func (f *flow) opens(r *http.Request) error {
	e := f.entry("http.open")
	if f.used != "" {
		e.Action, e.Secret = "secret.use", f.used
	}
	e.Method, e.Path, e.Inspected = f.request.Method, f.request.Path, true
	err := f.card.record(e)
	if err != nil && r.Body != nil {
		r.Body.Close() // it may be being unpacked
	}
	return err
}

// shown records that a server sent a value back.
func (f *flow) shown(n int64) {
	e := f.entry("secret.shown")
	e.More, e.Inspected = n, true
	e.Method, e.Path = f.request.Method, f.request.Path
	e.Reason = "the server sent a secret's value back, which the sandbox sees as its placeholder"
	f.card.record(e)
}

// near returns what counts the times when a value comes back but for its end.
func (u *use) near(f *flow) func(pair int) error {
	return func(pair int) error {
		s := u.clean.of[pair]
		n := u.v.near[s.Sealed].Add(1)
		if n < maxNear {
			return nil
		}
		why := u.v.guessed()
		if n == maxNear {
			e := f.entry("secret.guess")
			e.Secret, e.More, e.Inspected = s.Name, n, true
			e.Method, e.Path = f.request.Method, f.request.Path
			e.Reason = why.Error()
			f.card.record(e)
			f.card.endSearched(s.Sealed, why)
		}
		return why
	}
}

// endSearched ends all requests whose answers are searched for a value: what they hold back would tell right guesses from wrong ones.
func (c *card) endSearched(sealed string, why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for f := range c.flows {
		if f.use != nil && f.use.clean != nil && slices.ContainsFunc(f.use.clean.of, func(s Secret) bool { return s.Sealed == sealed }) {
			f.stop(why)
		}
	}
}
