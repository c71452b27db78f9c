"""The messages between rank, leader and coordinator, and the sessions and streams that carry them.

A rank talks to its group's leader, the leader to the coordinator. On a rank all of this runs in a thread of its own, as
an asyncio loop, so that training never waits for it; the leader of several ranks has a process of its own.

May import ``protocol`` (whose member rules it applies), ``config`` and ``runtime``; neither torch nor megatron.
Promises: what must not be lost is sent again after every reconnect.
"""
