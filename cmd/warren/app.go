package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/config"
)

// app is what the verbs share: the streams, the global flags and the way to the server.
type app struct {
	in       io.Reader
	out, err io.Writer
	progress *progressLine

	json, quiet  bool
	url, dataDir string
}

func newApp(in io.Reader, out, err io.Writer) *app {
	a := &app{in: in, out: out, err: err}
	a.progress = &progressLine{out: err, enabled: func() bool { return !a.quiet && isTerminal(err) && os.Getenv("TERM") != "dumb" }}
	return a
}

// isTerminal reports whether a stream is a terminal.
func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

func colours(stream io.Writer) bool {
	return isTerminal(stream) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

func (a *app) errorStyle(s string) string {
	if colours(a.err) {
		return "\x1b[31m" + s + "\x1b[0m"
	}
	return s
}

// notice tells people, not programs, about something that happened on the way.
func (a *app) notice(format string, args ...any) {
	if a.quiet {
		return
	}
	a.progress.clear()
	fmt.Fprintf(a.err, "warren: "+format+"\n", args...)
}

// home returns the data directory of this user's daemon.
func (a *app) home() (string, error) {
	if a.dataDir != "" {
		return config.DataDir(func(string) string { return a.dataDir })
	}
	return config.DataDir(os.Getenv)
}

// remote returns the URL of a server that the user named, empty for the local daemon.
func (a *app) remote() string {
	if a.url != "" {
		return a.url
	}
	if a.dataDir != "" {
		return ""
	}
	return os.Getenv("WARREN_URL")
}

// client connects to the server, after a local daemon has been started if there was none.
func (a *app) client(ctx context.Context) (*warren.Client, error) {
	opts := warren.Options{UserAgent: "warren-cli/" + versionString()}
	if url := a.remote(); url != "" {
		opts.URL, opts.Token = url, os.Getenv("WARREN_TOKEN")
		return warren.Connect(ctx, opts)
	}
	dir, err := a.home()
	if err != nil {
		return nil, err
	}
	if err := config.CheckDataDir(dir); err != nil {
		return nil, err
	}
	opts.URL = "unix://" + filepath.ToSlash(config.Socket(dir))
	dial := a.dialDaemon(dir)
	failed := make(chan error, 1)
	opts.Dial = func(ctx context.Context) (net.Conn, error) {
		conn, err := dial(ctx)
		if err != nil {
			select {
			case failed <- err:
			default:
			}
		}
		return conn, err
	}
	for try := 0; ; try++ {
		c, err := warren.Connect(ctx, opts)
		if err == nil {
			a.compareVersions(c)
			return c, nil
		}
		select {
		case err = <-failed: // why there is no daemon, without what the client adds for servers elsewhere
			return nil, err
		default:
		}
		// A daemon that was killed may have taken the connection with its last breath.
		if !errors.Is(err, warren.ErrUnavailable) || try == 40 || ctx.Err() != nil {
			return nil, err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// describe returns a message of one line for people. What comes from elsewhere cannot steer the terminal with it.
func describe(err error) string {
	msg := err.Error()
	if errors.Is(err, context.Canceled) {
		msg = "interrupted"
	}
	msg = strings.ReplaceAll(strings.TrimSpace(msg), "\n", "; ")
	if m := missing.FindStringSubmatch(msg); m != nil && lists[m[1]] != "" && errors.Is(err, warren.ErrNotFound) {
		msg += "; `" + lists[m[1]] + "` lists those that there are"
	}
	return escape(msg)
}

// missing is how the server names what there is not.
var missing = regexp.MustCompile(`(?:^|: )(?:there is no )?([a-z]+) "[^"]*": not found$`)

var lists = map[string]string{
	"sandbox": "warren ls", "workspace": "warren workspace ls", "snapshot": "warren snapshot ls", "template": "warren template ls", "secret": "warren secret ls",
	"token": "warren token ls", "image": "warren image ls", "repository": "warren repo ls", "policy": "warren policy ls",
}

// escape makes a name, label or message from elsewhere harmless on a terminal and in a table: control characters and
// those that turn the direction of text show as \x1b or \u202e, and invalid UTF-8 as \xff.
func escape(s string) string {
	clean := true
	for _, r := range s {
		if r == utf8.RuneError || !printable(r) {
			clean = false
			break
		}
	}
	if clean {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case printable(r):
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r == '\r':
			b.WriteString(`\r`)
		case r < 0x80:
			fmt.Fprintf(&b, `\x%02x`, r)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
		i += n
	}
	return b.String()
}

// printable is false for control characters, line separators and invisible characters that change how text reads.
func printable(r rune) bool {
	return r == ' ' || unicode.IsPrint(r)
}

// printJSON prints one value on one line.
func (a *app) printJSON(v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.out, "%s\n", data)
	return err
}

// table prints rows in columns. Cells are escaped.
func (a *app) table(header []string, rows [][]string) error {
	w := tabwriter.NewWriter(a.out, 0, 8, 3, ' ', 0)
	fmt.Fprintln(w, strings.Join(header, "\t"))
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, cell := range row {
			if cell == "" {
				cell = "-"
			}
			cells[i] = escape(cell)
		}
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	return w.Flush()
}

// list prints what a server has: JSON, a line each; with -q the names; or a table. row returns a thing's name, and its row.
func list[T any](a *app, cmd *cobra.Command, header []string, get func(*warren.Client) iter.Seq2[T, error], row func(T) (name string, cells []string)) error {
	c, err := a.client(cmd.Context())
	if err != nil {
		return err
	}
	defer c.Close()
	var rows [][]string
	for v, err := range get(c) {
		if err != nil {
			return err
		}
		name, cells := row(v)
		switch {
		case a.json:
			err = a.printJSON(v)
		case a.quiet:
			_, err = fmt.Fprintln(a.out, escape(name))
		default:
			rows = append(rows, cells)
		}
		if err != nil {
			return err
		}
	}
	if a.json || a.quiet {
		return nil
	}
	return a.table(header, rows)
}

// each is what a call returned, for list.
func each[T any](all []T, err error) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		if err != nil {
			var none T
			yield(none, err)
			return
		}
		for _, v := range all {
			if !yield(v, nil) {
				return
			}
		}
	}
}

// fields prints names and values one below the other, leaving out what is empty. Values are escaped.
func (a *app) fields(pairs ...string) error {
	w := tabwriter.NewWriter(a.out, 0, 8, 2, ' ', 0)
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			fmt.Fprintf(w, "%s\t%s\n", pairs[i], escape(pairs[i+1]))
		}
	}
	return w.Flush()
}

