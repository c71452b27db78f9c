"""The explorer finds wordings of the rules of state shards that are wrong: each is put back and must be found.

Those of the first part are decisions of the machine, those of the second part what a process does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from spare_megatron.protocol import invariants, learning, state_levelling, state_shards, voting
from spare_megatron.protocol.messages import Have
from spare_megatron.protocol.state import State
from spare_megatron.protocol.transition import ignore
from spare_megatron.protocol.view import COUNTS, VOID, StateHost
from tests.explore.model import Model
from tests.explore.process import Process, Processes
from tests.explore.search import CounterexampleError, Explorer, play
from tests.explore.shape import Shape
from tests.explore.shard_process import ShardProcesses, Wanted
from tests.explore.walk import run_out
from tests.pure.scenario import FOLDER, run

pytestmark = pytest.mark.timeout(600)

Patch = pytest.MonkeyPatch
TWICE = Shape(3, 3, kinds=frozenset({"kill"}), state_shards=2, state_copies=2, formed=True)
SMALLEST = replace(TWICE, steps=1, state_shards=1)
"""A quarter of the states, for what is found only when all are explored: that the job does not end."""
REFUSED = replace(SMALLEST, kinds=frozenset({"kill", "unable"}))
DRAINED = replace(TWICE, faults=1, kinds=frozenset({"drain"}))
ALONE = Shape(faults=2, kinds=frozenset({"drain", "unable"}), state_shards=2, state_copies=1, formed=True)


def finds(shape: Shape, what: str) -> None:
    with pytest.raises(CounterexampleError, match=what):
        Explorer(Model(shape)).explore()


def test_a_new_host_that_counts_as_soon_as_it_is_named(monkeypatch: Patch) -> None:
    """A commit makes a host that lacks the sums of its step; then its donor is lost."""

    def renewed(state: State) -> State:
        after = real(state)
        named = (replace(h, standing=COUNTS, donor=None, step=-1) for h in after.state_hosts)
        return replace(after, state_hosts=tuple(named))

    real = state_shards.renewed
    monkeypatch.setattr(state_shards, "renewed", renewed)
    finds(TWICE, "counts for state shard")


def test_a_wipe_out_while_a_report_is_on_its_way(monkeypatch: Patch) -> None:
    """The last host that counts is lost, and a new one has the state, which nobody has received yet."""
    monkeypatch.setattr(state_shards, "lost", state_shards.uncounted)
    finds(TWICE, "need not be")


def test_a_job_that_waits_for_a_state_that_nobody_has(monkeypatch: Patch) -> None:
    monkeypatch.setattr(state_shards, "lost", lambda state: [])
    finds(SMALLEST, "does not end from here|no copy is left")


def test_two_drained_groups_judged_one_by_one(monkeypatch: Patch) -> None:
    """Each could leave if the other one stayed. It takes three shards, and so more states than a mutation is worth to
    explore: the golden scenario finds it."""

    def needed(state: State, groups: Iterable[int]) -> frozenset[int]:
        alone = (group for group in groups if group in real(replace(state, drained=frozenset({group})), [group]))
        return frozenset(alone)

    real = state_shards.needed
    monkeypatch.setattr(state_shards, "needed", needed)
    with pytest.raises(invariants.InvariantError, match="group 0 leaves, and state shard 0 has 0 copies"):
        run((FOLDER / "state_shards_of_two_drained_groups.txt").read_text())


def test_a_report_of_an_earlier_epoch_counts(monkeypatch: Patch) -> None:
    """It may be of an earlier time as a host of the same shard."""

    def new_host(state: State, event: Have) -> StateHost | None:
        return real(state, replace(event, epoch=state.epoch))

    real = state_shards.new_host
    monkeypatch.setattr(state_shards, "new_host", new_host)
    text = (FOLDER / "state_shard_that_is_copied.txt").read_text()
    assert run(text) != text


def test_a_drained_group_is_named_as_a_host(monkeypatch: Patch) -> None:
    monkeypatch.setattr(state_shards, "_able", lambda state: frozenset(state.live))
    finds(DRAINED, "has hosts|leaves, and state shard")


def test_nobody_else_is_asked_where_a_group_cannot_keep_a_shard(monkeypatch: Patch) -> None:
    """The group waits for another epoch, and all others for the group."""
    monkeypatch.setattr(learning, "take", lambda after, before, taken, why: ignore(after, why))
    finds(REFUSED, "does not end from here")


def test_the_last_copy_leaves_where_no_other_group_has_room(monkeypatch: Patch) -> None:
    """No copy is due where no able group can keep one."""
    monkeypatch.setattr(state_shards, "max", lambda least, due: due, raising=False)
    finds(ALONE, "no copy is left")


def test_who_cannot_keep_a_shard_counts_as_a_host_of_it(monkeypatch: Patch) -> None:
    """So no other group is asked. It takes four groups: the golden scenario finds it."""
    monkeypatch.setattr(state_shards, "unable_groups", lambda state: defaultdict(set))
    text = (FOLDER / "state_shard_that_a_group_cannot_keep.txt").read_text()
    assert run(text) != text


def test_what_cannot_be_kept_is_hoped_for(monkeypatch: Patch) -> None:
    """The only copy is lost, and the job waits for a group that has none."""

    def lost(state: State) -> list[int]:
        hoped = {host.shard for host in state.state_hosts if host.standing != VOID}
        return [shard for shard in state_shards.uncounted(state) if shard not in hoped]

    monkeypatch.setattr(state_shards, "lost", lost)
    finds(replace(REFUSED, faults=3), "does not end from here|no copy is left")


def struck_off_early(patch: Patch) -> None:
    """The fullest host is struck off when another is named, before that one counts."""

    def levelled(state: State) -> tuple[State, str]:
        after, what = real(state)
        if not any(host.is_new for host in after.state_hosts):
            return after, what
        counting = tuple(replace(h, standing=COUNTS) if h.is_new else h for h in after.state_hosts)
        struck, _ = real(replace(after, state_hosts=counting))
        left = {(host.shard, host.group) for host in struck.state_hosts}
        return replace(after, state_hosts=tuple(h for h in after.state_hosts if (h.shard, h.group) in left)), what

    real = state_levelling.levelled
    patch.setattr(voting, "levelled", levelled)


def struck_off_by_number(patch: Patch) -> None:
    """Not the fullest host is struck off, but the first one: a copy may be taken from who has just got it."""

    def levelled(state: State) -> tuple[State, str]:
        after, what = real(state)
        if len(after.state_hosts) >= len(state.state_hosts):
            return after, what
        shard = (set(state.state_hosts) - set(after.state_hosts)).pop().shard
        first = next(host for host in reversed(state.state_hosts) if host.shard == shard)
        return replace(state, state_hosts=tuple(host for host in state.state_hosts if host is not first)), what

    real = state_levelling.levelled
    patch.setattr(voting, "levelled", levelled)


def moved_while_a_group_learns(patch: Patch) -> None:
    real = state_levelling.levelled
    patch.setattr(voting, "levelled", lambda state: _with_learners(real(replace(state, learners={})), state))


def _with_learners(found: tuple[State, str], before: State) -> tuple[State, str]:
    return replace(found[0], learners=before.learners), found[1]


def moved_to_who_has_no_room(patch: Patch) -> None:
    patch.setattr(state_levelling, "unable_groups", lambda state: defaultdict(set))


@pytest.mark.parametrize(
    ("mutant", "what"),
    [
        (struck_off_early, "is struck off, and state shard"),
        (struck_off_by_number, "keeps fewer than another host"),
        (moved_while_a_group_learns, "other decisions"),
        (moved_to_who_has_no_room, "without a comparison|one by one|other decisions"),
    ],
)
def test_a_shard_that_is_moved_wrongly(monkeypatch: Patch, mutant: Callable[[Patch], None], what: str) -> None:
    """It takes four groups: the golden scenario finds each."""
    mutant(monkeypatch)
    text = (FOLDER / "state_shards_that_move.txt").read_text()
    with pytest.raises(AssertionError, match=what):
        assert run(text) == text, "other decisions"


# ------------------------------------------------------------------------------------------------------- processes


def hosts_apply_early(patch: Patch) -> None:
    """The sums of the step in flight are applied before its commit is received, and overwrite weights that are
    needed."""
    real = ShardProcesses.fetched

    def fetched(rules: ShardProcesses, p: Process, wanted: Wanted) -> Process:
        q = real(rules, p, wanted)
        kept, weights = rules.kept(q), list(rules.kept(q).weights)
        if any(one[0] == wanted.shard for one in kept.sums):
            weights[wanted.shard] += 1
        return q._replace(copies=kept._replace(weights=tuple(weights)))

    patch.setattr(ShardProcesses, "fetched", fetched)


def sums_are_dropped_at_an_epoch(patch: Patch) -> None:
    """The sums of a step are given up with its epoch, also where the step was committed in it."""
    patch.setattr(
        ShardProcesses, "_is_good", staticmethod(lambda one, p: one[1] < p.known.step - 1 or one[2] == p.known.epoch)
    )


def a_vote_without_all_weights(patch: Patch) -> None:
    patch.setattr(ShardProcesses, "computes", Processes.computes)


def a_host_that_makes_no_weights(patch: Patch) -> None:
    """A new host has the state of its shard and made no weights of it; then the others are lost."""
    real = ShardProcesses.fetched

    def fetched(rules: ShardProcesses, p: Process, wanted: Wanted) -> Process:
        weights = rules.kept(p).weights
        q = real(rules, p, wanted)
        return q._replace(copies=rules.kept(q)._replace(weights=weights))

    patch.setattr(ShardProcesses, "fetched", fetched)


def a_host_that_takes_another_offer(patch: Patch) -> None:
    """A new host that has the state already takes it again, and goes back to the step of the offer."""

    def fetches(rules: ShardProcesses, p: Process) -> list[Wanted]:
        if p.orders is None or not p.known.is_member:
            return []
        parts = (host for host in rules.parts(p) if host.donor is not None and p.applied >= host.step)
        return [Wanted(host.shard, host.donor, host.step) for host in parts if host.donor is not None]

    patch.setattr(ShardProcesses, "fetches", fetches)


def a_host_that_keeps_no_sums(patch: Patch) -> None:
    """A new host queues nothing before it has the state."""
    real = ShardProcesses._tidied

    def tidied(rules: ShardProcesses, p: Process) -> Process:
        q = real(rules, p)
        own = dict(rules.kept(q).own)
        sums = tuple(one for one in rules.kept(q).sums if one[0] in own)
        return q._replace(copies=rules.kept(q)._replace(sums=sums))

    patch.setattr(ShardProcesses, "_tidied", tidied)


@pytest.mark.parametrize(
    ("mutant", "shape", "what"),
    [
        (hosts_apply_early, SMALLEST, "on the weights after|does not end from here"),
        (sums_are_dropped_at_an_epoch, TWICE, "not the sums|counts for state shard"),
        (a_vote_without_all_weights, TWICE, "on the weights after"),
        (a_host_that_makes_no_weights, SMALLEST, "does not end from here"),
        (a_host_that_takes_another_offer, SMALLEST, "has not the sums"),
        (a_host_that_keeps_no_sums, replace(TWICE, faults=1), "not the sums"),
    ],
)
def test_what_a_process_must_not_do(
    monkeypatch: Patch, mutant: Callable[[Patch], None], shape: Shape, what: str
) -> None:
    mutant(monkeypatch)
    finds(shape, what)


@pytest.mark.parametrize("seed", range(5))
def test_copies_are_made_again_while_the_job_goes_on(seed: int) -> None:
    model = Model(replace(TWICE, steps=5))
    w = play(model, ["kill 1"])
    over = run_out(model, w, ["kill 1"], seed)
    state = over.brain.state
    assert state.outcome == "finished"
    assert [(host.shard, host.group, host.counts) for host in state.state_hosts] == [
        (shard, group, True) for shard in (0, 1) for group in (0, 2)
    ]
