"""Sets random states inside a group: Megatron's seeds at the start, then states that depend on piece and layer alone.

Dropout and router jitter must give the same numbers for a piece whichever group computes it, in whatever order, and
however the layers are split over stages. So every generator state is set to a hash of (seed, step, global microbatch
index, place, context-parallel rank, and for some states other ranks) where the forward pass comes to a place: the
embedding, a layer by its number in the model, a layer of multi-token prediction, the output layer. The user's forward
step begins with the same states on every stage, which are those of the microbatch alone.

megatron-core saves all states before what it recomputes, and restores them in the backward pass. Which microbatch is
computed is one of them, so a layer finds its states again when it is recomputed, also where several are saved as one.

May assume: ``install_cpu_shims`` has run, model parallel state is initialised. Promises: two ranks that Megatron
gives equal states (tensor-parallel ranks outside tensor-parallel regions) get equal states here too.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel import random as core_random

from spare_megatron.config.errors import ConfigError


class CpuRngStatesTracker(core_random.CudaRNGStatesTracker):
    """megatron-core's tracker of named generator states, on torch's CPU generator."""

    def add(self, name: str, seed: int) -> None:
        """Track a new state under ``name``; ValueError for a seed or name that is tracked already, as in the base
        class."""
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} already exists")
        if name in self.states_:
            raise ValueError(f"rng state {name} already exists")
        self._is_initialized = True
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = core_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Inside, use the state ``name``; afterwards the state that was current before is used again."""
        if name not in self.states_:
            raise ValueError(f"rng state {name} is not added")
        outer_name: str = self._current_state_name  # type: ignore[has-type]
        outer_state = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer_state)
            self._current_state_name = outer_name


def use_cpu_generator() -> None:
    """Point megatron-core's tracker and its save/restore of states at torch's CPU generator."""

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    core_random._get_cuda_rng_state = get_state
    core_random._set_cuda_rng_state = set_state
    core_random.CudaRNGStatesTracker = CpuRngStatesTracker


def seed_start(seed: int, pipeline_rank: int) -> None:
    """Seed every generator for model initialisation exactly as Megatron's training loop does."""
    stage_seed = seed + 100 * pipeline_rank
    random.seed(stage_seed)
    numpy.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    core_random.model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)


@dataclass(frozen=True)
class RankKeys:
    """The coordinates of this rank that generator states depend on."""

    context: int
    tensor: int
    expert: int
    expert_tensor: int


@lru_cache
def _on_cuda() -> bool:
    return torch.cuda.is_available()


def state_seed(*key: int | str) -> int:
    """A 32-bit seed from the key: CPU generators use no more bits."""
    text = ",".join(str(part) for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


_PIECE = "spare-piece"
"""The tracker's state that says which microbatch is computed: int64, the numbers of :func:`_set_states`."""
_WITHIN = -1
"""Of these numbers the one that says which layer of multi-token prediction has begun, 0 where none has."""


def set_piece_states(seed: int, step: int, microbatch: int, keys: RankKeys) -> None:
    """Set the default state and the tracker's states where one microbatch begins on a model chunk of any stage.

    ``microbatch`` is the index (j * N + i) * D + d of the microbatch in the step's global batch.
    """
    piece = (seed, step, microbatch, keys.context, keys.tensor, keys.expert, keys.expert_tensor, 0)
    _set_states(torch.tensor(piece), "forward step", 0)


def set_states_by_layer(model: torch.nn.Module) -> None:
    """Have ``model``, a chunk of a stage without wrappers, set the states at each of its places, from the microbatch
    that :func:`set_piece_states` has said. Without one nothing is set.

    Raises ConfigError where the provider has made another tracker than megatron-core's own: the states of
    transformer-engine's, and of one for CUDA graphs, are generators, which are not set from numbers."""
    tracker = core_random.get_cuda_rng_tracker()
    if type(tracker) is not core_random.CudaRNGStatesTracker or tracker.use_cudagraphable_rng:
        raise ConfigError(
            f"the model provider has made {type(tracker).__name__} the tracker of random states, but layers must have "
            "megatron-core's usual one, whose states are set for each piece; leave out te_rng_tracker, "
            "use_cudagraphable_rng and inference_rng_tracker"
        )
    _find_places(model)
    head = getattr(model, "output_layer", None)
    if isinstance(head, torch.nn.Module):
        _at(head, "head", 0)


def _find_places(module: torch.nn.Module) -> None:
    """Set the states at the places inside ``module``: what has a number in the model is a layer, of whatever class, and
    all that is inside a layer goes on with the layer's states."""
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    for part in module.children():
        number = getattr(part, "layer_number", None)
        if isinstance(part, MultiTokenPredictionLayer):
            _at(part, "prediction", part.layer_number)
        elif isinstance(number, int):
            _at(part, "layer", number)
            continue
        elif isinstance(part, LanguageModelEmbedding):
            _at(part, "embedding", 0)
        _find_places(part)


def _at(module: torch.nn.Module, place: str, number: int) -> None:
    """Set the states of a place whenever ``module`` begins its forward pass."""

    def begins(*_unused: Any) -> None:
        piece = core_random.get_cuda_rng_tracker().get_states().get(_PIECE)
        if piece is None or (place == "embedding" and piece[_WITHIN]):  # a prediction layer embeds once more
            return
        if place == "prediction":
            piece = piece.clone()
            piece[_WITHIN] = number
        _set_states(piece, place, number)

    module.register_forward_pre_hook(begins)


def _set_states(piece: torch.Tensor, place: str, number: int) -> None:
    seed, step, microbatch, context, tensor, expert, expert_tensor, _ = piece.tolist()
    shared = (seed, step, microbatch, place, number, context)
    default = state_seed("default", *shared)
    on_cuda = _on_cuda()
    # torch.manual_seed would seed every device type, and costs 95 us instead of 1.
    torch.default_generator.manual_seed(default)
    if on_cuda:
        torch.cuda.manual_seed(default)
    tracker = core_random.get_cuda_rng_tracker()
    seeds = {
        core_random._DATA_PARALLEL_RNG_TRACKER_NAME: default,
        core_random._MODEL_PARALLEL_RNG_TRACKER_NAME: state_seed("tensor", *shared, tensor),
        core_random._EXPERT_PARALLEL_RNG_TRACKER_NAME: state_seed("expert", *shared, expert, expert_tensor),
    }
    generator = torch.Generator(device="cuda" if on_cuda else "cpu")
    tracker.set_states(
        {
            **{name: generator.manual_seed(seeds[name]).get_state() for name in tracker.get_states() if name in seeds},
            _PIECE: piece,
        }
    )
