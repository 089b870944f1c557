// Package recipe reads what a project's template is built from: a warren.yaml or a devcontainer.json in the project.
//
// The warren.yaml of a project is another thing than the daemon's configuration, which lies in the data directory: this one is read
// by `warren template build` only.
package recipe

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/config"
)

// FileName is the recipe in a project's root.
const FileName = "warren.yaml"

// Recipe is what a file describes.
type Recipe struct {
	// Spec has no Name unless the file gives one, and no Repo, which is to be made of Repo.
	Spec warren.TemplateSpec
	// Repo is a URL or path with an optional @REF, as a person writes it. A relative path is relative to the file's directory.
	// Empty means none.
	Repo string
	// Path is the file, and Dir the project's root.
	Path, Dir string
	// Notes say which parts of the file have no effect.
	Notes []string
}

// maxFile bounds a recipe.
const maxFile = 1 << 20

// Load reads the recipe at path: a file, or a directory that holds one.
func Load(path string) (*Recipe, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w: there is no such file or directory", path, warren.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	root := filepath.Dir(path)
	if info.IsDir() {
		root = path
		if path, err = find(path); err != nil {
			return nil, err
		}
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxFile {
		return nil, fmt.Errorf("%s: %w: longer than %d bytes; is this a recipe?", path, warren.ErrInvalid, maxFile)
	}
	var r *Recipe
	if strings.HasSuffix(path, ".json") {
		if filepath.Base(root) == ".devcontainer" {
			root = filepath.Dir(root)
		}
		r, err = devcontainer(b, root, path)
	} else {
		r, err = parse(b)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	r.Path, r.Dir = path, root
	return r, nil
}

// find returns the recipe of a project: its own comes before that of others.
func find(dir string) (string, error) {
	names := []string{FileName, filepath.Join(".devcontainer", "devcontainer.json"), ".devcontainer.json", "devcontainer.json"}
	for _, name := range names {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s: %w: it has neither %s nor .devcontainer/devcontainer.json; write one, or name the file", dir, warren.ErrNotFound, FileName)
}

// file is warren.yaml.
type file struct {
	Name         string            `yaml:"name"`
	Image        string            `yaml:"image"`
	Repo         string            `yaml:"repo"`
	Env          map[string]string `yaml:"env"`
	Resources    resources         `yaml:"resources"`
	Driver       string            `yaml:"driver"`
	Setup        []step            `yaml:"setup"`
	Services     []service         `yaml:"services"`
	ReadyTimeout time.Duration     `yaml:"ready_timeout"`
	Ports        []int             `yaml:"ports"`
	IdleTimeout  time.Duration     `yaml:"idle_timeout"`
}

type resources struct {
	CPU    string `yaml:"cpu"`
	Memory string `yaml:"memory"`
	Disk   string `yaml:"disk"`
	PIDs   uint32 `yaml:"pids"`
}

type step struct {
	Name    string            `yaml:"name"`
	Run     string            `yaml:"run"`
	Timeout time.Duration     `yaml:"timeout"`
	User    string            `yaml:"user"`
	Dir     string            `yaml:"dir"`
	Env     map[string]string `yaml:"env"`
}

// UnmarshalYAML takes a bare command too. The decoder's strictness does not reach here, so unknown keys are looked for.
func (s *step) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode {
		return n.Decode(&s.Run)
	}
	if err := known(n, "a step", "name", "run", "timeout", "user", "dir", "env"); err != nil {
		return err
	}
	type plain step
	return n.Decode((*plain)(s))
}

// command is a script for sh, or a program and its arguments.
type command []string

func (c *command) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode {
		if n.Value == "" {
			return fmt.Errorf("line %d: the command is empty", n.Line)
		}
		*c = shell(n.Value)
		return nil
	}
	var words []string
	if err := n.Decode(&words); err != nil {
		return err
	}
	*c = words
	return nil
}

// shell runs a line with sh.
func shell(line string) []string { return []string{"sh", "-c", line} }

type service struct {
	Name    string            `yaml:"name"`
	Command command           `yaml:"command"`
	User    string            `yaml:"user"`
	Dir     string            `yaml:"dir"`
	Env     map[string]string `yaml:"env"`
	Port    int               `yaml:"port"`
	Ready   *ready            `yaml:"ready"`
	Restart string            `yaml:"restart"`
}

type ready struct {
	HTTP     string        `yaml:"http"`
	TCP      bool          `yaml:"tcp"`
	Command  command       `yaml:"command"`
	Interval time.Duration `yaml:"interval"`
	Timeout  time.Duration `yaml:"timeout"`
	Retries  int           `yaml:"retries"`
}

// known refuses keys of a mapping that are none of names.
func known(n *yaml.Node, what string, names ...string) error {
	if n.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: %s is a mapping with %s", n.Line, what, strings.Join(names, ", "))
	}
	for i := 0; i < len(n.Content); i += 2 {
		key := n.Content[i]
		ok := false
		for _, name := range names {
			ok = ok || key.Value == name
		}
		if !ok {
			return fmt.Errorf("line %d: %s has no key %q; want %s", key.Line, what, key.Value, strings.Join(names, ", "))
		}
	}
	return nil
}

