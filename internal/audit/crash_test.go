package audit

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-sandbox/warren/internal/testenv"
)

// The crash test runs a writer in a second process (this test binary, executed again), ends it with SIGKILL at any time,
// and compares what it acknowledged with what the log holds.

const crashDir = "WARREN_TEST_AUDIT_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		crashChild(dir)
		return
	}
	os.Exit(m.Run())
}

// crashOptions rotate often and drop nothing.
var crashOptions = Options{SegmentBytes: 30_000, Sync: 5 * time.Millisecond}

func crashChild(dir string) {
	l, err := Open(dir, crashOptions)
	if err != nil {
		fmt.Println("fatal", err)
		os.Exit(3)
	}
	fmt.Println("open", l.Head().Seq, l.Head().Hash)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := 0; ; i++ {
				r, err := l.Append(context.Background(), Record{Actor: strconv.Itoa(w), Action: "crash", Message: strings.Repeat("m", rand.IntN(900)), Durable: i%3 == 0})
				if err != nil {
					fmt.Println("fatal", err)
					os.Exit(3)
				}
				// One write each: a line is acknowledged whole or not at all.
				os.Stdout.WriteString(fmt.Sprintln("ack", r.Seq, r.Hash))
			}
		})
	}
	wg.Wait()
}

func TestKill(t *testing.T) {
	t.Parallel()
	rounds := 100
	if testenv.Soak() {
		rounds = 5000
	}
	testenv.NeedsLinux(t)
	dir := t.TempDir()
	acked := map[int64]string{}
	recovered := 0
	for round := range rounds {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), crashDir+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		kill := func() { cmd.Process.Kill() }
		if round%4 == 0 {
			time.AfterFunc(time.Duration(rand.IntN(20_000))*time.Microsecond, kill) // while it opens
		}
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			f := strings.Fields(lines.Text())
			if f[0] == "open" {
				time.AfterFunc(time.Duration(rand.IntN(20_000))*time.Microsecond, kill)
			}
			if f[0] == "fatal" {
				t.Errorf("round %d: %s", round, lines.Text())
				continue
			}
			if len(f) != 3 || len(f[2]) != 64 {
				continue // cut by the kill
			}
			seq, _ := strconv.ParseInt(f[1], 10, 64)
			if h, ok := acked[seq]; ok && h != f[2] {
				t.Fatalf("round %d: record %d was acknowledged twice, differently", round, seq)
			}
			acked[seq] = f[2]
		}
		cmd.Wait()
		report, err := Verify(dir)
		if err != nil && report.Anchor.Seq+report.Records > 0 {
			t.Fatalf("round %d: %v", round, err)
		}
	}
	l := open(t, dir, crashOptions)
	l.Close()
	whole(t, dir)
	delete(acked, 0)
	n := len(acked)
	for _, r := range read(t, dir, 0) {
		if r.Action == "audit.recovered" {
			recovered++
		}
		if h, ok := acked[r.Seq]; ok && h != r.Hash {
			t.Errorf("record %d is another than the one that was acknowledged", r.Seq)
		}
		delete(acked, r.Seq)
	}
	if len(acked) > 0 {
		t.Errorf("%d of %d records that were acknowledged are gone", len(acked), n)
	}
	if n < rounds {
		t.Errorf("only %d records in %d rounds", n, rounds)
	}
	t.Logf("%d kills, %d records acknowledged, %d torn ends", rounds, n, recovered)
}
