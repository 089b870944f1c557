package engine

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/audit"
	"github.com/warren-sandbox/warren/internal/policy"
	"github.com/warren-sandbox/warren/internal/store"
)

// Network gives sandboxes their network cards. What serves the cards goes on while the engine is replaced.
type Network interface {
	// Attach makes a card for a sandbox and serves it under the policy, before it returns. One that it had before is gone then. With from,
	// names have the addresses that they have for that sandbox.
	Attach(ctx context.Context, id warren.SandboxID, p NetworkPolicy, from warren.SandboxID) (*driver.Card, error)
	// Plan returns what a card that a driver makes has to be like. It has no ends.
	Plan(ctx context.Context) (*driver.Card, error)
	// Adopt serves a card by its outer end, which stays the caller's, as Attach does.
	Adopt(ctx context.Context, id warren.SandboxID, outside *os.File, p NetworkPolicy, from warren.SandboxID) error
	// Detach ends a sandbox's flows and lets go of its card, if it has one.
	Detach(ctx context.Context, id warren.SandboxID) error
	// SetPolicy changes the policy of a sandbox that has a card; what it does not allow has ended when it returns. ErrSuperseded says that another
	// call, which came later, was faster.
	SetPolicy(ctx context.Context, id warren.SandboxID, p NetworkPolicy) error
	// Attached returns the digest of the policy of each sandbox that has a card.
	Attached(ctx context.Context) (map[warren.SandboxID]string, error)
	// SetPeers says who is in a private network, in place of who was; flows of those that are not together any more have ended when it returns.
	SetPeers(ctx context.Context, p PeerNetwork) error
	// PeerNetworks returns the digests of the private networks that there are, by key.
	PeerNetworks(ctx context.Context) (map[string]string, error)
	// Quiet is for how long a sandbox has neither sent nor received a byte.
	Quiet(ctx context.Context, id warren.SandboxID) (time.Duration, error)
	// Card returns the outer end of a sandbox's card, which the caller closes.
	Card(ctx context.Context, id warren.SandboxID) (*os.File, error)
	// Authority is the certificate that sandboxes have to trust for inspected connections, in PEM form.
	Authority() []byte
}

// ErrSuperseded is the answer to a call whose policy is not in force, since that of a later one is.
var ErrSuperseded = errors.New("a policy that came after it is in force")

// NetworkPolicy is a policy as its author wrote it.
type NetworkPolicy struct {
	Name   string
	Source []byte
	// Secrets are those that its grants name, and Digest tells all of it apart from another; [Network.Attached] returns it.
	Secrets []NetworkSecret
	Digest  string
}

// NetworkSecret is a secret as the gateway gets it. Sealed is empty when there is none of that name.
type NetworkSecret struct {
	Name, Sealed string
	// Placeholders stand for it in the sandbox, see [Spec].
	Placeholders []string
}

// NoNetwork is the name of no policy, but of having no network card at all.
const NoNetwork = "none"

// maxPolicy bounds the file of a policy.
const maxPolicy = 4 << 20

var policyForm = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

// reloadEvery is how often the files of policies in use are looked at. A file that is being written is taken when it has not changed between two
// looks.
const reloadEvery = 500 * time.Millisecond

// PolicyInfo tells of a policy that there is.
type PolicyInfo struct {
	Name string
	// Preset says that it comes with the program; Source is its text.
	Preset bool
	Source []byte
	// Problem is why it cannot be used, or empty.
	Problem string
}

// checkPolicy checks the policy of a spec, and fills in the default.
func (e *Engine) checkPolicy(ctx context.Context, s *Spec, d driver.Driver) error {
	_, can := driver.As[driver.Carder](d)
	can = can && e.opts.Network != nil
	if m, makes := driver.As[driver.CardMaker](d); can && makes && s.Policy != NoNetwork {
		err := m.CheckCard(ctx, s.DriverOptions)
		switch {
		case err == nil:
		case s.Policy == "" && errors.Is(err, errors.ErrUnsupported):
			can = false
		default:
			return fmt.Errorf("policy %s: driver %s gives the sandbox no network card: %w; without a policy, or with policy none, it has its loopback alone", quote(s.Policy), s.Driver, err)
		}
	}
	switch {
	case s.Policy == "" && can:
		s.Policy = e.opts.DefaultPolicy
	case s.Policy == "":
		s.Policy = NoNetwork
	case s.Policy != NoNetwork && !can:
		return fmt.Errorf("policy %s: sandboxes of driver %s have no network beside their loopback; leave the policy out, or use a driver whose sandboxes can have a network card (%s): %w",
			quote(s.Policy), s.Driver, e.carders(), errors.ErrUnsupported)
	}
	if s.Policy == NoNetwork {
		return nil
	}
	p, err := e.loadPolicy(s.Policy)
	if err != nil {
		return err
	}
	parsed, err := e.parse(p)
	if err != nil {
		faults := strings.ReplaceAll(err.Error(), "\n", "; ") // each is a line
		return fmt.Errorf("policy %s cannot be used: %s; `warren policy check` explains: %w", quote(s.Policy), faults, warren.ErrInvalid)
	}
	return e.issuePlaceholders(s, parsed)
}

