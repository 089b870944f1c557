package warren

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"connectrpc.com/connect"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
	"github.com/warren-sandbox/warren/proto/warren/v1/warrenv1connect"
)

// Options say which server to use. The zero value uses WARREN_URL and WARREN_TOKEN, and without them the
// socket in the data directory.
type Options struct {
	// URL of the server: unix:///path, http://host:port or https://host:port.
	URL string
	// Token is the bearer token; a unix socket needs none. It is sent to no other host than URL's.
	Token string
	// TLS settings for https, such as a private certificate authority.
	TLS *tls.Config
	// Dial, when set, opens every connection to the server.
	Dial func(ctx context.Context) (net.Conn, error)
	// RetryFor is how long calls that may safely be repeated, and the streams of running commands, keep trying when
	// the server cannot be reached, such as while it restarts. 0 means 30 seconds; negative means not at all.
	// Connect itself tries once.
	RetryFor time.Duration
	// UserAgent is put before the SDK's own.
	UserAgent string
}

// Client talks to one server. Its methods may be called at the same time.
type Client struct {
	url      *url.URL // as given, after defaults
	base     string   // for HTTP requests: scheme and host
	token    string
	agent    string
	tls      *tls.Config
	dial     func(ctx context.Context) (net.Conn, error)
	retryFor time.Duration
	http     *http.Client
	version  *Version

	sandboxes  warrenv1connect.SandboxServiceClient
	snapshots  warrenv1connect.SnapshotServiceClient
	templates  warrenv1connect.TemplateServiceClient
	policies   warrenv1connect.PolicyServiceClient
	secrets    warrenv1connect.SecretServiceClient
	workspaces warrenv1connect.WorkspaceServiceClient
	repos      warrenv1connect.RepoServiceClient
	images     warrenv1connect.ImageServiceClient
	system     warrenv1connect.SystemServiceClient
}

// maxMessage bounds one message from a server or a guest, in bytes.
const maxMessage = 64 << 20

// DefaultURL returns the URL that a client with zero [Options] uses: WARREN_URL, else the socket in the data directory
// ($WARREN_HOME, else /var/lib/warren for root, else warren in the XDG data directory).
func DefaultURL() string {
	if u := os.Getenv("WARREN_URL"); u != "" {
		return u
	}
	return (&url.URL{Scheme: "unix", Path: filepath.ToSlash(filepath.Join(dataDir(), "warren.sock"))}).String()
}

func dataDir() string {
	if dir := os.Getenv("WARREN_HOME"); dir != "" {
		if abs, err := filepath.Abs(dir); err == nil {
			return abs
		}
		return dir
	}
	if os.Geteuid() == 0 {
		return "/var/lib/warren"
	}
	if dir := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "warren")
	}
	if dir := os.Getenv("LOCALAPPDATA"); runtime.GOOS == "windows" && filepath.IsAbs(dir) {
		return filepath.Join(dir, "warren")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return filepath.Join(os.TempDir(), "warren")
	}
	return filepath.Join(home, ".local", "share", "warren")
}

// Connect returns a client of a server that answers. A server that cannot be reached gives [ErrUnavailable], a token
// that it does not know [ErrDenied].
func Connect(ctx context.Context, o Options) (*Client, error) {
	c, err := newClient(o)
	if err != nil {
		return nil, err
	}
	res, err := c.system.GetVersion(withoutRetry(ctx), connect.NewRequest(&warrenv1.GetVersionRequest{}))
	if err != nil {
		c.Close()
		err = fromWire("connect to "+c.redactedURL(), err)
		if broken(err) {
			return nil, fmt.Errorf("%w; is the server running? start it with `warren serve`", err)
		}
		return nil, err
	}
	c.version = versionFrom(res.Msg)
	return c, nil
}

