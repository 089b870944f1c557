package guest_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/warren-sandbox/warren/internal/guest"
	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
)

func TestServices(t *testing.T) {
	s := newSandbox(t)
	s.settle(t, `{"envVars":{"OF":"the sandbox"}}`)
	c := newClients(s.trusted(), "http://guest")
	put := func(services ...*guestv1.Service) error {
		_, err := c.guest.PutServices(testContext(t), connect.NewRequest(&guestv1.PutServicesRequest{Services: services}))
		return err
	}
	list := func(wait int64) []*guestv1.ServiceStatus {
		t.Helper()
		res, err := c.guest.ListServices(testContext(t), connect.NewRequest(&guestv1.ListServicesRequest{WaitMs: wait}))
		if err != nil {
			t.Fatal(err)
		}
		return res.Msg.GetServices()
	}
	web := &guestv1.Service{Name: "web", Command: []string{"/bin/sh", "-c", `echo "$OF $MINE in $PWD"; exec sleep 1000`}, Dir: "/usr",
		Env: map[string]string{"MINE": "mine"}, Check: &guestv1.ServiceCheck{Command: []string{"/bin/sh", "-c", `test "$MINE" = mine && test $PWD = /usr`}, IntervalMs: 50}}
	if err := put(web, &guestv1.Service{Name: "job", Command: []string{"false"}, Restart: "never"}); err != nil {
		t.Fatal(err)
	}
	until(t, "the job has failed", func() bool { return list(0)[0].GetState() == "failed" })
	got := list(20000)
	if len(got) != 2 || got[0].GetService().GetName() != "job" || got[0].GetState() != "failed" || got[0].GetExitCode() != 1 ||
		got[1].GetState() != "ready" || got[1].GetPid() == 0 || got[1].GetSince() == nil || got[1].GetService().GetCheck().GetTimeoutMs() != 2000 {
		t.Fatalf("services: %v", got)
	}
	// Its output is that of a process of its tag.
	output := func() string {
		st, err := c.guest.Attach(testContext(t), connect.NewRequest(&guestv1.AttachRequest{NoFollow: true,
			Process: &guestv1.ProcessSelector{Selector: &guestv1.ProcessSelector_Tag{Tag: "service:web"}}}))
		if err != nil {
			t.Fatal(err)
		}
		defer st.Close()
		var out strings.Builder
		for st.Receive() {
			out.Write(st.Msg().GetOutput().GetStdout())
		}
		return out.String()
	}
	until(t, "it says what it has to say", func() bool { return output() != "" }) // its check asks nothing of that
	if out := output(); out != "the sandbox mine in /usr\n" {
		t.Errorf("its output is %q", out)
	}
	processes, err := c.guest.ListProcesses(testContext(t), connect.NewRequest(&guestv1.ListProcessesRequest{All: true}))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range processes.Msg.GetProcesses() {
		if !strings.HasPrefix(p.GetTag(), "service:") {
			t.Errorf("a check is listed as a process: %v", p)
		}
	}
	control := func(name, action string) error {
		_, err := c.guest.ControlService(testContext(t), connect.NewRequest(&guestv1.ControlServiceRequest{Name: name, Action: action}))
		return err
	}
	if err := control("web", "stop"); err != nil || list(0)[1].GetState() != "stopped" {
		t.Errorf("stop: %v, %v", err, list(0))
	}
	if err := control("web", "restart"); err != nil || list(20000)[1].GetState() != "ready" || list(0)[1].GetPid() == got[1].GetPid() {
		t.Errorf("restart: %v, %v", err, list(0))
	}
	wantCode(t, control("nobody", "stop"), connect.CodeNotFound)
	wantCode(t, control("web", "dance"), connect.CodeInvalidArgument)
	for what, bad := range map[string]*guestv1.Service{
		"no name": {Command: []string{"true"}}, "no command": {Name: "x"}, "user": {Name: "x", Command: []string{"true"}, User: "no-such-user"},
		"port": {Name: "x", Command: []string{"true"}, Port: 1 << 16}, "env": {Name: "x", Command: []string{"true"}, Env: map[string]string{"": "x"}},
		"policy": {Name: "x", Command: []string{"true"}, Restart: "maybe"}, "check": {Name: "x", Command: []string{"true"}, Check: &guestv1.ServiceCheck{}},
		"time": {Name: "x", Command: []string{"true"}, Check: &guestv1.ServiceCheck{Command: []string{"true"}, IntervalMs: -1 << 63}},
		"more": {Name: "x", Command: []string{"true"}, Check: &guestv1.ServiceCheck{Command: []string{"true"}, TimeoutMs: 1<<63 - 1}},
	} {
		t.Run(fmt.Sprint("bad ", what), func(t *testing.T) { wantCode(t, put(bad), connect.CodeInvalidArgument) })
	}
	if err := put(); err != nil || len(list(0)) != 0 {
		t.Errorf("none: %v, %v", err, list(0))
	}
}

