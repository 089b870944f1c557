package secret

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
)

const (
	testValue = "tok_0123456789+/abcdef"
	ph        = "wsec_abcdefghijklmnopqrstuvwxyz234567"
	ph2       = "wsec_76543zyxwvutsrqponmlkjihgfedcba2"
)

func binding(p Place) Binding {
	return Binding{Grant: "github", Placeholder: ph, Place: p, Value: func() ([]byte, error) { return []byte(testValue), nil }}
}

func injector(t testing.TB, bindings ...Binding) *Injector {
	t.Helper()
	in, err := NewInjector(bindings, map[string]string{"other": ph2})
	if err != nil {
		t.Fatal(err)
	}
	return in
}

func request(t testing.TB, raw string, h http.Header, body string) *http.Request {
	t.Helper()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequest("POST", raw, r)
	if err != nil {
		t.Fatal(err)
	}
	if h != nil {
		req.Header = h
	}
	return req
}

var (
	bearer = Place{Kind: Header, Name: "authorization", Format: "Bearer {}"}
	apiKey = Place{Kind: Header, Name: "X-Api-Key"}
	basic  = Place{Kind: Basic, Username: "x-access-token"}
	query  = Place{Kind: Query, Name: "api_key"}
)

// Whatever the sandbox put into the place, the value is there once and nothing else.
func TestInjectWins(t *testing.T) {
	t.Parallel()
	basicOf := func(user, pass string) string {
		return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+pass))
	}
	headers := []http.Header{
		{},
		{"Authorization": {"Bearer " + ph}},
		{"Authorization": {basicOf("x-access-token", ph)}},
		{"Authorization": {basicOf(ph, "x-oauth-basic")}},
		{"Authorization": {basicOf(ph, "")}},
		{"Authorization": {"Bearer own", "Bearer " + ph, basicOf("a", "b")}},
		{"authorization": {"Bearer own"}, "AUTHORIZATION": {"token " + ph}, "Authorization": {"x"}},
		{"Connection": {"close, Authorization", "X-Api-Key"}, "Authorization": {"x"}},
		{"connection": {"x_api_key,authorization"}, "Trailer": {"Authorization, X-Sum"}},
		{"X-Api-Key": {"own", ph}, "x_api_key": {"own"}, "X-API-KEY": {"own"}, "X_Api-Key": {"own"}},
	}
	for _, tt := range []struct {
		place        Place
		header, want string
	}{
		{bearer, "Authorization", "Bearer " + testValue},
		{apiKey, "X-Api-Key", testValue},
		{basic, "Authorization", basicOf("x-access-token", testValue)},
		{Place{Kind: Header, Name: "PRIVATE-TOKEN"}, "Private-Token", testValue},
	} {
		in := injector(t, binding(tt.place))
		for _, h := range headers {
			h = h.Clone()
			// What is for another place would be misplaced; that is another test.
			for key := range h {
				if !sameHeader(key, tt.header) && key != "Connection" && key != "connection" && key != "Trailer" {
					h[key] = []string{"own"}
				}
			}
			req := request(t, "https://user:own@h.lab/p?a=1", h, "")
			req.Trailer = http.Header{http.CanonicalHeaderKey(tt.header): {"own"}, "X-Sum": nil}
			used, err := in.Inject(req)
			if err != nil || !slices.Equal(used, []string{"github"}) {
				t.Errorf("%v in %v: %v, %v", tt.place, h, used, err)
				continue
			}
			var have []string
			for key, values := range req.Header {
				if sameHeader(key, tt.header) {
					have = append(have, values...)
				}
				if sameHeader(key, "Connection") || sameHeader(key, "Trailer") {
					for part := range strings.SplitSeq(strings.Join(values, ","), ",") {
						if sameHeader(strings.TrimSpace(part), tt.header) {
							t.Errorf("%s: %v names it", key, values)
						}
					}
				}
			}
			if !slices.Equal(have, []string{tt.want}) || req.Header[tt.header] == nil {
				t.Errorf("%v: headers %v", tt.place, req.Header)
			}
			if tt.header == "Authorization" && req.URL.User != nil {
				t.Errorf("the URL's user part stays: %s", req.URL)
			}
			if _, ok := req.Trailer[http.CanonicalHeaderKey(tt.header)]; ok {
				t.Errorf("the trailer stays: %v", req.Trailer)
			}
		}
	}
}

