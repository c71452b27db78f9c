"""Random walks through a model that is too large to explore, and the journal of such a walk."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from spare_megatron.coordinator.journal import Journal, Replayed, replay
from spare_megatron.protocol.machine import initial_state, step
from tests.explore.model import Model, Move
from tests.explore.search import tell
from tests.explore.world import World

MOVES_MAX = 20_000


def walk(model: Model, numbers: Iterable[int]) -> tuple[World, list[str]]:
    """Each number chooses the next move, which is a fault in one of ten cases. Returns the last world and the moves."""
    model.do.received = []
    world, moves = model.start(), list[str]()
    for number in numbers:
        there = list(model.moves(world))
        if not there:
            break
        likely = [move for move in there if move[1] == (number % 10 == 0)] or there
        world = _made(model, moves, likely[number // 10 % len(likely)])
    return world, moves


def run_out(model: Model, world: World, moves: list[str], seed: int = 0) -> World:
    """Go on without faults, with moves in a fair (seeded) order, until the job is over and all processes know it."""
    order = random.Random(seed)
    for _ in range(MOVES_MAX):
        there = [move for move in model.moves(world) if not move[1]]
        if world.over and not there:
            return world
        assert there, "the job stands still:\n" + "\n".join(tell(model, moves)[-15:])
        world = _made(model, moves, order.choice(there))
    raise AssertionError("the job does not end:\n" + "\n".join(tell(model, moves)[-15:]))


def journalled(model: Model, world: World, path: Path) -> None:
    """Write the journal of a walk as the coordinator writes it, and check that its replay leads to the same state by
    the same actions. The model must have recorded the walk's events from the beginning."""
    assert model.do.received is not None, "the events of the walk were not recorded"
    state = initial_state()
    journal = Journal(path, Replayed(), clock=lambda: 0.0)
    for event in model.do.received:
        state, decision = step(state, event)
        journal.append(event, decision)
    journal.close()
    again = replay(path)
    assert again.records == len(model.do.received)
    brains = model.do.brains
    assert brains.of(again.state) is brains.of(state) is world.brain, "the journal's replay gives another state"


def _made(model: Model, moves: list[str], move: Move) -> World:
    label, _, make = move
    moves.append(label)
    try:
        return make()
    except AssertionError as error:
        raise AssertionError(f"{error}\n" + "\n".join(tell(model, moves)[-15:])) from error
