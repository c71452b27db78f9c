#!/usr/bin/env bash
# Installs Debian's packages that some tests need, where they are missing: packages_for_tests.sh slurm|chromium|simgrid
# Without root or apt-get, or where they cannot be installed, it says so, and these tests are skipped. For Slurm that
# apt-get fails is an error. Slurm's daemons are not started: the tests run their own.
set -euo pipefail
export PATH="$PATH:/usr/sbin"
failed= # what to do where apt-get fails; empty: go on without
case "${1:-}" in
  slurm)
    there() { command -v slurmctld && command -v slurmd && command -v munged; }
    packages="slurm-wlm munge" tests="the tests of Slurm"
    failed="install them, or run the tests with --ignore=tests/slurm"
    ;;
  chromium)
    there() { command -v chromium && command -v chromedriver; }
    packages="chromium chromium-driver" tests="the tests of the page in a browser"
    ;;
  simgrid) # the independent engine that the simulator is checked against
    there() { /usr/bin/python3 -c 'import simgrid'; }
    packages="python3-simgrid" tests="the tests against SimGrid"
    ;;
  *)
    echo "packages_for_tests.sh: '${1:-}' is not known; use slurm, chromium or simgrid" >&2
    exit 2
    ;;
esac
if there >/dev/null 2>&1; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "packages_for_tests.sh: $packages: not installed, and installing needs root and apt-get; $tests are skipped" >&2
  exit 0
fi
log=$(mktemp)
policy=/usr/sbin/policy-rc.d
if [ -e "$policy" ]; then
  trap 'rm -f "$log"' EXIT
else # the packages must not start services
  trap 'rm -f "$log" "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
fi
echo "Installing $packages for the tests ..."
# shellcheck disable=SC2086 # several packages
if ! { timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y -qq \
  --no-install-recommends $packages; } >"$log" 2>&1; then
  tail -5 "$log" >&2
  echo "packages_for_tests.sh: apt-get could not install $packages (see above); ${failed:-$tests are skipped}" >&2
  [ -z "$failed" ]
fi
