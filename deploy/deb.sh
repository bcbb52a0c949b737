#!/usr/bin/env bash
# Makes the Debian packages kvpoold, kvpool-tools, libkvpool0 and libkvpool-dev in build/dist. Usage: deploy/deb.sh [--no-deps]
#
#   --no-deps   what deploy/install_deps.sh test installs is there already
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

case "${1:-}" in
  "") say "packages (deploy/install_deps.sh test)" && step deb-packages deploy/install_deps.sh test ;;
  --no-deps) ;;
  *) sed -n '2,/^set/{s/^# \{0,1\}//;/^set/!p}' "$0" && exit 2 ;;
esac
pack() {
  rm -rf build/dist/*.deb
  # A step goes on after a command that fails, hence `&&`.
  cpack --config build/release/CPackConfig.cmake -B build/dist && rm -rf build/dist/_CPack_Packages
}
say "programs, libraries and manual pages (build/release)"
step deb-build build release kvpool_debian
say "the packages"
step deb-pack pack
du -h build/dist/*.deb
