package recipe

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/warren-sandbox/warren"
)

// What a devcontainer.json may say. A key that is in none of the lists is an error: it may change what the rest means.
var (
	// ignored keys change nothing that a sandbox has.
	ignored = map[string]string{
		"$schema": "", "customizations": "", "name": "the template's name is given to the command",
		"remoteUser": "commands run as the sandbox's own user", "containerUser": "commands run as the sandbox's own user", "updateRemoteUserUID": "",
		"workspaceFolder": "the workspace is /workspace", "workspaceMount": "the workspace is /workspace",
		"shutdownAction": "", "overrideCommand": "", "portsAttributes": "", "otherPortsAttributes": "", "hostRequirements": "give resources to the sandbox instead",
		"waitFor": "", "userEnvProbe": "", "init": "", "postAttachCommand": "nothing is attached", "initializeCommand": "nothing is run on this machine", "appPort": "use forwardPorts",
	}
	// refused keys say that the container is another one than the rest describes.
	refused = map[string]string{
		"dockerComposeFile": "name one image, and write the other containers as services of a " + FileName,
		"service":           "it belongs to dockerComposeFile; write a " + FileName + " with services", "runServices": "it belongs to dockerComposeFile; write a " + FileName + " with services",
		"build": "build the image with a tool for that and name it as image, or write its steps as setup of a " + FileName, "dockerFile": "name an image, or write its steps as setup of a " + FileName,
		"mounts":     "a template has no mounts; what it needs has to be in the image or the repository",
		"runArgs":    "they are for another program; see resources and env of a " + FileName,
		"privileged": "sandboxes are never privileged", "capAdd": "sandboxes get no capabilities", "securityOpt": "the boundary of sandboxes is not for templates to change",
	}
	// hooks are run in this order.
	hooks = []string{"onCreateCommand", "updateContentCommand", "postCreateCommand", "postStartCommand"}
)

type container struct {
	Image        string                     `json:"image"`
	Features     map[string]json.RawMessage `json:"features"`
	ForwardPorts []json.RawMessage          `json:"forwardPorts"`
	ContainerEnv map[string]*string         `json:"containerEnv"`
	RemoteEnv    map[string]*string         `json:"remoteEnv"`
}

// devcontainer reads a devcontainer.json of the project at root.
func devcontainer(b []byte, root, file string) (*Recipe, error) {
	plain, err := uncomment(b)
	if err != nil {
		return nil, err
	}
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(plain, &keys); err != nil {
		return nil, jsonError(plain, err)
	}
	r := &Recipe{}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		if slices.Contains(hooks, key) || slices.Contains([]string{"image", "features", "forwardPorts", "containerEnv", "remoteEnv"}, key) {
			continue
		}
		if hint, ok := refused[key]; ok {
			return nil, bad("%s cannot be had: %s", key, hint)
		}
		why, ok := ignored[key]
		if !ok {
			return nil, bad("the key %q is not known; leave it out, or write a %s", key, FileName)
		}
		if why != "" {
			r.Notes = append(r.Notes, fmt.Sprintf("%s has no effect: %s", key, why))
		}
	}
	var c container
	if err := json.Unmarshal(plain, &c); err != nil {
		return nil, jsonError(plain, err)
	}
	if c.Image == "" {
		return nil, bad("it names no image; add one")
	}
	r.Spec.Image = c.Image
	for _, env := range []map[string]*string{c.ContainerEnv, c.RemoteEnv} {
		for k, v := range env {
			if v == nil {
				return nil, bad("the variable %s is null; leave it out", k)
			}
			if r.Spec.Env == nil {
				r.Spec.Env = map[string]string{}
			}
			if r.Spec.Env[k], err = expand(k, *v); err != nil {
				return nil, err
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Features)) {
		st, err := feature(name, c.Features[name], root, filepath.Dir(file))
		if err != nil {
			return nil, err
		}
		r.Spec.Setup = append(r.Spec.Setup, st)
	}
	for _, hook := range hooks {
		if raw, ok := keys[hook]; ok {
			steps, err := lifecycle(hook, raw)
			if err != nil {
				return nil, err
			}
			r.Spec.Setup = append(r.Spec.Setup, steps...)
		}
	}
	for _, raw := range c.ForwardPorts {
		text := strings.Trim(string(raw), `"`)
		n, err := strconv.Atoi(strings.TrimPrefix(text, "localhost:"))
		if err != nil {
			return nil, bad("forwardPorts: %.60s is not a port of this container", text)
		}
		r.Spec.Ports = append(r.Spec.Ports, n)
	}
	if _, err := os.Lstat(filepath.Join(root, ".git")); err == nil {
		r.Repo = "."
	} else {
		r.Notes = append(r.Notes, "the project is in no git repository, so the workspace is empty")
	}
	return r, checkPorts(r.Spec.Ports)
}

func jsonError(b []byte, err error) error {
	msg := err.Error()
	at := int64(-1)
	switch e := err.(type) {
	case *json.SyntaxError:
		at = e.Offset
	case *json.UnmarshalTypeError:
		at, msg = e.Offset, fmt.Sprintf("%s cannot be a %s", e.Field, e.Value)
	}
	if at >= 0 {
		return bad("line %d: %s", 1+bytes.Count(b[:min(at, int64(len(b)))], []byte("\n")), msg)
	}
	return bad("%s", msg)
}