func newClient(o Options) (*Client, error) {
	raw := o.URL
	if raw == "" {
		raw = DefaultURL()
		if o.Token == "" {
			o.Token = os.Getenv("WARREN_TOKEN")
		}
	}
	u, err := url.Parse(raw)
	if err != nil {
		return nil, fmt.Errorf("server URL %q: %w: want unix:///path, http://host:port or https://host:port", raw, ErrInvalid)
	}
	c := &Client{url: u, token: o.Token, tls: o.TLS, retryFor: o.RetryFor}
	if c.retryFor == 0 {
		c.retryFor = 30 * time.Second
	}
	if strings.ContainsFunc(o.Token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, fmt.Errorf("token: %w: it has a character that a token cannot have, perhaps a line end", ErrInvalid)
	}
	switch {
	case u.Scheme == "unix" && u.Host == "" && u.Path != "":
		path := filepath.FromSlash(u.Path)
		c.base = "http://localhost"
		c.dial = func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
	case (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && strings.Trim(u.Path, "/") == "" && u.RawQuery == "" && u.User == nil:
		c.base = u.Scheme + "://" + u.Host
		address := u.Host
		if u.Port() == "" {
			address = net.JoinHostPort(u.Hostname(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
		}
		if c.tls == nil {
			c.tls = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		if c.tls.ServerName == "" {
			c.tls = c.tls.Clone()
			c.tls.ServerName = u.Hostname()
		}
		c.dial = func(ctx context.Context) (net.Conn, error) {
			return (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}).DialContext(ctx, "tcp", address)
		}
	default:
		return nil, fmt.Errorf("server URL %q: %w: want unix:///path, http://host:port or https://host:port", c.redactedURL(), ErrInvalid)
	}
	if o.Dial != nil {
		c.dial = o.Dial
	}
	c.agent = strings.TrimSpace(o.UserAgent + " warren-go")
	transport := &http.Transport{
		DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dial(ctx) },
		TLSClientConfig:     c.tls,
		ForceAttemptHTTP2:   u.Scheme == "https",
		HTTP2:               &http.HTTP2Config{SendPingTimeout: 20 * time.Second, PingTimeout: 20 * time.Second},
		MaxIdleConns:        256,
		MaxIdleConnsPerHost: 64,
		IdleConnTimeout:     60 * time.Second,
		// Output is binary or already compressed more often than not, and the server is near.
		DisableCompression: true,
	}
	c.http = &http.Client{
		Transport: credentials{transport, c},
		// A redirect would carry the request, and its token, to a place that nobody asked for.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	opts := []connect.ClientOption{connect.WithReadMaxBytes(maxMessage), connect.WithInterceptors(retrier{c}), connect.WithAcceptCompression("gzip", nil, nil)}
	c.sandboxes = warrenv1connect.NewSandboxServiceClient(c.http, c.base, opts...)
	c.snapshots = warrenv1connect.NewSnapshotServiceClient(c.http, c.base, opts...)
	c.templates = warrenv1connect.NewTemplateServiceClient(c.http, c.base, opts...)
	c.policies = warrenv1connect.NewPolicyServiceClient(c.http, c.base, opts...)
	c.secrets = warrenv1connect.NewSecretServiceClient(c.http, c.base, opts...)
	c.workspaces = warrenv1connect.NewWorkspaceServiceClient(c.http, c.base, opts...)
	c.repos = warrenv1connect.NewRepoServiceClient(c.http, c.base, opts...)
	c.images = warrenv1connect.NewImageServiceClient(c.http, c.base, opts...)
	c.system = warrenv1connect.NewSystemServiceClient(c.http, c.base, opts...)
	return c, nil
}

// Close drops idle connections. Commands that run keep running in their sandboxes.
func (c *Client) Close() error {
	c.http.CloseIdleConnections()
	return nil
}

// URL returns the server's URL, without a password.
func (c *Client) URL() string { return c.redactedURL() }

func (c *Client) redactedURL() string {
	if c.url == nil {
		return ""
	}
	return c.url.Redacted()
}

// credentials puts the token and the name of the program on each request.
type credentials struct {
	next *http.Transport
	c    *Client
}

func (t credentials) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	t.c.sign(r.Header)
	if r.Context().Value(comingBackKey{}) != nil {
		r.Header.Set(reconnectHeader, "1")
	}
	return t.next.RoundTrip(r)
}

// CloseIdleConnections is found by http.Client.
func (t credentials) CloseIdleConnections() { t.next.CloseIdleConnections() }

func (c *Client) sign(h http.Header) {
	if c.token != "" {
		h.Set("Authorization", "Bearer "+c.token)
	}
	h.Set("User-Agent", c.agent)
}

type noRetryKey struct{}

func withoutRetry(ctx context.Context) context.Context {
	return context.WithValue(ctx, noRetryKey{}, true)
}

// retrier repeats unary calls that change nothing when repeated while the server cannot be reached.
type retrier struct{ c *Client }

var idempotent = map[string]bool{
	warrenv1connect.SandboxServiceGetSandboxProcedure:        true,
	warrenv1connect.SandboxServiceListSandboxesProcedure:     true,
	warrenv1connect.SandboxServiceUpdateSandboxProcedure:     true,
	warrenv1connect.SandboxServiceDeleteSandboxProcedure:     true,
	warrenv1connect.SandboxServiceGetStatsProcedure:          true,
	warrenv1connect.SnapshotServiceGetSnapshotProcedure:      true,
	warrenv1connect.SnapshotServiceListSnapshotsProcedure:    true,
	warrenv1connect.SnapshotServiceDeleteSnapshotProcedure:   true,
	warrenv1connect.TemplateServiceGetTemplateProcedure:      true,
	warrenv1connect.TemplateServiceListTemplatesProcedure:    true,
	warrenv1connect.TemplateServiceDeleteTemplateProcedure:   true,
	warrenv1connect.WorkspaceServiceGetWorkspaceProcedure:    true,
	warrenv1connect.WorkspaceServiceListWorkspacesProcedure:  true,
	warrenv1connect.WorkspaceServiceDeleteWorkspaceProcedure: true,
	warrenv1connect.RepoServiceListReposProcedure:            true,
	warrenv1connect.RepoServiceDeleteRepoProcedure:           true,
	warrenv1connect.ImageServiceListImagesProcedure:          true,
	warrenv1connect.ImageServiceGetImageProcedure:            true,
	warrenv1connect.ImageServiceDeleteImageProcedure:         true,
	warrenv1connect.SystemServiceGetVersionProcedure:         true,
	warrenv1connect.SystemServiceDoctorProcedure:             true,
	warrenv1connect.SystemServiceListTokensProcedure:         true,
	warrenv1connect.SystemServiceDeleteTokenProcedure:        true,
}

// deletes are the idempotent calls for which "not found" after a lost answer means that the first try did it.
var deletes = map[string]bool{
	warrenv1connect.SandboxServiceDeleteSandboxProcedure:     true,
	warrenv1connect.SnapshotServiceDeleteSnapshotProcedure:   true,
	warrenv1connect.TemplateServiceDeleteTemplateProcedure:   true,
	warrenv1connect.WorkspaceServiceDeleteWorkspaceProcedure: true,
	warrenv1connect.RepoServiceDeleteRepoProcedure:           true,
	warrenv1connect.ImageServiceDeleteImageProcedure:         true,
	warrenv1connect.SystemServiceDeleteTokenProcedure:        true,
}

func (r retrier) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		procedure := req.Spec().Procedure
		retry := idempotent[procedure] && ctx.Value(noRetryKey{}) == nil
		var res connect.AnyResponse
		lost := false
		err := r.c.again(ctx, func() error {
			var err error
			res, err = next(ctx, req)
			if err == nil {
				return nil
			}
			err = fromWire("", err)
			if lost && deletes[procedure] && errors.Is(err, ErrNotFound) {
				res, err = goneResponse(procedure), nil
			}
			lost = lost || broken(err)
			if !retry {
				return giveUp{err}
			}
			return err
		})
		return res, err
	}
}

