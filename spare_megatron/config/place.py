"""Reads a rank's place in the job from the environment that a launcher gave it.

Three launchers are understood: spare-launch (``SPARE_*``), torchrun started once per group (its own variables plus
``SPARE_GROUP`` and ``SPARE_NUM_GROUPS``; the incarnation counts its restarts), and Slurm (``SLURM_*``, one job step
over all ranks, or one with the ranks of ``SPARE_GROUP``). Nothing here reads the environment of the process: a mapping
is passed in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from spare_megatron.config.errors import ConfigError

PLACE_FILE = "SPARE_PLACE_FILE"
"""Environment variable of a process that waits for a place: the file in which spare-launch will write it, as the other
variables that the place adds to the environment."""


LENT_TO = "SPARE_LENT_TO"
"""Environment variable of a rank on a lent node: the launcher of the job's other ranks."""
STAGES = "SPARE_STAGES"
"""Environment variable of a rank of a group that runs in a smaller shape: its number of pipeline stages."""
POSITIONS = "SPARE_POSITIONS"
"""Environment variable of a step of Slurm with some ranks of a group only: their positions, separated by commas."""


@dataclass(frozen=True)
class Place:
    """The place of one rank in the job."""

    group: int
    position: int
    """m: the rank's position in its group."""
    num_groups: int
    incarnation: int
    """Number of this start of the group, above that of every earlier one of the job; 0 the first time."""
    run_dir: str | None
    launcher: str
    """'spare-launch', 'torchrun', 'slurm', or 'none' for a process started by hand."""
    group_size: int = 1
    """M: ranks of the group; fewer in a smaller shape."""
    job_attempt: int = 1
    """How often the launcher has started the whole job."""
    saved_step: int | None = None
    """The step of the newest checkpoint that the job itself has saved in an earlier job attempt; None: it has none."""
    restarts: int = 0
    """How often the launcher has started the group again in this job attempt, up to this time; 0 for the ranks that the
    job attempt began with."""
    tls_dir: str = ""
    """Directory of ca.pem, cert.pem and key.pem, with which the control plane uses mutual TLS; empty: it does not."""
    local_rank: int = 0
    """Number of this rank on its host, which is the number of its device."""
    launcher_pid: int = 0
    """Process id of the spare-launch that this rank must not outlive; 0: none."""
    place_file: str = ""
    """The file in which this process's place will be; until then it is as a rank of group 0. Empty: it has one."""
    lent: bool = False
    """This rank is on a node that is only lent to the job: a signal that asks a process to leave means the node."""

    def saves_into(self, save: str | None) -> str:
        """``JobDescription.saves_into``."""
        return os.path.abspath(save) if save and self.launcher == "torchrun" else ""

    stages: int = 0
    """Pipeline stages of a group in a smaller shape (:mod:`spare_megatron.config.rows`); 0: it has the home shape."""
    rows: tuple[tuple[int, ...], ...] = ()
    """Of each rank of such a group its rows."""
    starts_again: bool = False
    """Whoever started this rank starts the whole job again when the coordinator asks for it (a planned restart)."""

    @property
    def is_leader(self) -> bool:
        """True for position 0, which starts its group's leader and does what one rank of a group must do."""
        return self.position == 0

    @property
    def home(self) -> str:
        """What this rank is of: 'group 2', 'standby 0'."""
        return standby_name(self.place_file) if self.place_file else f"group {self.group}"


def standby_name(place_file: str) -> str:
    """The name of whoever waits for its place in this file: 'standby 0' of '.../standby-0.json'."""
    return place_file.rpartition("/")[2].removesuffix(".json").replace("-", " ")


@dataclass(frozen=True)
class WorldHint:
    """The job's size as far as the environment alone gives it, before the flags are known."""

    launcher: str
    num_groups: int | None
    """N; None where the launcher does not give it."""
    group_size: int | None
    """M; None where the launcher does not give it."""
    world_size: int | None
    """N x M, where the launcher gives only the product; else None."""


