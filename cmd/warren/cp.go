package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/config"
)

func cpCommand(a *app) *cobra.Command {
	var opts warren.CopyOptions
	cmd := &cobra.Command{
		Use:   "cp SRC DST",
		Short: "Copy files and directories into and out of a sandbox",
		Long: `Copy a file or a directory with all in it. A name in a sandbox is ID:PATH, relative to /workspace unless it begins with a slash. Into
a directory that exists the copy keeps its name; SRC/. stands for what is in a directory. - is standard input or output, for a
single file. Directories need tar in the sandbox; what in them leads outside is left out.`,
		Example: `  warren cp notes.txt fix:
  warren cp fix:/workspace/report.html .
  warren cp ./assets fix:/workspace/assets
  warren cp fix:out.json - | jq .`,
		Args: exactly("SRC", "DST"),
		RunE: func(cmd *cobra.Command, args []string) error {
			from, to := splitPlace(args[0]), splitPlace(args[1])
			if (from.id == "") == (to.id == "") {
				return &usageError{errors.New("one of SRC and DST has to be in a sandbox, as ID:PATH"), cmd.CommandPath()}
			}
			opts.Warn = func(message string) { a.notice("%s", escape(message)) }
			if !a.json {
				opts.Progress = func(done, total int64) {
					text := config.Size(done).String()
					if total == 0 {
						done = 0 // nothing that a percentage could be of
					}
					a.progress.show("copy", text, done, total)
				}
			}
			ctx := cmd.Context()
			c, err := a.client(ctx)
			if err != nil {
				return err
			}
			defer c.Close()
			var n *warren.Copied
			switch {
			case from.path == "-" && from.id == "":
				return a.uploadInput(ctx, c.Ref(to.id), to.path, opts.User)
			case to.path == "-" && to.id == "":
				return a.printFile(ctx, c.Ref(from.id), from.path, opts.User)
			case to.id != "":
				n, err = c.Ref(to.id).CopyTo(ctx, from.path, to.path, opts)
			default:
				n, err = c.Ref(from.id).CopyFrom(ctx, from.path, to.path, opts)
			}
			a.progress.clear()
			if err == nil && a.json {
				err = a.printJSON(n)
			}
			return err
		},
	}
	cmd.Flags().StringVarP(&opts.User, "user", "u", "", "user in the sandbox who reads or owns the files")
	return cmd
}

// place is a path here, or in a sandbox when id is set.
type place struct{ id, path string }

func splitPlace(s string) place {
	id, rest, ok := strings.Cut(s, ":")
	// C:\x is a path of Windows, and a slash or a dot before the colon makes it a path anywhere.
	if !ok || id == "" || strings.ContainsAny(id, `/\.`) || len(id) == 1 && strings.HasPrefix(rest, `\`) {
		return place{path: s}
	}
	if rest == "" {
		rest = "/workspace"
	}
	return place{id: id, path: rest}
}

// fsName is the name that a path in a sandbox has in its files.
func fsName(p string) string {
	if !path.IsAbs(p) {
		p = path.Join("/workspace", p)
	}
	if p = strings.TrimPrefix(path.Clean(p), "/"); p == "" {
		return "."
	}
	return p
}

func (a *app) uploadInput(ctx context.Context, sb *warren.Sandbox, dst, user string) error {
	w, err := sb.FS().WithContext(ctx).WithUser(user).Create(fsName(dst))
	if err != nil {
		return err
	}
	_, err = io.Copy(w, a.in)
	if e := w.Close(); err == nil {
		err = e
	}
	return err
}

func (a *app) printFile(ctx context.Context, sb *warren.Sandbox, src, user string) error {
	f, err := sb.FS().WithContext(ctx).WithUser(user).Open(fsName(src))
	if err != nil {
		return err
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.IsDir() {
		return fmt.Errorf("%s: %w: it is a directory; only a file goes to standard output", filepath.ToSlash(src), warren.ErrInvalid)
	}
	_, err = io.Copy(fileOutput(a.out), f)
	return err
}
