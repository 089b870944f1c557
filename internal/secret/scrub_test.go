package secret

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

// Values of every character class that encodings treat differently.
var testValues = []string{
	"tok_0123456789abcdef",
	`p"a\s/s<w>o&r'd+=?%~ x`,
	"AbCdEfGhIj0123456789+/==",
	"12345678",
	strings.Repeat("aab", 30) + "aaaaaaaa",
}

const testPlaceholder = "wsec_aaaabbbbccccddddeeeeffffgggghhhh"

func scrubber(t testing.TB, values ...string) *Scrubber {
	t.Helper()
	var pairs []Pair
	for i, v := range values {
		pairs = append(pairs, Pair{[]byte(v), fmt.Sprintf("%s%d", testPlaceholder, i)})
	}
	s, err := NewScrubber(pairs...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// echoes are what servers make of a value that they show.
func echoes(value string) map[string]string {
	quoted, _ := json.Marshal(map[string]string{"v": value})
	var plain bytes.Buffer
	enc := json.NewEncoder(&plain)
	enc.SetEscapeHTML(false)
	enc.Encode(value)
	wrong := strings.ToLower(url.QueryEscape(value))
	list := map[string]string{
		"plain":          "x" + value + "y",
		"alone":          value,
		"json for html":  string(quoted),
		"json":           plain.String(),
		"json slashes":   strings.ReplaceAll(plain.String(), "/", `\/`),
		"query":          "a=" + url.QueryEscape(value) + "&b",
		"path":           "/" + url.PathEscape(value) + "/b",
		"html":           "<b>" + html.EscapeString(value) + "</b>",
		"hex":            hex.EncodeToString([]byte("ab" + value + "c")),
		"HEX":            strings.ToUpper(hex.EncodeToString([]byte(value))),
		"basic":          "Basic " + base64.StdEncoding.EncodeToString([]byte("user:"+value)),
		"bearer in json": `{"authorization":"Bearer ` + strings.Trim(strings.TrimSpace(plain.String()), `"`) + `"}`,
		"sse":            "event: x\ndata: " + value + "\n\n",
		"set-cookie":     "s=" + value + "; Path=/",
	}
	if strings.ToLower(value) == value {
		list["query in lower case"] = wrong
	}
	for n := range 4 {
		around := strings.Repeat("z", n)
		list[fmt.Sprintf("base64 after %d", n)] = base64.StdEncoding.EncodeToString([]byte(around + value + "tail"))
		list[fmt.Sprintf("base64url after %d", n)] = base64.RawURLEncoding.EncodeToString([]byte(around + value))
	}
	return list
}

// shows says whether any form of a value is left.
func shows(text, value string) bool {
	for _, f := range Forms(value) {
		if strings.Contains(text, f.Text) {
			return true
		}
	}
	return false
}

// chunks reads a text in pieces that end where cuts say.
type chunks struct {
	text string
	cuts []int
	at   int
}

func (c *chunks) Read(p []byte) (int, error) {
	if c.at == len(c.text) {
		return 0, io.EOF
	}
	end := len(c.text)
	for _, cut := range c.cuts {
		if cut > c.at {
			end = min(end, cut)
		}
	}
	n := copy(p, c.text[c.at:end])
	c.at += n
	return n, nil
}

// Every value in every form, cut in two at every offset.
func TestScrubAtEveryOffset(t *testing.T) {
	t.Parallel()
	for _, value := range testValues {
		s := scrubber(t, value)
		for name, text := range echoes(value) {
			whole, n := s.String(text)
			if n == 0 || shows(whole, value) {
				t.Errorf("%s: %q became %q (%d)", name, text, whole, n)
				continue
			}
			for cut := range len(text) + 1 {
				got, err := io.ReadAll(s.Reader(&chunks{text: text, cuts: []int{cut}}))
				if err != nil || string(got) != whole {
					t.Fatalf("%s cut at %d: %q, %v; want %q", name, cut, got, err, whole)
				}
			}
			got, err := io.ReadAll(s.Reader(iotest.OneByteReader(strings.NewReader(text))))
			if err != nil || string(got) != whole {
				t.Errorf("%s byte by byte: %q, %v", name, got, err)
			}
			got, err = io.ReadAll(iotest.OneByteReader(s.Reader(strings.NewReader(text))))
			if err != nil || string(got) != whole {
				t.Errorf("%s to a small buffer: %q, %v", name, got, err)
			}
		}
	}
}

// What stands for the value means the same in the same encoding.
func TestScrubKeepsTheEncoding(t *testing.T) {
	t.Parallel()
	for _, value := range testValues {
		s, err := NewScrubber(Pair{[]byte(value), testPlaceholder})
		if err != nil {
			t.Fatal(err)
		}
		quoted, _ := json.Marshal([]string{value, "other"})
		clean, _ := s.String(string(quoted))
		var list []string
		if err := json.Unmarshal([]byte(clean), &list); err != nil || list[0] != testPlaceholder || list[1] != "other" {
			t.Errorf("JSON: %s, %v", clean, err)
		}
		clean, _ = s.String("a=1&k=" + url.QueryEscape(value) + "&b=2")
		if q, err := url.ParseQuery(clean); err != nil || q.Get("k") != testPlaceholder || q.Get("b") != "2" {
			t.Errorf("query: %s, %v", clean, err)
		}
		clean, _ = s.String(hex.EncodeToString([]byte("<" + value + ">")))
		if b, err := hex.DecodeString(clean); err != nil || string(b) != "<"+testPlaceholder+">" {
			t.Errorf("hex: %q, %v", b, err)
		}
		for n := range 3 {
			before, after := "before"[:n+3], "and what follows"
			clean, _ = s.String(base64.StdEncoding.EncodeToString([]byte(before + value + after)))
			b, err := base64.StdEncoding.DecodeString(clean)
			// A byte at each end of the value shares its letter with the neighbour.
			if err != nil || !strings.HasPrefix(string(b), before) || !strings.HasSuffix(string(b), after) || !bytes.Contains(b, []byte(testPlaceholder[1:len(testPlaceholder)-1])) {
				t.Errorf("base64 at %d: %q, %v", n, b, err)
			}
		}
	}
}

func TestScrubLeavesTheRest(t *testing.T) {
	t.Parallel()
	s := scrubber(t, testValues[0], testValues[1], testValues[2], testValues[4])
	random := make([]byte, 1<<20)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range random {
		random[i] = byte(r.Uint32())
	}
	var empty Scrubber
	empty.m = newMatcher(nil)
	for name, text := range map[string]string{
		"nothing": "", "random": string(random), "beginnings": strings.Repeat("tok_0123456789abcde", 5000), "hex": hex.EncodeToString(random[:50_000]),
		"base64": base64.StdEncoding.EncodeToString(random[:50_000]), "one": "t", "most": "tok_0123456789abcde",
	} {
		for _, s := range []*Scrubber{s, &empty} {
			rd := s.Reader(iotest.HalfReader(strings.NewReader(text)))
			got, err := io.ReadAll(rd)
			if err != nil || string(got) != text || rd.Count() != 0 {
				t.Errorf("%s: %d bytes of %d, %v, %d replaced", name, len(got), len(text), err, rd.Count())
			}
		}
	}
}

// What cannot belong to a value is handed on at once, and what waits is shorter than the longest form.
func TestScrubDoesNotDelay(t *testing.T) {
	t.Parallel()
	value := "tok_0123456789abcdef"
	s := scrubber(t, value)
	in, out := io.Pipe()
	r := s.Reader(in)
	got := make(chan string, 100)
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := r.Read(buf)
			got <- string(buf[:n])
			if err != nil {
				return
			}
		}
	}()
	expect := func(send, want string) {
		t.Helper()
		io.WriteString(out, send)
		have := ""
		deadline := time.After(10 * time.Second)
		for have != want {
			select {
			case text := <-got:
				have += text
			case <-deadline:
				t.Fatalf("after %q: got %q, want %q", send, have, want)
			}
		}
	}
	expect("data: one\n\n", "data: one\n\n")
	expect("data: two\n\n", "data: two\n\n")
	// The beginning of a value waits, and only that.
	expect("data: tok_0123", "data: ")
	expect("!\n\n", "tok_0123!\n\n")
	expect("data: tok_012345678", "data: ")
	expect("9abcdef\n\n", testPlaceholder+"0\n\n")
	out.Close()

	s = scrubber(t, testValues...)
	for range 100 {
		text := ""
		for range 40 {
			switch v := testValues[rand.IntN(len(testValues))]; rand.IntN(3) {
			case 0:
				text += v[:rand.IntN(len(v))]
			case 1:
				text += Forms(v)[rand.IntN(len(Forms(v)))].Text[:4]
			default:
				text += "\n"
			}
		}
		r := &counting{r: strings.NewReader(text)}
		clean := s.Reader(iotest.OneByteReader(r))
		read := 0
		buf := make([]byte, 64)
		for {
			n, err := clean.Read(buf)
			read += n
			if waits := r.n - read; clean.Count() == 0 && waits > s.m.max-1 {
				t.Fatalf("%d bytes wait; the longest form has %d", waits, s.m.max)
			}
			if err != nil {
				break
			}
		}
	}
}

