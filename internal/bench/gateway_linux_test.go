package bench_test

import (
	"context"
	"strings"
	"testing"

	"github.com/warren-sandbox/warren/internal/bench"
	"github.com/warren-sandbox/warren/internal/testenv"
)

func TestGateway(t *testing.T) {
	testenv.NeedsTool(t, "ip")
	run(t, func(ctx context.Context, o bench.Options, w *strings.Builder) error { return bench.Gateway(ctx, o, w) },
		"native loopback", "veth pair", "passed through", "inspected", "one flow down, TLS", "idle connections", "10,000 rules", "target:")
}
