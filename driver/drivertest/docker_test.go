//go:build linux

package drivertest_test

import (
	"log/slog"
	"os"
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
func TestDockerEscape(t *testing.T)      { drivertest.Escape(t, dockerHarness(t, "")) }
func TestDockerRunsc(t *testing.T)       { drivertest.Run(t, brief(dockerHarness(t, "runsc"))) }
func TestDockerRunscEscape(t *testing.T) { drivertest.Escape(t, brief(dockerHarness(t, "runsc"))) }

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
		Processes: func(t testing.TB, id warren.SandboxID) []int { return containerProcesses(t, engine, api, id) },
	}
	if runtime != "" {
		h.Name, h.Boundary = "docker-"+runtime, "kernel"
		h.Lacks["dial-loopback"] = "runsc has the addresses that the engine gives a container, and without a network that is no IPv6"
	} else if runc, err := exec.LookPath("runc"); err == nil {
		h.Binaries = append(h.Binaries, runc)
	}
	return h
}

// TestDockerRemote runs the suite on an engine that is reached over TLS and sees none of this machine's directories.
func TestDockerRemote(t *testing.T) {
	guest, root := testenv.NeedsBinary(t, "warren-guest"), dockertest.Image(t)
	engine := dockertest.Start(t, dockertest.Config{Remote: true})
	t.Setenv("DOCKER_CERT_PATH", engine.Certs)
	api := engine.Client()
	state := filepath.Join(t.TempDir(), "docker")
	opts := docker.Options{
		StateDir: state, GuestPath: guest, Host: engine.Host, Logger: slog.New(slog.DiscardHandler),
		Accept: []string{docker.AcceptNoDiskLimit, docker.AcceptCopiedMounts},
	}
	const copied = "sandboxes work on copies there, which is accepted here, and refused otherwise"
	drivertest.Run(t, drivertest.Harness{
		Name: "docker-runc on another machine", Brief: true, Boundary: "namespace", Commands: true, State: []string{state}, Binaries: []string{guest},
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
			"limit-disk":    "accepted, see the local engine",
			"dial-loopback": "nobody can tell whether another machine's kernel has IPv6, so its loopback stays without",
			"root-binds":    "an image of this machine's directories is refused there",
			"mount-durable": copied,
			"mount-live":    copied,
		},
		Processes: func(t testing.TB, id warren.SandboxID) []int { return containerProcesses(t, engine, api, id) },
	})
}

// containerProcesses returns the host's processes of a sandbox's containers.
func containerProcesses(t testing.TB, engine *dockertest.Engine, api *client.Client, id warren.SandboxID) (pids []int) {
	t.Helper()
	list, err := api.ContainerList(t.Context(), client.ContainerListOptions{All: true, Filters: client.Filters{}.Add("label", "dev.warren.sandbox="+string(id))})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range list.Items {
		pids = append(pids, engine.Processes(c.ID)...)
	}
	return pids
}

// TestDockerSocket runs the suite through a daemon whose sandboxes are containers.
func TestDockerSocket(t *testing.T) {
	testenv.NeedsTool(t, "cp")
	_, store := dockertest.ImageStore(t)
	engine := dockertest.Start(t, dockertest.Config{})
	api := engine.Client()
	data := filepath.Join(engine.Shared, "home")
	if err := os.Mkdir(data, 0o711); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-a", store, filepath.Join(data, "images")).CombinedOutput(); err != nil {
		t.Fatalf("copy the image store: %v\n%s", err, out)
	}
	h := serveHarness(t, data, "WARREN_DRIVER=docker", "WARREN_IMAGE="+dockertest.ImageName, "WARREN_DOCKER_HOST="+engine.Host, "WARREN_DOCKER_ACCEPT="+docker.AcceptNoDiskLimit)
	h.Name, h.Boundary, h.Brief = "docker-runc over the socket", "namespace", true
	h.Lacks["limit-disk"] = "accepted, see the driver itself"
	h.Processes = func(t testing.TB, id warren.SandboxID) []int {
		own := h.Alias(id)
		if own == "" {
			return nil
		}
		return containerProcesses(t, engine, api, own)
	}
	drivertest.Run(t, h)
}

// TestPodman runs the suite on Podman's compatible service.
func TestPodman(t *testing.T) {
	testenv.NeedsTool(t, "podman")
	guest, root := testenv.NeedsBinary(t, "warren-guest"), dockertest.Image(t)
	engine := dockertest.Start(t, dockertest.Config{Podman: true})
	api := engine.Client()
	opts := docker.Options{
		StateDir: filepath.Join(engine.Shared, "docker"), GuestPath: guest, Host: engine.Host, Logger: slog.New(slog.DiscardHandler),
		Accept: []string{docker.AcceptNoDiskLimit, docker.AcceptNoUserNamespace},
	}
	drivertest.Run(t, drivertest.Harness{
		Name: "podman-runc", Brief: true, Boundary: "namespace", Commands: true, State: []string{engine.Shared}, Binaries: []string{guest},
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
			"limit-disk": "accepted, see Docker",
		},
		Processes: func(t testing.TB, id warren.SandboxID) []int { return containerProcesses(t, engine, api, id) },
	})
}
