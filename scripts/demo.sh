#!/usr/bin/env bash
# Sets everything up and shows the main job: a GPT trains on real text, a whole group is killed inside the gradient
# reduction, the job goes on; then the same job without the failure, and the comparison. Usage: ./scripts/demo.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
exec .venv/bin/python tools/demo.py "$@"
