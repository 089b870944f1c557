package failpoint

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

var testPoint = New("failpoint.test")

func TestActions(t *testing.T) {
	t.Cleanup(Clear)
	if err := testPoint.Hit(); err != nil {
		t.Fatalf("a point that is off returned %v", err)
	}
	if err := Set("failpoint.test=error:3"); err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= 4; i++ {
		if err := testPoint.Hit(); errors.Is(err, ErrInjected) != (i >= 3) {
			t.Errorf("hit %d: %v", i, err)
		}
	}
	if err := Set("failpoint.test=sleep:20ms"); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if err := testPoint.Hit(); err != nil || time.Since(start) < 20*time.Millisecond {
		t.Errorf("sleep: %v after %v", err, time.Since(start))
	}
	if err := Set("failpoint.test=panic"); err != nil {
		t.Fatal(err)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		testPoint.Hit()
	}()
}

func TestPending(t *testing.T) {
	t.Cleanup(Clear)
	if err := Set("failpoint.later=error"); err != nil {
		t.Fatal(err)
	}
	if err := Check(); err == nil {
		t.Error("an unknown name was not reported")
	}
	if err := New("failpoint.later").Hit(); !errors.Is(err, ErrInjected) {
		t.Errorf("got %v", err)
	}
	if err := Check(); err != nil {
		t.Error(err)
	}
	if !slices.Contains(Names(), "failpoint.later") {
		t.Error("Names misses a point")
	}
}

func TestSetRefuses(t *testing.T) {
	for _, spec := range []string{"x", "=kill", "x=", "x=explode", "x=sleep", "x=sleep:soon", "x=kill:0", "x=kill:1:2", "x=error:-1"} {
		if err := Set(spec); err == nil {
			t.Errorf("Set(%q) = nil", spec)
		}
	}
}

func TestKill(t *testing.T) {
	if os.Getenv("FAILPOINT_TEST_CHILD") != "" {
		testPoint.Hit()
		os.Exit(0)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestKill$")
	cmd.Env = append(os.Environ(), "FAILPOINT_TEST_CHILD=1", Env+"=failpoint.test=kill")
	err := cmd.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the child ended with %v, want SIGKILL", err)
	}
}

func FuzzSet(f *testing.F) {
	f.Add("a=kill,b=sleep:1ms:2")
	f.Fuzz(func(t *testing.T, spec string) {
		if strings.Contains(spec, "kill") || strings.Contains(spec, "panic") {
			return
		}
		Set(spec)
		Clear()
	})
}

func BenchmarkOff(b *testing.B) {
	for b.Loop() {
		testPoint.Hit()
	}
}