// uncomment blanks out comments and commas before a closing bracket, so that lines stay where they are.
func uncomment(b []byte) ([]byte, error) {
	out := bytes.Clone(b)
	comma := -1 // the last one with only space behind it so far
	for i := 0; i < len(out); i++ {
		switch ch := out[i]; {
		case ch == '"':
			comma = -1
			for i++; i < len(out) && out[i] != '"'; i++ {
				if out[i] == '\\' {
					i++
				}
			}
		case ch == '/' && i+1 < len(out) && out[i+1] == '/':
			for ; i < len(out) && out[i] != '\n'; i++ {
				out[i] = ' '
			}
		case ch == '/' && i+1 < len(out) && out[i+1] == '*':
			end := bytes.Index(out[i+2:], []byte("*/"))
			if end < 0 {
				return nil, bad("line %d: a comment has no end", 1+bytes.Count(out[:i], []byte("\n")))
			}
			for end += i + 4; i < end; i++ {
				if out[i] != '\n' {
					out[i] = ' '
				}
			}
			i--
		case ch == ',':
			comma = i
		case ch == '}' || ch == ']':
			if comma >= 0 {
				out[comma] = ' '
			}
			comma = -1
		case ch != ' ' && ch != '\t' && ch != '\n' && ch != '\r':
			comma = -1
		}
	}
	return out, nil
}

var variable = regexp.MustCompile(`\$\{([^}]*)\}`)

// expand replaces the variables of the format in a value.
func expand(key, v string) (string, error) {
	var failed error
	out := variable.ReplaceAllStringFunc(v, func(m string) string {
		name := m[2 : len(m)-1]
		if rest, ok := strings.CutPrefix(name, "localEnv:"); ok {
			name, def, _ := strings.Cut(rest, ":")
			if v, ok := os.LookupEnv(name); ok {
				return v
			}
			return def
		}
		switch name {
		case "containerWorkspaceFolder":
			return "/workspace"
		case "containerWorkspaceFolderBasename":
			return "workspace"
		}
		failed = bad("the variable %s: %s cannot be had; of these there are ${localEnv:NAME} and ${containerWorkspaceFolder}", key, m)
		return ""
	})
	return out, failed
}

// feature is the step that runs the install.sh of a directory beside the file.
func feature(name string, raw json.RawMessage, root, dir string) (warren.TemplateStep, error) {
	if !strings.HasPrefix(name, "./") {
		return warren.TemplateStep{}, bad("feature %s comes from a registry; only directories beside this file with an install.sh are run, such as ./tools: put what it does there, or into the image", name)
	}
	at := filepath.Join(dir, filepath.FromSlash(name))
	rel, err := filepath.Rel(root, at)
	if err != nil || !filepath.IsLocal(rel) {
		return warren.TemplateStep{}, bad("feature %s is outside of the project", name)
	}
	if info, err := os.Stat(filepath.Join(at, "install.sh")); err != nil || !info.Mode().IsRegular() {
		return warren.TemplateStep{}, bad("feature %s has no install.sh", name)
	}
	env := map[string]string{}
	var options map[string]any
	if err := json.Unmarshal(raw, &options); err != nil {
		var version string
		if json.Unmarshal(raw, &version) != nil {
			return warren.TemplateStep{}, bad("feature %s: its options are an object or a version", name)
		}
		options = map[string]any{"version": version}
	}
	for k, v := range options {
		env[strings.ToUpper(notWord.ReplaceAllString(k, "_"))] = fmt.Sprint(v)
	}
	return warren.TemplateStep{Name: "feature " + name, Run: "exec sh ./install.sh", User: "root", Dir: path.Join("/workspace", filepath.ToSlash(rel)), Env: env}, nil
}

var notWord = regexp.MustCompile(`[^A-Za-z0-9_]`)

// lifecycle are the steps of a hook: a line for the shell, a program and its arguments, or several of these by name.
func lifecycle(hook string, raw json.RawMessage) ([]warren.TemplateStep, error) {
	run, ok := line(raw)
	if ok {
		if strings.TrimSpace(run) == "" {
			return nil, nil
		}
		return []warren.TemplateStep{{Name: hook, Run: run}}, nil
	}
	var several map[string]json.RawMessage
	if err := json.Unmarshal(raw, &several); err != nil {
		return nil, bad("%s is a command, a list of words, or several commands by name", hook)
	}
	var steps []warren.TemplateStep
	for _, name := range slices.Sorted(maps.Keys(several)) {
		run, ok := line(several[name])
		if !ok || strings.TrimSpace(run) == "" {
			return nil, bad("%s: %s is a command or a list of words", hook, name)
		}
		steps = append(steps, warren.TemplateStep{Name: hook + " " + name, Run: run})
	}
	return steps, nil
}

// line is a command as the shell reads it.
func line(raw json.RawMessage) (string, bool) {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s, true
	}
	var words []string
	if json.Unmarshal(raw, &words) != nil {
		return "", false
	}
	for i, w := range words {
		words[i] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
	}
	return strings.Join(words, " "), true
}
