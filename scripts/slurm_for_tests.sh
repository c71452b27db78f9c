#!/usr/bin/env bash
# Installs Debian's Slurm and munge for the tests where they are missing. It starts no daemons: the tests run their own.
# Without root or apt-get it prints what is missing, and the tests of Slurm are skipped.
set -euo pipefail
export PATH="$PATH:/usr/sbin"
if command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "slurm_for_tests.sh: slurm-wlm and munge are not installed, and installing them needs root and apt-get;" \
    "the tests of Slurm are skipped" >&2
  exit 0
fi
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then # the packages must not start services
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
log=$(mktemp)
echo "Installing slurm-wlm and munge for the tests ..."
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
  slurm-wlm munge; } >"$log" 2>&1; then
  tail -5 "$log" >&2
  echo "slurm_for_tests.sh: apt-get could not install slurm-wlm and munge (see above); install them, or run the tests" \
    "with --ignore=tests/slurm" >&2
  rm -f "$log"
  exit 1
fi
rm -f "$log"
