#!/usr/bin/env bash
# What deploy/install_deps.sh does where no CUDA compiler can be had. Usage: install_deps_test.sh ROOT
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/deploy" "$scratch/bin"
cp "$1/deploy/install_deps.sh" "$scratch/deploy"
# All packages are there, a toolkit of this machine is of another release, and there is no network.
printf '#!/bin/sh\necho installed\n' >"$scratch/bin/dpkg-query"
printf '#!/bin/sh\necho "no network" >&2\nexit 1\n' >"$scratch/bin/python3"
printf '#!/bin/sh\ncase "$*" in *release*) exit 1 ;; esac\nexec /usr/bin/grep "$@"\n' >"$scratch/bin/grep"
chmod +x "$scratch"/bin/*

# expect STATUS WORDS COMMAND...
expect() {
  local status=0 output
  output=$(env -u KVPOOL_CUDA_ROOT "PATH=$scratch/bin:/usr/bin:/bin" "${@:3}" 2>&1) || status=$?
  if [ "$status" != "$1" ] || [[ $output != *"$2"* ]]; then
    echo "${*:3}: status $status, not $1, or not \"$2\" in: $output" >&2
    exit 1
  fi
}
script=$scratch/deploy/install_deps.sh
expect 1 "no CUDA compiler to be had" "$script" image
expect 1 "no network" "$script" image
expect 0 "building without CUDA, as asked" KVPOOL_CUDA_ROOT=none "$script" image
rm "$scratch/build/deps/cuda_root"
expect 1 "KVPOOL_CUDA_ROOT=/nowhere has no working bin/nvcc of CUDA 13" KVPOOL_CUDA_ROOT=/nowhere "$script" build
expect 0 "built without CUDA" "$script" build
expect 1 "unknown set" "$script" imgae
