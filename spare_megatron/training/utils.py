"""Helpers that users of Megatron import in their pretrain scripts, under Megatron's names and signatures."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags.blends import Blend, blends
from spare_megatron.training import megatron_exports
from spare_megatron.worker.user_state import get_args, print_rank_0

__all__ = [
    "average_losses_across_data_parallel_group",
    "get_batch_on_this_cp_rank",
    "get_batch_on_this_tp_rank",
    "get_blend_and_blend_per_split",
    "get_ltor_masks_and_position_ids",
    "is_dataset_built_on_rank",
    "is_first_or_last_pipeline_stage",
    "is_last_rank",
    "is_rank0",
    "logical_and_across_model_parallel_group",
    "print_rank_0",
    "print_rank_last",
    "reduce_max_stat_across_model_parallel_group",
    "report_memory",
    "unwrap_model",
    "warn_rank_0",
]


def get_batch_on_this_tp_rank(
    data_iterator: Iterator[Any] | None, mtp_on_this_rank: bool = False, needs_padding_mask: bool = False
) -> dict[str, Any]:
    """The next microbatch as ``tokens``, ``labels``, ``loss_mask``, ``attention_mask``, ``position_ids``.

    Tensors are [micro batch size, sequence length] (the attention mask [micro batch size, 1, seq, seq]); None where
    this pipeline stage does not need one. The last stage of a model with multi-token prediction needs all, whether
    ``mtp_on_this_rank`` says so or, as in older scripts, nothing. ``needs_padding_mask``, of data that are not
    supported, is refused. Collective in the tensor-parallel group.
    """
    if needs_padding_mask:
        raise ConfigError("get_batch_on_this_tp_rank(needs_padding_mask=True) is not supported: no data set here pads")
    from spare_megatron.megatron_adapter.data import microbatch_broadcast

    args = get_args()
    predicts = mtp_on_this_rank or (args.mtp_num_layers is not None and microbatch_broadcast.is_last_stage())
    return microbatch_broadcast.batch_on_this_tensor_rank(
        data_iterator, args.micro_batch_size, args.seq_length, args.create_attention_mask_in_dataloader, predicts
    )


def get_batch_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """The part of each sequence that this context-parallel rank computes; the batch itself without CP."""
    from spare_megatron.megatron_adapter.data import microbatch_broadcast

    return microbatch_broadcast.batch_on_this_context_rank(batch)


def is_first_or_last_pipeline_stage(vp_stage: int | None = None) -> bool:
    """Whether this rank (or its model chunk ``vp_stage``) reads samples."""
    from spare_megatron.megatron_adapter.data import microbatch_broadcast

    return microbatch_broadcast.is_first_or_last_stage(vp_stage)


def is_dataset_built_on_rank(vp_stage: int | None = None) -> bool:
    """Whether this rank needs data sets: tensor-parallel rank 0 of the first and the last stage."""
    from spare_megatron.megatron_adapter.data import microbatch_broadcast

    return microbatch_broadcast.is_first_or_last_stage(vp_stage) and microbatch_broadcast.tensor_rank() == 0


def get_blend_and_blend_per_split(args: Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """(blend, blend per split) of the data flags, as GPTDatasetConfig takes them; ConfigError where none is given."""
    named = blends(args)
    if named == (None, None) and not args.mock_data:
        raise ConfigError("there is no data; give --data-path PREFIX or --mock-data")
    return named


_MASK_FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
_MASK_FLAGS_AND_PADS = ("pad_token", *_MASK_FLAGS, "pad_mask_loss", "create_attention_mask")


def get_ltor_masks_and_position_ids(
    data: torch.Tensor, eod_token: int, *ordered: Any, **named: Any
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Masks and positions of a left-to-right model for ``data`` [batch, sequence].

    The other arguments stand in the order of any Megatron: ``reset_position_ids``, ``reset_attention_mask``,
    ``eod_mask_loss``; since 0.15 ``pad_token`` before and ``pad_mask_loss`` behind them, in the newest also
    ``create_attention_mask``. Only ``eod_token`` ends a document; a pad is masked in the loss.

    Returns:
        attention mask [batch or 1, 1, sequence, sequence], True where a token must *not* be seen, or None without one;
        loss mask [batch, sequence]; position ids [batch, sequence].
    """
    pads = len(ordered) > len(_MASK_FLAGS) or "pad_token" in named
    given = {**dict(zip(_MASK_FLAGS_AND_PADS if pads else _MASK_FLAGS, ordered, strict=False)), **named}
    pad_token, pad_mask_loss = given.pop("pad_token", None), given.pop("pad_mask_loss", False)
    with_mask = given.pop("create_attention_mask", True)
    hidden, loss_mask, positions = _masks_and_positions(data, eod_token, **given)
    if pad_mask_loss:
        loss_mask[data == pad_token] = 0.0
    return hidden if with_mask else None, loss_mask, positions


