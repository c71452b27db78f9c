#!/usr/bin/env bash
# Runs a command in a Debian 13, whose python3 is 3.13, with this repository at its own path and a .venv of its own there.
# Usage: ./scripts/debian13.sh COMMAND...        e.g. ./scripts/debian13.sh ./scripts/demo.sh
# For a machine with an older Python: megatron-core 0.17 and newer need 3.12. Needs root, and installs debootstrap where it is
# missing; the first time the system is laid into runs/debian-13 (a minute, 600 MB with its compiler).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -gt 0 ] || { sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}"; exit 2; }
[ "$(id -u)" = 0 ] || { echo "debian13.sh: needs root, for debootstrap and chroot; or set PYTHON to a Python 3.12 or 3.13" >&2; exit 1; }
root=$PWD/runs/debian-13
if ! command -v debootstrap >/dev/null; then
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends debootstrap; } >/dev/null
fi
if [ ! -f "$root/ready" ]; then
  rm -rf "$root"
  mkdir -p "$root"
  echo "Laying a Debian 13 into runs/debian-13 ..."
  debootstrap --variant=minbase \
    --include=python3,python3-venv,python3-dev,g++,ca-certificates,git,iproute2,iptables,procps trixie "$root" \
    >"$root.log" || { tail -5 "$root.log" >&2; exit 1; }
  touch "$root/ready"
fi
mkdir -p .venv runs/debian-13-venv
cp /etc/resolv.conf /etc/hosts "$root/etc/"
# mounts of a namespace of its own: they end with the command
exec unshare --mount --propagation private bash -euc '
  root=$1 here=$2
  shift 2
  for part in proc sys dev etc/ssl; do mount --rbind "/$part" "$root/$part"; done
  mount -t tmpfs tmpfs "$root/tmp"
  mkdir -p "$root$here"
  mount --bind "$here" "$root$here"
  mount --bind "$here/runs/debian-13-venv" "$root$here/.venv"
  cd "$root$here"
  exec chroot "$root" /usr/bin/env -u LD_LIBRARY_PATH -u PYTHON HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    sh -c "cd \"\$0\" && exec \"\$@\"" "$here" "$@"' debian13.sh "$root" "$PWD" "$@"
