//go:build linux

package main

import (
	"encoding/binary"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// files is the path of the file calls of Alice's sandbox.
func (p *probe) files() string {
	return "/v1/sandboxes/" + string(p.alice.box.ID) + "/ports/49983"
}

// file makes a file call that takes JSON.
func (p *probe) file(call, body string) answer {
	return p.api("POST", p.files()+"/filesystem.Filesystem/"+call, body, bearer(p.alice.token), "Content-Type: application/json", "Connect-Protocol-Version: 1")
}

// stream makes a call that answers with a stream.
func (p *probe) stream(path, body string) answer {
	return p.api("POST", path, string(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))))+body, bearer(p.alice.token), "Content-Type: application/connect+json", "Connect-Protocol-Version: 1")
}

// workspaceDir is where the files of Alice's workspace are on the host.
func (p *probe) workspaceDir() string {
	box, err := p.op.Sandbox(p.t.Context(), string(p.alice.box.ID))
	p.check(err)
	return filepath.Join(p.h.dir, "workspaces", string(box.Workspace), "files")
}

// untouched says what has happened to the host's file and its directory.
func (p *probe) untouched() string {
	var found []string
	err := filepath.WalkDir(filepath.Dir(filepath.Dir(p.canary)), func(path string, e fs.DirEntry, err error) error {
		if err == nil {
			found = append(found, strings.TrimPrefix(path, filepath.Dir(filepath.Dir(p.canary))))
		}
		return err
	})
	text, rerr := os.ReadFile(p.canary)
	fi, serr := os.Stat(p.canary)
	switch {
	case err != nil || rerr != nil || serr != nil:
		return fmt.Sprint(err, rerr, serr)
	case string(text) != p.secret:
		return fmt.Sprintf("it holds %q", text)
	case strings.Join(found, " ") != " /held /held/secret.txt":
		return fmt.Sprintf("beside it there are %q", found)
	case fi.Mode() != 0o644:
		return fmt.Sprintf("its mode is %v", fi.Mode())
	}
	return ""
}

// inside runs a script as root in Alice's sandbox.
func (p *probe) inside(script string, args ...string) {
	p.t.Helper()
	cmd := p.alice.box.Command("sh", append([]string{"-ec", script, "sh"}, args...)...)
	cmd.User = "root"
	if out, err := cmd.CombinedOutput(p.t.Context()); err != nil {
		p.t.Fatalf("%v: %s", err, out)
	}
}

