"""Who holds the lease among coordinators, and what Slurm's environment says of a job: pure."""

from __future__ import annotations

import pytest

from spare_megatron.config.allocation import allocation_of, kept_variables, of_batch_script
from spare_megatron.config.errors import ConfigError
from spare_megatron.coordinator.election import STAGGER, VACANT_LOOKS, Watch
from spare_megatron.coordinator.terms import Term
from spare_megatron.launch.slurm_commands import queues_preempted, time_left_s

LEASE_S, TICK_S = 4.0, 0.2


def first_claim_s(watch: Watch, terms: list[Term | None]) -> float | None:
    """When a candidate claims that sees ``terms`` one after the other, the last one for long."""
    for n in range(200):
        if watch.look(terms[min(n, len(terms) - 1)], n * TICK_S) == "claim":
            return n * TICK_S
    return None


def test_the_first_candidate_begins_after_a_few_looks_and_the_others_stand_back() -> None:
    assert first_claim_s(Watch(0, LEASE_S, 1, 0.0), [None]) == pytest.approx((VACANT_LOOKS - 1) * TICK_S)
    assert first_claim_s(Watch(2, LEASE_S, 1, 0.0), [None]) == pytest.approx(2 * STAGGER * LEASE_S, abs=TICK_S)


def test_a_term_of_an_earlier_job_attempt_is_vacant_whether_it_ended_or_not() -> None:
    for over in (None, 4):
        claim_s = first_claim_s(Watch(0, LEASE_S, 2, 0.0), [Term(3, 1, 17, over)])
        assert claim_s == pytest.approx((VACANT_LOOKS - 1) * TICK_S)


def test_a_look_or_two_that_find_nothing_are_no_vacancy() -> None:
    """At the start, when nothing was seen before: the first listing of a network file system may be old."""
    terms: list[Term | None] = [None] * (VACANT_LOOKS - 1) + [Term(1, 1, n) for n in range(200)]
    assert first_claim_s(Watch(0, LEASE_S, 1, 0.0), terms) is None


def test_nobody_claims_while_the_holder_lives() -> None:
    assert first_claim_s(Watch(0, LEASE_S, 1, 0.0), [Term(1, 1, n) for n in range(200)]) is None


def test_silence_for_a_lease_is_a_vacancy_and_the_lowest_candidate_is_first() -> None:
    beats: list[Term | None] = [Term(1, 1, n) for n in range(10)]
    silent_s = 9 * TICK_S
    claims = [first_claim_s(Watch(index, LEASE_S, 1, 0.0), beats) for index in (0, 1)]
    assert claims[0] == pytest.approx(silent_s + LEASE_S, abs=TICK_S)
    assert claims[1] == pytest.approx(silent_s + (1 + STAGGER) * LEASE_S, abs=TICK_S)


def test_a_new_term_of_another_candidate_starts_the_watch_again() -> None:
    terms: list[Term | None] = [Term(1, 1, 5)] * 15 + [Term(2, 1, 0)]
    assert first_claim_s(Watch(0, LEASE_S, 1, 0.0), terms) == pytest.approx(15 * TICK_S + LEASE_S, abs=TICK_S)


def test_a_candidate_that_was_stopped_itself_saw_no_silence() -> None:
    watch, term = Watch(0, LEASE_S, 1, 0.0), Term(1, 1, 5)
    assert watch.look(term, 0.0) == "wait"
    assert watch.look(term, 100.0) == "wait"
    assert watch.look(term, 100.0 + LEASE_S / 5) == "wait"


def test_the_end_of_the_job_is_the_end_of_the_watch() -> None:
    assert Watch(1, LEASE_S, 2, 0.0).look(Term(4, 2, 9, 0), 0.0) == "over"


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS_PER_NODE": "8"}


