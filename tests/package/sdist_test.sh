#!/usr/bin/env bash
# `pip install` of the sdist on a minimal Debian 12: it compiles all of kvpool, after fetching what deploy/install_deps.sh installs, some
# 400 MB. So deploy/release.sh runs it, and tests/run.sh does not. This machine's ccache is the tree's too: what was compiled here from
# the same text by the same compiler is not compiled again. Without it that takes a quarter of an hour on two cores.
# Usage: sdist_test.sh SOURCES VERSION
set -euo pipefail
root=$1 version=$2 debian=bookworm
. "$root/tests/package/bare_tree.sh"
shared=$(ccache --get-config cache_dir)
mkdir -p "$shared"
# The network as this machine reaches it: its names, and the certificates that its administrator trusts.
cp -L /etc/resolv.conf /etc/hosts "$tree/etc/"
mkdir -p "$tree/usr/local/share/ca-certificates" "$tree/srv/deploy"
find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t "$tree/usr/local/share/ca-certificates" {} +
cp "$root/build/dist/kvpool-$version.tar.gz" "$tree/srv"
cp "$root/deploy/install_deps.sh" "$tree/srv/deploy"
# shellcheck disable=SC2016  # the tree's shell
inside --net '
  cd /srv
  if command -v update-ca-certificates; then update-ca-certificates; fi  # Otherwise it comes with install_deps.sh.
  deploy/install_deps.sh
  started=$SECONDS
  python3 -m venv venv
  export PATH=/srv/venv/bin:$PATH PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1
  # pip unpacks and compiles below /tmp. To ccache a compiler of another name is another one.
  export CCACHE_DIR=/srv/shared CCACHE_BASEDIR=/tmp CCACHE_NOHASHDIR=1 CCACHE_STATSLOG=/tmp/ccache CXX=c++
  KVPOOL_CUDA_ROOT=$(cat build/deps/cuda_root) CMAKE_BUILD_PARALLEL_LEVEL='"${KVPOOL_JOBS:-$(nproc)}"' pip install --quiet kvpool-'"$version"'.tar.gz
  echo "compiled and installed in $((SECONDS - started)) s"
  ccache --show-log-stats
  kvpoold --version
  python -m kvpool.demo
'
