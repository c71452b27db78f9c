"""Reads Megatron's older format of a job with many virtual stages: more than ten chunks of the model on each rank. The
checkpoint is one of no step, in a directory without a tracker file."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from spare_megatron.checkpoint.convert.conversion import open_source
from spare_megatron.checkpoint.convert.model import Entry, ModelShape
from spare_megatron.checkpoint.convert.model_args import args_of_shape
from spare_megatron.checkpoint.convert.mp_rank import FILE, inner_name
from spare_megatron.checkpoint.convert.tensors import entries

STAGES = 2


@pytest.mark.parametrize("chunks", [1, 2, 12])
def test_layers_are_in_the_order_of_the_chunks_numbers(chunks: int, tmp_path: Path) -> None:
    layers = STAGES * chunks
    shape = ModelShape(
        num_layers=layers, hidden_size=8, num_attention_heads=2, num_query_groups=2, kv_channels=4, ffn_hidden_size=16,
        max_position_embeddings=8, padded_vocab_size=16,
    )  # fmt: skip
    args = argparse.Namespace(**args_of_shape(shape, torch.float32, 1, STAGES, 1))

    def place(entry: Entry) -> tuple[int, int]:
        """(chunk, stage) of a tensor: layers go round the stages."""
        if entry.layer is not None:
            return divmod(entry.layer, STAGES)
        return (0, 0) if entry.name.startswith("embedding.") else (chunks - 1, STAGES - 1)

    for stage in range(STAGES):
        state: dict[str, object] = {"args": args, "iteration": "release"}
        for chunk in range(chunks):
            state["model" if chunks == 1 else f"model{chunk}"] = {
                inner_name(entry, 0, None, "transformer_engine"): torch.full(entry.shape, float(entry.layer or 0))
                for entry in entries(shape)
                if place(entry) == (chunk, stage)
            }
        folder = tmp_path / "release" / f"mp_rank_00_{stage:03d}"
        folder.mkdir(parents=True)
        torch.save(state, folder / FILE)
    source, _ = open_source(tmp_path, "megatron")
    assert source.iteration == 1, "the one from which Megatron can resume"
    for entry in entries(shape):
        assert source.read(entry).unique().tolist() == [entry.layer or 0], entry.name
