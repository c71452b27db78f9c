"""Saves durable checkpoints of one group in megatron-core's torch_dist format, and loads them under any layout.

The content is Megatron's: ``model`` (``model0``, ``model1``, ... with virtual stages), ``optimizer``,
``opt_param_scheduler``, ``iteration``, ``checkpoint_version`` and ``args`` with the samples consumed. Tensors are
stored by logical name and global shape, so a checkpoint loads under another TP, PP, D or N.

May assume: every rank of the group calls ``Checkpointer.take``, ``save`` and ``load`` with the same arguments.
Promises: ``save`` returns on every rank only when all files are written; other groups take no part in any of them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.megatron_adapter.json_collectives import gather_bytes
from spare_megatron.megatron_adapter.shims import compute_device, install_cpu_shims

install_cpu_shims()

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed.checkpoint.api import CheckpointException

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint import gpt_in_hybrid, optimizer_gather, whole_state
from spare_megatron.megatron_adapter.checkpoint.checkpoint_writer import ShareWriter, TorchDistShare
from spare_megatron.megatron_adapter.checkpoint.distributed_state import (
    BUCKETS,
    FORM,
    RESHARDABLE,
    add_distributed,
    form_of,
    read_buckets,
    rename_requests,
)
from spare_megatron.megatron_adapter.checkpoint.manifest_version import version_of
from spare_megatron.megatron_adapter.checkpoint.restricted_pickle import ForbiddenPickleError
from spare_megatron.megatron_adapter.checkpoint.safe_loading import check_extra_states
from spare_megatron.megatron_adapter.core_differences import RATES, SCHEDULED, has_readable_common, load_optimizer
from spare_megatron.megatron_adapter.model.hybrid_layers import pattern_of
from spare_megatron.megatron_adapter.model.replica import Replica
from spare_megatron.megatron_adapter.model.soap import add_squares, is_soap, squares_apart
from spare_megatron.megatron_adapter.model.world import barrier
from spare_megatron.megatron_adapter.versions import TESTED_CORE_VERSIONS, core_version

CHECKPOINT_VERSION = 3.0
_REASON_CHARS = 250
_KEY = re.compile(r"key='([^']+)'")
_HERE = "optimizer of this layout"
"""The key under which a load collects optimizer tensors. Under Megatron's key, 'optimizer', megatron-core would merge
them by position with the parameter groups of the layout that saved them. These may be other groups: expert parameters
have an optimizer of their own in some layouts only."""
_RANK_STATE = "spare_rank_state"
_STATE_SHARDS = "spare_state_shards"
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, FORM: RESHARDABLE}
"""Megatron's description of how the state dict was built; a load builds it the same way."""


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint has besides the state that ``load`` put into the replica."""

    step: int
    consumed_samples: int
    consumed_valid_samples: int
    args: Mapping[str, Any]
    rank_state: Any = None
    """What this rank position gave to ``take``; None where the checkpoint has no such data or another group size."""
    read_rank_states: Callable[[], list[Any]] = list
    """Reads what each position gave to ``take``, on every rank. Collective."""
    state_shards: int | None = None
    """S, the number of state shards; None where no optimizer's state was read, or the checkpoint has none."""


