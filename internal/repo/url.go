package repo

import (
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/warren-sandbox/warren"
)

// Origin is where a repository comes from, taken apart.
//
// Two spellings are one repository, with one id, when they differ only in
//   - the case of scheme and host, a port that is the scheme's own, user and password of http and https;
//   - trailing slashes, doubled slashes and a trailing ".git" in the path;
//   - file:///p and /p, a symbolic link on the way to it, /p/.git, and /p for /p.git when only that exists.
//
// The scheme, another port, the user of ssh, upper and lower case of the path, and a query keep them apart. So do
// host:path and ssh://host/path, because the first is relative to a home directory.
type Origin struct {
	// URL is what git is given and what is stored: without user and password for http and https, without password for ssh.
	URL string
	// Path is set for a repository on this host: its directory.
	Path string
	// Scheme is "https", "http", "ssh" or "file".
	Scheme string

	key                string
	base               string // scheme and host, for credentials
	username, password string
}

var (
	scpLike = regexp.MustCompile(`^(?:([A-Za-z0-9._~-]+)@)?([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):([^/\\].*|/.*)$`)
	hostOK  = regexp.MustCompile(`^(?:[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])$`)
	userOK  = regexp.MustCompile(`^[A-Za-z0-9._~][A-Za-z0-9._~+-]*$`)
	portOK  = regexp.MustCompile(`^[0-9]{1,5}$`)
)

// maxURL is the longest URL in bytes.
const maxURL = 2048

// ParseOrigin takes a URL or an absolute path apart. It looks at the file system for a path only.
func ParseOrigin(raw string) (*Origin, error) {
	shown := redactURL(raw)
	bad := func(why string) error {
		return fmt.Errorf("repository %q: %s: %w", shown, why, warren.ErrInvalid)
	}
	switch {
	case raw == "":
		return nil, bad("the URL is empty")
	case len(raw) > maxURL:
		return nil, fmt.Errorf("repository URL: longer than %d bytes: %w", maxURL, warren.ErrInvalid)
	case raw[0] == '-':
		return nil, bad("starts with a dash")
	}
	for _, r := range raw {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == 0xfffd {
			return nil, bad("has a control character or is not UTF-8")
		}
	}
	if strings.HasPrefix(raw, "/") {
		return local(raw, bad)
	}
	if i := strings.Index(raw, "::"); i >= 0 && !strings.Contains(raw[:i], "/") && !strings.Contains(raw[:i], "[") {
		return nil, bad("remote helpers such as ext:: are not supported; use https, http, ssh, file or an absolute path")
	}
	if !strings.Contains(raw, "://") {
		m := scpLike.FindStringSubmatch(raw)
		if m == nil {
			return nil, bad("is neither a URL nor an absolute path")
		}
		user, host, p := m[1], strings.ToLower(m[2]), m[3]
		if user != "" && !userOK.MatchString(user) || !hostOK.MatchString(host) || strings.HasPrefix(p, "-") {
			return nil, bad("has a user, host or path that ssh may take for an option")
		}
		o := &Origin{URL: raw, Scheme: "ssh"}
		prefix := "/~/"
		if strings.HasPrefix(p, "/") {
			prefix = ""
		}
		o.key = "ssh://" + at(user) + host + prefix + cleanPath(p)
		return o, nil
	}
	u, err := url.Parse(raw)
	if err != nil {
		return nil, bad("is not a URL")
	}
	if u.Fragment != "" {
		return nil, bad("has a fragment")
	}
	scheme := strings.ToLower(u.Scheme)
	switch scheme {
	case "file":
		if u.Host != "" && u.Host != "localhost" || u.RawQuery != "" || u.User != nil {
			return nil, bad("a file URL is file:///absolute/path")
		}
		return local(u.Path, bad)
	case "https", "http", "ssh":
	case "git+ssh", "ssh+git":
		scheme = "ssh"
	default:
		return nil, bad("scheme " + u.Scheme + " is not supported; use https, http, ssh, file or an absolute path")
	}
	host, port := strings.ToLower(u.Hostname()), u.Port()
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	if !hostOK.MatchString(host) || port != "" && !portOK.MatchString(port) {
		return nil, bad("has no valid host")
	}
	if port == map[string]string{"https": "443", "http": "80", "ssh": "22"}[scheme] {
		port = ""
	}
	if port != "" {
		host += ":" + port
	}
	if strings.ContainsFunc(u.Path, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return nil, bad("has a control character")
	}
	p := cleanPath(u.EscapedPath())
	if p == "" || p == "/" {
		return nil, bad("has no path")
	}
	o := &Origin{Scheme: scheme, base: scheme + "://" + host}
	if u.User != nil {
		o.username = u.User.Username()
		o.password, _ = u.User.Password()
		if strings.ContainsFunc(o.username+o.password, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return nil, bad("has a control character in the user")
		}
	}
	if scheme == "ssh" {
		if o.username != "" && !userOK.MatchString(o.username) || strings.HasPrefix(strings.TrimPrefix(u.Path, "/"), "-") {
			return nil, bad("has a user or path that ssh may take for an option")
		}
		host = at(o.username) + host
		o.username, o.password = "", ""
	}
	o.URL = (&url.URL{Scheme: scheme, Host: "x", Path: u.Path, RawPath: u.RawPath, RawQuery: u.RawQuery}).String()
	o.URL = scheme + "://" + host + strings.TrimPrefix(o.URL, scheme+"://x")
	o.key = scheme + "://" + host + p
	if u.RawQuery != "" {
		o.key += "?" + u.RawQuery
	}
	return o, nil
}

