"""Reads what earlier job attempts decided about themselves, for the ranks of the next job attempt and for checkpoints.

The coordinator writes each job attempt's choice into the run directory (:mod:`spare_megatron.coordinator.job_tuning`).
Redundancy is read only from job attempts before a rank's own, which do not change any more, so all ranks of a job
attempt read the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spare_megatron.config.place import Place
from spare_megatron.planning.published import best_redundancy
from spare_megatron.runtime.disk import with_retries
from spare_megatron.runtime.run_directory import RunDirectory, read_json

FILE = "spare_choice.json"
"""The file in a checkpoint with the newest choice of the job that wrote it, its figures and its reason."""


def redundancy_of(asked: int | None, num_groups: int, data: str, place: Place) -> int:
    """The redundancy r: ``asked``, or where that is None ('auto') the choice of the job.

    That is N where every group reads all data; else what an earlier job attempt decided from its figures; in the first
    job attempt what the published formula says, but at least 2 where there are 2 groups."""
    earlier = range(place.job_attempt - 1, 0, -1) if asked is None and data != "shared" and num_groups > 1 else ()
    for job_attempt in earlier:
        found = _choice(place, job_attempt)
        if found is not None:
            choice = found["choice"]
            return int(choice.get("redundancy_next") or choice["redundancy"])
    return first_redundancy(asked, num_groups, data)


def first_redundancy(asked: int | None, num_groups: int, data: str) -> int:
    """The redundancy of a job's first attempt, which follows from its flags alone; arguments as of
    :func:`redundancy_of`."""
    if asked is not None:
        return asked
    if data == "shared" or num_groups < 2:
        return num_groups
    return min(num_groups, max(2, best_redundancy(num_groups)))


def leave_choice(place: Place, directory: Path) -> None:
    """Write the job's newest choice, if there is one, into a checkpoint that is being written; called by one rank."""
    for job_attempt in range(place.job_attempt, 0, -1):
        found = _choice(place, job_attempt)
        if found is not None:
            (directory / FILE).write_text(json.dumps(found, indent=1) + "\n")
            return


def _choice(place: Place, job_attempt: int) -> Mapping[str, Any] | None:
    if place.run_dir is None:
        return None
    path = RunDirectory(place.run_dir).choice(job_attempt)
    return with_retries(lambda: read_json(path))
