"""What rank, leader and coordinator say to each other: sessions, streams, messages, and the run directory as files.

A rank talks to its group's leader, the leader to the coordinator; everything is asyncio in a thread of its own, so that
training never waits for it. May import ``controller`` (whose member rules it applies), ``config`` and ``failpoints``;
neither torch nor megatron. Promises: what must not be lost is said again after every reconnect.
"""
