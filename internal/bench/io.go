package bench

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/warren-sandbox/warren"
)

// targetCreate is the most that making small files in the workspace may cost, as a multiple of native.
const targetCreate = 2.5

// workload is a line of sh that is run in a directory of its own.
type workload struct {
	name string
	run  string
	// needs is a program without which the workload is left out.
	needs string
}

// sizes are how much a workload has to do.
type sizes struct {
	// files are in one tree, packages of ten files in the other.
	files, packages int
	// program is what is built: as a library without imports in a moment, as a program with the standard library below it.
	program string
}

func (o Options) sizes() sizes {
	if o.Quick {
		return sizes{files: 300, packages: 20, program: "package program\n\n// One is 1.\nfunc One() int { return 1 }\n"}
	}
	return sizes{files: 6000, packages: 400,
		program: "package main\n\nimport (\n\t\"fmt\"\n\t\"os\"\n\t\"strings\"\n)\n\nfunc main() { fmt.Println(strings.ToUpper(strings.Join(os.Args, \" \"))) }\n"}
}

// thousands writes 6000 as "6,000".
func thousands(n int) string {
	if n < 1000 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%d,%03d", n/1000, n%1000)
}

// createFiles makes many small files.
func (z sizes) createFiles() workload {
	return workload{name: "create " + thousands(z.files) + " files of 3 KB", run: `mkdir tree && tar xf "$SRC/tree.tar" --no-same-owner -m -C tree`}
}

// workloads run in this order, each round in a directory of its own; $SRC holds tree.tar, modules.tar and the module to
// build. Nothing is removed before all rounds are done: an ext4 without a journal does not use an inode again for minutes
// after a file was removed, and looks at all of those for each file that is made.
func (z sizes) workloads() []workload {
	return []workload{
		z.createFiles(),
		{name: "stat walk of them", run: `find tree -type f -size +1k | wc -l`},
		{name: "read them", run: `tar cf - tree | wc -c`},
		{name: "git add and commit", needs: "git", run: `cd tree && git init -q -b main . && git add . && git -c user.name=b -c user.email=b@b commit -q -m b`},
		{name: "git status", needs: "git", run: `cd tree && git status --short`},
		{name: "git clone --local", needs: "git", run: `git clone -q --local --no-hardlinks tree clone`},
		{name: "npm-like tree, " + thousands(10*z.packages) + " files", run: `mkdir app && tar xf "$SRC/modules.tar" --no-same-owner -m -C app`},
		{name: "go build, cold cache", needs: "go", run: `cp -r "$SRC/module" module && cd module && GOCACHE="$PWD/cache" GOFLAGS=-mod=mod GOPROXY=off GOTOOLCHAIN=local CGO_ENABLED=0 go build -o program .`},
	}
}

var removal = workload{name: "rm -rf of all that", run: `rm -rf tree clone app module`}

// IO measures work with many files in the workspace and in the root overlay of a sandbox beside the same work outside, on
// the same disk, taking turns. It prints the medians and their ratios to w.
func IO(ctx context.Context, o Options, w io.Writer) (err error) {
	s, err := o.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	native, err := os.MkdirTemp(s.Dir, "native-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(native)
	sb, err := s.client.Create(ctx, warren.Spec{Image: s.Image, Resources: warren.Resources{Disk: 8 << 30, Memory: 4 << 30}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove(ctx, sb)) }()
	const inSandbox = "/tmp/warren-bench"
	source := filepath.Join(native, "source")
	z := s.sizes()
	if err := writeSource(source, z); err != nil {
		return err
	}
	if err := upload(ctx, sb, source, inSandbox); err != nil {
		return err
	}
	places := []*place{
		{name: "native", sh: nativeShell(filepath.Join(native, "work"), source)},
		{name: "workspace", sh: sandboxShell(sb, "/workspace/warren-bench", inSandbox)},
		{name: "root overlay", sh: sandboxShell(sb, "/var/tmp/warren-bench", inSandbox)},
	}
	rounds := max(1, s.rounds()/5)
	left := map[string]string{}
	measure := func(round int, l workload) error {
		for _, p := range places {
			if left[l.name] != "" {
				return nil
			}
			d, err := p.time(ctx, round, l)
			if errors.Is(err, errMissing) {
				left[l.name] = err.Error()
				return nil
			}
			if err != nil {
				return fmt.Errorf("%s, %s: %w", l.name, p.name, err)
			}
			p.add(l.name, d)
		}
		return nil
	}
	for round := range rounds {
		for _, l := range z.workloads() {
			if err := measure(round, l); err != nil {
				return err
			}
		}
	}
	for round := range rounds {
		if err := measure(round, removal); err != nil {
			return err
		}
	}
	s.report(w, places, rounds, left)
	return nil
}

func (o Options) report(w io.Writer, places []*place, rounds int, left map[string]string) {
	fmt.Fprintf(w, "Files: the same work outside and inside, median of %d runs that take turns\n", rounds)
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "\tnative\tworkspace\t\troot overlay\t\t")
	for _, l := range append(o.sizes().workloads(), removal) {
		if left[l.name] != "" {
			continue
		}
		base := places[0].times[l.name].median()
		fmt.Fprintf(tw, "%s\t%s\t", l.name, ms(base))
		v := map[string]float64{"runs": float64(rounds), "nativeMs": inMs(base)}
		for i, p := range places[1:] {
			d := p.times[l.name].median()
			v[[]string{"workspaceMs", "rootMs"}[i]] = inMs(d)
			fmt.Fprintf(tw, "%s\t%.2fx\t", ms(d), float64(d)/float64(base))
		}
		fmt.Fprintln(tw)
		o.record(Row{Benchmark: "files", Name: l.name, Values: v})
	}
	tw.Flush()
	for name, why := range left {
		fmt.Fprintf(w, "  not measured: %s (%s)\n", name, why)
		o.record(Row{Benchmark: "files", Name: name, Absent: why})
	}
	create := o.sizes().createFiles().name
	ratio := float64(places[1].times[create].median()) / float64(places[0].times[create].median())
	o.verdict(w, "files", "making small files in the workspace", ratio <= targetCreate, fmt.Sprintf("%.1fx native", targetCreate))
}

