"""Damaged files, full disks and interruptions: a conversion writes all or nothing, and what is there stays."""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spare_megatron.checkpoint.convert import conversion
from spare_megatron.cli import convert
from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint import digest as digests
from spare_megatron.megatron_adapter.checkpoint.manifest_version import MANIFEST
from tests.megatron.hugging_face_models import run
from tests.megatron.refused_folders import FILE, Capture, refused, returned, same, weights

pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def test_every_cut_of_a_safetensors_file(model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    data = (folder / FILE).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for size in (0, 5, 8, 100, header - 1, header, header + 1, len(data) // 2, len(data) - 1):
        (folder / FILE).write_bytes(data[:size])
        refused(folder, capsys, FILE, "fetch it again", f"{size} bytes")
    (folder / FILE).write_bytes(data + b"\0")
    refused(folder, capsys, "too long")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"F32"', '"F99"', "F99"),
        ("[100,64]", "[100,63]", "has 25600 bytes, but F32 [100, 63] needs 25200"),
        ("[100,64]", "[-100,64]", "[-100, 64]"),
        ("data_offsets", "data_offsetz", "has no dtype, shape and data_offsets"),
        ("model.norm.weight", "model.embed_tokens.weight", "twice"),
        ("{", "[", "damaged header"),
    ],
)
def test_a_safetensors_header_that_contradicts_itself(
    old: str, new: str, sentence: str, model: Callable[[str], Path], capsys: Capture
) -> None:
    folder = model("llama")
    data = (folder / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].decode().rstrip()
    assert old in text
    changed = text.replace(old, new, 1).encode()
    (folder / FILE).write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    refused(folder, capsys, sentence)


