"""A converted Hugging Face model, trained with --use-checkpoint-args and no flag of its shape: the same first loss."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.hugging_face_models import NOT_LOCAL, make, run
from tests.spawn import run_ranks
from tests.tickets import run_of

pytest.importorskip("transformers")
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

VOCAB = 1024
TOLERANCE = 1e-5
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# name -> kind of model, and what is special about its config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("qwen3", {"rms_norm_eps": 1e-3}),
    "mixtral": ("mixtral", {}),
    "qwen3-moe": ("qwen3-moe", {}),
    "deepseek-v2": ("deepseek-v2", {}),
    "deepseek-v3": ("deepseek-v3", {}),
    "glm4-moe": ("glm4-moe", {}),
    "gpt-oss": ("gpt-oss-yarn", {}),
}
MODELS = {name: one for name, one in MODELS.items() if name not in NOT_LOCAL}
FLAGS = (
    "--use-checkpoint-args --finetune --no-use-tokenizer-model-from-checkpoint-args --tokenizer-type NullTokenizer "
    "--vocab-size 1000 --mock-data --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 "
    "--transformer-impl local"
)


def train(load: str, save: str, store: Any) -> dict[str, Any]:
    """One step of a job of one rank, as ``pretrain`` starts it, and its checkpoint; the step's samples and its loss."""
    import pretrain_gpt
    from spare_megatron.checkpoint.saved_args import plain
    from spare_megatron.config.errors import ConfigError
    from spare_megatron.data.dataset_build import build_datasets, sample_counts
    from spare_megatron.data.microbatch_loader import MicrobatchLoader, train_consumed
    from spare_megatron.data.sampling import SampleOrder
    from spare_megatron.flags.checkpoint_args import other_model
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
    from spare_megatron.megatron_adapter.megatron_engine import MegatronEngine
    from spare_megatron.megatron_adapter.model import world
    from spare_megatron.megatron_adapter.model.replica import build_replica
    from spare_megatron.worker import user_state
    from spare_megatron.worker.job_arguments import parse_job
    from spare_megatron.worker.start import load_start
    from spare_megatron.worker.tokenizer import build_tokenizer

    job, args = parse_job([*FLAGS.split(), "--load", load])
    here = world.init_group_world(job.shape, 0, store)
    try:
        user_state.begin(job, args, build_tokenizer(args))
        replica = build_replica(job.settings(args.padded_vocab_size), here, pretrain_gpt.model_provider)
        resumed = replace(job, checkpoint=replace(job.checkpoint, finetune=False, no_load_optim=True))
        begun = load_start(resumed, args, replica)  # a conversion knows of no samples
        assert (begun.step, begun.consumed_samples) == (1, job.shape.global_batch_size), "Megatron's rule"
        with pytest.raises(ConfigError, match=f"of a model with --num-attention-heads {args.num_attention_heads}, but"):
            load_start(resumed, Namespace(**{**vars(args), "num_attention_heads": 64}), replica)
        assert load_start(job, args, replica).step == 0
        (directory,) = Path(load).glob("iter_*")
        assert other_model(args, vars(group_checkpoint.read_common(directory)["args"])) == []
        provider = pretrain_gpt.train_valid_test_datasets_provider
        built = build_datasets(provider, sample_counts(job.train_iters, args), args, leads=True)
        order = SampleOrder(job.shape, len(built.train))
        loader = MicrobatchLoader(
            built.train, order, inner=0, hosted=None, consumed=train_consumed(0, 2), vocab_size=1001
        )
        samples = list(loader(1, range(job.shape.microbatches)))
        engine = MegatronEngine(replica, here, pretrain_gpt.forward_step, loader)
        engine.begin_step(1)
        engine.run(1, run_of(range(job.shape.pieces)))
        loss = engine.apply(1, engine.local_sum(), engine.scalars())["loss"]
        loader.close()
        group_checkpoint.save(save, replica, step=1, consumed_samples=2, args=plain(vars(args)))
    finally:
        world.destroy()
        user_state.clear()
    reported = {name: torch.cat([sample[name] for sample in samples]).tolist() for name in ("tokens", "labels")}
    return {"loss": loss, "padded_vocab_size": args.padded_vocab_size, **reported}


def worker(_rank: int, store: Any, directories: dict[str, str]) -> dict[str, Any]:
    from torch.distributed import PrefixStore

    return {
        name: train(directory, f"{directory}/trained/iter_0000001", PrefixStore(name, store))
        for name, directory in directories.items()
    }


def test_the_first_loss_of_a_converted_model_is_that_of_transformers(tmp_path: Path) -> None:
    models = {}
    for name, (kind, other) in MODELS.items():
        models[name] = make(kind, tmp_path / name / "hf", vocab_size=VOCAB, num_hidden_layers=2, **other)
        run(tmp_path / name / "hf", tmp_path / name, "hf", "core")
    (trained,) = run_ranks(
        "tests.megatron.test_checkpoint_args:worker", [{name: str(tmp_path / name) for name in MODELS}]
    )
    for name, model in models.items():
        tokens, labels = (torch.tensor(trained[name][key]) for key in ("tokens", "labels"))
        with torch.no_grad():
            logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
        print(f"{name}: the first loss {loss:.4f} differs by {abs(trained[name]['loss'] - loss):.1e}")
        assert trained[name]["loss"] == pytest.approx(loss, abs=TOLERANCE), name
        same_shape_again(tmp_path / name, trained[name]["padded_vocab_size"])


def same_shape_again(converted: Path, rows: int) -> None:
    """What a job of ours saved says the same about its model as what the conversion wrote, to a later job."""
    from spare_megatron.flags import checkpoint_args
    from spare_megatron.worker.job_arguments import parse_job

    jobs = [parse_job([*FLAGS.split(), "--load", str(load)]) for load in (converted, converted / "trained")]
    names = (*checkpoint_args.MODEL, *checkpoint_args.SIZES, *checkpoint_args.COMMAND_LINE)
    first, again = ({name: getattr(ns, name) for name in names} for _, ns in jobs)
    assert again == {**first, "padded_vocab_size": rows}


@pytest.mark.parametrize("form", ["common.pt", "an object beside the tensors"])
def test_args_that_hold_objects_of_torch_and_megatron_are_read(tmp_path: Path, form: str) -> None:
    """As Megatron-LM saves them, up to megatron-core 0.18 and since: types, enums and tensors beside plain values."""
    import argparse
    import signal

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from spare_megatron.checkpoint.saved_args import COMMON, is_plain, read_args
    from spare_megatron.megatron_adapter.shims import install_cpu_shims

    install_cpu_shims()
    from megatron.core.transformer.enums import AttnBackend

    plain = {"num_layers": 4, "moe_layer_freq": [0, 1], "rope": 1e-5, "name": None, "bf16": True}
    objects = {"params_dtype": torch.bfloat16, "backend": AttnBackend.auto, "exit_signal": signal.SIGTERM}
    args = argparse.Namespace(**plain, **objects, tensor=torch.ones(3))
    common = {"args": args, "optimizer": {0: torch.zeros(2)}, "content": {1, 2}}
    if form == COMMON:
        torch.save(common, tmp_path / COMMON)
    else:
        state = {"weight": torch.ones(5), "common_state/shard_0_1": [common]}
        dcp.save(state, checkpoint_id=str(tmp_path), planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    found = read_args(tmp_path)
    assert {name: value for name, value in found.items() if is_plain(value)} == plain
    assert found.keys() == plain.keys() | objects.keys() | {"tensor"}
