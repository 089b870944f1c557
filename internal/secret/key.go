package secret

import (
	"bytes"
	"context"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

const keySize = 32

// Key is a master key: 32 bytes that are here, or data keys that a KMS opens.
type Key struct {
	id     string
	master []byte
	kms    *KMS
	cache  cache
}

// ID names the key; it tells nothing of it.
func (k *Key) ID() string { return k.id }

// String hides the key from whoever prints it.
func (k *Key) String() string { return "key " + k.id }

// GoString hides the key as well.
func (k *Key) GoString() string { return k.String() }

func newKey(master []byte) (*Key, error) {
	if len(master) != keySize {
		return nil, fmt.Errorf("the key has %d bytes; want %d", len(master), keySize)
	}
	if bytes.Count(master, master[:1]) == keySize {
		return nil, errors.New("the key is one byte repeated; make one with: openssl rand -hex 32")
	}
	id, err := hkdf.Key(sha256.New, master, nil, "warren key id v1", 8)
	if err != nil {
		return nil, err
	}
	return &Key{id: hex.EncodeToString(id), master: master}, nil
}

// Derive returns 32 bytes for a purpose of the caller's, such as a key for signing. They tell nothing about the key, nor about those for
// other purposes. The key of a KMS does not leave it, so it has none.
func (k *Key) Derive(purpose string) ([]byte, error) {
	if k.kms != nil {
		return nil, fmt.Errorf("key %s is a KMS's, from which no other is derived: %w", k.id, errors.ErrUnsupported)
	}
	return hkdf.Key(sha256.New, k.master, nil, "warren derived key v1 "+purpose, keySize)
}

// parseKey reads 64 hex digits, or base64 of 32 bytes in either alphabet, padded or not.
func parseKey(text string) (*Key, error) {
	text = strings.TrimSpace(text)
	if b, err := hex.DecodeString(text); err == nil && len(b) == keySize {
		return newKey(b)
	}
	bare := strings.NewReplacer("+", "-", "/", "_").Replace(strings.TrimRight(text, "="))
	if b, err := base64.RawURLEncoding.DecodeString(bare); err == nil && len(b) == keySize {
		return newKey(b)
	}
	// Nothing of the text goes into the message.
	return nil, fmt.Errorf("want 64 hex digits or base64 of %d bytes, have %d characters that are neither; make one with: openssl rand -hex 32", keySize, len(text))
}

// FileKey reads the key in a file and makes the file, with mode 0600 and a random key, when it is not there. A file that others
// may read, that is not regular, or that holds no key is refused.
func FileKey(path string) (*Key, error) {
	k, err := readKey(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return k, err
	}
	master := make([]byte, keySize)
	if _, err := rand.Read(master); err != nil {
		return nil, err
	}
	// Linked into place when it is whole: of two that begin at once, both use one key.
	if err := writeKey(path, master, os.Link); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make the key file %s: %w", path, err)
	}
	return readKey(path)
}

func readKey(path string) (*Key, error) {
	// A pipe in its place must not keep the daemon waiting.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("read the key file: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read the key file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("the key file %s is no regular file (%s)", path, info.Mode())
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return nil, fmt.Errorf("the key file %s has mode %04o, so that others can read the key: chmod 600 it, and make a new key if anyone may have", path, mode)
	}
	text, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return nil, fmt.Errorf("read the key file %s: %w", path, err)
	}
	defer clear(text)
	k, err := parseKey(string(text))
	if err != nil {
		return nil, fmt.Errorf("the key file %s: %w", path, err)
	}
	return k, nil
}