func at(user string) string {
	if user == "" {
		return ""
	}
	return user + "@"
}

// cleanPath drops what does not tell repositories apart.
func cleanPath(p string) string {
	return strings.TrimSuffix(strings.TrimRight(path.Clean("/"+p), "/"), ".git")
}

// local finds the repository at a path of this host, as git would.
func local(p string, bad func(string) error) (*Origin, error) {
	if !filepath.IsAbs(p) || strings.ContainsRune(p, 0) {
		return nil, bad("is not an absolute path")
	}
	real, err := filepath.EvalSymlinks(filepath.Clean(p))
	if errors.Is(err, fs.ErrNotExist) {
		real, err = filepath.EvalSymlinks(filepath.Clean(p) + ".git")
	}
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = warren.ErrNotFound
		}
		return nil, fmt.Errorf("no repository at %s: %w", p, err)
	}
	if filepath.Base(real) == ".git" {
		real = filepath.Dir(real)
	}
	if _, err := os.Lstat(filepath.Join(real, ".git")); err != nil {
		if _, err := os.Lstat(filepath.Join(real, "HEAD")); err != nil {
			return nil, fmt.Errorf("%s is not a git repository: neither .git nor HEAD is there: %w", p, warren.ErrNotFound)
		}
	}
	return &Origin{URL: real, Path: real, Scheme: "file", key: "file://" + real}, nil
}

// ID returns the id that all spellings of the origin share.
func (o *Origin) ID() warren.RepoID {
	sum := sha256.Sum256([]byte(o.key))
	return warren.RepoID("r" + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:19])
}

// secrets are what must not show.
func (o *Origin) secrets() []string {
	if o.password != "" {
		return []string{o.password}
	}
	if o.username != "" { // a token alone
		return []string{o.username}
	}
	return nil
}

// redactURL takes whatever may be a user part out of a string that may not be a URL.
func redactURL(raw string) string {
	if i := strings.Index(raw, "://"); i >= 0 {
		rest := raw[i+3:]
		end := strings.IndexAny(rest, "/?#")
		if end < 0 {
			end = len(rest)
		}
		if j := strings.LastIndex(rest[:end], "@"); j >= 0 {
			raw = raw[:i+3] + "***" + rest[j:]
		} else if j := strings.LastIndex(rest, "@"); j >= 0 && strings.Contains(rest[:j], ":") {
			raw = raw[:i+3] + "***" + rest[j:]
		}
	}
	if len(raw) > 200 {
		raw = raw[:200] + "..."
	}
	return raw
}

var (
	idOK     = regexp.MustCompile(`^r[a-z2-7]{19}$`)
	prefixOK = regexp.MustCompile(`^r[a-z2-7]{0,18}$`)
)
