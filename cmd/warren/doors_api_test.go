//go:build linux

package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/testenv"
	"github.com/warren-sandbox/warren/proto/e2b/filesystem"
	"github.com/warren-sandbox/warren/proto/e2b/process"
	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// procedures lists the calls of a contract.
func procedures(f protoreflect.FileDescriptor) (all []protoreflect.MethodDescriptor) {
	for i := range f.Services().Len() {
		methods := f.Services().Get(i).Methods()
		for j := range methods.Len() {
			all = append(all, methods.Get(j))
		}
	}
	return all
}

func pathOf(m protoreflect.MethodDescriptor) string {
	return "/" + string(m.Parent().FullName()) + "/" + string(m.Name())
}

// guestProcedures are the calls of what runs in a sandbox.
func guestProcedures() []protoreflect.MethodDescriptor {
	return slices.Concat(procedures(process.File_e2b_process_process_proto), procedures(filesystem.File_e2b_filesystem_filesystem_proto), procedures(guestv1.File_warren_guest_v1_guest_proto))
}

// rpc makes a call with JSON, as one answer or as a stream.
func (p *probe) rpc(token string, m protoreflect.MethodDescriptor, path, body string, header ...string) answer {
	header = append(header, bearer(token))
	if !m.IsStreamingClient() && !m.IsStreamingServer() {
		return p.api("POST", path, body, append(header, "Content-Type: application/json", "Connect-Protocol-Version: 1")...)
	}
	return p.api("POST", path, string(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))))+body, append(header, "Content-Type: application/connect+json", "Connect-Protocol-Version: 1")...)
}

// kind returns the kind of error that a call ended with, also one of a stream, or "".
func (a answer) kind() string {
	if k := a.header.Get("Warren-Error"); k != "" {
		return k
	}
	for _, code := range []string{"not_found", "permission_denied", "unauthenticated", "invalid_argument", "failed_precondition", "unavailable", "already_exists", "unimplemented", "resource_exhausted", "internal", "unknown"} {
		if strings.Contains(a.body, `"code":"`+code+`"`) {
			return code
		}
	}
	return ""
}

// everyRoute asks for all that there is without a token, and for all that looks like it (E02). The calls are those of the contract; the rest of the
// server's table is kept complete by TestRoutesAreKnown of internal/server.
func everyRoute(p *probe) {
	box := "/v1/sandboxes/" + string(p.alice.box.ID)
	paths := []string{"/metrics", box + "/ports/8000/", box + "/ports/49983/health", box + "/ports/49983/files?path=/etc/passwd", box + "/dial/8000"}
	for _, m := range procedures(warrenv1.File_warren_v1_warren_proto) {
		paths = append(paths, pathOf(m))
	}
	for _, m := range guestProcedures() {
		paths = append(paths, box+"/ports/49983"+pathOf(m))
	}
	for i, path := range paths {
		for _, method := range []string{"GET", "HEAD", "OPTIONS", "POST", "PUT"} {
			a := p.api(method, path, "{}", "Content-Type: application/json")
			p.refused(a.status == 401, "%s %s without a token: %v", method, path, a)
		}
		if !testenv.Soak() && (i+p.state)%3 != 0 {
			continue // the spellings of the others are those of other states
		}
		last := strings.LastIndexByte(path, '/')
		for _, odd := range []string{
			"/" + path, "/." + path, "/%2e" + path, "/x/.." + path, "/healthz/.." + path, "/healthz/%2e%2e" + path, "/healthz;" + path, path + "/", path + ".", path + ";x=1", path + "%00", path + "%2f..", path + "?x",
			strings.ToUpper(path), path[:last] + "%2f" + path[last+1:], path[:last] + "\\" + path[last+1:], fmt.Sprintf("/%%%02x", path[1]) + path[2:], path[:last] + "//" + path[last+1:],
		} {
			method := []string{"GET", "POST", "HEAD", "OPTIONS"}[i%4]
			a := p.api(method, odd, "", "Content-Type: application/json")
			// What does not begin with a slash is no request.
			p.refused(a.status == 401 || a.status == 400 && odd[0] != '/', "%s %s without a token: %v", method, odd, a)
		}
		for _, h := range [][]string{
			{"Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="}, {"Connection: Upgrade", "Upgrade: warren-tcp"},
			{"Authorization: Basic " + "eDp4"}, {"Authorization: Bearer"}, {bearer(p.alice.token), bearer(p.alice.token)}, {"X-Api-Key: " + p.alice.token}, {"X-Warren-Token: " + p.alice.token}, {"Cookie: token=" + p.alice.token},
		} {
			a := p.api("GET", path, "", h...)
			p.refused(a.status == 401, "GET %s with %q: %v", path, h, a)
		}
	}
	a := p.api("GET", "/metrics?token="+p.alice.token+"&access_token="+p.alice.token, "")
	p.refused(a.status == 401, "with a token in the query: %v", a)
	for _, path := range paths {
		a := p.api("HEAD", path, "", bearer(p.alice.token))
		p.right(a.err == nil && a.status != 401, "HEAD %s with a token: %v", path, a)
	}
	a = p.api("OPTIONS", "*", "")
	p.refused(a.status == 401, "OPTIONS * without a token: %v", a)
	if len(paths) < 80 {
		p.t.Errorf("only %d paths: there are more calls", len(paths))
	}
}

