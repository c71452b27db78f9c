"""Configurations of Megatron-LM's functional tests and published recipes, made small for
benchmarks/functional_configs.py."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from benchmarks._shrinking_rules import RULES, STEPS
from benchmarks._shrunk_flags import GROUPS, Shrunk, shrink
from benchmarks._shrunk_recipes import ASKED_FOR, FEATURES, MORE_RULES, drawn_recipes, features_of, shrink_recipe
from benchmarks.functional_configs import FOLDERS, described, judge
from benchmarks.recipes import FOLDER, of_mainline
from spare_megatron.config.errors import ConfigError
from spare_megatron.worker.job_arguments import parse_job
from tests.pure.claim import RESULTS
from tests.pure.functional_sets import functional_sets


@pytest.fixture(scope="module")
def small(answers: dict[str, str]) -> dict[str, Shrunk]:
    """Every GPT and MoE configuration that passes the check, made small."""
    sets = functional_sets()["training"]
    passed = [name for name, reported in answers.items() if not reported and name.startswith(FOLDERS)]
    return {name: shrink(sets[name]) for name in passed}


RECIPES = {path.stem: of_mainline(path.read_text().splitlines())[0] for path in sorted(FOLDER.glob("*.args"))}
REFUSED = ("bert", "gptoss", "paidsv3", "paimoon")
"""Recipes that are refused."""
OF_NEWER_CORES = ("--use-mup needs megatron-core", "--optimizer muon needs ")
"""How the answer begins where megatron-core is older than a configuration needs, or Muon's package is missing."""


@pytest.mark.parametrize("nth", [5, pytest.param(1, marks=pytest.mark.full)], ids=["every fifth", "each"])
def test_every_small_configuration_is_a_job_of_this_machine_or_says_what_it_needs(
    small: dict[str, Shrunk], nth: int
) -> None:
    for name, shrunk in list(small.items())[::nth]:
        try:
            job, _ = parse_job([*shrunk.words, "--spare-reduce", "fp32"], {"SPARE_NUM_GROUPS": str(GROUPS)})
        except ConfigError as error:
            if not str(error).startswith(OF_NEWER_CORES):
                raise
            continue
        assert (job.train_iters, job.shape.group_size) == (STEPS, shrunk.group_size), name


def test_each_flag_is_kept_changed_or_dropped(small: dict[str, Shrunk]) -> None:
    sets = functional_sets()["training"]
    for name, shrunk in small.items():
        fates = Counter([*shrunk.kept, *shrunk.changed, *shrunk.dropped])
        assert fates == Counter({word for word in sets[name] if word.startswith("--")}), name


def test_each_rule_is_of_use_and_no_flag_has_two() -> None:
    flags = Counter(flag for rule in RULES for flag in rule.flags)
    assert max(flags.values()) == 1
    assert flags.keys() <= {word for words in functional_sets()["training"].values() for word in words}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "equal"),
        ({"loss": 4.00001}, "equal"),
        ({"loss": 4.0001}, "losses differ"),
        ({"loss": float("nan")}, "losses differ"),
        ({"lr": 0.2}, "learning rates or skipped steps differ"),
        ({"skipped": 1}, "learning rates or skipped steps differ"),
    ],
)
def test_a_difference_in_one_step_is_notified(change: dict[str, float], verdict: str) -> None:
    plain = [{"loss": loss, "grad_norm": 1.0, "lr": 0.1, "skipped": 0} for loss in (5.0, 4.0)]
    assert judge(plain, [plain[0], {**plain[1], **change}])["verdict"] == verdict


def test_a_reference_that_learns_nothing_is_notified() -> None:
    plain = [{"loss": 5.0, "grad_norm": 1.0, "lr": 0.1, "skipped": 0}] * 2
    assert judge(plain, plain)["verdict"] == "the reference learns nothing"


def test_the_results_are_of_the_rules_that_are_here(small: dict[str, Shrunk]) -> None:
    content = json.loads((RESULTS / "functional_configs.json").read_text())
    for row in content["results"]:
        name = row["configuration"]
        assert row.items() >= described(name, small[name]).items()


@pytest.mark.parametrize("nth", [7, pytest.param(1, marks=pytest.mark.full)], ids=["every seventh", "each"])
def test_every_small_recipe_is_a_job_of_two_ranks_at_most_or_says_what_it_needs(nth: int) -> None:
    for number, name in enumerate([one for one in RECIPES if one not in REFUSED][::nth]):
        shrunk = shrink_recipe(RECIPES[name], random.Random(number))
        try:
            job, _ = parse_job([*shrunk.words, "--spare-reduce", "fp32"], {"SPARE_NUM_GROUPS": str(GROUPS)})
        except ConfigError as error:
            if " needs megatron-core" not in str(error):
                raise
            continue
        assert job.shape.group_size == shrunk.group_size <= 2, name


def test_each_rule_for_recipes_is_of_use_and_no_flag_has_two() -> None:
    flags = Counter(flag for rule in MORE_RULES for flag in rule.flags)
    assert max(flags.values()) == 1
    assert flags.keys() <= {word.partition("=")[0] for words in RECIPES.values() for word in words}


def test_a_seed_draws_the_same_recipes_and_every_feature() -> None:
    accepted = [name for name in RECIPES if name not in REFUSED]
    drawn = drawn_recipes(accepted, 30, 2026)
    assert len(drawn) == 30
    assert {name: one.words for name, one in drawn.items()} == {
        name: one.words for name, one in drawn_recipes(accepted, 30, 2026).items()
    }
    assert {word for one in drawn.values() for word in features_of(one)} == {
        *ASKED_FOR,
        *(feature.name for feature in FEATURES),
    }
    sizes = [one.group_size for one in drawn.values()]
    assert sizes == sorted(sizes)


def test_the_results_of_recipes_are_of_the_rules_that_are_here() -> None:
    content = json.loads((RESULTS / "trained_recipes.json").read_text())
    drawn = drawn_recipes([name for name in RECIPES if name not in REFUSED], 30, content["config"]["seed"])
    for row in content["results"]:
        name = row["configuration"]
        assert row.items() >= described(name, drawn[name]).items()
