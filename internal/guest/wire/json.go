package wire

import (
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth bounds how deep JSON may nest: messages nest at most 5 deep, and unknown fields are skipped by recursion.
const maxDepth = 64

// enum is implemented by enumerations, whose JSON form is a name.
type enum interface{ names() map[int32]string }

var (
	timeType = reflect.TypeFor[time.Time]()
	enumType = reflect.TypeFor[enum]()
)

// field describes how one field of a message stands in JSON.
type field struct {
	name  string // lowerCamelCase, as it is written
	alt   string // snake_case, which is read too
	index int
	oneof string
}

// fieldsOf caches the fields of each message type.
var fieldsOf sync.Map // reflect.Type -> []field

func fields(t reflect.Type) []field {
	if f, ok := fieldsOf.Load(t); ok {
		return f.([]field)
	}
	var out []field
	for i := range t.NumField() {
		sf := t.Field(i)
		name := sf.Tag.Get("json")
		out = append(out, field{name: name, alt: snake(name), index: i, oneof: sf.Tag.Get("oneof")})
	}
	fieldsOf.Store(t, out)
	return out
}

// snake turns lowerCamelCase into snake_case.
func snake(s string) string {
	var b strings.Builder
	for _, r := range s {
		if r >= 'A' && r <= 'Z' {
			b.WriteByte('_')
			r += 'a' - 'A'
		}
		b.WriteRune(r)
	}
	return b.String()
}

// Append appends the JSON form of msg, a pointer to a message of this package, as protojson writes it: fields
// that hold their default are left out, 64-bit numbers are strings, bytes are base64.
func Append(dst []byte, msg any) []byte {
	return appendMessage(dst, reflect.ValueOf(msg).Elem())
}

func appendMessage(dst []byte, v reflect.Value) []byte {
	dst = append(dst, '{')
	first := true
	for _, f := range fields(v.Type()) {
		fv := v.Field(f.index)
		// A field with presence (a pointer, or bytes in a oneof) is written when it is set, another when it is not zero.
		if fv.Kind() == reflect.Slice && f.oneof == "" || fv.Kind() == reflect.Map {
			if fv.Len() == 0 {
				continue
			}
		} else if fv.IsZero() {
			continue
		}
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = append(dst, '"')
		dst = append(dst, f.name...)
		dst = append(dst, '"', ':')
		dst = appendValue(dst, fv)
	}
	return append(dst, '}')
}

func appendValue(dst []byte, v reflect.Value) []byte {
	t := v.Type()
	switch {
	case t == timeType:
		return appendTime(dst, v.Interface().(time.Time))
	case t.Implements(enumType):
		if name, ok := v.Interface().(enum).names()[int32(v.Int())]; ok {
			return AppendString(dst, name)
		}
		return strconv.AppendInt(dst, v.Int(), 10)
	}
	switch t.Kind() {
	case reflect.Pointer:
		return appendValue(dst, v.Elem())
	case reflect.Struct:
		return appendMessage(dst, v)
	case reflect.String:
		return AppendString(dst, v.String())
	case reflect.Bool:
		return strconv.AppendBool(dst, v.Bool())
	case reflect.Int32:
		return strconv.AppendInt(dst, v.Int(), 10)
	case reflect.Uint32:
		return strconv.AppendUint(dst, v.Uint(), 10)
	case reflect.Int64:
		dst = append(dst, '"')
		dst = strconv.AppendInt(dst, v.Int(), 10)
		return append(dst, '"')
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			dst = append(dst, '"')
			dst = base64.StdEncoding.AppendEncode(dst, v.Bytes())
			return append(dst, '"')
		}
		dst = append(dst, '[')
		for i := range v.Len() {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = appendValue(dst, v.Index(i))
		}
		return append(dst, ']')
	case reflect.Map:
		return AppendMap(dst, v.Interface().(map[string]string))
	}
	panic("wire: a message has a field of type " + t.String())
}

// AppendMap appends a map of strings, in the order of its keys.
func AppendMap(dst []byte, m map[string]string) []byte {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	dst = append(dst, '{')
	for i, k := range keys {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = AppendString(dst, k)
		dst = append(dst, ':')
		dst = AppendString(dst, m[k])
	}
	return append(dst, '}')
}

// appendTime writes RFC 3339 with 0, 3, 6 or 9 digits of a second, as protojson does.
func appendTime(dst []byte, t time.Time) []byte {
	t = t.UTC()
	layout := "2006-01-02T15:04:05"
	switch ns := t.Nanosecond(); {
	case ns == 0:
	case ns%1e6 == 0:
		layout += ".000"
	case ns%1e3 == 0:
		layout += ".000000"
	default:
		layout += ".000000000"
	}
	dst = append(dst, '"')
	dst = t.AppendFormat(dst, layout)
	return append(dst, 'Z', '"')
}

