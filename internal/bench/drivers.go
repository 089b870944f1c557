package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/warren-sandbox/warren"
)

// variant is one way to run sandboxes that the server has.
type variant struct {
	name string
	spec warren.Spec

	start, exec sample
	files       sample
	memory      int64
	kernel      string
	absent      string
}

// idleCount is how many idle sandboxes of each driver are measured.
func (o Options) idleCount() int {
	if o.Quick {
		return 1
	}
	return 3
}

// Drivers sets the server's drivers side by side: create to first command, round trip, many small files in the workspace,
// memory of an idle sandbox as its driver counts it, and whose kernel its programs call. Each of names is a driver, or
// DRIVER:RUNTIME; none means all drivers of the server. Bubblewrap and `docker run` are plain references.
func Drivers(ctx context.Context, o Options, names []string, w io.Writer) (err error) {
	s, err := o.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	variants, err := s.variants(ctx, names)
	if err != nil {
		return err
	}
	native, err := os.MkdirTemp(s.Dir, "native-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(native)
	source := filepath.Join(native, "source")
	if err := writeSource(source, s.sizes()); err != nil {
		return err
	}
	references, absent := s.references(ctx)
	for _, v := range variants {
		// What the first sandbox of a driver has to make, and whether it runs here at all.
		if err := s.startOnce(ctx, v); err != nil {
			v.absent = firstLine(err.Error())
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
		v.start = nil
	}
	for range s.rounds() {
		for _, v := range variants {
			if v.absent != "" {
				continue
			}
			if err := s.startOnce(ctx, v); err != nil {
				return fmt.Errorf("%s: %w", v.name, err)
			}
		}
		for _, y := range references {
			d, err := y.run(ctx)
			if err != nil {
				return fmt.Errorf("%s: %w", y.name, err)
			}
			y.sample = append(y.sample, d)
		}
	}
	outside := &place{sh: nativeShell(filepath.Join(native, "work"), source)}
	for _, v := range variants {
		if v.absent != "" {
			continue
		}
		if err := s.inside(ctx, v, source, outside); err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
	}
	s.reportDrivers(w, variants, references, absent, outside)
	return nil
}

// variants are what names say, or all drivers of the server.
func (s *session) variants(ctx context.Context, names []string) ([]*variant, error) {
	if len(names) == 0 {
		info, err := s.client.Version(ctx)
		if err != nil {
			return nil, err
		}
		names = info.Drivers
	}
	var out []*variant
	for _, name := range names {
		driver, runtime, _ := strings.Cut(name, ":")
		v := &variant{name: name, spec: warren.Spec{Driver: driver, Image: s.Image}}
		if runtime != "" {
			v.spec.DriverOptions = map[string]string{"runtime": runtime}
		}
		out = append(out, v)
	}
	return out, nil
}

// references are the ways that are no drivers; absent says which are not here, and why.
func (s *session) references(ctx context.Context) (ways []*way, absent []string) {
	add := func(y *way, why string) {
		if why == "" {
			if _, err := y.run(ctx); err != nil {
				why = firstLine(err.Error())
			}
		}
		if why != "" {
			absent = append(absent, y.name+" ("+why+")")
			s.record(Row{Benchmark: "drivers", Name: y.name, Absent: why})
			return
		}
		ways = append(ways, y)
	}
	add(bwrap())
	add(docker(ctx))
	return ways, absent
}

func (s *session) startOnce(ctx context.Context, v *variant) error {
	var sb *warren.Sandbox
	d, err := timed(func() (err error) {
		sb, err = s.sandboxOf(ctx, v.spec)
		return err
	})
	if err != nil {
		return err
	}
	v.start = append(v.start, d)
	return remove(ctx, sb)
}

// inside measures what goes on in a sandbox.
func (s *session) inside(ctx context.Context, v *variant, source string, outside *place) (err error) {
	var idle []*warren.Sandbox
	defer func() {
		for _, sb := range idle {
			err = errors.Join(err, remove(ctx, sb))
		}
	}()
	for range s.idleCount() {
		sb, err := s.sandboxOf(ctx, v.spec)
		if err != nil {
			return err
		}
		idle = append(idle, sb)
	}
	s.settled()
	for _, sb := range idle {
		st, err := sb.Stats(ctx)
		if err != nil {
			return err
		}
		v.memory += st.Memory / int64(len(idle))
	}
	sb := idle[0]
	for range 5 * s.rounds() {
		d, err := timed(func() error { return sb.Command("/bin/true").Run(ctx) })
		if err != nil {
			return err
		}
		v.exec = append(v.exec, d)
	}
	kernel, err := sb.Command("/bin/cat", "/proc/version").Output(ctx)
	if err != nil {
		return err
	}
	host, err := os.ReadFile("/proc/version")
	if err != nil {
		return err
	}
	v.kernel = "its own"
	if string(kernel) == string(host) {
		v.kernel = "the host's"
	}
	const inSandbox = "/tmp/warren-bench"
	if err := upload(ctx, sb, source, inSandbox); err != nil {
		return err
	}
	work := &place{sh: sandboxShell(sb, "/workspace/warren-bench", inSandbox)}
	create := s.sizes().createFiles()
	for round := range max(1, s.rounds()/5) {
		d, err := work.time(ctx, round, create)
		if err != nil {
			return err
		}
		v.files = append(v.files, d)
		if d, err = outside.time(ctx, len(outside.times[create.name]), create); err != nil {
			return err
		}
		outside.add(create.name, d)
	}
	return nil
}

func (s *session) reportDrivers(w io.Writer, variants []*variant, references []*way, absent []string, outside *place) {
	create := s.sizes().createFiles().name
	base := outside.times[create].median()
	fmt.Fprintf(w, "Drivers side by side (medians; %d starts each, taking turns)\n", s.rounds())
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(tw, "\tfirst command\tp95\tround trip\t%s\tidle memory\tkernel\t\n", create)
	for _, v := range variants {
		if v.absent != "" {
			absent = append(absent, v.name+" ("+v.absent+")")
			s.record(Row{Benchmark: "drivers", Name: v.name, Absent: v.absent})
			continue
		}
		ratio := float64(v.files.median()) / float64(base)
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s (%.2fx)\t%s\t%s\t\n", v.name, ms(v.start.median()), ms(v.start.at(0.95)), ms(v.exec.median()), ms(v.files.median()), ratio, mib(v.memory), v.kernel)
		values := v.start.values()
		values["roundTripMs"], values["filesMs"], values["filesNativeMs"], values["idleBytes"] = inMs(v.exec.median()), inMs(v.files.median()), inMs(base), float64(v.memory)
		values["ownKernel"] = map[string]float64{"its own": 1}[v.kernel]
		s.record(Row{Benchmark: "drivers", Name: v.name, Values: values})
	}
	for _, y := range references {
		fmt.Fprintf(tw, "%s\t%s\t%s\t\t\t\t%s\t\n", y.name, ms(y.median()), ms(y.at(0.95)), "the host's")
		s.record(Row{Benchmark: "drivers", Name: y.name, Values: y.values()})
	}
	if base > 0 {
		fmt.Fprintf(tw, "no sandbox\t\t\t\t%s\t\t%s\t\n", ms(base), "the host's")
	}
	tw.Flush()
	slices.Sort(absent)
	if len(absent) > 0 {
		fmt.Fprintf(w, "  not measured: %s\n", strings.Join(absent, ", "))
	}
}
