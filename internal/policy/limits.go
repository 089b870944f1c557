package policy

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Limits are ceilings for one sandbox. 0 means none beyond the gateway's own.
type Limits struct {
	// Connections may be open at once.
	Connections int
	// BytesUp and BytesDown may pass over the sandbox's life, out of it and into it.
	BytesUp, BytesDown int64
	// RequestsPerMinute may be sent over inspected connections, and as many connections of the other kind be made.
	RequestsPerMinute int
	// NewHostsPerHour may be connected to that the sandbox has not been connected to before.
	NewHostsPerHour int
}

// Limits returns the ceilings.
func (p *Policy) Limits() Limits { return p.limits }

func (p *parser) parseLimits(n *yaml.Node) {
	keys, ok := p.mapping(n, "", "limits", "connections", "bytes_up", "bytes_down", "requests_per_minute", "new_hosts_per_hour")
	if !ok {
		return
	}
	for _, l := range []struct {
		key string
		to  *int
	}{{"connections", &p.limits.Connections}, {"requests_per_minute", &p.limits.RequestsPerMinute}, {"new_hosts_per_hour", &p.limits.NewHostsPerHour}} {
		if keys[l.key] == nil {
			continue
		}
		s := p.text(keys[l.key], "", "limits."+l.key)
		n, err := strconv.ParseUint(s, 10, 31)
		if s != "" && err != nil {
			p.bad(keys[l.key], "", fmt.Sprintf("limits.%s is %.60q", l.key, s), "want a whole number, 0 for no ceiling of the policy's")
		}
		*l.to = int(n)
	}
	for _, l := range []struct {
		key string
		to  *int64
	}{{"bytes_up", &p.limits.BytesUp}, {"bytes_down", &p.limits.BytesDown}} {
		if keys[l.key] == nil {
			continue
		}
		s := p.text(keys[l.key], "", "limits."+l.key)
		n, ok := size(s)
		if s != "" && !ok {
			p.bad(keys[l.key], "", fmt.Sprintf("limits.%s is %.60q", l.key, s), "want a number with a unit, such as 512MiB or 2GB, 0 for no ceiling of the policy's")
		}
		*l.to = n
	}
}

var sizePattern = regexp.MustCompile(`^(\d+(?:\.\d+)?) ?(?i)(|b|[kmgt]|[kmgt]b|[kmgt]ib)$`)

// size reads 512MiB, 2G or 1000000. K, M, G and T, with or without iB, count by 1024; KB and so on by 1000.
func size(s string) (int64, bool) {
	m := sizePattern.FindStringSubmatch(s)
	if m == nil {
		return 0, false
	}
	number, unit := m[1], strings.ToLower(m[2])
	factor, base := 1.0, 1024.0
	if len(unit) == 2 {
		base = 1000
	}
	if unit != "" && unit != "b" {
		factor = math.Pow(base, float64(1+strings.IndexByte("kmgt", unit[0])))
	}
	if factor == 1 {
		n, err := strconv.ParseInt(number, 10, 64)
		return n, err == nil
	}
	f, err := strconv.ParseFloat(number, 64)
	if f *= factor; err != nil || f >= math.MaxInt64 {
		return 0, false
	}
	return int64(f), true
}
