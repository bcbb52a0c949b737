#!/usr/bin/env bash
# Checks that the project, alone on a fresh minimal Debian 12, builds, passes its tests and runs its demo.
# Usage (as root): tests/bare.sh [--full] [--keep] [COMMAND...]
#
#   --full       run all of tests/run.sh, not only --quick
#   --keep       leave the tree and print its path
#   COMMAND...   run this in the project's folder instead of the demo and the tests
#
# Makes a tree with debootstrap, copies the last commit's files into it, and nothing else, and runs the
# commands in it under chroot. KVPOOL_BARE_BASE=DIR copies a tree that debootstrap made earlier;
# KVPOOL_BARE_DIR says where to make the tree (default: /var/tmp). Mounts and processes are in namespaces of
# their own and end with the script.
set -euo pipefail
cd "$(dirname "$0")/.."

tests_flag=--quick
keep=no
while [ $# -gt 0 ]; do
  case "$1" in
    --full) tests_flag= ;;
    --keep) keep=yes ;;
    --) shift && break ;;
    -*) echo "bare: unknown flag '$1'" >&2 && exit 2 ;;
    *) break ;;
  esac
  shift
done
[ "$(id -u)" = 0 ] || { echo "bare: needs root, for debootstrap and chroot" >&2; exit 2; }
command -v debootstrap >/dev/null || apt-get -q -y install --no-install-recommends debootstrap

tree=$(mktemp -d "${KVPOOL_BARE_DIR:-/var/tmp}/kvpool-bare.XXXXXX")
cleanup() {
  if [ $keep = yes ]; then echo "bare: left in $tree"; else rm -rf --one-file-system "$tree"; fi
}
trap cleanup EXIT
chmod 755 "$tree"

if [ -n "${KVPOOL_BARE_BASE:-}" ]; then
  echo "bare: copying $KVPOOL_BARE_BASE to $tree"
  cp -a "$KVPOOL_BARE_BASE/." "$tree"
else
  echo "bare: debootstrap --variant=minbase bookworm $tree"
  debootstrap --variant=minbase bookworm "$tree" >"$tree.log" 2>&1 || { tail -n 20 "$tree.log" >&2; exit 1; }
  rm -f "$tree.log"
fi
[ -z "$(git status --porcelain)" ] || echo "bare: uncommitted changes are not tested"
mkdir -p "$tree/srv/kvpool"
git archive HEAD | tar -x -C "$tree/srv/kvpool"
# The tree reaches the network as this machine does, with its names and the certificates that
# its administrator trusts.
cp -L /etc/resolv.conf /etc/hosts "$tree/etc/"
mkdir -p "$tree/usr/local/share/ca-certificates"
find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t "$tree/usr/local/share/ca-certificates" {} +
# In a tree without the package they count from its installation on.
[ ! -x "$tree/usr/sbin/update-ca-certificates" ] || chroot "$tree" /usr/sbin/update-ca-certificates >/dev/null

# inside COMMAND: runs COMMAND in the tree's /srv/kvpool, with mounts and process ids of its own.
inside() {
  local started=$SECONDS status=0
  echo "bare: \$ $1"
  unshare --mount --pid --fork --kill-child --propagation private bash -c '
    set -e
    mount -t proc proc "$0/proc"
    mount --rbind /dev "$0/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$0/dev/shm"
    exec chroot "$0" /usr/bin/env -i HOME=/root LANG=C.UTF-8 TERM=dumb PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
      ${http_proxy:+http_proxy=$http_proxy} ${https_proxy:+https_proxy=$https_proxy} /bin/bash -c "cd /srv/kvpool && $1"
  ' "$tree" "$1" </dev/null || status=$?
  echo "bare: exit status $status after $((SECONDS - started)) s"
  return $status
}

if [ $# -gt 0 ]; then
  inside "$*"
else
  inside "deploy/demo.sh"
  inside "tests/run.sh $tests_flag"
  # The second run has nothing to install and little to build, so that it is quick.
  inside "deploy/demo.sh"
fi