type counting struct {
	r io.Reader
	n int
}

func (c *counting) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += n
	return n, err
}

// naive is what a scrubber does, said simply.
func naive(s *Scrubber, text string) string {
	var out strings.Builder
	for i := 0; i < len(text); {
		best := -1
		for n, t := range s.m.texts {
			if strings.HasPrefix(text[i:], t) && (best < 0 || len(t) > len(s.m.texts[best])) {
				best = n
			}
		}
		if best < 0 {
			out.WriteByte(text[i])
			i++
			continue
		}
		out.WriteString(s.with[best])
		i += len(s.m.texts[best])
	}
	return out.String()
}

func FuzzScrub(f *testing.F) {
	for i, v := range testValues {
		for _, text := range echoes(v) {
			f.Add(v, testValues[(i+1)%len(testValues)], text, uint16(i*7), uint16(3))
		}
	}
	f.Add("aaaaaaaa", "aaaaaaaaab", "aaaaaaaaaaaaaaaaaaaaaaaaaaaab", uint16(9), uint16(17))
	f.Fuzz(func(t *testing.T, a, b, text string, cut, cut2 uint16) {
		if CheckValue([]byte(a)) != nil || CheckValue([]byte(b)) != nil {
			return
		}
		s := scrubber(t, a, b)
		text += a + text + Forms(b)[int(cut)%len(Forms(b))].Text + text
		want := naive(s, text)
		if got, _ := s.String(text); got != want {
			t.Fatalf("String(%q)\n got %q\nwant %q", text, got, want)
		}
		cuts := []int{int(cut) % (len(text) + 1), int(cut2) % (len(text) + 1)}
		got, err := io.ReadAll(s.Reader(&chunks{text: text, cuts: cuts}))
		if err != nil || string(got) != want {
			t.Fatalf("%q cut at %d:\n got %q, %v\nwant %q", text, cuts, got, err, want)
		}
		n, found := 0, 0
		if err := s.Search(&chunks{text: text, cuts: cuts}, func(f Found) { found++ }); err != nil {
			t.Fatal(err)
		}
		if _, n = s.String(text); n != found {
			t.Fatalf("Search finds %d, String %d", found, n)
		}
	})
}

