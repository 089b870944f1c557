package drivertest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
)

var mountCases = []testCase{
	{name: "root-private", sentence: "a sandbox writes to an overlay of its own; the root and other sandboxes do not see it", commands: true, run: testRootPrivate},
	{name: "root-binds", sentence: "binds show in the root as they are on the host, in order, and Hide covers what was there", commands: true, run: testRootBinds},
	{name: "mount-read-only", sentence: "a mount that is not writable refuses writes, whoever asks", commands: true, run: testMountReadOnly},
	{name: "mount-durable", sentence: "writes to a writable mount are on the host when they return", commands: true, run: testMountDurable},
	{name: "mount-survives-kill", sentence: "a crash of the sandbox loses nothing that a write had returned for", commands: true, processes: true, run: testMountSurvivesKill},
	{name: "mount-sync", sentence: "Sync brings what was written into the directories and leaves there what only the host changed; a missing sandbox gives ErrNotFound", commands: true, optional: syncs, run: testMountSync},
	{name: "mount-live", sentence: "what the host changes in a mount shows in the sandbox", commands: true, run: testMountLive},
	{name: "mount-order", sentence: "mounts are made in order, one inside another too", commands: true, run: testMountOrder},
	{name: "mount-pinned", sentence: "what was opened is mounted, whatever the path names by then (A14)", commands: true, run: testMountPinned},
	{name: "owner-base", sentence: "Owner.IDBase maps 65536 ids on disk one to one", commands: true, run: testOwnerBase},
	{name: "owner-user", sentence: "Owner.User maps one host user to the sandbox's user and everyone else to nobody", commands: true, run: testOwnerUser},
	{name: "set-user-id", sentence: "a set-uid file made inside belongs to no user of the host", commands: true, run: testSetUserID},
}

// diskOwner is how a workspace's ids lie on disk.
var diskOwner = driver.Owner{IDBase: driver.DiskIDBase}

// chown gives a file to an id of a sandbox.
func chown(t testing.TB, path string, id int) {
	t.Helper()
	if err := os.Lchown(path, driver.DiskIDBase+id, driver.DiskIDBase+id); err != nil {
		t.Fatal(err)
	}
}

// workDir returns a directory that the sandbox's user owns.
func workDir(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "work")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	chown(t, dir, driver.SandboxUID)
	return dir
}

