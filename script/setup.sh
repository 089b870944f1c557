#!/usr/bin/env bash
# Installs the Debian packages that a make target needs and that are missing. Does nothing, quickly, when all is there.
#
#   script/setup.sh build|demo|test|bench|browser
set -euo pipefail

missing=()
# need TOOL PACKAGE...: the packages are wanted unless the tool is found.
need() {
	local tool=$1
	shift
	if ! PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" >/dev/null 2>&1; then
		missing+=("$@")
	fi
}
file() {
	[ -e "$1" ] || missing+=("$2")
}

target=${1:?usage: script/setup.sh build|demo|test|bench|browser}
if ! command -v go >/dev/null 2>&1; then
	echo "setup: Go is not installed; see https://go.dev/doc/install" >&2
	exit 1
fi
# The module proxy is reached over TLS.
file /etc/ssl/certs/ca-certificates.crt ca-certificates
need git git
case $target in
build | demo) ;;
test)
	need node nodejs
	need npm npm
	need mmdebstrap mmdebstrap
	need mkfs.ext4 e2fsprogs
	need mount mount
	need ssh openssh-client
	need ip iproute2
	need pgrep procps
	need unshare util-linux
	need xz xz-utils
	# Clients that speak through the gateway.
	need curl curl
	need python3 python3
	file /usr/lib/python3/dist-packages/pip python3-pip
	need javac default-jdk-headless
	# Their programs alone: the tests start engines of their own.
	need dockerd docker.io
	need podman podman
	;;
bench)
	need bwrap bubblewrap
	need ip iproute2
	# What container engines bring along will do as well.
	need iptables nftables
	need runc runc
	need node nodejs
	need npm npm
	;;
browser)
	need node nodejs
	need npm npm
	need chromium chromium
	;;
*)
	echo "setup: unknown target $target" >&2
	exit 1
	;;
esac

[ ${#missing[@]} -gt 0 ] || exit 0
if ! command -v apt-get >/dev/null 2>&1; then
	echo "setup: install these first, this is no Debian: ${missing[*]}" >&2
	exit 1
fi
if [ "$(id -u)" != 0 ]; then
	echo "setup: run as root, or first: apt-get install -y --no-install-recommends ${missing[*]}" >&2
	exit 1
fi
echo "setup: installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
# No service of what is installed shall run on this machine because of us.
policy=/usr/sbin/policy-rc.d
if [ -e "$policy" ]; then
	policy=
else
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod 755 "$policy"
fi
trap 'rm -f "$log" $policy' EXIT
install() {
	apt-get install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1
}
# Package lists may be absent or older than what the mirror still has.
if ! install && ! { apt-get update >"$log" 2>&1 && install; }; then
	tail -n 20 "$log" >&2
	echo "setup: apt-get could not install ${missing[*]}" >&2
	exit 1
fi
