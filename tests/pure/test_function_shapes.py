"""Functions stay short enough to read at once, and each event has one rule."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

from spare_megatron.protocol import machine, messages

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX = 80
POSITIONAL_MAX = 6
FOREIGN = {
    "kernels/dispatch.py": "the arguments of the C functions, passed on at one place",
    "kernels/native.py": "as there",
    "kernels/reference.py": "as there",
    "training/pretrain_call.py": "Megatron's own signatures of pretrain()",
}
"""Files whose functions have more positional parameters, and why."""


LOOKED_AT = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Call)


@cache
def nodes() -> tuple[tuple[str, ast.AST], ...]:
    """(file, node) of the syntax trees of all that people write of the package: functions, classes and calls."""
    package = ROOT / "spare_megatron"
    return tuple(
        (str(path.relative_to(package)), node)
        for path in sorted(package.rglob("*.py"))
        if not path.name.endswith("_pb2.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, LOOKED_AT)
    )


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each function and method, as (file:name, its syntax tree)."""
    for file, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{file}:{node.name}", node


def test_no_function_is_longer_than_a_screen() -> None:
    lengths = {name: (node.end_lineno or node.lineno) - node.lineno + 1 for name, node in functions()}
    assert {name: lines for name, lines in lengths.items() if lines > LINES_MAX} == {}


def test_no_call_has_a_row_of_arguments_without_names() -> None:
    found: dict[str, int] = {}
    for name, node in functions():
        given = [one.arg for one in (*node.args.posonlyargs, *node.args.args) if one.arg not in ("self", "cls")]
        if len(given) > POSITIONAL_MAX:
            found[name] = len(given)
    files = {name.split(":")[0] for name in found}
    assert {name: count for name, count in found.items() if name.split(":")[0] not in FOREIGN} == {}
    assert files == FOREIGN.keys(), "an exception that is none any more"


def test_no_dataclass_is_made_of_a_row_of_values_without_names() -> None:
    classes = {
        node.name
        for _, node in nodes()
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list)
    }
    found = [
        f"{file}:{node.lineno}: {ast.unparse(node.func)}"
        for file, node in nodes()
        if isinstance(node, ast.Call) and len(node.args) > POSITIONAL_MAX
        if ast.unparse(node.func).rpartition(".")[2] in classes
    ]
    assert {"Assignment", "View"} <= classes
    assert found == []


def test_each_event_has_one_rule() -> None:
    assert set(machine._RULES) == set(get_args(messages.Event)) - {messages.Opened}
