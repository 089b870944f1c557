package guest_test

import (
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"

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
	st, err := c.guest.Attach(testContext(t), connect.NewRequest(&guestv1.AttachRequest{NoFollow: true,
		Process: &guestv1.ProcessSelector{Selector: &guestv1.ProcessSelector_Tag{Tag: "service:web"}}}))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for st.Receive() {
		out.Write(st.Msg().GetOutput().GetStdout())
	}
	st.Close()
	if out.String() != "the sandbox mine in /usr\n" {
		t.Errorf("its output is %q, %v", out.String(), st.Err())
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