func TestInjectQuery(t *testing.T) {
	t.Parallel()
	in := injector(t, binding(query))
	esc := url.QueryEscape(testValue)
	for raw, want := range map[string]string{
		"":                                 "api_key=" + esc,
		"a=1&b=%20":                        "a=1&b=%20&api_key=" + esc,
		"api_key=" + ph:                    "api_key=" + esc,
		"a=1&api_key=own&API_KEY=x&b=2":    "a=1&b=2&api_key=" + esc,
		"api%5Fkey=own&a=1":                "a=1&api_key=" + esc,
		"a=1;api_key=own&b=2":              "b=2&api_key=" + esc,
		"api_key":                          "api_key=" + esc,
		"api_keys=1&my_api_key=2":          "api_keys=1&my_api_key=2&api_key=" + esc,
		"&&a=1":                            "a=1&api_key=" + esc,
		"q=%zz&api_key=" + ph + "&broken%": "q=%zz&broken%&api_key=" + esc,
	} {
		req := request(t, "https://h.lab/p", nil, "")
		req.URL.RawQuery = raw
		if _, err := in.Inject(req); err != nil || req.URL.RawQuery != want {
			t.Errorf("%q: %q, %v; want %q", raw, req.URL.RawQuery, err, want)
		}
	}
}

// The placeholder of this or another grant, in any form, anywhere else.
func TestMisplaced(t *testing.T) {
	t.Parallel()
	in := injector(t, binding(bearer))
	none, err := NewInjector(nil, map[string]string{"github": ph, "other": ph2})
	if err != nil {
		t.Fatal(err)
	}
	b64 := base64.StdEncoding.EncodeToString
	written := map[string]string{
		"plain": ph, "hex": hex.EncodeToString([]byte(ph)), "HEX": strings.ToUpper(hex.EncodeToString([]byte(ph))),
		"base64": b64([]byte(ph)), "base64 1": b64([]byte("a" + ph + "z")), "base64 2": b64([]byte("ab" + ph)), "other grant": ph2,
		"basic": "Basic " + b64([]byte("user:"+ph)),
	}
	for _, in := range []*Injector{in, none} {
		for how, text := range written {
			for where, req := range map[string]*http.Request{
				"a header":        request(t, "https://h.lab/", http.Header{"X-Note": {"a " + text + " b"}}, ""),
				"a cookie":        request(t, "https://h.lab/", http.Header{"Cookie": {"a=b; c=" + text}}, ""),
				"proxy":           request(t, "https://h.lab/", http.Header{"Proxy-Authorization": {text}}, ""),
				"a header's name": request(t, "https://h.lab/", http.Header{"X-" + text: {"v"}}, ""),
				"the path":        request(t, "https://h.lab/a/"+url.PathEscape(text)+"/b", nil, ""),
				"the query":       request(t, "https://h.lab/?q="+url.QueryEscape(text), nil, ""),
				"the fragment":    request(t, "https://h.lab/#"+url.QueryEscape(text), nil, ""),
			} {
				_, err := in.Inject(req)
				var m *MisplacedError
				if !errors.Is(err, ErrMisplaced) || !errors.As(err, &m) {
					t.Errorf("%s in %s: %v", how, where, err)
					continue
				}
				if want := map[bool]string{true: "other", false: "github"}[how == "other grant"]; m.Grant != want || strings.Contains(err.Error(), ph[5:]) {
					t.Errorf("%s in %s: %v; want grant %s", how, where, err, want)
				}
			}
			if strings.HasPrefix(how, "basic") {
				continue
			}
			host := request(t, "https://h.lab/", nil, "")
			host.Host = text + ".h.lab"
			method := request(t, "https://h.lab/", nil, "")
			method.Method = text
			trailer := request(t, "https://h.lab/", nil, "x")
			trailer.Trailer = http.Header{"X-Sum": {text}}
			for _, req := range []*http.Request{host, method, trailer} {
				if _, err := in.Inject(req); !errors.Is(err, ErrMisplaced) {
					t.Errorf("%s in host, method or trailer: %v", how, err)
				}
			}
		}
	}
	once := func(s string) string { // every byte
		var b strings.Builder
		for i := range len(s) {
			fmt.Fprintf(&b, "%%%02x", s[i])
		}
		return b.String()
	}
	for _, raw := range []string{once(ph), once(once(ph)), strings.ReplaceAll(ph, "_", "%5f"), strings.ReplaceAll(ph, "w", "%2577"), once(once(once(once(once(ph)))))} {
		req := request(t, "https://h.lab/", nil, "")
		req.URL.RawQuery = "q=" + raw
		if _, err := in.Inject(req); !errors.Is(err, ErrMisplaced) {
			t.Errorf("%.40q: %v", raw, err)
		}
		if _, err := in.Inject(request(t, "https://h.lab/", http.Header{"X-Note": {raw}}, "")); !errors.Is(err, ErrMisplaced) {
			t.Errorf("%.40q: %v", raw, err)
		}
	}
	if req := request(t, "https://user:"+ph+"@h.lab/", nil, ""); true {
		if _, err := none.Inject(req); !errors.Is(err, ErrMisplaced) {
			t.Errorf("the user part: %v", err)
		}
	}
	if _, err := in.Inject(request(t, "https://h.lab/", http.Header{"X-Note": {"a\r\nAuthorization: x"}}, "")); err == nil {
		t.Error("a header with a line break passed")
	}
	if used, err := none.Inject(request(t, "https://h.lab/?q=%25%25", http.Header{"Authorization": {"Bearer own"}}, "x")); err != nil || used != nil {
		t.Errorf("a request of its own: %v, %v", used, err)
	}
}

