#!/usr/bin/env bash
# Measures engines on the pool, and writes client/integrations/RESULTS.md. Usage: client/integrations/results.sh [TABLE...]
#
# After tests/engines.sh --gemma --smollm2, in its environment; after tests/engines.sh --gemma --vllm those of vLLM too, whose engines run on
# core $VLLM_CORE (default: 1); after tests/engines.sh --kvpress, scores against kvpress's. Figures are kept in $KVPOOL_RESULTS_DIR
# (default: /var/tmp/kvpool-results), and what is there is not measured again: remove a file to measure its table anew;
# a table without figures there stays as the page has it. All takes 115 minutes of one core, and more where that has no instructions for
# bfloat16; texts are 4 MB of Debian packages, which are downloaded and not installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
directory=${KVPOOL_ENGINES_DIR:-/var/tmp/kvpool-engines}
for needed in "$directory/gemma/model.safetensors" "$directory/smollm2/model.safetensors" build/release/bin/kvpoold build/release/bin/kvpool-lab; do
  [ -e "$needed" ] || { echo "results.sh: $needed is missing: tests/engines.sh --gemma --smollm2, or a build, makes it" >&2; exit 1; }
done
export KVPOOL_BIN=$PWD/build/release/bin KVPOOL_GEMMA=$directory/gemma KVPOOL_GGUF=$directory/gemma-3-270m-q4_k_m.gguf
export KVPOOL_SMOLLM2=$directory/smollm2 KVPOOL_SMOLLM2_GGUF=$directory/smollm2.gguf
export KVPOOL_RESULTS_DIR=${KVPOOL_RESULTS_DIR:-/var/tmp/kvpool-results}
[ ! -x "$directory/vllm/bin/python" ] || export KVPOOL_VLLM_PYTHON=$directory/vllm/bin/python
[ ! -x "$directory/kvpress/bin/python" ] || export KVPOOL_KVPRESS_PYTHON=$directory/kvpress/bin/python
HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 nice "$directory/venv/bin/python" client/integrations/results/run.py "$@"
