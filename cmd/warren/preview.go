package main

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

func previewCommand(a *app) *cobra.Command {
	var opts warren.PreviewOptions
	var public, private, open, noOpen bool
	var host string
	cmd := &cobra.Command{
		Use:   "preview ID PORT [flags]",
		Short: "Open a port of a sandbox in the browser",
		Long: `Print the link to a port of a sandbox, and open it when there is a browser. Each port of each sandbox is an origin of its own, whose
cookies and storage no other has. It is private: the link lets in whoever has it, until it expires. Nothing needs to listen on the
port yet, and a paused sandbox is resumed by looking at it.

The program in the sandbox is told that it is localhost, which development servers answer for; --host keep tells it the real name.`,
		Example: `  warren preview fix 3000
  warren preview fix 3000 --ttl 8h --no-open
  warren preview fix 8080 --public                   no link is needed any more, until --private
  warren preview fix 3000 --revoke                   earlier links to fix end, this one works
  curl -s "$(warren preview fix 3000 --no-open)"`,
		Args: exactly("ID", "PORT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			port, err := strconv.Atoi(args[1])
			if err != nil || port < 1 || port > 65535 {
				return fmt.Errorf("port %q: %w: want a number from 1 to 65535", args[1], warren.ErrInvalid)
			}
			if cmd.Flags().Changed("ttl") && opts.TTL <= 0 {
				return fmt.Errorf("--ttl %s: %w: want 1s to 24h", opts.TTL, warren.ErrInvalid)
			}
			yes, no := true, false
			switch {
			case public:
				opts.Public = &yes
			case private:
				opts.Public = &no
			}
			switch host {
			case "":
			case "keep":
				opts.KeepHost = &yes
			case "mask":
				opts.KeepHost = &no
			default:
				return fmt.Errorf("--host %q: %w: want mask or keep", host, warren.ErrInvalid)
			}
			c, err := a.client(cmd.Context())
			if err != nil {
				return err
			}
			defer c.Close()
			p, err := c.Ref(args[0]).Preview(cmd.Context(), port, opts)
			if err != nil {
				return err
			}
			if err := a.printPreview(p); err != nil {
				return err
			}
			if !open && (noOpen || a.json || !isTerminal(a.out) || !hasBrowser()) {
				return nil
			}
			return browse(p.Link)
		},
	}
	flags := cmd.Flags()
	flags.DurationVar(&opts.TTL, "ttl", time.Hour, "how long the link works, up to 24h")
	flags.BoolVar(&public, "public", false, "let everybody in who reaches this server's previews")
	flags.BoolVar(&private, "private", false, "let nobody in without a link or a token")
	flags.BoolVar(&opts.Revoke, "revoke", false, "end earlier links to all ports of the sandbox, and what they opened")
	flags.StringVar(&host, "host", "", `what the program is told that it is called: "mask", as localhost, or "keep"`)
	flags.BoolVar(&open, "open", false, "open it also when the output is no terminal")
	flags.BoolVar(&noOpen, "no-open", false, "only print it")
	cmd.MarkFlagsMutuallyExclusive("public", "private")
	cmd.MarkFlagsMutuallyExclusive("open", "no-open")
	return cmd
}

// printPreview prints the link alone, for scripts, and tells people what it is worth.
func (a *app) printPreview(p *warren.Preview) error {
	if a.json {
		return a.printJSON(p)
	}
	if _, err := fmt.Fprintln(a.out, p.Link); err != nil {
		return err
	}
	if p.Public {
		a.notice("public: it lets in everybody who reaches it; --private closes it")
	} else {
		a.notice("private: this link lets in whoever has it until %s", p.Expires.Local().Format("2006-01-02 15:04"))
	}
	if u, err := url.Parse(p.URL); err == nil && a.remote() != "" && strings.HasSuffix(u.Hostname(), ".localhost") {
		a.notice("it is on the server's own loopback; `ssh -L %s:127.0.0.1:%s SERVER` brings it here", u.Port(), u.Port())
	}
	return nil
}

// hasBrowser says whether a page can be shown to the person at this terminal.
func hasBrowser() bool {
	if runtime.GOOS == "darwin" || runtime.GOOS == "windows" {
		return true
	}
	return os.Getenv("BROWSER") != "" || os.Getenv("DISPLAY") != "" || os.Getenv("WAYLAND_DISPLAY") != ""
}

// browse opens a URL, which this program or its server has made.
func browse(link string) error {
	words := []string{"xdg-open"}
	switch {
	case os.Getenv("BROWSER") != "":
		words = []string{os.Getenv("BROWSER")}
	case runtime.GOOS == "darwin":
		words = []string{"open"}
	case runtime.GOOS == "windows":
		words = []string{"rundll32", "url.dll,FileProtocolHandler"}
	}
	u, err := url.Parse(link)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" {
		return fmt.Errorf("the server's link is no URL: %w", errors.Join(warren.ErrInvalid, err))
	}
	cmd := exec.Command(words[0], append(words[1:], link)...)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("open the browser: %w; --no-open only prints the link", err)
	}
	go func() { _ = cmd.Wait() }()
	return nil
}

func portsCommand(a *app) *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "ports ID [flags]",
		Short: "List the ports of a sandbox on which something listens",
		Long: `List the TCP ports of a sandbox on which something listens, and where each is shown to browsers. With --follow, tell those that open
and close as they do. The URLs let in who was let in before; warren preview makes a link.`,
		Example: `  warren ports fix
  warren ports fix --follow
  warren ports fix --json | jq -r .preview`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			c, err := a.client(ctx)
			if err != nil {
				return err
			}
			defer c.Close()
			sb := c.Ref(args[0])
			shown := func(port int) string {
				p, err := sb.Preview(ctx, port, warren.PreviewOptions{NoLink: true})
				if err != nil {
					return "" // a port without one, or a server
				}
				return p.URL
			}
			if !follow {
				ports, err := sb.Ports(ctx)
				if err != nil {
					return err
				}
				var rows [][]string
				for _, p := range ports {
					if a.json {
						if err := a.printJSON(portLine{PortEvent: warren.PortEvent{Port: p}, Preview: shown(p.Port)}); err != nil {
							return err
						}
						continue
					}
					rows = append(rows, []string{strconv.Itoa(p.Port), p.Address, strconv.Itoa(p.PID), p.Program, shown(p.Port)})
				}
				if a.json {
					return nil
				}
				return a.table([]string{"PORT", "ADDRESS", "PID", "PROGRAM", "PREVIEW"}, rows)
			}
			for e, err := range sb.WatchPorts(ctx) {
				if err != nil {
					return err
				}
				line := portLine{PortEvent: e}
				if !e.Closed {
					line.Preview = shown(e.Port.Port)
				}
				if a.json {
					err = a.printJSON(line)
				} else if e.Closed {
					_, err = fmt.Fprintf(a.out, "closed %d\n", e.Port.Port)
				} else {
					_, err = fmt.Fprintln(a.out, escape(strings.TrimSpace(fmt.Sprintf("open %d  %s  %s", e.Port.Port, e.Program, line.Preview))))
				}
				if err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "tell ports that open and close, as they do")
	return cmd
}

// portLine is a port as JSON.
type portLine struct {
	warren.PortEvent
	Preview string `json:"preview,omitempty"`
}
