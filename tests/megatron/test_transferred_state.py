"""A rank that takes over another's state goes on exactly as that one does, in every mode and layout.

One engine trains a few steps. After each of some steps a fresh engine with other weights takes over its state, applies
the next two committed results without having run a piece, and then computes a step itself. What it would save is
compared with what the first one would save, tensor by tensor, and so are its sums and what it reports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from spare_megatron.collectives.converting import results_of
from tests.megatron.test_parity import BALANCED, SEED, case
from tests.spawn import run_ranks
from tests.tickets import run_of

pytestmark = pytest.mark.timeout(600)

LEARNS = 2
"""Number of results that are applied before the fresh engine computes a step."""
STARTS = (0, 1, 3)
"""The steps after which a state is taken over: never updated; measured or skipped; updated."""
STEPS = STARTS[-1] + LEARNS + 1
SHARDS = 3
"""State shards of a position."""
DIGESTS = [f"state shard {number}" for number in range(SHARDS)]
SMALL = {"num_layers": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1}
SCALED = {"initial_loss_scale": 2.0**18, "hysteresis": 2, "loss_scale_window": 2}
SPLIT = {"use_distributed_optimizer": True}


def one_group(transformer: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    made = {"global_batch_size": 4, "steps": STEPS, "state_shards": SHARDS, **changes}
    return case(groups=1, transformer={**SMALL, **transformer}, **made)


TOGETHER = {
    "TP2, loss scale, exact": one_group(
        {"sequence_parallel": True, "fp16": True}, tensor=2, reduce="exact", optimizer=SCALED
    ),
    "PP2, virtual stages, bf16, reduced in bf16": one_group(
        {"bf16": True, "num_layers": 4}, pipeline=2, virtual=2, reduce="bf16"
    ),
    "D2, split optimizer, loss scale": one_group({"fp16": True}, inner_data=2, optimizer={**SCALED, **SPLIT}),
    "EP2, expert bias, split optimizer, bf16, exact": one_group(
        {**BALANCED, "bf16": True}, inner_data=2, expert=2, reduce="exact", optimizer=SPLIT
    ),
}
"""Groups of both processes."""
ALONE = [
    {"exact32": one_group({}, reduce="exact32")},
    {
        "expert bias, bf16, exact": one_group({**BALANCED, "bf16": True}, reduce="exact"),
        "SGD": one_group({}, optimizer={"optimizer": "sgd", "sgd_momentum": 0.9}),
    },
]
"""For each process, groups of it alone."""
CASES = [*TOGETHER, *(name for cases in ALONE for name in cases)]


def worker(rank: int, store: Any, _: Any) -> dict[str, Any]:
    """What this process found in its cases."""
    from torch.distributed import PrefixStore

    found = {name: Transfer(one, rank, PrefixStore(name, store)).found() for name, one in TOGETHER.items()}
    for name, one in ALONE[rank].items():
        found[name] = Transfer(one, 0, PrefixStore(name, store)).found()
    return found


@dataclasses.dataclass
class Seen:
    """What is known of one engine after a step: copies."""

    tensors: dict[str, torch.Tensor]
    values: Any
    saved: dict[str, Any]
    """What it would save; nothing here comes of the methods that are tested."""


@dataclasses.dataclass
class Result:
    """What a step was committed with, and what the engine reported."""

    sums: list[torch.Tensor]
    scalars: dict[str, float]
    report: dict[str, Any]


class Transfer:
    """One case on one rank."""

    def __init__(self, one: dict[str, Any], position: int, store: Any) -> None:
        self.case, self.position, self.store = one, position, store
        self.seen: dict[int, Seen] = {}
        self.results: dict[int, Result] = {}
        self.wrong: list[str] = []
        self.needless: list[str] = []

    def found(self) -> dict[str, Any]:
        """Everything that is unlike, the parts of a state without which nothing is unlike, and the first's reports."""
        self.train()
        for start in STARTS:
            self.go_on(start)
        reports = [{key: result.report[key] for key in ("skipped", "loss")} for result in self.results.values()]
        return {"wrong": self.wrong, "needless": self.needless, "reports": reports}

    @contextlib.contextmanager
    def engine(self, name: str, seed: int) -> Iterator[Any]:
        """A fresh engine inside the layers that a job puts around it, with the weights of ``seed``."""
        from torch.distributed import PrefixStore

        from spare_megatron.megatron_adapter.model import world
        from spare_megatron.megatron_adapter.model.losses import averages
        from spare_megatron.worker.evaluation import EvaluatingEngine, Evaluation
        from spare_megatron.worker.reporting import ReportingEngine, StepHooks
        from tests.megatron import groups

        one = groups.engine_of({**self.case, "seed": seed}, self.position, PrefixStore(name, self.store))
        one.replica.settings = dataclasses.replace(one.replica.settings, seed=SEED)
        source = groups.source_of(groups.shape_of(self.case), one.world.data_rank)
        passes = [Evaluation("validation", 1, lambda state, iteration: source)]
        try:
            yield EvaluatingEngine(ReportingEngine(one, StepHooks(), True), STEPS, 2, passes, (), averages)
        finally:
            world.destroy()

    def train(self) -> None:
        """Train the first engine from the beginning to the end, then apply the same results to one that is never asked
        for its state."""
        with self.engine("first", SEED) as engine:
            self.seen[0] = see(engine)
            for step in range(1, STEPS + 1):
                engine.begin_step(step)
                engine.run(step, run_of(self.pieces))
                sums, scalars = results_of(engine.conversion(), engine.local_sum()), dict(engine.scalars())
                self.compare(
                    f"state of step {step - 1} in step {step}", engine.state_tensors(), self.seen[step - 1].tensors
                )
                values = json.loads(json.dumps(engine.state_values()))
                self.note(f"values of step {step - 1} in step {step}", values == self.seen[step - 1].values)
                self.results[step] = Result(sums, scalars, dict(engine.apply(step, sums, scalars)))
                self.seen[step] = see(engine)
        with self.engine("unasked", SEED) as engine:
            for step in range(1, STEPS + 1):
                self.learn(engine, step)
            self.compare("end of the engine that is not asked", saved(engine), self.seen[STEPS].saved)

    @property
    def pieces(self) -> list[int]:
        from tests.megatron import groups

        return list(range(groups.shape_of(self.case).pieces))

    def go_on(self, start: int) -> None:
        """Take the state after ``start`` over, apply results, compute one step."""
        with self.engine(f"from {start}", SEED + 1) as engine:
            fresh, donor = see(engine), self.seen[start]
            if self.position == 0:  # alone: neither is collective
                assert engine.state_tensors().keys() == fresh.tensors.keys()
                assert engine.state_values().keys() == fresh.values.keys()
            kinds = [{name: (one.dtype, one.shape) for name, one in seen.tensors.items()} for seen in (fresh, donor)]
            self.note(f"names from {start}", kinds[0] == kinds[1])
            self.note(f"other weights before {start}", unlike(fresh.saved, donor.saved) != [])
            self.adopt(engine, donor.tensors, donor.values, start)
            self.compare_all(f"adopted {start}", engine, start)
            for step in range(start + 1, start + LEARNS + 1):
                self.learn(engine, step)
            self.compare_all(f"from {start}, step {step}", engine, step)
            last = start + LEARNS + 1
            engine.begin_step(last)
            engine.run(last, run_of(self.pieces))
            sums, scalars = results_of(engine.conversion(), engine.local_sum()), dict(engine.scalars())
            self.compare(
                f"sums of step {last} from {start}", dict(enumerate(sums)), dict(enumerate(self.results[last].sums))
            )
            self.note(f"scalars of step {last} from {start}", scalars == self.results[last].scalars)
            self.note_report(last, engine.apply(last, sums, scalars))
            self.compare_all(f"from {start}, computed {last}", engine, last)
            if start == STARTS[-1]:
                self.leave_out(engine, fresh, start)
                if DIGESTS[0] in donor.values:
                    self.tear(engine, fresh, start)

    def tear(self, engine: Any, fresh: Seen, start: int) -> None:
        """Take a state over of which one tensor came otherwise than it was."""
        donor = self.seen[start]
        name = max(name for name in donor.tensors if name.startswith("state shard"))
        try:
            self.adopt(engine, {**donor.tensors, name: fresh.tensors[name]}, donor.values, start)
        except RuntimeError as error:
            self.note(str(error), str(error).endswith(f"than it was: {DIGESTS[-1]}"))
        else:
            self.note("a torn state was taken", False)

    def leave_out(self, engine: Any, fresh: Seen, start: int) -> None:
        """Find the parts of a state that can be as in a fresh engine without anything that is saved being unlike."""
        donor, result = self.seen[start], self.results[start + 1]
        for part in sorted({kind(name) for name in donor.tensors} | set(inside(donor.values))):
            given = {name: fresh.tensors if kind(name) == part else donor.tensors for name in donor.tensors}
            tensors = {name: seen[name] for name, seen in given.items()}
            self.adopt(engine, tensors, without(part, donor.values, fresh.values), start, mixed=True)
            if anywhere(bool(unlike(saved(engine), donor.saved))):
                continue
            engine.begin_step(start + 1)
            engine.apply(start + 1, [one.clone() for one in result.sums], result.scalars)
            if not anywhere(bool(unlike(saved(engine), self.seen[start + 1].saved))):
                self.needless.append(part)

    @staticmethod
    def adopt(engine: Any, tensors: Mapping[str, torch.Tensor], values: Any, step: int, *, mixed: bool = False) -> None:
        """Take a state over; ``mixed``: its tensors are not all of one engine, so the digests are made of what came."""
        for name, own in engine.state_tensors().items():
            assert own.is_contiguous()
            own.view(-1).view(torch.uint8).copy_(in_bytes(tensors[name]))
        if mixed:
            values = {**values, **{name: one for name, one in engine.state_values().items() if name in DIGESTS}}
        engine.adopt_state(step, json.loads(json.dumps(values)))

    def learn(self, engine: Any, step: int) -> None:
        """Apply a committed result without having run a piece."""
        result = self.results[step]
        engine.begin_step(step)
        self.note_report(step, engine.apply(step, [one.clone() for one in result.sums], result.scalars))

    def note_report(self, step: int, report: Mapping[str, Any]) -> None:
        timers = report["timers"]
        self.note(f"times of {step}", all(0 <= timers[name] < 1e6 for name in timers))
        own, first = ({key: one[key] for key in one if key != "timers"} for one in (report, self.results[step].report))
        self.note(f"report of {step}: {own} and {first}", str(own) == str(first))

    def compare_all(self, when: str, engine: Any, step: int) -> None:
        seen, expected = see(engine), self.seen[step]
        self.compare(f"tensors, {when}", seen.tensors, expected.tensors)
        self.note(f"values, {when}", seen.values == expected.values)
        self.compare(f"saved, {when}", seen.saved, expected.saved)

    def compare(self, when: str, own: Mapping[Any, Any], expected: Mapping[Any, Any]) -> None:
        self.note(when + f": {unlike(own, expected)[:3]}", not unlike(own, expected))

    def note(self, what: str, right: bool) -> None:
        if not right:
            self.wrong.append(what)


