package warren_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"os"
	"time"

	"github.com/warren-sandbox/warren"
)

// A sandbox with a repository in it, a command, and its result as a patch.
func Example() {
	ctx := context.Background()
	c, err := warren.Connect(ctx, warren.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	sb, err := c.Create(ctx, warren.Spec{Repo: &warren.RepoSource{URL: "https://github.com/golang/example"}})
	if err != nil {
		log.Fatal(err)
	}
	defer sb.Delete(ctx)
	cmd := sb.Command("go", "vet", "./...")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(ctx); err != nil {
		log.Fatal(err)
	}
	diff, err := sb.Diff(ctx, warren.DiffOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer diff.Close()
	io.Copy(os.Stdout, diff)
}

func ExampleClient_Create() {
	ctx := context.Background()
	c, err := warren.Connect(ctx, warren.Options{})
	if err != nil {
		log.Fatal(err)
	}
	sb, err := c.Create(ctx, warren.Spec{
		Name:        "fix-the-tests",
		Resources:   warren.Resources{CPUMillis: 2000, Memory: 2 << 30},
		IdleTimeout: time.Hour,
		Progress:    func(p warren.Progress) { fmt.Println(p.Step, p.Message) },
	})
	if errors.Is(err, warren.ErrExhausted) {
		log.Fatal("no room: ", err)
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(sb.ID)
}

func ExampleSandbox_Command() {
	ctx := context.Background()
	c, err := warren.Connect(ctx, warren.Options{})
	if err != nil {
		log.Fatal(err)
	}
	out, err := c.Ref("fix-the-tests").Command("git", "status", "--short").Output(ctx)
	var exit *warren.ExitError
	if errors.As(err, &exit) {
		fmt.Printf("git: %v: %s", exit, exit.Stderr)
	}
	fmt.Printf("%s", out)
}

func ExampleSandbox_FS() {
	ctx := context.Background()
	c, err := warren.Connect(ctx, warren.Options{})
	if err != nil {
		log.Fatal(err)
	}
	files, err := c.Ref("fix-the-tests").FS().Dir("workspace")
	if err != nil {
		log.Fatal(err)
	}
	if err := files.WriteFile("notes/plan.md", []byte("1. read\n"), 0); err != nil {
		log.Fatal(err)
	}
	fs.WalkDir(files, ".", func(path string, d fs.DirEntry, err error) error {
		fmt.Println(path)
		return err
	})
}

func ExampleSandbox_Session() {
	ctx := context.Background()
	c, err := warren.Connect(ctx, warren.Options{})
	if err != nil {
		log.Fatal(err)
	}
	shell, err := c.Ref("fix-the-tests").Session(ctx, warren.SessionOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer shell.Close(ctx)
	for _, command := range []string{"cd sub", "export DEBUG=1", "make test"} {
		res, err := shell.Run(ctx, command, warren.SessionRun{Stdout: os.Stdout, Stderr: os.Stderr})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(command, "ended with", res.ExitCode, "in", res.Dir)
	}
}

func ExampleSandbox_Dial() {
	ctx := context.Background()
	c, err := warren.Connect(ctx, warren.Options{})
	if err != nil {
		log.Fatal(err)
	}
	conn, err := c.Ref("fix-the-tests").Dial(ctx, 8080)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET / HTTP/1.0\r\n\r\n")
	io.Copy(os.Stdout, conn)
}

func ExampleSandbox_Search() {
	ctx := context.Background()
	c, err := warren.Connect(ctx, warren.Options{})
	if err != nil {
		log.Fatal(err)
	}
	for m, err := range c.Ref("fix-the-tests").Search(ctx, warren.Query{Pattern: `TODO`, Include: []string{"*.go"}}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s:%d: %s\n", m.Path, m.Line, m.Text)
	}
}
