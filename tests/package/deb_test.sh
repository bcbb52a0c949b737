#!/usr/bin/env bash
# The Debian packages on a minimal Debian 12 that runs systemd: installed, started, used, upgraded, removed, purged. Then what
# `cmake --install` installs, with what the packages depend on and without the sources.
# Usage: deb_test.sh SOURCES VERSION [--no-build]
#
# It fetches what the packages depend on, and systemd and compilers, some 100 MB.
set -euo pipefail
root=$1 version=$2 debian=bookworm
. "$root/tests/package/bare_tree.sh"
[ "${3:-}" = --no-build ] || "$root/deploy/deb.sh" --no-deps
fail() { echo "deb_test: $*" >&2; exit 1; }

echo "== lintian, and what the unit leaves open"
lintian --tag-display-limit 0 "$root"/build/dist/*.deb >"$tree/lintian" || true
if grep '^E:' "$tree/lintian"; then fail "lintian has errors"; fi
cut -d: -f1 "$tree/lintian" | sort | uniq -c
exposure=$(systemd-analyze security --offline=true "$root/deploy/debian/kvpoold.service" | sed -n 's/.*exposure level.*: \([0-9.]*\) .*/\1/p')
echo "exposure: $exposure"
awk "BEGIN { exit !($exposure < 2.0) }" || fail "systemd-analyze security says $exposure; the limit is 2.0"

echo "== systemd, and what the packages need, are fetched"
cp -L /etc/resolv.conf /etc/hosts "$tree/etc/"
mkdir "$tree/srv/debs" "$tree/srv/next"
cp "$root"/build/dist/*.deb "$tree/srv/debs"
cp "$root"/client/examples/engine.{c,cc} "$root/tests/package/completions_test.zsh" "$tree/srv/debs"
cp -r "$root/client/examples" "$tree/srv/examples"
# The lines of deploy/README.md, word for word.
readme_lines deploy/README.md kvpoold_ >"$tree/srv/service"
readme_lines deploy/README.md libkvpool0_ >"$tree/srv/libraries"
readme_lines deploy/README.md pkg-config >"$tree/srv/compile"
readme_lines deploy/README.md 'cmake --install' >"$tree/srv/prefix"
printf 'APT::Get::Assume-Yes "true";\nAPT::Install-Recommends "false";\n' >"$tree/etc/apt/apt.conf.d/answers"
printf '#!/bin/sh\nexec "$@"\n' >"$tree/usr/bin/sudo" && chmod +x "$tree/usr/bin/sudo"
# The same kvpoold with a later version, to upgrade to.
dpkg-deb -R "$root"/build/dist/kvpoold_*.deb "$tree/srv/kvpoold"
sed -i 's/^Version: .*/&.1/' "$tree/srv/kvpoold/DEBIAN/control"
dpkg-deb --root-owner-group -b "$tree/srv/kvpoold" "$tree/srv/next" >/dev/null
# And one of before there were rules of access, with another kvpoold.conf.
sed -i 's/^Version: .*/Version: 0.0.9/' "$tree/srv/kvpoold/DEBIAN/control"
sed -i /access.conf/d "$tree/srv/kvpoold/DEBIAN/conffiles" "$tree/srv/kvpoold/DEBIAN/md5sums" "$tree/srv/kvpoold/etc/kvpool/kvpoold.conf"
rm "$tree/srv/kvpoold/etc/kvpool/access.conf"
sed -i 's| --access=[^ ]*||' "$tree/srv/kvpoold/lib/systemd/system/kvpoold.service"
mkdir "$tree/srv/earlier"
dpkg-deb --root-owner-group -b "$tree/srv/kvpoold" "$tree/srv/earlier" >/dev/null
inside --net '
  export DEBIAN_FRONTEND=noninteractive
  apt-get -q -q update
  apt-get -q -q -y install --no-install-recommends systemd systemd-sysv cmake g++ make pkg-config zsh >/dev/null
  apt-get -q -q -y install --no-install-recommends --download-only /srv/debs/*.deb
' >"$tree/fetched" 2>&1 || { tail -n 20 "$tree/fetched" >&2; fail "apt-get"; }

echo "== installed, and started by systemd"
boot
booted 'cd /srv/debs && USER=nobody && . /srv/service' >/dev/null
booted '
  id --name --groups nobody | grep -w kvpool
  gpasswd --delete nobody kvpool
  systemctl is-active kvpoold.service
  systemctl is-enabled kvpoold.service
  kvpoolctl health --wait=30s
  [ "$(stat -c %U:%G:%a /run/kvpool/kvpoold.sock)" = kvpool:kvpool:660 ]
  [ "$(stat -c %U "/proc/$(systemctl show --value -p MainPID kvpoold)")" = kvpool ]
  kvpoold --version
  # Nobody outside the group is let in.
  if setpriv --reuid nobody --regid nogroup --clear-groups kvpoolctl health 2>/dev/null; then exit 1; fi
  # Who is in it runs engines and looks on; root operates.
  member="setpriv --reuid nobody --regid nogroup --groups kvpool kvpoolctl"
  $member sessions
  if $member drain 2>/tmp/refused; then exit 1; fi
  grep -q "Drain needs the role operator" /tmp/refused
  systemctl reload kvpoold
  # Manual pages say what --help says.
  for page in man8/kvpoold.8 man1/kvpoolctl.1 man1/kvpool-replay.1 man1/kvpool-sim.1 man1/kvpool-lab.1; do
    zcat /usr/share/man/$page.gz | grep -q "^\.SH DESCRIPTION"
  done
  zcat /usr/share/man/man8/kvpoold.8.gz | grep -q capacity
  # Completion of commands and flags.
  . /usr/share/bash-completion/completions/kvpoolctl
  _kvpool kvpoolctl se
  [ "${COMPREPLY[*]}" = sessions ]
  _kvpool kvpoold --cap
  [ "${COMPREPLY[*]}" = --capacity= ]
  _kvpool kvpool-sim adv
  [ "${COMPREPLY[*]}" = advise ]
  zsh -f /srv/debs/completions_test.zsh
'
echo "== used, by engines in C and C++ that are compiled there"
booted '
  cd /srv/debs
  . /srv/libraries >/dev/null
  . /srv/compile
  unset KVPOOL_SOCKET
  [ "$(./engine_c)" = "0 of 1024 tokens were cached" ]
  [ "$(./engine_c)" = "1024 of 1024 tokens were cached" ]
  [ "$(./engine)" = "0 of 64 blocks were cached" ]
  [ "$(./engine)" = "64 of 64 blocks were cached" ]
  cmake -S /srv/examples -B /tmp/by_cmake >/dev/null
  cmake --build /tmp/by_cmake >/dev/null
  [ "$(/tmp/by_cmake/engine_example)" = "64 of 64 blocks were cached" ]
  [ "$(/tmp/by_cmake/engine_example_c)" = "1024 of 1024 tokens were cached" ]
'
echo "== configured: the file is kept when the package is upgraded, and the new program serves"
booted '
  sed -i "s/^#capacity = .*/capacity = 96MiB/" /etc/kvpool/kvpoold.conf
  systemctl restart kvpoold
  kvpoolctl health --wait=30s
  before=$(systemctl show -p MainPID kvpoold)
  apt-get -q -q -y install /srv/next/kvpoold_*.deb >/dev/null
  kvpoolctl health --wait=30s
  [ "$before" != "$(systemctl show -p MainPID kvpoold)" ]
  grep -q "^capacity = 96MiB" /etc/kvpool/kvpoold.conf
  [ "$(dpkg-query -W -f "\${Version}" kvpoold)" = "'"$version"'.1" ]
  # It ends on SIGTERM with status 0, and a killed one is started again.
  systemctl kill -s KILL kvpoold && sleep 0.1
  for i in $(seq 100); do kvpoolctl health --wait=1s >/dev/null 2>&1 && break; sleep 0.1; done
  systemctl stop kvpoold
  [ "$(systemctl show -p Result kvpoold)" = Result=success ]
  systemctl start kvpoold
