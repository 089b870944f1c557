package image

import (
	"testing"

	"github.com/warren-sandbox/warren/internal/image/imagetest"
)

func TestMain(m *testing.M) { imagetest.Main(m) }
