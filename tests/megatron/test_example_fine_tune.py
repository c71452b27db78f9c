"""examples/fine_tune.sh on a tiny model and text: the weights have changed, and transformers loads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.test_fine_tune_round_trip import TEXT, loaded, model_of
from tests.spawn import ROOT, environment

pytest.importorskip("transformers")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_fine_tuning_example_trains_a_hugging_face_model(tmp_path: Path) -> None:
    model_of("llama", tmp_path / "model")
    (tmp_path / "text.jsonl").write_text((json.dumps({"text": TEXT * 4}) + "\n") * 40)
    words = ["--train-iters", "6", "--lr", "1e-3", "--transformer-impl", "local", "--seq-length", "32"]
    words += ["--max-position-embeddings", "32", "--log-interval", "1"]
    environ = {**environment(), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [str(ROOT / "examples" / "fine_tune.sh"), "model", "text.jsonl", "tuned", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = (tmp_path / "tuned" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    before, after = loaded(tmp_path / "model"), loaded(tmp_path / "tuned" / "hf")
    assert not before.lm_head.weight.equal(after.lm_head.weight)
    assert (tmp_path / "tuned" / "hf" / "tokenizer.json").read_bytes() == (
        tmp_path / "model" / "tokenizer.json"
    ).read_bytes()