def see(engine: Any) -> Seen:
    tensors = {name: one.clone() for name, one in engine.state_tensors().items()}
    return Seen(tensors, json.loads(json.dumps(engine.state_values())), saved(engine))


def saved(engine: Any) -> dict[str, Any]:
    """What a checkpoint of this rank would have, and its weights. Collective."""
    from spare_megatron.megatron_adapter.checkpoint.group_checkpoint import Checkpointer

    inner = engine.engine.engine
    if not hasattr(engine, "checkpointer"):
        engine.checkpointer = Checkpointer(inner.replica)
    exact = None if inner.exact is None else inner.exact.state
    share = engine.checkpointer.take("unused", step=1, consumed_samples=1, rank_state=exact, copied=False)
    found: dict[str, Any] = {"digest": engine.weights_digest(), **engine.weights_checksums()}
    for _, data, tensors in share.buckets:
        found |= {str(item.index): one.clone() for item, one in tensors}
        found |= {
            str(item.index): text(torch.load(io.BytesIO(one.getvalue()), weights_only=False)) for item, one in data
        }
    return {**found, **{f"common {name}": text(value) for name, value in sorted(share.common.items())}}


def text(value: Any) -> str:
    """All of a nested value, to the last bit."""
    return repr(tree_map(lambda one: one.tolist() if torch.is_tensor(one) else one, value))


