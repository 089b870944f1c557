package warren

import "errors"

// The kinds of failure that callers can tell apart with errors.Is, on both sides of the wire. What a driver or
// an image cannot do at all matches errors.ErrUnsupported; a missing file in a sandbox matches fs.ErrNotExist;
// a cancelled or late call matches the context's errors.
var (
	// ErrNotFound says that there is no such sandbox, workspace, repo, image or process.
	ErrNotFound = errors.New("not found")
	// ErrExists says that the name or id is taken.
	ErrExists = errors.New("already exists")
	// ErrInvalid says that an argument cannot be right.
	ErrInvalid = errors.New("invalid")
	// ErrDenied says that the caller may not do this.
	ErrDenied = errors.New("denied")
	// ErrState says that the object is in a state in which this cannot be done.
	ErrState = errors.New("wrong state")
	// ErrExhausted says that a budget, a limit or a disk is used up.
	ErrExhausted = errors.New("exhausted")
	// ErrUnavailable says that what is needed cannot be reached now; a retry may succeed.
	ErrUnavailable = errors.New("unavailable")
)
