package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"golang.org/x/sys/unix"
)

// userName is the account that works in a sandbox. The guest looks it up by this name.
const userName = "user"

// adapt makes the layer of ours that goes on top of an image, and returns its DiffID. It holds
//
//   - the mount points, as real directories whatever the image has under these names: a symbolic link at /workspace would
//     otherwise decide where the workspace is mounted;
//   - the account "user" with uid and gid 1000. When the image has that uid under another name, such as node or ubuntu, both
//     names stand for it: "user" comes first, so that it is the name that programs show, and the other keeps its home. An account
//     "user" with another uid is replaced, for files in workspaces belong to 1000;
//   - a rule that lets user become root without a password, when sudo is there;
//   - /etc/hosts and /etc/resolv.conf where the image has none.
//
// The layer is a deterministic tar, so that images with equal needs share it.
func (s *Store) adapt(ctx context.Context, layers []string) (string, error) {
	v, err := s.openView(layers)
	if err != nil {
		return "", err
	}
	defer v.close()
	b, err := (&adapter{view: v}).run()
	if err != nil {
		return "", fmt.Errorf("adapt the image for sandboxes: %w", err)
	}
	sum := sha256.Sum256(b)
	top := hex.EncodeToString(sum[:])
	return top, s.ensureLayer(ctx, top, func(context.Context) (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(b)), nil
	})
}

type adapter struct {
	view *view
	buf  bytes.Buffer
	tar  *tar.Writer
	made map[string]bool
}

// epoch is the time of everything in the layer.
var epoch = time.Unix(0, 0)

func (a *adapter) run() ([]byte, error) {
	a.tar, a.made = tar.NewWriter(&a.buf), map[string]bool{}
	for _, step := range []func() error{a.mountPoints, a.accounts, a.sudo, a.network} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	if err := a.tar.Close(); err != nil {
		return nil, err
	}
	return a.buf.Bytes(), nil
}

// mountPoints makes what is mounted over, and what every program counts on.
func (a *adapter) mountPoints() error {
	const none = -1 // the mode is the image's, or 0755
	for _, d := range []struct {
		name string
		mode int64
		id   int
	}{
		{"dev", none, 0}, {"home", none, 0}, {"home/user", 0o755, driver.SandboxUID}, {"proc", none, 0}, {"root", none, 0},
		{"run", none, 0}, {"sys", none, 0}, {"tmp", 0o1777, 0}, {"var", none, 0}, {"var/tmp", 0o1777, 0}, {"workspace", 0o755, driver.SandboxUID},
		{".warren", 0o755, 0}, {".warren/repo", 0o755, 0}, {".warren/repo/objects", 0o755, 0},
	} {
		if d.mode == none {
			if err := a.keepDir(d.name); err != nil {
				return err
			}
			continue
		}
		if err := a.dir(d.name, d.mode, d.id, d.id); err != nil {
			return err
		}
	}
	// Nothing that the image has below /.warren shows.
	if err := a.write(&tar.Header{Name: ".warren/.wh..wh..opq", Typeflag: tar.TypeReg, Mode: 0o600}, nil); err != nil {
		return err
	}
	return a.write(&tar.Header{Name: ".warren/guest", Typeflag: tar.TypeReg, Mode: 0o755}, nil)
}

// keepDir makes a directory with the owner and mode that it has in the image.
func (a *adapter) keepDir(name string) error {
	n, err := a.view.lookup(name, false)
	if errors.Is(err, fs.ErrNotExist) || err == nil && n.kind() != unix.S_IFDIR {
		mode := int64(0o755)
		if name == "root" {
			mode = 0o700
		}
		return a.dir(name, mode, 0, 0)
	}
	if err != nil {
		return err
	}
	uid, gid := a.ids(n)
	return a.dir(name, int64(n.st.Mode&0o7777), uid, gid)
}

// ids are a node's owners as the sandbox sees them.
func (a *adapter) ids(n *node) (uid, gid int) {
	return int(n.st.Uid - a.view.base), int(n.st.Gid - a.view.base)
}

func (a *adapter) dir(name string, mode int64, uid, gid int) error {
	if a.made[name] {
		return nil
	}
	a.made[name] = true
	return a.write(&tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: mode, Uid: uid, Gid: gid}, nil)
}

func (a *adapter) write(h *tar.Header, content []byte) error {
	h.ModTime, h.Format, h.Size = epoch, tar.FormatPAX, int64(len(content))
	if err := a.tar.WriteHeader(h); err != nil {
		return err
	}
	_, err := a.tar.Write(content)
	return err
}

// place writes a file where the image looks for it: in the directory that its links lead to, with the owner and mode of what it
// replaces. New ones get the given mode.
func (a *adapter) place(name string, content []byte, old *node, mode int64) error {
	dir := path.Dir(name)
	n, err := a.view.lookup(dir, true)
	switch {
	case errors.Is(err, fs.ErrNotExist) || err == nil && n.kind() != unix.S_IFDIR:
		// Nothing leads there yet; what is in the way is hidden.
		if dir != "." {
			if up := path.Dir(dir); up != "." {
				if err := a.keepDir(up); err != nil {
					return err
				}
			}
			if err := a.dir(dir, 0o755, 0, 0); err != nil {
				return err
			}
		}
	case err != nil:
		return err
	default:
		dir = n.path
		for _, d := range ancestors(dir) {
			if err := a.keepDir(d); err != nil {
				return err
			}
		}
	}
	h := &tar.Header{Name: path.Join(dir, path.Base(name)), Typeflag: tar.TypeReg, Mode: mode}
	if old != nil {
		h.Mode = int64(old.st.Mode & 0o777)
		h.Uid, h.Gid = a.ids(old)
	}
	return a.write(h, content)
}

