"""Rows: what each rank of a group keeps in each shape, and the order in which ranks reduce."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.rows import RowCut, rows_of, shape_of, shapes_of, smaller
from spare_megatron.config.shape import JobShape
from spare_megatron.config.stage_cut import StageCut
from spare_megatron.flags.check import check_machine
from spare_megatron.flags.stage_layout import recomputes_whole_units
from tests.pure.flags_of_a_job import job_of, launched

WHOLE = "stages stay whole"


def home_of(pipeline: int, tensor: int = 1, inner: int = 1) -> JobShape:
    return JobShape(4, 1, 64 * inner, tensor=tensor, pipeline=pipeline, inner_data=inner)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("pipeline", [1, 2, 3, 4, 6, 8])
def test_where_stages_stay_whole_a_row_is_what_a_home_rank_has(pipeline: int, tensor: int) -> None:
    home, shapes = home_of(pipeline, tensor), smaller(pipeline, WHOLE)
    cut = RowCut(StageCut(2 * pipeline, pipeline), tuple(shapes))
    for stages in (*shapes, pipeline):
        ranks = shape_of(home, stages).group_size
        rows = [rows_of(home, cut, stages, position) for position in range(ranks)]
        assert sorted(row for of_rank in rows for row in of_rank) == list(range(home.group_size))
        assert all(list(of_rank) == sorted(of_rank) for of_rank in rows)
        assert all(row % tensor == position % tensor for position, of_rank in enumerate(rows) for row in of_rank)
        firsts = [min(of_rank) // tensor for of_rank in rows]
        assert firsts == sorted(firsts), "a later stage has earlier layers"
    assert cut.is_home
    assert [rows_of(home, cut, pipeline, one) for one in range(home.group_size)] == [
        (one,) for one in range(home.group_size)
    ]


def drawn_cut(choose: random.Random) -> RowCut:
    """A job whose stages may be cut, with some of its smaller shapes, and stages of various sizes."""
    pipeline = choose.randint(2, 8)
    sizes = [choose.randint(1, 3) for _ in range(pipeline)]
    ends = choose.choice([(None, None), (sizes[0], None), (None, sizes[-1]), (sizes[0], sizes[-1])])
    each = choose.randint(1, 3)
    layers = sum(ends[at] or each for at in (0, 1)) + (pipeline - 2) * each
    shapes = smaller(pipeline)
    some = sorted(choose.sample(shapes, choose.randint(1, len(shapes))), reverse=True)
    return RowCut(StageCut(layers, pipeline, first=ends[0], last=ends[1]), tuple(some))


@pytest.mark.parametrize("seed", range(60))
def test_each_layer_of_each_shape_is_in_one_row_of_its_rank(seed: int) -> None:
    """A row that a rank has is whole, and the embedding is in the first row, the head in the last."""
    cut = drawn_cut(random.Random(seed))
    for stages in (cut.home.stages, *cut.shapes):
        rows = [cut.of_stage(stages, stage) for stage in range(stages)]
        assert [row for of_stage in rows for row in of_stage] == list(range(cut.number)), "each row is on one stage"
        there = cut.home.with_stages(stages)
        sizes = there.sizes()
        assert sum(sizes) == cut.home.layers
        if cut.home.stages % stages:
            assert max(sizes) - min(sizes) <= 1, "as even as possible"
        for row, place in zip(cut.of_layers, there.places(), strict=True):
            assert row in rows[place.stage]
    finest = [[place.stage for place in cut.home.with_stages(one).places()] for one in (cut.home.stages, *cut.shapes)]
    together = list(zip(*finest, strict=True))
    for (one, row), (other, after) in pairwise(zip(together, cut.of_layers, strict=True)):
        assert (row == after) == (one == other), "a row is what all shapes keep together"


@pytest.mark.parametrize("seed", range(60))
def test_ranks_that_reduce_row_by_row_never_wait_in_a_circle(seed: int) -> None:
    """Of groups in shapes drawn at random: a row is summed once all ranks that keep it have come to it."""
    choose = random.Random(seed)
    cut = drawn_cut(choose)
    home = home_of(cut.home.stages, choose.choice([1, 2]))
    queues = []
    for _ in range(choose.randint(1, 6)):
        stages = choose.choice([*cut.shapes, home.pipeline])
        queues += [list(rows_of(home, cut, stages, one)) for one in range(shape_of(home, stages).group_size)]
    groups = sum(row == 0 for queue in queues for row in queue)
    while any(queues):
        heads = [queue[0] for queue in queues if queue]
        summed = [row for row in set(heads) if heads.count(row) == groups]
        assert summed, f"all ranks wait: {queues}"
        queues = [queue[1:] if queue and queue[0] in summed else queue for queue in queues]


def test_what_the_flag_allows() -> None:
    assert shapes_of("none", 4) == ()
    assert shapes_of("auto", 6) == (5, 4, 3, 2, 1)
    assert shapes_of("auto", 6, WHOLE) == shapes_of("auto", 6, "", WHOLE) == (3, 2, 1)
    assert shapes_of("5,2", 6, "", WHOLE) == (5, 2), "a number that is asked for"
    assert shapes_of("1,2", 4) == (2, 1)
    assert shapes_of("auto", 1) == ()


@pytest.mark.parametrize(
    ("text", "pipeline", "sentence"),
    [
        ("4", 4, "has 4 pipeline stages, but a smaller shape has at least 1 and fewer than the 4 of .*: use 3, 2, 1"),
        ("0", 4, "has 0 pipeline stages"),
        ("1", 1, "with one stage there is no smaller shape"),
        (
            "2,",
            4,
            r"--spare-shapes '2,' is no list of numbers of pipeline stages; use none, auto, or numbers such as 3,2,1",
        ),
        ("some", 2, "is no list of numbers"),
    ],
)
def test_bad_shapes_are_refused(text: str, pipeline: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        shapes_of(text, pipeline)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--num-layers 8 --num-virtual-stages-per-pipeline-rank 2", "virtual pipeline stages cannot be cut"),
        ("--pipeline-model-parallel-layout Et|t|t|tL", "stages of --pipeline-model-parallel-layout cannot be cut"),
    ],
)
def test_stages_that_cannot_be_cut(flags: str, why: str) -> None:
    """Only numbers of stages are left that divide home's, and auto takes these."""
    job = f"--num-layers 4 --pipeline-model-parallel-size 4 --spare-max-group-restarts 3 {flags}"
    with pytest.raises(ConfigError, match=f"^--spare-shapes 3 has 3 pipeline stages, but {why}, .*: use 2, 1$"):
        job_of(f"{job} --spare-shapes 3", launched(4))
    assert job_of(f"{job} --spare-shapes auto", launched(4))[0].cut.shapes == (2, 1)


