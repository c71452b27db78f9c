"""The framework's own flags, ``--spare-*``, for settings that Megatron does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spare_megatron.config.flags import flag


@dataclass(frozen=True)
class SpareConfig:
    """How a job masks failures. Each field is the flag ``--spare-<field>``; in flags that take 'auto', None stands for
    it."""

    redundancy: int | None = flag(None, kind="int-or-auto")
    """r: how many groups host each shard of the data. auto: all groups with --spare-data shared; else r follows from
    the number of groups, or, with --save and from the second start of a job on, from the figures that it measured."""
    state_redundancy: int | None = None
    """How many groups keep each part of the optimizer's state (master weights, moments); default: all. With fewer, a
    group has less memory for it, and parameters are gathered over groups after each step."""
    granularity: Literal["microbatch", "shard"] = "microbatch"
    """The smallest unit that moves to another group after a failure: a piece of --spare-piece-microbatches, or a
    shard."""
    piece_microbatches: int | None = flag(None, kind="int-or-auto")
    """C: microbatches of a piece, which one group computes in order and sums in fp32 before its sum is rounded; C
    divides the microbatches of a shard. Large pieces cost little less, and survivors share the work of a lost group
    in larger portions. auto: as many as lose less by that than they save."""
    schedule: Literal["core", "tickets"] = "core"
    """Who orders the work of pipeline stages: megatron-core's schedules (core), or programs of this package that take
    one microbatch after the other and need not know how many will come (tickets). Results have the same bits."""
    relief: bool = False
    """Inside a step, let groups that are slow give pieces that they have not begun to faster hosts of the same
    shards."""
    placement: Literal["independent", "consecutive"] = "independent"
    """Which groups host a shard: groups at offsets of pairwise distinct differences (independent), or neighbours
    (consecutive)."""
    data: Literal["shared", "staged"] = "staged"
    """staged: a group reads only the shards that it hosts; shared: every group can read all data."""
    no_adoption: bool = False
    """Where every group that hosts a shard is lost, go back to the last checkpoint, instead of letting other groups
    open the data of the shard."""
    stage_command: str | None = None
    """Shell command that brings the data of a shard to a host whose group is to read it and did not before; {shard} and
    {host} in it stand for their number and name."""
    adopt_timeout_s: float = 300.0
    """Time in seconds within which a group must have opened a shard that it did not host, its --spare-stage-command
    included; then another group is asked."""
    reduce: Literal["exact", "exact32", "fp32", "bf16"] = "exact"
    """How gradients are summed over groups: exactly, as 64-bit (exact) or 32-bit (exact32) integers, or in fp32 or
    bf16."""
    audit_rate: float = 0.0
    """Share of the pieces, 0 to 1, that a second group computes too, to find silent corruption."""
    allow_untested_core: bool = False
    """Run with a version of megatron-core that was not tested."""
    comm: Literal["auto", "nccl", "gloo"] = "auto"
    """Backend of the sums over groups; gloo with CUDA tensors is staged through pinned host memory."""
    interface: str | None = None
    """Network interface over which groups sum: its name, or a network (10.0.0.0/16) in which its address lies; default:
    that of GLOO_SOCKET_IFNAME, or the one on the way to the coordinator."""
    run_dir: str | None = None
    """Directory of the job's records; if it is not given, spare-launch makes one."""
    coordinator: str | None = None
    """HOST:PORT of the coordinator; if it is not given, it is read from the run directory."""
    heartbeat_timeout_s: float = 5.0
    """Silence of a rank, in seconds, after which its group counts as dead."""
    progress_timeout_s: float | None = None
    """Time in seconds for which a rank may stand still while others wait for it, before its group counts as dead;
    default: 60, or 12 times the heartbeat time-out where that is more."""
    no_async_save: bool = False
    """Let training wait until the files of a checkpoint are written, instead of writing them in the background."""
    no_emergency_save: bool = False
    """Do not save at once where the loss of one more group would end the job and no other is on its way back."""
    keep_checkpoints: int | None = None
    """Number of newest checkpoints to keep; older ones are removed. Default: all, or two with
    --save-retain-interval."""
    min_groups: int | None = None
    """Number of groups with which the job may begin once the start-up time is over; default: one."""
    max_group_restarts: int = 3
    """How often spare-launch or spare-slurm starts one lost group again within an hour, while the others train; 0: it
    stays lost. A group whose results were wrong starts on other devices only."""
    transfer_rate: str | None = None
    """The most that one rank gives a second to groups that come back: bytes or bits with a unit, as in 500MB or 4Gb;
    default: no limit."""
    health_check: str | None = None
    """Shell command that is run before a lost group is started again, on each host where it would run; while it leaves
    with another code than 0, the group is not started, and it is tried again later."""
    on_event: str | None = None
    """Shell command that the coordinator runs for each event of the job (a loss, a patch, a return, a save that counts,
    a restart, a wipe-out, the end), with one line of JSON on its standard input; nothing waits for it."""
    rank_times: bool = False
    """Let each rank write when it did the parts of each step into a file of its own in the run directory, from which
    spare-timeline draws a track for it."""
    group_restart_pause_s: float = 5.0
    """Time in seconds that the second restart of a group within an hour waits; each further one waits twice as long,
    up to 60 times as long as the second. The first begins at once; 0: all do."""
    standby_groups: int = 0
    """Number of further groups that spare-launch starts, on devices of their own: their models are built, and they wait
    to take the places of lost groups."""
    shapes: str = "none"
    """Pipeline stages with which spare-launch may start a lost group whose host is not fit for all its ranks, largest
    first: numbers below --pipeline-model-parallel-size, separated by commas; auto: all of them, with
    --overlap-grad-reduce those that divide it; none: the group waits. The weights stay bit for bit those of the
    failure-free run; the group goes back to its home shape when its host is fit again."""
    preload: str | None = None
    """Further modules, separated by commas, that spare-launch imports once for all ranks, which are forked then; none:
    each rank makes its own imports."""
    mtbf_gpu_hours: float | None = None
    """Mean time between failures of one GPU, in hours, from which 'auto' settings are computed (default 49152, from
    Llama 3: 16,384 GPUs and an unexpected interruption about every 3 h)."""
    restart_after: int | None = flag(None, kind="int-or-auto")
    """Number of lost groups after which the job saves and restarts itself with all groups; 0: never. auto: where the
    measured figures show that it pays, but only with --save-interval auto and never under Slurm."""
    inner_data_parallel: int | None = flag(None, kind="int-or-auto")
    """D: number of data-parallel ranks inside a group. auto: the least that expert parallelism allows (1 without
    experts)."""
    check: bool = False
    """Check the flags, print the resolved configuration and what it needs, and leave (exit 0, or 2 with the reason)."""
