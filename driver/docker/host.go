//go:build linux

package docker

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/warren-sandbox/warren"
)

// usualSockets are where an engine listens that nobody has said anything about, the likeliest first.
var usualSockets = []string{"/var/run/docker.sock", "/run/podman/podman.sock"}

// findHost returns the address of the engine: what is configured, else DOCKER_HOST, else the current docker context, else
// the first of the usual sockets that is there.
func findHost(configured string, getenv func(string) string) (string, error) {
	host, from := configured, "the configuration"
	if host == "" {
		host, from = getenv("DOCKER_HOST"), "DOCKER_HOST"
	}
	if host == "" {
		var err error
		if host, from, err = contextHost(getenv); err != nil {
			return "", err
		}
	}
	if host == "" {
		for _, path := range usualSockets {
			if fi, err := os.Stat(path); err == nil && fi.Mode()&os.ModeSocket != 0 {
				return "unix://" + path, nil
			}
		}
		return "", fmt.Errorf("no engine: there is no socket at %s; start Docker or Podman, or set DOCKER_HOST: %w", strings.Join(usualSockets, " or "), errors.ErrUnsupported)
	}
	if !strings.HasPrefix(host, "unix://") {
		return "", fmt.Errorf("the engine %s of %s may be on another machine, and the workspaces are directories of this one; name a unix:// socket: %w", host, from, errors.ErrUnsupported)
	}
	return host, nil
}

// contextHost returns the address that docker's own command line would use because of a context, "" for the default one.
func contextHost(getenv func(string) string) (host, from string, err error) {
	dir := getenv("DOCKER_CONFIG")
	if dir == "" {
		home := getenv("HOME")
		if home == "" {
			return "", "", nil
		}
		dir = filepath.Join(home, ".docker")
	}
	name := getenv("DOCKER_CONTEXT")
	if name == "" {
		var config struct{ CurrentContext string }
		if err := readJSON(filepath.Join(dir, "config.json"), &config); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", "", err
		}
		name = config.CurrentContext
	}
	if name == "" || name == "default" {
		return "", "", nil
	}
	sum := sha256.Sum256([]byte(name))
	var meta struct {
		Endpoints struct {
			Docker struct{ Host string } `json:"docker"`
		}
	}
	err = readJSON(filepath.Join(dir, "contexts", "meta", hex.EncodeToString(sum[:]), "meta.json"), &meta)
	if errors.Is(err, fs.ErrNotExist) {
		return "", "", fmt.Errorf("docker context %q does not exist; `docker context use default`, or set DOCKER_HOST: %w", name, warren.ErrInvalid)
	}
	if err != nil {
		return "", "", err
	}
	return meta.Endpoints.Docker.Host, fmt.Sprintf("docker context %q", name), nil
}

func readJSON(path string, into any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("%s: %w: %v", path, warren.ErrInvalid, err)
	}
	return nil
}
