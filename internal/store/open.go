package store

import (
	"context"
	"crypto/rand"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/failpoint"
	"modernc.org/sqlite"
	lib "modernc.org/sqlite/lib"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

var duringMigration = failpoint.New("store.migrate")

// lockFile keeps a second process away from the database; the kernel lets go when the holder ends, however it does.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, openError(path, err)
	}
	pid := ""
	for end := time.Now().Add(lockWait); ; time.Sleep(10 * time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			break
		}
		who, _ := io.ReadAll(io.NewSectionReader(f, 0, 32))
		pid = strings.TrimSpace(string(who))
		if gone(pid) && time.Now().Before(end) {
			continue
		}
		f.Close()
		if pid == "" {
			pid = "unknown"
		}
		return nil, fmt.Errorf("the store %s is in use by process %s; stop that server first, or use another data directory: %w",
			strings.TrimSuffix(path, ".lock"), pid, warren.ErrUnavailable)
	}
	// Only for the message above; a full disk must not keep anyone out.
	if f.Truncate(0) == nil {
		f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return f, nil
}

// lockWait is how long the lock of an owner that has ended is waited for: a process that it was just starting has it until it runs a program of its own.
const lockWait = 2 * time.Second

// gone says whether the process that took the lock may be one that has given it back: it has ended, or is this one.
func gone(pid string) bool {
	n, err := strconv.Atoi(pid)
	return err == nil && n > 0 && (n == os.Getpid() || errors.Is(syscall.Kill(n, 0), syscall.ESRCH))
}

func openError(path string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("open the store %s: its directory does not exist: %w", path, warren.ErrNotFound)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return fmt.Errorf("open the store %s: the directory cannot be written (%v); make it writable, or use another data directory: %w",
			path, errors.Unwrap(err), warren.ErrUnavailable)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("open the store %s: no space or inodes are left; free some and start again: %w", path, warren.ErrExhausted)
	}
	return fmt.Errorf("open the store %s: %w (%v)", path, warren.ErrUnavailable, err)
}

const magic = "SQLite format 3\x00"

// checkFile looks at an existing file before SQLite does, which would take an empty or short file for a new database.
func checkFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if info, err := os.Stat(path + "-wal"); err == nil && info.Size() > 0 {
			return damaged(path, "the file is missing but its log "+filepath.Base(path)+"-wal is there")
		}
		// Created here for its mode.
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return openError(path, err)
		}
		return f.Close()
	}
	if err != nil {
		return openError(path, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return openError(path, err)
	}
	if !info.Mode().IsRegular() {
		return damaged(path, "it is no regular file")
	}
	if info.Size() == 0 {
		return nil // created by an Open that was cut short
	}
	head := make([]byte, len(magic))
	if _, err := io.ReadFull(f, head); err != nil || string(head) != magic {
		return damaged(path, "it does not begin as an SQLite database does")
	}
	return nil
}

func damaged(path, why string) error {
	return fmt.Errorf("the store %s is damaged: %s. Nothing was started and nothing changed. "+
		"Put a backup of the file back, or end what runs (`warren shutdown --sandboxes`) and move the whole directory %s away to "+
		"begin empty: workspaces and repositories in it are as they were: %w", path, why, filepath.Dir(path), warren.ErrUnavailable)
}

// verify reads the whole database for damage.
func (s *Store) verify(ctx context.Context) error {
	rows, err := s.conn.QueryContext(ctx, "PRAGMA quick_check(5)")
	if err != nil {
		return s.explain("check", err)
	}
	defer rows.Close()
	var found []string
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			return s.explain("check", err)
		}
		if line != "ok" {
			found = append(found, line)
		}
	}
	if err := rows.Err(); err != nil {
		return s.explain("check", err)
	}
	if len(found) > 0 {
		return damaged(s.opts.Path, strings.Join(found, "; "))
	}
	return nil
}

type migration struct {
	version int
	name    string
	sql     string
}

func migrations() ([]migration, error) {
	entries, err := migrationFiles.ReadDir("migrations")
	if err != nil {
		return nil, err
	}
	var all []migration
	for i, e := range entries {
		num, _, _ := strings.Cut(e.Name(), "_")
		v, err := strconv.Atoi(num)
		if err != nil || v != i+1 {
			return nil, fmt.Errorf("migration %s: want number %04d", e.Name(), i+1)
		}
		b, err := migrationFiles.ReadFile("migrations/" + e.Name())
		if err != nil {
			return nil, err
		}
		all = append(all, migration{v, e.Name(), string(b)})
	}
	return all, nil
}

func (s *Store) migrate(ctx context.Context) error {
	all, err := migrations()
	if err != nil {
		return err
	}
	return s.migrateTo(ctx, all)
}

