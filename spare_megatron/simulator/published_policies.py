"""Simulates the steps of the published policies: checkpoint only, replication, SPARe (arXiv 2603.00357), with the
assumptions of ``Policy.reading`` where the paper does not state them.

Failures are polled before each layer and at the reduction. A reduction that a death interrupts costs half its time and
is repeated only where a patch is needed. SPARe computes the top S slots of every stack. For a death seen before a layer
it makes a new plan at once, which the remaining layers follow; a death seen at the reduction costs a patch, that is one
layer and one reduction, only if the survivors' top S slots no longer hold every shard. Jitter does not slow a patch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from spare_megatron.placement import placement_from_offsets
from spare_megatron.protocol.messages import JobSpec
from spare_megatron.simulator.intervals import save_interval_steps
from spare_megatron.simulator.policy_trial import PolicyTrial, job_spec


class _SavesBySteps(PolicyTrial):
    """Saves at multiples of a number of steps, as the published policies do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.interval_steps = save_interval_steps(self.cluster, self.policy)

    def _save_if_due(self) -> None:
        if self.saving is not None and self.now_s >= self.saving[0]:
            self.saved_step, self.saving = self.saving[1], None
        if self.control.state.committed[0] % self.interval_steps == 0:
            self._save()


class ReplicationEngine(_SavesBySteps):
    """A trial of replication: all groups of a block of r consecutive groups (the last block may be smaller) compute the
    same r shards in every step.

    For the protocol machine a block is one group with one shard, so the death of a block's last group is a wipe-out.
    Policy 'checkpoint' has blocks of one group. Without blocks (``Policy.reading``) shard i is on groups i .. i + r -
    1.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.layers = 1 if self.policy.name == "checkpoint" else self.policy.redundancy
        self.block = np.arange(self.cluster.num_groups) // (self.layers if self.policy.reading.blocks else 1)
        self.back: list[tuple[float, int]] = []

    def _spec(self) -> JobSpec:
        if self.policy.reading.blocks:
            return job_spec(self.policy, self._blocks(), 1, 1, "shard")
        policy = replace(self.policy, placement="consecutive")
        return job_spec(policy, self.cluster.num_groups, policy.redundancy, 1, "shard")

    def _members(self) -> list[int]:
        return list(range(self._blocks()))

    def _blocks(self) -> int:
        size = 1 if self.policy.name == "checkpoint" or not self.policy.reading.blocks else self.policy.redundancy
        return -(-self.cluster.num_groups // size)

    def _recover(self) -> None:
        self.back = []
        super()._recover()

    def _step(self) -> bool:
        self._repair()
        cluster = self.cluster
        dead: list[int] = []
        layer_s = cluster.compute_s * self.slowest()
        for _ in range(self.layers):
            dead += self._poll_one(self.now_s, not dead)
            if dead and not self._survives(dead):
                return False
            self.now_s += layer_s
        late = self._poll_one(self.now_s + cluster.reduce_s, not dead)
        self.now_s += cluster.reduce_s / 2 if late else cluster.reduce_s
        if late and not self._survives(late):
            return False
        if dead or late:
            self._masked()
        self.tally.work += self.layers
        self.control.all_voted()
        return True

    def _masked(self) -> None:
        """Add what a masked failure in this step costs according to ``Policy.reading``."""
        reading, cluster = self.policy.reading, self.cluster
        self.tally.masked += 1
        self.now_s += reading.masked_layers * cluster.compute_s
        if reading.replication_rebuilds:
            self.now_s += cluster.rebuild_s
            self.tally.down_s += cluster.rebuild_s

    def _poll_one(self, until_s: float, may: bool) -> list[int]:
        """The group that failed up to ``until_s``, if ``may``: a step registers one failure, further ones wait for the
        next step."""
        if not may or (self.failures.first > until_s and not self.held):
            return []
        hit = [*self.held, *(group for _, group in self.failures.due(until_s))]
        hit = [group for group in dict.fromkeys(hit) if self.alive[group]]
        self.held = hit[1:]
        dead = self.bury(hit[:1])
        if self.cluster.rejoin_s is not None:
            self.back += [(until_s + self.cluster.rejoin_s, group) for group in dead]
        return dead

    def _repair(self) -> None:
        for at, group in [one for one in self.back if one[0] <= self.now_s]:
            self.alive[group] = True
            self.back.remove((at, group))

    def _survives(self, dead: list[int]) -> bool:
        hit = {int(self.block[group]) for group in dead} & self.control.state.live.keys()
        blocks = [b for b in sorted(hit) if not self.alive[self.block == b].any()]
        return not blocks or self.control.lost(blocks)


class SpareEngine(_SavesBySteps):
    """A trial of SPARe as published."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.depth = 1
        placement = placement_from_offsets(self.cluster.num_groups, self.control.spec.offsets)
        self.hosts = np.ascontiguousarray(placement.hosts().T)

    def _spec(self) -> JobSpec:
        return job_spec(self.policy, self.cluster.num_groups, self.policy.redundancy, 1, "shard")

    def _recover(self) -> None:
        self.depth = 1
        super()._recover()

    def _step(self) -> bool:
        cluster = self.cluster
        dead: list[int] = []
        layer_s = cluster.compute_s * self.slowest()
        work = 0
        while work < self.depth:
            dead += self.poll(self.now_s)
            if dead and self.policy.reading.replans_at_once:
                if not self._shrinks(dead):
                    return False
                dead = []
            self.now_s += layer_s
            work += 1
        while True:
            dead += self.poll(self.now_s + cluster.reduce_s)
            if not dead:
                self.now_s += cluster.reduce_s
                break
            self.now_s += cluster.reduce_s / 2
            uncovered = self._uncovered()
            if not self._shrinks(dead):
                return False
            if not uncovered:
                break
            self.tally.patched += 1
            dead = self.poll(self.now_s)
            self.now_s += cluster.compute_s * (self.slowest() if self.policy.reading.patch_jitter else 1.0)
            work += 1
        self.tally.work += work
        self.control.all_voted()
        return True

    def _shrinks(self, dead: list[int]) -> bool:
        """Let the protocol machine plan without the dead; False when they were the last hosts of a shard."""
        cluster = self.cluster
        self.now_s += cluster.rebuild_s
        self.tally.down_s += cluster.rebuild_s
        if not self.control.lost(dead):
            return False
        self.tally.masked += len(dead)
        self.now_s += self.policy.reading.masked_layers * cluster.compute_s * len(dead)
        self.depth = max(self.depth, self._standing().depth)
        return True

    def _standing(self) -> Any:
        standing = self.control.state.standing
        assert standing is not None
        return standing.assignment

    def _uncovered(self) -> bool:
        """Whether some shard is in none of the survivors' top S slots."""
        slots = self._standing().slots
        top = slots[np.arange(len(self.hosts))[:, None], self.hosts] < self.depth
        return not bool((top & self.alive[self.hosts]).any(axis=0).all())
