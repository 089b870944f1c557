package port

import (
	"fmt"
	"net"
	"os"
	"slices"
	"testing"
)

const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1234 1 0000000000000000 100 0 0 10 0
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 77 1 0000000000000000 100 0 0 10 0
   2: 0100007F:1F90 0100007F:A000 01 00000000:00000000 00:00000000 00000000     0        0 78 1 0000000000000000 100 0 0 10 0
   3: 00000000000000000000000001000000:0BB8 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 79 1
   4: 0000000000000000FFFF00000100007F:0BB9 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 80 1
   5: ZZ:0016 00000000:0000 0A 0 0 0 0 0 81
   6: 00000000:10016 00000000:0000 0A 0 0 0 0 0 81
   7: 00:0016 00000000:0000 0A 0 0 0 0 0 81
garbage
`

func TestParse(t *testing.T) {
	var got []string
	for _, l := range parse(table) {
		got = append(got, fmt.Sprintf("%s %d %d", l.addr, l.port, l.inode))
	}
	want := []string{"127.0.0.1 8080 1234", "0.0.0.0 22 77", "::1 3000 79", "127.0.0.1 3001 80"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestList(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	is := func(p Port) bool { return p.Port == port && p.PID == os.Getpid() && p.Addr.String() == "127.0.0.1" }
	for range 2 { // the second time from memory
		if list := List(); !slices.ContainsFunc(list, is) {
			t.Errorf("%d is not in %v", port, list)
		}
	}
	if list := List(port); slices.ContainsFunc(list, is) {
		t.Errorf("%d is not left out of %v", port, list)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(table)
	f.Fuzz(func(t *testing.T, in string) {
		for _, l := range parse(in) {
			if !l.addr.IsValid() || l.port == 0 {
				t.Errorf("%+v", l)
			}
		}
	})
}
