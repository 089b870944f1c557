// Patch makes a copy of gVisor's module in which checkpoints, restores and commands are faster and two faults are mended, and a go.mod that uses it:
//
//	go build -modfile="$(go run ./driver/gvisor/patch .cache/gvisor)" ./cmd/warren-runtime
//
// It prints the path of that go.mod. Without it the runtime works too, takes longer for each, and has the faults. What is changed
// are the edits below, each of which has to fit exactly once, so a new version of gVisor that needs others does not build.
package main

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
)

const module = "gvisor.dev/gvisor"

//go:embed pgalloc/holes.go boot/busy.go boot/clocks.go boot/copier.go boot/ahead.go boot/mapped.go state/plain.go state/parallel.go gofer/mount.go
var sources embed.FS

// source is a file of our own, and where it goes.
type source struct{ name, to string }

var added = []source{
	{"pgalloc/holes.go", "pkg/sentry/pgalloc/warren_holes.go"},
	{"boot/busy.go", "runsc/boot/warren_busy.go"},
	{"boot/clocks.go", "runsc/boot/warren_clocks.go"},
	{"boot/copier.go", "runsc/boot/warren_copier.go"},
	{"boot/ahead.go", "runsc/boot/warren_ahead.go"},
	{"boot/mapped.go", "runsc/boot/warren_mapped.go"},
	{"state/plain.go", "pkg/state/warren_plain.go"},
	{"state/parallel.go", "pkg/state/warren_parallel.go"},
	{"gofer/mount.go", "pkg/sentry/fsimpl/gofer/warren_mount.go"},
}

func (s source) content() []byte {
	b, err := sources.ReadFile(s.name)
	if err != nil {
		panic(err) // it is embedded
	}
	return b
}

// edit is one place that is changed.
type edit struct{ file, old, new string }