// parse reads the text of a policy, or remembers how it was read the last time.
func (e *Engine) parse(p NetworkPolicy) (*policy.Policy, error) {
	e.parsedMu.Lock()
	have := e.parsed[p.Name]
	e.parsedMu.Unlock()
	if have != nil && bytes.Equal(have.source, p.Source) {
		return have.policy, have.err
	}
	have = &parsedPolicy{source: p.Source}
	have.policy, have.err = policy.Parse(p.Name, p.Source)
	e.parsedMu.Lock()
	defer e.parsedMu.Unlock()
	if len(e.parsed) >= maxParsed {
		clear(e.parsed)
	}
	e.parsed[p.Name] = have
	return have.policy, have.err
}

// maxParsed is of how many policies it is remembered how they were read.
const maxParsed = 100

// parsedPolicy is a policy that was read.
type parsedPolicy struct {
	source []byte
	policy *policy.Policy
	err    error
}

// carders names the drivers whose sandboxes can have a network.
func (e *Engine) carders() string {
	var names []string
	for _, name := range sortedKeys(e.opts.Drivers) {
		if _, ok := driver.As[driver.Carder](e.opts.Drivers[name]); ok {
			names = append(names, name)
		}
	}
	if e.opts.Network == nil || len(names) == 0 {
		return "this server has none"
	}
	return strings.Join(names, ", ")
}

// loadPolicy reads a policy: a preset, or a file.
func (e *Engine) loadPolicy(name string) (NetworkPolicy, error) {
	if !policyForm.MatchString(name) {
		return NetworkPolicy{}, invalid("policy", name, "want the name of a policy, 1 to 63 of a-z, 0-9 and -, not - first: "+e.whichPolicies())
	}
	preset := slices.Contains(policy.Presets(), name)
	if e.opts.PolicyDir != "" {
		path := filepath.Join(e.opts.PolicyDir, name+".yaml")
		var source []byte
		var err error
		if preset || name == NoNetwork {
			// Its author may have meant to narrow what the preset allows, so the preset does not count either.
			if _, err = os.Lstat(path); err == nil {
				return NetworkPolicy{}, reservedPolicy(name)
			}
			if errors.Is(err, syscall.ENOTDIR) {
				err = fs.ErrNotExist
			}
		} else if source, err = readPolicy(path); err == nil {
			return NetworkPolicy{Name: name, Source: source}, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			var pe *fs.PathError
			if errors.As(err, &pe) {
				err = pe.Err // events show it to users
			}
			return NetworkPolicy{}, fmt.Errorf("policy %s cannot be read: %v: %w", quote(name), err, warren.ErrUnavailable)
		}
	}
	if preset {
		return NetworkPolicy{Name: name, Source: []byte("extends: " + name + "\n")}, nil
	}
	if name == NoNetwork {
		return NetworkPolicy{}, fmt.Errorf("%s is no policy, but to have no network at all: %w", NoNetwork, warren.ErrNotFound)
	}
	return NetworkPolicy{}, fmt.Errorf("there is no policy %s; want %s: %w", quote(name), e.whichPolicies(), warren.ErrNotFound)
}

// reservedPolicy is why a file of a name that means something else cannot be used.
func reservedPolicy(name string) error {
	if name == NoNetwork {
		return fmt.Errorf("the file %s.yaml cannot be used: --policy %s is to have no network at all; rename the file: %w", name, name, warren.ErrInvalid)
	}
	return fmt.Errorf("the file %s.yaml has the name of a preset, so neither is used; rename the file, which may begin with `extends: %s`: %w", name, name, warren.ErrInvalid)
}

// whichPolicies says which names there are, and where to put a file.
func (e *Engine) whichPolicies() string {
	which := strings.Join(policy.Presets(), ", ") + ", " + NoNetwork
	if e.opts.PolicyDir == "" {
		return which
	}
	return fmt.Sprintf("%s, or NAME for a file NAME.yaml in the server's directory of policies, %s", which, e.opts.PolicyDir)
}

// readPolicy reads a regular file. What else has its name is not opened: a pipe would be waited for, and a device do what opening makes it do.
func readPolicy(path string) ([]byte, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if err := regular(fi); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // it may have become a pipe
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if fi, err = f.Stat(); err != nil {
		return nil, err
	}
	if err := regular(fi); err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxPolicy+1))
	if err == nil && len(b) > maxPolicy {
		err = fmt.Errorf("it is larger than %s", size(maxPolicy))
	}
	return b, err
}

