#!/usr/bin/env bash
# Prints one table for each driver: conformance, escape cases with their twins, and at the end a benchmark of all of them side by side.
# Ends with a verdict. The engines are started for the time of the tests, in namespaces of their own.
#
#   script/drivers.sh
set -euo pipefail
cd "$(dirname "$0")/.."
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
export WARREN_BIN="$PWD/bin" WARREN_REQUIRE_ALL=1 WARREN_RESULTS="$results" WARREN_SOAK=1
failed=()
# run NAME PACKAGE PATTERN: one run of go test, whose output is shown when it fails.
run() {
	if ! go test "$2" -count=1 -v -timeout 60m -run "^($3)\$" >"$results/$1.log" 2>&1; then
		failed+=("$1")
		grep -vE '^ *=== |level=' "$results/$1.log" | tail -n 60 || true
	fi
}
run conformance ./driver/drivertest 'TestFake|TestGVisor|TestDocker|TestDockerRunsc|TestDockerRemote|TestPodman'
run escape ./driver/drivertest 'TestTwins|TestGVisorEscape|TestDockerEscape|TestDockerRunscEscape'
WARREN_BENCH_ROUNDS=${WARREN_BENCH_ROUNDS:-5} run benchmark ./cmd/warren TestDockerBench

for driver in fake gvisor docker-runc docker-runsc docker-runc-on-another-machine podman-runc; do
	printf '\n== %s\n' "$driver"
	for suite in conformance escape; do
		if [ -e "$results/$driver-$suite.txt" ]; then
			cat "$results/$driver-$suite.txt"
		else
			echo "$driver, $suite: not run here"
		fi
	done
done
printf '\n== benchmark\n'
sed -n '/Drivers side by side/,/^--- /p' "$results/benchmark.log" | grep -v '^--- ' || echo "not measured"
if [ ${#failed[@]} -gt 0 ]; then
	echo "FAIL: drivers (${failed[*]})"
	exit 1
fi
echo "PASS: drivers"
