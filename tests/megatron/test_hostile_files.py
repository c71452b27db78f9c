"""A file of a stranger is looked at and runs nothing: each kind of file, by each command that reads it.

Every file holds what makes a directory, the marker, when it is unpickled, imported or constructed. Nobody may have made
it, and who refuses the file says so in one sentence.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from spare_megatron.checkpoint.files import entries_of
from spare_megatron.checkpoint.folder import TRACKER, iteration_name, write_manifest
from spare_megatron.checkpoint.saved_args import read_args
from spare_megatron.cli import checkpoint, convert
from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint.manifest_version import MANIFEST
from tests.megatron.hugging_face_models import make
from tests.megatron.test_damage import FLAGS, replica
from tests.process.harness import launch

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

STEP = 2


class Strange:
    """Whoever unpickles it makes the directory ``marker``."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of this framework, which no test changes."""
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint

    directory = tmp_path_factory.mktemp("hostile") / "save" / iteration_name(STEP)
    with replica() as made:
        group_checkpoint.save(directory, made, step=STEP, consumed_samples=2 * STEP, args=vars(_args()))
    write_manifest(directory, entries_of(directory))
    (directory.parent / TRACKER).write_text(str(STEP))
    return directory


def _args() -> Any:
    from spare_megatron.worker.job_arguments import parse_job

    args = parse_job(FLAGS)[1]
    args.padded_vocab_size = 128
    return args


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint in a --save directory of its own."""
    return Path(shutil.copytree(saved.parent, tmp_path / "save")) / saved.name


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "MARKER"
    yield path
    assert not path.exists(), "the file ran what it names"


def plant(directory: Path, name: str, content: Any) -> None:
    """Put ``content`` in the place of a file of the checkpoint, with a manifest that fits."""
    if name == ".metadata":
        (directory / name).write_bytes(pickle.dumps(content))
    else:
        torch.save(content, directory / name)
    (directory / MANIFEST).unlink(missing_ok=True)
    write_manifest(directory, entries_of(directory))


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> None:
    reported = capsys.readouterr().err
    assert code == 2, reported
    assert reported.count("\n") == 1, reported
    assert all(word in reported for word in ("is refused", *words)), reported


COMMANDS: dict[str, Callable[[Path], int]] = {
    "inspect": lambda one: checkpoint.main(["inspect", str(one)]),
    "inspect --json": lambda one: checkpoint.main(["inspect", str(one.parent), "--json"]),
    "digest": lambda one: checkpoint.main(["digest", str(one)]),
    "to hf": lambda one: _convert(one.parent, "core", "hf"),
    "to core": lambda one: _convert(one, "megatron", "core"),
    "to legacy": lambda one: _convert(one.parent, "torch_dist", "legacy"),
}


def _convert(load: Path, loader: str, saver: str) -> int:
    paths = ("--load-dir", str(load), "--save-dir", str(load.parent / "converted"))
    return convert.main(["--model-type", "GPT", "--loader", loader, "--saver", saver, *paths])


def test_the_commands_read_the_honest_file(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in COMMANDS.items():
        shutil.rmtree(directory.parent / "converted", ignore_errors=True)
        shutil.rmtree(directory.parent.parent / "converted", ignore_errors=True)
        assert command(directory) == 0, (name, capsys.readouterr().err)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("where", ["at the top", "beside the tensors"])
def test_metadata(directory: Path, marker: Path, where: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    content: Any = Strange(marker)
    if where == "beside the tensors":
        content = pickle.loads((directory / ".metadata").read_bytes())
        content.planner_data = Strange(marker)
    plant(directory, ".metadata", content)
    refused(capsys, COMMANDS[command](directory), ".metadata", "posix.mkdir", "use")


@pytest.mark.parametrize("command", [one for one in COMMANDS if one != "digest"])
def test_common(directory: Path, marker: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    plant(directory, "common.pt", {"iteration": STEP, "args": Strange(marker)})
    refused(capsys, COMMANDS[command](directory), "common.pt", "posix.mkdir", "use")


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_load_in_training(directory: Path, marker: Path, name: str) -> None:
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint

    plant(directory, name, Strange(marker))
    with replica() as made, pytest.raises(ConfigError, match=rf"{name} is refused: it names posix\.mkdir.*do not use"):
        group_checkpoint.load(directory, made)


@pytest.mark.parametrize("environment", [{}, {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}])
def test_an_object_beside_the_tensors(
    tmp_path: Path, marker: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's planner unpickles those without any check."""
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint

    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with replica() as made:
        group_checkpoint.save(tmp_path / "new", made, step=1, consumed_samples=2, rank_state={"a": Strange(marker)})
        if marker.exists():  # a copy in memory was made by the same way
            marker.rmdir()
        with pytest.raises(ConfigError, match=r"an object of the checkpoint is refused: it names posix\.mkdir"):
            group_checkpoint.load(tmp_path / "new", made)


