package guest

import (
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/warren-sandbox/warren/internal/guest/file"
)

// cpuSample is the processor time of the sandbox at one moment, in ticks.
type cpuSample struct {
	busy, total uint64
	at          time.Time
}

// cpuMeter remembers the last sample, from which the next one tells the use in between.
type cpuMeter struct {
	mu      sync.Mutex
	last    cpuSample
	forgets bool // the last sample says nothing of the next one
}

// parseCPU reads the first line of /proc/stat.
func parseCPU(stat string) (busy, total uint64) {
	line, _, _ := strings.Cut(stat, "\n")
	fields := strings.Fields(line)
	if len(fields) < 5 || fields[0] != "cpu" {
		return 0, 0
	}
	for i, f := range fields[1:] {
		n, err := strconv.ParseUint(f, 10, 63)
		if err != nil {
			return 0, 0
		}
		if i >= 8 {
			break // guest time is in user time already
		}
		total += n
		if i != 3 && i != 4 { // idle, iowait
			busy += n
		}
	}
	return busy, total
}

// percent returns the use of all processors since the last call; the first call measures since the start, and the first after a reset nothing.
func (m *cpuMeter) percent() float64 {
	busy, total := parseCPU(readSmall("/proc/stat", 64<<10))
	m.mu.Lock()
	defer m.mu.Unlock()
	dt, db, forgets := total-m.last.total, busy-m.last.busy, m.forgets
	m.last, m.forgets = cpuSample{busy: busy, total: total, at: time.Now()}, false
	if forgets || dt == 0 || dt > 1<<62 || db > dt {
		return 0
	}
	return float64(db) / float64(dt) * 100
}

// busyMillis returns the processor time that was used since the start, of all processors together. It only grows, so that each
// of several callers can tell the use since its own last question.
func busyMillis() uint64 {
	const tick = 10 // USER_HZ is 100 wherever Go runs
	busy, _ := parseCPU(readSmall("/proc/stat", 64<<10))
	return busy * tick
}

// reset begins to count afresh when it is asked next: after a restore the counters may be another machine's.
func (m *cpuMeter) reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forgets = true
}

// parseMeminfo returns the values of /proc/meminfo in bytes.
func parseMeminfo(data string) map[string]uint64 {
	m := make(map[string]uint64)
	for line := range strings.Lines(data) {
		name, rest, ok := strings.Cut(line, ":")
		f := strings.Fields(rest)
		if !ok || len(f) == 0 {
			continue
		}
		if n, err := strconv.ParseUint(f[0], 10, 54); err == nil {
			m[name] = n * 1024
		}
	}
	return m
}

func (s *Server) metrics(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		httpError(w, http.StatusMethodNotAllowed, "use GET")
		return
	}
	mem := parseMeminfo(readSmall("/proc/meminfo", 64<<10))
	total, available := mem["MemTotal"], mem["MemAvailable"]
	if limit := s.get().memoryLimit; limit > 0 && uint64(limit) < total {
		available -= min(available, total-uint64(limit))
		total = uint64(limit)
	}
	used := total - min(available, total)
	diskUsed, diskTotal, _ := file.Disk("/") // zeros where it cannot be told
	body := []byte(`{"ts":`)
	num := func(name string, v uint64) {
		body = append(body, `,"`+name+`":`...)
		body = strconv.AppendUint(body, v, 10)
	}
	body = strconv.AppendInt(body, time.Now().Unix(), 10)
	num("cpu_count", uint64(runtime.NumCPU()))
	body = append(body, `,"cpu_used_pct":`...) // since somebody last asked
	body = strconv.AppendFloat(body, s.cpu.percent(), 'f', 2, 64)
	num("mem_total", total)
	num("mem_total_mib", total>>20)
	num("mem_used", used)
	num("mem_used_mib", used>>20)
	num("mem_cache", mem["Cached"])
	num("disk_used", diskUsed)
	num("disk_total", diskTotal)
	num("processes", uint64(countProcesses()))
	// What tells work from idleness. The engine reads these names.
	num("cpu_busy_ms", busyMillis())
	num("clients", uint64(max(s.clients.Load(), 0)))
	holds, until := 0, time.Time{}
	if s.cfg.RunDir != "" {
		holds, until = s.holds().Now(time.Now())
	}
	num("holds", uint64(holds))
	if holds > 0 {
		body = append(body, `,"holdUntil":"`...)
		body = append(until.UTC().AppendFormat(body, time.RFC3339), '"')
	}
	writeJSON(w, append(body, '}'))
}

// countProcesses returns how many processes the sandbox has, the guest included, and 0 where it cannot be told.
func countProcesses() (n int) {
	dir, err := os.Open("/proc")
	if err != nil {
		return 0
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return 0
	}
	for _, name := range names {
		if parseUint(name) > 0 {
			n++
		}
	}
	return n
}

// parseUint returns 0 for what is no number.
func parseUint(s string) uint64 {
	n, _ := strconv.ParseUint(s, 10, 64)
	return n
}
