//go:build linux

package keeper

import (
	"archive/tar"
	"bufio"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/control/client"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
	gsandbox "gvisor.dev/gvisor/runsc/sandbox"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// gVisor can write the root overlay as a tar itself, but reads each file into the sandbox's memory whole for it, holes
// included. Its file system checkpoint instead writes a tar in which a file's content is a list of where its parts are in the
// file on the host that holds the overlay. That file the keeper reads itself, while the sandbox stands still.

// saveRoot writes the root overlay of a sandbox, as it is at one instant, as a layer of an OCI image to a connection, after
// the answer that says its size.
func (k *Keeper) saveRoot(ctx context.Context, id string, answer func(size int64) error, to io.Writer) error {
	f, size, err := k.spoolRoot(ctx, id)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := answer(size); err != nil {
		return nil // the caller has gone
	}
	if _, err := io.Copy(to, f); err != nil && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
		k.log.Warn("send a saved root", "sandbox", id, "error", err)
	}
	return nil
}

// spoolRoot writes the layer into a file without a name, so that the sandbox does not stand still for as long as somebody
// reads.
func (k *Keeper) spoolRoot(ctx context.Context, id string) (_ *os.File, size int64, err error) {
	s, err := k.hold(id)
	if err != nil {
		return nil, 0, err
	}
	defer k.calls.Done()
	defer s.still.Unlock()
	t0 := time.Now()
	out, err := unnamed(sandboxDir(id))
	if err != nil {
		return nil, 0, err
	}
	defer func() {
		if err != nil {
			out.Close()
		}
	}()
	thaw, err := k.standStill(s)
	if err != nil {
		return nil, 0, err
	}
	err = k.writeRoot(ctx, s, out)
	stood := time.Since(t0)
	if terr := thaw(); terr != nil {
		return nil, 0, errors.Join(err, terr)
	}
	if err == nil {
		size, err = out.Seek(0, io.SeekCurrent)
	}
	if err == nil {
		_, err = out.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, 0, err
	}
	k.log.Info("saved the root", "sandbox", id, "bytes", size, "stood", stood)
	return out, size, nil
}

// standStill makes a sandbox stand still, and returns what puts it back as it was; s.still is held.
func (k *Keeper) standStill(s *sandbox) (undo func() error, err error) {
	s.mu.Lock()
	was, kernel := s.meta.Frozen, s.kernel
	s.mu.Unlock()
	switch was {
	case stands:
		return func() error { return nil }, nil
	case changing: // the last keeper was killed at the wrong moment
		if err := s.release(); err != nil {
			return nil, err
		}
	}
	if err := s.freeze(kernel); err != nil {
		err = k.snapshotFailed(s, "stop", err)
		if s.currentState() == stateRunning {
			err = errors.Join(err, s.release())
		}
		return nil, err
	}
	return func() error {
		if err := s.release(); err != nil && s.currentState() == stateRunning {
			return fmt.Errorf("let the sandbox run on: %w", err)
		}
		return nil
	}, nil
}

// unnamed returns a new file without a name on the file system of a directory.
func unnamed(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return os.NewFile(uintptr(fd), "unnamed"), nil
	}
	f, terr := os.CreateTemp(dir, "spool")
	if terr != nil {
		return nil, errors.Join(err, terr)
	}
	return f, os.Remove(f.Name())
}

// writeRoot writes the layer of a sandbox that stands still.
func (k *Keeper) writeRoot(ctx context.Context, s *sandbox, out *os.File) error {
	s.mu.Lock()
	kernel, limits := s.kernel, s.meta.Limits
	s.mu.Unlock()
	index, err := unnamed(sandboxDir(s.id))
	if err != nil {
		return err
	}
	defer index.Close()
	if err := fsSave(kernel, index); err != nil {
		return k.snapshotFailed(s, "save", err)
	}
	length, err := index.Seek(0, io.SeekEnd)
	if err == nil {
		_, err = index.Seek(0, io.SeekStart)
	}
	if err != nil {
		return err
	}
	data, err := filestore(s)
	if err != nil {
		return err
	}
	defer data.Close()
	w := bufio.NewWriterSize(out, 1<<20)
	l := &layerWriter{
		in: tar.NewReader(bufio.NewReaderSize(index, 1<<20)), size: length, out: tar.NewWriter(w), data: data,
		// What has been written fits into the limit of the disk; the rest are holes.
		most: 2*limits.Disk + 64<<20, removed: make(map[string]bool),
	}
	if err := l.convert(ctx); err != nil {
		return err
	}
	return w.Flush()
}

