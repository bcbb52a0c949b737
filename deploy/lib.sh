# Sourced by deploy/demo.sh and tests/run.sh, with the repository root as working directory. Prints
# each step with the time since the start, keeps its output in build/logs, and shows the end of that
# when the step fails.

KVPOOL_JOBS=${KVPOOL_JOBS:-$(nproc)}
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1  # checkouts in other folders share one cache
KVPOOL_STARTED=$SECONDS
# A prefix of the commands that build and test, such as setarch. Builds need it too: they run the
# tests to list them.
KVPOOL_WRAP=()

say() {
  local elapsed=$((SECONDS - KVPOOL_STARTED))
  printf '[%2d:%02d] %s\n' $((elapsed / 60)) $((elapsed % 60)) "$*"
}

# step NAME COMMAND...: runs COMMAND with its output in build/logs/NAME.log. On failure prints the end of that
# and returns the command's status.
step() {
  local name=$1 log=build/logs/$1.log status=0
  shift
  mkdir -p build/logs
  "$@" >"$log" 2>&1 </dev/null || status=$?
  if [ $status -ne 0 ]; then
    say "FAILED: $name (exit status $status). The end of $log:" >&2
    # The compiler's first error is worth more than the last line of ninja.
    grep -n -m 5 -E 'error:|Error:|FAILED:' "$log" | sed 's/^/    /' >&2 || true
    tail -n 40 "$log" | sed 's/^/    /' >&2
  fi
  return $status
}

# configure PRESET: makes build/PRESET ready for ninja. A build that KVPOOL_UNITY=ON makes compiles sources in groups, which
# takes half the time from nothing, and longer after each change.
configure() {
  local root
  root=$(cat build/deps/cuda_root)
  cmake --preset "$1" "-DKVPOOL_CUDA_ROOT=${root:-none}" ${KVPOOL_UNITY:+"-DCMAKE_UNITY_BUILD=$KVPOOL_UNITY"}
}

# build PRESET TARGET...: configures and builds. A lock allows one build at a time in a checkout, so that the
# demo and the tests may run side by side.
build() {
  local preset=$1
  shift
  (
    flock 9
    configure "$preset" && "${KVPOOL_WRAP[@]}" cmake --build --preset "$preset" --parallel "$KVPOOL_JOBS" --target "$@"
  ) 9>build/.lock
}