// The fuzz test's property over random texts, in every run.
func TestScrubIsNaive(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(3, 4))
	letters := "ab01%"
	word := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = letters[r.IntN(len(letters))]
		}
		return string(b)
	}
	for range 400 {
		var values []string
		for range 1 + r.IntN(4) {
			values = append(values, word(8+r.IntN(6)))
		}
		// One that goes on after another, and one that begins within it, in any order.
		values = append(values, values[0]+word(1+r.IntN(9)), values[0][3:]+word(3+r.IntN(5)))
		r.Shuffle(len(values), func(i, j int) { values[i], values[j] = values[j], values[i] })
		s := scrubber(t, values...)
		text := word(r.IntN(50))
		for range 6 {
			v := values[r.IntN(len(values))]
			all := Forms(v)
			f := all[r.IntN(len(all))].Text
			text += f[:1+r.IntN(len(f))] + f + word(r.IntN(4))
		}
		want := naive(s, text)
		cuts := []int{r.IntN(len(text)), r.IntN(len(text)), r.IntN(len(text))}
		got, err := io.ReadAll(s.Reader(&chunks{text: text, cuts: cuts}))
		if err != nil || string(got) != want {
			t.Fatalf("values %q, %q cut at %d:\n got %q, %v\nwant %q", values, text, cuts, got, err, want)
		}
	}
}

