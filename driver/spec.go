package driver

import (
	"fmt"
	"path"
	"strings"

	"github.com/warren-sandbox/warren"
)

// Check returns an error that matches [warren.ErrInvalid] when no driver could honour the spec. Drivers call it first, and
// then refuse what they themselves cannot do.
func (s *Spec) Check() error {
	if !validID(string(s.ID)) {
		return invalid("id %.80q: 1 to 64 of a-z, 0-9 and dashes", s.ID)
	}
	if !validHostname(s.Hostname) {
		return invalid("host name %.80q: 1 to 63 letters, digits, dots and dashes", s.Hostname)
	}
	if l := s.Limits; l.CPUMillis == 0 || l.Memory <= 0 || l.Disk <= 0 || l.PIDs == 0 {
		return invalid("every limit must be set and positive: %+v", l)
	}
	seen := map[string]bool{}
	for _, m := range s.Mounts {
		if err := checkTarget("mount", m.Target); err != nil {
			return err
		}
		if seen[m.Target] {
			return invalid("two mounts on %s", m.Target)
		}
		if m.Dir == nil && m.Source == "" {
			return invalid("the mount on %s has no directory", m.Target)
		}
		for _, taken := range []string{"/proc", "/sys", "/dev", "/.warren/guest"} {
			if m.Target == taken || strings.HasPrefix(m.Target, taken+"/") {
				return invalid("mount target %s: %s belongs to the sandbox", m.Target, taken)
			}
		}
		seen[m.Target] = true
	}
	for _, b := range s.Root.Binds {
		if err := checkTarget("bind", b.Target); err != nil {
			return err
		}
	}
	for _, e := range s.Env {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" || strings.ContainsRune(e, 0) {
			return invalid("environment entry %.80q is not NAME=VALUE", e)
		}
	}
	return nil
}

func invalid(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, warren.ErrInvalid)...)
}

func checkTarget(what, target string) error {
	if !path.IsAbs(target) || path.Clean(target) != target || target == "/" || target == "/.warren" || strings.ContainsRune(target, 0) {
		return invalid("%s target %.200q must be an absolute, clean path below the root", what, target)
	}
	return nil
}

func validID(s string) bool {
	if s == "" || len(s) > 64 || s[0] == '-' {
		return false
	}
	return strings.IndexFunc(s, func(r rune) bool { return !(r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-') }) < 0
}

// validHostname keeps a name from adding lines to files such as /etc/hosts.
func validHostname(s string) bool {
	if s == "" || len(s) > 63 {
		return false
	}
	return strings.IndexFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '.')
	}) < 0
}
