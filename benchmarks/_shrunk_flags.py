"""Makes a published configuration small by the rules of ``_shrinking_rules.py``, and says what was done to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks._shrinking_rules import ADDED, LAYERS, LAYOUT, RULES, Rule, Values
from spare_megatron.flags.check import ENGINE_MODULES

GROUPS, GROUP_MAX = 2, 4
"""Groups of a job, and the most ranks that each has."""


@dataclass
class Shrunk:
    """A configuration as it is trained, and what was done to it."""

    kept: dict[str, Values] = field(default_factory=dict)
    changed: dict[str, tuple[Values, Values]] = field(default_factory=dict)
    """Flag -> (values there, values here)."""
    dropped: dict[str, Values] = field(default_factory=dict)
    given: Values = ()
    """Words that it gets beside those that every configuration gets."""

    @property
    def words(self) -> list[str]:
        """The command line."""
        now = {**self.kept, **{flag: new for flag, (_, new) in self.changed.items()}}
        return [word for flag, values in now.items() for word in (flag, *values)] + self.added

    @property
    def added(self) -> list[str]:
        """What it got in addition."""
        no_biases = "--num-experts" in self.kept | self.changed and "--disable-bias-linear" not in self.kept
        return [*ADDED, *(["--disable-bias-linear"] if no_biases else []), *self.given]

    @property
    def layout(self) -> dict[str, int]:
        """Degrees of parallelism."""
        names = {"TP": "tensor-model", "PP": "pipeline-model", "EP": "expert-model"}
        return {short: int(self.value(f"--{name}-parallel-size", "1")) for short, name in names.items()}

    @property
    def inner_data(self) -> int:
        """Data-parallel ranks of a group: as few as the experts allow."""
        tensor, expert = self.layout["TP"], self.layout["EP"]
        expert *= int(self.value("--expert-tensor-parallel-size", str(tensor)))
        return max(1, expert // tensor)

    @property
    def group_size(self) -> int:
        """Ranks of a group."""
        return self.layout["TP"] * self.layout["PP"] * self.inner_data

    def value(self, flag: str, default: str = "") -> str:
        """The value that a flag has now."""
        if flag in self.changed:
            return self.changed[flag][1][0]
        return self.kept[flag][0] if flag in self.kept else default

    def change(self, flag: str, value: int) -> None:
        """Give a flag that is there another value."""
        there = self.kept.pop(flag) if flag in self.kept else self.changed[flag][0]
        self.changed[flag] = (there, (str(value),))

    def drop(self, flag: str) -> None:
        """Take a flag out, if it is there."""
        if flag in self.kept:
            self.dropped[flag] = self.kept.pop(flag)
        if flag in self.changed:
            self.dropped[flag] = self.changed.pop(flag)[0]


def shrink(words: Sequence[str], more: Sequence[Rule] = ()) -> Shrunk:
    """The configuration of a command line, made small by ``RULES``; where ``more`` has a rule for a flag, by that."""
    rules = {flag: rule for rule in (*RULES, *more) for flag in rule.flags}
    shrunk = Shrunk()
    for flag, values in dict(_flags(words)).items():  # of a flag that comes twice the last counts
        new = rules[flag].apply(values) if flag in rules else values
        if new is None:
            shrunk.dropped[flag] = values
        elif new == values:
            shrunk.kept[flag] = values
        else:
            shrunk.changed[flag] = (values, new)
    _fit(shrunk)
    return shrunk


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Values]]:
    starts = [n for n, word in enumerate(words) if word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        flag, equals, value = words[start].partition("=")
        yield flag, (value,) if equals else tuple(words[start + 1 : end])


def _fit(shrunk: Shrunk) -> None:
    """Change what depends on several flags."""
    if shrunk.group_size > GROUP_MAX:
        shrunk.change("--tensor-model-parallel-size", 1)
    if int(shrunk.value("--expert-tensor-parallel-size", "1")) > shrunk.layout["TP"]:
        shrunk.change("--expert-tensor-parallel-size", shrunk.layout["TP"])
    if "--account-for-loss-in-pipeline-split" in shrunk.kept:  # with the embedding, two of the four
        shrunk.change("--num-layers", LAYERS - 2)
    if "--moe-layer-freq" in shrunk.changed and shrunk.value("--num-layers") != str(LAYERS):
        shrunk.change("--num-layers", LAYERS)
    if LAYOUT in shrunk.changed and not shrunk.value("--mtp-num-layers"):
        there, (layout,) = shrunk.changed[LAYOUT]
        shrunk.changed[LAYOUT] = (there, (layout.replace("m", ""),))
    modules = shrunk.kept.get("--recompute-modules", ())
    if set(ENGINE_MODULES) & set(modules):
        left = tuple(module for module in modules if module not in ENGINE_MODULES)
        shrunk.changed["--recompute-modules"] = (shrunk.kept.pop("--recompute-modules"), left or ("core_attn",))
    batch = shrunk.value("--global-batch-size")
    ranks = GROUPS * shrunk.inner_data
    if batch and int(batch) < ranks * int(shrunk.value("--micro-batch-size")):
        shrunk.change("--micro-batch-size", int(batch) // ranks)