var edits = []edit{
	// What was never touched is not read, see holes.go. The save of the kernel waits meanwhile, for it asks the same lock.
	{"pkg/sentry/pgalloc/save_restore.go", "zeroPage := make([]byte, hostarch.PageSize)", "zeroPage := make([]byte, hostarch.PageSize)\n\tvar untouched memoryHoles"},
	{"pkg/sentry/pgalloc/save_restore.go", "isZeroed := bytes.Equal(pg, zeroPage)", "isZeroed := !wasCommitted && untouched.at(f.file, off) || bytes.Equal(pg, zeroPage)"},
	// Pages are read and written by 128 goroutines, each of which gets a thread and a processor of Go's, so the world is stopped twice for a
	// file of 2 MiB. As many as can run at a time are enough; the queue stays as long.
	{"pkg/aio/aio.go", "func newGoQueue(cap, workers int) *GoQueue {", "func newGoQueue(cap, workers int) *GoQueue {\n\tworkers = min(workers, 2*runtime.NumCPU())"},
	{"pkg/aio/aio.go", "import (\n", "import (\n\t\"runtime\"\n"},
	// See busy.go.
	{"runsc/boot/controller.go", `log.Debugf("containerManager.StartRoot, cid: %s", *cid)`, `log.Debugf("containerManager.StartRoot, cid: %s", *cid); asked.Store(true); roomy()`},
	{"runsc/boot/controller.go", `log.Debugf("containerManager.Restore")`, `log.Debugf("containerManager.Restore"); asked.Store(true); busy()`},
	{"runsc/boot/controller.go", `log.Debugf("containerManager.Checkpoint")`, `log.Debugf("containerManager.Checkpoint"); roomy()`},
	// See ahead.go.
	{"runsc/boot/loader.go", "func (l *Loader) WaitForStartSignal() {\n", "func (l *Loader) WaitForStartSignal() {\n" + workAhead},
	{"runsc/cmd/sentry/sentrycmd/boot.go", "\t\tl.PreSeccompCallback = func() {\n", "\t\tl.PreSeccompCallback = sync.OnceFunc(func() {\n"},
	{"runsc/cmd/sentry/sentrycmd/boot.go", "UmountProc(b.procMountSyncFD)\n\t\t\t}\n\t\t}\n", "UmountProc(b.procMountSyncFD)\n\t\t\t}\n\t\t})\n"},
	{"runsc/cmd/sentry/sentrycmd/boot.go", "\t\t\ttimer.Reached(\"open FDs validated\")\n", ""}, // which is another goroutine's
	{"runsc/cmd/sentry/sentrycmd/boot.go", "\t\"strings\"\n", "\t\"strings\"\n\t\"sync\"\n"},
	{"pkg/sentry/platform/systrap/systrap.go", "// NewContext returns an interruptible platformContext.\n", prepareStubs + "// NewContext returns an interruptible platformContext.\n"},
	// See mapped.go.
	{"runsc/boot/restore.go", "\t// Since we have a new kernel we also must make a new watchdog.\n", "\tmapAhead(l.k)\n\n\t// Since we have a new kernel we also must make a new watchdog.\n"},
	{"pkg/sentry/mm/address_space.go", "// unmapASLocked removes all", mapMemory + "// unmapASLocked removes all"},
	// See copier.go.
	{"runsc/boot/controller.go", "\t\tstateio.NewPagesFileFDReaderDefault(int32(pagesFile.Release())),", "\t\tnewCopier(int32(pagesFile.Release())),"},
	// See clocks.go.
	{"runsc/boot/loader.go", "tk.SetClocks(time.NewCalibratedClocks(", "tk.SetClocks(calibrated(time.NewCalibratedClocks, "},
	{"runsc/boot/restore.go", "clocks := time.NewCalibratedClocks(", "clocks := calibrated(time.NewCalibratedClocks, "},
	// Each of the 20,000 objects of a kernel was timed for a table in a debug log, which was a tenth of all that its save and load took.
	{"pkg/state/stats.go", "now := gohacks.Nanotime()", "now := s.last"},
	// What nobody reads was written all the same, tables of types and of times among it, 2 ms of each fork: there is a log where it is asked for only.
	{"pkg/log/log.go", "Level: Info, Emitter: GoogleEmitter", "Level: Warning, Emitter: GoogleEmitter"},
	{"pkg/timing/timing.go", "\tt.End()\n\ttype pointType int\n", "\tt.End()\n\tif !log.IsLogging(log.Info) {\n\t\treturn\n\t}\n\ttype pointType int\n"},
	{"pkg/sentry/kernel/kernel.go", "stats.String())\n\tlog.Infof(\"Kernel load took [%s].\", time.Since(kernelStart))\n\ttimeline", "&stats)\n\tlog.Infof(\"Kernel load took [%s].\", time.Since(kernelStart))\n\ttimeline"},
	{"pkg/sentry/kernel/kernel.go", "\t\tlog.Infof(\"Kernel save stats: %s\", stats.String())\n", "\t\tlog.Infof(\"Kernel save stats: %s\", &stats)\n"},
	// See plain.go.
	{"pkg/state/encode.go", "\tstats Stats\n", "\tstats Stats\n\n\tplain map[reflect.Type]plain\n"},
	{"pkg/state/encode.go", "\t\tes.encodeStruct(obj, dest)\n", "\t\tif !encodePlain(es.plain, obj, how != encodeDefault, dest) {\n\t\t\tes.encodeStruct(obj, dest)\n\t\t}\n"},
	{"pkg/state/encode.go", "\t\tes.encodeArray(obj, dest)\n", "\t\tif !encodeBytes(obj, dest) {\n\t\t\tes.encodeArray(obj, dest)\n\t\t}\n"},
	{"pkg/state/decode.go", "\tcase wire.Uint:\n\t\tobj", "\tcase wire.Uint:\n\t\tif obj.Kind() == reflect.Struct {\n\t\t\tdecodeNumber(obj, x)\n\t\t\treturn\n\t\t}\n\t\tobj"},
	{"pkg/state/decode.go", "\tcase *wire.String:\n", "\tcase *wire.String:\n\t\tif obj.Kind() == reflect.Array {\n\t\t\tdecodeBytes(obj, string(*x))\n\t\t\treturn\n\t\t}\n"},
	{"pkg/state/state.go", "encodedStructs: make(map[reflect.Value]*wire.Struct),", "encodedStructs: make(map[reflect.Value]*wire.Struct),\n\t\tplain: plainTypes(globalTypeDatabase),"},
	// A kernel is read byte by byte, each through four readers.
	{"pkg/state/state.go", "wire.Reader{Reader: r},", "wire.Reader{Reader: r, Bytes: byteReader(r)},"},
	{"pkg/state/wire/wire.go", "\tbuf [1]byte\n", "\tbuf [1]byte\n\n\t// Bytes is the same reader, if it gives single bytes.\n\tBytes io.ByteReader\n"},
	{"pkg/state/wire/wire.go", "func (r *Reader) readByte() byte {\n", "func (r *Reader) readByte() byte {\n\tif r.Bytes != nil {\n\t\tb, err := r.Bytes.ReadByte()\n\t\tif err != nil {\n\t\t\tpanic(err)\n\t\t}\n\t\treturn b\n\t}\n"},
	{"pkg/compressio/nocompressio.go", "// Close implements io.Closer.Close.\nfunc (r *SimpleReader) Close()", singleBytes + "// Close implements io.Closer.Close.\nfunc (r *SimpleReader) Close()"},
	// See parallel.go.
	{"pkg/state/decode.go", "\t\tfor i := uint64(0); i < numObjects; {\n", "\t\tnext, stop := readAhead(&ds.r, numObjects, safely)\n\t\tdefer stop()\n\t\tfor i := uint64(0); i < numObjects; {\n"},
	{"pkg/state/decode.go", "// Unmarshal either a type object or object ID.\n\t\t\tencoded = wire.Load(&ds.r)", "// Unmarshal either a type object or object ID.\n\t\t\tencoded = next()"},
	{"pkg/state/decode.go", "// Unmarshal and resolve the actual object.\n\t\t\t\tencoded = wire.Load(&ds.r)", "// Unmarshal and resolve the actual object.\n\t\t\t\tencoded = next()"},
	// See mount.go.
	{"runsc/boot/restore.go", "\t\tfor i, fd := range cont.stdioFDs {\n\t\t\tkey", "\t\tif len(r.containers) == 1 { // else there is more in the map\n\t\t\tgofer.MountAhead(restoreMnts.fdmap)\n\t\t}\n\t\tfor i, fd := range cont.stdioFDs {\n\t\t\tkey"},
	{"runsc/boot/restore.go", "\t\"gvisor.dev/gvisor/pkg/sentry/fsimpl/host\"\n", "\t\"gvisor.dev/gvisor/pkg/sentry/fsimpl/gofer\"\n\t\"gvisor.dev/gvisor/pkg/sentry/fsimpl/host\"\n"},
	{"pkg/sentry/fsimpl/gofer/gofer.go", "\tsock, err := unet.NewSocket(fs.opts.fd)\n\tif err != nil {\n\t\treturn lisafs.Inode{}, -1, err\n\t}\n\n", ""},
	{"pkg/sentry/fsimpl/gofer/gofer.go", "\t\trootHostFD int\n\t)\n\tfs.client, rootInode, rootHostFD, err = lisafs.NewClient(sock)", "\t\trootHostFD int\n\t\terr error\n\t)\n\tfs.client, rootInode, rootHostFD, err = newClient(fs.opts.fd)"},
	{"pkg/sentry/fsimpl/gofer/gofer.go", "\t\"gvisor.dev/gvisor/pkg/unet\"\n", ""},
	// When a sandbox is saved, what it has written reaches its files, and those are written to disk. gVisor did the latter for each file that is open or
	// mapped. For those that are only read, the libraries of each program, the disk was made to empty its cache too, one after the other, 2 ms for an idle agent
	// on a fast one. Who keeps an image for good writes the whole file system to disk once.
	{"pkg/sentry/fsimpl/gofer/save_restore.go", "fs.Sync(ctx)", "fs.syncWritten(ctx)"},
	{"pkg/sentry/fsimpl/gofer/save_restore.go", "// beforeSave is invoked by stateify.\nfunc (d *dentry)", syncWritten + "// beforeSave is invoked by stateify.\nfunc (d *dentry)"},
	{"pkg/sentry/fsimpl/gofer/save_restore.go", "import (\n", "import (\n\t\"errors\"\n"},
	// The names of all types and their fields were looked at for what only a mistake in gVisor's source can do.
	{"pkg/state/types.go", "func assertValidType(name string, fields []string) {\n", "func assertValidType(name string, fields []string) {\n\tif !raceEnabled {\n\t\treturn\n\t}\n"},
	// What receives packets from a network card is made anew for that of a restore. Saved with it were half a megabyte of room for packets and 600 objects.
	{"pkg/tcpip/link/fdbased/fdbased_state_autogen.go", "\tstateSinkObject.Save(3, &e.inboundDispatchers)\n", "\tstateSinkObject.Save(3, new([]linkDispatcher))\n"},
	// Threads that wait for each other's system calls look again and again for a while before they sleep, unless that does not pay. To begin with they
	// did, after two periods of 400 us; ten sandboxes that go on at once on two processors took each other's time so for as long as their first commands ran.
	{"pkg/sentry/platform/systrap/metrics.go", "fastPathBackoffMin             = 2", "fastPathBackoffMin             = 128"},
	// Programs ask the processor what it can do 60 times as they start (glibc does, of caches), and each time was a fault that the sentry answered, with what the
	// processor says: 2.5 ms of each command. gVisor does without the fault where the processor has none.
	{"pkg/sentry/platform/systrap/subprocess_linux.go", "\t// Enable cpuid-faulting.\n\tenableCpuidFault()\n\n", ""},
	// A task that was interrupted in a system call, as all are by a checkpoint, went back to its program to make the call again. It is made again at once: when a
	// sandbox goes on, a dozen tasks went there and back, on two processors for 5 ms, and were so before any of them did something.
	{"pkg/sentry/kernel/task_run.go", "\t\t\t\tt.Arch().RestartSyscall()\n\t\t\t}\n", "\t\t\t\tt.Arch().RestartSyscall()\n\t\t\t}\n" + reenter},
	{"pkg/sentry/arch/syscalls_amd64.go", "// RestartSyscallWithRestartBlock implements", reenterArch("Rip", "\tc.Regs.Orig_rax = c.Regs.Rax\n")},
	{"pkg/sentry/arch/syscalls_arm64.go", "// RestartSyscallWithRestartBlock implements", reenterArch("Pc", "")},
	// To let go on what does not stand still ended the sandbox. A keeper that takes over from one that was killed just then cannot always know.
	{"pkg/sentry/kernel/kernel.go", "\tk.tasks.EndExternalStop()\n", "\tif k.tasks.isExternallyStopped() {\n\t\tk.tasks.EndExternalStop()\n\t}\n"},
	// What came, or became free, after a forwarded connection had looked and before it was registered to be told was never noticed: a channel
	// opened through the guest's port then stood still for good. It looks once more.
	{"runsc/boot/portforward/portforward_netstack.go", forwardWaits("ReadableEvents"), forwardWaits("ReadableEvents") + "\n\t\t\tres, tcpErr = n.ep.Read(b, tcpip.ReadOptions{})\n\t\t\tcontinue"},
	{"runsc/boot/portforward/portforward_netstack.go", forwardWaits("WritableEvents"), forwardWaits("WritableEvents") + "\n\t\t\tres, tcpErr = n.ep.Write(&b, tcpip.WriteOptions{Atomic: true})\n\t\t\tcontinue"},
}

