#!/usr/bin/env bash
# Installs Debian's Chromium and its driver for the tests of spare-page where they are missing.
# Without root or apt-get it prints what is missing, and these tests are skipped.
set -euo pipefail
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "chromium_for_tests.sh: chromium and chromium-driver are not installed, and installing them needs root and apt-get;" \
    "the tests of the page in a browser are skipped" >&2
  exit 0
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "Installing chromium and chromium-driver for the tests ..."
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
  chromium chromium-driver; } >"$log" 2>&1; then
  tail -5 "$log" >&2
  echo "chromium_for_tests.sh: apt-get could not install chromium and chromium-driver (see above); the tests of the page" \
    "in a browser are skipped" >&2
fi
