"""pretrain_gpt.py with position embeddings that are not trained where FROZEN is set, and with an Adam that counts its
updates as those of transformer-engine and apex do: once for a parameter group, and not for one without parameters."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import megatron.core.optimizer
import torch
from megatron.core.enums import ModelType

import pretrain_gpt
from spare_megatron.training import pretrain


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, capturable=False
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def load_state_dict(self, state_dict):
        for state in state_dict["state"].values():  # what transformer-engine's knows
            assert state.keys() <= {"exp_avg", "exp_avg_sq", "master_param"}
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            first, second = (1 - beta ** group["step"] for beta in group["betas"])
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state.update({name: torch.zeros_like(one) for name in ("exp_avg", "exp_avg_sq")})
                if one.grad is None:
                    continue
                mean = state["exp_avg"].lerp_(one.grad, 1 - group["betas"][0])
                square = state["exp_avg_sq"].lerp_(one.grad * one.grad, 1 - group["betas"][1])
                one.mul_(1 - group["lr"] * group["weight_decay"])
                one.sub_(group["lr"] * (mean / first) / ((square / second).sqrt() + group["eps"]))


def model_provider(*args, **options):
    model = pretrain_gpt.model_provider(*args, **options)
    for name, one in model.named_parameters():
        one.requires_grad_("position_embeddings" not in name or "FROZEN" not in os.environ)
    return model


if __name__ == "__main__":
    megatron.core.optimizer.Adam = FusedAdam
    megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = False
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
