#!/usr/bin/env bash
# Holds C++ sources to .clang-tidy. Usage: tests/clang_tidy.sh [--all | SOURCE...]
#
# Without arguments: the sources that differ from the branch `main`, and for a header the source of its name. A source takes 7 to
# 16 seconds, since clang-tidy reads all its headers: the test tidy.clang_tidy looks at a few rooms only, and --all takes half an
# hour on two cores.
# Needs a configured build/release and what is generated there. Exit status 77: clang-tidy is not here.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v clang-tidy >/dev/null || { echo "clang_tidy.sh: clang-tidy is not here: deploy/install_deps.sh test installs it"; exit 77; }

# changed COMMIT
changed() {
  { git diff --name-only --diff-filter=d "$1"; git ls-files --others --exclude-standard; } |
    sed -n 's/\.h$/.cc/p; /\.cc$/p' | sort -u
}

case "${1:-}" in
  --all) mapfile -t sources < <(git ls-files '*.cc') ;;
  "")
    since=$(git merge-base main HEAD)  # The script ends here where there is no branch main.
    mapfile -t sources < <(changed "$since")
    ;;
  *) sources=("$@") ;;
esac
# Only what the build compiles has a command to go by.
python3 -B tests/tidy/commands.py build/release build/logs/commands
compiled=()
for source in "${sources[@]}"; do
  grep -qF "\"file\": \"$PWD/$source\"" build/logs/commands/compile_commands.json && compiled+=("$source")
done
[ ${#compiled[@]} -gt 0 ] || { echo "clang_tidy.sh: no compiled source among ${#sources[@]}"; exit 0; }
printf '%s\n' "${compiled[@]}" | xargs -P "${KVPOOL_JOBS:-$(nproc)}" -n 1 clang-tidy --quiet -p build/logs/commands 2>/dev/null
echo "clang_tidy.sh: ${#compiled[@]} sources"
