package guest_test

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/testenv"
)

func fetch(t testing.TB, method, url string, body io.Reader, hdr ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequest(method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(hdr); i += 2 {
		req.Header.Set(hdr[i], hdr[i+1])
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(data)
}

func gzipped(s string) io.Reader {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	io.WriteString(z, s)
	z.Close()
	return &b
}

// form makes a form of parts with the given Content-Disposition.
func form(parts ...string) (io.Reader, string) {
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i+1 < len(parts); i += 2 {
		p, _ := w.CreatePart(textproto.MIMEHeader{"Content-Disposition": {parts[i]}})
		io.WriteString(p, parts[i+1])
	}
	w.Close()
	return &b, w.FormDataContentType()
}

func TestUpload(t *testing.T) {
	s := newSandbox(t)
	dir := t.TempDir()
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return "error: " + err.Error()
		}
		return string(data)
	}
	at := func(name string) string { return s.url("/files?path=" + url.QueryEscape(filepath.Join(dir, name))) }
	const octets = "application/octet-stream"

	resp, body := fetch(t, "POST", at("new/dir/a.txt"), strings.NewReader("one"), "Content-Type", octets)
	want := fmt.Sprintf(`[{"path":"%s/new/dir/a.txt","name":"a.txt","type":"file"}]`, dir)
	if resp.StatusCode != 200 || body != want || read("new/dir/a.txt") != "one" {
		t.Errorf("%s %s; file %q", resp.Status, body, read("new/dir/a.txt"))
	}
	if resp, _ := fetch(t, "POST", at("new/dir/a.txt"), gzipped("2"), "Content-Type", octets, "Content-Encoding", "gzip"); resp.StatusCode != 200 || read("new/dir/a.txt") != "2" {
		t.Errorf("gzip: %s %q", resp.Status, read("new/dir/a.txt"))
	}
	f, ctype := form(`form-data; name="file"; filename="ignored"`, "three")
	if resp, _ := fetch(t, "POST", at("b.txt"), f, "Content-Type", ctype); resp.StatusCode != 200 || read("b.txt") != "three" {
		t.Errorf("form with path: %s %q", resp.Status, read("b.txt"))
	}
	f, ctype = form(
		`form-data; name="other"`, "passed over",
		`form-data; name="file"; filename="`+dir+`/x/1.txt"`, "1",
		`form-data; name="file"; filename="`+dir+`/x/%22q%22 ü.txt"`, "2",
		`form-data; filename*=UTF-8''`+url.PathEscape(dir+"/x/ä.txt")+`; name=file`, "3")
	resp, body = fetch(t, "POST", s.url("/files"), f, "Content-Type", ctype)
	if resp.StatusCode != 200 || read("x/1.txt")+read(`x/"q" ü.txt`)+read("x/ä.txt") != "123" {
		t.Errorf("form: %s %s", resp.Status, body)
	}

	syscall.Mkfifo(dir+"/fifo", 0o666)
	for _, c := range []struct {
		name, url, ctype, body string
		hdr                    []string
		status                 int
	}{
		{"no path", s.url("/files"), octets, "x", nil, 400},
		{"no type", at("n"), "", "x", nil, 400},
		{"another type", at("n"), "text/plain", "x", nil, 400},
		{"a form without boundary", at("n"), "multipart/form-data", "x", nil, 400},
		{"a broken form", at("n"), "multipart/form-data; boundary=b", "x", nil, 400},
		{"an unknown encoding", at("n"), octets, "x", []string{"Content-Encoding", "br"}, 400},
		{"no gzip", at("n"), octets, "x", []string{"Content-Encoding", "gzip"}, 400},
		{"a directory", at("x"), octets, "x", nil, 400},
		{"a pipe", at("fifo"), octets, "x", nil, 400},
		{"a device", s.url("/files?path=/dev/null"), octets, "x", nil, 400},
		{"below a file", at("b.txt/c"), octets, "x", nil, 400},
		{"a zero byte", s.url("/files?path=/a%00b"), octets, "x", nil, 400},
		{"a long name", at(strings.Repeat("n", 300)), octets, "x", nil, 400},
		{"an unknown user", at("n") + "&username=nobody-knows", octets, "x", nil, 401},
		{"metadata too long", at("n"), octets, "x", []string{"X-Metadata-A", strings.Repeat("v", 5000)}, 400},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp, body := fetch(t, "POST", c.url, strings.NewReader(c.body), append(c.hdr, "Content-Type", c.ctype)...)
			if resp.StatusCode != c.status || !strings.HasPrefix(body, `{"code":`+strconv.Itoa(c.status)+`,"message":"`) {
				t.Errorf("%s %s, want %d", resp.Status, body, c.status)
			}
		})
	}
	f, ctype = form(`form-data; name="file"; filename="`+dir+`/t"`, "1", `form-data; name="file"; filename="`+dir+`/./t"`, "2")
	if resp, body := fetch(t, "POST", s.url("/files"), f, "Content-Type", ctype); resp.StatusCode != 400 {
		t.Errorf("one path twice: %s %s", resp.Status, body)
	}
}