// goneResponse is the empty answer of a delete.
func goneResponse(procedure string) connect.AnyResponse {
	switch procedure {
	case warrenv1connect.SandboxServiceDeleteSandboxProcedure:
		return connect.NewResponse(&warrenv1.DeleteSandboxResponse{})
	case warrenv1connect.WorkspaceServiceDeleteWorkspaceProcedure:
		return connect.NewResponse(&warrenv1.DeleteWorkspaceResponse{})
	case warrenv1connect.RepoServiceDeleteRepoProcedure:
		return connect.NewResponse(&warrenv1.DeleteRepoResponse{})
	case warrenv1connect.ImageServiceDeleteImageProcedure:
		return connect.NewResponse(&warrenv1.DeleteImageResponse{})
	default:
		return connect.NewResponse(&warrenv1.DeleteTokenResponse{})
	}
}

func (r retrier) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (r retrier) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// giveUp marks an error that again must not repeat.
type giveUp struct{ error }

// again calls f until it returns nil or an error that coming again does not mend, for at most retryFor.
func (c *Client) again(ctx context.Context, f func() error) error {
	var deadline time.Time
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		err := f()
		if g, ok := err.(giveUp); ok {
			return g.error
		}
		if !broken(err) || c.retryFor < 0 {
			return err
		}
		if now := time.Now(); deadline.IsZero() {
			deadline = now.Add(c.retryFor)
		} else if now.Add(wait).After(deadline) {
			return err
		}
		if !sleep(ctx, wait) {
			return err
		}
	}
}

// sleep waits, and reports false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// randomKey returns a name that nobody else has chosen.
func randomKey() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}
