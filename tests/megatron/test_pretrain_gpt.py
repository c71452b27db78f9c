"""pretrain_gpt.py with flags as users give them: model, data, forward step and loss on megatron-core's engine."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from spare_megatron.config.shape import JobShape
from tests.pure.flags_of_a_job import job_of
from tests.spawn import run_ranks
from tests.tickets import run_of

CASES = {
    "plain": "",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --rotary-percent 0.5 "
    "--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 4",
    "activations": "--squared-relu --hidden-dropout 0 --attention-dropout 0 --init-method-xavier-uniform",
    "experts": "--num-experts 4 --disable-bias-linear --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
    "--moe-layer-freq ([0]+[1])*2",
    "bf16": "--bf16 --recompute-activations",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "tokens": "--calculate-per-token-loss --reset-position-ids --reset-attention-mask --eod-mask-loss",
    "sgd": "--optimizer sgd --lr-decay-style constant --weight-decay 0",
    "window": "--window-size 7,0 --window-attn-skip-freq 2 --qk-layernorm --attention-output-gate",
    "shared": "--num-experts 4 --disable-bias-linear --moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall",
    "unevaluated": "--eval-iters 0",
}


def train(extra: str, store: Any) -> dict[str, Any]:
    """Two steps of a job of one rank through pretrain_gpt's functions."""
    import pretrain_gpt
    from spare_megatron.data.dataset_build import build_datasets, sample_counts
    from spare_megatron.data.microbatch_loader import MicrobatchLoader, train_consumed
    from spare_megatron.data.sampling import SampleOrder
    from spare_megatron.megatron_adapter.megatron_engine import MegatronEngine
    from spare_megatron.megatron_adapter.model import world as group_world
    from spare_megatron.megatron_adapter.model.replica import build_replica
    from spare_megatron.training.utils import unwrap_model
    from spare_megatron.worker import user_state
    from spare_megatron.worker.tokenizer import build_tokenizer

    job, args = job_of(f"--global-batch-size 2 {extra}")
    shape: JobShape = job.shape
    world = group_world.init_group_world(shape, 0, store)
    user_state.begin(job, args, build_tokenizer(args))
    replica = build_replica(job.settings(args.padded_vocab_size), world, pretrain_gpt.model_provider)
    provider = pretrain_gpt.train_valid_test_datasets_provider
    built = build_datasets(provider, sample_counts(job.train_iters, args), args, leads=True)
    order = SampleOrder(shape, len(built.train))
    loader = MicrobatchLoader(built.train, order, inner=0, hosted=None, consumed=train_consumed(0, 2), vocab_size=1001)
    engine = MegatronEngine(replica, world, pretrain_gpt.forward_step, loader)
    losses = []
    for step in (1, 2):
        engine.begin_step(step)
        engine.run(step, run_of(range(shape.pieces)))
        losses.append(engine.apply(step, engine.local_sum(), engine.scalars())["loss"])
    loader.close()
    group_world.destroy()
    user_state.clear()
    rotary = getattr(unwrap_model(replica.chunks[0]), "rotary_pos_emb", None)
    return {
        "losses": losses,
        "layers": args.transformer_impl,
        "sizes": [None if part is None else len(part) for part in (built.train, built.valid, built.test)],
        "compiler": "torch._dynamo" in sys.modules,
        "frequencies": None if rotary is None else rotary.inv_freq.tolist(),
    }


def worker(_rank: int, store: Any, _arguments: Any) -> dict[str, Any]:
    from torch.distributed import PrefixStore

    return {name: train(extra, PrefixStore(name, store)) for name, extra in CASES.items()}


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    (result,) = run_ranks("tests.megatron.test_pretrain_gpt:worker", [None])
    return result


@pytest.mark.parametrize("name", CASES)
def test_two_steps(trained: dict[str, Any], name: str) -> None:
    first, second = trained[name]["losses"]
    assert first == pytest.approx(math.log(1024), rel=0.1)
    assert second == pytest.approx(first, rel=0.05)
    assert trained[name]["layers"] == "local"
    assert not trained[name]["compiler"], "0.4 s of a first step"


def test_mock_data_of_which_nothing_is_drawn_is_not_built(trained: dict[str, Any]) -> None:
    assert min(trained["plain"]["sizes"]) > 1000
    assert trained["unevaluated"]["sizes"] == [trained["plain"]["sizes"][0], None, None]
    assert trained["unevaluated"]["losses"] == trained["plain"]["losses"]


def test_rope_is_scaled_as_llama_3_does_it(trained: dict[str, Any]) -> None:
    """Of 8 rotary dimensions one wavelength is short (as it is), one in between (mixed), two are long (a quarter)."""
    plain = [500000.0 ** (-index / 4) for index in range(4)]
    wanted = []
    for frequency in plain:
        turns = 8192 * frequency / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - 1) / (4 - 1)))
        wanted.append(frequency * (share + (1 - share) / 4))
    assert trained["llama"]["frequencies"] == pytest.approx(wanted, rel=1e-5)
    assert trained["llama"]["frequencies"] != pytest.approx(plain, rel=1e-5)
    assert trained["plain"]["frequencies"] is None


def test_masks_and_positions_are_those_of_megatron_core() -> None:
    import itertools

    import torch

    from spare_megatron.megatron_adapter.shims import install_cpu_shims

    install_cpu_shims()
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    from spare_megatron.training.utils import get_ltor_masks_and_position_ids

    rows = torch.tensor([[1, 2, 0, 3, 0, 0, 4, 5], [0, 1, 2, 3, 4, 5, 6, 0], [1, 2, 3, 4, 5, 6, 7, 8]])
    for flags in itertools.product((False, True), repeat=3):
        hidden, loss_mask, positions = get_ltor_masks_and_position_ids(rows, 0, *flags)
        for index, row in enumerate(rows):
            want = _get_ltor_masks_and_position_ids(row, 0, *flags, True)
            assert torch.equal(hidden.expand(3, 1, 8, 8)[index], want[0])
            assert torch.equal(loss_mask[index], want[1])
            assert torch.equal(positions[index], want[2])
        # the order of Megatron-LM 0.15 and newer; 7 is a pad
        padded = get_ltor_masks_and_position_ids(rows, 0, 7, *flags, True)
        assert torch.equal(padded[0], hidden)
        assert torch.equal(padded[1], loss_mask * (rows != 7))
        assert torch.equal(padded[2], positions)
    assert (
        get_ltor_masks_and_position_ids(rows, 0, 7, False, False, False, False, create_attention_mask=False)[0] is None
    )
    with pytest.raises(TypeError, match="eod_mask_loss"):
        get_ltor_masks_and_position_ids(rows, 0, False, False)