// A body that holds the placeholder never leaves whole, wherever it is cut.
func TestMisplacedInBody(t *testing.T) {
	t.Parallel()
	in := injector(t, binding(bearer))
	for name, text := range map[string]string{
		"plain": ph, "json": `{"token":"` + ph + `"}`, "form": "a=b&t=" + ph, "base64 0": base64.StdEncoding.EncodeToString([]byte(ph)),
		"base64 1": base64.RawURLEncoding.EncodeToString([]byte("a" + ph)), "base64 2": base64.StdEncoding.EncodeToString([]byte("ab" + ph + "c")),
		"hex": hex.EncodeToString([]byte(ph)), "percent": percent(ph, "", "%%%02X", "+"), "other grant": ph2,
	} {
		body := "before " + text + " after"
		most := len("before ") + 6
		if i := strings.Index(body, ph); i > 0 {
			most = i
		}
		for cut := range len(body) {
			req := request(t, "https://h.lab/", nil, "x")
			req.Body = io.NopCloser(&chunks{text: body, cuts: []int{cut}})
			if _, err := in.Inject(req); err != nil {
				t.Fatal(err)
			}
			sent, err := io.ReadAll(req.Body)
			if !errors.Is(err, ErrMisplaced) || len(sent) > most || req.GetBody != nil {
				t.Fatalf("%s cut at %d: sent %q, %v", name, cut, sent, err)
			}
		}
	}
	clean := strings.Repeat("wsec_abcdefghijklmnopqrstuvwxyz23456! ", 5000)
	req := request(t, "https://h.lab/", nil, clean)
	if _, err := in.Inject(req); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(req.Body); err != nil || string(got) != clean {
		t.Errorf("a body without it: %d of %d bytes, %v", len(got), len(clean), err)
	}
}

func pack(t testing.TB, coding, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	var w io.WriteCloser
	switch coding {
	case "gzip":
		w = gzip.NewWriter(&b)
	case "deflate":
		w = zlib.NewWriter(&b)
	case "raw":
		w, _ = flate.NewWriter(&b, 9)
	}
	io.WriteString(w, text)
	w.Close()
	return b.Bytes()
}

