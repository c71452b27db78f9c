"""Flags of Megatron-LM that this framework does not honour, each with the reason and the nearest choice.

A flag is never ignored: it is honoured, refused here, or listed in :mod:`no_effect` with the reason why it changes
nothing. A test checks that every flag of ``megatron_lm.json`` is exactly one of the three. Flags that are refused
whatever their value are listed in :mod:`refused_flags`; here are values of honoured flags.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from spare_megatron.flags.no_effect import taken
from spare_megatron.flags.refused_flags import FLAGS, GROUPS
from spare_megatron.flags.specs import SECTIONS, megatron_table, specs_of
from spare_megatron.megatron_adapter.model.settings import REFUSED_BALANCING

# (destination, value) -> (reason, nearest choice)
VALUES: dict[tuple[str, object], tuple[str, str]] = {
    ("optimizer", "adaptive_muon"): (
        "its first step fails in megatron-core itself, which builds it without the scale that emerging-optimizers 0.3 "
        "looks for",
        "use --optimizer muon or soap",
    ),
    ("muon_fp32_matmul_prec", "low"): ("torch knows no such precision", "use medium or high"),
    ("dataloader_type", "external"): (
        "a shard's samples must be found again after a failure, which needs a data set with an index",
        "use --dataloader-type single or cyclic",
    ),
    ("transformer_impl", "inference_optimized"): ("inference is not part of this framework", "use local"),
    **{("moe_router_load_balancing_type", kind): why for kind, why in REFUSED_BALANCING.items()},
    ("experimental_attention_variant", "dsa"): (
        "sparse attention needs its indexer's loss in the schedule and a run on GPUs that shows it right",
        "use gated_delta_net",
    ),
    ("position_embedding_type", "mrope"): ("only language models are trained here", "use rope"),
    ("position_embedding_type", "relative"): ("only decoder-only language models are trained here", "use rope"),
    ("rerun_mode", "report_stats"): (
        "a suspicious step is not computed again in this version",
        "leave it out or use disabled",
    ),
    ("dist_ckpt_strictness", "return_unexpected"): ("nobody would read what is returned", "use log_unexpected"),
    ("dist_ckpt_strictness", "return_all"): ("nobody would read what is returned", "use log_all"),
    ("tokenizer_type", "BertWordPieceLowerCase"): ("only decoder-only language models are trained here", "use another"),
    ("tokenizer_type", "BertWordPieceCase"): ("only decoder-only language models are trained here", "use another"),
    ("tokenizer_type", "MultimodalTokenizer"): ("only language models are trained here", "use HuggingFaceTokenizer"),
    ("tokenizer_type", "NullMultimodalTokenizer"): ("only language models are trained here", "use NullTokenizer"),
    ("tokenizer_type", "SFTTokenizer"): ("supervised fine-tuning is not supported", "use HuggingFaceTokenizer"),
}


@dataclass(frozen=True)
class Refusal:
    """Why a flag is refused, and the nearest choice ('' where there is none)."""

    reason: str
    instead: str

    def sentence(self, *reported: str) -> str:
        """The sentence that a user sees. ``reported`` are the refused flags, with a value where only that is
        refused."""
        verb = "is" if len(reported) == 1 else "are"
        return f"{' and '.join(reported)} {verb} not supported: {self.reason}" + (
            f"; {self.instead}" if self.instead else ""
        )


LINES_MAX = 10


def all_sentences(given: Sequence[tuple[str, Refusal]], lines_max: int = LINES_MAX) -> str:
    """One line for each reason, with all given flags that it refuses, so that a user sees all of them at once; beyond
    ``lines_max`` lines only the flags."""
    by_reason: dict[Refusal, list[str]] = {}
    for reported, refusal in given:
        by_reason.setdefault(refusal, [])
        if reported not in by_reason[refusal]:
            by_reason[refusal].append(reported)
    lines = [refusal.sentence(*reported) for refusal, reported in by_reason.items()]
    left = [word for reported in list(by_reason.values())[lines_max:] for word in reported]
    return "\n".join(lines[:lines_max] + ([f"and {' '.join(left)} are not supported either"] if left else []))


@functools.cache
def refused_names() -> dict[str, Refusal]:
    """Name of each refused flag -> its refusal."""
    ours = {name for section, (_, cls) in SECTIONS.items() for spec in specs_of(section, cls) for name in spec.names}
    refused = {name: Refusal(reason, instead) for reason, instead, names in FLAGS for name in names.split()}
    for row in megatron_table().values():
        for name in row["names"]:
            if row["group"] in GROUPS and name not in ours and name not in taken():
                refused.setdefault(name, Refusal(*GROUPS[row["group"]]))
    return refused