// fsSave makes gVisor write its index of the root overlay. The pages, which it would copy, are thrown away.
func fsSave(kernel *gsandbox.Sandbox, index *os.File) error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	conn, err := controlSocket(kernel)
	if err != nil {
		return err
	}
	defer conn.Close()
	return conn.Call(boot.ContMgrFSSave, &boot.FSSaveArgs{
		FilePayload: urpc.FilePayload{Files: []*os.File{null, index, null, null}},
	}, nil)
}

// controlSocket connects to gVisor's control server in a sandbox.
func controlSocket(kernel *gsandbox.Sandbox) (*urpc.Client, error) {
	if kernel == nil {
		return nil, errors.New("the sandbox has ended")
	}
	name := kernel.GetControlSocketPath()
	if len(name) > 100 { // of 107 that fit into an address
		fd, err := unix.Open(name, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		defer unix.Close(fd)
		name = fmt.Sprintf("/proc/self/fd/%d", fd)
	}
	return client.ConnectTo(name)
}

// filestore opens the file that holds what a sandbox has written to its root.
func filestore(s *sandbox) (*os.File, error) {
	var home unix.Stat_t
	if err := unix.Stat(sandboxDir(s.id), &home); err != nil {
		return nil, err
	}
	dir := fmt.Sprintf("/proc/%d/fd", s.meta.Sandbox.PID)
	fds, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range fds {
		at := filepath.Join(dir, e.Name())
		if name, err := os.Readlink(at); err != nil || !strings.Contains(name, "/runsc-filestore-") {
			continue
		}
		// The process behind the descriptors is the sandbox's: what it has open may be no more than such a file.
		var st unix.Stat_t
		if unix.Stat(at, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Dev != home.Dev || st.Nlink != 0 {
			continue
		}
		return os.Open(at)
	}
	return nil, errors.New("the sandbox has no file for its root overlay")
}

// layerWriter turns gVisor's index of an overlay into a layer of an OCI image. What it reads comes from the sandbox's own
// kernel, and is trusted with nothing but the content of that sandbox.
type layerWriter struct {
	in *tar.Reader
	// size of the index, which no entry of it can exceed: a tar may claim to have more in holes.
	size int64
	out  *tar.Writer
	data io.ReaderAt
	// most is how many bytes of content may still be written.
	most    int64
	removed map[string]bool
}

const (
	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..wh..opq"
	xattrRecord    = "SCHILY.xattr."
)

func (l *layerWriter) convert(ctx context.Context) error {
	for {
		if ctx.Err() != nil {
			return protocol.Errorf(protocol.KindCanceled, "saving the root was cancelled")
		}
		h, err := l.in.Next()
		if err == io.EOF {
			return l.out.Close()
		}
		if err != nil {
			return fmt.Errorf("read what gVisor says of the root: %w", err)
		}
		if err := l.entry(ctx, h); err != nil {
			return fmt.Errorf("save %.200q: %w", h.Name, err)
		}
	}
}

// entry writes one file, which may become two entries.
func (l *layerWriter) entry(ctx context.Context, from *tar.Header) error {
	name, err := inLayer(from.Name)
	if err != nil {
		return err
	}
	if unfit(name) || from.Typeflag == tar.TypeLink && unfit(from.Linkname) {
		return nil
	}
	records, opaque, err := attributes(from.PAXRecords)
	if err != nil {
		return err
	}
	h := &tar.Header{
		Typeflag: from.Typeflag, Name: name, Linkname: from.Linkname, Size: from.Size, Mode: from.Mode, Uid: from.Uid, Gid: from.Gid,
		ModTime: from.ModTime, Devmajor: from.Devmajor, Devminor: from.Devminor, PAXRecords: records, Format: tar.FormatPAX,
	}
	switch h.Typeflag {
	case tar.TypeChar:
		if h.Devmajor == 0 && h.Devminor == 0 {
			l.removed[name] = true
			return l.whiteout(name)
		}
	case tar.TypeLink:
		if h.Linkname, err = inLayer(h.Linkname); err != nil {
			return err
		}
		if l.removed[h.Linkname] { // all removed names are one file to gVisor
			return l.whiteout(name)
		}
		h.PAXRecords = nil
	case tar.TypeDir:
		if name == "." {
			return nil // the root directory itself is the image's
		}
		h.Name += "/"
		if err := l.out.WriteHeader(h); err != nil || !opaque {
			return err
		}
		return l.out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name + "/" + opaqueName})
	case tar.TypeReg:
		return l.file(ctx, h)
	}
	if h.Size != 0 {
		return fmt.Errorf("gVisor says that this file of type %q has %d bytes", h.Typeflag, h.Size)
	}
	return l.out.WriteHeader(h)
}