const hexDigits = "0123456789abcdef"

// appendString writes a JSON string. Bytes that are no UTF-8 (file names, command lines) become U+FFFD, since JSON
// cannot hold them.
func AppendString(dst []byte, s string) []byte {
	dst = append(dst, '"')
	for i := 0; i < len(s); {
		c := s[i]
		if c < utf8.RuneSelf {
			i++
			switch {
			case c == '"' || c == '\\':
				dst = append(dst, '\\', c)
			case c == '\n':
				dst = append(dst, '\\', 'n')
			case c == '\t':
				dst = append(dst, '\\', 't')
			case c == '\r':
				dst = append(dst, '\\', 'r')
			case c < 0x20 || c == 0x7f:
				dst = append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
			default:
				dst = append(dst, c)
			}
			continue
		}
		r, n := utf8.DecodeRuneInString(s[i:])
		dst = utf8.AppendRune(dst, r) // RuneError for an invalid byte
		i += n
	}
	return append(dst, '"')
}

// Unmarshal reads the JSON form of a message into msg, a pointer to a message of this package, by protojson's
// rules with unknown fields ignored: names in lowerCamelCase or snake_case, 64-bit numbers as strings or
// numbers, bytes in either base64 alphabet, null as absent; a field given twice is an error, and so is a second
// member of a oneof.
func Unmarshal(data []byte, msg any) error {
	p := parser{data: data}
	p.space()
	if err := p.message(reflect.ValueOf(msg).Elem(), 0); err != nil {
		return err
	}
	p.space()
	if p.pos != len(p.data) {
		return p.errorf("something follows the message")
	}
	return nil
}

type parser struct {
	data []byte
	pos  int
}

func (p *parser) errorf(format string, args ...any) error {
	return fmt.Errorf("invalid JSON at byte %d: %s", p.pos, fmt.Sprintf(format, args...))
}

func (p *parser) space() {
	for p.pos < len(p.data) {
		switch p.data[p.pos] {
		case ' ', '\t', '\n', '\r':
			p.pos++
		default:
			return
		}
	}
}

// peek returns the next byte that is no white space, or 0 at the end.
func (p *parser) peek() byte {
	p.space()
	if p.pos == len(p.data) {
		return 0
	}
	return p.data[p.pos]
}

func (p *parser) expect(c byte) error {
	if p.peek() != c {
		return p.errorf("want %q", c)
	}
	p.pos++
	return nil
}

// object reads an object, calling member for each key with the parser at its value.
func (p *parser) object(depth int, member func(key string) error) error {
	if depth > maxDepth {
		return p.errorf("nested too deep")
	}
	if err := p.expect('{'); err != nil {
		return err
	}
	if p.peek() == '}' {
		p.pos++
		return nil
	}
	for {
		if p.peek() != '"' {
			return p.errorf("want a key")
		}
		key, err := p.str()
		if err != nil {
			return err
		}
		if err := p.expect(':'); err != nil {
			return err
		}
		p.space()
		if err := member(key); err != nil {
			return err
		}
		switch p.peek() {
		case ',':
			p.pos++
		case '}':
			p.pos++
			return nil
		default:
			return p.errorf("want ',' or '}'")
		}
	}
}

// array reads an array, calling element with the parser at each value.
func (p *parser) array(depth int, element func() error) error {
	if depth > maxDepth {
		return p.errorf("nested too deep")
	}
	if err := p.expect('['); err != nil {
		return err
	}
	if p.peek() == ']' {
		p.pos++
		return nil
	}
	for {
		p.space()
		if err := element(); err != nil {
			return err
		}
		switch p.peek() {
		case ',':
			p.pos++
		case ']':
			p.pos++
			return nil
		default:
			return p.errorf("want ',' or ']'")
		}
	}
}

func (p *parser) message(v reflect.Value, depth int) error {
	fs := fields(v.Type())
	var seen uint64 // messages have few fields
	oneofs := map[string]bool(nil)
	return p.object(depth, func(key string) error {
		i := slices.IndexFunc(fs, func(f field) bool { return f.name == key || f.alt == key })
		if i < 0 {
			return p.skip(depth + 1)
		}
		if seen&(1<<i) != 0 {
			return p.errorf("field %q is given twice", key)
		}
		seen |= 1 << i
		if p.null() {
			return nil
		}
		if o := fs[i].oneof; o != "" {
			if oneofs[o] {
				return p.errorf("field %q: another member of %q is set already", key, o)
			}
			if oneofs == nil {
				oneofs = make(map[string]bool)
			}
			oneofs[o] = true
		}
		if err := p.value(v.Field(fs[i].index), depth+1); err != nil {
			return fmt.Errorf("field %q: %w", key, err)
		}
		return nil
	})
}