def _masks_and_positions(
    data: torch.Tensor, eod_token: int, reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, length = data.shape
    ends = data == eod_token
    positions = torch.arange(length, dtype=torch.long, device=data.device).expand(batch, length)
    # a document begins after each end: its number is the count of ends strictly before a token
    documents = torch.cumsum(ends, dim=1) - ends.long()
    hidden = torch.ones(length, length, dtype=torch.bool, device=data.device).triu(1).view(1, 1, length, length)
    if reset_attention_mask:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    if reset_position_ids:
        starts = torch.zeros_like(positions)
        starts[:, 1:] = torch.where(ends[:, :-1], positions[:, 1:], 0)
        positions = positions - torch.cummax(starts, dim=1).values
    loss_mask = torch.ones(batch, length, dtype=torch.float, device=data.device)
    if eod_mask_loss:
        loss_mask[ends] = 0.0
    return hidden, loss_mask, positions.contiguous()


def average_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The losses of this microbatch, [number of losses], detached, to be returned in the report.

    Nothing is averaged here: the step loop averages what the loss function reports over all microbatches of the
    committed step, with those of other groups and data ranks. A collective here could wait for a dead group.
    """
    return torch.cat([loss.detach().reshape(1).clone() for loss in losses])


def reduce_max_stat_across_model_parallel_group(stat: float | None) -> float | None:
    """The largest ``stat`` of the ranks of this model-parallel group, which must not be negative; None where all have
    None. Collective in that group.
    """
    from spare_megatron.megatron_adapter.data import microbatch_broadcast

    largest = microbatch_broadcast.max_over_model(-1.0 if stat is None else float(stat))
    return None if largest == -1.0 else largest


def logical_and_across_model_parallel_group(input: bool) -> bool:
    """Whether ``input`` is true on every rank of this model-parallel group; collective in that group."""
    from spare_megatron.megatron_adapter.data import microbatch_broadcast

    return microbatch_broadcast.max_over_model(0.0 if input else 1.0) == 0.0


def report_memory(name: str) -> None:
    """Print the device's memory figures in MiB, on inner data rank 0 of each group; they are 0 without CUDA."""
    from spare_megatron.megatron_adapter.data import microbatch_broadcast

    if microbatch_broadcast.data_rank() == 0:
        figures = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
        parts = [f"{each.replace('memory_', '').replace('_', ' ')}: {_mebibytes(each):.2f}" for each in figures]
        print(f"[Rank {get_args().rank}] {name} memory (MB) | {' | '.join(parts)}", flush=True)


def _mebibytes(figure: str) -> float:
    return getattr(torch.cuda, figure)() / 2**20 if torch.cuda.is_available() else 0.0


def is_rank0() -> bool:
    """Whether this is rank 0 of the whole job."""
    return bool(get_args().rank == 0)


def warn_rank_0(message: str, rank: int | None = None) -> None:
    """Warn once per job: on rank 0 of the whole job, or where ``rank`` is 0."""
    if (get_args().rank if rank is None else rank) == 0:
        warnings.warn(message, stacklevel=2)


def is_last_rank() -> bool:
    """Whether this is the last rank of the whole job."""
    args = get_args()
    return bool(args.rank == args.world_size - 1)


def print_rank_last(message: object) -> None:
    """Print on the last rank of the job."""
    if is_last_rank():
        print(message, flush=True)


def unwrap_model(model: Any) -> Any:
    """The model without its wrappers (half precision, gradient buffers); a list gives a list."""
    if isinstance(model, list):
        return [unwrap_model(part) for part in model]
    while hasattr(model, "module"):
        model = model.module
    return model


def __getattr__(name: str) -> Any:
    raise megatron_exports.missing(__name__, name)
