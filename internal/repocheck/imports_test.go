package repocheck

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren/internal/testenv"
)

const module = "github.com/warren-sandbox/warren"

// rule says what some packages may not import. Paths of this module begin with "./"; "./x/..." means x and all below.
type rule struct {
	of []string
	// only, when set, is all that may be imported beside the standard library; never is what may not be.
	only, never []string
	// except lifts the rule from packages, but from what may not be imported.
	except, but []string
	// deep also looks at what is imported by what is imported.
	deep bool
	why  string
}

var rules = []rule{
	{
		of:   []string{"."},
		only: []string{"connectrpc.com/connect", "google.golang.org/protobuf/...", "./proto/..."},
		why:  "whoever imports the SDK gets all that it imports",
	},
	{of: []string{"./proto/..."}, only: []string{"connectrpc.com/connect", "google.golang.org/protobuf/...", "./proto/..."}, why: "the wire contract stands on nothing of ours"},
	{of: []string{"./driver"}, only: []string{"."}, why: "a driver outside this module needs only the vocabulary"},
	{
		of: []string{"./driver/..."}, never: []string{"./internal/engine/...", "./internal/server/...", "./internal/store/...", "./internal/wire", "./cmd/..."}, deep: true,
		why: "drivers are below the engine and do not know it",
	},
	{of: []string{"./driver/fake/..."}, never: []string{"./driver/gvisor/...", "./driver/docker/..."}, deep: true, why: "drivers do not know each other"},
	{of: []string{"./driver/gvisor/..."}, never: []string{"./driver/fake/...", "./driver/docker/..."}, deep: true, why: "drivers do not know each other"},
	{of: []string{"./driver/docker/..."}, never: []string{"./driver/fake/...", "./driver/gvisor/..."}, deep: true, why: "drivers do not know each other"},
	{of: []string{"./..."}, never: []string{"github.com/moby/moby/..."}, except: []string{"./driver/docker/...", "./cmd/warren"}, deep: true, why: "one driver talks to an engine, and the daemon links it"},
	{
		of: []string{"./cmd/warren-guest", "./internal/guest/..."}, only: []string{"golang.org/x/sys/...", "github.com/hashicorp/yamux", "./internal/guest/...", "./internal/duplex"},
		except: []string{"./internal/guest/e2btest"}, why: "the guest runs in every sandbox: it must stay small, and a bug in a library would be a bug in each",
	},
	{
		of: []string{"./cmd/warren-runtime", "./driver/gvisor/keeper/..."}, never: []string{".", "connectrpc.com/...", "google.golang.org/grpc/...", "modernc.org/...", "./internal/..."},
		but: []string{"./internal/message", "./internal/companion"}, deep: true, why: "every sandbox executes this program: it links gVisor and what the keeper needs, nothing of the daemon",
	},
	{
		of: []string{"./..."}, never: []string{"gvisor.dev/..."}, except: []string{"./cmd/warren-runtime", "./driver/gvisor/keeper/...", "./driver/gvisor/patch/...", "./cmd/warren-gateway", "./internal/gateway"}, deep: true,
		why: "the daemon and the client do not link gVisor: it takes minutes to compile and 30 MB",
	},
	{
		of: []string{"./cmd/warren-gateway", "./internal/gateway"}, never: []string{"./internal/engine/...", "./internal/server/...", "./internal/store/...", "./driver/...", "gvisor.dev/gvisor/runsc/...", "gvisor.dev/gvisor/pkg/sentry/..."}, deep: true,
		why: "the gateway is what every packet ends in: it links a TCP/IP stack and its policy, and nothing of the daemon",
	},
	{
		of:    []string{"./internal/image/...", "./internal/repo/...", "./internal/git/...", "./internal/workspace/...", "./internal/store/...", "./internal/config/...", "./internal/failpoint/..."},
		never: []string{"./internal/engine/...", "./internal/server/...", "./internal/wire", "./cmd/...", "./driver/gvisor/...", "./driver/docker/...", "./driver/fake/..."}, deep: true,
		why: "durable things are valid with no sandbox running and do not know who runs them",
	},
	{of: []string{"./internal/store/..."}, never: []string{"./driver/...", "./internal/image/...", "./internal/repo/...", "./internal/workspace/..."}, deep: true, why: "the store keeps records and knows nothing of what they are about"},
	{
		of: []string{"./internal/engine"}, never: []string{"./internal/server/...", "./internal/wire", "./cmd/...", "./driver/gvisor/...", "./driver/docker/...", "./driver/fake/...", "./proto/...", "connectrpc.com/..."},
		why: "the engine knows drivers by their interface, and nothing of how it is called",
	},
	{
		of: []string{"./internal/server"}, never: []string{"./internal/store/...", "./internal/image/...", "./internal/repo/...", "./internal/git/...", "./internal/workspace/...", "./driver/gvisor/...", "./driver/docker/...", "./driver/fake/...", "./cmd/..."},
		why: "the server decodes, asks the engine and encodes; no layer is passed by",
	},
	{
		of: []string{"./internal/preview"}, only: []string{".", "./internal/engine", "./internal/duplex", "./internal/framing"},
		why: "it stands between everybody and sandboxes: it knows the engine, and nothing of records, files or how it is configured",
	},
	{of: []string{"./internal/duplex"}, only: []string{}, why: "the guest, the daemon and the previews stand on it"},
	{of: []string{"./internal/audit"}, only: []string{"golang.org/x/sys/..."}, why: "evidence stands on nothing of ours, so that nothing of ours can bend it"},
	{of: []string{"./internal/secret"}, only: []string{"golang.org/x/sys/...", "golang.org/x/sync/singleflight"}, why: "few lines see a secret's value, and these import nothing of ours that could keep it"},
	{of: []string{"./internal/secret/secrettest"}, only: []string{"./internal/secret"}, why: "it looks for secrets in all the rest and is no part of it"},
	{of: []string{"./internal/recipe"}, only: []string{".", "./internal/config", "go.yaml.in/yaml/v3"}, why: "a template is built by a client, and the daemon reads no project's files"},
	{
		of: []string{"./internal/policy"}, only: []string{"cel.dev/cel-go/...", "go.yaml.in/yaml/v3", "golang.org/x/net/idna", "golang.org/x/net/publicsuffix"},
		why: "what decides is told everything: it knows nothing of ours",
	},
	{of: []string{"./internal/policy"}, never: []string{"net", "os", "os/exec", "syscall"}, why: "a decision touches neither files nor the network"},
	{of: []string{"./internal/bench/..."}, only: []string{".", "./internal/bench/..."}, why: "it measures what a user of the SDK gets"},
	{
		of: []string{"./..."}, never: []string{"testing", "./internal/testenv"},
		except: []string{"./internal/testenv", "./driver/drivertest/...", "./driver/docker/dockertest", "./internal/server/servertest", "./internal/image/imagetest", "./internal/guest/e2btest", "./internal/secret/secrettest", "./internal/repocheck"},
		why:    "programs do not carry test code; packages of test code end in test",
	},
}

