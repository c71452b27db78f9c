"""One job in one process whose nodes break, are repaired, are lent and leave: the protocol machine, the launcher's
places of groups and its looks at nodes are the real ones, and each group has an engine of the toy model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

import torch

from spare_megatron.config.allocation import Allocation
from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.node_looks import JobNodes, look_at_nodes
from spare_megatron.launch.slurm_places import Move, SlurmPlaces
from spare_megatron.simulator.cluster import Policy
from spare_megatron.simulator.job_control import JobControl
from spare_megatron.simulator.policy_trial import job_spec
from tests.process.returning import failure_free_weights
from tests.process.toy_engine import ToyEngine
from tests.tickets import run_of

PIECES, STEPS, LAST = 2, 60, 4
"""Steps with events, and those after the last one, in which all that have nodes come back."""
EVENTS = ("breaks", "breaks", "breaks", "repaired", "repaired", "lent", "leaves", "nothing", "nothing")


class NodeJob:
    """A job of 2 to 5 groups of 1 to 3 nodes, with up to two spare ones, as the seed draws them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.groups, self.size, self.spares = (self.rng.randint(*one) for one in ((2, 5), (1, 3), (0, 2)))
        ranks = self.groups * self.size
        count = ranks + self.spares
        self.places = SlurmPlaces(Allocation("", count, ranks, tasks_of_nodes=(1,) * count), self.size)
        self.nodes, self.lent = set(range(count)), set[int]()
        self.broken, self.noticed = set[int](), set[int]()
        """Of the broken nodes, those that Slurm takes for dead: of the others only a check finds it out."""
        self.waiting: set[int] = set()
        policy = Policy(redundancy=self.groups, pieces_per_shard=PIECES, steps=STEPS + LAST + 1)
        self.control = JobControl(job_spec(policy, self.groups, self.groups, PIECES, "microbatch"), check=True)
        self.control.open(0, range(self.groups))
        self.engines = {group: self._engine() for group in range(self.groups)}
        self.voted = set(self.engines)
        """Those that were members in the last step."""
        self.counts: Counter[str] = Counter()
        self.digests: list[set[str]] = []

    def play(self) -> dict[str, object]:
        """Play the schedule; returns what happened, and how it ended."""
        for _ in range(STEPS):
            self._event(self.rng.choice(EVENTS))
            self._step()
        self._settle()
        for _ in range(LAST):
            self._step()
        failure_free = failure_free_weights(len(self.digests), self.groups, PIECES)
        unlike = sum(found != {digest} for found, digest in zip(self.digests, failure_free[1:], strict=True))
        names = ("breaks", "repaired", "lent", "leaves", "losses", "to_spare", "to_lent", "salvaged")
        return {
            "groups": self.groups,
            "nodes_per_group": self.size,
            "spare_nodes": self.spares,
            "steps": len(self.digests),
            **{name: self.counts[name] for name in names},
            "live_at_end": len(self.control.state.live),
            "live_possible": min(self.groups, len(self.nodes - self.broken) // self.size),
            "steps_with_other_weights": unlike,
        }

    # -------------------------------------------------------------------------------------------------------- nodes

    def _event(self, kind: str) -> None:
        if kind == "breaks":
            self._away({node for node in self.nodes - self.broken if self._may_go(node)}, kind)
        elif kind == "leaves":
            self._away({node for node in self.lent & self.nodes if self._may_go(node)}, kind)
        elif kind == "lent":
            node = self.places.add_node(1)
            self.nodes.add(node)
            self.lent.add(node)
            self.counts[kind] += 1
            self._moved(self.places.salvage(self.nodes - self.noticed))
        elif kind == "repaired" and self.broken:
            node = self.rng.choice(sorted(self.broken))
            self.broken.remove(node)
            self.noticed.discard(node)
            self.counts[kind] += 1
            self._look_at_all()

    def _may_go(self, node: int) -> bool:
        """Whether the loss of a node leaves a group that has voted, without which the job would end."""
        live = self.control.state.live
        return any(node not in self.places.nodes_of(group) for group in self.voted & live.keys())

    def _away(self, nodes: Collection[int], kind: str) -> None:
        """A node breaks or, if it is a lent one, leaves; then its group is looked at."""
        if not nodes:
            return
        node = self.rng.choice(sorted(nodes))
        self.counts[kind] += 1
        if kind == "leaves":
            self.nodes.remove(node)
            self.broken.discard(node)
            self.places.close_node(node)
        else:
            self.broken.add(node)
            if self.rng.random() < 0.5:
                self.noticed.add(node)
        state = self.control.state
        struck = [one for one in range(self.groups) if one not in self.waiting and node in self.places.nodes_of(one)]
        lost = [group for group in struck if group in state.live]
        loads = state.plan.loads()
        progress = [(g, self.rng.randint(0, int(loads[g]))) for g in state.live if g not in lost and loads[g]]
        if lost:
            self.control.lost(lost, progress)
        if learning := [group for group in struck if group in self.control.state.learners]:
            self.control.learners_lost(learning)
        self.counts["losses"] += len(lost)
        self.waiting |= set(struck)
        for group in struck:
            self._look(group)

    def _look(self, group: int) -> None:
        """The launcher looks at a lost group, and at those that it completes."""
        if group not in self.waiting:
            return
        names = {node: f"n{node}" for node in range(1 + max(self.nodes | self.lent))}
        known = JobNodes(names, self.nodes - self.noticed, lent=self.lent)
        look = look_at_nodes(
            self.places,
            group,
            known,
            lambda some: {node: HealthFault("node", "it is broken") for node in some if node in self.broken},
        )
        if look.fault is None:
            mine = set(self.places.nodes_of(group))
            assert mine <= self.nodes - self.broken, "a group is started on a broken node"
            self.waiting.remove(group)
            self.control.returns(group)
        owned = [node for one in range(self.groups) for node in self.places.nodes_of(one)]
        assert len(set(owned)) == len(owned) == self.groups * self.size, "a node has two owners"
        self._moved({one: moves for one, moves in look.moves.items() if one != group or look.fault is None}, group)

    def _moved(self, moves: dict[int, list[Move]], looked_at: int | None = None) -> None:
        for group, changes in moves.items():
            for move in changes:
                to = "to_lent" if move.other in self.lent else "to_spare"
                self.counts[to if move.giver is None else "salvaged"] += 1
            if group != looked_at:
                self._look(group)

    def _look_at_all(self) -> None:
        for group in sorted(self.waiting):
            self._look(group)

    def _settle(self) -> None:
        """Groups that wait are looked at again and again: those that find a spare node broken try others."""
        for _ in range(2 + len(self.nodes)):
            self._look_at_all()

    # -------------------------------------------------------------------------------------------------------- steps

    def _engine(self) -> ToyEngine:
        return ToyEngine(0, 1, self.groups, PIECES, 0.0)

    def _step(self) -> None:
        """Live groups compute their plans, the sum is applied, and groups that are back take the weights."""
        control = self.control
        step, members = control.state.step_in_flight, sorted(control.state.live)
        plan = control.state.plan
        for group in members:
            self.engines[group].begin_step(step)
            self.engines[group].run(step, run_of(plan.pieces(group)))
        sums = [
            torch.stack(parts).sum(0) for parts in zip(*(self.engines[g].local_sum() for g in members), strict=True)
        ]
        scalars = {name: sum(self.engines[group].scalars()[name] for group in members) for name in ("loss", "pieces")}
        control.caught_up()
        control.all_voted()
        assert control.state.committed[0] == step
        control.caught_up()  # those that it admitted have its result
        for group in members:
            self.engines[group].apply(step, sums, scalars)
        self.engines, self.voted = {group: self.engines[group] for group in members}, set(members)
        for group in control.state.live.keys() - self.engines.keys():
            self.engines[group] = self._copy(self.engines[members[0]])
        self.digests.append({engine.digest() for engine in self.engines.values()})

    def _copy(self, of: ToyEngine) -> ToyEngine:
        """What a learner gets."""
        made = self._engine()
        with torch.no_grad():
            for mine, theirs in zip(made.state_tensors().values(), of.state_tensors().values(), strict=True):
                mine.copy_(theirs)
        made.adopt_state(of.applied, of.state_values())
        return made
