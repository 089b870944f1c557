package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/warren-sandbox/warren"
)

// Size is a number of bytes that people write as 512MiB, 2G or 1000000.
type Size int64

// The units of [ParseSize], also the ones that [Size.String] picks from.
const (
	KiB Size = 1 << (10 * (iota + 1))
	MiB
	GiB
	TiB
)

// ParseSize reads a size. K, M, G and T, with or without iB, count by 1024; KB, MB, GB and TB by 1000; a bare
// number is bytes. Case does not matter and a fraction is allowed before a unit: 1.5GiB.
func ParseSize(s string) (Size, error) {
	t := strings.TrimSpace(s)
	i := strings.IndexFunc(t, func(r rune) bool { return (r < '0' || r > '9') && r != '.' })
	if i < 0 {
		i = len(t)
	}
	number, unit := t[:i], strings.ToLower(strings.TrimSpace(t[i:]))
	factor, ok := map[string]float64{
		"": 1, "b": 1,
		"k": 1 << 10, "kib": 1 << 10, "kb": 1e3,
		"m": 1 << 20, "mib": 1 << 20, "mb": 1e6,
		"g": 1 << 30, "gib": 1 << 30, "gb": 1e9,
		"t": 1 << 40, "tib": 1 << 40, "tb": 1e12,
	}[unit]
	if !ok || number == "" {
		return 0, fmt.Errorf("size %q: %w: want a number with a unit, such as 512MiB or 2G", s, warren.ErrInvalid)
	}
	if !strings.Contains(number, ".") && factor == 1 {
		n, err := strconv.ParseInt(number, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("size %q: %w: too large", s, warren.ErrInvalid)
		}
		return Size(n), nil
	}
	f, err := strconv.ParseFloat(number, 64)
	if err != nil || unit == "" {
		return 0, fmt.Errorf("size %q: %w: want a number with a unit, such as 512MiB or 2G", s, warren.ErrInvalid)
	}
	f *= factor
	if f >= math.MaxInt64 {
		return 0, fmt.Errorf("size %q: %w: too large", s, warren.ErrInvalid)
	}
	return Size(f), nil
}

// String writes the size with the largest unit that leaves at least 1: "512MiB", "1.5GiB", "12B".
func (s Size) String() string {
	for _, u := range []struct {
		size Size
		name string
	}{{TiB, "TiB"}, {GiB, "GiB"}, {MiB, "MiB"}, {KiB, "KiB"}} {
		if s >= u.size {
			return strconv.FormatFloat(math.Round(float64(s)/float64(u.size)*10)/10, 'f', -1, 64) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10) + "B"
}

// Set reads the size of a flag or a configuration file.
func (s *Size) Set(v string) error {
	n, err := ParseSize(v)
	if err != nil {
		return err
	}
	*s = n
	return nil
}

// Type names the kind of value in the help of a flag.
func (*Size) Type() string { return "SIZE" }

// CPUs is a number of processors in thousandths, which people write as 2, 0.5 or 1.25.
type CPUs uint32

// ParseCPUs reads a number of processors with at most three decimals.
func ParseCPUs(s string) (CPUs, error) {
	f, err := strconv.ParseFloat(strings.TrimSpace(s), 64)
	if err != nil || math.IsNaN(f) || f < 0.001 || f > 1e6 {
		return 0, fmt.Errorf("processors %q: %w: want a number such as 2 or 0.5", s, warren.ErrInvalid)
	}
	return CPUs(math.Round(f * 1000)), nil
}

// String writes 1500 as "1.5".
func (c CPUs) String() string { return strconv.FormatFloat(float64(c)/1000, 'f', -1, 64) }

// Set reads the value of a flag or a configuration file.
func (c *CPUs) Set(v string) error {
	n, err := ParseCPUs(v)
	if err != nil {
		return err
	}
	*c = n
	return nil
}

// Type names the kind of value in the help of a flag.
func (*CPUs) Type() string { return "N" }
