package guest

import (
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/warren-sandbox/warren/internal/guest/account"
)

// What furnish copies at most: /etc/skel is the image's and may hold anything.
const (
	maxSkelFiles = 64
	maxSkelBytes = 1 << 20
)

// furnish puts the files of skel, the image's /etc/skel, into a home that has nothing in it, as adduser would have done:
// homes are durable directories of the host, and a new one is empty. It acts as the user.
func furnish(u *account.User, skel string) error {
	return u.Do(func() error {
		home, err := os.OpenRoot(u.Home)
		if err != nil {
			return err
		}
		defer home.Close()
		dir, err := home.Open(".")
		if err != nil {
			return err
		}
		_, err = dir.Readdirnames(1)
		dir.Close()
		if !errors.Is(err, io.EOF) {
			return err // something is there, or it cannot be read
		}
		entries, err := os.ReadDir(skel)
		if err != nil {
			return err
		}
		for _, e := range entries[:min(len(entries), maxSkelFiles)] {
			info, err := e.Info()
			if err != nil || !info.Mode().IsRegular() || info.Size() > maxSkelBytes {
				continue
			}
			data, err := os.ReadFile(filepath.Join(skel, e.Name()))
			if err != nil {
				return err
			}
			if err := home.WriteFile(e.Name(), data, info.Mode().Perm()); err != nil {
				return err
			}
		}
		return nil
	})
}