var errMissing = errors.New("a program is missing")

// place is where work is done. Its shell stays, so that starting one is not measured.
type place struct {
	name  string
	sh    func(ctx context.Context, line string) (string, error)
	times map[string]sample
}

func (p *place) add(name string, d time.Duration) {
	if p.times == nil {
		p.times = map[string]sample{}
	}
	p.times[name] = append(p.times[name], d)
}

// time runs a workload and returns what a clock beside it showed.
func (p *place) time(ctx context.Context, round int, l workload) (time.Duration, error) {
	if l.needs != "" {
		if _, err := p.sh(ctx, "command -v "+l.needs); err != nil {
			return 0, fmt.Errorf("%w: %s has no %s", errMissing, p.name, l.needs)
		}
	}
	out, err := p.sh(ctx, fmt.Sprintf(`mkdir -p round%d && cd round%d; `, round, round)+`begin=$(date +%s%N); ( `+l.run+` ) >/dev/null || exit 1; end=$(date +%s%N); echo "took $((end-begin))"`)
	if err != nil {
		return 0, err
	}
	_, text, ok := strings.Cut(out, "took ")
	ns, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if !ok || err != nil {
		return 0, fmt.Errorf("no time in %q", out)
	}
	return time.Duration(ns), nil
}

// prelude makes the two sides alike: same directory layout, same PATH, no one's configuration.
func prelude(dir, source string) string {
	return fmt.Sprintf(`set -e; export SRC=%q PATH=/usr/local/go/bin:/usr/local/bin:/usr/bin:/bin GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null HOME=/tmp; mkdir -p %q; cd %q; `, source, dir, dir)
}

func nativeShell(dir, source string) func(context.Context, string) (string, error) {
	return func(ctx context.Context, line string) (string, error) {
		cmd := exec.CommandContext(ctx, "/bin/sh", "-c", prelude(dir, source)+line)
		return output(cmd.Output())
	}
}

func sandboxShell(sb *warren.Sandbox, dir, source string) func(context.Context, string) (string, error) {
	return func(ctx context.Context, line string) (string, error) {
		return output(sb.Command("/bin/sh", "-c", prelude(dir, source)+line).Output(ctx))
	}
}

func output(out []byte, err error) (string, error) {
	var native *exec.ExitError
	var inside *warren.ExitError
	switch {
	case errors.As(err, &native):
		err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(native.Stderr))
	case errors.As(err, &inside):
		err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(inside.Stderr))
	}
	return string(out), err
}

// writeSource makes what the workloads start from.
func writeSource(dir string, z sizes) error {
	rnd := rand.New(rand.NewPCG(1, 2))
	if err := os.MkdirAll(filepath.Join(dir, "module"), 0o755); err != nil {
		return err
	}
	tree := map[string]int{}
	for i := range z.files {
		tree[fmt.Sprintf("d%02d/s%d/file%d.txt", i%60, i%7, i)] = 3 << 10
	}
	modules := map[string]int{}
	for i := range z.packages {
		base := fmt.Sprintf("node_modules/package-%d/", i)
		if i%5 == 0 {
			base = fmt.Sprintf("node_modules/package-%d/node_modules/inner-%d/", i-1, i)
		}
		for _, f := range []string{"package.json", "README.md", "LICENSE", "index.js", "index.d.ts", "lib/a.js", "lib/b.js", "lib/util/c.js", "dist/min.js", "dist/min.js.map"} {
			modules[base+f] = 200 + rnd.IntN(4000)
		}
	}
	for name, files := range map[string]map[string]int{"tree.tar": tree, "modules.tar": modules} {
		b, err := archive(files, rnd)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			return err
		}
	}
	for name, text := range map[string]string{
		"module/go.mod":  "module example.test/program\n\ngo 1.21\n",
		"module/main.go": z.program,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func archive(files map[string]int, rnd *rand.Rand) ([]byte, error) {
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for name, size := range files {
		if err := tw.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(size), Typeflag: tar.TypeReg}); err != nil {
			return nil, err
		}
		text := make([]byte, size)
		for i := range text {
			text[i] = byte('a' + rnd.IntN(26))
		}
		if _, err := tw.Write(text); err != nil {
			return nil, err
		}
	}
	// The end of the archive is written by Close.
	err := tw.Close()
	return b.Bytes(), err
}

// upload copies the source into a sandbox as one stream.
func upload(ctx context.Context, sb *warren.Sandbox, from, to string) error {
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	if err := tw.AddFS(os.DirFS(from)); err != nil {
		return err
	}
	if err := tw.Close(); err != nil {
		return err
	}
	cmd := sb.Command("/bin/sh", "-c", fmt.Sprintf("mkdir -p %q && tar xf - --no-same-owner -C %q", to, to))
	cmd.Stdin = &b
	out, err := cmd.CombinedOutput(ctx)
	if err != nil {
		return fmt.Errorf("copy into the sandbox: %w %s", err, out)
	}
	return nil
}
