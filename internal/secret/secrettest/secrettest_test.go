package secrettest_test

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/warren-sandbox/warren/internal/secret/secrettest"
	"github.com/warren-sandbox/warren/internal/testenv"
)

const canary = "canary+9f8e7d/6c5b&4a<39"

// Each way to leave a secret behind is found, and named.
func TestFinds(t *testing.T) {
	t.Parallel()
	s := secrettest.New(t, map[string]string{"first": canary, "second": "another-secret-value"})
	dir := t.TempDir()
	basic := "Basic " + base64.StdEncoding.EncodeToString([]byte("user:"+canary))
	for name, text := range map[string]string{
		"plain": "a " + canary + " b", "hex": hex.EncodeToString([]byte(canary)), "url": "?q=" + url.QueryEscape(canary), "basic": basic,
		"sub/end": strings.Repeat("x", 300_000) + canary, "nothing": "canary+9f8e7d/6c5b&4a<3 9",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("another-secret-value", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	list, files, err := s.Paths(dir)
	if err != nil || files != 6 {
		t.Fatalf("%d files, %v", files, err)
	}
	got := map[string]string{}
	for _, f := range list {
		rel, _ := filepath.Rel(dir, f.Where)
		got[rel] += f.Secret + " " + f.Form
	}
	want := map[string]string{"plain": "first plain", "hex": "first hex", "url": "first url", "basic": "first base64", "sub/end": "first plain", "link": "second name"}
	for name, what := range want {
		if got[name] != what {
			t.Errorf("%s: found %q, want %q", name, got[name], what)
		}
	}
	if len(got) != len(want) {
		t.Errorf("found %v", got)
	}
	if _, _, err := s.Paths(filepath.Join(dir, "none")); err == nil {
		t.Error("a directory that is not there was scanned")
	}
	if list, err := s.Reader("slow", iotest.OneByteReader(strings.NewReader("a\x00"+canary+"\x00b"))); err != nil || len(list) != 1 || list[0].At != 2 {
		t.Errorf("byte by byte: %v, %v", list, err)
	}
}

func TestProcess(t *testing.T) {
	t.Parallel()
	testenv.NeedsLinux(t)
	s := secrettest.New(t, map[string]string{"c": canary})
	run := func(env string) (found []secrettest.Finding, memory int64) {
		cmd := exec.Command("sleep", "60")
		cmd.Env = []string{env}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer cmd.Wait()
		defer cmd.Process.Kill()
		// Start returns in the middle of the exec: the kernel closes its pipe before it says where the environment stands.
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", cmd.Process.Pid)); err == nil && len(b) > 0 {
				break
			}
			if time.Now().After(end) {
				t.Fatal("a process without an environment")
			}
		}
		found, memory, err := s.Process(cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		return found, memory
	}
	if found, _ := run("TOKEN=" + canary); len(found) == 0 || !strings.Contains(found[0].Where, "environ") {
		t.Errorf("a secret in the environment: %v", found)
	} else if len(found) < 2 && os.Geteuid() == 0 {
		t.Errorf("it is in memory too: %v", found)
	}
	if found, memory := run("TOKEN=wsec_placeholder"); len(found) > 0 || memory == 0 && os.Geteuid() == 0 {
		t.Errorf("%d bytes of memory, %v", memory, found)
	}
}
