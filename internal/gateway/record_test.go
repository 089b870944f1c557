//go:build linux

package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// failing makes all evidence fail, or no longer.
func (l *lab) failing(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fail = err
}

// of returns what is on record of an action.
func (l *lab) of(action string) []Entry {
	return l.found(func(e Entry) bool { return e.Action == action })
}

// TestInspectedUnrecorded lets nothing pass that cannot be recorded, also within connections that are open, and says how much was not once it can be.
func TestInspectedUnrecorded(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	l.name("plain.lab", "11.1.1.2")
	var served atomic.Int64
	serve := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { served.Add(1); io.WriteString(w, "hi") })
	l.web("11.1.1.1:443", serve, "api.lab")
	l.web("11.1.1.2:80", serve)
	in := l.sandbox("one", inspected+"  - \"*.wild.lab\"\n")
	client := in.client()
	get := func(url string) (int, string) {
		r, err := client.Get(url)
		if err != nil {
			return 0, err.Error()
		}
		defer r.Body.Close()
		b, _ := io.ReadAll(r.Body)
		return r.StatusCode, string(b)
	}
	urls := []string{"https://api.lab/v1/x", "http://plain.lab/x"}
	for _, url := range urls {
		if status, text := get(url); status != 200 {
			t.Fatalf("%s: %d %s", url, status, text)
		}
	}
	if opened, ended := l.of("http.open"), l.of("http.request"); len(opened) != 2 || len(ended) != 2 || opened[0].Method != "GET" || opened[0].Path != "/v1/x" {
		t.Errorf("begun %+v, ended %+v", opened, ended)
	}
	l.reached()
	before := served.Load()
	l.failing(errors.New("the disk is full"))
	for _, url := range urls {
		for range 3 {
			if status, text := get(url); status != http.StatusServiceUnavailable || !strings.Contains(text, "on record") {
				t.Errorf("%s with a full disk: %d %s", url, status, text)
			}
		}
	}
	if _, err := in.lookup("secret-data.wild.lab"); err == nil {
		t.Error("a name is found that cannot be put on record")
	}
	if n := served.Load() - before; n != 0 {
		t.Errorf("%d requests arrived that are not on record", n)
	}
	if _, asked := l.reached(); len(asked) != 0 {
		t.Errorf("asked for %v, which is not on record", asked)
	}
	l.failing(nil)
	if status, text := get(urls[0]); status != 200 {
		t.Errorf("with space again: %d %s", status, text)
	}
	lost := l.of("record.lost")
	if len(lost) == 0 || lost[0].Sandbox != "one" || lost[0].More < 7 || !strings.Contains(lost[0].Reason, "could not be written") {
		t.Errorf("what was lost: %+v", lost)
	}
	in.lookup("secret-data.wild.lab")
	if _, asked := l.reached(); len(asked) == 0 {
		t.Error("the name is not asked for, though it can be recorded")
	}
}

// TestLostIsTold tells of what could not be recorded also when nothing more happens.
func TestLostIsTold(t *testing.T) {
	var mu sync.Mutex
	var fail error
	var got []Entry
	g := newLedger(defaultRecords, func(e Entry) error {
		mu.Lock()
		defer mu.Unlock()
		if fail == nil {
			got = append(got, e)
		}
		return fail
	})
	g.wait = 10 * time.Millisecond
	fail = errors.New("the disk is full")
	for range 3 {
		if g.add(Entry{Sandbox: "one", Action: "http.request"}) == nil {
			t.Fatal("what could not be written counts as written")
		}
	}
	mu.Lock()
	fail = nil
	mu.Unlock()
	eventually(t, "it is told", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(got) == 1 && got[0].Action == "record.lost" && got[0].More == 3 && got[0].Sandbox == "one"
	})
}

// TestWhyOnRecord has on record why a request came to nothing that its policy allows: an address that is denied is a denial by that rule, and a server that
// cannot be asked is no answer.
func TestWhyOnRecord(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "10.1.2.3")
	l.name("plain.lab", "11.1.1.2")
	l.name("forged.lab", "11.1.1.3")
	l.web("11.1.1.3:443", http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), "another.lab")
	l.mu.Lock()
	l.servers["tcp/11.1.1.2:80"] = "127.0.0.1:1" // where nothing listens
	l.mu.Unlock()
	in := l.sandbox("one", inspected+"  - {host: forged.lab, inspect: true}\n")
	for _, c := range []struct {
		url, action, addr, reason string
		status                    int
	}{
		{"https://api.lab/v1/x", "http.deny", "10.1.2.3", "private", 403},
		{"http://plain.lab/", "http.fail", "", "refused", 502},
		{"https://forged.lab/", "http.fail", "", "certificate", 502},
	} {
		status, _, err := in.get(c.url)
		if err != nil || status != c.status {
			t.Errorf("%s: %d, %v", c.url, status, err)
		}
		host := strings.Split(c.url, "/")[2]
		got := l.found(func(e Entry) bool { return e.Action == c.action && string(e.Host) == host })
		if len(got) != 1 || got[0].Addr != c.addr && c.addr != "" || !strings.Contains(got[0].Reason, c.reason) || got[0].Status != c.status {
			t.Errorf("%s is on record as %+v, want %s of %s, since %s", c.url, got, c.action, c.addr, c.reason)
		}
		if c.action == "http.deny" && got[0].Rule != "address" {
			t.Errorf("%s is denied by %q", c.url, got[0].Rule)
		}
	}
	if got := l.of("http.request"); len(got) != 0 {
		t.Errorf("requests that came to nothing are on record as answered: %+v", got)
	}
}

