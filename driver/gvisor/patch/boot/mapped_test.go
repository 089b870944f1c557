//go:build linux

package boot

import (
	"slices"
	"testing"

	"gvisor.dev/gvisor/pkg/context"
)

type program struct {
	pieces, mapped int
	text           bool
}

func (p *program) MapAhead(_ context.Context, most int, text bool) int {
	p.mapped, p.text = min(p.pieces, most), text
	return p.mapped
}

// TestMapEach maps no more than it should, and only the text of the first.
func TestMapEach(t *testing.T) {
	all := []*program{{pieces: 30}, {pieces: 0}, {pieces: mostMapped - 40}, {pieces: 20}, {pieces: 5}}
	var programs []mapper
	for _, p := range all {
		programs = append(programs, p)
	}
	mapEach(context.Background(), programs)
	var mapped []int
	for i, p := range all {
		mapped = append(mapped, p.mapped)
		if p.text != (i == 0) {
			t.Errorf("program %d: text %v", i, p.text)
		}
	}
	if want := []int{30, 0, mostMapped - 40, 10, 0}; !slices.Equal(mapped, want) {
		t.Errorf("mapped %v, want %v", mapped, want)
	}
}
