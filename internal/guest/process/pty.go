package process

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/guest/account"
)

// openPTY makes a terminal that belongs to the user.
func openPTY(u *account.User, size Size) (master *os.File, slave int, err error) {
	master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("open a terminal: %w", err)
	}
	defer func() {
		if err != nil {
			master.Close()
		}
	}()
	var n int
	err = control(master, func(fd int) error {
		if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
			return err
		}
		n, err = unix.IoctlGetInt(fd, unix.TIOCGPTN)
		return err
	})
	if err != nil {
		return nil, -1, fmt.Errorf("open a terminal: %w", err)
	}
	if err = setSize(master, size); err != nil {
		return nil, -1, err
	}
	slave, err = unix.Open("/dev/pts/"+strconv.Itoa(n), unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("open a terminal: %w", err)
	}
	// Programs such as sudo, ssh and tmux open the terminal by name. Not every kernel lets its owner be changed.
	if account.Self() == 0 {
		_ = unix.Fchown(slave, int(u.UID), int(u.GID))
		_ = unix.Fchmod(slave, 0o620)
	}
	return master, slave, nil
}

// maxSide bounds the sides of a terminal to what its kernel structure holds.
const maxSide = 1<<16 - 1

func setSize(f *os.File, s Size) error {
	cols, rows := s.Cols, s.Rows
	if cols == 0 {
		cols = 80
	}
	if rows == 0 {
		rows = 24
	}
	ws := &unix.Winsize{Col: uint16(min(cols, maxSide)), Row: uint16(min(rows, maxSide))}
	if err := control(f, func(fd int) error { return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, ws) }); err != nil {
		return fmt.Errorf("set the size of a terminal: %w", err)
	}
	return nil
}

// control calls f with the descriptor, without making the file blocking as its Fd method would.
func control(file *os.File, f func(fd int) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	if err := raw.Control(func(fd uintptr) { ferr = f(int(fd)) }); err != nil {
		return err
	}
	return ferr
}
