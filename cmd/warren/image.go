package main

import (
	"context"
	"fmt"
	"io"
	"iter"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func imageCommand(a *app) *cobra.Command {
	return parent("image", "Root file systems: list, pull, import, build, remove",
		`  warren image ls
  warren image pull debian:12
  docker save app | warren image import app -
  warren image bootstrap tools git python3 nodejs`,
		imageListCommand(a), imagePullCommand(a), imageImportCommand(a), imageBootstrapCommand(a), imageInspectCommand(a), imageRemoveCommand(a))
}

func imageListCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List images",
		Example: `  warren image ls
  warren image ls --json | jq -r .digest`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return list(a, cmd, []string{"NAME", "KIND", "DIGEST", "SIZE", "AGE"}, func(c *warren.Client) iter.Seq2[*warren.Image, error] {
				return c.Images(cmd.Context())
			}, func(img *warren.Image) (string, []string) {
				return img.Name, []string{img.Name, img.Kind, digest(img.Digest), bytesOf(img.Size), ago(img.Created)}
			})
		},
	}
}

// digest cuts a digest to its kind and 12 characters.
func digest(d string) string {
	if len(d) > 19 {
		return d[:19]
	}
	return d
}

// printImage tells about an image that a verb made.
func (a *app) printImage(img *warren.Image) error {
	a.progress.clear()
	if a.json {
		return a.printJSON(img)
	}
	_, err := fmt.Fprintf(a.out, "%s %s\n", escape(img.Name), escape(img.Digest))
	return err
}

func imagePullCommand(a *app) *cobra.Command {
	opts := warren.PullOptions{Progress: a.showProgress}
	cmd := &cobra.Command{
		Use:   "pull REF [flags]",
		Short: "Fetch an OCI image from a registry",
		Long:  "Fetch an OCI image from a registry, with the credentials of the server's Docker configuration. Layers that are there are not fetched again.",
		Example: `  warren image pull debian:12
  warren image pull ghcr.io/org/app@sha256:… --name app
  warren image pull 127.0.0.1:5000/app:1`,
		Args: exactly("REF"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			img, err := c.PullImage(cmd.Context(), args[0], opts)
			if err != nil {
				return err
			}
			return a.printImage(img)
		},
	}
	cmd.Flags().StringVar(&opts.Name, "name", "", "name to store it under (default the reference)")
	cmd.Flags().StringVar(&opts.Platform, "platform", "", "platform, such as linux/amd64 (default the server's)")
	cmd.Flags().BoolVar(&opts.Insecure, "insecure", false, "speak plain HTTP to the registry")
	return cmd
}

func imageImportCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "import NAME FILE",
		Short: "Store a tar of a root file system, of an OCI layout or of docker save",
		Long:  "Store a tar of a root file system, of an OCI layout or of docker save, compressed or not. FILE - reads standard input.",
		Example: `  warren image import rootfs rootfs.tar.gz
  docker save app:1 | warren image import app -`,
		Args: exactly("NAME", "FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			in, total := a.in, int64(0)
			if args[1] != "-" {
				f, err := os.Open(args[1])
				if err != nil {
					return err
				}
				defer f.Close()
				if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
					total = info.Size()
				}
				in = f
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			img, err := c.ImportImage(cmd.Context(), args[0], &countingReader{r: in, tell: func(n int64) {
				a.progress.show("import", "", n, total)
			}})
			if err != nil {
				return err
			}
			return a.printImage(img)
		},
	}
}

// countingReader tells how much was read.
type countingReader struct {
	r    io.Reader
	n    int64
	tell func(int64)
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	c.tell(c.n)
	return n, err
}

func imageBootstrapCommand(a *app) *cobra.Command {
	opts := warren.BootstrapOptions{Distribution: "debian", Progress: a.showProgress}
	cmd := &cobra.Command{
		Use:   "bootstrap NAME [PACKAGE...] [flags]",
		Short: "Build a Debian root file system from packages",
		Long:  "Build a minimal Debian root file system with these packages besides, on the server's host, which needs mmdebstrap.",
		Example: `  warren image bootstrap base
  warren image bootstrap tools git python3 nodejs npm --release bookworm
  warren run --image tools -- python3 --version`,
		Args: atLeastOne("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			opts.Name, opts.Packages = args[0], args[1:]
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			img, err := c.BootstrapImage(cmd.Context(), opts)
			if err != nil {
				return err
			}
			return a.printImage(img)
		},
	}
	cmd.Flags().StringVar(&opts.Release, "release", "", "release, such as bookworm (default the stable one)")
	return cmd
}

func imageInspectCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "inspect NAME", Short: "Show all about an image",
		Example: `  warren image inspect host`,
		Args:    exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			img, err := c.Image(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(img)
			}
			pairs := []string{
				"Name", img.Name, "Kind", img.Kind, "Digest", img.Digest, "Size", bytesOf(img.Size), "Layers", fmt.Sprint(img.Layers),
				"User", img.User, "Directory", img.WorkingDir, "Created", rfc3339(img.Created),
			}
			for _, k := range sortedKeys(img.Env) {
				pairs = append(pairs, "Env", k+"="+img.Env[k])
			}
			return a.fields(pairs...)
		},
	}
}

func imageRemoveCommand(a *app) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: "rm NAME... [flags]", Aliases: []string{"delete"}, Short: "Remove images that no sandbox uses",
		Example: `  warren image rm tools`,
		Args:    atLeastOne("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			return a.each(cmd.Context(), args, func(ctx context.Context, name string) error {
				return c.DeleteImage(ctx, name, warren.DeleteOptions{AllowMissing: force})
			})
		},
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "no error for an image that does not exist")
	return cmd
}

// rfc3339 writes a time in the local zone, nothing for none.
func rfc3339(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.Local().Format(time.RFC3339)
}
