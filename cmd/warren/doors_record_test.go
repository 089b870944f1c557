//go:build linux

package main

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/audit"
	"github.com/warren-sandbox/warren/internal/secret/secrettest"
)

// randomWord is one that stands nowhere else.
func randomWord() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// scanMemory looks through the memory that sandboxes were paused with.
func (d *doors) scanMemory(t *testing.T, dir string) {
	planted := ""
	for _, u := range []*tenant{d.alice, d.bob} {
		sb, err := d.op.Sandbox(t.Context(), string(u.box.ID))
		if err != nil {
			t.Fatal(err)
		}
		if sb.State != warren.StatePaused {
			t.Fatalf("%s is %s", u.name, sb.State)
		}
		if u == d.alice {
			planted = sb.Spec.Env[plantedVariable]
		}
	}
	scan := secrettest.New(t, map[string]string{"alice": d.alice.token, "bob": d.bob.token})
	found, files, err := scan.Paths(filepath.Join(d.h.dir, dir))
	if err != nil || len(found) > 0 || files == 0 {
		t.Errorf("in %d files tokens stand in %v, %v", files, found, err)
	}
	found, _, err = secrettest.New(t, map[string]string{"planted": planted}).Paths(filepath.Join(d.h.dir, dir))
	if err != nil || len(found) == 0 {
		t.Errorf("a word that is in the memory is not found: %v", err)
	}
}

// records are the two chained ones, below the data directory.
var records = []string{"calls", filepath.Join("gateway", "events")}

// copyRecord copies a record that is written on, its anchor first: what comes after is no harm.
func copyRecord(t *testing.T, from string) (dir string, lines []string, file string) {
	t.Helper()
	dir = t.TempDir()
	names, err := filepath.Glob(filepath.Join(from, "*.jsonl"))
	if err != nil || len(names) == 0 {
		t.Fatal(from, names, err)
	}
	slices.Sort(names)
	for i, name := range append([]string{filepath.Join(from, "head")}, names...) {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(name)), b, 0o600); err != nil {
			t.Fatal(err)
		}
		if i == len(names) {
			file = filepath.Join(dir, filepath.Base(name))
			for s := bufio.NewScanner(bytes.NewReader(b[:bytes.LastIndexByte(b, '\n')+1])); s.Scan(); {
				lines = append(lines, s.Text())
			}
		}
	}
	return dir, lines, file
}

// tampering changes records offline (G10): the first bad one is named.
func tampering(p *probe) {
	p.fetch("/recorded")
	for _, record := range records {
		from := filepath.Join(p.h.dir, record)
		// A few more, so that there is a middle.
		for range 8 {
			p.call(p.alice.token, "SystemService/GetVersion", "{}")
		}
		p.until("the anchor of "+record, func() bool {
			dir, lines, _ := copyRecord(p.t, from)
			r, err := audit.Verify(dir)
			if err == nil && len(lines) > 8 && r.Anchor.Seq > seqOf(lines[1]) {
				return true
			}
			p.fetch("/more")
			return false
		})
		for _, c := range []struct {
			name string
			kind audit.Kind
			do   func(lines []string, k int) ([]string, int)
		}{
			{"edited", audit.Edited, func(l []string, k int) ([]string, int) {
				l[k] = strings.Replace(l[k], `"action":"`, `"action":"x`, 1)
				return l, k
			}},
			{"deleted", audit.Removed, func(l []string, k int) ([]string, int) { return slices.Delete(l, k, k+1), k }},
			{"reordered", audit.Reordered, func(l []string, k int) ([]string, int) { l[k], l[k+1] = l[k+1], l[k]; return l, k }},
			{"inserted", audit.Inserted, func(l []string, k int) ([]string, int) { return slices.Insert(l, k+1, l[k]), k }},
			{"truncated", audit.Truncated, func(l []string, k int) ([]string, int) { return l[:2], 2 }},
		} {
			dir, lines, file := copyRecord(p.t, from)
			_, err := audit.Verify(dir)
			p.right(err == nil, "%s as it is: %v", record, err)
			k := len(lines) / 2
			first := seqOf(lines[1])
			lines, at := c.do(lines, k)
			p.check(os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600))
			_, err = audit.Verify(dir)
			var bad *audit.Bad
			p.refused(errors.As(err, &bad) && bad.Kind == c.kind && bad.Seq == first+int64(at)-1, "%s with record %d %s: %v", record, first+int64(at)-1, c.name, err)
		}
		// A whole record of before is sound in itself: what was kept elsewhere shows that it ends too early.
		dir, _, _ := copyRecord(p.t, from)
		p.call(p.alice.token, "SystemService/GetVersion", "{}")
		if record != "calls" {
			p.fetch("/later")
		}
		var head *warren.FlowReport
		p.until("more of "+record, func() bool {
			old, err := audit.Verify(dir)
			p.check(err)
			verify := p.op.VerifyCalls
			if record != "calls" {
				verify = p.op.VerifyFlows
			}
			head, err = verify(p.t.Context())
			p.check(err)
			return head.Last > old.Last.Seq
		})
		_, err := audit.Verify(dir, audit.Head{Seq: head.Last, Hash: head.Hash})
		var bad *audit.Bad
		p.refused(errors.As(err, &bad) && bad.Kind == audit.Truncated, "%s of before: %v", record, err)
	}
}

// seqOf is the number of a record.
func seqOf(line string) int64 {
	_, rest, _ := strings.Cut(line, `"seq":`)
	n, _ := strconv.ParseInt(rest[:strings.IndexAny(rest+",", ",}")], 10, 64)
	return n
}

