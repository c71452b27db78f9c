"""Random walks through the worlds of a model that is too large to explore, and the journal that one leaves."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from spare_megatron.controller.machine import initial_state, step
from spare_megatron.recovery.journal import Journal, replay
from tests.explore.search import tell
from tests.explore.world import Model, World

MOVES_MAX = 20_000


def walk(model: Model, numbers: Iterable[int]) -> tuple[World, list[str]]:
    """Each number chooses the next move, in one of ten cases a fault. The last world, and the moves."""
    world, moves = model.start(), []
    for number in numbers:
        there = list(model.moves(world))
        if not there:
            break
        likely = [move for move in there if move[1] == (number % 10 == 0)] or there
        label, _, make = likely[number // 10 % len(likely)]
        moves.append(label)
        world = _made(model, moves, make)
    return world, moves


def run_out(model: Model, world: World, moves: list[str], seed: int = 0) -> World:
    """Nothing more fails: what can happen happens, in a fair (seeded) order, until the job is over and all know."""
    order = random.Random(seed)
    for _ in range(MOVES_MAX):
        there = [move for move in model.moves(world) if not move[1]]
        if world.over and not there:
            return world
        assert there, "the job stands still:\n" + "\n".join(tell(model, moves)[-15:])
        label, _, make = order.choice(there)
        moves.append(label)
        world = _made(model, moves, make)
    raise AssertionError("the job does not end:\n" + "\n".join(tell(model, moves)[-15:]))


def journalled(model: Model, moves: Iterable[str], path: Path) -> None:
    """Play the moves with a journal as the coordinator writes it. Its replay gives the same actions and state."""
    model.heard = []
    world = model.start()
    for wanted in moves:
        world = next(make for label, _, make in model.moves(world) if label == wanted)()
    events = [event.value for event, _ in model.heard]
    model.heard, state = None, initial_state()
    journal = Journal(path, 0, 0, clock=lambda: 0.0)
    for event in events:
        state, decision = step(state, event)
        journal.append(event, decision)
    journal.close()
    read, count = replay(path)
    assert count == len(events)
    assert model.brains.of(read) is model.brains.of(state) is world.brain, "the journal's replay gives another state"


def _made(model: Model, moves: list[str], make: object) -> World:
    try:
        world: World = make()  # type: ignore[operator]
    except AssertionError as error:
        raise AssertionError(f"{error}\n" + "\n".join(tell(model, moves)[-15:])) from error
    return world