func writeFile(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// sync makes the mounts' directories what the sandbox sees, where its driver says that it works on copies.
func (c *ctx) sync(id warren.SandboxID) {
	c.t.Helper()
	if s, ok := driver.As[driver.Syncer](c.d); ok && s.Copies(c) {
		if err := s.Sync(c, id); err != nil {
			c.t.Fatalf("Sync(%s): %v", id, err)
		}
	}
}

// hostFile wants a file on the host.
func hostFile(t testing.TB, path, want string) {
	t.Helper()
	if text, err := os.ReadFile(path); err != nil || string(text) != want {
		t.Errorf("%s on the host: %q, %v; want %q", filepath.Base(path), text, err, want)
	}
}

// succeeds runs a line of sh as a user.
func (g *Guest) succeeds(c *ctx, user, line string) string {
	g.t.Helper()
	r := g.Shell(c, user, line)
	if r.Code != 0 {
		g.t.Errorf("%s: %q: %s %s", user, line, r.Status, r.Stderr)
	}
	return strings.TrimSuffix(r.Stdout, "\n")
}

// fails runs a line of sh that must not work.
func (g *Guest) fails(c *ctx, user, line string) {
	g.t.Helper()
	if r := g.Shell(c, user, line); r.Code == 0 {
		g.t.Errorf("%s: %q worked: %s", user, line, r.Stdout)
	}
}

func testRootPrivate(t *testing.T, c *ctx) {
	first, second := c.create(), c.create()
	g, other := c.guest(first), c.guest(second)
	g.succeeds(c, "root", "echo changed > /etc/hostname && echo new > /etc/new && mkdir -p /usr/local/x && echo new > /usr/local/x/new && rm /etc/passwd- /etc/shells 2>/dev/null; ln -sf /bin/false /usr/bin/env")
	g.succeeds(c, "root", "test -e /etc/new && test -e /usr/local/x/new")
	other.fails(c, "root", "test -e /etc/new || test -e /usr/local/x/new")
	other.succeeds(c, "root", "env true")
	// Also one that boots afterwards sees the image as it was (A19).
	c.guest(c.create()).succeeds(c, "root", "env true && ! test -e /etc/new")
	for _, l := range c.h.Spec(t, first).Root.Layers {
		if _, err := os.Lstat(filepath.Join(l.Dir, "etc/new")); err == nil {
			t.Error("the layer on the host has the sandbox's file")
		}
	}
}

func testRootBinds(t *testing.T, c *ctx) {
	dir := t.TempDir()
	for _, sub := range []string{"a", "a/hidden", "b"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	writeFile(t, filepath.Join(dir, "a/file"), "of a")
	writeFile(t, filepath.Join(dir, "a/hidden/secret"), "secret")
	writeFile(t, filepath.Join(dir, "a/secret"), "secret")
	writeFile(t, filepath.Join(dir, "b/file"), "of b")
	id := c.create(func(s *driver.Spec) {
		s.Root.Binds = append(append([]driver.Bind{}, s.Root.Binds...),
			driver.Bind{Source: filepath.Join(dir, "a"), Target: "/mnt"},
			driver.Bind{Target: "/mnt/hidden", Hide: true},
			driver.Bind{Target: "/mnt/secret", Hide: true},
			driver.Bind{Source: filepath.Join(dir, "b/file"), Target: "/mnt/file"},
		)
	})
	g := c.guest(id)
	if got := g.succeeds(c, "root", "cat /mnt/file"); got != "of b" {
		t.Errorf("the later bind does not hide the earlier: %q", got)
	}
	if got := g.succeeds(c, "root", "ls -A /mnt/hidden; cat /mnt/secret"); got != "" {
		t.Errorf("hidden names show: %q", got)
	}
	// Writes go to the overlay or are refused; the host keeps what it has.
	g.Shell(c, "root", "echo x > /mnt/file; echo x > /mnt/new; rm -rf /mnt/hidden /mnt/secret")
	hostFile(t, filepath.Join(dir, "b/file"), "of b")
	hostFile(t, filepath.Join(dir, "a/secret"), "secret")
	hostFile(t, filepath.Join(dir, "a/hidden/secret"), "secret")
	if _, err := os.Lstat(filepath.Join(dir, "a/new")); err == nil {
		t.Error("a file made below a bind is on the host")
	}
}

func testMountReadOnly(t *testing.T, c *ctx) {
	dir := workDir(t)
	file := filepath.Join(dir, "file")
	writeFile(t, file, "original")
	chown(t, file, driver.SandboxUID)
	g := c.guest(c.create(func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, dir, "/mnt/ro", false, diskOwner))
	}))
	if got := g.succeeds(c, "user", "cat /mnt/ro/file"); got != "original" {
		t.Errorf("read %q", got)
	}
	for _, user := range []string{"user", "root"} {
		for _, line := range []string{
			"echo x > /mnt/ro/file", "echo x >> /mnt/ro/file", "echo x > /mnt/ro/new", "rm /mnt/ro/file", "mkdir /mnt/ro/d", "chmod 777 /mnt/ro/file",
			"mv /mnt/ro/file /mnt/ro/moved", "ln -s x /mnt/ro/link", "touch /mnt/ro/file", "truncate -s 0 /mnt/ro/file", "chown 0 /mnt/ro/file",
		} {
			g.fails(c, user, line)
		}
	}
	// A new mount of the same thing gives root in the sandbox nothing either.
	g.Shell(c, "root", "mount -o remount,rw /mnt/ro; mkdir -p /mnt/rw; mount --bind /mnt/ro /mnt/rw; mount -o remount,rw,bind /mnt/rw; echo x > /mnt/rw/file; echo x > /mnt/rw/new; echo x > /mnt/ro/file; echo x > /mnt/ro/new")
	hostFile(t, file, "original")
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("the directory on the host has %v, %v", entries, err)
	}
}

