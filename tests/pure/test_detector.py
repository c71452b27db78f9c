"""Who is taken for dead, in virtual time (protocol rule 11)."""

from __future__ import annotations

from dataclasses import replace

from spare_megatron.config.timeouts import Timeouts
from spare_megatron.control_plane.rank_ledger import RankLedger
from spare_megatron.control_plane.reports import Beat, Heartbeat, LastRank, LateRank
from spare_megatron.coordinator.failure_detector import Attempt, Detector, Finding

TIMES = Timeouts(
    heartbeat_interval_s=0.5, heartbeat_timeout_s=5.0, grace_s=1.0, progress_timeout_s=20.0, startup_timeout_s=600.0
)
MEMBERS = {0: 0, 1: 0, 2: 0}


class World:
    """Groups of two ranks that beat, through their leaders, unless the test says otherwise."""

    def __init__(self, groups: int = 3) -> None:
        self.now_s = 100.0
        self.detector = Detector(TIMES, self.now_s)
        self.beats = {(g, m): Beat(m, 7, "vote", 0, 0, 4) for g in range(groups) for m in range(2)}
        self.silent: set[tuple[int, int]] = set()
        self.still: set[tuple[int, int]] = set()
        self.hung: set[tuple[int, int]] = set()
        """Those that do not follow a new epoch either."""
        self.epoch = 1
        self.voted: set[int] = set()
        self.joiners: set[int] = set()
        self.stood_still: list[float] = []
        """Times after the start of a run."""
        self.ledgers = [
            RankLedger(2, TIMES.heartbeat_interval_s, TIMES.heartbeat_interval_s, self.now_s) for _ in range(groups)
        ]
        for group in range(groups):
            self.detector.hello(group, 0, 2, self.now_s)

    def run(self, seconds: float, members: dict[int, int] | None = None) -> list[tuple[float, Finding]]:
        """Let time pass in ticks; what was found, and when."""
        found: list[tuple[float, Finding]] = []
        start_s, ticks = self.now_s, round(seconds / self.detector.tick_s)
        for tick in range(ticks):
            self.now_s += self.detector.tick_s
            if tick % 4 == 0:
                self._beat()
            attempt = Attempt(self.epoch, members, self.voted, self.joiners) if members is not None else None
            found += [(self.now_s - start_s, one) for one in self.detector.tick(self.now_s, attempt)]
            if attempt is not None and not found and self.detector.standstill(self.now_s, attempt):
                self.stood_still.append(self.now_s - start_s)
                self.epoch += 1
                self._try_again()
        return found

    def _try_again(self) -> None:
        """The new epoch of a standstill: ranks that can do so begin their reduction again."""
        for key in self.beats.keys() - self.hung:
            beat = self.beats[key]
            self.beats[key] = Beat(beat.position, beat.step, "reduce", beat.counter + 1, 0, beat.pieces_done)

    def _beat(self) -> None:
        for group, position in sorted(self.beats):
            key, beat = (group, position), self.beats[group, position]
            if key not in self.still:
                beat = self.beats[key] = replace(beat, counter=beat.counter + 1)
            if key not in self.silent and (group, 0) not in self.silent:
                self.ledgers[group].receive(position, beat, self.now_s)
        for group, ledger in enumerate(self.ledgers):
            if (group, 0) not in self.silent:
                self.detector.heartbeat(group, 0, ledger.heartbeat(self.now_s), self.now_s)

    def at(self, group: int, position: int, phase: str, pieces: int = 0, in_phase: int = 0, step: int = 7) -> None:
        """Where a rank stands."""
        self.beats[group, position] = Beat(position, step, phase, 1, in_phase, pieces)


def test_nothing_is_found_while_all_speak() -> None:
    assert World().run(120.0, MEMBERS) == []


def test_a_silent_rank_is_found_at_the_timeout_and_named() -> None:
    world = World()
    world.silent = {(1, 1)}
    [(after_s, one)] = world.run(30.0)
    assert 5.0 <= after_s <= 5.0 + 2 * world.detector.tick_s
    assert (one.loss.group, one.loss.incarnation, one.loss.position, one.loss.cause) == (1, 0, 1, "silent")
    assert one.since_s == 100.0
    assert "the time-out is 5 s" in one.loss.detail


