//go:build linux

package dockertest

import (
	"archive/tar"
	"crypto/sha256"
	"debug/elf"
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
	"testing"

	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/image"
	"github.com/warren-sandbox/warren/internal/testenv"
)

// ImageName is the image of [Image] in its store.
const ImageName = "dockertest-small"

// smallVersion is raised when [writeSmall] writes something else.
const smallVersion = 1

// Image returns a small root with a shell, the usual tools, git and curl in it, made once for all tests of a checkout.
func Image(t testing.TB) driver.Root {
	t.Helper()
	root, _ := ImageStore(t)
	return root
}

// ImageStore is [Image] and the directory of its store, which may be copied.
func ImageStore(t testing.TB) (driver.Root, string) {
	t.Helper()
	testenv.NeedsTool(t, "dpkg", "git", "curl", "ps")
	// Of other packages, or other versions of them, another image is made.
	versions, err := exec.Command("dpkg-query", append([]string{"-W"}, smallPackages...)...).Output()
	if len(versions) == 0 {
		t.Fatalf("dpkg-query: %v", err)
	}
	sum := sha256.Sum256(fmt.Appendf(versions, "%d", smallVersion))
	dir := filepath.Join(testenv.Repo(t), ".cache", "images")
	small := filepath.Join(dir, fmt.Sprintf("small-%x", sum[:6]))
	if err := os.MkdirAll(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "small.lock"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	store, err := image.Open(image.Options{Dir: small, IDBase: driver.DiskIDBase})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	im, err := store.Resolve(t.Context(), ImageName)
	if err != nil {
		r, w := io.Pipe()
		go func() { w.CloseWithError(writeSmall(w)) }()
		if im, err = store.Import(t.Context(), ImageName, r, image.ImportOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	return im.Root, small
}

// smallPackages are those whose files the image is made of. Every engine of a test loads it anew, so a whole Debian would take
// most of the time of most tests.
var smallPackages = []string{
	"base-files", "base-passwd", "bash", "bsdutils", "coreutils", "curl", "dash", "debianutils", "diffutils", "findutils", "git", "grep", "gzip",
	"hostname", "libc-bin", "login", "mawk", "mount", "perl-base", "procps", "sed", "tar", "util-linux",
}

// writeSmall writes the image as a tar, of this machine's files: those of the packages, and the libraries that their programs need.
func writeSmall(w io.Writer) error {
	files := []string{"/etc/ssl/certs/ca-certificates.crt"}
	for _, name := range smallPackages {
		out, err := exec.Command("dpkg", "-L", name).Output()
		if err != nil && name != "login" && name != "hostname" {
			return fmt.Errorf("the files of package %s: %w", name, err)
		}
		for path := range strings.Lines(string(out)) {
			if path = strings.TrimSpace(path); wanted(path) {
				files = append(files, path)
			}
		}
	}
	// Alternatives are links that no package has.
	for _, path := range []string{"/bin/sh", "/usr/bin/awk", "/etc/alternatives/awk"} {
		if _, err := os.Lstat(path); err == nil {
			files = append(files, path)
		}
	}
	libraries, err := libraries(files)
	if err != nil {
		return err
	}
	s := &small{tar: tar.NewWriter(w), have: map[string]bool{}, names: map[uint64]string{}}
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		// As on this machine: directories, or links to those below /usr.
		if target, err := os.Readlink("/" + dir); err == nil {
			s.link(dir, target)
		}
	}
	for _, dir := range []string{"dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "usr", "var", "var/lib", "var/log", "var/tmp"} {
		mode := fs.FileMode(0o755)
		if strings.HasSuffix(dir, "tmp") {
			mode = 0o1777
		}
		s.dir(dir, mode)
	}
	s.text("etc/passwd", "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n")
	s.text("etc/group", "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n")
	for _, path := range append(files, libraries...) {
		s.file(path)
	}
	return errors.Join(s.err, s.tar.Close())
}

// wanted leaves out what no test reads, and what is large.
func wanted(path string) bool {
	for _, dir := range []string{
		"/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/", "/usr/share/info/", "/usr/share/bash-completion/", "/usr/share/perl", "/usr/lib/x86_64-linux-gnu/perl",
		"/usr/lib/aarch64-linux-gnu/perl", "/usr/share/lintian/", "/usr/share/i18n/", "/var/lib/", "/usr/share/gitweb/", "/usr/sbin/ldconfig", "/sbin/ldconfig",
	} {
		if strings.HasPrefix(path, dir) {
			return false
		}
	}
	fi, err := os.Lstat(path)
	if err != nil || fi.IsDir() {
		return false
	}
	if path == "/usr/bin/scalar" || path == "/usr/bin/git-shell" {
		return false
	}
	if strings.HasPrefix(path, "/usr/lib/git-core/") && fi.Size() > 100<<10 {
		return strings.HasSuffix(path, "/git-remote-http") || strings.HasSuffix(path, "/git-remote-https")
	}
	return fi.Mode().IsRegular() || fi.Mode()&fs.ModeSymlink != 0
}

// libraries returns what the programs among files are linked with.
func libraries(files []string) ([]string, error) {
	out, err := exec.Command("/sbin/ldconfig", "-p").Output()
	if err != nil {
		return nil, fmt.Errorf("ldconfig -p: %w", err)
	}
	where := map[string]string{}
	for line := range strings.Lines(string(out)) {
		name, path, ok := strings.Cut(line, " => ")
		if name, _, found := strings.Cut(strings.TrimSpace(name), " "); ok && found && where[name] == "" {
			where[name] = strings.TrimSpace(path)
		}
	}
	var found []string
	seen := map[string]bool{}
	for todo := slices.Clone(files); len(todo) > 0; todo = todo[1:] {
		f, err := elf.Open(todo[0])
		if err != nil {
			continue // no program
		}
		needed, err := f.ImportedLibraries()
		if s := f.Section(".interp"); s != nil && err == nil {
			// The loader has a place of its own.
			var text []byte
			if text, err = s.Data(); err == nil {
				loader := strings.TrimRight(string(text), "\x00")
				where[loader] = loader
				needed = append(needed, loader)
			}
		}
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", todo[0], err)
		}
		for _, name := range needed {
			if path := where[name]; path != "" && !seen[path] {
				seen[path] = true
				found, todo = append(found, path), append(todo, path)
			}
		}
	}
	return found, nil
}

// small writes each path once, with its parents before it.
type small struct {
	tar  *tar.Writer
	have map[string]bool
	// names of files that have several, by their inode.
	names map[uint64]string
	err   error
}

func (s *small) add(h tar.Header, text io.Reader) {
	if s.err != nil || s.have[h.Name] {
		return
	}
	if parent := filepath.Dir(h.Name); parent != "." {
		s.dir(parent, 0o755)
	}
	s.have[h.Name] = true
	if s.err == nil {
		s.err = s.tar.WriteHeader(&h)
	}
	if s.err == nil && text != nil {
		_, s.err = io.Copy(s.tar, text)
	}
}

func (s *small) dir(name string, mode fs.FileMode) {
	s.add(tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: int64(mode)}, nil)
}

