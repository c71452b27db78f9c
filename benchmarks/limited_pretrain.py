"""pretrain_gpt.py with kernels that use no newer instruction set than SPARE_BENCHMARK_LEVEL names (avx2 or avx512).

benchmarks/step_overhead.py --level starts it; torch and its libraries are limited by their own variables.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import torch

from spare_megatron.kernels import dispatch, native

LEVEL = "SPARE_BENCHMARK_LEVEL"

if __name__ == "__main__":
    library = dispatch.kernels(torch.device("cpu"))
    assert isinstance(library, native.CpuLibrary), "there are no native kernels to limit"
    wanted = os.environ[LEVEL]
    assert library.limit(wanted) == wanted, f"this machine has no {wanted}"
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "pretrain_gpt.py"), run_name="__main__")
