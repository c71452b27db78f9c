"""spare-convert converts checkpoints between formats, with the command line of Megatron's tool."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from spare_megatron.checkpoint.convert.hf_values import DEFAULTS
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.flags import flag_name
from spare_megatron.config.version_flag import add_version

if TYPE_CHECKING:
    from spare_megatron.checkpoint.convert.conversion import Wish
    from spare_megatron.checkpoint.convert.model import Entry

PROGRAM = "spare-convert"
EXAMPLE = """examples:
  spare-convert --model-type GPT --loader hf --saver core \\
    --load-dir Llama-3.2-1B --save-dir llama \\
    --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2
  spare-convert --model-type GPT --loader core --saver hf --load-dir checkpoints --save-dir out
Then train with pretrain_gpt.py --load llama --finetune --use-checkpoint-args, or with the flags in
llama/model_flags.txt. Weights are converted, optimizer state is not. A checkpoint of this framework
loads under any layout without a conversion."""
LOADERS = {
    **dict.fromkeys(("hf", "llama_mistral", "mixtral_hf"), "hf"),
    **dict.fromkeys(("core", "mcore", "torch_dist", "legacy", "megatron", "mp_rank"), "megatron"),
}
SAVERS = {
    **dict.fromkeys(("core", "mcore", "torch_dist"), "torch_dist"),
    **dict.fromkeys(("legacy", "megatron", "mp_rank"), "mp_rank"),
    "hf": "hf",
}


def _listed(kinds: Iterable[str]) -> str:
    return ", ".join(sorted(kinds))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')} (see --help)")


def parser() -> argparse.ArgumentParser:
    """The command line: Megatron's flags, and a few of our own."""
    made = _Parser(
        prog=PROGRAM,
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(made)
    add = made.add_argument
    add("--model-type", required=True, choices=("GPT", "BERT"), help="GPT stands for every decoder")
    add("--loader", default="megatron", choices=sorted(LOADERS), metavar="KIND", help=f"{_listed(LOADERS)}: hf, "
        "llama_mistral and mixtral_hf read a Hugging Face model; all others read a Megatron checkpoint, torch_dist or "
        "mp_rank_XX")  # fmt: skip
    add("--saver", default="megatron", choices=sorted(SAVERS), help="core writes torch_dist, which this framework "
        "loads; legacy writes mp_rank_XX directories; hf writes safetensors")  # fmt: skip
    add("--load-dir", required=True, type=Path, help="directory to read")
    add("--save-dir", required=True, type=Path, help="directory to write")
    add("--target-tensor-parallel-size", type=int, metavar="N", help="default: that of the checkpoint")
    add("--target-pipeline-parallel-size", type=int, metavar="N", help="default: that of the checkpoint")
    add("--target-expert-parallel-size", type=int, metavar="N", help="default: 1")
    add("--saver-transformer-impl", default="transformer_engine", choices=("local", "transformer_engine"),
        help="implementation whose names of norms mp_rank files get")  # fmt: skip
    add("--true-vocab-size", type=int, metavar="N", help="number of ids of the tokenizer; other rows are padding")
    add("--vocab-file", type=Path, help="JSON vocabulary whose length is --true-vocab-size")
    add("--make-vocab-size-divisible-by", type=int, metavar="N", help="pad the vocabulary to a multiple of this x TP")
    add("--tokenizer-model", type=Path, help="tokenizer to name in the args of the written checkpoint")
    add("--bf16", action="store_true", help="convert the weights to bfloat16")
    add("--fp16", action="store_true", help="convert the weights to float16")
    add("--hf-model", choices=tuple(DEFAULTS), metavar="KIND", help=f"{_listed(DEFAULTS)}: kind of model that "
        "saver hf writes, where the weights fit several kinds")  # fmt: skip
    add("--checkpoint-type", choices=("hf", "meta"), help="a flag of Megatron's llama_mistral loader; only hf works")
    same = "accepted because scripts give it; the value is found in the checkpoint"
    add("--model-size", help=same)
    add("--position-embedding-type", choices=("learned_absolute", "rope"), help=same)
    add("--loader-transformer-impl", choices=("local", "transformer_engine"), help=same)
    add("--megatron-path", help="accepted because scripts give it; Megatron-LM is not needed")
    add("--max-queue-size", type=int, help="accepted because scripts give it; there is no queue")
    add("--no-checking", action="store_true", help="accepted because scripts give it; shapes are always checked")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns exit code 0, or 2 after one sentence that says what is wrong."""
    try:
        options = parser().parse_args(argv)
        wish = _wish(options)
        from spare_megatron.checkpoint.convert.conversion import convert

        sentence = convert(options.load_dir, LOADERS[options.loader], options.save_dir, wish, _Progress().announce)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return int(ExitCode.BAD_INPUT)
    sys.stdout.write(sentence + "\n")
    return 0


def _wish(options: argparse.Namespace) -> Wish:
    if options.model_type != "GPT":
        raise ConfigError("--model-type BERT is not supported: only decoders are trained here; use GPT")
    if options.checkpoint_type == "meta":
        raise ConfigError(
            "--checkpoint-type meta is not supported: Meta's files have another format; use Hugging Face's"
        )
    if options.bf16 and options.fp16:
        raise ConfigError("--bf16 and --fp16 are different types; give one of them")
    for name in ("target_tensor", "target_pipeline", "target_expert"):
        value = getattr(options, f"{name}_parallel_size")
        if value is not None and value < 1:
            raise ConfigError(f"{flag_name(name)}-parallel-size is {value}, but must be at least 1")
    for name in ("true_vocab_size", "make_vocab_size_divisible_by"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{flag_name(name)} is {value}, but must be at least 1")
    import torch

    from spare_megatron.checkpoint.convert.conversion import Wish
    from spare_megatron.checkpoint.convert.layout import Layout

    given = (options.target_tensor_parallel_size, options.target_pipeline_parallel_size)
    layout = None
    if any((*given, options.target_expert_parallel_size)):
        layout = Layout(given[0] or 1, given[1] or 1, options.target_expert_parallel_size or 1)
    return Wish(
        saver=SAVERS[options.saver],
        layout=layout,
        implementation=options.saver_transformer_impl,
        dtype=torch.bfloat16 if options.bf16 else torch.float16 if options.fp16 else None,
        vocab_size=options.true_vocab_size or _vocabulary(options.vocab_file),
        divisible_by=options.make_vocab_size_divisible_by,
        hf_kind=options.hf_model,
        tokenizer_model=options.tokenizer_model,
    )


def _vocabulary(path: Path | None) -> int | None:
    if path is None:
        return None
    import json

    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--vocab-file {path} cannot be read ({error}); give a JSON vocabulary") from None
    if not isinstance(found, dict | list) or not found:
        raise ConfigError(f"--vocab-file {path} holds no words; give a JSON vocabulary")
    return len(found)


class _Progress:
    """Prints a line for each layer, with the bytes done and the rate."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._layer: int | None = -1

    def announce(self, entry: Entry, done: int, total: int) -> None:
        if entry.layer == self._layer and done < total:
            return
        self._layer = entry.layer
        what = entry.name if entry.layer is None else f"layer {entry.layer}"
        rate = done / max(time.monotonic() - self._start, 1e-9)
        sys.stderr.write(f"{what}: {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB, {rate / 2**20:,.0f} MiB/s\n")


if __name__ == "__main__":
    sys.exit(main())