// What the text of a field of a request names. Each has to be here, so that a new one is not forgotten.
var namedBy = map[string]string{
	"SandboxSpec.name": "", "SandboxSpec.image": "", "RepoSource.url": "", "RepoSource.ref": "", "SandboxSpec.workspace_id": "workspace", "SandboxSpec.env": "", "Mount.source": "", "Mount.target": "", "SandboxSpec.driver": "",
	"SandboxSpec.labels": "", "SandboxSpec.driver_options": "", "SandboxSpec.policy": "", "SandboxSpec.private_network": "", "SandboxSpec.snapshot": "snapshot", "SandboxSpec.template": "template",
	"CreateSandboxRequest.idempotency_key": "", "GetSandboxRequest.id": "sandbox", "ListSandboxesRequest.labels": "", "ListSandboxesRequest.page_token": "", "UpdateSandboxRequest.id": "sandbox", "UpdateSandboxRequest.name": "",
	"UpdateSandboxRequest.set_labels": "", "UpdateSandboxRequest.remove_labels": "", "UpdateSandboxRequest.private_network": "", "DeleteSandboxRequest.id": "sandbox", "DeleteSandboxRequest.idempotency_key": "",
	"RestartSandboxRequest.id": "sandbox", "PauseSandboxRequest.id": "sandbox", "ResumeSandboxRequest.id": "sandbox", "ForkSandboxRequest.id": "sandbox", "ForkSandboxRequest.name": "", "ForkSandboxRequest.env": "",
	"ForkSandboxRequest.labels": "", "RollbackSandboxRequest.id": "sandbox", "RollbackSandboxRequest.snapshot": "snapshot", "GetStatsRequest.id": "sandbox", "WatchEventsRequest.id": "events", "ListFlowsRequest.id": "sandbox",
	"PreviewPortRequest.id": "sandbox", "CreateSnapshotRequest.sandbox_id": "sandbox", "CreateSnapshotRequest.name": "", "GetSnapshotRequest.id": "snapshot", "ListSnapshotsRequest.sandbox_id": "events",
	"ListSnapshotsRequest.page_token": "", "DeleteSnapshotRequest.id": "snapshot", "PutTemplateRequest.name": "", "PutTemplateRequest.snapshot": "snapshot", "PutTemplateRequest.recipe": "", "GetTemplateRequest.id": "template",
	"DeleteTemplateRequest.id": "template", "CreateWorkspaceRequest.name": "", "CreateWorkspaceRequest.idempotency_key": "", "GetWorkspaceRequest.id": "workspace", "ListWorkspacesRequest.page_token": "",
	"DeleteWorkspaceRequest.id": "workspace", "CopyWorkspaceRequest.id": "workspace", "CopyWorkspaceRequest.name": "", "MarkWorkspaceRequest.id": "workspace", "DiffRequest.id": "workspace", "CommitRequest.id": "workspace", "CommitRequest.message": "",
	"CommitRequest.branch": "", "CommitRequest.author": "", "PushRequest.id": "workspace", "PushRequest.branch": "", "PushRequest.remote_branch": "", "FormatPatchRequest.id": "workspace", "FetchRepoRequest.url": "",
	"DeleteRepoRequest.id": "operator", "PullImageRequest.ref": "operator", "PullImageRequest.name": "", "PullImageRequest.platform": "", "ImportImageRequest.name": "operator", "ImportImageRequest.chunk": "",
	"BootstrapImageRequest.name": "operator", "BootstrapImageRequest.distribution": "", "BootstrapImageRequest.release": "", "BootstrapImageRequest.packages": "", "GetImageRequest.name": "", "DeleteImageRequest.name": "operator",
	"GetPolicyRequest.name": "", "CheckPolicyRequest.name": "", "CheckPolicyRequest.source": "", "ExplainPolicyRequest.sandbox": "sandbox", "ExplainPolicyRequest.policy": "", "ExplainPolicyRequest.source": "",
	"ExplainPolicyRequest.target": "", "SetSecretRequest.name": "operator", "SetSecretRequest.value": "", "DeleteSecretRequest.name": "operator", "CreateTokenRequest.user": "operator", "CreateTokenRequest.description": "",
	"DeleteTokenRequest.id": "token", "RecordHead.hash": "",
}

// besides is what a request needs besides the id that is tried.
var besides = map[string]string{
	"UpdateSandbox": `"set_labels":{"pwned":"yes"}`, "DeleteSandbox": `"delete_workspace":true`, "PreviewPort": `"port":8000,"public":true`, "WatchEvents": `"no_follow":true`, "PutTemplate": `"name":"stolen","recipe":"{}"`,
	"ExplainPolicy": `"target":"web.lab"`, "SetSecret": `"value":"c3RvbGVuLXZhbHVl"`, "Commit": `"message":"m"`, "CopyWorkspace": `"name":"stolen"`, "ForkSandbox": `"name":"stolen"`, "CreateSnapshot": `"name":"stolen"`, "RollbackSandbox": `"snapshot":"x"`,
}

// foreign is one id of one request.
type foreign struct {
	m           protoreflect.MethodDescriptor
	field, kind string
	// body makes the request of what is named.
	body func(ref string) string
}

// foreigns are all ids of all requests.
func foreigns(t *testing.T, own string) (all []foreign) {
	t.Helper()
	seen := map[string]bool{}
	for _, m := range procedures(warrenv1.File_warren_v1_warren_proto) {
		var walk func(d protoreflect.MessageDescriptor, around string)
		walk = func(d protoreflect.MessageDescriptor, around string) {
			for i := range d.Fields().Len() {
				f := d.Fields().Get(i)
				if f.Kind() == protoreflect.MessageKind && !f.IsMap() {
					if strings.HasPrefix(string(f.Message().FullName()), "warren.") {
						walk(f.Message(), fmt.Sprintf(around, `"`+string(f.Name())+`":{%s}`))
					}
					continue
				}
				if f.Kind() != protoreflect.StringKind && f.Kind() != protoreflect.BytesKind && !f.IsMap() {
					continue
				}
				name := string(d.Name()) + "." + string(f.Name())
				seen[name] = true
				kind, known := namedBy[name]
				if !known {
					t.Errorf("%s is a new text of %s: say in namedBy whether it names something that is a user's", name, m.FullName())
				}
				if kind == "" {
					continue
				}
				more := ""
				if name == "RollbackSandboxRequest.snapshot" {
					more = fmt.Sprintf(`,"id":%q`, own)
				} else if b := besides[string(m.Name())]; b != "" {
					more = "," + b
				}
				all = append(all, foreign{m, name, kind, func(ref string) string {
					return fmt.Sprintf(around, fmt.Sprintf("%q:%q%s", f.Name(), ref, more))
				}})
			}
		}
		walk(m.Input(), "{%s}")
	}
	for name := range namedBy {
		if !seen[name] {
			t.Errorf("namedBy has %s, which no request has", name)
		}
	}
	return all
}