func testMountDurable(t *testing.T, c *ctx) {
	dir := workDir(t)
	g := c.guest(c.create(func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, dir, "/mnt/rw", true, diskOwner))
	}))
	for i := range 20 {
		text := fmt.Sprintf("write %d", i)
		// No sync and no close: the shell keeps the file open while we look.
		p := g.start(c, Command{User: "user", Args: []string{"/bin/sh", "-c", fmt.Sprintf("exec 3>/mnt/rw/f%d; printf %%s '%s' >&3; echo written; sleep 100", i, text)}})
		if line, err := p.line(); line != "written" {
			t.Fatalf("the writer said %q, %v", line, err)
		}
		hostFile(t, filepath.Join(dir, fmt.Sprintf("f%d", i)), text)
		p.cancel()
	}
	g.succeeds(c, "user", "mkdir /mnt/rw/d && mv /mnt/rw/f0 /mnt/rw/d/moved && rm /mnt/rw/f1 && ln -s d/moved /mnt/rw/link && chmod 700 /mnt/rw/d && truncate -s 3 /mnt/rw/f2")
	hostFile(t, filepath.Join(dir, "d/moved"), "write 0")
	hostFile(t, filepath.Join(dir, "f2"), "wri")
	if _, err := os.Lstat(filepath.Join(dir, "f1")); err == nil {
		t.Error("a removed file is still on the host")
	}
	if target, err := os.Readlink(filepath.Join(dir, "link")); target != "d/moved" {
		t.Errorf("link: %q, %v", target, err)
	}
	if fi, err := os.Stat(filepath.Join(dir, "d")); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("mode of d: %v, %v", fi, err)
	}
	// Memory that is shared with a file is the file.
	p := g.start(c, Command{User: "user", Args: []string{"/bin/sh", "-c", "dd if=/dev/zero of=/mnt/rw/big bs=1M count=8 2>/dev/null; echo written; sleep 100"}})
	if line, err := p.line(); line != "written" {
		t.Fatalf("the writer said %q, %v", line, err)
	}
	if fi, err := os.Stat(filepath.Join(dir, "big")); err != nil || fi.Size() != 8<<20 {
		t.Errorf("8 MiB written: %v, %v", fi, err)
	}
}

func testMountSurvivesKill(t *testing.T, c *ctx) {
	dir := workDir(t)
	id := c.create(func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, dir, "/mnt/rw", true, diskOwner))
	})
	g := c.guest(id)
	p := g.start(c, Command{User: "user", Args: []string{"/bin/sh", "-c", "i=0; while :; do echo line $i >> /mnt/rw/log; i=$((i+1)); echo $i; done"}})
	last := "0"
	for range 200 {
		line, err := p.line()
		if err != nil {
			t.Fatal(err)
		}
		last = line
	}
	c.kill(id)
	c.sync(id)
	text, err := os.ReadFile(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	// The line before the last that was announced had been written when the announcement was.
	if n := strings.Count(string(text), "\n"); fmt.Sprint(n) < last && len(fmt.Sprint(n)) <= len(last) {
		t.Errorf("%d lines on the host, %s were announced", n, last)
	}
	if strings.ContainsRune(string(text), 0) {
		t.Error("the file has holes")
	}
}

func testMountSync(t *testing.T, c *ctx) {
	s, _ := driver.As[driver.Syncer](c.d)
	if err := s.Sync(c, c.newID()); err != nil && !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("Sync of a missing sandbox: %v, want nil or ErrNotFound", err)
	}
	dir, other := workDir(t), workDir(t)
	for _, name := range []string{"both", "removed", "host"} {
		writeFile(t, filepath.Join(dir, name), "first")
		chown(t, filepath.Join(dir, name), driver.SandboxUID)
	}
	id := c.create(func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, dir, "/mnt/rw", true, diskOwner), openMount(t, other, "/mnt/ro", false, diskOwner))
	})
	g := c.guest(id)
	g.succeeds(c, "user", "cd /mnt/rw && echo -n second > both && rm removed && mkdir -p a/b && echo -n deep > a/b/c && ln a/b/c twin && ln -s both link && chmod 640 both")
	writeFile(t, filepath.Join(dir, "host"), "changed by the host")
	writeFile(t, filepath.Join(dir, "host-new"), "made by the host")
	for range 2 {
		if err := s.Sync(c, id); err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]string{"both": "second", "a/b/c": "deep", "twin": "deep", "link": "second", "host": "changed by the host", "host-new": "made by the host"} {
			hostFile(t, filepath.Join(dir, name), want)
		}
		if _, err := os.Lstat(filepath.Join(dir, "removed")); err == nil {
			t.Error("what the sandbox removed is there")
		}
		if fi, err := os.Stat(filepath.Join(dir, "both")); err != nil || fi.Mode().Perm() != 0o640 {
			t.Errorf("both: %v, %v", fi, err)
		}
		ownedBy(t, filepath.Join(dir, "a/b/c"), driver.DiskIDBase+driver.SandboxUID, driver.DiskIDBase+driver.SandboxUID)
	}
	c.answers(c.d, id) // it runs on
	g.succeeds(c, "user", "rm -r /mnt/rw/a && echo -n third > /mnt/rw/both")
	c.delete(id)
	hostFile(t, filepath.Join(dir, "both"), "third")
	if _, err := os.Lstat(filepath.Join(dir, "a")); err == nil {
		t.Error("what the sandbox removed last is there after Delete")
	}
	if entries, _ := os.ReadDir(other); len(entries) > 0 {
		t.Errorf("the directory that was mounted read-only has %v", entries)
	}
}