func TestScrubErrors(t *testing.T) {
	t.Parallel()
	s := scrubber(t, "tok_0123456789abcdef")
	broken := errors.New("connection reset")
	got, err := io.ReadAll(s.Reader(io.MultiReader(strings.NewReader("abc tok_0123456"), iotest.ErrReader(broken))))
	if !errors.Is(err, broken) || string(got) != "abc " {
		t.Errorf("a stream that breaks: %q, %v", got, err)
	}
	if _, err := io.ReadAll(s.Reader(stuck{})); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("a reader that gives nothing: %v", err)
	}
	if _, err := NewScrubber(Pair{[]byte("short"), "x"}); !errors.Is(err, ErrValue) {
		t.Errorf("a short value: %v", err)
	}
	if _, err := NewScrubber(make([]Pair, MaxPairs+1)...); err == nil {
		t.Error("too many values are taken")
	}
}

type stuck struct{}

func (stuck) Read([]byte) (int, error) { return 0, nil }

func answer(status int, header http.Header, text io.Reader) *http.Response {
	if header == nil {
		header = http.Header{}
	}
	return &http.Response{StatusCode: status, Status: fmt.Sprint(status, " OK"), Header: header, Body: io.NopCloser(text), ContentLength: 7, Request: &http.Request{Method: "GET"}}
}

func TestScrubResponse(t *testing.T) {
	t.Parallel()
	const value = "tok_0123456789abcdef"
	s := scrubber(t, value)
	shown := testPlaceholder + "0"
	res := answer(200, http.Header{
		"Content-Length": {"7"}, "Location": {"https://h.lab/?t=" + value}, "Set-Cookie": {"a=b", "s=" + value}, "X-" + value: {"v"},
		"X-" + strings.ToUpper(value): {"v"}, "X-Note": {"nothing"},
	}, strings.NewReader("<"+value+">"))
	res.Status = "200 " + value
	res.Trailer = http.Header{"X-Sum": nil, "X-" + value: nil}
	var found []int64
	if err := s.Response(res, Tell{Found: func(n int64) { found = append(found, n) }}); err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(&trailing{res.Body, func() { res.Trailer.Set("X-Sum", value) }})
	if err != nil || string(text) != "<"+shown+">" {
		t.Errorf("body %q, %v", text, err)
	}
	want := http.Header{"Location": {"https://h.lab/?t=" + shown}, "Set-Cookie": {"a=b", "s=" + shown}, "X-Note": {"nothing"}}
	if fmt.Sprint(res.Header) != fmt.Sprint(want) || res.Status != "200 "+shown || res.ContentLength != -1 {
		t.Errorf("%v %v %d", res.Status, res.Header, res.ContentLength)
	}
	if len(res.Trailer) != 1 {
		t.Errorf("trailers %v", res.Trailer)
	}
	if !slices.Equal(found, []int64{6, 1}) {
		t.Errorf("evidence %v", found)
	}

	// A trailer that comes with the end of the body.
	res = answer(200, nil, nil)
	res.Trailer = http.Header{"X-Sum": nil}
	res.Body = io.NopCloser(&trailing{strings.NewReader("x"), func() { res.Trailer.Set("X-Sum", value) }})
	if err := s.Response(res, Tell{}); err != nil {
		t.Fatal(err)
	}
	if io.ReadAll(res.Body); res.Trailer.Get("X-Sum") != shown {
		t.Errorf("trailer %v", res.Trailer)
	}

	// Compressed all the same.
	var packed bytes.Buffer
	gz := gzip.NewWriter(&packed)
	gz.Write([]byte("<" + value + ">"))
	gz.Close()
	res = answer(200, http.Header{"Content-Encoding": {"GZIP"}}, &packed)
	if err := s.Response(res, Tell{}); err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(res.Body); err != nil || string(text) != "<"+shown+">" || res.Header.Get("Content-Encoding") != "" {
		t.Errorf("gzip: %q, %v, %v", text, err, res.Header)
	}
	for _, coding := range []string{"br", "zstd", "gzip, br", "deflate", "unknown"} {
		if err := s.Response(answer(200, http.Header{"content_encoding": {coding}}, strings.NewReader("x")), Tell{}); !errors.Is(err, ErrOpaque) {
			t.Errorf("%s: %v", coding, err)
		}
	}
	res = answer(200, nil, strings.NewReader("x"))
	res.TransferEncoding = []string{"gzip", "chunked"}
	if err := s.Response(res, Tell{}); !errors.Is(err, ErrOpaque) {
		t.Errorf("a transfer coding: %v", err)
	}
	res = answer(204, http.Header{"Content-Encoding": {"br"}}, http.NoBody)
	if err := s.Response(res, Tell{}); err != nil {
		t.Errorf("no body: %v", err)
	}

	// What has no body can have trailers, and its header may tell of the body that another answer has.
	for _, tt := range []struct {
		method string
		status int
	}{{"GET", 204}, {"GET", 304}, {"HEAD", 200}} {
		res = answer(tt.status, http.Header{"Content-Length": {"7"}, "Content-Encoding": {"br"}}, nil)
		res.Request.Method = tt.method
		res.Trailer = http.Header{"X-Sum": nil}
		res.Body = io.NopCloser(&trailing{strings.NewReader(""), func() { res.Trailer.Set("X-Sum", value) }})
		n := int64(0)
		if err := s.Response(res, Tell{Found: func(k int64) { n += k }}); err != nil {
			t.Fatal(err)
		}
		if text, err := io.ReadAll(res.Body); err != nil || len(text) > 0 || res.Trailer.Get("X-Sum") != shown || n != 1 {
			t.Errorf("%s %d: %q, %v, trailer %v, told of %d", tt.method, tt.status, text, err, res.Trailer, n)
		}
		if res.ContentLength != 7 || res.Header.Get("Content-Length") != "7" || res.Header.Get("Content-Encoding") != "br" {
			t.Errorf("%s %d: %v, length %d", tt.method, tt.status, res.Header, res.ContentLength)
		}
	}
}

