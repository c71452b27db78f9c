#!/usr/bin/env bash
# Installs Debian's SimGrid, the independent engine that the simulator is checked against, where it is missing.
# Without root or apt-get, or where it cannot be installed, it says so, and that test is skipped.
set -euo pipefail
if /usr/bin/python3 -c 'import simgrid' 2>/dev/null; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "simgrid_for_tests.sh: python3-simgrid is not installed, and installing it needs root and apt-get;" \
    "the test against SimGrid is skipped" >&2
  exit 0
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq \
  --no-install-recommends python3-simgrid; } >"$log" 2>&1; then
  tail -5 "$log" >&2
  echo "simgrid_for_tests.sh: apt-get could not install python3-simgrid (see above); the test against SimGrid is skipped" >&2
fi
