package drivertest

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/internal/image/tree"
	"github.com/warren-sandbox/warren/internal/image/unpack"
)

var rootCases = []testCase{
	{name: "root-save", sentence: "SaveRoot writes a layer that, put on the base, gives the same tree; mounts are left out", commands: true, optional: saving, run: testRootSave},
	{name: "root-save-again", sentence: "a sandbox on a saved layer can be saved again, and holds what both hold", commands: true, optional: saving, run: testRootSaveAgain},
	{name: "root-save-frozen", sentence: "SaveRoot works on a frozen sandbox, which stays so, and leaves a running one running", optional: saving, run: testRootSaveFrozen},
	{name: "root-save-refuses", sentence: "a missing sandbox gives ErrNotFound, one that has died ErrState, and a writer's error is returned", optional: saving, run: testRootSaveRefuses},
}

func (c *ctx) saver() driver.RootSaver {
	s, _ := driver.As[driver.RootSaver](c.d)
	return s
}

// saveRoot returns the root overlay of a sandbox and the names in it.
func (c *ctx) saveRoot(id warren.SandboxID) (layer []byte, names []string) {
	c.t.Helper()
	var b bytes.Buffer
	if err := c.saver().SaveRoot(c, id, &b); err != nil {
		c.t.Fatalf("SaveRoot(%s): %v", id, err)
	}
	for r := tar.NewReader(bytes.NewReader(b.Bytes())); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return b.Bytes(), names
		}
		if err != nil {
			c.t.Fatalf("the layer is no tar: %v", err)
		}
		names = append(names, strings.Trim(strings.TrimPrefix(h.Name, "."), "/"))
	}
}

// apply unpacks a layer as an image store does.
func (c *ctx) apply(layer []byte) driver.Layer {
	c.t.Helper()
	dir := c.layerDir()
	t, err := tree.Open(dir)
	if err != nil {
		c.t.Fatal(err)
	}
	defer t.Close()
	if _, err := unpack.Tar(c, t, bytes.NewReader(layer), unpack.Options{IDBase: driver.DiskIDBase}); err != nil {
		c.t.Fatalf("unpack the layer: %v", err)
	}
	return driver.Layer{Dir: dir, IDBase: driver.DiskIDBase}
}

// layerDir is a directory for a layer, on a path that ids without any right can pass.
func (c *ctx) layerDir() string {
	c.t.Helper()
	dir := filepath.Join(c.t.TempDir(), "layer")
	if err := os.Mkdir(dir, 0o755); err != nil {
		c.t.Fatal(err)
	}
	chown(c.t, dir, 0)
	return dir
}

// baseLayer is what the case changes: a directory in the root with one of each kind.
func (c *ctx) baseLayer() driver.Layer {
	c.t.Helper()
	dir := c.layerDir()
	for _, sub := range []string{"base", "base/kept", "base/gone", "base/gone/deep", "base/replaced", "base/replaced/old", "base/to-file", "base/mode", "base/empty"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			c.t.Fatal(err)
		}
	}
	for _, name := range []string{"kept/file", "gone/deep/file", "replaced/old/file", "replaced/file", "to-file/file", "mode/file", "changed", "removed", "to-dir", "owner", "grown", "moved", "linked"} {
		writeFile(c.t, filepath.Join(dir, "base", name), "base "+name+"\n")
	}
	for link, target := range map[string]string{"link": "changed", "link-gone": "removed", "link-turned": "kept"} {
		if err := os.Symlink(target, filepath.Join(dir, "base", link)); err != nil {
			c.t.Fatal(err)
		}
	}
	if err := os.Link(filepath.Join(dir, "base/linked"), filepath.Join(dir, "base/linked-2")); err != nil {
		c.t.Fatal(err)
	}
	if err := filepath.WalkDir(filepath.Join(dir, "base"), func(p string, _ os.DirEntry, err error) error {
		if err == nil {
			chown(c.t, p, driver.SandboxUID)
		}
		return err
	}); err != nil {
		c.t.Fatal(err)
	}
	return driver.Layer{Dir: dir, IDBase: driver.DiskIDBase}
}

// rootChanges is what the sandbox does to its root: whatever can be done to a name.
const rootChanges = `set -e
cd /base
echo changed > changed; rm removed; echo more >> grown
mkdir added added/deep; echo text > added/deep/file; printf '' > added/empty; mkdir added/none; chmod 700 added/none
rm -r gone
rm -r replaced; mkdir replaced; echo new > replaced/new
rm -r to-file; echo now a file > to-file
rm to-dir; mkdir to-dir; echo in > to-dir/file
rmdir empty
chmod 751 mode; chmod 640 mode/file; chmod 4755 changed
chown 1234:4321 owner; chown 0:0 added/deep
ln -s ../changed added/link; ln -s /nowhere added/dangling; rm link-gone; ln -sfn gone link-turned
echo first > added/one; ln added/one added/two
mv moved added/moved
echo odd > 'added/a name with
a line'; echo dash > added/-dash; echo wide > added/ü
head -c 3000000 /dev/zero | tr '\0' x > added/big
long=added; for i in 1 2 3 4 5 6 7 8; do long=$long/directory-with-a-long-name-$i; done; mkdir -p $long; echo deep > $long/file
`