func TestCompressedBody(t *testing.T) {
	t.Parallel()
	in := injector(t, binding(bearer))
	send := func(coding string, body []byte) ([]byte, error) {
		req := request(t, "https://h.lab/", http.Header{"Content-Encoding": {coding}}, "x")
		req.Body = io.NopCloser(iotest.HalfReader(bytes.NewReader(body)))
		if _, err := in.Inject(req); err != nil {
			return nil, err
		}
		defer req.Body.Close()
		return io.ReadAll(req.Body)
	}
	long := strings.Repeat("some text of a packet line\n", 20_000)
	for name, coding := range map[string]string{"gzip": "gzip", "deflate": "deflate", "raw": "deflate"} {
		body := pack(t, name, long)
		if got, err := send(coding, body); err != nil || !bytes.Equal(got, body) {
			t.Errorf("%s: %d of %d bytes, %v", name, len(got), len(body), err)
		}
		if got, err := send(coding, pack(t, name, long+ph+long)); !errors.Is(err, ErrMisplaced) {
			t.Errorf("%s with the placeholder: %d bytes, %v", name, len(got), err)
		}
		if _, err := send(coding, body[:len(body)/2]); err == nil {
			t.Errorf("%s cut off passed", name)
		}
		if _, err := send(coding, []byte("no such thing at all")); !errors.Is(err, ErrOpaque) {
			t.Errorf("%s that is none: %v", name, err)
		}
		if _, err := send(coding, nil); err != nil {
			t.Errorf("%s of nothing: %v", name, err)
		}
	}
	if _, err := send("gzip", append(pack(t, "gzip", "x"), ph...)); err == nil {
		t.Error("the placeholder behind the compressed part passed")
	}
	if _, err := send("gzip", pack(t, "gzip", strings.Repeat("\x00", 64<<20))); !errors.Is(err, ErrOpaque) {
		t.Errorf("a bomb: %v", err)
	}
	for _, coding := range []string{"br", "zstd", "gzip, gzip", "compress"} {
		if _, err := send(coding, []byte("x")); !errors.Is(err, ErrOpaque) {
			t.Errorf("%s: %v", coding, err)
		}
	}
	// Nobody reads on: what looks ends as well.
	req := request(t, "https://h.lab/", http.Header{"Content-Encoding": {"gzip"}}, "x")
	req.Body = io.NopCloser(bytes.NewReader(pack(t, "gzip", long)))
	if _, err := in.Inject(req); err != nil {
		t.Fatal(err)
	}
	req.Body.Read(make([]byte, 10))
	req.Body.Close()
}

func TestInjectFailsClosed(t *testing.T) {
	t.Parallel()
	gone := errors.New("the secret was deleted")
	for name, tt := range map[string]struct {
		value string
		err   error
		want  error
	}{
		"deleted":    {"", gone, gone},
		"line break": {"tok_0123\r\nX-Evil: 1", nil, ErrValue},
		"empty":      {"", nil, ErrValue},
	} {
		b := binding(bearer)
		b.Value = func() ([]byte, error) { return []byte(tt.value), tt.err }
		req := request(t, "https://h.lab/", http.Header{"Authorization": {"Bearer " + ph}}, "")
		used, err := injector(t, b).Inject(req)
		if !errors.Is(err, tt.want) || used != nil || !strings.Contains(err.Error(), "github") || req.Header.Get("Authorization") != "" {
			t.Errorf("%s: %v, %v, %v", name, used, err, req.Header)
		}
	}
}

func TestOnPlaceholder(t *testing.T) {
	t.Parallel()
	for _, p := range []Place{bearer, basic, query} {
		b := binding(p)
		b.OnPlaceholder = true
		in := injector(t, b)
		own := request(t, "https://h.lab/?api_key=own", http.Header{"Authorization": {"Bearer own"}}, "")
		if used, err := in.Inject(own); err != nil || used != nil || own.Header.Get("Authorization") != "Bearer own" || own.URL.RawQuery != "api_key=own" {
			t.Errorf("%s: its own credential: %v, %v, %v", p.Kind, used, err, own.Header)
		}
		with := request(t, "https://h.lab/?api_key="+ph, nil, "")
		if p.Kind != Query {
			with = request(t, "https://h.lab/", http.Header{"Authorization": {"Basic " + base64.StdEncoding.EncodeToString([]byte("user:"+ph))}}, "")
		}
		if used, err := in.Inject(with); err != nil || len(used) != 1 {
			t.Errorf("%s: the placeholder: %v, %v", p.Kind, used, err)
		}
	}
}

func TestPlaces(t *testing.T) {
	t.Parallel()
	for _, p := range []Place{
		{}, {Kind: "body"}, {Kind: Header}, {Kind: Header, Name: "a b"}, {Kind: Header, Name: "a:b"}, {Kind: Header, Name: "a\r\nb"},
		{Kind: Header, Name: "host"}, {Kind: Header, Name: "Content_Length"}, {Kind: Header, Name: "connection"}, {Kind: Header, Name: "X", Format: "Bearer"},
		{Kind: Header, Name: "X", Format: "{} {}"}, {Kind: Header, Name: "X", Format: "{}\r\nY: z"}, {Kind: Basic, Username: "a:b"}, {Kind: Basic, Username: "a\n"},
		{Kind: Query}, {Kind: Query, Name: "a\nb"},
	} {
		if _, err := NewInjector([]Binding{binding(p)}, nil); !errors.Is(err, ErrPlace) {
			t.Errorf("%+v: %v", p, err)
		}
	}
	for _, pair := range [][2]Place{
		{bearer, basic}, {bearer, {Kind: Header, Name: "AUTHORIZATION"}}, {apiKey, {Kind: Header, Name: "x_api_key"}}, {query, {Kind: Query, Name: "API_KEY"}},
	} {
		if _, err := NewInjector([]Binding{binding(pair[0]), binding(pair[1])}, nil); !errors.Is(err, ErrAmbiguous) {
			t.Errorf("%v: %v", pair, err)
		}
	}
	if _, err := NewInjector([]Binding{binding(bearer), binding(query)}, nil); err != nil {
		t.Errorf("two places: %v", err)
	}
	short := binding(bearer)
	short.Placeholder = "wsec_"
	if _, err := NewInjector([]Binding{short}, nil); !errors.Is(err, ErrPlace) {
		t.Errorf("a short placeholder: %v", err)
	}
}

