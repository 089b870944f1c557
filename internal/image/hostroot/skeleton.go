package hostroot

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/image/tree"
	"golang.org/x/sys/unix"
)

// skeleton writes the directory that the host's programs are bound into.
type skeleton struct {
	host *tree.Tree
	// fds are the directories that have been made, each open: what is made in one never goes through a link, and needs one
	// call of the kernel and not one for each part of its name.
	fds  map[string]*os.File
	base uint32
	// binds are the names at the top that show as they are on the host.
	binds []string
	// seen are the names of the host whose change makes the skeleton stale.
	seen map[string]stamp
	// stamp looks at a name of the host; it is called before the name is read.
	stamp func(name string) stamp
	// lines describe every entry; the digest is over them, sorted.
	lines   []string
	made    map[string]bool
	copied  int64
	entries int
}

// build writes the skeleton, after tops, into out and returns the digest of its content.
func (s *skeleton) build() (string, error) {
	for _, step := range []func() error{s.dirs, s.accounts, s.etc, s.pam, s.homes, s.copies} {
		if err := step(); err != nil {
			return "", err
		}
	}
	slices.Sort(s.lines)
	sum := sha256.Sum256([]byte(strings.Join(s.lines, "\n")))
	return hex.EncodeToString(sum[:]), nil
}

// topNames are the directories at the top that hold programs and libraries.
var topNames = []string{"usr", "opt", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "libo32"}

// dpkgDir is the list of installed packages: apt and dpkg in a sandbox must know what is in /usr.
const dpkgDir = "var/lib/dpkg"

