#!/usr/bin/env bash
# The wheels of two releases together: the engine and the tools of each with the daemon of the other, and both engines on one
# daemon, where they share a prefix. A daemon that is too old for the new engine is to be named by it. Usage: releases_test.sh OLD NEW.whl
#
#   OLD   a wheel, or a git revision, such as v0.1.0, whose wheel its own deploy/wheel.sh makes: it compiles all of it, in ten minutes
#         on two cores
#
# It needs what deploy/install_deps.sh test installs. deploy/release.sh runs it with the last tag.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
scratch=$(mktemp -d)
daemon=
stop() {
  if [ -n "$daemon" ]; then kill "$daemon" && wait "$daemon" || true; fi
  daemon=
}
trap 'stop; rm -rf "$scratch"' EXIT
# same WHAT GOT EXPECTED
same() { [ "$2" = "$3" ] || { echo "releases_test: $1: got '$2', expected '$3'" >&2; exit 1; }; }

old=$1 new=$2
if [ ! -f "$old" ]; then
  echo "== the wheel of $(git -C "$root" log -1 --format='%h, %s' "$1")"
  mkdir -p "$scratch/sources/build"
  git -C "$root" archive "$1" | tar -x -C "$scratch/sources"
  ln -s "$root/build/deps" "$scratch/sources/build/deps"
  "$scratch/sources/deploy/wheel.sh" --no-deps
  old=$(echo "$scratch"/sources/build/dist/kvpool-*.whl)
fi
for name in old new; do
  /usr/bin/python3 -m venv "$scratch/$name"
  "$scratch/$name/bin/pip" install --quiet --disable-pip-version-check --no-index --find-links "$root/build/deps/wheels" "${!name}"
done
export KVPOOL_SOCKET=$scratch/kvpoold.sock
for name in old new; do
  other=new && [ $name = old ] || other=old
  echo "== the daemon is $("$scratch/$name/bin/kvpoold" --version), the engine $("$scratch/$other/bin/kvpoolctl" --version)"
  "$scratch/$name/bin/kvpoold" --device=host --capacity=256MiB --socket="$KVPOOL_SOCKET" --state-dir="$scratch/state" \
    --metrics-listen= --shutdown-grace=100ms >"$scratch/log" 2>&1 &
  daemon=$!
  "$scratch/$other/bin/kvpoolctl" health --wait=30s
  "$scratch/$other/bin/kvpoolctl" spaces
  "$scratch/$other/bin/kvpoolctl" status
  first=$("$scratch/$other/bin/python" "$root/client/examples/engine.py" 2>&1) || true
  # A daemon of 0.1.0 takes no Step stream in frames, and engines of today send no other: COMPATIBILITY.md.
  if [ $name = old ] && [[ $first = *"upgrade the daemon first"* ]]; then
    echo "the engine asks for a later daemon"
    stop
    continue
  fi
  same "first engine" "$first" "0 of 64 blocks were cached"
  same "second engine" "$("$scratch/$other/bin/python" "$root/client/examples/engine.py")" "64 of 64 blocks were cached"
  same "engine of the daemon's release" "$("$scratch/$name/bin/python" "$root/client/examples/engine.py")" "64 of 64 blocks were cached"
  "$scratch/$other/bin/kvpool-replay" --workload=conversation --seed=1 --engines=2 --requests=300 --kill-one-at=0.5
  stop
done
