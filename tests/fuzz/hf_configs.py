"""Fuzzes Hugging Face directories: ``python -m tests.fuzz.hf_configs --seed S --minutes M``.

Takes the config of one of sixteen families (tiny, with the fields of published ones) and its weights, and changes one
field, or the stored tensors. The judge is transformers: a model that is converted must load there without a missing,
unused or mismatched name, and the job's model, built from the flags that the conversion wrote, must have its logits.
Everything else must be refused in one sentence with exit code 2, and leave nothing behind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fuzz import Hang, patience
from tests.fuzz.searching import PATIENCE_S, Verdict, answer, finish, search

ROWS = 96
_SIZES = {"vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu"}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_REST = {"initializer_range": 0.3, "use_cache": True, "torch_dtype": "float32", "transformers_version": "4.46.0"}
_COMMON = {**_SIZES, **_HEADS, **_IDS, **_REST, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
_ATTENTION = {"attention_bias": False, "attention_dropout": 0.0, "rope_theta": 10000.0, "rope_scaling": None}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip
_SLIDING = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2}
_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
         "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
_SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
           "routed_scaling_factor": 1.5}  # fmt: skip
_DEEPSEEK = {**_SHARED, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
             "v_head_dim": 16, "rms_norm_eps": 1e-6, "moe_layer_freq": 1}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {**_COMMON, **_ATTENTION, "model_type": "llama", "pretraining_tp": 1, "mlp_bias": False},
    "llama3": {**_COMMON, **_ATTENTION, "model_type": "llama", "head_dim": 16, "rope_theta": 500000.0,
               "rope_scaling": _LLAMA3, "tie_word_embeddings": True, "eos_token_id": [2, 3]},
    "mistral": {**_COMMON, **_ATTENTION, "model_type": "mistral", "sliding_window": None, "head_dim": 8},
    "mixtral": {**_COMMON, "model_type": "mixtral", "rope_theta": 1e6, "sliding_window": None, "attention_dropout": 0.0,
                "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False,
                "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.0},
    "qwen2": {**_COMMON, **_SLIDING, "model_type": "qwen2", "rope_theta": 1e6, "attention_dropout": 0.0},
    "qwen3": {**_COMMON, **_SLIDING, **_ATTENTION, "model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6},
    "gpt2": {"model_type": "gpt2", "vocab_size": ROWS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
             "n_ctx": 64, "n_inner": None, "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
             "resid_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "initializer_range": 0.3, "scale_attn_weights": True,
             "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "summary_type": "cls_index",
             "bos_token_id": 1, "eos_token_id": 1, "torch_dtype": "float32", "use_cache": True},
    "gemma2": {**_COMMON, **_ATTENTION, "model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8,
               "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "sliding_window": 4096,
               "tie_word_embeddings": True},
    "phi3": {**_COMMON, **_ATTENTION, "model_type": "phi3", "sliding_window": None, "pad_token_id": 0,
             "original_max_position_embeddings": 64},
    "gemma3_text": {**_COMMON, **_ATTENTION, "model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8,
                    "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 5, "sliding_window_pattern": 2,
                    "rope_local_base_freq": 1e4, "tie_word_embeddings": True},
    "qwen3_next": {**_COMMON, "model_type": "qwen3_next", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "full_attention_interval": 2,
                   "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
                   "linear_value_head_dim": 8, "rope_theta": 1e6},
    "qwen3_moe": {**_COMMON, **_SLIDING, **_ATTENTION, "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
                  "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001},
    "deepseek_v2": {**_COMMON, **_ATTENTION, **_DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None,
                    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
                    "scoring_func": "softmax", "num_experts_per_tok": 2},
    "deepseek_v3": {**_COMMON, **_ATTENTION, **_DEEPSEEK, "model_type": "deepseek_v3", "q_lora_rank": 16,
                    "topk_method": "noaux_tc", "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
                    "scoring_func": "sigmoid", "num_experts_per_tok": 4, "num_nextn_predict_layers": 1,
                    "rope_scaling": _YARN},
    "glm4_moe": {**_COMMON, **_SHARED, "model_type": "glm4_moe", "head_dim": 16, "partial_rotary_factor": 0.5,
                 "attention_bias": True, "use_qk_norm": True, "rope_theta": 1e6, "rope_scaling": None, "n_group": 1,
                 "topk_group": 1, "norm_topk_prob": True, "num_experts_per_tok": 2, "attention_dropout": 0.0,
                 "num_nextn_predict_layers": 1},
    "gpt_oss": {**_COMMON, "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 0.5,
                "attention_bias": True, "attention_dropout": 0.0, "router_aux_loss_coef": 0.9, "rope_theta": 150000,
                "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                 "truncate": False, "original_max_position_embeddings": 4096}},
}  # fmt: skip
SUPPORTED = tuple(family for family in FAMILIES if family not in ("gemma2", "phi3", "gemma3_text", "qwen3_next"))
VALUES = st.one_of(
    st.sampled_from([None, True, False, 0, 1, 2, 3, 4, 5, 8, 16, 31, 32, 33, 48, 64, 95, 96, 97, -1, 10**9, 10**40]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 1e-6, 1e-3, 10000.0, 10000.5, 1e30, float("nan"), float("inf"), -1.0]),
    st.sampled_from(["", "silu", "swish", "gelu", "gelu_new", "relu", "gelu_fast", "gelu_pytorch_tanh", "x\ny"]),
    st.sampled_from(["llama", "mistral", "mixtral", "qwen2", "qwen3", "gpt2", "phi3"]),
    st.sampled_from([[], {}, [1, 2], ["full_attention", "sliding_attention"], ["full_attention"] * 2, {"a": 1}]),
    st.sampled_from([
        {"rope_type": "default"}, {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 4},
        {"rope_type": "linear", "factor": 2.5}, {"rope_type": "dynamic", "factor": 2.0},
        {"type": "yarn", "factor": 2.0},
        {"rope_type": "linear", "factor": "2"}, {"rope_type": "default", "rope_theta": 1e6}, {"rope_theta": 5000.0},
        {**_LLAMA3, "factor": 32.0}, {**_LLAMA3, "low_freq_factor": 2.0}, {"factor": 2.0}, {"rope_type": None},
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}, {"quant_method": "fp8"},
    ]),
)  # fmt: skip
MORE = (
    *("rope_parameters", "quantization_config", "layer_types", "partial_rotary_factor", "mlp_bias", "attention_bias"),
    *("head_dim", "add_cross_attention", "logit_scale", "clip_qkv", "tie_word_embeddings", "hidden_size", "n_embd"),
    *(
        "sliding_window",
        "use_sliding_window",
        "num_local_experts",
        "text_config",
        "dtype",
        "architectures",
        "new_field",
    ),
)
NAMES = sorted({name for config in FAMILIES.values() for name in config} | set(MORE))
TENSORS = ("none", "none", "none", "drop", "extra", "head", "reshape", "dtype", "rename", "bias", "ema", "parts", "cut")
REFUSES = "transformers refuses it"


@st.composite
def directories(draw: st.DrawFn) -> tuple[str, dict[str, Any], str, int]:
    """(family, changes of its config, what is done to its tensors, a number that chooses one); '' removes a field."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    own = sorted(FAMILIES[family])
    changes: dict[str, Any] = {}
    if draw(st.integers(0, 5)):
        name = draw(st.sampled_from(own if draw(st.booleans()) else NAMES))
        changes[name] = draw(st.one_of(st.just("REMOVED"), VALUES, VALUES))
    return family, changes, draw(st.sampled_from(TENSORS)), draw(st.integers(0, 10**6))


