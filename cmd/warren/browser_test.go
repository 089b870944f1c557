//go:build linux

package main

import (
	"bufio"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/testenv"
)

const puppeteerVersion = "24.1.0"

// TestPreviewInBrowser looks at previews with a Chromium, whose path WARREN_BROWSER is: a Vite page that shows an edit inside of its
// sandbox, two previews that know nothing of each other, a sandbox that is woken, and the page that waits for a server. The browser's part is
// testdata/browser.mjs; it says a word where this side has to do something, and gets one back. Screenshots are artifacts of the test.
func TestPreviewInBrowser(t *testing.T) {
	testenv.NeedsLong(t, "WARREN_BROWSER")
	modules := npmInstall(t, "vite", viteVersion)
	puppeteer := npmInstall(t, "puppeteer-core", puppeteerVersion)
	h := newHome(t)
	h.startVite(modules)
	c, err := warren.Connect(t.Context(), warren.Options{URL: "unix://" + filepath.Join(h.dir, "warren.sock")})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for name, text := range map[string]string{
		"sw.js":     "self.addEventListener('fetch', (e) => { if (e.request.url.endsWith('/taken')) e.respondWith(new Response('taken')); });",
		"sub/sw.js": "",
		"shared.js": "onconnect = (e) => e.ports[0].postMessage('shared');",
	} {
		if err := c.Ref("s").FS().WriteFile("workspace/app/public/"+name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	h.warren("fork", "s", "--name", "other")
	link := func(name, port string) string { return h.warren("preview", name, port, "--no-open") }
	script, err := filepath.Abs(filepath.Join("testdata", "browser.mjs"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "node", script, os.Getenv("WARREN_BROWSER"), puppeteer, t.ArtifactDir(), link("s", "5173"), link("other", "5173"), link("s", "4000"))
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var did []string
	for lines := bufio.NewScanner(out); lines.Scan(); {
		word := lines.Text()
		switch word {
		case "edit":
			if err := c.Ref("s").FS().WriteFile("workspace/app/src/word.ts", []byte(viteWord("second")), 0o644); err != nil {
				t.Fatal(err)
			}
		case "pause":
			h.warren("pause", "s")
		case "state":
			// The page that is open has not woken it.
			if state := h.warren("ls", "-q", "--state", "paused"); state == "" {
				t.Error("the open page has woken the sandbox")
			}
		case "serve":
			h.warren("exec", "-d", "s", "--", "python3", "-m", "http.server", "--bind", "127.0.0.1", "--directory", "/workspace/app", "4000")
		default:
			t.Log(word)
			continue
		}
		did = append(did, word)
		if _, err := io.WriteString(in, "done\n"); err != nil {
			t.Fatal(err)
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the browser's part: %v", err)
	}
	if got := strings.Join(did, " "); got != "edit pause state serve" {
		t.Errorf("did %s", got)
	}
	h.warren("rm", "s", "other")
}
