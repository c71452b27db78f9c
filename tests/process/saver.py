"""A group of one rank that does nothing but save; some tests kill it at random moments."""

from __future__ import annotations

from pathlib import Path

import torch

from spare_megatron.checkpoint.folder import Retention
from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.config.place import Place
from spare_megatron.worker.group_store import StoreClient
from spare_megatron.worker.save_mail import SaveMail
from spare_megatron.worker.saving import Ask, GroupSaver
from spare_megatron.worker.store_server import StoreServer
from tests.process.toy_engine import ToyShare

WRITE_S = 0.01
_servers: list[StoreServer] = []


def lone_saver(save: Path, incarnation: int = 0) -> GroupSaver:
    """It saves into ``save``."""
    place = Place(0, 0, 1, incarnation, None, "none")
    me = Identity(Member(0, incarnation), token="t")
    server = StoreServer(me, "127.0.0.1")
    _servers.append(server)
    return GroupSaver(
        save,
        place,
        10**9,
        lambda number, _directory, _copied: ToyShare("rank0.pt", {"step": [torch.full((5000,), number)]}, WRITE_S),
        lambda value: value,
        SaveMail(StoreClient(me, server.address), 0, 1),
        retention=Retention(interval=7, last=3),
    )


def save_for_ever(save: str, step: int, incarnation: int) -> None:
    """Save ``step`` + 1, ``step`` + 2, ... into ``save`` until killed. Two of three are written beside this thread."""
    saver = lone_saver(Path(save), incarnation)
    while True:
        step += 1
        saver.save(step, 1, Ask(lambda _step, _directory: True, lambda: None), since=step, final=step % 3 == 0)
