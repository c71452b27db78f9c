"""Which processes of a node are swept away before a lost group is started again there, and the ranks' places then."""

from __future__ import annotations

import pytest

from spare_megatron.config.place import place_of
from spare_megatron.launch.group_sweep import is_of

FIRST = {
    "SPARE_RUN_DIR": "/run",
    "SPARE_INCARNATION": "3",
    "SPARE_GROUP_SIZE": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
"""Of a rank of the step that a job attempt began with: four groups of two."""
AGAIN = {
    **FIRST,
    "SPARE_GROUP": "2",
    "SPARE_NUM_GROUPS": "4",
    "SPARE_INCARNATION": "4",
    "SPARE_LOCAL_RANK_FROM": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "0",
}
"""Of a rank of group 2, which was started again."""


@pytest.mark.parametrize(
    ("environ", "incarnation", "swept"),
    [
        ({**FIRST, "SLURM_PROCID": "4"}, 3, True),
        ({**FIRST, "SLURM_PROCID": "5"}, 3, True),
        ({**FIRST, "SLURM_PROCID": "3"}, 3, False),
        ({**FIRST, "SLURM_PROCID": "6"}, 3, False),
        ({**FIRST, "SLURM_PROCID": "4"}, 2, False),
        ({**FIRST, "SLURM_PROCID": "4", "SPARE_RUN_DIR": "/other"}, 3, False),
        ({**AGAIN, "SLURM_PROCID": "1"}, 3, False),
        ({**AGAIN, "SLURM_PROCID": "1"}, 4, True),
        ({**AGAIN, "SLURM_PROCID": "1", "SPARE_GROUP": "1"}, 4, False),
    ],
)
def test_the_ranks_of_a_group_up_to_an_incarnation(environ: dict[str, str], incarnation: int, swept: bool) -> None:
    assert is_of(environ, "/run", 2, 2, incarnation) is swept


def test_neither_the_batch_script_nor_srun_nor_a_coordinator_is_a_rank() -> None:
    srun = {**FIRST, "SLURM_PROCID": "0"}
    del srun["SLURM_STEP_ID"]
    coordinator = {**FIRST, "SLURM_PROCID": "0", "SLURM_NTASKS": "3"}
    del coordinator["SPARE_INCARNATION"]
    for environ in (srun, coordinator, {"SPARE_RUN_DIR": "/run"}, {}):
        assert not is_of(environ, "/run", 0, 2, 9)


def test_ranks_of_a_group_that_was_started_again_have_its_place() -> None:
    place = place_of({**AGAIN, "SLURM_PROCID": "1"}, 4, 2, None)
    assert (place.group, place.position, place.incarnation, place.local_rank) == (2, 1, 4, 3)
    behind = place_of({**AGAIN, "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}, 4, 2, None)
    assert behind.local_rank == 0, "only the first node of the step has ranks of other groups before its own"
    alone = place_of({**AGAIN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, 4, 1, None)
    assert (alone.launcher, alone.group, alone.position) == ("slurm", 2, 0)