class Checkpointer:
    """Takes this rank's shares of the checkpoints of its group; a job makes one."""

    def __init__(self, replica: Replica, *, optimizer: bool = True) -> None:
        """Without ``optimizer`` checkpoints have neither its state nor the schedule's, as Megatron's have not with
        ``--no-save-optim``."""
        self._replica, self._optimizer = replica, optimizer
        self._writer = ShareWriter()

    def check(self) -> None:
        """Raise ConfigError, on every rank, where megatron-core cannot save this model: a job says so before it trains,
        and not with its first save. Collective."""
        found: dict[str, Any] = {}
        reason = ""
        try:
            found = _sharded_state(self._replica, dict(_CONTENT), is_loading=False, optimizer=False)
        except (AssertionError, CheckpointingException, NotImplementedError, ValueError) as error:
            reason = f"this model cannot be saved: {_shortened(error) or type(error).__name__}; leave --save out"
        self._agree(reason)
        if not self._optimizer:
            return
        tensors = [one for state in found.values() for one in nested_values(state)]
        keeps = any(map(optimizer_gather.keeps_state, self._replica.optimizer.chained_optimizers))
        trained = {str(n): one for n, one in enumerate(tensors) if keeps and getattr(one.data, "requires_grad", False)}
        apply_factories(trained)
        metadata = determine_global_metadata(trained)[1]
        try:
            validate_sharding_integrity(metadata)
        except CheckpointingException as error:
            key = _KEY.search(str(error))
            reason = (
                f"the optimizer's state of {key[1] if key else 'this model'} cannot be saved: megatron-core stores "
                "that of all layers as one tensor, and some of them are frozen; freeze all or none of these layers, or "
                "give --no-save-optim"
            )
        self._agree(reason)

    @staticmethod
    def _agree(reason: str) -> None:
        reasons = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        if first := next(filter(None, reasons), ""):
            raise ConfigError(first)

    def take(
        self,
        directory: str | Path,
        *,
        step: int,
        consumed_samples: int,
        consumed_valid_samples: int = 0,
        args: Mapping[str, Any] | None = None,
        rank_state: Any = None,
        state_shards: int | None = None,
        whole: Replica | None = None,
        copied: bool = True,
    ) -> TorchDistShare:
        """This rank's share of the group's state after ``step``, for ``directory``; nothing is written. Collective.

        Args:
            directory: where the share will be written.
            step: the committed step.
            consumed_samples, consumed_valid_samples: consumed up to that step.
            args: Megatron's flags, to be stored with the checkpoint.
            rank_state: data of this rank position that can be pickled; only a load with the same group size returns it.
            state_shards: S; with the number of elements of a buffer the borders of the shards follow from it.
            whole: this rank's replica with an optimizer that has the whole state, made by :mod:`.whole_state`; None: it
                is gathered from the ranks that divide it.
            copied: see :meth:`ShareWriter.take`.
        """
        replica, apart = self._replica, frozenset[int]()
        if self._optimizer:
            if whole is not None:
                apart = whole_state.storages(whole)
            else:
                optimizer_gather.give_first_state(replica)
                whole = optimizer_gather.gathered(replica)
            state = _sharded_state(whole, dict(_CONTENT), is_loading=False, optimizer=True)
            _share_step(_parts(state["optimizer"]))
            add_distributed(_parts(state["optimizer"]))
            state["opt_param_scheduler"] = replica.scheduler.state_dict()
            state[_STATE_SHARDS] = state_shards
        else:
            state = _sharded_state(replica, dict(_CONTENT), is_loading=False, optimizer=False)
        state["args"] = argparse.Namespace(
            **{
                **(args or {}),
                "consumed_train_samples": consumed_samples,
                "consumed_valid_samples": consumed_valid_samples,
            }
        )
        state[_RANK_STATE] = _rank_object(rank_state)
        state["checkpoint_version"] = CHECKPOINT_VERSION
        state["iteration"] = step
        state["content_metadata"] = dict(_CONTENT)
        return self._writer.take(state, directory, copied=copied, apart=apart)


def save(directory: str | Path, replica: Replica, *, optimizer: bool = True, **stored: Any) -> None:
    """Write the group's state into ``directory``, which must be new or empty, and wait until it is written. Collective.

    ``stored`` has the keyword arguments of :meth:`Checkpointer.take`. An error while writing is raised only on its
    rank, while the other ranks wait until their timeout; so jobs save with :mod:`spare_megatron.worker.saving` instead.
    """
    directory = Path(directory)
    share = Checkpointer(replica, optimizer=optimizer).take(directory, copied=False, **stored)
    directory.mkdir(parents=True, exist_ok=True)

    def create(name: str) -> Any:
        return (directory / name).open("wb")

    reports = gather_bytes(share.write(create), compute_device())
    if dist.get_rank() == 0:
        share.finish(create, reports)
    barrier()


