"""Waits until a host is fit for processes that are to be started."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from spare_megatron.launch.group_health import HealthFault
from spare_megatron.launch.group_restarts import pause_s
from spare_megatron.runtime.disk import words


async def found(fault: Callable[[], Awaitable[HealthFault | None]]) -> HealthFault | None:
    """What a look at a host finds; one that cannot be made is a fault too."""
    try:
        return await fault()
    except OSError as error:
        return HealthFault("probe", f"the check cannot be started: {words(error)}")


async def until_fit(
    fault: Callable[[], Awaitable[HealthFault | None]],
    who: str,
    announce: Callable[[str], None],
    goes_on: Callable[[], Awaitable[bool]],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> bool:
    """Look at the host until nothing is wrong with it (True), or ``goes_on``, asked after each look, is False (False).

    There are pauses as between restarts, but without an end: that costs the others nothing, and somebody may mend the
    host. A fault is reported when it is new, not each time that it is found; ``who`` begins the sentence."""
    reported, looks = "", 0
    while True:
        wrong = await found(fault)
        if not await goes_on():
            return False
        if wrong is None:
            return True
        looks += 1
        if wrong.kind != reported:
            reported = wrong.kind
            announce(
                f"{who} is not started again yet, {wrong.sentence}; looked at again in {pause_s(looks):g} s, and then "
                "less and less often"
            )
        await pause(pause_s(looks))