func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %s", warren.ErrInvalid, fmt.Sprintf(format, args...))
}

// wrongType is what the library says of a value of another type than its key's.
var wrongType = regexp.MustCompile("cannot unmarshal !!([a-z]+)(?: `((?s:.*?))`)? into (\\[\\][a-z.A-Z0-9]+|map\\[string\\]string|[a-z.A-Z0-9]+)")

// sayType says that a value is of another type than its key's, in words of the file.
func sayType(have, value, want string) string {
	if value == "" {
		value = map[string]string{"seq": "a list", "map": "a mapping"}[have]
	}
	if value == "" {
		value = "the value"
	} else if have != "seq" && have != "map" {
		value = fmt.Sprintf("%q", value)
	}
	say, ok := map[string]string{
		"time.Duration": "a time with its unit, such as 30s or 5m", "int": "a whole number", "uint32": "a whole number, 0 or more", "bool": "true or false",
		"string": "text", "[]int": "a list of whole numbers, such as [3000, 8080]", "[]string": "a list of words", "map[string]string": "a mapping of names to text",
		"[]recipe.step": "a list of steps, each a command or a mapping with run", "[]recipe.service": "a list of services, each a mapping with name and command",
		"recipe.file": "a mapping with image, setup, services and so on", "recipe.service": "a mapping with name and command", "recipe.plain": "a mapping with run",
		"recipe.resources": "a mapping with cpu, memory, disk and pids", "recipe.ready": "a mapping with http, tcp or command",
	}[want]
	if !ok {
		return value + " cannot stand here"
	}
	return value + " is not " + say
}

// parse reads a warren.yaml.
func parse(b []byte) (*Recipe, error) {
	var f file
	dec := yaml.NewDecoder(bytes.NewReader(b))
	dec.KnownFields(true)
	if err := dec.Decode(&f); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, bad("it is empty")
		}
		// The library names Go types, which tell a reader of the file nothing.
		msg := strings.TrimPrefix(err.Error(), "yaml: ")
		msg = strings.ReplaceAll(strings.ReplaceAll(msg, "unmarshal errors:\n  ", ""), "\n  ", "; ")
		msg = wrongType.ReplaceAllStringFunc(msg, func(s string) string {
			m := wrongType.FindStringSubmatch(s)
			return sayType(m[1], m[2], m[3])
		})
		for _, t := range [][2]string{{"file", "a recipe"}, {"resources", "resources"}, {"service", "a service"}, {"ready", "ready"}} {
			msg = strings.ReplaceAll(msg, " not found in type recipe."+t[0], " is not known in "+t[1])
		}
		return nil, bad("%s", msg)
	}
	if err := dec.Decode(new(any)); !errors.Is(err, io.EOF) {
		return nil, bad("it holds more than one document")
	}
	s := warren.TemplateSpec{Name: f.Name, Image: f.Image, Env: f.Env, Driver: f.Driver, ReadyTimeout: f.ReadyTimeout, Ports: f.Ports, IdleTimeout: f.IdleTimeout}
	var err error
	if s.Resources, err = f.Resources.parse(); err != nil {
		return nil, err
	}
	for i, st := range f.Setup {
		if strings.TrimSpace(st.Run) == "" {
			return nil, bad("step %d of setup has nothing to run", i+1)
		}
		if st.Timeout < 0 {
			return nil, bad("step %d of setup: timeout %v is negative", i+1, st.Timeout)
		}
		s.Setup = append(s.Setup, warren.TemplateStep(st))
	}
	names := map[string]bool{}
	for i, v := range f.Services {
		sv, err := v.parse(i)
		if err != nil {
			return nil, err
		}
		if names[sv.Name] {
			return nil, bad("two services are named %s", sv.Name)
		}
		names[sv.Name] = true
		s.Services = append(s.Services, sv)
	}
	for _, d := range []struct {
		key string
		v   time.Duration
	}{{"ready_timeout", f.ReadyTimeout}, {"idle_timeout", f.IdleTimeout}} {
		if d.v < 0 {
			return nil, bad("%s %v is negative", d.key, d.v)
		}
	}
	return &Recipe{Spec: s, Repo: f.Repo}, checkPorts(f.Ports)
}

