"""Nothing in the package is there for nobody: vulture finds no name that only its definition, or a test, has.

Names that are read by others, or by name, are listed with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USED_BY = ("spare_megatron", "benchmarks", "tools", "scripts", "pretrain_gpt.py", "pretrain_hybrid.py")
CONFIDENCE = 60
"""Percent; vulture's own default."""
READ_BY_NAME = {
    "spare_megatron/config/sections.py": "fields are flags, which the parser and megatron-core's dataclasses read",
    "spare_megatron/flags/": "values of a namespace of flags that megatron-core reads",
    "spare_megatron/megatron_adapter/": "attributes and methods that torch and megatron-core read and call",
    "spare_megatron/training/": "names that users' scripts import, and arguments that they give",
    "spare_megatron/monitor/trace_files.py": "fields of protobuf messages",
}
"""Path or folder -> why its names may be read nowhere in the package."""
EXCEPTIONS = {
    "called by torch": (
        *("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "load_bytes", "resolve_tensor"),
        *("commit_tensor", "multi_set", "compare_set", "delete_key", "num_keys", "has_extended_api"),
    ),
    "read by torch": (
        *("_timeout", "blocking", "is_high_priority_stream", "reduceOp", "rootRank", "rootTensor"),
        "barrier_with_L1_time",
    ),
    "called by io, grpc and aiohttp": ("writable", "intercept_service"),
    "read by numpy, tempfile and Python": ("writeable", "tempdir", "__class__", "ORIGINAL_DIR", "authkey"),
    "read by compiled code, or an outcome of it": (
        *("other_type", "source_type", "packed_in", "packed_out", "NO_POLL", "SHORTAGE", "UNEVEN"),
    ),
    "read by a template": ("HEIGHT",),
    "read by name: results, flags, checkpoints": (
        *("steps_recomputed", "allow_untested_core", "consumed_train_samples", "expert_layers"),
    ),
    "imported by users' scripts, with Megatron's arguments": (
        *("__getattr__", "__dir__", "carry_state", "set_startup_timestamps"),
        *("launch_script_start", "launch_script_presrun", "slurm_job_start_time"),
    ),
    "kept in the journal's snapshots since 0.1.0": ("recoveries",),
    "part of a figure that documents show": ("gemm",),
    "tests divide work among threads by it": ("bytes_per_thread",),
}
"""Reason -> names."""


def unused() -> Iterator[tuple[str, str]]:
    """(where, name) of each name that vulture takes for unused and that is not read by name."""
    from vulture import Vulture

    found = Vulture()
    found.scavenge([str(ROOT / path) for path in USED_BY], exclude=[str(ROOT / "*_pb2.py*")])
    for item in found.get_unused_code(min_confidence=CONFIDENCE):
        place = str(Path(item.filename).relative_to(ROOT))
        if place.startswith("spare_megatron/") and not place.startswith(tuple(READ_BY_NAME)):
            yield f"{place}:{item.first_lineno}", str(item.name)


def test_no_name_is_there_for_nobody() -> None:
    found, known = list(unused()), {name for names in EXCEPTIONS.values() for name in names}
    assert [f"{where}: {name}" for where, name in found if name not in known] == []
    assert known - {name for _, name in found} == set(), "exceptions that are none any more"