// TestSecretNotSent tells of a secret that a request was to get and that went nowhere.
func TestSecretNotSent(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "10.1.2.3")
	in := l.sandbox("one", `
allow: [{host: api.lab, inspect: true}]
secrets: [{secret: token, host: api.lab, place: {header: Authorization}}]
`, l.secret("token", "a-value-of-some-length"))
	if status, _, err := in.get("https://api.lab/"); err != nil || status != 403 {
		t.Fatalf("%d, %v", status, err)
	}
	got := l.of("http.deny")
	if len(got) != 1 || got[0].Secret == "" || !strings.Contains(got[0].Reason, "not sent") {
		t.Errorf("on record: %+v", got)
	}
}

// TestNewNames counts a name once, whatever is asked of it, how often, and whether it exists; and has it on record before anybody is asked.
func TestNewNames(t *testing.T) {
	l := newLab(t)
	for _, h := range []string{"a", "b"} {
		l.name(h+".wild.lab", "11.1.1.1")
	}
	in := l.sandbox("one", "allow: [\"*.wild.lab\"]\nlimits: {new_hosts_per_hour: 3}\n")
	for range 20 {
		var both sync.WaitGroup
		for range 4 {
			both.Go(func() { in.lookup("missing.wild.lab") })
		}
		both.Wait()
	}
	for _, h := range []string{"a.wild.lab", "b.wild.lab", "a.wild.lab"} {
		if _, err := in.lookup(h); err != nil {
			t.Errorf("%s: %v", h, err)
		}
	}
	if _, err := in.lookup("c.wild.lab"); err == nil {
		t.Error("a fourth name is looked up")
	}
	for host, want := range map[string]string{
		"missing.wild.lab": "[dns.allow dns.fail]", "a.wild.lab": "[dns.allow]", "b.wild.lab": "[dns.allow]", "c.wild.lab": "[dns.deny]",
	} {
		var got []string
		for _, e := range l.found(func(e Entry) bool { return string(e.Host) == host }) {
			got = append(got, e.Action)
		}
		if fmt.Sprint(got) != want {
			t.Errorf("of %s is on record %v, want %s", host, got, want)
		}
	}
}

// TestStopAtTheEnd stops requests in the moment in which they end.
func TestStopAtTheEnd(t *testing.T) {
	l := newLab(t)
	l.name("api.lab", "11.1.1.1")
	l.web("11.1.1.1:443", hello("hi"), "api.lab")
	in := l.sandbox("one", inspected)
	c, err := l.g.card("one")
	if err != nil {
		t.Fatal(err)
	}
	client := in.client()
	done := make(chan bool)
	go func() {
		defer close(done)
		for range 300 {
			if r, err := client.Get("https://api.lab/v1/x"); err == nil {
				io.Copy(io.Discard, r.Body)
				r.Body.Close()
			}
		}
	}()
	for {
		select {
		case <-done:
			return
		default:
		}
		c.mu.Lock()
		for f := range c.flows {
			if f.request != nil {
				f.stop(errors.New("it is time"))
			}
		}
		c.mu.Unlock()
	}
}

// TestGivenUpOnRecord has a client leave while a server thinks: on record is that the server had got the request, or may have, over both
// kinds of HTTP. The server can be quicker than the report that all was written.
func TestGivenUpOnRecord(t *testing.T) {
	l := newLab(t)
	l.name("slow.lab", "11.1.1.1")
	arrived := make(chan struct{}, 1)
	think := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		arrived <- struct{}{}
		<-r.Context().Done()
	})
	l.web("11.1.1.1:80", think)
	l.web("11.1.1.1:443", think, "slow.lab")
	in := l.sandbox("one", "allow:\n  - {host: slow.lab, protocol: http, inspect: true}\n  - {host: slow.lab, inspect: true}\n")
	for _, url := range []string{"http://slow.lab/x", "https://slow.lab/x"} {
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			<-arrived
			cancel()
		}()
		if _, err := in.client().Do(req); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		eventually(t, url+" is on record", func() bool { return l.has("http.fail", "slow.lab") })
		l.mu.Lock()
		for _, e := range l.entries {
			if e.Action == "http.fail" && (e.Reason != givenUpAfter && e.Reason != givenUpDuring || e.Path != "/x") {
				t.Errorf("%s: on record is %+v", url, e)
			}
		}
		l.entries = nil
		l.mu.Unlock()
	}
}
