package workspace

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
)

// Callers are told of a full disk, and never where on the host.
func TestPlain(t *testing.T) {
	for _, err := range []error{
		&fs.PathError{Op: "mkdir", Path: "/secret/place", Err: unix.ENOSPC},
		&os.LinkError{Op: "rename", Old: "/secret/a", New: "/secret/b", Err: unix.EDQUOT},
		&git.Error{Verb: "update-index", Code: 128, Message: "fatal: unable to write: No space left on device"},
	} {
		if got := plain(err); !errors.Is(got, warren.ErrExhausted) || strings.Contains(got.Error(), "/secret") {
			t.Errorf("%v becomes %v", err, got)
		}
	}
}
