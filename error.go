package warren

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strings"

	"connectrpc.com/connect"

	warrenv1 "github.com/warren-sandbox/warren/proto/warren/v1"
)

// Error is a failure that a server told, or that an engine tells a server. It matches the sentinel of its Kind with
// errors.Is on both sides of the wire.
type Error struct {
	// Kind is "not_found", "exists", "invalid", "denied", "state", "exhausted", "unavailable", "unsupported",
	// "canceled", "deadline", "file_not_found", "file_exists", "file_denied" or "internal".
	Kind string
	// Op is what was being done, such as "create sandbox".
	Op string
	// ID is the id or name of what it was done to.
	ID string
	// Hint says what to do about it, if something can be done.
	Hint string
	// Resource is the budget or resource that was used up, such as "sandboxes per user (limit 20)", [ResourceGuest] or [ResourceGateway].
	Resource string
	// Message says what went wrong. It may be empty when Err is set.
	Message string
	// Err is the cause, where the failure happened. It does not cross the wire.
	Err error
}

// ResourceGuest is the Resource of an error that says that the guest of a sandbox does not answer. Its kind is "unavailable", but
// this client does not ask again on its own: who is root inside may have stopped the guest for good.
const ResourceGuest = "guest"

// ResourceGateway is the same of the server's gateway: somebody may have stopped it, and what to do is in the message.
const ResourceGateway = "gateway"

// silent reports whether err says that a guest or the gateway does not answer.
func silent(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Kind == "unavailable" && (e.Resource == ResourceGuest || e.Resource == ResourceGateway)
}

// kinds pairs each kind with what it matches.
var kinds = []struct {
	kind     string
	sentinel error
	code     connect.Code
}{
	{"not_found", ErrNotFound, connect.CodeNotFound},
	{"exists", ErrExists, connect.CodeAlreadyExists},
	{"invalid", ErrInvalid, connect.CodeInvalidArgument},
	{"denied", ErrDenied, connect.CodePermissionDenied},
	{"state", ErrState, connect.CodeFailedPrecondition},
	{"exhausted", ErrExhausted, connect.CodeResourceExhausted},
	{"unavailable", ErrUnavailable, connect.CodeUnavailable},
	{"unsupported", errors.ErrUnsupported, connect.CodeUnimplemented},
	{"canceled", context.Canceled, connect.CodeCanceled},
	{"deadline", context.DeadlineExceeded, connect.CodeDeadlineExceeded},
	{"file_not_found", fs.ErrNotExist, connect.CodeUnknown},
	{"file_exists", fs.ErrExist, connect.CodeUnknown},
	{"file_denied", fs.ErrPermission, connect.CodeUnknown},
	{"denied", ErrDenied, connect.CodeUnauthenticated},
	{"state", ErrState, connect.CodeAborted},
	{"invalid", ErrInvalid, connect.CodeOutOfRange},
}

// Error returns the operation, the message and the hint.
func (e *Error) Error() string {
	var b strings.Builder
	if e.Op != "" {
		b.WriteString(e.Op)
		if e.ID != "" {
			fmt.Fprintf(&b, " %s", e.ID)
		}
		b.WriteString(": ")
	}
	switch {
	case e.Message != "":
		b.WriteString(e.Message)
	case e.Err != nil:
		b.WriteString(e.Err.Error())
	case e.sentinel() != nil:
		b.WriteString(e.sentinel().Error())
	default:
		b.WriteString("internal error")
	}
	if e.Hint != "" && !strings.Contains(b.String(), e.Hint) {
		b.WriteString("; ")
		b.WriteString(e.Hint)
	}
	return b.String()
}

// Unwrap returns what the error matches: its sentinel, if its kind has one, and its cause.
func (e *Error) Unwrap() []error {
	var errs []error
	if s := e.sentinel(); s != nil {
		errs = append(errs, s)
	}
	if e.Err != nil {
		errs = append(errs, e.Err)
	}
	return errs
}

func (e *Error) sentinel() error {
	for _, k := range kinds {
		if k.kind == e.Kind {
			return k.sentinel
		}
	}
	return nil
}

// fromWire turns what a connect client returned into an error that matches the sentinels. What has no detail, such
// as an answer of another E2B-compatible guest, is judged by its code.
func fromWire(op string, err error) error {
	if err == nil {
		return nil
	}
	var known *Error
	if errors.As(err, &known) {
		return err
	}
	var ce *connect.Error
	if !errors.As(err, &ce) {
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		return &Error{Kind: "unavailable", Op: op, Message: err.Error(), Err: err}
	}
	for _, d := range ce.Details() {
		v, derr := d.Value()
		if derr != nil {
			continue
		}
		if ed, ok := v.(*warrenv1.ErrorDetail); ok {
			return &Error{Kind: ed.GetKind(), Op: ed.GetOp(), ID: ed.GetId(), Hint: ed.GetHint(), Resource: ed.GetResource(), Message: ce.Message()}
		}
	}
	e := &Error{Kind: "internal", Op: op, Message: ce.Message()}
	if !connect.IsWireError(err) {
		// Made on this side: the transport broke, or ctx ended.
		e.Err = err
		switch {
		case errors.Is(err, context.Canceled):
			e.Kind = "canceled"
		case errors.Is(err, context.DeadlineExceeded):
			e.Kind = "deadline"
		case ce.Code() == connect.CodeResourceExhausted || ce.Code() == connect.CodeUnimplemented:
			e.Kind = kindOfCode(ce.Code())
		default:
			e.Kind = "unavailable"
		}
		return e
	}
	e.Kind = kindOfCode(ce.Code())
	return e
}

// guestError is fromWire for calls on which a guest's "not found" and "permission denied" speak of files, of which a server
// that adds details never speaks.
func guestError(op string, err error) error {
	if err == nil || !connect.IsWireError(err) || len(details(err)) > 0 {
		return fromWire(op, err)
	}
	e := &Error{Kind: kindOfCode(connect.CodeOf(err)), Op: op, Message: strings.TrimPrefix(err.Error(), connect.CodeOf(err).String()+": ")}
	switch connect.CodeOf(err) {
	case connect.CodeNotFound:
		e.Kind = "file_not_found"
	case connect.CodeAlreadyExists:
		e.Kind = "file_exists"
	case connect.CodePermissionDenied:
		e.Kind = "file_denied"
	}
	return e
}

// details are only on errors of the server itself.
func details(err error) []*connect.ErrorDetail {
	var ce *connect.Error
	if errors.As(err, &ce) {
		return ce.Details()
	}
	return nil
}

// refused reports whether err says that nothing listened, so that the request cannot have arrived.
func refused(err error) bool {
	var oe *net.OpError
	return errors.As(err, &oe) && oe.Op == "dial"
}

func kindOfCode(c connect.Code) string {
	for _, k := range kinds {
		if k.code == c && c != connect.CodeUnknown {
			return k.kind
		}
	}
	return "internal"
}

// broken reports whether err says that the connection, not the server, failed, or that the server asks to come again.
func broken(err error) bool {
	return err != nil && errors.Is(err, ErrUnavailable) && !silent(err)
}
