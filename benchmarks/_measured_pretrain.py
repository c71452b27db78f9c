"""pretrain_gpt.py that writes what a rank's memory was at the end into a folder that SPARE_BENCHMARK_LINES names:
bytes of the optimizers' tensors, elements of the parameters, and of the process the greatest resident memory.

benchmarks/state_memory.py starts it.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

from spare_megatron.megatron_adapter.megatron_engine import MegatronEngine

LINES = "SPARE_BENCHMARK_LINES"
MADE: list[Any] = []
ROOT = Path(__file__).resolve().parents[1]


def measured(engine: Any) -> dict[str, int]:
    """Of a rank that has trained."""
    kept: dict[int, int] = {}
    model = {one.untyped_storage().data_ptr() for chunk in engine.replica.chunks for one in chunk.parameters()}
    for part in engine.replica.optimizer.chained_optimizers:
        mains = [one for group in part.param_groups for one in group["params"]]
        for tensor in (*mains, *(one for state in part.optimizer.state.values() for one in state.values())):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in model:
                kept[storage.data_ptr()] = storage.nbytes()
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
    return {
        "elements": sum(one.numel() for chunk in engine.replica.chunks for one in chunk.parameters()),
        "optimizer_bytes": sum(kept.values()),
        "resident_bytes": sizes["VmRSS"],
        "most_resident_bytes": sizes["VmHWM"],
    }


def main() -> None:
    """Train, then write."""
    begin = MegatronEngine.__init__

    def noted(engine: Any, *given: Any, **named: Any) -> None:
        begin(engine, *given, **named)
        MADE.append(engine)

    MegatronEngine.__init__ = noted  # type: ignore[method-assign]
    try:
        runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
    finally:
        name = f"{os.environ['SPARE_GROUP']}.json"
        (Path(os.environ[LINES]) / name).write_text(json.dumps(measured(MADE[-1])))


if __name__ == "__main__":
    main()
