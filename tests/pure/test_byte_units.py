"""Amounts of bytes as users write and read them."""

from __future__ import annotations

import pytest

from spare_megatron.config.byte_units import in_bytes, rate_of
from spare_megatron.config.errors import ConfigError
from tests.pure.flags_of_a_job import job_of


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("500MB", 5e8),
        ("4Gb", 5e8),
        ("4Gb/s", 5e8),
        (" 1.5 GiB/s ", 1.5 * 2**30),
        ("1B", 1.0),
        ("8b", 1.0),
        ("20kB", 2e4),
        ("2TB", 2e12),
        ("3Kib", 384.0),
    ],
)
def test_a_rate(text: str, rate: float) -> None:
    assert rate_of("--spare-transfer-rate", text) == rate


@pytest.mark.parametrize(
    "text", ["500", "", "MB", "0MB", "0.0001B", "-1MB", "1mB", "1KB", "nanB", "infGB", "1e3B", "1MB/h"]
)
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        rate_of("--flag", text)
    assert str(refused.value).startswith(
        f"--flag is {text!r}, but takes bytes (B) or bits (b) a second, at least 1B, as"
    )


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (1.25e9, "1.25 GB"),
        (8e10, "80 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_an_amount(amount: float, text: str) -> None:
    assert in_bytes(amount) == text


def test_the_flag_of_a_job() -> None:
    assert job_of()[0].transfer_rate_bytes_s == 0.0
    assert job_of("--spare-transfer-rate 80Mb")[0].transfer_rate_bytes_s == 1e7
    with pytest.raises(ConfigError, match="--spare-transfer-rate is '80', but takes bytes"):
        job_of("--spare-transfer-rate 80")
