"""Lists registers, shared memory and spilled bytes of each CUDA kernel, for each target, as ptxas reports them.

    python benchmarks/cuda_registers.py [--json FILE]

Needs nvcc, but no GPU: the figures describe the compiled code, not its speed.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report

ROOT = Path(__file__).resolve().parents[1]

_spec = importlib.util.spec_from_file_location("spare_megatron_setup", ROOT / "setup.py")
assert _spec
assert _spec.loader
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

_KERNEL = re.compile(
    r"Compiling entry function '(?P<kernel>\S+)' for.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def kernels_of(target: str, folder: Path) -> list[dict[str, object]]:
    """One row for each kernel of ``sm_<target>``; CalledProcessError when it does not compile."""
    flags = [flag for flag in build.CUDA_FLAGS if flag not in ("-cudart", "static")]
    source, out = str(ROOT / build.SOURCES / "cuda.cu"), str(folder / f"{target}.cubin")
    command = [build.nvcc() or "nvcc", *flags, "-Xptxas", "-v", f"-arch=sm_{target}", "-cubin", source, "-o", out]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [
        {
            "target": f"sm_{target}",
            "kernel": readable(found["kernel"]),
            "registers": int(found["registers"]),
            "spill_stores_bytes": int(found["stores"]),
            "spill_loads_bytes": int(found["loads"]),
        }
        for found in _KERNEL.finditer(done.stderr)
    ]


def readable(symbol: str) -> str:
    """The C++ name, where c++filt is there, without arguments."""
    try:
        name = subprocess.run(["c++filt", symbol], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return symbol
    return name.replace("(anonymous namespace)::", "").removeprefix("void ").split("(Spare")[0].split("(Batch")[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, help="result file (default: benchmarks/results/cuda_registers.json)")
    arguments = parser.parse_args()
    if build.nvcc() is None:
        sys.exit("cuda_registers: there is no nvcc on the PATH; set NVCC to its path")
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for target in build.CUDA_TARGETS for row in kernels_of(target, Path(folder))]
    version = subprocess.run([build.nvcc() or "nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    config = {"nvcc": version.splitlines()[-2].strip(), "flags": " ".join(build.CUDA_FLAGS)}
    print(f"written to {report('cuda_registers', config, rows, arguments.json)}")


if __name__ == "__main__":
    main()
