"""A job's decisions about itself: what is gathered, when it decides, and that a record's figures give its decision."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import PLANNED
from spare_megatron.config.tuning import Tuning
from spare_megatron.coordinator.job_tuning import TRIAL_PATIENCE_STEPS, JobTuning
from spare_megatron.planning.at_start import Measured, at_start, restart_pays, without_progress
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import State, initial_state, step
from tests.pure.decided_again import decided_again

SPEC = m.JobSpec(6, 4, (0, 1, 3), "microbatch", 0, 200_000, 1, "f")
WISHES = Tuning(save_interval=True, mtbf_gpu_hours=2.0, group_size=2, can_restart=True)


class Job:
    """A job of which only what the coordinator sees is played: steps of 1 s, of which 0.1 s is the reduction."""

    def __init__(self, wishes: Tuning = WISHES, spec: m.JobSpec = SPEC) -> None:
        self.wishes = wishes
        self.state: State = initial_state()
        self.tuning = JobTuning(started_s=90.0)
        self.tuning.begin(wishes)
        self.now_s = 100.0
        self.decided: list[m.Event] = []
        self.commits: list[m.SendCommit] = []
        self.feed(m.Opened(spec, 1, 1))
        self.feed(m.AllHere(tuple((group, 0) for group in range(spec.num_groups))))

    def feed(self, event: m.Event) -> None:
        """As the coordinator does: the event, then what is to be decided."""
        before = self.state
        self.state, decision = step(before, event)
        self.commits += [action for action in decision.actions if isinstance(action, m.SendCommit)]
        self.tuning.observe(self.now_s, before, event, self.state)
        following = self.tuning.next(self.state)
        if following is not None:
            self.decided.append(following)
            self.feed(following)

    def run(self, steps: int, saves: bool = True) -> None:
        """Steps that are committed; a save that is ordered takes half a second and counts 2 s later."""
        for _ in range(steps):
            at = self.state.step_in_flight
            load = self.state.plan.loads().max() / SPEC.pieces_per_shard
            self.now_s += 0.9 * load + 0.1
            self.tuning.figures(at, self.state.epoch, [("compute_s", 0.9 * load), ("reduce_s", 0.1)])
            self.feed(m.AllVoted(at, self.state.epoch))
            if self.commits[-1].save and saves:
                self.now_s += 2.0
                self.tuning.report({"save_s": 0.5})
                self.feed(m.Saved(0, 0, at, "d"))

    def lose(self, group: int) -> None:
        self.feed(m.Lost((m.Loss(group, 0, "exited"),)))

    def tuned(self) -> list[m.Tuned]:
        return [event for event in self.decided if isinstance(event, m.Tuned)]


def test_first_steps_and_a_trial_save_lead_to_a_choice_that_can_be_made_again() -> None:
    job = Job()
    job.run(12)
    trial, choice = job.tuned()
    assert (trial.save_now, trial.save_interval, dict(trial.choice)) == (True, 0, {})
    assert next(commit.step for commit in job.commits if commit.save) == 6  # two warm up, three count
    measured = Measured(**choice.figures)  # type: ignore[arg-type]
    assert (measured.restart_s, measured.save_s, measured.write_s) == (10.0, 0.5, 2.0)
    assert (measured.compute_s, measured.reduce_s) == pytest.approx((0.9, 0.1))
    assert (measured.num_groups, measured.group_size, measured.redundancy, measured.steps) == (6, 2, 3, 199_994)
    assert choice.choice == at_start(measured).as_json() == decided_again(choice, None)
    assert choice.save_interval == job.state.save_interval == choice.choice["save_interval_steps"]


def test_the_predicted_time_to_train_is_compared_with_the_pace() -> None:
    """199,994 steps of 1 s are left at the choice; of the 10 that follow, one takes 5 s longer."""
    job = Job()
    assert job.tuning.time_to_train() is None
    job.run(6)
    (_, choice) = job.tuned()
    reported = job.tuning.time_to_train()
    assert reported is not None
    assert (reported["steps"], reported["without_failures_s"], reported["steps_done"]) == (199_994, 199_994.0, 0)
    assert reported["predicted_s"] == round(199_994.0 * choice.choice["time_to_train_ratio"], 1)  # type: ignore[operator]
    assert reported["at_this_pace_s"] is None
    job.now_s += 5.0
    job.run(10)
    reported = job.tuning.time_to_train()
    assert reported is not None
    assert (reported["steps_done"], reported["taken_s"], reported["at_this_pace_s"]) == (10, 15.0, 299_991.0)


def test_the_machine_orders_the_saves_of_the_interval() -> None:
    job = Job()
    job.run(12)
    every = job.state.save_interval
    job.run(3 * every)
    saved = [commit.step for commit in job.commits if commit.save]
    assert {after - before for before, after in itertools.pairwise(saved)} == {every}


def test_a_save_of_which_nothing_is_received_is_ordered_again() -> None:
    job = Job()
    job.run(TRIAL_PATIENCE_STEPS + 12, saves=False)
    assert len(job.tuned()) == 2
    assert all(event.save_now for event in job.tuned())


GIVEN = replace(WISHES, save_interval=False, redundancy=True, restart_after=None)


def test_redundancy_alone_is_chosen_from_the_saves_of_the_given_interval() -> None:
    """--spare-redundancy auto, --save-interval STEPS: no save but the given ones is ordered, the interval stays, the
    choice is said."""
    job = Job(GIVEN, replace(SPEC, save_every=9))
    job.run(8)
    assert not job.decided
    job.run(3)
    (choice,) = job.tuned()
    assert [commit.step for commit in job.commits if commit.save] == [9]
    assert (choice.save_interval, choice.save_now, job.state.save_interval) == (0, False, 0)
    measured = Measured(**choice.figures)  # type: ignore[arg-type]
    assert (measured.save_s, measured.write_s, measured.save_interval_steps) == (0.5, 2.0, 9)
    assert choice.choice == at_start(measured).as_json() == decided_again(choice, None)
    assert choice.choice["save_interval_steps"] == 9
    assert choice.choice["restart_after_failures"] is None
    assert "a save every 9 steps as given" in choice.reason
    assert "redundancy 3 in effect" in choice.reason
    job.lose(1)
    job.run(20)
    assert job.decided == [choice]


def test_a_redundancy_for_the_next_start_is_said() -> None:
    measured = Measured(64, 2, 100.0, 5.0, 9.0, 0.1, 4, 50_000, 1.0, redundancy=2, redundancy_is_free=True)
    choice = at_start(measured)
    assert choice.redundancy_next is not None
    assert choice.redundancy_next > choice.redundancy == 2
    assert f"; the next start of the job takes redundancy {choice.redundancy_next}, which cannot" in choice.reason
    assert dict(choice.rows())["redundancy"] == f"2, {choice.redundancy_next} from the next start on"


@pytest.mark.parametrize("more", [{"shared_data": True}, {"redundancy": False}])
def test_nothing_is_chosen_where_all_is_given(more: dict[str, bool]) -> None:
    job = Job(replace(GIVEN, **more))
    job.run(20)
    assert not job.decided


def test_losses_change_the_interval_within_bounds_and_can_be_decided_again() -> None:
    job = Job(WISHES)
    job.run(12)
    first = job.tuned()[1]
    for group in (1, 4):
        job.lose(group)
        job.run(2)
    updates = job.tuned()[2:]
    assert updates
    for update in updates:
        assert decided_again(update, first) == update.choice
        assert first.save_interval / 4 - 1 <= update.save_interval < first.save_interval
        assert f"-> {update.save_interval} steps" in update.reason


def test_a_planned_restart_ends_the_job_attempt_with_the_step_in_flight() -> None:
    job = Job(Tuning(restart_after=2, can_restart=True))
    job.run(3)
    job.lose(1)
    assert not job.decided
    job.run(1)
    job.lose(4)
    (asked,) = job.decided
    assert isinstance(asked, m.StopRequested)
    assert asked.reason.startswith(f"{PLANNED}: 2 of 6 groups are lost")
    job.run(1)
    assert job.commits[-1].leave
    assert job.state.phase == "ending"


def test_a_group_that_is_being_brought_up_to_date_is_not_lost() -> None:
    job = Job(Tuning(restart_after=2, can_restart=True))
    job.run(3)
    job.lose(1)
    job.feed(m.Hello(1, 1, "f", 0))
    assert job.state.learners.keys() == {1}
    job.lose(4)
    assert not job.decided
    job.feed(m.Lost((m.Loss(1, 1, "exited"),)))
    (asked,) = job.decided
    assert isinstance(asked, m.StopRequested)


@pytest.mark.parametrize(
    "wishes",
    [Tuning(restart_after=2), Tuning(restart_after=0, can_restart=True), Tuning(restart_after=None, can_restart=True)],
)
def test_no_planned_restart_where_none_can_be_or_none_is_wanted(wishes: Tuning) -> None:
    job = Job(wishes)
    job.run(3)
    job.lose(1)
    job.lose(4)
    assert not job.decided


def test_no_planned_restart_for_the_last_step() -> None:
    job = Job(Tuning(restart_after=1, can_restart=True), replace(SPEC, last_step=4))
    job.run(3)
    job.lose(1)
    assert not job.decided


def test_a_restart_pays_early_and_not_late() -> None:
    measured = Measured(6, 2, 100.0, 5.0, 0.9, 0.1, 4, 5000, planned_restarts=True)
    assert restart_pays(measured, live=4, steps_left=1000)
    assert not restart_pays(measured, live=4, steps_left=100)


def test_a_restarted_coordinator_goes_on_with_the_choice() -> None:
    job = Job()
    job.run(12)
    again = JobTuning(started_s=500.0)
    again.begin(WISHES)
    other = Job()
    other.tuning = again
    for event in [m.Opened(SPEC, 1, 2), job.tuned()[1]]:
        before = other.state
        other.state, _ = step(before, event)
        again.observe(600.0, before, event, other.state)
    assert again.next(other.state) is None


def test_a_job_without_progress_still_saves() -> None:
    measured = Measured(2, 1, 600.0, 5.0, 0.9, 0.1, 4, 5000, mtbf_gpu_hours=0.001, redundancy=2)
    choice = without_progress(measured, "too few")
    assert choice.save_interval_steps == 45
    assert choice.redundancy_next is None
    assert dict(choice.rows())["time to train / failure-free"] == "none"


def test_a_job_without_progress_takes_a_redundancy_with_it_at_its_next_start() -> None:
    measured = Measured(64, 1, 2000.0, 5.0, 0.9, 0.1, 4, 5000, 2.0, redundancy=2, redundancy_is_free=True)
    with pytest.raises(ConfigError, match="--spare-redundancy 2 endures"):
        at_start(measured)
    kept = without_progress(measured, "too few")
    assert kept.redundancy == 2
    assert (kept.redundancy_next or 0) > 2
    assert "the next start of the job takes redundancy" in kept.reason
