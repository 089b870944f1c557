# The first process of an engine's namespaces. It starts and ends the daemon as told, and takes everything along when
# standard input ends. $1 is the engine's directory, $2 dockerd, podman or remote.
base=$1 kind=$2
if [ "$kind" = remote ]; then
	# Of the test's temporary directories it sees its own alone.
	mount --make-rprivate / && mkdir -p /run/engine && mount --bind "$base" /run/engine &&
		mount -t tmpfs -o mode=1777 tmpfs /tmp && mkdir -p "$base" && chmod 711 "$base" && mount --move /run/engine "$base" || exit 1
fi
mount -t proc proc /proc &&
	mount -t overlay -o "lowerdir=/etc,upperdir=$base/etc,workdir=$base/etc-work" overlay /etc &&
	mount -o loop "$base/disk" "$base/data" &&
	mount -t tmpfs -o mode=755 tmpfs /run &&
	ip link set lo up || exit 1
daemon=
while read -r word; do
	case $word in
	start)
		if [ "$kind" = podman ]; then
			set -- podman --root "$base/data" --runroot "$base/exec" system service -t 0 "unix://$base/docker.sock"
		else
			set -- dockerd --config-file "$base/daemon.json" --data-root "$base/data" --exec-root "$base/exec" -p "$base/docker.pid" -H "unix://$base/docker.sock"
			[ "$kind" != remote ] || set -- "$@" -H tcp://127.0.0.1:2376
		fi
		"$@" >>"$base/log" 2>&1 </dev/null &
		daemon=$!
		;;
	kill | stop)
		signal=KILL
		[ "$word" = kill ] || signal=TERM
		kill -$signal $daemon
		wait $daemon
		rm -f "$base/docker.pid"
		: >"$base/ended"
		;;
	esac
done
exit 0
