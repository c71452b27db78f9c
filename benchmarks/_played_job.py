"""What played groups and ranks report of their job, and of each of their steps."""

from __future__ import annotations

from spare_megatron.config.job import JobDescription
from spare_megatron.config.timeouts import timeouts_from
from spare_megatron.protocol.messages import JobSpec

TIMES = timeouts_from(heartbeat_timeout_s=60.0)
"""The usual interval; but a machine that is too small for so many players must not lose groups by their silence."""
FIGURES = (("compute_s", 1.25), ("patch_s", 0.0), ("rebuild_s", 0.0625), ("reduce_s", 0.25))


def specification(offsets: tuple[int, ...], groups: int, pieces: int, ranks: int) -> tuple[JobSpec, JobDescription]:
    """A job without an end, of ``groups`` groups of ``ranks`` ranks under these placement offsets."""
    job = JobDescription(
        identity={"model": "none"}, timeouts=TIMES, train_iters=10**6, log_interval=10**6, world_size=groups * ranks
    )
    spec = JobSpec(
        num_groups=groups,
        pieces_per_shard=pieces,
        offsets=offsets,
        granularity="microbatch",
        first_step=0,
        last_step=10**6,
        min_groups=1,
        fingerprint=job.fingerprint,
        heartbeat_timeout_s=TIMES.heartbeat_timeout_s,
    )
    return spec, job
