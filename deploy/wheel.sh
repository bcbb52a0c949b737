#!/usr/bin/env bash
# Makes the wheel and the sdist of kvpool in build/dist/. Usage: deploy/wheel.sh [--no-deps]
#
# The wheel has the Python module, the programs, the engines' packages, and every library that they need and that a Debian 12
# without packages of its own lacks; module and programs share one copy of each. It is for Python 3.11 and later, and for the glibc that
# Debian's libraries ask for (2.35). The CUDA driver is loaded at run time, where there is one.
#
#   --no-deps   what deploy/install_deps.sh test installs is there already
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

case "${1:-}" in
  "") say "packages (deploy/install_deps.sh test)" && step wheel-packages deploy/install_deps.sh test ;;
  --no-deps) ;;
  *) sed -n '2,/^set/{s/^# \{0,1\}//;/^set/!p}' "$0" && exit 2 ;;
esac
python=$PWD/build/deps/python/bin/python
[ -x "$python" ] || { say "build/deps/python is missing: deploy/install_deps.sh test makes it, build/logs/python_tools.log says why not" >&2; exit 1; }
stage=$PWD/build/wheel

# copy_licenses FOLDER: of what is compiled in, and of the libraries that auditwheel adds, which are all but those of every Linux.
copy_licenses() {
  local package
  mkdir "$1" && cp "$("$python" -c 'import nanobind; print(nanobind.__path__[0])')"-*.dist-info/licenses/LICENSE "$1/nanobind" || return
  for package in nlohmann-json3-dev $(ldd "$stage"/prefix/kvpool/bin/* | awk '$2 == "=>" { print "*" $3 }' | sort -u | xargs dpkg -S |
    cut -d: -f1 | sort -u | grep -vxE 'libc6|libgcc-s1|libstdc\+\+6|zlib1g'); do
    cp "/usr/share/doc/$package/copyright" "$1/$package" || return
  done
}

# A step goes on after a command that fails, hence `&&`.
pack_wheel() {
  rm -rf "$stage"
  # auditwheel finds patchelf in PATH.
  cmake --install build/release --component python --prefix "$stage/prefix" --strip &&
    copy_licenses "$stage/prefix/kvpool/licenses" &&
    KVPOOL_PYTHON_PREBUILT=$stage/prefix "$python" -m pip wheel --no-deps --no-build-isolation \
      --config-settings build-dir="$stage/build" --wheel-dir "$stage" . &&
    PATH=$(dirname "$python"):$PATH "$python" -m auditwheel repair --wheel-dir build/dist "$stage"/*.whl
}

say "module and programs (build/release)"
mkdir -p build/dist
step wheel-build build release kvpool_wheel
rm -rf build/dist/kvpool-*.whl build/dist/kvpool-*.tar.gz
say "the wheel and the sdist"
step wheel-pack pack_wheel
step wheel-sdist "$python" -c 'from scikit_build_core.build import build_sdist; print(build_sdist("build/dist"))'
du -h build/dist/kvpool-*.whl build/dist/kvpool-*.tar.gz
