//go:build linux

package boot

import (
	"testing"
	"time"
)

// TestAhead works ahead while nobody tells it what to run, and begins nothing more when somebody does.
func TestAhead(t *testing.T) {
	t.Cleanup(func() { asked.Store(false) })
	order := make(chan int, 10)
	more := make(chan bool, 2)
	begun := time.Now()
	ahead(func(func() bool) {
		if since := time.Since(begun); since < waiting {
			t.Errorf("worked ahead after %v", since)
		}
		order <- 1
	}, func(m func() bool) {
		more <- m()
		asked.Store(true)
		more <- m()
		order <- 2
	}, func(func() bool) { order <- 3 })
	for want := 1; want <= 2; want++ {
		if got := <-order; got != want {
			t.Fatalf("step %d, want %d", got, want)
		}
	}
	if first, then := <-more, <-more; !first || then {
		t.Errorf("more: %v before it was told, %v after; want true and false", first, then)
	}
	time.Sleep(10 * time.Millisecond)
	ahead(func(func() bool) { order <- 4 })
	time.Sleep(waiting + 50*time.Millisecond)
	if len(order) > 0 {
		t.Errorf("step %d was done after it was told what to run", <-order)
	}
}