def load(
    directory: str | Path, replica: Replica, *, optimizer: bool = True, strictness: str = "assume_ok_unexpected"
) -> Loaded:
    """Put the state in ``directory`` into the replica; with ``optimizer`` False the weights only. Collective.

    ``strictness`` is one of megatron-core's words for what to do about tensors that only one side has.

    ConfigError when there is no such checkpoint, or it is of another model.
    """
    directory = Path(directory)
    before = version_of(directory)
    common = read_common(directory)
    content = common.get("content_metadata") or dict(_CONTENT)
    whole = optimizer_gather.empty(replica) if optimizer else replica
    optimizer_gather.begin_states(whole)
    state = _sharded_state(whole, dict(content), is_loading=True, optimizer=optimizer)
    stored = _stored(directory)
    if optimizer and "optimizer" not in common and not any(name.startswith("optimizer.") for name in stored):
        raise ConfigError(
            f"{directory} has no optimizer state, as it was saved with --no-save-optim; add --no-load-optim to go on "
            "with its weights and new moments"
        )
    form = form_of(directory, stored) if optimizer else ""
    here = state.pop("optimizer", None)
    if form == RESHARDABLE:
        rename_requests(here)
    states = [state[name] for name, _ in _modules(replica)] + ([here] if optimizer else [])
    translated = gpt_in_hybrid.retarget(directory, stored, pattern_of(_modules(replica)[0][1]), states, form)
    failed: ConfigError | None = None
    try:
        mine = _rank_object(None)
        if optimizer and mine.unique_key in stored and not translated:
            state[_RANK_STATE] = mine
        if optimizer and form != BUCKETS:
            state[_HERE] = here
        state = dist_checkpointing.load(state, str(directory), strict=strictness)
        for name, _ in _modules(replica):
            check_extra_states(state[name], directory)
    except (
        *(CheckpointException, CheckpointingException, ForbiddenPickleError),
        *(KeyError, ValueError, RuntimeError, OSError),
    ) as error:
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = " ".join(str(first).split())[:_REASON_CHARS]
        failed = ConfigError(
            f"{directory} cannot be loaded: {reason}; do not use this checkpoint"
            if isinstance(first, ForbiddenPickleError)
            else f"{directory} cannot be loaded into this model: {reason}; "
            "give the flags of the model that it was saved from"
        )
        failed.__cause__ = error
    _agree(failed, directory, before)
    for name, module in _modules(replica):
        module.load_state_dict(state[name])
    if optimizer:
        if form == BUCKETS:
            saved = dict(enumerate(read_buckets(directory, whole)))
            mine_now = whole.optimizer.state_dict()
            state[_HERE] = dict(enumerate(mine_now)) if isinstance(mine_now, list) else mine_now
        else:
            saved = common["optimizer"]
        load_optimizer(whole.optimizer, _with_saved_options(state[_HERE], saved, whole))
        optimizer_gather.scatter(whole, replica)
        _load_schedule(replica, common["opt_param_scheduler"], directory)
    else:
        optimizer_gather.take_weights(replica)
    args = vars(common["args"]) if "args" in common else {}
    return Loaded(
        step=_step(common),
        consumed_samples=int(args.get("consumed_train_samples", 0)),
        consumed_valid_samples=int(args.get("consumed_valid_samples", 0)),
        args=args,
        rank_state=state.get(_RANK_STATE),
        read_rank_states=partial(_rank_states, directory, stored, before) if optimizer else list,
        state_shards=common.get(_STATE_SHARDS) if optimizer else None,
    )


def _step(common: Mapping[str, Any]) -> int:
    """The step of a checkpoint, 0 of weights alone, in which Megatron's tools have a word for it or nothing."""
    iteration = common.get("iteration")
    return iteration if isinstance(iteration, int) else 0


def _load_schedule(replica: Replica, saved: dict[str, Any], directory: Path) -> None:
    """Go on with a saved learning-rate schedule, or at its place in that of the flags. Groups that have the schedule's
    own rates keep to it: megatron-core asks a group's rates first."""
    scheduler = replica.scheduler
    scheduler.num_steps = 0
    before = {name: getattr(scheduler, name) for name in SCHEDULED}
    try:
        scheduler.load_state_dict(saved)
    except AssertionError as error:  # megatron-core's way to say that two schedules differ
        raise ConfigError(
            f"the learning-rate schedule of {directory} is not that of these flags ({error}); add "
            "--override-opt_param-scheduler to go on with that of the flags, or "
            "--use-checkpoint-opt_param-scheduler to go on with the checkpoint's"
        ) from None
    for group in replica.optimizer.param_groups:
        own = {name for name, rate in before.items() if name in group and group[name] == rate}
        group.update({name: getattr(scheduler, name) for name in own})
    scheduler.step(0)


