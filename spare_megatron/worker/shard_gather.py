"""Gathers what a rank lacks in a job whose groups keep only some state shards (docs/protocol.md, rules 25 to 29): after
each step the parameters of the other shards, and when an epoch begins the state of shards of which its group is a new
host.

A *host* of a shard is a group that keeps it, and *counts* for it once votes have compared its copy. When a step is
committed each host updates its shards without waiting for others, and so has their new parameters. The *primary* of a
shard is the lowest group that counts for it. In a *gather* each rank sends what its group is primary of, bit for bit,
to the rank at the same position of the other groups of the epoch (:mod:`spare_megatron.collectives.gathering`). As any
reduction, a gather ends with its epoch, and is repeated in the next one.

All members of a ring have the same order of operations. An epoch begins with a gather of the parameters after t*, the
last committed step, if a member says that it lacks them, and of the state of shards with new hosts. Then each reduction
whose step is committed in that epoch is followed by a gather after that step. What a gather reads does not change
before the next commit, because that needs every member's vote, and a vote needs the gather. Gathers have a thread of
their own, and a rank that lacks nothing computes meanwhile. Otherwise a rank could wait in a pipeline for a rank that
waits for it in a gather.

If the commit of a step orders a save, or ends the run of a job that saves, the state of all shards follows the
parameters in that gather, one shard after the other. The group that saves keeps all of it, in host memory, until it has
copied its share of the checkpoint.

The state of shards is sent one shard after the other, so a group has memory for one of those that it gives at a time,
and for those that it is to keep. All others pass through a small window.

Where the ranks of a group divide the sums among them (``--use-distributed-optimizer``), a rank's shards are those of
its part, and a gather brings the parameters of this part. The training threads of the group exchange the parts once
each has its own; the next pieces need all of them.

Beside the parameters after t*, the gather with which an epoch begins brings what is no part of any shard (scales of
sums, the learning-rate schedule, a script's own state): the lowest of the primaries puts it in. So a group that comes
back, or a standby that takes its place, has all that it needs after that gather
(:mod:`spare_megatron.worker.shard_joining`).

Promises: no piece of step t + 1 begins without all parameters after t; nothing is reduced in an epoch before all new
hosts have their state. No group is blamed for a gather that ended with its epoch; a gather that fails by itself is a
failed vote.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from spare_megatron.collectives.gathering import Gathering
from spare_megatron.collectives.reduction import ReduceOutcome, Reduction
from spare_megatron.collectives.reduction_attempt import OpenReduction
from spare_megatron.collectives.ring import Shares
from spare_megatron.control_plane.session import Session
from spare_megatron.protocol.member import Orders
from spare_megatron.protocol.messages import ReductionResult
from spare_megatron.protocol.view import View
from spare_megatron.worker.engine import StepEngine
from spare_megatron.worker.engine_decorator import PassThrough
from spare_megatron.worker.free_bytes import free_bytes
from spare_megatron.worker.packed_state import packed
from spare_megatron.worker.ticket_reader import LeaveError

GB = 1e9
BYTES = 4
"""Of an element of a shard's state."""
COPIES_MADE = 2
"""Of a shard that a group gets: what comes, and what is kept of it."""
WINDOW = 2**24
"""So many elements of a shard's state are sent at a time. A group that neither gives nor keeps it has memory for these
only."""
LOOK_S = 0.05
"""The interval at which a wait looks whether the job is over, or its epoch."""