// ago writes how long something is past: "5s", "3m", "2h", "9d".
func ago(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	d := max(time.Since(t), 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// bytesOf writes a number of bytes for people, nothing for 0.
func bytesOf(n int64) string {
	if n == 0 {
		return ""
	}
	return config.Size(n).String()
}

// exactly is like cobra.ExactArgs, and without names like cobra.NoArgs, with a message that names what is wanted.
func exactly(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return fmt.Errorf("missing %s", names[len(args)])
		case len(args) > len(names):
			return fmt.Errorf("unexpected argument %q", args[len(names)])
		}
		return nil
	}
}

// atMostOne wants one argument or none.
func atMostOne(cmd *cobra.Command, args []string) error {
	return exactly()(cmd, args[min(len(args), 1):])
}

// atLeastOne wants one argument or more.
func atLeastOne(name string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) == 0 {
			return fmt.Errorf("missing %s", name)
		}
		return nil
	}
}

// progressLine is one line on a terminal that is written over and over.
type progressLine struct {
	out     io.Writer
	enabled func() bool
	mu      sync.Mutex
	shown   bool
	last    time.Time
}

// show replaces the line, at most ten times a second except for a new step.
func (p *progressLine) show(step, message string, done, total int64) {
	if !p.enabled() {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shown && time.Since(p.last) < 100*time.Millisecond {
		return
	}
	p.last = time.Now()
	line := step
	switch {
	case total > 0:
		line += fmt.Sprintf(" %d%%", 100*done/total)
	case done > 0:
		line += fmt.Sprintf(" %d", done)
	}
	if message != "" {
		line += ": " + message
	}
	line = escape(line)
	if f, ok := p.out.(*os.File); ok {
		if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 4 {
			if r := []rune(line); len(r) > width-1 {
				line = string(r[:width-2]) + "…"
			}
		}
	}
	fmt.Fprintf(p.out, "\r\x1b[K%s", line)
	p.shown = true
}

// clear removes the line.
func (p *progressLine) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shown {
		fmt.Fprint(p.out, "\r\x1b[K")
		p.shown = false
	}
}

// sortedKeys returns the keys of a map in order.
func sortedKeys[V any](m map[string]V) []string {
	return slices.Sorted(maps.Keys(m))
}

// escapeLine is escape for a line of a file, in which tabs are usual.
func escapeLine(s string) string {
	parts := strings.Split(s, "\t")
	for i, p := range parts {
		parts[i] = escape(p)
	}
	return strings.Join(parts, "\t")
}
