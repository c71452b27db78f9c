"""Names that users import from megatron.training: here under the same path, or refused with what to use."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.training import megatron_exports


@pytest.mark.parametrize("module", ["spare_megatron", "spare_megatron.training"])
def test_exported_names_are_there(module: str) -> None:
    for name in megatron_exports.EXPORTS:
        assert callable(getattr(importlib.import_module(module), name)), name


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("from spare_megatron.training import get_tensorboard_writer", "return your own in the report of the loss"),
        ("from spare_megatron import initialize_megatron", "pretrain() does it"),
        ("from spare_megatron.training.global_vars import get_wandb_writer", "which Megatron-LM has"),
        ("from spare_megatron.training.checkpointing import load_checkpoint", "use --save, --load"),
        ("from spare_megatron.training.training import setup_model_and_optimizer", "pretrain() does it"),
        ("from spare_megatron.training.utils import calc_params_l2_norm", "use --log-params-norm"),
        ("from spare_megatron.training import no_such_name", "cannot import name 'no_such_name'"),
    ],
)
def test_other_names_are_refused_with_what_to_use(line: str, sentence: str) -> None:
    with pytest.raises(ImportError) as error:
        exec(line, {})
    assert sentence in str(error.value)


def test_kinds_of_data_that_are_not_here_are_refused_where_they_are_used() -> None:
    from spare_megatron.training.datasets.sft_dataset import MockSFTDataset, SFTDataset
    from spare_megatron.training.datasets.varlen_dataset import MockVarlenDataset, VarlenDataset

    for kind in (SFTDataset, MockSFTDataset):
        with pytest.raises(ConfigError, match=rf"^{kind.__name__} of Megatron-LM is not here: .*--sft"):
            kind(1, name="train")
    for kind in (VarlenDataset, MockVarlenDataset):
        with pytest.raises(ConfigError, match=r"packed sequences"):
            kind(None)


def test_what_is_called_only_for_packed_sequences_or_older_models_is_refused_where_it_is_called() -> None:
    import spare_megatron.legacy.model
    from spare_megatron.training.training import update_seqlen_stats_from_cu_seqlens
    from spare_megatron.training.utils import get_batch_on_this_tp_rank

    with pytest.raises(ConfigError, match="packed sequences are not supported"):
        update_seqlen_stats_from_cu_seqlens([0, 4])
    with pytest.raises(ConfigError, match="needs_padding_mask=True"):
        get_batch_on_this_tp_rank(None, needs_padding_mask=True)
    with pytest.raises(ConfigError, match="--use-legacy-models"):
        spare_megatron.legacy.model.GPTModel(None)


def test_the_names_of_every_script_cost_no_import_of_torch() -> None:
    code = (
        "import sys\nfrom spare_megatron.training import get_args, get_timers, pretrain, print_rank_0\n"
        "from spare_megatron.training.arguments import core_transformer_config_from_args\n"
        "print([name for name in ('torch', 'numpy', 'megatron.core') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
