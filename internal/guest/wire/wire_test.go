package wire_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/warren-sandbox/warren/internal/guest/wire"
	"github.com/warren-sandbox/warren/proto/e2b/filesystem"
	"github.com/warren-sandbox/warren/proto/e2b/process"
	guestv1 "github.com/warren-sandbox/warren/proto/warren/guest/v1"
)

// pairs holds each generated message beside the hand-written one that stands for it.
var pairs = []struct {
	generated proto.Message
	hand      any
}{
	{&process.ListRequest{}, &wire.ListRequest{}},
	{&process.ListResponse{}, &wire.ListResponse{}},
	{&process.StartRequest{}, &wire.StartRequest{}},
	{&process.StartResponse{}, &wire.StartResponse{}},
	{&process.ConnectRequest{}, &wire.ConnectRequest{}},
	{&process.ConnectResponse{}, &wire.StartResponse{}},
	{&process.UpdateRequest{}, &wire.UpdateRequest{}},
	{&process.UpdateResponse{}, &wire.Empty{}},
	{&process.SendInputRequest{}, &wire.SendInputRequest{}},
	{&process.SendInputResponse{}, &wire.Empty{}},
	{&process.StreamInputRequest{}, &wire.StreamInputRequest{}},
	{&process.StreamInputResponse{}, &wire.Empty{}},
	{&process.SendSignalRequest{}, &wire.SendSignalRequest{}},
	{&process.SendSignalResponse{}, &wire.Empty{}},
	{&process.CloseStdinRequest{}, &wire.ConnectRequest{}},
	{&process.CloseStdinResponse{}, &wire.Empty{}},
	{&filesystem.MoveRequest{}, &wire.MoveRequest{}},
	{&filesystem.MoveResponse{}, &wire.EntryResponse{}},
	{&filesystem.MakeDirRequest{}, &wire.PathRequest{}},
	{&filesystem.MakeDirResponse{}, &wire.EntryResponse{}},
	{&filesystem.RemoveRequest{}, &wire.PathRequest{}},
	{&filesystem.RemoveResponse{}, &wire.Empty{}},
	{&filesystem.StatRequest{}, &wire.PathRequest{}},
	{&filesystem.StatResponse{}, &wire.EntryResponse{}},
	{&filesystem.ListDirRequest{}, &wire.ListDirRequest{}},
	{&filesystem.ListDirResponse{}, &wire.ListDirResponse{}},
	{&filesystem.WatchDirRequest{}, &wire.WatchDirRequest{}},
	{&filesystem.WatchDirResponse{}, &wire.WatchDirResponse{}},
	{&filesystem.CreateWatcherRequest{}, &wire.WatchDirRequest{}},
	{&filesystem.CreateWatcherResponse{}, &wire.CreateWatcherResponse{}},
	{&filesystem.GetWatcherEventsRequest{}, &wire.CreateWatcherResponse{}},
	{&filesystem.GetWatcherEventsResponse{}, &wire.GetWatcherEventsResponse{}},
	{&filesystem.RemoveWatcherRequest{}, &wire.CreateWatcherResponse{}},
	{&filesystem.RemoveWatcherResponse{}, &wire.Empty{}},
	{&guestv1.AttachRequest{}, &wire.AttachRequest{}},
	{&guestv1.AttachResponse{}, &wire.AttachResponse{}},
	{&guestv1.ListProcessesRequest{}, &wire.ListProcessesRequest{}},
	{&guestv1.ListProcessesResponse{}, &wire.ListProcessesResponse{}},
	{&guestv1.SignalRequest{}, &wire.SignalRequest{}},
	{&guestv1.SignalResponse{}, &wire.Empty{}},
	{&guestv1.SearchRequest{}, &wire.SearchRequest{}},
	{&guestv1.SearchResponse{}, &wire.SearchResponse{}},
	{&guestv1.ReplaceRequest{}, &wire.ReplaceRequest{}},
	{&guestv1.ReplaceResponse{}, &wire.ReplaceResponse{}},
	{&guestv1.OpenSessionRequest{}, &wire.OpenSessionRequest{}},
	{&guestv1.OpenSessionResponse{}, &wire.OpenSessionResponse{}},
	{&guestv1.RunInSessionRequest{}, &wire.RunInSessionRequest{}},
	{&guestv1.RunInSessionResponse{}, &wire.RunInSessionResponse{}},
	{&guestv1.CloseSessionRequest{}, &wire.CloseSessionRequest{}},
	{&guestv1.CloseSessionResponse{}, &wire.Empty{}},
	{&guestv1.ListSessionsRequest{}, &wire.Empty{}},
	{&guestv1.ListSessionsResponse{}, &wire.ListSessionsResponse{}},
	{&guestv1.WatchPortsRequest{}, &wire.WatchPortsRequest{}},
	{&guestv1.WatchPortsResponse{}, &wire.WatchPortsResponse{}},
	{&guestv1.WatchLifecycleRequest{}, &wire.WatchLifecycleRequest{}},
	{&guestv1.WatchLifecycleResponse{}, &wire.WatchLifecycleResponse{}},
	{&guestv1.PutServicesRequest{}, &wire.PutServicesRequest{}},
	{&guestv1.PutServicesResponse{}, &wire.Empty{}},
	{&guestv1.ListServicesRequest{}, &wire.ListServicesRequest{}},
	{&guestv1.ListServicesResponse{}, &wire.ListServicesResponse{}},
	{&guestv1.ControlServiceRequest{}, &wire.ControlServiceRequest{}},
	{&guestv1.ControlServiceResponse{}, &wire.Empty{}},
}

