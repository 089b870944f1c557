//go:build linux

package gateway

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/warren-sandbox/warren/internal/policy"
)

// The gateway's own ceilings, for policies that state none: they keep one sandbox from taking what all share.
const (
	maxFlows    = 1024
	maxNewHosts = 2000 // an hour
)

// limitError says that a ceiling of the policy is reached.
type limitError struct{ what string }

func (e *limitError) Error() string { return e.what }

// atMost returns the lower of two ceilings, of which the first may be 0 for none.
func atMost(policy, own int) int {
	if policy > 0 {
		return min(policy, own)
	}
	return own
}

// meter counts what a sandbox has used since its card was attached.
type meter struct {
	upTotal, downTotal atomic.Int64
	// limits are those of the last look, which the bytes are compared with.
	maxUp, maxDown atomic.Int64
	// last is when the last byte went by, since began; 0 for none.
	began time.Time
	last  atomic.Int64

	mu       sync.Mutex
	requests window
	hosts    window
	// asked are the names that were counted, and when.
	asked map[policy.Host]time.Time
}

func newMeter() *meter {
	return &meter{began: time.Now(), requests: window{span: time.Minute}, hosts: window{span: time.Hour}, asked: map[policy.Host]time.Time{}}
}

// left says whether there is anything left for another flow.
func (m *meter) left(l policy.Limits) error {
	m.maxUp.Store(l.BytesUp)
	m.maxDown.Store(l.BytesDown)
	return errors.Join(m.up(0), m.down(0))
}

func (m *meter) note(n int64) {
	if n > 0 {
		m.last.Store(int64(time.Since(m.began)))
	}
}

// quiet is for how long no byte went by, since the card was attached if none ever did.
func (m *meter) quiet() time.Duration { return time.Since(m.began) - time.Duration(m.last.Load()) }

// up counts bytes that leave the sandbox, before they do.
func (m *meter) up(n int64) error {
	m.note(n)
	if total, most := m.upTotal.Add(n), m.maxUp.Load(); most > 0 && (total > most || n == 0 && total == most) {
		return &limitError{fmt.Sprintf("the sandbox has sent its %d bytes (limits.bytes_up)", most)}
	}
	return nil
}

// down counts bytes that come in.
func (m *meter) down(n int64) error {
	m.note(n)
	if total, most := m.downTotal.Add(n), m.maxDown.Load(); most > 0 && (total > most || n == 0 && total == most) {
		return &limitError{fmt.Sprintf("the sandbox has received its %d bytes (limits.bytes_down)", most)}
	}
	return nil
}

// request counts a request.
func (m *meter) request(l policy.Limits) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if l.RequestsPerMinute > 0 && !m.requests.take(time.Now(), l.RequestsPerMinute) {
		return &limitError{fmt.Sprintf("more than %d requests in a minute (limits.requests_per_minute)", l.RequestsPerMinute)}
	}
	return nil
}

// newHost counts a name that the sandbox has not asked for within an hour, whether it exists or not, and says whether it is one.
func (m *meter) newHost(l policy.Limits, h policy.Host) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if at, ok := m.asked[h]; ok && now.Sub(at) < time.Hour {
		return false, nil
	}
	most := atMost(l.NewHostsPerHour, maxNewHosts)
	if !m.hosts.take(now, most) {
		return false, &limitError{fmt.Sprintf("more than %d new names in an hour (limits.new_hosts_per_hour)", most)}
	}
	if len(m.asked) >= 2*maxNewHosts {
		maps.DeleteFunc(m.asked, func(_ policy.Host, at time.Time) bool { return now.Sub(at) >= time.Hour })
	}
	m.asked[h] = now
	return true, nil
}

// notAsked takes back that a name was asked for.
func (m *meter) notAsked(h policy.Host) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.asked, h)
}

// window counts what happened within a span, in slices of it.
type window struct {
	span   time.Duration
	slices [12]int64
	last   int64 // number of the current slice
	sum    int64
}

// take counts one more, unless there have been most already.
func (w *window) take(now time.Time, most int) bool {
	at := now.UnixNano() / (int64(w.span) / int64(len(w.slices)))
	if gone := at - w.last; gone > 0 {
		for i := range min(gone, int64(len(w.slices))) {
			slot := &w.slices[(w.last+1+i)%int64(len(w.slices))]
			w.sum -= *slot
			*slot = 0
		}
		w.last = at
	}
	if w.sum >= int64(most) {
		return false
	}
	w.slices[w.last%int64(len(w.slices))]++
	w.sum++
	return true
}

// bucket lets through rate things a second, and burst at once.
type bucket struct {
	rate, burst float64

	mu     sync.Mutex
	have   float64
	at     time.Time
	missed int64
}

func newBucket(rate, burst float64) bucket { return bucket{rate: rate, burst: burst, have: burst} }

// take says whether one more may go through, and how many did not since the last one that did.
func (b *bucket) take() (missed int64, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if !b.at.IsZero() {
		b.have = min(b.burst, b.have+b.rate*now.Sub(b.at).Seconds())
	}
	b.at = now
	if b.have < 1 {
		b.missed++
		return 0, false
	}
	b.have--
	missed, b.missed = b.missed, 0
	return missed, true
}

// record writes evidence, or counts it where there is too much. What may not go unrecorded does not happen when this fails.
func (c *card) record(e Entry) error {
	e.Sandbox, e.Time = c.id, time.Now()
	e.Policy = c.policy().Name()
	return c.ledger.add(e)
}

// write puts an entry on record.
func (c *card) write(e Entry) error {
	if err := c.g.opts.Evidence(e); err != nil {
		c.g.log.Error("evidence cannot be written", "sandbox", c.id, "action", e.Action, "error", err)
		return fmt.Errorf("%w: %w", errUnrecorded, err)
	}
	return nil
}

var errUnrecorded = errors.New("it cannot be recorded")

// refuse records a denial, of a flow if it does not say of what else. The ledger bounds what a sandbox writes that tries without end.
func (c *card) refuse(e Entry) {
	if e.Action == "" {
		e.Action = "flow.deny"
	}
	c.record(e)
}

// isEnd says whether a connection ended in order.
func isEnd(err error) bool { return errors.Is(err, io.EOF) }