func TestManyGrants(t *testing.T) {
	t.Parallel()
	others := map[string]string{}
	for i := range maxPlaceholders {
		p, err := NewPlaceholder("")
		if err != nil {
			t.Fatal(err)
		}
		others[fmt.Sprint(i)] = p
	}
	in, err := NewInjector(nil, others)
	if err != nil {
		t.Fatal(err)
	}
	for grant, p := range others {
		_, err := in.Inject(request(t, "https://h.lab/", http.Header{"X-Note": {base64.StdEncoding.EncodeToString([]byte("u:" + p))}}, ""))
		var m *MisplacedError
		if !errors.As(err, &m) || m.Grant != grant {
			t.Fatalf("grant %s: %v", grant, err)
		}
	}
	if _, err := NewInjector([]Binding{binding(bearer)}, others); !errors.Is(err, ErrPlace) {
		t.Errorf("one more: %v", err)
	}
}

func TestStripCredentials(t *testing.T) {
	t.Parallel()
	req := request(t, "https://u:p@h.lab/", http.Header{"authorization": {"x"}, "Cookie": {"x"}, "X_Api_Key": {"x"}, "Accept": {"*/*"}}, "")
	got := StripCredentials(req)
	if !slices.Equal(got, []string{"Cookie", "X_Api_Key", "authorization", "the URL's user part"}) || len(req.Header) != 1 || req.URL.User != nil {
		t.Errorf("%v, %v", got, req.Header)
	}
	// Those of registries, clouds and providers of models, as their clients spell them.
	for _, name := range []string{
		"X-NuGet-ApiKey", "X-JFrog-Art-Api", "npm-otp", "OTP", "X-Registry-Auth", "PRIVATE-TOKEN", "X-GitHub-OTP", "X-Auth-Key", "X-Auth-Email", "X-Auth-Token", "X-Subject-Token",
		"CF-Access-Client-Secret", "X-Goog-Api-Key", "X-Amz-Security-Token", "X-Serverless-Authorization", "x-functions-key", "Fastly-Key", "x-api-key", "api-key", "apikey", "xi-api-key",
		"X-Subscription-Token", "Ocp-Apim-Subscription-Key", "X-Consul-Token", "X-Hasura-Admin-Secret", "X-Figma-Token",
	} {
		req := request(t, "https://h.lab/", http.Header{name: {"mine"}, "X-Request-Id": {"x"}, "X-NuGet-Client-Version": {"x"}, "X-Amz-Date": {"x"}}, "")
		if got := StripCredentials(req); !slices.Equal(got, []string{name}) || len(req.Header) != 3 {
			t.Errorf("%s: %q removed, %v", name, got, req.Header)
		}
	}
}

