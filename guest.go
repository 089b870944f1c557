package warren

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strconv"

	"connectrpc.com/connect"

	"github.com/warren-sandbox/warren/proto/e2b/filesystem/filesystemconnect"
	"github.com/warren-sandbox/warren/proto/e2b/process/processconnect"
	"github.com/warren-sandbox/warren/proto/warren/guest/v1/guestv1connect"
)

// userHeader names the user in the sandbox that a request acts as; the server turns it into what the guest wants.
const userHeader = "Warren-User"

// errorHeader is on answers that the server itself gave instead of the sandbox. It holds the kind.
const errorHeader = "Warren-Error"

// reconnectHeader tells the server that a request goes on with what was cut off, such as output that was followed. Such a request
// does not resume a sandbox that somebody has paused.
const reconnectHeader = "Warren-Reconnect"

type comingBackKey struct{}

// comingBack marks the requests made with ctx by reconnectHeader.
func comingBack(ctx context.Context) context.Context {
	return context.WithValue(ctx, comingBackKey{}, true)
}

// guest talks to one sandbox's guest through the server's byte proxy.
type guest struct {
	c       *Client
	base    string
	process processconnect.ProcessClient
	files   filesystemconnect.FilesystemClient
	warren  guestv1connect.GuestServiceClient
}

func newGuest(c *Client, id string) *guest {
	g := &guest{c: c, base: c.base + portPath(id, GuestPort)}
	// The guest speaks JSON only.
	opts := []connect.ClientOption{
		connect.WithProtoJSON(),
		connect.WithReadMaxBytes(maxMessage),
		connect.WithAcceptCompression("gzip", nil, nil),
	}
	g.process = processconnect.NewProcessClient(c.http, g.base, opts...)
	g.files = filesystemconnect.NewFilesystemClient(c.http, g.base, opts...)
	g.warren = guestv1connect.NewGuestServiceClient(c.http, g.base, opts...)
	return g
}

// portPath is the path of the byte proxy to a port.
func portPath(id string, port int) string {
	return "/v1/sandboxes/" + url.PathEscape(id) + "/ports/" + strconv.Itoa(port)
}

// request returns a request for a user, who may be empty for the sandbox's own default.
func request[T any](user string, msg *T) *connect.Request[T] {
	r := connect.NewRequest(msg)
	if user != "" {
		r.Header().Set(userHeader, user)
	}
	return r
}

// do sends a plain HTTP request to the guest and returns an answer of 2xx, or an error.
func (g *guest) do(ctx context.Context, method, path, user string, query url.Values, header http.Header, body io.Reader) (*http.Response, error) {
	u := g.base + path
	if len(query) > 0 {
		u += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, u, body)
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	if user != "" {
		req.Header.Set(userHeader, user)
	}
	res, err := g.c.http.Do(req)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, &Error{Kind: "unavailable", Message: err.Error(), Err: err}
	}
	if res.StatusCode/100 == 2 {
		return res, nil
	}
	defer res.Body.Close()
	if res.StatusCode == http.StatusRequestedRangeNotSatisfiable {
		return nil, &rangeError{plainError(res)}
	}
	return nil, plainError(res)
}

// plainError turns an answer of a plain HTTP route into an error.
func plainError(res *http.Response) error {
	var body struct {
		Message  string          `json:"message"`
		Kind     string          `json:"kind"`
		Op       string          `json:"op"`
		ID       string          `json:"id"`
		Hint     string          `json:"hint"`
		Resource string          `json:"resource"`
		Code     json.RawMessage `json:"code"`
	}
	data, _ := io.ReadAll(io.LimitReader(res.Body, 64<<10))
	if json.Unmarshal(data, &body) != nil || body.Message == "" {
		body.Message = res.Status
	}
	e := &Error{Message: body.Message}
	if kind := res.Header.Get(errorHeader); kind != "" {
		e.Kind, e.Op, e.ID, e.Hint, e.Resource = kind, body.Op, body.ID, body.Hint, body.Resource
		return e
	}
	switch res.StatusCode {
	case http.StatusBadRequest:
		e.Kind = "invalid"
	case http.StatusNotFound:
		e.Kind = "file_not_found"
	case http.StatusConflict:
		e.Kind = "file_exists"
	case http.StatusForbidden:
		e.Kind = "file_denied"
	case http.StatusUnauthorized:
		e.Kind = "denied"
	case http.StatusInsufficientStorage, http.StatusRequestEntityTooLarge, http.StatusTooManyRequests:
		e.Kind = "exhausted"
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		e.Kind = "unavailable"
	case http.StatusNotImplemented:
		e.Kind = "unsupported"
	default:
		e.Kind = "internal"
	}
	return e
}

// fileError turns an error of the guest's file system services into one that matches io/fs's sentinels. An
// error of the server itself, such as that the sandbox is gone, stays what it is.
func fileError(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: path, Err: guestError("", err)}
}

// Port is a TCP port on which something in a sandbox listens.
type Port struct {
	Port int `json:"port"`
	// Address such as "127.0.0.1", "0.0.0.0", "::1" or "::".
	Address string `json:"address"`
	// PID and Program of what listens, where known.
	PID     int    `json:"pid,omitempty"`
	Program string `json:"program,omitempty"`
}

// String returns the address, the port and the program.
func (p Port) String() string {
	if p.Program == "" {
		return fmt.Sprintf("%s:%d", p.Address, p.Port)
	}
	return fmt.Sprintf("%s:%d (%s)", p.Address, p.Port, p.Program)
}
