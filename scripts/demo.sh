#!/usr/bin/env bash
# Sets everything up and runs the demo: a GPT trains on real text, a whole group is killed during the gradient reduction,
# and the job goes on; then the same job runs without the failure, and both are compared. Usage: ./scripts/demo.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
exec .venv/bin/python tools/demo.py "$@"
