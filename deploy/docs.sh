#!/usr/bin/env bash
# Makes the API pages in build/docs: C and C++ by Doxygen, Python by pdoc, the protos by a script. Any warning is an error.
# Usage: deploy/docs.sh
#
# Needs deploy/install_deps.sh test, and build/release for the Python module. Exit status 77: one of these is not here.
set -euo pipefail
cd "$(dirname "$0")/.."
python=build/deps/python/bin/python
module=build/release/client/python

for needed in doxygen protoc $python build/deps/python/bin/pdoc; do
  command -v "$needed" >/dev/null || { echo "docs.sh: $needed is not here: deploy/install_deps.sh test installs it"; exit 77; }
done
[ -f $module/kvpool/_core.pyi ] || { echo "docs.sh: $module has no kvpool: build the release preset"; exit 77; }
rm -rf build/docs
mkdir -p build/docs/protos

doxygen deploy/docs/Doxyfile
protoc -I proto --include_source_info -o build/docs/protos/kvpool.v1.binpb proto/kvpool/v1/*.proto
$python -B deploy/docs/protos.py build/docs/protos/kvpool.v1.binpb >build/docs/protos/index.html
PYTHONPATH=$module PYTHONDONTWRITEBYTECODE=1 $python -W error -m pdoc --output-directory build/docs/python kvpool
cat >build/docs/index.html <<'HTML'
<!doctype html><html lang="en"><meta charset="utf-8"><title>kvpool</title><h1>kvpool</h1>
<ul><li><a href="protos/index.html">protos</a><li><a href="cpp/kvpool_8h.html">C</a><li><a href="cpp/annotated.html">C++</a>
<li><a href="python/kvpool.html">Python</a></ul>
HTML
echo "build/docs/index.html"
