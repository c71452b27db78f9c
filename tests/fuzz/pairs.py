"""Pairs of data files with wrong bytes. What passes is read a second time by struct alone, and must hold together."""

from __future__ import annotations

import struct
from pathlib import Path

from hypothesis import strategies as st

from spare_megatron.config.errors import ConfigError
from spare_megatron.data.data_files import HEADER_BYTES, check_data
from tests.fuzz import EDITS, Edit, edited
from tests.pure.test_data_files import flags, write_pair

VOCABULARY = 1000
CODES = {4: ("i", 4), 8: ("H", 2), 1: ("B", 1), 2: ("b", 1), 3: ("h", 2), 5: ("q", 8)}

DOCUMENTS = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6), min_size=1, max_size=6)
CASES = st.tuples(DOCUMENTS, st.sampled_from(["uint16", "int32"]), EDITS, EDITS)


def check_sentence(reported: str, prefix: str, changed: bool) -> None:
    """A refusal is one sentence with the path, and of changed files only."""
    assert "\n" not in reported
    assert prefix in reported
    assert changed, reported


def examine(folder: Path, case: tuple[list[list[int]], str, list[Edit], list[Edit]]) -> None:
    documents, dtype, of_index, of_tokens = case
    prefix = folder / "data"
    write_pair(prefix, documents, dtype)
    for end, edits in ((".idx", of_index), (".bin", of_tokens)):
        path = Path(f"{prefix}{end}")
        path.write_bytes(edited(path.read_bytes(), edits))
    try:
        (file,) = check_data(flags(data_path=[str(prefix)]), VOCABULARY)
    except ConfigError as error:
        check_sentence(str(error), str(prefix), bool(of_index or of_tokens))
        return
    raw, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    version, code, sequences, ends = struct.unpack("<QBQQ", raw[9:HEADER_BYTES])
    kind, width = CODES[code]
    lengths = struct.unpack_from(f"<{sequences}i", raw, HEADER_BYTES)
    offsets = struct.unpack_from(f"<{sequences}q", raw, HEADER_BYTES + 4 * sequences)
    bounds = struct.unpack_from(f"<{ends}q", raw, HEADER_BYTES + 12 * sequences)
    assert version == 1
    assert all(at == width * sum(lengths[:n]) for n, at in enumerate(offsets))
    assert (bounds[0], bounds[-1]) == (0, sequences)
    assert list(bounds) == sorted(bounds)
    ids = struct.unpack(f"<{len(tokens) // width}{kind}", tokens)
    assert (file.sequences, file.tokens) == (sequences, sum(lengths))
    assert len(ids) == sum(lengths)
    assert all(0 <= one < VOCABULARY for one in ids)
    if not of_tokens and not of_index:
        assert [list(ids[sum(lengths[:n]) :][:length]) for n, length in enumerate(lengths)] == documents