const singleBytes = `// ReadByte implements io.ByteReader.ReadByte.
func (r *SimpleReader) ReadByte() (byte, error) {
	if r.h == nil {
		return r.bin.ReadByte()
	}
	var b [1]byte
	n, err := r.Read(b[:])
	if n == 0 && err == nil {
		err = io.ErrNoProgress
	}
	return b[0], err // which may be that the hash is wrong
}

`

const workAhead = `	platform := l.k.Platform
	ahead(func(func() bool) {
		if l.PreSeccompCallback != nil {
			l.PreSeccompCallback()
		}
	}, func(more func() bool) {
		if p, ok := platform.(interface{ Prepare(int, func() bool) error }); ok {
			if err := p.Prepare(stubs, more); err != nil {
				log.Warningf("Cannot prepare address spaces: %v", err)
			}
		}
	})
`

const prepareStubs = `// Prepare makes address spaces for those who will need them, as long as there are to be more. Another is made before the last one
// is given away, which would be taken for it.
func (p *Systrap) Prepare(n int, more func() bool) error {
	for range n {
		if !more() {
			break
		}
		s, err := newSubprocess(globalPool.source.createStub, p.memoryFile, true)
		if err != nil {
			return err
		}
		defer s.Release()
	}
	return nil
}

`

const mapMemory = `// MapAhead maps so many pieces of what mm has that is not mapped yet, and returns how many. Nothing else uses mm. With text also what it executes has.
func (mm *MemoryManager) MapAhead(ctx context.Context, most int, text bool) (n int) {
	if mm.as == nil {
		return 0
	}
	mm.mappingMu.RLock()
	defer mm.mappingMu.RUnlock()
	mm.activeMu.Lock()
	defer mm.activeMu.Unlock()
	for vseg := mm.vmas.FirstSegment(); text && vseg.Ok(); vseg = vseg.NextSegment() {
		if vma := vseg.ValuePtr(); vma.mappable != nil && vma.effectivePerms.Execute {
			// What fails does so again for who uses it.
			_, _, _ = mm.getPMAsLocked(ctx, vseg, vseg.Range(), hostarch.NoAccess, false, false)
		}
	}
	for pseg := mm.pmas.FirstSegment(); pseg.Ok() && n < most; pseg = pseg.NextSegment() {
		if mf, ok := pseg.ValuePtr().file.(*pgalloc.MemoryFile); ok && mf.IsAsyncLoading() {
			break // or it would be waited for
		}
		if err := mm.mapASLocked(ctx, pseg, pseg.Range(), memmap.PlatformEffectDefault); err != nil {
			break
		}
		n++
	}
	return n
}

`