// tops makes /usr and its companions: a mount point where the host has a directory, the same symbolic link where it has one
// that leads to such a directory (the merged /usr).
func (s *skeleton) tops() error {
	for _, name := range append(slices.Clone(topNames), dpkgDir) {
		s.see(name)
		st, err := s.host.Lstat(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Mode&0o005 == 0o005 {
			s.binds = append(s.binds, name)
			if err := s.dir(name, 0o755, 0, 0); err != nil {
				return err
			}
		}
	}
	for _, name := range topNames {
		target, err := s.host.Readlink(name)
		if err != nil || !s.visible(tree.Target(name, target)) {
			continue
		}
		if err := s.link(name, target); err != nil {
			return err
		}
	}
	return nil
}

// visible says whether an absolute path lies in what the image shows of the host.
func (s *skeleton) visible(abs string) bool {
	rel := strings.TrimPrefix(abs, "/")
	for _, b := range s.binds {
		if rel == b || strings.HasPrefix(rel, b+"/") {
			return true
		}
	}
	top, rest, _ := strings.Cut(rel, "/")
	if slices.Contains(topNames, top) { // a merged directory: /bin/x is /usr/bin/x
		if target, err := s.host.Readlink(top); err == nil {
			return s.visible(path.Join(tree.Target(top, target), rest))
		}
	}
	return false
}

func (s *skeleton) dirs() error {
	for _, d := range []struct {
		name string
		mode fs.FileMode
		uid  uint32
	}{
		{".", 0o755, 0},
		{"etc", 0o755, 0}, {"home", 0o755, 0}, {"home/user", 0o755, driver.SandboxUID}, {"root", 0o700, 0},
		{"proc", 0o555, 0}, {"sys", 0o555, 0}, {"dev", 0o755, 0}, {"run", 0o755, 0}, {"run/lock", 0o1777, 0},
		{"tmp", 0o1777, 0}, {"mnt", 0o755, 0}, {"media", 0o755, 0}, {"srv", 0o755, 0}, {"boot", 0o755, 0},
		{"workspace", 0o755, driver.SandboxUID},
		{".warren", 0o755, 0}, {".warren/repo", 0o755, 0}, {".warren/repo/objects", 0o755, 0},
		{"var", 0o755, 0}, {"var/tmp", 0o1777, 0}, {"var/cache", 0o755, 0}, {"var/cache/apt", 0o755, 0},
		{"var/cache/apt/archives", 0o755, 0}, {"var/cache/apt/archives/partial", 0o700, 0}, {"var/cache/debconf", 0o755, 0},
		{"var/cache/ldconfig", 0o700, 0}, {"var/cache/fontconfig", 0o755, 0}, {"var/cache/man", 0o755, 0},
		{"var/lib", 0o755, 0}, {"var/lib/apt", 0o755, 0}, {"var/lib/apt/lists", 0o755, 0}, {"var/lib/apt/lists/partial", 0o700, 0},
		{"var/lib/misc", 0o755, 0}, {"var/lib/sudo", 0o700, 0}, {"var/lib/systemd", 0o755, 0},
		{"var/log", 0o755, 0}, {"var/log/apt", 0o755, 0}, {"var/mail", 0o2775, 0}, {"var/opt", 0o755, 0}, {"var/local", 0o755, 0},
		{"var/backups", 0o755, 0}, {"var/spool", 0o755, 0}, {"var/www", 0o755, 0},
	} {
		if err := s.dir(d.name, d.mode, d.uid, d.uid); err != nil {
			return err
		}
	}
	for _, l := range [][2]string{{"var/run", "/run"}, {"var/lock", "/run/lock"}, {"var/spool/mail", "../mail"}} {
		if err := s.link(l[0], l[1]); err != nil {
			return err
		}
	}
	return s.file(".warren/guest", "", 0o755)
}

// see notes that the skeleton depends on a name of the host, whether or not it exists.
func (s *skeleton) see(name string) {
	if _, ok := s.seen[name]; !ok {
		s.seen[name] = s.stamp(name)
	}
}

// parent returns the directory that name is to be made in, and makes those above it that are missing.
func (s *skeleton) parent(name string) (fd int, base string, err error) {
	dir := path.Dir(name)
	if s.fds[dir] == nil {
		if s.made[dir] {
			return -1, "", fmt.Errorf("%w: /%s is a link, so nothing can be put below it", warren.ErrInvalid, dir)
		}
		if err := s.dir(dir, 0o755, 0, 0); err != nil {
			return -1, "", err
		}
	}
	return int(s.fds[dir].Fd()), path.Base(name), nil
}

// close closes the directories.
func (s *skeleton) close() {
	for _, f := range s.fds {
		f.Close()
	}
}

func (s *skeleton) note(format string, args ...any) {
	s.lines = append(s.lines, fmt.Sprintf(format, args...))
}

// set gives an open entry its owner, shifted as all of a sandbox's ids on disk are, and its mode.
func (s *skeleton) set(fd int, mode fs.FileMode, uid, gid uint32) error {
	if err := unix.Fchown(fd, int(s.base+uid), int(s.base+gid)); err != nil {
		return err
	}
	return unix.Fchmod(fd, uint32(mode)) // after the owner, whose change drops bits
}

// dir makes a directory; modes here and below are Unix's own bits.
func (s *skeleton) dir(name string, mode fs.FileMode, uid, gid uint32) error {
	if s.made[name] {
		return nil
	}
	if name != "." {
		pfd, base, err := s.parent(name)
		if err != nil {
			return err
		}
		if err := unix.Mkdirat(pfd, base, 0o700); err != nil {
			return err
		}
		fd, err := unix.Openat(pfd, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		s.fds[name] = os.NewFile(uintptr(fd), name)
	}
	s.made[name] = true
	s.note("d %q %o %d %d", name, mode, uid, gid)
	return s.set(int(s.fds[name].Fd()), mode, uid, gid)
}

func (s *skeleton) link(name, target string) error {
	if s.made[name] {
		return nil
	}
	pfd, base, err := s.parent(name)
	if err != nil {
		return err
	}
	s.made[name] = true
	s.note("l %q %q", name, target)
	if err := unix.Symlinkat(target, pfd, base); err != nil {
		return err
	}
	return unix.Fchownat(pfd, base, int(s.base), int(s.base), unix.AT_SYMLINK_NOFOLLOW)
}

func (s *skeleton) file(name, content string, mode fs.FileMode) error {
	return s.fileOf(name, content, mode, 0)
}

func (s *skeleton) fileOf(name, content string, mode fs.FileMode, uid uint32) error {
	if s.made[name] {
		return nil
	}
	pfd, base, err := s.parent(name)
	if err != nil {
		return err
	}
	s.made[name] = true
	s.note("f %q %o %d %x", name, mode, uid, sha256.Sum256([]byte(content)))
	fd, err := unix.Openat(pfd, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.WriteString(content)
	return errors.Join(err, s.set(fd, mode, uid, uid), f.Close())
}

// copies brings in what the list of allowed names names.
func (s *skeleton) copies() error {
	for _, it := range allowed {
		names, err := s.expand(path.Join("etc", it.path))
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := s.copy(name, it.kind); err != nil {
				return err
			}
		}
	}
	return nil
}

// expand resolves the patterns in a name.
func (s *skeleton) expand(pattern string) ([]string, error) {
	names := []string{"."}
	for part := range strings.SplitSeq(pattern, "/") {
		var next []string
		for _, dir := range names {
			if !strings.ContainsAny(part, "*[?") {
				next = append(next, path.Join(dir, part))
				continue
			}
			s.see(dir)
			list, err := s.host.ReadDir(dir)
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
				continue
			}
			if err != nil {
				return nil, err
			}
			for _, e := range list {
				if ok, _ := path.Match(part, e.Name()); ok {
					next = append(next, path.Join(dir, e.Name()))
				}
			}
		}
		slices.Sort(next)
		names = next
	}
	return names, nil
}

// copy brings in one name, and what is below it, as its kind says.
func (s *skeleton) copy(name string, k kind) error {
	st, err := s.host.Lstat(name)
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFLNK {
		s.see(name) // a link never changes, and its directory is seen
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	if err != nil {
		return err
	}
	if s.entries++; s.entries > maxEntries {
		return fmt.Errorf("%w: the host's /%s and its like hold more than %d names, too many for the image host", warren.ErrExhausted, name, maxEntries)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		return s.copyLink(name, k)
	case unix.S_IFDIR:
		if st.Mode&0o005 != 0o005 {
			return nil
		}
		list, err := s.host.ReadDir(name)
		if err != nil {
			return err
		}
		slices.SortFunc(list, func(a, b fs.DirEntry) int { return cmp.Compare(a.Name(), b.Name()) })
		if err := s.dir(name, 0o755, 0, 0); err != nil {
			return err
		}
		for _, e := range list {
			if err := s.copy(path.Join(name, e.Name()), k); err != nil {
				return err
			}
		}
		return nil
	case unix.S_IFREG:
		if k == links {
			return nil
		}
		return s.copyFile(name, name, k)
	}
	return nil
}

// copyLink keeps a symbolic link when it leads to what the image shows, or stays below /etc. Others would show names of the
// host; certificates are worth resolving.
func (s *skeleton) copyLink(name string, k kind) error {
	target, err := s.host.Readlink(name)
	if err != nil {
		return err
	}
	abs := tree.Target(name, target)
	switch {
	case s.visible(abs):
		return s.link(name, target)
	case k == certificates:
		s.see(strings.TrimPrefix(abs, "/"))
		return s.copyFile(name, name, k)
	case strings.HasPrefix(abs, "/etc/"):
		return s.link(name, target)
	}
	return nil
}

// copyFile copies a file that every user of the host may read; others are left out without a word, for that is what the mode
// asks for.
func (s *skeleton) copyFile(name, from string, k kind) error {
	f, st, err := s.host.OpenFile(from)
	if err != nil {
		return nil // a link that dangles, or something that is no file
	}
	f.Close()
	if st.Mode&0o004 == 0 || st.Size > maxFile {
		return nil
	}
	b, err := s.host.ReadFile(from, maxFile)
	if err != nil {
		return err
	}
	if s.copied += int64(len(b)); s.copied > maxCopied {
		return fmt.Errorf("%w: the host's /etc holds more than %d MB of what the image host copies", warren.ErrExhausted, maxCopied>>20)
	}
	if bytes.Contains(b, []byte("PRIVATE KEY")) || (k == certificates && !isCertificates(name, b)) {
		return nil
	}
	mode := fs.FileMode(0o644)
	if st.Mode&0o111 != 0 {
		mode = 0o755
	}
	return s.file(name, string(b), mode)
}

// isCertificates says whether a file holds public certificates and nothing else. Java's own store of trusted certificates
// is told by its place: every Java program of the host reads it, with a password that is public.
func isCertificates(name string, b []byte) bool {
	if path.Base(name) == "cacerts" && path.Base(path.Dir(name)) == "java" {
		return true
	}
	n := 0
	for {
		block, rest := pem.Decode(b)
		if block == nil {
			return n > 0
		}
		switch block.Type {
		case "CERTIFICATE", "TRUSTED CERTIFICATE", "X509 CRL":
			n++
		default:
			return false
		}
		b = rest
	}
}

// account is a line of passwd or group, as far as it is taken from the host.
type account struct {
	name    string
	id, gid uint32
}

// hostAccounts reads the names and ids of the host's system users or groups, those from 1 to 999. People have higher ids.
func (s *skeleton) hostAccounts(file string) []account {
	s.see(file)
	b, err := s.host.ReadFile(file, maxFile)
	if err != nil {
		return nil
	}
	var list []account
	names, ids := map[string]bool{"root": true, "user": true, "nobody": true, "nogroup": true}, map[uint32]bool{}
	for line := range strings.Lines(string(b)) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) < 4 || !accountName.MatchString(f[0]) || names[f[0]] {
			continue
		}
		id, err := strconv.ParseUint(f[2], 10, 32)
		if err != nil || id < 1 || id > 999 || ids[uint32(id)] {
			continue
		}
		a := account{name: f[0], id: uint32(id), gid: nogroup}
		if gid, err := strconv.ParseUint(f[3], 10, 32); err == nil && gid >= 1 && gid <= 999 {
			a.gid = uint32(gid)
		}
		names[a.name], ids[a.id] = true, true
		list = append(list, a)
	}
	slices.SortFunc(list, func(a, b account) int { return cmp.Compare(a.id, b.id) })
	return list
}

const nogroup = 65534
