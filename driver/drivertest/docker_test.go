//go:build linux

package drivertest_test

import (
	"log/slog"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/driver"
	"github.com/warren-sandbox/warren/driver/docker"
	"github.com/warren-sandbox/warren/driver/docker/dockertest"
	"github.com/warren-sandbox/warren/driver/drivertest"
	"github.com/warren-sandbox/warren/internal/testenv"
)

func TestDocker(t *testing.T)            { drivertest.Run(t, dockerHarness(t, "")) }
func TestDockerWrapped(t *testing.T)     { drivertest.Run(t, drivertest.Wrap(dockerHarness(t, ""))) }
func TestDockerEscape(t *testing.T)      { drivertest.Escape(t, dockerHarness(t, "")) }
func TestDockerRunsc(t *testing.T)       { drivertest.Run(t, dockerHarness(t, "runsc")) }
func TestDockerRunscEscape(t *testing.T) { drivertest.Escape(t, dockerHarness(t, "runsc")) }

// dockerHarness is the Docker driver on an engine of its own. An empty runtime is the engine's default, runc.
func dockerHarness(t *testing.T, runtime string) drivertest.Harness {
	t.Helper()
	guest := testenv.NeedsBinary(t, "warren-guest")
	root := dockertest.Image(t)
	engine := dockertest.Start(t, dockertest.Config{})
	api := engine.Client()
	opts := docker.Options{
		StateDir: filepath.Join(engine.Shared, "docker"), GuestPath: guest, Host: engine.Host, Runtime: runtime, Logger: slog.New(slog.DiscardHandler),
		Accept: []string{docker.AcceptNoDiskLimit},
	}
	h := drivertest.Harness{
		Name:     "docker-runc",
		Boundary: "namespace",
		Commands: true,
		State:    []string{engine.Shared},
		Binaries: []string{guest},
		New: func(t testing.TB) driver.Driver {
			t.Helper()
			d, err := docker.New(opts)
			if err != nil {
				t.Fatal(err)
			}
			return d
		},
		Spec: func(_ testing.TB, id warren.SandboxID) *driver.Spec {
			return &driver.Spec{ID: id, Hostname: "sandbox", Limits: limits, Root: root}
		},
		Lacks: map[string]string{
			"limit-disk": "an engine limits disks on xfs with project quotas or on zfs, which the test's has not; it is accepted here, and refused otherwise",
		},
		Processes: func(t testing.TB, id warren.SandboxID) []int {
			t.Helper()
			list, err := api.ContainerList(t.Context(), client.ContainerListOptions{All: true, Filters: client.Filters{}.Add("label", "dev.warren.sandbox="+string(id))})
			if err != nil {
				t.Fatal(err)
			}
			var pids []int
			for _, c := range list.Items {
				pids = append(pids, engine.Processes(c.ID)...)
			}
			return pids
		},
	}
	if runtime != "" {
		h.Name, h.Boundary = "docker-"+runtime, "kernel"
		h.Lacks["dial-loopback"] = "runsc has the addresses that the engine gives a container, and without a network that is no IPv6"
	} else if runc, err := exec.LookPath("runc"); err == nil {
		h.Binaries = append(h.Binaries, runc)
	}
	return h
}