// pkg is what go list tells of a package.
type pkg struct {
	ImportPath    string
	Imports, Deps []string
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports,Deps", "./...")
	cmd.Dir = testenv.Repo(t)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var list []pkg
	for dec := json.NewDecoder(out); ; {
		var p pkg
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, p)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	return list
}

// short writes the paths of this module with a dot.
func short(path string) string {
	if path == module {
		return "."
	}
	if rest, ok := strings.CutPrefix(path, module+"/"); ok {
		return "./" + rest
	}
	return path
}

func matches(path string, patterns []string) bool {
	for _, p := range patterns {
		prefix, tree := strings.CutSuffix(p, "/...")
		if path == prefix || tree && strings.HasPrefix(path, prefix+"/") || p == "./..." && path == "." {
			return true
		}
	}
	return false
}

func standard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".")
}

// breaks returns what of a package's imports a rule forbids.
func (r rule) breaks(p pkg) (bad []string) {
	if !matches(short(p.ImportPath), r.of) || matches(short(p.ImportPath), r.except) {
		return nil
	}
	imports := p.Imports
	if r.deep {
		imports = p.Deps
	}
	for _, path := range imports {
		s := short(path)
		switch {
		case r.only != nil && s != path && matches(s, r.only), r.only != nil && s == path && (standard(path) || matches(path, r.only)):
		case r.only != nil, matches(s, r.never) && !matches(s, r.but):
			bad = append(bad, s)
		}
	}
	return bad
}

func TestImports(t *testing.T) {
	list := packages(t)
	for _, r := range rules {
		hit := false
		for _, p := range list {
			hit = hit || matches(short(p.ImportPath), r.of)
			for _, bad := range r.breaks(p) {
				t.Errorf("%s imports %s: %s", short(p.ImportPath), bad, r.why)
			}
		}
		if !hit {
			t.Errorf("no package is named %v: the rule has become empty", r.of)
		}
	}
}

// The rules themselves must notice.
func TestRuleNotices(t *testing.T) {
	only := rule{of: []string{"./a/..."}, only: []string{"x.org/y/...", "."}}
	never := rule{of: []string{"./..."}, never: []string{"./b/..."}, except: []string{"./c"}, deep: true}
	for _, tt := range []struct {
		r    rule
		p    pkg
		want []string
	}{
		{only, pkg{ImportPath: module + "/a/b", Imports: []string{"fmt", "x.org/y/z", module}}, nil},
		{only, pkg{ImportPath: module + "/a/b", Imports: []string{"x.org/z", module + "/q"}}, []string{"x.org/z", "./q"}},
		{only, pkg{ImportPath: module + "/ab", Imports: []string{"x.org/z"}}, nil},
		{never, pkg{ImportPath: module, Deps: []string{"fmt", module + "/b/c"}}, []string{"./b/c"}},
		{never, pkg{ImportPath: module + "/c", Deps: []string{module + "/b"}}, nil},
		{never, pkg{ImportPath: module + "/d", Deps: []string{module + "/bb"}}, nil},
	} {
		if got := tt.r.breaks(tt.p); !slices.Equal(got, tt.want) {
			t.Errorf("%v of %s: %v, want %v", tt.r.of, tt.p.ImportPath, got, tt.want)
		}
	}
}

// daemonFiles are those of the command that run the daemon, look at the host or measure; every other verb does what any user of the SDK could.
var daemonFiles = []string{"serve", "daemon", "doctor", "bench", "durable", "shutdown", "gateway"}

func TestCommandUsesThePublicAPI(t *testing.T) {
	for _, s := range sources(t) {
		base := filepath.Base(s.name)
		if filepath.Dir(s.name) != "cmd/warren" || strings.HasSuffix(base, "_test.go") {
			continue
		}
		verb, _, _ := strings.Cut(strings.TrimSuffix(base, ".go"), "_")
		if slices.Contains(daemonFiles, verb) {
			continue
		}
		for _, imp := range s.file.Imports {
			path, err := strconv.Unquote(imp.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if p := short(path); strings.HasPrefix(p, "./") && p != "./internal/config" && p != "./internal/recipe" {
				t.Errorf("%s imports %s: verbs are made of the public API, files that people write excepted", s.name, p)
			}
		}
	}
}
