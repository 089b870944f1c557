# The first process of an engine's namespaces. It starts and ends the daemon as told, and takes everything along when
# standard input ends. $1 is the engine's directory, $2 dockerd or podman.
base=$1 kind=$2
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