func writeKey(path string, master []byte, place func(tmp, path string) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".new-*") // mode 0600; no name that FileBox looks for
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.WriteString(hex.EncodeToString(master) + "\n")
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := place(f.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// RotateFile puts a new random key in place of the one in a file and keeps that one beside it, as FILE.old-ID. A crash
// leaves the file with the one or the other, and both can be read by [FileBox].
func RotateFile(path string) (*Key, error) {
	old, err := readKey(path)
	if err != nil {
		return nil, err
	}
	if err := writeKey(path+oldKey+old.id, old.master, os.Link); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("keep the old key: %w", err)
	}
	master := make([]byte, keySize)
	if _, err := rand.Read(master); err != nil {
		return nil, err
	}
	if err := writeKey(path, master, os.Rename); err != nil {
		return nil, fmt.Errorf("write the new key to %s: %w", path, err)
	}
	return readKey(path)
}

const oldKey = ".old-"

// FileBox returns a box with the key of a file, as [FileKey], that also opens what was sealed under the keys which [RotateFile]
// kept.
func FileBox(path string) (*Box, error) {
	key, err := FileKey(path)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	var older []*Key
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), filepath.Base(path)+oldKey) {
			continue
		}
		k, err := readKey(filepath.Join(filepath.Dir(path), e.Name()))
		if err != nil {
			return nil, err
		}
		older = append(older, k)
	}
	return NewBox(key, older...), nil
}

// EnvKey reads the key from an environment variable: 64 hex digits, or base64 of 32 bytes. Programs that the process starts
// inherit the variable unless the caller takes care.
func EnvKey(variable string) (*Key, error) {
	text, ok := os.LookupEnv(variable)
	if !ok || text == "" {
		return nil, fmt.Errorf("the environment variable %s is not set; it must hold the key: 64 hex digits or base64 of %d bytes", variable, keySize)
	}
	k, err := parseKey(text)
	if err != nil {
		return nil, fmt.Errorf("the environment variable %s: %w", variable, err)
	}
	return k, nil
}

// KMS is a program that seals data keys with a key of its own. It is run as COMMAND seal and COMMAND open, gets the data key,
// or what seal had written, on its standard input, and writes the other to its standard output, exit code 0.
type KMS struct {
	// Command is the absolute path of an executable that only its owner can write.
	Command string
	// ID names the KMS's key in sealed values: 1 to 48 letters, digits, dots, _ and -.
	ID string
	// Timeout of one run, by default 10 s.
	Timeout time.Duration
	// Env is the program's environment; nil gives it none but PATH.
	Env []string
}

const (
	kmsTimeout = 10 * time.Second
	maxWrapped = 16 << 10
)

// Key returns a key that the KMS holds. Nothing is run before the first value is sealed or opened; a data key that the KMS
// opened is kept in memory.
func (k KMS) Key() (*Key, error) {
	if !filepath.IsAbs(k.Command) {
		return nil, fmt.Errorf("the KMS command %.200q is no absolute path", k.Command)
	}
	if k.ID == "" || len(k.ID) > 48 || strings.Trim(k.ID, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") != "" {
		return nil, fmt.Errorf("the KMS id %.60q: want 1 to 48 letters, digits, dots, _ and -", k.ID)
	}
	if k.Timeout <= 0 {
		k.Timeout = kmsTimeout
	}
	if k.Env == nil {
		k.Env = []string{"PATH=" + os.Getenv("PATH")}
	}
	if err := k.check(); err != nil {
		return nil, err
	}
	return &Key{id: "kms." + k.ID, kms: &k, cache: cache{keys: map[string][]byte{}, sealing: make(chan struct{}, 1)}}, nil
}

// check looks at the program before each run: whoever can write it gets the keys.
func (k *KMS) check() error {
	info, err := os.Stat(k.Command)
	if err != nil {
		return fmt.Errorf("the KMS command: %w", err)
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
		return fmt.Errorf("the KMS command %s is no executable file (%s)", k.Command, info.Mode())
	}
	if info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("the KMS command %s can be written by others (%s): chmod go-w it", k.Command, info.Mode())
	}
	return nil
}

