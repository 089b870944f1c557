package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/config"
)

// specFlags are the flags that describe a sandbox, shared by run and create.
type specFlags struct {
	name, image, repo, workspace, snapshot       string
	template                                     string
	driver, runtime, restart                     string
	dirty, fetch, keepWorkspace                  bool
	env, envFiles, mounts, labels, driverOptions []string
	cpu                                          config.CPUs
	memory, disk                                 config.Size
	pids                                         uint32
	idleTimeout, idle, ttl, maxLifetime          time.Duration
	idleAction, ttlAction, policy, network       string
	autoResume                                   bool
}

func (f *specFlags) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.StringVar(&f.name, "name", "", "name of the sandbox, unique among yours")
	flags.StringVar(&f.image, "image", "", `image, such as "host" (the default) or debian:12`)
	flags.StringVar(&f.repo, "repo", "", "cut the workspace from this repository: URL or PATH, with @REF for a branch, tag or commit")
	flags.BoolVar(&f.dirty, "dirty", false, "take uncommitted changes of --repo PATH along")
	flags.BoolVar(&f.fetch, "fetch", false, "ask the origin of --repo for news, even when the ref is in the cache")
	flags.StringVar(&f.workspace, "workspace", "", "use this workspace instead of a new one")
	flags.StringVar(&f.snapshot, "snapshot", "", "go on from this snapshot, with its image, memory and a copy of its workspace")
	flags.StringVar(&f.template, "template", "", "go on from the snapshot of this template, its services running")
	flags.BoolVar(&f.keepWorkspace, "keep-workspace", false, "keep the new workspace when the sandbox is removed")
	flags.StringArrayVarP(&f.env, "env", "e", nil, "set a variable of every process, as K=V; K alone takes the value from here")
	flags.StringArrayVar(&f.envFiles, "env-file", nil, "read variables from a file, one K=V a line")
	flags.Var(&f.cpu, "cpu", "processors, such as 2 or 0.5")
	flags.Var(&f.memory, "memory", "memory of all processes together, such as 512MiB")
	flags.Var(&f.disk, "disk", "what may be written outside the workspace, such as 10GiB")
	for _, name := range []string{"cpu", "memory", "disk"} {
		flags.Lookup(name).DefValue = "" // the server's, which is not 0B
	}
	flags.Uint32Var(&f.pids, "pids", 0, "processes and threads")
	flags.StringArrayVar(&f.mounts, "mount", nil, "show a host directory: HOST:PATH, read-only, or HOST:PATH:rw")
	flags.StringArrayVarP(&f.labels, "label", "l", nil, "label to find the sandbox by, as K=V")
	flags.StringVar(&f.driver, "driver", "", "what runs the sandbox: gvisor or docker")
	flags.StringVar(&f.runtime, "runtime", "", "runtime of the driver's engine, such as runsc; short for --driver-option runtime=NAME")
	flags.StringArrayVar(&f.driverOptions, "driver-option", nil, "option of the driver, as K=V")
	flags.StringVar(&f.policy, "policy", "", `what the sandbox may reach: a policy, see warren policy, or "none" for no network`)
	flags.StringVar(&f.network, "network", "", `private network: your sandboxes in it reach each other as NAME.NETWORK.internal; "none" for none`)
	choiceVar(flags, &f.restart, "restart", `"never", or "on-failure": a failed sandbox starts afresh at the next command`, "never", "on-failure")
	flags.DurationVar(&f.idleTimeout, "idle-timeout", 0, "pause the sandbox when it has been idle for this long, such as 30m")
	flags.DurationVar(&f.idle, "idle", 0, "short for --idle-timeout; alone it means 1m")
	flags.Lookup("idle").NoOptDefVal = "1m"
	choiceVar(flags, &f.idleAction, "idle-action", `what the idle timeout does: "pause" (the default where the driver can) or "delete"`, "pause", "delete")
	flags.BoolVar(&f.autoResume, "auto-resume", true, "let the next call resume the sandbox when it is paused")
	flags.DurationVar(&f.ttl, "ttl", 0, "remove the sandbox this long after its creation, such as 12h, or pause it: see --ttl-action")
	choiceVar(flags, &f.ttlAction, "ttl-action", `what --ttl does: "delete" (the default), or "pause"; a resume begins it anew`, "pause", "delete")
	flags.DurationVar(&f.maxLifetime, "max-lifetime", 0, "remove the sandbox this long after its creation, paused or not; cannot be changed")
}

