"""The rules of a process in a job with state shards: what it keeps, gathers and fetches (docs/protocol.md, rules 25 to
29).

A shard's state after a step, its sums and its weights are represented by the step alone (sums also by their epoch):
that all groups apply the same result of a step is checked elsewhere (:mod:`tests.explore.judge`).
"""

from __future__ import annotations

from typing import NamedTuple

from spare_megatron.protocol import messages as m
from spare_megatron.protocol.view import MemberId, StateHost
from tests.explore.process import Copies, Process, Processes, Violation


class Wanted(NamedTuple):
    """What a new host may fetch."""

    shard: int
    donor: MemberId
    step: int


class ShardProcesses(Processes):
    """The rules by which processes with state shards change."""

    @staticmethod
    def kept(p: Process) -> Copies:
        """What it has, which must be modelled."""
        assert p.copies is not None, "a job without state shards"
        return p.copies

    @staticmethod
    def parts(p: Process) -> list[StateHost]:
        """What its view says of it as a host."""
        mine = (host for host in p.known.state_hosts if host.member == (p.group, p.incarnation))
        return [host for host in mine if host.counts or host.is_new]

    # ---------------------------------------------------------------------------------------------- what it receives

    def receive(self, p: Process) -> Process | None:
        """The process receives its next message. Of a view, a new host reports what it has."""
        action = p.down[0].value
        q = super().receive(p)
        if q is None or q.orders is None or not q.known.is_member:
            return q
        q = self._served(self._tidied(self._anew(q)))
        if isinstance(action, m.SendView) and (action.view.epoch, action.view.fencing) == (
            q.known.epoch,
            q.known.fencing,
        ):
            q = self._reported(q)
        return q

    def _learn(self, p: Process) -> Process:
        """Who is no member has nothing, and is ready to become one."""
        if p.known.is_member:
            return p
        p = self._empty(p)
        return p if p.known.leave else p._replace(up=self._up(p, m.Ready(p.group, p.incarnation)))

    def _empty(self, p: Process) -> Process:
        empty = Process(
            p.group, p.incarnation, p.where, p.down, p.up, p.orders, p.process_nonce, p.replaces, applied=-1
        )
        return empty._replace(weights="", copies=Copies((-1,) * len(self.kept(p).weights)))

    def _anew(self, p: Process) -> Process:
        """A member that has no part in the last commit has left in between and come back, without hearing of it."""
        at = p.known.committed
        held = p.held.value if p.held else None
        if p.applied < 0 or p.applied >= at[0] or (held is not None and (held.step, held.epoch) == at):
            return p
        if any(host.counts for host in self.parts(p)):
            raise Violation(f"group {p.name} counts as a host, has applied {p.applied} and has not the sums of {at}")
        return self._empty(p)

    def _tidied(self, p: Process) -> Process:
        """Drop what it does not host any more, and sums of epochs in which their step was not committed; read from the
        checkpoint what it hosts from the start."""
        kept, (step, epoch) = self.kept(p), p.known.committed
        mine = {host.shard: host for host in self.parts(p)}
        own = {shard: at for shard, at in kept.own if shard in mine}
        if epoch == 0 and p.applied == step:
            own |= {shard: step for shard, host in mine.items() if host.counts and shard not in own}
        sums = tuple(one for one in kept.sums if one[0] in mine and self._is_good(one, p))
        refused = kept.refused if kept.refused[0] == p.known.epoch else (0, 0)
        return p._replace(copies=kept._replace(own=tuple(sorted(own.items())), sums=sums, refused=refused))

    @staticmethod
    def _is_good(one: tuple[int, int, int], p: Process) -> bool:
        """Whether sums are of a committed step, or of the step in flight in the present epoch."""
        _, step, epoch = one
        at = p.known.committed
        return step < at[0] or (step, epoch) == at or (step > at[0] and epoch == p.known.epoch)

    def _served(self, p: Process) -> Process:
        """A donor copies what new hosts are to get, as soon as it is in that state, and drops what is not listed."""
        kept, own = self.kept(p), dict(self.kept(p).own)
        listed = {
            (host.shard, host.member, host.step)
            for host in p.known.state_hosts
            if host.donor == (p.group, p.incarnation)
        }
        copied = {one for one in kept.copied if one in listed}
        for one in listed - copied:
            if own.get(one[0], -1) > one[2] or one[0] not in own:
                raise Violation(f"group {p.name} is to give state shard {one[0]} after step {one[2]}, and has {own}")
            if own[one[0]] == one[2]:
                copied.add(one)
        return p._replace(copies=kept._replace(copied=tuple(sorted(copied))))

    def _reported(self, p: Process) -> Process:
        """A new host reports what it has; one that has caught up, that it has."""
        own = dict(self.kept(p).own)
        for host in self.parts(p):
            if not host.counts and host.shard in own and host.standing != "whole":
                p = self._have(p, host.shard, whole=True)
            elif host.standing == "new" and host.shard not in own and host.donor is None:
                p = self._have(p, host.shard, whole=False)
        if self._stands_still(p):
            p = self.refused(p, self.kept(p).refused[1])
        if self.kept(p).caught == p.applied == p.known.committed[0]:
            p = self._caught(p)
        return p

    def _reported_of_offers(self, p: Process) -> list[m.Event]:
        """After a Hello it reports again that it has caught up, before any vote: one that comes earlier is ignored."""
        reported = super()._reported_of_offers(p)
        if self.kept(p).caught == p.applied >= 0:
            reported.append(m.CaughtUp(p.group, p.incarnation, 0, p.applied, p.weights))
        return reported

    def _have(self, p: Process, shard: int, whole: bool) -> Process:
        return p._replace(up=self._up(p, m.Have(p.group, p.incarnation, p.known.epoch, shard, whole)))

    def _caught(self, p: Process) -> Process:
        return p._replace(up=self._up(p, m.CaughtUp(p.group, p.incarnation, 0, p.applied, p.weights)))

    # --------------------------------------------------------------------------------------------------- what it does

    def computes(self, p: Process) -> bool:
        """Whether it can compute: with all weights of the last step."""
        return super().computes(p) and self.is_complete(p)

    def is_complete(self, p: Process) -> bool:
        """Whether it has all weights of the step that it has applied."""
        return all(step == p.applied for step in self.kept(p).weights)

    def reduces(self, p: Process) -> bool:
        """Whether it takes part in the reduction: each shard has a primary."""
        return (
            super().reduces(p)
            and not self._stands_still(p)
            and {host.shard for host in p.known.state_hosts if host.counts} == set(range(self._spec.state_shards))
        )

    def applies(self, p: Process) -> bool:  # type: ignore[override]
        """Whether a step is committed that it has not applied; a joiner that has no state has nothing to apply."""
        return p.applied >= 0 and super().applies(p)

    def apply(self, p: Process) -> Process:
        """Apply the committed step to all shards that it has, and make the weights of these."""
        step, epoch = p.known.committed
        p = super().apply(p)
        kept, weights, own = self.kept(p), list(self.kept(p).weights), dict(self.kept(p).own)
        for shard, at in own.items():
            if at != step - 1 or (shard, step, epoch) not in kept.sums:
                raise Violation(f"group {p.name} has state shard {shard} after step {at} and not the sums of {step}")
            own[shard] = weights[shard] = step
        sums = tuple(one for one in kept.sums if one[0] not in own or one[1] > step)
        return self._served(p._replace(copies=kept._replace(weights=tuple(weights), own=tuple(own.items()), sums=sums)))

    def gathers(self, p: Process) -> list[int]:
        """The shards whose weights it lacks: of the step that it has applied or, if it has none, of the last commit."""
        if p.orders is None or not p.known.is_member or self._stands_still(p):
            return []
        step = self.target(p)
        return [shard for shard, known in enumerate(self.kept(p).weights) if known < step]

    @staticmethod
    def target(p: Process) -> int:
        """The step of which it wants all weights."""
        return p.applied if p.applied >= 0 else p.known.committed[0]

    def gathered(self, p: Process, shard: int) -> Process:
        """It has the weights of one shard; a joiner that has them all has caught up."""
        kept, weights, step = self.kept(p), list(self.kept(p).weights), self.target(p)
        weights[shard] = step
        p = p._replace(copies=kept._replace(weights=tuple(weights)))
        if p.applied >= 0 or any(known != step for known in weights):
            return p
        p = p._replace(applied=step, weights=str(step), copies=self.kept(p)._replace(caught=step))
        return self._caught(p)

    def fetches(self, p: Process) -> list[Wanted]:
        """What it may fetch as a new host, in the state of the offer or a later one."""
        if p.orders is None or not p.known.is_member or self._stands_still(p):
            return []
        own = dict(self.kept(p).own)
        return [
            Wanted(host.shard, host.donor, host.step)
            for host in self.parts(p)
            if host.donor is not None and host.shard not in own and p.applied >= host.step
        ]

    def fetched(self, p: Process, wanted: Wanted) -> Process:  # type: ignore[override]
        """It has a shard's state, applies what it has queued, and makes the weights."""
        kept, weights = self.kept(p), list(self.kept(p).weights)
        for step in range(wanted.step + 1, p.applied + 1):
            if not any(one[:2] == (wanted.shard, step) for one in kept.sums):
                raise Violation(f"group {p.name} has not the sums of state shard {wanted.shard} in step {step}")
        weights[wanted.shard] = p.applied
        own = {**dict(kept.own), wanted.shard: p.applied}
        sums = tuple(one for one in kept.sums if one[0] != wanted.shard or one[1] > p.applied)
        p = p._replace(copies=kept._replace(weights=tuple(weights), own=tuple(sorted(own.items())), sums=sums))
        return self._have(p, wanted.shard, whole=True)

    def refusable(self, p: Process) -> list[Wanted]:
        """What it may refuse: an epoch begins with that, and the end of the run has no more of it."""
        if p.orders is None or p.known.leave or (p.held is not None and p.held.value.epoch == p.known.epoch):
            return []
        return self.fetches(p)

    def refused(self, p: Process, shard: int) -> Process:
        """It cannot keep a shard of which it is a new host."""
        have = m.Have(p.group, p.incarnation, p.known.epoch, shard, False, "no memory")
        return p._replace(up=self._up(p, have), copies=self.kept(p)._replace(refused=(p.known.epoch, shard)))

    def _stands_still(self, p: Process) -> bool:
        """Whether it waits for another epoch, as it has refused a shard in this one."""
        return p.orders is not None and self.kept(p).refused[0] == p.known.epoch

    def ends(self, p: Process) -> Process | None:
        """After the last step: vote on its weights, which it must have gathered."""
        return super().ends(p) if self.is_complete(p) else None


def has_state(p: Process, shard: int, at: tuple[int, int]) -> bool:
    """Whether a process can be in the state of a shard after the last commit, ``at`` (step, epoch)."""
    kept = ShardProcesses.kept(p)
    step = dict(kept.own).get(shard)
    return step == at[0] or (step == at[0] - 1 and (shard, *at) in kept.sums)
