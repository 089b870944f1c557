package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Code is one of Connect's error codes.
type Code string

// Connect's error codes.
const (
	Canceled           Code = "canceled"
	Unknown            Code = "unknown"
	InvalidArgument    Code = "invalid_argument"
	DeadlineExceeded   Code = "deadline_exceeded"
	NotFound           Code = "not_found"
	AlreadyExists      Code = "already_exists"
	PermissionDenied   Code = "permission_denied"
	ResourceExhausted  Code = "resource_exhausted"
	FailedPrecondition Code = "failed_precondition"
	Aborted            Code = "aborted"
	OutOfRange         Code = "out_of_range"
	Unimplemented      Code = "unimplemented"
	Internal           Code = "internal"
	Unavailable        Code = "unavailable"
	DataLoss           Code = "data_loss"
	Unauthenticated    Code = "unauthenticated"
)

// Status returns the HTTP status that stands for the code.
func (c Code) Status() int {
	switch c {
	case Canceled:
		return 499
	case InvalidArgument, FailedPrecondition, OutOfRange:
		return http.StatusBadRequest
	case DeadlineExceeded:
		return http.StatusGatewayTimeout
	case NotFound:
		return http.StatusNotFound
	case AlreadyExists, Aborted:
		return http.StatusConflict
	case PermissionDenied:
		return http.StatusForbidden
	case ResourceExhausted:
		return http.StatusTooManyRequests
	case Unimplemented:
		return http.StatusNotImplemented
	case Unavailable:
		return http.StatusServiceUnavailable
	case Unauthenticated:
		return http.StatusUnauthorized
	}
	return http.StatusInternalServerError
}

// Error is an error with a code, as a client sees it.
type Error struct {
	Code    Code
	Message string
}

// Errorf makes an [Error].
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Error implements error.
func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

// AsError returns err as an [Error], unknown if it has no code.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Code: Unknown, Message: err.Error()}
}

// AppendError appends the JSON form of an error.
func AppendError(dst []byte, e *Error) []byte {
	dst = append(dst, `{"code":`...)
	dst = AppendString(dst, string(e.Code))
	dst = append(dst, `,"message":`...)
	dst = AppendString(dst, e.Message)
	return append(dst, '}')
}

// Flags of a frame.
const (
	flagCompressed = 1
	flagEnd        = 2
)

const frameHeader = 5

// AppendFrame appends a message as a frame of a stream.
func AppendFrame(dst []byte, msg any) []byte {
	start := len(dst)
	dst = append(dst, 0, 0, 0, 0, 0)
	dst = Append(dst, msg)
	binary.BigEndian.PutUint32(dst[start+1:], uint32(len(dst)-start-frameHeader))
	return dst
}

// AppendEnd appends the last frame of a stream, with an error unless err is nil.
func AppendEnd(dst []byte, err *Error) []byte {
	start := len(dst)
	dst = append(dst, flagEnd, 0, 0, 0, 0, '{')
	if err != nil {
		dst = append(dst, `"error":`...)
		dst = AppendError(dst, err)
	}
	dst = append(dst, '}')
	binary.BigEndian.PutUint32(dst[start+1:], uint32(len(dst)-start-frameHeader))
	return dst
}

// ReadFrame reads one frame of at most limit bytes from a request stream. It returns io.EOF at the end of the
// stream, whether or not the client sent an end frame.
func ReadFrame(r io.Reader, limit int) ([]byte, error) {
	var head [frameHeader]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, io.EOF
		}
		return nil, Errorf(InvalidArgument, "the stream ends inside the head of a frame: %v", err)
	}
	switch {
	case head[0]&flagCompressed != 0:
		return nil, Errorf(Internal, "a compressed frame without a compression")
	case head[0]&flagEnd != 0:
		return nil, io.EOF
	case head[0] != 0:
		return nil, Errorf(InvalidArgument, "unknown flags %#02x in a frame", head[0])
	}
	n := binary.BigEndian.Uint32(head[1:])
	if int64(n) > int64(limit) {
		return nil, Errorf(ResourceExhausted, "a frame of %d bytes is larger than %d", n, limit)
	}
	// The length is the sender's word: memory is taken as bytes arrive.
	data, err := io.ReadAll(io.LimitReader(r, int64(n)))
	if err != nil || len(data) < int(n) {
		return nil, Errorf(InvalidArgument, "the stream ends inside a frame")
	}
	return data, nil
}

// Timeout reads the header Connect-Timeout-Ms; 0 means none.
func Timeout(h http.Header) (time.Duration, error) {
	v := h.Get("Connect-Timeout-Ms")
	if v == "" {
		return 0, nil
	}
	ms, err := strconv.ParseUint(v, 10, 63)
	if err != nil || len(v) > 10 {
		return 0, Errorf(InvalidArgument, "Connect-Timeout-Ms: %.20q is not a number of at most 10 digits", v)
	}
	return max(time.Duration(ms)*time.Millisecond, 1), nil
}

// The two content types that the guest speaks.
const (
	UnaryType  = "application/json"
	StreamType = "application/connect+json"
)

// ContentType says whether the header names want, whatever its parameters.
func ContentType(h http.Header, want string) bool {
	t, params, _ := strings.Cut(h.Get("Content-Type"), ";")
	if !strings.EqualFold(strings.TrimSpace(t), want) {
		return false
	}
	charset := strings.ToLower(strings.TrimSpace(params))
	return charset == "" || charset == "charset=utf-8" || charset == `charset="utf-8"`
}