// spec resolves the flags. What names a file of this machine is looked at only when the server is on it.
func (f *specFlags) spec(a *app) (warren.Spec, error) {
	local := a.remote() == ""
	spec := warren.Spec{
		Name: f.name, Image: f.image, Workspace: f.workspace, Driver: f.driver, Restart: warren.RestartPolicy(f.restart),
		Resources:   warren.Resources{CPUMillis: uint32(f.cpu), Memory: int64(f.memory), Disk: int64(f.disk), PIDs: f.pids},
		IdleTimeout: f.idleTimeout, TTL: f.ttl, TTLAction: warren.IdleAction(f.ttlAction), MaxLifetime: f.maxLifetime, KeepWorkspace: f.keepWorkspace,
		Snapshot: f.snapshot, Template: f.template, Policy: f.policy, PrivateNetwork: f.network,
		IdleAction: warren.IdleAction(f.idleAction), NoAutoResume: !f.autoResume,
		Progress: a.progressNotes(),
	}
	if f.idle != 0 {
		if f.idleTimeout != 0 {
			return spec, fmt.Errorf("--idle and --idle-timeout: %w: they are the same; give one of the two", warren.ErrInvalid)
		}
		spec.IdleTimeout = f.idle
	}
	if f.repo != "" && f.workspace != "" {
		return spec, fmt.Errorf("--repo and --workspace: %w: a workspace is already cut; give one of the two", warren.ErrInvalid)
	}
	switch {
	case f.repo != "":
		source, err := parseRepo(f.repo, local)
		if err != nil {
			return spec, err
		}
		source.Dirty, source.Fetch = f.dirty, f.fetch
		spec.Repo = source
	case f.dirty || f.fetch:
		return spec, fmt.Errorf("--dirty and --fetch: %w: they need --repo", warren.ErrInvalid)
	}
	for _, m := range f.mounts {
		mount, err := parseMount(m, local)
		if err != nil {
			return spec, err
		}
		spec.Mounts = append(spec.Mounts, mount)
	}
	var err error
	if spec.Env, err = environment(f.envFiles, f.env); err != nil {
		return spec, err
	}
	if spec.Labels, err = pairs("label", f.labels); err != nil {
		return spec, err
	}
	if f.runtime != "" {
		f.driverOptions = append(f.driverOptions, "runtime="+f.runtime)
	}
	spec.DriverOptions, err = pairs("driver-option", f.driverOptions)
	return spec, err
}

func (a *app) showProgress(p warren.Progress) { a.progress.show(p.Step, p.Message, p.Done, p.Total) }

// pairs reads K=V flags.
func pairs(flag string, values []string) (map[string]string, error) {
	if len(values) == 0 {
		return nil, nil
	}
	m := make(map[string]string, len(values))
	for _, v := range values {
		key, value, ok := strings.Cut(v, "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("--%s %q: %w: want K=V", flag, v, warren.ErrInvalid)
		}
		m[key] = value
	}
	return m, nil
}

// environment reads files and then K=V or K flags; later ones win.
func environment(files, values []string) (map[string]string, error) {
	env := map[string]string{}
	for _, name := range files {
		if err := readEnvFile(name, env); err != nil {
			return nil, err
		}
	}
	for _, v := range values {
		key, value, ok := strings.Cut(v, "=")
		if key == "" {
			return nil, fmt.Errorf("--env %q: %w: want K=V or K", v, warren.ErrInvalid)
		}
		if !ok {
			if value, ok = os.LookupEnv(key); !ok {
				return nil, fmt.Errorf("--env %s: %w: it is not set here; give %s=VALUE", key, warren.ErrInvalid, key)
			}
		}
		env[key] = value
	}
	if len(env) == 0 {
		return nil, nil
	}
	return env, nil
}

// maxEnvLine bounds a line of a file of variables, which is far more than the server takes.
const maxEnvLine = 1 << 20