func regular(fi fs.FileInfo) error {
	what := "something else"
	switch m := fi.Mode(); {
	case m.IsRegular():
		return nil
	case m.IsDir():
		what = "a directory"
	case m&fs.ModeNamedPipe != 0:
		what = "a named pipe"
	case m&fs.ModeSocket != 0:
		what = "a socket"
	case m&fs.ModeDevice != 0:
		what = "a device"
	}
	return fmt.Errorf("it is %s, and has to be a regular file", what)
}

// Policies returns the policies that there are, presets first. Which there are is no secret among the users of a server.
func (e *Engine) Policies() ([]PolicyInfo, error) {
	names := slices.Clone(policy.Presets())
	if e.opts.PolicyDir != "" {
		files, err := os.ReadDir(e.opts.PolicyDir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, f := range files {
			name, ok := strings.CutSuffix(f.Name(), ".yaml")
			if ok && policyForm.MatchString(name) && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	list := make([]PolicyInfo, 0, len(names))
	for _, name := range names {
		list = append(list, e.policyInfo(name))
	}
	return list, nil
}

func (e *Engine) policyInfo(name string) PolicyInfo {
	info := PolicyInfo{Name: name}
	p, err := e.loadPolicy(name)
	if err == nil {
		info.Source = p.Source
		info.Preset = slices.Contains(policy.Presets(), name)
		_, err = e.parse(p)
	}
	if err != nil {
		info.Problem = err.Error()
	}
	return info
}

// Policy returns one policy.
func (e *Engine) Policy(name string) (PolicyInfo, error) {
	if _, err := e.loadPolicy(name); err != nil {
		return PolicyInfo{}, err
	}
	return e.policyInfo(name), nil
}

// card makes the network card of an execution, which is served from then on, or returns nil for a sandbox that has none.
func (e *Engine) card(ctx context.Context, r bootRequest) (*driver.Card, error) {
	name := r.spec.Policy
	if name == "" {
		name = NoNetwork
	}
	e.mu.Lock()
	if sb := e.boxes[r.row.ID]; sb != nil {
		sb.policy, sb.placeholders = name, r.spec.Placeholders
	}
	e.mu.Unlock()
	if name == NoNetwork {
		return nil, nil
	}
	if e.opts.Network == nil {
		return nil, fmt.Errorf("the sandbox has policy %s, and this server has no gateway: %w", quote(name), warren.ErrUnavailable)
	}
	e.mu.Lock()
	n := ownedName{r.row.Owner, r.row.Network}
	e.mu.Unlock()
	if err := e.tellPeers(ctx, n); err != nil {
		return nil, err
	}
	var c *driver.Card
	var err error
	if _, makes := driver.As[driver.CardMaker](e.opts.Drivers[r.row.Driver]); makes {
		c, err = e.opts.Network.Plan(ctx)
	} else {
		err = e.arming(ctx, r.row.ID, func() error {
			p, state := e.judgePolicy(r.row.ID, name)
			p, err := e.armed(p, r.spec.Placeholders)
			if err == nil {
				c, err = e.opts.Network.Attach(ctx, r.row.ID, p, r.row.SourceID)
			}
			if err == nil {
				e.inForceAnew(ctx, r, name, state)
			}
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("the gateway gives the sandbox no network card: %w", err)
	}
	return c, nil
}

// plug has the card served that a driver has made of its own. Until then nothing passes.
func (e *Engine) plug(ctx context.Context, r bootRequest) error {
	m, ok := driver.As[driver.CardMaker](e.opts.Drivers[r.row.Driver])
	if !ok {
		return nil
	}
	return e.arming(ctx, r.row.ID, func() error {
		p, state := e.judgePolicy(r.row.ID, r.spec.Policy)
		p, err := e.armed(p, r.spec.Placeholders)
		if err != nil {
			return err
		}
		f, err := m.Card(ctx, r.row.ID)
		if err == nil {
			err = e.opts.Network.Adopt(ctx, r.row.ID, f, p, r.row.SourceID)
			f.Close()
		}
		if err != nil {
			return fmt.Errorf("the gateway does not serve the sandbox's network card: %w", err)
		}
		e.inForceAnew(ctx, r, r.spec.Policy, state)
		return nil
	})
}

// arming does for a sandbox what reads a policy and its secrets and has the gateway take them, one after the other: what was read later is sent later. Who
// changes either and then looks at all sandboxes finds none that takes the old text afterwards.
func (e *Engine) arming(ctx context.Context, id warren.SandboxID, do func() error) error {
	e.mu.Lock()
	sb := e.boxes[id]
	if sb == nil { // a standby, which has the policy of nobody
		e.mu.Unlock()
		return do()
	}
	if sb.arming == nil {
		sb.arming = make(chan struct{}, 1)
	}
	turn := sb.arming
	e.mu.Unlock()
	select {
	case turn <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("another change of what sandbox %s may reach has not ended: %w", id, ctx.Err())
	}
	defer func() { <-turn }()
	return do()
}

// putPolicy has the gateway take the policy of a sandbox and its secrets as they are now. With settled, a policy of another text is not put into force,
// but errUnsettled returned: it may be in the middle of being written.
func (e *Engine) putPolicy(ctx context.Context, sb cardedSandbox, settled []byte) error {
	put := func() error {
		p := e.effective(sb.id, sb.policy)
		if settled != nil && !bytes.Equal(p.Source, settled) {
			return errUnsettled
		}
		p, err := e.armed(p, sb.placeholders)
		if err != nil {
			return err
		}
		return e.opts.Network.SetPolicy(ctx, sb.id, p)
	}
	return e.arming(ctx, sb.id, func() error {
		err := put()
		// A call that was given up may come to the gateway yet, and before this one. What is in force is to be what is written.
		for again := 0; errors.Is(err, ErrSuperseded) && again < maxAgain; again++ {
			err = put()
		}
		return err
	})
}

// maxAgain is how often a policy is sent again that another has overtaken.
const maxAgain = 5

var errUnsettled = errors.New("the policy is being written")

// removeFrom has a driver remove a sandbox, and the gateway let go of a card that the driver has made, which does not go by itself: whoever
// serves it keeps it alive. It may be repeated; a gateway that cannot be reached serves nothing.
func (e *Engine) removeFrom(ctx context.Context, name string, id warren.SandboxID) error {
	d := e.opts.Drivers[name]
	if err := d.Delete(ctx, id); err != nil {
		return err
	}
	if _, makes := driver.As[driver.CardMaker](d); !makes || e.opts.Network == nil {
		return nil
	}
	e.mu.Lock()
	sb := e.boxes[id]
	has := sb == nil || sb.policy != NoNetwork // or it is not known yet
	e.mu.Unlock()
	if !has {
		return nil
	}
	if err := e.opts.Network.Detach(ctx, id); err != nil && ctx.Err() == nil {
		e.log.Warn("let go of the network card of a sandbox that is gone", "sandbox", id, "error", err)
	}
	return nil
}

// effective returns a policy by its name. In place of one that cannot be used it returns one that allows nothing, and
// no private network either: what it would have denied there is not known.
func (e *Engine) effective(id warren.SandboxID, name string) NetworkPolicy {
	p, _ := e.judgePolicy(id, name)
	return p
}

// policyState is what is on record of a policy.
type policyState struct {
	// digest is that of the text, also of one that cannot be used, shortened; "none" where there is no text.
	digest string
	// problem is why it cannot be used, or empty.
	problem string
}

// judgePolicy is effective, with what is to be put on record of the policy.
func (e *Engine) judgePolicy(id warren.SandboxID, name string) (NetworkPolicy, policyState) {
	state := policyState{digest: "none"}
	p, err := e.loadPolicy(name)
	if err == nil {
		state.digest = shortDigest(fmt.Sprintf("sha256:%x", sha256.Sum256(p.Source)))
		_, err = e.parse(p)
	}
	if err != nil {
		e.log.Error("a policy cannot be used; nothing passes until it can", "sandbox", id, "policy", name, "error", err)
		state.problem = err.Error()
		return NetworkPolicy{Name: name, Source: []byte("extends: locked\ndeny: [\"*.internal\"]\n")}, state
	}
	return p, state
}

// shortDigest is enough of a digest to tell one policy from another.
func shortDigest(s string) string {
	const n = len("sha256:") + 12
	return s[:min(n, len(s))]
}

// Recorder keeps what happens without a call on the record of calls; an [audit.Log] is one.
type Recorder interface {
	Append(ctx context.Context, r audit.Record) (audit.Record, error)
}

// policyChange is what is on record of a policy of which another text is in force from now on.
type policyChange struct {
	name, old string
	now       policyState
}

func (c policyChange) record() (message string, fields map[string]string) {
	fields = map[string]string{"policy": c.name, "old": c.old, "new": c.now.digest}
	if c.old == c.now.digest {
		return "what the secrets of policy " + c.name + " stand for has changed", fields
	}
	message = fmt.Sprintf("policy %s has changed from %s to %s", c.name, c.old, c.now.digest)
	if c.old == unknownText {
		message = fmt.Sprintf("policy %s is %s now; what it was before is not known", c.name, c.now.digest)
	}
	if c.now.problem != "" {
		message += ", which cannot be used, so that nothing passes: " + c.now.problem
		fields["problem"] = c.now.problem
	}
	return message, fields
}

// unknownText is the digest of a text that this engine does not know: it was in force under an earlier one.
const unknownText = "unknown"

// inForce notes which text of its policy a sandbox has from now on, by whatever way it came to it, and puts on the sandbox's record that it is
// another than before, or that its secrets are. Of what it had before this engine was asked, was says what is known, "" for nothing and no change.
func (e *Engine) inForce(ctx context.Context, id warren.SandboxID, name string, now policyState, was string, secrets bool) (c policyChange, changed bool) {
	e.mu.Lock()
	sb := e.boxes[id]
	if sb == nil { // a standby, which has the policy of nobody
		e.mu.Unlock()
		return c, false
	}
	old := cmp.Or(sb.policyText, was)
	sb.policyText = now.digest
	e.mu.Unlock()
	if old == "" || old == now.digest && !secrets {
		return c, false
	}
	c = policyChange{name, old, now}
	message, fields := c.record()
	e.noteEvent(ctx, id, "policy.change", message, fields)
	return c, true
}

// inForceAnew is inForce for a sandbox whose execution begins, or goes on.
func (e *Engine) inForceAnew(ctx context.Context, r bootRequest, name string, now policyState) {
	e.mu.Lock()
	was := ""
	if sb := e.boxes[r.row.ID]; sb != nil && (r.row.Generation > 1 || sb.state() == Resuming) {
		was = unknownText
	}
	e.mu.Unlock()
	if c, changed := e.inForce(ctx, r.row.ID, name, now, was, false); changed {
		e.recordPolicies(ctx, map[policyChange]int{c: 1})
	}
}

// recordPolicies puts changes of policies on the record of calls, each once for all sandboxes that it concerns.
func (e *Engine) recordPolicies(ctx context.Context, changed map[policyChange]int) {
	for c, sandboxes := range changed {
		if e.opts.Calls == nil {
			return
		}
		message, fields := c.record()
		fields["sandboxes"] = strconv.Itoa(sandboxes)
		if _, err := e.opts.Calls.Append(ctx, audit.Record{Actor: "warren", Action: "policy.change", Message: message, Fields: fields}); err != nil && ctx.Err() == nil {
			e.log.Error("a change of a policy could not be recorded", "policy", c.name, "error", err)
		}
	}
}

// inspects says whether a policy has connections looked into, for which the sandbox has to trust the gateway.
func (e *Engine) inspects(name string) bool {
	if name == "" || name == NoNetwork || e.opts.Network == nil {
		return false
	}
	p, err := e.loadPolicy(name)
	if err != nil {
		return false
	}
	parsed, err := e.parse(p)
	return err == nil && parsed.Inspects()
}

// trust has a guest that runs trust the gateway.
func (e *Engine) trust(ctx context.Context, sb cardedSandbox) error {
	conn, err := e.opts.Drivers[sb.driver].Dial(ctx, sb.id, warren.GuestPort)
	if err != nil {
		return err
	}
	defer conn.Close()
	body, err := json.Marshal(map[string]string{"certificate": string(e.opts.Network.Authority())})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest/warren/trust", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	var refused error
	if err := askGuest(ctx, conn, req, func(resp *http.Response) error {
		refused = refusal(resp, "the guest refused to trust the gateway")
		return nil
	}); err != nil {
		return err
	}
	return refused
}

// trustWait is how long a guest may take to trust the gateway.
const trustWait = 5 * time.Second

func closeCard(c *driver.Card) {
	if c != nil && c.Inside != nil {
		c.Inside.Close()
		c.Outside.Close()
	}
}

// cardedSandbox is a sandbox that has a network card, or may have one at any moment.
type cardedSandbox struct {
	id             warren.SandboxID
	driver, policy string
	placeholders   map[string][]string
	// held says that it does not run yet, or an operation is under way, such as a snapshot. Its card is left alone; what it may do is not.
	held bool
}

// hasCard says whether a sandbox that runs has a network card.
func (e *Engine) hasCard(id warren.SandboxID) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb := e.boxes[id]
	return e.opts.Network != nil && sb != nil && sb.policy != "" && sb.policy != NoNetwork
}

// carded returns the sandboxes that run with a network card, and those that an operation may give one: it is served before they run.
func (e *Engine) carded() (list []cardedSandbox) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for id, sb := range e.boxes {
		rests := sb.op == nil && (sb.state() == Paused || sb.state() == Failed)
		if !rests && sb.policy != "" && sb.policy != NoNetwork {
			list = append(list, cardedSandbox{id, sb.row.Driver, sb.policy, sb.placeholders, sb.op != nil || sb.state() != Running})
		}
	}
	return list
}

// findPolicies reads which policies the sandboxes of an earlier engine have.
func (e *Engine) findPolicies(ctx context.Context) error {
	e.mu.Lock()
	var ids []warren.SandboxID
	for id, sb := range e.boxes {
		if sb.state() == Running && sb.policy == "" {
			ids = append(ids, id)
		}
	}
	e.mu.Unlock()
	if len(ids) == 0 {
		return nil
	}
	rows, err := e.store.Specs(ctx, ids...)
	if err != nil {
		return err
	}
	for id, row := range rows {
		var s Spec
		if err := json.Unmarshal(row.Spec, &s); err != nil {
			return fmt.Errorf("the spec of sandbox %s: %w", id, err)
		}
		e.mu.Lock()
		if sb := e.boxes[id]; sb != nil && sb.policy == "" {
			sb.policy, sb.placeholders = s.Policy, s.Placeholders
		}
		e.mu.Unlock()
	}
	return nil
}

// networkLoop keeps the cards of running sandboxes served under the policies of this moment.
func (e *Engine) networkLoop() {
	for err := e.findPolicies(e.ctx); err != nil; err = e.findPolicies(e.ctx) {
		e.log.Error("look after the network cards", "error", err)
		select {
		case <-e.ctx.Done():
			return
		case <-e.clock.After(time.Second):
		}
	}
	e.peersChanged() // the gateway may have ended together with the last daemon
	policies := map[string]*watchedPolicy{}
	said, at := "", time.Time{}
	for looks := 0; ; looks++ {
		// A card that was lost is rare, and told; a policy that has changed is to count at once.
		all := looks%tendEvery == 0
		if all {
			for _, name := range sortedKeys(e.opts.Drivers) {
				e.keepCards(e.ctx, name)
			}
		}
		if err := e.tendCards(e.ctx, policies, all); err != nil && e.ctx.Err() == nil {
			// A gateway may be silent for hours.
			if now := e.clock.Now(); err.Error() != said || now.Sub(at) > time.Minute {
				said, at = err.Error(), now
				e.log.Error("look after the network cards; changes of policies do not count until this ends", "error", err)
			}
			looks = -1
		} else {
			said = ""
		}
		select {
		case <-e.ctx.Done():
			return
		case <-e.clock.After(reloadEvery):
		case <-e.tend:
			looks = -1
		}
	}
}

// tendEvery is after how many looks at the policies all cards are looked at.
const tendEvery = 20

// TendNetwork has the network cards looked after at once: whoever served them has been started anew.
func (e *Engine) TendNetwork() {
	select {
	case e.tend <- struct{}{}:
	default:
	}
	e.peersChanged()
	e.renewStandbys()
}

// watchedPolicy is a policy that running sandboxes have.
type watchedPolicy struct {
	NetworkPolicy
	// settled says that it has not changed since the look before.
	settled bool
	// due says that some sandboxes may have an older one.
	due bool
	// state is of the file as it was last seen.
	state policyState
}

// tendCards does one look: cards that nobody serves are served again, and policies that have changed are applied.
func (e *Engine) tendCards(ctx context.Context, policies map[string]*watchedPolicy, all bool) error {
	list := e.carded()
	looked := map[string]bool{}
	for _, sb := range list {
		if looked[sb.policy] {
			continue
		}
		looked[sb.policy] = true
		p, state := e.judgePolicy(sb.id, sb.policy)
		w := policies[sb.policy]
		switch {
		case w == nil:
			w = &watchedPolicy{NetworkPolicy: p, due: true}
			policies[sb.policy] = w
		case !bytes.Equal(w.Source, p.Source):
			// It may be in the middle of being written.
			w.NetworkPolicy, w.settled, w.due, w.state = p, false, true, state
			continue
		}
		w.settled, w.state = true, state
		all = all || w.due
	}
	for name := range policies {
		if !looked[name] {
			delete(policies, name)
		}
	}
	if !all || len(list) == 0 {
		return nil
	}
	attached, err := e.opts.Network.Attached(ctx)
	if err != nil {
		return err
	}
	failed, changed := map[string]bool{}, map[policyChange]int{}
	note := func(sb cardedSandbox, was string, secrets bool) {
		if c, ok := e.inForce(ctx, sb.id, sb.policy, policies[sb.policy].state, was, secrets); ok {
			changed[c]++
		}
	}
	for _, sb := range list {
		w := policies[sb.policy]
		if !w.settled {
			continue // not yet
		}
		p, err := e.armed(w.NetworkPolicy, sb.placeholders)
		if err != nil {
			return err
		}
		digest, served := attached[sb.id]
		switch {
		case !served && sb.held:
			// Its card may have come since, with a policy that was read before this one.
			if err := e.putPolicy(ctx, sb, w.Source); err == nil {
				note(sb, "", false)
			} else if !errors.Is(err, warren.ErrNotFound) {
				e.log.Warn("change the policy of a sandbox that starts", "sandbox", sb.id, "policy", sb.policy, "error", err)
				failed[sb.policy] = true
			}
		case !served:
			if e.replug(ctx, sb) {
				note(sb, unknownText, false)
			}
		case digest != p.Digest:
			if err := e.putPolicy(ctx, sb, w.Source); sb.held && errors.Is(err, warren.ErrNotFound) {
				continue // it has ended, or is made anew
			} else if err != nil {
				e.log.Error("change the policy of a sandbox", "sandbox", sb.id, "policy", sb.policy, "error", err)
				failed[sb.policy] = true
				continue
			}
			e.log.Info("the policy of a sandbox has changed", "sandbox", sb.id, "policy", sb.policy)
			if e.inspects(sb.policy) {
				// Beside the others, which shall not wait for a guest that does not answer.
				e.spawn(func() {
					ctx, cancel := context.WithTimeout(e.ctx, trustWait)
					defer cancel()
					if err := e.trust(ctx, sb); err != nil && e.ctx.Err() == nil {
						e.log.Warn("a sandbox does not trust the gateway, which inspects its connections", "sandbox", sb.id, "error", err)
					}
				})
			}
			was := unknownText
			if len(p.Secrets) == 0 {
				was = shortDigest(digest)
			}
			note(sb, was, true)
		default:
			note(sb, "", false) // perhaps a change whose answer came too late
		}
	}
	e.recordPolicies(ctx, changed)
	for name, w := range policies {
		w.due = !w.settled || failed[name]
	}
	return nil
}

// replug has a card served again that its gateway lost, and says whether it is.
func (e *Engine) replug(ctx context.Context, sb cardedSandbox) bool {
	id := sb.id
	c, ok := driver.As[driver.Carder](e.opts.Drivers[sb.driver])
	if !ok {
		return false
	}
	// Before it is served: what names are its network's is not asked of anyone outside.
	if err := e.tellPeers(ctx, e.networkOf(id)); err != nil {
		e.log.Warn("a sandbox has no network for now", "sandbox", id, "error", err)
		return false
	}
	err := e.arming(ctx, id, func() error {
		p, err := e.armed(e.effective(id, sb.policy), sb.placeholders)
		if err != nil {
			return err
		}
		f, err := c.Card(ctx, id)
		if err == nil {
			err = e.opts.Network.Adopt(ctx, id, f, p, "")
			f.Close()
		}
		return err
	})
	switch {
	case err == nil:
		e.log.Info("serve the network card of a sandbox again", "sandbox", id)
	case errors.Is(err, warren.ErrNotFound) || ctx.Err() != nil:
	case errors.Is(err, warren.ErrUnavailable):
		e.log.Warn("a sandbox has no network for now", "sandbox", id, "error", err)
	case e.lostCard(id):
		e.log.Warn("a sandbox has no network: its card is lost; pause and resume it, or restart it, for a new one", "sandbox", id, "error", err)
	}
	return err == nil
}

// lostCard notes that a sandbox has lost its card for good, and says whether that is news.
func (e *Engine) lostCard(id warren.SandboxID) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb := e.boxes[id]
	if sb == nil || sb.cardLost == sb.row.Generation {
		return false
	}
	sb.cardLost = sb.row.Generation
	return true
}

// keepCards gives a driver that was killed and started anew the cards of its sandboxes again, so that they outlive the gateway too.
func (e *Engine) keepCards(ctx context.Context, name string) {
	c, ok := driver.As[driver.CardKeeper](e.opts.Drivers[name])
	if !ok || e.opts.Network == nil {
		return
	}
	for _, sb := range e.carded() {
		if sb.driver != name || sb.held {
			continue
		}
		id := sb.id
		f, err := c.Card(ctx, id)
		if err == nil {
			f.Close()
			continue
		}
		if !errors.Is(err, warren.ErrState) {
			continue
		}
		if f, err = e.opts.Network.Card(ctx, id); err != nil {
			continue
		}
		if err := c.KeepCard(ctx, id, f); err != nil && ctx.Err() == nil {
			e.log.Warn("keep the card of a sandbox", "sandbox", id, "error", err)
		}
		f.Close()
	}
}

// noteEvent records what happened to a sandbox without anybody's asking.
func (e *Engine) noteEvent(ctx context.Context, id warren.SandboxID, action, message string, fields map[string]string) {
	e.mu.Lock()
	sb := e.boxes[id]
	var ev *store.Event
	if sb != nil {
		ev = e.event("warren", action, &sb.row, message)
		ev.Fields = fields
	}
	e.mu.Unlock()
	if ev == nil {
		return
	}
	if err := e.store.Update(ctx, func(tx *store.Tx) error { return tx.AppendEvent(ev) }); err != nil {
		e.log.Error("record an event", "sandbox", id, "action", action, "error", err)
	}
}

// PolicyFinding is something in a policy that its author should look at.
type PolicyFinding struct {
	// Severity is "error", "warning", or "failure" of one of the policy's own tests.
	Severity string
	Line     int
	Rule     string
	Message  string
	Remedy   string
}

// CheckPolicy reads a policy, looks for what is doubtful and runs its tests, and returns what it found and how many tests there are.
func (e *Engine) CheckPolicy(name string, source []byte) ([]PolicyFinding, int, error) {
	if name == "" {
		name = "policy"
	}
	if len(source) > maxPolicy {
		return nil, 0, invalid("policy", name, fmt.Sprintf("it has %s, and at most %s are read", size(int64(len(source))), size(maxPolicy)))
	}
	var list []PolicyFinding
	if name == NoNetwork || slices.Contains(policy.Presets(), name) {
		list = append(list, PolicyFinding{Severity: "error", Message: fmt.Sprintf("%s is the name of a preset or of having no network, which a file cannot have", name), Remedy: "rename the file; `extends: NAME` uses a preset"})
	} else if !policyForm.MatchString(name) {
		list = append(list, PolicyFinding{Severity: "warning", Message: fmt.Sprintf("%s cannot be the name of a policy, which is 1 to 63 of a-z, 0-9 and -, not - first", quote(name)), Remedy: "rename the file before you put it among the server's policies"})
	}
	p, err := policy.Parse(name, source)
	if err != nil {
		found := len(list)
		for _, x := range policy.Problems(err) {
			list = append(list, PolicyFinding{"error", x.Line, x.Rule, x.What, x.Remedy})
		}
		if len(list) == found {
			list = append(list, PolicyFinding{Severity: "error", Message: err.Error()})
		}
		return list, 0, nil
	}
	for _, g := range p.Grants() {
		if e.secret(g.Secret) == nil {
			list = append(list, PolicyFinding{"warning", 0, g.Name, fmt.Sprintf("secret %s is not set", g.Secret), "`warren secret set " + g.Secret + "`; without it requests that need it fail"})
		}
	}
	for _, f := range p.Lint() {
		list = append(list, PolicyFinding{string(f.Severity), f.Line, f.Rule, f.What, f.Remedy})
	}
	for _, f := range p.Test() {
		got := "denied"
		if f.Verdict.Allow {
			got = "allowed"
		}
		list = append(list, PolicyFinding{"failure", f.Line, "", fmt.Sprintf("%s: it is %s by %s: %s", f.Test, got, f.Verdict.Rule, f.Verdict.Reason), ""})
	}
	return list, p.Tests(), nil
}

// DescribePolicy tells the text of a policy in words, rule by rule. Of one that cannot be used there is nothing to tell, see [Engine.CheckPolicy].
func (e *Engine) DescribePolicy(name string, source []byte) (steps []PolicyStep) {
	if len(source) > maxPolicy {
		return nil
	}
	p, err := policy.Parse(cmp.Or(name, "policy"), source)
	if err != nil {
		return nil
	}
	for _, s := range p.Describe() {
		steps = append(steps, PolicyStep{Rule: s.Rule, Line: s.Line, Reason: s.Detail})
	}
	return steps
}

// PolicyAnswer says how a policy decides.
type PolicyAnswer struct {
	Policy string
	Allow  bool
	Rule   string
	Reason string
	Steps  []PolicyStep
}

// PolicyStep is one rule that was considered.
type PolicyStep struct {
	Rule    string
	Line    int
	Matched bool
	Reason  string
}

// ExplainSandbox says how the policy of a sandbox decides on a target, see [policy.ParseTarget].
func (e *Engine) ExplainSandbox(ctx context.Context, c Caller, ref, target string) (*PolicyAnswer, error) {
	sb, err := e.Get(ctx, c, ref)
	if err != nil {
		return nil, err
	}
	if sb.Spec.Policy == "" || sb.Spec.Policy == NoNetwork {
		return &PolicyAnswer{Policy: NoNetwork, Rule: "none", Reason: "the sandbox has no network card: it reaches nothing but itself"}, nil
	}
	if a, err := e.explainPeer(sb, target); a != nil || err != nil {
		return a, err
	}
	return e.ExplainPolicy(sb.Spec.Policy, target)
}

// ExplainPolicy says how a policy decides on a target.
func (e *Engine) ExplainPolicy(name, target string) (*PolicyAnswer, error) {
	p, err := e.loadPolicy(name)
	if err != nil {
		return nil, err
	}
	return e.ExplainSource(p.Name, p.Source, target)
}

// ExplainSource says how the text of a policy decides on a target.
func (e *Engine) ExplainSource(name string, source []byte, target string) (*PolicyAnswer, error) {
	if len(source) > maxPolicy {
		return nil, invalid("policy", name, fmt.Sprintf("it has %s, and at most %s are read", size(int64(len(source))), size(maxPolicy)))
	}
	p, err := policy.Parse(name, source)
	if err != nil {
		return &PolicyAnswer{Policy: name, Rule: "none", Reason: "the policy cannot be used, so that nothing is allowed: " + err.Error()}, nil
	}
	r, err := policy.ParseTarget(target)
	if err != nil {
		return nil, fmt.Errorf("target: %v: %w", err, warren.ErrInvalid)
	}
	v := p.Decide(r)
	a := &PolicyAnswer{Policy: name, Allow: v.Allow, Rule: v.Rule, Reason: v.Reason}
	for _, s := range p.Explain(r) {
		a.Steps = append(a.Steps, PolicyStep{s.Rule, s.Line, s.Matched, s.Detail})
	}
	return a, nil
}
