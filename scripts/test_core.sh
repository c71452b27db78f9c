#!/usr/bin/env bash
# Runs the tests that use megatron-core with another version of it, in an environment beside .venv, which stays as it is.
# Without pytest arguments all of them run, and what passed is kept in benchmarks/results/core_VERSION.txt.
# Usage: ./scripts/test_core.sh VERSION [pytest arguments]        e.g. ./scripts/test_core.sh 0.16.0
# Versions from 0.17 on need Python 3.12. Where .venv has an older one, the tests run in a Debian 13 (scripts/debian13.sh), whose
# .venv takes torch from the package index: 5 GB on the disk, a few minutes.
# Add the version to TESTED_CORE_VERSIONS in spare_megatron/megatron_adapter/versions.py first (jobs refuse others), and
# leave it there if this passes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=${1:?usage: ./scripts/test_core.sh VERSION [pytest arguments]}
python=${PYTHON:-python3}
case $version in
  0.16.*) ;;
  *) if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then exec ./scripts/debian13.sh ./scripts/test_core.sh "$@"; fi ;;
esac
shift
./scripts/setup.sh
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

# an environment that has only megatron-core and finds everything else in .venv
beside=.venv-core-$version
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ ! -f "$beside/ready" ]; then
  .venv/bin/python -m venv --without-pip "$beside"
  own=$("$beside/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  packages=("megatron-core==$version")
  case $version in 0.16.* | 0.17.*) ;; *) packages+=(emerging-optimizers==0.3.0) ;; esac # Muon and Lion are tested from 0.18 on
  .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --target "$own" "${packages[@]}"
  echo "import site; site.addsitedir('$site')" >"$own/rest_of_the_environment.pth"
  touch "$beside/ready"
fi
found=$("$beside/bin/python" -c 'import importlib.metadata as m; print(m.version("megatron-core"))')
[ "$found" = "$version" ] || { echo "test_core.sh: megatron-core $found is found instead of $version" >&2; exit 1; }
tests=(tests/megatron/test_{core_flags,settings,pretrain_gpt,engine,parity,exact,masking,checkpointing,distributed_state}.py)
tests+=(tests/megatron/test_{transferred_state,users_script,data,ademamix,optimizers}.py)
python=$beside/bin/python
if [ $# -gt 0 ]; then exec "$python" -m pytest -m "not full" "$@"; fi
kept=benchmarks/results/core_$version.txt
{
  echo "./scripts/test_core.sh $version, $(date -u +%FT%TZ), commit $(git rev-parse --short HEAD), $(nproc --all) cores"
  "$python" -c 'import platform, torch; print("Python", platform.python_version(), "torch", torch.__version__)'
} | tee "$kept"
"$python" -m pytest --no-header -m "not full" -rs -v "${tests[@]}" 2>&1 | tee -a "$kept"
