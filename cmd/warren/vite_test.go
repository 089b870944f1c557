//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/testenv"
)

const viteVersion = "5.4.11"

// viteProject is a small project whose one module has to be transformed: TypeScript, by a process of the server's own.
var viteProject = map[string]string{
	"package.json": `{"name": "app", "private": true, "type": "module"}`,
	"index.html":   `<!doctype html><div id="app"></div><script type="module" src="/src/main.ts"></script>`,
	"src/main.ts":  `import { word } from './word'; const app: HTMLElement = document.getElementById('app')!; app.textContent = word;`,
	"src/word.ts":  viteWord("first"),
}

func viteWord(word string) string { return "export const word: string = '" + word + "';\n" }

// npmInstall installs a package into the checkout's cache, once, and returns the directory that has node_modules.
func npmInstall(t *testing.T, name, version string) string {
	t.Helper()
	testenv.NeedsTool(t, "node", "npm")
	cache := filepath.Join(testenv.Repo(t), ".cache", "npm")
	dir := filepath.Join(cache, name+"-"+version)
	pkg := filepath.Join(dir, "node_modules", name)
	if _, err := os.Stat(pkg); err == nil {
		return dir
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		t.Fatal(err)
	}
	tmp, err := os.MkdirTemp(cache, "install-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(tmp)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", tmp, name+"@"+version)
	if out, err := cmd.CombinedOutput(); err != nil {
		testenv.Skip(t, fmt.Sprintf("npm cannot install %s@%s: %v\n%s", name, version, err, out))
	}
	// Another test may have been faster.
	if err := os.Rename(tmp, dir); err != nil {
		if _, err := os.Stat(pkg); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// startVite makes the sandbox s, in which Vite serves its project on port 5173.
func (h *home) startVite(modules string) {
	h.t.Helper()
	app := h.t.TempDir()
	for name, text := range viteProject {
		name = filepath.Join(app, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			h.t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			h.t.Fatal(err)
		}
	}
	h.warren("create", "--name", "s", "--memory", "1GiB")
	h.warren("cp", app, "s:/workspace/app")
	h.warren("cp", filepath.Join(modules, "node_modules"), "s:/workspace/app/node_modules")
	h.warren("exec", "-d", "-w", "/workspace/app", "--tag", "vite", "s", "--",
		"node", "node_modules/vite/bin/vite.js", "--host", "127.0.0.1", "--port", "5173", "--strictPort")
}

// TestDevServer holds a Vite development server to its work through a pause and in forks: it serves, it has its files transformed by
// its own process, and it sees what changes in its sandbox and only there.
func TestDevServer(t *testing.T) {
	modules := npmInstall(t, "vite", viteVersion)
	h := newHome(t)
	h.startVite(modules)

	c, err := warren.Connect(t.Context(), warren.Options{URL: "unix://" + filepath.Join(h.dir, "warren.sock")})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	get := func(name, path string) (string, error) {
		sb := c.Ref(name)
		client := http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return sb.Dial(ctx, 5173) },
		}}
		res, err := client.Get("http://localhost:5173" + path)
		if err != nil {
			return "", err
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		if err == nil && res.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s: %s", res.Status, body)
		}
		return string(body), err
	}
	// serves waits until a path has a text.
	serves := func(name, path, want string) {
		t.Helper()
		deadline := time.Now().Add(time.Minute)
		for {
			body, err := get(name, path)
			if err == nil && strings.Contains(body, want) {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s: %s is %q, %v; want %q in it\n%s", name, path, body, err, want, h.warren("logs", "s", "vite"))
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	// change checks that it serves at once, as before, and that it sees a change.
	change := func(name, was, word string) {
		t.Helper()
		for path, want := range map[string]string{"/": "/@vite/client", "/src/word.ts": `word = "` + was + `"`, "/@vite/client": "HMRContext"} {
			if body, err := get(name, path); err != nil || !strings.Contains(body, want) {
				t.Fatalf("%s: %s is %.2000q, %v; want %q in it", name, path, body, err, want)
			}
		}
		if err := c.Ref(name).FS().WriteFile("workspace/app/src/word.ts", []byte(viteWord(word)), 0o644); err != nil {
			t.Fatal(err)
		}
		serves(name, "/src/word.ts", `word = "`+word+`"`)
	}
	serves("s", "/src/word.ts", `word = "first"`)
	serves("s", "/src/main.ts", "word.ts")
	change("s", "first", "second")
	h.warren("pause", "s")
	h.warren("resume", "s")
	change("s", "second", "third")
	h.warren("fork", "-n", "3", "--name", "kid", "s")
	for i := range 3 {
		kid := fmt.Sprintf("kid-%d", i+1)
		change(kid, "third", kid)
	}
	change("s", "third", "fourth")
	for i := range 3 {
		kid := fmt.Sprintf("kid-%d", i+1)
		change(kid, kid, "end")
	}
	h.warren("rm", "s", "kid-1", "kid-2", "kid-3")
}