def _agree(failed: ConfigError | None, directory: Path, before: int | None) -> None:
    """Raise ``failed``, or a ConfigError where another rank has failed to load: since 0.18 ranks read on their own, and
    one that has all it needs would wait for the others for ever. Or one where the checkpoint is not the one any more,
    on each rank, that it was ``before`` on all of them. Collective."""
    replaced, seen = version_of(directory) != before, -1 if before is None else before
    flags = torch.tensor([failed is not None, replaced, seen, -seen], dtype=torch.int64).to(compute_device())
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    any_failed, any_replaced, most, least = flags.tolist()
    if any_replaced or most != -least:
        raise ConfigError(f"{directory} was replaced or removed while ranks read it; start again, or load another one")
    if failed is not None:
        raise failed
    if any_failed:
        raise ConfigError(f"{directory} cannot be loaded by another rank of this group; see its log")


def _rank_states(directory: Path, stored: Mapping[str, Any], before: int | None) -> list[Any]:
    """What each rank position of the group that saved a checkpoint gave to ``take``. Collective."""
    positions = sum(name.startswith(f"{_RANK_STATE}/") for name in stored)
    here = dist.get_rank()
    wanted = {n: ShardedObject(_RANK_STATE, None, (positions,), (n,), replica_id=here) for n in range(positions)}
    if not wanted:
        return []
    loaded = dist_checkpointing.load({_RANK_STATE: wanted}, str(directory))
    _agree(None, directory, before)
    return [loaded[_RANK_STATE][n] for n in range(positions)]


def _rank_object(data: Any) -> ShardedObject:
    return ShardedObject(_RANK_STATE, data, (dist.get_world_size(),), (dist.get_rank(),))


def read_common(directory: str | Path) -> dict[str, Any]:
    """What a checkpoint has besides tensors (iteration, args, schedule), without a process group. ConfigError where it
    cannot be read."""
    directory = Path(directory)
    if (directory / ".metadata").exists() and not has_readable_common(directory):
        raise ConfigError(
            f"{directory} has no {COMMON_STATE_FNAME}: megatron-core 0.19 and newer save none, and {core_version()} "
            f"cannot load without; install megatron-core {TESTED_CORE_VERSIONS[-1]} (it needs Python 3.12)"
        )
    try:
        ours = dist_checkpointing.check_is_distributed_checkpoint(str(directory))
        common = dist_checkpointing.load_common_state_dict(str(directory)) if ours else {}
    except Exception as error:  # a damaged pickle may raise anything
        raise _unreadable(directory, error) from error
    if not ours:
        raise ConfigError(
            f"{directory} has no checkpoint in megatron-core's torch_dist format; give the directory of one iteration"
        )
    return dict(common)


def _stored(directory: Path) -> Mapping[str, Any]:
    """The metadata of a checkpoint's tensors and objects, by name; ConfigError where it cannot be read."""
    try:
        return dict(load_sharded_metadata(str(directory)))
    except Exception as error:  # a damaged pickle may raise anything
        raise _unreadable(directory, error) from error


def _shortened(error: BaseException) -> str:
    return " ".join(str(error).split())[:_REASON_CHARS]


def _unreadable(directory: Path, error: Exception) -> ConfigError:
    if isinstance(error, ForbiddenPickleError):
        return ConfigError(f"{error}; do not use this checkpoint")
    reason = " ".join(str(error).split())[:_REASON_CHARS] or type(error).__name__
    return ConfigError(f"{directory} cannot be read: {reason}; use an older checkpoint")


def _modules(replica: Replica) -> list[tuple[str, torch.nn.Module]]:
    """(Megatron's name in a checkpoint, model without its wrappers) of each chunk."""
    modules = []
    for index, chunk in enumerate(replica.chunks):
        module = chunk.module
        while hasattr(module, "module"):
            module = module.module
        modules.append(("model" if len(replica.chunks) == 1 else f"model{index}", module))
    return modules