// TestEveryMessageOfEveryServiceIsPaired makes sure that a new procedure is not forgotten here.
func TestEveryMessageOfEveryServiceIsPaired(t *testing.T) {
	have := make(map[protoreflect.FullName]bool)
	for _, p := range pairs {
		have[p.generated.ProtoReflect().Descriptor().FullName()] = true
	}
	for _, f := range []protoreflect.FileDescriptor{process.File_e2b_process_process_proto, filesystem.File_e2b_filesystem_filesystem_proto, guestv1.File_warren_guest_v1_guest_proto} {
		for i := range f.Services().Len() {
			ms := f.Services().Get(i).Methods()
			for j := range ms.Len() {
				for _, d := range []protoreflect.MessageDescriptor{ms.Get(j).Input(), ms.Get(j).Output()} {
					if !have[d.FullName()] {
						t.Errorf("%s has no hand-written message in this test", d.FullName())
					}
				}
			}
		}
	}
}

func TestMessagesRoundTrip(t *testing.T) {
	options := []protojson.MarshalOptions{{}, {UseProtoNames: true}, {UseEnumNumbers: true}, {Multiline: true}, {EmitUnpopulated: true}}
	for _, p := range pairs {
		name := string(p.generated.ProtoReflect().Descriptor().FullName())
		t.Run(name, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(1, 2))
			for i := range 300 {
				want := p.generated.ProtoReflect().New().Interface()
				fill(rnd, want.ProtoReflect(), 0)
				opt := options[i%len(options)]
				data, err := opt.Marshal(want)
				if err != nil {
					t.Fatal(err)
				}
				hand := reflect.New(reflect.TypeOf(p.hand).Elem()).Interface()
				if err := wire.Unmarshal(data, hand); err != nil {
					t.Fatalf("read %s: %v", data, err)
				}
				back := wire.Append(nil, hand)
				got := p.generated.ProtoReflect().New().Interface()
				if err := protojson.Unmarshal(back, got); err != nil {
					t.Fatalf("protojson refuses what was written: %s: %v", back, err)
				}
				if !proto.Equal(want, got) {
					t.Fatalf("a round trip changed the message\nfrom %s\nto   %s", data, back)
				}
			}
		})
	}
}

