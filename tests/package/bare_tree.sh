# Sourced by tests of packages: `inside COMMAND` runs a command as root in a fresh minimal Debian, of the release $debian, which is
# gone with the test. Mounts and processes are in namespaces of their own. Status 77, with the reason, where that can't be.
base=$root/build/deps/$debian.tar
[ "$(id -u)" = 0 ] || { echo "needs root, for chroot" >&2; exit 77; }
[ -f "$base" ] || { echo "build/deps/$debian.tar is missing: deploy/install_deps.sh test makes it, build/logs/bare_tree_$debian.log says why not" >&2; exit 77; }
tree=$(mktemp -d)
trap 'rm -rf --one-file-system "$tree"' EXIT
chmod 755 "$tree"
tar -C "$tree" -xf "$base" --exclude './dev/*'
echo force-unsafe-io >"$tree/etc/dpkg/dpkg.cfg.d/unsafe_io"  # Nothing here has to outlive a power failure.

# readme_lines FILE WORDS: prints the block of shell lines in FILE that has these words.
readme_lines() {
  WORDS=$2 awk '/^```sh$/ { block = ""; inside = 1; next }
    /^```$/ { if (inside && index(block, ENVIRON["WORDS"])) { printf "%s", block; found = 1; exit } inside = 0 }
    inside { block = block $0 "\n" }
    END { exit !found }' "$root/$1"
}

# inside [--net] COMMAND: without --net it has no network. The folder $shared of this machine, if it is set, is /srv/shared there.
inside() {
  local network=--net
  [ "$1" != --net ] || { network= && shift; }
  # shellcheck disable=SC2086  # --net or nothing
  unshare --mount --pid $network --fork --kill-child --propagation private bash -c '
    set -e
    mount -t proc proc "$0/proc"
    mount --rbind /dev "$0/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$0/dev/shm"
    # Here, in a namespace that ends with the command: what removes the tree must not find it.
    if [ -n "$2" ]; then mkdir -p "$0/srv/shared" && mount --bind "$2" "$0/srv/shared"; fi
    exec chroot "$0" /usr/bin/env -i HOME=/root LANG=C.UTF-8 TERM=dumb PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
      ${http_proxy:+http_proxy=$http_proxy} ${https_proxy:+https_proxy=$https_proxy} /bin/bash -euo pipefail -c "$1"
  ' "$tree" "$1" "${shared:-}" </dev/null
}

# boot: starts systemd in the tree, without a network, in namespaces that end with the test. booted COMMAND runs a command there.
boot() {
  # shellcheck disable=SC2016  # the inner shell's variables
  unshare --mount --pid --net --cgroup --uts --ipc --fork --kill-child --propagation private bash -c '
    set -e
    mount --bind "$0" "$0"
    mount -t proc proc "$0/proc"
    mount -t sysfs -o ro sysfs "$0/sys"
    mount -t tmpfs -o mode=755 tmpfs "$0/run"
    mount -t tmpfs -o mode=755 tmpfs "$0/dev"
    for name in null zero full random urandom tty; do touch "$0/dev/$name"; mount --bind "/dev/$name" "$0/dev/$name"; done
    mkdir "$0/dev/shm" "$0/dev/pts"
    mount -t devpts devpts "$0/dev/pts"
    ln -s pts/ptmx "$0/dev/ptmx"
    mount -t tmpfs -o mode=1777 tmpfs "$0/dev/shm"
    ln -s /proc/self/fd "$0/dev/fd"
    mount -t tmpfs tmpfs "$0/sys/fs/cgroup"
    mkdir "$0/sys/fs/cgroup/systemd"
    mount -t cgroup -o none,name=systemd cgroup "$0/sys/fs/cgroup/systemd"
    mkdir "$0/host"
    cd "$0"
    pivot_root . host
    umount --lazy /host
    exec /usr/bin/env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=multi-user.target
  ' "$tree" </dev/null >"$tree.boot" 2>&1 &
  local namespaces=$!
  # shellcheck disable=SC2064  # the process as it is now
  trap "kill -9 $namespaces; wait $namespaces 2>/dev/null || true; rm -rf --one-file-system '$tree' '$tree.boot'" EXIT
  for _ in $(seq 100); do
    systemd=$(pgrep -P $namespaces || true)
    if [ -n "$systemd" ] && booted 'systemctl is-system-running --wait' >/dev/null 2>&1; then return; fi
    kill -0 $namespaces || { cat "$tree.boot" >&2; exit 1; }
    sleep 0.1
  done
  echo "systemd does not start here" >&2
  exit 77
}

booted() {
  nsenter --target "$systemd" --mount --pid --net --cgroup --uts --ipc env -i HOME=/root LANG=C.UTF-8 TERM=dumb \
    DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin bash -euo pipefail -c "$1" </dev/null
}
