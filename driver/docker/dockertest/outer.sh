# Runs an engine in namespaces of its own until standard input ends, and then removes what those do not: the directory, its
# mount, control groups. $1 is the directory, $2 what runs inside, $3 the name of the control groups, $4 dockerd, podman or remote.
base=$1 groups=$3
# Podman puts its containers elsewhere and cannot be told; what is there already is somebody else's.
if [ "$4" = podman ] && ! ls -d /sys/fs/cgroup/*/libpod_parent /sys/fs/cgroup/libpod_parent >/dev/null 2>&1; then
	groups="$groups libpod_parent"
fi
mount --bind "$base/shared" "$base/shared" && mount --make-shared "$base/shared" || exit 1
unshare --mount --net --pid --ipc --uts --fork --propagation slave sh -c "$2" sh "$base" "$4"
umount -l "$base/shared"
for name in $groups; do
	for group in /sys/fs/cgroup/*/"$name" /sys/fs/cgroup/"$name"; do
		[ -d "$group" ] || continue
		# What has been killed may still be on its way out.
		for _ in 1 2 3 4 5 6 7 8 9 10; do
			find "$group" -depth -type d -exec rmdir {} + 2>/dev/null && break
			sleep 0.2
		done
	done
done
rm -rf --one-file-system "$base"
