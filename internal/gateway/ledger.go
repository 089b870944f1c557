//go:build linux

package gateway

import (
	"fmt"
	"sync"
	"time"

	"github.com/warren-sandbox/warren/internal/policy"
)

const (
	// defaultRecords is how many records a second a sandbox may write one by one, and burstRecords how many at once: the record is everybody's, and the
	// oldest go when it is full.
	defaultRecords = 50
	burstRecords   = 10_000
	// ledgerTime is how long what is more than that is counted, before the counts are written. maxKinds bounds what is told apart, and maxReached with whom there
	// were connections and secrets were used, apart from all else.
	ledgerTime = 10 * time.Second
	maxKinds   = 50
	maxReached = 500
)

// ledger decides which of a sandbox's records are written one by one. Of the others the first of each kind is as well, and the rest are counted by kind and
// written as one. When there are too many kinds, what is more is counted by what was done alone; but a connection to one more host, and one more secret, is refused
// then, so that whom a sandbox has reached cannot be hidden behind a flood of anything.
type ledger struct {
	rate bucket
	// write puts an entry on record.
	write func(Entry) error
	// wait is ledgerTime.
	wait time.Duration

	mu     sync.Mutex
	counts map[kind]*Entry
	// reached is how many of them are of what was reached.
	reached int
	timer   *time.Timer
	// failed says that the last entry could not be written: until one can, none is counted, so that whoever may do nothing unrecorded finds out.
	failed bool
	// lost is how many could not be written, of which sandbox, since when.
	lost    int64
	lostOf  string
	lostNow time.Time
}

// kind is what records have in common that are counted together.
type kind struct {
	action, addr, rule, method, secret, peer string
	host                                     policy.Host
	port                                     uint16
	protocol                                 policy.Protocol
	inward                                   bool
}

func newLedger(rate int, write func(Entry) error) *ledger {
	return &ledger{rate: newBucket(float64(rate), burstRecords), write: write, wait: ledgerTime, counts: map[kind]*Entry{}}
}

func kindOfEntry(e *Entry) kind {
	k := kind{e.Action, "", e.Rule, e.Method, e.Secret, e.Peer, e.Host, e.Port, e.Protocol, e.Inward}
	if e.Host == "" {
		k.addr = e.Addr
	}
	return k
}

// add writes an entry, or counts it.
func (l *ledger) add(e Entry) error {
	if _, ok := l.rate.take(); !ok {
		if counted, err := l.count(&e); counted || err != nil {
			return err
		}
	}
	l.tellLost()
	err := l.write(e)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed = err != nil; l.failed {
		l.miss(1, e.Sandbox, time.Now())
	}
	return err
}

// miss counts what could not be written. The caller holds mu.
func (l *ledger) miss(n int64, of string, since time.Time) {
	if l.lost == 0 || since.Before(l.lostNow) {
		l.lostNow = since
	}
	l.lost += n
	l.lostOf = of
	if l.timer == nil {
		l.timer = time.AfterFunc(l.wait, l.settle)
	}
}

// tellLost records that something could not be recorded, once that is possible again.
func (l *ledger) tellLost() {
	l.mu.Lock()
	n, of, since := l.lost, l.lostOf, l.lostNow
	l.lost = 0
	l.mu.Unlock()
	if n == 0 {
		return
	}
	e := Entry{Sandbox: of, Time: time.Now(), Action: "record.lost", More: n, Reason: fmt.Sprintf("%d records since %s could not be written; "+
		"connections, requests and questions for names that could not be recorded did not happen, but the ends of others are among them", n, since.UTC().Format(time.RFC3339))}
	if l.write(e) != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.miss(n, of, since)
	}
}

// reaches says whether an action tells whom a sandbox has reached; of a flow's end, with how many bytes.
func reaches(action string) bool {
	return action == "flow.open" || action == "http.open" || action == "secret.use" || action == "flow.close"
}

// count counts an entry, unless it has to be written. An error is that what it tells of may not be.
func (l *ledger) count(e *Entry) (counted bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed {
		return false, nil
	}
	k := kindOfEntry(e)
	sum, known := l.counts[k], true
	if sum == nil {
		full := len(l.counts)-l.reached >= maxKinds
		if reaches(e.Action) {
			full = l.reached >= maxReached
		}
		if full && reaches(e.Action) && e.Action != "flow.close" {
			return false, &limitError{fmt.Sprintf("the sandbox writes more than its share of the record, and has reached %d hosts or used secrets in as many ways within %s", maxReached, l.wait)}
		}
		if full {
			// One for all others, by what was done.
			k = kind{action: e.Action}
			sum = l.counts[k]
			known = true
		} else {
			known = false
		}
	}
	if sum == nil {
		sum = &Entry{
			Sandbox: e.Sandbox, Action: "record.more", Of: e.Action, Host: k.host, Addr: k.addr, Port: k.port, Protocol: k.protocol, Policy: e.Policy, Rule: k.rule, Method: k.method,
			Secret: k.secret, Peer: k.peer, Inward: k.inward,
		}
		l.counts[k] = sum
		if reaches(e.Action) {
			l.reached++
		}
		if l.timer == nil {
			l.timer = time.AfterFunc(l.wait, l.settle)
		}
	}
	if !known {
		return false, nil
	}
	sum.More += 1 + e.More
	sum.Up += e.Up
	sum.Down += e.Down
	return true, nil
}

// settle writes what was counted.
func (l *ledger) settle() {
	l.mu.Lock()
	counts := l.counts
	l.counts, l.reached = map[kind]*Entry{}, 0
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	l.mu.Unlock()
	l.tellLost()
	for k, e := range counts {
		if e.More == 0 {
			continue
		}
		e.Time = time.Now()
		e.Reason = fmt.Sprintf("%d more of this kind were not written one by one: the sandbox writes more than its share of the record", e.More)
		if l.write(*e) == nil {
			continue
		}
		// They stay counted, with what comes, until there is space again.
		l.mu.Lock()
		l.failed = true
		if now := l.counts[k]; now != nil {
			now.More, now.Up, now.Down = now.More+e.More, now.Up+e.Up, now.Down+e.Down
		} else {
			l.counts[k] = e
			if reaches(k.action) {
				l.reached++
			}
		}
		if l.timer == nil {
			l.timer = time.AfterFunc(l.wait, l.settle)
		}
		l.mu.Unlock()
	}
}

// Settle writes what of the records of all sandboxes is counted and not written yet. It is to be called before the process ends.
func (g *Gateway) Settle() {
	g.mu.Lock()
	cards := make([]*card, 0, len(g.cards))
	for _, c := range g.cards {
		cards = append(cards, c)
	}
	g.mu.Unlock()
	for _, c := range cards {
		c.ledger.settle()
	}
}
