// Command protogen compiles the contract below proto/ to Go and to docs/API.md, with the compiler and the generators that go.mod
// pins, so that no protoc has to be installed.
//
// Run it from the root of the repository: go run ./internal/protogen
package main

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"

	"github.com/bufbuild/protocompile"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "protogen:", err)
		os.Exit(1)
	}
}

func run() error {
	var files []string
	err := filepath.WalkDir("proto", func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".proto") {
			files = append(files, strings.TrimPrefix(filepath.ToSlash(path), "proto/"))
		}
		return err
	})
	if err != nil {
		return err
	}
	sort.Strings(files)
	compiler := protocompile.Compiler{
		Resolver:       protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: []string{"proto"}}),
		SourceInfoMode: protocompile.SourceInfoStandard,
	}
	compiled, err := compiler.Compile(context.Background(), files...)
	if err != nil {
		return err
	}
	req := &pluginpb.CodeGeneratorRequest{FileToGenerate: files}
	seen := map[string]bool{}
	var add func(protoreflect.FileDescriptor)
	add = func(f protoreflect.FileDescriptor) {
		if seen[f.Path()] {
			return
		}
		seen[f.Path()] = true
		imports := f.Imports()
		for i := range imports.Len() {
			add(imports.Get(i).FileDescriptor)
		}
		req.ProtoFile = append(req.ProtoFile, descriptor(f))
	}
	for _, f := range compiled {
		add(f)
	}
	descriptors := make([]protoreflect.FileDescriptor, len(compiled))
	for i, f := range compiled {
		descriptors[i] = f
	}
	if err := writeReference(filepath.Join("docs", "API.md"), descriptors); err != nil {
		return err
	}
	for _, plugin := range []string{"protoc-gen-go", "protoc-gen-connect-go"} {
		param := "module=github.com/warren-sandbox/warren"
		if plugin == "protoc-gen-connect-go" {
			param += ",simple=false"
		}
		req.Parameter = proto.String(param)
		if err := generate(plugin, req); err != nil {
			return fmt.Errorf("%s: %w", plugin, err)
		}
	}
	return nil
}

// descriptor keeps the comments, which protodesc alone would drop.
func descriptor(f protoreflect.FileDescriptor) *descriptorpb.FileDescriptorProto {
	if r, ok := f.(interface {
		FileDescriptorProto() *descriptorpb.FileDescriptorProto
	}); ok {
		return r.FileDescriptorProto()
	}
	return protodesc.ToFileDescriptorProto(f)
}

func generate(plugin string, req *pluginpb.CodeGeneratorRequest) error {
	in, err := proto.Marshal(req)
	if err != nil {
		return err
	}
	cmd := exec.Command("go", "tool", plugin)
	cmd.Stdin = bytes.NewReader(in)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return err
	}
	var res pluginpb.CodeGeneratorResponse
	if err := proto.Unmarshal(out, &res); err != nil {
		return err
	}
	if res.Error != nil {
		return fmt.Errorf("%s", res.GetError())
	}
	for _, f := range res.File {
		path := filepath.FromSlash(f.GetName())
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(f.GetContent()), 0o644); err != nil {
			return err
		}
	}
	return nil
}
