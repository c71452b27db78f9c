"""The flags of the optimizers: what they become, what else a job says of them, what it needs, and what is refused."""

from __future__ import annotations

from argparse import Namespace

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags import check
from spare_megatron.flags.optimizer_flags import PACKAGE
from tests.pure.flags_of_a_job import job_of, launched

INNER = "--num-experts 2 --disable-bias-linear --expert-model-parallel-size 2 --use-distributed-optimizer"


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages and versions that are missing here do not count."""
    monkeypatch.setattr(check, "check_machine", lambda _: None)


@pytest.mark.usefixtures("reported")
def test_dist_muon_is_muon_and_older_flags_are_newer_ones() -> None:
    job, namespace = job_of("--optimizer dist_muon --muon-use-nesterov")
    assert (namespace.optimizer, namespace.muon_nesterov, namespace.muon_use_nesterov) == ("muon", True, False)
    assert "--optimizer dist_muon: each rank of a group updates all of its weights, as with muon" in job.notes


@pytest.mark.usefixtures("reported")
def test_only_adams_kind_of_state_is_divided() -> None:
    for optimizer, divided in (("adam", True), ("ademamix", True), ("muon", False), ("lion", False), ("soap", False)):
        job, namespace = job_of(f"{INNER} --optimizer {optimizer}")
        assert (job.shape.inner_data, namespace.use_distributed_optimizer) == (2, divided)
        [note] = [one for one in job.notes if one.startswith("--use-distributed-optimizer")]
        assert ("divided over its 2 inner ranks" if divided else f"--optimizer {optimizer} is whole on each") in note
    with pytest.raises(ConfigError, match="not that of --optimizer sgd; use --optimizer adam or leave the flag out"):
        job_of(f"{INNER} --optimizer sgd")


@pytest.mark.usefixtures("reported")
def test_the_coefficients_that_megatron_core_gives_lion_are_said() -> None:
    assert not [note for note in job_of("--optimizer lion")[0].notes if "lion" in note]
    [note] = job_of("--optimizer lion --lion-beta1 0.9")[0].notes
    assert "--optimizer lion has --adam-beta1 and --adam-beta2" in note
    assert not job_of("--optimizer muon --muon-scalar-optimizer lion --lion-beta1 0.9")[0].notes


def test_ademamix_is_settings_of_its_own() -> None:
    job, _ = job_of("--optimizer ademamix --ademamix-alpha 8 --ademamix-beta3-warmup 1000 --adam-beta2 0.99")
    assert job.settings(128).ademamix == {
        "ademamix_alpha": 8.0,
        "ademamix_beta3": 0.9999,
        "ademamix_alpha_warmup": None,
        "ademamix_beta3_warmup": 1000,
    }
    assert job.optimizer["adam_beta2"] == 0.99
    job, _ = job_of("--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style 1-sqrt")
    assert job.scheduler["lr_wsd_decay_style"] == "minus_sqrt"
    assert job_of()[0].settings(128).ademamix is None


def needs_of(words: str) -> dict[str, str]:
    """What is needed -> what to do instead, of those needs that have to do with optimizers."""
    namespaces: list[Namespace] = []

    def keep(namespace: Namespace, *_: object) -> str:
        namespaces.append(namespace)
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "report", keep)
        with pytest.raises(SystemExit):
            job_of(f"--spare-check {words}", launched(2))
    return {need.what: need.fix for need in check.needs(namespaces[0]) if "optimizer" in need.why}


def test_a_package_and_a_version_that_an_optimizer_needs_are_named() -> None:
    for optimizer in ("muon", "lion", "soap"):
        assert needs_of(f"--optimizer {optimizer}") == {
            "megatron-core 0.18 or later": "install it (it needs Python 3.12), or use --optimizer adam",
            PACKAGE: f"pip install {PACKAGE}, or use --optimizer adam",
        }
    assert needs_of("--optimizer ademamix") == {}


@pytest.mark.usefixtures("reported")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--optimizer muon --fp16", "--optimizer muon does not go with --fp16 in megatron-core; use --bf16"),
        ("--optimizer muon --muon-coefficient-type cubic", "'cubic', but emerging-optimizers knows simple, quintic"),
        ("--optimizer muon --muon-num-ns-steps 0", "--muon-num-ns-steps is 0, but must be at least 1"),
        ("--muon-fp32-matmul-prec low", "--muon-fp32-matmul-prec low is not supported: .*; use medium or high"),
        ("--optimizer ademamix --ademamix-beta3 1.0", r"--ademamix-beta3 is 1\.0, but must be in 0 <= x < 1"),
        ("--optimizer ademamix --ademamix-alpha -1", r"--ademamix-alpha is -1\.0, but must be at least 0"),
        ("--ademamix-alpha-warmup -5", "--ademamix-alpha-warmup is -5, but must be at least 0"),
    ],
)
def test_what_has_no_good_value_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        job_of(words)


def test_a_job_with_muon_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.core_versions, "installed", lambda: (0, 17))
    with pytest.raises(ConfigError, match=r"--optimizer muon needs megatron-core 0\.18 or later, .*; install it"):
        job_of("--optimizer muon")
    monkeypatch.setattr(check.core_versions, "installed", lambda: (0, 19))
    monkeypatch.setattr(check, "has_package", lambda name: lambda: name != PACKAGE.replace("-", "_"))
    with pytest.raises(ConfigError, match=f"--optimizer muon needs {PACKAGE}, .*; pip install {PACKAGE}"):
        job_of("--optimizer muon")
