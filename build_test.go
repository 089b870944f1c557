package warren_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/warren-sandbox/warren"
	"github.com/warren-sandbox/warren/internal/server/servertest"
)

// TestBuildTemplateBadInput asks for builds that cannot be: no sandbox is made.
func TestBuildTemplateBadInput(t *testing.T) {
	s := servertest.New(t)
	c := s.Client()
	for name, spec := range map[string]warren.TemplateSpec{
		"no name":       {},
		"bad name":      {Name: "A"},
		"long name":     {Name: strings.Repeat("a", 41)},
		"empty step":    {Name: "a", Setup: []warren.TemplateStep{{Run: " \n"}}},
		"step timeout":  {Name: "a", Setup: []warren.TemplateStep{{Run: "a", Timeout: -1}}},
		"ready timeout": {Name: "a", ReadyTimeout: -time.Second},
	} {
		if _, err := c.BuildTemplate(t.Context(), spec, warren.BuildOptions{}); !errors.Is(err, warren.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// One that fails on the way removes its sandbox: this server keeps no snapshots.
	if _, err := c.BuildTemplate(t.Context(), warren.TemplateSpec{Name: "a", Setup: []warren.TemplateStep{{Run: "true"}}}, warren.BuildOptions{}); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("without snapshots: %v", err)
	}
	for sb, err := range c.Sandboxes(t.Context(), warren.ListOptions{}) {
		t.Errorf("left: %v, %v", sb.ID, err)
	}
}
