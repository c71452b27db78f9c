"""A rank of a toy job: the real worker, loop, session and communicators around :class:`ToyEngine`.

Prints nothing of its own; leaves the digest of its weights in ``RUN_DIR/toy/``.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from spare_megatron.checkpoint.folder import Retention, last_good, step_of
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.job import JobDescription
from spare_megatron.config.place import Place, place_of, world_hint
from spare_megatron.config.timeouts import timeouts_from
from spare_megatron.config.tuning import Tuning
from spare_megatron.control_plane.leader_process import start_ahead
from spare_megatron.flags.parser import steps_or_auto, whole_number_or_auto
from spare_megatron.megatron_adapter.model.gloo_device import LOOPBACK, shared_gloo_device
from spare_megatron.placement import build_placement
from spare_megatron.protocol.messages import JobSpec
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.worker import saving
from spare_megatron.worker.fault_injection import Injector
from spare_megatron.worker.fenced_end import status_of
from spare_megatron.worker.group_store import GroupStore
from spare_megatron.worker.rendezvous import group_store, on_one_host
from spare_megatron.worker.save_mail import SaveMail
from spare_megatron.worker.saved_choice import leave_choice, redundancy_of
from spare_megatron.worker.saving import GroupSaver
from spare_megatron.worker.waiting import wait_for_place
from spare_megatron.worker.warm_up import warm_up
from spare_megatron.worker.worker import RankJob, train_rank
from tests.process.sleeping_pipeline import SleepingPipeline, drawn
from tests.process.toy_engine import WIDTH, ToyEngine


def main() -> int:
    """Train, then say what the weights are."""
    options = _options()
    torch.set_num_threads(1)
    size = int(os.environ["SPARE_GROUP_SIZE"])
    groups = world_hint(os.environ).num_groups or int(os.environ["SLURM_NTASKS"]) // size
    logging.basicConfig(level=logging.INFO, force=True)  # imports of some megatron-cores have done so
    place = place_of(os.environ, groups, size, None)
    if place.group == 0 and options.unfit_once and options.unfit_once.exists():
        RunDirectory(str(place.run_dir)).report_error(f"group-0-rank-{place.position}", "device 1 is gone")
        return int(ExitCode.BAD_INPUT)
    store = group_store(place, 60)
    with shared_gloo_device(LOOPBACK if on_one_host(store, place) else ""):
        dist.init_process_group("gloo", store=store, rank=place.position, world_size=place.group_size)
    _limit_files(options, place)
    injector = Injector.from_environment(os.environ, place)
    engine = (SleepingPipeline if options.stages else ToyEngine)(
        place.position,
        place.group_size,
        place.num_groups,
        options.pieces,
        options.piece_s,
        options.width,
        options.layers,
        options.layer_s,
        options.joins,
        flips=injector.flips,
        slowness=lambda step: _slowness(options, injector, place.group, step),
    )
    engine.bad_step = options.bad_step
    waited = bool(place.place_file)
    if waited:
        warm_up(engine, 1, 0)
        if place.is_leader:
            start_ahead()
        wait_for_place(os.environ)
        place = place_of(os.environ, groups, size, None)
        injector.move(place)
    first_step = _load(engine, options.save) if place.job_attempt > 1 or options.load else 0
    saver = _saver(engine, place, options, store) if options.save else None
    spec, description = _spec(place, options, first_step), _job(place, options)
    rank = RankJob(
        place,
        spec,
        description,
        "gloo",
        torch.device("cpu"),
        overlap=options.overlap,
        transfer_rate_bytes_s=options.transfer_rate_bytes_s,
        warm=waited,
        rank_times=options.spare_rank_times,
    )
    code = train_rank(rank, engine, saver, injector, partial(_open, options, place))
    if code == ExitCode.FINISHED and (engine.step or first_step):  # a learner that never joined holds nothing
        _leave_digest(engine, place)
    return status_of(code, place)


def _slowness(options: argparse.Namespace, injector: Injector, group: int, step: int) -> float:
    """How many times --piece-s a piece takes."""
    if options.quick_once and options.quick_once.exists():
        return 0.0
    return injector.slowness(step) * drawn(options.jitter, group, step)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pieces", type=int, default=2)
    parser.add_argument("--piece-s", type=float, default=0.0)
    parser.add_argument("--quick-once", type=Path, help="pieces take no longer than they must once this file is there")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--layer-s", type=float, default=0.0)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--joins", action="store_true", help="pipelines take in pieces while they run")
    parser.add_argument("--ahead", type=int, default=0, help="tickets ahead; with --joins slow groups are relieved")
    parser.add_argument("--jitter", type=float, default=0.0, help="standard deviation of a group's pace in a step")
    parser.add_argument(
        "--stages", action="store_true", help="ranks are pipeline stages, and sleep instead of computing"
    )
    parser.add_argument("--redundancy", type=whole_number_or_auto, default=2)
    parser.add_argument("--granularity", default="microbatch")
    parser.add_argument("--audit-rate", type=float, default=0.0)
    parser.add_argument("--heartbeat-s", type=float, default=8.0)
    parser.add_argument("--progress-s", type=float, default=40.0)
    parser.add_argument("--grace-s", type=float, default=0.0, help="0: it follows from the heartbeat time-out")
    parser.add_argument("--save", default="")
    parser.add_argument("--save-interval", type=steps_or_auto)
    parser.add_argument("--emergency-saves", action="store_true")
    parser.add_argument("--adoption", action="store_true", help="groups take over shards without a host")
    parser.add_argument("--shut", type=int, nargs="*", default=(), help="groups that can open no further shard")
    parser.add_argument("--open-s", type=float, default=0.0, help="how long opening a shard takes")
    parser.add_argument("--adopt-timeout-s", type=float, default=60.0)
    parser.add_argument("--restart-after", type=whole_number_or_auto, default=0)
    parser.add_argument("--mtbf-gpu-hours", type=float)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--no-async-save", action="store_true")
    parser.add_argument("--retain", type=int)
    parser.add_argument("--keep", type=int)
    parser.add_argument("--file-bytes", type=int, default=0, help="no file of position 1 may grow beyond it")
    parser.add_argument("--unfit-once", type=Path, help="group 0 finds bad input once this file is there")
    parser.add_argument("--bad-step", type=int, default=0, help="the data of this step cannot be read, by any group")
    parser.add_argument("--duration-s", type=float, default=0.0)
    parser.add_argument("--transfer-rate-bytes-s", type=float, default=0.0)
    parser.add_argument("--spare-rank-times", action="store_true")
    times = ("max-group-restarts", "group-restart-pause-s")
    for flag in (*times, "on-event", "health-check", "standby-groups", "preload"):
        parser.add_argument(f"--spare-{flag}", help="is for the launcher")
    return parser.parse_args()


def _spec(place: Place, options: argparse.Namespace, first_step: int) -> JobSpec:
    redundancy = redundancy_of(options.redundancy, place.num_groups, "staged", place)
    placement = build_placement(place.num_groups, min(redundancy, place.num_groups))
    return JobSpec(
        num_groups=place.num_groups,
        pieces_per_shard=options.pieces,
        offsets=placement.offsets,
        granularity=options.granularity,
        first_step=first_step,
        last_step=options.steps,
        min_groups=1,
        fingerprint=_job(place, options).fingerprint,
        heartbeat_timeout_s=options.heartbeat_s,
        audit_rate=options.audit_rate,
        audit_seed=1,
        save_every=options.save_interval if options.save and isinstance(options.save_interval, int) else 0,
        emergency_saves=options.emergency_saves,
        adoption=options.adoption,
    )


def _job(place: Place, options: argparse.Namespace) -> JobDescription:
    timeouts = timeouts_from(options.heartbeat_s, options.progress_s)
    return JobDescription(
        identity={"steps": options.steps, "pieces": options.pieces, "width": options.width},
        timeouts=replace(timeouts, grace_s=options.grace_s) if options.grace_s else timeouts,
        tuning=Tuning(
            save_interval=options.save_interval == "auto",
            redundancy=options.redundancy is None,
            restart_after=options.restart_after,
            mtbf_gpu_hours=options.mtbf_gpu_hours,
            group_size=place.group_size,
            can_restart=bool(options.save),
        ),
        train_iters=options.steps,
        late_pauses=options.joins,
        tickets_ahead=options.ahead,
        adopt_timeout_s=options.adopt_timeout_s,
        exit_duration_s=options.duration_s,
        log_interval=1,
        global_batch_size=place.num_groups * options.pieces,
        seq_length=1,
        world_size=place.num_groups * place.group_size,
        saves_into=place.saves_into(options.save),
    )


def _saver(engine: ToyEngine, place: Place, options: argparse.Namespace, store: GroupStore) -> GroupSaver:
    def agree(value: bool) -> bool:
        reported = torch.tensor([int(value)])
        dist.broadcast(reported, 0)
        return bool(reported.item())

    return GroupSaver(
        Path(options.save),
        place,
        options.steps,
        lambda step, directory, copied: engine.share(),
        agree,
        SaveMail(store.client.another(), place.position, place.group_size),
        asynchronous=not options.no_async_save,
        retention=Retention(options.retain, options.keep),
        notice=RunDirectory(str(place.run_dir)).notice,
        complete=partial(leave_choice, place),
        hung_s=_job(place, options).timeouts.hung_s,
    )


def _open(options: argparse.Namespace, place: Place, shard: int, step: int) -> None:
    """What a rank does whose group has adopted a shard: the last position may find that it cannot read it."""
    time.sleep(options.open_s)
    if place.group in options.shut and place.position == place.group_size - 1:
        raise OSError(f"no such file: shard-{shard}.bin")


def _limit_files(options: argparse.Namespace, place: Place) -> None:
    """What a full disk does to one rank: its file can be opened and not be written."""
    saving.LAST_PAUSES_S = (0.1, 0.2) if options.file_bytes else saving.LAST_PAUSES_S
    if options.file_bytes and place.position == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_bytes, options.file_bytes))


def _load(engine: ToyEngine, save: str) -> int:
    directory, _ = last_good(Path(save))
    if directory is None:
        return 0
    engine.load(directory)
    return step_of(directory)


def _leave_digest(engine: ToyEngine, place: Place) -> None:
    folder = Path(place.run_dir) / "toy"
    folder.mkdir(exist_ok=True)
    (folder / f"group-{place.group}-rank-{place.position}.txt").write_text(engine.digest())