// chainsWhole verifies both records as they are after what was done to the daemon and the gateway (G11), and that each change that was said yes to before a
// kill is done and on record.
func chainsWhole(p *probe) {
	ctx := p.t.Context()
	p.fetch("/chain")
	calls, err := p.op.VerifyCalls(ctx)
	p.check(err)
	flows, err := p.op.VerifyFlows(ctx)
	p.check(err)
	p.refused(calls.Problem == "", "calls: %s", calls.Problem)
	p.refused(flows.Problem == "", "flows: %s", flows.Problem)
	p.right(calls.Records > 50 && flows.Records > 2, "%d calls and %d flows", calls.Records, flows.Records)
	if p.pledged == "" || p.pledges == 0 {
		return
	}
	sb, err := p.op.Sandbox(ctx, p.pledged)
	p.check(err)
	last, _ := strconv.Atoi(sb.Spec.Labels["pledge"])
	p.refused(last >= p.pledges, "%d changes were said yes to, and number %d is there", p.pledges, last)
	events := 0
	for e, err := range p.op.Events(ctx, warren.EventOptions{Sandbox: p.pledged, NoFollow: true}) {
		p.check(err)
		if e.Action == "sandbox.update" && e.Seq > p.pledgedFrom && e.Seq <= p.pledgedTo {
			events++
		}
	}
	p.refused(events >= p.pledges, "%d changes were said yes to, and %d are on record", p.pledges, events)
}

// masking sends secrets in all places of requests, to the API and from a sandbox to a server that it may reach (G12): no record has them.
func masking(p *probe) {
	ctx := p.t.Context()
	word := func(prefix string) string { return prefix + randomWord() + randomWord()[:8] }
	secrets := map[string]string{
		"path": word("ghp_"), "query": word("q"), "header": word("h"), "bearer": word("b"), "body": word("sk-"), "args": word("a"), "url": word("u"), "id": word("warren_"), "name": word("glpat-"), "alice": p.alice.token, "bob": p.bob.token,
	}
	p.lab.take()
	out, err := p.alice.box.Command("curl", "-sS", "-m", "20", "http://user:"+secrets["url"]+"@web.lab:"+p.web+"/p/"+secrets["path"]+"?access_token="+secrets["query"], "-H", "X-Api-Key: "+secrets["header"], "-H", "Authorization: Bearer "+secrets["bearer"],
		"-d", secrets["body"], "-H", "X-Args: --password "+secrets["args"]).CombinedOutput(ctx)
	p.check(err)
	seen := strings.Join(p.lab.take(), "\n")
	for _, name := range []string{"path", "query", "header", "bearer", "args"} {
		p.right(strings.Contains(seen, secrets[name]), "the server outside has not been sent the secret in the %s: %s %s", name, out, seen)
	}
	cmd := p.alice.box.Command("echo", "--password", secrets["args"], "--token="+secrets["query"])
	_, err = cmd.Output(ctx)
	p.check(err)
	box := "/v1/sandboxes/" + string(p.alice.box.ID) + "/ports/8000/"
	p.api("POST", box+secrets["path"]+"?token="+secrets["query"], secrets["body"], bearer(p.alice.token), "X-Api-Key: "+secrets["header"])
	p.api("GET", "/"+secrets["path"]+"?token="+secrets["query"], "", bearer(p.alice.token))
	p.api("GET", "/v1/sandboxes/x/ports/1/", "", bearer(secrets["id"]))
	for _, ref := range []string{secrets["id"], secrets["path"], secrets["name"], p.alice.token, "https://user:" + secrets["url"] + "@h/?token=" + secrets["query"]} {
		p.call(p.alice.token, "SandboxService/GetSandbox", fmt.Sprintf(`{"id":%q}`, ref))
		p.call(p.alice.token, "WorkspaceService/GetWorkspace", fmt.Sprintf(`{"id":%q}`, ref))
		p.call(p.alice.token, "ImageService/GetImage", fmt.Sprintf(`{"name":%q}`, ref))
	}
	body := fmt.Sprintf(`{"url":"http://user:%s@127.0.0.1:1/r?token=%s"}`, secrets["url"], secrets["query"])
	p.api("POST", "/warren.v1.RepoService/FetchRepo", string(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))))+body, bearer(p.alice.token), "Content-Type: application/connect+json")
	p.shown("GET", strings.SplitN(p.alice.link, "?", 2)[0]+secrets["path"]+"?token="+secrets["query"], "", "X-Warren-Token: "+p.alice.token)
	_, link := parts(p.alice.link)
	secrets["link"] = link

	p.fetch("/after")
	scan := secrettest.New(p.t, secrets)
	var text strings.Builder
	for _, args := range [][]string{{"events", "--json"}, {"events", "--calls", "--json"}, {"events", string(p.alice.box.ID), "--flows", "--json"}} {
		io.WriteString(&text, p.h.warren(args...)+"\n")
	}
	found := scan.Text("events", text.String())
	p.refused(len(found) == 0, "%v", found)
	files, n, err := scan.Paths(filepath.Join(p.h.dir, "calls"), filepath.Join(p.h.dir, "gateway", "events"), filepath.Join(p.h.dir, "logs"), filepath.Join(p.h.dir, "serve.out"), filepath.Join(p.h.dir, "run", "gateway", "gateway.log"))
	p.check(err)
	p.refused(len(files) == 0 && n > 3, "in %d files: %v", n, files)
	p.right(strings.Contains(text.String(), "ghp_***") && strings.Contains(text.String(), "web.lab"), "nothing of it is on record: %s", text.String()[max(0, text.Len()-2000):])
}
