"""The framework's own flags, ``--spare-*``: what Megatron has no word for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spare_megatron.config.flags import flag


@dataclass(frozen=True)
class SpareConfig:
    """How a job masks failures. Each field is the flag ``--spare-<field>``; ``None`` of an 'auto' flag is auto."""

    redundancy: int | None = flag(None, kind="int-or-auto")
    """r: on how many groups each shard of the data lies. auto: all with shared data; else by the number of groups, and
    with --save, from the second start of a job on, by the figures that it measured."""
    granularity: Literal["microbatch", "shard"] = "microbatch"
    """The smallest unit that moves to another group after a failure."""
    placement: Literal["independent", "consecutive"] = "independent"
    """Which groups host a shard: offsets of pairwise distinct differences, or neighbours."""
    data: Literal["shared", "staged"] = "staged"
    """staged: a group reads only the shards that it hosts; shared: every group can read all data."""
    reduce: Literal["exact", "exact32", "fp32", "bf16"] = "exact"
    """How gradients are summed over groups."""
    audit_rate: float = 0.0
    """Share of the pieces that a second group computes again to find silent corruption."""
    allow_untested_core: bool = False
    """Run with a megatron-core version that the tests have not seen."""
    comm: Literal["auto", "nccl", "gloo"] = "auto"
    """Backend of the sums over groups; gloo with CUDA tensors is staged through pinned host memory."""
    run_dir: str | None = None
    """Directory of the job's records; spare-launch makes one when it is not given."""
    coordinator: str | None = None
    """HOST:PORT of the coordinator; read from the run directory when it is not given."""
    heartbeat_timeout_s: float = 5.0
    """Silence of a rank after which its group counts as dead."""
    progress_timeout_s: float | None = None
    """Time a rank may stand still while others wait for it, before its group counts as dead; 60, or 12 times the
    heartbeat time-out where that is more."""
    no_async_save: bool = False
    """Let training wait until a checkpoint is written and counts, instead of writing it beside the training."""
    keep_checkpoints: int | None = None
    """The newest so many checkpoints are kept, older ones removed; all without it, two with --save-retain-interval."""
    min_groups: int | None = None
    """Groups that must be there to begin once the start-up time is over; one when it is not given."""
    max_group_restarts: int = 0
    """Restarts of one lost group; 0: it stays lost."""
    standby_groups: int = 0
    """Started groups that hold no place until one is lost."""
    standby_ranks: int = 0
    """Started processes that take the place of single dead ranks."""
    mtbf_gpu_hours: float | None = None
    """Mean time between failures of one GPU, in hours: what 'auto' settings are computed from (49152 when it is not
    given: Llama 3, 16,384 GPUs and an unexpected interruption about every 3 h)."""
    restart_after: int | None = flag(None, kind="int-or-auto")
    """Losses of groups after which the job saves and starts itself again with all groups. auto: with --save-interval
    auto, where the measured figures say that it pays, and never under Slurm; 0: never."""
    inner_data_parallel: int | None = flag(None, kind="int-or-auto")
    """D: data-parallel ranks inside a group. auto: the least that expert parallelism allows (1 without it)."""
    check: bool = False
    """Check the flags, print the resolved configuration and what it needs, and leave (exit 0, or 2 with the reason)."""
