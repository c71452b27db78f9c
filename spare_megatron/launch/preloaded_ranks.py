"""Has the ranks of a launch forked by a preloaded parent, and starts the parent again when it ends.

Ranks are started one by one, as new processes, where there is no parent: none is wanted, the script imports nothing
that takes time, a module cannot be preloaded, the parent was killed and is not ready again. Each reason is reported
once.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spare_megatron.launch.local_job import Launch
from spare_megatron.launch.preload_client import ForkedProcess, ParentLink, connect, search_path_of
from spare_megatron.launch.preload_wire import ForkRefusedError
from spare_megatron.launch.processes import Processes
from spare_megatron.launch.rank_process import BLAS_THREADS
from spare_megatron.launch.script_modules import modules_of
from spare_megatron.runtime.disk import words as words_of

LISTENING = "SPARE_PRELOADED"
"""Environment variable: the socket of a preloaded parent that is there already."""
MOST_ENDS, AN_HOUR_S = 3, 3600.0
"""A parent that ends more often within this time is not started again."""
PATIENCE_S = 300.0
"""How long ranks wait for the parent's imports before they are started one by one."""


class PreloadedRanks:
    """The parent of one launch's ranks. Used in one event loop."""

    def __init__(self, launch: Launch, processes: Processes, announce: Callable[[str], None]) -> None:
        """``announce`` shows one line to the user."""
        self._launch, self._processes, self._announce = launch, processes, announce
        self._environ = {"OMP_NUM_THREADS": "1", **launch.environ, "PYTHONUNBUFFERED": "1"}
        self._environ["SPARE_RUN_DIR"] = str(launch.run_dir.path)
        self._modules, reason = modules_of(launch.command, launch.flags.preload, launch.environ)
        self._settled = asyncio.Event()
        """Whether it is known if ranks are forked."""
        self._link: ParentLink | None = None
        self._ends_s: list[float] = []
        """When parents ended."""
        self._task: asyncio.Task[None] | None = None
        if reason:
            announce(f"ranks are started one by one, each with its own imports: {reason}")
        if not self._modules:
            self._settled.set()

    async def __aenter__(self) -> PreloadedRanks:
        if self._modules:
            self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def settled(self) -> None:
        """Wait until ranks can be forked, or it is known that they cannot."""
        try:
            await asyncio.wait_for(self._settled.wait(), PATIENCE_S)
        except TimeoutError:
            self._announce(
                f"ranks are started one by one: the imports of their parent are not done after {PATIENCE_S:g} s"
            )
            self._settled.set()

    def fork(
        self, command: Sequence[str], environ: Mapping[str, str], streams: tuple[int, int, int]
    ) -> ForkedProcess | None:
        """Fork a process; None where it is to be started in another way."""
        if self._link is None or self._link.broken:
            return None
        try:
            return self._link.start(command, environ, streams)
        except OSError as error:
            self._announce(f"a rank is started with its own imports: {words_of(error)}")
            return None

    async def _run(self) -> None:
        """Have a parent, and another one when it has ended, until this is cancelled."""
        while self._modules:
            try:
                await self._one()
            except ForkRefusedError as refused:
                self._refused(refused)
                continue
            except OSError as error:
                self._give_up(f"their parent has not started: {words_of(error)}")
                return
            now_s = time.monotonic()
            self._ends_s = [end_s for end_s in self._ends_s if now_s - end_s < AN_HOUR_S] + [now_s]
            if len(self._ends_s) > MOST_ENDS:
                self._give_up(f"their preloaded parent has ended {len(self._ends_s)} times within an hour")
                return
            self._announce(
                "the preloaded parent of the ranks has ended; until it is there again, ranks make their own imports"
            )

    async def _one(self) -> None:
        """Have a parent until it ends. Raises ForkRefusedError or OSError where it never gets ready."""
        link = await self._listening() or await self._own()
        try:
            self._link = link
            self._settled.set()
            await _something_from(link)
            while link.hear():
                await _something_from(link)
        finally:
            link.close()

    def _refused(self, refused: ForkRefusedError) -> None:
        if refused.module is None:
            self._give_up(str(refused))
        else:
            self._announce(f"{refused}; it is not preloaded")
            self._modules = tuple(name for name in self._modules if name != refused.module)
        if not self._modules:
            self._settled.set()

    def _give_up(self, reason: str) -> None:
        self._announce(f"ranks are started one by one, each with its own imports: {reason}")
        self._modules = ()
        self._settled.set()

    async def _listening(self) -> ParentLink | None:
        """A connection to the parent that the environment names."""
        path = self._launch.environ.get(LISTENING)
        if not path:
            return None
        try:
            search_path = search_path_of(self._launch.command)
            return await asyncio.to_thread(connect, Path(path), self._modules, search_path, self._environ)
        except (OSError, ForkRefusedError) as error:
            self._announce(f"the preloaded parent at {path} is not used: {error}")
            return None

    async def _own(self) -> ParentLink:
        """A parent of this launch's own, when its imports are done."""
        ours, theirs = socket.socketpair()
        log = self._launch.run_dir.logs / "preloaded_parent.log"
        with theirs:
            self._processes.start(
                "preloaded parent",
                [sys.executable, "-m", "spare_megatron.launch.preloaded_parent", "--fd", str(theirs.fileno())],
                {BLAS_THREADS: "1", **self._environ},
                log,
                ended=lambda child: None,  # the end of its socket says it
                pass_fds=(theirs.fileno(),),
            )
        link = ParentLink(ours)
        try:
            link.greet(self._modules, search_path_of(self._launch.command))
            await _something_from(link)
            link.receive()
        except BaseException:
            link.close()
            raise
        return link


async def _something_from(link: ParentLink) -> None:
    """Wait until there is something to read from the parent: an answer, or its end."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(link.sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(link.sock)
