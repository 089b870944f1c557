package hostroot

import (
	"testing"
	"time"
)

func TestReal(t *testing.T) {
	h, err := Open(Options{Dir: t.TempDir(), IDBase: 0x60000000})
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	for range 4 {
		t0 := time.Now()
		im, err := h.Resolve(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Log(time.Since(t0), im.Digest, len(im.Root.Binds), len(h.now.Inputs), len(h.now.Watch))
	}
}