func TestUploadMetadata(t *testing.T) {
	s := newSandbox(t)
	dir := t.TempDir()
	path := s.url("/files?path=" + dir + "/f")
	resp, body := fetch(t, "POST", path, strings.NewReader("x"), "Content-Type", "application/octet-stream", "X-Metadata-Author", "me", "X-Metadata-B-C", "2")
	if resp.StatusCode == 400 && strings.Contains(body, "keeps no metadata") {
		testenv.Skip(t, "the temporary directory's file system keeps no extended attributes")
	}
	if want := `[{"path":"` + dir + `/f","name":"f","type":"file","metadata":{"author":"me","b-c":"2"}}]`; body != want {
		t.Errorf("got %s, want %s", body, want)
	}
	stat := func() string {
		_, body := fetch(t, "POST", s.url("/filesystem.Filesystem/Stat"), strings.NewReader(`{"path":"`+dir+`/f"}`), "Content-Type", "application/json")
		_, md, _ := strings.Cut(body, `"metadata":`)
		return md
	}
	if got := stat(); got != `{"author":"me","b-c":"2"}}}` {
		t.Errorf("stat: %s", got)
	}
	fetch(t, "POST", path, strings.NewReader("x"), "Content-Type", "application/octet-stream", "X-Metadata-B-C", "3")
	if got := stat(); got != `{"b-c":"3"}}}` {
		t.Errorf("after the second upload: %s", got)
	}
}

