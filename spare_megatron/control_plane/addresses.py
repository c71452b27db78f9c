"""The addresses at which ranks listen for the replica rings: checks when a rank arrives, before training begins.

A coordinator checks the leaders, a leader its group's other ranks, so that no process makes a connection to every rank.
"""

from __future__ import annotations

import asyncio

from spare_megatron.config.host_port import split_address

CONNECT_S = 5.0
"""How long an address may take to answer."""


async def unreachable(address: str, who: str) -> str:
    """Why nobody can connect to ``address``, at which ``who`` listens; empty where it answers, or is none."""
    if not address:
        return ""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*split_address(address)), CONNECT_S)
    except (TimeoutError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else f"no answer within {CONNECT_S:g} s"
        return (
            f"{who} listens for the other groups at {address}, which cannot be reached: {why}; give --spare-interface "
            "with the name or the network (10.0.0.0/16) of interfaces that all machines of the job share"
        )
    writer.close()
    return ""


def same_address(address: str, who: str, taken_by: str) -> str:
    """The sentence for two ranks that tell one address."""
    return (
        f"{who} listens for the other groups at {address}, and so does {taken_by}: machines of this job share that "
        "address; give --spare-interface with the name or the network of interfaces whose addresses differ"
    )
