#!/usr/bin/env bash
# What `cmake --install` installs, and programs that have only that: the examples, in C and C++, by find_package and by
# pkg-config, with an installed kvpoold. Usage: install_test.sh SOURCES BUILD VERSION
set -euo pipefail
sources=$1 build=$2 version=$3
scratch=$(mktemp -d)
daemon=
cleanup() {
  if [ -n "$daemon" ]; then kill "$daemon" && wait "$daemon" || true; fi
  rm -rf "$scratch"
}
trap cleanup EXIT
fail() { echo "install_test: $*" >&2; exit 1; }
# same WHAT GOT EXPECTED
same() { [ "$2" = "$3" ] || fail "$1: got '$2', expected '$3'"; }

prefix=$scratch/prefix
cmake --install "$build" --prefix "$prefix" --strip >"$scratch/install.log"
# The sources are not to be found by accident: the prefix moves, and what is built lies elsewhere.
mv "$prefix" "$scratch/moved"
prefix=$scratch/moved
lib=$(dirname "$(find "$prefix" -name libkvpool.so)")
if grep -rIl -e "$sources" -e "$build" -e "$scratch/prefix" "$prefix"; then fail "the files above name folders of the build"; fi

echo "== versions: $version everywhere"
export PATH=$prefix/bin:$PATH PKG_CONFIG_PATH=$lib/pkgconfig LD_LIBRARY_PATH=$lib
for program in kvpoold kvpoolctl kvpool-replay kvpool-sim kvpool-lab; do
  [[ "$("$prefix/bin/$program" --version)" = "$program $version "* ]] || fail "$program --version: $("$program" --version)"
done
same pkg-config "$(pkg-config --modversion kvpool) $(pkg-config --modversion kvpool-client)" "$version $version"
same "kvpool_version()" "$version" "$(python3 -c 'import ctypes, sys
function = ctypes.CDLL(sys.argv[1]).kvpool_version
function.restype = ctypes.c_char_p
print(function().decode())' "$lib/libkvpool.so.0")"

echo "== libkvpool.so: its soname, and its symbols"
readelf --dynamic "$lib/libkvpool.so" | grep -q 'soname: \[libkvpool.so.0\]' || fail "the soname is not libkvpool.so.0"
same "symbols that are not kvpool_*@@KVPOOL_0" "" \
  "$(nm --dynamic --defined-only --format=posix "$lib/libkvpool.so" | cut -d' ' -f1 | grep -Ev '^(kvpool_\w+@@KVPOOL_0|KVPOOL_0)$' || true)"

same "gRPC that libkvpool.so asks for" "" "$(readelf --dynamic "$lib/libkvpool.so" | grep -E 'NEEDED.*lib(grpc|gpr)' || true)"

echo "== each header alone"
# shellcheck disable=SC2016  # the inner shell's variables
find "$prefix/include/kvpool" -name '*.h' -printf '%P\n' | sort | xargs -P 2 -I HEADER sh -ec '
  echo "#include \"HEADER\"" | c++ -std=c++20 -fsyntax-only -Wall -I "$0" -x c++ -
  echo HEADER' "$prefix/include/kvpool" | sort >"$scratch/headers"
cat "$scratch/headers"
same "headers that compile alone" "$(wc -l <"$scratch/headers")" "$(find "$prefix/include/kvpool" -name '*.h' | wc -l)"
echo '#include <kvpool.h>' | cc -std=c99 -pedantic -Wall -Wextra -Werror -fsyntax-only -I "$prefix/include" -x c -

echo "== the examples, by find_package"
cp -r "$sources/client/examples" "$scratch/examples"
cd "$scratch/examples"
for bound in engine.c:30 engine.py:15 engine.cc:40; do  # A whole engine is that short.
  [ "$(wc -l <"${bound%:*}")" -le "${bound#*:}" ] || fail "${bound%:*} has more lines than ${bound#*:}"
done
cmake -S . -B by_cmake -G Ninja -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_DISABLE_FIND_PACKAGE_gRPC=ON >"$scratch/cmake.log" || { cat "$scratch/cmake.log" >&2; fail "find_package"; }
cmake --build by_cmake
# The C ABI alone asks for no Protocol Buffers.
mkdir only_c
cat >only_c/CMakeLists.txt <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(only_c LANGUAGES C)
set(CMAKE_DISABLE_FIND_PACKAGE_Protobuf ON)
find_package(kvpool 0.1 REQUIRED COMPONENTS c)
if(NOT EXISTS ${kvpool_PROTO_DIR}/kvpool/v1/engine.proto)
  message(FATAL_ERROR "kvpool_PROTO_DIR=${kvpool_PROTO_DIR} has no .proto files")
endif()
add_executable(engine ../engine.c)
target_link_libraries(engine PRIVATE kvpool::c)
CMAKE
cmake -S only_c -B only_c/build -G Ninja -DCMAKE_PREFIX_PATH="$prefix" >"$scratch/cmake.log"
cmake --build only_c/build

echo "== the examples, by pkg-config"
# shellcheck disable=SC2046  # words
cc -std=c99 -Wall -Werror engine.c -o engine_c $(pkg-config --cflags --libs kvpool)
# shellcheck disable=SC2046
c++ -std=c++20 engine.cc -o engine $(pkg-config --cflags --libs kvpool-client)

echo "== all of them, with the installed daemon"
export KVPOOL_SOCKET=$scratch/kvpoold.sock
kvpoold --device=host --capacity=256MiB --slab-bytes=8MiB --socket="$KVPOOL_SOCKET" --state-dir="$scratch" --metrics-listen= \
  --shutdown-grace=200ms >"$scratch/log" 2>&1 &
daemon=$!
kvpoolctl health --wait=60s
same "engine.cc" "$(by_cmake/engine_example)" "0 of 64 blocks were cached"
same "engine.cc by pkg-config" "$(./engine)" "64 of 64 blocks were cached"
same "engine.c" "$(by_cmake/engine_example_c)" "0 of 1024 tokens were cached"
same "engine.c by pkg-config" "$(./engine_c)" "1024 of 1024 tokens were cached"
same "engine.c, C ABI alone" "$(only_c/build/engine)" "1024 of 1024 tokens were cached"
same "pruning.cc" "$(by_cmake/pruning_example)" "264 of 1000 tokens are resident, in 17 blocks"
