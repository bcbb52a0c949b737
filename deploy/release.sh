#!/usr/bin/env bash
# Makes and tests all that a release has, and leaves it in build/dist with SHA-256 sums. Usage (as root): deploy/release.sh
#
# The version is project(VERSION) in CMakeLists.txt; CHANGELOG.md must have a section for it, and the tree no changes. The packages are
# installed in a minimal Debian, where the sdist is compiled too, and the wheel meets that of the release before, which is the last tag. It
# takes half an hour on two cores, and tests/run.sh, which is to pass before, another 50 minutes.
#
#   KVPOOL_LAST_RELEASE=WHAT   a wheel or a git revision, in place of the last tag
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/lib.sh

die() { echo "release: $*" >&2; exit 1; }
[ $# = 0 ] || { sed -n '2,/^set/{s/^# \{0,1\}//;/^set/!p}' "$0"; exit 2; }
[ "$(id -u)" = 0 ] || die "needs root, to install packages in a minimal Debian"
[ -z "$(git status --porcelain)" ] || die "the tree has changes that no commit has"
version=$(sed -n 's/^project(kvpool VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
grep -qx "## $version" CHANGELOG.md || die "CHANGELOG.md has no section $version"
for file in deploy/kubernetes/base/kustomization.yaml deploy/README.md deploy/Dockerfile; do
  grep -qF -e "kvpool:$version " -e "newTag: $version" $file || die "$file names another version"
done

# A test is skipped, with status 77, where it can't run: nothing is released there.
say "kvpool $version: packages (deploy/install_deps.sh test)"
step release-packages deploy/install_deps.sh test
say "what is installed (build/release)"
step release-build build release kvpool_wheel kvpool_debian
say "cmake --install, and engines that have only that (tests/package/install_test.sh)"
step release-install tests/package/install_test.sh "$PWD" "$PWD/build/release" "$version"
say "the wheel, in minimal Debians with Python 3.11, 3.13 and 3.14 (tests/package/wheel_test.sh)"
step release-wheel tests/package/wheel_test.sh "$PWD" "$version" bookworm
for debian in trixie forky; do
  step release-wheel-$debian tests/package/wheel_test.sh "$PWD" "$version" $debian --no-build
done
last=${KVPOOL_LAST_RELEASE:-$(git describe --tags --abbrev=0 --match='v*' 2>/dev/null || true)}
if [ -n "$last" ]; then
  say "engines and daemons of this release and of $last (tests/compat/releases_test.sh)"
  step release-compat tests/compat/releases_test.sh "$last" build/dist/kvpool-"$version"-*.whl
else
  say "not run: tests/compat/releases_test.sh: no tag v*, so this is the first release"
fi
say "the Debian packages, on a minimal Debian that runs systemd (tests/package/deb_test.sh)"
step release-deb tests/package/deb_test.sh "$PWD" "$version"
say "the sdist, compiled and installed in a minimal Debian (tests/package/sdist_test.sh)"
step release-sdist tests/package/sdist_test.sh "$PWD" "$version"
(cd build/dist && sha256sum kvpool-*.whl kvpool-*.tar.gz ./*.deb >SHA256SUMS && cat SHA256SUMS)
say "done: build/dist. To do: tests/run.sh, git tag v$version, tests/compat/record.sh"