def unlike(own: Mapping[Any, Any], expected: Mapping[Any, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        if torch.is_tensor(a) and torch.is_tensor(b):
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*map(in_bytes, (a, b)))
        return type(a) is type(b) and a == b

    return [str(name) for name in {**own, **expected} if not same(own.get(name), expected.get(name))]


def in_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def kind(name: str) -> str:
    """'model', 'main', 'exp_avg', ...: what a tensor is to its optimizer or its model."""
    return "model" if name.startswith("model.") else name.rpartition(".")[2]


def inside(values: Any) -> list[str]:
    """The parts of a state's values that are not empty."""
    parts = [name for name in ("schedule", "exact") if values[name]]
    return parts + [name for name in ("options", "steps", "scaler") if values["optimizers"][0][name]]


def without(part: str, donor: Any, fresh: Any) -> Any:
    """The values of ``donor``, with one part of ``fresh``."""
    if part in donor:
        return {**donor, part: fresh[part]}
    pairs = zip(donor["optimizers"], fresh["optimizers"], strict=True)
    return {**donor, "optimizers": [{**one, **({part: other[part]} if part in one else {})} for one, other in pairs]}


def anywhere(mine: bool) -> bool:
    """Whether ``mine`` is true on some rank of the group. Collective."""
    import torch.distributed as dist

    reported = torch.tensor([int(mine)])
    dist.all_reduce(reported, op=dist.ReduceOp.MAX)
    return bool(reported.item())


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[Any]:
    print(f"seed {SEED}")
    worker = "tests.megatron.test_transferred_state:worker"
    found: list[Any] = once("transferred state", lambda: run_ranks(worker, [None] * 2, timeout_s=560.0))
    return found


@pytest.mark.parametrize("name", CASES)
def test_whoever_takes_over_a_state_goes_on_as_its_donor(results: list[Any], name: str) -> None:
    ranks = [result[name] for result in results if name in result]
    assert ranks
    for rank in ranks:
        assert rank["wrong"] == []
        assert all(math.isfinite(report["loss"]) for report in rank["reports"])


@pytest.mark.parametrize("name", CASES)
def test_no_part_of_a_state_can_be_left_out(results: list[Any], name: str) -> None:
    """The comparison above sees each part."""
    for result in results:
        if name in result:
            assert result[name]["needless"] == []


def test_steps_that_update_nothing_are_among_them(results: list[Any]) -> None:
    skipped = {name: [one["skipped"] for one in result[name]["reports"]] for result in results for name in result}
    assert skipped["exact32"] == [1, 1, 0, 0, 0, 0]
    for name in CASES:
        assert set(skipped[name]) == ({0, 1} if "loss scale" in name or "32" in name else {0})
