"""Opening the data of adopted shards: each once, however many views name it."""

from __future__ import annotations

import queue
from types import SimpleNamespace

from spare_megatron.worker.shard_opening import ShardOpening

WAIT_S = 60.0


def test_a_shard_that_views_name_again_is_opened_once() -> None:
    opened: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    reported: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    opening = ShardOpening(lambda shard, step: opened.put((shard, step)))
    for step, adopts in ((4, ()), (5, ((2, 0),)), (6, ((2, 0),)), (7, ((2, 0), (3, 0)))):
        opening.look(SimpleNamespace(view=SimpleNamespace(adopts=adopts, step=step)))  # type: ignore[arg-type]
    opening.begin(SimpleNamespace(opened=lambda shard, problem: reported.put((shard, problem))))  # type: ignore[arg-type]
    assert [opened.get(timeout=WAIT_S) for _ in range(2)] == [(2, 5), (3, 7)]
    assert [reported.get(timeout=WAIT_S) for _ in range(2)] == [(2, ""), (3, "")]
    opening.close()
    opening._thread.join(WAIT_S)
    assert opened.empty()
