#!/usr/bin/env bash
# Builds deploy/Dockerfile without a docker engine or a registry, and runs what is in the image.
# Usage (as root): tests/image.sh
#
# buildah (from Debian) builds from the last commit, on a minimal Debian 12 made by debootstrap in place of
# debian:12. KVPOOL_BARE_BASE=DIR takes a tree that debootstrap made earlier; KVPOOL_BARE_DIR says where to
# work (default: /var/tmp). KVPOOL_CUDA_ROOT=none builds the image without CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "image: needs root, for debootstrap and chroot" >&2; exit 2; }
command -v buildah >/dev/null && command -v debootstrap >/dev/null ||
  apt-get -q -y install --no-install-recommends buildah debootstrap

scratch=$(mktemp -d "${KVPOOL_BARE_DIR:-/var/tmp}/kvpool-image.XXXXXX")
trap 'rm -rf --one-file-system "$scratch"' EXIT
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
bud() { buildah --root "$scratch/storage" --runroot "$scratch/run" "$@"; }

base=${KVPOOL_BARE_BASE:-$scratch/base}
if [ ! -d "$base" ]; then
  echo "image: debootstrap --variant=minbase bookworm $base"
  debootstrap --variant=minbase bookworm "$base" >"$scratch/debootstrap.log" 2>&1 || { tail -n 20 "$scratch/debootstrap.log" >&2; exit 1; }
fi
tar -C "$base" -cf "$scratch/base.tar" .
container=$(bud from scratch)
bud add -q "$container" "$scratch/base.tar" / >/dev/null
# The image gets the certificates that this machine's administrator trusts, so that builds reach the network
# as it does.
for certificate in /usr/local/share/ca-certificates/*.crt; do
  [ ! -e "$certificate" ] || bud copy -q "$container" "$certificate" /usr/local/share/ca-certificates/ >/dev/null
done
bud commit -q --rm "$container" docker.io/library/debian:12 >/dev/null
bud tag docker.io/library/debian:12 docker.io/library/debian:12-slim

mkdir "$scratch/context"
git archive HEAD | tar -x -C "$scratch/context"
echo "image: building deploy/Dockerfile"
bud build --pull-never --network host --build-arg "KVPOOL_CUDA_ROOT=${KVPOOL_CUDA_ROOT:-}" -f "$scratch/context/deploy/Dockerfile" -t kvpool:test "$scratch/context" >"$scratch/build.log" 2>&1 ||
  { tail -n 40 "$scratch/build.log" >&2; exit 1; }

container=$(bud from --pull-never localhost/kvpool:test)
for program in kvpoold kvpoolctl kvpool-replay; do
  bud run "$container" -- "$program" --help >/dev/null
  echo "image: $program --help: ok"
done
bud run "$container" -- bash -c '
  set -euo pipefail
  [ "$(id -u)" = 65532 ] || { echo "image: runs as uid $(id -u)"; exit 1; }
  # The programs that commands of the runbooks may use, as in tests/observability/runbooks_test.py.
  for program in cat cut grep head ls sort tail tr uniq wc; do command -v "$program" >/dev/null; done
  kvpoold --device=host --capacity=64MiB &
  daemon=$!
  trap "kill $daemon" EXIT
  until kvpoolctl health; do kill -0 $daemon; read -r -t 0.1 <> <(:) || true; done
  kvpoolctl status'
bud images --filter reference=kvpool
