"""Calls the coordinator from processes that are no ranks: to report an exit, to ask it to stop, and whether a group
may be started again; and that groups are to leave for now, to be started again elsewhere or in another shape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import grpc.aio

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import Backoff, Security, call_once, open_channel
from spare_megatron.runtime.run_directory import RunDirectory

TELL_S = 1.0
"""Time-out of one call of the coordinator, which is then repeated."""
UNDECIDED_S = 1.0
"""Time until a request is made again on which the coordinator could not decide."""
ANSWER_S = 5.0
"""How long a coordinator that is asked to stop has to answer before it is asked in another way."""


class Teller(Protocol):
    """What calls the coordinator."""

    async def tell(self, method: str, request: object, answer: Any) -> Any:
        """See :meth:`CoordinatorClient.tell`."""


async def drain_for_now(
    client: Teller, groups: Sequence[int], reason: str, *, undo: bool = False
) -> pb.DrainAnswer | None:
    """Ask that groups leave with a commit, or (``undo``) take that back, until the coordinator has decided on it. None
    when the job attempt was over first. What an operator asks for is not touched."""
    request = pb.DrainRequest(groups=groups, reason=reason, undo=undo, for_now=True)
    while True:
        answer: pb.DrainAnswer | None = await client.tell("Drain", request, pb.DrainAnswer)
        if answer is None or not answer.undecided:
            return answer
        await asyncio.sleep(UNDECIDED_S)


class CoordinatorClient:
    """Calls the coordinator of one job attempt, whichever process that is at the moment."""

    def __init__(self, run_dir: RunDirectory, security: Security, over: Callable[[], bool]) -> None:
        """``over`` says whether the job attempt has ended, so that no coordinator is there to be called."""
        self._dir, self._security, self._over = run_dir, security, over
        self._tasks: set[asyncio.Task[None]] = set()

    def request_stop(self, reason: str, otherwise: Callable[[], None]) -> None:
        """Ask the coordinator to save and leave; ``otherwise`` is called once where it does not answer within
        :data:`ANSWER_S`."""
        self.beside(self._request_stop(pb.StopRequest(reason=reason), otherwise))

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` as a task of its own, until it is done or :meth:`close`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def tell(self, method: str, request: object | Callable[[], object], answer: Any = pb.Done) -> Any:
        """Call ``method`` until the coordinator, which may be restarted meanwhile, answers. Returns its answer, a
        message of type ``answer``; None when the job attempt was over first. A ``request`` that depends on when it is
        sent is made anew for each call."""
        backoff = Backoff()
        while not self._over():
            published = self._dir.coordinator()
            if published is not None:
                try:
                    async with open_channel(published.address, self._security, TELL_S) as channel:
                        made = request() if callable(request) else request
                        return await call_once(channel, method, self._security, made, TELL_S, answer)
                except grpc.aio.AioRpcError:
                    pass
            await backoff.wait()
        return None

    async def ask_restart(self, group: int, incarnation: int) -> pb.RestartAnswer | None:
        """Whether a group may be started again, no process of which is left after its ``incarnation``. None when the
        job attempt was over first."""
        request = pb.LostGroup(group=group, incarnation=incarnation)
        answer: pb.RestartAnswer | None = await self.tell("AskRestart", request, pb.RestartAnswer)
        return answer

    def close(self) -> None:
        """Cancel the tasks that :meth:`beside` started."""
        for task in self._tasks:
            task.cancel()

    async def _request_stop(self, request: pb.StopRequest, otherwise: Callable[[], None]) -> None:
        telling = asyncio.ensure_future(self.tell("RequestStop", request))
        try:
            done, _ = await asyncio.wait({telling}, timeout=ANSWER_S)
            if not done:
                otherwise()
            await telling
        finally:
            telling.cancel()


def with_age(exited: pb.Exited, ended_s: float) -> pb.Exited:
    """The report as it is sent now: hosts have clocks of their own, so it says for how long the process has been
    gone."""
    exited.age_s = time.monotonic() - ended_s
    return exited