// migrateTo brings the schema to the last of all, each step in a transaction of its own with its version number, so
// that a crash between or within steps is continued by the next Open.
func (s *Store) migrateTo(ctx context.Context, all []migration) error {
	var have int
	if err := s.conn.QueryRowContext(ctx, "PRAGMA user_version").Scan(&have); err != nil {
		return s.explain("open", err)
	}
	latest := len(all)
	if have > latest {
		return fmt.Errorf("the store %s has schema version %d, but this program knows only up to %d: it was written by a newer Warren. "+
			"Run that version, or restore the copy %s.v%d that it made before it migrated, if there is one: %w",
			s.opts.Path, have, latest, filepath.Base(s.opts.Path), latest, warren.ErrState)
	}
	if have == latest {
		return nil
	}
	if have > 0 {
		backup := fmt.Sprintf("%s.v%d", s.opts.Path, have)
		// One left by an attempt that was cut short may be incomplete.
		if err := os.Remove(backup); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return openError(backup, err)
		}
		if _, err := s.conn.ExecContext(ctx, "VACUUM INTO ?", backup); err != nil {
			return s.explain("back up before migrating", err)
		}
		if err := os.Chmod(backup, 0o600); err != nil {
			return openError(backup, err)
		}
		s.log.Info("store copied before migrating", "from", have, "to", latest)
	}
	for _, m := range all[have:] {
		if err := s.step(ctx, m); err != nil {
			return s.explain(fmt.Sprintf("migrate to version %d", m.version), err)
		}
	}
	return nil
}

func (s *Store) step(ctx context.Context, m migration) (err error) {
	tx, err := s.conn.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, m.sql); err != nil {
		return err
	}
	if m.version == 1 {
		if _, err := tx.ExecContext(ctx, "INSERT INTO meta (key, value) VALUES ('instance', ?)", newInstance()); err != nil {
			return err
		}
	}
	if _, err := tx.ExecContext(ctx, fmt.Sprintf("PRAGMA user_version = %d", m.version)); err != nil {
		return err
	}
	if err := duringMigration.Hit(); err != nil {
		return err
	}
	return tx.Commit()
}

// newInstance names a data directory for ever.
func newInstance() string {
	b := make([]byte, 16)
	rand.Read(b)
	return hex.EncodeToString(b)
}

// escapePath makes a path safe in SQLite's file: URIs.
func escapePath(p string) string {
	return strings.NewReplacer("%", "%25", "?", "%3f", "#", "%23", " ", "%20").Replace(p)
}

// explain turns SQLite's errors into ours, and stops all writing after one that leaves in doubt what is on disk.
func (s *Store) explain(op string, err error) error {
	if err == nil || errors.Is(err, warren.ErrUnavailable) || errors.Is(err, warren.ErrExhausted) {
		return err
	}
	var se *sqlite.Error
	if !errors.As(err, &se) {
		return fmt.Errorf("store: %s: %w", op, err)
	}
	switch code := se.Code(); code & 0xff {
	case lib.SQLITE_CORRUPT, lib.SQLITE_NOTADB:
		err := damaged(s.opts.Path, se.Error())
		s.broken.CompareAndSwap(nil, &err)
		return err
	case lib.SQLITE_FULL:
		return fmt.Errorf("the disk that holds the store is full; free space (`warren rm`, `warren workspace rm`, `warren image rm`) and try again: %w", warren.ErrExhausted)
	case lib.SQLITE_READONLY, lib.SQLITE_CANTOPEN, lib.SQLITE_PERM:
		return fmt.Errorf("the store %s cannot be written (%v); make its directory writable and start again: %w", s.opts.Path, se, warren.ErrUnavailable)
	case lib.SQLITE_IOERR:
		if full(s.opts.Path) {
			return fmt.Errorf("the disk that holds the store is full; free space and try again: %w", warren.ErrExhausted)
		}
		err := fmt.Errorf("the disk failed to take a change (%v); the store takes no more until the server is started again: %w", se, warren.ErrUnavailable)
		s.broken.CompareAndSwap(nil, &err)
		s.log.Error("store broken", "error", se)
		return err
	case lib.SQLITE_BUSY, lib.SQLITE_LOCKED:
		return fmt.Errorf("the store is locked by another program: %w", warren.ErrUnavailable)
	case lib.SQLITE_CONSTRAINT:
		return fmt.Errorf("store: %s: %w (%v)", op, warren.ErrExists, se)
	}
	return fmt.Errorf("store: %s: %w (%v)", op, warren.ErrUnavailable, se)
}

// full says whether the file system of path has no room for a page. SQLite reports some full disks (the shared
// memory of the log, a failed extension of a sparse file) as plain input/output errors.
func full(path string) bool {
	var st syscall.Statfs_t
	if syscall.Statfs(filepath.Dir(path), &st) != nil {
		return false
	}
	return int64(st.Bavail)*st.Bsize < 64<<10 || (st.Files > 0 && st.Ffree == 0)
}

// free is how many bytes the file system of path has left.
func free(path string) int64 {
	var st syscall.Statfs_t
	if syscall.Statfs(filepath.Dir(path), &st) != nil {
		return 0
	}
	return int64(st.Bavail) * st.Bsize
}
