"""The examples that need no Megatron. Those that do are run by tests/megatron, the batch scripts by tests/slurm."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from spare_megatron.protocol.tickets import KnownTickets, Ticket
from tests.process.harness import ROOT, launch

FOLDER = ROOT / "examples" / "torch_only"
GROUPS, STEPS = 3, 12


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import train  # type: ignore[import-not-found]

    return train  # type: ignore[no-any-return]


class Alone:
    """One engine that computes the pieces of all groups."""

    def __init__(self, train: ModuleType) -> None:
        model, loss_of = train.build(GROUPS)
        self.pieces = GROUPS * train.PIECES
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.engine = train.TorchEngine(optimizer, loss_of, self.pieces * train.SAMPLES)

    def step(self, step: int) -> float:
        """The loss of a step."""
        self.engine.begin_step(step)
        self.engine.run(step, KnownTickets([Ticket(piece) for piece in range(self.pieces)]))
        return self.engine.apply(step, self.engine.local_sum(), self.engine.scalars())["lm loss"]  # type: ignore[no-any-return]


def test_a_torch_loop_loses_a_group_and_no_step(tmp_path: Path, train: ModuleType) -> None:
    script = str(FOLDER / "train.py")
    inject = ["sigkill:group=2,step=5,at=forward,n=1"]
    job = launch(tmp_path, "--steps", str(STEPS), groups=GROUPS, group_size=1, script=script, inject=inject)
    lines = job.finish()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["recovery"]["lost_groups"] for line in lines if line["recovery"]] == [[2]]
    alone = Alone(train)
    for line in lines:
        assert line["loss"] == pytest.approx(alone.step(line["step"]), rel=1e-5), f"step {line['step']}"


def test_the_state_of_a_torch_engine_is_all_that_another_one_needs(train: ModuleType) -> None:
    donor, learner = Alone(train), Alone(train)
    for step in (1, 2):
        donor.step(step)
    with torch.no_grad():
        for name, tensor in learner.engine.state_tensors().items():
            tensor.copy_(donor.engine.state_tensors()[name])
    learner.engine.adopt_state(2, donor.engine.state_values())
    assert learner.step(3) == donor.step(3)
    assert learner.engine.weights_digest() == donor.engine.weights_digest() != Alone(train).engine.weights_digest()
