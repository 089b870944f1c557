package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
)

// version is set by the linker in builds of the Makefile.
var version string

// versionString is the version of this program: the linker's, else that of the module or commit it was built from.
func versionString() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "devel"
}

func versionCommand(a *app) *cobra.Command {
	var client bool
	cmd := &cobra.Command{
		Use: "version [flags]", Short: "Print the versions of this program and of the server",
		Example: `  warren version
  warren version --client                            without asking, or starting, a server`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			own := warren.Version{Version: versionString(), GoVersion: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
			var server *warren.Version
			if !client {
				c, err := a.client(cmd.Context())
				if err != nil {
					return err
				}
				defer c.Close()
				v := c.ServerVersion()
				server = &v
			}
			if a.json {
				return a.printJSON(struct {
					Client warren.Version  `json:"client"`
					Server *warren.Version `json:"server,omitempty"`
				}{own, server})
			}
			pairs := []string{"Client", own.Version, "Go", own.GoVersion, "Platform", own.Platform}
			if server != nil {
				pairs = append(pairs, "Server", server.Version, "Server platform", server.Platform, "Drivers", fmt.Sprint(server.Drivers), "Instance", server.Instance)
			}
			return a.fields(pairs...)
		},
	}
	cmd.Flags().BoolVar(&client, "client", false, "only of this program")
	return cmd
}

// compareVersions says, once a command, that the local daemon is of another build than this program.
func (a *app) compareVersions(c *warren.Client) {
	server := c.ServerVersion().Version
	if server != versionString() {
		a.notice("the daemon is version %s and this program %s; `warren shutdown` ends the daemon and keeps sandboxes running, the next command starts the new one",
			escape(server), versionString())
	}
}