'
echo "== removed: the service has ended, and the configuration is left; purged: nothing is"
booted '
  apt-get -q -q -y remove kvpoold >/dev/null
  [ "$(systemctl show --value -p MainPID kvpoold)" = 0 ]
  [ -f /etc/kvpool/kvpoold.conf ]
  [ -f /etc/kvpool/access.conf ]
  apt-get -q -q -y purge kvpoold kvpool-tools libkvpool0 libkvpool-dev >/dev/null
  if find /etc/kvpool /var/lib/kvpool /lib/systemd/system/kvpoold.service /usr/lib/sysusers.d/kvpool.conf 2>/dev/null | grep .; then exit 1; fi
'
echo "== upgraded from before there were rules of access, with settings of that time that are kept: the rules are in force"
booted '
  cd /srv/debs
  apt-get -q -q -y install /srv/earlier/kvpoold_*.deb >/dev/null
  echo "capacity = 80MiB" >>/etc/kvpool/kvpoold.conf
  apt-get -q -q -y -o Dpkg::Options::=--force-confold install ./kvpoold_*.deb ./kvpool-tools_*.deb >/dev/null
  kvpoolctl health --wait=30s
  grep -q "^capacity = 80MiB" /etc/kvpool/kvpoold.conf
  setpriv --reuid nobody --regid nogroup --groups kvpool kvpoolctl sessions
  apt-get -q -q -y purge kvpoold kvpool-tools >/dev/null
'
echo "== what cmake --install installs below a prefix, used where the packages are gone"
(cd "$root" && DESTDIR=$tree bash -euo pipefail -c "$(head -n 1 "$tree/srv/prefix")" >"$tree/prefix_installed")
sed -i 1d "$tree/srv/prefix"
booted '
  if command -v kvpoold || pkg-config --exists kvpool; then exit 1; fi
  . /srv/prefix
  cd /srv/debs
  . /srv/compile
  cmake -S /srv/examples -B /tmp/by_prefix >/dev/null
  cmake --build /tmp/by_prefix >/dev/null
  export KVPOOL_SOCKET=/tmp/kvpoold.sock
  kvpoold --device=host --capacity=256MiB --state-dir=/tmp --socket=$KVPOOL_SOCKET --metrics-listen= --shutdown-grace=100ms >/tmp/log 2>&1 &
  kvpoolctl health --wait=30s
  [ "$(./engine)" = "0 of 64 blocks were cached" ]
  [ "$(/tmp/by_prefix/engine_example)" = "64 of 64 blocks were cached" ]
  [ "$(/tmp/by_prefix/engine_example_c)" = "0 of 1024 tokens were cached" ]
  [ "$(./engine_c)" = "1024 of 1024 tokens were cached" ]
  kill % && wait %
'
