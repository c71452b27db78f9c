#!/usr/bin/env bash
# Checks style, types and layers beside the tests; a failure of either fails. Usage:
#   ./scripts/test.sh [--quick | --full] [pytest arguments]
#   --quick  only the tests of pure functions, and one job that is killed and compared: two minutes
#   --full   also runs the long test matrices, with other random examples each time, and writes
#            benchmarks/results/full_tests.txt with the date
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
packages=
if [ "${1:-}" != "--quick" ]; then
  for one in slurm chromium simgrid; do ./scripts/packages_for_tests.sh "$one" || exit; done &
  packages=$!
fi
./scripts/setup.sh || { code=$?; wait; exit "$code"; }
[ -z "$packages" ] || wait "$packages"
unset PYTHONDONTWRITEBYTECODE # each of some thousand processes would compile the package anew
# Where a test has two threads of torch, the one that waits uses no core.
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONUNBUFFERED=1

ruff check .
ruff format --check .
# What programs forget in their temporary folder (torchrun, browsers, killed processes) goes with it. pytest's own
# folders of the last three runs stay, as ever.
scratch=$(mktemp -d) log=$scratch/types
trap 'rm -rf "$scratch"' EXIT
export PYTEST_DEBUG_TEMPROOT="${TMPDIR:-/tmp}" TMPDIR="$scratch"
{ renice -n 19 "$BASHPID" && (mypy && lint-imports); } >"$log" 2>&1 & # in the pauses of the tests
types=$!

# Four workers more than cores (nproc would say OMP_NUM_THREADS): a test of processes waits a part of its time, and
# those of Slurm, in two workers, nearly all of it. tests/conftest.py puts the longest files first.
together=(-n "$(($(env -u OMP_NUM_THREADS nproc) + 4))" --dist loadfile --no-loadscope-reorder)
code=0 killed="tests/process/test_masking.py::test_a_death_at_each_point_of_the_step[group]"
if [ "${1:-}" = "--quick" ]; then
  shift
  python -m pytest -m "not full and not alone" "${together[@]}" tests/pure "$killed" "$@" || code=$?
elif [ "${1:-}" = "--full" ]; then
  shift
  { date -u +%FT%TZ; git rev-parse HEAD; echo "$(nproc --all) cores; pytest $*"; } >benchmarks/results/full_tests.txt
  python -m pytest --no-header -v --hypothesis-profile random "$@" 2>&1 | tee -a benchmarks/results/full_tests.txt || code=$?
elif [ $# -gt 0 ]; then
  python -m pytest -m "not full" "$@" || code=$?
else
  # In a new clone each worker would compile all tests, all at the same time. What is wrong in them the run says.
  if [ ! -d tests/pure/__pycache__ ]; then
    python -m pytest --collect-only -q tests/pure >/dev/null &
    python -m pytest --collect-only -q tests --ignore=tests/pure >/dev/null || true
    wait $! || true
  fi
  python -m pytest -m "not full and not alone" "${together[@]}" tests || code=$?
  mapfile -t timed < <(grep -rl --include='*.py' 'mark\.alone' tests)
  python -m pytest -m "not full and alone" -n 3 --dist loadfile "${timed[@]}" || code=$?
fi

if wait "$types"; then
  echo "test.sh: types and layers are right"
else
  cat "$log"
  echo "test.sh: types or layers are wrong (above); pytest ended with $code" >&2
  code=1
fi
exit "$code"