def test_a_cut_checkpoint_of_megatron(model: Callable[[str], Path], capsys: Capture) -> None:
    """Megatron-LM's have no manifest: their own metadata say how long the files are."""
    folder = model("llama")
    top = folder.parent
    run(folder, top / "core", "hf", "core")
    directory = top / "core" / "iter_0000001"
    (directory / "spare_manifest.json").unlink()
    words = ["--model-type", "GPT", "--load-dir", str(top / "core"), "--save-dir", str(top / "x"), "--saver"]
    capsys.readouterr()
    for name, end in (("__0_0.distcp", "copy"), (".metadata", "use another checkpoint")):
        data = (directory / name).read_bytes()
        for size in (0, 1, len(data) // 2, len(data) - 1):
            (directory / name).write_bytes(data[:size])
            for saver in ("hf", "legacy"):
                assert convert.main([*words, saver]) == 2
                error = capsys.readouterr().err
                assert name in error
                assert end in error
                assert error.count("\n") == 1
                assert not (top / "x").exists()
        (directory / name).write_bytes(data)
    for text in ("9" * 5000, "2", "", "iter", "-1"):
        (top / "core" / "latest_checkpointed_iteration.txt").write_text(text)
        assert convert.main([*words, "hf"]) == 2
        assert "correct the file" in capsys.readouterr().err
    (top / "core" / "latest_checkpointed_iteration.txt").unlink()
    assert convert.main([*words, "hf"]) == 0
    assert same(weights(top / "x"), weights(folder))


def test_damaged_bin_files(model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    tensors = weights(folder)
    (folder / FILE).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert same(returned(folder), tensors)
    data = (folder / "pytorch_model.bin").read_bytes()
    for bad in (data[: len(data) // 2], b"", b"junk" * 100, data[:-1]):
        (folder / "pytorch_model.bin").write_bytes(bad)
        refused(folder, capsys, "pytorch_model.bin", "fetch it again")
    torch.save([1, 2], folder / "pytorch_model.bin")
    refused(folder, capsys, "other things than named tensors")


@pytest.mark.parametrize("saver", ["core", "legacy", "hf"])
def test_a_disk_that_ends_leaves_nothing(saver: str, model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    origin, loader = folder, "hf"
    if saver == "hf":
        origin, loader = folder.parent / "core", "core"
        run(folder, origin, "hf", "core")
    save = folder.parent / "x"
    words = ["--model-type", "GPT", "--loader", loader, "--load-dir", str(origin), "--save-dir", str(save)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # no file may be longer, as on a full disk
    try:
        capsys.readouterr()
        assert convert.main([*words, "--saver", saver]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    sentences = [line for line in capsys.readouterr().err.splitlines() if "MiB" not in line]
    assert len(sentences) == 1
    assert "File too large" in sentences[0]
    assert not save.exists()
    assert convert.main([*words, "--saver", saver]) == 0


def test_an_error_in_the_middle_leaves_nothing(model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    top = folder.parent
    run(folder, top / "legacy", "hf", "legacy")
    path = top / "legacy" / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["decoder.final_layernorm.weight"] = torch.ones(63)
    torch.save(state, path)
    words = ["--model-type", "GPT", "--load-dir", str(top / "legacy"), "--save-dir", str(top / "x"), "--saver"]
    for saver in ("core", "legacy", "hf"):
        assert convert.main([*words, saver]) == 2
        assert "decoder.final_layernorm.weight has shape (63,)" in capsys.readouterr().err
        assert not (top / "x").exists()


def other_version(directory: Path) -> None:
    """Another manifest, as another checkpoint has it."""
    (directory / MANIFEST).write_text("{}")


@pytest.mark.parametrize("removed", [False, True])
def test_a_digest_of_a_checkpoint_that_a_job_replaces_or_deletes_meanwhile(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    folder = model("llama")
    run(folder, folder.parent / "save", "hf", "core")
    directory = folder.parent / "save" / "iter_0000001"
    before = digests.digest(directory)
    together = digests._together

    def parts(entries: Any) -> Iterator[dict[str, Any]]:
        yield from together(entries)
        if removed:
            shutil.rmtree(directory)
        else:
            other_version(directory)

    monkeypatch.setattr(digests, "TOGETHER_BYTES", 1)
    assert digests.digest(directory) == before
    monkeypatch.setattr(digests, "_together", parts)
    with pytest.raises(ConfigError, match="iter_0000001 was replaced or removed while it was read"):
        digests.digest(directory)


def test_a_checkpoint_that_a_job_replaces_meanwhile(model: Callable[[str], Path]) -> None:
    """A job that went back saves a step again: a conversion would have tensors of both."""
    folder = model("llama")
    top, seen = folder.parent, list[str]()
    run(folder, top / "save", "hf", "core")
    shutil.copytree(top / "save", top / "again")
    other_version(top / "again" / "iter_0000001")

    def replace(*_progress: object) -> None:
        seen.append("a tensor")
        if len(seen) == 2:
            (top / "save" / "iter_0000001").rename(top / "aside")
            (top / "again" / "iter_0000001").rename(top / "save" / "iter_0000001")

    with pytest.raises(ConfigError, match="iter_0000001 was replaced or removed while it was read"):
        conversion.convert(top / "save", "megatron", top / "x", conversion.Wish("torch_dist"), replace)
    assert len(seen) == 2
    assert not (top / "x").exists()


@pytest.mark.parametrize("moved", range(5))
def test_what_is_interrupted_while_files_get_their_names(
    moved: int, model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves no model, because the weights come last; an error leaves what was there before."""
    folder = model("llama")
    (folder / "tokenizer.json").write_text("{}")
    save, replaced = folder.parent / "x", []
    (save / "partial").mkdir(parents=True)
    (save / "partial" / "mine").write_text("kept")
    seen: list[list[str]] = []

    def replace(source: Path, target: Path) -> None:
        seen.append(sorted(path.name for path in save.glob("*.*")))
        if len(replaced) == moved:
            raise OSError(errno.EIO, "Input/output error")
        replaced.append(target.name)
        source.rename(target)

    monkeypatch.setattr("spare_megatron.checkpoint.convert.hugging_face.os.replace", replace)
    words = [
        *("--model-type", "GPT", "--loader", "hf", "--saver", "hf"),
        "--load-dir",
        str(folder),
        "--save-dir",
        str(save),
    ]
    assert convert.main(words) == (2 if moved < 4 else 0)
    assert not any("model.safetensors" in names for names in seen)
    assert (save / "partial" / "mine").read_text() == "kept"
    found = {path.name for path in save.iterdir()} - {"partial"}
    whole = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert found == (whole if moved == 4 else set())


@pytest.mark.parametrize("name", ["config.json", "tokenizer.model", "model-00001-of-00002.safetensors"])
def test_a_directory_with_a_model_stays_as_it_is(name: str, model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    save = folder.parent / "x"
    save.mkdir()
    (save / name).write_text("mine")
    words = [
        *("--model-type", "GPT", "--loader", "hf", "--saver", "hf"),
        "--load-dir",
        str(folder),
        "--save-dir",
        str(save),
    ]
    assert convert.main(words) == 2
    assert f"already has {name}; give an empty directory" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in save.iterdir()] == [(name, "mine")]


def test_the_checkpoints_of_a_job_stay_as_they_are(model: Callable[[str], Path], capsys: Capture) -> None:
    folder = model("llama")
    save = folder.parent / "x"
    accepted = save / "partial" / "iter_0000020.group0-incarnation0-epoch1"
    accepted.mkdir(parents=True)
    (save / "partial" / f"{accepted.name}.accepted").touch()
    run(folder, save, "hf", "core")
    assert accepted.is_dir()
    (save / "iter_0000001").rename(save / "iter_0000010")
    (save / "latest_checkpointed_iteration.txt").write_text("10")
    words = ["--model-type", "GPT", "--loader", "hf", "--load-dir", str(folder), "--save-dir", str(save), "--saver"]
    capsys.readouterr()
    for saver in ("core", "legacy"):
        assert convert.main([*words, saver]) == 2
        assert "has a checkpoint of step 10, and Megatron's tools would take this one" in capsys.readouterr().err
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert convert.main([*words[:3], "core", *words[4:5], str(save), "--save-dir", f"{save}-hf", "--saver", "hf"]) == 0
    assert f"torch_dist in {save}/iter_0000010 -> hf: wrote" in capsys.readouterr().out