func testMountLive(t *testing.T, c *ctx) {
	dir := workDir(t)
	g := c.guest(c.create(func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, dir, "/mnt/rw", true, diskOwner))
	}))
	g.fails(c, "user", "cat /mnt/rw/later")
	file := filepath.Join(dir, "later")
	for _, text := range []string{"first", "second, longer", "3"} {
		writeFile(t, file, text)
		chown(t, file, driver.SandboxUID)
		if got := g.succeeds(c, "user", "cat /mnt/rw/later"); got != text {
			t.Errorf("the host wrote %q, the sandbox reads %q", text, got)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	g.fails(c, "user", "cat /mnt/rw/later")
}

func testMountOrder(t *testing.T, c *ctx) {
	outer, inner := workDir(t), workDir(t)
	if err := os.Mkdir(filepath.Join(outer, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(outer, "sub/file"), "covered")
	writeFile(t, filepath.Join(inner, "file"), "inner")
	id := c.create(func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, outer, "/mnt/outer", true, diskOwner), openMount(t, inner, "/mnt/outer/sub", true, diskOwner))
	})
	g := c.guest(id)
	if got := g.succeeds(c, "root", "cat /mnt/outer/sub/file"); got != "inner" {
		t.Errorf("the inner mount shows %q", got)
	}
	g.succeeds(c, "user", "echo -n new > /mnt/outer/sub/new")
	c.sync(id)
	hostFile(t, filepath.Join(inner, "new"), "new")
}

// testMountPinned swaps the path between a directory and a link to a secret one, before and while sandboxes are made.
func testMountPinned(t *testing.T, c *ctx) {
	base := t.TempDir()
	path, secret, aside := filepath.Join(base, "path"), filepath.Join(base, "secret"), filepath.Join(base, "aside")
	for _, dir := range []string{path, secret} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	writeFile(t, filepath.Join(path, "file"), "mine")
	writeFile(t, filepath.Join(secret, "file"), "secret")

	// A thousand tries of the race itself, which needs no sandbox, are beside the code that opens.
	for round := range 10 {
		spec := c.spec(func(s *driver.Spec) {
			s.Mounts = append(s.Mounts, openMount(t, path, "/mnt/pinned", true, diskOwner))
		})
		swap := func() { os.Rename(path, aside); os.Symlink(secret, path) }
		back := func() { os.Remove(path); os.Rename(aside, path) }
		var wg sync.WaitGroup
		stop := make(chan struct{})
		if round == 0 {
			swap()
		} else {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						swap()
						back()
					}
				}
			})
		}
		err := c.d.Create(c, spec)
		close(stop)
		wg.Wait()
		if err == nil {
			if got := NewGuest(t, c.d, spec.ID).Shell(c, "root", "cat /mnt/pinned/file; echo x > /mnt/pinned/file2").Stdout; got != "mine" {
				t.Errorf("round %d: the sandbox reads %q", round, got)
			}
		} else {
			t.Logf("round %d: refused: %v", round, err)
		}
		if round == 0 {
			back()
		}
		if entries, _ := os.ReadDir(secret); len(entries) != 1 {
			t.Errorf("round %d: the secret directory has %v", round, entries)
		}
		os.Remove(filepath.Join(path, "file2"))
	}
}

func testOwnerBase(t *testing.T, c *ctx) {
	dir := workDir(t)
	for _, id := range []int{0, 1000, 1234, 65534} {
		file := filepath.Join(dir, fmt.Sprint(id))
		writeFile(t, file, "")
		chown(t, file, id)
	}
	box := c.create(func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, dir, "/mnt/rw", true, diskOwner))
	})
	g := c.guest(box)
	for _, id := range []int{0, 1000, 1234, 65534} {
		if got, want := g.succeeds(c, "root", fmt.Sprintf("stat -c %%u:%%g /mnt/rw/%d", id)), fmt.Sprintf("%d:%d", id, id); got != want {
			t.Errorf("the file of id %d shows as %s", id, got)
		}
	}
	g.succeeds(c, "user", "echo > /mnt/rw/by-user; mkdir /mnt/rw/dir-by-user; ln -s x /mnt/rw/link-by-user")
	g.succeeds(c, "root", "echo > /mnt/rw/by-root; echo > /mnt/rw/given; chown 4321:4322 /mnt/rw/given")
	c.sync(box)
	for name, want := range map[string][2]uint32{
		"by-user": {1000, 1000}, "dir-by-user": {1000, 1000}, "link-by-user": {1000, 1000}, "by-root": {0, 0}, "given": {4321, 4322},
	} {
		ownedBy(t, filepath.Join(dir, name), driver.DiskIDBase+want[0], driver.DiskIDBase+want[1])
	}
	// The user may not touch what root has.
	g.fails(c, "user", "echo x > /mnt/rw/by-root")
}