const syncWritten = `// syncWritten is Sync for those files that may have been written.
func (fs *filesystem) syncWritten(ctx context.Context) (err error) {
	fs.syncMu.Lock()
	var files []*dentry
	for e := fs.syncableDentries.Front(); e != nil; e = e.Next() {
		files = append(files, e.d)
	}
	var special []*specialFileFD
	for fd := fs.specialFileFDs.Front(); fd != nil; fd = fd.Next() {
		special = append(special, fd)
	}
	fs.syncMu.Unlock()
	for _, d := range files {
		d.inode.handleMu.RLock()
		written := d.inode.isWriteHandleOk()
		d.inode.handleMu.RUnlock()
		if written {
			err = errors.Join(err, d.syncCachedFile(ctx, true, false))
		}
	}
	for _, fd := range special {
		if fd.vfsfd.IsWritable() {
			err = errors.Join(err, fd.sync(ctx, true, false))
		}
	}
	return err
}

`

// With a tracer, or a mask of signals to put back, the task goes the long way.
const reenter = `			if !t.hasTracer() && !t.haveSavedSignalMask {
				t.Arch().ReenterSyscall()
				t.haveSyscallReturn = false
				return t.doSyscall()
			}
`

func reenterArch(ip, save string) string {
	return `// ReenterSyscall does to the registers what the system call's instruction does, after RestartSyscall.
func (c *Context64) ReenterSyscall() {
	c.Regs.` + ip + ` += SyscallWidth
` + save + `}

// RestartSyscallWithRestartBlock implements`
}

