package audit

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"
)

// origin is what the first record of a log continues.
const origin = "0000000000000000000000000000000000000000000000000000000000000000"

// maxLine is longer than any line that is written; a longer one is no record.
const maxLine = 64 << 10

// wire is a line as it is decoded. It is encoded by hand, so that the bytes which are hashed depend on no library.
type wire struct {
	Seq     int64             `json:"seq"`
	Time    string            `json:"time"`
	Actor   string            `json:"actor"`
	Action  string            `json:"action"`
	Sandbox string            `json:"sandbox"`
	Message string            `json:"message"`
	Fields  map[string]string `json:"fields"`
	Prev    string            `json:"prev"`
	Hash    string            `json:"hash"`
}

// header is the first line of a segment.
type header struct {
	Version int    `json:"audit"`
	First   int64  `json:"first"`
	Prev    string `json:"prev"`
}

func encodeHeader(h header) []byte {
	return fmt.Appendf(nil, "{\"audit\":1,\"first\":%d,\"prev\":%q}\n", h.First, h.Prev)
}

func decodeHeader(line []byte) (header, error) {
	var h header
	if err := strict(line, &h); err != nil {
		return header{}, fmt.Errorf("it is no header of a segment: %w", err)
	}
	if h.Version != 1 {
		return header{}, fmt.Errorf("the segment has version %d; this program knows 1", h.Version)
	}
	if !isHash(h.Prev) || h.First < 1 || !bytes.Equal(encodeHeader(h), line) {
		return header{}, errors.New("the header of the segment is not as it is written")
	}
	return h, nil
}

// encode sets the hash of a record and returns its line.
func encode(r *Record) []byte {
	line := body(r)
	r.Hash = sum(r.Prev, line)
	line = append(line[:len(line)-1], `,"hash":"`...)
	line = append(line, r.Hash...)
	return append(line, "\"}\n"...)
}

// sum chains: the hash before, then the record's line without its own hash.
func sum(prev string, body []byte) string {
	h := sha256.New()
	h.Write([]byte(prev))
	h.Write(body)
	return hex.EncodeToString(h.Sum(nil))
}

// body is the canonical form of a record: its line without the hash. Texts that are empty are left out.
func body(r *Record) []byte {
	b := make([]byte, 0, 512)
	b = append(b, `{"seq":`...)
	b = strconv.AppendInt(b, r.Seq, 10)
	b = append(b, `,"time":"`...)
	b = r.Time.AppendFormat(b, time.RFC3339Nano)
	b = append(b, '"')
	for _, f := range [...]struct{ key, value string }{{"actor", r.Actor}, {"action", r.Action}, {"sandbox", r.Sandbox}, {"message", r.Message}} {
		if f.value != "" {
			b = append(append(append(b, `,"`...), f.key...), `":`...)
			b = appendText(b, f.value)
		}
	}
	if len(r.Fields) > 0 {
		sep := byte('{')
		b = append(b, `,"fields":`...)
		for _, key := range slices.Sorted(maps.Keys(r.Fields)) {
			b = append(b, sep)
			b = append(appendText(b, key), ':')
			b = appendText(b, r.Fields[key])
			sep = ','
		}
		b = append(b, '}')
	}
	b = append(b, `,"prev":"`...)
	b = append(b, r.Prev...)
	return append(b, `"}`...)
}

// appendText writes a JSON string. Only quotes and backslashes need escaping: every text is tidy.
func appendText(b []byte, s string) []byte {
	b = append(b, '"')
	for {
		i := 0
		for i < len(s) && s[i] != '"' && s[i] != '\\' {
			i++
		}
		b = append(b, s[:i]...)
		if i == len(s) {
			return append(b, '"')
		}
		b = append(b, '\\', s[i])
		s = s[i+1:]
	}
}

// decode reads a line with its newline. A record comes back also when its hash is not that of its content; then the
// error is errHash. Any line that encode would have written in another way is an error.
func decode(line []byte) (Record, error) {
	var w wire
	if err := strict(line, &w); err != nil {
		return Record{}, fmt.Errorf("it is no record: %w", err)
	}
	at, err := time.Parse(time.RFC3339Nano, w.Time)
	if err != nil {
		return Record{}, fmt.Errorf("its time %.40q is none", w.Time)
	}
	r := Record{
		Seq: w.Seq, Time: at.UTC(), Actor: w.Actor, Action: w.Action, Sandbox: w.Sandbox, Message: w.Message,
		Fields: w.Fields, Prev: w.Prev,
	}
	if r.Seq < 1 || r.Action == "" || !isHash(w.Prev) || !isHash(w.Hash) {
		return Record{}, errors.New("it is no record: seq, action, prev or hash is missing or out of range")
	}
	for key, value := range w.Fields {
		if !tidied(key) || !tidied(value) {
			return Record{}, fmt.Errorf("its field %.80q holds characters that are always escaped", key)
		}
	}
	if !tidied(r.Actor) || !tidied(r.Action) || !tidied(r.Sandbox) || !tidied(r.Message) {
		return Record{}, errors.New("it holds characters that are always escaped")
	}
	if again := encode(&r); !bytes.Equal(again, line) {
		if r.Hash != w.Hash {
			r.Hash = w.Hash
			return r, errHash
		}
		return Record{}, errors.New("it is not written as records are")
	}
	return r, nil
}

var errHash = errors.New("its hash is not that of its content")

func strict(line []byte, to any) error {
	if !utf8.Valid(line) {
		return errors.New("the line is no UTF-8")
	}
	dec := json.NewDecoder(bytes.NewReader(line))
	dec.DisallowUnknownFields()
	return dec.Decode(to)
}

func isHash(s string) bool {
	if len(s) != len(origin) {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