class World:
    """The families' models on disk, and a process group of this one process for the job's models."""

    def __init__(self, top: Path) -> None:
        from spare_megatron.megatron_adapter.shims import install_cpu_shims

        install_cpu_shims()
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.top = top
        for family in FAMILIES:
            self._make(family)

    def _make(self, family: str) -> None:
        import transformers

        folder = self.top / family
        config = transformers.AutoConfig.for_model(**FAMILIES[family])
        torch.manual_seed(sum(family.encode()))
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if parameter.dim() == 1 and not name.endswith("inv_freq"):
                parameter.data.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(FAMILIES[family]))

    def prepare(self, example: tuple[str, dict[str, Any], str, int]) -> Path:
        family, changes, what, number = example
        folder = self.top / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.top / family, folder)
        config = {**FAMILIES[family], **changes}
        config = {name: value for name, value in config.items() if not isinstance(value, str) or value != "REMOVED"}
        (folder / "config.json").write_text(json.dumps(config))
        change_tensors(folder, what, number)
        return folder


def change_tensors(folder: Path, what: str, number: int) -> None:
    """Change the stored tensors of a model."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    name = names[number % len(names)]
    one = tensors[name]
    random = torch.Generator().manual_seed(number)
    if what == "none":
        return
    if what == "cut":
        path.write_bytes(path.read_bytes()[: number % path.stat().st_size])
        return
    if what == "drop":
        del tensors[name]
    elif what == "extra":
        tensors[name.replace("weight", "weight_scale") + ("" if "weight" in name else "2")] = torch.ones(1)
    elif what == "head":
        words = next(value for key, value in tensors.items() if "embed_tokens" in key or "wte" in key)
        tensors["lm_head.weight"] = words.clone() if number % 2 else torch.randn(words.shape, generator=random)
    elif what == "reshape":
        tensors[name] = one[:-1].contiguous() if number % 2 else torch.cat([one, one[-1:]])
    elif what == "dtype":
        types = (torch.int8, torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
        tensors[name] = one.to(types[number % len(types)])
    elif what == "rename":
        tensors["model." + name if number % 2 else name.partition(".")[2]] = tensors.pop(name)
    elif what == "bias":
        tensors[name.removesuffix("weight") + "bias"] = torch.randn(one.shape[0], generator=random)
    elif what == "ema":
        copy = {key: value + 1.0 for key, value in tensors.items()}
        save_file(copy, folder / ("aaa.safetensors", "model_ema.safetensors", "z.safetensors")[number % 3])
    elif what == "parts":
        path.unlink()
        index = {}
        for part in range(2):
            file = f"model-0000{part + 1}-of-00002.safetensors"
            here = {key: tensors[key] for place, key in enumerate(names) if place % 2 == part}
            save_file(here, folder / file, {"format": "pt"})
            index |= dict.fromkeys(here, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        if number % 2:
            save_file({key: value + 1.0 for key, value in tensors.items()}, folder / "model-00003-of-00003.safetensors")
        return
    save_file(tensors, path, {"format": "pt"})


def job_logits(save: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Of the model that a job builds from the flags that the conversion wrote."""
    from tests.megatron.hugging_face_models import flags_of, logits_of

    # one type for all, because a model of transformers has one, whatever a tensor of it was stored in
    flags = [word for word in flags_of(save) if word not in ("--bf16", "--fp16")]
    return logits_of(flags, save / "iter_0000001", tokens)


