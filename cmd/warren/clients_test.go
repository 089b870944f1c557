//go:build linux

package main

import (
	"archive/tar"
	"archive/zip"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/miekg/dns"

	"github.com/warren-sandbox/warren/internal/secret/secrettest"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// labWorld is the world that the clients of TestClients speak to: a git host, package registries of several kinds and a web server, told apart by
// the first label of the host's name. The names below lab are allowed, those below bad.lab are not, and the same servers are behind both.
type labWorld struct {
	*scriptLab
	t     *testing.T
	ports map[string]string // by mode and scheme: each mode has servers of its own
	roots []byte
	git   http.Handler
	oci   http.Handler
	repo  string
	apt   map[string][]byte // by path

	mu    sync.Mutex
	asked []string // names that TLS clients asked for
}

var registryHosts = []string{"git", "npm", "pypi", "goproxy", "apt", "ws", "web", "oci"}

// What the servers want to see in the mode "secret", and no sandbox has. The session is what the registry of images gives for the first.
const (
	robotToken = "lab+robot/0123456789abcdef"
	npmToken   = "npm_fedcba9876543210lab"
	ociSession = "session-of-the-registry"
)

func newLabWorld(t *testing.T) *labWorld {
	t.Helper()
	r := &labWorld{scriptLab: &scriptLab{}, t: t, ports: map[string]string{}}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	r.repo = filepath.Join(t.TempDir(), "repo.git")
	run := func(dir, name string, args ...string) {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		// Not as whoever runs the tests has it, with keys to sign by and hooks.
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v\n%s", name, args, err, out)
		}
	}
	work := t.TempDir()
	run("", "git", "init", "-q", "--bare", "-b", "main", r.repo)
	run(r.repo, "git", "config", "http.receivepack", "true")
	run(work, "git", "init", "-q", "-b", "main", ".")
	check(os.WriteFile(filepath.Join(work, "README"), []byte("from the git host\n"), 0o644))
	run(work, "git", "add", ".")
	run(work, "git", "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-q", "-m", "first")
	run(work, "git", "push", "-q", r.repo, "main")
	out, err := exec.Command("git", "--exec-path").Output()
	check(err)
	r.git = &cgi.Handler{Path: filepath.Join(strings.TrimSpace(string(out)), "git-http-backend"), Env: []string{"GIT_PROJECT_ROOT=" + filepath.Dir(r.repo), "GIT_HTTP_EXPORT_ALL=1"}}
	r.apt = aptRepository(t)
	r.oci = registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	check(pushImage(r.oci))

	var names []string
	for _, h := range registryHosts {
		names = append(names, h+".lab", h+".bad.lab")
	}
	cert, roots := labCertificate(check, names...)
	r.roots = roots
	secure := &tls.Config{
		Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2", "http/1.1"},
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.asked = append(r.asked, h.ServerName)
			return nil, nil
		},
	}
	for _, mode := range modes {
		for scheme, config := range map[string]*tls.Config{"http": nil, "https": secure} {
			ln, err := net.Listen("tcp", labAddr+":0")
			check(err)
			s := &http.Server{Handler: r, TLSConfig: config.Clone(), ErrorLog: log.New(io.Discard, "", 0)}
			if config == nil {
				go s.Serve(ln)
			} else {
				go s.ServeTLS(ln, "", "")
			}
			t.Cleanup(func() { s.Close() })
			_, port, err := net.SplitHostPort(ln.Addr().String())
			check(err)
			r.ports[mode+" "+scheme] = port
		}
	}
	return r
}

// modes are how connections go through the gateway. In the last the servers of https want credentials, which the gateway puts in.
var modes = []string{"passed", "inspected", "secret"}

// mode is that of the server which a request has come to.
func (r *labWorld) mode(q *http.Request) string {
	_, port, _ := net.SplitHostPort(q.Context().Value(http.LocalAddrContextKey).(net.Addr).String())
	for key, p := range r.ports {
		if mode, _, _ := strings.Cut(key, " "); p == port {
			return mode
		}
	}
	return ""
}

