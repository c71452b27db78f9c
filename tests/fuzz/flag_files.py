"""Files of settings with wrong bytes: --yaml-cfg, --data-args-path, --per-split-data-args-path. What is taken must be
what the file's own library reads."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags.blends import blends
from tests.fuzz import EDITS, Edit, edited
from tests.pure.flags_of_a_job import job_of

SETTINGS = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "lr": 0.001,
    "swiglu": True,
    "split": "99,1,0",
    "rampup_batch_size": [4, 4, 40],
    "global_batch_size": 16,
    "activation_func": "swiglu",
    "lr_warmup_iters": 2,
    "data_path": ["0.5", "a", "0.5", "b"],
}
OF_THE_FILE = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings")
"""Flags that the job's words leave out: those on the command line override the file's."""
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(-9, 9), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
YAML = st.builds(
    lambda name, value: yaml.safe_dump(SETTINGS | {name: value}).encode(),
    st.sampled_from(sorted(SETTINGS)) | st.text(max_size=6),
    VALUES,
)
SPLITS = st.builds(
    lambda name, value: json.dumps({"train": [0.5, "a", 0.5, "b"], "valid": "c", name: value}).encode(),
    st.sampled_from(["train", "valid", "test", "more"]),
    VALUES,
)
WORDS = st.lists(
    st.sampled_from(["0.5", "a", "b", "0", "nan", "-1", "inf", "1e308", "1e309", "0x1", "1_0", "\u0661"]), max_size=6
).map(lambda words: " ".join(words).encode())
CASES = st.one_of(
    st.tuples(st.just("--yaml-cfg"), YAML, EDITS),
    st.tuples(st.just("--per-split-data-args-path"), SPLITS, EDITS),
    st.tuples(st.just("--data-args-path"), WORDS, EDITS),
)


def plain_settings(content: Any) -> dict[str, Any]:
    """The whole numbers of a mapping, with those of the mappings in it, by name; the last of two."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            found |= plain_settings(value)
        elif type(value) is int:
            found[str(name)] = value
        else:
            found.pop(str(name), None)
    return found


def examine(folder: Path, case: tuple[str, bytes, list[Edit]]) -> None:
    flag, raw, edits = case
    path = folder / "file"
    path.write_bytes(edited(raw, edits))
    args, reported = None, ""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _, args = job_of(f"{flag} {path}", drop=("--mock-data", *(OF_THE_FILE if flag == "--yaml-cfg" else ())))
    except ConfigError as error:
        reported = str(error)
    assert "\n" not in reported, reported
    if args is None:
        assert reported
        return
    if flag != "--yaml-cfg":
        named, per_split = blends(args)
        for prefixes, weights in filter(None, (named, *(per_split or []))):
            assert prefixes
            assert weights is None or all(0 < weight < float("inf") for weight in weights)
        return
    wanted = plain_settings(yaml.safe_load(path.read_text()))
    for name in ("num_layers", "hidden_size", "seq_length", "lr_warmup_iters"):
        if name in wanted:
            assert getattr(args, name) == wanted[name], name
