#!/usr/bin/env bash
# Sets up .venv in the repository root: the package, editable, with the pinned versions of constraints.txt.
# Does nothing when it is already set up for these files. Usage: ./scripts/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "setup.sh: $python is not Python 3.11 or newer (3.11 to 3.13 are tested); set PYTHON to one that is" >&2
  exit 1
fi

stamp=.venv/spare_megatron.stamp
want=$(cat setup.py pyproject.toml constraints.txt kernels/* | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  exit 0
fi

echo "Setting up .venv (the first time takes about two minutes; torch and megatron-core are the large parts) ..."
if ! "$python" -m venv .venv; then
  echo "setup.sh: python3 cannot make virtual environments here; on Debian: apt-get install python3-venv" >&2
  exit 1
fi
# The package is built, its libraries by the C++ compiler, while pip looks for all that it needs.
install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt)
mapfile -t needed < <(.venv/bin/python -c '
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
for one in (*project["dependencies"], *extras["test"]):
    name, _, own = one.partition("[")
    print(*(extra for each in own.strip("]").split(",") for extra in extras[each]) if name == project["name"] else [one], sep="\n")
')
"${install[@]}" "${needed[@]}" &
others=$!
"${install[@]}" --no-deps -e . || { kill "$others"; wait "$others" || true; exit 1; }
wait "$others"
# pip would compile its 15,000 files on one core (41 s of its time), compileall does on all of them; without the largest
# packages of which nearly nothing is imported.
rarely='/(transformers|sympy|networkx|pip|setuptools|mypy|selenium|wandb|torch/(_inductor|testing|onnx|ao))/'
.venv/bin/python -m compileall -q -j 0 -x "$rarely" .venv/lib/python3*/site-packages spare_megatron >/dev/null 2>&1 || true
.venv/bin/python -c 'from spare_megatron import kernels; print(kernels.why_slow("cpu"), end="")' | sed 's/^/setup.sh: /'
echo "$want" >"$stamp"