def test_the_states_of_transformer_engine(marker: Path, tmp_path: Path) -> None:
    """transformer-engine, and megatron-core up to 0.17, unpickle these bytes themselves."""
    from spare_megatron.megatron_adapter.checkpoint.restricted_pickle import ForbiddenPickleError
    from spare_megatron.megatron_adapter.checkpoint.safe_loading import check_extra_states

    def state(value: Any) -> dict[str, Any]:
        return {"layer._extra_state": torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)}

    check_extra_states(state({"scale_fwd": torch.ones(3), "extra": {"n": 1}}), tmp_path)
    with pytest.raises(ForbiddenPickleError, match=r"layer\._extra_state is refused: it names posix\.mkdir"):
        check_extra_states(state({"scale_fwd": Strange(marker)}), tmp_path)


def test_a_pickle_that_changes_a_class_is_refused_and_the_class_is_as_before(directory: Path) -> None:
    """Setting attributes needs no forbidden name: BUILD does it with any object, a class as well."""
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    from spare_megatron.megatron_adapter.checkpoint.restricted_pickle import ForbiddenPickleError
    from spare_megatron.megatron_adapter.checkpoint.safe_loading import read_metadata

    module = "torch.distributed.checkpoint.metadata"
    before = dict(vars(StorageMeta))
    (directory / ".metadata").write_bytes(
        f"c{module}\nStorageMeta\n(NS'modules'\nc{module}\nMetadata\n".encode().replace(b"(NS", b"(N(S") + b"dtb."
    )
    with pytest.raises(ForbiddenPickleError, match="it changes the class StorageMeta"):
        read_metadata(directory)
    assert dict(vars(StorageMeta)) == before
    assert vars(StorageMeta).get("modules") is not Metadata


def test_a_file_outside_of_the_checkpoint_is_not_opened(directory: Path) -> None:
    from spare_megatron.megatron_adapter.checkpoint.digest import digest

    metadata = pickle.loads((directory / ".metadata").read_bytes())
    first = next(iter(metadata.storage_data.values()))
    first.relative_path = "../../secret"
    plant(directory, ".metadata", metadata)
    with pytest.raises(ConfigError, match=r"it names \.\./\.\./secret, a file outside of the checkpoint"):
        digest(directory)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_flags_are_taken_without_running_them(directory: Path, marker: Path, name: str) -> None:
    """--use-checkpoint-args, which reads the file before a job imports torch."""
    (directory / MANIFEST).unlink()
    if name == ".metadata":
        (directory / "common.pt").unlink()
        (directory / name).write_bytes(pickle.dumps(Strange(marker)))
        with pytest.raises(ConfigError, match=r"\.metadata cannot be read"):
            read_args(directory)
    else:
        torch.save({"args": Strange(marker)}, directory / name)
        assert read_args(directory) == {}


