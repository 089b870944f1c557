package recipe

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/warren-sandbox/warren"
)

// project writes files below a new directory.
func project(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestLoad(t *testing.T) {
	dir := project(t, map[string]string{FileName: `
name: app
image: debian:12
repo: .
env: {A: b}
resources: {cpu: 1.5, memory: 512MiB, disk: 1GiB, pids: 100}
setup:
  - make deps
  - name: seed
    run: |
      a
      b
    timeout: 5m
    user: root
    dir: /workspace/db
    env: {X: y}
services:
  - name: db
    command: [postgres, -D, /data]
    ready: {command: pg_isready, interval: 1s, timeout: 3s, retries: 5}
  - name: web
    command: npm run dev
    port: 3000
    ready: {http: /health}
    restart: always
  - name: queue
    command: [queue]
    port: 5
    ready: {tcp: true}
ready_timeout: 2m
ports: [3000]
idle_timeout: 30m
`, ".devcontainer/devcontainer.json": "{"})
	r, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := &Recipe{Repo: ".", Dir: dir, Path: filepath.Join(dir, FileName), Spec: warren.TemplateSpec{
		Name: "app", Image: "debian:12", Env: map[string]string{"A": "b"},
		Resources: warren.Resources{CPUMillis: 1500, Memory: 512 << 20, Disk: 1 << 30, PIDs: 100},
		Setup: []warren.TemplateStep{
			{Run: "make deps"},
			{Name: "seed", Run: "a\nb\n", Timeout: 5 * time.Minute, User: "root", Dir: "/workspace/db", Env: map[string]string{"X": "y"}},
		},
		Services: []warren.Service{
			{Name: "db", Command: []string{"postgres", "-D", "/data"}, Check: &warren.ServiceCheck{Command: []string{"sh", "-c", "pg_isready"}, Interval: time.Second, Timeout: 3 * time.Second, Retries: 5}},
			{Name: "web", Command: []string{"sh", "-c", "npm run dev"}, Port: 3000, Check: &warren.ServiceCheck{HTTPPath: "/health"}, Restart: "always"},
			{Name: "queue", Command: []string{"queue"}, Port: 5, Check: &warren.ServiceCheck{TCP: true}},
		},
		ReadyTimeout: 2 * time.Minute, Ports: []int{3000}, IdleTimeout: 30 * time.Minute,
	}}
	if d := cmp.Diff(want, r); d != "" {
		t.Error(d)
	}
}

func TestLoadBad(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"", "empty"},
		{"imge: x", "line 1: field imge is not known in a recipe"},
		{"image: [1]", "line 1"},
		{"image: a\n---\nimage: b", "more than one document"},
		{"setup:\n  - run: a\n    user: root\n    shel: b", `line 4: a step has no key "shel"`},
		{"setup:\n  - [a, b]", "line 2: a step is a mapping"},
		{"setup: ['']", "step 1 of setup has nothing to run"},
		{"setup: [{run: a, timeout: -1s}]", "negative"},
		{"setup: [{run: a, timeout: 5}]", "5"},
		{"setup: [{run: a, timeout: soon}]", "soon"},
		{"services: [{command: a}]", "service 1 has no name"},
		{"services: [{name: a b, command: a}]", "letters, digits"},
		{"services: [{name: a}]", "it has no command"},
		{"services: [{name: a, command: ''}]", "empty"},
		{"services: [{name: a, command: a, port: 70000}]", "70000 is no port"},
		{"services: [{name: a, command: a, restart: maybe}]", `"maybe" is none of`},
		{"services: [{name: a, command: a, port: 1, ready: {}}]", "by one of"},
		{"services: [{name: a, command: a, port: 1, ready: {tcp: true, http: /}}]", "by one of"},
		{"services: [{name: a, command: a, ready: {tcp: true}}]", "needs a port"},
		{"services: [{name: a, command: a, port: 1, ready: {http: x}}]", "no path"},
		{"services: [{name: a, command: a, port: 1, ready: {tcp: true, interval: 2h}}]", "at most an hour"},
		{"services: [{name: a, command: a, port: 1, ready: {tpc: true}}]", "field tpc is not known in ready"},
		{"services: [{name: a, command: a}, {name: a, command: b}]", "two services are named a"},
		{"resources: {cpu: many}", "resources.cpu"},
		{"resources: {memory: lots}", "resources.memory"},
		{"ports: [0]", "0 is no port; want 1 to 65535"},
		{"ready_timeout: 2", `line 1: "2" is not a time with its unit, such as 30s or 5m`},
		{"services: [{name: a, command: a, port: abc}]", `line 1: "abc" is not a whole number`},
		{"services: hello", `line 1: "hello" is not a list of services`},
		{"setup: {a: b}", "line 1: a mapping is not a list of steps"},
		{"setup: [{run: x, timeout: soon}]", `"soon" is not a time with its unit`},
		{"ports: 80", `"80" is not a list of whole numbers`},
		{"image: [a]", "a list is not text"},
		{"resources: {pids: many}", `"many" is not a whole number, 0 or more`},
		{"env: 3", `"3" is not a mapping of names to text`},
		{"just words", `is not a mapping with image`},
		{"ready_timeout: -1s", "ready_timeout -1s is negative"},
		{"a: &a [*a]", "line 1"},
	} {
		_, err := Load(project(t, map[string]string{FileName: tt.text}))
		if !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "recipe.") {
			t.Errorf("%q: %v; want %q", tt.text, err, tt.want)
		}
	}
	if _, err := Load(filepath.Join(t.TempDir(), "nothing")); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("no such directory: %v", err)
	}
	if _, err := Load(t.TempDir()); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("a directory without: %v", err)
	}
	if _, err := Load(project(t, map[string]string{FileName: "#" + strings.Repeat("a", maxFile)})); !errors.Is(err, warren.ErrInvalid) {
		t.Errorf("a long file: %v", err)
	}
}

