#!/usr/bin/env bash
# All benchmarks of this machine, with a private data directory: script/bench.sh [start|io|gateway|fleet]...
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/bin:$PATH"
unset WARREN_URL WARREN_TOKEN
WARREN_HOME=$(mktemp -d /tmp/warren-bench.XXXXXX)
export WARREN_HOME
cleanup() {
	local code=$?
	warren shutdown --sandboxes >/dev/null 2>&1 || true
	rm -rf "$WARREN_HOME"
	exit $code
}
trap cleanup EXIT
trap 'exit 130' INT TERM

[ $# -gt 0 ] || set -- start io gateway fleet
for what in "$@"; do
	warren bench "$what"
done
echo "PASS: bench"