// TestServicesOfFiles has a guest begin with the files of another, as one made of a snapshot without memory does.
func TestServicesOfFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "lib", "services.json")
	begin := func() (*sandbox, clients) {
		s := newSandbox(t, func(c *guest.Config) { c.ServicesFile = path })
		return s, newClients(s.trusted(), "http://guest")
	}
	put := func(c clients, services ...*guestv1.Service) error {
		_, err := c.guest.PutServices(testContext(t), connect.NewRequest(&guestv1.PutServicesRequest{Services: services}))
		return err
	}
	list := func(c clients) []*guestv1.ServiceStatus {
		t.Helper()
		res, err := c.guest.ListServices(testContext(t), connect.NewRequest(&guestv1.ListServicesRequest{WaitMs: 20000}))
		if err != nil {
			t.Fatal(err)
		}
		return res.Msg.GetServices()
	}
	first, c := begin()
	first.settle(t, `{"envVars":{"OF":"the first"}}`)
	web := &guestv1.Service{Name: "web", Command: []string{"/bin/sh", "-c", `test "$OF" = "the second" || exec sleep 1000; exec sleep 2000`}, Restart: "always",
		Env: map[string]string{"MINE": "mine \"quoted\""}, Check: &guestv1.ServiceCheck{Command: []string{"true"}, IntervalMs: 50, Retries: 7}}
	if err := put(c, web); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("the file: %v, %v", fi, err)
	}
	want := list(c)[0].GetService()

	second, c2 := begin()
	if got := list(c2); len(got) != 0 {
		t.Fatalf("services before the guest knows who it is: %v", got)
	}
	second.settle(t, `{"envVars":{"OF":"the second"}}`)
	got := list(c2)
	if len(got) != 1 || got[0].GetState() != "ready" || !proto.Equal(got[0].GetService(), want) {
		t.Fatalf("services of the files: %v, want %v", got, want)
	}
	processes, err := c2.guest.ListProcesses(testContext(t), connect.NewRequest(&guestv1.ListProcessesRequest{}))
	if err != nil || len(processes.Msg.GetProcesses()) != 1 {
		t.Errorf("processes: %v, %v", processes, err)
	}
	// Told once more, it does not begin again; and what is refused is not kept.
	if err := put(c2); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file without services: %v", err)
	}
	if err := put(c2, &guestv1.Service{Name: "bad"}); err == nil {
		t.Error("a service without a command is taken")
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file after a refusal: %v", err)
	}
	second.settle(t, `{"envVars":{}}`)
	if got := list(c2); len(got) != 0 {
		t.Errorf("services after the second event: %v", got)
	}

	// A file that is none hinders nothing.
	for name, content := range map[string]string{"no JSON": "{", "no services": `{"services":[{"name":"x"}]}`, "large": strings.Repeat(" ", 2<<20), "a list": "[]"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		s, c := begin()
		s.settle(t, `{"envVars":{}}`)
		if got := list(c); len(got) != 0 {
			t.Errorf("%s: %v", name, got)
		}
	}
}