func ownedBy(t testing.TB, path string, uid, gid uint32) {
	t.Helper()
	fi, err := os.Lstat(path)
	if err != nil {
		t.Error(err)
		return
	}
	if st := fi.Sys().(*syscall.Stat_t); st.Uid != uid || st.Gid != gid {
		t.Errorf("%s belongs to %d:%d on the host, want %d:%d", filepath.Base(path), st.Uid, st.Gid, uid, gid)
	}
}

func testOwnerUser(t *testing.T, c *ctx) {
	const uid, gid, stranger = 23456, 23457, 24999
	dir := filepath.Join(t.TempDir(), "users")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, "of-user"), "mine")
	writeFile(t, filepath.Join(dir, "of-stranger"), "theirs")
	writeFile(t, filepath.Join(dir, "of-root"), "root's")
	for name, id := range map[string][2]int{".": {uid, gid}, "of-user": {uid, gid}, "of-stranger": {stranger, stranger}} {
		if err := os.Chown(filepath.Join(dir, name), id[0], id[1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(dir, "of-stranger"), 0o600); err != nil {
		t.Fatal(err)
	}
	id := c.create(func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, dir, "/mnt/mine", true, driver.Owner{User: true, UID: uid, GID: gid}))
	})
	g := c.guest(id)
	for name, want := range map[string]string{"of-user": "1000:1000", "of-stranger": "65534:65534", "of-root": "65534:65534"} {
		if got := g.succeeds(c, "user", "stat -c %u:%g /mnt/mine/"+name); got != want {
			t.Errorf("%s shows as %s, want %s", name, got, want)
		}
	}
	if got := g.succeeds(c, "user", "cat /mnt/mine/of-user"); got != "mine" {
		t.Errorf("read %q", got)
	}
	g.succeeds(c, "user", "echo x > /mnt/mine/new && echo -n more >> /mnt/mine/of-user")
	c.sync(id)
	ownedBy(t, filepath.Join(dir, "new"), uid, gid)
	hostFile(t, filepath.Join(dir, "of-user"), "minemore")
	for _, user := range []string{"user", "root"} {
		g.Shell(c, user, "echo x > /mnt/mine/of-stranger; echo x > /mnt/mine/of-root; chown 1000 /mnt/mine/of-stranger; chmod 777 /mnt/mine/of-root")
	}
	c.sync(id)
	hostFile(t, filepath.Join(dir, "of-stranger"), "theirs")
	hostFile(t, filepath.Join(dir, "of-root"), "root's")
	ownedBy(t, filepath.Join(dir, "of-stranger"), stranger, stranger)
}

func testSetUserID(t *testing.T, c *ctx) {
	dir := workDir(t)
	id := c.create(func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, dir, "/mnt/rw", true, diskOwner))
	})
	g := c.guest(id)
	g.Shell(c, "root", "cp /bin/true /mnt/rw/suid; chown 0:0 /mnt/rw/suid; chmod 6755 /mnt/rw/suid; mknod /mnt/rw/dev b 254 0; mknod /mnt/rw/null c 1 3")
	c.sync(id)
	fi, err := os.Stat(filepath.Join(dir, "suid"))
	if err != nil {
		t.Fatal(err)
	}
	if st := fi.Sys().(*syscall.Stat_t); st.Uid < driver.DiskIDBase {
		t.Errorf("the set-uid file belongs to %d on the host", st.Uid)
	}
	for _, name := range []string{"dev", "null"} {
		if fi, err := os.Lstat(filepath.Join(dir, name)); err == nil && fi.Mode()&os.ModeDevice != 0 && fi.Sys().(*syscall.Stat_t).Rdev != 0 {
			t.Errorf("the sandbox made device %s on the host", name)
		}
	}
}