// null reads the word null if it is next.
func (p *parser) null() bool { return p.word("null") }

func (p *parser) word(w string) bool {
	if strings.HasPrefix(string(p.data[p.pos:min(len(p.data), p.pos+len(w))]), w) {
		p.pos += len(w)
		return true
	}
	return false
}

func (p *parser) value(v reflect.Value, depth int) error {
	t := v.Type()
	switch {
	case t == timeType:
		s, err := p.str()
		if err != nil {
			return err
		}
		tm, err := time.Parse(time.RFC3339Nano, s)
		if err != nil {
			return p.errorf("%.40q is no time in RFC 3339", s)
		}
		v.Set(reflect.ValueOf(tm.UTC()))
		return nil
	case t.Implements(enumType):
		return p.enum(v)
	}
	switch t.Kind() {
	case reflect.Pointer:
		e := reflect.New(t.Elem())
		if err := p.value(e.Elem(), depth); err != nil {
			return err
		}
		v.Set(e)
		return nil
	case reflect.Struct:
		return p.message(v, depth)
	case reflect.String:
		s, err := p.str()
		if err != nil {
			return err
		}
		v.SetString(s)
		return nil
	case reflect.Bool:
		switch {
		case p.word("true"):
			v.SetBool(true)
		case p.word("false"):
			v.SetBool(false)
		default:
			return p.errorf("want true or false")
		}
		return nil
	case reflect.Int32:
		return p.integer(math.MinInt32, math.MaxInt32, v.SetInt)
	case reflect.Int64:
		return p.integer(math.MinInt64, math.MaxInt64, v.SetInt)
	case reflect.Uint32:
		return p.integer(0, math.MaxUint32, func(n int64) { v.SetUint(uint64(n)) })
	case reflect.Map:
		return p.stringMap(v, depth)
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return p.bytes(v)
		}
		return p.array(depth, func() error {
			e := reflect.New(t.Elem()).Elem()
			if err := p.value(e, depth+1); err != nil {
				return err
			}
			v.Set(reflect.Append(v, e))
			return nil
		})
	}
	panic("wire: a message has a field of type " + t.String())
}

func (p *parser) stringMap(v reflect.Value, depth int) error {
	m := make(map[string]string)
	err := p.object(depth, func(key string) error {
		if _, dup := m[key]; dup {
			return p.errorf("key %.40q is given twice", key)
		}
		s, err := p.str()
		m[key] = s
		return err
	})
	v.Set(reflect.ValueOf(m))
	return err
}

func (p *parser) bytes(v reflect.Value) error {
	s, err := p.rawString()
	if err != nil {
		return err
	}
	enc := base64.StdEncoding
	if slices.ContainsFunc(s, func(c byte) bool { return c == '-' || c == '_' }) {
		enc = base64.URLEncoding
	}
	if len(s)%4 != 0 {
		enc = enc.WithPadding(base64.NoPadding)
	}
	out := make([]byte, enc.DecodedLen(len(s)))
	n, err := enc.Decode(out, s)
	if err != nil {
		return p.errorf("bytes are not base64")
	}
	v.SetBytes(out[:n])
	return nil
}

func (p *parser) enum(v reflect.Value) error {
	if p.peek() != '"' {
		return p.integer(math.MinInt32, math.MaxInt32, v.SetInt)
	}
	s, err := p.str()
	if err != nil {
		return err
	}
	for n, name := range v.Interface().(enum).names() {
		if name == s {
			v.SetInt(int64(n))
			return nil
		}
	}
	// An unknown name is ignored like an unknown field, as protojson does when told to discard those.
	return nil
}

// integer reads a whole number, given as a number or as a string, also as 1.0 or 1e3.
func (p *parser) integer(lo, hi int64, set func(int64)) error {
	var tok string
	if p.peek() == '"' {
		s, err := p.str()
		if err != nil {
			return err
		}
		// The text of the string must be a number by itself.
		q := parser{data: []byte(s)}
		if tok, err = q.number(); err != nil || q.pos != len(s) {
			return p.errorf("%.40q is no number", s)
		}
	} else {
		var err error
		if tok, err = p.number(); err != nil {
			return err
		}
	}
	n, err := strconv.ParseInt(tok, 10, 64)
	if err != nil {
		f, ferr := strconv.ParseFloat(tok, 64)
		if errors.Is(err, strconv.ErrRange) || ferr != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
			return p.errorf("%.40s is no whole number in range", tok)
		}
		n = int64(f)
	}
	if n < lo || n > hi {
		return p.errorf("%d is out of range", n)
	}
	set(n)
	return nil
}

