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
  # Tests of one process, and such as wait for Slurm, share the cores (nproc would say OMP_NUM_THREADS); those that start
  # jobs need all of them.
  together=(-n "$(env -u OMP_NUM_THREADS nproc)" --dist worksteal)
  mapfile -t beside < <(grep -l pytest.mark.beside_others -r tests --include 'test_*.py' | sort)
  python -m pytest -m "not full" "${together[@]}" tests/pure tests/explore tests/kernels
  python -m pytest -m "not full and beside_others" "${together[@]}" "${beside[@]}"
  python -m pytest -m "not full and not beside_others" tests --ignore tests/pure --ignore tests/explore --ignore tests/kernels
fi
