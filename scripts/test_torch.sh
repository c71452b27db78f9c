#!/usr/bin/env bash
# Runs tests with another version of torch, in an environment beside .venv, which stays as it is. torch comes from the package
# index: some 5 GB on the disk, a few minutes.
# Without pytest arguments all tests that use megatron-core run, about 10 minutes on two cores.
# Usage: ./scripts/test_torch.sh VERSION [pytest arguments]        e.g. ./scripts/test_torch.sh 2.14.1 tests/process
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=${1:?usage: ./scripts/test_torch.sh VERSION [pytest arguments]}
shift
./scripts/setup.sh
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

# an environment that has torch and what it needs, and finds everything else in .venv
beside=.venv-torch-$version
if [ ! -f "$beside/ready" ]; then
  .venv/bin/python -m venv "$beside"
  "$beside/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile --no-cache-dir "torch==$version"
  site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  own=$("$beside/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$site')" >"$own/rest_of_the_environment.pth"
  touch "$beside/ready"
fi
export PATH=$PWD/$beside/bin:$PATH
python -c 'import platform, torch; print("Python", platform.python_version(), "torch", torch.__version__)'
[ $# -gt 0 ] || set -- -n 2 --dist loadfile --no-loadscope-reorder tests/megatron
exec python -m pytest -m "not full and not alone" "$@"
