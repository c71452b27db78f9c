"""pretrain_gpt.py, whose last pipeline stage sleeps before the backward pass of each of its layers once injection 1 of
the job has begun: so there is time to sum buckets while the pass goes on, however slow the machine is.

It sleeps long until injection 2 has begun, and briefly from then on.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

import pretrain_gpt
from spare_megatron import ModelType, pretrain

INJECTED = Path(os.environ["SPARE_RUN_DIR"]) / "injected"


def sleep(*_: Any) -> None:
    if any(INJECTED.glob("2-*")):
        time.sleep(0.05)
    elif any(INJECTED.glob("1-*")):
        time.sleep(0.7)


def model_provider(pre_process: bool = True, post_process: bool = True, **more: Any) -> torch.nn.Module:
    model = pretrain_gpt.model_provider(pre_process, post_process, **more)
    if post_process:
        for layer in model.decoder.layers:
            layer.register_full_backward_pre_hook(sleep)
    return model


if __name__ == "__main__":
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
    )