// A client, a proxy that uses this package, and a server that echoes all that it gets, over real connections.
func TestEndToEnd(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var seen []string
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		mu.Lock()
		seen = append(seen, fmt.Sprint(r.Header["Authorization"], r.Trailer, len(body), err == nil))
		mu.Unlock()
		auth := r.Header.Get("Authorization")
		w.Header().Set("Trailer", "X-Echo")
		w.Header().Set("X-Got", auth)
		w.Header().Set("Location", "/?t="+url.QueryEscape(auth))
		for i := range len(auth) { // in pieces
			io.WriteString(w, auth[i:i+1])
			w.(http.Flusher).Flush()
		}
		io.WriteString(w, base64.StdEncoding.EncodeToString([]byte(auth)))
		w.Header().Set("X-Echo", auth)
	}))
	defer upstream.Close()
	scrub, err := NewScrubber(Pair{[]byte(testValue), ph})
	if err != nil {
		t.Fatal(err)
	}
	in := injector(t, binding(bearer))
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		out := r.Clone(r.Context())
		out.URL.Scheme, out.URL.Host, out.RequestURI = "http", upstream.Listener.Addr().String(), ""
		if _, err := in.Inject(out); err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		RestrictEncoding(out.Header)
		res, err := http.DefaultTransport.RoundTrip(out)
		if err != nil {
			http.Error(w, "upstream", http.StatusBadGateway)
			return
		}
		defer res.Body.Close()
		if err := scrub.Response(res, Tell{}); err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		for k, v := range res.Header {
			w.Header()[k] = v
		}
		w.Header().Set("Trailer", "X-Echo")
		w.WriteHeader(res.StatusCode)
		io.Copy(w, res.Body)
		w.Header().Set("X-Echo", res.Trailer.Get("X-Echo"))
	}))
	defer proxy.Close()
	call := func(h http.Header, body io.Reader) (string, int) {
		req, err := http.NewRequestWithContext(context.Background(), "POST", proxy.URL, body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header = h
		res, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		text, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(res.Header, res.Trailer, string(text)), res.StatusCode
	}
	got, code := call(http.Header{"Authorization": {"Bearer " + ph}}, strings.NewReader("hello"))
	if code != 200 || shows(got, testValue) || !strings.Contains(got, "Bearer "+ph) {
		t.Errorf("%d: %s", code, got)
	}
	if want := fmt.Sprint([]string{"Bearer " + testValue}, http.Header(nil), 5, true); len(seen) != 1 || seen[0] != want {
		t.Errorf("upstream saw %q, want %q", seen, want)
	}
	seen = nil
	if _, code := call(http.Header{"X-Note": {ph}}, nil); code != http.StatusForbidden || len(seen) != 0 {
		t.Errorf("misplaced in a header: %d, upstream saw %q", code, seen)
	}
	big := strings.Repeat("x", 1<<20)
	got, code = call(http.Header{}, io.MultiReader(strings.NewReader(big), strings.NewReader(ph), strings.NewReader(big)))
	mu.Lock()
	defer mu.Unlock()
	if code == 200 || shows(got, testValue) || len(seen) > 1 || len(seen) == 1 && !strings.HasSuffix(seen[0], "false") {
		t.Errorf("misplaced in a body: %d, upstream saw %q", code, seen)
	}
}

// No request, however it is put together, gets the value anywhere but into its place.
func FuzzInject(f *testing.F) {
	f.Add("/p", "a=1", "Authorization", "Bearer "+ph, "X-Note", "v")
	f.Add("/"+ph, "api_key="+ph, "authorization", ph, "Connection", "Authorization")
	f.Add("/%77sec_", "a;b", "A", "%25", "Authorization ", "x")
	in, err := NewInjector([]Binding{binding(bearer)}, nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, path, query, k1, v1, k2, v2 string) {
		req := &http.Request{Method: "GET", URL: &url.URL{Scheme: "https", Host: "h.lab", Path: path, RawQuery: query}, Header: http.Header{}, Host: "h.lab"}
		req.Header[k1] = append(req.Header[k1], v1)
		req.Header[k2] = append(req.Header[k2], v2)
		_, err := in.Inject(req)
		n := 0
		for key, values := range req.Header {
			for _, v := range values {
				if strings.Contains(v, testValue) {
					n++
				}
				if err == nil && strings.Contains(key+v, ph) {
					t.Errorf("the placeholder stays in %q: %q", key, v)
				}
			}
		}
		if err == nil && (n != 1 || len(req.Header["Authorization"]) != 1) || err != nil && n != 0 {
			t.Errorf("%d values, %v, %v", n, err, req.Header)
		}
		if err == nil && strings.Contains(req.URL.String(), ph) {
			t.Errorf("the placeholder stays in %s", req.URL)
		}
	})
}

func BenchmarkInject(b *testing.B) {
	in := injector(b, binding(bearer))
	for b.Loop() {
		req := &http.Request{Method: "GET", Host: "h.lab", URL: &url.URL{Scheme: "https", Host: "h.lab", Path: "/v1/things", RawQuery: "a=1&b=2"}, Header: http.Header{
			"Authorization": {"Bearer " + ph}, "User-Agent": {"curl/8.5.0"}, "Accept": {"application/json"}, "Content-Type": {"application/json"}, "X-Request-Id": {"0123456789abcdef"},
		}}
		if _, err := in.Inject(req); err != nil {
			b.Fatal(err)
		}
	}
}
