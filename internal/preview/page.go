package preview

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
)

// problem is a page of this package's own. It is constant but for the number of the port, which %d stands for, once in Text if at all.
type problem struct {
	status int
	name   string // in the header Warren-Preview, for programs
	title  string
	text   string
	hint   string
	// again makes a browser ask again by itself.
	again bool
}

var (
	badRequest = &problem{status: http.StatusBadRequest, name: "bad-request", title: "This is not a request for a preview",
		text: "Its method, its path or its host is not one that a browser would send here.", hint: "Open the URL that `warren preview ID PORT` prints."}
	badFraming = &problem{status: http.StatusBadRequest, name: "bad-framing", title: "This request could be two",
		text: "Where it ends is said twice, or in a way that programs read differently.", hint: "Send one Content-Length, or `Transfer-Encoding: chunked`, and lines that end with CRLF."}
	badHost = &problem{status: http.StatusMisdirectedRequest, name: "bad-host", title: "No preview has this name",
		text: "This server answers for previews only, under their own names.", hint: "Open the URL that `warren preview ID PORT` prints."}
	badName = &problem{status: http.StatusNotFound, name: "bad-name", title: "No preview has this name",
		text: "The name of a preview is PORT-ID: a port, a dash, and the whole id of a sandbox, in small letters.", hint: "Open the URL that `warren preview ID PORT` prints."}
	badPort = &problem{status: http.StatusNotFound, name: "bad-port", title: "This port has no preview",
		text: "Ports are from 1 to 65535; those of other protocols than HTTP, and the guest's own, have none.", hint: "`warren port-forward ID PORT` reaches any port but the guest's."}
	denied = &problem{status: http.StatusUnauthorized, name: "denied", title: "This preview is not open to you",
		text: "It is private, it has been closed, its link has expired, or there is no such preview.", hint: "`warren preview ID PORT` makes a new link."}
	guessing = &problem{status: http.StatusTooManyRequests, name: "guessing", title: "Too many tokens were not good",
		text: "This address has shown many API tokens that are not valid.", hint: "Try again later, or with one that is."}
	crowded = &problem{status: http.StatusServiceUnavailable, name: "busy", title: "Too many requests are under way",
		text: "Port %d of this sandbox, or this server, has as many requests under way as it may.", hint: "Try again later.", again: true}
	waiting = &problem{status: http.StatusServiceUnavailable, name: "waiting", title: "The sandbox is waking up",
		text: "It was paused and is being resumed. This page shows port %d as soon as it is there.", hint: "There is nothing to do.", again: true}
	late = &problem{status: http.StatusGatewayTimeout, name: "late", title: "The sandbox does not answer",
		text: "It was waited for, and port %d could not be reached.", hint: "`warren inspect ID` says how it is, `warren restart ID` begins afresh.", again: true}
	nothing = &problem{status: http.StatusBadGateway, name: "nothing-listens", title: "Nothing listens there yet",
		text: "The sandbox runs, and no program in it listens on port %d. This page tries again by itself.",
		hint: "Start a server in the sandbox; `warren ports ID` lists the ports that are open.", again: true}
	notRunning = &problem{status: http.StatusServiceUnavailable, name: "not-running", title: "The sandbox is not running",
		text: "It is paused or has ended, and this request does not start it.", hint: "Load the page again; `warren inspect ID` says how the sandbox is, `warren resume ID` and `warren restart ID` start it."}
	exhausted = &problem{status: http.StatusServiceUnavailable, name: "exhausted", title: "There is no room for the sandbox",
		text: "It is paused, and what it needs to run is in use.", hint: "Pause or remove another sandbox.", again: true}
	broken = &problem{status: http.StatusBadGateway, name: "broken", title: "The answer was cut off",
		text: "What listens on port %d ended the connection, or does not speak HTTP.", hint: "`warren logs ID` may say why; `warren port-forward ID PORT` carries any protocol."}
	ended = &problem{status: http.StatusServiceUnavailable, name: "ended", title: "The request was ended",
		text: "Its link has expired or was revoked, or the server is stopping.", hint: "Load the page again."}
)

const style = `body{font:16px/1.5 system-ui,sans-serif;max-width:36em;margin:20vh auto 0;padding:0 1em;color:#222;background:#fff}` +
	`h1{font-size:1.4em}p{margin:.6em 0}.hint{color:#666}@media(prefers-color-scheme:dark){body{color:#ddd;background:#1b1b1b}.hint{color:#999}}`

// pagePolicy lets a page have its style and nothing else.
var pagePolicy = func() string {
	sum := sha256.Sum256([]byte(style))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}()

// ownHeader is that of answers which no sandbox gave.
func ownHeader(h http.Header) {
	h.Set("Cache-Control", "no-store")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", pagePolicy)
}

// code shows what stands between backquotes as code.
func code(s string) string {
	parts := strings.Split(s, "`")
	for i := 1; i < len(parts); i += 2 {
		parts[i] = "<code>" + parts[i] + "</code>"
	}
	return strings.Join(parts, "")
}

func (p *problem) write(w http.ResponseWriter, method, accept string, port uint16) {
	text := p.text
	if strings.Contains(text, "%d") {
		text = fmt.Sprintf(text, port)
	}
	h := w.Header()
	ownHeader(h)
	h.Set("Warren-Preview", p.name)
	h.Set("Vary", "Accept")
	if p == denied {
		h.Set("WWW-Authenticate", `Bearer realm="warren preview"`)
	}
	if p.again {
		h.Set("Retry-After", "2")
	}
	body := fmt.Sprintf("warren: %s. %s\n%s\n", p.title, text, p.hint)
	h.Set("Content-Type", "text/plain; charset=utf-8")
	if strings.Contains(accept, "text/html") {
		h.Set("Content-Type", "text/html; charset=utf-8")
		refresh := ""
		if p.again && method == http.MethodGet {
			refresh = `<meta http-equiv="refresh" content="2">`
		}
		body = fmt.Sprintf("<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">%s<title>%s</title><style>%s</style></head>"+
			"<body><h1>%s</h1><p>%s</p><p class=\"hint\">%s</p></body></html>\n", refresh, p.title, style, p.title, text, code(p.hint))
	}
	w.WriteHeader(p.status)
	if method != http.MethodHead {
		_, _ = w.Write([]byte(body))
	}
}
