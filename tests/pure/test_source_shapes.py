"""The package's sources: functions stay short enough to read at once, and each event has one rule; no file imports
another that leads back to it; a name means one thing: no two modules share one, and no two classes or type aliases of
different files."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args

from spare_megatron.protocol import machine, messages

PACKAGE = Path(__file__).resolve().parents[2] / "spare_megatron"
LINES_MAX = 80
POSITIONAL_MAX = 6
FOREIGN = {
    "kernels/dispatch.py": "the arguments of the C functions, passed on at one place",
    "kernels/native.py": "as there",
    "kernels/reference.py": "as there",
    "training/pretrain_call.py": "Megatron's own signatures of pretrain()",
}
"""Files whose functions have more positional parameters, and why."""
LOOKED_AT = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Call, ast.Import, ast.ImportFrom, ast.If)


@cache
def trees() -> dict[Path, tuple[ast.Module, tuple[ast.AST, ...]]]:
    """Of each file that people write of the package, the syntax tree and those of its nodes that are looked at."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            tree = ast.parse(path.read_text())
            found[path] = tree, tuple(node for node in ast.walk(tree) if isinstance(node, LOOKED_AT))
    return found


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """(file, node)."""
    for path, (_, some) in trees().items():
        yield from ((str(path.relative_to(PACKAGE)), node) for node in some)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each function and method, as (file:name, its syntax tree)."""
    for file, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{file}:{node.name}", node


def test_no_function_is_longer_than_a_screen() -> None:
    lengths = {name: (node.end_lineno or node.lineno) - node.lineno + 1 for name, node in functions()}
    assert len(lengths) > 1000
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


def imported(nodes: tuple[ast.AST, ...]) -> set[str]:
    """The modules of the package that a file imports when it runs; what only types need is no import."""
    conditions = [one for one in nodes if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING"]
    only_types = {inner for one in conditions for statement in one.body for inner in ast.walk(statement)}
    found = set()
    for node in nodes:
        if node in only_types:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spare_megatron"):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if is_module(name) else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("spare_megatron")}
    return found


@cache
def is_module(name: str) -> bool:
    place = PACKAGE.parent.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


def test_no_file_leads_back_to_itself() -> None:
    graph = {}
    for path, (_, some) in trees().items():
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = imported(some) - {name}
    assert len(graph) > 200
    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()


def defined(tree: ast.Module, nodes: tuple[ast.AST, ...]) -> Iterator[str]:
    """Classes, wherever they stand in a file, and what its top level gives a class-like name: type aliases."""
    yield from (node.name for node in nodes if isinstance(node, ast.ClassDef))
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():
                yield target.id


def test_two_files_never_define_one_name() -> None:
    places = defaultdict(set)
    for path, (tree, some) in trees().items():
        for name in defined(tree, some):
            places[name].add(str(path.relative_to(PACKAGE)))
    assert len(places) > 300
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_two_modules_never_share_a_name() -> None:
    places = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py":
            places[path.stem].add(str(path.relative_to(PACKAGE)))
    assert len(places) > 200
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
