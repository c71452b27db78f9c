"""Says which modules a preloaded parent imports for a script: those that take time and that every process may share.

The parent imports nothing of the user's own, whose code may do anything when it is imported, unless ``--spare-preload``
names it. What a script imports is read from its source and that of the modules beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from spare_megatron.launch.preload_client import search_path_of
from spare_megatron.runtime.script_sources import find_module, imported_names

OF_A_JOB = (
    "numpy.random",
    "torch",
    "spare_megatron.training.training",
    "spare_megatron.worker.megatron_job",
    "spare_megatron.training.utils",
    "spare_megatron.planning.choose",
    "spare_megatron.planning.piece_size",
    "spare_megatron.megatron_adapter.data.datasets",
    "spare_megatron.megatron_adapter.data.tokenizers",
    "spare_megatron.megatron_adapter.preload",
)
"""What every rank of a Megatron job imports, at its beginning or later."""
_TORCH = ("numpy.random", "torch")
_NONE = "none"
_SETTINGS = ("LD_PRELOAD", "LD_AUDIT")
"""Variables that put code into each new process, which may not expect to be forked."""


def modules_of(command: Sequence[str], preload: str, environ: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """The modules to preload for a rank's command line, and why there are none where that needs to be said.

    Args:
        command: the interpreter, a script or ``-m`` and a module, flags.
        preload: further modules, separated by commas; 'none': nothing is preloaded.
        environ: of the ranks.
    """
    more = tuple(name.strip() for name in preload.split(",") if name.strip())
    if more == (_NONE,):
        return (), ""
    found = [name for name in _SETTINGS if environ.get(name)]
    if found:
        return (), f"{found[0]} is set"
    if command[0] != sys.executable:
        return (), f"{command[0]} is not the Python that runs this launcher, {sys.executable}"
    script = _source(command)
    if script is None:
        return (), ""
    return (*_preloaded(imported_names(script)), *more), ""


def _source(command: Sequence[str]) -> Path | None:
    """The file of the script or module; None where it has no source."""
    path = command[1] if command[1] != "-m" else _file_of_module(command[2], search_path_of(command))
    return Path(path) if path.endswith(".py") else None


def _file_of_module(name: str, search_path: Sequence[str]) -> str:
    """The file that ``-m`` runs; empty where there is none. No package of it is imported for that."""
    parts, path = name.split("."), list(search_path)
    for number in range(1, len(parts) + 2):
        spec = find_module(".".join(parts[:number]), path)
        if spec is None:
            return ""
        if spec.submodule_search_locations is None:
            return str(spec.origin) if number >= len(parts) else ""
        path = list(spec.submodule_search_locations)
        parts += ["__main__"] * (number == len(parts))
    return ""


def _preloaded(names: Sequence[str]) -> tuple[str, ...]:
    packages = {name.partition(".")[0] for name in names}
    if packages & {"spare_megatron", "megatron"}:
        return OF_A_JOB
    return _TORCH if "torch" in packages else ()