def test_a_silent_leader_silences_its_group_once() -> None:
    world = World()
    world.run(10.0)
    world.silent = {(2, 0)}
    [(_, one)] = world.run(60.0)
    assert (one.loss.group, one.loss.position, one.loss.cause) == (2, 0, "silent")


def test_groups_that_fall_silent_together_are_found_together() -> None:
    world = World()
    world.silent = {(0, 0), (2, 1)}
    found = world.run(30.0)
    assert [one.loss.group for _, one in found] == [0, 2]
    assert found[0][0] == found[1][0]


def test_what_is_due_within_a_tick_of_another_loss_is_found_with_it() -> None:
    world = World()
    world.detector.closed(0, 0, world.now_s)
    world.detector.closed(1, 0, world.now_s + 0.5 * world.detector.tick_s)
    world.detector.closed(2, 0, world.now_s + 3.0 * world.detector.tick_s)
    found = world.run(4.0)
    assert [one.loss.group for _, one in found] == [0, 1, 2]
    assert found[0][0] == found[1][0] < found[2][0]


def test_a_closed_connection_has_the_grace_time() -> None:
    world = World()
    world.silent = {(1, 0)}
    world.detector.closed(1, 0, world.now_s)
    [(after_s, one)] = world.run(4.0)
    assert 1.0 <= after_s <= 1.0 + world.detector.tick_s
    assert (one.loss.group, one.loss.position, one.loss.cause) == (1, -1, "closed")


def test_the_same_incarnation_may_come_back_within_the_grace_time() -> None:
    world = World()
    world.detector.closed(1, 0, world.now_s)
    assert world.run(0.5) == []
    world.detector.hello(1, 0, 2, world.now_s)
    assert world.run(30.0) == []


def test_a_rank_whose_connection_to_its_leader_closed() -> None:
    world = World()
    world.detector.closed(1, 0, world.now_s, position=1)
    assert world.run(0.5) == []
    world.detector.opened(1, 0, 1, world.now_s)
    assert world.run(10.0) == []
    world.detector.closed(1, 0, world.now_s, position=1)
    [(_, one)] = world.run(10.0)
    assert (one.loss.group, one.loss.position, one.loss.cause) == (1, 1, "closed")


def test_an_old_incarnation_is_not_received() -> None:
    world = World()
    world.detector.hello(1, 1, 2, world.now_s)
    world.detector.closed(1, 0, world.now_s)
    assert world.run(3.0) == [], "the close of the older connection does not count"
    [(_, one)] = world.run(10.0)
    assert one.loss.incarnation == 1, "heartbeats of the older incarnation do not count"


def test_an_exit_counts_once() -> None:
    world = World()
    assert world.detector.lost(1, 0)
    assert not world.detector.lost(1, 0)
    world.silent = {(1, 0), (1, 1)}
    assert world.run(60.0) == []
    world.detector.hello(1, 1, 2, world.now_s)
    assert not world.detector.lost(1, 0), "the exit of an older incarnation is old news"
    assert world.detector.lost(1, 1)


def test_a_member_by_the_journal_must_send_hello() -> None:
    detector = Detector(TIMES, 0.0)
    detector.expect(3, 2, 0.0)
    found = [one for tick in range(1, 100) for one in detector.tick(tick * detector.tick_s)]
    assert [(one.loss.group, one.loss.incarnation, one.loss.cause) for one in found] == [(3, 2, "silent")]


def test_the_coordinators_own_stall_is_nobodys_silence() -> None:
    world = World()
    world.detector.closed(1, 0, world.now_s)
    world.now_s += 60.0
    assert world.detector.tick(world.now_s, Attempt(1, MEMBERS)) == []
    world.detector.hello(1, 0, 2, world.now_s)
    assert world.run(30.0, MEMBERS) == []


def test_a_stall_only_moves_the_deadline() -> None:
    world = World()
    world.silent = {(1, 1)}
    assert world.run(4.0) == []
    world.now_s += 60.0
    [(after_s, one)] = world.run(10.0)
    assert 0.0 < after_s <= 2.0
    assert one.loss.group == 1