def test_auto_leaves_overlapping_sums_alone() -> None:
    job = "--num-layers 6 --pipeline-model-parallel-size 3 --spare-max-group-restarts 3 --overlap-grad-reduce"
    assert job_of(f"{job} --spare-shapes auto", launched(4))[0].cut.shapes == (1,)
    asked, namespace = job_of(f"{job} --spare-shapes 2", launched(4))
    assert asked.cut.shapes == (2,)
    assert any(note.startswith("--overlap-grad-reduce has no effect") for note in namespace.spare_notes)


@pytest.mark.skipif(not recomputes_whole_units(), reason="this megatron-core takes a smaller last unit")
def test_where_layers_are_computed_again_in_units_each_stage_has_whole_ones() -> None:
    """megatron-core 0.16 would ask a stage of three layers for its fourth."""
    job = "--num-layers 6 --pipeline-model-parallel-size 3 --spare-max-group-restarts 3"
    job += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
    assert job_of(f"{job} --spare-shapes auto", launched(4))[0].cut.shapes == (1,)
    sentence = "^--spare-shapes 2: with 2 pipeline stages one has 3 layers, no multiple of --recompute-num-layers 2"
    with pytest.raises(ConfigError, match=sentence):
        job_of(f"{job} --spare-shapes 2", launched(4))
    sentence = "--recompute-num-layers 2 with a stage of 3 layers needs megatron-core 0.19 or later"
    with pytest.raises(ConfigError, match=sentence):
        check_machine(job_of(f"{job} --pipeline-model-parallel-size 2", launched(4))[1])


def test_a_home_rank_has_several_rows_where_a_shape_cuts_its_stage() -> None:
    job = "--num-layers 6 --pipeline-model-parallel-size 3 --spare-max-group-restarts 3"
    home = job_of(f"{job} --spare-shapes auto", launched(4))[0]
    assert (home.place.stages, home.place.rows) == (0, ((0,), (1, 2), (3,)))
    assert job_of(f"{job} --spare-shapes 1", launched(4))[0].place.rows == ()


@pytest.mark.parametrize(("shapes", "allowed"), [("1", "1"), ("none", "no smaller shape")])
def test_a_rank_with_a_number_of_stages_that_no_group_can_have_is_refused(shapes: str, allowed: str) -> None:
    job = f"--pipeline-model-parallel-size 4 --num-layers 4 --spare-shapes {shapes} --spare-max-group-restarts 3"
    with pytest.raises(ConfigError, match=f"^the environment variable SPARE_STAGES is 3, but .* allows {allowed};"):
        job_of(job, {**launched(4), "SPARE_STAGES": "3"})


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