// otherUsers asks with one user's token for what is another's, by each id of each call and into the sandbox itself (E03): the answer is that of something
// which never was, to the byte, nothing changes, and it is on record.
func otherUsers(p *probe) {
	a, b := p.alice, p.bob
	box, err := a.c.Sandbox(p.t.Context(), string(a.box.ID))
	p.check(err)
	things := map[string][]string{
		"sandbox": {string(box.ID), box.Spec.Name}, "workspace": {string(box.Workspace), string(box.ID), box.Spec.Name}, "snapshot": {a.snapshot, "alices-snapshot"}, "template": {a.template}, "token": {a.tokenID},
		"events": {string(box.ID)}, "operator": {"anything"},
	}
	look := func() string {
		return strings.Join([]string{
			p.call(a.token, "SandboxService/GetSandbox", fmt.Sprintf(`{"id":%q}`, box.ID)).steady("lastActive"), p.call(a.token, "WorkspaceService/GetWorkspace", fmt.Sprintf(`{"id":%q}`, box.Workspace)).steady(),
			p.call(a.token, "SnapshotService/ListSnapshots", `{}`).steady(), p.call(a.token, "TemplateService/ListTemplates", `{}`).steady(), p.call(a.token, "SystemService/ListTokens", `{}`).steady("lastUsed"),
			p.call(a.token, "SandboxService/ListSandboxes", `{}`).steady("lastActive"), p.call(a.token, "WorkspaceService/ListWorkspaces", `{}`).steady(),
		}, "\n")
	}
	before, record := look(), p.lastCall()
	list := foreigns(p.t, string(b.box.ID))
	if len(list) < 40 {
		p.t.Errorf("only %d ids in all calls", len(list))
	}
	wanted := map[string]bool{}
	for _, f := range list {
		for _, ref := range things[f.kind] {
			never := strings.Repeat("n", len(ref))
			if len(ref) == 20 {
				never = ref[:1] + strings.Repeat("n", 19)
			}
			path := pathOf(f.m)
			got, nothing := p.rpc(b.token, f.m, path, f.body(ref)), p.rpc(b.token, f.m, path, f.body(never))
			what := fmt.Sprintf("%s with %s of %s, %s", f.m.Name(), f.field, f.kind, ref)
			p.refused(strings.ReplaceAll(got.String(), ref, "REF") == strings.ReplaceAll(nothing.String(), never, "REF"), "%s answers\n%v\nand for one that never was\n%v", what, got, nothing)
			switch f.kind {
			case "events":
				p.refused(got.status == 200 && !strings.Contains(got.body, "alice") && !strings.Contains(got.body, ref), "%s: %v", what, got)
			case "operator":
				p.refused(got.kind() == "denied" || got.kind() == "permission_denied", "%s: %v", what, got)
			default:
				p.refused(got.kind() == "not_found", "%s: %v", what, got)
				wanted[path+" "+ref] = true
			}
		}
	}
	// Into the sandbox.
	into := []string{"/ports/8000/", "/ports/49983/health", "/ports/49983/files?path=/workspace/server.py", "/ports/49983/envs", "/dial/8000"}
	for _, m := range guestProcedures() {
		into = append(into, "/ports/49983"+pathOf(m))
	}
	for _, ref := range things["sandbox"] {
		never := strings.Repeat("n", len(ref))
		for _, path := range into {
			for _, method := range []string{"GET", "POST"} {
				got := p.api(method, "/v1/sandboxes/"+ref+path, "", bearer(b.token), "Content-Type: application/json")
				nothing := p.api(method, "/v1/sandboxes/"+never+path, "", bearer(b.token), "Content-Type: application/json")
				p.refused(got.status == 404 && strings.ReplaceAll(got.String(), ref, "REF") == strings.ReplaceAll(nothing.String(), never, "REF"), "%s %s of another's sandbox: %v\nand of one that never was: %v", method, path, got, nothing)
			}
		}
		wanted["port "+ref] = true
	}
	if after := look(); after != before {
		p.refused(false, "what is the other user's has changed from\n%s\nto\n%s", before, after)
	}
	// The same ids are good for whom they belong to.
	for _, f := range list {
		switch f.m.Name() {
		case "GetSandbox", "GetStats", "GetWorkspace", "GetSnapshot", "GetTemplate", "ListFlows", "WatchEvents", "ListSnapshots", "Diff", "ExplainPolicy":
			got := p.rpc(a.token, f.m, pathOf(f.m), f.body(things[f.kind][0]))
			p.right(got.status == 200 && got.kind() == "", "%s by its owner: %v", f.m.Name(), got)
		}
	}
	for _, path := range into[:4] {
		got := p.api("GET", "/v1/sandboxes/"+string(box.ID)+path, "", bearer(a.token))
		p.right(got.status < 400, "%s by its owner: %v", path, got)
	}
	// On record: who, what, and that it was not there.
	missing := ""
	p.until("the record of calls", func() bool {
		have := map[string]bool{}
		for e, err := range p.op.Calls(p.t.Context(), record) {
			p.check(err)
			if e.Actor == b.name && e.Fields["result"] == "not_found" {
				have[e.Fields["call"]+" "+e.Fields["target"]] = true
			}
		}
		missing = ""
		for w := range wanted {
			if path, ref, _ := strings.Cut(w, " "); !have[w] && !have[path+" "+ref] {
				missing += "\n" + w
			}
		}
		return missing == "" || time.Now().Nanosecond()%7 == 0 && len(have) > len(wanted)/2
	})
	p.refused(missing == "", "not on record, with result not_found, are%s", missing)
}

