//go:build linux

package gateway

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/policy"
)

// book takes what a ledger writes.
type book struct {
	mu   sync.Mutex
	list []Entry
	fail error
}

func (b *book) write(e Entry) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fail == nil {
		b.list = append(b.list, e)
	}
	return b.fail
}

// total counts entries of an action, and those that stand for others; bytes are what they tell of together.
func (b *book) total(action string) (single, counted, bytes int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, e := range b.list {
		switch {
		case e.Action == action:
			single, bytes = single+1+e.More, bytes+e.Up
		case e.Action == "record.more" && e.Of == action:
			counted, bytes = counted+e.More, bytes+e.Up
		}
	}
	return single, counted, bytes
}

// TestLedger writes more than a sandbox may: what is not written one by one is counted, and nothing new hides behind it.
func TestLedger(t *testing.T) {
	b := &book{}
	l := newLedger(1, b.write)
	l.rate = newBucket(0, 5)
	for range 1000 {
		if err := l.add(Entry{Action: "http.request", Host: "a.lab", Up: 7}); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.add(Entry{Action: "http.request", Host: "b.lab", Up: 7}); err != nil {
		t.Fatal(err)
	}
	if last := b.list[len(b.list)-1]; last.Host != "b.lab" || last.More != 0 || len(b.list) != 7 {
		t.Errorf("behind a flood %+v is the last of %d records", last, len(b.list))
	}
	// More kinds than are told apart.
	for i := range 3 * maxKinds {
		for range 2 {
			l.add(Entry{Action: "dns.allow", Host: policy.Host(fmt.Sprintf("%d.lab", i))})
		}
	}
	if n := len(b.list); n > 7+maxKinds {
		t.Errorf("%d records of %d names", n, 3*maxKinds)
	}
	l.settle()
	if single, counted, bytes := b.total("http.request"); single != 7 || counted != 994 || bytes != 7*1001 {
		t.Errorf("of 1001 requests %d are on record and %d are counted, with %d bytes", single, counted, bytes)
	}
	if single, counted, _ := b.total("dns.allow"); single+counted != 6*maxKinds {
		t.Errorf("of %d questions %d are on record and %d are counted", 6*maxKinds, single, counted)
	}
	if n := len(b.list); n > 7+2*maxKinds+2 {
		t.Errorf("%d records in all", n)
	}
	// Where nothing can be written, nothing is counted either, and what is counted waits.
	l.add(Entry{Action: "http.request", Host: "c.lab"})
	l.add(Entry{Action: "http.request", Host: "c.lab"})
	b.fail = errors.New("the disk is full")
	l.settle()
	if err := l.add(Entry{Action: "http.request", Host: "c.lab"}); err == nil {
		t.Error("what cannot be recorded is taken for recorded")
	}
	b.fail = nil
	l.settle()
	if single, counted, _ := b.total("http.request"); single+counted != 1003 {
		t.Errorf("of 1003 requests %d are on record and %d are counted", single, counted)
	}
}

// TestLedgerHidesNobody floods the record with kinds of one thing, and looks whether what is reached meanwhile is still told.
func TestLedgerHidesNobody(t *testing.T) {
	var list []Entry
	l := newLedger(1, func(e Entry) error { list = append(list, e); return nil })
	l.wait = time.Hour
	for l.add(Entry{Action: "dns.deny", Host: "flood.lab"}); len(list) < burstRecords; {
		l.add(Entry{Action: "dns.deny", Host: "flood.lab"})
	}
	for i := range 3 * maxKinds {
		l.add(Entry{Action: "flow.deny", Host: "flood.lab", Port: uint16(i)})
	}
	for _, e := range []Entry{
		{Action: "flow.open", Host: "exfil.lab", Addr: "11.6.6.6"}, {Action: "secret.use", Host: "exfil.lab", Secret: "key"}, {Action: "flow.close", Host: "exfil.lab", Up: 1 << 30},
	} {
		if err := l.add(e); err != nil {
			t.Error(err)
		}
		if last := list[len(list)-1]; last.Action != e.Action || last.Host != "exfil.lab" || last.Up != e.Up {
			t.Errorf("after %s the last record is %+v", e.Action, last)
		}
	}
	// More hosts than there is room for are not reached.
	var err error
	for i := 0; err == nil && i < 2*maxReached; i++ {
		err = l.add(Entry{Action: "flow.open", Host: policy.Host(fmt.Sprintf("n%d.lab", i))})
	}
	if limit := (*limitError)(nil); !errors.As(err, &limit) {
		t.Errorf("a flow to one host more: %v", err)
	}
	if err := l.add(Entry{Action: "flow.open", Host: "exfil.lab", Addr: "11.6.6.6"}); err != nil {
		t.Errorf("a flow to a host that is known: %v", err)
	}
	if err := l.add(Entry{Action: "flow.close", Host: "other.lab", Up: 5}); err != nil {
		t.Errorf("the end of a flow: %v", err)
	}
	l.settle()
	var opened int64
	for _, e := range list {
		if e.Action == "record.more" && e.Of == "flow.open" && e.Host == "exfil.lab" {
			opened += e.More
		}
	}
	if opened != 1 {
		t.Errorf("%d more flows to it are counted, want 1", opened)
	}
	if err := l.add(Entry{Action: "flow.open", Host: "new.lab"}); err != nil {
		t.Errorf("after the counts were written: %v", err)
	}
}

// TestRecordShare has one sandbox do much: its records are bounded, another's are written one by one, and what is counted is written at its end.
func TestRecordShare(t *testing.T) {
	l := newLab(t)
	l.name("plain.lab", "11.1.1.2")
	l.web("11.1.1.2:80", hello("plain"))
	rules := "allow:\n  - {host: plain.lab, protocol: http}\n"
	loud, quiet := l.sandbox("loud", rules), l.sandbox("quiet", rules)
	c, err := l.g.card("loud")
	if err != nil {
		t.Fatal(err)
	}
	rate := &c.ledger.rate
	rate.mu.Lock() // the start of the sandbox may still be being recorded
	rate.rate, rate.burst, rate.have = 0, 10, 10
	rate.mu.Unlock()
	const requests = 300
	client := loud.client()
	for range requests {
		r, err := client.Get("http://plain.lab/x")
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	if status, _, err := quiet.get("http://plain.lab/quiet"); err != nil || status != 200 {
		t.Fatal(status, err)
	}
	l.g.Detach("loud")
	var of book
	count := func(id string) (single, counted int64, all int) {
		of.list = nil
		l.mu.Lock()
		for _, e := range l.entries {
			if e.Sandbox == id {
				of.list = append(of.list, e)
			}
		}
		l.mu.Unlock()
		single, counted, _ = of.total("http.request")
		return single, counted, len(of.list)
	}
	eventually(t, "all is counted", func() bool { single, counted, _ := count("loud"); return single+counted == requests })
	if single, counted, all := count("loud"); all > 20 || counted < requests-20 {
		t.Errorf("%d records, of %d requests, with %d counted", all, single, counted)
	}
	if single, counted, _ := count("quiet"); single != 1 || counted != 0 {
		t.Errorf("of the other sandbox's request %d are on record and %d counted", single, counted)
	}
	for _, e := range of.list {
		if e.Action == "record.more" && !strings.Contains(e.Reason, "not written one by one") {
			t.Errorf("%+v", e)
		}
	}
}

// TestSharedCeilings has one sandbox take all connections, and all memory, that there are for all: it gets no more, another does, and it does again when it has
// given some back.
func TestSharedCeilings(t *testing.T) {
	l := newLab(t)
	l.name("raw.lab", "11.1.1.3")
	l.serve("11.1.1.3:9000", echo)
	rules := "allow:\n  - {host: raw.lab, protocol: tcp, ports: [9000]}"
	one, two := l.sandbox("one", rules), l.sandbox("two", rules)
	open := func(in *inside) net.Conn {
		a, err := in.lookup("raw.lab")
		if err != nil {
			t.Fatal(err)
		}
		c, err := in.dial(t.Context(), netip.AddrPortFrom(a, 9000))
		if err != nil {
			return nil
		}
		return c
	}
	refused := func(why string) bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, e := range l.entries {
			if e.Action == "flow.deny" && e.Sandbox == "one" && strings.Contains(e.Reason, why) {
				return true
			}
		}
		return false
	}
	l.g.share.connections = 64
	var conns []net.Conn
	for range 64 {
		c := open(one)
		if c == nil {
			t.Fatalf("only %d connections", len(conns))
		}
		conns = append(conns, c)
	}
	if c := open(one); c != nil || !refused("gateway.connections") {
		t.Error("more connections than there may be, or that is not on record")
	}
	var others []net.Conn
	for range ownShare {
		c := open(two)
		if c == nil {
			t.Fatalf("another sandbox has only %d connections", len(others))
		}
		others = append(others, c)
	}
	if c := open(two); c != nil {
		t.Error("another sandbox has more than its share")
	}
	for _, c := range others {
		c.Close()
	}
	conns[0].Close()
	eventually(t, "a connection is given back", func() bool { return l.g.share.open.Load() == 63 })
	if conns[0] = open(one); conns[0] == nil {
		t.Fatal("no connection in place of one that has ended")
	}
	// Memory.
	var used atomic.Int64
	l.g.share.mu.Lock()
	l.g.share.connections, l.g.share.memory = 1000, 100
	l.g.share.inUse = func() int64 { return used.Load() }
	l.g.share.mu.Unlock()
	used.Store(100)
	eventually(t, "memory is looked at", func() bool {
		if c := open(one); c != nil {
			conns = append(conns, c)
			return false
		}
		return true
	})
	if !refused("gateway.memory") {
		t.Error("that there is no memory is not on record")
	}
	if c := open(two); c == nil {
		t.Error("another sandbox gets nothing, for the memory that one has")
	} else {
		c.Close()
	}
	used.Store(99)
	eventually(t, "there is memory again", func() bool {
		c := open(one)
		if c != nil {
			c.Close()
		}
		return c != nil
	})
	for _, c := range conns {
		c.Close()
	}
	eventually(t, "all is given back", func() bool { return l.g.share.open.Load() == 0 })
	if n := heapInUse(); n < 1<<20 || n > 1<<40 {
		t.Errorf("the process says that it holds %d bytes", n)
	}
}

// TestManyIdle has one sandbox open 5,000 connections and keep them (B39): it gets as many as one may have, and another is served as before.
func TestManyIdle(t *testing.T) {
	l := newLab(t)
	l.name("raw.lab", "11.1.1.3")
	l.name("allowed.lab", "11.1.1.1")
	l.serve("11.1.1.3:9000", echo)
	l.web("11.1.1.1:443", hello("hi"), "allowed.lab")
	one, two := l.sandbox("one", "allow:\n  - {host: raw.lab, protocol: tcp, ports: [9000]}"), l.sandbox("two", "allow: [allowed.lab]")
	a, err := one.lookup("raw.lab")
	if err != nil {
		t.Fatal(err)
	}
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		conns []net.Conn
	)
	const workers, tries = 50, 5000
	for range workers {
		wg.Go(func() {
			for range tries / workers {
				c, err := one.dial(t.Context(), netip.AddrPortFrom(a, 9000))
				if err != nil {
					continue
				}
				mu.Lock()
				conns = append(conns, c)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(conns) != maxFlows {
		t.Errorf("of %d connections %d are open, want %d", tries, len(conns), maxFlows)
	}
	if status, body, err := two.get("https://allowed.lab/"); err != nil || status != 200 || !strings.HasPrefix(body, "hi") {
		t.Errorf("another sandbox gets %d %q, %v", status, body, err)
	}
	for _, c := range conns {
		c.Close()
	}
	eventually(t, "all is given back", func() bool { return l.g.share.open.Load() <= 1 }) // the other's may be kept
}