func readEnvFile(name string, env map[string]string) error {
	f, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("--env-file: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, maxEnvLine)
	n := 1
	for ; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok || key == "" {
			return fmt.Errorf("%s:%d: %w: want K=V", name, n, warren.ErrInvalid)
		}
		env[key] = value
	}
	err = lines.Err()
	if errors.Is(err, bufio.ErrTooLong) {
		return fmt.Errorf("%s:%d: %w: the line is longer than %d MiB; is this a file of variables, one K=V a line?", name, n, warren.ErrInvalid, maxEnvLine>>20)
	}
	if err != nil {
		return fmt.Errorf("--env-file %s: %w", name, err)
	}
	return nil
}

// parseMount reads HOST:PATH[:ro|rw].
func parseMount(s string, local bool) (warren.Mount, error) {
	parts := strings.Split(s, ":")
	m := warren.Mount{}
	if len(parts) == 3 && (parts[2] == "ro" || parts[2] == "rw") {
		m.Writable = parts[2] == "rw"
		parts = parts[:2]
	}
	if len(parts) != 2 || parts[0] == "" || !path.IsAbs(parts[1]) {
		return m, fmt.Errorf("--mount %q: %w: want HOST:PATH, HOST:PATH:ro or HOST:PATH:rw, with an absolute PATH", s, warren.ErrInvalid)
	}
	m.Source, m.Target = parts[0], path.Clean(parts[1])
	switch {
	case local:
		abs, err := filepath.Abs(m.Source)
		if err != nil {
			return m, err
		}
		m.Source = abs
	case !path.IsAbs(m.Source):
		return m, fmt.Errorf("--mount %q: %w: the server is elsewhere, so HOST has to be an absolute path there", s, warren.ErrInvalid)
	}
	return m, nil
}

// scpLike matches user@host:path and host:path, as git takes them.
var scpLike = regexp.MustCompile(`^(?:[^/:@]+@)?[^/:]+:`)

// parseRepo reads URL[@REF] or PATH[@REF].
func parseRepo(s string, local bool) (*warren.RepoSource, error) {
	var head string // what cannot hold the @ of a ref
	isPath := false
	if i := strings.Index(s, "://"); i >= 0 {
		j := strings.IndexByte(s[i+3:], '/')
		if j < 0 {
			return nil, fmt.Errorf("--repo %q: %w: the URL has no path", s, warren.ErrInvalid)
		}
		head = s[:i+3+j]
	} else if m := scpLike.FindString(s); m != "" && !path.IsAbs(s) {
		head = m
	} else {
		isPath = true
		if local {
			if _, err := os.Stat(s); err == nil {
				return localRepo(s, "")
			}
		}
	}
	rest, ref := s[len(head):], ""
	if i := strings.LastIndexByte(rest, '@'); i >= 0 {
		rest, ref = rest[:i], rest[i+1:]
		if ref == "" {
			return nil, fmt.Errorf("--repo %q: %w: a ref has to follow the @", s, warren.ErrInvalid)
		}
	}
	url := head + rest
	switch {
	case !isPath:
		return &warren.RepoSource{URL: url, Ref: ref}, nil
	case local:
		return localRepo(url, ref)
	case !path.IsAbs(url):
		return nil, fmt.Errorf("--repo %q: %w: the server is elsewhere, so give a URL, or an absolute path there", s, warren.ErrInvalid)
	}
	return &warren.RepoSource{URL: url, Ref: ref}, nil
}

// localRepo finds the repository that holds dir, as git does.
func localRepo(dir, ref string) (*warren.RepoSource, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(abs); err != nil {
		return nil, fmt.Errorf("--repo %s: %w: there is no such directory; give a path or a URL", dir, warren.ErrNotFound)
	}
	for top := abs; ; top = filepath.Dir(top) {
		if _, err := os.Lstat(filepath.Join(top, ".git")); err == nil {
			return &warren.RepoSource{URL: top, Ref: ref}, nil
		}
		if top == filepath.Dir(top) {
			break
		}
	}
	// A bare repository has no .git; the server looks closer.
	return &warren.RepoSource{URL: abs, Ref: ref}, nil
}