// trailing calls fn before it gives the end.
type trailing struct {
	r  io.Reader
	fn func()
}

func (r *trailing) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if errors.Is(err, io.EOF) {
		r.fn()
	}
	return n, err
}

type duplex struct {
	io.Reader
	io.Writer
}

func (duplex) Close() error { return nil }

// After a switch of protocols a value cannot be replaced; the stream ends before it.
func TestScrubUpgrade(t *testing.T) {
	t.Parallel()
	const value = "tok_0123456789abcdef"
	s := scrubber(t, value)
	res := answer(101, nil, nil)
	var sent bytes.Buffer
	res.Body = duplex{strings.NewReader("\x81\x05hello\x81\x14" + value), &sent}
	n := int64(0)
	if err := s.Response(res, Tell{Found: func(k int64) { n += k }}); err != nil {
		t.Fatal(err)
	}
	io.WriteString(res.Body.(io.Writer), "frame")
	got, err := io.ReadAll(res.Body)
	if !errors.Is(err, ErrShown) || string(got) != "\x81\x05hello\x81\x14" || sent.String() != "frame" || n != 1 {
		t.Errorf("%q, %v, sent %q, %d", got, err, sent.String(), n)
	}
}

// What begins as a value and goes on otherwise is told of, wherever reads end; a whole value is not.
func TestScrubNear(t *testing.T) {
	t.Parallel()
	const first, second = "tok_0123456789abcdef", `p"a\s/s<w>o&r'd+=?%~ x`
	// The third begins with the first, the fourth is of the kind of tokens that begin alike.
	third, fourth := first+":the-password-of-it", strings.Repeat("head.", 24)+"tail-of-forty-letters-that-tells-them-apart"
	s := scrubber(t, first, second, third, fourth)
	inHex := hex.EncodeToString([]byte(first))
	for _, tt := range []struct {
		text string
		want []int
	}{
		{"nothing of it", nil},
		{first, nil},
		{first + first + inHex, nil},
		{first[:11], nil},
		{first[:12], []int{0}},
		{first[:12] + first, []int{0}},
		{"<" + first[:19] + ">", []int{0}},
		{"<" + first[:12] + "> <" + first[:13] + ">" + first, []int{0, 0}},
		{inHex[:24] + "zz", []int{0}},
		{inHex[:23] + "zz", nil},
		{url.QueryEscape(second)[:43] + "%", []int{1}},
		{url.QueryEscape(second) + second, nil},
		{base64.RawStdEncoding.EncodeToString([]byte("u:" + first))[:22] + "-", []int{0}},
		{third, nil},
		{third[:len(third)-10] + "?", nil},
		{third[:len(third)-9] + "?", []int{2}},
		{fourth[:len(fourth)-41] + "another", nil},
		{fourth[:len(fourth)-40] + "?", []int{3}},
	} {
		for _, size := range []int{1, 2, 7, len(tt.text) + 1} {
			var got []int
			r := s.Reader(&chunks{text: tt.text, cuts: every(size, len(tt.text))})
			r.missed = s.misses(Tell{Near: func(pair int) error { got = append(got, pair); return nil }})
			if _, err := io.ReadAll(r); err != nil || !slices.Equal(got, tt.want) {
				t.Errorf("%q by %d: %v, %v; want %v", tt.text, size, got, err, tt.want)
			}
		}
	}

	enough := errors.New("enough")
	for _, status := range []int{200, 101} {
		res := answer(status, nil, nil)
		src, in := io.Pipe()
		res.Body = duplex{src, in}
		n := 0
		if err := s.Response(res, Tell{Near: func(int) error {
			if n++; n == 3 {
				return enough
			}
			return nil
		}}); err != nil {
			t.Fatal(err)
		}
		// The guess of a letter: what is held back is a right one.
		go func() {
			for _, c := range "xyzXYZ-,;" {
				if _, err := io.WriteString(in, first[:12]+string(c)+"."); err != nil {
					return
				}
			}
			in.Close()
		}()
		got, err := io.ReadAll(res.Body)
		src.Close()
		if want := first[:12] + "x." + first[:12] + "y."; !errors.Is(err, enough) || string(got) != want || n != 3 {
			t.Errorf("%d: %q, %v, told of %d", status, got, err, n)
		}
	}
}

