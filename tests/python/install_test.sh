#!/usr/bin/env bash
# `pip install ./client/python`, and a session with what it installed. Usage: install_test.sh ROOT VENV BIN
#
# In an environment of its own that borrows VENV's packages (NumPy, and what builds), so that nothing is downloaded.
set -euo pipefail
root=$1 venv=$2 bin=$3
scratch=$(mktemp -d)
daemon=
cleanup() {
  if [ -n "$daemon" ]; then kill "$daemon" && wait "$daemon" || true; fi
  rm -rf "$scratch"
}
trap cleanup EXIT

"$venv/bin/python" -m venv --without-pip "$scratch/venv"
site=$("$scratch/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/borrowed.pth"
# The compiler by the name that the tree was built with: ccache knows objects by it.
CXX=c++ CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1 CMAKE_BUILD_PARALLEL_LEVEL=${KVPOOL_JOBS:-2} PIP_DISABLE_PIP_VERSION_CHECK=1 \
  "$scratch/venv/bin/python" -m pip install --quiet --no-index --no-build-isolation --no-deps --prefix "$scratch/venv" \
  --config-settings build-dir="$root/build/python-install-test" "$root/client/python"

ls "$site/kvpool"
[ -f "$site/kvpool/py.typed" ] && [ -f "$site/kvpool/_core.pyi" ]
"$bin/kvpoold" --device=host --capacity=64MiB --slab-bytes=4MiB --socket="$scratch/kvpoold.sock" --state-dir="$scratch" \
  --metrics-listen= --shutdown-grace=200ms >"$scratch/log" 2>&1 &
daemon=$!
"$bin/kvpoolctl" --socket="$scratch/kvpoold.sock" health --wait=60s
cd "$scratch"
PYTHONPATH= KVPOOL_SOCKET=$scratch/kvpoold.sock "$scratch/venv/bin/python" - "$site" <<'PYTHON'
import sys
import numpy
import kvpool
assert kvpool.__file__.startswith(sys.argv[1]), kvpool.__file__
layout = kvpool.Layout.paged(layers=2, kv_heads=2, head_dim=16, dtype="float32")
with kvpool.Session(layout, "installed") as session, session.lease(1) as blocks:
    numpy.asarray(blocks.k(0))[:] = 1
    print("installed, and it works")
PYTHON