func (s *small) link(name, target string) {
	s.add(tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, nil)
}

func (s *small) text(name, text string) {
	s.add(tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(text)), Mode: 0o644}, strings.NewReader(text))
}

// file adds a file of this machine below the directory that it truly lies in, and what a link leads to.
func (s *small) file(path string) {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		s.err = errors.Join(s.err, err)
		return
	}
	path = filepath.Join(dir, filepath.Base(path))
	name := strings.TrimPrefix(path, "/")
	if s.err != nil || s.have[name] {
		return
	}
	fi, err := os.Lstat(path)
	if err != nil {
		s.err = err
		return
	}
	if fi.Mode()&fs.ModeSymlink != 0 {
		target, err := os.Readlink(path)
		if err != nil {
			s.err = err
			return
		}
		s.link(name, target)
		if !filepath.IsAbs(target) {
			target = filepath.Join(dir, target)
		}
		if fi, err := os.Stat(target); err == nil && fi.Mode().IsRegular() {
			s.file(target)
		}
		return
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok && st.Nlink > 1 {
		if first := s.names[st.Ino]; first != "" {
			s.add(tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: first}, nil)
			return
		}
		s.names[st.Ino] = name
	}
	f, err := os.Open(path)
	if err != nil {
		s.err = err
		return
	}
	defer f.Close()
	mode := int64(fi.Mode().Perm())
	if fi.Mode()&fs.ModeSetuid != 0 {
		mode |= 0o4000
	}
	s.add(tar.Header{Typeflag: tar.TypeReg, Name: name, Size: fi.Size(), Mode: mode, ModTime: fi.ModTime()}, f)
}
