// Package wire turns errors into what callers of the API may see: a kind that matches a sentinel of package warren on
// the other side, a message, and nothing of the server's own inside.
package wire

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf8"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/warren-sandbox/warren"
	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// ErrorHeader is on each answer of the server's own plain HTTP routes that is an error. It holds the kind, and tells such an
// answer from one that a sandbox gave.
const ErrorHeader = "Warren-Error"

// maxText bounds each text of an error, in bytes.
const maxText = 4 << 10

// Kind is one way in which calls fail.
type Kind struct {
	// Name as in warren.Error.Kind.
	Name string
	// Sentinel that an error of this kind matches.
	Sentinel error
	Code     connect.Code
	// Status of a plain HTTP answer.
	Status int
}

// Kinds in the order in which they are looked for.
var Kinds = []Kind{
	{"not_found", warren.ErrNotFound, connect.CodeNotFound, http.StatusNotFound},
	{"exists", warren.ErrExists, connect.CodeAlreadyExists, http.StatusConflict},
	{"invalid", warren.ErrInvalid, connect.CodeInvalidArgument, http.StatusBadRequest},
	{"denied", warren.ErrDenied, connect.CodePermissionDenied, http.StatusForbidden},
	{"state", warren.ErrState, connect.CodeFailedPrecondition, http.StatusConflict},
	{"exhausted", warren.ErrExhausted, connect.CodeResourceExhausted, http.StatusTooManyRequests},
	{"unavailable", warren.ErrUnavailable, connect.CodeUnavailable, http.StatusServiceUnavailable},
	{"unsupported", errors.ErrUnsupported, connect.CodeUnimplemented, http.StatusNotImplemented},
	{"canceled", context.Canceled, connect.CodeCanceled, 499},
	{"deadline", context.DeadlineExceeded, connect.CodeDeadlineExceeded, http.StatusGatewayTimeout},
	{"file_not_found", fs.ErrNotExist, connect.CodeNotFound, http.StatusNotFound},
	{"file_exists", fs.ErrExist, connect.CodeAlreadyExists, http.StatusConflict},
	{"file_denied", fs.ErrPermission, connect.CodePermissionDenied, http.StatusForbidden},
}

var internal = Kind{"internal", nil, connect.CodeInternal, http.StatusInternalServerError}

// Fault is an error as its caller may see it.
type Fault struct {
	Kind
	Op, ID, Hint, Resource string
	Message                string
	// Reference is set when the caller does not see all; the log holds the rest under it.
	Reference string
}

// Audience says who will see an error.
type Audience struct {
	// Operator sees the server's own details: it can read them on the host anyway.
	Operator bool
	// Hide are paths of the host whose names, and all below, no other audience sees.
	Hide []string
	// Op is what was being done, for errors that do not say it themselves.
	Op string
}

// Judge decides what an audience may see of an error.
func Judge(err error, to Audience) Fault {
	f := Fault{Kind: kindOf(err), Op: to.Op, Message: err.Error()}
	var e *warren.Error
	if errors.As(err, &e) {
		f.Hint, f.Resource = e.Hint, e.Resource
		f.Op, f.ID = e.Op, e.ID
		if err == error(e) {
			// Op and ID travel on their own; the other side puts them together again.
			bare := *e
			bare.Op, bare.ID, bare.Hint = "", "", ""
			f.Message = bare.Error()
		} else if f.Op != "" {
			// The text has it already, somewhere.
			f.Op, f.ID = "", ""
		}
	} else if f.Op != "" && strings.Contains(f.Message, f.Op) {
		f.Op = ""
	}
	if f.Name == internal.Name {
		f.Reference = reference()
		if to.Operator {
			f.Message = "internal error (reference " + f.Reference + "): " + f.Message
		} else {
			f.Message = "internal error (reference " + f.Reference + ")"
		}
	} else if !to.Operator {
		var paths []string
		if hostNames(err, &paths) {
			f.Reference = reference()
		}
		for _, text := range []*string{&f.Message, &f.Hint, &f.Resource, &f.ID, &f.Op} {
			clean := scrub(*text, paths, to.Hide)
			if clean != *text && f.Reference == "" {
				f.Reference = reference()
			}
			*text = clean
		}
		if f.Reference != "" {
			f.Message += " (reference " + f.Reference + ")"
		}
	}
	for _, text := range []*string{&f.Message, &f.Hint, &f.Resource, &f.ID, &f.Op} {
		*text = Printable(*text, maxText)
	}
	return f
}

func reference() string {
	var b [6]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

func kindOf(err error) Kind {
	var e *warren.Error
	if errors.As(err, &e) {
		for _, k := range Kinds {
			if k.Name == e.Kind {
				return k
			}
		}
		if e.Kind == internal.Name {
			return internal
		}
	}
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		return Of(warren.ErrExhausted)
	}
	host := hostNames(err, new([]string))
	for _, k := range Kinds {
		if !errors.Is(err, k.Sentinel) {
			continue
		}
		// A file that the server misses on its own disk is not a file that the caller asked for, and a
		// system call that the host's kernel lacks is not a feature that the driver lacks.
		if host && (strings.HasPrefix(k.Name, "file_") || k.Name == "unsupported") {
			continue
		}
		return k
	}
	// A disk that is full is nobody's mistake, and the caller can do something about it.
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return Of(warren.ErrExhausted)
	}
	return internal
}

