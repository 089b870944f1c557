#!/usr/bin/env bash
# What CI runs before the tests: script/check.sh GUEST_LIMIT RUNTIME_LIMIT (bytes). Ends with a verdict; changes no file.
set -euo pipefail
cd "$(dirname "$0")/.."
guest_limit=$1 runtime_limit=$2
export CGO_ENABLED=0 GOWORK=off

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
failed=()

# step NAME COMMAND...: runs it quietly; what it printed shows only when it fails.
step() {
	local name=$1 start=$SECONDS
	shift
	if "$@" >"$tmp/out" 2>&1; then
		printf 'ok    %-32s %3ds\n' "$name" $((SECONDS - start))
	else
		printf 'FAIL  %-32s %3ds\n' "$name" $((SECONDS - start))
		sed 's/^/      /' "$tmp/out"
		failed+=("$name")
	fi
}

formatted() {
	local files
	files=$(git ls-files -z --cached --others --exclude-standard '*.go' | xargs -0 gofmt -l)
	[ -z "$files" ] || { printf 'run gofmt -w on:\n%s\n' "$files"; return 1; }
}

generated() {
	local before after
	before=$(contract)
	go run ./internal/protogen
	after=$(contract)
	[ "$before" = "$after" ] || { echo "generated files were out of date; run make generate and commit"; return 1; }
}
contract() {
	find proto docs/API.md -type f -print0 | sort -z | xargs -0 sha256sum
}

crossbuild() {
	GOOS=$1 GOARCH=$2 go build -buildvcs=false -o "$tmp/warren-$1" ./cmd/warren
}

size() {
	local limit=$2 bytes as=()
	[ "$1" != warren-runtime ] || as=(-modfile="$(go run ./driver/gvisor/patch .cache/gvisor)") # as make build does
	go build -buildvcs=false "${as[@]}" -ldflags '-s -w' -o "$tmp/$1" "./cmd/$1"
	bytes=$(stat -c %s "$tmp/$1")
	echo "$1: $bytes bytes, limit $limit"
	[ "$bytes" -le "$limit" ]
}

scripts() {
	local f
	for f in script/*.sh .ci/run; do bash -n "$f"; done
}

state=$(git diff HEAD | sha256sum)
step "gofmt" formatted
step "shell scripts parse" scripts
step "go vet" go vet ./...
step "staticcheck" go tool staticcheck ./...
step "go mod verify" go mod verify
step "generated code" generated
step "import and documentation rules" go test ./internal/repocheck/
step "build for macOS" crossbuild darwin arm64
step "build for Windows" crossbuild windows amd64
step "size of warren-guest" size warren-guest "$guest_limit"
step "size of warren-runtime" size warren-runtime "$runtime_limit"
[ "$state" = "$(git diff HEAD | sha256sum)" ] || failed+=("the check changed files")
# In CI nothing may differ from the commit at all.
if [ "${CI:-}" = true ] && ! git diff --exit-code HEAD >"$tmp/out"; then
	cat "$tmp/out"
	failed+=("git diff is not clean")
fi

if [ ${#failed[@]} -gt 0 ]; then
	printf 'FAIL: check found %d problem(s):' ${#failed[@]}
	printf ' [%s]' "${failed[@]}"
	echo
	exit 1
fi
echo "PASS: check"
