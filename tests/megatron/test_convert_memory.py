"""A conversion's memory is bounded by one layer plus the largest tensor, in every direction.

One process converts a small model each way, so that all is imported, then a model of 400 MB in 24 layers. Linux counts
the resident pages at their highest (VmHWM), mapped files included, and forgets the mark on request. glibc raises by
itself the size from which it gives memory back when it is freed, and then keeps what an earlier conversion had, more or
less of it from run to run; here that size is fixed, so that what counts is what a conversion holds.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.spawn import ROOT, environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

HIDDEN, WIDE, LAYERS, VOCAB = 512, 2048, 24, 4096
SLACK = 20 << 20
"""Bytes of a second copy of a part, of small objects and of mapped pages that are not released yet."""
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
STEPS = (
    ("hf", "hf", "core", "core"),
    ("core", "megatron", "legacy", "legacy"),
    ("legacy", "megatron", "core", "again"),
    ("again", "megatron", "hf", "back"),
)
"""(what is read, its loader, saver, what is made)."""


def sizes(hidden: int, wide: int, layers: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama's tensors."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        top = f"model.layers.{layer}."
        found |= {f"{top}self_attn.{one}_proj.weight": (hidden, hidden) for one in "qkvo"}
        found |= {f"{top}mlp.{one}_proj.weight": (wide, hidden) for one in ("gate", "up")}
        found[f"{top}mlp.down_proj.weight"] = (hidden, wide)
        found |= {f"{top}{one}_layernorm.weight": (hidden,) for one in ("input", "post_attention")}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def make(folder: Path, *shape: int) -> None:
    """A Llama of Hugging Face's form; each tensor holds one number of its own."""
    from spare_megatron.checkpoint.convert import safetensors_file

    hidden, wide, layers, vocab = shape
    named = sizes(*shape)
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    number = {name: float(index) for index, name in enumerate(named)}
    types = {name: (torch.float32, size) for name, size in named.items()}
    safetensors_file.write(folder / "model.safetensors", types, lambda name: torch.full(named[name], number[name]))


def status(name: str) -> int:
    """A line of /proc/self/status, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def measure(directory: Path) -> dict[str, int]:
    """Conversion -> bytes by which it raised the resident set at most."""
    from spare_megatron.cli import convert

    found: dict[str, int] = {}
    for kind, shape in (("small", (64, 96, 2, 256)), ("large", (HIDDEN, WIDE, LAYERS, VOCAB))):
        make(directory / kind / "hf", *shape)
        for origin, loader, saver, made in STEPS:
            words = ["--load-dir", str(directory / kind / origin), "--save-dir", str(directory / kind / made)]
            cut = ["--target-tensor-parallel-size", "2"] if saver == "legacy" else []
            gc.collect()  # maps of the files before
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
            assert convert.main(["--model-type", "GPT", "--loader", loader, "--saver", saver, *words, *cut]) == 0
            found[f"{origin} to {made}"] = status("VmHWM") - before
    same = (directory / "large" / name / "model.safetensors" for name in ("hf", "back"))
    first, last = (path.stat().st_size for path in same)
    found["size"] = first
    assert abs(first - last) < 1 << 16
    return found


def test_peak_memory_is_one_layer_and_the_largest_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "tests.megatron.test_convert_memory", str(tmp_path)]
    environ = environment() | GIVEN_BACK
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    tensors = {name: 4 * torch.Size(size).numel() for name, size in sizes(HIDDEN, WIDE, LAYERS, VOCAB).items()}
    layer = sum(size for name, size in tensors.items() if name.startswith("model.layers.0."))
    largest = max(max(tensors.values()), 2 * 4 * WIDE * HIDDEN)
    whole = found.pop("size")
    assert whole > 5 * (layer + largest + SLACK)
    with capsys.disabled():
        shown = ", ".join(f"{name} {peak / 1e6:.0f} MB" for name, peak in found.items())
        print(f"\n{whole / 1e6:.0f} MB, a layer {layer / 1e6:.0f}, the largest tensor {largest / 1e6:.0f}: {shown}")
    for name, peak in found.items():
        assert peak <= layer + largest + SLACK, name


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
