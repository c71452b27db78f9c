"""The description of a job that its first group sends to the coordinator, beside the machine's JobSpec.

It has what the coordinator needs beside the machine: figures for records, time-outs, what it may tune. It has plain
values only, because it is sent as JSON and kept in the run directory, so that a restarted coordinator has it too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spare_megatron.config.batches import BatchSchedule
from spare_megatron.config.timeouts import Timeouts
from spare_megatron.config.tuning import Tuning

Plain = str | int | float | bool | None
PROGRESS = frozenset({"iteration", "consumed_train_samples"})
"""Names in an identity that say where a job attempt begins, and so differ between the attempts of one job."""


@dataclass(frozen=True)
class JobDescription:
    """What the coordinator must know of a job for its records, timers and tuning, and what all ranks must have in
    common."""

    identity: Mapping[str, Plain] = field(default_factory=dict)
    """Everything that must be equal on all ranks, by name: model, data, flags, versions."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    tuning: Tuning = field(default_factory=Tuning)
    train_iters: int = 0
    """Last step of the training schedule, for the iteration line; the run may end before it."""
    log_interval: int = 100
    global_batch_size: int = 0
    seq_length: int = 0
    consumed_samples: int = 0
    """Samples consumed before the first step of this job attempt."""
    state_shards: int = 0
    """S: into how many shards the optimizer's state of each rank position is cut; 0: it is not."""
    batch_phases: tuple[tuple[int, int, int], ...] = ()
    """The phases of a batch size that changes (:class:`spare_megatron.config.batches.BatchSchedule`); empty: it is
    constant."""
    pieces_per_shard: int = 0
    """K of the full batch; used only where the batch size changes."""
    saves_into: str = ""
    """The absolute path of ``--save``, where the job has no launcher that keeps other jobs out of it (torchrun): the
    coordinator does. Empty: it does not save, or a launcher does."""
    exit_duration_s: float = 0.0
    """Time from the start of a job attempt after which the job saves and leaves; 0: no limit."""
    world_size: int = 0
    device: str = "cpu"
    """The kind of device on which the ranks compute: 'cpu' or 'cuda'."""
    flops_per_step: float = 0.0
    """Floating-point operations of one step over the whole job, for the throughput; 0: not logged."""
    late_pauses: bool = False
    """Whether the pipelines of the groups take in pieces while they run (``--spare-schedule tickets``)."""
    tickets_ahead: int = 0
    """How many tickets a group's leader issues ahead of what is begun, so that the group can give the others back; 0:
    all, and slow groups are not relieved (``--spare-relief``)."""
    adopt_timeout_s: float = 300.0
    """How long a group may take to open a shard that it has adopted (``--spare-adopt-timeout-s``)."""
    loss_names: tuple[str, ...] = ("lm loss",)
    """Keys of the report that are printed as losses; the first one is the metrics' ``loss``."""
    smaller_shapes: tuple[int, ...] = ()
    """The numbers of pipeline stages with which a lost group may come back (``--spare-shapes``), the largest first."""
    tensorboard_dir: str = ""
    tensorboard_log_interval: int = 1
    tensorboard_queue_size: int = 1000
    board_extras: tuple[str, ...] = ("loss-scale",)
    """What else is written to the boards: 'loss-scale', 'validation-ppl', 'timers', 'memory', 'world-size'."""
    wandb_project: str = ""
    wandb_exp_name: str = ""
    wandb_save_dir: str = ""
    wandb_entity: str = ""
    otel_enabled: bool = False
    """Whether figures and spans are sent to OpenTelemetry."""
    otel_service_name: str = ""
    """Empty: as the environment says."""
    otel_span_groups: tuple[str, ...] = ()
    """The groups of spans that are sent (:mod:`spare_megatron.config.span_groups`)."""

    @property
    def has_boards(self) -> bool:
        """Whether anything is written to TensorBoard, W&B or OpenTelemetry."""
        return bool(self.tensorboard_dir or self.wandb_project or self.otel_enabled)

    def batch_schedule(self, first_step: int) -> BatchSchedule:
        """The batch size of each step of a job attempt that starts from the state after ``first_step``."""
        return BatchSchedule(self.batch_phases or ((first_step + 1, self.consumed_samples, self.global_batch_size),))

    @property
    def fingerprint(self) -> str:
        """Digest of ``identity``, for ``JobSpec.fingerprint``."""
        text = json.dumps(dict(self.identity), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def difference(ours: Mapping[str, Plain], theirs: Mapping[str, Plain], shown: int = 3, whose: str = "elsewhere") -> str:
    """How two identities differ, in words: 'lr is 0.1, elsewhere 0.2'; empty if they do not. ``whose``: the word for
    ``theirs``."""
    absent = object()
    names = [n for n in sorted({*ours, *theirs}) if ours.get(n, absent) != theirs.get(n, absent)]
    parts = [f"{n} is {ours.get(n, 'not set')}, {whose} {theirs.get(n, 'not set')}" for n in names[:shown]]
    more = len(names) - shown
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def unlike_first(identities: Sequence[Mapping[str, Plain]]) -> tuple[int, str] | None:
    """The first rank of a group whose identity differs from that of rank 0, and how; ``identities``: those of all."""
    found = ((rank, difference(one, identities[0])) for rank, one in enumerate(identities))
    return next(((rank, differs) for rank, differs in found if differs), None)
