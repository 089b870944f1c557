//go:build linux

package keeper

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/warren-sandbox/warren/driver/gvisor/internal/protocol"
)

// An image may be packed: each chunk of each file is compressed, if that makes it smaller, and then encrypted, if there is a
// key. gVisor reads and writes plain files only. Where there is a key these are never on a disk but on a file system in memory
// that nobody else sees, so that an encrypted image takes its size in memory while it is written and while it is read.

// smallImage is the size up to which an image is compressed unasked: it takes less time than its start.
const smallImage = 8 << 20

// The first byte of a packed chunk.
const (
	chunkStored = 0
	chunkZstd   = 1
)

// place is what a box is for. No two of an image are alike, so that none can stand for another.
type place struct{ file, chunk uint32 }

// sealer encrypts the parts of one image with AES-256-GCM: the chunks, each of which is written once, with the place as nonce, and
// the manifest, which is written again when a transient image is sealed, under another key and with a random nonce.
type sealer struct {
	keyID            string
	salt             []byte
	chunks, manifest cipher.AEAD
}

// keyID names a key without telling it.
func keyID(key []byte) string {
	sum := sha256.Sum256(append([]byte("warren image key id\x00"), key...))
	return hex.EncodeToString(sum[:8])
}

// newSealer returns one for a new image, nil without a key.
func newSealer(key []byte) (*sealer, error) {
	if len(key) == 0 {
		return nil, nil
	}
	salt := make([]byte, 32)
	rand.Read(salt) // never fails
	return openSealer(key, keyID(key), salt)
}

// openSealer returns that of an image.
func openSealer(key []byte, id string, salt []byte) (*sealer, error) {
	switch {
	case len(key) == 0:
		return nil, protocol.Errorf(protocol.KindUnsupported, "the image is encrypted with key %s, and no key is set here; snapshots.key in the daemon's warren.yaml names the file with the key", id)
	case len(key) != protocol.KeySize:
		return nil, protocol.Errorf(protocol.KindInvalid, "a key of %d bytes, want %d", len(key), protocol.KeySize)
	case keyID(key) != id:
		return nil, protocol.Errorf(protocol.KindUnsupported, "the image is encrypted with key %s, and the key that is set here is %s; snapshots.key in the daemon's warren.yaml names the file: give it the key of then", id, keyID(key))
	}
	s := &sealer{keyID: id, salt: salt}
	for purpose, aead := range map[string]*cipher.AEAD{"warren memory image": &s.chunks, "warren memory image manifest": &s.manifest} {
		own, err := hkdf.Key(sha256.New, key, salt, purpose, protocol.KeySize)
		if err != nil {
			return nil, err
		}
		block, err := aes.NewCipher(own)
		if err != nil {
			return nil, err
		}
		if *aead, err = cipher.NewGCM(block); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (p place) nonce() []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(make([]byte, 4, 12), p.file), p.chunk)
}

func (s *sealer) box(p place, plain []byte) []byte {
	return s.chunks.Seal(nil, p.nonce(), plain, nil)
}

func (s *sealer) open(p place, box []byte) ([]byte, error) {
	return s.chunks.Open(nil, p.nonce(), box, nil)
}

func (s *sealer) boxManifest(plain []byte) (nonce, box []byte) {
	nonce = make([]byte, s.manifest.NonceSize())
	rand.Read(nonce) // never fails
	return nonce, s.manifest.Seal(nil, nonce, plain, nil)
}

func (s *sealer) openManifest(nonce, box []byte) ([]byte, error) {
	if len(nonce) != s.manifest.NonceSize() {
		return nil, errors.New("the nonce has another length")
	}
	return s.manifest.Open(nil, nonce, box, nil)
}

// scratch is a directory on a file system in memory, for the files of one image.
type scratch struct{ dir string }

func newScratch() (*scratch, error) {
	dir, err := os.MkdirTemp(stageDir, ".image")
	if err != nil {
		return nil, err
	}
	if err := unix.Mount("warren-image", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700,size=100%"); err != nil {
		os.Remove(dir)
		return nil, fmt.Errorf("mount a tmpfs: %w", err)
	}
	return &scratch{dir}, nil
}

// close gives the memory back as soon as nobody has a file of it open.
func (s *scratch) close() error {
	if s == nil {
		return nil
	}
	return errors.Join(unix.Unmount(s.dir, unix.MNT_DETACH), os.Remove(s.dir))
}

// compresses says whether a plain image of a size is compressed.
func compresses(p protocol.Packing, size int64) bool {
	return p.Compress == protocol.CompressAlways || p.Compress == "" && size <= smallImage
}

// plainSize returns how large the plain files are together.
func (m *image) plainSize() (n int64, err error) {
	entries, err := os.ReadDir(m.plain())
	for _, e := range entries {
		fi, serr := e.Info()
		if serr != nil {
			return 0, serr
		}
		n += fi.Size()
	}
	return n, err
}

// pack replaces the plain files of an image, which are in its scratch or in its directory, by packed ones.
func (m *image) pack(ctx context.Context, compress bool) error {
	from := m.plain()
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	var enc *zstd.Encoder
	if compress {
		if enc, err = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(runtime.NumCPU()),
			zstd.WithWindowSize(1<<20), zstd.WithLowerEncoderMem(true), zstd.WithEncoderCRC(false)); err != nil {
			return err
		}
		defer enc.Close()
	}
	m.Files = nil
	for i, e := range entries {
		f, err := m.packFile(ctx, filepath.Join(from, e.Name()), uint32(i), enc)
		if err != nil {
			return err
		}
		m.Files = append(m.Files, f)
	}
	m.Packed = true
	return nil
}