// ancestors lists a directory and those above it, from the top.
func ancestors(dir string) []string {
	var out []string
	for ; dir != "." && dir != "/"; dir = path.Dir(dir) {
		out = append(out, dir)
	}
	slices.Reverse(out)
	return out
}

// read returns a file of the image, nil when there is none.
func (a *adapter) read(name string) ([]byte, *node, error) {
	b, n, err := a.view.readFile(name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, warren.ErrInvalid) {
		return nil, nil, nil
	}
	return b, n, err
}

func (a *adapter) accounts() error {
	const id = driver.SandboxUID
	shell := "/bin/sh"
	if ok, err := a.view.exists("bin/bash"); err != nil {
		return err
	} else if ok {
		shell = "/bin/bash"
	}
	passwd, pn, err := a.read("etc/passwd")
	if err != nil {
		return err
	}
	lines := withAccount(passwd, 2, fmt.Sprintf("%s:x:%d:%d::/home/user:%s", userName, id, id, shell))
	if !hasName(lines, "root") {
		lines = slices.Insert(lines, 0, "root:x:0:0:root:/root:"+shell)
	}
	if err := a.place("etc/passwd", join(lines), pn, 0o644); err != nil {
		return err
	}
	group, gn, err := a.read("etc/group")
	if err != nil {
		return err
	}
	lines = withAccount(group, 2, fmt.Sprintf("%s:x:%d:", userName, id))
	if !hasName(lines, "root") {
		lines = slices.Insert(lines, 0, "root:x:0:")
	}
	for i, l := range lines {
		if f := strings.Split(l, ":"); len(f) == 4 && (f[0] == "sudo" || f[0] == "wheel") && !slices.Contains(strings.Split(f[3], ","), userName) {
			lines[i] = strings.TrimSuffix(strings.Join(append(f[:3:3], userName+","+f[3]), ":"), ",")
		}
	}
	if err := a.place("etc/group", join(lines), gn, 0o644); err != nil {
		return err
	}
	shadow, sn, err := a.read("etc/shadow")
	if err != nil || sn == nil {
		return err // without a shadow file, passwd alone decides
	}
	return a.place("etc/shadow", join(withAccount(shadow, -1, userName+":*:19000:0:99999:7:::")), sn, 0o600)
}

// withAccount returns the lines of an account file with one for the sandbox's user, before the first line of the same id (in
// column idColumn, if not negative), and without another line of its name.
func withAccount(content []byte, idColumn int, line string) []string {
	want := strings.Split(line, ":")
	var lines []string
	for l := range strings.Lines(string(content)) {
		l = strings.TrimRight(l, "\r\n")
		if name, _, _ := strings.Cut(l, ":"); l != "" && name != want[0] {
			lines = append(lines, l)
		}
	}
	at := slices.IndexFunc(lines, func(l string) bool {
		f := strings.Split(l, ":")
		return idColumn >= 0 && len(f) > idColumn && f[idColumn] == want[idColumn]
	})
	if at < 0 {
		at = len(lines)
	}
	return slices.Insert(lines, at, line)
}

func hasName(lines []string, name string) bool {
	return slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, name+":") })
}

func join(lines []string) []byte { return []byte(strings.Join(lines, "\n") + "\n") }

// sudo lets the user become root when the image has sudo.
func (a *adapter) sudo() error {
	found := false
	for _, p := range []string{"usr/bin/sudo", "bin/sudo", "usr/local/bin/sudo"} {
		ok, err := a.view.exists(p)
		if err != nil {
			return err
		}
		found = found || ok
	}
	if !found {
		return nil
	}
	rule := userName + " ALL=(ALL:ALL) NOPASSWD: ALL\n"
	sudoers, n, err := a.read("etc/sudoers")
	if err != nil {
		return err
	}
	if n == nil {
		sudoers = []byte("root ALL=(ALL:ALL) ALL\n")
	}
	// At the end of the file itself: the last rule that matches wins, wherever an include stands.
	return a.place("etc/sudoers", append(bytes.TrimRight(sudoers, "\n"), "\n\n"+rule...), n, 0o440)
}

// network writes what the C library reads, where the image has nothing.
func (a *adapter) network() error {
	for _, f := range []struct{ name, text string }{
		{"etc/hosts", "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"},
		{"etc/resolv.conf", "# No name server: this sandbox has no network beyond its loopback.\n"},
	} {
		b, n, err := a.read(f.name)
		if err != nil {
			return err
		}
		if len(bytes.TrimSpace(b)) == 0 {
			if err := a.place(f.name, []byte(f.text), n, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}