// lastCall is the number of the last call on record.
func (p *probe) lastCall() (last int64) {
	r, err := p.op.VerifyCalls(p.t.Context())
	p.check(err)
	return r.Last
}

// steady is an answer without what changes by itself.
func (a answer) steady(fields ...string) string {
	var v any
	if a.status != 200 || json.Unmarshal([]byte(a.body), &v) != nil {
		return a.String()
	}
	var strip func(any)
	strip = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for _, f := range fields {
				delete(v, f)
			}
			for _, x := range v {
				strip(x)
			}
		case []any:
			for _, x := range v {
				strip(x)
			}
		}
	}
	strip(v)
	b, _ := json.Marshal(v)
	return string(b)
}

// label reads a label of Alice's sandbox.
func (p *probe) label(name string) string {
	sb, err := p.op.Sandbox(p.t.Context(), string(p.alice.box.ID))
	p.check(err)
	return sb.Spec.Labels[name]
}

// pwn is a call that changes something.
func (p *probe) pwn(header ...string) answer {
	return p.call(p.alice.token, "SandboxService/UpdateSandbox", fmt.Sprintf(`{"id":%q,"set_labels":{"pwned":"yes"}}`, p.alice.box.ID), header...)
}

// mended takes the label of pwn away, after it was seen.
func (p *probe) mended() {
	p.check(p.op.Ref(string(p.alice.box.ID)).Update(p.t.Context(), warren.Change{RemoveLabels: []string{"pwned"}}))
}

// rebinding asks under names that were pointed here, with a good token (E15).
func rebinding(p *probe) {
	_, port, _ := net.SplitHostPort(p.addr)
	for _, host := range []string{
		"rebind.evil.lab", "rebind.evil.lab:" + port, "localhost.evil.lab:" + port, "127.0.0.1.evil.lab", "localhost.", "localhost.:" + port, "127.0.0.1.", "2130706433:" + port, "0x7f000001", "0177.0.0.1", "127.1:" + port, "0.0.0.0:" + port,
		"[::]:" + port, "169.254.169.254", "10.0.0.1:" + port, "localhost:" + port + ":1", "localhost:80a", "localhost@evil.lab", "evil.lab#localhost", "", "warren", "8000-" + string(p.alice.box.ID) + ".localhost:" + port,
	} {
		a := p.pwn("Host: " + host)
		p.refused(a.status == 421 || a.status == 400, "Host %q: %v", host, a)
		a = p.api("GET", "/v1/sandboxes/"+string(p.alice.box.ID)+"/ports/8000/", "", bearer(p.alice.token), "Host: "+host)
		p.refused((a.status == 421 || a.status == 400) && !strings.Contains(a.body, "inside"), "Host %q into a sandbox: %v", host, a)
	}
	two := p.pwn("Host: "+p.addr, "Host: evil.lab")
	p.refused(two.status == 400, "two hosts: %v", two)
	p.refused(p.label("pwned") == "", "something was changed")
	for _, host := range []string{p.addr, "localhost", "LOCALHOST:" + port, "[::1]:" + port, "127.0.0.1"} {
		p.right(p.pwn("Host: "+host).status == 200 && p.label("pwned") == "yes", "Host %q", host)
		p.mended()
	}
}

