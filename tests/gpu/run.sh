#!/usr/bin/env bash
# Runs everything that needs a GPU, on a machine that has one. No network and no packages are needed: the binaries are in the folder
# that tests/gpu/build.sh makes, where a copy of this file lies beside them.
# Usage: run.sh [--fake] [--only REGEX]
#
#   --fake         over the fake driver instead: shows that the checks themselves work, says nothing about a GPU
#   --only REGEX   only the checks whose names match (facts, scorers, memcheck, score-timings, replay-tier, …)
#
# A line for each figure is printed and written to $OUT/results.txt (OUT: the folder results beside this file unless it is set) as soon
# as it is known, and each check's output beside it: a run that is cut off has what it had measured. What matters most comes first.
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
scorer_tests=*
requests=20000
only=
while [ $# -gt 0 ]; do
  case $1 in
    --fake)
      export KVPOOL_LIBCUDA=$here/fake/libcuda.so.1
      facts_effort=(--quick)
      # CTest runs these, which need no files, over the same driver.
      scorer_tests='-ComputeTest.*:*.OddShapes:*.EveryTypeAndArrangement*'
      requests=2000
      echo "over the FAKE driver: none of this is about a GPU"
      ;;
    --only)
      only=${2:?--only needs a regular expression}
      shift
      ;;
    *)
      sed -n '2,/^set/{s/^# \{0,1\}//;/^set/!p}' "$0"
      exit 2
      ;;
  esac
  shift
done

work=$(mktemp -d "${TMPDIR:-/tmp}/kvpool-gpu-XXXXXX")
out=${OUT:-$here/results}
mkdir -p "$out"
: >"$out/results.txt"
daemon=
busy=
cleanup() {
  [ -z "$daemon$busy" ] || kill $daemon $busy 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT
failed=0
ran=0

# result LINE: prints it, and keeps it.
result() { printf '%s\n' "$1" | tee -a "$out/results.txt"; }
wanted() { [[ $1 =~ $only ]]; }
# check NAME COMMAND...: runs it, shows its output where it fails, and says how it went.
check() {
  wanted "$1" || return 0
  local name=$1 started=$SECONDS outcome=ok
  shift
  ran=1
  "$@" >"$out/$name.log" 2>&1 || outcome=FAIL
  if [ $outcome = FAIL ]; then
    tail -n 60 "$out/$name.log"
    failed=1
  fi
  result "$(printf '%-6s %-30s %4d s' "$outcome" "$name" $((SECONDS - started)))"
}
skip() { ! wanted "$1" || result "$(printf '%-6s %-30s %s' skip "$1" "$2")"; }
# measure NAME COMMAND...: its lines are results as they are.
measure() {
  wanted "$1" || return 0
  local name=$1 status=0
  shift
  ran=1
  "$@" 2>&1 | tee "$out/$name.log" | tee -a "$out/results.txt" || status=$?
  [ $status -eq 0 ] || { failed=1; result "$(printf '%-6s %-30s' FAIL "$name")"; }
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

# Whether there is a GPU at all.
status=0
gpu_facts --gpu >"$out/gpu.log" 2>&1 || status=$?
result "$(cat "$out/gpu.log")"
if [ $status -ne 0 ]; then
  echo "nothing was run: there is no GPU on this machine, or no driver for it"
  exit 2
fi
# Correctness first, and the GPU's own answers to what the design relies on.
check device-contract device_contract_test
check stamps stamper_test
check fences fence_events_test
check copies block_copier_test
check tiers gpu_tier_test
check engines engine_test
check scorers scorers_test "--gtest_filter=$scorer_tests"
measure facts gpu_facts "${facts_effort[@]}"
# The sanitizer does not work everywhere that a GPU does: it is asked first. Records, anchors, windows, policies and selections of all
# types are in these cases, in small shapes, since it makes a kernel a hundred times slower.
sanitized='ComputeTest.EveryType*:ComputeTest.Windows*:ComputeTest.EveryCode*:ChoiceTest.*'
sanitize() { compute-sanitizer --tool "$1" --error-exitcode 9 "$2" "--gtest_filter=$3"; }
if sanitize memcheck stamper_test StamperTest.NoBlocksAreNoWork >"$out/sanitizer.log" 2>&1; then
  check memcheck-stamps sanitize memcheck stamper_test '*'
  for tool in memcheck racecheck initcheck; do
    check $tool sanitize $tool scorers_test "$sanitized"
  done
else
  skip memcheck "no compute-sanitizer, or it refuses this machine"
fi
# What scoring costs, alone and beside a process that keeps the GPU busy with the same, and what copies to a tier and from it do.
measure score-timings score_timings "${facts_effort[@]}"
beside_a_busy_process() {
  (while score_timings "${facts_effort[@]}"; do :; done) >"$out/busy.log" 2>&1 &
  busy=$!
  score_timings "${facts_effort[@]}" | sed -u 's/^/beside: /'
  local status=${PIPESTATUS[0]}
  pkill -P $busy 2>/dev/null || true
  kill $busy 2>/dev/null || true
  wait $busy 2>/dev/null || true
  busy=
  return "$status"
}
measure score-timings-busy beside_a_busy_process
measure copy-timings copy_timings "${facts_effort[@]}"
# Real engines, where the machine has them: an environment as tests/engines.sh makes it, with a PyTorch for this GPU.
engines_python=${KVPOOL_ENGINES_PYTHON:-python3}
if LD_LIBRARY_PATH='' "$engines_python" -c 'import kvpool_transformers, pytest, torch; assert torch.cuda.is_available()' >"$out/engines.log" 2>&1; then
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
  skip transformers "$engines_python: $(tail -n 1 "$out/engines.log")"
fi
# lines_of NAME REGEX: what of a check's output is a result.
lines_of() { ! wanted "$1" || while IFS= read -r line; do result "       $line"; done < <(grep -E "$2" "$out/$1.log"); }
check replay-small-blocks serve_and_replay 256MiB --block-bytes=65536
check replay-large-blocks serve_and_replay 2GiB --block-bytes=1048576
# What the GPU has no room for comes back from a folder.
with_tier() {
  local status=0
  daemon_flags=("--tier=file:$work/tier,capacity=4GiB")
  serve_and_replay 256MiB --block-bytes=65536 --wait-ms=60000 || status=$?
  daemon_flags=()
  grep -qE '^Below the pool: .* down, [1-9]' "$out/replay-tier.log" || { echo "nothing came up"; status=1; }
  return $status
}
check replay-tier with_tier
lines_of replay-tier '^Below the pool'
# The daemon is killed under its engines, and so are engines: what was in the GPU's memory is found, byte by byte.
killed() {
  kvpool-replay --spawn-daemon --keeper --daemon-flag=--device=cuda:0 --blocks=2000 --workload=conversation --seed=7 --requests=300 --engines=3 \
    --kill-daemon-every=30 --kill-every=50
}
check replay-daemon-killed killed
# What waits for the next daemon: the teardown of the dead one's context is a part of its longest time.
lines_of replay-daemon-killed '^(VERB|match, answered|lease, magazine refilled|seal, answered) '

[ $ran -eq 1 ] || { echo "--only=$only: no check is called so"; exit 2; }
[ $failed -eq 0 ] && result "all passed" || result "FAILED"
exit $failed
