#!/usr/bin/env bash
# Makes one folder with all that a machine with a GPU needs to run everything that needs one: our binaries, the libraries they
# were linked with, and run.sh. It can be copied anywhere; there, only the C library of the machine is used. FOLDER.tar.xz has it packed.
# Usage: tests/gpu/build.sh [FOLDER]      (build/gpu)
set -euo pipefail
cd "$(dirname "$0")/../.."
. deploy/lib.sh

folder=${1:-build/gpu}
binaries=(gpu_facts device_contract_test device_peer stamper_test fence_events_test block_copier_test engine_test
          scorers_test score_timings gpu_tier_test copy_timings kvpoold kvpoolctl kvpool-replay)
limit_mib=60  # It is copied, packed, to a machine each time.

if [ ! -e build/deps/cuda_root ]; then
  say "packages (deploy/install_deps.sh)"
  step gpu-packages deploy/install_deps.sh build
fi
say "building ${binaries[*]} (build/release; log: build/logs/gpu-build.log)"
step gpu-build build release "${binaries[@]}" fake_cuda

rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/lib" "$folder/fake"
for binary in "${binaries[@]}"; do
  strip -o "$folder/bin/$binary" "build/release/bin/$binary"
done
strip -o "$folder/fake/libcuda.so.1" build/release/lib/fake_cuda/libcuda.so.1
# All libraries but the C library's own, which go with the loader of the machine.
ldd "$folder"/bin/* | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -vE '/(libc|libm|libdl|libpthread|librt|libresolv)\.so\.[0-9]+$' | xargs cp -Lt "$folder/lib"
cp tests/gpu/run.sh tests/scorers/vectors.json tests/scorers/scenarios.json tests/scorers/{merge,drift,low}.json "$folder/"
# Tests in Python, for the engines that the machine has.
mkdir -p "$folder/engines/engines" "$folder/engines/python"
cp tests/engines/{conftest,models,transformers_test}.py "$folder/engines/engines/"
cp tests/python/daemon.py "$folder/engines/python/"

needs=$(objdump -T "$folder"/bin/* "$folder"/lib/* | grep -oE 'GLIBC_2\.[0-9]+' | sort -uV | tail -n 1)
rm -f "$folder.tar.xz"
# The binaries have the same kernels in them, which xz finds again.
python3 - "$folder" <<'EOF'
import pathlib, sys, tarfile
folder = pathlib.Path(sys.argv[1])
with tarfile.open(f"{folder}.tar.xz", "w:xz") as packed:
    packed.add(folder, folder.name)
EOF
mib=$(du -m "$folder.tar.xz" | cut -f 1)
say "$folder.tar.xz: $mib MiB, needs glibc ${needs#GLIBC_} or later; unpack it on a machine with a GPU and run its run.sh there"
[ "$mib" -lt $limit_mib ] || { say "FAILED: $folder.tar.xz has $mib MiB, the limit is $limit_mib"; exit 1; }
