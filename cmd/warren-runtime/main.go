//go:build linux

// Warren-runtime is the binary that Warren's gVisor driver runs: the keeper of the sandboxes, and gVisor's own
// processes. It is not meant to be called by people.
//
//	warren-runtime keeper -state DIR    hold the sandboxes of a state directory
//	runsc-sandbox, runsc-gofer, ...     gVisor's sub-commands, started by the keeper
//
// It links of gVisor only what these need: the full runsc binary is more than twice as large.
package main

import (
	"os"
	"runtime"

	"github.com/google/subcommands"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"

	"github.com/warren-sandbox/warren/driver/gvisor/keeper"
)

// Nobody reads a profile of what was allocated, and to keep one took 1 ms of each fork.
func init() { runtime.MemProfileRate = 0 }

// init keeps the main goroutine of a keeper on the first thread, which cannot end: others that are given a namespace of their own
// end with their goroutine.
func init() {
	if len(os.Args) > 1 && os.Args[1] == keeper.Role {
		runtime.LockOSThread()
	}
}

func main() {
	// Before any flag is parsed: gVisor puts its configuration first and the sub-command later.
	if len(os.Args) > 1 && os.Args[1] == keeper.Role {
		os.Exit(keeper.Main(os.Args[2:]))
	}
	os.Args = keeper.BeforeGVisor(os.Args)
	cli.Run(nil, map[util.SubCommand]string{
		new(sentrycmd.Boot):   "",
		new(cmd.Gofer):        "",
		new(sentrycmd.Umount): "",
	}, []subcommands.Command{})
}