def number(environ: Mapping[str, str], name: str) -> int | None:
    """The environment variable ``name`` as a number; None where it is not set, ConfigError where it is no number."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name} is {text!r}, but must be a number") from None
    if value < 0:
        raise ConfigError(f"the environment variable {name} is {value}, but must not be negative")
    return value


def required(environ: Mapping[str, str], name: str, beside: str) -> int:
    """The environment variable ``name`` as a number; ConfigError where it is not set although ``beside`` is."""
    value = number(environ, name)
    if value is None:
        raise ConfigError(f"{beside} is set but {name} is not; set {name} as well, or start the job with spare-launch")
    return value


def world_hint(environ: Mapping[str, str]) -> WorldHint:
    """The launcher and the sizes that it gave; the flags must agree with them."""
    num_groups = number(environ, "SPARE_NUM_GROUPS")
    if number(environ, "SPARE_POSITION") is not None:
        return WorldHint("spare-launch", required(environ, "SPARE_NUM_GROUPS", "SPARE_POSITION"), None, None)
    if number(environ, "RANK") is not None and number(environ, "SPARE_GROUP") is not None:
        size = required(environ, "WORLD_SIZE", "RANK")
        return WorldHint("torchrun", required(environ, "SPARE_NUM_GROUPS", "SPARE_GROUP"), size, None)
    if number(environ, "RANK") is not None and (number(environ, "WORLD_SIZE") or 1) > 1:
        raise ConfigError(
            f"torchrun started {environ.get('WORLD_SIZE')} ranks but SPARE_GROUP is not set; start one torchrun per "
            "group with SPARE_GROUP and SPARE_NUM_GROUPS set, or use spare-launch --num-groups N"
        )
    if number(environ, "SLURM_PROCID") is not None and number(environ, STAGES) is not None:
        return WorldHint("slurm", required(environ, "SPARE_NUM_GROUPS", "SPARE_GROUP"), None, None)
    if number(environ, "SLURM_PROCID") is not None and number(environ, "SPARE_GROUP") is not None:
        some = POSITIONS in environ
        size = required(environ, *(("SPARE_GROUP_SIZE", POSITIONS) if some else ("SLURM_NTASKS", "SLURM_PROCID")))
        return WorldHint("slurm", required(environ, "SPARE_NUM_GROUPS", "SPARE_GROUP"), size, None)
    if number(environ, "SLURM_PROCID") is not None and (number(environ, "SLURM_NTASKS") or 1) > 1:
        return WorldHint("slurm", num_groups, None, required(environ, "SLURM_NTASKS", "SLURM_PROCID"))
    return WorldHint("none", num_groups, None, None)


def place_of(environ: Mapping[str, str], num_groups: int, group_size: int, run_dir: str | None) -> Place:
    """This rank's place in a job of ``num_groups`` groups of ``group_size`` ranks.

    ``run_dir`` is that of the flags; ``SPARE_RUN_DIR`` counts where they give none. Raises ConfigError.
    """
    hint = world_hint(environ)
    run_dir = run_dir or environ.get("SPARE_RUN_DIR") or None
    incarnation, restarts = number(environ, "SPARE_INCARNATION") or 0, number(environ, "SPARE_RESTARTS") or 0
    if hint.launcher == "spare-launch":
        group = 0 if environ.get(PLACE_FILE) else required(environ, "SPARE_GROUP", "SPARE_POSITION")
        position = required(environ, "SPARE_POSITION", "SPARE_GROUP")
    elif hint.launcher == "torchrun":
        group, position = required(environ, "SPARE_GROUP", "RANK"), required(environ, "RANK", "SPARE_GROUP")
        incarnation += number(environ, "TORCHELASTIC_RESTART_COUNT") or 0
        restarts = restarts or incarnation
    elif hint.launcher == "slurm":
        rank, alone = required(environ, "SLURM_PROCID", "SLURM_NTASKS"), number(environ, "SPARE_GROUP")
        if alone is not None and POSITIONS in environ:
            rank = int(environ[POSITIONS].split(",")[rank])
        group, position = divmod(rank, group_size) if alone is None else (alone, rank)
        if number(environ, "SPARE_INCARNATION") is None:
            incarnation = number(environ, "SLURM_RESTART_COUNT") or 0
    else:
        group, position = 0, 0
    if group >= num_groups:
        raise ConfigError(
            f"this rank's group is {group}, but a job of {num_groups} groups has groups 0 to {num_groups - 1}"
        )
    if position >= group_size:
        raise ConfigError(
            f"this rank's position is {position}, but a group of {group_size} ranks has positions 0 to "
            f"{group_size - 1}; start as many ranks per group as --tensor-model-parallel-size x "
            "--pipeline-model-parallel-size x --context-parallel-size x inner data-parallel size"
        )
    return Place(
        group=group,
        position=position,
        num_groups=num_groups,
        incarnation=incarnation,
        run_dir=run_dir,
        launcher=environ.get(LENT_TO) or hint.launcher,
        lent=LENT_TO in environ,
        group_size=group_size,
        job_attempt=number(environ, "SPARE_LIFE") or 1,
        saved_step=number(environ, "SPARE_SAVED_STEP"),
        restarts=restarts,
        tls_dir=environ.get("SPARE_TLS_DIR", ""),
        local_rank=_local_rank(environ, hint.launcher),
        launcher_pid=number(environ, "SPARE_LAUNCHER_PID") or 0,
        place_file=environ.get(PLACE_FILE, ""),
        starts_again=bool(number(environ, "SPARE_STARTS_AGAIN")),
    )


def _local_rank(environ: Mapping[str, str], launcher: str) -> int:
    """Number of a rank on its host. A step of Slurm with one group may begin on a node behind ranks of other groups."""
    if launcher != "slurm":
        return number(environ, "LOCAL_RANK") or 0
    before = (number(environ, "SPARE_LOCAL_RANK_FROM") or 0) if not number(environ, "SLURM_NODEID") else 0
    return before + (number(environ, "SLURM_LOCALID") or 0)