func checkPorts(ports []int) error {
	for _, p := range ports {
		if p < 1 || p > 1<<16-1 {
			return bad("%d is no port; want 1 to 65535", p)
		}
	}
	return nil
}

func (r resources) parse() (warren.Resources, error) {
	out := warren.Resources{PIDs: r.PIDs}
	if r.CPU != "" {
		n, err := config.ParseCPUs(r.CPU)
		if err != nil {
			return out, bad("resources.cpu: %v", err)
		}
		out.CPUMillis = uint32(n)
	}
	for _, f := range []struct {
		key, v string
		to     *int64
	}{{"memory", r.Memory, &out.Memory}, {"disk", r.Disk, &out.Disk}} {
		if f.v == "" {
			continue
		}
		n, err := config.ParseSize(f.v)
		if err != nil {
			return out, bad("resources.%s: %v", f.key, err)
		}
		*f.to = int64(n)
	}
	return out, nil
}

// parse checks what a build would only find out after its setup.
func (v service) parse(i int) (warren.Service, error) {
	s := warren.Service{Name: v.Name, Command: v.Command, User: v.User, Dir: v.Dir, Env: v.Env, Port: v.Port, Restart: v.Restart}
	if s.Name == "" {
		return s, bad("service %d has no name", i+1)
	}
	fail := func(format string, args ...any) (warren.Service, error) {
		return s, bad("service %.70s: %s", s.Name, fmt.Sprintf(format, args...))
	}
	switch {
	case len(s.Name) > 64 || strings.Trim(s.Name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") != "":
		return fail("use up to 64 letters, digits, dots, dashes and underscores for its name")
	case len(s.Command) == 0 || s.Command[0] == "":
		return fail("it has no command")
	case s.Port < 0 || s.Port > 1<<16-1:
		return fail("%d is no port; want 1 to 65535", s.Port)
	}
	switch s.Restart {
	case "", "always", "on-failure", "never":
	default:
		return fail("restart %.40q is none of always, on-failure and never", s.Restart)
	}
	c := v.Ready
	if c == nil {
		return s, nil
	}
	ways := 0
	for _, way := range []bool{c.HTTP != "", c.TCP, len(c.Command) > 0} {
		if way {
			ways++
		}
	}
	switch {
	case ways != 1:
		return fail("its ready check is by one of http: /PATH, tcp: true and command")
	case len(c.Command) == 0 && s.Port == 0:
		return fail("its ready check needs a port")
	case c.HTTP != "" && c.HTTP[0] != '/':
		return fail("http %.100q of its ready check is no path; it begins with /", c.HTTP)
	case c.Interval < 0 || c.Timeout < 0 || c.Retries < 0 || c.Interval > time.Hour || c.Timeout > time.Hour:
		return fail("times and counts of its ready check are not negative, and times at most an hour")
	}
	s.Check = &warren.ServiceCheck{HTTPPath: c.HTTP, TCP: c.TCP, Command: c.Command, Interval: c.Interval, Timeout: c.Timeout, Retries: c.Retries}
	return s, nil
}
