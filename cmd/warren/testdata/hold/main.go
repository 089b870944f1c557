// Command hold keeps random memory and random files, and says their hashes, so that a test sees whether all of them is still
// what it was. It runs in a sandbox.
//
//	hold serve MB           holds so much memory, and answers below
//	hold memory             prints the hash of the memory of the one that serves
//	hold change-memory      writes some of it anew
//	hold make DIR MB        makes a tree of so many random bytes
//	hold files DIR...       prints the hash of trees: names, modes, sizes, links and contents
//	hold state DIR...       prints both hashes
//	hold change-files DIR   writes some of a tree anew, adds and removes
package main

import (
	"bufio"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"io/fs"
	mrand "math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
)

const address = "127.0.0.1:7070"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "hold:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 2 && args[0] == "serve":
		mb, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		return serve(mb)
	case len(args) == 1 && (args[0] == "memory" || args[0] == "change-memory"):
		return ask(args[0])
	case len(args) == 3 && args[0] == "make":
		mb, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		return grow(args[1], int64(mb)<<20)
	case len(args) > 1 && args[0] == "files":
		return sum(args[1:])
	case len(args) > 1 && args[0] == "state":
		if err := ask("memory"); err != nil {
			return err
		}
		return sum(args[1:])
	case len(args) == 2 && args[0] == "change-files":
		return change(args[1])
	}
	return fmt.Errorf("arguments %q", args)
}

// source is random, and other in each call.
func source() *mrand.ChaCha8 {
	var seed [32]byte
	rand.Read(seed[:])
	return mrand.NewChaCha8(seed)
}

func serve(mb int) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	held := make([]byte, mb<<20)
	source().Read(held)
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		word, _ := bufio.NewReader(conn).ReadString('\n')
		if word == "change-memory\n" {
			src := source()
			for at := 0; at < len(held); at += 64 << 10 {
				src.Read(held[at : at+1000])
			}
		}
		fmt.Fprintf(conn, "%x\n", sha256.Sum256(held))
		conn.Close()
	}
}

func ask(word string) error {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := fmt.Fprintln(conn, word); err != nil {
		return err
	}
	answer, err := io.ReadAll(conn)
	if err == nil && len(answer) != 65 {
		err = fmt.Errorf("the answer is %q", answer)
	}
	fmt.Print(string(answer))
	return err
}

// grow makes files of 0 to 4 MiB, most of them small, with links and other modes among them.
func grow(dir string, size int64) error {
	src := source()
	r := mrand.New(src)
	for i := 0; size > 0; i++ {
		sub := filepath.Join(dir, fmt.Sprintf("d%d", i/100), fmt.Sprintf("e%d", i%7))
		if err := os.MkdirAll(sub, 0o755); err != nil {
			return err
		}
		n := min(r.Int64N(8<<10), size)
		if i%16 == 0 {
			n = min(r.Int64N(4<<20), size)
		}
		b := make([]byte, n)
		src.Read(b)
		name := filepath.Join(sub, fmt.Sprintf("f%d", i))
		if err := os.WriteFile(name, b, 0o600|fs.FileMode(i%2)*0o111); err != nil {
			return err
		}
		if i%20 == 0 {
			if err := os.Symlink(filepath.Base(name), name+".link"); err != nil {
				return err
			}
		}
		size -= max(n, 1)
	}
	return nil
}

// sum prints one hash of all. The files are read several at a time, and count in the order of their names.
func sum(dirs []string) error {
	h := sha256.New()
	count := 0
	var order []string
	sums := map[string][sha256.Size]byte{}
	var mu sync.Mutex
	var readers errgroup.Group
	readers.SetLimit(2 * runtime.NumCPU())
	for _, dir := range dirs {
		if err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			count++
			fmt.Fprintf(h, "%q %v\n", name, info.Mode())
			switch {
			case info.Mode()&fs.ModeSymlink != 0:
				to, err := os.Readlink(name)
				fmt.Fprintf(h, "%q\n", to)
				return err
			case info.Mode().IsRegular():
				binary.Write(h, binary.BigEndian, info.Size())
				order = append(order, name)
				readers.Go(func() error {
					f, err := os.Open(name)
					if err != nil {
						return err
					}
					defer f.Close()
					own := sha256.New()
					if _, err = io.Copy(own, f); err != nil {
						return err
					}
					mu.Lock()
					defer mu.Unlock()
					sums[name] = [sha256.Size]byte(own.Sum(nil))
					return nil
				})
			}
			return nil
		}); err != nil {
			return err
		}
	}
	if err := readers.Wait(); err != nil {
		return err
	}
	for _, name := range order {
		one := sums[name]
		h.Write(one[:])
	}
	fmt.Printf("%x of %d\n", h.Sum(nil), count)
	return nil
}

func change(dir string) error {
	src := source()
	i := 0
	return filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		i++
		b := make([]byte, 5000)
		src.Read(b)
		switch {
		case i%10 == 1: // in place
			f, err := os.OpenFile(name, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.Write(b)
			return err
		case i%40 == 2:
			return os.Remove(name)
		case i%40 == 3 && !strings.HasSuffix(name, ".new"):
			return os.WriteFile(name+".new", b, 0o640)
		case i%40 == 4:
			return os.Chmod(name, 0o640)
		}
		return nil
	})
}
