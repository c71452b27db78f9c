"""pretrain_gpt.py with an object of its own that keeps something from step to step, and leaves it in the run directory
for the test. It waits after each step for STEP_S seconds, so that a job trains few steps while a group comes back."""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron.core.enums import ModelType

from pretrain_gpt import forward_step, model_provider, train_valid_test_datasets_provider
from spare_megatron.training import carry_state, pretrain


class SmoothedNorm:
    """A running mean of the gradients' norms."""

    def __init__(self):
        self.steps, self.norm = 0, 0.0

    def after_step(self, step, figures):
        time.sleep(float(os.environ.get("STEP_S", "0")))
        self.steps, self.norm = self.steps + 1, 0.9 * self.norm + 0.1 * (figures.get("grad_norm") or 0.0)
        name = f"norm-{os.environ['SPARE_GROUP']}-{os.environ['SPARE_POSITION']}.json"
        (Path(os.environ["SPARE_RUN_DIR"]) / name).write_text(json.dumps([step, self.steps, self.norm]))

    def state_dict(self):
        return {"steps": self.steps, "norm": self.norm}

    def load_state_dict(self, state):
        self.steps, self.norm = state["steps"], state["norm"]


if __name__ == "__main__":
    carry_state("smoothed norm", SmoothedNorm())
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