// may says whether a request has the credential that its server wants, and asks for it if not.
func may(w http.ResponseWriter, q *http.Request, host, base string) bool {
	user, password, _ := q.BasicAuth()
	ok, challenge := user == "robot" && password == robotToken, `Basic realm="lab"`
	switch {
	case host == "npm":
		ok = q.Header.Get("Authorization") == "Bearer "+npmToken
	case host == "web":
		ok = q.Header.Get("X-Api-Key") == robotToken
	case host == "ws":
		ok = q.URL.Query().Get("key") == robotToken
	case host == "oci" && q.URL.Path != "/token":
		ok, challenge = q.Header.Get("Authorization") == "Bearer "+ociSession, fmt.Sprintf(`Bearer realm="%s/token",service="lab"`, base)
	}
	if !ok {
		w.Header().Set("WWW-Authenticate", challenge)
		http.Error(w, "credentials, please", http.StatusUnauthorized)
	}
	return ok
}

// pushImage puts lab/image into a registry.
func pushImage(h http.Handler) error {
	layer := static.NewLayer([]byte("from the registry\n"), types.OCILayer)
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return err
	}
	s := httptest.NewServer(h)
	defer s.Close()
	ref, err := name.NewTag(strings.TrimPrefix(s.URL, "http://") + "/lab/image:1")
	if err != nil {
		return err
	}
	return remote.Write(ref, img)
}

// resolver serves names, and returns where.
func (r *labWorld) resolver() string {
	packets, err := net.ListenPacket("udp", labAddr+":0")
	if err != nil {
		r.t.Fatal(err)
	}
	names := &dns.Server{PacketConn: packets, Handler: dns.HandlerFunc(r.resolve)}
	go names.ActivateAndServe()
	r.t.Cleanup(func() { packets.Close() })
	return packets.LocalAddr().String()
}

// seen returns the requests that have come for a mode, with D for the domain.
func (r *labWorld) seen(mode string) (hits []string) {
	r.scriptLab.mu.Lock()
	defer r.scriptLab.mu.Unlock()
	for _, hit := range r.hits {
		for _, scheme := range []string{"http", "https"} {
			if before, after, ok := strings.Cut(hit, ".lab:"+r.ports[mode+" "+scheme]); ok {
				// Both are the same to every server, and the gateway sends one of them.
				hits = append(hits, before+".D"+strings.NewReplacer("/./", "/", "%2F", "%2f").Replace(after))
			}
		}
	}
	return hits
}

// forget returns all that has come, the names that were looked up too, and forgets it.
func (r *labWorld) forget() (hits, asked []string) {
	r.scriptLab.mu.Lock()
	hits, r.hits = r.hits, nil
	r.scriptLab.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	asked, r.asked = r.asked, nil
	return hits, asked
}

func (r *labWorld) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	scheme := "http"
	if q.TLS != nil {
		scheme = "https"
	}
	r.hit("%s %s://%s%s %s", q.Method, scheme, q.Host, q.URL.EscapedPath(), q.Proto)
	host, _, _ := strings.Cut(q.Host, ".")
	base := scheme + "://" + q.Host
	if q.TLS != nil && r.mode(q) == "secret" && !may(w, q, host, base) {
		return
	}
	switch host {
	case "oci":
		if q.URL.Path == "/token" {
			fmt.Fprintf(w, `{"token":%q}`, ociSession)
			return
		}
		r.oci.ServeHTTP(w, q)
	case "git":
		r.git.ServeHTTP(w, q)
	case "npm":
		serveNPM(w, q, base)
	case "pypi":
		servePyPI(w, q)
	case "goproxy":
		serveGoProxy(w, q)
	case "apt":
		body, ok := r.apt[path.Clean(q.URL.Path)]
		if !ok {
			http.NotFound(w, q)
			return
		}
		w.Write(body)
	case "ws":
		serveEcho(w, q)
	case "web":
		n, _ := io.Copy(io.Discard, q.Body)
		fmt.Fprintf(w, "%s %s of %d bytes over %s", q.Method, q.URL.Path, n, q.Proto)
	default:
		http.NotFound(w, q)
	}
}