func (k *KMS) run(ctx context.Context, verb string, in []byte) ([]byte, error) {
	if err := k.check(); err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, k.Timeout)
	defer cancel()
	cmd := exec.CommandContext(limited, k.Command, verb)
	cmd.Env = k.Env
	cmd.Dir = "/"
	cmd.Stdin = bytes.NewReader(in)
	endWithChildren(cmd)
	cmd.WaitDelay = time.Second
	out, problem := &capped{limit: maxWrapped + 1}, &capped{limit: 512}
	cmd.Stdout, cmd.Stderr = out, problem
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case limited.Err() != nil:
		return nil, fmt.Errorf("the KMS command %s %s did not end within %v", k.Command, verb, k.Timeout)
	case err != nil:
		return nil, fmt.Errorf("the KMS command %s %s: %w: %q", k.Command, verb, err, strings.TrimSpace(string(problem.text)))
	case len(out.text) == 0 || len(out.text) > maxWrapped:
		return nil, fmt.Errorf("the KMS command %s %s wrote %d bytes; want 1 to %d", k.Command, verb, len(out.text), maxWrapped)
	}
	return out.text, nil
}

// capped keeps the beginning of what is written to it.
type capped struct {
	text  []byte
	limit int
}

func (c *capped) Write(p []byte) (int, error) {
	c.text = append(c.text, p[:min(len(p), c.limit-len(c.text))]...)
	return len(p), nil
}

// toSeal returns the bytes that value keys are derived from, and what they are sealed as.
func (k *Key) toSeal(ctx context.Context) (master, wrapped []byte, err error) {
	if k.kms == nil {
		return k.master, nil, nil
	}
	select {
	case k.cache.sealing <- struct{}{}:
		defer func() { <-k.cache.sealing }()
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
	k.cache.mu.Lock()
	master, wrapped = k.cache.keys[string(k.cache.own)], k.cache.own
	k.cache.mu.Unlock()
	if wrapped != nil {
		return master, wrapped, nil
	}
	data := make([]byte, keySize)
	if _, err := rand.Read(data); err != nil {
		return nil, nil, err
	}
	wrapped, err = k.kms.run(ctx, "seal", data)
	if err != nil {
		return nil, nil, err
	}
	if bytes.Contains(wrapped, data) {
		return nil, nil, fmt.Errorf("the KMS command %s seal wrote the data key itself", k.kms.Command)
	}
	// Before anything relies on it: does it come back?
	back, err := k.kms.run(ctx, "open", wrapped)
	if err != nil {
		return nil, nil, err
	}
	if !slices.Equal(back, data) {
		return nil, nil, fmt.Errorf("the KMS command %s does not open what it sealed", k.kms.Command)
	}
	k.cache.mu.Lock()
	defer k.cache.mu.Unlock()
	k.cache.own = wrapped
	k.cache.keys[string(wrapped)] = data
	return data, wrapped, nil
}

func (k *Key) toOpen(ctx context.Context, wrapped []byte) ([]byte, error) {
	if k.kms == nil {
		if len(wrapped) > 0 {
			return nil, fmt.Errorf("%w: it has a data key of a KMS", ErrSealed)
		}
		return k.master, nil
	}
	if len(wrapped) == 0 || len(wrapped) > maxWrapped {
		return nil, fmt.Errorf("%w: its data key has %d bytes", ErrSealed, len(wrapped))
	}
	k.cache.mu.Lock()
	data := k.cache.keys[string(wrapped)]
	k.cache.mu.Unlock()
	if data != nil {
		return data, nil
	}
	// Whoever wants the same data key waits for one run of the program; a run that hangs keeps nobody from another.
	opened := k.cache.open.DoChan(string(wrapped), func() (any, error) {
		data, err := k.kms.run(context.WithoutCancel(ctx), "open", wrapped)
		if err != nil {
			return nil, err
		}
		if len(data) != keySize {
			return nil, fmt.Errorf("the KMS command %s open wrote %d bytes; want %d", k.kms.Command, len(data), keySize)
		}
		k.cache.mu.Lock()
		defer k.cache.mu.Unlock()
		k.cache.keys[string(wrapped)] = data
		return data, nil
	})
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case r := <-opened:
		if r.Err != nil {
			return nil, r.Err
		}
		return r.Val.([]byte), nil
	}
}