// packFile writes the packed form of a plain file, under its name, into the image's directory.
func (m *image) packFile(ctx context.Context, path string, number uint32, enc *zstd.Encoder) (_ imageFile, err error) {
	src, err := os.Open(path)
	if err != nil {
		return imageFile{}, err
	}
	defer src.Close()
	fi, err := src.Stat()
	if err != nil {
		return imageFile{}, err
	}
	out := imageFile{Name: filepath.Base(path), Size: fi.Size(), Chunks: []checksum{}, Packed: []int64{}}
	tmp := out.Name + ".packed"
	dst, err := m.create(tmp)
	if err != nil {
		return imageFile{}, err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	type result struct {
		data []byte
		sum  checksum
	}
	for first := int64(0); first < chunks(out.Size); {
		n := min(int64(runtime.NumCPU()), chunks(out.Size)-first)
		batch := make([]result, n)
		g, ctx := errgroup.WithContext(ctx)
		for i := range batch {
			g.Go(func() error {
				if err := ctx.Err(); err != nil {
					return err
				}
				start := (first + int64(i)) * chunkSize
				plain := make([]byte, min(chunkSize, out.Size-start))
				if _, err := src.ReadAt(plain, start); err != nil {
					return err
				}
				data := packChunk(plain, enc)
				if m.seals != nil {
					data = m.seals.box(place{number, uint32(first) + uint32(i)}, data)
				}
				batch[i] = result{data, checksumOf(data)}
				return nil
			})
		}
		if err := g.Wait(); err != nil {
			return imageFile{}, err
		}
		for _, r := range batch {
			if _, err := dst.Write(r.data); err != nil {
				return imageFile{}, err
			}
			out.Packed, out.Chunks = append(out.Packed, int64(len(r.data))), append(out.Chunks, r.sum)
		}
		first += n
	}
	return out, unix.Renameat(int(m.dir.Fd()), tmp, int(m.dir.Fd()), out.Name)
}

func packChunk(plain []byte, enc *zstd.Encoder) []byte {
	if enc != nil {
		if data := enc.EncodeAll(plain, []byte{chunkZstd}); len(data) <= len(plain)-len(plain)/16 {
			return data
		}
	}
	return append([]byte{chunkStored}, plain...)
}

func newDecoder() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderConcurrency(runtime.NumCPU()), zstd.WithDecoderMaxMemory(chunkSize), zstd.WithDecoderLowmem(true))
}

// unpack compares the chunks of the files with their checksums and writes what they hold to the scratch, as gVisor reads it.
func (m *image) unpack(ctx context.Context, files []*os.File) error {
	dec, err := newDecoder()
	if err != nil {
		return err
	}
	defer dec.Close()
	full := func(err error, n int64) error {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.ENOMEM) {
			return protocol.Errorf(protocol.KindExhausted, "not enough memory to unpack the image, which holds %s", size(n))
		}
		return err
	}
	if m.Pages > 0 {
		if err := m.assemble(ctx, files, dec); err != nil {
			return full(err, m.Pages)
		}
	}
	for i, f := range m.Files {
		if m.Pages > 0 && (f.Name == mapName || slices.Contains(m.Packs, f.Name)) {
			continue
		}
		if err := m.unpackFile(ctx, files[i], i, dec); err != nil {
			return full(err, f.Size)
		}
	}
	return nil
}

func (m *image) unpackFile(ctx context.Context, src *os.File, number int, dec *zstd.Decoder) (err error) {
	f := m.Files[number]
	dst, err := os.OpenFile(filepath.Join(m.unpacked.dir, f.Name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	if err := dst.Truncate(f.Size); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.NumCPU())
	for c := range int(chunks(f.Size)) {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			plain, err := m.readChunk(src, number, c, dec)
			if err != nil {
				return err
			}
			_, err = dst.WriteAt(plain, int64(c)*chunkSize)
			return err
		})
	}
	return g.Wait()
}

// readChunk returns what a chunk of a file holds, after comparing it with its checksum.
func (m *image) readChunk(src *os.File, number, chunk int, dec *zstd.Decoder) ([]byte, error) {
	f := &m.Files[number]
	start, stored := f.at(chunk)
	if stored > chunkSize+1024 {
		return nil, damaged("its manifest has a chunk of %d bytes in %s", stored, f.Name)
	}
	data := make([]byte, stored)
	if _, err := src.ReadAt(data, start); err != nil {
		return nil, err
	}
	if err := m.compare(number, chunk, checksumOf(data)); err != nil {
		return nil, err
	}
	if f.Packed == nil {
		return data, nil
	}
	at := int64(chunk) * chunkSize
	p, seals := place{uint32(number), uint32(chunk)}, m.seals
	if f.seals != nil {
		p.file, seals = f.Number, f.seals
	}
	plain, err := unpackChunk(seals, p, data, dec)
	if err != nil || int64(len(plain)) != min(chunkSize, f.Size-at) {
		return nil, damaged("its file %s cannot be unpacked, %d MiB from its start", f.Name, at>>20)
	}
	return plain, nil
}

func unpackChunk(seals *sealer, p place, data []byte, dec *zstd.Decoder) ([]byte, error) {
	if seals != nil {
		var err error
		if data, err = seals.open(p, data); err != nil {
			return nil, err
		}
	}
	switch {
	case len(data) > 0 && data[0] == chunkStored:
		return data[1:], nil
	case len(data) > 0 && data[0] == chunkZstd:
		return dec.DecodeAll(data[1:], nil)
	}
	return nil, errors.New("unknown form")
}