func forwardWaits(events string) string {
	return "waiter." + events + " | waiter.EventIn | waiter.EventHUp | waiter.EventErr)\n\t\t\tn.wq.EventRegister(&e)\n\t\t\tdefer n.wq.EventUnregister(&e)"
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: go run ./driver/gvisor/patch DIRECTORY")
		os.Exit(2)
	}
	modfile, err := patch(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "patch gVisor:", err)
		os.Exit(1)
	}
	fmt.Println(modfile)
}

// patch makes the copy in a directory, unless it is there, and returns the path of the go.mod beside it.
func patch(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	var mod struct{ Dir, Version, Error string }
	out, err := exec.Command("go", "mod", "download", "-json", module).Output()
	if jerr := json.Unmarshal(out, &mod); err == nil {
		err = jerr
	}
	if err != nil || mod.Error != "" {
		return "", fmt.Errorf("go mod download %s: %w", module, failed(err, mod.Error))
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	// One at a time; a build that uses another copy meanwhile is none of this checkout.
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", err
	}
	copied := filepath.Join(dir, mod.Version+"-"+digest())
	if _, err := os.Stat(copied); err != nil {
		if err := replaceCopy(dir, copied, mod.Dir); err != nil {
			return "", err
		}
	}
	return writeModule(dir, copied)
}