// fill sets random fields of m.
func fill(r *rand.Rand, m protoreflect.Message, depth int) {
	d := m.Descriptor()
	if d.FullName() == "google.protobuf.Timestamp" {
		// In range, and with fractions of every length.
		nanos := []int32{0, 120_000_000, 123_456_000, 123_456_789}[r.IntN(4)]
		m.Set(d.Fields().ByName("seconds"), protoreflect.ValueOfInt64(r.Int64N(4e9)))
		m.Set(d.Fields().ByName("nanos"), protoreflect.ValueOfInt32(nanos))
		return
	}
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		if o := f.ContainingOneof(); o != nil && !o.IsSynthetic() && m.WhichOneof(o) != nil || r.IntN(4) == 0 || depth > 5 {
			continue
		}
		switch {
		case f.IsMap():
			for range r.IntN(3) {
				m.Mutable(f).Map().Set(scalar(r, f.MapKey()).MapKey(), scalar(r, f.MapValue()))
			}
		case f.IsList():
			for range r.IntN(3) {
				if f.Message() != nil {
					e := m.Mutable(f).List().NewElement()
					fill(r, e.Message(), depth+1)
					m.Mutable(f).List().Append(e)
				} else {
					m.Mutable(f).List().Append(scalar(r, f))
				}
			}
		case f.Message() != nil:
			fill(r, m.Mutable(f).Message(), depth+1)
		default:
			m.Set(f, scalar(r, f))
		}
	}
}

func scalar(r *rand.Rand, f protoreflect.FieldDescriptor) protoreflect.Value {
	text := []string{"", "a", "zwölf <&> \u2028 \U0001f600", "q\"\\/\b\f\n\r\t\x01\x7f", strings.Repeat("x", 100)}[r.IntN(5)]
	switch f.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(text)
	case protoreflect.BytesKind:
		b := make([]byte, r.IntN(20))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return protoreflect.ValueOfBytes(b)
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(r.IntN(2) == 0)
	case protoreflect.Int32Kind, protoreflect.Sint32Kind:
		return protoreflect.ValueOfInt32([]int32{0, 1, -1, 1 << 30, -1 << 31}[r.IntN(5)])
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64([]int64{0, 1, -1, 1<<63 - 1, -1 << 63}[r.IntN(5)])
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32([]uint32{0, 1, 1<<32 - 1}[r.IntN(3)])
	case protoreflect.EnumKind:
		vs := f.Enum().Values()
		return protoreflect.ValueOfEnum(vs.Get(r.IntN(vs.Len())).Number())
	}
	panic("no value for " + f.Kind().String())
}

