"""Checkpoints of Megatron's FSDP modes, which are torch's own format, are converted, weights only. No FSDP runs on a
CPU, so the files are written here with the names that Megatron-LM gives (fsdp_dtensor_checkpoint.py, checkpointing.py)
and in parts of uneven sizes, as its ranks have them."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from spare_megatron.checkpoint import folder
from spare_megatron.checkpoint.saved_args import read_args
from spare_megatron.cli import convert
from tests.megatron.hugging_face_models import make, run

safetensors_torch = pytest.importorskip("safetensors.torch")
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

GATED = re.compile(r"\.linear_fc1\.weight\d*$")


def model_of(kind: str, top: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state of one rank's model, as its modules name it, and Megatron's args."""
    make(kind, top / "hf", num_hidden_layers=2)
    run(top / "hf", top / "legacy", "hf", "legacy")
    state = torch.load(top / "legacy" / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    return {name: one for name, one in state["model"].items() if one is not None}, vars(state["args"])


def fsdp_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Megatron's FSDP stores a model: gated weights as two tensors, an expert's number behind its weight."""
    found = {}
    for name, one in tensors.items():
        new = re.sub(r"local_experts\.(\d+)\.(linear_fc\d)\.weight", r"\2.weight\1", name)
        if GATED.search(new):
            found |= {f"{new}_w": one.chunk(2)[0].clone(), f"{new}_v": one.chunk(2)[1].clone()}
        else:
            found[new] = one
    return {f"module.{name}": one for name, one in found.items()}


def write(directory: Path, model: dict[str, torch.Tensor], args: dict[str, Any]) -> None:
    moments = {name: torch.zeros_like(one) for name, one in model.items()}
    state = {"args": Namespace(**args), "iteration": 7, "checkpoint_version": 3.0, "model": model}
    dcp.save({**state, "optimizer": {"state": {"exp_avg": moments}}}, checkpoint_id=str(directory), no_dist=True)


@pytest.mark.parametrize("format_", ["torch_dcp", "fsdp_dtensor"])
@pytest.mark.parametrize("kind", ["llama-tied", "qwen3-moe"])
def test_weights_come_out_of_megatrons_fsdp(kind: str, format_: str, tmp_path: Path) -> None:
    model, args = model_of(kind, tmp_path)
    own = tmp_path / "own" / "iter_0000007"
    write(own, fsdp_names(model) if format_ == "fsdp_dtensor" else model, args)
    assert read_args(own)["num_layers"] == 2
    run(tmp_path / "own", tmp_path / "back", "core", "hf")
    run(tmp_path / "own", tmp_path / "core", "core", "core", "--target-tensor-parallel-size", "2")
    run(tmp_path / "core", tmp_path / "again", "core", "hf")
    before = safetensors_torch.load_file(tmp_path / "hf" / "model.safetensors")
    for name in ("back", "again"):
        after = safetensors_torch.load_file(tmp_path / name / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[one], after[one]) for one in before)
    assert (tmp_path / "core" / "iter_0000007").is_dir()
    assert not folder.damage(tmp_path / "core" / "iter_0000007")


def test_a_job_says_what_converts_them(tmp_path: Path) -> None:
    from spare_megatron.config.errors import ConfigError
    from spare_megatron.worker.job_arguments import parse_job

    own = tmp_path / "own"
    write(own / "iter_0000007", {"decoder.final_layernorm.weight": torch.ones(3)}, {"num_layers": 2})
    flags = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-torch-fsdp2 --no-strict-fsdp-dtensor-load"
    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    words += f"--micro-batch-size 1 --train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer {flags}"
    job, _ = parse_job([*words.split(), "--vocab-size", "10", "--transformer-impl", "local", "--load", str(own)])
    notes = "\n".join(job.notes)
    assert "--use-megatron-fsdp and --use-torch-fsdp2: FSDP saves memory by dividing" in notes
    assert "convert-torch-dist-to-fsdp-dtensor converts back" in notes
    assert "--no-strict-fsdp-dtensor-load: a checkpoint of --ckpt-format fsdp_dtensor is converted before" in notes
    good, [damage] = folder.last_good(own)
    assert good is None
    command = f"spare-convert --model-type GPT --loader core --saver core --load-dir {own} --save-dir {own}-torch_dist"
    assert command in damage.reason
    with pytest.raises(ConfigError, match=re.escape(command)):
        parse_job([*words.split(), "--vocab-size", "10", "--load", str(own), "--use-checkpoint-args"])


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, args = model_of("llama", tmp_path)
    cases = {
        "parts": (model, {**args, "tensor_model_parallel_size": 2}, "torch_dcp keeps only one rank's part"),
        "lost": ({**model, "decoder.layers.1.score.weight": torch.ones(3)}, args, "decoder.layers.1.score.weight"),
        "missing": ({name: model[name] for name in list(model)[1:]}, args, f"has no tensor {next(iter(model))}"),
        "argless": (model, {}, "was saved without args"),
    }
    for name, (tensors, known, sentence) in cases.items():
        write(tmp_path / name / "iter_0000007", tensors, known)
        words = ["--model-type", "GPT", "--saver", "core", "--load-dir", str(tmp_path / name)]
        capsys.readouterr()
        assert convert.main([*words, "--save-dir", str(tmp_path / "x")]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1
        assert not (tmp_path / "x").exists()
