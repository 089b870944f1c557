package small_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/internal/guest/small"
)

func TestReadAndWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for _, n := range []int{0, 1, 4095, 4096, 4097, 20_000} {
		data := bytes.Repeat([]byte("0123456789abcdef"), n/16+1)[:n]
		if err := small.Write(path, unix.O_CREAT|unix.O_TRUNC, 0o640, data); err != nil {
			t.Fatal(err)
		}
		if got, err := small.Read(path, 1<<20); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes: read %d, %v", n, len(got), err)
		}
		if got, err := small.ReadRegular(path, 20_000); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes: read %d of a regular file, %v", n, len(got), err)
		}
		if got, err := small.Read(path, 100); err != nil || !bytes.Equal(got, data[:min(n, 100)]) {
			t.Errorf("the first of %d bytes: read %d, %v", n, len(got), err)
		}
	}
	if st, err := os.Stat(path); err != nil || st.Mode() != 0o640 {
		t.Errorf("%v, %v", st, err)
	}
	if err := small.Write(path, 0, 0, []byte("XY")); err != nil {
		t.Fatal(err)
	}
	if got, err := small.Read(path, 4); err != nil || string(got) != "XY23" {
		t.Errorf("written in place: %q, %v", got, err)
	}
	// A file of /proc has no size.
	want, err := os.ReadFile("/proc/self/limits")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := small.Read("/proc/self/limits", 64<<10); err != nil || !bytes.Equal(got, want) {
		t.Errorf("/proc/self/limits: %q, %v, want %q", got, err, want)
	}
}

func TestRefused(t *testing.T) {
	dir := t.TempDir()
	missing, pipe := filepath.Join(dir, "missing"), filepath.Join(dir, "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	// Somebody has it open to write, and writes nothing.
	w, err := os.OpenFile(pipe, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for name, read := range map[string]func(string) ([]byte, error){
		"Read":        func(p string) ([]byte, error) { return small.Read(p, 100) },
		"ReadRegular": func(p string) ([]byte, error) { return small.ReadRegular(p, 100) },
	} {
		if _, err := read(missing); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: what is missing: %v", name, err)
		}
		if _, err := read(pipe); err == nil {
			t.Errorf("%s: a silent pipe was read", name)
		}
		if _, err := read(dir); err == nil {
			t.Errorf("%s: a directory was read", name)
		}
	}
	large := filepath.Join(dir, "large")
	if err := os.WriteFile(large, make([]byte, 101), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := small.ReadRegular(large, 100); err == nil {
		t.Error("a file beyond the limit was read")
	}
	if err := small.Write(missing, 0, 0, []byte("x")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("written without O_CREAT: %v", err)
	}
	if err := small.Write("/dev/full", 0, 0, []byte("x")); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a full disk: %v", err)
	}
}
