"""TensorBoard and W&B get what Megatron writes there: names, steps, samples, config, and one run over restarts.

The files are read back: W&B writes offline here, as it does on nodes without network (``wandb sync`` sends them).
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.job import JobDescription
from spare_megatron.metrics.boards import Boards, points

SAMPLES = 8
_BLOCK_BYTES = 1 << 15
_FULL, _LAST = 1, 4
"""Kinds of pieces that end a record."""
LINE = {
    "lr": 1e-3,
    "loss": 5.0,
    "grad_norm": 2.0,
    "num_zeros": 3.0,
    "params_norm": 7.0,
    "loss_scale": 1.0,
    "step_time_s": 0.5,
    "epoch": 1,
    "live_groups": 4,
    "load_max": 2,
    "pieces_computed": 8,
    "pieces_discarded": 0,
}
MEGATRONS_OVER_SAMPLES = {
    "learning-rate",
    "batch-size",
    "lm loss",
    "loss-scale",
    "world-size",
    "grad-norm",
    "num-zeros",
    "params-norm",
    "lm loss validation",
    "lm loss validation ppl",
}
"""Scalars that training_log and evaluate_and_print_results of Megatron-LM also write as '... vs samples'."""


def job(folder: Path, **more: Any) -> JobDescription:
    return JobDescription(
        identity={"lr": 1e-3, "num_layers": 4, "use_flash_attn": False},
        train_iters=6,
        global_batch_size=SAMPLES,
        world_size=8,
        tensorboard_dir=str(folder / "tb"),
        board_extras=("loss-scale", "validation-ppl", "world-size"),
        **more,
    )


def write(boards: Boards, description: JobDescription, steps: range) -> None:
    """Steps of a run that evaluates the weights after every second step."""
    for step in steps:
        line: dict[str, Any] = {**LINE, "step": step, "loss": 10.0 - step}
        if step % 2 == 1 and step > 1:
            line["validation"] = {"lm loss": 20.0 - (step - 1)}
        for point in points(line, description, lambda t: t * SAMPLES):
            boards.write(point)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Scalar -> (step, value), of all event files of a directory."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((folder / "tb").iterdir()):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_tensorboard_has_megatrons_names_and_steps(tmp_path: Path) -> None:
    description = job(tmp_path, tensorboard_log_interval=3)
    boards = Boards(description, tmp_path)
    write(boards, description, range(1, 8))
    boards.close()
    found = events(tmp_path)
    assert found["lm loss"] == [(3, 7.0), (6, 4.0)], "every third step; the round after the last one trains nothing"
    assert found["lm loss vs samples"] == [(3 * SAMPLES, 7.0), (6 * SAMPLES, 4.0)]
    assert found["lm loss validation"] == [(2, 18.0), (4, 16.0), (6, 14.0)], "of the weights after these steps"
    assert found["lm loss validation vs samples"] == [(2 * SAMPLES, 18.0), (4 * SAMPLES, 16.0), (6 * SAMPLES, 14.0)]
    over_samples = {name.removesuffix(" vs samples") for name in found if name.endswith(" vs samples")}
    assert over_samples == MEGATRONS_OVER_SAMPLES


class OfflineRun:
    """What one process wrote of a W&B run."""

    def __init__(self, path: Path) -> None:
        self.id = self.project = self.name = ""
        self.config: dict[str, Any] = {}
        self.history: dict[int, dict[str, Any]] = {}
        self.has_ended = False
        for record in _records(path):
            if record.WhichOneof("record_type") == "run":
                run = record.run  # a later one has only what changed
                self.id, self.project = run.run_id or self.id, run.project or self.project
                self.name = run.display_name or self.name
                self.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.WhichOneof("record_type") == "exit":
                self.has_ended = True
            elif record.WhichOneof("record_type") == "history":
                values = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
                self.history.setdefault(int(values["_step"]), {}).update(values)


def _records(path: Path) -> Iterator[Any]:
    """The records of a W&B file: LevelDB's log format (blocks of 32 KiB, each piece of a record behind its checksum,
    length and kind) after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def offline_runs(folder: Path) -> list[OfflineRun]:
    """What the files say once W&B's own process, which writes them, has written the ends of all runs."""
    deadline_s = time.monotonic() + 30.0
    while True:
        runs = [OfflineRun(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]
        if all(run.has_ended for run in runs):
            return runs
        assert time.monotonic() < deadline_s, "W&B does not write the end of a run"
        time.sleep(0.05)


def assert_steps(history: Mapping[int, Mapping[str, Any]], steps: range) -> None:
    assert sorted(history) == list(steps)
    for step in steps:
        assert history[step]["lm loss"] == 10.0 - step
        assert history[step]["samples vs steps"] == step * SAMPLES
        assert history[step].get("lm loss validation") == (20.0 - step if step % 2 == 0 else None)
        assert history[step]["spare/live_groups"] == 4


def test_a_wandb_run_goes_on_after_a_restart_and_only_forwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is started again in its run directory, by Slurm's requeue or after its coordinator died."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    description = job(tmp_path, wandb_project="corpus", wandb_exp_name="first")
    first = Boards(description, tmp_path)
    write(first, description, range(1, 6))
    write(first, description, range(3, 6))  # a wipe-out: these are computed again
    first.close()
    again = Boards(description, tmp_path)
    write(again, description, range(5, 8))
    again.close()
    runs = offline_runs(tmp_path)
    assert [(run.project, run.name) for run in runs] == [("corpus", "first")] * 2
    assert runs[0].id == runs[1].id
    assert_steps(runs[0].history, range(1, 6))
    assert runs[1].history[4]["lm loss validation"] == 16.0, "of the weights before the first step"
    del runs[1].history[4]
    assert_steps(runs[1].history, range(5, 7))
    for run in runs:
        assert {name: run.config[name] for name in description.identity} == dict(description.identity)
