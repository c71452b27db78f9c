"""Megatron jobs whose groups keep only a part of the optimizer's state have the weights and the state of those that
keep all, bit for bit, also where groups are killed; and a group has no memory for what it does not keep."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spare_megatron import kernels
from spare_megatron.config.errors import ConfigError
from spare_megatron.control_plane.group_aggregation import first_part
from spare_megatron.coordinator import journal
from spare_megatron.protocol.messages import ReductionResult, Vote
from spare_megatron.worker.job_arguments import parse_job
from tests.megatron.test_transferred_state import SPLIT, one_group
from tests.process.harness import Job, launch
from tests.pure.flags_of_a_job import launched
from tests.spawn import run_ranks

pytestmark = pytest.mark.timeout(300)

STEPS = 8
GROUPS = 3
FLAGS = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "6", "--lr", "1e-3"),
    *("--clip-grad", "1.0", "--train-iters", str(STEPS), "--mock-data", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "127", "--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--log-interval", "1"),
    *("--split", "100,0,0", "--eval-iters", "0", "--num-workers", "0", "--bf16", "--spare-redundancy", "3"),
)
DIVIDED = ("--spare-state-redundancy", "2")
ALONE = ("--spare-redundancy", "1", "--spare-piece-microbatches", "1")
"""Of a job of one group, which keeps all state and leaves the bits of any number of groups."""


def start(run_dir: Path, *flags: str, inject: Sequence[str] = (), groups: int = GROUPS) -> Job:
    words = (*common(flags), *flags, *(ALONE if groups == 1 else ()))
    return launch(run_dir, *words, groups=groups, group_size=None, script="pretrain_gpt.py", inject=inject)


def common(flags: Sequence[str]) -> tuple[str, ...]:
    """The flags of a job that has ``flags`` too."""
    return tuple(flag for flag in FLAGS if flag != "--bf16" or "--fp16" not in flags)


def results(run_dir: Path) -> list[ReductionResult]:
    """What ok votes had."""
    events = [record.event for record in journal.read(run_dir / "journal.jsonl")]
    return [event.result for event in events if isinstance(event, Vote) and event.result.ok]


def weights(run_dir: Path) -> dict[int, set[str]]:
    """Step -> digests of the weights after it, as all votes have them."""
    found: dict[int, set[str]] = {}
    for result in results(run_dir):
        found.setdefault(result.step - 1, set()).add(first_part(result.weights_digest))
    return found


def states(run_dir: Path) -> dict[tuple[int, int], set[int]]:
    """(step, state shard) -> checksums of its copies after the step."""
    found: dict[tuple[int, int], set[int]] = {}
    for result in results(run_dir):
        for shard, checksum in result.state:
            found.setdefault((result.step - 1, shard), set()).add(checksum)
    return found


def without_failures(folder: Path) -> str:
    """Where the job without failures ran in which each state shard has two copies. It has the weights of the one whose
    only group keeps all state."""
    jobs = [start(folder / "whole", groups=1), start(folder / "divided", *DIVIDED)]
    for job in jobs:
        job.finish(timeout_s=200)
    whole, divided = (job.run_dir for job in jobs)
    assert weights(divided) == weights(whole)
    assert set(weights(divided)) == set(range(STEPS + 1)), "a step without votes"
    return str(divided)


def check_bits(run_dir: Path, undisturbed: Path) -> None:
    """Weights after every step, and each copy of a shard after each, are the same bits. (Those of groups that keep all
    are compared in checkpoints: :mod:`.test_divided_saves`.)"""
    assert weights(run_dir) == weights(undisturbed)
    expected, found = states(undisturbed), states(run_dir)
    assert expected.keys() >= {(step, shard) for step in range(1, STEPS) for shard in range(GROUPS)}
    assert {at: value for at, value in found.items() if at[0]} == {at: value for at, value in expected.items() if at[0]}
    assert all(len(value) == 1 for value in found.values()), "copies that differ"


@pytest.mark.parametrize(
    "kills",
    [
        ("sigkill:group=1,step=4,at=vote",),
        ("sigkill:group=0,step=4,at=apply",),
        ("sigkill:group=0,step=3,at=gather", "sigkill:group=1,step=6,at=backward"),
        ("coordinator-sigkill:group=1,step=4,at=gather", "sigkill:group=1,step=5,at=vote"),
    ],
    ids=[
        "before the commit",
        "between commit and update",
        "in the gather, and another host later",
        "the coordinator in the gather, and a host after it",
    ],
)
def test_two_copies_of_each_shard_give_the_bits_of_three(
    tmp_path: Path, undisturbed: Path, kills: Sequence[str]
) -> None:
    job = start(tmp_path, *DIVIDED, inject=kills)
    lines = job.finish(timeout_s=200)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    check_bits(job.run_dir, undisturbed)
    copies = json.loads((job.run_dir / "status.json").read_text())["state_copies"]
    assert not copies["copying"], "who got a copy says so at once"


EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-router-score-function", "sigmoid"),
    *("--moe-router-enable-expert-bias", "--moe-router-load-balancing-type", "aux_loss"),
    *("--moe-aux-loss-coeff", "1e-2"),
)
OVERLAP = ("--overlap-grad-reduce", "--num-layers", "4", "--log-num-zeros-in-grad", "--log-params-norm")
STAGES = ("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1")
HALF = ("--fp16", "--initial-loss-scale", str(2**20), "--loss-scale-window", "2", "--hysteresis", "1")
"""The first steps are skipped, and the scale grows again."""
LAST = ("sigkill:group=0,step=3,at=gather", "sigkill:group=1,step=6,at=backward")
SHORTER = ("--train-iters", "6")
IN_A_BUCKET = ("sigkill:group=0,step=3,at=gather", "sigkill:group=1,step=5,at=reduce,n=0")


@pytest.mark.parametrize(
    ("flags", "size", "kills"),
    [
        ((*OVERLAP, *STAGES, "--spare-reduce", "exact32", *SHORTER), 2, IN_A_BUCKET),
        pytest.param(STAGES, 2, LAST, marks=pytest.mark.full),
        pytest.param(
            ("--spare-inner-data-parallel", "2", "--global-batch-size", "12"),
            2,
            ("sigkill:group=1,step=4,at=apply",),
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("--spare-inner-data-parallel", "2", "--use-distributed-optimizer", "--global-batch-size", "12"),
            2,
            ("sigkill:group=0,position=1,step=3,at=gather", "sigkill:group=1,step=6,at=backward"),
            marks=pytest.mark.full,
        ),
        pytest.param(("--tensor-model-parallel-size", "2"), 2, LAST, marks=pytest.mark.full),
        ((*HALF, "--spare-inner-data-parallel", "2", "--use-distributed-optimizer"), 2, LAST),
        pytest.param(EXPERTS, 1, LAST, marks=pytest.mark.full),
        pytest.param(OVERLAP, 1, IN_A_BUCKET, marks=pytest.mark.full),
        pytest.param(
            (
                *EXPERTS,
                *("--expert-model-parallel-size", "2", "--spare-inner-data-parallel", "2", "--global-batch-size", "12"),
            ),
            2,
            LAST,
            marks=pytest.mark.full,
        ),
        pytest.param(("--mtp-num-layers", "1", "--position-embedding-type", "rope"), 1, LAST, marks=pytest.mark.full),
        (("--split", "90,10,0", "--eval-interval", "3", "--eval-iters", "2"), 1, ("sigkill:group=1,step=9,at=vote",)),
    ],
    ids=[
        "two stages, four chunks, overlap, exact32",
        "two stages, four chunks",
        "two inner replicas",
        "two inner replicas that divide the sums",
        "two tensor ranks",
        "fp16, two inner replicas that divide the sums",
        "experts",
        "overlap",
        "experts over two ranks",
        "more tokens",
        "evaluation, the last round",
    ],
)
def test_other_jobs_have_the_same_bits_too(
    tmp_path: Path, flags: Sequence[str], size: int, kills: Sequence[str]
) -> None:
    """Groups of several ranks add up digests of state in another way where they keep all: of these, weights are
    compared with such a job, and state with a job that divides it and has no failures."""
    jobs, zeros, norms = [], [], []
    for name, groups, more, faults in (
        ("whole", 1, ALONE, ()),
        ("undisturbed", GROUPS, DIVIDED, ()),
        ("struck", GROUPS, DIVIDED, kills),
    ):
        job = launch(
            tmp_path / name,
            *(*common(flags), *flags, *more),
            groups=groups,
            group_size=size,
            script="pretrain_gpt.py",
            inject=faults,
        )
        lines = job.finish(timeout_s=200)
        skipped = [line["skipped"] for line in lines]
        assert any(skipped[:2]) == bool({"--fp16", "exact32"} & set(flags)), f"skipped: {skipped}"
        assert not all(skipped[2:])
        early = sum(line["buckets_early"] for line in lines)
        assert bool(early) == (OVERLAP[0] in flags), f"{early} buckets were sent before everything was computed"
        zeros.append([line.get("num_zeros") for line in lines])
        norms.append([line.get("params_norm") for line in lines])
        jobs.append(job.run_dir)
    whole, undisturbed, struck = jobs
    assert weights(whole) == weights(undisturbed) == weights(struck)
    assert zeros[0] == zeros[1] == zeros[2]
    assert norms[1] == norms[2]
    if OVERLAP[0] in flags:
        assert any(zeros[0])
        assert norms[1] == pytest.approx(norms[0], rel=2**-8)
    expected, found = states(undisturbed), states(struck)
    assert {step for step, _ in found} >= set(range(1, len(norms[0])))
    assert expected.items() >= {at: value for at, value in found.items() if at[0]}.items()


def test_the_loss_of_the_only_copy_ends_the_job(tmp_path: Path) -> None:
    job = start(tmp_path, "--spare-state-redundancy", "1", inject=["sigkill:group=1,step=4,at=reduce"])
    job.wait_for("the end", lambda: job.process.poll() is not None, 200)
    assert job.process.returncode != 0
    assert "no copy is left of state shard 1" in (job.run_dir / "launch.out").read_text()
    job.finish(job.process.returncode)


UNCLEAR = "have different copies after step 3 and no majority agrees"


@pytest.mark.parametrize(
    ("groups", "copies", "flip", "sentence"),
    [
        (3, 2, "group=1,position=0,step=3,at=optimizer", f"the hosts of state shard 0 {UNCLEAR}"),
        (3, 2, "group=0,position=0,step=3,at=weights", f"the hosts of state shard 2 {UNCLEAR}"),
        (4, 3, "group=0,position=0,step=3,at=optimizer", "group 0 (rank 0) diverged: its copy of state shard 3 after"),
    ],
    ids=["a moment", "weights of a host", "a moment, and two others are right"],
)
def test_a_flipped_bit_is_found_before_the_next_commit(
    tmp_path: Path, groups: int, copies: int, flip: str, sentence: str
) -> None:
    """Two copies that differ end the job, since either may be wrong, and most groups have the weights of one of
    them."""
    job = launch(
        tmp_path,
        *(*FLAGS, "--global-batch-size", str(2 * groups), "--spare-redundancy", str(groups)),
        *("--spare-state-redundancy", str(copies)),
        groups=groups,
        group_size=None,
        script="pretrain_gpt.py",
        inject=[f"bitflip:{flip}"],
    )
    job.wait_for("the end", lambda: job.process.poll() is not None, 200)
    before, found, _ = (job.run_dir / "launch.out").read_text().partition(sentence)
    assert found, before[-3000:]
    assert "iteration        4/" not in before, "a step was committed on it"
    job.finish(job.process.returncode)


def test_a_flipped_bit_in_what_was_converted_is_found_and_reduced_again(tmp_path: Path, undisturbed: Path) -> None:
    job = start(tmp_path, *DIVIDED, inject=("bitflip:group=1,position=0,step=4,at=reduce",))
    lines = job.finish(timeout_s=200)
    assert [line["live_groups"] for line in lines] == [GROUPS] * STEPS
    shown = (job.run_dir / "launch.out").read_text()
    assert re.search(r"group 1 failed step 4 in epoch 1: .*reduced result", shown), shown[-3000:]
    check_bits(job.run_dir, undisturbed)


def optimizer_bytes(rank: int, store: Any, job: tuple[int, list[int]]) -> tuple[int, int, int]:
    """Bytes of optimizer tensors of a rank whose group, of so many ranks that divide the sums, keeps some of four
    shards, by what the optimizers hold, of what it drops when all but the first of them have moved to others, and
    elements of all its parameters."""
    from tests.megatron import groups

    ranks, kept = job
    divided = {"inner_data": ranks, "optimizer": SPLIT, "divides_state": True}
    engine = groups.engine_of(one_group({"bf16": True}, reduce="exact", state_shards=4, **divided), rank, store)

    def held() -> Iterator[Any]:
        for part in engine.replica.optimizer.chained_optimizers:
            for main, state in part.optimizer.state.items():
                yield from (main, *(value for name, value in state.items() if name != "step"))

    engine.shards.keep(kept, {})
    sizes = [(weakref.ref(tensor), tensor.untyped_storage().nbytes()) for tensor in held()]
    assert not any(hasattr(one, "main_param") for chunk in engine.replica.chunks for one in chunk.parameters())
    engine.shards.keep(kept[:1], {})
    dropped = sum(size for tensor, size in sizes if tensor() is None)
    assert dropped == sum(size for _, size in sizes) - sum(tensor.untyped_storage().nbytes() for tensor in held())
    elements = sum(one.numel() for chunk in engine.replica.chunks for one in chunk.parameters())
    return sum(size for _, size in sizes), dropped, elements


def test_a_group_has_memory_for_what_it_keeps() -> None:
    """But for a block at each border of a shard."""
    for ranks, kept in ((1, [0, 1]), (1, [2]), (2, [1, 3])):
        found = run_ranks("tests.megatron.test_state_redundancy:optimizer_bytes", [(ranks, kept)] * ranks)
        for size, dropped, elements in found:
            part, blocks = 12 * elements / 4 / ranks, 12 * kernels.BLOCK
            assert size == pytest.approx(part * len(kept), abs=blocks * len(kept))
            assert dropped == pytest.approx(part * (len(kept) - 1), abs=blocks), "memory that is not given back"


def left_gradients(rank: int, store: Any, _: None) -> tuple[bool, bool]:
    """Of a group whose optimizer updates whole parameters, in the model's own memory: whether they have gradients after
    an update, and whether those of shards that it has dropped then have."""
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.model import optimizer_shards
    from tests.megatron import groups

    optimizer_shards.is_emerging = lambda part: True  # type: ignore[attr-defined]  # as Muon's
    one = one_group({}, reduce="exact", state_shards=4, divides_state=True)
    engine = groups.engine_of(one, rank, PrefixStore("group", store))
    engine.shards.keep(range(4), {})
    groups.one_step(engine, groups.peers_of(PrefixStore("peers", store), 0, 1), one, 0, 1)

    def there() -> bool:
        return any(one.grad is not None for chunk in engine.replica.chunks for one in chunk.parameters())

    updated = there()
    engine.shards.keep((), {})
    return updated, there()


def test_a_backward_pass_adds_to_no_gradient_of_a_shard_that_was_dropped() -> None:
    assert run_ranks("tests.megatron.test_state_redundancy:left_gradients", [None]) == [[True, False]]


def saved_twice(rank: int, store: Any, ranks: int) -> tuple[list[bool], list[bool]]:
    """Of a share of a checkpoint: for each of its tensors of the optimizer and of the model, whether it has been copied
    for it; both before training goes on. And whether the checkpoint's state is what the optimizers had."""
    import torch

    from spare_megatron.megatron_adapter.checkpoint import optimizer_gather, whole_state
    from spare_megatron.megatron_adapter.checkpoint.group_checkpoint import Checkpointer
    from tests.megatron import groups

    made = {"inner_data": ranks, "optimizer": SPLIT, "divides_state": True, "state_shards": 4, "reduce": "exact"}
    engine = groups.engine_of(one_group({"bf16": True}, **made), rank, store)
    shards, [part] = engine.shards, engine.replica.optimizer.chained_optimizers
    drawn = torch.Generator().manual_seed(7)
    before = {}
    for parameter, main in optimizer_gather.main_copies(part).items():
        optimizer_gather.give_first_state(engine.replica)
        state = part.optimizer.state[main]
        state["step"].fill_(3.0)
        for values in (main.data, state["exp_avg"], state["exp_avg_sq"]):
            values.copy_(torch.randn(values.shape, generator=drawn))
        before[parameter] = [one.clone() for one in (main.data, *(value for _, value in sorted(state.items())))]
    shards.keep(range(4), {})
    states = {shard: shards.state(shard, mine=True).clone() for shard in range(4)}
    whole = shards.whole(states)
    [part] = whole.optimizer.chained_optimizers
    same = []
    for parameter, main in optimizer_gather.main_copies(part).items():
        after = (main, *(value for _, value in sorted(part.optimizer.state[main].items())))
        same += [torch.equal(one, other) for one, other in zip(before[parameter], after, strict=True)]
    share = Checkpointer(engine.replica).take("nowhere", step=3, consumed_samples=0, whole=whole, copied=True)
    apart = whole_state.storages(whole)
    copied = [
        (item.index.fqn.startswith("optimizer."), data.untyped_storage().data_ptr() not in apart)
        for _, _, tensors in share.buckets
        for item, data in tensors
    ]
    assert {there for there, _ in copied} == ({True, False} if rank == 0 else {there for there, _ in copied})
    return same, [copy != of_optimizer for of_optimizer, copy in copied]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_save_has_the_state_once_in_host_memory(ranks: int) -> None:
    for same, right in run_ranks("tests.megatron.test_state_redundancy:saved_twice", [ranks] * ranks):
        assert same
        assert all(same), "the state of the checkpoint is not that of the optimizers"
        assert all(right), "state was copied once more, or weights were not"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--spare-state-redundancy", "0"], "is not between 1 and the 3 groups of the job"),
        (["--spare-state-redundancy", "4"], "is not between 1 and the 3 groups of the job"),
        (["--spare-state-redundancy", "2", "--optimizer", "soap"], "the factors that --optimizer soap has"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(flags: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_job([*FLAGS, *flags], launched(GROUPS))
