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


def check_imports(script: Path) -> None:
    """ConfigError for a script that imports from ``megatron.training`` instead of ``spare_megatron.training``, itself
    or in a module beside it that it imports; what Python cannot parse it says itself when it runs."""
    found = {path: lines for path in _script_and_modules(script) if (lines := import_lines(_parsed(path)))}
    if not found:
        return
    where = " and ".join(
        f"{path} in {counted(len(lines), 'line')} ({', '.join(map(str, lines))})" for path, lines in found.items()
    )
    raise ConfigError(
        f"{PACKAGE} is imported by {where}: that is Megatron's own loop, which ends with the first rank that is lost; "
        f"write spare_megatron.training there: sed -i 's/^from megatron\\.training/from spare_megatron.training/' "
        f"{' '.join(map(str, found))}"
    )


def _script_and_modules(script: Path) -> list[Path]:
    """The script, and the modules in its folder that it or one of them imports."""
    found = [script]
    for path in found:  # grows
        for name in _imported(_parsed(path)):
            module = script.parent / f"{name.partition('.')[0]}.py"
            if module not in found and module.is_file():
                found.append(module)
    return found


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text())
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _imported(tree: ast.Module) -> set[str]:
    """The names of the modules that absolute imports name."""
    nodes = list(ast.walk(tree))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module}
    return names | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


def import_lines(tree: ast.Module) -> list[int]:
    """The numbers of the lines that import from ``megatron.training``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        if any(name == PACKAGE or name.startswith(f"{PACKAGE}.") for name in names):
            found.append(node.lineno)
    return sorted(found)