func TestFullDisk(t *testing.T) {
	testenv.NeedsRoot(t)
	s := newSandbox(t)
	disk := testenv.SmallFS(t, 2<<20, 100)
	resp, body := fetch(t, "POST", s.url("/files?path="+disk+"/f"), io.LimitReader(zeros{}, 8<<20), "Content-Type", "application/octet-stream")
	if resp.StatusCode != 507 {
		t.Errorf("%s %s, want 507", resp.Status, body)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestDownload(t *testing.T) {
	s := newSandbox(t)
	dir := t.TempDir()
	text := strings.Repeat("0123456789", 1000)
	if err := os.WriteFile(dir+"/f.txt", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/empty", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	syscall.Mkfifo(dir+"/fifo", 0o666)
	at := func(name string) string { return s.url("/files?path=" + url.QueryEscape(dir+"/"+name)) }
	for _, c := range []struct {
		name, url, rng string
		status         int
		want           string
	}{
		{"whole", at("f.txt"), "", 200, text},
		{"a range", at("f.txt"), "bytes=5-9", 206, "56789"},
		{"the end", at("f.txt"), "bytes=-3", 206, "789"},
		{"an open range", at("f.txt"), "bytes=9998-", 206, "89"},
		{"beyond the end", at("f.txt"), "bytes=10000-", 416, ""},
		{"empty", at("empty"), "", 200, ""},
		{"a file of /proc", s.url("/files?path=/proc/self/comm"), "", 200, "guest.test\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp, body := fetch(t, "GET", c.url, nil, "Range", c.rng, "Accept-Encoding", "gzip, deflate")
			if resp.StatusCode != c.status || c.status != 416 && body != c.want {
				t.Errorf("%s %.100q", resp.Status, body)
			}
			if resp.Header.Get("X-Content-Type-Options") != "nosniff" {
				t.Error("no nosniff")
			}
		})
	}
	if resp, _ := fetch(t, "GET", at("empty"), nil); resp.ContentLength != 0 {
		t.Errorf("empty: length %d", resp.ContentLength)
	}
	if resp, body := fetch(t, "HEAD", at("f.txt"), nil); resp.StatusCode != 200 || resp.ContentLength != 10000 || body != "" {
		t.Errorf("HEAD: %s %d", resp.Status, resp.ContentLength)
	}
	resp, body := fetch(t, "GET", at("f.txt"), nil, "Accept-Encoding", "gzip;q=1, identity;q=0")
	z, err := gzip.NewReader(strings.NewReader(body))
	if err != nil {
		t.Fatal(err, resp.Header)
	}
	if data, err := io.ReadAll(z); err != nil || string(data) != text {
		t.Errorf("gzip: %d bytes, %v", len(data), err)
	}
	for name, want := range map[string]struct {
		status int
		text   string
	}{
		at("gone"):                       {404, fmt.Sprintf(`{"code":404,"message":"path '%s/gone' does not exist"}`, dir)},
		s.url("/files?path=" + dir):      {400, `{"code":400,"message":"path '` + dir + `' is a directory"}`},
		at("fifo"):                       {400, `{"code":400,`},
		s.url("/files?path=/dev/zero"):   {400, `{"code":400,`},
		at("f.txt/x"):                    {400, `{"code":400,`},
		s.url("/files?path=~other/file"): {400, `{"code":400,`},
	} {
		if resp, body := fetch(t, "GET", name, nil); resp.StatusCode != want.status || !strings.HasPrefix(body, want.text) {
			t.Errorf("%s: %s %s", name, resp.Status, body)
		}
	}
	if resp, _ := fetch(t, "DELETE", at("f.txt"), nil); resp.StatusCode != 405 {
		t.Errorf("DELETE: %s", resp.Status)
	}
}

func TestCompose(t *testing.T) {
	s := newSandbox(t)
	dir := t.TempDir()
	for _, n := range []string{"a", "b", "c"} {
		if err := os.WriteFile(dir+"/"+n, []byte(n+n), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	post := func(body string) (*http.Response, string) {
		return fetch(t, "POST", s.url("/files/compose"), strings.NewReader(strings.ReplaceAll(body, "DIR", dir)), "Content-Type", "application/json")
	}
	resp, body := post(`{"source_paths":["DIR/a","DIR/b","DIR/a"],"destination":"DIR/a"}`)
	data, _ := os.ReadFile(dir + "/a")
	if resp.StatusCode != 200 || string(data) != "aabbaa" || body != `{"path":"`+dir+`/a","name":"a","type":"file"}` {
		t.Errorf("%s %s %q", resp.Status, body, data)
	}
	for body, status := range map[string]int{
		`{}`: 400, `{"source_paths":[],"destination":"DIR/x"}`: 400, `{"source_paths":["DIR/gone"],"destination":"DIR/b"}`: 404,
		`{"source_paths":["DIR"],"destination":"DIR/b"}`: 400, `{"source_paths":["DIR/b"],"destination":"DIR/b","username":"nobody-knows"}`: 401,
	} {
		if resp, text := post(body); resp.StatusCode != status {
			t.Errorf("%s: %s %s", body, resp.Status, text)
		}
	}
	entries, _ := os.ReadDir(dir)
	if data, _ := os.ReadFile(dir + "/b"); string(data) != "bb" || len(entries) != 3 {
		t.Errorf("a failure left %q and %v", data, entries)
	}
}

func TestSignatures(t *testing.T) {
	s := newSandbox(t)
	const token = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"
	s.settle(t, `{"accessToken":"`+token+`"}`)
	dir := t.TempDir()
	path := dir + "/hello.txt"
	if err := os.WriteFile(path, []byte("hi"), 0o644); err != nil {
		t.Fatal(err)
	}
	sign := func(path, op, user, expiry string) string {
		text := path + ":" + op + ":" + user + ":" + token
		if expiry != "" {
			text += ":" + expiry
		}
		d := sha256.Sum256([]byte(text))
		return "v1_" + base64.RawStdEncoding.EncodeToString(d[:])
	}
	if got := sign("hello.txt", "read", "user", ""); got != "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E" {
		t.Fatalf("the test's own signature is wrong: %s", got)
	}
	in := func(d time.Duration) string { return strconv.FormatInt(time.Now().Add(d).Unix(), 10) }
	future, past := in(time.Hour), in(-time.Hour)
	link := func(q ...string) string {
		v := url.Values{}
		for i := 0; i+1 < len(q); i += 2 {
			v.Set(q[i], q[i+1])
		}
		return s.url("/files?" + v.Encode())
	}
	for _, c := range []struct {
		name, method, url, token string
		status                   int
		body                     string
	}{
		{"good", "GET", link("path", path, "signature", sign(path, "read", "", "")), "", 200, "hi"},
		{"with user", "GET", link("path", path, "username", "root", "signature", sign(path, "read", "root", "")), "", 200, "hi"},
		{"with expiry", "GET", link("path", path, "signature", sign(path, "read", "", future), "signature_expiration", future), "", 200, "hi"},
		{"missing", "GET", link("path", path), "", 401, `{"code":401,"message":"a signature or an access token is needed"}`},
		{"wrong", "GET", link("path", path, "signature", "v1_x"), "", 401, `{"code":401,"message":"invalid signature"}`},
		{"for writing", "GET", link("path", path, "signature", sign(path, "write", "", "")), "", 401, `{"code":401,"message":"invalid signature"}`},
		{"for another user", "GET", link("path", path, "username", "root", "signature", sign(path, "read", "", "")), "", 401, `{"code":401,"message":"invalid signature"}`},
		{"for another path", "GET", link("path", "/etc/passwd", "signature", sign(path, "read", "", "")), "", 401, `{"code":401,"message":"invalid signature"}`},
		{"expired", "GET", link("path", path, "signature", sign(path, "read", "", past), "signature_expiration", past), "", 401, `{"code":401,"message":"signature is already expired"}`},
		{"expiry taken off", "GET", link("path", path, "signature", sign(path, "read", "", past)), "", 401, `{"code":401,"message":"invalid signature"}`},
		{"expiry moved", "GET", link("path", path, "signature", sign(path, "read", "", past), "signature_expiration", future), "", 401, `{"code":401,"message":"invalid signature"}`},
		{"the token wins over a bad signature", "GET", link("path", path, "signature", "x"), token, 200, "hi"},
		{"a wrong token wins over a good signature", "GET", link("path", path, "signature", sign(path, "read", "", "")), "x", 401, ""},
		{"writing", "POST", link("path", path, "signature", sign(path, "write", "", "")), "", 200, ""},
		{"writing with one for reading", "POST", link("path", path, "signature", sign(path, "read", "", "")), "", 401, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			if strings.Contains(c.url, "username=root") {
				testenv.NeedsRoot(t)
			}
			var body io.Reader
			if c.method == "POST" {
				body = strings.NewReader("hi")
			}
			hdr := []string{"Content-Type", "application/octet-stream"}
			if c.token != "" {
				hdr = append(hdr, "X-Access-Token", c.token)
			}
			resp, text := fetch(t, c.method, c.url, body, hdr...)
			if resp.StatusCode != c.status || c.body != "" && text != c.body {
				t.Errorf("%s %s", resp.Status, text)
			}
		})
	}
}

func TestMetrics(t *testing.T) {
	s := newSandbox(t)
	resp, body := fetch(t, "GET", s.url("/metrics"), nil)
	for _, k := range []string{"ts", "cpu_count", "cpu_used_pct", "mem_total", "mem_total_mib", "mem_used", "mem_used_mib", "mem_cache", "disk_used", "disk_total", "processes"} {
		if !strings.Contains(body, `"`+k+`":`) {
			t.Errorf("%s is missing: %s %s", k, resp.Status, body)
		}
	}
}
