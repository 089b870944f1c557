#!/usr/bin/env bash
# The main job on real input, with real output and the time of each step: from this very repository to a diff, through the death of the
# sandbox, to a commit. Everything it makes is private to it and gone at its end, but for Go's build cache of earlier runs in .cache/demo.
#
#   script/demo.sh [--driver NAME] [--runtime NAME]
#
# What follows goes to every create; without it the sandboxes run under gVisor. With docker its engine has to run, and the docker command be there.
set -euo pipefail
how=("$@") driver=gvisor
while [ $# -gt 0 ]; do
	[ $# -ge 2 ] && [[ $1 = --driver || $1 = --runtime ]] || { echo "usage: script/demo.sh [--driver NAME] [--runtime NAME]" >&2; exit 2; }
	[ "$1" != --driver ] || driver=$2
	shift 2
done
cd "$(dirname "$0")/.."
root=$PWD
export PATH="$root/bin:$PATH"
unset WARREN_URL WARREN_TOKEN
WARREN_HOME=$(mktemp -d "${TMPDIR:-/tmp}/warren-demo.XXXXXX")
export WARREN_HOME
began=$(date +%s%N)

if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' off=$'\e[0m'; else bold='' dim='' off=''; fi

now() { date +%s%N; }
seconds() { awk -v ns="$1" 'BEGIN { printf "%.2f s", ns / 1e9 }'; }

# step TITLE: begins a step and ends the one before.
last='' at=0
times=()
finish() {
	[ -z "$last" ] || {
		local took
		took=$(seconds $(($(now) - at)))
		times+=("$(printf '%10s  %s' "$took" "$last")")
		printf '%s   took %s%s\n' "$dim" "$took" "$off"
	}
	last=''
}
step() {
	finish
	last=$1 at=$(now)
	printf '\n%s== %s%s\n' "$bold" "$1" "$off"
}
# show COMMAND…: prints a command and runs it.
show() {
	local word
	printf '%s$' "$dim"
	for word in "$@"; do
		case $word in
		*[!A-Za-z0-9_./:=@,+%-]*) printf " '%s'" "${word//\'/\'\\\'\'}" ;;
		*) printf ' %s' "$word" ;;
		esac
	done
	printf '%s\n' "$off"
	"$@"
}

# The host's processes of one sandbox: those in the control group that carries its id, or its container's.
pids_of() {
	local group=$1
	if [ "$driver" = docker ]; then
		group=$(docker ps -aq --no-trunc --filter "label=dev.warren.sandbox=$1")
		[ -n "$group" ] || return 0
	fi
	grep -lsE "/(docker-)?$group(\.scope)?\$" /proc/[0-9]*/cgroup | sed 's|^/proc/\([0-9]*\)/.*|\1|' || true
}

cleanup() {
	local code=$?
	if [ -d "$WARREN_HOME" ]; then
		[ $code = 0 ] || { echo "demo: failed; the end of the daemon's log:"; tail -n 20 "$WARREN_HOME/logs/daemon.log" || true; }
		warren shutdown --sandboxes >/dev/null 2>&1 || true
		rm -rf "$WARREN_HOME"
	fi
	exit $code
}
trap cleanup EXIT
trap 'exit 130' INT TERM

modules=$(go env GOMODCACHE)
buildcache=$root/.cache/demo/go-build
mkdir -p "$modules" "$buildcache"
# Nothing is fetched inside: a sandbox has no network.
cat >"$WARREN_HOME/go.env" <<END
GOPROXY=off
GOTOOLCHAIN=local
GOFLAGS=-buildvcs=false
CGO_ENABLED=0
PATH=$(go env GOROOT)/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
END
with=("${how[@]}" --env-file "$WARREN_HOME/go.env" --mount "$modules:/home/user/go/pkg/mod:ro" --mount "$buildcache:/home/user/.cache/go-build:rw")
# The image that stands for the host's with some drivers has no Go.
[ "$driver" = gvisor ] || with+=(--mount "$(go env GOROOT):$(go env GOROOT):ro")
vetted=(./internal/failpoint ./script/testsum ./internal/guest/channel)
tested=(./internal/failpoint ./script/testsum)

step "Look at the host"
show warren doctor

step "Start the daemon and clone this repository into the cache"
show warren repo fetch "$root"
show warren repo ls

step "Create a sandbox from it"
show warren create --name fix --repo "$root" --keep-workspace "${with[@]}"
show warren inspect fix --timing
show warren exec fix -- sh -c 'uname -sr; id -un; pwd; git log --oneline -1; ls'

step "go vet in the sandbox"
show warren exec fix -- go vet "${vetted[@]}"

step "Tests in the sandbox"
show warren exec fix -- go test "${tested[@]}"

step "Edit files inside"
show warren exec fix -- sh -c 'echo "Edited in a sandbox." >> CONTRIBUTING.md && printf "package main\n\nfunc main() { println(\"made inside\") }\n" > hello.go'
show warren exec fix -- go run hello.go

step "The diff, on the host"
show warren diff fix --stat
show warren diff fix

step "Kill the sandbox's processes from the host with SIGKILL"
id=$(warren ls -q)
workspace=$(warren inspect fix --json | sed 's/.*"workspaceId":"\([^"]*\)".*/\1/')
pids=$(pids_of "$id")
[ -n "$pids" ] || { echo "demo: sandbox $id has no process on the host"; exit 1; }
echo "processes of $id: $(echo $pids)"
# shellcheck disable=SC2086
show kill -KILL $pids
for _ in $(seq 200); do
	[ "$(warren ls -q --state failed)" = "$id" ] && break
	sleep 0.05
done
show warren ls
show warren rm fix

step "A new sandbox on the same workspace: the edit is there"
show warren create --name again --workspace "$workspace" "${with[@]}"
show warren exec again -- git status --short
show warren exec again -- go run hello.go

step "Commit to a branch that the host's git sees"
show warren commit again -m "Edit from a sandbox" --branch warren/demo --author "Ada <ada@example.com>"
mirror=$(warren repo ls --json | sed 's/.*"path":"\([^"]*\)".*/\1/')
show git --git-dir="$mirror" log --stat -1 --format='%h %an: %s' warren/demo

step "Clean up: nothing is left"
show warren rm again
show warren workspace rm "$workspace"
show warren shutdown --sandboxes
# Whatever names the data directory in its arguments, or has a file of it open, or is mounted from it.
left=0
for p in $(grep -lsF "$WARREN_HOME" /proc/[0-9]*/cmdline || true); do
	echo "left: process ${p//[!0-9]/}: $(tr '\0' ' ' <"$p")"
	left=1
done
if grep -F "$WARREN_HOME" /proc/mounts; then left=1; fi
if pids_of "$id" | grep .; then left=1; fi
[ -z "$(ls "$WARREN_HOME/workspaces")" ] || { echo "left: workspaces"; left=1; }
rm -rf "$WARREN_HOME"
[ $left = 0 ] || exit 1
echo "no process, no mount, no workspace"
finish

printf '\n%sTimes%s\n' "$bold" "$off"
printf '%s\n' "${times[@]}"
printf '%10s  %s\n' "$(seconds $(($(now) - began)))" "all"
echo "PASS: demo"
