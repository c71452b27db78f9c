"""A name of the package means one thing: no two modules share one, and no two classes or type aliases of different
files."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "spare_megatron"


def defined(tree: ast.Module) -> Iterator[str]:
    """Classes, wherever they stand in a file, and what its top level gives a class-like name: type aliases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():
                yield target.id


def test_two_files_never_define_one_name() -> None:
    places = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            for name in defined(ast.parse(path.read_text())):
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
