#!/usr/bin/env bash
# Does what "Add a policy" in cuda/scorers/README.md says, to the letter, in a copy, and finds the policy listed and scoring.
# Usage: add_a_policy.sh <root of the tree> <C++ compiler>
set -euo pipefail
root=$1
compiler=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/proto"
cp -r "$root/cuda" "$scratch/cuda"
cp -r "$root/proto/support" "$scratch/proto/support"

# block LANGUAGE: the section's first block of that language, its indent taken off.
block() {
  sed -n '/^## Add a policy/,/^## Policies/p' "$root/cuda/scorers/README.md" |
    sed -n "/^   \`\`\`$1\$/,/^   \`\`\`\$/p" | sed '1d;$d;s/^   //'
}
block cpp >"$scratch/cuda/scorers/policies/longest_value.h"
block text >>"$scratch/cuda/scorers/policies/registry.list"

cat >"$scratch/main.cc" <<'CPP'
#include <cstdio>

#include "cuda/scorers/policies/policy_kernels.h"
#include "cuda/scorers/policies/registry.h"

int main() {
  using namespace kvpool::scorers;
  const auto bound = BindPolicy("longest_value", {});
  if (!bound.ok()) return std::puts(bound.status().ToString().c_str()), 1;
  float values[3] = {2, 1, 3}, scores[3] = {};
  ScoreContext context;
  context.kv.shape = {.layers = 1, .kv_heads = 1, .tokens_per_block = 4, .tokens = 3, .k_head_dim = 1, .v_head_dim = 1};
  context.v_norms = values;
  ScorePlane(bound->id, context, 0, 0, bound->params, scores);
  if (scores[0] != 2 || scores[1] != 1 || scores[2] != 3) return std::puts("wrong scores"), 1;
  std::puts(PoliciesHelp().c_str());
}
CPP
cat >"$scratch/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(added LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
find_package(Threads REQUIRED)
find_package(absl REQUIRED)
include_directories(${PROJECT_SOURCE_DIR})
add_library(kvpool_support INTERFACE)
target_link_libraries(kvpool_support INTERFACE absl::status absl::statusor absl::strings Threads::Threads)
add_subdirectory(cuda/scorers)
add_executable(listed main.cc)
target_link_libraries(listed kvpool_scorers)
CMAKE
cmake -G Ninja -S "$scratch" -B "$scratch/build" -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_UNITY_BUILD=ON >"$scratch/log" 2>&1 ||
  { cat "$scratch/log"; exit 1; }
ninja -C "$scratch/build" -j2 listed >"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
"$scratch/build/listed" | grep -A2 '  longest_value: Keeps tokens whose value is long' || { echo "longest_value is not listed"; exit 1; }
