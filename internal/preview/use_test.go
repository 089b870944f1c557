package preview

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
)

// told takes what a server tells of uses.
type told struct {
	mu   sync.Mutex
	list []Use
}

func (d *told) add(u Use) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.list = append(d.list, u)
}

// lines are what was told, in short and in order.
func (d *told) lines() (list []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, u := range d.list {
		list = append(list, fmt.Sprintf("%s:%d by=%s user=%s refused=%s requests=%d remote=%v", u.Sandbox, u.Port, u.By, u.User, u.Refused, u.Requests, u.Remote != ""))
	}
	slices.Sort(list)
	return list
}

// TestUses has a preview used in each way: the first use of a kind is told at once, what follows is counted, and none of it tells what a request said.
func TestUses(t *testing.T) {
	var d told
	r := newRig(t, func(o *Options) { o.Used, o.Recheck = d.add, time.Hour })
	r.listen(boxA, 3000, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") })
	r.listen(boxA, 3001, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") })
	r.publicPorts[3001] = true
	const canary = "canary-77aa"
	base := strings.TrimSuffix(r.s.URL(boxA, 3000), "/")
	path := "/" + canary + "?key=" + canary
	for range 3 {
		r.do("GET", base+path, "Authorization: Bearer "+adaToken, "X-Secret: "+canary)
		r.do("GET", base+path, "Cookie: "+r.cookie(boxA, 3000)+"; c="+canary)
		r.do("GET", base+path+"&"+Parameter+"="+r.token(boxA, 3000))
		r.do("GET", strings.TrimSuffix(r.s.URL(boxA, 3001), "/")+path)
		r.do("GET", base+path, "Authorization: Bearer "+bobToken)
		r.do("GET", base+path)
		r.do("GET", strings.TrimSuffix(r.s.URL("s0000000000000000000", 3000), "/")+path)
		r.raw("GET / HTTP/1.1\r\nHost: " + canary + "\r\n\r\n")
	}
	first := []string{
		":0 by= user= refused=bad-host requests=1 remote=true",
		":0 by= user= refused=denied requests=1 remote=true",
		boxA + ":3000 by= user= refused=denied requests=1 remote=true",
		boxA + ":3000 by=cookie user=ada refused= requests=1 remote=true",
		boxA + ":3000 by=link user=ada refused= requests=1 remote=true",
		boxA + ":3000 by=token user=ada refused= requests=1 remote=true",
		boxA + ":3001 by=public user= refused= requests=1 remote=true",
	}
	for end := time.Now().Add(10 * time.Second); len(d.lines()) < len(first) && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
	}
	slices.Sort(first)
	if got := d.lines(); !slices.Equal(got, first) {
		t.Errorf("told:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(first, "\n"))
	}
	r.s.uses.settle(time.Now()) // nothing is due
	if n := len(d.lines()); n != len(first) {
		t.Errorf("%d are told before their time", n)
	}
	d.list = nil
	r.s.uses.settle(time.Time{})
	var rest []string
	for _, line := range first {
		n := "requests=2"
		if strings.Contains(line, boxA+":3000 by= ") {
			n = "requests=5" // bob's, and nobody's
		}
		rest = append(rest, strings.NewReplacer("requests=1", n, "remote=true", "remote=false").Replace(line))
	}
	if got := d.lines(); !slices.Equal(got, rest) {
		t.Errorf("told of what followed:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(rest, "\n"))
	}
	for _, u := range d.list {
		for _, secret := range []string{canary, adaToken, bobToken, Parameter} {
			if strings.Contains(fmt.Sprintf("%+v", u), secret) {
				t.Errorf("%q is told of: %+v", secret, u)
			}
		}
	}
	// Then it begins anew.
	d.list = nil
	r.do("GET", base+path, "Authorization: Bearer "+adaToken)
	if got := d.lines(); len(got) != 1 {
		t.Errorf("told after that: %q", got)
	}
}

// TestUsesAreBounded has strangers ask for more than is told apart: they do not keep the owner's uses out.
func TestUsesAreBounded(t *testing.T) {
	var d told
	u := uses{tell: d.add, later: func(f func()) { f() }, wait: useTime}
	r := &http.Request{RemoteAddr: "192.0.2.1:5"}
	now := time.Now()
	for range 2 {
		for port := range 3 * maxUses {
			u.note(r, place{warren.SandboxID(boxA), uint16(port + 1)}, grant{}, "denied", now)
		}
	}
	if n := len(d.list); n != maxUses+1 {
		t.Errorf("%d uses of strangers are told", n)
	}
	d.list = nil
	u.note(r, place{boxA, 3000}, grant{by: "token", user: "ada"}, "", now)
	if len(d.list) != 1 || d.list[0].User != "ada" || d.list[0].Sandbox != boxA {
		t.Errorf("the owner's use is told as %+v", d.list)
	}
	u.settle(now.Add(useTime))
	total := int64(maxUses + 1)
	for _, c := range d.list[1:] {
		total += c.Requests
	}
	if total != 6*maxUses {
		t.Errorf("%d requests of %d are told", total, 6*maxUses)
	}
	if len(u.counts) != 0 || len(u.in) != 0 || u.all != 0 {
		t.Errorf("%d are kept, %d of them let in", len(u.counts), u.all)
	}
}
