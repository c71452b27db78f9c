"""Finds in a user's script, and in the modules beside it, the imports of Megatron's own training package, whose loop
knows nothing of groups.

Since megatron-core 0.17 that package lies beside megatron-core, so such a script starts, and then trains as plain
Megatron does. The launchers say so before they start anything.
"""

from __future__ import annotations

import ast
from pathlib import Path

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted

PACKAGE = "megatron.training"
SED = r"s/\bmegatron\.training\b/spare_megatron.training/g; s/\bfrom \(megatron import training\)/from spare_\1/"
"""The command of sed that ports a script."""


def check_imports(script: Path) -> None:
    """ConfigError for a script that imports from ``megatron.training`` instead of ``spare_megatron.training``, itself
    or in a module beside it that it imports; what Python cannot parse it says itself when it runs."""
    sources = _script_and_modules(script)
    found = {path: lines for path, tree in sources.items() if (lines := import_lines(tree))}
    if not found:
        return
    where = " and ".join(
        f"{path} in {counted(len(lines), 'line')} ({', '.join(map(str, lines))})" for path, lines in found.items()
    )
    raise ConfigError(
        f"{PACKAGE} is imported by {where}: that is Megatron's own loop, which ends with the first rank that is lost; "
        f"write spare_megatron.training there: sed -i '{SED}' {' '.join(map(str, found))}"
    )


def _script_and_modules(script: Path) -> dict[Path, ast.Module]:
    """The sources of the script, and of the modules and packages in its folder that it or one of them imports."""
    found: dict[Path, ast.Module] = {}
    waiting = [script]
    for path in waiting:  # grows
        found[path] = _parsed(path)
        for name in _imported(found[path]):
            parts = name.split(".")
            places = [script.parent.joinpath(*parts[: n + 1]) for n in range(len(parts)) if parts[0] != "megatron"]
            files = [file for one in places for file in (one.with_suffix(".py"), one / "__init__.py")]
            waiting += [file for file in files if file not in waiting and file.is_file()]
    return found


def _parsed(path: Path) -> ast.Module:
    """A source; an empty one for a file that is not there (a module of an installed package) or is no Python."""
    try:
        return ast.parse(path.read_text())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _imported(tree: ast.Module) -> list[str]:
    """The full names that absolute imports name, modules or not."""
    return sorted({name for names in _imports(tree).values() for name in names})


def import_lines(tree: ast.Module) -> list[int]:
    """The numbers of the lines that import from ``megatron.training``."""
    inside = f"{PACKAGE}."
    return [line for line, names in _imports(tree).items() if any(f"{name}.".startswith(inside) for name in names)]


def _imports(tree: ast.Module) -> dict[int, list[str]]:
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