// filePaths asks for files by paths that lead out of where a naive server begins (E23).
func filePaths(p *probe) {
	p.inside(`rm -rf "$(dirname "$1")"`, p.canary)
	up := strings.Repeat("../", 30) + strings.TrimPrefix(p.canary, "/")
	enc := url.QueryEscape
	paths := []string{
		enc(up), enc(p.canary), up, p.canary, strings.ReplaceAll(up, "../", "..%2f"), strings.ReplaceAll(up, "../", "%2e%2e%2f"), strings.ReplaceAll(up, "../", "%252e%252e%252f"), strings.ReplaceAll(up, "../", "..%5c"), strings.ReplaceAll(up, "../", "..\\"),
		enc("/workspace/a/./../../" + up), enc("/workspace/" + up), enc("~/" + up), enc("~root/" + up), enc("/proc/self/root" + p.canary), enc("/proc/1/root" + p.canary), enc("/proc/self/cwd/" + up), enc("/proc/thread-self/root" + p.canary),
		strings.ReplaceAll(up, "../", "%c0%ae%c0%ae/"), strings.ReplaceAll(up, "../", "%c0%ae%c0%ae%c0%af"), strings.ReplaceAll(up, "../", "....//"), enc(p.canary + "\x00.txt"), enc("\x00" + p.canary), enc(up + "/"), enc(strings.Repeat("a/", 2600) + up), enc(strings.Repeat("a", 5<<10)), enc("file://" + p.canary),
		enc("/workspace/../" + p.canary), enc("//" + p.canary), enc(p.h.dir + "/warren.db"), enc(p.h.dir + "/secrets/key"), enc(p.h.dir + "/preview/key"), enc(p.workspaceDir() + "/server.py"),
	}
	for _, path := range paths {
		for _, user := range []string{"", "&username=root"} {
			a := p.api("GET", p.files()+"/files?path="+path+user, "", bearer(p.alice.token))
			p.refused(a.err == nil && a.status >= 400 && a.status < 500 && !strings.Contains(a.body, p.secret), "GET of %.200s: %v", path, a)
		}
		plain, err := url.QueryUnescape(path)
		p.check(err)
		for _, call := range []string{"Stat", "ListDir", "Remove"} {
			a := p.file(call, fmt.Sprintf(`{"path":%s}`, jsonText(plain)))
			p.refused(a.err == nil && (a.status >= 400 || call == "Remove") && !strings.Contains(a.body, p.secret), "%s of %.200s: %v", call, path, a)
		}
	}
	// The same in the path of the request: nothing but what is named leads to the guest.
	for _, path := range []string{
		"/files/../files", "/files/%2e%2e/init", "/files/..%2f..%2f..", "/../../../../../../etc/passwd", "/..%2f..%2f..%2fetc/passwd", "//etc/passwd", "/%66iles/../init", "/init", "/warren/channel", "/root", "/warren/quiesce", "/warren/mark", "/warren/trust", "/warren/oom",
		"/process.Process/../init", "/process.Process//Start", "/process.Process/Start/..", "/filesystem.Filesystem/..%2f..%2finit", "/files/", "/Files", "/files;x",
	} {
		a := p.api("POST", p.files()+path, "{}", bearer(p.alice.token), "Content-Type: application/json")
		p.refused(a.status == 403 || a.status == 404, "%s: %v", path, a)
	}
	p.refused(p.untouched() == "", "the host's file: %s", p.untouched())
	a := p.api("POST", p.files()+"/files?path=/workspace/written", "written", bearer(p.alice.token), "Content-Type: application/octet-stream")
	p.right(a.status == 200, "a file is written: %v", a)
	for _, path := range []string{"/workspace/written", "/workspace/a/./../written", "/workspace/../workspace/written", "/proc/self/root/workspace/written"} {
		a := p.api("GET", p.files()+"/files?path="+enc(path), "", bearer(p.alice.token))
		p.right(a.status == 200 && a.body == "written", "%s: %v", path, a)
	}
	// The twin: a server that puts the path behind its own directory is led out by the same requests.
	naive := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path := r.URL.Query().Get("path")
		if !strings.HasPrefix(path, "/") {
			path = p.workspaceDir() + "/" + path
		}
		text, err := os.ReadFile(path)
		if err != nil {
			w.WriteHeader(404)
		}
		w.Write(text)
	}))
	defer naive.Close()
	out := 0
	for _, path := range paths {
		a := p.send(strings.TrimPrefix(naive.URL, "http://"), "GET", "/files?path="+path, "")
		if strings.Contains(a.body, p.secret) {
			out++
		}
	}
	p.right(out >= 8, "of a naive server only %d of %d paths get the host's file", out, len(paths))
}

