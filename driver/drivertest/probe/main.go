// Command probe is what package drivertest runs inside a sandbox: the far end of connections, programs that use too much,
// and attacks. An attack prints as JSON what it could do; the verdict is the host's.
package main

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"time"

	"github.com/warren-sandbox/warren/driver/drivertest/peer"
)

// verbs maps the first argument to what is done with the rest.
var verbs = map[string]func(args []string) error{
	"serve":   serve,
	"memory":  memory,
	"forks":   forks,
	"attack":  attack,
	"twin":    twin,
	"wait":    wait,
	"calls":   calls,
	"peer":    beVisible,
	"fuzz":    fuzz,
	"fuzzone": fuzzOne,
	"states":  holdStates,
	"trylock": tryLock,
	"status":  status,
}

func main() {
	if len(os.Args) < 2 || verbs[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "probe: the first argument is no verb")
		os.Exit(2)
	}
	if err := verbs[os.Args[1]](os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

// serve listens on a TCP address and answers as package peer says.
func serve(args []string) error {
	l, err := net.Listen("tcp", args[0])
	if err != nil {
		return err
	}
	fmt.Println("listening")
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go peer.Serve(conn)
	}
}

// status asks a URL of the guest's with a token and prints the status of the answer.
func status(args []string) error {
	req, err := http.NewRequest(http.MethodGet, args[0], nil)
	if err != nil {
		return err
	}
	req.Header.Set("X-Access-Token", args[1])
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	fmt.Println(resp.StatusCode)
	return nil
}

// memory touches so many bytes and keeps them until all are touched.
func memory(args []string) error {
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	const step = 4 << 20
	var kept [][]byte
	for used := 0; used < n; used += step {
		b := make([]byte, step)
		for i := range b {
			b[i] = byte(i ^ used)
		}
		kept = append(kept, b)
		// The guest looks a few times a second; a program that takes all at once is the kernel's to stop.
		time.Sleep(2 * time.Millisecond)
	}
	fmt.Println("all", len(kept)*step)
	return nil
}

// forks starts processes that wait until no more can be had or there are so many, prints how many, and ends them.
func forks(args []string) error {
	most, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	var running []*exec.Cmd
	for len(running) < most {
		cmd := exec.Command("/bin/sleep", "1000")
		if err := cmd.Start(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			break
		}
		running = append(running, cmd)
	}
	fmt.Println(len(running))
	var wg sync.WaitGroup
	for _, cmd := range running {
		cmd.Process.Kill()
		wg.Go(func() { cmd.Wait() })
	}
	wg.Wait()
	return nil
}
