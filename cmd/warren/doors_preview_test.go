//go:build linux

package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/secret/secrettest"
)

// cookie exchanges a new link for a cookie, as a browser does.
func (p *probe) cookie(u *tenant, port int) string {
	p.t.Helper()
	a := p.shown("GET", p.newLink(u, port, time.Hour), "", "Accept: text/html")
	c := a.header.Get("Set-Cookie")
	if a.status != 303 || c == "" {
		p.t.Fatalf("a link is exchanged for %v", a)
	}
	pair, _, _ := strings.Cut(c, ";")
	return pair
}

// parts takes a link apart.
func parts(link string) (base, token string) {
	base, query, _ := strings.Cut(link, "/?")
	return base, strings.TrimPrefix(query, "warren_token=")
}

// previewStrangers come to a preview with nothing, and with what is wrong (E01). One answer is for all of them: of a sandbox that is there, and of one
// that never was.
func previewStrangers(p *probe) {
	a, b := p.alice, p.bob
	base, good := parts(p.newLink(a, 8000, time.Hour))
	never := "http://8000-s" + strings.Repeat("n", 19) + base[strings.IndexByte(base, '.'):]
	_, other := parts(b.link)
	_, port := parts(p.newLink(a, 8001, time.Hour))
	expires := p.newLink(a, 8000, time.Second)
	_, old := parts(expires)
	cookie := p.cookie(a, 8000)
	oldCookie := ""
	if c := p.shown("GET", p.newLink(a, 8000, time.Second), "", "Accept: text/html"); c.status == 303 {
		oldCookie, _, _ = strings.Cut(c.header.Get("Set-Cookie"), ";")
	}
	p.until("the end of a link", func() bool { return p.shown("GET", expires, "").status == 401 })
	p.until("the end of a cookie", func() bool { return p.shown("GET", base+"/", "", "Cookie: "+oldCookie).status == 401 })
	query := func(v string) string { return "/?warren_token=" + v }
	tries := []struct{ path, header string }{
		{"/", ""}, {query(""), ""}, {query("rubbish"), ""}, {query(old), ""}, {query(other), ""}, {query(port), ""}, {query(good[:len(good)-1]), ""}, {query(good + "A"), ""}, {query(good) + "&warren_token=" + good, ""},
		{query(strings.TrimPrefix(cookie, "warren_preview=")), ""}, {"/", "Cookie: " + oldCookie}, {"/", "Cookie: " + p.cookie(b, 8000)}, {"/", "Cookie: " + p.cookie(a, 8001)}, {"/", "Cookie: warren_preview=" + good},
		{"/", "Cookie: __Host-" + strings.Replace(cookie, "_preview", "", 1)}, {"/", bearer(b.token)}, {"/", "X-Warren-Token: " + b.token}, {"/", "X-Api-Key: " + a.token}, {"/", "Cookie: token=" + a.token}, {"/?token=" + a.token, ""},
	}
	seen := map[string]string{}
	for _, t := range tries {
		for _, at := range []string{base, never} {
			for _, method := range []string{"GET", "HEAD", "POST", "OPTIONS", "WEBSOCKET"} {
				m, header := method, []string{}
				if t.header != "" {
					header = append(header, t.header)
				}
				if method == "WEBSOCKET" {
					m, header = "GET", append(header, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")
				}
				got := p.shown(m, at+t.path, "", header...)
				if seen[method] == "" {
					seen[method] = got.String()
				}
				p.refused(got.status == 401 && got.String() == seen[method], "%s %s with %q answers\n%v\nand others are told\n%s", method, at+t.path, t.header, got, seen[method])
			}
		}
	}
	for _, t := range []struct{ path, header string }{{query(good), ""}, {"/", "Cookie: " + cookie}, {"/", bearer(a.token)}, {"/", "X-Warren-Token: " + a.token}} {
		header := []string{}
		if t.header != "" {
			header = append(header, t.header)
		}
		got := p.shown("GET", base+t.path, "", header...)
		p.right(got.status == 200 && strings.HasPrefix(got.body, "inside"), "%s with %q: %v", t.path, t.header, got)
	}
	// The link of the state before is still one.
	got := p.shown("GET", a.link, "")
	p.right(got.status == 200, "a link that was made earlier: %v", got)
}

// canaryHeaders are what no sandbox may be shown of a request.
var canaryHeaders = []string{
	"Cookie: warren_preview=canary", "Cookie: __Host-warren=canary", "X-Api-Key: canary", "X-Access-Token: canary", "X-Forwarded-For: canary", "X-Forwarded-Host: canary", "X-Forwarded-User: canary", "X-Real-Ip: canary", "Forwarded: for=canary",
	"Via: canary", "Proxy-Authorization: Basic canary", "Proxy-Connection: canary", "Warren-User: canary", "Warren-Reconnect: canary", "X-Warren-Anything: canary", "X-Auth-Request-Email: canary", "X-Amzn-Oidc-Data: canary", "Cf-Access-Jwt-Assertion: canary",
	"True-Client-Ip: canary", "Private-Token: canary", "X_forwarded_for: canary",
}

// headersIn sends what platforms and proxies put on requests (E04), through a preview and through the API.
func headersIn(p *probe) {
	p.t.Helper()
	_, token := parts(p.alice.link)
	base, _ := parts(p.alice.link)
	inside := "/v1/sandboxes/" + string(p.alice.box.ID) + "/ports/8000/headers"
	word := strings.ToLower
	for _, h := range append([]string{bearer(p.alice.token), "X-Warren-Token: " + p.alice.token}, canaryHeaders...) {
		name, value, _ := strings.Cut(h, ": ")
		canary := "canary"
		if strings.Contains(value, p.alice.token) {
			canary = p.alice.token
		}
		got := p.shown("GET", base+"/headers?warren_token="+token, "", h)
		p.refused(got.status == 200 && strings.HasPrefix(got.body, "inside") && !strings.Contains(word(got.body), canary) && !strings.Contains(got.body, token), "a preview shows the sandbox %s: %v", name, got)
		if name != "Authorization" {
			got = p.api("GET", inside, "", bearer(p.alice.token), h)
			// Here only what is the API's own, and what says who is in front of it, stays out.
			own := strings.HasPrefix(name, "X-F") || strings.HasPrefix(name, "Warren-") || strings.HasPrefix(name, "X-Warren-") || strings.HasPrefix(name, "Proxy-") || strings.Contains(" Cookie X-Api-Key X-Access-Token Forwarded Via X-Real-Ip ", " "+name+" ")
			p.refused(got.status == 200 && strings.HasPrefix(got.body, "inside") && !strings.Contains(got.body, p.alice.token) && (!own || !strings.Contains(word(got.body), canary)), "the API shows the sandbox %s: %v", name, got)
		}
		// The twin: without anything in front, the server inside sees it. Not the token itself, which its memory is looked through for (E05).
		c, err := p.alice.box.Dial(p.t.Context(), 8000)
		p.check(err)
		io.WriteString(c, "GET /headers HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"+strings.ReplaceAll(h, p.alice.token, "canary")+"\r\n\r\n")
		b, _ := io.ReadAll(c)
		c.Close()
		p.right(strings.Contains(word(string(b)), "canary"), "the server inside is shown %s, and says %s", name, b)
	}
	got := p.shown("GET", base+"/headers?warren_token="+token, "", "Cookie: session=mine", "X-Mine: yes")
	p.right(strings.Contains(got.body, "session=mine") && strings.Contains(got.body, "X-Mine: yes"), "what is the program's own: %v", got)
}

// tokensStayOut looks for users' tokens in a sandbox that was called with them in all ways (E05). Its memory is looked through when it is paused.
func tokensStayOut(p *probe) {
	base, _ := parts(p.alice.link)
	box := "/v1/sandboxes/" + string(p.alice.box.ID)
	for _, a := range []answer{
		p.api("POST", box+"/ports/8000/", "body", bearer(p.alice.token)), p.shown("GET", base+"/", "", "X-Warren-Token: "+p.alice.token), p.shown("GET", base+"/", "", bearer(p.alice.token)),
		p.api("GET", box+"/ports/49983/envs", "", bearer(p.alice.token)), p.api("POST", box+"/ports/49983/files?path=/tmp/up", "x", bearer(p.alice.token), "Content-Type: application/octet-stream"),
	} {
		p.right(a.status == 200, "%v", a)
	}
	// What is read is looked through outside, so that the looking brings nothing in.
	cmd := p.alice.box.Command("sh", "-c", `cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null; tar -cf - -C / workspace home tmp root run var/log etc 2>/dev/null; :`)
	cmd.User = "root"
	out, err := cmd.Output(p.t.Context())
	p.check(err)
	planted := p.planted()
	scan := secrettest.New(p.t, map[string]string{"alice": p.alice.token, "bob": p.bob.token})
	found := scan.Text("the sandbox", string(out))
	p.refused(len(found) == 0, "tokens stand in %v", found)
	p.right(len(secrettest.New(p.t, map[string]string{"planted": planted}).Text("the sandbox", string(out))) > 0, "a word that is in an environment is not found in %d bytes", len(out))
}

// planted is the word in the memory of Alice's sandbox.
func (p *probe) planted() string {
	out, err := p.alice.box.Command("printenv", plantedVariable).Output(p.t.Context())
	p.check(err)
	return strings.TrimSpace(string(out))
}

// memoryWithout looks for tokens in the memory of paused sandboxes.
func (d *doors) memoryWithout(dir string) {
	d.t.Helper()
	d.t.Run("E05, memory", func(t *testing.T) {
		d.scanMemory(t, dir)
	})
}

// cookiesOut has a page of the sandbox set cookies for others (E07).
func cookiesOut(p *probe) {
	got := p.shown("GET", strings.Replace(p.alice.link, "/?", "/bad?", 1), "")
	cookies := got.header.Values("Set-Cookie")
	p.right(got.status == 200 && len(cookies) == 1 && strings.HasPrefix(cookies[0], "tossed=1"), "the sandbox's own cookie: %q", cookies)
	for _, c := range cookies {
		p.refused(!strings.Contains(strings.ToLower(c), "domain") && !strings.Contains(c, "warren"), "a cookie %q", c)
	}
	// A jar that is too large is refused, and harms nobody else.
	got = p.shown("GET", p.alice.link, "", "Cookie: a="+strings.Repeat("x", 80<<10))
	p.refused(got.status == 431, "a jar of 80 KiB: %d", got.status)
	got = p.call(p.alice.token, "SystemService/GetVersion", "{}")
	p.right(got.status == 200, "the API: %v", got)
	// The API sets none, whatever a sandbox sends.
	got = p.api("GET", "/v1/sandboxes/"+string(p.alice.box.ID)+"/ports/8000/bad", "", bearer(p.alice.token))
	p.refused(got.status == 200 && len(got.header.Values("Set-Cookie")) == 0, "through the API: %v", got)
}

// answersOut has the sandbox send what acts beyond its answer (E10).
func answersOut(p *probe) {
	got := p.shown("GET", strings.Replace(p.alice.link, "/?", "/bad?", 1), "")
	p.right(got.status == 200 && strings.HasPrefix(got.body, "inside"), "%v", got)
	for _, name := range []string{"Strict-Transport-Security", "Alt-Svc", "Service-Worker-Allowed", "Access-Control-Allow-Credentials", "Access-Control-Allow-Private-Network", "Nel", "Warren-Preview", "Warren-Error"} {
		p.refused(got.header.Get(name) == "", "a preview answers with %s: %s", name, got.header.Get(name))
	}
	got = p.api("GET", "/v1/sandboxes/"+string(p.alice.box.ID)+"/ports/8000/bad", "", bearer(p.alice.token))
	p.right(got.status == 200 && strings.HasPrefix(got.body, "inside"), "%v", got)
	for _, name := range []string{"Strict-Transport-Security", "Alt-Svc", "Service-Worker-Allowed", "Access-Control-Allow-Credentials", "Access-Control-Allow-Origin", "Nel", "Refresh", "Link", "Clear-Site-Data", "Warren-Error"} {
		p.refused(got.header.Get(name) == "", "the API answers with %s: %s", name, got.header.Get(name))
	}
	p.refused(got.header.Get("Content-Security-Policy") == "sandbox" && got.header.Get("X-Content-Type-Options") == "nosniff", "the API lets a page of the sandbox be one of its own: %v", got)
	// The twin: without anything in front it is all there.
	c, err := p.alice.box.Dial(p.t.Context(), 8000)
	p.check(err)
	defer c.Close()
	io.WriteString(c, "GET /bad HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	b, _ := io.ReadAll(c)
	for _, name := range []string{"Strict-Transport-Security: ", "Alt-Svc: ", "Domain=localhost", "Warren-Error: ", "Clear-Site-Data: "} {
		p.right(strings.Contains(string(b), name), "the server inside does not send %s", name)
	}
}

// linkExchange follows a link as a browser does (E11), and looks for its token wherever it could have been left.
func linkExchange(p *probe) {
	link := strings.Replace(p.newLink(p.alice, 8000, time.Hour), "/?", "/page?x=1&", 1)
	base, _, _ := strings.Cut(link, "/page")
	token := link[strings.LastIndexByte(link, '=')+1:]
	got := p.shown("GET", link, "", "Accept: text/html", "Sec-Fetch-Mode: navigate")
	to, cookie := got.header.Get("Location"), got.header.Get("Set-Cookie")
	p.refused(got.status == 303 && to == base+"/page?x=1" && got.header.Get("Referrer-Policy") == "no-referrer" && got.header.Get("Cache-Control") == "no-store", "a link leads on with %v", got)
	p.refused(strings.Contains(cookie, "HttpOnly") && strings.Contains(cookie, "SameSite=Lax") && strings.Contains(cookie, "Path=/") && !strings.Contains(cookie, "Domain") && !strings.Contains(cookie, token), "its cookie is %q", cookie)
	pair, _, _ := strings.Cut(cookie, ";")
	got = p.shown("GET", to, "", "Cookie: "+pair, "Referer: "+link)
	p.right(got.status == 200 && strings.HasPrefix(got.body, "inside"), "with the cookie: %v", got)
	p.refused(!strings.Contains(got.body, token) && !strings.Contains(got.body, "warren_"), "the sandbox is shown %v", got)
	scan := secrettest.New(p.t, map[string]string{"link": token, "cookie": pair[strings.IndexByte(pair, '=')+1:]})
	found, files, err := scan.Paths(p.h.dir+"/logs", p.h.dir+"/serve.out", p.h.dir+"/calls", p.h.dir+"/gateway/events")
	p.check(err)
	p.refused(len(found) == 0 && files > 2, "in %d files, it stands in %v", files, found)
}

// previewPorts asks for ports that have no preview (E12), and for sandboxes by names that are not theirs (E13).
func previewPorts(p *probe) {
	base, _ := parts(p.alice.link)
	id := string(p.alice.box.ID)
	domain := base[strings.IndexByte(base, '.'):]
	for _, port := range []string{"22", "49983", "0", "65536", "99999", "08000", "+8000", "-1", "8000.0", "25", "4294967296", "8000%20"} {
		got := p.send(p.previews, "GET", "/", "", "Host: "+port+"-"+id+domain, "X-Warren-Token: "+p.alice.token)
		p.refused((got.status == 404 || got.status == 421 || got.status == 400) && !strings.Contains(got.body, "inside"), "port %s: %v", port, got)
		if got := p.call(p.alice.token, "SandboxService/PreviewPort", fmt.Sprintf(`{"id":%q,"port":%s}`, id, strings.TrimLeft(port, "+"))); port == "22" || port == "49983" || port == "0" || port == "65536" {
			p.refused(got.status == 400, "a link to port %s: %v", port, got)
		}
	}
	for _, name := range []string{"api", "www", "admin", "8000-api", "8000-..", "8000-alices-box", "8000-" + strings.ToUpper(id), "8000-" + id + "x", "8000-" + id[:19], "8000-" + id + ".x", "x.8000-" + id, "xn--8000-" + id, "-8000-" + id, "8000-" + strings.Repeat("s", 64)} {
		got := p.send(p.previews, "GET", "/", "", "Host: "+name+domain, "X-Warren-Token: "+p.alice.token)
		p.refused((got.status == 404 || got.status == 421) && !strings.Contains(got.body, "inside"), "name %s: %v", name, got)
	}
	got := p.send(p.previews, "GET", "/", "", "Host: "+strings.TrimPrefix(base, "http://"), "X-Warren-Token: "+p.alice.token)
	p.right(got.status == 200, "the one name: %v", got)
}

// previewHosts spells hosts in ways in which no browser does (E14).
func previewHosts(p *probe) {
	base, _ := parts(p.alice.link)
	host := strings.TrimPrefix(base, "http://")
	other := strings.TrimPrefix(strings.Split(p.bob.link, "/?")[0], "http://")
	name, port, _ := net.SplitHostPort(host)
	token := "X-Warren-Token: " + p.alice.token
	for _, h := range []string{name + ".:" + port, name + ":" + port + ":" + port, name + ":", name + ":x", strings.ToUpper(name) + ":" + port, "[::1]:" + port, p.previews, "localhost:" + port, "evil.lab", name + ".evil.lab", "", host + "/", "x@" + host, host + "#", host + "%00"} {
		got := p.send(p.previews, "GET", "/", "", "Host: "+h, token)
		p.refused(got.status == 400 || got.status == 421 || got.status == 404, "Host %q: %v", h, got)
	}
	for _, t := range []struct {
		method, target string
		header         []string
	}{
		{"GET", "/", []string{"Host: " + host, "Host: " + other}}, {"GET", "/", []string{"Host: " + host, "Host: " + host}}, {"GET", "http://" + host + "/", []string{"Host: " + host}}, {"GET", "http://" + other + "/", []string{"Host: " + host}},
		{"GET", "http://evil.lab/", []string{"Host: " + host}}, {"OPTIONS", "*", []string{"Host: " + host}}, {"CONNECT", host, []string{"Host: " + host}}, {"TRACE", "/", []string{"Host: " + host}}, {"GET", "//" + other + "/x", []string{"Host: " + other}},
	} {
		got := p.send(p.previews, t.method, t.target, "", append(t.header, token)...)
		p.refused((got.status == 400 || got.status == 401 || got.status == 421) && !strings.Contains(got.body, "inside"), "%s %s with %q: %v", t.method, t.target, t.header, got)
	}
	// What names another host behind the one that counts leads nowhere else.
	for _, h := range []string{"X-Forwarded-Host: " + other, "Forwarded: host=" + other, "X-Host: " + other, "X-Original-Url: http://" + other + "/", "X-Rewrite-Url: /other"} {
		got := p.send(p.previews, "GET", "/mine", "", "Host: "+host, token, h)
		p.refused(got.status == 200 && strings.Contains(got.body, "GET /mine") && !strings.Contains(got.body, other), "with %q: %v", h, got)
	}
	got := p.send(p.previews, "GET", "/", "", "Host: "+host, token)
	p.right(got.status == 200 && strings.HasPrefix(got.body, "inside"), "the one host: %v", got)
	u, err := url.Parse(p.alice.link)
	p.check(err)
	res, err := (&http.Client{Transport: &http.Transport{DialContext: (&net.Dialer{}).DialContext, DisableKeepAlives: true, Proxy: func(*http.Request) (*url.URL, error) { return url.Parse("http://" + p.previews) }}}).Get("http://evil.lab/?" + u.RawQuery)
	if err == nil {
		res.Body.Close()
	}
	p.refused(err != nil || res.StatusCode >= 400, "as a proxy it answers %v", res)
}