class Shards(Protocol):
    """The state shards of one rank, as :mod:`spare_megatron.megatron_adapter.model.optimizer_shards` has them."""

    number: int
    kept: frozenset[int] | None

    @property
    def device(self) -> torch.device:
        """Where the state is."""

    def keep(self, shards: Collection[int], received: Mapping[int, torch.Tensor]) -> None:
        """Keep these shards and no other; ``received`` has the state of those that are not kept yet."""

    def weight_sizes(self) -> list[int]:
        """Elements of each shard's part of :meth:`weights`."""

    def weights(self, order: Sequence[int], mine: Collection[int]) -> torch.Tensor:
        """The bits of all parameters, int32, in this order of shards. Those of ``mine`` are filled in, the others are
        only space."""

    def take_weights(self, flat: torch.Tensor, order: Sequence[int], own: Collection[int]) -> None:
        """Write all parameters but those of ``own``."""

    def share_weights(self) -> None:
        """Get the parameters of which other ranks of the group have the shards; collective in the group."""

    def state(self, shard: int, *, mine: bool) -> torch.Tensor:
        """The bits of a shard's state, int32, if it is ``mine`` to send; else space for them."""

    def state_size(self, shard: int) -> int:
        """Elements of :meth:`state`."""

    def digests(self, shards: Sequence[int]) -> list[int]:
        """64 bits for each of some shards that are kept."""


class Sums(Protocol):
    """The part of :class:`~spare_megatron.collectives.replica_communicators.ReplicaCommunicators` that is needed; one
    call at a time."""

    def gather(self, epoch: int, request: Gathering, stale: Callable[[], bool]) -> ReduceOutcome:
        """Gather over the groups of ``epoch``."""

    def reduce(self, epoch: int, request: Reduction, stale: Callable[[], bool]) -> ReduceOutcome:
        """Sum over the groups of ``epoch``."""

    def begin(self, epoch: int, request: Reduction, stale: Callable[[], bool]) -> OpenReduction:
        """Begin to sum over the groups of ``epoch`` what is not final yet. Never waits."""


