package guest

import (
	"os"
	"strings"
)

// wipe overwrites the secrets in the environment block that the kernel made, which /proc/1/environ shows: unsetting a
// variable leaves it there.
func wipe(own map[string]string) {
	token := own["WARREN_CHANNEL_TOKEN"]
	if token == "" {
		return
	}
	start, end := environBlock(readSmall("/proc/self/stat", 4096))
	if start == 0 || end <= start || end-start > 1<<20 {
		return
	}
	mem, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer mem.Close()
	block := make([]byte, end-start)
	if _, err := mem.ReadAt(block, int64(start)); err != nil {
		return
	}
	at := strings.Index(string(block), "WARREN_CHANNEL_TOKEN="+token)
	if at < 0 {
		return
	}
	_, _ = mem.WriteAt([]byte(strings.Repeat("x", len(token))), int64(start)+int64(at+len("WARREN_CHANNEL_TOKEN=")))
}

// environBlock finds the addresses of the environment in /proc/self/stat: fields 50 and 51.
func environBlock(stat string) (start, end uint64) {
	i := strings.LastIndexByte(stat, ')') // the name of the program may hold anything
	if i < 0 {
		return 0, 0
	}
	f := strings.Fields(stat[i+1:])
	const envStart, envEnd = 50 - 3, 51 - 3
	if len(f) <= envEnd {
		return 0, 0
	}
	return parseUint(f[envStart]), parseUint(f[envEnd])
}
