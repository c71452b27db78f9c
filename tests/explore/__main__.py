"""Explores all states of a small job, walks at random through larger ones, or plays a counterexample.

``python -m tests.explore --help`` says how.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from tests.explore.model import Model
from tests.explore.search import CounterexampleError, Explorer, tell
from tests.explore.shape import FAULTS, Shape
from tests.explore.shapes import FULL, PLAIN, WALKS
from tests.explore.walker import kind_of, shorten, summed, walks


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns 0 where no counterexample was found, else 1."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    named = {**PLAIN, **FULL, **WALKS}
    if chosen.list:
        sys.stdout.write("".join(f"{name}\n    {shape}\n" for name, shape in named.items()))
        return 0
    kinds = frozenset(filter(None, chosen.faults.split(",")))
    if kinds - set(FAULTS):
        parser.error(f"--faults {chosen.faults}: use some of {', '.join(FAULTS)}")
    if chosen.shape and chosen.shape not in (WALKS if chosen.walk else named):
        parser.error(f"--shape {chosen.shape!r} is not one of those that --list shows")
    if chosen.walk:
        return _walk(chosen.shape, chosen.seed, chosen.minutes)
    shape = named[chosen.shape] if chosen.shape else _shape(chosen, kinds)
    model = Model(replace(shape, observed=True) if shape in WALKS.values() else shape)
    if chosen.play is not None:
        moves = [move.strip() for move in chosen.play.split(";") if move.strip()]
        sys.stdout.write("".join(f"{line}\n" for line in tell(model, moves)))
        return 0

    def progress(text: str) -> None:
        sys.stderr.write(f"\r{text}")
        sys.stderr.flush()

    try:
        found = Explorer(model, chosen.limit, progress, chosen.every_move).explore()
    except CounterexampleError as error:
        sys.stdout.write(f"\n{error}\n")
        return 1
    sys.stdout.write(f"\ncomplete: {found}\n")
    return 0


def _walk(name: str | None, seed: str, minutes: float) -> int:
    """Walk at random; print each kind of finding once, shortened."""

    def progress(text: str) -> None:
        sys.stderr.write(f"\r{text}")
        sys.stderr.flush()

    sys.stdout.write(f"seed {seed}\n")
    found = walks({name: WALKS[name]} if name else WALKS, seed, 60 * minutes, progress)
    seen = set[str]()
    for figures in found.values():
        for finding in figures.findings:
            if kind_of(finding.what) not in seen:
                seen.add(kind_of(finding.what))
                sys.stdout.write(f"\n{shorten(finding)}\n")
    for one, figures in found.items():
        sys.stdout.write(f"\n{one}: {figures}")
    total = summed(found.values())
    sys.stdout.write(f"\nin all: {total}\n")
    return 1 if total.findings else 0


def _shape(chosen: argparse.Namespace, kinds: frozenset[str]) -> Shape:
    shape = Shape(chosen.groups, chosen.redundancy or chosen.groups, chosen.steps, chosen.pieces, chosen.count, kinds)
    return replace(
        shape,
        save_every=chosen.save_every,
        audit_rate=chosen.audit_rate,
        formed=chosen.formed,
        late_finals=chosen.late_finals,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.explore", description=__doc__)
    parser.add_argument("--groups", type=int, default=2, metavar="N", help="number of groups (default 2)")
    parser.add_argument("--redundancy", type=int, default=0, metavar="R", help="hosts of each shard (default: all)")
    parser.add_argument("--steps", type=int, default=2, help="steps of the job (default 2)")
    parser.add_argument("--pieces", type=int, default=1, help="pieces of each shard (default 1)")
    parser.add_argument("--faults", default="kill", metavar="KIND,...", help=f"some of {', '.join(FAULTS)}")
    parser.add_argument("--count", type=int, default=2, help="faults in all, of the kinds of --faults (default 2)")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="0: save only the last step")
    parser.add_argument("--audit-rate", type=float, default=0.0, help="share of audited pieces (default 0)")
    parser.add_argument("--formed", action="store_true", help="start with all groups in their first step")
    parser.add_argument("--late-finals", action="store_true", help="a ghost sends the actions of one final record")
    parser.add_argument("--every-move", action="store_true", help="explore without the partial-order reduction")
    parser.add_argument("--limit", type=int, help="give up, with an error, beyond this number of states")
    parser.add_argument("--play", metavar="'MOVE; MOVE; ...'", help="print what these moves do, and explore nothing")
    parser.add_argument("--walk", action="store_true", help="walk at random through the shapes of random walks")
    parser.add_argument("--seed", default="1", help="seed of the random walks (default 1)")
    parser.add_argument("--minutes", type=float, default=1.0, help="CPU time of the random walks (default 1)")
    parser.add_argument("--shape", help="name of a shape that the tests explore (--list)")
    parser.add_argument("--list", action="store_true", help="list the shapes that the tests explore")
    return parser


if __name__ == "__main__":
    sys.exit(main())
