"""The shapes of which all states are explored: ``PLAIN`` takes a minute of CPU time in plain tests, ``FULL`` longer."""

from __future__ import annotations

from dataclasses import replace

from tests.explore.shape import FAULTS, Shape

ANY = frozenset(FAULTS) - {"damage", "err", "slow", "ask", "drain", "unable", "speeds", "twin", "tune", "home"}
"""Every fault that leaves arithmetic and memory alone."""
TRUTH = frozenset({"damage", "kill", "suspect"})
BACK = frozenset({"kill", "return", "suspect", "late", "cut", "restart", "takeover"})
LATE_GROUP = "two groups, two state shards once, of which one moves to the group that comes late"

PLAIN = {
    "two groups, one step, any two faults": Shape(steps=1, faults=2, kinds=ANY, formed=True),
    "three groups, any fault": Shape(3, 3, steps=1, faults=1, kinds=ANY, formed=True),
    "three groups, each shard on two, one step, any fault": Shape(3, 2, steps=1, faults=1, kinds=ANY),
    "two groups, a group lost and back, a save after each step": Shape(
        steps=2, faults=2, kinds=frozenset({"kill", "return"}), save_every=1, formed=True
    ),
    "three groups, each shard on two, a learner called as the last resort": Shape(
        3, 2, steps=1, faults=3, kinds=frozenset({"kill", "return"}), each=(("kill", 2), ("return", 1)), formed=True
    ),
    "three groups, damaged weights, saves": Shape(
        3, 3, faults=1, kinds=frozenset({"damage"}), save_every=1, formed=True
    ),
    "three groups without redundancy, damaged weights, saves": Shape(
        3, 1, faults=1, kinds=frozenset({"damage"}), save_every=1, formed=True
    ),
    "three groups, wrong arithmetic under audits": Shape(
        3, 3, steps=1, faults=1, kinds=frozenset({"err"}), audit_rate=1.0, formed=True
    ),
    "two groups, two pieces of a shard, one that is slow and asked, and any fault": Shape(
        pieces=2, steps=1, faults=2, kinds=ANY | {"slow", "ask"}, each=(("slow", 1),), formed=True
    ),
    "three groups, one that is drained and is back, each shard on two": Shape(
        3, 2, steps=1, faults=2, kinds=frozenset({"drain", "return", "kill", "cut"}), each=(("drain", 1),), formed=True
    ),
    "two groups, one goes home, which an operator drains": Shape(
        faults=4, kinds=frozenset({"home", "drain", "return"}), each=(("drain", 1),), formed=True
    ),
    "three groups, each shard on two, speeds that change, and a loss": Shape(
        3, 2, steps=3, pieces=2, faults=2, kinds=frozenset({"speeds", "kill"}), formed=True
    ),
    "two groups without redundancy, one step, a shard adopted, and any fault": Shape(
        2, 1, steps=1, faults=2, kinds=ANY | {"unable"}, adoption=True, formed=True
    ),
    "two groups without redundancy, the last host of a shard stands still for too long": Shape(
        2, 1, faults=2, kinds=frozenset({"stall", "kill", "unable"}), adoption=True, hasty=True, formed=True
    ),
    "three groups without redundancy, a shard adopted or not": Shape(
        3, 1, steps=1, faults=3, kinds=frozenset({"kill", "unable"}), each=(("kill", 1),), adoption=True, formed=True
    ),
    "two groups, two state shards twice, any two of a few faults": Shape(
        faults=2, kinds=frozenset({"kill", "suspect", "restart"}), state_shards=2, state_copies=2, formed=True
    ),
    "two groups, two state shards once, losses and a takeover": Shape(
        faults=2, kinds=frozenset({"kill", "takeover"}), state_shards=2, state_copies=1, formed=True
    ),
    "two groups, two state shards twice, a group lost and back, and another loss": Shape(
        faults=3, kinds=frozenset({"kill", "return"}), state_shards=2, state_copies=2, formed=True
    ),
    "three groups, two state shards twice, two losses": Shape(
        3, 3, faults=2, kinds=frozenset({"kill"}), state_shards=2, state_copies=2, formed=True
    ),
    "three groups, two state shards twice, a loss, and one that cannot keep a shard": Shape(
        3, 3, faults=2, kinds=frozenset({"kill", "unable"}), state_shards=2, state_copies=2, formed=True
    ),
    "three groups, two state shards once, one is drained": Shape(
        3, 3, faults=1, kinds=frozenset({"drain"}), state_shards=2, state_copies=1, formed=True
    ),
    "two groups, two state shards once, one is drained, and the other cannot keep a shard": Shape(
        faults=2, kinds=frozenset({"drain", "unable"}), state_shards=2, state_copies=1, formed=True
    ),
    f"{LATE_GROUP}, and a loss or too little memory": Shape(
        steps=4,
        faults=2,
        kinds=frozenset({"hurry", "kill", "unable"}),
        each=(("hurry", 1),),
        state_shards=2,
        state_copies=1,
    ),
    "two groups, one final record said by a coordinator that was replaced": Shape(
        faults=1, kinds=frozenset({"takeover"}), late_finals=True
    ),
}
FULL = {
    "two groups, any two faults": Shape(faults=2, kinds=ANY),
    "three groups, two steps, any fault": Shape(3, 3, faults=1, kinds=ANY),
    "three groups, each shard on two, any fault": Shape(3, 2, faults=1, kinds=ANY),
    "two groups without redundancy, a shard adopted, and any fault": Shape(
        2, 1, faults=2, kinds=ANY | {"unable"}, adoption=True, formed=True
    ),
    **{
        f"{name}, {steps} steps": replace(PLAIN[name], steps=steps)
        for name, steps in (
            ("two groups, a group lost and back, a save after each step", 5),
            ("three groups, each shard on two, a learner called as the last resort", 3),
            ("three groups, one that is drained and is back, each shard on two", 2),
        )
    },
    "two groups, any two faults, a save after each step": Shape(faults=2, kinds=ANY, save_every=1),
    "three groups, any fault, a save after each step": Shape(3, 3, faults=1, kinds=ANY, save_every=1),
    "two groups, three steps, any two faults, a save after each step": Shape(
        steps=3, faults=2, kinds=ANY, save_every=1
    ),
    **{
        f"two groups, a group lost and back, and {kind}": Shape(
            steps=6, faults=3, kinds=frozenset({"kill", "return", kind}), each=(("return", 1), ("kill", 2)), formed=True
        )
        for kind in ("cut", "fail", "late", "restart", "stop", "suspect", "takeover", "void", "withdraw")
    },
    "two groups, a group lost and back, and damaged weights": Shape(
        steps=6, faults=3, kinds=frozenset({"kill", "return", "damage"}), save_every=1, formed=True
    ),
    "three groups, each shard on two, a learner, two losses and a void": Shape(
        3,
        2,
        steps=4,
        faults=4,
        kinds=frozenset({"kill", "return", "void"}),
        each=(("return", 1), ("void", 1)),
        formed=True,
    ),
    "two groups, two pieces of a shard, whole shards move, any two faults": Shape(
        pieces=2, faults=2, kinds=ANY, granularity="shard"
    ),
    "two groups, damaged weights and any other fault, saves": Shape(
        faults=2, kinds=ANY | {"damage"}, each=(("damage", 1),), save_every=1
    ),
    "three groups, damaged weights and a loss, saves": Shape(3, 3, faults=2, kinds=TRUTH, save_every=1),
    "three groups, each shard on two, damaged weights and a loss, saves": Shape(
        3, 2, faults=2, kinds=TRUTH, save_every=1
    ),
    "three groups, wrong arithmetic under audits and a loss": Shape(
        3, 3, faults=2, kinds=frozenset({"err", "kill", "suspect"}), audit_rate=1.0, formed=True
    ),
    "three groups, two that are slow and asked, and a loss or a broken connection": Shape(
        3, 3, steps=1, faults=3, kinds=frozenset({"slow", "kill", "cut"}), formed=True
    ),
    "three groups, each shard on two, one that is slow and asked, and a fault": Shape(
        3,
        2,
        steps=1,
        faults=2,
        kinds=frozenset({"slow", "ask", "kill", "cut", "restart", "takeover", "fail"}),
        formed=True,
    ),
    "three groups, one that is slow and asked under audits, and wrong arithmetic": Shape(
        3, 3, steps=1, faults=2, kinds=frozenset({"slow", "err"}), audit_rate=0.5, formed=True
    ),
    "two groups, a group lost and back, and one that is slow and asked": Shape(
        pieces=2, steps=4, faults=3, kinds=frozenset({"slow", "kill", "return"}), each=(("slow", 1),), formed=True
    ),
    "two groups, one is drained, and any fault, a save after each step": Shape(
        faults=2, kinds=ANY | {"drain"}, each=(("drain", 1),), save_every=1, formed=True
    ),
    "two groups, one goes home, which an operator drains, and losses": Shape(
        faults=4, kinds=frozenset({"home", "drain", "return", "kill"}), each=(("drain", 2),), formed=True
    ),
    "two groups, any two drained or faults": Shape(faults=2, steps=3, kinds=ANY | {"drain"}, save_every=1),
    "three groups, each shard on two, drained, lost and back": Shape(
        3, 2, steps=3, faults=3, kinds=frozenset({"drain", "kill", "return"}), emergency_saves=True, formed=True
    ),
    "three groups, one drained, a donor of one that is back": Shape(
        3,
        3,
        steps=4,
        faults=3,
        kinds=frozenset({"drain", "kill", "return"}),
        each=(("drain", 1), ("kill", 1)),
        formed=True,
    ),
    "three groups, each shard on two, one drained and a fault": Shape(
        3, 2, faults=2, kinds=ANY | {"drain"}, each=(("drain", 1),), formed=True
    ),
    "two groups, two pieces of a shard, speeds that change, and any fault, a save after each step": Shape(
        pieces=2, faults=2, kinds=ANY | {"speeds"}, each=(("speeds", 1),), save_every=1, formed=True
    ),
    "two groups, a group lost and back, and speeds that change": Shape(
        pieces=2,
        steps=4,
        faults=3,
        kinds=frozenset({"speeds", "kill", "return"}),
        each=(("kill", 1), ("return", 1)),
        formed=True,
    ),
    "three groups, each shard on two, speeds that change, one drained and a loss": Shape(
        3,
        2,
        steps=3,
        pieces=2,
        faults=3,
        kinds=frozenset({"speeds", "drain", "kill"}),
        each=(("drain", 1), ("kill", 1)),
        formed=True,
    ),
    "three groups, speeds that change under audits, and wrong arithmetic": Shape(
        3, 3, steps=2, pieces=2, faults=2, kinds=frozenset({"speeds", "err"}), audit_rate=0.5, formed=True
    ),
    "two groups, speeds that change, and one that is slow and asked": Shape(
        pieces=3, steps=2, faults=2, kinds=frozenset({"speeds", "slow", "ask"}), formed=True
    ),
    "three groups without redundancy, a shard adopted, and speeds that change": Shape(
        3,
        1,
        pieces=2,
        faults=3,
        kinds=frozenset({"kill", "unable", "speeds"}),
        each=(("kill", 1), ("unable", 1)),
        adoption=True,
        formed=True,
    ),
    "three groups without redundancy, a shard adopted, and back": Shape(
        3,
        1,
        faults=3,
        kinds=frozenset({"kill", "unable", "cut", "return"}),
        each=(("kill", 2), ("cut", 1), ("return", 1)),
        adoption=True,
        formed=True,
    ),
    "three groups without redundancy, a shard adopted, and any fault": Shape(
        3, 1, faults=2, kinds=ANY | {"unable"}, adoption=True, formed=True
    ),
    "three groups, each shard on two, both hosts lost, and one adopter that cannot": Shape(
        3, 2, steps=1, faults=3, kinds=frozenset({"kill", "unable", "suspect"}), adoption=True, formed=True
    ),
    "four groups, each shard on two, two adopters of which one is asked and one cannot": Shape(
        4,
        2,
        steps=1,
        pieces=2,
        faults=4,
        kinds=frozenset({"kill", "unable", "slow", "ask"}),
        each=(("kill", 2), ("slow", 1), ("ask", 1), ("unable", 1)),
        adoption=True,
        formed=True,
    ),
    "three groups without redundancy, a shard adopted, and one that is drained": Shape(
        3,
        1,
        steps=3,
        faults=3,
        kinds=frozenset({"kill", "unable", "drain"}),
        each=(("kill", 1), ("drain", 1)),
        adoption=True,
        formed=True,
    ),
    "three groups without redundancy, last hosts stand still for too long": Shape(
        3,
        1,
        steps=1,
        faults=3,
        kinds=frozenset({"stall", "kill", "unable", "cut"}),
        each=(("stall", 2), ("kill", 1), ("cut", 1)),
        adoption=True,
        hasty=True,
        formed=True,
    ),
    "two groups without redundancy, a shard adopted, lost and back, and a save": Shape(
        2, 1, steps=5, faults=3, kinds=frozenset({"kill", "unable", "return"}), save_every=1, adoption=True, formed=True
    ),
    **{
        f"{number} groups, two state shards {copies} times, {name}": Shape(
            number, number, faults=faults, kinds=kinds, state_shards=2, state_copies=copies, formed=True
        )
        for number, copies, name, faults, kinds in (
            *((2, copies, "any two faults", 2, ANY) for copies in (1, 2)),
            *((3, copies, "any fault", 1, ANY) for copies in (1, 2)),
            *((2, copies, "one is drained, and any fault", 2, ANY | {"drain"}) for copies in (1, 2)),
            (3, 1, "one is drained and a loss", 2, frozenset({"drain", "kill"})),
            (3, 2, "losses and a takeover", 2, frozenset({"kill", "takeover"})),
            (3, 2, "losses, and one that cannot keep a shard", 3, frozenset({"kill", "unable"})),
            (3, 1, "one is drained and another cannot keep a shard", 2, frozenset({"drain", "unable"})),
        )
    },
    "three groups, two state shards twice, a group lost and back": Shape(
        3,
        3,
        faults=2,
        kinds=frozenset({"kill", "return"}),
        each=(("kill", 1), ("return", 1)),
        state_shards=2,
        state_copies=2,
        formed=True,
    ),
    "two groups, two state shards once, one is drained and back, and a shard moves to it": Shape(
        steps=5,
        faults=2,
        kinds=frozenset({"drain", "return"}),
        each=(("drain", 1), ("return", 1)),
        state_shards=2,
        state_copies=1,
        formed=True,
    ),
    **{
        f"{LATE_GROUP}, and {kind}": Shape(
            steps=4, faults=2, kinds=frozenset({"hurry", kind}), each=(("hurry", 1),), state_shards=2, state_copies=1
        )
        for kind in ("cut", "drain", "fail", "restart", "suspect", "takeover")
    },
    "three groups, three failed reductions": Shape(3, 3, steps=1, faults=3, kinds=frozenset({"fail"}), formed=True),
    "three groups, a group lost and back, and another loss": Shape(
        3, 3, faults=3, kinds=frozenset({"kill", "return"}), save_every=1
    ),
}

