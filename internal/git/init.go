package git

import (
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// Layout says what Init writes.
type Layout struct {
	// Head is what HEAD holds: "ref: refs/heads/main" or an object id.
	Head string
	// Format is "sha1" or "sha256"; empty means sha1.
	Format string
	// Bare repositories have no work tree.
	Bare bool
	// Config is added to the configuration as text; it begins in the section core.
	Config string
	// Fixed repositories are never written by git, and have only what it looks for: elsewhere it makes the rest when it needs it.
	Fixed bool
	// Alternates are object directories to borrow from, one per line of objects/info/alternates.
	Alternates []string
}

// Init writes an empty git directory into root, without running git: no template, no hooks, nothing of a user's
// configuration. Own is called with each file and directory that it made.
func Init(root *os.Root, l Layout, own func(name string) error) error {
	var config strings.Builder
	version := 0
	if l.Format == "sha256" {
		version = 1
	}
	fmt.Fprintf(&config, "[core]\n\trepositoryformatversion = %d\n\tfilemode = true\n\tbare = %t\n", version, l.Bare)
	if !l.Bare {
		config.WriteString("\tlogallrefupdates = true\n")
	}
	config.WriteString(l.Config)
	if version == 1 {
		config.WriteString("[extensions]\n\tobjectformat = sha256\n")
	}

	dirs := []string{"objects", "refs"}
	files := []struct{ name, text string }{
		{"config", config.String()},
		{"HEAD", l.Head + "\n"},
	}
	if !l.Fixed {
		dirs = append(dirs, "objects/pack", "refs/heads", "refs/tags", "info")
		files = append(files, struct{ name, text string }{"info/exclude", ""})
	}
	if !l.Fixed || len(l.Alternates) > 0 {
		dirs = append(dirs, "objects/info")
	}
	if len(l.Alternates) > 0 {
		files = append(files, struct{ name, text string }{"objects/info/alternates", strings.Join(l.Alternates, "\n") + "\n"})
	}
	for _, d := range dirs {
		if err := root.Mkdir(d, 0o755); err != nil && !os.IsExist(err) {
			return err
		}
		if err := own(d); err != nil {
			return err
		}
	}
	for _, f := range files {
		if err := writeFile(root, f.name, f.text); err != nil {
			return err
		}
		if err := own(f.name); err != nil {
			return err
		}
	}
	return nil
}

func writeFile(root *os.Root, name, text string) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, fs.FileMode(0o644))
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// Unowned is an own function for Init that changes nothing.
func Unowned(string) error { return nil }
