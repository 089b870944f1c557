package driver_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

func good() *driver.Spec {
	return &driver.Spec{
		ID: "s0123456789abcdefghi", Hostname: "box", Env: []string{"A=", "B=c=d"},
		Mounts: []driver.Mount{{Source: "/srv", Target: "/data"}, {Source: "/srv", Target: "/data/sub"}},
		Root:   driver.Root{Binds: []driver.Bind{{Source: "/usr", Target: "/usr"}}},
		Limits: driver.Limits{CPUMillis: 1, Memory: 1, Disk: 1, PIDs: 1},
	}
}

func TestSpecCheck(t *testing.T) {
	if err := good().Check(); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*driver.Spec){
		"no id":              func(s *driver.Spec) { s.ID = "" },
		"path id":            func(s *driver.Spec) { s.ID = "../x" },
		"upper-case id":      func(s *driver.Spec) { s.ID = "S1" },
		"long id":            func(s *driver.Spec) { s.ID = warren.SandboxID(strings.Repeat("s", 65)) },
		"no host name":       func(s *driver.Spec) { s.Hostname = "" },
		"two lines":          func(s *driver.Spec) { s.Hostname = "a\n1.2.3.4 b" },
		"no memory":          func(s *driver.Spec) { s.Limits.Memory = 0 },
		"negative disk":      func(s *driver.Spec) { s.Limits.Disk = -1 },
		"no processes":       func(s *driver.Spec) { s.Limits.PIDs = 0 },
		"no processor":       func(s *driver.Spec) { s.Limits.CPUMillis = 0 },
		"relative target":    func(s *driver.Spec) { s.Mounts[0].Target = "data" },
		"unclean target":     func(s *driver.Spec) { s.Mounts[0].Target = "/data/../etc" },
		"root target":        func(s *driver.Spec) { s.Mounts[0].Target = "/" },
		"proc target":        func(s *driver.Spec) { s.Mounts[0].Target = "/proc/sys" },
		"NUL in a target":    func(s *driver.Spec) { s.Mounts[0].Target = "/a\x00b" },
		"one target twice":   func(s *driver.Spec) { s.Mounts[1].Target = "/data" },
		"no directory":       func(s *driver.Spec) { s.Mounts[0].Source = "" },
		"relative bind":      func(s *driver.Spec) { s.Root.Binds[0].Target = "usr" },
		"variable without =": func(s *driver.Spec) { s.Env = []string{"A"} },
		"nameless variable":  func(s *driver.Spec) { s.Env = []string{"=a"} },
		"NUL in a variable":  func(s *driver.Spec) { s.Env = []string{"A=b\x00"} },
	} {
		s := good()
		spoil(s)
		if err := s.Check(); !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
}
