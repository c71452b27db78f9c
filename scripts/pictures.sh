#!/usr/bin/env bash
# Draws all pictures of README.md and docs/ anew: screenshots of a real run, and plots of benchmarks/results.
# Needs Chromium (scripts/packages_for_tests.sh chromium). Usage: ./scripts/pictures.sh [--plots-only]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
exec .venv/bin/python benchmarks/pictures.py "$@"
