"""A group of one rank that does nothing but save; some tests kill it at random moments."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from spare_megatron.checkpoint.folder import Retention
from spare_megatron.config.place import Place
from spare_megatron.trainer.save_mail import SaveMail
from spare_megatron.trainer.saving import Ask, GroupSaver
from tests.process.toy_engine import ToyShare

WRITE_S = 0.01


def lone_saver(save: Path, incarnation: int = 0) -> GroupSaver:
    """It saves into ``save``."""
    place = Place(0, 0, 1, incarnation, None, "none")
    store = dist.FileStore(tempfile.mktemp(dir=save.parent), 1)
    return GroupSaver(
        save,
        place,
        10**9,
        lambda number, _directory, _copied: ToyShare("rank0.pt", {"step": [torch.full((5000,), number)]}, WRITE_S),
        lambda value: value,
        SaveMail(store, 0, 1),
        retention=Retention(interval=7, last=3),
    )


def save_for_ever(save: str, step: int, incarnation: int) -> None:
    """Save ``step`` + 1, ``step`` + 2, ... into ``save`` until killed. Two of three are written beside this thread."""
    saver = lone_saver(Path(save), incarnation)
    while True:
        step += 1
        saver.save(step, 1, Ask(lambda _step, _directory: True, lambda: None), since=step, final=step % 3 == 0)
