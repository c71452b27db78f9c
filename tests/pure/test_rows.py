"""Rows: what each rank of a group keeps in each shape, and the order in which ranks reduce."""

from __future__ import annotations

import random

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.rows import check_stages, rows_of, shape_of, shapes_of, smaller
from spare_megatron.config.shape import JobShape
from tests.pure.flags_of_a_job import job_of, launched


def home_of(pipeline: int, tensor: int = 1, inner: int = 1) -> JobShape:
    return JobShape(4, 1, 64 * inner, tensor=tensor, pipeline=pipeline, inner_data=inner)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("pipeline", [1, 2, 3, 4, 6, 8])
def test_each_row_is_on_one_rank_with_its_own_place_in_the_stage(pipeline: int, tensor: int) -> None:
    home = home_of(pipeline, tensor)
    for stages in (*smaller(pipeline), pipeline):
        ranks = shape_of(home, stages).group_size
        rows = [rows_of(home, stages, position) for position in range(ranks)]
        assert sorted(row for of_rank in rows for row in of_rank) == list(range(home.group_size))
        assert all(list(of_rank) == sorted(of_rank) for of_rank in rows)
        assert all(row % tensor == position % tensor for position, of_rank in enumerate(rows) for row in of_rank)
        firsts = [min(of_rank) // tensor for of_rank in rows]
        assert firsts == sorted(firsts), "a later stage has earlier layers"
    assert rows_of(home, pipeline, pipeline * tensor - 1) == (pipeline * tensor - 1,)


@pytest.mark.parametrize("seed", range(40))
def test_ranks_that_reduce_row_by_row_never_wait_in_a_circle(seed: int) -> None:
    """Of groups in shapes drawn at random: a row is summed once all ranks that keep it have come to it."""
    choose = random.Random(seed)
    home = home_of(choose.choice([2, 4, 6, 8]), choose.choice([1, 2]))
    queues = []
    for _ in range(choose.randint(1, 6)):
        stages = choose.choice([*smaller(home.pipeline), home.pipeline])
        queues += [list(rows_of(home, stages, one)) for one in range(shape_of(home, stages).group_size)]
    groups = sum(row == 0 for queue in queues for row in queue)
    while any(queues):
        heads = [queue[0] for queue in queues if queue]
        summed = [row for row in set(heads) if heads.count(row) == groups]
        assert summed, f"all ranks wait: {queues}"
        queues = [queue[1:] if queue and queue[0] in summed else queue for queue in queues]


def test_what_the_flag_allows() -> None:
    assert shapes_of("none", 4) == ()
    assert shapes_of("auto", 12) == (6, 4, 3, 2, 1)
    assert shapes_of("1,2", 4) == (2, 1)
    assert shapes_of("auto", 1) == ()


@pytest.mark.parametrize(
    ("text", "pipeline", "sentence"),
    [
        ("3", 4, r"--spare-shapes 3 has 3 pipeline stages, .*: use 2, 1"),
        ("4", 4, "has 4 pipeline stages"),
        ("0", 4, "has 0 pipeline stages"),
        ("1", 1, "with one stage there is no smaller shape"),
        (
            "2,",
            4,
            r"--spare-shapes '2,' is no list of numbers of pipeline stages; use none, auto, or numbers such as 2,1",
        ),
        ("some", 2, "is no list of numbers"),
    ],
)
def test_bad_shapes_are_refused(text: str, pipeline: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        shapes_of(text, pipeline)


def test_a_rank_with_a_number_of_stages_that_no_group_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="the environment variable SPARE_STAGES has 3 pipeline stages"):
        check_stages(4, 3, "the environment variable SPARE_STAGES")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--spare-reduce fp32", "--spare-reduce fp32 sums in floating point, whose bits depend on the split"),
        ("--spare-state-redundancy 1", "no group has a whole state"),
        ("--use-distributed-optimizer --spare-inner-data-parallel 2", "that an inner rank keeps depends on the stages"),
        ("--use-tp-pp-dp-mapping --spare-inner-data-parallel 2", "numbers a group's ranks in another order"),
        ("--mtp-num-layers 1 --position-embedding-type rope", "have embeddings of their own"),
        ("--spare-standby-groups 1", "standbys have the home shape: leave --spare-standby-groups out"),
        ("--spare-max-group-restarts 0", "give --spare-max-group-restarts"),
    ],
)
def test_jobs_whose_groups_cannot_be_cut_are_refused(flags: str, reason: str) -> None:
    job = "--pipeline-model-parallel-size 2 --spare-shapes auto --spare-max-group-restarts 3"
    with pytest.raises(ConfigError, match=f"^--spare-shapes auto: .*{reason}.*; or leave --spare-shapes out$"):
        job_of(f"{job} {flags}", launched(4))


@pytest.mark.parametrize(
    "flags",
    [
        "--num-experts 4 --moe-router-topk 2",
        "--num-virtual-stages-per-pipeline-rank 2 --num-layers 8",
        "--decoder-first-pipeline-num-layers 1",
        "--pipeline-model-parallel-layout Ettt|tL",
        "--spare-inner-data-parallel 2",
        "--use-distributed-optimizer",
    ],
)
def test_jobs_whose_groups_can_be_cut_are_taken(flags: str) -> None:
    job = "--pipeline-model-parallel-size 2 --num-layers 4 --spare-shapes auto --spare-max-group-restarts 3"
    assert job_of(f"{job} {flags}", launched(4))[0].spare.shapes == "auto"
