package secret

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Errors of requests and grants.
var (
	// ErrMisplaced is what a placeholder matches that stands where no grant puts its value. See [MisplacedError].
	ErrMisplaced = errors.New("a secret's placeholder stands where it is not allowed")
	// ErrAmbiguous: two grants put a value into one place.
	ErrAmbiguous = errors.New("two grants put a value into the same place")
	// ErrPlace: a grant's place cannot be used.
	ErrPlace = errors.New("the grant's place cannot be used")
)

// MisplacedError says which grant's placeholder was found where. It matches [ErrMisplaced] and does not hold the placeholder.
type MisplacedError struct {
	Grant string
	Where string // such as "the header X-Note" or "the body"
}

// Error names the grant and the place.
func (e *MisplacedError) Error() string {
	grant := ""
	if e.Grant != "" {
		grant = fmt.Sprintf(" of grant %q", e.Grant)
	}
	return fmt.Sprintf("the placeholder%s stands in %s; its value goes only where the grant says", grant, e.Where)
}

// Is makes the error match ErrMisplaced.
func (e *MisplacedError) Is(target error) bool { return target == ErrMisplaced }

// Kind of a place.
type Kind string

// Where a value can be put.
const (
	Header Kind = "header" // a header of its own
	Basic  Kind = "basic"  // the password of basic auth
	Query  Kind = "query"  // a parameter of the URL's query
)

// Place is where in a request a value goes.
type Place struct {
	Kind Kind
	// Name of the header or of the query parameter.
	Name string
	// Format of the header's value, with one {} for the secret, such as "Bearer {}"; empty means "{}".
	Format string
	// Username of basic auth.
	Username string
}

// reserved headers belong to the connection or decide where the request goes.
var reserved = []string{
	"Host", "Connection", "Proxy-Connection", "Keep-Alive", "Transfer-Encoding", "Content-Length", "Content-Encoding", "Trailer", "TE",
	"Upgrade", "Expect", "Accept-Encoding", "Proxy-Authorization", "Range",
}

// Check says whether a value can be put there. The error matches [ErrPlace].
func (p Place) Check() error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrPlace, fmt.Sprintf(format, args...))
	}
	switch p.Kind {
	case Header:
		if p.Name == "" || len(p.Name) > 128 || strings.Trim(p.Name, tokenLetters) != "" {
			return refuse("%.80q is no name of a header", p.Name)
		}
		if slices.ContainsFunc(reserved, func(r string) bool { return sameHeader(r, p.Name) }) {
			return refuse("the header %s belongs to the connection", p.Name)
		}
		if p.Format != "" && strings.Count(p.Format, "{}") != 1 {
			return refuse("the format %.80q must hold {} once, such as \"Bearer {}\"", p.Format)
		}
		if len(p.Format) > 1024 || !printable(p.Format) {
			return refuse("the format %.80q is longer than 1 KiB or holds characters that a header cannot", p.Format)
		}
		return nil
	case Basic:
		if len(p.Username) > 256 || strings.Contains(p.Username, ":") || !printable(p.Username) {
			return refuse("the user name %.80q holds a colon or characters that a header cannot, or more than 256", p.Username)
		}
		return nil
	case Query:
		if p.Name == "" || len(p.Name) > 128 || !printable(p.Name) {
			return refuse("%.80q is no name of a query parameter", p.Name)
		}
		return nil
	}
	return refuse("its kind is %.40q; want header, basic or query", p.Kind)
}

const tokenLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+-.^_`|~"

func printable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// header is the header that the place takes up, "" for a query.
func (p Place) header() string {
	switch p.Kind {
	case Header:
		return p.Name
	case Basic:
		return "Authorization"
	}
	return ""
}

// Binding is one grant's value and where it goes.
type Binding struct {
	// Grant names it in errors and evidence.
	Grant string
	// Placeholder is what the sandbox has instead of the value.
	Placeholder string
	Place       Place
	// Value returns the value for one request, so that a new value counts at once and one that is gone fails. The bytes are
	// cleared after use.
	Value func() ([]byte, error)
	// OnPlaceholder puts the value in only where the sandbox put the placeholder; else a request without it gets the
	// value as well, which git and package managers need that know of no credential.
	OnPlaceholder bool
}

// Injector puts values into requests to one destination. It never changes, and may be used concurrently; make it once for a
// set of grants.
type Injector struct {
	bindings []Binding
	m        *matcher
	grants   []string // by form
}

// maxPlaceholders bounds what one injector looks for.
const maxPlaceholders = 1000

// NewInjector returns an injector for the bindings of a destination. others are the placeholders, by grant, that the sandbox
// has for other destinations: they may stand nowhere in a request to this one. Without bindings it only looks for them.
// The error matches [ErrPlace] or [ErrAmbiguous].
func NewInjector(bindings []Binding, others map[string]string) (*Injector, error) {
	if n := len(bindings) + len(others); n > maxPlaceholders {
		return nil, fmt.Errorf("%w: %d grants for one sandbox; %d at most", ErrPlace, n, maxPlaceholders)
	}
	in := &Injector{bindings: slices.Clone(bindings)}
	var texts []string
	seen := map[string]bool{}
	look := func(grant, placeholder string) error {
		if len(placeholder) < 16 || !printable(placeholder) || strings.Contains(placeholder, " ") {
			return fmt.Errorf("%w: grant %q has a placeholder of %d characters; want 16 or more, printable", ErrPlace, grant, len(placeholder))
		}
		for _, f := range Forms(placeholder) {
			if !seen[f.Text] {
				seen[f.Text] = true
				texts, in.grants = append(texts, f.Text), append(in.grants, grant)
			}
		}
		return nil
	}
	for i, b := range in.bindings {
		if err := b.Place.Check(); err != nil {
			return nil, fmt.Errorf("grant %q: %w", b.Grant, err)
		}
		if b.Value == nil {
			return nil, fmt.Errorf("%w: grant %q has no value", ErrPlace, b.Grant)
		}
		for _, other := range in.bindings[:i] {
			if samePlace(b.Place, other.Place) {
				return nil, fmt.Errorf("%w: %q and %q; narrow one to other hosts, methods or paths, or remove it", ErrAmbiguous, other.Grant, b.Grant)
			}
		}
		if err := look(b.Grant, b.Placeholder); err != nil {
			return nil, err
		}
	}
	for grant, placeholder := range others {
		if err := look(grant, placeholder); err != nil {
			return nil, err
		}
	}
	in.m = newMatcher(texts)
	return in, nil
}

func samePlace(a, b Place) bool {
	if a.header() != "" || b.header() != "" {
		return a.header() != "" && b.header() != "" && sameHeader(a.header(), b.header())
	}
	return strings.EqualFold(a.Name, b.Name)
}

// Inject changes a request that was decided to go to the injector's destination, before it is sent: each place gets its value,
// once, and loses all else that was there, under any spelling of its name, also in trailers and in the Connection header.
// A placeholder anywhere else is an error that matches [ErrMisplaced]: at once when it stands in the method, the URL or a
// header, and while the body is read when it stands there or in a trailer; no whole placeholder leaves before. Bodies are
// looked at as they are, and inside gzip and deflate; other encodings match [ErrOpaque]. It returns the grants that were
// used. After an error the request must not be sent.
//
// The request is to be sent once (GetBody is gone), by a transport that follows no redirect and adds no Accept-Encoding;
// [RestrictEncoding] is the caller's.
func (in *Injector) Inject(req *http.Request) (used []string, err error) {
	if len(in.m.texts) == 0 {
		return nil, nil
	}
	if req.Header == nil {
		req.Header = http.Header{}
	}
	var put []Binding
	for _, b := range in.bindings {
		if !b.OnPlaceholder || in.holds(req, b) {
			put = append(put, b)
		}
	}
	for _, b := range put {
		strip(req, b.Place)
	}
	if err := in.inspect(req); err != nil {
		return nil, err
	}
	for _, b := range put {
		if err := b.put(req); err != nil {
			return nil, fmt.Errorf("grant %q: %w", b.Grant, err)
		}
		used = append(used, b.Grant)
	}
	return used, in.guardBody(req, put)
}

// holds says whether the placeholder of a binding stands in its place.
func (in *Injector) holds(req *http.Request, b Binding) bool {
	if name := b.Place.header(); name != "" {
		for key, values := range req.Header {
			for _, v := range values {
				if sameHeader(key, name) && in.grantIn(v) == b.Grant {
					return true
				}
			}
		}
		return false
	}
	for part := range strings.SplitSeq(req.URL.RawQuery, "&") {
		key, value, _ := strings.Cut(part, "=")
		if strings.EqualFold(unescape(key), b.Place.Name) && in.grantIn(value) == b.Grant {
			return true
		}
	}
	return false
}

// strip removes what stands in a place.
func strip(req *http.Request, p Place) {
	name := p.header()
	if name == "" {
		req.URL.RawQuery = stripQuery(req.URL.RawQuery, p.Name)
		return
	}
	deleteHeader(req.Header, name)
	stripTrailer(req, name)
	for key := range req.Header {
		for _, list := range [...]string{"Connection", "Proxy-Connection", "Keep-Alive", "Trailer"} {
			if sameHeader(key, list) {
				dropToken(req.Header, key, name)
			}
		}
	}
	if p.Kind == Basic || sameHeader(name, "Authorization") {
		// The transport would make a header of it.
		req.URL.User = nil
	}
}

func stripTrailer(req *http.Request, name string) {
	deleteHeader(req.Trailer, name)
}

// dropToken takes a header's name out of a list of names, which would make a server remove what was put in.
func dropToken(h http.Header, key, name string) {
	var keep []string
	for part := range strings.SplitSeq(strings.Join(h[key], ","), ",") {
		if part = strings.TrimSpace(part); part != "" && !sameHeader(part, name) {
			keep = append(keep, part)
		}
	}
	if len(keep) == 0 {
		delete(h, key)
		return
	}
	h[key] = []string{strings.Join(keep, ", ")}
}

func stripQuery(raw, name string) string {
	var keep []string
parts:
	for part := range strings.SplitSeq(raw, "&") {
		// Some servers separate by semicolons as well.
		for sub := range strings.SplitSeq(part, ";") {
			key, _, _ := strings.Cut(sub, "=")
			if strings.EqualFold(strings.TrimSpace(unescape(key)), name) {
				continue parts
			}
		}
		if part != "" {
			keep = append(keep, part)
		}
	}
	return strings.Join(keep, "&")
}

// put writes the value into its place, which is empty.
func (b Binding) put(req *http.Request) error {
	value, err := b.Value()
	if err != nil {
		return err
	}
	defer clear(value)
	if err := CheckValue(value); err != nil {
		return err
	}
	switch p := b.Place; p.Kind {
	case Header:
		format := p.Format
		if format == "" {
			format = "{}"
		}
		req.Header[http.CanonicalHeaderKey(p.Name)] = []string{strings.Replace(format, "{}", string(value), 1)}
	case Basic:
		req.Header["Authorization"] = []string{"Basic " + base64.StdEncoding.EncodeToString([]byte(p.Username+":"+string(value)))}
	case Query:
		pair := url.QueryEscape(p.Name) + "=" + url.QueryEscape(string(value))
		if req.URL.RawQuery != "" {
			pair = req.URL.RawQuery + "&" + pair
		}
		req.URL.RawQuery = pair
	}
	return nil
}

// inspect looks for placeholders in all of a request but its body.
func (in *Injector) inspect(req *http.Request) error {
	u, user := req.URL, ""
	if u.User != nil {
		user = u.User.String()
	}
	for _, part := range [...]struct{ text, where string }{
		{req.Method, "the method"},
		{req.Host, "the host"}, {u.Host, "the host"},
		{user, "the user part of the URL"},
		{u.Opaque, "the URL"}, {u.Path, "the path"}, {u.RawPath, "the path"}, {u.RawQuery, "the query"}, {u.Fragment, "the URL's fragment"},
	} {
		if err := in.inText(part.text, part.where); err != nil {
			return err
		}
	}
	return errors.Join(in.inHeaders(req.Header, "the header"), in.inHeaders(req.Trailer, "the trailer"))
}

func (in *Injector) inHeaders(h http.Header, what string) error {
	for name, values := range h {
		if err := in.inText(name, what+"'s name"); err != nil {
			return err
		}
		for _, v := range values {
			if strings.ContainsAny(v, "\r\n\x00") {
				return fmt.Errorf("%s %.80q holds a line break or NUL", what, name)
			}
			if err := in.inText(v, what+" "+fmt.Sprintf("%.80q", name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// inText looks at a text as it is and as often decoded as it can be.
func (in *Injector) inText(text, where string) error {
	for range 4 {
		if at, which := in.m.find([]byte(text), 0); at >= 0 {
			return &MisplacedError{Grant: in.grants[which], Where: where}
		}
		plain := unescape(text)
		if plain == text {
			return nil
		}
		text = plain
	}
	// Whoever encodes more often than that hides something.
	if strings.Contains(text, "%") && unescape(text) != text {
		return &MisplacedError{Where: where + ", encoded many times over"}
	}
	return nil
}

func (in *Injector) grantIn(text string) string {
	var m *MisplacedError
	if errors.As(in.inText(text, ""), &m) {
		return m.Grant
	}
	return ""
}

// unescape decodes %XX, and leaves alone what is none.
func unescape(s string) string {
	if strings.IndexByte(s, '%') < 0 {
		return s
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			if hi, lo := unhex(s[i+1]), unhex(s[i+2]); hi >= 0 && lo >= 0 {
				b = append(b, byte(hi<<4|lo))
				i += 2
				continue
			}
		}
		b = append(b, s[i])
	}
	return string(b)
}

func unhex(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c|0x20 >= 'a' && c|0x20 <= 'f':
		return int(c|0x20-'a') + 10
	}
	return -1
}

// guardBody puts readers around the body that end it where a placeholder appears.
func (in *Injector) guardBody(req *http.Request, put []Binding) error {
	if req.Body == nil || req.Body == http.NoBody {
		return nil
	}
	found := func(which int) error { return &MisplacedError{Grant: in.grants[which], Where: "the body"} }
	// Another copy of the body would pass unseen.
	req.GetBody = nil
	src, stop := io.Reader(req.Body), func() {}
	switch coding := contentCoding(req.Header); coding {
	case "":
	case "gzip", "deflate":
		f := newInflater(src, coding, func(plain io.Reader) error {
			_, err := io.Copy(io.Discard, &Reader{m: in.m, src: plain, found: found})
			return err
		})
		src, stop = f, f.stop
	default:
		return fmt.Errorf("%w: content encoding %.60q of the request; send it as it is, or as gzip", ErrOpaque, coding)
	}
	r := &Reader{m: in.m, src: src, found: found}
	req.Body = &body{Reader: r, Closer: closer{req.Body, stop}, end: func() error {
		for _, b := range put {
			if name := b.Place.header(); name != "" {
				stripTrailer(req, name)
			}
		}
		return in.inHeaders(req.Trailer, "the trailer")
	}}
	return nil
}

type closer struct {
	io.Closer
	stop func()
}

func (c closer) Close() error {
	c.stop()
	return c.Closer.Close()
}

// credentialHeaders carry a client's own credentials.
var credentialHeaders = []string{
	"Authorization", "Cookie", "X-Api-Key", "Api-Key", "X-Auth-Token", "X-Access-Token", "X-Token", "Private-Token", "Job-Token", "Deploy-Token",
	"X-Goog-Api-Key", "X-Amz-Security-Token", "X-Vault-Token", "X-Github-Token", "X-Gitlab-Token", "X-Csrf-Token", "X-Session-Token",
	"X-Ms-Token-Aad-Access-Token", "Ocp-Apim-Subscription-Key", "Circle-Token", "Dd-Api-Key", "Dd-Application-Key",
	// Of any service.
	"ApiKey", "X-ApiKey", "Api-Token", "X-Api-Token", "X-Authorization", "X-Key", "X-User-Token", "X-Xsrf-Token",
	// Of registries and forges.
	"X-NuGet-ApiKey", "X-JFrog-Art-Api", "Npm-Otp", "Otp", "X-Registry-Auth", "X-Registry-Config", "X-GitHub-Otp", "X-Gitea-Otp", "X-Forgejo-Otp",
	"X-Gitlab-Static-Object-Token", "X-Buildkite-Token", "X-Octopus-ApiKey",
	// Of clouds.
	"X-Auth-Key", "X-Auth-Email", "X-Auth-User", "X-Auth-User-Service-Key", "X-Subject-Token", "X-Storage-Token", "CF-Access-Client-Id", "CF-Access-Client-Secret",
	"CF-Access-Token", "CF-Aig-Authorization", "X-Serverless-Authorization", "X-Goog-Iam-Authorization-Token", "X-Amz-Access-Token", "X-Amz-S3session-Token",
	"X-Aws-Ec2-Metadata-Token", "X-Ms-Authorization-Auxiliary", "X-Functions-Key", "Aeg-Sas-Key", "Aeg-Sas-Token", "X-Consul-Token", "X-Nomad-Token", "Fastly-Key", "AccessKey",
	// Of providers of models, and of what stands before them.
	"Xi-Api-Key", "X-Subscription-Token", "X-OpenAI-Api-Key", "X-Cohere-Api-Key", "X-Portkey-Api-Key", "Helicone-Auth", "X-RapidApi-Key",
	// Of data bases, monitors and tools of teams.
	"X-Algolia-Api-Key", "X-Meili-Api-Key", "X-Typesense-Api-Key", "X-Hasura-Admin-Secret", "X-Parse-Rest-Api-Key", "X-Parse-Master-Key", "X-Sentry-Auth", "X-Sentry-Token",
	"X-Honeycomb-Team", "X-Insert-Key", "X-Query-Key", "X-License-Key", "X-Rollbar-Access-Token", "X-Figma-Token", "X-Shopify-Access-Token", "X-Postmark-Server-Token",
	"X-Postmark-Account-Token", "X-Redmine-Api-Key", "X-TrackerToken", "X-Cisco-Meraki-Api-Key",
}

// StripCredentials removes the headers by which a client shows credentials of its own, and those of the URL's user part, and
// returns the names of what it removed, for evidence. It is for sandboxes that may use only what the platform gives.
func StripCredentials(req *http.Request) (removed []string) {
	for key := range req.Header {
		if slices.ContainsFunc(credentialHeaders, func(c string) bool { return sameHeader(strings.TrimSpace(key), c) }) {
			delete(req.Header, key)
			removed = append(removed, key)
		}
	}
	if req.URL.User != nil {
		req.URL.User = nil
		removed = append(removed, "the URL's user part")
	}
	slices.Sort(removed)
	return removed
}
