#!/usr/bin/env bash
# Checks all that this machine can, starting from nothing: packages, builds, tests, sanitizers, dashboards.
# Usage: tests/run.sh [--quick] [REGEX]
#
#   --quick   the release build and its tests only (without --quick: about 45 minutes on two cores, from nothing)
#   REGEX     run only the tests whose names match, as ctest -R does
#
# Prints what it does, then a table of what passed, what failed, and what was not run and why. Logs are in
# build/logs. The exit status is 0 if and only if nothing failed.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

quick=no
regex=.
for argument in "$@"; do
  case "$argument" in
    --quick) quick=yes ;;
    -h | --help) sed -n '2,/^set/{s/^# \{0,1\}//;/^set/!p}' "$0" && exit 0 ;;
    -*) echo "run.sh: unknown flag '$argument'" >&2 && exit 2 ;;
    *) regex=$argument ;;
  esac
done

results=build/results  # one file per check or run of ctest; tests/summary.py reads them
rm -rf $results
mkdir -p $results build/logs

# check NAME COMMAND...: runs a step that counts as one test.
check() {
  local name=$1 started=$SECONDS outcome=passed
  shift
  step "$name" "$@" || outcome=failed
  printf '%s\t%s\t%s\n' "$outcome" $((SECONDS - started)) "" >"$results/$name.check"
  [ $outcome = passed ]
}

# not_run NAME REASON: counts one skipped test.
not_run() {
  say "not run: $1: $2"
  printf 'skipped\t0\t%s\n' "$2" >"$results/$1.check"
}

# run_ctest PRESET ARGUMENT...: runs the tests of one build, twice as many at a time as there are cores, since many wait. Each has a time
# limit, so that one that hangs does not stop the rest.
run_ctest() {
  local preset=$1
  shift
  # This entry without a results file, as a run that dies early leaves it, counts as a failure.
  printf 'ctest\n' >"$results/$preset.ctest"
  "${KVPOOL_WRAP[@]}" ctest --test-dir "build/$preset" --output-on-failure --no-tests=error --timeout 300 --parallel $((KVPOOL_JOBS * 2)) \
    --output-junit "$PWD/$results/$preset.xml" -R "$regex" "$@"
}

# build_and_test PRESET CTEST_ARGUMENT...
build_and_test() {
  local preset=$1
  shift
  say "$preset: building (build/$preset)"
  if ! check "$preset-build" build "$preset" all; then
    not_run "$preset-tests" "the $preset build failed"
    return
  fi
  say "$preset: testing"
  step "$preset-tests" run_ctest "$preset" "$@" || true  # the failed tests are in the results
}

# fuzz TARGET: a minute of stories, beginning with the corpus. What ends it is kept in build/logs, and its log says where.
fuzz() {
  mkdir -p "build/corpus/$1"
  "build/asan/bin/$1" -max_total_time=60 -max_len=256 -entropic=0 -timeout=30 -print_final_stats=1 -artifact_prefix="build/logs/$1-" \
    "build/corpus/$1" "tests/fuzz/corpus/$1"
}

# A figure that misses its bound (exit status 1) is shown but fails nothing, since a busy machine is no bug.
bench() {
  build/release/bin/kvpool-bench || [ $? -eq 1 ]
}

# What is run on a GPU, over the fake driver.
gpu() {
  check gpu-folder tests/gpu/build.sh && check gpu-checks build/gpu/run.sh --fake || true
}

# Sanitizers stop at the first report, so that the test fails even if its assertions hold. Debian's libraries
# are not instrumented; tsan.supp gives the reason for each thing it leaves out.
sanitizers() {
  export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
  export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
  # A suppression names a library by the stack of an access, which a busy thread soon forgets: it remembers as much as it can.
  export TSAN_OPTIONS=suppressions=$PWD/tests/tsan.supp:halt_on_error=1:second_deadlock_stack=1:history_size=7
}

# This is a function so that the shell has read all of it before it starts, since a checkout may change while
# the tests run.
main() {
  say "packages (deploy/install_deps.sh test)"
  check packages deploy/install_deps.sh test || { python3 tests/summary.py $results; exit 1; }
  tail -n 1 build/logs/packages.log
  PATH=$PATH:$PWD/build/deps/prometheus/usr/bin

  [ -e build/release/CMakeCache.txt ] || export KVPOOL_UNITY=ON
  build_and_test release
  not_run package.deb "it downloads systemd and a compiler, 100 MB: tests/package/deb_test.sh, which deploy/release.sh runs"
  not_run package.sdist "it compiles everything again: tests/package/sdist_test.sh, which deploy/release.sh runs"
  not_run compat.releases "it compiles an earlier release: tests/compat/releases_test.sh, which deploy/release.sh runs"
  if [ $quick = no ]; then
    if [ -x build/release/bin/kvpool-bench ]; then
      say "the figures that kvpool promises (kvpool-bench; all of them: build/logs/bench.log)"
      check bench bench && { grep -E 'MISSED' build/logs/bench.log || say "each met on this machine, now"; }
    else
      not_run bench "the release build failed"
    fi
  fi
  if [ ! -s build/deps/cuda_root ]; then
    not_run gpu-checks "built without CUDA"
  elif [ "$regex" = . ]; then
    # It packs on one core, beside the next build, and after what measures.
    say "what is run on a GPU, over the fake driver: tests/gpu/build.sh, build/gpu/run.sh --fake"
    gpu &
  fi
  if [ $quick = no ]; then
    sanitizers
    # Clang's build, which also analyses locks. Tidy checks give the same result with every compiler, and a
    # benchmark of a sanitizer's build means nothing.
    build_and_test asan -LE 'tidy|bench'
    if [ -x build/asan/bin/step_fuzz ] && [ -x build/asan/bin/attach_fuzz ] && [ -x build/asan/bin/stream_fuzz ] &&
      [ -x build/asan/bin/http_fuzz ]; then
      say "fuzzing both sockets and the metrics address for a minute"
      check step_fuzz fuzz step_fuzz & check attach_fuzz fuzz attach_fuzz & check stream_fuzz fuzz stream_fuzz &
      check http_fuzz fuzz http_fuzz & wait
    else
      not_run fuzzing "the asan build failed"
    fi
    # The thread sanitizer of g++ 12 finds no room for its shadow memory where the kernel
    # randomizes addresses widely.
    if setarch -R true 2>/dev/null; then KVPOOL_WRAP=(setarch -R); fi
    build_and_test tsan -LE 'tidy|bench'
  fi
  wait
  say "done"
  python3 tests/summary.py $results
}
main; exit