// rootListing prints all that a layer has to keep of the directory, and some of the rest.
const rootListing = `cd /base && find . -printf '%p|%y|%m|%U:%G|%l|%n\n' | sed 's/|[0-9]*$/&/; /|d|/s/|[0-9]*$//' | LC_ALL=C sort; find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum; ls /mnt; test added/one -ef added/two && echo linked`

func (c *ctx) onLayers(layers ...driver.Layer) func(*driver.Spec) {
	return func(s *driver.Spec) {
		s.Root.Layers = append(append([]driver.Layer{}, s.Root.Layers...), layers...)
	}
}

func testRootSave(t *testing.T, c *ctx) {
	base := c.baseLayer()
	work := workDir(t)
	writeFile(t, filepath.Join(work, "of-the-mount"), "")
	id := c.create(c.onLayers(base), func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, work, "/mnt/rw", true, diskOwner))
	})
	g := c.guest(id)
	g.succeeds(c, "root", rootChanges)
	g.succeeds(c, "root", "echo x > /mnt/rw/by-root; setfattr -n user.note -v kept /base/changed 2>/dev/null || true")
	want := g.succeeds(c, "root", rootListing)
	layer, names := c.saveRoot(id)
	for _, n := range names {
		if strings.HasPrefix(n, "mnt/rw/") || n == "mnt/rw" || strings.HasPrefix(n, ".warren") || strings.HasPrefix(n, "proc/") || strings.HasPrefix(n, "sys/") || strings.HasPrefix(n, "base/kept") {
			t.Errorf("the layer has %s", n)
		}
	}
	if got := g.succeeds(c, "root", rootListing); got != want {
		t.Errorf("SaveRoot changed the sandbox: %s", diff(want, got))
	}
	again := c.guest(c.create(c.onLayers(base, c.apply(layer)), func(s *driver.Spec) {
		s.Mounts = append(s.Mounts, openMount(t, work, "/mnt/rw", true, diskOwner))
	}))
	if got := again.succeeds(c, "root", rootListing); got != want {
		t.Errorf("the base with the layer differs (- the sandbox, + the layer): %s", diff(want, got))
	}
}

// diff names the lines of two listings that only one has.
func diff(a, b string) string {
	var out strings.Builder
	only := func(mark string, these, those string) {
		has := map[string]bool{}
		for l := range strings.SplitSeq(those, "\n") {
			has[l] = true
		}
		for l := range strings.SplitSeq(these, "\n") {
			if !has[l] {
				out.WriteString("\n" + mark + l)
			}
		}
	}
	only("- ", a, b)
	only("+ ", b, a)
	return out.String()
}

func testRootSaveAgain(t *testing.T, c *ctx) {
	layers := []driver.Layer{c.baseLayer()}
	want := ""
	for _, change := range []string{"echo one > /base/one; rm -r /base/gone; rm /base/removed", "echo two > /base/two; rm /base/one; mkdir /base/gone; echo back > /base/removed", "true"} {
		id := c.create(c.onLayers(layers...))
		g := c.guest(id)
		if got := g.succeeds(c, "root", "cd /base; find . -type f | LC_ALL=C sort | xargs head"); want != "" && got != want {
			t.Errorf("on the saved layers: %s", diff(want, got))
		}
		g.succeeds(c, "root", change)
		want = g.succeeds(c, "root", "cd /base; find . -type f | LC_ALL=C sort | xargs head")
		layer, _ := c.saveRoot(id)
		layers = append(layers, c.apply(layer))
	}
}

func testRootSaveFrozen(t *testing.T, c *ctx) {
	id := c.create()
	c.answers(c.d, id)
	if c.h.Commands {
		c.guest(id).succeeds(c, "root", "echo text > /var/tmp/of-the-case")
	}
	saved := func() {
		t.Helper()
		_, names := c.saveRoot(id)
		if found := strings.Contains("\n"+strings.Join(names, "\n")+"\n", "\nvar/tmp/of-the-case\n"); found != c.h.Commands {
			t.Errorf("the layer has the file: %v; all of it: %q", found, names)
		}
	}
	saved()
	c.answers(c.d, id)
	f, ok := driver.As[driver.Freezer](c.d)
	if !ok {
		return
	}
	c.freeze(id)
	saved()
	if !c.still(id) {
		t.Error("the guest of a frozen sandbox answers after SaveRoot")
	}
	if err := f.Thaw(c, id); err != nil {
		t.Fatal(err)
	}
	c.answers(c.d, id)
}

// fullWriter takes nothing.
type fullWriter struct{}

func (fullWriter) Write([]byte) (int, error) { return 0, unix.ENOSPC }

func testRootSaveRefuses(t *testing.T, c *ctx) {
	if err := c.saver().SaveRoot(c, c.newID(), io.Discard); !errors.Is(err, warren.ErrNotFound) {
		t.Errorf("SaveRoot of a missing sandbox: %v, want ErrNotFound", err)
	}
	id := c.create()
	c.answers(c.d, id)
	if err := c.saver().SaveRoot(c, id, fullWriter{}); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("SaveRoot to a writer that is full: %v, want its error", err)
	}
	c.answers(c.d, id)
	if c.h.Kill == nil && c.h.Processes == nil {
		return
	}
	c.kill(id)
	if err := c.saver().SaveRoot(c, id, io.Discard); !errors.Is(err, warren.ErrState) {
		t.Errorf("SaveRoot of a dead sandbox: %v, want ErrState", err)
	}
}