def judge(example: tuple[str, dict[str, Any], str, int], world: World) -> Verdict:
    """Convert a directory and compare with transformers."""
    from spare_megatron.cli import convert

    family, changes, what, _ = example
    folder, save = world.prepare(example), world.top / "save"
    shutil.rmtree(save, ignore_errors=True)
    words = ["--model-type", "GPT", "--loader", "hf", "--saver", "core", "--load-dir", str(folder)]
    code, error = answer(convert.main, [*words, "--save-dir", str(save)])
    if code == 2:
        if error.count("\n") != 1 or "Traceback" in error:
            return Verdict("refused", f"not one sentence: {error!r}")
        if save.exists():
            return Verdict("refused", f"leaves {os.listdir(save)}")
        if family in SUPPORTED and not changes and what in ("none", "parts", "ema"):
            return Verdict("refused", f"a good model: {error}")
        return Verdict("refused")
    if code != 0:
        return Verdict("no answer", f"exit code {code}: {error}")
    verdict = compared(folder, save)
    if not verdict.fault.startswith(REFUSES) or not changes:
        return verdict
    # what transformers takes for no value of this field has no meaning there; the model must be right without it. It
    # takes no whole numbers for others, which older versions wrote
    changed = {name: float(value) for name, value in changes.items() if type(value) is int and value < 10**9}
    (folder / "config.json").write_text(json.dumps(FAMILIES[family] | changed))
    verdict = compared(folder, save)
    if verdict.fault.startswith(REFUSES) and changed:
        (folder / "config.json").write_text(json.dumps(FAMILIES[family]))
        verdict = compared(folder, save)
    return dataclasses.replace(verdict, outcome="accepted without a field that transformers refuses")


