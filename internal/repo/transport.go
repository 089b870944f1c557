package repo

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/git"
)

// transport is the way to an origin for one fetch or push.
type transport struct {
	origin *Origin
	url    string
	local  *Local // of a repository on this host

	protocols []string
	config    []git.Setting
	env       []string
	secrets   []string
}

// helper hands git the user and password of the URL. They travel in the environment of git, which only its own user can
// read, not in an argument, a file or the repository's configuration.
const helper = `!f() { test "$1" = get && printf 'username=%s\npassword=%s\n' "$WARREN_GIT_USERNAME" "$WARREN_GIT_PASSWORD"; }; f`

// connect prepares the way to the origin.
//
// Credentials come from three places: the user part of the URL, for this call; with host set, the daemon's user: its
// credential helpers, URL rewrites, proxies and certificates are read out of its own git configuration (and only
// credential.*, url.*.insteadOf, url.*.pushInsteadOf and http.*), and its ssh agent, keys and GIT_ASKPASS are used;
// and nowhere else. Nothing of it is stored.
func (c *Cache) connect(ctx context.Context, o *Origin, host bool) (*transport, error) {
	t := &transport{origin: o, url: o.URL, secrets: o.secrets()}
	if o.Path != "" {
		l, err := OpenLocal(ctx, o.Path, c.o.Dir)
		if err != nil {
			return nil, err
		}
		t.local, t.url, t.protocols = l, l.Dir, []string{"file"}
		return t, nil
	}
	t.protocols = []string{o.Scheme}
	if o.Scheme == "http" {
		t.protocols = append(t.protocols, "https") // for a redirect
	}
	t.config = append(t.config, git.Setting{Key: "http.followRedirects", Value: "initial"}, git.Setting{Key: "http.lowSpeedLimit", Value: "1"}, git.Setting{Key: "http.lowSpeedTime", Value: "60"})
	if o.username != "" {
		t.env = append(t.env, "WARREN_GIT_USERNAME="+o.username, "WARREN_GIT_PASSWORD="+o.password)
		t.config = append(t.config, git.Setting{Key: "credential." + o.base + ".helper", Value: helper})
	}
	ssh := "ssh -oBatchMode=yes -oConnectTimeout=30"
	if host {
		for _, k := range []string{"HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK", "GIT_ASKPASS", "SSH_ASKPASS", "DBUS_SESSION_BUS_ADDRESS"} {
			if v := os.Getenv(k); v != "" {
				t.env = append(t.env, k+"="+v)
			}
		}
		settings, err := hostSettings(ctx)
		if err != nil {
			return nil, err
		}
		t.config = append(t.config, settings...)
		// A rewrite may lead from one of these to another.
		t.protocols = []string{"https", "http", "ssh"}
	} else {
		if o.Scheme == "ssh" {
			return nil, fmt.Errorf("repository %s: ssh needs the credentials of the host's user, which only operators of the host may use: %w", o.URL, warren.ErrDenied)
		}
		ssh = "false"
	}
	t.env = append(t.env, "GIT_SSH_COMMAND="+ssh, "GIT_SSH_VARIANT=ssh")
	return t, nil
}

func (t *transport) close() {
	if t.local != nil {
		t.local.Close()
	}
}

// command returns a git command that may use the transport.
func (t *transport) command(dir string, args ...string) *git.Cmd {
	return &git.Cmd{Dir: dir, Args: args, Protocols: t.protocols, Config: t.config, Env: t.env, Secrets: t.secrets}
}

// look asks the origin for its default branch and object format.
func (t *transport) look(ctx context.Context) (branch, format string, err error) {
	dir, err := os.MkdirTemp("", "warren-look-")
	if err != nil {
		return "", "", err
	}
	defer os.RemoveAll(dir)
	if err := initBare(dir, "sha1", nil); err != nil {
		return "", "", err
	}
	out, err := t.command(dir, "ls-remote", "--symref", "--quiet", "--end-of-options", t.url, "HEAD", "refs/heads/*").Output(ctx)
	if err != nil {
		return "", "", err
	}
	format = ""
	for line := range strings.Lines(string(out)) {
		left, right, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		if ref, ok := strings.CutPrefix(left, "ref: refs/heads/"); ok && right == "HEAD" {
			if git.CheckRef(ref) == nil {
				branch = ref
			}
			continue
		}
		switch len(left) {
		case 40:
			format = "sha1"
		case 64:
			format = "sha256"
		}
	}
	if format == "" {
		return "", "", fmt.Errorf("repository %s is empty: it has no branch yet; push something first: %w", t.origin.URL, warren.ErrState)
	}
	return branch, format, nil
}

// hostSettings reads what is for transports out of the git configuration of the daemon's user and of the system. It is the
// only place that reads these, and git does nothing else while it does.
func hostSettings(ctx context.Context) ([]git.Setting, error) {
	bin, err := exec.LookPath("git")
	if err != nil {
		return nil, fmt.Errorf("git is not installed on the host: %w", warren.ErrUnavailable)
	}
	var out []git.Setting
	for _, scope := range []string{"--system", "--global"} {
		cmd := exec.CommandContext(ctx, bin, "config", scope, "--includes", "--null", "--get-regexp", `^(credential\..*|url\..*\.(insteadof|pushinsteadof)|http\..*)$`)
		cmd.Dir = "/"
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "LC_ALL=C", "GIT_DIR=/nonexistent"}
		if v := os.Getenv("XDG_CONFIG_HOME"); v != "" {
			cmd.Env = append(cmd.Env, "XDG_CONFIG_HOME="+v)
		}
		if v := os.Getenv("GIT_CONFIG_GLOBAL"); v != "" && scope == "--global" {
			cmd.Env = append(cmd.Env, "GIT_CONFIG_GLOBAL="+v)
		}
		b, err := cmd.Output()
		if err != nil {
			continue // there is no such file, or nothing in it
		}
		for rec := range strings.SplitSeq(string(b), "\x00") {
			if k, v, ok := strings.Cut(rec, "\n"); ok {
				out = append(out, git.Setting{Key: k, Value: v})
			}
		}
	}
	return out, nil
}
