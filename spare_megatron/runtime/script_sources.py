"""Reads from a user's script, and the modules beside it, what they import, and what stands for all that they do.
Nothing is imported for that."""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

_CLONED = ("megatron", "spare_megatron")
"""Packages that may lie beside a script, in a clone, and are no part of it: all their sources take 0.2 s to read."""


def find_module(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Where a module would be found in a search path, or that of its package."""
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def imported_names(script: Path) -> list[str]:
    """The full names that the script, and the modules beside it that it imports, name in absolute imports, at their
    beginning or later."""
    return sorted({name for tree in script_and_modules(script).values() for name in _imported(tree)})


def script_and_modules(script: Path, folder: Path | None = None) -> dict[Path, ast.Module]:
    """The sources of the script, and of what is in its folder (or this one) and it or one of them imports, or names as
    a file to run, as Megatron's pretrain_mamba.py does."""
    found: dict[Path, ast.Module] = {}
    waiting = [script]
    for path in waiting:  # grows
        tree = found[path] = _parsed(path)
        names = [name for name in _imported(tree) if name.partition(".")[0] not in _CLONED]
        files = [file for name in names for file in _files(folder or script.parent, name)]
        files += [file for above, name in _relative(tree, path) for file in _files(above, name)]
        files += [script.parent / name for name in _file_names(tree)]
        waiting += [file for file in dict.fromkeys(files) if file not in waiting and file.is_file()]
    return found


def _files(folder: Path, name: str) -> list[Path]:
    """Where the module of this name, and the packages that it is in, would be."""
    parts = name.split(".")
    places = [folder.joinpath(*parts[: n + 1]) for n in range(len(parts))]
    return [file for one in places for file in (one.with_suffix(".py"), one / "__init__.py")]


def _relative(tree: ast.Module, path: Path) -> list[tuple[Path, str]]:
    """The folders from which, and the names that, relative imports name, modules or not."""
    above, found = path.absolute().parents, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(above):
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            found += [(above[node.level - 1], name) for name in names]
    return found


@functools.cache
def source_digests() -> Mapping[str, str]:
    """File -> what stands for its source, without comments and layout, for the script of this process and the modules
    beside it; empty where the script has no source. Files are as they were at the first call."""
    main = sys.modules["__main__"]
    if not str(getattr(main, "__file__", "")).endswith(".py"):
        return {}
    script, spec = Path(str(main.__file__)).absolute(), main.__spec__
    folder = script.parents[spec.name.count(".") if spec is not None else 0]
    return {
        os.path.relpath(path, folder): hashlib.sha256(ast.dump(tree).encode(errors="surrogatepass")).hexdigest()[:12]
        for path, tree in script_and_modules(script, folder).items()
    }


def _parsed(path: Path) -> ast.Module:
    """A source; an empty one for a file that is not there (a module of an installed package) or is no Python."""
    try:
        return ast.parse(path.read_text())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _file_names(tree: ast.Module) -> list[str]:
    """Strings that are the name of a script, without a folder."""
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return sorted(word for word in words if word.endswith(".py") and not set(word) & {"/", " ", "\n"})


def _imported(tree: ast.Module) -> list[str]:
    """The full names that absolute imports name, modules or not."""
    return sorted({name for names in imports_of(tree).values() for name in names})


def imports_of(tree: ast.Module) -> dict[int, list[str]]:
    """Line -> the full names that absolute imports name there, of imports that are carried out when all goes well."""
    found: dict[int, list[str]] = {}
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # grows
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.setdefault(node.lineno, []).extend(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.setdefault(node.lineno, []).extend(alias.name for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif not isinstance(node, ast.ExceptHandler):
            nodes += ast.iter_child_nodes(node)
    return dict(sorted(found.items()))
