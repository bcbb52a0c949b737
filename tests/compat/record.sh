#!/usr/bin/env bash
# Records what this release promises, in tests/compat/VERSION, in place of what the release before promised. Usage: tests/compat/record.sh
#
# It needs what deploy/install_deps.sh test installs, and a build of the release preset.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# = 0 ] || { sed -n '2,/^set/{s/^# \{0,1\}//;/^set/!p}' "$0"; exit 2; }
version=$(sed -n 's/^project(kvpool VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
folder=build/release/$version
rm -rf "$folder"
mkdir "$folder"
protoc -I proto -o "$folder/kvpool.v1.binpb" proto/kvpool/v1/*.proto
build/release/bin/wire_test --record "$folder/engine.binpb"
python3 -B tests/compat/c_abi.py client/c/kvpool.h >"$folder/c_abi.txt"
python3 -B tests/compat/c_library.py client/c/kvpool.h build/release/lib/libkvpool.so >"$folder/libkvpool.abi"
rm -rf tests/compat/[0-9]*
mv "$folder" tests/compat
du -ab "tests/compat/$version"
