//go:build linux

// Package state is compiled as a part of gVisor's package of that name, see the program in the directory above.
package state

import (
	"fmt"
	"io"
	"reflect"
	"unsafe"

	"gvisor.dev/gvisor/pkg/state/wire"
)

// A sandbox stands still while the structures of its kernel are written down one by one, and its copy begins when they have been read one by
// one. Of 22,000 of an idle agent a third are atomic numbers, and as many are empty: locks that nobody holds, lists of watches on which
// nobody is, marks of what an inode is not. Of the numbers two thirds are single bytes of packets. Written as what they are, a
// number, nothing and a string, they cost next to nothing.

// plain is how values of a type are written other than by their own methods, which for these types do nothing but write their fields.
type plain uint8

const (
	_ plain = iota
	// number is a struct of which all that is written is one number, of all its bytes.
	number
	// blank is a struct that is not written if all its bytes are zero.
	blank
)

// plainTypes says which of the types that can be saved are plain.
func plainTypes(known map[string]reflect.Type) map[reflect.Type]plain {
	types := make(map[reflect.Type]plain, len(plainNames))
	for name, how := range plainNames {
		typ, ok := known[name]
		if !ok || how == number && typ.Size() != 4 && typ.Size() != 8 {
			continue
		}
		types[typ] = how
	}
	return types
}

var plainNames = map[string]plain{
	"pkg/atomicbitops.Bool":                                number,
	"pkg/atomicbitops.Int32":                               number,
	"pkg/atomicbitops.Int64":                               number,
	"pkg/atomicbitops.Uint32":                              number,
	"pkg/atomicbitops.Uint64":                              number,
	"pkg/sentry/fsimpl/kernfs.InodeAlwaysValid":            blank,
	"pkg/sentry/fsimpl/kernfs.InodeAnonymous":              blank,
	"pkg/sentry/fsimpl/kernfs.InodeDirectoryNoNewChildren": blank,
	"pkg/sentry/fsimpl/kernfs.InodeFSOwned":                blank,
	"pkg/sentry/fsimpl/kernfs.InodeNoStatFS":               blank,
	"pkg/sentry/fsimpl/kernfs.InodeNoopRefCount":           blank,
	"pkg/sentry/fsimpl/kernfs.InodeNotAnonymous":           blank,
	"pkg/sentry/fsimpl/kernfs.InodeNotDirectory":           blank,
	"pkg/sentry/fsimpl/kernfs.InodeNotSymlink":             blank,
	"pkg/sentry/fsimpl/kernfs.InodeTemporary":              blank,
	"pkg/sentry/fsimpl/kernfs.InodeWatches":                blank,
	"pkg/sentry/vfs.FileLocks":                             blank,
	"pkg/sentry/vfs.Watches":                               blank,
	"pkg/tcpip.StatCounter":                                blank,
	"pkg/waiter.Queue":                                     blank,
}

// encodePlain encodes a struct of a plain type, and says whether it was one. One that is written as a value may not be written as nothing.
func encodePlain(types map[reflect.Type]plain, obj reflect.Value, value bool, dest *wire.Object) bool {
	kind, ok := types[obj.Type()]
	if !ok || !obj.CanAddr() {
		return false
	}
	b := content(obj)
	switch {
	case !value && zero(b):
		*dest = wire.Nil{}
	case kind == blank:
		return false
	case len(b) == 4:
		*dest = wire.Uint(*(*uint32)(unsafe.Pointer(&b[0])))
	default:
		*dest = wire.Uint(*(*uint64)(unsafe.Pointer(&b[0])))
	}
	return true
}

// decodeNumber decodes what encodePlain made of a number.
func decodeNumber(obj reflect.Value, x wire.Uint) {
	switch b := content(obj); len(b) {
	case 4:
		if x > 1<<32-1 {
			panic(fmt.Errorf("unsigned integer %d does not fit into a %v", x, obj.Type()))
		}
		*(*uint32)(unsafe.Pointer(&b[0])) = uint32(x)
	case 8:
		*(*uint64)(unsafe.Pointer(&b[0])) = uint64(x)
	default:
		panic(fmt.Errorf("an integer for a %v", obj.Type()))
	}
}

// encodeBytes encodes an array as a string, if it is one of bytes.
func encodeBytes(obj reflect.Value, dest *wire.Object) bool {
	if obj.Type().Elem().Kind() != reflect.Uint8 || !obj.CanAddr() || obj.Len() == 0 {
		return false
	}
	s := wire.String(content(obj))
	*dest = &s
	return true
}

// decodeBytes decodes what encodeBytes made of an array.
func decodeBytes(obj reflect.Value, s string) {
	if obj.Type().Elem().Kind() != reflect.Uint8 || obj.Len() != len(s) {
		panic(fmt.Errorf("%d bytes for a %v", len(s), obj.Type()))
	}
	copy(content(obj), s)
}

// content is the memory of an object that has an address.
func content(obj reflect.Value) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(obj.UnsafeAddr())), obj.Type().Size())
}

func zero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// byteReader is a reader that gives single bytes, or nil.
func byteReader(r io.Reader) io.ByteReader {
	b, _ := r.(io.ByteReader)
	return b
}

var (
	_ = plainTypes // whose callers are gVisor's
	_ = encodePlain
	_ = decodeNumber
	_ = encodeBytes
	_ = decodeBytes
	_ = byteReader
)