def compared(folder: Path, save: Path) -> Verdict:
    """Whether transformers loads the whole directory, as a model with the same logits."""
    import transformers

    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32, local_files_only=True
        )
    except Exception as error:
        return Verdict("accepted", f"{REFUSES}: {type(error).__name__}: {str(error)[:300]}")
    report = {name: sorted(map(str, values)) for name, values in report.items() if values}
    if report:
        return Verdict("accepted", f"transformers reports {report}")
    length = min(16, int(model.config.max_position_embeddings))
    tokens = torch.randint(
        0, min(ROWS, model.config.vocab_size), (1, length), generator=torch.Generator().manual_seed(5)
    )
    try:
        with torch.no_grad(), patience(PATIENCE_S):
            theirs = model.eval()(tokens).logits
        with patience(PATIENCE_S):
            ours = job_logits(save, tokens)[..., : theirs.shape[-1]]
    except Hang:
        return Verdict("accepted", "no logits in time")
    except Exception as error:
        return Verdict("accepted", f"no logits: {type(error).__name__}: {str(error)[:300]}")
    difference = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3))
    if not difference < 1e-4:
        return Verdict("accepted", f"logits differ: by {difference:.1e} of the largest")
    return Verdict("accepted", returned(folder, save, model))


def returned(folder: Path, save: Path, model: Any) -> str:
    """What differs after the way back to Hugging Face; empty if nothing does."""
    import transformers

    from spare_megatron.cli import convert

    back = save / "back"
    words = ["--model-type", "GPT", "--loader", "core", "--saver", "hf", "--load-dir", str(save)]
    code, error = answer(convert.main, [*words, "--save-dir", str(back)])
    if code != 0:
        return f"the way back ends with {code}: {error}"
    before, after = (json.loads((one / "config.json").read_text()) for one in (save / "hugging_face", back))
    for name in ("torch_dtype", "dtype"):  # is that of the weights
        before.pop(name, None)
        after.pop(name, None)
    if json.dumps(before) != json.dumps(after):
        return f"the config that goes back is {after}"
    if (folder / "config.json").read_bytes() != (save / "hugging_face" / "config.json").read_bytes():
        shutil.copy(folder / "config.json", back)  # the one that transformers takes
    again = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32, local_files_only=True)
    one, other = model.state_dict(), again.state_dict()
    names = sorted(name for name in one.keys() | other.keys() if name not in one or name not in other)
    names += sorted(name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name]))
    return f"weights that go back differ: {names[:5]}" if names else ""


def run(seed: int, minutes: float) -> list[str]:
    """Search for that long; returns what was found."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for family in SUPPORTED:
            verdict = judge((family, {}, "none", 0), world)
            assert verdict == Verdict("accepted"), f"the unchanged {family}: {verdict}"
        found, counts = search("hf_configs", directories(), lambda example: judge(example, world), seed, minutes)
    assert counts["refused"], "nothing was refused, so nothing was changed"
    return found


if __name__ == "__main__":
    finish(run)
