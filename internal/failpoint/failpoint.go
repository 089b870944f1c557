// Package failpoint makes named places in the code fail on demand, so that tests can end the process, return
// errors or wait exactly there.
//
// A point is declared once, as a package variable, and hit where it stands:
//
//	var afterIntent = failpoint.New("engine.create.after-intent")
//	...
//	if err := afterIntent.Hit(); err != nil { return err }
//
// Points are switched on by the environment variable WARREN_FAILPOINTS, or by [Set] in tests:
//
//	name=kill            SIGKILL the own process
//	name=error           return an error that matches [ErrInjected]
//	name=panic           panic
//	name=sleep:50ms      wait
//	name=kill:3          only the third hit and later
//	name=sleep:50ms:2    the same, with an argument
//
// Several are separated by commas or semicolons. A point that is off costs one atomic load.
package failpoint

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Env names the environment variable that switches points on.
const Env = "WARREN_FAILPOINTS"

// ErrInjected is what every injected error matches.
var ErrInjected = errors.New("injected failure")

// Point is one named place.
type Point struct {
	name   string
	action atomic.Pointer[action]
}

type action struct {
	kind  string
	sleep time.Duration
	from  int64
	hits  atomic.Int64
}

var (
	mu      sync.Mutex
	points  = map[string]*Point{}
	pending = map[string]*action{} // switched on before the point was declared
	envErr  error
)

// The environment is read before any point can be hit: package variables of importers come later.
var _ = func() bool {
	if v := os.Getenv(Env); v != "" {
		envErr = Set(v)
	}
	return true
}()

// New declares a point. Declaring a name twice panics, for two places would answer to it.
func New(name string) *Point {
	mu.Lock()
	defer mu.Unlock()
	if points[name] != nil {
		panic("failpoint: " + name + " is declared twice")
	}
	p := &Point{name: name}
	if a := pending[name]; a != nil {
		p.action.Store(a)
		delete(pending, name)
	}
	points[name] = p
	return p
}

// Name of the point.
func (p *Point) Name() string { return p.name }

// Hit does what the point is switched on to do, and nothing when it is off.
func (p *Point) Hit() error {
	a := p.action.Load()
	if a == nil {
		return nil
	}
	return p.act(a)
}

func (p *Point) act(a *action) error {
	if a.hits.Add(1) < a.from {
		return nil
	}
	switch a.kind {
	case "kill":
		killSelf()
	case "panic":
		panic("failpoint " + p.name)
	case "sleep":
		time.Sleep(a.sleep)
	case "error":
		return fmt.Errorf("failpoint %s: %w", p.name, ErrInjected)
	}
	return nil
}

// Names lists the declared points, sorted.
func Names() []string {
	mu.Lock()
	defer mu.Unlock()
	names := make([]string, 0, len(points))
	for n := range points {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// Set switches points on as the environment variable would; points that spec does not name stay as they are.
// A name that nobody has declared yet takes effect when it is.
func Set(spec string) error {
	parsed := map[string]*action{}
	for item := range strings.FieldsFuncSeq(spec, func(r rune) bool { return r == ',' || r == ';' || r == ' ' }) {
		name, what, ok := strings.Cut(item, "=")
		if !ok || name == "" {
			return fmt.Errorf("failpoint %q: want name=action", item)
		}
		a, err := parse(what)
		if err != nil {
			return fmt.Errorf("failpoint %q: %w", item, err)
		}
		parsed[name] = a
	}
	mu.Lock()
	defer mu.Unlock()
	for name, a := range parsed {
		if p := points[name]; p != nil {
			p.action.Store(a)
		} else {
			pending[name] = a
		}
	}
	return nil
}

// Clear switches every point off.
func Clear() {
	mu.Lock()
	defer mu.Unlock()
	clear(pending)
	for _, p := range points {
		p.action.Store(nil)
	}
}

// Check returns what was wrong with the environment variable, and names in it that no point has; a program calls
// it at its start so that a misspelt name is not a test that tests nothing.
func Check() error {
	mu.Lock()
	defer mu.Unlock()
	if envErr != nil {
		return envErr
	}
	for name := range pending {
		return fmt.Errorf("failpoint %q in %s does not exist", name, Env)
	}
	return nil
}

func parse(s string) (*action, error) {
	parts := strings.Split(s, ":")
	a := &action{kind: parts[0], from: 1}
	rest := parts[1:]
	switch a.kind {
	case "kill", "error", "panic":
	case "sleep":
		if len(rest) == 0 {
			return nil, errors.New("sleep needs a duration, such as sleep:50ms")
		}
		d, err := time.ParseDuration(rest[0])
		if err != nil || d < 0 {
			return nil, fmt.Errorf("%q is no duration", rest[0])
		}
		a.sleep, rest = d, rest[1:]
	default:
		return nil, fmt.Errorf("unknown action %q (kill, error, panic, sleep:DURATION)", a.kind)
	}
	if len(rest) > 1 {
		return nil, fmt.Errorf("%q is too much", strings.Join(rest[1:], ":"))
	}
	if len(rest) == 1 {
		n, err := strconv.ParseInt(rest[0], 10, 64)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("%q is no count", rest[0])
		}
		a.from = n
	}
	return a, nil
}
