package git

import (
	"bytes"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
)

// messages takes what git writes to stderr: it hands on progress and keeps the end for the error.
type messages struct {
	progress func(string)
	secrets  []string

	mu   sync.Mutex
	line []byte
	kept []string
	size int
}

// Write splits p into lines; git ends a line of progress with a carriage return.
func (m *messages) Write(p []byte) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := len(p)
	for len(p) > 0 {
		i := bytes.IndexAny(p, "\r\n")
		if i < 0 {
			if room := maxStderr - len(m.line); room > 0 {
				m.line = append(m.line, p[:min(room, len(p))]...)
			}
			break
		}
		if room := maxStderr - len(m.line); room > 0 {
			m.line = append(m.line, p[:min(room, i)]...)
		}
		m.take(p[i] == '\n')
		p = p[i+1:]
	}
	return n, nil
}

func (m *messages) take(keep bool) {
	s := Redact(printable(strings.TrimSpace(string(m.line))), m.secrets...)
	m.line = m.line[:0]
	if s == "" {
		return
	}
	if m.progress != nil {
		m.progress(s)
	}
	if !keep {
		return
	}
	if _, _, _, ok := ParseProgress(s); ok {
		return
	}
	m.kept = append(m.kept, s)
	m.size += len(s)
	for m.size > maxStderr || len(m.kept) > 12 {
		m.size -= len(m.kept[0])
		m.kept = m.kept[1:]
	}
}

// last returns the end of what git said, most telling line first.
func (m *messages) last() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.line) > 0 {
		m.take(true)
	}
	var out []string
	for _, s := range m.kept {
		if strings.HasPrefix(s, "hint:") || strings.HasPrefix(s, "warning: ") && len(m.kept) > 1 {
			continue
		}
		out = append(out, strings.TrimPrefix(strings.TrimPrefix(s, "fatal: "), "error: "))
	}
	return strings.Join(out[max(0, len(out)-4):], "; ")
}

// printable replaces control characters: what git repeats may come from a hostile repository or server.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' && r != '\t' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}

// userinfo finds credentials in what looks like a URL.
var userinfo = regexp.MustCompile(`([a-zA-Z][a-zA-Z0-9+.-]*://)([^/@\s'"]+)@`)

// Redact takes the given secrets and the user part of any URL out of a message.
func Redact(s string, secrets ...string) string {
	for _, x := range secrets {
		if x != "" {
			s = strings.ReplaceAll(s, x, "***")
			s = strings.ReplaceAll(s, url.QueryEscape(x), "***")
			s = strings.ReplaceAll(s, url.PathEscape(x), "***")
		}
	}
	return userinfo.ReplaceAllStringFunc(s, func(m string) string {
		g := userinfo.FindStringSubmatch(m)
		if !strings.Contains(g[2], ":") && strings.HasSuffix(g[1], "ssh://") {
			return m
		}
		return g[1] + "***@"
	})
}

var progressLine = regexp.MustCompile(`^(?:remote: )?([A-Z][A-Za-z ]+): +(?:\d+% \((\d+)/(\d+)\)|(\d+))(?:[,.].*)?$`)

// ParseProgress reads a line such as "Receiving objects:  45% (450/1000), 1.20 MiB | 2.00 MiB/s"; total is 0 when
// git does not know it.
func ParseProgress(line string) (what string, done, total int64, ok bool) {
	m := progressLine.FindStringSubmatch(line)
	if m == nil {
		return "", 0, 0, false
	}
	if m[4] != "" {
		done, _ = strconv.ParseInt(m[4], 10, 64)
		return m[1], done, 0, true
	}
	done, _ = strconv.ParseInt(m[2], 10, 64)
	total, _ = strconv.ParseInt(m[3], 10, 64)
	return m[1], done, total, true
}