func TestUnmarshalRules(t *testing.T) {
	str := func(s string) *string { return &s }
	u32 := func(n uint32) *uint32 { return &n }
	for _, c := range []struct {
		name, in string
		want     any // the message, or nil for an error
		into     any
	}{
		{"unknown fields are skipped", `{"x":[{"y":[1,-2.5e3,"a\u00e4",true,null]}],"fromSeq":"7"}`, &wire.AttachRequest{FromSeq: 7}, &wire.AttachRequest{}},
		{"a 64-bit number as number", `{"fromSeq":-1}`, &wire.AttachRequest{FromSeq: -1}, &wire.AttachRequest{}},
		{"a number with a fraction of zero", `{"fromSeq":7.0}`, &wire.AttachRequest{FromSeq: 7}, &wire.AttachRequest{}},
		{"a number with an exponent", `{"fromSeq":"1e3"}`, &wire.AttachRequest{FromSeq: 1000}, &wire.AttachRequest{}},
		{"a real fraction", `{"fromSeq":7.5}`, nil, &wire.AttachRequest{}},
		{"a number out of range", `{"process":{"pid":4294967296}}`, nil, &wire.AttachRequest{}},
		{"a huge number", `{"fromSeq":1e999}`, nil, &wire.AttachRequest{}},
		{"a negative pid", `{"process":{"pid":-1}}`, nil, &wire.AttachRequest{}},
		{"snake case", `{"from_seq":5,"no_follow":true}`, &wire.AttachRequest{FromSeq: 5, NoFollow: true}, &wire.AttachRequest{}},
		{"both cases", `{"from_seq":5,"fromSeq":5}`, nil, &wire.AttachRequest{}},
		{"a field twice", `{"path":"a","path":"b"}`, nil, &wire.PathRequest{}},
		{"null is absent", `{"path":null}`, &wire.PathRequest{}, &wire.PathRequest{}},
		{"two members of a oneof", `{"pid":1,"tag":"a"}`, nil, &wire.ProcessSelector{}},
		{"null in a oneof", `{"pid":null,"tag":"a"}`, &wire.ProcessSelector{Tag: str("a")}, &wire.ProcessSelector{}},
		{"zero in a oneof is set", `{"pid":0}`, &wire.ProcessSelector{PID: u32(0)}, &wire.ProcessSelector{}},
		{"empty bytes in a oneof are set", `{"stdin":""}`, &wire.ProcessInput{Stdin: []byte{}}, &wire.ProcessInput{}},
		{"base64url without padding", `{"stdin":"-_8"}`, &wire.ProcessInput{Stdin: []byte{0xfb, 0xff}}, &wire.ProcessInput{}},
		{"base64 with padding", `{"stdin":"+/8="}`, &wire.ProcessInput{Stdin: []byte{0xfb, 0xff}}, &wire.ProcessInput{}},
		{"no base64", `{"stdin":"!"}`, nil, &wire.ProcessInput{}},
		{"an enum by number", `{"signal":15}`, &wire.SendSignalRequest{Signal: wire.SignalTerm}, &wire.SendSignalRequest{}},
		{"an unknown enum number is kept", `{"signal":99}`, &wire.SendSignalRequest{Signal: 99}, &wire.SendSignalRequest{}},
		{"an unknown enum name is dropped", `{"signal":"SIGNAL_NEW"}`, &wire.SendSignalRequest{}, &wire.SendSignalRequest{}},
		{"a number for a string", `{"path":1}`, nil, &wire.PathRequest{}},
		{"a string for a bool", `{"noFollow":"true"}`, nil, &wire.AttachRequest{}},
		{"invalid UTF-8", "{\"path\":\"\xff\"}", nil, &wire.PathRequest{}},
		{"half a surrogate pair", `{"path":"\ud800"}`, nil, &wire.PathRequest{}},
		{"a surrogate pair", `{"path":"\ud83d\ude00"}`, &wire.PathRequest{Path: "😀"}, &wire.PathRequest{}},
		{"a control character", "{\"path\":\"a\nb\"}", nil, &wire.PathRequest{}},
		{"a duplicate map key", `{"envs":{"a":"1","a":"2"}}`, nil, &wire.ProcessConfig{}},
		{"null in a map", `{"envs":{"a":null}}`, nil, &wire.ProcessConfig{}},
		{"null in a list", `{"args":[null]}`, nil, &wire.ProcessConfig{}},
		{"nothing", ``, nil, &wire.PathRequest{}},
		{"no object", `[]`, nil, &wire.PathRequest{}},
		{"trailing text", `{} {}`, nil, &wire.PathRequest{}},
		{"a trailing comma", `{"path":"a",}`, nil, &wire.PathRequest{}},
		{"a leading zero", `{"fromSeq":01}`, nil, &wire.AttachRequest{}},
		{"deep nesting", `{"x":` + strings.Repeat("[", 100000), nil, &wire.PathRequest{}},
		{"deep but closed", `{"x":` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000) + "}", nil, &wire.PathRequest{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := wire.Unmarshal([]byte(c.in), c.into)
			if c.want == nil {
				if err == nil {
					t.Fatalf("no error; read %+v", c.into)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(c.into, c.want) {
				t.Errorf("got %s, want %s", wire.Append(nil, c.into), wire.Append(nil, c.want))
			}
		})
	}
}

func TestAppendReplacesWhatIsNoUTF8(t *testing.T) {
	if got := string(wire.Append(nil, &wire.PathRequest{Path: "a\xffb"})); got != `{"path":"a�b"}` {
		t.Errorf("got %s", got)
	}
}

func TestReadFrame(t *testing.T) {
	frame := func(flags byte, n uint32, data string) string {
		return string([]byte{flags}) + string(binary.BigEndian.AppendUint32(nil, n)) + data
	}
	for _, c := range []struct {
		name, in, want string
		err            error // io.EOF, or another kind
		code           wire.Code
	}{
		{"a frame", frame(0, 2, "{}rest"), "{}", nil, ""},
		{"an empty frame", frame(0, 0, ""), "", nil, ""},
		{"nothing", "", "", io.EOF, ""},
		{"an end frame", frame(2, 2, "{}"), "", io.EOF, ""},
		{"a cut head", "\x00\x00", "", nil, wire.InvalidArgument},
		{"a cut body", frame(0, 5, "{}"), "", nil, wire.InvalidArgument},
		{"too large", frame(0, 101, ""), "", nil, wire.ResourceExhausted},
		{"a lie about the size", frame(0, 1<<32-1, ""), "", nil, wire.ResourceExhausted},
		{"compressed", frame(1, 2, "{}"), "", nil, wire.Internal},
		{"unknown flags", frame(4, 2, "{}"), "", nil, wire.InvalidArgument},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := wire.ReadFrame(strings.NewReader(c.in), 100)
			var e *wire.Error
			switch {
			case c.code != "":
				if !errors.As(err, &e) || e.Code != c.code {
					t.Errorf("error %v, want code %s", err, c.code)
				}
			case !errors.Is(err, c.err):
				t.Errorf("error %v, want %v", err, c.err)
			case string(got) != c.want:
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestTimeout(t *testing.T) {
	for in, want := range map[string]time.Duration{"": 0, "60000": time.Minute, "0": 1, "x": -1, "-1": -1, "12345678901": -1, "9999999999": 9999999999 * time.Millisecond} {
		h := http.Header{}
		if in != "" {
			h.Set("Connect-Timeout-Ms", in)
		}
		got, err := wire.Timeout(h)
		if (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("Timeout(%q) = %v, %v; want %v", in, got, err, want)
		}
	}
}

func TestContentType(t *testing.T) {
	for in, want := range map[string]bool{"application/json": true, "Application/JSON; charset=UTF-8": true, "application/json;charset=latin1": false,
		"application/connect+json": false, "application/proto": false, "": false} {
		if got := wire.ContentType(http.Header{"Content-Type": {in}}, wire.UnaryType); got != want {
			t.Errorf("ContentType(%q) = %t", in, got)
		}
	}
}

func FuzzUnmarshal(f *testing.F) {
	rnd := rand.New(rand.NewPCG(3, 4))
	for i, p := range pairs {
		m := p.generated.ProtoReflect().New().Interface()
		fill(rnd, m.ProtoReflect(), 0)
		data, err := protojson.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(i), data)
	}
	f.Add(uint8(0), []byte(`{"a":[1e5,{"b":"\ud83d\ude00"}]}`))
	f.Fuzz(func(t *testing.T, which uint8, data []byte) {
		p := pairs[int(which)%len(pairs)]
		hand := reflect.New(reflect.TypeOf(p.hand).Elem()).Interface()
		if err := wire.Unmarshal(data, hand); err != nil {
			return
		}
		// What was taken must be written so that it reads the same again.
		out := wire.Append(nil, hand)
		again := reflect.New(reflect.TypeOf(p.hand).Elem()).Interface()
		if err := wire.Unmarshal(out, again); err != nil {
			t.Fatalf("%s is written as %s, which cannot be read: %v", data, out, err)
		}
		if back := wire.Append(nil, again); !bytes.Equal(out, back) {
			t.Fatalf("%s and %s differ", out, back)
		}
	})
}

func FuzzReadFrame(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x00\x02{}\x02\x00\x00\x00\x02{}"))
	f.Add([]byte("\x01\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		for {
			frame, err := wire.ReadFrame(r, 1000)
			if err != nil {
				return
			}
			if len(frame) > 1000 {
				t.Fatalf("a frame of %d bytes", len(frame))
			}
		}
	})
}
