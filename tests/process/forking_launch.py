"""spare-launch as the tests start it: its coordinator is forked by the tests' preloaded parent, as the launcher itself
and its ranks are, and does not import everything anew (a third of a second of a processor in each job)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spare_megatron.cli import launch
from spare_megatron.launch import supervisor
from spare_megatron.launch.preload_client import ForkedProcess, ParentLink, connect, search_path_of
from spare_megatron.launch.preloaded_ranks import LISTENING
from spare_megatron.launch.processes import Child, Processes
from spare_megatron.launch.script_modules import OF_A_JOB
from tests import preloaded


class ForkingProcesses(Processes):
    """The processes of a launch; coordinators are forked over one connection of their own."""

    _link: ParentLink | None = None

    def start(self, name: str, *arguments: Any, **options: Any) -> Child:
        """As :meth:`Processes.start`."""
        if name == "coordinator" and os.environ.get(LISTENING):
            options["fork"] = self._fork
        return super().start(name, *arguments, **options)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._link is not None:
            self._link.close()

    def _fork(
        self, command: Sequence[str], environ: Mapping[str, str], streams: tuple[int, int, int]
    ) -> ForkedProcess | None:
        if not preloaded.can_fork(environ):
            return None
        try:
            if self._link is None:
                self._link = connect(Path(os.environ[LISTENING]), OF_A_JOB, search_path_of(command), environ)
            return self._link.start([*command[:2], "tests.forked", *command[2:]], environ, streams)
        except OSError:  # it has not answered in time, on a busy machine: as for ranks, a new process
            return None


if __name__ == "__main__":
    supervisor.Processes = ForkingProcesses  # type: ignore[misc]
    sys.exit(launch.main())
