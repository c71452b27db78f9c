"""The committed table of megatron-core's fields is what the installed megatron-core has."""

from __future__ import annotations

import dataclasses
import json

import pytest

from spare_megatron.flags import check, specs, supported
from spare_megatron.megatron_adapter.versions import TESTED_CORE_VERSIONS, core_version, minor_of
from tests.pure.flags_of_a_job import job_of


def test_the_table_is_that_of_the_installed_megatron_core() -> None:
    from spare_megatron.megatron_adapter import flag_sources

    tables, made = flag_sources.read_tables(), flag_sources.core_table()
    assert core_version() in TESTED_CORE_VERSIONS
    kept = tables[minor_of(core_version())]["fields"]
    assert json.dumps(kept) == json.dumps(made["fields"]), (
        "write it anew: python -m spare_megatron.megatron_adapter.flag_sources"
    )
    assert flag_sources.tables_text(tables) == flag_sources.CORE_FIELDS.read_text()


def test_every_field_of_megatron_core_that_its_command_line_has_is_a_flag_or_refused() -> None:
    from spare_megatron.megatron_adapter import flag_sources

    fields = {field.name for cls in flag_sources.dataclass_types().values() for field in dataclasses.fields(cls)}
    honoured = {spec.dest for spec in supported.all_specs()}
    rows = [row for row in specs.megatron_table().values() if row["dest"] in fields & honoured]
    assert len(rows) > 90


def config_types() -> dict[str, type]:
    """megatron-core's dataclasses whose fields settings name."""
    from spare_megatron.megatron_adapter.shims import install_cpu_shims

    install_cpu_shims()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    return {
        "transformer": TransformerConfig,
        "mla_transformer": MLATransformerConfig,
        "optimizer": OptimizerConfig,
        "ddp": DistributedDataParallelConfig,
    }


def test_words_of_settings_become_objects_that_megatron_core_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "check_machine", lambda _: None)  # a config needs no transformer-engine to be built
    from spare_megatron.megatron_adapter.core_differences import transformer_fields
    from spare_megatron.megatron_adapter.model.replica import with_objects

    types = config_types()
    for extra in ("", "--swiglu", "--squared-relu", "--quick-geglu", "--init-method-xavier-uniform --window-size 3,0"):
        job, _ = job_of(extra)
        config = types["transformer"](**transformer_fields(types["transformer"], with_objects(job.transformer)))
        assert callable(config.activation_func)
        types["optimizer"](**job.optimizer)
        types["ddp"](**job.ddp)
    job, _ = job_of("--multi-latent-attention --q-lora-rank 16")
    mla = types["mla_transformer"]
    assert mla(**transformer_fields(mla, with_objects(job.transformer))).q_lora_rank == 16