// number reads the text of a JSON number.
func (p *parser) number() (string, error) {
	start := p.pos
	digits := func() bool {
		n := p.pos
		for p.pos < len(p.data) && p.data[p.pos] >= '0' && p.data[p.pos] <= '9' {
			p.pos++
		}
		return p.pos > n
	}
	at := func(chars string) bool {
		if p.pos < len(p.data) && strings.IndexByte(chars, p.data[p.pos]) >= 0 {
			p.pos++
			return true
		}
		return false
	}
	at("-")
	ok := at("0") || digits()
	if ok && at(".") {
		ok = digits()
	}
	if ok && at("eE") {
		at("+-")
		ok = digits()
	}
	if !ok {
		return "", p.errorf("want a number")
	}
	return string(p.data[start:p.pos]), nil
}

// str reads a string, which must be UTF-8.
func (p *parser) str() (string, error) {
	b, err := p.rawString()
	if err != nil {
		return "", err
	}
	if !utf8.Valid(b) {
		return "", p.errorf("a string is not UTF-8")
	}
	return string(b), nil
}

// rawString reads a string and resolves its escapes. The result is valid until the data is.
func (p *parser) rawString() ([]byte, error) {
	if p.pos >= len(p.data) || p.data[p.pos] != '"' {
		return nil, p.errorf("want a string")
	}
	p.pos++
	start := p.pos
	for i := p.pos; i < len(p.data); i++ {
		switch c := p.data[i]; {
		case c == '"':
			p.pos = i + 1
			return p.data[start:i], nil
		case c == '\\':
			p.pos = i
			return p.escaped(slices.Clone(p.data[start:i]))
		case c < 0x20:
			p.pos = i
			return nil, p.errorf("a control character in a string")
		}
	}
	p.pos = len(p.data)
	return nil, p.errorf("a string does not end")
}

// escaped continues a string at its first escape.
func (p *parser) escaped(out []byte) ([]byte, error) {
	for p.pos < len(p.data) {
		c := p.data[p.pos]
		p.pos++
		switch {
		case c == '"':
			return out, nil
		case c < 0x20:
			return nil, p.errorf("a control character in a string")
		case c != '\\':
			out = append(out, c)
			continue
		}
		if p.pos == len(p.data) {
			break
		}
		c = p.data[p.pos]
		p.pos++
		switch c {
		case '"', '\\', '/':
			out = append(out, c)
		case 'b':
			out = append(out, '\b')
		case 'f':
			out = append(out, '\f')
		case 'n':
			out = append(out, '\n')
		case 'r':
			out = append(out, '\r')
		case 't':
			out = append(out, '\t')
		case 'u':
			r, err := p.hex4()
			if err != nil {
				return nil, err
			}
			if utf16.IsSurrogate(r) {
				if !p.word(`\u`) {
					return nil, p.errorf("half a surrogate pair")
				}
				low, err := p.hex4()
				if err != nil {
					return nil, err
				}
				if r = utf16.DecodeRune(r, low); r == utf8.RuneError {
					return nil, p.errorf("half a surrogate pair")
				}
			}
			out = utf8.AppendRune(out, r)
		default:
			return nil, p.errorf("unknown escape")
		}
	}
	return nil, p.errorf("a string does not end")
}

func (p *parser) hex4() (rune, error) {
	if len(p.data)-p.pos < 4 {
		return 0, p.errorf("a string does not end")
	}
	n, err := strconv.ParseUint(string(p.data[p.pos:p.pos+4]), 16, 16)
	if err != nil {
		return 0, p.errorf("want four hexadecimal digits")
	}
	p.pos += 4
	return rune(n), nil
}

// skip passes over any value.
func (p *parser) skip(depth int) error {
	switch c := p.peek(); {
	case c == '{':
		return p.object(depth, func(string) error { return p.skip(depth + 1) })
	case c == '[':
		return p.array(depth, func() error { return p.skip(depth + 1) })
	case c == '"':
		_, err := p.str()
		return err
	case p.word("true"), p.word("false"), p.null():
		return nil
	}
	_, err := p.number()
	return err
}