// foreignPages asks as browsers do for pages of other sites (E16), of the API and of a preview.
func foreignPages(p *probe) {
	cookie := p.cookie(p.alice, 8000)
	u := strings.SplitN(p.alice.link, "?", 2)[0]
	own := strings.TrimSuffix(u, "/")
	for _, h := range [][]string{
		{"Origin: http://evil.lab"}, {"Origin: null"}, {"Origin: "}, {"Origin: http://" + p.addr}, {"Origin: http://localhost"}, {"Origin: " + own}, {"Origin: http://evil.lab", "Origin: null"}, {"Sec-Fetch-Site: cross-site"}, {"Sec-Fetch-Site: same-site"},
		{"Origin: null", "Sec-Fetch-Site: same-origin"},
	} {
		p.refused(p.pwn(h...).status == 403, "the API with %q: %v", h, p.pwn(h...))
		a := p.api("GET", "/v1/sandboxes/"+string(p.alice.box.ID)+"/dial/8000", "", append([]string{bearer(p.alice.token), "Connection: Upgrade", "Upgrade: warren-tcp"}, h...)...)
		p.refused(a.status == 403, "a raw connection with %q: %v", h, a)
	}
	// Nothing that a browser has lets into the API, and none of its simple bodies is a call.
	for _, kind := range []string{"text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""} {
		body := fmt.Sprintf(`{"id":%q,"set_labels":{"pwned":"yes"}}`, p.alice.box.ID)
		a := p.api("POST", "/warren.v1.SandboxService/UpdateSandbox", body, "Cookie: "+cookie, "Content-Type: "+kind)
		p.refused(a.status == 401, "the API with a cookie and %q: %v", kind, a)
		a = p.api("POST", "/warren.v1.SandboxService/UpdateSandbox", body, bearer(p.alice.token), "Content-Type: "+kind)
		p.refused(a.status == 415, "the API with %q: %v", kind, a)
	}
	p.refused(p.label("pwned") == "", "something was changed")
	p.right(p.pwn().status == 200 && p.label("pwned") == "yes", "without any of it")
	p.mended()

	socket := []string{"Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="}
	sibling := strings.Replace(own, "8000-", "8001-", 1)
	for _, t := range []struct {
		method string
		header []string
	}{
		{"POST", nil}, {"PUT", nil}, {"DELETE", nil}, {"OPTIONS", nil}, {"POST", []string{"Origin: http://evil.lab"}}, {"POST", []string{"Origin: null"}}, {"POST", []string{"Origin: " + sibling}}, {"POST", []string{"Origin: " + own, "Origin: http://evil.lab"}},
		{"POST", []string{"Origin: " + sibling, "Sec-Fetch-Site: same-site", "Content-Type: text/plain"}}, {"POST", []string{"Origin: null", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"}},
		{"GET", []string{"Origin: http://evil.lab"}}, {"GET", []string{"Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors"}}, {"GET", []string{"Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: iframe"}},
		{"GET", append([]string{"Origin: http://evil.lab"}, socket...)}, {"GET", append([]string{"Origin: " + sibling}, socket...)}, {"GET", append([]string{"Origin: null", "Sec-Fetch-Site: cross-site"}, socket...)},
	} {
		a := p.shown(t.method, u, "", append(t.header, "Cookie: "+cookie)...)
		p.refused(a.status == 401 && !strings.Contains(a.body, "inside"), "a preview, %s with %q: %v", t.method, t.header, a)
	}
	for _, t := range []struct {
		method string
		header []string
	}{
		{"GET", nil}, {"POST", []string{"Origin: " + own}}, {"POST", []string{"Origin: null", "Sec-Fetch-Site: same-origin"}}, {"GET", []string{"Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"}},
	} {
		a := p.shown(t.method, u, "", append(t.header, "Cookie: "+cookie)...)
		p.right(a.status == 200 && strings.Contains(a.body, "inside"), "a preview, %s with %q: %v", t.method, t.header, a)
	}
	c, _, a := p.open(p.previews, "GET", "/", "", append([]string{"Host: " + strings.TrimPrefix(own, "http://"), "Origin: " + own, "Cookie: " + cookie}, socket...)...)
	p.right(a.status == 101, "a WebSocket of the preview's own page: %v", a)
	if c != nil {
		c.Close()
	}
}

// preflights asks what browsers ask before they send what is not simple (E17).
func preflights(p *probe) {
	ask := func(origin string) []string {
		return []string{"Origin: " + origin, "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,content-type", "Access-Control-Request-Private-Network: true"}
	}
	own := strings.TrimSuffix(strings.SplitN(p.alice.link, "?", 2)[0], "/")
	allows := func(a answer) bool {
		for name := range a.header {
			if strings.HasPrefix(name, "Access-Control-Allow") {
				return true
			}
		}
		return a.status < 400
	}
	for _, origin := range []string{"http://evil.lab", "null", "http://localhost", "http://" + p.addr, own} {
		for _, path := range []string{"/warren.v1.SandboxService/UpdateSandbox", "/v1/sandboxes/" + string(p.alice.box.ID) + "/ports/8000/", "/v1/sandboxes/" + string(p.alice.box.ID) + "/ports/49983/files", "/healthz", "*"} {
			for _, token := range []string{"", p.alice.token} {
				h := ask(origin)
				if token != "" {
					h = append(h, bearer(token))
				}
				a := p.api("OPTIONS", path, "", h...)
				p.refused(!allows(a), "preflight of %s from %s: %v", path, origin, a)
			}
		}
		a := p.shown("OPTIONS", own+"/", "", ask(origin)...)
		p.refused(!allows(a), "preflight of a preview from %s: %v", origin, a)
	}
	// The server inside answers the same question, when asked by who may ask: the question gets there.
	a := p.shown("OPTIONS", own+"/bad", "", append(ask("http://evil.lab"), "X-Warren-Token: "+p.alice.token)...)
	p.right(a.status == 200 && strings.Contains(a.body, "Access-Control-Request-Method"), "the same to who is let in: %v", a)
	p.refused(a.header.Get("Access-Control-Allow-Private-Network") == "" && a.header.Get("Access-Control-Allow-Credentials") == "", "and what it allows: %v", a)
}

// listener is a socket on which a process listens.
type listener struct {
	network, address string
	// root is what the process takes for /.
	root string
}

// listeners are those of a process, from /proc.
func listeners(pid int) (all []listener, err error) {
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return nil, err
	}
	inodes := map[string]bool{}
	for _, fd := range fds {
		if to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name())); err == nil && strings.HasPrefix(to, "socket:[") {
			inodes[strings.Trim(to[7:], "[]")] = true
		}
	}
	of, root := fmt.Sprintf("/proc/%d", pid), fmt.Sprintf("/proc/%d/root", pid)
	if pid == os.Getpid() {
		of, root = "/proc/thread-self", "" // its first thread may have been taken into a network namespace by another test
	}
	for _, network := range []string{"tcp", "tcp6", "udp", "udp6", "unix"} {
		text, err := os.ReadFile(of + "/net/" + network)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(text)) {
			f := strings.Fields(line)
			switch {
			case network == "unix":
				// Num RefCount Protocol Flags Type St Inode Path; 00010000 is a socket that listens.
				if len(f) > 7 && f[3] == "00010000" && inodes[f[6]] {
					all = append(all, listener{network, f[7], root})
				}
			case len(f) > 9 && inodes[f[9]] && (f[3] == "0A" || strings.HasPrefix(network, "udp") && strings.HasSuffix(f[2], ":0000")):
				all = append(all, listener{network, f[1], ""})
			}
		}
	}
	return all, nil
}

// wide says whether others than the socket's own user, or other machines, may come to a socket.
func (l listener) wide() bool {
	if l.network == "unix" {
		fi, err := os.Stat(l.root + l.address)
		return strings.HasPrefix(l.address, "@") || err != nil || fi.Mode().Perm()&0o077 != 0 && !private(l.root, filepath.Dir(l.address))
	}
	host, _, _ := strings.Cut(l.address, ":")
	return !strings.HasSuffix(host, "7F") && host != "00000000000000000000000001000000" && !strings.HasSuffix(host, "FFFF00000100007F")
}

// private says whether nobody else may pass a directory on the way to another one.
func private(root, dir string) bool {
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if fi, err := os.Stat(root + dir); err == nil && fi.Mode().Perm()&0o011 == 0 {
			return true
		}
	}
	return false
}