def test_the_rank_furthest_behind_is_blamed_when_it_stands_still() -> None:
    world = World()
    world.at(1, 0, "forward", pieces=2, in_phase=3)
    world.at(1, 1, "forward", pieces=2, in_phase=2)
    world.at(0, 0, "reduce")
    world.at(0, 1, "vote")
    world.still = {(1, 0), (1, 1), (0, 0), (0, 1), (2, 0), (2, 1)}
    [(after_s, one)] = world.run(30.0, MEMBERS)
    assert 20.0 <= after_s <= 21.0
    assert (one.loss.group, one.loss.position, one.loss.cause) == (1, 1, "stalled")
    assert "step 7, forward, 2 pieces done" in one.loss.detail
    assert "5 ranks wait" not in one.loss.detail
    assert "4 ranks wait" in one.loss.detail


def test_nobody_is_lost_where_all_wait_for_each_other() -> None:
    """Whose bucket count is lowest says nothing: behind one silent link everybody stands still in turn."""
    world = World()
    for group in range(3):
        world.at(group, 1, "reduce", in_phase=2 if group == 2 else 3)
    world.still = set(world.beats)
    assert world.run(70.0, MEMBERS) == []
    assert [at_s // 20 for at_s in world.stood_still] == [1, 2, 3]


def test_who_does_not_try_again_with_the_others_is_behind() -> None:
    world = World()
    for group in range(3):
        world.at(group, 1, "reduce")
    world.still, world.hung = set(world.beats), {(1, 1)}
    [(after_s, one)] = world.run(70.0, MEMBERS)
    assert len(world.stood_still) == 1
    assert 40.0 <= after_s <= 42.0
    assert (one.loss.group, one.loss.position, one.loss.cause) == (1, 1, "stalled")


def test_of_two_that_stand_still_the_longest_is_lost_first() -> None:
    world = World()
    for key in world.beats:
        world.at(*key, "reduce")
    world.at(0, 0, "forward", in_phase=5)
    world.at(1, 0, "forward", in_phase=1)
    world.still = set(world.beats) - {(1, 0)}
    world.run(3.0, MEMBERS)
    world.still = set(world.beats)
    [(_, one)] = world.run(25.0, MEMBERS)
    assert one.loss.group == 0


def test_a_reduction_that_ended_for_others_is_waited_for_no_longer() -> None:
    world = World()
    world.at(1, 1, "reduce")
    world.still, world.voted = set(world.beats), {0, 2}
    [(_, one)] = world.run(30.0, MEMBERS)
    assert (one.loss.group, one.loss.position, one.loss.cause) == (1, 1, "stalled")


def test_a_vote_that_never_arrives_is_a_standstill_of_its_group() -> None:
    """Its ranks believe that they have voted; the others' votes are there, and everybody waits."""
    world = World()
    world.still, world.voted = set(world.beats), {0, 2}
    [(after_s, one)] = world.run(30.0, MEMBERS)
    assert 20.0 <= after_s <= 21.0
    assert (one.loss.group, one.loss.cause) == (1, "stalled")
    assert "vote" in one.loss.detail


def test_a_group_that_was_spared_is_watched_as_before() -> None:
    world = World()
    world.at(1, 0, "forward")
    world.still = set(world.beats)
    [(_, one)] = world.run(30.0, MEMBERS)
    world.detector.spare(one.loss.group, world.now_s)
    world.epoch += 1
    assert len(world.run(30.0, MEMBERS)) == 1
    world.detector.spare(one.loss.group, world.now_s)
    world.silent = {(1, 1)}
    [(_, silent)] = world.run(8.0, MEMBERS)
    assert (silent.loss.group, silent.loss.cause) == (1, "silent")


def test_those_who_waited_for_it_have_the_time_anew() -> None:
    world = World()
    for key in world.beats:
        world.at(*key, "reduce")
    world.at(1, 0, "forward")
    world.still = set(world.beats)
    assert len(world.run(21.0, MEMBERS)) == 1
    assert world.run(19.0, {0: 0, 2: 0}) == [], "their next heartbeat may be a while off"


def test_a_slow_rank_that_moves_is_not_blamed() -> None:
    world = World()
    world.still = set(world.beats) - {(1, 0)}
    world.at(1, 0, "forward")
    world.at(1, 1, "reduce")
    assert world.run(120.0, MEMBERS) == []


def test_who_has_voted_is_never_blamed() -> None:
    world = World()
    world.still, world.voted = set(world.beats), {0, 1, 2}
    assert world.run(120.0, MEMBERS) == []


def test_standing_still_while_nobody_waits_is_no_offence() -> None:
    world = World()
    for key in world.beats:
        world.at(*key, "checkpoint")
    world.still = set(world.beats)
    assert world.run(120.0, MEMBERS) == []


def test_progress_counts_from_membership_on() -> None:
    world = World()
    for key in world.beats:
        world.at(*key, "start")
    world.at(0, 0, "reduce")
    world.still = set(world.beats)
    assert world.run(300.0) == [], "a job that forms is not judged"
    assert world.run(19.0, MEMBERS) == []
    [(_, one)] = world.run(5.0, MEMBERS)
    assert one.loss.cause == "stalled"


def test_progress_is_what_all_ranks_of_a_group_have_done() -> None:
    world = World()
    world.at(0, 0, "forward", pieces=3)
    world.at(0, 1, "forward", pieces=2)
    world.at(1, 0, "vote", pieces=4, step=6)
    world.run(1.0)
    assert world.detector.progress(MEMBERS, 7) == ((0, 2), (1, 0), (2, 4))
    assert world.detector.progress([9], 7) == ((9, 0),)


def test_a_silence_that_a_leader_tells_of_does_not_reach_back_over_the_coordinators_own_pause() -> None:
    """The rank's host may have slept together with the coordinator's, and the leader's not."""
    world = World()
    world.run(10.0)
    world.now_s += 60.0
    late = Heartbeat(7, 4, 2, LastRank(1, 7, "vote", 1, 4, 61.0), LateRank(1, 61.0))
    world.detector.heartbeat(1, 0, late, world.now_s)
    assert world.detector.tick(world.now_s, Attempt(1, MEMBERS)) == []
    assert world.run(30.0, MEMBERS) == [], "it is received again"


def test_a_pause_does_not_save_a_rank_that_was_late_before() -> None:
    world = World()
    world.run(10.0)
    world.silent = {(1, 1)}
    world.run(4.0)
    world.now_s += 60.0
    [(after_s, one)] = world.run(10.0)
    assert 0.0 < after_s <= 2.0
    assert (one.loss.position, one.loss.cause) == (1, "silent")


def test_a_leader_that_was_stopped_calls_nobody_silent() -> None:
    ledger = RankLedger(2, 0.5, 0.5, 0.0)
    for position in range(2):
        ledger.receive(position, Beat(position, 7, "forward", 1, 0, 0), 0.0)
    ledger.receive(0, Beat(0, 7, "forward", 2, 0, 0), 4.5)
    beat = ledger.heartbeat(4.5)
    assert beat.late is None
    assert beat.last == LastRank(1, 7, "forward", 1, 0, 1.0), "nor does it count as standing still"
    ledger.receive(0, Beat(0, 7, "forward", 3, 0, 0), 5.0)
    assert ledger.heartbeat(5.0).late == LateRank(1, 1.5), "from now on its silence counts"
    ledger.arrived(1, 5.25)
    assert ledger.heartbeat(5.5).late is None


def test_a_beat_does_not_grow_with_the_group() -> None:
    ledger = RankLedger(600, 0.5, 0.5, 0.0)
    for time_s in (0.0, 0.5, 1.0, 1.5):
        for position in range(600 if time_s == 0.0 else 20):
            ledger.receive(
                position, Beat(position, 3, "reduce" if position % 2 else "backward", 1, position, 5), time_s
            )
    beat = ledger.heartbeat(1.5)
    assert (beat.step, beat.pieces_done, beat.waiting) == (3, 5, 300)
    assert beat.last == LastRank(0, 3, "backward", 1, 5, 1.5)
    assert beat.late == LateRank(20, 1.5)


def test_a_tick_looks_at_groups_only_when_something_can_be_due() -> None:
    world = World()
    looks: list[float] = []
    judge = world.detector._silent_or_closed
    world.detector._silent_or_closed = lambda *args: (looks.append(world.now_s), judge(*args))[1]  # type: ignore[method-assign]
    world.run(100.0, MEMBERS)
    assert len(looks) <= 3 * 100 / 4


def test_the_standing_of_a_group_is_that_of_its_last_rank() -> None:
    """Group 1 computes, with one rank behind the other, and has not been received for 2 s; group 9 is not watched."""
    world = World()
    world.at(1, 0, "backward", pieces=2)
    world.at(1, 1, "forward", pieces=1)
    world.still = {(1, 1)}
    world.run(10.0)
    world.silent = {(1, 0)}
    world.run(2.0)
    found = world.detector.standings({0: 0, 1: 0, 2: 1, 9: 0}, world.now_s)
    assert sorted(found) == [0, 1], "another incarnation of group 2 is watched"
    last = found[1].last
    assert last is not None
    assert (last.position, last.step, last.phase, last.pieces_done) == (1, 7, "forward", 1)
    assert 11.0 < found[1].still_s <= 12.0
    assert 2.0 <= found[1].silent_s <= 2.5
    assert found[0].silent_s < 0.5


def test_ranks_that_waited_for_data_have_not_stood_still() -> None:
    """Neither while they wait nor right after, whichever of them is named then."""
    ledger = RankLedger(2, 0.5, 0.5, 0.0)
    waiting = [Beat(position, 7, "backward", 3, 1, 2) for position in range(2)]
    for now_s in range(1, 61):
        for beat in waiting:
            ledger.receive(beat.position, beat, now_s / 2)
    assert ledger.heartbeat(30.0).last == LastRank(0, 7, "backward", 3, 2, 29.5)
    ledger.excuse(30.0)
    assert ledger.heartbeat(30.0).last == LastRank(0, 7, "backward", 3, 2, 0.0)
    ledger.receive(0, replace(waiting[0], counter=4), 30.5)
    ledger.receive(1, waiting[1], 30.5)
    assert ledger.heartbeat(30.5).last == LastRank(1, 7, "backward", 3, 2, 0.5)


def test_members_that_all_hang_while_nobody_waits_are_lost_in_the_end() -> None:
    """The job waits for them. They may all be slow for one reason, so that takes ten times as long."""
    world = World()
    for key in world.beats:
        world.at(*key, "forward")
    world.still = set(world.beats)
    found = world.run(210.0, MEMBERS)
    assert [(one.loss.group, one.loss.cause) for _, one in found] == [(0, "hung"), (1, "hung"), (2, "hung")]
    assert all(200.0 <= after_s <= 202.0 for after_s, _ in found)


def test_a_lone_member_that_hangs_is_lost_in_the_end() -> None:
    world = World(1)
    world.at(0, 1, "backward", pieces=2)
    world.still = {(0, 1)}
    [(after_s, one)] = world.run(210.0, {0: 0})
    assert 200.0 <= after_s <= 202.0
    assert (one.loss.group, one.loss.position, one.loss.cause) == (0, 1, "hung")
    assert "no group waits for another" in one.loss.detail


def test_of_members_that_hang_one_that_moves_is_enough() -> None:
    world = World()
    for key in world.beats:
        world.at(*key, "forward")
    world.still = set(world.beats) - {(2, 0), (2, 1)}
    assert world.run(300.0, MEMBERS) == []


def test_who_hangs_at_the_end_is_waited_for_by_those_that_are_done() -> None:
    """Nobody is in a phase of waiting any more; who has voted and sent Applied waits for the others all the same."""
    world = World()
    for key in world.beats:
        world.at(*key, "apply", step=9)
    world.still, world.voted = set(world.beats), {0, 2}
    [(after_s, one)] = world.run(30.0, MEMBERS)
    assert 20.0 <= after_s <= 21.0
    assert (one.loss.group, one.loss.cause) == (1, "stalled")


def test_a_joiner_that_receives_later_does_not_hide_the_donor_that_hangs() -> None:
    """The joiner is at the earlier step and moves, because its donor promises the state; the donor hangs."""
    world = World()
    for position in (0, 1):
        world.at(0, position, "start", step=6)
        world.at(1, position, "forward")
    world.still = {(1, 0), (1, 1)}
    world.joiners = {0}
    [(after_s, one)] = world.run(30.0, MEMBERS)
    assert 20.0 <= after_s <= 21.0
    assert (one.loss.group, one.loss.cause) == (1, "stalled")


def test_a_joiner_that_stands_still_is_found_once_all_others_wait() -> None:
    world = World()
    for position in (0, 1):
        world.at(0, position, "start", step=6)
    world.still, world.joiners = {(0, 0), (0, 1)}, {0}
    [(after_s, one)] = world.run(30.0, MEMBERS)
    assert 20.0 <= after_s <= 21.0
    assert (one.loss.group, one.loss.cause) == (0, "stalled")
