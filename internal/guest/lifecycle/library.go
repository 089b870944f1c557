package lifecycle

import (
	"embed"
	"io/fs"
	"os"
	"path/filepath"
)

// library holds modules for languages whose programs keep the state of a random generator in their memory. The root of an
// image may be anybody's, so they are not put on the way of a language by themselves: a program, or its image, names
// them, as docs/FORK.md says.
//
//go:embed lib/python/*.py lib/node/*.cjs
var library embed.FS

// WriteLibrary writes the modules below a directory.
func WriteLibrary(dir string) error {
	return fs.WalkDir(library, "lib", func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel("lib", name)
		if err != nil {
			return err
		}
		at := filepath.Join(dir, rel)
		if e.IsDir() {
			return os.MkdirAll(at, 0o755)
		}
		data, err := library.ReadFile(name)
		if err != nil {
			return err
		}
		return os.WriteFile(at, data, 0o644)
	})
}
