#!/usr/bin/env bash
# Runs everything that needs a GPU, on a machine that has one, and prints a table. No network and no packages are needed: the
# binaries are in the folder that tests/gpu/build.sh makes, where a copy of this file lies beside them.
# Usage: run.sh [--fake]
#
#   --fake   over the fake driver instead: shows that the checks themselves work, says nothing about a GPU
#
# Exit status: 0 all passed, 1 something failed, 2 nothing could be run.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
if [ ! -x "$here/bin/gpu_facts" ]; then
  folder=$here/../../build/gpu  # called in the tree
  [ -x "$folder/bin/gpu_facts" ] || "$here/build.sh"
  here=$(cd "$folder" && pwd)
fi
export LD_LIBRARY_PATH=$here/lib PATH=$here/bin:$PATH KVPOOL_TEST_DEVICE=cuda KVPOOL_SCORER_VECTORS=$here
facts_effort=()
requests=20000
if [ "${1:-}" = --fake ]; then
  export KVPOOL_LIBCUDA=$here/fake/libcuda.so.1
  facts_effort=(--quick)
  requests=2000
  echo "over the FAKE driver: none of this is about a GPU"
elif [ $# -gt 0 ]; then
  sed -n '2,/^set/{s/^# \{0,1\}//;/^set/!p}' "$0"
  exit 2
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/kvpool-gpu-XXXXXX")
daemon=
cleanup() {
  [ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT
table=()
failed=0

# check NAME COMMAND...: runs it, shows its output where it fails, and adds a line to the table.
check() {
  local name=$1 started=$SECONDS outcome=ok
  shift
  echo "== $name"
  "$@" >"$work/$name.log" 2>&1 || outcome=FAIL
  if [ $outcome = FAIL ]; then
    tail -n 60 "$work/$name.log"
    failed=1
  fi
  table+=("$(printf '%-5s %-28s %4d s' "$outcome" "$name" $((SECONDS - started)))")
}

# Flags for kvpoold, beside those that serve_and_replay gives it.
daemon_flags=()
# The whole of it: a daemon on the GPU, and engine processes that stamp and verify every block, one of them killed half way.
serve_and_replay() {
  kvpoold --device=cuda:0 --capacity="$1" --slab-bytes=64MiB --socket="$work/kvpoold.sock" --metrics-listen= \
    "${daemon_flags[@]}" >"$work/kvpoold.log" 2>&1 &
  daemon=$!
  local tries=0
  until kvpoolctl health --socket="$work/kvpoold.sock" >/dev/null 2>&1; do
    kill -0 $daemon || { cat "$work/kvpoold.log"; return 1; }
    [ $((tries += 1)) -lt 600 ] || { echo "kvpoold does not serve"; return 1; }
    sleep 0.1
  done
  shift
  local status=0
  kvpool-replay --socket="$work/kvpoold.sock" --workload=conversation --requests=$requests --engines=2 --kill-one-at=0.5 "$@" ||
    status=$?
  kill -TERM $daemon
  wait $daemon || status=$?
  daemon=
  [ $status -eq 0 ] || tail -n 30 "$work/kvpoold.log"
  return $status
}

echo "== facts"
status=0
gpu_facts "${facts_effort[@]}" || status=$?
if [ $status -eq 2 ]; then
  echo "nothing was run: there is no GPU on this machine, or no driver for it"
  exit 2
fi
[ $status -eq 0 ] || failed=1
table+=("$(printf '%-5s %-28s' "$([ $status -eq 0 ] && echo ok || echo FAIL)" facts)")
check device-contract device_contract_test
check stamps stamper_test
check fences fence_events_test
check copies block_copier_test
check tiers gpu_tier_test
check engines engine_test
check scorers scorers_test
# The sanitizer does not work everywhere that a GPU does: it is asked first.
sanitize() { compute-sanitizer --tool memcheck --error-exitcode 9 stamper_test "$@"; }
if sanitize --gtest_filter=StamperTest.NoBlocksAreNoWork >"$work/sanitizer.log" 2>&1; then
  check memcheck sanitize
else
  table+=("$(printf '%-5s %-28s %s' skip memcheck "no compute-sanitizer, or it refuses this machine")")
fi
# What scoring costs: its lines go into the table as they are.
status=0
score_timings "${facts_effort[@]}" >"$work/score-timings.log" 2>&1 || status=$?
[ $status -eq 0 ] || failed=1
mapfile -t -O ${#table[@]} table <"$work/score-timings.log"
# The same of copies to a tier and from it.
status=0
copy_timings "${facts_effort[@]}" >"$work/copy-timings.log" 2>&1 || status=$?
[ $status -eq 0 ] || failed=1
mapfile -t -O ${#table[@]} table <"$work/copy-timings.log"
# Real engines, where the machine has them: an environment as tests/engines.sh makes it, with a PyTorch for this GPU.
engines_python=${KVPOOL_ENGINES_PYTHON:-python3}
if LD_LIBRARY_PATH='' "$engines_python" -c 'import kvpool_transformers, pytest, torch; assert torch.cuda.is_available()' >"$work/engines.log" 2>&1; then
  # Our libraries are for our programs alone.
  mkdir "$work/bin"
  for program in kvpoold kvpoolctl; do
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$here/lib" "$here/bin/$program" >"$work/bin/$program"
    chmod +x "$work/bin/$program"
  done
  transformers() {
    LD_LIBRARY_PATH='' KVPOOL_BIN=$work/bin KVPOOL_ENGINES_DEVICE=cuda:0 PYTHONDONTWRITEBYTECODE=1 \
      "$engines_python" -m pytest -q -p no:cacheprovider "$here/engines/engines/transformers_test.py"
  }
  check transformers transformers
else
  table+=("$(printf '%-5s %-28s %s' skip transformers "$engines_python: $(tail -n 1 "$work/engines.log")")")
fi
check replay-small-blocks serve_and_replay 256MiB --block-bytes=65536
check replay-large-blocks serve_and_replay 2GiB --block-bytes=1048576
# What the GPU has no room for comes back from a folder.
with_tier() {
  local status=0
  daemon_flags=("--tier=file:$work/tier,capacity=4GiB")
  serve_and_replay 256MiB --block-bytes=65536 --wait-ms=60000 || status=$?
  daemon_flags=()
  grep -qE '^Below the pool: .* down, [1-9]' "$work/replay-tier.log" || { echo "nothing came up"; status=1; }
  return $status
}
check replay-tier with_tier
mapfile -t -O ${#table[@]} table < <(grep '^Below the pool' "$work/replay-tier.log" | sed 's/^/      /')
# The daemon is killed under its engines, and so are engines: what was in the GPU's memory is found, byte by byte.
killed() {
  kvpool-replay --spawn-daemon --keeper --daemon-flag=--device=cuda:0 --blocks=2000 --workload=conversation --seed=7 --requests=300 --engines=3 \
    --kill-daemon-every=30 --kill-every=50
}
check replay-daemon-killed killed
# What waits for the next daemon: the teardown of the dead one's context is a part of its longest time.
mapfile -t -O ${#table[@]} table < <(grep -E '^(VERB|match, answered|lease, magazine refilled|seal, answered) ' "$work/replay-daemon-killed.log" | sed 's/^/      /')

echo
printf '%s\n' "${table[@]}"
[ $failed -eq 0 ] && echo "all passed" || echo "FAILED"
exit $failed
