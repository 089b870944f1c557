package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// writeReference writes the contract as a page for people: every service, call, message and value with its comment.
func writeReference(path string, files []protoreflect.FileDescriptor) error {
	var b bytes.Buffer
	b.WriteString("# API reference\n\n" +
		"<!-- Generated from proto/ by `make generate`; do not edit. -->\n\n" +
		"Every call is `POST /<package>.<Service>/<Call>` in the Connect protocol (JSON or protobuf), on the server's socket for\n" +
		"`warren.v1`, and through `/v1/sandboxes/{id}/ports/49983/` for what the guest of a sandbox serves. In JSON, field names are\n" +
		"lowerCamelCase, 64-bit integers are strings, bytes are base64, durations read `\"1.5s\"` and times are RFC 3339.\n")
	for _, f := range files {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n", f.Package(), fileComment(f))
		for i := range f.Services().Len() {
			service(&b, f.Services().Get(i))
		}
		for i := range f.Messages().Len() {
			message(&b, f.Messages().Get(i))
		}
		for i := range f.Enums().Len() {
			enum(&b, f.Enums().Get(i))
		}
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}

func service(b *bytes.Buffer, s protoreflect.ServiceDescriptor) {
	fmt.Fprintf(b, "\n### %s\n\n%s\n\n| Call | Takes | Returns | |\n|---|---|---|---|\n", s.Name(), comment(s))
	for i := range s.Methods().Len() {
		m := s.Methods().Get(i)
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", m.Name(), streamed(m.IsStreamingClient(), m.Input()), streamed(m.IsStreamingServer(), m.Output()), comment(m))
	}
}

func streamed(stream bool, m protoreflect.MessageDescriptor) string {
	if stream {
		return "stream of " + link(m)
	}
	return link(m)
}

func message(b *bytes.Buffer, m protoreflect.MessageDescriptor) {
	if m.IsMapEntry() {
		return
	}
	fmt.Fprintf(b, "\n#### %s\n", short(m))
	if c := comment(m); c != "" {
		fmt.Fprintf(b, "\n%s\n", c)
	}
	if m.Fields().Len() == 0 {
		b.WriteString("\nNo fields.\n")
	} else {
		b.WriteString("\n| Field | Type | |\n|---|---|---|\n")
	}
	for i := range m.Fields().Len() {
		f := m.Fields().Get(i)
		note := comment(f)
		if o := f.ContainingOneof(); o != nil && !o.IsSynthetic() {
			note = strings.TrimSpace("One of `" + string(o.Name()) + "`. " + note)
		}
		fmt.Fprintf(b, "| `%s` | %s | %s |\n", f.JSONName(), fieldType(f), note)
	}
	for i := range m.Messages().Len() {
		message(b, m.Messages().Get(i))
	}
	for i := range m.Enums().Len() {
		enum(b, m.Enums().Get(i))
	}
}

func enum(b *bytes.Buffer, e protoreflect.EnumDescriptor) {
	fmt.Fprintf(b, "\n#### %s\n\n", short(e))
	for i := range e.Values().Len() {
		v := e.Values().Get(i)
		fmt.Fprintf(b, "- `%s` (%d) %s\n", v.Name(), v.Number(), comment(v))
	}
}

func fieldType(f protoreflect.FieldDescriptor) string {
	if f.IsMap() {
		return "map of " + scalar(f.MapKey()) + " to " + scalar(f.MapValue())
	}
	if f.IsList() {
		return "list of " + scalar(f)
	}
	return scalar(f)
}

func scalar(f protoreflect.FieldDescriptor) string {
	switch f.Kind() {
	case protoreflect.MessageKind:
		return link(f.Message())
	case protoreflect.EnumKind:
		return "[" + short(f.Enum()) + "](#" + strings.ToLower(short(f.Enum())) + ")"
	default:
		return f.Kind().String()
	}
}

func link(m protoreflect.MessageDescriptor) string {
	if strings.HasPrefix(string(m.FullName()), "google.protobuf.") {
		return string(m.Name())
	}
	return "[" + short(m) + "](#" + strings.ToLower(strings.ReplaceAll(short(m), ".", "")) + ")"
}

// short is the name without the package.
func short(d protoreflect.Descriptor) string {
	return strings.TrimPrefix(string(d.FullName()), string(d.ParentFile().Package())+".")
}

func comment(d protoreflect.Descriptor) string {
	loc := d.ParentFile().SourceLocations().ByDescriptor(d)
	return strings.ReplaceAll(strings.Join(strings.Fields(loc.LeadingComments), " "), "|", "\\|")
}

// fileComment is the comment above the syntax line.
func fileComment(f protoreflect.FileDescriptor) string {
	loc := f.SourceLocations().ByPath(protoreflect.SourcePath{12})
	return strings.Join(strings.Fields(loc.LeadingComments), " ")
}