class ShardGather:
    """The thread. ``look`` is for the control thread, all other methods are for the training thread."""

    def __init__(
        self,
        shards: Shards,
        engine: StepEngine,
        first_step: int,
        inject: Callable[[str, int, int], None],
        *,
        saves: bool,
    ) -> None:
        """``engine`` has the state that is in no shard. ``inject(point, step, n)`` is called where a fault can be
        injected; ``saves``: the checkpoints of this job have the optimizer's state."""
        self._shards, self._engine, self._inject, self._saves = shards, engine, inject, saves
        self._changed = threading.Condition()
        self._view: View | None = None
        """Of the newest epoch, as it began."""
        self._applied = self._whole = first_step
        """The step that the optimizers have applied, and the one of which all parameters are here."""
        self._shared = first_step
        """The step of which this rank has the parameters of other ranks of its group too."""
        self._done = (0, 0)
        """(epoch, step) of the newest gather that was complete."""
        self._ended = (0, 0)
        """(epoch, step) of the newest one that was complete, has failed, or cannot be made."""
        self._failure: ReduceOutcome | None = None
        """How the gather of :attr:`_ended` failed."""
        self._ordered: int | None = None
        """The step whose commit ordered a save, or ended the run: all state follows its parameters."""
        self._saver = -1
        """The lowest group of the epoch in which this rank has reduced last, which saves what that commits."""
        self._saved: tuple[int, dict[int, torch.Tensor]] = (-1, {})
        """A step, and the state of all shards after it."""
        self._received: dict[int, torch.Tensor] = {}
        """State of shards that the group is to keep, after the step of :attr:`_done`."""
        self._joins = False
        """Whether the group is no member, or one that has not caught up: it has nothing to put in."""
        self._takes_part = False
        """Whether the training thread has seen that the group is a member, and has cut the state."""
        self._unsharded: torch.Tensor | None = None
        """For a group that joins: what is in no shard, as a member packed it."""
        self._turn = threading.Lock()
        """Held in a reduction."""
        self._closing = False
        self._broken: Exception | None = None
        """What ended the thread."""
        self._digests: dict[tuple[int, int], int] = {}
        """(step, shard) -> digest."""
        self._thread = threading.Thread(target=self._run, name="shard-gather", daemon=True)

    def look(self, orders: Orders) -> None:
        """Note a newer epoch."""
        hosts = tuple(one for one in orders.view.state_hosts if one.counts or one.is_new)
        with self._changed:
            self._view = replace(orders.view, state_hosts=hosts)
            if not orders.view.is_member:
                self._joins, self._takes_part = True, False
            self._changed.notify_all()

    def start(self, session: Session, sums: Sums) -> None:
        """Take part in gathers from now on."""
        self._session, self._sums = session, sums
        self._thread.start()

    def close(self) -> None:
        """Take part in no further one."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def empty(self) -> None:
        """The group is no member: keep no shard. Not called before the first view."""
        with self._turn:
            self._shards.keep((), {})

    def join(self, step: int, epoch: int) -> torch.Tensor | None:
        """The group is a member in ``epoch``, in which ``step`` is t*, and has not caught up: take part in gathers.
        Returns what is in no shard, as :func:`~spare_megatron.worker.packed_state.packed`, once all parameters after
        ``step`` are here; None where the epoch has ended before."""
        with self._turn, self._changed:
            if self._applied != step or self._unsharded is None:  # what it has is older, or not the job's
                self._shards.keep((), {})
                self._received, self._unsharded, self._whole = {}, None, -1
            self._applied, self._joins, self._takes_part = step, True, True
            self._note_save(step)
            self._changed.notify_all()
        with self._changed:
            while self._done != (epoch, step):
                if self._is_over(epoch):
                    return None
                self._session.progress("start", step, 0)
                self._wait()
        self._install()
        return self._unsharded

    def caught_up(self, view: View) -> None:
        """The group has caught up, and reports what it has as a new host."""
        with self._changed:
            self._joins = False
        self._say_have(view)

    def settle(self, step: int) -> None:
        """The optimizers have applied ``step``: return when all parameters after it are here, and the group keeps what
        it is to keep. Raises LeaveError where the job is over before."""
        if self._shards.kept is None:
            self._begin()
        with self._changed:
            if self._applied != step:
                self._unsharded = None  # of an older step
            self._applied = step
            self._note_save(step)
            self._changed.notify_all()
            if self._whole < step or not self._done[0]:
                self._session.progress("reduce", step, 0)
            while self._whole < step or not self._done[0]:
                if self._session.orders.over:
                    raise LeaveError(self._session.orders)
                self._wait()
        self._install()
        if self._shared < step:
            self.share(step)

    def share(self, step: int) -> None:
        """Exchange with the other ranks of the group what each has of the parameters after ``step``. All of them call
        it, each when it has all of its part; which steps it is called for is the same on all."""
        self._shards.share_weights()
        self._shared = step

    def _begin(self) -> None:
        """Keep what the group counts for, of the whole state with which the job begins, and take part in gathers."""
        view = self._session.orders.view
        self._shards.keep({one.shard for one in view.state_hosts if one.member == view.receiver and one.counts}, {})
        with self._changed:
            self._takes_part = True

    def _note_save(self, step: int) -> None:
        """Note whether the commit of ``step`` has ordered a save. All members find the same: it is in the commit, and
        in all views until the next one, for which this rank has to vote."""
        view = self._session.orders.view
        if view.committed[0] != step or self._ordered == step:
            return
        self._saved = (-1, {})
        if self._saves and (view.save or view.leave):
            self._ordered = step

    def state_to_save(self) -> dict[int, torch.Tensor]:
        """The state of each shard after the step that was applied last, as :meth:`Shards.state` has it; once, on the
        group that saves it. Raises LeaveError where the job is over before it is here."""
        with self._changed:
            while self._saved[0] != self._applied:
                if self._session.orders.over:
                    raise LeaveError(self._session.orders)
                self._session.progress("reduce", self._applied, 0)
                self._wait()
            (_, state), self._saved = self._saved, (-1, {})
        return state

    def reduce(self, epoch: int, request: Reduction, stale: Callable[[], bool]) -> ReduceOutcome:
        """Reduce in ``epoch`` behind its gather; fails as that did."""
        failed = self._wait_for(epoch, stale)
        if failed is not None:
            return failed
        with self._changed:
            self._note_saver(epoch)
        with self._turn:
            return self._sums.reduce(epoch, request, stale)

    def begin(self, epoch: int, request: Reduction, stale: Callable[[], bool]) -> OpenReduction | None:
        """Begin to reduce in ``epoch`` what is not final yet; None where the gather with which that begins is not
        complete. Never waits. The next gather in ``epoch`` follows the commit of what is reduced; that of a newer one
        has other connections."""
        with self._changed:
            if self._done[0] != epoch:
                return None
            self._note_saver(epoch)
        return self._sums.begin(epoch, request, stale)

    def _note_saver(self, epoch: int) -> None:
        if self._view is not None and self._view.epoch == epoch:
            self._saver = min(self._view.live_groups)

    def digests(self, epoch: int, stale: Callable[[], bool]) -> tuple[tuple[int, int], ...]:
        """(shard, digest) of each shard that the group keeps in ``epoch``, signed, for its vote."""
        self._wait_for(epoch, stale)
        step, kept = self._applied, sorted(self._shards.kept or ())
        self._digests = {at: digest for at, digest in self._digests.items() if at[0] == step}
        new = [shard for shard in kept if (step, shard) not in self._digests]
        for shard, digest in zip(new, self._shards.digests(new), strict=True):
            self._digests[step, shard] = (digest ^ 1 << 63) - (1 << 63)
        return tuple((shard, self._digests[step, shard]) for shard in kept)

    def _wait_for(self, epoch: int, stale: Callable[[], bool]) -> ReduceOutcome | None:
        """Wait for the gather with which ``epoch`` begins; why nothing can be reduced in it, None where it can."""
        with self._changed:
            while self._done[0] != epoch:
                if self._failure is not None and self._ended[0] == epoch:
                    return self._failure
                if stale():
                    return ReduceOutcome(ok=False, stale=True)
                self._wait()
        self._install()
        return None

    def _install(self) -> None:
        """Keep what the view of the newest gather says."""
        with self._changed:
            view, received = self._view, self._received
            if view is None or self._done[0] != view.epoch:
                return  # a newer epoch has begun, whose gather is still to come
            mine = {host.shard for host in view.state_hosts if host.member == view.receiver}
            self._shards.keep(mine & ((self._shards.kept or frozenset()) | received.keys()), received)
            self._received = {}
            self._changed.notify_all()

    def _wait(self) -> None:
        if self._broken is not None:
            raise RuntimeError("the gathers of state shards have ended") from self._broken
        self._changed.wait(LOOK_S)

    def _run(self) -> None:
        try:
            if self._shards.device.type == "cuda":
                torch.cuda.set_device(self._shards.device)  # a thread begins with device 0
            self._take_part()
        except Exception as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _take_part(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._due() is not None)
                due = self._due()
                if self._closing or due is None:
                    return
                view, step = due
                first = self._done[0] != view.epoch
            if first and self._refuses(view, step):
                self._wait_for_newer(view.epoch)
                continue
            if first:
                self._say_have(view)
            self._gather(view, step, first)

    def _refuses(self, view: View, step: int) -> bool:
        """Report which shards this rank has no memory for, of those of which its group is a new host; then another
        epoch begins, and nothing is gathered in this one."""
        with self._changed:
            there = (self._shards.kept or frozenset()) | self._received.keys()
        mine = [host for host in view.state_hosts if host.member == view.receiver and host.donor is not None]
        needed, refused = 0, False
        for host in mine if not view.leave else ():
            if host.shard in there:
                continue
            own = COPIES_MADE * BYTES * self._shards.state_size(host.shard)
            why = self._no_room(step, host.shard, needed + own)
            if why:
                refused = True
                self._session.have(view.epoch, host.shard, whole=False, detail=why)
            else:
                needed += own
        return refused

    def _no_room(self, step: int, shard: int, needed: int) -> str:
        """Why this rank cannot have so many bytes more; empty where it can."""
        try:
            self._inject("copy", step, shard)
            free = free_bytes(self._shards.device)
        except RuntimeError as error:
            return f"{error}"
        return f"it needs {needed / GB:.2f} GB, and {free / GB:.2f} GB are free" if needed > free else ""

    def _due(self) -> tuple[View, int] | None:
        view = self._view
        if view is None or not view.is_member or not self._takes_part or self._applied < view.committed[0]:
            return None
        if (view.epoch, self._applied) <= self._ended or (self._failure is not None and self._ended[0] == view.epoch):
            return None
        return view, self._applied

    def _gather(self, view: View, step: int, first: bool) -> None:
        """Take part in the gather of the parameters after ``step``; if it is the ``first`` one of its epoch, of the
        state of shards with new hosts and of what is in no shard; and of all state where it is to be saved."""
        primaries: dict[int, int] = {}
        for host in sorted((one for one in view.state_hosts if one.counts), key=lambda one: one.group):
            primaries.setdefault(host.shard, host.group)
        if len(primaries) < self._shards.number:  # nothing is committed in this epoch
            self._end(view, step, None)
            return
        mine = {shard for shard, group in primaries.items() if group == view.group}
        self._inject("gather", step, 0)
        received, saved = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        with self._turn:
            outcome, lacking = ReduceOutcome(ok=True, stale=False), True
            if first:
                outcome = self._gathered(view, [], [], {"lacking": float(step > self._whole)})
                lacking = outcome.ok and outcome.scalars["lacking"] > 0
            if lacking:
                outcome = self._gather_weights(view, step, primaries, mine)
            if outcome.ok and first:
                outcome, received = self._begin_epoch(view, primaries, lacking)
            saves = view.group in (self._saver, min(view.live_groups)) and not self._joins
            for shard in range(self._shards.number if self._ordered == step else 0):
                if not outcome.ok:
                    break
                self._inject("gather", step, 1 + shard)
                outcome, state = self._gather_state(view, shard, primaries[shard], None, keeps=saves)
                if outcome.ok and saves:
                    saved[shard] = state.to("cpu", copy=True)
            if outcome.stale:
                self._wait_for_newer(view.epoch)
                return
            self._end(view, step, outcome, received, saved)

    def _gather_weights(
        self, view: View, step: int, primaries: Mapping[int, int], mine: Collection[int]
    ) -> ReduceOutcome:
        """Gather the parameters after ``step``. ``mine``: the shards of which this group is primary."""
        order = sorted(primaries, key=lambda shard: (primaries[shard], shard))
        flat, sizes = self._shards.weights(order, mine), self._shards.weight_sizes()
        given = Counter[int]()
        for shard, group in primaries.items():
            given[group] += sizes[shard]
        outcome = self._gathered(view, [flat], [_shares(view, given)])
        if outcome.ok and step > self._whole:
            self._shards.take_weights(flat, order, self._shards.kept or ())
        return outcome

    def _begin_epoch(
        self, view: View, primaries: Mapping[int, int], lacking: bool
    ) -> tuple[ReduceOutcome, dict[int, torch.Tensor]]:
        """Gather the state of shards with new hosts, as far as these need it, and what is in no shard if a member is
        ``lacking`` it. Returns the outcome, and the state of the shards that the group is to keep and lacks."""
        to: dict[int, set[int]] = {}
        for host in view.state_hosts:
            if not host.counts:
                to.setdefault(host.shard, set()).add(host.group)
        hosted = {host.shard for host in view.state_hosts if host.member == view.receiver}
        missing, received = hosted - (self._shards.kept or frozenset()), dict[int, torch.Tensor]()
        for shard, groups in sorted(to.items()):
            outcome, state = self._gather_state(view, shard, primaries[shard], groups, keeps=shard in missing)
            if not outcome.ok:
                return outcome, {}
            if shard in missing:
                received[shard] = state
        giver, unsharded = min(primaries.values()), torch.empty(0, dtype=torch.int32)
        if lacking and giver == view.group:
            unsharded = packed(self._engine)
        outcome = self._gathered(view, [], [], {"unsharded": unsharded.numel()})
        if not outcome.ok:
            return outcome, {}
        if lacking:
            numel = int(outcome.scalars["unsharded"])
            if giver != view.group:
                unsharded = torch.empty(numel, dtype=torch.int32)
            outcome = self._gathered(view, [unsharded], [_shares(view, {giver: numel})])
            if outcome.ok and self._joins:
                self._unsharded = unsharded
        return outcome, received

    def _gather_state(
        self, view: View, shard: int, primary: int, to: Collection[int] | None, *, keeps: bool
    ) -> tuple[ReduceOutcome, torch.Tensor]:
        """Gather the state of a shard, which ``primary`` gives, for the groups ``to``, None: all. Returns the state
        where this group ``keeps`` it or gives it, else what has passed through last."""
        size, here = self._shards.state_size(shard), keeps or primary == view.group
        if here:
            state = self._state(shard, primary == view.group)
        else:
            state = torch.empty(min(size, WINDOW), dtype=torch.int32, device=self._shards.device)
        parts = [state[at : at + WINDOW] if here else state[: size - at] for at in range(0, size, WINDOW)]
        shares = [_shares(view, {primary: len(part)}, to) for part in parts]
        return self._gathered(view, parts, shares), state

    def _gathered(
        self,
        view: View,
        tensors: Sequence[torch.Tensor],
        shares: Sequence[Shares],
        scalars: Mapping[str, float] | None = None,
    ) -> ReduceOutcome:
        request = Gathering(tensors, shares, scalars or {})
        return self._sums.gather(view.epoch, request, lambda: self._is_over(view.epoch))

    def _state(self, shard: int, mine: bool) -> torch.Tensor:
        """What this rank sends of a shard's state, also if it has received this state and not installed it yet."""
        with self._changed:
            received = self._received.get(shard)
        return received if mine and received is not None else self._shards.state(shard, mine=mine)

    def _end(
        self,
        view: View,
        step: int,
        outcome: ReduceOutcome | None,
        received: Mapping[int, torch.Tensor] | None = None,
        saved: dict[int, torch.Tensor] | None = None,
    ) -> None:
        with self._changed:
            self._ended, self._failure = (view.epoch, step), None
            if outcome is not None and outcome.ok:
                self._done, self._whole = (view.epoch, step), step
                self._received.update(received or {})
                if saved:
                    self._saved = (step, saved)
            elif outcome is not None:
                self._failure = outcome
            self._changed.notify_all()
        if outcome is not None and outcome.ok:
            if received and not self._joins:
                self._say_have(view)
        elif outcome is not None:
            detail = f"the gather of the parameters after step {step} failed: {outcome.error}"
            self._session.reduced(
                ReductionResult(step + 1, view.epoch, ok=False, pieces=(), links=outcome.links, detail=detail)
            )

    def _say_have(self, view: View) -> None:
        """Report which shards this rank has of those of which its group is a new host, and which it can never have. A
        group that joins has none before it has caught up."""
        with self._changed:
            there = (self._shards.kept or frozenset()) | self._received.keys()
        for host in view.state_hosts:
            if host.member == view.receiver and not host.counts:
                if host.shard in there:
                    if not self._joins:
                        self._session.have(view.epoch, host.shard, whole=True)
                elif host.donor is None:
                    self._session.have(view.epoch, host.shard, whole=False)

    def _is_over(self, epoch: int) -> bool:
        view = self._view
        return self._closing or self._session.orders.over or view is None or view.epoch != epoch

    def _wait_for_newer(self, epoch: int) -> None:
        """After a gather that its epoch ended: wait for the next one, or for the end."""
        with self._changed:
            while not self._is_over(epoch):
                self._changed.wait(LOOK_S)


def _shares(view: View, given: Mapping[int, int], to: Collection[int] | None = None) -> Shares:
    """What each group of an epoch gives, in elements; ``to``: the groups that need it, None: all."""
    groups = view.live_groups
    size, ranks = len(groups), [groups.index(one) for one in (groups if to is None else to)]
    hops = tuple(max((rank - giver) % size for rank in ranks) for giver in range(size))
    return Shares(tuple(given.get(group, 0) for group in groups), hops)


@dataclass
class GatheringEngine(PassThrough):
    """An engine whose group keeps only some state shards: an update ends with the gather of all parameters."""

    gather: ShardGather

    def apply(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Mapping[str, Any]:
        """Have the engine apply the committed update to what its group keeps, and gather the rest."""
        report = self.engine.apply(step, reduced, scalars)
        self.gather.settle(step)
        return report