// Of returns the kind of a sentinel.
func Of(sentinel error) Kind {
	for _, k := range Kinds {
		if k.Sentinel == sentinel {
			return k
		}
	}
	return internal
}

// hostNames reports whether an error of the operating system is in err's tree, and collects the names in it.
func hostNames(err error, names *[]string) bool {
	found := false
	switch e := err.(type) {
	case nil:
		return false
	case *fs.PathError:
		_, found = e.Err.(syscall.Errno)
		if found {
			*names = append(*names, e.Path)
		}
	case *os.LinkError:
		*names, found = append(*names, e.Old, e.New), true
	case *os.SyscallError, syscall.Errno, *exec.ExitError:
		found = true
	case *exec.Error:
		*names, found = append(*names, e.Name), true
	case *net.OpError:
		for _, a := range []net.Addr{e.Addr, e.Source} {
			if a != nil {
				*names = append(*names, a.String())
			}
		}
		found = true
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		found = hostNames(e.Unwrap(), names) || found
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			found = hostNames(err, names) || found
		}
	}
	return found
}

// scrub takes names, and words that begin with a hidden path, out of a text.
func scrub(text string, names, hide []string) string {
	for _, n := range names {
		if len(n) > 1 {
			text = strings.ReplaceAll(text, n, "…")
		}
	}
	for _, h := range hide {
		if len(h) < 2 {
			continue
		}
		var b strings.Builder
		for {
			i := strings.Index(text, h)
			if i < 0 {
				break
			}
			b.WriteString(text[:i])
			b.WriteString("…")
			text = text[i+len(h):]
			end := strings.IndexFunc(text, func(r rune) bool {
				return unicode.IsSpace(r) || strings.ContainsRune(`"'():;,`+"`", r)
			})
			if end < 0 {
				end = len(text)
			}
			text = text[end:]
		}
		text = b.String() + text
	}
	return text
}

// Printable returns text on one line with all that a terminal or a log could take for more than text escaped, and of at most max bytes.
func Printable(text string, max int) string {
	if len(text) <= max && !strings.ContainsFunc(text, unsafeRune) && utf8.ValidString(text) {
		return text
	}
	var b strings.Builder
	for i := 0; i < len(text); {
		if b.Len() >= max {
			b.WriteString("…")
			break
		}
		r, n := utf8.DecodeRuneInString(text[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			b.WriteString(`\x` + hex.EncodeToString([]byte{text[i]}))
		case r == '\n':
			b.WriteString(`\n`)
		case unsafeRune(r):
			const digits = "0123456789abcdef"
			b.WriteString(`\u`)
			for shift := 12; shift >= 0; shift -= 4 {
				b.WriteByte(digits[r>>shift&15])
			}
		default:
			b.WriteString(text[i : i+n])
		}
		i += n
	}
	return b.String()
}

// unsafeRune reports control characters and those that change the direction or the look of what follows.
func unsafeRune(r rune) bool {
	return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == '\u2028' || r == '\u2029' || r == '\ufeff'
}

// Connect returns the fault as an error for a connect handler.
func (f Fault) Connect() *connect.Error {
	ce := connect.NewError(f.Code, errors.New(f.Message))
	if d, err := connect.NewErrorDetail(f.Detail()); err == nil {
		ce.AddDetail(d)
	}
	return ce
}

// Detail returns what goes along with the message.
func (f Fault) Detail() *warrenv1.ErrorDetail {
	return &warrenv1.ErrorDetail{Kind: f.Name, Op: f.Op, Id: f.ID, Hint: f.Hint, Resource: f.Resource}
}

var writer = connect.NewErrorWriter()

// Write answers a plain HTTP request with the fault: in the form that its protocol has for errors when the request is a remote
// call whose errors are not in the status, and else as JSON, which is also the form for unary calls of Connect.
func (f Fault) Write(w http.ResponseWriter, r *http.Request) {
	w.Header().Set(ErrorHeader, f.Name)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	contentType := strings.ToLower(r.Header.Get("Content-Type"))
	if r.Method == http.MethodPost && (strings.HasPrefix(contentType, "application/connect+") || strings.HasPrefix(contentType, "application/grpc")) && writer.IsSupported(r) {
		writer.Write(w, r, f.Connect())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(f.Status)
	if r.Method != http.MethodHead {
		w.Write(append(f.json(), '\n'))
	}
}

// json is Connect's form of an error, with the fields of the detail beside it for those who do not read protobuf.
func (f Fault) json() []byte {
	type detail struct {
		Type  string `json:"type"`
		Value string `json:"value"`
	}
	body := struct {
		Code     string   `json:"code"`
		Message  string   `json:"message"`
		Kind     string   `json:"kind"`
		Op       string   `json:"op,omitempty"`
		ID       string   `json:"id,omitempty"`
		Hint     string   `json:"hint,omitempty"`
		Resource string   `json:"resource,omitempty"`
		Details  []detail `json:"details,omitempty"`
	}{Code: f.Code.String(), Message: f.Message, Kind: f.Name, Op: f.Op, ID: f.ID, Hint: f.Hint, Resource: f.Resource}
	d := f.Detail()
	if value, err := proto.Marshal(d); err == nil {
		body.Details = []detail{{string(d.ProtoReflect().Descriptor().FullName()), base64.RawStdEncoding.EncodeToString(value)}}
	}
	b, _ := json.Marshal(body)
	return b
}
