"""Which small faults put into the code do the tests catch? A seeded list of mutants, one after the other.

    python -m benchmarks.mutants --seed 45 --count 60 [--first N] [--only N] [--pure] [--limit-s 90] [--json FILE]

Each mutant is one change at one place: a comparison with its neighbour, ``and`` for ``or``, ``+`` for ``-``, a number
one larger, a truth value turned, a ``not`` or a whole statement left out. The places are drawn from five parts of the
package in turn. A mutant runs in a copy of this checkout: first the pure tests that import the changed module, then
each file of tests that is listed for its part, until one fails. A run that takes more CPU time than the limit counts as
caught too; that the code as it is passes the listed files within the limit, ``--only 0`` shows. A mutant that survives
may be one that changes nothing which can be seen. Needs the compiled libraries of the checkout.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "protocol": (
        "protocol",
        ["pure/test_scenarios.py", "pure/test_machine_random.py", "explore/test_explore.py", "process/test_masking.py"],
    ),
    "worker": (
        "worker",
        [
            *("process/test_masking.py", "process/test_checkpoints.py", "megatron/test_masking.py"),
            *("megatron/test_state_redundancy.py", "megatron/test_divided_returns.py"),
        ],
    ),
    "collectives": (
        "collectives",
        ["process/test_replica.py", "process/test_masking.py", "megatron/test_inner_sums.py"],
    ),
    "checkpoint": ("checkpoint", ["process/test_checkpoints.py", "megatron/test_convert.py"]),
    "data": (
        "data",
        [
            *("pure/test_text_files.py", "megatron/test_data.py", "megatron/test_preprocess.py"),
            *("megatron/test_preprocess_golden.py", "megatron/test_stale_indices.py"),
        ],
    ),
}
"""Part -> (its package, tests that run beside the pure ones which import the module)."""
HANGS = 5
"""So many times its limit of CPU time a run of pytest may last: some mutants hang where no signal is heard."""
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """``text`` in the place of the bytes from ``start`` to ``end`` of ``file``, on its line ``line``."""

    part: str
    file: str
    line: int
    start: int
    end: int
    text: str


def changed(node: ast.AST) -> ast.AST | None:
    """A node like ``node``, and yet another; None where nothing is changed."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return ast.Compare(node.left, [COMPARED[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    if isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        return ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return ast.Pass()
    return None


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below ``node`` that run inside functions: no annotation, default value, text in braces or logging."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in child.body:
                yield statement
                yield from _inside(statement)
        elif isinstance(child, ast.ClassDef):
            yield from _computing(child)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            speaks = isinstance(child, ast.JoinedStr | ast.Raise) or (
                isinstance(child, ast.Expr) and re.search(r"\b(log|logger|logging|warn)\b", ast.unparse(child))
            )
            if isinstance(child, ast.AST) and not speaks:
                yield child
                yield from _inside(child)


def places(part: str) -> list[Mutant]:
    """All mutants of a part, in the order of files and lines."""
    found = []
    for path in sorted((ROOT / "spare_megatron" / PARTS[part][0]).rglob("*.py")):
        source = path.read_text()
        begins = [0]
        for line in source.encode().splitlines(keepends=True):
            begins.append(begins[-1] + len(line))
        for node in _computing(ast.parse(source)):
            other = changed(node)
            if other is not None:
                start, end = (begins[a - 1] + b for a, b in _span(node))
                text = ast.unparse(other)
                text = f"({text})" if isinstance(node, ast.expr) else text
                found.append(Mutant(part, str(path.relative_to(ROOT)), node.lineno, start, end, text))
    return found


def _span(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def drawn(seed: int, count: int) -> list[Mutant]:
    """So many mutants, of each part in turn; a longer list of the same seed begins with the shorter one."""
    draw, by_part = random.Random(seed), {part: places(part) for part in PARTS}
    return [draw.choice(by_part[list(PARTS)[n % len(PARTS)]]) for n in range(count)]


def tests_of(tree: Path, mutant: Mutant, only_pure: bool) -> list[list[str]]:
    """The pure tests that import the mutant's module, then each file of its part."""
    module = Path(mutant.file).with_suffix("")
    package, name = ".".join(module.parent.parts), module.name
    wanted = re.compile(rf"from {package}(\.{name} import| import ([^\n]*|\([^)]*)\b{name}\b)", re.DOTALL)
    pure = [path for path in sorted((tree / "tests" / "pure").glob("test_*.py")) if wanted.search(path.read_text())]
    listed = [[tree / "tests" / path] for path in PARTS[mutant.part][1] if path.startswith("pure") or not only_pure]
    return [[str(path.relative_to(tree)) for path in paths] for paths in (pure, *listed) if paths]


def outcome(tree: Path, tests: list[str], limit_s: int) -> str:
    """'passed', or what was wrong: the last line of pytest, or the time."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not full and not alone", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=tree,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=HANGS * limit_s,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s)),
        )
    except subprocess.TimeoutExpired:
        return f"hangs: no end after {HANGS * limit_s} s"
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name}: more than {limit_s} s of CPU time"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "passed" if done.returncode == 0 else (failed or done.stdout.splitlines() or ["failed"])[-1][:160]


def judged(tree: Path, mutant: Mutant, limit_s: int, only_pure: bool) -> str:
    """What the tests say of a mutant: 'survived', or what caught it."""
    path = tree / mutant.file
    kept = path.read_bytes()
    try:
        path.write_bytes(kept[: mutant.start] + mutant.text.encode() + kept[mutant.end :])
        found = (outcome(tree, tests, limit_s) for tests in tests_of(tree, mutant, only_pure))
        return next((one for one in found if one != "passed"), "survived")
    finally:
        path.write_bytes(kept)


def main() -> None:
    """Judge the mutants that the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=45)
    parser.add_argument("--count", type=int, default=60, help="the length of the list")
    parser.add_argument("--first", type=int, default=1, help="the number of the first one")
    parser.add_argument("--only", type=int, help="this one; 0: the code as it is, by each part's tests")
    parser.add_argument("--limit-s", type=int, default=90, help="seconds of CPU time for one run of pytest")
    parser.add_argument("--pure", action="store_true", help="run pure tests only")
    parser.add_argument("--list", action="store_true", help="print the list and run nothing")
    parser.add_argument("--json", type=Path, help="append a line for each mutant to this file")
    given = parser.parse_args()
    numbered = list(enumerate(drawn(given.seed, given.count), 1))[given.first - 1 :]
    if given.only is not None:
        nothing = [(0, Mutant(part, f"spare_megatron/{PARTS[part][0]}/__init__.py", 0, 0, 0, "")) for part in PARTS]
        numbered = [one for one in nothing + numbered if one[0] == given.only]
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        tree = Path(name) / "tree"
        if not given.list:
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", ".*_cache", "shared"))
        for number, mutant in numbered:
            began_s = time.monotonic()
            reported = "" if given.list else judged(tree, mutant, given.limit_s, given.pure)
            print(f"{number} {mutant.part} {mutant.file}:{mutant.line} {mutant.text[:80]!r}: {reported}", flush=True)
            if given.json:
                line = {"number": number, **asdict(mutant), "said": reported, "s": round(time.monotonic() - began_s, 1)}
                with given.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