def test_the_nodes_of_a_group() -> None:
    uneven = allocation_of({**SLURM, "SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "2(x3),1"})
    assert uneven.tasks_of_nodes == (2, 2, 2, 1)
    assert uneven.places_of(1, 3) == ((1, 1), (2, 0), (2, 1))
    assert allocation_of(SLURM).places_of(3, 4) == ((1, 4), (1, 5), (1, 6), (1, 7))
    # what Slurm says of nodes that are not those of all ranks is not used
    unlike = allocation_of({**SLURM, "SLURM_NTASKS": "30", "SLURM_TASKS_PER_NODE": "8(x4)"})
    assert unlike.tasks_of_nodes == (8, 8, 8, 6)


def test_a_process_of_a_step_knows_the_allocation_of_its_batch_script() -> None:
    """srun says the tasks of the step instead."""
    batch = {**SLURM, "SLURM_TASKS_PER_NODE": "8(x4)", "SLURM_JOB_NODELIST": "n[1-4]"}
    step = {**batch, **kept_variables(batch), "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "1(x3)"}
    assert allocation_of(of_batch_script(step)) == allocation_of(of_batch_script(batch)) == allocation_of(batch)
    assert allocation_of(of_batch_script(step)).with_spares(3, 8).ranks == 24


def test_the_world_size_of_an_allocation() -> None:
    assert allocation_of(SLURM).ranks == 32
    assert allocation_of({**SLURM, "SLURM_NTASKS": "30"}).ranks == 30
    assert allocation_of(SLURM).groups_of(16) == 2
    with pytest.raises(ConfigError, match=r"32 ranks .4 nodes., which is no multiple of the 12 .* 24 or 36 ranks"):
        allocation_of(SLURM).groups_of(12)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "this is no Slurm job: SLURM_JOB_ID is not set"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}, "give sbatch --ntasks-per-node RANKS"),
        ({**SLURM, "SLURM_NTASKS": "many"}, "SLURM_NTASKS is 'many', but must be a number"),
    ],
)
def test_bad_allocations_are_one_sentence(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        allocation_of(environ)


@pytest.mark.parametrize(("size", "lost"), [(8, 0), (16, 0), (32, 0), (4, 2), (2, 4), (12, 2)])
def test_groups_that_share_a_node_share_its_fate(size: int, lost: int) -> None:
    sentence = allocation_of(SLURM).shared_fate(size)
    assert (f"takes up to {lost} groups" in sentence) if lost else not sentence


def test_elements_of_an_array() -> None:
    array = {**SLURM, "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MAX": "3"}
    assert (allocation_of(array).array, allocation_of(array).last_of_array) == ("5", False)
    assert allocation_of({**array, "SLURM_ARRAY_TASK_ID": "3"}).last_of_array


def test_an_element_of_an_array_knows_whether_another_one_comes() -> None:
    array = {**SLURM, "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MAX": "3"}
    assert allocation_of(array).next_element
    assert not allocation_of({**array, "SLURM_ARRAY_TASK_ID": "3"}).next_element
    assert not allocation_of(SLURM).next_element


@pytest.mark.parametrize(
    ("limit", "run", "left_s"),
    [
        ("00:10:00", "00:00:12", 588.0),
        ("2-01:00:00", "1-23:59:59", 3601.0),
        ("UNLIMITED", "00:00:12", None),
        ("", "", None),
    ],
)
def test_the_time_that_slurm_leaves(limit: str, run: str, left_s: float | None) -> None:
    assert time_left_s({"TimeLimit": limit, "RunTime": run}) == left_s


PREEMPTED = {"PreemptTime": "2026-01-02T03:04:05", "Requeue": "1", "BatchFlag": "1"}
CONFIG = {"SLURM_VERSION": "24.11.5", "PreemptType": "preempt/partition_prio", "MaxBatchRequeue": "5"}


@pytest.mark.parametrize(
    ("reported", "config", "mode", "by_itself"),
    [
        ({}, {}, "REQUEUE", True),
        ({}, {}, "GANG,REQUEUE", True),
        ({}, {"SLURM_VERSION": "24.05.0-0rc1"}, "REQUEUE", True),
        ({"BatchFlag": "4"}, {}, "REQUEUE", True),
        ({"BatchFlag": "5"}, {}, "REQUEUE", False),
        ({"PreemptTime": "None"}, {}, "REQUEUE", False),
        ({"Requeue": "0"}, {}, "REQUEUE", False),
        ({}, {"SLURM_VERSION": "23.11.11"}, "REQUEUE", False),
        ({}, {"PreemptType": "preempt/qos"}, "REQUEUE", False),
        ({}, {}, "CANCEL", False),
    ],
)
def test_who_queues_a_preempted_job_again(
    reported: dict[str, str], config: dict[str, str], mode: str, by_itself: bool
) -> None:
    assert queues_preempted({**PREEMPTED, **reported}, {**CONFIG, **config}, mode) is by_itself


@pytest.mark.parametrize("absent", [*PREEMPTED, *CONFIG, "mode"])
def test_what_slurm_does_not_tell_counts_as_no(absent: str) -> None:
    reported, config = ({name: text for name, text in all_.items() if name != absent} for all_ in (PREEMPTED, CONFIG))
    assert not queues_preempted(reported, config, "" if absent == "mode" else "REQUEUE")


def test_a_candidate_with_a_shorter_lease_goes_by_that_of_the_holder() -> None:
    """Which shows signs of life ten times in a lease of its own, and may act for half of it after its last look."""
    slow = Term(1, 1, 5, lease_s=7 * LEASE_S)
    assert first_claim_s(Watch(0, LEASE_S, 1, 0.0), [slow]) == pytest.approx(7 * LEASE_S, abs=TICK_S)
