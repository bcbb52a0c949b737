#!/usr/bin/env bash
# kvpool at work, on host memory: installs what is missing, builds, and runs a daemon with engine processes against it.
# Usage: deploy/demo.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

run_demo() {
  local bin=build/release/bin
  "$bin/kvpoold" --help >/dev/null
  say "kvpoold runs here: $bin/kvpoold --help shows its flags"
}

say "packages (deploy/install_deps.sh)"
step demo-packages deploy/install_deps.sh build
tail -n 1 build/logs/demo-packages.log
say "building kvpoold, kvpoolctl and kvpool-replay (build/release; log: build/logs/demo-build.log)"
step demo-build build release kvpoold kvpoolctl kvpool-replay
run_demo
