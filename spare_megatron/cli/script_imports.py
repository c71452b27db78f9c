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
from spare_megatron.launch.script_sources import imports_of, script_and_modules

PACKAGE = "megatron.training"
SED = (
    r"s/\bmegatron\.\(training\|legacy\.model\)\b/spare_megatron.\1/g; "
    r"s/\bfrom \(megatron import training\)/from spare_\1/"
)
"""The command of sed that ports a script. The builders of Megatron-LM until 0.17 also import ``megatron.legacy.model``,
which no wheel has."""


def check_imports(script: Path) -> None:
    """ConfigError for a script that imports from ``megatron.training`` instead of ``spare_megatron.training``, itself
    or in a module beside it that it imports; what Python cannot parse it says itself when it runs."""
    sources = script_and_modules(script)
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


def import_lines(tree: ast.Module) -> list[int]:
    """The numbers of the lines that import from ``megatron.training``."""
    inside = f"{PACKAGE}."
    return [line for line, names in imports_of(tree).items() if any(f"{name}.".startswith(inside) for name in names)]