// serveNPM has two packages, one of them with a scope, whose name clients write with an encoded slash.
func serveNPM(w http.ResponseWriter, q *http.Request, base string) {
	name, file, tarball := strings.Cut(strings.TrimPrefix(q.URL.Path, "/"), "/-/")
	if name != "plain" && name != "@lab/scoped" {
		http.NotFound(w, q)
		return
	}
	var b bytes.Buffer
	zw := gzip.NewWriter(&b)
	tw := tar.NewWriter(zw)
	for _, f := range [][2]string{
		{"package/package.json", fmt.Sprintf(`{"name":%q,"version":"1.0.0","main":"index.js"}`, name)},
		{"package/index.js", fmt.Sprintf("module.exports = %q\n", "from "+name)},
	} {
		tw.WriteHeader(&tar.Header{Name: f[0], Mode: 0o644, Size: int64(len(f[1])), Typeflag: tar.TypeReg})
		io.WriteString(tw, f[1])
	}
	tw.Close()
	zw.Close()
	if tarball {
		if file != path.Base(name)+"-1.0.0.tgz" {
			http.NotFound(w, q)
			return
		}
		w.Write(b.Bytes())
		return
	}
	sum := sha512.Sum512(b.Bytes())
	version := map[string]any{"name": name, "version": "1.0.0", "main": "index.js", "dist": map[string]any{
		"tarball": base + "/" + name + "/-/" + path.Base(name) + "-1.0.0.tgz", "integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:]),
	}}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(map[string]any{"name": name, "dist-tags": map[string]string{"latest": "1.0.0"}, "versions": map[string]any{"1.0.0": version}})
}