def _sharded_state(replica: Replica, content: dict[str, Any], *, is_loading: bool, optimizer: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        name: module.sharded_state_dict(metadata=dict(content))  # type: ignore[operator]
        for name, module in _modules(replica)
    }
    if optimizer:
        chained = replica.optimizer
        with squares_apart(chained):
            state["optimizer"] = chained.sharded_state_dict(state, is_loading=is_loading, metadata=content)
        for part, described in zip(chained.chained_optimizers, _parts(state["optimizer"]), strict=True):
            add_squares(part, _inner(described).get("state", {}))
    return state


def _with_saved_options(state: dict[Any, Any], saved: dict[Any, Any], replica: Replica) -> dict[Any, Any]:
    """Loaded optimizer tensors with what a checkpoint stores once: options of parameter groups, step, loss scale."""
    saved_parts = _parts(saved)
    options = [group for part in saved_parts for group in _inner(part)["param_groups"]]
    states = [_inner(part).get("state", {}) for part in saved_parts]
    steps = [float(state["common_step"]) for state in states if "common_step" in state]
    steps += [float(group["step"]) for group in options if group.get("step") is not None]
    scalers = [part["grad_scaler"] for part in saved_parts if "grad_scaler" in part]
    for part, current in zip(_parts(state), replica.optimizer.chained_optimizers, strict=True):
        inner = _inner(part)
        for group, own in zip(inner["param_groups"], current.param_groups, strict=True):
            stored = {name: value for name, value in _like(own, options).items() if name != "step"}
            group.update({**stored, "params": group["params"]})
            for name in ("is_expert_parallel", *RATES):
                group.pop(name, None)
                group.update({name: own[name]} if name in own else {})
        inner.setdefault("state", {})
        if hasattr(current, "fp32_from_float16_groups"):  # megatron-core's load drops lists without a tensor
            part.setdefault("fp32_from_fp16_params", [[] for _ in current.fp32_from_float16_groups])
        step = max(steps, default=0.0)  # for one that counts none, such as Lion, 0 is stored
        if is_soap(current):
            inner["state"]["common_step"] = int(step)
        elif optimizer_gather.counts_in_groups(current):
            for group in inner["param_groups"]:
                group["step"] = int(step)
        elif optimizer_gather.counts_steps(current):
            inner["state"]["common_step"] = torch.tensor(step)
        if scalers:
            part["grad_scaler"] = scalers[0]
    return state


def _share_step(parts: list[dict[str, Any]]) -> None:
    """Have each rank know how many updates were counted: what a checkpoint stores once is rank 0's, and where all of
    its stage is frozen it has counted none. Collective in the group."""
    states = [_inner(part).setdefault("state", {}) for part in parts]
    known = max((float(state["common_step"]) for state in states if "common_step" in state), default=0.0)
    step = torch.tensor([known], dtype=torch.float64).to(compute_device())
    dist.all_reduce(step, op=dist.ReduceOp.MAX)
    if step.item() > known:
        states[0]["common_step"] = torch.tensor(step.item(), dtype=torch.float32)


def _parts(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """The state of each chained optimizer; Megatron stores that of a single optimizer without a number."""
    return [state[index] for index in sorted(state)] if 0 in state else [state]


def _inner(part: dict[str, Any]) -> dict[str, Any]:
    """torch's state dict in an optimizer's state: the state itself in fp32, one level down with fp32 main
    parameters."""
    return part.get("optimizer", part)  # type: ignore[no-any-return]


def _like(group: Mapping[str, Any], options: list[dict[str, Any]]) -> dict[str, Any]:
    """The saved options of the parameter group that corresponds to ``group``; without a better one, an expert group
    may correspond to a dense one. Groups of one weight decay may be of two optimizers (Muon's and Adam's), and with
    maximal update parametrization they differ in their rates and eps."""
    names = ("wd_mult", "lr_mult", "is_decoupled_lr")
    likely = ("optimizer", "is_expert_parallel", *RATES, "eps")
    matching = [one for one in options if all(one[name] == group[name] for name in names)]
    if not matching:
        wanted = ", ".join(f"{name} {group[name]}" for name in names)
        raise ConfigError(
            f"the checkpoint's optimizer has no parameter group with {wanted}; "
            "give the optimizer flags that it was saved with, or --no-load-optim"
        )
    return max(matching, key=lambda one: [one.get(name) == group.get(name) for name in likely])
