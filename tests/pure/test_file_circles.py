"""No file of the package imports another that leads back to it, wherever in the file the import stands."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "spare_megatron"


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports when it runs; what only types need is no import."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spare_megatron"):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if is_module(name) else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("spare_megatron")}
    return found


def is_module(name: str) -> bool:
    place = PACKAGE.parent.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


def test_no_file_leads_back_to_itself() -> None:
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        if not path.name.endswith("_pb2.py"):
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
            graph[name] = imported(path) - {name}
    assert len(graph) > 200
    TopologicalSorter(graph).prepare()
