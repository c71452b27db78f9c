#!/usr/bin/env bash
# Checks style, types, layers, then runs the tests. Usage: ./scripts/test.sh [--full] [pytest arguments]
#   --full   also runs the long test matrices, and writes benchmarks/results/full_tests.txt with the date
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
./scripts/slurm_for_tests.sh
./scripts/chromium_for_tests.sh
unset PYTHONDONTWRITEBYTECODE # each of some thousand processes would compile the package anew
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

ruff check .
ruff format --check .
mypy
lint-imports

if [ "${1:-}" = "--full" ]; then
  shift
  { date -u +%FT%TZ; git rev-parse HEAD; echo "$(nproc --all) cores; pytest $*"; } >benchmarks/results/full_tests.txt
  python -m pytest --no-header -v "$@" 2>&1 | tee -a benchmarks/results/full_tests.txt
elif [ $# -gt 0 ]; then
  python -m pytest -m "not full" "$@"
else
  # One worker more than cores (nproc would say OMP_NUM_THREADS): a test of processes waits a part of its time.
  workers=$(($(env -u OMP_NUM_THREADS nproc) + 1))
  python -m pytest -m "not full and not alone" -n "$workers" --dist worksteal tests
  python -m pytest -m "not full and alone" tests
fi