// servePyPI has one wheel.
func servePyPI(w http.ResponseWriter, q *http.Request) {
	const wheel = "labpkg-1.0-py3-none-any.whl"
	var b bytes.Buffer
	zw := zip.NewWriter(&b)
	for _, f := range [][2]string{
		{"labpkg.py", "word = 'from the wheel'\n"},
		{"labpkg-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: labpkg\nVersion: 1.0\n"},
		{"labpkg-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: lab\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{"labpkg-1.0.dist-info/RECORD", "labpkg.py,,\nlabpkg-1.0.dist-info/METADATA,,\nlabpkg-1.0.dist-info/WHEEL,,\nlabpkg-1.0.dist-info/RECORD,,\n"},
	} {
		fw, _ := zw.CreateHeader(&zip.FileHeader{Name: f[0], Method: zip.Deflate})
		io.WriteString(fw, f[1])
	}
	zw.Close()
	switch q.URL.Path {
	case "/simple/labpkg/":
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<!DOCTYPE html><html><body><a href="/files/%s#sha256=%x">%s</a></body></html>`, wheel, sha256.Sum256(b.Bytes()), wheel)
	case "/files/" + wheel:
		w.Write(b.Bytes())
	default:
		http.NotFound(w, q)
	}
}

// serveGoProxy has one module.
func serveGoProxy(w http.ResponseWriter, q *http.Request) {
	const mod = "module lab.test/mod\n\ngo 1.20\n"
	switch q.URL.Path {
	case "/lab.test/mod/@v/v1.0.0.info":
		io.WriteString(w, `{"Version":"v1.0.0","Time":"2025-01-01T00:00:00Z"}`)
	case "/lab.test/mod/@v/v1.0.0.mod":
		io.WriteString(w, mod)
	case "/lab.test/mod/@v/v1.0.0.zip":
		zw := zip.NewWriter(w)
		for _, f := range [][2]string{{"go.mod", mod}, {"mod.go", "package mod\n\n// Word is from the module.\nconst Word = \"from the module\"\n"}} {
			fw, _ := zw.Create("lab.test/mod@v1.0.0/" + f[0])
			io.WriteString(fw, f[1])
		}
		zw.Close()
	default:
		http.NotFound(w, q)
	}
}

// aptRepository has one package.
func aptRepository(t *testing.T) map[string][]byte {
	t.Helper()
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "labdeb", "DEBIAN"), 0o755); err != nil {
		t.Fatal(err)
	}
	control := "Package: labdeb\nVersion: 1.0\nArchitecture: all\nMaintainer: lab <lab@example.com>\nDescription: of the lab\n"
	if err := os.WriteFile(filepath.Join(dir, "labdeb", "DEBIAN", "control"), []byte(control), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("dpkg-deb", "--root-owner-group", "--build", filepath.Join(dir, "labdeb"), filepath.Join(dir, "labdeb.deb")).CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb: %v\n%s", err, out)
	}
	deb, err := os.ReadFile(filepath.Join(dir, "labdeb.deb"))
	if err != nil {
		t.Fatal(err)
	}
	packages := fmt.Sprintf("%sFilename: ./labdeb.deb\nSize: %d\nSHA256: %x\n\n", control, len(deb), sha256.Sum256(deb))
	release := fmt.Sprintf("Date: %s\nSHA256:\n %x %d Packages\n", time.Now().UTC().Format(time.RFC1123), sha256.Sum256([]byte(packages)), len(packages))
	return map[string][]byte{"/debian/Packages": []byte(packages), "/debian/Release": []byte(release), "/debian/labdeb.deb": deb}
}

// serveEcho is a WebSocket that sends each message back.
func serveEcho(w http.ResponseWriter, q *http.Request) {
	key := q.Header.Get("Sec-Websocket-Key")
	if !strings.EqualFold(q.Header.Get("Upgrade"), "websocket") || key == "" {
		http.Error(w, "want a WebSocket", http.StatusBadRequest)
		return
	}
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer conn.Close()
	sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n\r\n", base64.StdEncoding.EncodeToString(sum[:]))
	for {
		code, text, err := readFrame(rw.Reader)
		if err != nil {
			return
		}
		head := []byte{0x80 | code, byte(len(text))}
		if len(text) > 125 {
			head = binary.BigEndian.AppendUint16([]byte{0x80 | code, 126}, uint16(len(text)))
		}
		conn.Write(append(head, text...))
		if code == 8 {
			return
		}
	}
}

func readFrame(r *bufio.Reader) (code byte, text []byte, err error) {
	head := make([]byte, 2)
	if _, err := io.ReadFull(r, head); err != nil {
		return 0, nil, err
	}
	n := int(head[1] & 127)
	if n == 126 {
		more := make([]byte, 2)
		if _, err := io.ReadFull(r, more); err != nil {
			return 0, nil, err
		}
		n = int(binary.BigEndian.Uint16(more))
	}
	if n == 127 || head[1]&128 == 0 {
		return 0, nil, fmt.Errorf("a frame that is too long or has no mask")
	}
	mask := make([]byte, 4)
	if _, err := io.ReadFull(r, mask); err != nil {
		return 0, nil, err
	}
	text = make([]byte, n)
	_, err = io.ReadFull(r, text)
	for i := range text {
		text[i] ^= mask[i%4]
	}
	return head[0] & 15, text, err
}

// registryClient is a program as people use it: a line of sh in which $D is the domain, $S the port of https and $H that of http.
type registryClient struct {
	name, run string
	// wants is what it prints, with HTTP/D for the version that a server was asked in, and sees what the server has to see, with D for
	// the domain.
	wants string
	sees  []string
}

const aptFlags = `-o Dir::Etc::SourceList=/tmp/apt/list -o Dir::Etc::SourceParts=/dev/null -o Dir::State=/tmp/apt/state -o Dir::State::status=/tmp/apt/status ` +
	`-o Dir::Cache=/tmp/apt/cache -o Acquire::Retries=0 -o Acquire::Languages=none $APT_CA`

func apt(scheme, port string) string {
	return `rm -rf /tmp/apt; mkdir -p /tmp/apt/state/lists/partial /tmp/apt/cache/archives/partial; touch /tmp/apt/status; cd /tmp/apt
echo "deb [trusted=yes] ` + scheme + `://apt.$D:` + port + `/debian ./" >list
apt-get ` + aptFlags + ` update; apt-get ` + aptFlags + ` download labdeb; dpkg-deb -f labdeb_1.0_all.deb Description`
}

var registryClients = []registryClient{
	{"git", `rm -rf /tmp/git; git clone -q https://git.$D:$S/repo.git /tmp/git; cd /tmp/git; cat README
head -c 2000000 /dev/urandom >big; git add .; git -c user.name=b -c user.email=b@example.com commit -qm more; git push -q origin HEAD:$MODE`,
		"from the git host", []string{"GET https://git.D/repo.git/info/refs", "POST https://git.D/repo.git/git-upload-pack", "POST https://git.D/repo.git/git-receive-pack"}},
	{"npm", `rm -rf /tmp/npm; mkdir /tmp/npm; cd /tmp/npm; echo '{}' >package.json
npm install --registry https://npm.$D:$S/ --no-audit --no-fund --no-update-notifier --fetch-retries=0 --cache /tmp/npm/cache plain @lab/scoped >&2
node -e 'console.log(require("plain") + ", " + require("@lab/scoped"))'`,
		"from plain, from @lab/scoped", []string{"GET https://npm.D/plain ", "GET https://npm.D/@lab%2fscoped ", "GET https://npm.D/@lab/scoped/-/scoped-1.0.0.tgz"}},
	{"pip", `rm -rf /tmp/pip; python3 -m pip install -q --no-cache-dir --disable-pip-version-check --retries 0 --index-url https://pypi.$D:$S/simple/ --target /tmp/pip labpkg
PYTHONPATH=/tmp/pip python3 -c 'import labpkg; print(labpkg.word)'`,
		"from the wheel", []string{"GET https://pypi.D/simple/labpkg/", "GET https://pypi.D/files/labpkg-1.0-py3-none-any.whl"}},
	{"go", `export GOPROXY=https://goproxy.$D:$S GOSUMDB=off GOTOOLCHAIN=local GOFLAGS=-modcacherw GOPATH=/tmp/go GOCACHE=/tmp/go/cache; rm -rf /tmp/go; mkdir /tmp/go; cd /tmp/go
go mod download -json lab.test/mod@v1.0.0; cat /tmp/go/pkg/mod/lab.test/mod@v1.0.0/mod.go`,
		"from the module", []string{"GET https://goproxy.D/lab.test/mod/@v/v1.0.0.zip"}},
	{"curl", `curl -sSf --http2 -w ' by %{http_version}\n' https://web.$D:$S/curl
head -c 2000000 /dev/zero | curl -sSf --http1.1 -T - https://web.$D:$S/up`,
		"GET /curl of 0 bytes over HTTP/D by 2\nPUT /up of 2000000 bytes", []string{"GET https://web.D/curl HTTP/2.0", "PUT https://web.D/up"}},
	{"apt over https", apt("https", "$S"), "of the lab", []string{"GET https://apt.D/debian/Packages", "GET https://apt.D/debian/labdeb.deb"}},
	{"apt over http", apt("http", "$H"), "of the lab", []string{"GET http://apt.D/debian/Packages", "GET http://apt.D/debian/labdeb.deb"}},
	{nodeClient, `node $(node --experimental-websocket -e 0 2>/dev/null && echo --experimental-websocket) --input-type=module -e '
const r = await fetch("https://web.'$D:$S'/fetch", {method: "POST", body: "x".repeat(70000)}); console.log(await r.text())
const ws = new WebSocket("wss://ws.'$D:$S'/node"); ws.onerror = e => { console.error(e); process.exit(1) }
ws.onopen = () => ws.send("there and back"); ws.onmessage = m => { console.log(m.data); ws.close() }'`,
		"POST /fetch of 70000 bytes over HTTP/D\nthere and back", []string{"POST https://web.D/fetch", "GET https://ws.D/node HTTP/1.1"}},
	{"urllib, requests and a WebSocket of python", `python3 -c '
import socket, ssl, sys, urllib.request
try: import requests
except ImportError: from pip._vendor import requests
domain, port = sys.argv[1], int(sys.argv[2])
web, host = f"https://web.{domain}:{port}", f"ws.{domain}"
failed = []
def urllib_(): print(urllib.request.urlopen(web + "/urllib").read().decode())
def requests_():
    s = requests.Session()
    for _ in range(2): print(s.post(web + "/requests", data=(b"chunk%d" % i for i in range(10))).text)
def socket_():
    s = ssl.create_default_context().wrap_socket(socket.create_connection((host, port), 10), server_hostname=host)
    s.sendall(f"GET /python HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n".encode())
    f = s.makefile("rb")
    print(f.readline().decode().strip())
    while f.readline() != b"\r\n": pass
    for word in b"ping", b"pong":
        s.sendall(bytes([0x81, 0x80 + len(word), 0, 0, 0, 0]) + word)
        print(f.read(2 + len(word))[2:].decode())
for do in urllib_, requests_, socket_:
    try: do()
    except Exception as e: failed.append(e)
sys.exit("; ".join(map(str, failed)) or None)
' $D $S`,
		"GET /urllib of 0 bytes over HTTP/D\nPOST /requests of 60 bytes over HTTP/D\nPOST /requests of 60 bytes over HTTP/D\nHTTP/1.1 101 Switching Protocols\nping\npong",
		[]string{"GET https://web.D/urllib", "POST https://web.D/requests", "GET https://ws.D/python HTTP/1.1"}},
	{"a client of image registries", `/tmp/lab/oci oci.$D:$S/lab/image:1`, "from the registry", []string{"GET https://oci.D/v2/lab/image/manifests/1", "GET https://oci.D/v2/lab/image/blobs/sha256:"}},
	{"java", `java -XX:TieredStopAtLevel=1 $JAVA_CA -cp /tmp/lab Fetch https://web.$D:$S/java`,
		"GET /java of 0 bytes", []string{"GET https://web.D/java HTTP/2.0"}},
}

// placeholderClients have the placeholder where people would have the credential.
var placeholderClients = []registryClient{
	{"git, in the URL", `rm -rf /tmp/git2; git clone -q https://robot:$ROBOT_TOKEN@git.$D:$S/repo.git /tmp/git2; cat /tmp/git2/README /tmp/git2/.git/config`, "from the git host", nil},
	{"npm, in .npmrc", `rm -rf /tmp/npm2; mkdir /tmp/npm2; cd /tmp/npm2; echo '{}' >package.json
echo "//npm.$D:$S/:_authToken=$NPM_TOKEN" >.npmrc
npm install --registry https://npm.$D:$S/ --no-audit --no-fund --no-update-notifier --fetch-retries=0 --cache /tmp/npm2/cache plain >&2
node -e 'console.log(require("plain"))'`, "from plain", nil},
	{"pip, in the index's URL", `rm -rf /tmp/pip2; python3 -m pip install -q --no-cache-dir --disable-pip-version-check --retries 0 --index-url https://robot:$ROBOT_TOKEN@pypi.$D:$S/simple/ --target /tmp/pip2 labpkg
PYTHONPATH=/tmp/pip2 python3 -c 'import labpkg; print(labpkg.word)'`, "from the wheel", nil},
	{"go and curl, in .netrc", `printf 'machine goproxy.%s login robot password %s\n' $D $ROBOT_TOKEN >~/.netrc; curl -sSfn https://goproxy.$D:$S/lab.test/mod/@v/v1.0.0.info; echo
export GOPROXY=https://goproxy.$D:$S GOSUMDB=off GOTOOLCHAIN=local GOFLAGS=-modcacherw GOPATH=/tmp/go2 GOCACHE=/tmp/go2/cache; rm -rf /tmp/go2; mkdir /tmp/go2; cd /tmp/go2
go mod download -json lab.test/mod@v1.0.0; cat /tmp/go2/pkg/mod/lab.test/mod@v1.0.0/mod.go`, "from the module", nil},
}

const nodeClient = "fetch and WebSocket of node"

// nodeHasWebSocket says whether the machine's Node has one of its own, as from 20.10 on. Debian 12's has not.
func nodeHasWebSocket() bool {
	return exec.Command("node", "--experimental-websocket", "-e", "process.exit(typeof WebSocket === 'function' ? 0 : 1)").Run() == nil
}

// nodeFetch is the client without the WebSocket, which Python's goes on trying.
func nodeFetch(c registryClient) registryClient {
	lines := strings.Split(c.run, "\n")
	c.name, c.run = "fetch of node", strings.Join(lines[:2], "\n")+"'"
	c.wants, _, _ = strings.Cut(c.wants, "\n")
	c.sees = c.sees[:1]
	return c
}

const fetchJava = `import java.net.*;
import java.net.http.*;

public class Fetch {
	public static void main(String[] args) throws Exception {
		System.out.println(new String(URI.create(args[0]).toURL().openStream().readAllBytes()));
		System.out.println(HttpClient.newHttpClient().send(HttpRequest.newBuilder(URI.create(args[0])).build(), HttpResponse.BodyHandlers.ofString()).body());
	}
}
`

// TestClients has the programs that people use speak with servers of their kind through the gateway: passed through, when they trust the servers'
// own authority, and inspected, when they trust what a sandbox trusts. To a name that no rule allows none of them gets.
func TestClients(t *testing.T) {
	testenv.NeedsTool(t, "git", "npm", "node", "python3", "go", "curl", "apt-get", "dpkg-deb", "java", "javac", "keytool")
	r := newLabWorld(t)
	h := newHome(t)
	roots := filepath.Join(h.dir, "lab-roots.pem")
	files := t.TempDir()
	policy := func(mode, more string) string {
		hosts := strings.Join(registryHosts, ".lab, ") + ".lab"
		return fmt.Sprintf("allow:\n  - {name: registries, hosts: [%s], cidr: %s/32, ports: [%s]%s}\n  - {name: mirror, host: apt.lab, cidr: %s/32, protocol: http, ports: [%s]}\n",
			hosts, labAddr, r.ports[mode+" https"], more, labAddr, r.ports[mode+" http"])
	}
	robot := func(name, host, rest string) string {
		return fmt.Sprintf("  - {secret: robot, env: ROBOT_TOKEN, name: %s, host: %s.lab, ports: [%s], %s}\n", name, host, r.ports["secret https"], rest)
	}
	secrets := "secrets:\n" + robot("git", "git", "place: {basic: robot}") + robot("pip", "pypi", "place: {basic: robot}") + robot("go", "goproxy", "place: {basic: robot}") +
		robot("apt", "apt", "place: {basic: robot}") + robot("images", "oci", "paths: [/token], place: {basic: robot}") + robot("web", "web", "place: {header: X-Api-Key}") +
		robot("ws", "ws", "place: {query: key}") +
		fmt.Sprintf("  - {secret: npm, env: NPM_TOKEN, host: npm.lab, ports: [%s], place: {header: Authorization, format: \"Bearer {}\"}}\n", r.ports["secret https"])
	for name, text := range map[string]string{
		filepath.Join(h.dir, "policies", "secret.yaml"): policy("secret", "") + secrets,
		roots: string(r.roots), filepath.Join(files, "roots.pem"): string(r.roots), filepath.Join(files, "Fetch.java"): fetchJava,
		filepath.Join(h.dir, "policies", "passed.yaml"): policy("passed", ""), filepath.Join(h.dir, "policies", "inspected.yaml"): policy("inspected", ", inspect: true"),
	} {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{
		{"javac", "--release", "11", "-d", files, filepath.Join(files, "Fetch.java")},
		{"keytool", "-importcert", "-noprompt", "-storetype", "JKS", "-storepass", "changeit", "-keystore", filepath.Join(files, "roots.jks"), "-file", roots},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	if _, err := testenv.Build(files, "oci", "./cmd/warren/testdata/oci"); err != nil {
		t.Fatal(err)
	}
	h.env = []string{"WARREN_GATEWAY_RESOLVER=" + r.resolver(), "WARREN_GATEWAY_ROOTS=" + roots}

	// What a sandbox that is passed through has to be told: whom the servers' certificates are by.
	trust := "export "
	for _, v := range []string{"SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"} {
		trust += v + "=/tmp/lab/roots.pem "
	}
	trust += "npm_config_cafile=/tmp/lab/roots.pem APT_CA='-o Acquire::https::CAInfo=/tmp/lab/roots.pem' JAVA_CA=-Djavax.net.ssl.trustStore=/tmp/lab/roots.jks"
	script := func(mode, domain string, c registryClient) string {
		env := fmt.Sprintf("set -e; MODE=%s D=%s S=%s H=%s\n", mode, domain, r.ports[mode+" https"], r.ports[mode+" http"])
		if mode == "passed" {
			env += trust + "\n"
		}
		return env + c.run
	}
	for name, value := range map[string]string{"robot": robotToken, "npm": npmToken} {
		set := h.command("secret", "set", name)
		set.Stdin = strings.NewReader(value)
		if out, err := set.CombinedOutput(); err != nil {
			t.Fatalf("secret set: %v\n%s", err, out)
		}
	}
	for _, mode := range modes {
		h.warren("create", "--name", mode, "--policy", mode, "--memory", "2GiB")
		h.warren("cp", files, mode+":/tmp/lab")
	}
	t.Run("allowed", func(t *testing.T) {
		for _, mode := range modes {
			t.Run(mode, func(t *testing.T) {
				t.Parallel()
				clients := registryClients
				if mode == "secret" {
					clients = slices.Concat(clients, placeholderClients)
				}
				for _, c := range clients {
					if c.name == nodeClient && !nodeHasWebSocket() {
						c = nodeFetch(c)
					}
					t.Run(c.name, func(t *testing.T) {
						out, err := h.command("exec", mode, "--", "sh", "-c", script(mode, "lab", c)).CombinedOutput()
						hits := r.seen(mode)
						if err != nil || !strings.Contains(strings.NewReplacer("over HTTP/1.1", "over HTTP/D", "over HTTP/2.0", "over HTTP/D").Replace(string(out)), c.wants) {
							t.Errorf("%v, want %q of:\n%s\nThe servers saw:\n%s", err, c.wants, out, strings.Join(hits, "\n"))
						}
						for _, want := range c.sees {
							if !slices.ContainsFunc(hits, func(hit string) bool { return strings.HasPrefix(hit, want) }) {
								t.Errorf("no server saw %s, but\n%s", want, strings.Join(hits, "\n"))
							}
						}
					})
				}
			})
		}
	})
	// What was looked into is on record request by request, and what was not is not.
	for mode, looked := range map[string]bool{"passed": false, "inspected": true, "secret": true} {
		if got := strings.Contains(h.warren("events", mode, "--flows"), "host=git.lab"); !got {
			t.Errorf("%s: the flows are not on record", mode)
		}
		if got := strings.Contains(h.warren("events", mode, "--flows"), "path=/repo.git/git-receive-pack"); got != looked {
			t.Errorf("%s: requests on record: %v", mode, got)
		}
	}
	// What has used the secrets has never had them: what the clients keep, and all that is on record, is without.
	kept := filepath.Join(t.TempDir(), "kept")
	h.warren("exec", "secret", "--", "sh", "-c", "cp -r ~ /tmp/home; env >/tmp/env")
	h.warren("cp", "secret:/tmp", kept)
	scan := secrettest.New(t, map[string]string{"robot": robotToken, "npm": npmToken})
	found, looked, err := scan.Paths(kept)
	if err != nil || len(found) > 0 || looked < 20 {
		t.Errorf("among %d files of the sandbox: %v, %v", looked, found, err)
	}
	record := h.warren("events", "secret", "--flows", "--json")
	if found := scan.Text("the record", record); len(found) > 0 {
		t.Errorf("on record: %v", found)
	}
	for _, grant := range []string{"git", "npm", "pip", "go", "apt", "images", "web", "ws"} {
		if !strings.Contains(record, fmt.Sprintf(`"secret":%q`, grant)) {
			t.Errorf("no use of the grant %s is on record", grant)
		}
	}
	// The twin: nothing gets to what no rule allows.
	r.forget()
	t.Run("denied", func(t *testing.T) {
		for lane, mode := range modes {
			t.Run(mode, func(t *testing.T) {
				t.Parallel()
				for i, c := range registryClients {
					if i%len(modes) != lane {
						continue
					}
					t.Run(c.name, func(t *testing.T) {
						out, err := h.command("exec", mode, "--", "sh", "-c", script(mode, "bad.lab", c)).CombinedOutput()
						if err == nil {
							t.Errorf("it succeeded:\n%s", out)
						}
					})
				}
			})
		}
	})
	if hits, asked := r.forget(); len(hits) > 0 || len(asked) > 0 {
		t.Errorf("of what no rule allows the servers saw %v, for %v", hits, asked)
	}
	// Without the credential there is nothing to be had of the servers that want one: the policy without the grants.
	if err := os.WriteFile(filepath.Join(h.dir, "policies", "bare.yaml"), []byte(policy("secret", ", inspect: true")), 0o644); err != nil {
		t.Fatal(err)
	}
	h.warren("create", "--name", "bare", "--policy", "bare", "--memory", "2GiB")
	h.warren("cp", files, "bare:/tmp/lab")
	for _, c := range registryClients {
		if c.name != "git" && c.name != "curl" && !strings.HasPrefix(c.name, "a client") {
			continue
		}
		if out, err := h.command("exec", "bare", "--", "sh", "-c", script("secret", "lab", c)).CombinedOutput(); err == nil {
			t.Errorf("without a grant %s succeeded:\n%s", c.name, out)
		}
	}
	if hits, _ := r.forget(); len(hits) < 3 {
		t.Errorf("without grants the servers saw %v: they were not asked", hits)
	}
	// That these servers would have answered is shown by a client that asks them without a gateway.
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(r.roots)
	direct := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true, DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, net.JoinHostPort(labAddr, r.ports["passed https"]))
	}}}
	res, err := direct.Get("https://web.bad.lab/direct")
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if hits, asked := r.forget(); len(hits) != 1 || len(asked) != 1 || asked[0] != "web.bad.lab" {
		t.Errorf("a direct request was seen as %v, for %v", hits, asked)
	}
}
