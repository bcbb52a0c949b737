#!/usr/bin/env bash
# `pip install` of the wheel on a minimal Debian that has Python, no compiler, no gRPC, no Protocol Buffers and no network:
# the lines of README.md, the module, the commands, a script run twice. Usage: wheel_test.sh SOURCES VERSION DEBIAN [--no-build]
#
#   DEBIAN       bookworm, trixie or forky, for their Python 3.11, 3.13 and 3.14: the wheel is one. vLLM 0.33 is for 3.11 to 3.14
#   --no-build   it is in build/dist already
set -euo pipefail
root=$1 version=$2 debian=$3
. "$root/tests/package/bare_tree.sh"
[ "${4:-}" = --no-build ] || "$root/deploy/wheel.sh" --no-deps

mkdir "$tree/srv/wheels"
cp "$root"/build/dist/kvpool-"$version"-*.whl "$root"/build/deps/wheels/*.whl "$tree/srv/wheels"
cp "$root/client/examples/engine.py" "$tree/srv"
readme_lines README.md kvpool.demo >"$tree/srv/quick_start"
# shellcheck disable=SC2016  # the tree's shell
inside '
  if command -v cc c++ cmake || ldconfig -p | grep -E "grpc|protobuf|absl"; then exit 1; fi
  export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INDEX=1 PIP_FIND_LINKS=/srv/wheels PIP_QUIET=1
  cd /srv/wheels
  python3 --version
  started=$SECONDS
  . /srv/quick_start
  echo "from nothing to the end of the demonstration: $((SECONDS - started)) s; $(du -sh --total "$VIRTUAL_ENV"/lib/python3*/site-packages/kvpool* | tail -n 1 | cut -f 1)"
  for program in kvpoold kvpoolctl kvpool-replay kvpool-sim kvpool-lab; do
    [[ "$($program --version)" = "$program '"$version"' "* ]]
    # Nothing of its own beside the copies that all of them share.
    [ -z "$(ldd "$VIRTUAL_ENV"/lib/python3*/site-packages/kvpool/bin/$program | grep -E "not found|grpc|absl" | grep -v kvpool.libs/)" ]
  done
  # What engines import has no gRPC.
  ldd "$VIRTUAL_ENV"/lib/python3*/site-packages/kvpool/_core*.so >/tmp/libraries
  if ! grep -q libprotobuf /tmp/libraries || grep -E "libgrpc|libgpr" /tmp/libraries; then exit 1; fi
  cd "$VIRTUAL_ENV"/lib/python3*/site-packages  # Each library that others made comes with its license.
  for package in libgrpc29 libgrpc++1.51 libprotobuf32 libabsl20220623 libcurl4 libssl3 libre2-9 libc-ares2 nanobind nlohmann-json3-dev; do
    [ -s kvpool/licenses/$package ]
  done
  python -c "import kvpool; assert kvpool.__version__ == \"'"$version"'\"; import kvpool_vllm, kvpool_llama_cpp.library"
  export KVPOOL_SOCKET=/tmp/kvpoold.sock
  kvpoold --device=host --capacity=64MiB --state-dir=/tmp --socket=$KVPOOL_SOCKET --metrics-listen= --shutdown-grace=100ms >/tmp/log 2>&1 &
  daemon=$!
  kvpoolctl health --wait=30s
  python /srv/engine.py
  python /srv/engine.py
  # By a daemon of its own.
  kvpool-conform --only=prefix_of_the_dead -- python -m kvpool.conform.toy --socket={socket} --other={other}
  # The command is the daemon, so that a signal to it arrives.
  kill $daemon && wait $daemon
  pip uninstall --quiet --yes kvpool
' | tee "$tree/log"
grep -qx '0 of 64 blocks were cached' "$tree/log"
grep -qx '64 of 64 blocks were cached' "$tree/log"