WALKED = frozenset(FAULTS) - {"hurry"}
SHARDS = frozenset({*BACK, "stall", "standstill", "fail", "repeat", "stop", "drain", "unable"})
"""What is explored of state shards, whose saves and damage are not."""
WALKS = {
    "two groups": Shape(2, 2, steps=4, pieces=2, faults=10, kinds=WALKED, save_every=2, audit_rate=0.5),
    "two groups, adoption": Shape(2, 1, steps=4, pieces=2, faults=10, kinds=WALKED, save_every=1, adoption=True),
    "three groups": Shape(3, 2, steps=5, faults=12, kinds=WALKED, save_every=3, audit_rate=0.5, emergency_saves=True),
    "three groups, all on all": Shape(
        3, 3, steps=5, pieces=2, faults=12, kinds=WALKED, save_every=2, audit_rate=0.5, formed=True
    ),
    "three groups, adoption": Shape(
        3, 1, steps=4, pieces=2, faults=10, kinds=WALKED, save_every=2, adoption=True, hasty=True, formed=True
    ),
    "four groups": Shape(
        4, 2, steps=6, faults=12, kinds=WALKED, save_every=2, audit_rate=0.3, offsets=(0, 2), formed=True
    ),
    "four groups, adoption": Shape(
        4,
        2,
        steps=5,
        pieces=2,
        faults=12,
        kinds=WALKED | {"hurry"},
        audit_rate=0.3,
        emergency_saves=True,
        save_every=3,
        adoption=True,
        offsets=(0, 2),
    ),
    "four groups, each shard on three": Shape(
        4, 3, steps=4, faults=12, kinds=WALKED, save_every=2, audit_rate=1.0, formed=True
    ),
    "four groups, all on all": Shape(4, 4, steps=4, faults=10, kinds=WALKED, save_every=1, audit_rate=1.0, formed=True),
    "three groups, state shards": Shape(
        3, 3, steps=6, faults=10, kinds=SHARDS, save_every=0, state_shards=2, state_copies=2, formed=True
    ),
    "four groups, state shards": Shape(
        4, 4, steps=6, pieces=2, faults=10, kinds=SHARDS, state_shards=4, state_copies=2, formed=True
    ),
    "five groups, state shards": Shape(5, 5, steps=6, faults=10, kinds=SHARDS, state_shards=3, state_copies=3),
    "five groups": Shape(
        5, 2, steps=6, faults=12, kinds=WALKED, save_every=2, audit_rate=0.3, adoption=True, hasty=True, formed=True
    ),
}
"""The shapes of random walks: all kinds of faults at once."""