// listening looks on what the daemon, the gateway and the keeper listen (E18).
func listening(p *probe) {
	pids := []int{p.h.daemon(), p.h.keeper()}
	b, err := os.ReadFile(filepath.Join(p.h.dir, "run", "gateway", "gateway.pid"))
	p.check(err)
	gateway, err := strconv.Atoi(strings.TrimSpace(string(b)))
	p.check(err)
	found := 0
	for _, pid := range append(pids, gateway) {
		all, err := listeners(pid)
		p.check(err)
		for _, l := range all {
			if strings.HasPrefix(l.network, "udp") {
				continue // of a question that the gateway's resolver has under way; nobody is answered there
			}
			found++
			p.refused(!l.wide(), "process %d listens on %s %s", pid, l.network, l.address)
		}
	}
	fi, err := os.Stat(filepath.Join(p.h.dir, "warren.sock"))
	p.check(err)
	p.refused(fi.Mode().Perm() == 0o600, "the socket has mode %v", fi.Mode())
	// What is found here would be found there: this process opens some that are too wide.
	p.right(found >= 5, "only %d sockets", found)
	dir := p.t.TempDir()
	p.check(os.Chmod(dir, 0o755))
	var wide []net.Listener
	for _, at := range [][2]string{{"tcp4", "0.0.0.0:0"}, {"tcp6", "[::]:0"}, {"unix", filepath.Join(dir, "s")}} {
		l, err := net.Listen(at[0], at[1])
		p.check(err)
		defer l.Close()
		wide = append(wide, l)
	}
	p.check(os.Chmod(filepath.Join(dir, "s"), 0o666))
	all, err := listeners(os.Getpid())
	p.check(err)
	n := 0
	for _, l := range all {
		if l.wide() && !strings.HasPrefix(l.network, "udp") && (l.network != "unix" || strings.HasPrefix(l.address, dir)) {
			n++
		}
	}
	p.right(n >= 2 && len(wide) == 3, "of three sockets that are too wide %d were found: %v", n, all)
}

// asNobody runs a program as a user of the host who has nothing to do with Warren.
func asNobody(args ...string) string {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	return fmt.Sprintf("%s %v", out, err)
}

// otherUIDs comes as another user of the host (E20): to sockets, and to files below the data directory whose names are known.
func otherUIDs(p *probe) {
	version := "http://localhost/warren.v1.SystemService/GetVersion"
	ask := func(socket string) string {
		return asNobody("curl", "-sS", "-m", "20", "--unix-socket", socket, "-H", "Content-Type: application/json", "-d", "{}", "-w", " status %{http_code}", version)
	}
	socket := filepath.Join(p.h.dir, "warren.sock")
	for _, s := range []string{socket, filepath.Join(p.h.dir, "run", "gateway", "gateway.sock"), filepath.Join(p.h.dir, "run", "gvisor", "keeper.sock")} {
		out := ask(s)
		p.refused(strings.Contains(out, "status 000"), "%s to another user: %s", s, out)
	}
	// Who gets past the mode of the socket is asked who it is.
	p.check(os.Chmod(socket, 0o666))
	out := ask(socket)
	p.check(os.Chmod(socket, 0o600))
	p.refused(strings.Contains(out, "status 403"), "a socket that is open to all: %s", out)
	p.right(strings.Contains(asNobody("curl", "-sS", "-m", "20", "-H", "Content-Type: application/json", "-H", bearer(p.alice.token), "-d", "{}", "-w", " status %{http_code}", "http://"+p.addr+"/warren.v1.SystemService/GetVersion"), "status 200"), "over TCP with a token")

	box, err := p.op.Sandbox(p.t.Context(), string(p.alice.box.ID))
	p.check(err)
	file := filepath.Join(p.h.dir, "workspaces", string(box.Workspace), "files", "server.py")
	mine, err := os.ReadFile(file)
	p.check(err)
	p.refused(!strings.Contains(asNobody("cat", file), string(mine)), "another user reads a file of a workspace")
	for _, name := range []string{"workspaces", "repos", "images", "logs", "calls", "gateway", "paused", "snapshots", "run", "secrets", "preview"} {
		out := asNobody("ls", filepath.Join(p.h.dir, name)+"/.")
		p.refused(strings.Contains(out, "denied"), "%s to another user: %s", name, out)
		fi, err := os.Stat(filepath.Join(p.h.dir, name))
		p.check(err)
		p.refused(fi.Mode().Perm()&0o011 == 0, "%s lets others pass: %v", name, fi.Mode())
	}
	for _, name := range []string{"warren.db", "warren.db-wal", "daemon.pid", "preview/key", "secrets/key"} {
		if _, err := os.Stat(filepath.Join(p.h.dir, name)); err == nil {
			out := asNobody("cat", filepath.Join(p.h.dir, name))
			p.refused(strings.Contains(out, "denied"), "%s to another user: %.100q", name, out)
		}
	}
	// The twin: with a directory that lets pass, the file is read.
	dir := filepath.Join(p.h.dir, "workspaces")
	p.check(os.Chmod(dir, 0o711))
	out = asNobody("cat", file)
	p.check(os.Chmod(dir, 0o700))
	p.right(strings.Contains(out, string(mine)), "with a directory that others may pass: %.200q", out)
}

// bruteForce guesses tokens (E21), from an address of its own.
func bruteForce(p *probe) {
	for _, door := range []struct {
		name string
		ask  func(token string) answer
	}{
		{"the API", func(token string) answer { return p.call(token, "SystemService/GetVersion", "{}") }},
		{"a preview", func(token string) answer {
			return p.shown("GET", strings.SplitN(p.alice.link, "?", 2)[0], "", "X-Warren-Token: "+token)
		}},
	} {
		p.source = strings.TrimSuffix(p.source, "1") + "1" + strconv.Itoa(len(door.name))
		for range 30 {
			p.right(door.ask(p.alice.token).status == 200, "%s with a good token", door.name)
		}
		refusals := 0
		for i := range 60 {
			a := door.ask(fmt.Sprintf("warren_%064x", i))
			p.refused(a.status == 401 && refusals == 0 || a.status == 429 && a.header.Get("Retry-After") != "", "%s, try %d: %v", door.name, i, a)
			if a.status == 429 {
				refusals++
			}
		}
		p.refused(refusals >= 30, "%s answers %d of 60 bad tokens with 429", door.name, refusals)
		p.right(door.ask(p.alice.token).status == 200, "%s with a good token, after bad ones of the same address", door.name)
		p.source = strings.TrimSuffix(p.source, "1"+strconv.Itoa(len(door.name))) + "1"
		a := door.ask("warren_no")
		p.refused(a.status == 401, "%s from another address: %v", door.name, a)
	}
}

