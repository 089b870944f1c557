package preview

import (
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/warren-sandbox/warren"
)

// Use tells that a preview has been used, for the record of who called what. Nothing of it is of a request's path, query or headers, in which secrets travel.
type Use struct {
	// Sandbox is empty where there is none of that name, and then Port is 0.
	Sandbox warren.SandboxID
	Port    uint16
	// By is what let it in: "link" (which is being exchanged or used), "cookie" (that a link was exchanged for), "token" (of the API), "public", or empty for who was not.
	By string
	// User is who showed the token, or in whose name a link is.
	User string
	// Refused says why it was not carried out, by the name of its page.
	Refused string
	// Remote is from where the first came.
	Remote string
	// Requests is how many there were, since Since. The first of a kind is told at once, as one; what follows it, some minutes later.
	Requests int64
	Since    time.Time
}

const (
	// useTime is how long uses of a kind are counted before they are told.
	useTime = 10 * time.Minute
	// maxUses bounds what is told apart, of each user's previews for those who are let in and of all others together; what is beyond is told without a sandbox.
	maxUses = 500
)

// useKind is what is counted together: a page asks for hundreds of things.
type useKind struct {
	at      place
	by      string
	user    string
	refused string
}

// uses counts uses.
type uses struct {
	tell func(Use)
	// later tells without keeping anybody waiting.
	later func(func())
	// wait is useTime.
	wait time.Duration

	mu     sync.Mutex
	counts map[useKind]*Use
	in     map[string]int // of counts, those that were let in, by user
	all    int            // the sum of those
}

// note counts a use, and tells of it if it is the first of its kind.
func (u *uses) note(r *http.Request, at place, g grant, refused string, now time.Time) {
	if u.tell == nil {
		return
	}
	k := useKind{at: at, refused: refused}
	if g.by != "" {
		k.by, k.user = g.by, g.user
	}
	u.mu.Lock()
	if u.counts[k] == nil {
		if full := len(u.counts) - u.all; k.by == "" && full >= maxUses || k.by != "" && u.in[k.user] >= maxUses {
			k.at = place{}
		}
	}
	if have := u.counts[k]; have != nil {
		have.Requests++
		u.mu.Unlock()
		return
	}
	first := Use{Sandbox: k.at.id, Port: k.at.port, By: k.by, User: k.user, Refused: k.refused, Requests: 1, Since: now}
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err == nil {
		first.Remote = host
	}
	rest := first
	rest.Requests = 0
	if u.counts == nil {
		u.counts = map[useKind]*Use{}
	}
	u.counts[k] = &rest
	if k.by != "" {
		if u.in == nil {
			u.in = map[string]int{}
		}
		u.in[k.user]++
		u.all++
	}
	u.mu.Unlock()
	if refused != "" {
		// To write it takes a moment, in which strangers could see whether there is such a sandbox.
		u.later(func() { u.tell(first) })
		return
	}
	u.tell(first)
}

// settle tells what has been counted for long enough; a zero time means all.
func (u *uses) settle(now time.Time) {
	if u.tell == nil {
		return
	}
	var list []Use
	u.mu.Lock()
	for k, c := range u.counts {
		if !now.IsZero() && now.Sub(c.Since) < u.wait {
			continue
		}
		delete(u.counts, k)
		if k.by != "" {
			u.all--
			if u.in[k.user]--; u.in[k.user] == 0 {
				delete(u.in, k.user)
			}
		}
		if c.Requests > 0 {
			c.Remote = ""
			list = append(list, *c)
		}
	}
	u.mu.Unlock()
	for _, c := range list {
		u.tell(c)
	}
}
