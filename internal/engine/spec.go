package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

var errUnsupported = errors.ErrUnsupported

// What a spec may hold.
const (
	maxEnv      = 256
	maxEnvBytes = 128 << 10
	maxLabels   = 64
	maxLabelKey = 128
	maxLabel    = 1024
	maxMounts   = 32
	maxPath     = 4095
	maxTimeout  = 10 * 365 * 24 * time.Hour
	maxKey      = 256
	maxRef      = 4096
	minMemory   = 32 << 20
	minDisk     = 1 << 20
	minPIDs     = 16
)

var (
	nameForm = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)
	envForm  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,255}$`)
)

// invalid says which field of a request is wrong, with which value, and what is allowed.
func invalid(field, value, allowed string) error {
	return fmt.Errorf("%s %s: %s: %w", field, quote(value), allowed, warren.ErrInvalid)
}

func quote(v string) string {
	if len(v) > 80 {
		cut := 77
		for cut > 0 && !utf8.RuneStart(v[cut]) {
			cut--
		}
		return fmt.Sprintf("%q", v[:cut]) + "…"
	}
	return fmt.Sprintf("%q", v)
}

func validName(name string) error {
	if !nameForm.MatchString(name) {
		return invalid("name", name, "want 1 to 63 of a-z, 0-9 and -, not - first")
	}
	// Of any kind: what has a name like the id of another would be taken for it.
	if isID(name, 's') || isID(name, 'w') || isID(name, 'p') || isID(name, 'm') {
		return invalid("name", name, "it looks like an id; choose another")
	}
	return nil
}

// text checks what is kept and shown as it is.
func text(field, v string, most int) error {
	switch {
	case len(v) > most:
		return invalid(field, v, fmt.Sprintf("longer than %d bytes", most))
	case !utf8.ValidString(v):
		return invalid(field, v, "not UTF-8")
	case strings.ContainsFunc(v, func(r rune) bool { return r < 0x20 || r == 0x7f }):
		return invalid(field, v, "control characters are not allowed")
	}
	return nil
}

// normal checks all of a spec that can be checked without changing anything, and fills in its defaults.
func (e *Engine) normal(ctx context.Context, c Caller, s *Spec) error {
	if s.Name != "" {
		if err := validName(s.Name); err != nil {
			return err
		}
	}
	if s.Image == "" {
		s.Image = e.opts.DefaultImage
	}
	if err := text("image", s.Image, 512); err != nil {
		return err
	}
	if s.Repo != nil && s.WorkspaceID != "" {
		return invalid("workspace", s.WorkspaceID, "a workspace that exists cannot be cut from a repo; give one of the two")
	}
	if s.Repo != nil {
		if err := checkRepo(c, s.Repo); err != nil {
			return err
		}
	}
	if s.Driver == "" {
		s.Driver = e.opts.DefaultDriver
	}
	d := e.opts.Drivers[s.Driver]
	if d == nil {
		has := "this server has " + driverNames(e.opts.Drivers)
		if why := e.opts.Unavailable[s.Driver]; why != "" {
			has = fmt.Sprintf("it could not be opened when the server started: %s; %s; once that is mended, `warren shutdown` and try again, for a server looks only when it starts", why, has)
		}
		return invalid("driver", s.Driver, has)
	}
	if err := checkOptions(s.Driver, d, s.DriverOptions); err != nil {
		return err
	}
	if err := e.checkPolicy(ctx, s, d); err != nil {
		return err
	}
	if err := checkPeers(s); err != nil {
		return err
	}
	if err := e.checkResources(&s.Resources); err != nil {
		return err
	}
	if err := checkEnv(s.Env); err != nil {
		return err
	}
	if err := checkLabels(s.Labels); err != nil {
		return err
	}
	if err := checkTargets(s.Mounts); err != nil {
		return err
	}
	switch s.Restart {
	case "":
		s.Restart = RestartNever
	case RestartNever, RestartOnFailure:
	default:
		return invalid("restart", string(s.Restart), "want never or on-failure")
	}
	if s.IdleTimeout == 0 {
		s.IdleTimeout = e.opts.DefaultIdleTimeout
	}
	if err := checkTimeout("idle timeout", s.IdleTimeout); err != nil {
		return err
	}
	if err := e.checkAction("idle action", s.IdleAction, s.Driver); err != nil {
		return err
	}
	if err := e.checkAction("ttl action", s.TTLAction, s.Driver); err != nil {
		return err
	}
	if err := checkTimeout("max lifetime", s.MaxLifetime); err != nil {
		return err
	}
	switch most := e.opts.MaxLifetime; {
	case most == 0:
	case s.MaxLifetime == 0:
		s.MaxLifetime = most
	case s.MaxLifetime > most:
		return invalid("max lifetime", s.MaxLifetime.String(), fmt.Sprintf("this server gives no sandbox more than %s", most))
	}
	return checkTimeout("ttl", s.TTL)
}

// normalFrom is normal for a spec that [Engine.from] has filled. Its repo only says where the snapshot's files once came from: it is
// not read again, so it takes no right to read it.
func (e *Engine) normalFrom(ctx context.Context, c Caller, s *Spec) error {
	repo := s.Repo
	s.Repo = nil
	err := e.normal(ctx, c, s)
	s.Repo = repo
	return err
}

func checkTimeout(field string, d time.Duration) error {
	if d < 0 || d > maxTimeout || (d > 0 && d < time.Second) {
		return invalid(field, d.String(), "want 0 for none, or between 1s and 10 years")
	}
	return nil
}

func (e *Engine) checkResources(r *Resources) error {
	def, most := e.opts.Defaults, e.opts.Max
	fill := func(field string, v *int64, def, least, most int64, show func(int64) string) error {
		if *v == 0 {
			*v = def
			if most > 0 {
				*v = min(def, most)
			}
			return nil
		}
		if *v < least {
			return invalid(field, show(*v), "the least is "+show(least))
		}
		if most > 0 && *v > most {
			return invalid(field, show(*v), "this server allows at most "+show(most))
		}
		return nil
	}
	cpu, pids := int64(r.CPUMillis), int64(r.PIDs)
	count := func(n int64) string { return fmt.Sprint(n) }
	if err := fill("cpu", &cpu, int64(def.CPUMillis), 10, int64(most.CPUMillis), processors); err != nil {
		return err
	}
	if err := fill("pids", &pids, int64(def.PIDs), minPIDs, int64(most.PIDs), count); err != nil {
		return err
	}
	r.CPUMillis, r.PIDs = uint32(cpu), uint32(pids)
	if err := fill("memory", &r.MemoryBytes, def.Memory, minMemory, most.Memory, size); err != nil {
		return err
	}
	return fill("disk", &r.DiskBytes, def.Disk, minDisk, most.Disk, size)
}

func (r Resources) limits() driver.Limits {
	return driver.Limits{CPUMillis: r.CPUMillis, Memory: r.MemoryBytes, Disk: r.DiskBytes, PIDs: r.PIDs}
}

func checkEnv(env map[string]string) error {
	if len(env) > maxEnv {
		return invalid("env", fmt.Sprintf("%d variables", len(env)), fmt.Sprintf("at most %d", maxEnv))
	}
	total := 0
	for _, k := range sortedKeys(env) {
		if !envForm.MatchString(k) {
			return invalid("env", k, "a name has letters, digits and _, and no digit first")
		}
		if strings.ContainsRune(env[k], 0) || !utf8.ValidString(env[k]) {
			return fmt.Errorf("env %q: its value must be UTF-8 without NUL: %w", k, warren.ErrInvalid) // the value may be a secret
		}
		total += len(k) + len(env[k])
	}
	if total > maxEnvBytes {
		return invalid("env", size(int64(total)), "at most "+size(maxEnvBytes)+" together")
	}
	return nil
}

func checkLabels(labels map[string]string) error {
	if len(labels) > maxLabels {
		return invalid("labels", fmt.Sprintf("%d labels", len(labels)), fmt.Sprintf("at most %d", maxLabels))
	}
	for _, k := range sortedKeys(labels) {
		if k == "" {
			return invalid("label", k, "a key is needed")
		}
		if err := text("label key", k, maxLabelKey); err != nil {
			return err
		}
		if err := text("label "+quote(k), labels[k], maxLabel); err != nil {
			return err
		}
	}
	return nil
}

// OptionChecker is what a driver has that can judge its options before anything is made.
type OptionChecker interface {
	CheckOptions(options map[string]string) error
}

func checkOptions(name string, d driver.Driver, options map[string]string) error {
	if len(options) == 0 {
		return nil
	}
	for _, k := range sortedKeys(options) {
		if err := text("driver option", k, 128); err != nil {
			return err
		}
		if err := text("driver option "+quote(k), options[k], maxPath); err != nil {
			return err
		}
	}
	if x, ok := driver.As[OptionChecker](d); ok {
		return x.CheckOptions(options)
	}
	return nil // the driver refuses what it does not know, at its create
}

// local says whether a repository's URL is read from the host's file system. What is not plainly remote is local.
func local(url string) bool {
	for _, scheme := range []string{"https://", "http://", "ssh://", "git://", "git+ssh://"} {
		if strings.HasPrefix(url, scheme) {
			return false
		}
	}
	// git's short form of ssh: [user@]host:path, with no slash before the colon and no transport helper's double colon.
	host, rest, ok := strings.Cut(url, ":")
	return !ok || strings.Contains(host, "/") || strings.HasPrefix(rest, ":") || strings.HasPrefix(rest, "//") || host == "file"
}

// foreignKind returns the scheme, or the transport helper with its double colon, that nobody may use, or "".
func foreignKind(url string) string {
	if helper, _, ok := strings.Cut(url, "::"); ok && !strings.ContainsAny(helper, "/[") {
		return helper + "::"
	}
	scheme, _, ok := strings.Cut(url, "://")
	if !ok || strings.Contains(scheme, "/") || scheme == "file" || !local(url) {
		return ""
	}
	return scheme + "://"
}

func checkRepo(c Caller, r *RepoSource) error {
	if r.URL == "" {
		return invalid("repo", r.URL, "a URL or path is needed")
	}
	if err := text("repo", r.URL, maxRef); err != nil {
		return err
	}
	if err := text("ref", r.Ref, 1024); err != nil {
		return err
	}
	if strings.HasPrefix(r.URL, "-") || strings.HasPrefix(r.Ref, "-") {
		return invalid("repo", r.URL+"@"+r.Ref, "neither may begin with -")
	}
	if kind := foreignKind(r.URL); kind != "" {
		return invalid("repo", r.URL, fmt.Sprintf("URLs of the kind %s are not allowed; give an https, http or ssh URL, or as the operator of this server an absolute path", quote(kind)))
	}
	if !local(r.URL) {
		if r.Dirty {
			return invalid("repo", r.URL, "only a path has uncommitted changes")
		}
		return nil
	}
	if !c.Operator {
		return fmt.Errorf("repo %s is a path on the server; only its operator may use those, others give an https or ssh URL: %w", quote(r.URL), warren.ErrDenied)
	}
	if p := strings.TrimPrefix(r.URL, "file://"); !path.IsAbs(p) {
		return invalid("repo", r.URL, "want an https, ssh or file URL, or an absolute path")
	}
	return nil
}

func checkUpdate(r UpdateRequest) error {
	if r.Name != nil && *r.Name != "" {
		if err := validName(*r.Name); err != nil {
			return err
		}
	}
	if err := checkLabels(r.SetLabels); err != nil {
		return err
	}
	if n := r.PrivateNetwork; n != nil && *n != "" && *n != noPeers {
		if err := checkNetwork(*n); err != nil {
			return err
		}
	}
	if r.IdleTimeout != nil {
		if err := checkTimeout("idle timeout", *r.IdleTimeout); err != nil {
			return err
		}
	}
	if r.TTL != nil {
		return checkTimeout("ttl", *r.TTL)
	}
	return nil
}

func checkKey(key string) error { return text("idempotency key", key, maxKey) }

// fingerprint names the content of a request, so that a reused key with another request shows.
func fingerprint(v any) string {
	b, err := json.Marshal(v) // maps are written in order of their keys
	if err != nil {
		panic(err) // requests are structs of plain values
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// clone makes a spec that shares nothing with the caller's.
func (s Spec) clone() Spec {
	s.Env, s.Labels, s.DriverOptions = maps.Clone(s.Env), maps.Clone(s.Labels), maps.Clone(s.DriverOptions)
	s.Mounts = slices.Clone(s.Mounts)
	if s.Repo != nil {
		r := *s.Repo
		s.Repo = &r
	}
	return s
}