// jsonText is a text as JSON, with what is no UTF-8 replaced.
func jsonText(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\x00", `\u0000`).Replace(strings.ToValidUTF8(s, "?")) + `"`
}

// workspaceLinks has links in the workspace that lead to a file of the host (E24), and uses them in all calls that read or write files: those of the guest,
// and those for which the daemon reads the workspace itself. In the sandbox the same path is a file of its own.
func workspaceLinks(p *probe) {
	own := "the sandbox's own " + randomWord()
	p.inside(`mkdir -p "$(dirname "$1")"; chmod 777 "$(dirname "$1")"; echo "$2" >"$1"; chmod 666 "$1"
rm -rf /workspace/evil; mkdir -p /workspace/evil; cd /workspace/evil
ln -s "$1" file; ln -s "$(dirname "$1")" dir; ln -s "/proc/self/root$1" proc; ln -s "../../../../../../../../../..$1" up; ln -s file chain; ln -s loop loop; ln -s /proc/self/fd fd; ln -s / slash; ln "$1" hard 2>/dev/null || :
chown -h user:user . *`, p.canary, own)
	read := func(path string) answer {
		return p.api("GET", p.files()+"/files?path="+path, "", bearer(p.alice.token))
	}
	for _, name := range []string{"file", "proc", "up", "chain", "dir/secret.txt", "slash" + p.canary} {
		a := read("/workspace/evil/" + name)
		p.right(a.status == 200 && strings.Contains(a.body, own), "%s leads to what the sandbox has there: %v", name, a)
		p.refused(!strings.Contains(a.body, p.secret), "%s leads to the host's file", name)
	}
	var all []answer
	add := func(a ...answer) { all = append(all, a...) }
	for _, name := range []string{"file", "dir", "proc", "up", "chain", "loop", "fd", "slash", "dir/secret.txt"} {
		path, depth := "/workspace/evil/"+name, 3
		if name == "slash" || name == "fd" {
			depth = 1 // of all that the sandbox has
		}
		add(p.file("Stat", fmt.Sprintf(`{"path":%q}`, path)), p.file("ListDir", fmt.Sprintf(`{"path":%q,"depth":%d}`, path, depth)), read(path))
		add(p.api("POST", p.files()+"/files/compose", fmt.Sprintf(`{"sourcePaths":[%q],"destination":"/workspace/composed"}`, path), bearer(p.alice.token), "Content-Type: application/json"), read("/workspace/composed"))
	}
	add(p.stream(p.files()+"/warren.guest.v1.GuestService/Search", `{"path":"/workspace/evil","pattern":"own"}`))
	add(p.api("POST", p.files()+"/files?path=/workspace/evil/dir/up", "uploaded", bearer(p.alice.token), "Content-Type: application/octet-stream"), p.file("MakeDir", `{"path":"/workspace/evil/dir/made"}`))
	add(p.api("POST", p.files()+"/files?path=/workspace/evil/file", "through", bearer(p.alice.token), "Content-Type: application/octet-stream"))
	add(p.file("Move", `{"source":"/workspace/evil/dir/up","destination":"/workspace/evil/moved"}`), p.file("Remove", `{"path":"/workspace/evil/dir/made"}`), p.file("Remove", `{"path":"/workspace/evil/chain"}`))
	// What the daemon reads itself.
	box := string(p.alice.box.ID)
	diff := p.stream("/warren.v1.WorkspaceService/Diff", fmt.Sprintf(`{"id":%q,"all":true}`, box))
	add(diff, p.call(p.alice.token, "WorkspaceService/GetWorkspace", fmt.Sprintf(`{"id":%q,"size":true}`, box)))
	made := p.copied(&all)
	add(p.file("Remove", `{"path":"/workspace/evil/dir/"}`))
	for _, a := range all {
		p.refused(a.err == nil && !strings.Contains(a.body, p.secret), "the host's file is in %v", a)
	}
	p.refused(p.untouched() == "", "the host's file: %s", p.untouched())
	p.right(diff.status == 200 && made == 2, "diff %v, and %d of 2 copies", diff.status, made)
	// The twin: who reads the workspace on the host by its paths is led to the host's file.
	text, err := os.ReadFile(filepath.Join(p.workspaceDir(), "evil", "up"))
	p.right(strings.Contains(string(text), p.secret), "a naive reader gets %q, %v", text, err)
}

// copied has the workspace copied in the ways that there are, and removes the copies; it returns how many there were.
func (p *probe) copied(all *[]answer) (made int) {
	box := string(p.alice.box.ID)
	name := "copy-" + randomWord()[:8]
	a := p.call(p.alice.token, "WorkspaceService/CopyWorkspace", fmt.Sprintf(`{"id":%q,"name":%q}`, box, name))
	*all = append(*all, a)
	if a.status == 200 {
		made++
		*all = append(*all, p.stream("/warren.v1.WorkspaceService/Diff", fmt.Sprintf(`{"id":%q,"all":true}`, name)), p.call(p.alice.token, "WorkspaceService/DeleteWorkspace", fmt.Sprintf(`{"id":%q}`, name)))
	}
	a = p.stream("/warren.v1.SnapshotService/CreateSnapshot", fmt.Sprintf(`{"sandbox_id":%q,"name":%q,"files_only":true}`, box, name))
	*all = append(*all, a)
	if a.status == 200 && a.kind() == "" {
		made++
		*all = append(*all, p.call(p.alice.token, "SnapshotService/GetSnapshot", fmt.Sprintf(`{"id":%q,"size":true}`, name)), p.call(p.alice.token, "SnapshotService/DeleteSnapshot", fmt.Sprintf(`{"id":%q}`, name)))
	}
	return made
}

// swapper turns /workspace/NAME/d from a directory into a link and back, until there is a file stop.
const swapper = `
import os, shutil, sys, time
for name, target in zip(sys.argv[1::2], sys.argv[2::2]):
    os.makedirs('/workspace/' + name + '/d', exist_ok=True)
    os.symlink(target, '/workspace/' + name + '/link')
while not os.path.exists('/workspace/stop'):
    for name in sys.argv[1::2]:
        at = '/workspace/' + name + '/'
        try:
            os.rename(at + 'd', at + 'real'); os.rename(at + 'link', at + 'd'); os.rename(at + 'd', at + 'link'); os.rename(at + 'real', at + 'd')
            time.sleep(0.0005)
        except OSError:
            # Who was served in between has made a directory in its place.
            for left in ('d', 'real'):
                if os.path.isdir(at + left) and not os.path.islink(at + left): shutil.rmtree(at + left, True)
                elif os.path.islink(at + left): os.rename(at + left, at + 'link')
            os.makedirs(at + 'd', exist_ok=True)
`

// swappedDirectories has a directory of the workspace turn into a link to a directory of the host and back, while files in it are read, written, listed and
// removed (E25). WARREN_SWAPS says in how many rounds of 8 calls; with WARREN_SOAK these are 10,000 calls in each state.
func swappedDirectories(p *probe) {
	swaps := testenv.Count(p.t, "WARREN_SWAPS", 10, 1_250)
	twin := p.t.TempDir()
	p.inside(`rm -rf /workspace/swap /workspace/twin /workspace/stop; mkdir -p "$1" "$2"; chmod 777 "$1" "$2"; rm -f "$1"/f "$1"/new`, filepath.Dir(p.canary), twin)
	// It ends by itself, should this process be killed.
	cmd := p.alice.box.Command("timeout", fmt.Sprint(120+2*swaps), "python3", "-c", swapper, "swap", filepath.Dir(p.canary), "twin", twin)
	p.check(cmd.Start(p.t.Context()))
	defer func() {
		p.inside(`touch /workspace/stop`)
		cmd.Wait()
		// What was made on the host belongs to nobody in the sandbox.
		os.RemoveAll(filepath.Join(p.workspaceDir(), "twin"))
		p.inside(`rm -rf /workspace/swap /workspace/twin /workspace/stop`)
	}()
	p.until("the swaps", func() bool { return p.file("Stat", `{"path":"/workspace/twin/link"}`).status == 200 })
	var all []answer
	done := 0
	for i := range swaps {
		at := []answer{
			p.api("POST", p.files()+"/files?path=/workspace/swap/d/f", "from outside", bearer(p.alice.token), "Content-Type: application/octet-stream"),
			p.api("GET", p.files()+"/files?path=/workspace/swap/d/secret.txt", "", bearer(p.alice.token)), p.file("Stat", `{"path":"/workspace/swap/d/secret.txt"}`), p.file("ListDir", `{"path":"/workspace/swap","depth":4}`),
			p.file("MakeDir", `{"path":"/workspace/swap/d/new"}`), p.file("Move", `{"source":"/workspace/swap/d/f","destination":"/workspace/swap/d/g"}`), p.file("Remove", `{"path":"/workspace/swap/d/new"}`), p.file("Remove", `{"path":"/workspace/swap/d/g"}`),
		}
		if i%10 == 0 {
			at = append(at, p.stream("/warren.v1.WorkspaceService/Diff", fmt.Sprintf(`{"id":%q,"all":true}`, p.alice.box.ID)), p.call(p.alice.token, "WorkspaceService/GetWorkspace", fmt.Sprintf(`{"id":%q,"size":true}`, p.alice.box.ID)))
		}
		if i%100 == 5 {
			p.copied(&at)
		}
		for _, a := range at {
			if a.status == 200 {
				done++
			}
			p.refused(a.err == nil && !strings.Contains(a.body, p.secret), "the host's file is in %v", a)
		}
		if len(all) < 10 {
			all = append(all, at[0])
		}
	}
	p.refused(p.untouched() == "", "the host's directory: %s", p.untouched())
	p.right(done > 2*swaps, "only %d calls of %d rounds were served", done, swaps)
	// The twin: who writes on the host by its paths is led out, sooner or later.
	led := false
	for end := time.Now().Add(time.Minute); !led && time.Now().Before(end); {
		os.WriteFile(filepath.Join(p.workspaceDir(), "twin", "d", "f"), []byte("from outside"), 0o644)
		_, err := os.Stat(filepath.Join(twin, "f"))
		led = err == nil
	}
	p.right(led, "a naive writer is not led out in a minute")
}

// likeNames has names and ids of which one begins like another (E26).
func likeNames(p *probe) {
	ctx, a := p.t.Context(), p.alice.c
	var boxes []*warren.Sandbox
	for _, name := range []string{"door", "door1"} {
		sb, err := a.Create(ctx, warren.Spec{Name: name, Policy: "none"})
		p.check(err)
		defer sb.Delete(ctx)
		boxes = append(boxes, sb)
		p.check(sb.FS().WriteFile("workspace/own", []byte(name), 0o644))
	}
	get := func(token, ref string) answer {
		return p.call(token, "SandboxService/GetSandbox", fmt.Sprintf(`{"id":%q}`, ref))
	}
	for i, name := range []string{"door", "door1"} {
		got := get(p.alice.token, name)
		p.right(strings.Contains(got.body, string(boxes[i].ID)), "%s is %v", name, got)
		got = p.api("GET", "/v1/sandboxes/"+name+"/ports/49983/files?path=/workspace/own", "", bearer(p.alice.token))
		p.right(got.body == name, "%s has the files of %v", name, got)
	}
	for _, ref := range []string{"doo", "door10", "oor1", "door ", "Door", "door%00", "door/", "door*", "%"} {
		got := get(p.alice.token, ref)
		p.refused(got.status == 404 || got.status == 400, "%q is %v", ref, got)
	}
	id := string(p.alice.box.ID)
	for n := 1; n <= len(id); n++ {
		got := get(p.bob.token, id[:n])
		p.refused((got.status == 404 || got.status == 400) && (n == len(id) || !strings.Contains(got.body, id)), "%s is to another user %v", id[:n], got)
	}
	// Others name what is theirs like the beginning of an id, and like a name.
	was, like, named := "bobs-"+randomWord()[:8], id[:9], p.name(id)
	p.check(p.bob.c.Ref(string(p.bob.box.ID)).Update(ctx, warren.Change{Name: &like}))
	for _, name := range []string{like, named} {
		got := p.api("POST", "/warren.v1.WorkspaceService/CreateWorkspace", string(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(name)+11)))+fmt.Sprintf(`{"name":%q}`, name), bearer(p.bob.token), "Content-Type: application/connect+json")
		p.check(got.err)
		defer p.bob.c.DeleteWorkspace(ctx, name, warren.DeleteOptions{AllowMissing: true})
	}
	if sb, err := p.op.Sandbox(ctx, like); err == nil {
		p.refused(false, "%s, an id's beginning, is to the operator another user's %s", like, sb.ID)
	} else {
		p.refused(strings.Contains(err.Error(), "ambiguous"), "%s is to the operator %v", like, err)
	}
	for _, ref := range []string{like, named} {
		w, err := p.op.Workspace(ctx, ref)
		p.refused(err != nil && strings.Contains(err.Error(), "ambiguous"), "workspace %s is to the operator %v, %v", ref, w, err)
		w, err = a.Workspace(ctx, ref)
		p.right(err == nil && w.Owner == "alice", "workspace %s is to Alice %v, %v", ref, w, err)
	}
	p.check(p.bob.c.Ref(string(p.bob.box.ID)).Update(ctx, warren.Change{Name: &was}))
	sb, err := p.op.Sandbox(ctx, like)
	p.right(err == nil && string(sb.ID) == id, "%s is to the operator %v, %v", like, sb, err)
	// One goes, the other stays.
	p.check(boxes[0].Delete(ctx))
	got := p.api("GET", "/v1/sandboxes/door1/ports/49983/files?path=/workspace/own", "", bearer(p.alice.token))
	p.right(got.body == "door1", "when door is deleted, door1 has %v", got)
	p.refused(get(p.alice.token, "door").status == 404, "door is still there")
}

// name is the name of a sandbox.
func (p *probe) name(id string) string {
	sb, err := p.op.Sandbox(p.t.Context(), id)
	p.check(err)
	return sb.Spec.Name
}

// TestDoorMounts has a directory that users may mount from, and others whose names begin like it (E26).
func TestDoorMounts(t *testing.T) {
	h := newHome(t)
	base := t.TempDir()
	for dir := base; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"open", "open2", "open-not", "private"} {
		if err := os.Mkdir(filepath.Join(base, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../private", filepath.Join(base, "open", "link")); err != nil {
		t.Fatal(err)
	}
	addr := freeAddr(t)
	h.serve("--listen", addr, "--allow-mount", filepath.Join(base, "open"))
	c, err := warren.Connect(t.Context(), warren.Options{URL: "http://" + addr, Token: lastLine(h.warren("token", "create", "--user", "ada"))})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	mount := func(source string) error {
		sb, err := c.Create(t.Context(), warren.Spec{Policy: "none", Mounts: []warren.Mount{{Source: source, Target: "/mnt/x"}}})
		if err == nil {
			err = sb.Delete(t.Context())
		}
		return err
	}
	for _, name := range []string{"open2", "open-not", "private", "open/../private", "open/link", "open/../open2", "", "open/../../"} {
		if err := mount(filepath.Join(base) + "/" + name); err == nil {
			t.Errorf("a user mounts %q", name)
		}
	}
	for _, source := range []string{"/", "/etc", h.dir, "/proc", "/proc/self/root/" + base + "/private"} {
		if err := mount(source); err == nil {
			t.Errorf("a user mounts %s", source)
		}
	}
	if err := mount(filepath.Join(base, "open")); err != nil {
		t.Errorf("the directory that users may mount: %v", err)
	}
}
