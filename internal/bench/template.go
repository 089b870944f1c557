package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/warren-sandbox/warren"
)

// targetTemplate is the design's, on 2 cores without KVM: create from a template with a running dev server to its first reply.
const targetTemplate = 150 * time.Millisecond

// devServers are what a template runs: the first whose program the image has.
var devServers = []struct {
	program, title string
	command        []string
}{
	{"node", "Node", []string{"node", "-e", `
require('http').createServer((q, r) => r.end('held by node')).listen(8080, '127.0.0.1');`}},
	{"python3", "Python", []string{"python3", "-c", `
import http.server
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'held by python')
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(('127.0.0.1', 8080), H).serve_forever()`}},
}

// templates measures create from a template in which a server runs, until that server replies.
func (s *session) templates(ctx context.Context, w io.Writer) (err error) {
	const benchmark = "template"
	fmt.Fprintf(w, "\nCreate from a template with a running dev server (n=%d)\n", s.rounds())
	service, title, err := s.devServer(ctx)
	if err != nil {
		return err
	}
	if title == "" {
		const why = "the image has neither node nor python3"
		fmt.Fprintf(w, "  not measured: %s\n", why)
		s.record(Row{Benchmark: benchmark, Name: "dev server", Absent: why})
		return nil
	}
	name := "bench-" + strings.ToLower(rand.Text()[:10])
	built, err := timed(func() error {
		_, err := s.client.BuildTemplate(ctx, warren.TemplateSpec{Name: name, Image: s.Image, Services: []warren.Service{service}}, warren.BuildOptions{})
		return err
	})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		err = errors.Join(err, s.client.DeleteTemplate(ctx, name, warren.DeleteOptions{}))
	}()
	// By turns: one that stands by is taken over, and while there is none the next is restored.
	var created, replied, restored, restoredReply sample
	for range s.rounds() {
		if err := s.standsBy(ctx, name); err != nil {
			return err
		}
		c, r, err := s.fromTemplate(ctx, name)
		if err != nil {
			return err
		}
		created, replied = append(created, c), append(replied, r)
		for {
			t, err := s.client.Template(ctx, name)
			if err != nil {
				return err
			}
			c, r, err := s.fromTemplate(ctx, name)
			if err != nil {
				return err
			}
			if t.Standby == 0 { // else that was one that stood by
				restored, restoredReply = append(restored, c), append(restoredReply, r)
				break
			}
		}
	}
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "\tmedian\tp95\ttarget\t")
	const toReply = "create to first HTTP reply"
	for _, row := range []struct {
		what, target string
		sample
	}{{"create", "", created}, {toReply, ms(targetTemplate), replied}, {"create, none stands by", "", restored}, {toReply + ", none stands by", ms(targetTemplate), restoredReply}} {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t\n", row.what, ms(row.median()), ms(row.at(0.95)), row.target)
		s.record(Row{Benchmark: benchmark, Name: title + " server: " + row.what, Values: row.values()})
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "  the server is %s's; the build of the template took %s\n", title, ms(built))
	s.record(Row{Benchmark: benchmark, Name: title + " server: build", Values: map[string]float64{"ms": inMs(built)}})
	s.verdict(w, benchmark, title+" server: "+toReply+", median", replied.median() <= targetTemplate, ms(targetTemplate))
	s.verdict(w, benchmark, title+" server: "+toReply+", none stands by, median", restoredReply.median() <= targetTemplate, ms(targetTemplate))
	return nil
}

// devServer is what the image can run of devServers; an empty title says that it is nothing.
func (s *session) devServer(ctx context.Context) (service warren.Service, title string, err error) {
	sb, err := s.sandbox(ctx)
	if err != nil {
		return service, "", err
	}
	defer func() { err = errors.Join(err, remove(ctx, sb)) }()
	for _, d := range devServers {
		err := sb.Command("/bin/sh", "-c", "command -v "+d.program).Run(ctx)
		if err == nil {
			check := &warren.ServiceCheck{HTTPPath: "/", Interval: 50 * time.Millisecond}
			return warren.Service{Name: "web", Command: d.command, Port: loadPort, Check: check}, d.title, nil
		}
		if exit := (*warren.ExitError)(nil); !errors.As(err, &exit) {
			return service, "", err
		}
	}
	return service, "", nil
}

// standbyWait is how long a template may take to have a sandbox that stands by.
const standbyWait = 30 * time.Second

// standsBy waits until a sandbox of a template stands by.
func (s *session) standsBy(ctx context.Context, name string) error {
	for end := time.Now().Add(standbyWait); ; time.Sleep(20 * time.Millisecond) {
		t, err := s.client.Template(ctx, name)
		if err != nil || t.Standby > 0 {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("no sandbox of template %s stands by after %s: is WARREN_STANDBY 0, or memory short?", name, standbyWait)
		}
	}
}

// fromTemplate makes a sandbox of a template, and returns when it was there and when its server had replied.
func (s *session) fromTemplate(ctx context.Context, name string) (created, replied time.Duration, err error) {
	begun := time.Now()
	sb, err := s.client.Create(ctx, warren.Spec{Template: name})
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, remove(ctx, sb)) }()
	created = time.Since(begun)
	if err := firstReply(ctx, sb); err != nil {
		return 0, 0, fmt.Errorf("the first reply: %w", err)
	}
	return created, time.Since(begun), nil
}