func (l *layerWriter) whiteout(name string) error {
	return l.out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: path.Join(path.Dir(name), whiteoutPrefix+path.Base(name))})
}

// inLayer returns a name as it stands in a layer.
func inLayer(name string) (string, error) {
	clean := path.Clean(name)
	if path.IsAbs(clean) || clean == ".." || strings.HasPrefix(clean, "../") {
		return "", errors.New("the name leads out of the root")
	}
	return clean, nil
}

// unfit says whether a path has a name in it that means something else in a layer, so that none can hold it.
func unfit(name string) bool {
	for part := range strings.SplitSeq(name, "/") {
		if strings.HasPrefix(part, whiteoutPrefix) {
			return true
		}
	}
	return false
}

// attributes returns the extended attributes among the records of a header without gVisor's own marks, and says whether one of
// these was that the directory hides what is below it.
func attributes(from map[string]string) (records map[string]string, opaque bool, err error) {
	records = make(map[string]string)
	for key, value := range from {
		attr, ok := strings.CutPrefix(key, xattrRecord)
		if !ok {
			continue // of the format, which the writer makes anew
		}
		kind, mark, isMark := strings.Cut(attr, ".overlay.")
		switch {
		case isMark && (kind == "trusted" || kind == "user"):
			opaque = opaque || mark == "opaque" && value == "y"
			continue
		case attr == "system.posix_acl_access" || attr == "system.posix_acl_default":
			raw, err := base64.RawStdEncoding.DecodeString(value)
			if err != nil {
				return nil, false, fmt.Errorf("read its access list: %w", err)
			}
			value = string(raw)
		}
		records[key] = value
	}
	return records, opaque, nil
}

// file writes a regular file from its segments: size, and then start, end and place in the data of each.
func (l *layerWriter) file(ctx context.Context, h *tar.Header) error {
	const number, segment = 8, 24
	if h.Size < number || h.Size > l.size || (h.Size-number)%segment != 0 {
		return fmt.Errorf("gVisor's list of its parts has %d bytes", h.Size)
	}
	parts := h.Size - number
	var head [segment]byte
	if _, err := io.ReadFull(l.in, head[:number]); err != nil {
		return err
	}
	size := binary.LittleEndian.Uint64(head[:])
	if size > math.MaxInt64 || int64(size) > l.most {
		return protocol.Errorf(protocol.KindExhausted, "it has %d bytes, nearly all of them holes, and a layer has no holes; remove it or make it smaller", size)
	}
	l.most -= int64(size)
	h.Size = int64(size)
	if err := l.out.WriteHeader(h); err != nil {
		return err
	}
	at := uint64(0)
	for ; parts > 0; parts -= segment {
		if ctx.Err() != nil {
			return protocol.Errorf(protocol.KindCanceled, "saving the root was cancelled")
		}
		if _, err := io.ReadFull(l.in, head[:]); err != nil {
			return err
		}
		start, end, value := binary.LittleEndian.Uint64(head[:]), binary.LittleEndian.Uint64(head[8:]), binary.LittleEndian.Uint64(head[16:])
		if start < at || end < start || value > math.MaxInt64 {
			return errors.New("gVisor's list of its parts is not in order")
		}
		start, end = min(start, size), min(end, size)
		if err := l.copy(zeroBytes{}, start-at); err != nil {
			return err
		}
		if err := l.copy(io.NewSectionReader(l.data, int64(value), int64(end-start)), end-start); err != nil {
			return err
		}
		at = end
	}
	return l.copy(zeroBytes{}, size-at)
}

func (l *layerWriter) copy(from io.Reader, n uint64) error {
	_, err := io.CopyN(l.out, from, int64(n))
	return err
}

// zeroBytes is a file that is one hole.
type zeroBytes struct{}

func (zeroBytes) Read(p []byte) (int, error) { clear(p); return len(p), nil }
