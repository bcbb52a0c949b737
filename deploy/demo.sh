#!/usr/bin/env bash
# Shows kvpool at work on host memory: installs what is missing, builds, and runs a daemon and engines.
# Usage: deploy/demo.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

# start_daemon FOLDER: starts kvpoold on host memory, with its files in FOLDER; returns when it serves.
start_daemon() {
  # 40 MiB in blocks of 4 KiB: about 10,000 blocks, where the trace's working set has 183,000.
  build/release/bin/kvpoold --device=host --capacity=40MiB --slab-bytes=40MiB --metrics-listen=127.0.0.1:0 \
    --socket="$1/kvpoold.sock" --state-dir="$1/state" >"$1/kvpoold.log" 2>&1 &
  demo_daemon=$!
  local tries=0
  until build/release/bin/kvpoolctl --socket="$1/kvpoold.sock" health --wait=1s >/dev/null 2>&1; do
    if ! kill -0 "$demo_daemon" 2>/dev/null || [ $((tries += 1)) -gt 30 ]; then
      say "FAILED: kvpoold does not serve. Its log:" >&2
      sed 's/^/    /' "$1/kvpoold.log" >&2
      return 1
    fi
  done
}

# stop_demo FOLDER: ends what the demo started, and removes FOLDER. Engines are children of kvpool-replay and
# end with it.
stop_demo() {
  local pid
  for pid in ${demo_replay:-} ${demo_daemon:-}; do
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  rm -rf "$1"
}

# conversation_trace: prints the path of the public trace, if it is at hand.
conversation_trace() {
  local folder place
  for folder in "${KVPOOL_TRACES:-}" ../shared/traces; do
    for place in "$folder" "$folder/conversation_trace.jsonl" "$folder/mooncake_conversation_trace.jsonl.gz"; do
      if [ -f "$place" ]; then
        echo "$place"
        return
      fi
    done
  done
}

# scrape PORT NAME...: prints the named metrics. It needs nothing but bash.
scrape() {
  local port=$1 pattern
  shift
  pattern=$(IFS='|' && echo "$*")
  exec 3<>"/dev/tcp/127.0.0.1/$port"
  printf 'GET /metrics HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n' >&3
  grep -E "^($pattern)[{ ]" <&3 || true
  exec 3>&-
}

run_demo() {
  local work trace port
  work=$(mktemp -d "${TMPDIR:-/tmp}/kvpool-demo-XXXXXX")
  # shellcheck disable=SC2064  # the folder as it is now
  trap "stop_demo '$work'" EXIT
  export KVPOOL_SOCKET=$work/kvpoold.sock
  local ctl=build/release/bin/kvpoolctl
  say "starting kvpoold on host memory: 40 MiB, 10,239 blocks of 4 KiB"
  start_daemon "$work"
  port=$(sed -n 's/.*"metrics_port": *\([0-9]*\).*/\1/p' "$work/state/kvpoold.json")

  local workload=(--workload=conversation --seed=1)
  trace=$(conversation_trace)
  if [ -n "$trace" ]; then
    workload=(--trace="$trace")
    say "replaying the public conversation trace: $trace"
  else
    say "replaying made requests: the public conversation trace is not at hand (client/replay/README.md says where anyone gets it)"
  fi
  say "two engine processes share the pool; one of them is killed with SIGKILL half way, and started again"
  build/release/bin/kvpool-replay "${workload[@]}" --engines=2 --kill-one-at=0.5 &
  demo_replay=$!
  wait "$demo_replay"
  demo_replay=

  say "the daemon's own account (kvpoolctl status):"
  "$ctl" status
  say "a few of its metrics (http://127.0.0.1:$port/metrics):"
  scrape "$port" kvpool_blocks kvpool_lookup_blocks_total kvpool_hit_blocks_total kvpool_evicted_blocks_total \
    kvpool_sessions_ended_total
  say "done. To look around yourself:"
  cat <<'NEXT'
    build/release/bin/kvpoold --device=host --capacity=1GiB --socket=/tmp/kvpoold.sock --state-dir=/tmp/kvpool &
    export KVPOOL_SOCKET=/tmp/kvpoold.sock
    build/release/bin/kvpoolctl health --wait=30s
    build/release/bin/engine_example   # a whole engine, client/examples/engine.cc: run it twice
    build/release/bin/kvpool-replay --workload=conversation --engines=4 --kill-every=1000 &
    build/release/bin/kvpoolctl top
    build/release/bin/kvpoolctl spaces                       # then: blocks --space=1 --state=cached
    build/release/bin/kvpoolctl explain --space=1 --block=7  # why is it here?
    curl -s localhost:9400/metrics
NEXT
}

say "packages (deploy/install_deps.sh)"
step demo-packages deploy/install_deps.sh build
tail -n 1 build/logs/demo-packages.log
say "building kvpoold, kvpoolctl, kvpool-replay and engine_example (build/release; log: build/logs/demo-build.log)"
step demo-build build release kvpoold kvpoolctl kvpool-replay engine_example
run_demo
