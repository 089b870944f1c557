// Command attack tries to get something out of a sandbox over its network, one attack for each case of the project's list. What arrives is the
// verdict of the lab that it is pointed at, see package egress; it prints what it tried and what came back.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/warren-sandbox/warren/driver/drivertest/egress"
)

func main() {
	if len(os.Args) < 2 {
		fail("want a verb: run [CASE...], control, carry HOST, first, spray, send, detach, keep or stranger TOKEN")
	}
	switch verb, args := os.Args[1], os.Args[2:]; verb {
	case "run":
		run(args)
	case "control":
		json.NewEncoder(os.Stdout).Encode(egress.Report{Controls: controls(), Charge: charge()})
	case "first":
		first()
	case "spray":
		if err := spray(0); err != nil {
			fail(err.Error())
		}
	case "carry":
		carry(args)
	case "send":
		send(args)
	case "detach":
		detach(args)
	case "keep":
		keep()
	case "stranger":
		stranger(args)
	default:
		fail("no verb " + verb)
	}
}

func fail(text string) {
	fmt.Fprintln(os.Stderr, "attack:", text)
	os.Exit(1)
}

// try is a [egress.Try] that has not been made.
type try struct {
	what  string
	signs []string
	do    func() string
}

// cases are the attacks by case.
var cases = map[string]func() []try{}

const (
	// atOnce bounds the tries at a time, and patience one that hangs.
	atOnce   = 64
	patience = 20 * time.Second
)

// run makes the tries of cases, of all but those with a policy of their own if none is named, and then the requests that must succeed.
func run(ids []string) {
	if len(ids) == 0 {
		for id := range cases {
			if id != egress.OwnKeys && id != egress.Flood {
				ids = append(ids, id)
			}
		}
	}
	slices.Sort(ids)
	var (
		wg     sync.WaitGroup
		slots  = make(chan bool, atOnce)
		report egress.Report
	)
	type pending struct {
		id string
		try
		got chan string
	}
	var all []pending
	for _, id := range ids {
		if cases[id] == nil {
			fail("no case " + id)
		}
		for _, t := range cases[id]() {
			all = append(all, pending{id, t, make(chan string, 1)})
		}
	}
	for _, p := range all {
		slots <- true
		wg.Go(func() {
			defer func() { <-slots }()
			done := make(chan string, 1)
			go func() { done <- p.do() }()
			select {
			case got := <-done:
				p.got <- got
			case <-time.After(patience):
				p.got <- "it hangs"
			}
		})
	}
	wg.Wait()
	for _, p := range all {
		got := <-p.got
		t := egress.Try{Case: p.id, What: p.what, Signs: p.signs, To: toldTo(p.signs)}
		if strings.HasPrefix(p.signs[0], egress.Shown("")) {
			t.Back = []byte(got)
		}
		t.Got = strings.ToValidUTF8(got[:min(len(got), 200)], "?")
		report.Tries = append(report.Tries, t)
	}
	report.Controls, report.Charge = controls(), charge()
	json.NewEncoder(os.Stdout).Encode(report)
}

// controls makes the requests that a policy allows. A spelling of a name is the name.
func controls() map[string]string {
	got := map[string]string{}
	for _, c := range []struct{ scheme, name string }{
		{"https", egress.Allowed}, {"https", "ALLOWED.lab"}, {"https", egress.Allowed + "."}, {"https", egress.Passed}, {"http", egress.Plain}, {"https", egress.Wild},
	} {
		got[c.scheme+"://"+c.name] = get(c.scheme, c.name)
	}
	return got
}