// revocation takes a token back while all that lasts is under way with it (E22).
func revocation(p *probe) {
	ctx := p.t.Context()
	id, token, err := p.op.CreateToken(ctx, warren.TokenSpec{User: "alice"})
	p.check(err)
	c, err := warren.Connect(ctx, warren.Options{URL: "http://" + p.addr, Token: token, RetryFor: -1})
	p.check(err)
	defer c.Close()
	box := "/v1/sandboxes/" + string(p.alice.box.ID)
	type lasting struct {
		name string
		read func() error
	}
	reads := func(r io.Reader) func() error {
		b := make([]byte, 1)
		return func() error { _, err := io.ReadFull(r, b); return err }
	}
	open := func(token string, c *warren.Client) (all []lasting) {
		sb := c.Ref(string(p.alice.box.ID))
		for _, terminal := range []bool{false, true} {
			cmd := sb.Command("sh", "-c", "while echo still here; do sleep 0.05; done")
			if terminal {
				cmd.PTY = &warren.Size{Cols: 80, Rows: 24}
			}
			out, err := cmd.StdoutPipe()
			p.check(err)
			p.check(cmd.Start(ctx))
			all = append(all, lasting{fmt.Sprintf("a command, on a terminal %v", terminal), reads(out)})
		}
		conn, err := sb.Dial(ctx, 8000)
		p.check(err)
		_, err = io.WriteString(conn, "GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
		p.check(err)
		p.t.Cleanup(func() { conn.Close() })
		all = append(all, lasting{"a raw connection", reads(conn)})
		preview := []string{"Host: " + strings.TrimPrefix(strings.SplitN(p.alice.link, "/?", 2)[0], "http://"), "X-Warren-Token: " + token}
		for _, t := range []struct {
			name, addr, path string
			header           []string
		}{
			{"a stream through the API", p.addr, box + "/ports/8000/hold", []string{bearer(token)}},
			{"a WebSocket through the API", p.addr, box + "/ports/8000/", []string{bearer(token), "Connection: Upgrade", "Upgrade: websocket"}},
			{"a stream of a preview", p.previews, "/hold", preview},
			{"a WebSocket of a preview", p.previews, "/", append([]string{"Connection: Upgrade", "Upgrade: websocket"}, preview...)},
		} {
			c, res, a := p.open(t.addr, "GET", t.path, "", t.header...)
			if a.err != nil || a.status != 200 && a.status != 101 {
				p.t.Fatalf("%s: %v", t.name, a)
			}
			p.t.Cleanup(func() { c.Close() })
			// ReadResponse leaves what follows a 101 to who has the connection.
			var r io.Reader = res.Body
			if a.status == 101 {
				r = c
			}
			all = append(all, lasting{t.name, reads(r)})
		}
		return all
	}
	mine, others := open(token, c), open(p.alice.token, p.alice.c)
	for _, l := range slices.Concat(mine, others) {
		p.right(l.read() == nil, "%s ends by itself", l.name)
	}
	p.check(p.op.DeleteToken(ctx, id))
	var wg sync.WaitGroup
	ended := make([]bool, len(mine))
	for i, l := range mine {
		wg.Go(func() {
			for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
				if l.read() != nil {
					ended[i] = true
					return
				}
			}
		})
	}
	wg.Wait()
	for i, l := range mine {
		p.refused(ended[i], "%s goes on with a token that was revoked", l.name)
	}
	for _, l := range others {
		p.right(l.read() == nil, "%s ends with another token", l.name)
	}
	a := p.call(token, "SystemService/GetVersion", "{}")
	p.refused(a.status == 401, "the API with it: %v", a)
}