// seen says how much of a text is handed on when 0, 1, 2 ... of its bytes have come.
func seen(t *testing.T, s *Scrubber, text string) (handed []int, near []int) {
	t.Helper()
	src := &watched{text: text}
	r := s.Reader(src)
	r.missed = s.misses(Tell{Near: func(pair int) error { near = append(near, pair); return nil }})
	buf := make([]byte, 512)
	for {
		n, err := r.Read(buf)
		src.handed += n
		if errors.Is(err, io.EOF) {
			return src.seen, near
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// watched gives a text byte by byte, each when all was handed on that is.
type watched struct {
	text   string
	handed int
	seen   []int
}

func (w *watched) Read(p []byte) (int, error) {
	w.seen = append(w.seen, w.handed)
	if len(w.seen) > len(w.text) {
		return 0, io.EOF
	}
	p[0] = w.text[len(w.seen)-1]
	return 1, nil
}

// What is held back, and how long, tells nothing of the end of a value, in any form: not letter by letter, nor digit by digit.
func TestScrubTellsNothingOfAnEnd(t *testing.T) {
	t.Parallel()
	const key = "key+0123456789abcdef"
	for name, values := range map[string][]string{
		"one":        {testValues[0]},
		"escaped":    {testValues[1]},
		"base64":     {testValues[2]},
		"short":      {testValues[3]},
		"periodic":   {testValues[4]},
		"begins so":  {key, key + ":the-password-of-it"},
		"is in it":   {key, "user:" + key + ":and-much-more-that-is-long-enough-to-go-on-after-it"},
		"both":       {"user:" + key + ":and-much-more-that-is-long-enough-to-go-on-after-it", key, key + ":x"},
		"ends so":    {key, "user:" + key},
		"all sorts":  testValues,
		"alike":      {"head." + key, "head." + key[:18] + "XX"},
		"end escape": {"abcdefghijkl+/=="},
	} {
		s := scrubber(t, values...)
		for i, text := range s.m.texts {
			near := len(s.near.texts[i])
			for _, before := range []string{"<", "user:"} {
				// Nothing right of the end, and then more of it.
				var want []int
				for right := near; right < len(text); right++ {
					probe := before + text[:right] + strings.Repeat("\x01", len(text)-right)
					got, missed := seen(t, s, probe+strings.Repeat("\x01", s.m.max))
					got = got[:len(probe)]
					if want == nil {
						want = got
					}
					if !slices.Equal(got, want) {
						t.Fatalf("%s: of %q %v is handed on, of one with nothing right after %d bytes %v", name, probe, got, near, want)
					}
					if len(missed) == 0 {
						t.Fatalf("%s: %q is not told of", name, probe)
					}
				}
			}
		}
	}

	// After a switch of protocols too.
	s := scrubber(t, testValues[0])
	for _, text := range []string{testValues[0][:12] + "3456789.", testValues[0][:12] + "........"} {
		res := answer(http.StatusSwitchingProtocols, nil, nil)
		src := &watched{text: text}
		res.Body = duplex{src, nil}
		if err := s.Response(res, Tell{}); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 64)
		for err := error(nil); err == nil; {
			var n int
			n, err = res.Body.Read(buf)
			src.handed += n
		}
		if want := append(make([]int, 20), 20); !slices.Equal(src.seen, want) {
			t.Errorf("after a switch of protocols %v of %q is handed on, want %v", src.seen, text, want)
		}
	}

	// It waits no longer than that, and a whole value with something after it no longer than it has to.
	s = scrubber(t, testValues[2])
	for text, want := range map[string]int{
		testValues[2][:16] + strings.Repeat(".", 16): 32, // as many as a URL has for it
		testValues[2][:16] + strings.Repeat(".", 15): 0,
		testValues[2] + "\n":                         len(testPlaceholder) + 2,
	} {
		if got, _ := seen(t, s, text); got[len(text)] != want {
			t.Errorf("of %q %d bytes are handed on; want %d", text, got[len(text)], want)
		}
	}
}

// every returns cuts after each n bytes.
func every(n, length int) (cuts []int) {
	for at := n; at < length; at += n {
		cuts = append(cuts, at)
	}
	return cuts
}

func TestRestrictEncoding(t *testing.T) {
	t.Parallel()
	h := http.Header{"Accept-Encoding": {"gzip", "br"}, "accept-encoding": {"x"}, "Te": {"gzip"}, "Sec-Websocket-Extensions": {"permessage-deflate"}, "Accept": {"*/*"},
		"Range": {"bytes=0-3"}, "If-Range": {"x"}, "request_range": {"bytes=0-3"}}
	RestrictEncoding(h)
	if fmt.Sprint(h) != fmt.Sprint(http.Header{"Accept-Encoding": {"identity"}, "Accept": {"*/*"}}) {
		t.Error(h)
	}
}

// TestPartial: parts of an answer may each hold less of a value than is looked for.
func TestPartial(t *testing.T) {
	t.Parallel()
	s := scrubber(t, "a-value-of-some-length")
	for _, head := range []string{"Content-Range: bytes 0-3/22\r\nContent-Length: 4\r\n\r\na-va", "Content-Type: multipart/byteranges; boundary=x\r\nContent-Length: 0\r\n\r\n"} {
		res, err := http.ReadResponse(bufio.NewReader(strings.NewReader("HTTP/1.1 206 Partial Content\r\n"+head)), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Response(res, Tell{}); !errors.Is(err, ErrOpaque) {
			t.Errorf("%q: %v", head, err)
		}
	}
}

func BenchmarkScrub(b *testing.B) {
	r := rand.New(rand.NewPCG(5, 6))
	raw := make([]byte, 8<<20)
	for i := range raw {
		raw[i] = byte(r.Uint32())
	}
	bodies := map[string][]byte{
		"binary": raw,
		"json":   bytes.Repeat([]byte(`{"name":"left-pad","version":"1.3.0","dist":{"shasum":"5b8a3a7765dfe001261dde915589e782f8c94d1e"}},`), len(raw)/100),
		"base64": []byte(base64.StdEncoding.EncodeToString(raw))[:len(raw)],
		"hex":    []byte(hex.EncodeToString(raw))[:len(raw)],
	}
	for _, secrets := range []int{1, 10, 100} {
		var values []string
		for i := range secrets {
			values = append(values, fmt.Sprintf("tok_%d_", i)+hex.EncodeToString(raw[i*16:i*16+16]))
		}
		s := scrubber(b, values...)
		for _, name := range []string{"binary", "json", "base64", "hex"} {
			b.Run(fmt.Sprintf("%d/%s", secrets, name), func(b *testing.B) {
				b.SetBytes(int64(len(bodies[name])))
				buf := make([]byte, 32<<10)
				for b.Loop() {
					rd := s.Reader(bytes.NewReader(bodies[name]))
					rd.missed = func(int, int) error { return nil }
					for {
						if _, err := rd.Read(buf); err != nil {
							break
						}
					}
				}
			})
		}
	}
	b.Run("make/10", func(b *testing.B) {
		var values []string
		for i := range 10 {
			values = append(values, fmt.Sprintf("tok_%d_", i)+hex.EncodeToString(raw[i*16:i*16+16]))
		}
		for b.Loop() {
			scrubber(b, values...)
		}
	})
}
