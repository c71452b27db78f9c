"""Reads what Slurm allocated to a batch job from the environment of its batch script, which is passed in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.place import number

OF_A_STEP = (
    "SLURM_JOB_NUM_NODES",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_JOB_NODELIST",
    "SLURM_TASKS_PER_NODE",
)
"""Variables that srun sets anew for the processes of a step."""
KEPT = "SPARE_BATCH_"


@dataclass(frozen=True)
class Allocation:
    """One batch job."""

    job: str
    num_nodes: int
    ranks: int
    """The world size: tasks of a job step over all nodes but the spare ones."""
    array: str | None = None
    """Id of the job array; None for a job that is in none."""
    last_of_array: bool = False
    restarts: int = 0
    """How often Slurm has restarted this job."""
    node_list: str = ""
    """Its nodes at the start, as Slurm writes them ('n[1-4]')."""
    tasks_of_nodes: tuple[int, ...] = ()
    """Ranks that each node has room for, in the order of ``node_list``."""

    @property
    def next_element(self) -> bool:
        """True where another element of the array comes after this one."""
        return self.array is not None and not self.last_of_array

    @property
    def ranks_per_node(self) -> int:
        """Ranks of the node that has most of them."""
        return max(self.tasks_of_nodes)

    @property
    def nodes_used(self) -> int:
        """How many nodes, from the first on, the ranks fill; the others are spare."""
        return next(count for count in range(1, self.num_nodes + 1) if sum(self.tasks_of_nodes[:count]) >= self.ranks)

    def with_spares(self, groups: int, size: int) -> Allocation:
        """This allocation for ``groups`` groups of ``size`` ranks, with the nodes beyond them as spares; ConfigError
        where it is too small."""
        if groups < 1:
            raise ConfigError(f"--num-groups is {groups}, but must be at least 1")
        if groups * size > self.ranks:
            raise ConfigError(
                f"--num-groups {groups} needs {groups * size} ranks ({size} for each group), and the job has "
                f"{self.ranks} on {self.num_nodes} nodes; give sbatch more --nodes, or fewer groups"
            )
        return replace(self, ranks=groups * size)

    def places_of(self, group: int, size: int) -> tuple[tuple[int, int], ...]:
        """(index of the node, number on that node) of each rank of a group of ``size``: ranks fill node after node."""
        places = [(node, local) for node, count in enumerate(self.tasks_of_nodes) for local in range(count)]
        return tuple(places[group * size : (group + 1) * size])

    def groups_of(self, size: int) -> int:
        """N, the number of groups of ``size`` ranks; ConfigError where the ranks are not a multiple of it."""
        if self.ranks % size:
            raise ConfigError(
                f"the job has {self.ranks} ranks ({self.num_nodes} nodes), which is no multiple of the {size} ranks of "
                f"a group; ask for {self.ranks // size * size or size} or {(self.ranks // size + 1) * size} ranks"
            )
        return self.ranks // size

    def shared_fate(self, size: int) -> str:
        """A sentence on the groups that the loss of one node takes with it, where it can be more than one; else
        empty."""
        per_node = self.ranks_per_node
        if set(self.tasks_of_nodes) == {per_node} and size % per_node == 0:
            return ""
        lost = max(2, -(-per_node // size))
        return (
            f"a node has {per_node} ranks and a group {size}: the loss of one node takes up to {lost} groups, and "
            f"--spare-redundancy must be above {lost} to mask it for certain; a group of whole nodes loses only itself"
        )


def allocation_of(environ: Mapping[str, str]) -> Allocation:
    """The batch job whose environment this is; ConfigError where it is of none."""
    job = environ.get("SLURM_JOB_ID", "")
    nodes = number(environ, "SLURM_JOB_NUM_NODES")
    if not job or not nodes:
        raise ConfigError("this is no Slurm job: SLURM_JOB_ID is not set; start it with sbatch, or use spare-launch")
    ranks = number(environ, "SLURM_NTASKS")
    per_node = number(environ, "SLURM_NTASKS_PER_NODE")
    if not ranks:
        if not per_node:
            raise ConfigError("the job does not say how many ranks it has; give sbatch --ntasks-per-node RANKS")
        ranks = nodes * per_node
    array = environ.get("SLURM_ARRAY_JOB_ID") or None
    last = array is not None and environ.get("SLURM_ARRAY_TASK_ID") == environ.get("SLURM_ARRAY_TASK_MAX")
    return Allocation(
        job,
        nodes,
        ranks,
        array,
        last,
        restarts=number(environ, "SLURM_RESTART_COUNT") or 0,
        node_list=environ.get("SLURM_JOB_NODELIST", ""),
        tasks_of_nodes=_tasks_of_nodes(environ.get("SLURM_TASKS_PER_NODE", ""), nodes, ranks),
    )


def kept_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What a batch script gives to the processes of a step, so that they know its allocation."""
    return {f"{KEPT}{name}": environ[name] for name in OF_A_STEP if name in environ}


def of_batch_script(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a batch script as far as :func:`allocation_of` reads it, from that of a process which was
    given :func:`kept_variables`."""
    kept = {name.removeprefix(KEPT): value for name, value in environ.items() if name.startswith(KEPT)}
    return {**{name: value for name, value in environ.items() if not kept or name not in OF_A_STEP}, **kept}


def _tasks_of_nodes(text: str, nodes: int, ranks: int) -> tuple[int, ...]:
    """The numbers of '2(x3),1', where they are those of all ranks; else as many for each node, fewer for the last."""
    found = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    if len(found) == nodes and sum(found) == ranks:
        return tuple(found)
    most = -(-ranks // nodes)
    return tuple(max(0, min(most, ranks - node * most)) for node in range(nodes))