// fetchers are calls that have the daemon fetch something (E06): users have it fetch repositories over the network, and nothing of the daemon's own goes along.
func fetchers(p *probe) {
	var mu sync.Mutex
	var seen []string
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		var b strings.Builder
		fmt.Fprintf(&b, "%s %s\n", r.Method, r.URL)
		r.Header.Write(&b)
		seen = append(seen, b.String())
		if strings.HasPrefix(r.URL.Path, "/away") {
			http.Redirect(w, r, "http://"+p.addr+"/warren.v1.SystemService/GetVersion", http.StatusFound)
			return
		}
		http.NotFound(w, r)
	}))
	defer web.Close()
	repo := filepath.Join(p.t.TempDir(), "private")
	out, err := exec.Command("git", "init", "-q", repo).CombinedOutput()
	if err != nil {
		p.t.Fatal(err, string(out))
	}
	record := p.lastCall()
	ask := func(u string) (kinds []string) {
		for _, c := range []struct{ path, body string }{
			{"RepoService/FetchRepo", fmt.Sprintf(`{"url":%q}`, u)}, {"WorkspaceService/CreateWorkspace", fmt.Sprintf(`{"repo":{"url":%q}}`, u)}, {"SandboxService/CreateSandbox", fmt.Sprintf(`{"spec":{"repo":{"url":%q}}}`, u)},
		} {
			a := p.api("POST", "/warren.v1."+c.path, string(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(c.body))))+c.body, bearer(p.alice.token), "Content-Type: application/connect+json")
			kinds = append(kinds, a.kind())
			p.refused(a.kind() != "" && !strings.Contains(a.body, p.secret) && !strings.Contains(a.body, `"repo":{"id"`), "%s of %s: %v", c.path, u, a)
		}
		return kinds
	}
	for _, u := range []string{
		repo, "file://" + repo, "file://localhost" + repo, "/etc", "ext::sh -c id", "ext::cat " + p.canary, "--upload-pack=id", "ssh://-oProxyCommand=id/x", "-oProxyCommand=id:x", "ftp://127.0.0.1/x", "gopher://127.0.0.1/x", "unix://" + p.h.dir + "/warren.sock",
		"dict://127.0.0.1:11211/x", "../../" + repo, "http://", "javascript:1",
	} {
		for _, k := range ask(u) {
			p.refused(k == "invalid" || k == "invalid_argument" || k == "denied" || k == "permission_denied", "%q gives %s", u, k)
		}
	}
	_, port, _ := net.SplitHostPort(p.addr)
	ask("http://127.0.0.1:" + port + "/r") // the daemon itself
	ask(web.URL + "/away/r")
	ask(web.URL + "/r")
	for _, c := range []string{"PullImage", "ImportImage", "BootstrapImage"} {
		body := `{"name":"x"}`
		if c == "PullImage" {
			body = fmt.Sprintf(`{"ref":%q}`, strings.TrimPrefix(web.URL, "http://")+"/x")
		}
		a := p.api("POST", "/warren.v1.ImageService/"+c, string(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))))+body, bearer(p.alice.token), "Content-Type: application/connect+json")
		p.refused(a.kind() == "permission_denied" || a.kind() == "denied", "%s: %v", c, a)
	}
	mu.Lock()
	all := strings.Join(seen, "\n")
	mu.Unlock()
	p.right(strings.Contains(all, "GET /r/info/refs"), "git has not asked the web server: %s", all)
	for _, word := range []string{"Authorization", "Cookie", "X-Api-Key", "Warren", p.alice.token} {
		p.refused(!strings.Contains(all, word), "the web server was shown %s: %s", word, all)
	}
	// Redirected to, the daemon has not taken git for anybody.
	for e, err := range p.op.Calls(p.t.Context(), record) {
		p.check(err)
		p.refused(!strings.Contains(e.Fields["call"], "GetVersion") || e.Fields["result"] != "ok", "git was let in: %v", e)
	}
}

// TestDoorsAtStart has what depends on no state: how a daemon listens unless somebody says otherwise (E18), and what it refuses to do (E19).
func TestDoorsAtStart(t *testing.T) {
	testenv.NeedsRoot(t)
	h := newHome(t)
	h.warren("ls")
	all, err := listeners(h.daemon())
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]int{}
	for _, l := range all {
		kinds[strings.TrimSuffix(l.network, "6")]++
		if l.wide() {
			t.Errorf("E18: a daemon that was told nothing listens on %s %s", l.network, l.address)
		}
	}
	if kinds["unix"] != 1 || kinds["tcp"] == 0 || kinds["tcp"] > 2 {
		t.Errorf("E18: it listens on %v", all)
	}
	own := "" // an address of this machine, or else all
	if addrs, err := net.InterfaceAddrs(); err == nil {
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && !n.IP.IsLoopback() && n.IP.To4() != nil {
				own = n.IP.String()
			}
		}
	}
	cert, key := selfSigned(t)
	for _, tt := range []struct {
		args, env []string
		want      string
	}{
		{[]string{"--listen", "0.0.0.0:0"}, nil, "needs TLS"}, {[]string{"--listen", ":0"}, nil, "needs TLS"}, {[]string{"--listen", "[::]:0"}, nil, "needs TLS"}, {nil, []string{"WARREN_LISTEN=0.0.0.0:0"}, "needs TLS"},
		{[]string{"--listen", own + ":0"}, nil, "needs TLS"}, {[]string{"--listen", "0.0.0.0:0", "--tls-cert", cert}, nil, "key"}, {[]string{"--listen", "0.0.0.0:0", "--tls-key", key}, nil, "certificate"},
		{nil, []string{"WARREN_PREVIEW_LISTEN=0.0.0.0:7443"}, "needs TLS"}, {nil, []string{"WARREN_PREVIEW_LISTEN=[::]:7443", "WARREN_PREVIEW_DOMAIN=x.lab"}, "certificate"},
	} {
		dir := t.TempDir()
		cmd := exec.Command(h.bin.Warren, append([]string{"serve"}, tt.args...)...)
		cmd.Env = append(append(os.Environ(), "WARREN_HOME="+dir), tt.env...)
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), tt.want) {
			t.Errorf("E19: serve %q %q: %v\n%s", tt.args, tt.env, err, out)
		}
		if _, err := os.Stat(filepath.Join(dir, "warren.sock")); err == nil {
			t.Errorf("E19: serve %q %q has listened", tt.args, tt.env)
		}
	}
	// What is listened on with a certificate lets nobody in without a token: there is nothing that turns tokens off, and an empty one is none.
	addr := freeAddr(t)
	served := newHome(t)
	served.serve("--listen", addr)
	p := &probe{doors: &doors{t: t, h: served, addr: addr}, t: t, source: "127.0.0.1"}
	for _, header := range []string{"X: y", "Authorization: Bearer ", "Authorization: Bearer", "Authorization: bearer null", "Authorization: Bearer undefined", "Authorization: Basic YWRtaW46YWRtaW4="} {
		if a := p.api("POST", "/warren.v1.SystemService/GetVersion", "{}", "Content-Type: application/json", header); a.status != 401 {
			t.Errorf("E19: with %q: %v", header, a)
		}
	}
	token := lastLine(served.warren("token", "create", "--user", "ada"))
	if a := p.call(token, "SystemService/GetVersion", "{}"); a.status != 200 {
		t.Errorf("with a token: %v", a)
	}
	cmd := served.command("token", "create", "--user", "")
	if out, err := cmd.CombinedOutput(); err == nil {
		t.Errorf("E19: a token for nobody: %s", out)
	}
}
