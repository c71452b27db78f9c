"""Finds in a user's script the imports of Megatron's own training package, whose loop knows nothing of groups.

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
    """ConfigError for a script that imports from ``megatron.training`` instead of ``spare_megatron.training``; what
    Python cannot parse it says itself when it runs."""
    try:
        lines = import_lines(script.read_text())
    except (SyntaxError, ValueError):
        return
    if lines:
        where = f"{counted(len(lines), 'line')} ({', '.join(map(str, lines))})"
        raise ConfigError(
            f"{script} imports from {PACKAGE} in {where}: that is Megatron's own loop, which ends with the first rank "
            f"that is lost; write spare_megatron.training there: sed -i 's/^from megatron\\.training/from "
            f"spare_megatron.training/' {script}"
        )


def import_lines(text: str) -> list[int]:
    """The numbers of the lines of a Python source that import from ``megatron.training``."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        if any(name == PACKAGE or name.startswith(f"{PACKAGE}.") for name in names):
            found.append(node.lineno)
    return sorted(found)