func TestDevcontainer(t *testing.T) {
	t.Setenv("HERE", "there")
	dir := project(t, map[string]string{
		".git/HEAD":                           "",
		".devcontainer/features/a/install.sh": "true",
		".devcontainer/devcontainer.json": `// What it is.
{
	"name": "Mine", "image": "debian:12", // not "build": {}
	"customizations": {"x": "/* no comment */ // nor this, \" }"},
	"features": {"./features/a": {"my-version": 3, "on": true,}},
	"containerEnv": {"A": "1"},
	"remoteEnv": {"B": "${localEnv:HERE}:${localEnv:NOT_HERE_AT_ALL:x}:${containerWorkspaceFolder}",},
	"onCreateCommand": "",
	"postCreateCommand": {"two": ["echo", "it's"], "one": "a && b"},
	"postStartCommand": "start",
	"forwardPorts": [3000, "localhost:5", "6",],
}
`})
	want := &Recipe{Repo: ".", Dir: dir, Path: filepath.Join(dir, ".devcontainer", "devcontainer.json"),
		Notes: []string{"name has no effect: the template's name is given to the command"},
		Spec: warren.TemplateSpec{
			Image: "debian:12", Env: map[string]string{"A": "1", "B": "there:x:/workspace"}, Ports: []int{3000, 5, 6},
			Setup: []warren.TemplateStep{
				{Name: "feature ./features/a", Run: "exec sh ./install.sh", User: "root", Dir: "/workspace/.devcontainer/features/a", Env: map[string]string{"MY_VERSION": "3", "ON": "true"}},
				{Name: "postCreateCommand one", Run: "a && b"},
				{Name: "postCreateCommand two", Run: `'echo' 'it'\''s'`},
				{Name: "postStartCommand", Run: "start"},
			},
		}}
	for _, path := range []string{dir, want.Path} {
		r, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, r); d != "" {
			t.Errorf("%s:\n%s", path, d)
		}
	}
}

func TestDevcontainerBad(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"", "JSON"},
		{"[]", "array"},
		{"{}", "names no image"},
		{"{\n\"image\": 1}", "image cannot be a number"},
		{"{\n\n\"image\" 1}", "line 3"},
		{"{ /* ", "a comment has no end"},
		{`{"image": "`, "unexpected end"},
		{`{"image": "a", "imgae": "b"}`, `"imgae" is not known`},
		{`{"dockerComposeFile": "x"}`, "dockerComposeFile cannot be had"},
		{`{"image": "a", "build": {}}`, "build cannot be had"},
		{`{"image": "a", "mounts": []}`, "mounts cannot be had"},
		{`{"image": "a", "features": {"ghcr.io/x/y:1": {}}}`, "comes from a registry"},
		{`{"image": "a", "features": {"./../../x": {}}}`, "outside of the project"},
		{`{"image": "a", "features": {"./x": {}}}`, "has no install.sh"},
		{`{"image": "a", "remoteEnv": {"A": null}}`, "A is null"},
		{`{"image": "a", "remoteEnv": {"A": "${containerEnv:PATH}"}}`, "${containerEnv:PATH} cannot be had"},
		{`{"image": "a", "forwardPorts": ["db:1"]}`, "db:1 is not a port"},
		{`{"image": "a", "forwardPorts": [0]}`, "0 is no port"},
		{`{"image": "a", "postCreateCommand": 1}`, "postCreateCommand is a command"},
		{`{"image": "a", "postCreateCommand": {"x": {}}}`, "x is a command"},
	} {
		_, err := Load(project(t, map[string]string{".devcontainer/devcontainer.json": tt.text}))
		if !errors.Is(err, warren.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v; want %q", tt.text, err, tt.want)
		}
	}
}

func FuzzDevcontainer(f *testing.F) {
	f.Add([]byte(`{"image": "a", /* b */ "features": {"./x": "1",}, } // c`))
	f.Add([]byte("/*"))
	f.Add([]byte(`"\`))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := devcontainer(b, dir, filepath.Join(dir, "devcontainer.json")); err == nil && r.Spec.Image == "" {
			t.Error("no image and no error")
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("setup: [a, {run: b}]\nservices: [{name: a, command: [b], ready: {tcp: true}}]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := parse(b); err == nil && r == nil {
			t.Error("neither a recipe nor an error")
		}
	})
}
