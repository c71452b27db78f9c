"""What the state of SOAP needs that no other optimizer's does: a fixed order in memory, and names in checkpoints.

SOAP is that of emerging-optimizers. For a matrix of r x c values it keeps Adam's two moments (r x c), the factors L
(r x r) and R (c x c) of Shampoo, their eigenbases Q_L and Q_R, all fp32, and the number of updates, an int. A
tensor-parallel rank has those of its own part of a matrix, as plain megatron-core does.

LAPACK returns an eigenbasis column after column, torch begins with rows, and a checkpoint has rows. Products of two
orders may differ in the last bit, and a state travels in the order in which it lies in memory. So both bases always lie
column after column here: before each update, and before the state is given to another rank.

megatron-core saves state of the shape of its weight only. The square tensors are saved beside it, each as a tensor of
its own whose name ends with where the part of the weight begins: another pipeline, expert or data-parallel layout finds
the same parts, and another tensor-parallel size has parts that no checkpoint has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

BASES = ("Q_L", "Q_R")
SQUARES = ("L", "R", *BASES)
"""The names of the square tensors in the state of a matrix."""
_NAMED = "optimizer.state.exp_avg."


def is_soap(part: Any) -> bool:
    """Whether one of megatron-core's optimizers is SOAP."""
    kind = type(part.optimizer)
    return (kind.__module__, kind.__name__) == ("emerging_optimizers.soap.soap", "SOAP")


def order_bases(optimizer: Any, *_: Any) -> None:
    """Have the eigenbases of a SOAP optimizer lie column after column. Where they do, as after each update on a CPU and
    with CUDA, nothing is copied."""
    for state in optimizer.state.values():
        for name in BASES:
            if name in state and not state[name].t().is_contiguous():
                state[name] = state[name].t().contiguous().t()


def order_before_updates(chained: Any) -> None:
    """Have every SOAP optimizer in ``chained`` order its bases before each update."""
    for part in chained.chained_optimizers:
        if is_soap(part):
            part.optimizer.register_step_pre_hook(order_bases)


@contextlib.contextmanager
def squares_apart(chained: Any) -> Iterator[None]:
    """Inside, the optimizers' state has no square tensors, so that megatron-core can describe it. A state that was not
    created yet is created first."""
    apart = []
    for part in chained.chained_optimizers:
        if is_soap(part):
            for group in part.param_groups:
                part.optimizer._init_group(group, skip_non_grad_params=False)
            states = list(part.optimizer.state.values())
            apart += [(state, {name: state.pop(name) for name in SQUARES}) for state in states]
    try:
        yield
    finally:
        for state, squares in apart:
            state.update(squares)


def add_squares(part: Any, described: dict[Any, Any]) -> None:
    """Add the square tensors of one of megatron-core's optimizers to its ``described`` state, which maps the number of
    a weight to its sharded tensors; nothing for another optimizer."""
    if not is_soap(part):
        return
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for number, state in part.optimizer.state_dict()["state"].items():
        like = described[number]["exp_avg"]
        if isinstance(like, ShardedTensorFactory):  # it saves parts of a matrix apart; the first says where it begins
            like = next(iter(nested_values(like.build())))
        weight, begins = like.key.removeprefix(_NAMED), ".".join(map(str, like.global_offset))
        for name in SQUARES:
            described[number][name] = ShardedTensor.from_rank_offsets(
                f"optimizer.state.{name}.{weight}.at.{begins}", state[name].contiguous(), replica_id=like.replica_id
            )