func failed(err error, text string) error {
	if exit, ok := err.(*exec.ExitError); ok && text == "" {
		text = string(bytes.TrimSpace(exit.Stderr))
	}
	if text == "" {
		text = fmt.Sprint(err)
	}
	return errors.New(text)
}

// digest is of all that is changed.
func digest() string {
	h := sha256.New()
	fmt.Fprintf(h, "%q", edits)
	for _, s := range added {
		fmt.Fprintf(h, "%q %q", s, s.content())
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:6])
}

// replaceCopy makes a copy of the module from, in place of all others. It is there as a whole or not at all.
func replaceCopy(dir, copied, from string) error {
	others, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(dir, unfinished)
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := os.CopyFS(tmp, os.DirFS(from)); err != nil { // which makes what is read-only in the module cache writable
		return err
	}
	for _, e := range edits {
		path := filepath.Join(tmp, e.file)
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if n := strings.Count(string(b), e.old); n != 1 {
			return fmt.Errorf("%s has %q %d times, want 1: this version of gVisor needs other edits", e.file, e.old, n)
		}
		if err := os.WriteFile(path, []byte(strings.Replace(string(b), e.old, e.new, 1)), 0o644); err != nil {
			return err
		}
	}
	for _, s := range added {
		if err := os.WriteFile(filepath.Join(tmp, s.to), s.content(), 0o644); err != nil {
			return err
		}
	}
	for _, o := range others {
		if !ours(o) {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, o.Name())); err != nil {
			return err
		}
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return err
	}
	return os.Rename(tmp, copied)
}

// unfinished is how the names of copies begin that are being made.
const unfinished = "new-"

var copyName = regexp.MustCompile(`^v.*-[0-9a-f]{12}-[0-9a-f]{12}$`)

// ours says whether an entry is a copy, whole or not.
func ours(e fs.DirEntry) bool {
	return e.IsDir() && (strings.HasPrefix(e.Name(), unfinished) || copyName.MatchString(e.Name()))
}

// writeModule writes a go.mod that is this module's but for the copy, with its go.sum.
func writeModule(dir, copied string) (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", failed(err, ""))
	}
	gomod := string(bytes.TrimSpace(out))
	mod, err := os.ReadFile(gomod)
	if err != nil {
		return "", err
	}
	sum, err := os.ReadFile(strings.TrimSuffix(gomod, ".mod") + ".sum")
	if err != nil {
		return "", err
	}
	mod = fmt.Appendf(mod, "\nreplace %s => %q\n", module, copied)
	modfile := filepath.Join(dir, "go.mod")
	for path, content := range map[string][]byte{modfile: mod, filepath.Join(dir, "go.sum"): sum} {
		if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, content) {
			continue
		}
		if err := os.WriteFile(path+".new", content, 0o644); err != nil {
			return "", err
		}
		if err := os.Rename(path+".new", path); err != nil {
			return "", err
		}
	}
	return modfile, nil
}