@pytest.mark.parametrize("saver", ["core", "hf", "legacy"])
def test_a_rank_of_the_older_format(
    directory: Path, marker: Path, saver: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _convert(directory.parent, "core", "legacy") == 0
    capsys.readouterr()
    old = directory.parent.parent / "converted"
    (file,) = old.glob("iter_*/mp_rank_00/model_optim_rng.pt")
    torch.save({**torch.load(file, weights_only=False), "rng_state": Strange(marker)}, file)
    refused(capsys, _convert(old, "legacy", saver), str(file), "posix.mkdir", "give")


@pytest.mark.parametrize("saver", ["core", "legacy"])
def test_a_model_of_hugging_face(tmp_path: Path, marker: Path, saver: str, capsys: pytest.CaptureFixture[str]) -> None:
    make("llama", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Strange(marker)}, tmp_path / "hf" / "pytorch_model.bin")
    capsys.readouterr()
    refused(capsys, _convert(tmp_path / "hf", "hf", saver), "pytorch_model.bin", "posix.mkdir", "use")


def test_cached_index_maps(tmp_path: Path, marker: Path) -> None:
    from spare_megatron.megatron_adapter.data import datasets
    from spare_megatron.megatron_adapter.data.tokenizers import build_tokenizer

    writer = datasets.IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=numpy.int32)
    for _ in range(40):
        writer.add_document(torch.arange(30), [30])
    writer.finalize(str(tmp_path / "text.idx"))
    data = datasets.IndexedDataset(str(tmp_path / "text"))
    tokenizer = build_tokenizer(_args())

    def build() -> Any:
        settings = datasets.GPTDatasetConfig(
            random_seed=1,
            sequence_length=8,
            path_to_cache=str(tmp_path / "cache"),
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        return datasets.GPTDataset(data, str(tmp_path / "text"), numpy.arange(40), 20, datasets.Split.train, settings)

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        build()
        files = sorted((tmp_path / "cache").rglob("*.npy"))
        assert len(files) >= 3
        build()
        for file in files:
            honest = file.read_bytes()
            for other in (pickle.dumps(Strange(marker)), honest[:-1], b""):
                file.write_bytes(other)
                with pytest.raises(ConfigError, match=rf"{file} is no array of numbers.*remove it"):
                    build()
            file.write_bytes(honest)
    finally:
        torch.distributed.destroy_process_group()


def test_files_of_a_tokenizer(tmp_path: Path, marker: Path) -> None:
    from spare_megatron.megatron_adapter.data.tokenizers import build_tokenizer

    (tmp_path / "strange.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Strange: pass\n")
    maps = {"AutoTokenizer": ["strange.Strange", "strange.Strange"], "AutoConfig": "strange.Strange"}
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text(json.dumps({"auto_map": maps, "tokenizer_class": "Strange"}))
    args = _args()
    args.tokenizer_type, args.tokenizer_model, args.vocab_size = "HuggingFaceTokenizer", str(tmp_path), None
    with pytest.raises(ConfigError, match=r"HuggingFaceTokenizer cannot be built: .* contains custom code"):
        build_tokenizer(args)


def test_yaml(tmp_path: Path, marker: Path) -> None:
    from spare_megatron.worker.job_arguments import parse_job

    (tmp_path / "flags.yaml").write_text(f"num_layers: !!python/object/apply:os.mkdir ['{marker}']\n")
    with pytest.raises(ConfigError, match=r"flags\.yaml"):
        parse_job([*FLAGS, "--yaml-cfg", str(tmp_path / "flags.yaml")])


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_job_does_not_start_from_it(directory: Path, marker: Path, tmp_path: Path, name: str) -> None:
    content: Any = {"iteration": STEP, "args": Strange(marker)} if name == "common.pt" else Strange(marker)
    plant(directory, name, content)
    shape: dict[str, Any] = {"groups": 1, "group_size": None}
    job = launch(tmp_path / "run", *FLAGS, "--load", str(directory.parent), **shape, script="pretrain_gpt.py")
    assert job.process.wait(timeout=110) == 2
    reported = (job.run_dir / "launch.out").read_text() + (job.run_dir / "logs/group-0/rank-0.log").read_text()
    assert f"{name} is refused: it names posix.mkdir" in reported
    assert "Traceback" not in reported
