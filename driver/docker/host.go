//go:build linux

package docker

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/moby/client"

	"github.com/warren-sandbox/warren"
)

// usualSockets are where an engine listens that nobody has said anything about, the likeliest first.
var usualSockets = []string{"/var/run/docker.sock", "/run/podman/podman.sock"}

// endpoint is where an engine is, and with what it is to be convinced.
type endpoint struct {
	// host is the address as users write it.
	host string
	// from says who names it.
	from string
	// certs is a directory with ca.pem, cert.pem and key.pem, "" for no TLS.
	certs string
}

// findHost returns the engine's endpoint: what is configured, else DOCKER_HOST, else the current docker context, else the
// first of the usual sockets that is there.
func findHost(configured string, getenv func(string) string) (endpoint, error) {
	e := endpoint{host: configured, from: "the configuration"}
	if e.host == "" {
		e.host, e.from = getenv("DOCKER_HOST"), "DOCKER_HOST"
	}
	if e.host != "" {
		e.certs = envCerts(getenv)
	} else {
		var err error
		if e, err = contextHost(getenv); err != nil {
			return endpoint{}, err
		}
	}
	if e.host == "" {
		for _, path := range usualSockets {
			if fi, err := os.Stat(path); err == nil && fi.Mode()&os.ModeSocket != 0 {
				return endpoint{host: "unix://" + path, from: "the usual places"}, nil
			}
		}
		return endpoint{}, fmt.Errorf("no engine: there is no socket at %s; start Docker or Podman, or set DOCKER_HOST: %w", strings.Join(usualSockets, " or "), errors.ErrUnsupported)
	}
	return e, e.check()
}

// check refuses addresses at which whoever is on the way could take the engine's place.
func (e *endpoint) check() error {
	u, err := url.Parse(e.host)
	if err != nil {
		return fmt.Errorf("the engine %q of %s is no address (unix://PATH, ssh://USER@HOST or tcp://HOST:PORT): %w", e.shown(), e.from, warren.ErrInvalid)
	}
	switch u.Scheme {
	case "unix":
		e.certs = ""
		return nil
	case "ssh":
		e.certs = ""
		_, err := sshArguments(u)
		return err
	case "tcp":
		if u.User != nil {
			return fmt.Errorf("the engine %s of %s: an engine takes no user and no password, it knows its users by their keys; want tcp://HOST:PORT: %w", e.shown(), e.from, warren.ErrInvalid)
		}
		if e.certs != "" {
			return nil
		}
		if ip := net.ParseIP(u.Hostname()); u.Hostname() == "localhost" || ip != nil && ip.IsLoopback() {
			return nil
		}
		return fmt.Errorf("the engine %s of %s is on another machine and would be spoken to without encryption: whoever listens would own it; use ssh://, or set DOCKER_TLS_VERIFY=1 and DOCKER_CERT_PATH: %w", e.shown(), e.from, errors.ErrUnsupported)
	}
	return fmt.Errorf("the engine %q of %s: want unix://PATH, ssh://USER@HOST or tcp://HOST:PORT: %w", e.shown(), e.from, errors.ErrUnsupported)
}

// shown is the address without a password, as errors have it.
func (e *endpoint) shown() string {
	if u, err := url.Parse(e.host); err == nil && u.Opaque == "" {
		return u.Redacted()
	}
	// Of what is no address nobody knows where its password begins.
	if i := strings.LastIndexByte(e.host, '@'); i >= 0 {
		return "..." + e.host[i:]
	}
	return e.host
}

// local says that the engine is reached without any network.
func (e *endpoint) local() bool { return strings.HasPrefix(e.host, "unix://") }

// options are those with which a client reaches the engine.
func (e *endpoint) options() ([]client.Opt, error) {
	if strings.HasPrefix(e.host, "ssh://") {
		u, err := url.Parse(e.host)
		if err != nil {
			return nil, err
		}
		args, err := sshArguments(u)
		if err != nil {
			return nil, err
		}
		// The name is never looked up: every connection is a process.
		return []client.Opt{client.WithHost("http://engine.invalid"), client.WithDialContext(dialCommand("ssh", args))}, nil
	}
	opts := []client.Opt{client.WithHost(e.host)}
	if e.certs != "" {
		file := func(name string) string { return filepath.Join(e.certs, name) }
		for _, name := range []string{"ca.pem", "cert.pem", "key.pem"} {
			if _, err := os.Stat(file(name)); err != nil {
				return nil, fmt.Errorf("the engine %s of %s wants TLS, and its keys are not all there: %v; put ca.pem, cert.pem and key.pem into DOCKER_CERT_PATH: %w", e.shown(), e.from, err, warren.ErrInvalid)
			}
		}
		opts = append(opts, client.WithTLSClientConfig(file("ca.pem"), file("cert.pem"), file("key.pem")))
	}
	return opts, nil
}

// dockerConfig is the directory in which docker's own command line keeps what it knows, "" without a home.
func dockerConfig(getenv func(string) string) string {
	if dir := getenv("DOCKER_CONFIG"); dir != "" {
		return dir
	}
	if home := getenv("HOME"); home != "" {
		return filepath.Join(home, ".docker")
	}
	return ""
}

// envCerts is where the environment says that the keys are. An engine is never believed unverified, also where
// DOCKER_TLS_VERIFY does not ask for it.
func envCerts(getenv func(string) string) string {
	if dir := getenv("DOCKER_CERT_PATH"); dir != "" {
		return dir
	}
	if getenv("DOCKER_TLS_VERIFY") != "" {
		return dockerConfig(getenv)
	}
	return ""
}

// contextHost returns the endpoint that docker's own command line would use because of a context, an empty one for the
// default context.
func contextHost(getenv func(string) string) (endpoint, error) {
	dir := dockerConfig(getenv)
	if dir == "" {
		return endpoint{}, nil
	}
	name := getenv("DOCKER_CONTEXT")
	if name == "" {
		var config struct{ CurrentContext string }
		if err := readJSON(filepath.Join(dir, "config.json"), &config); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return endpoint{}, err
		}
		name = config.CurrentContext
	}
	if name == "" || name == "default" {
		return endpoint{}, nil
	}
	sum := sha256.Sum256([]byte(name))
	id := hex.EncodeToString(sum[:])
	var meta struct {
		Endpoints struct {
			Docker struct {
				Host          string
				SkipTLSVerify bool
			} `json:"docker"`
		}
	}
	err := readJSON(filepath.Join(dir, "contexts", "meta", id, "meta.json"), &meta)
	if errors.Is(err, fs.ErrNotExist) {
		return endpoint{}, fmt.Errorf("docker context %q does not exist; `docker context use default`, or set DOCKER_HOST: %w", name, warren.ErrInvalid)
	}
	if err != nil {
		return endpoint{}, err
	}
	if meta.Endpoints.Docker.SkipTLSVerify {
		return endpoint{}, fmt.Errorf("docker context %q does not verify its engine (skip-tls-verify): whoever is on the way could take its place; make the context anew without it: %w", name, errors.ErrUnsupported)
	}
	e := endpoint{host: meta.Endpoints.Docker.Host, from: fmt.Sprintf("docker context %q", name)}
	if certs := filepath.Join(dir, "contexts", "tls", id, "docker"); isDir(certs) {
		e.certs = certs
	}
	return e, nil
}

func isDir(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.IsDir()
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
