"""A decoder's numbers: by name, from a config.json, from GGUF metadata, and one GPU's share of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError, FileError
from ptxlab.llm.model import MODELS, Config
from ptxlab.lowbit.bench import shapes

# As published with the models, less what says nothing of a layer.
SMOLLM = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "num_hidden_layers": 30, "vocab_size": 49152, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": True, "hidden_act": "silu",
    "attention_bias": False,
}  # fmt: skip
LLAMA31 = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "mlp_bias": False,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 32000, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "sliding_window": 4096,
}  # fmt: skip
MIXTRAL = {
    **MISTRAL, "model_type": "mixtral", "rope_theta": 1000000.0, "sliding_window": None, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "num_hidden_layers": 24, "vocab_size": 151936, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 32768, "tie_word_embeddings": True,
}  # fmt: skip
YI = {
    "model_type": "llama", "hidden_size": 7168, "intermediate_size": 20480, "num_attention_heads": 56,
    "num_key_value_heads": 8, "num_hidden_layers": 60, "vocab_size": 64000, "rms_norm_eps": 1e-05,
    "rope_theta": 5000000.0,
}  # fmt: skip
GGUF = {
    "general.architecture": "llama", "general.name": "mixtral", "llama.embedding_length": np.uint32(4096),
    "llama.feed_forward_length": 14336, "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8,
    "llama.block_count": 32, "llama.rope.freq_base": np.float32(1e6), "llama.rope.dimension_count": 128,
    "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5), "llama.expert_count": 8, "llama.expert_used_count": 2,
    "tokenizer.ggml.tokens": ["a"] * 32000,
}  # fmt: skip


def test_the_models_of_table_1_are_known_by_name() -> None:
    """The names are LiquidGEMM's eight.

    They say the parameters in billions, without embeddings.
    """
    for name, billions in {
        "LLaMA-30B": 32.1, "LLaMA-2-7B": 6.5, "LLaMA-2-13B": 12.7, "LLaMA-2-70B": 68.5, "LLaMA-3-8B": 7.0,
        "Mistral-7B": 7.0, "Yi-34B": 33.5, "Mixtral-8x7B": 46.4,
    }.items():  # fmt: skip
        config = Config.named(name)
        sizes = {part: N * K for part, (N, K) in config.matrices.items()}
        of_experts = (sizes["gate_up"] + sizes["down"]) * max(1, config.experts)
        assert config.layers * (sizes["qkv"] + sizes["o"] + of_experts) / 1e9 == pytest.approx(billions, abs=0.05), name
    assert all(config.name == name for name, config in MODELS.items())


def test_the_benches_measure_these_models() -> None:
    assert [(layer.part, layer.N, layer.K) for layer in shapes.LAYERS[:4]] == [
        ("QKV", 12288, 4096), ("O", 4096, 4096), ("gate+up", 22016, 4096), ("down", 4096, 11008),
    ]  # fmt: skip
    assert shapes.HEADS == ((32, 32), (32, 8), (64, 8)) and (shapes.EXPERTS, shapes.CHOSEN_EXPERTS) == (8, 2)


@pytest.mark.parametrize(
    ("source", "name"),
    [(LLAMA31, "LLaMA-3-8B"), (MISTRAL, "Mistral-7B"), (MIXTRAL, "Mixtral-8x7B"), (YI, "Yi-34B")],
)
def test_a_published_config_has_the_matrices_of_its_name(source: dict[str, Any], name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(source))
    config, published = Config.from_json(path), Config.named(name)
    assert config == Config.from_json(source) == Config.from_json(str(path))
    for field in ("matrices", "layers", "vocabulary", "eps", "rope_base", "experts", "chosen_experts", "head_dim"):
        assert getattr(config, field) == getattr(published, field), field


def test_further_keys_of_a_config() -> None:
    assert Config.from_json(LLAMA31).rope_scaling == LLAMA31["rope_scaling"]
    assert Config.from_json(MISTRAL).window == 4096 and Config.from_json(MIXTRAL).window is None
    qwen, smol = Config.from_json(QWEN2), Config.from_json(SMOLLM)
    assert (qwen.head_dim, qwen.qkv_bias, qwen.window, qwen.tied_head) == (64, True, None, True)
    assert (smol.head_dim, smol.qkv_width, smol.tied_head, smol.qkv_bias) == (64, 960, True, False)
    new = {key: entry for key, entry in LLAMA31.items() if not key.startswith("rope")}
    angles = {**LLAMA31["rope_scaling"], "rope_theta": 5e5}
    config, same = Config.from_json({**new, "rope_parameters": angles}), Config.from_json(LLAMA31)
    assert (config.rope_base, hash(config)) == (5e5, hash(same))
    assert all((a == b).all() for a, b in zip(config.rope_tables(9), same.rope_tables(np.arange(9)), strict=True))
    linear = Config.from_json({**SMOLLM, "rope_scaling": {"type": "linear", "factor": 2}})
    plain_config = Config.from_json({**SMOLLM, "rope_scaling": {"rope_type": "default"}})
    (cos, sin), (cos_of_half, sin_of_half) = linear.rope_tables(np.arange(0, 18, 2)), plain_config.rope_tables(9)
    assert cos.shape == (9, 32) and (cos == cos_of_half).all() and (sin == sin_of_half).all()
    assert Config.from_json({**SMOLLM, "head_dim": 128}).matrices["o"] == (576, 1152)


def test_gguf_metadata_are_read_likewise() -> None:
    config, published = Config.from_gguf(GGUF), Config.named("Mixtral-8x7B")
    for field in ("matrices", "layers", "vocabulary", "rope_base", "experts", "chosen_experts", "head_dim"):
        assert getattr(config, field) == getattr(published, field), field
    assert config.eps == pytest.approx(1e-5) and not config.tied_head
    qwen = {key.replace("llama.", "qwen2."): entry for key, entry in GGUF.items() if "expert" not in key}
    scaling = {"general.architecture": "qwen2", "qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 4.0}
    config = Config.from_gguf({**qwen, **scaling}, tied_head=True)
    assert (config.qkv_bias, config.experts, config.tied_head) == (True, 0, True)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_a_share_has_its_part_of_heads_and_rows() -> None:
    config = Config.named("LLaMA-2-70B")
    for n in (1, 2, 4, 8):
        share = config.share(n)
        assert (share.heads, share.kv_heads, share.ffn, share.hidden) == (64 // n, 8 // n, 28672 // n, 8192)
        assert sum(N * K for N, K in share.matrices.values()) * n == sum(N * K for N, K in config.matrices.values())
    with pytest.raises(ArgumentError, match=r"n: must divide the 52 of heads \(got 8\)"):
        Config.named("LLaMA-30B").share(8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, r"config.json: hidden_size: must be given \(got nothing\)"),
        ({"hidden_size": "576"}, r"config.json: hidden_size: must be an integer, 1 or more \(got '576'\)"),
        ({"vocab_size": 0}, r"config.json: vocab_size: must be an integer, 1 or more \(got 0\)"),
        ({"num_hidden_layers": True}, r"config.json: num_hidden_layers: must be an integer, 1 or more \(got True\)"),
        ({"num_key_value_heads": 2}, r"config.json: num_key_value_heads: must divide the 9 query heads \(got 2\)"),
        ({"head_dim": 63}, r"config.json: head_dim: must be even \(got 63\)"),
        ({"rms_norm_eps": float("nan")}, r"config.json: rms_norm_eps: must be a number above 0 \(got nan\)"),
        ({"rope_theta": -1}, r"config.json: rope_theta: must be a number above 0 \(got -1\)"),
        ({"hidden_act": "relu"}, r"config.json: hidden_act: must be one of silu, .* \(got 'relu'\)"),
        ({"model_type": "gpt2"}, r"config.json: model_type: must be one of llama, mistral, .* \(got 'gpt2'\)"),
        ({"model_type": ["llama"]}, r"config.json: model_type: must be one of"),
        ({"attention_bias": True}, r"config.json: attention_bias: must be false: .* \(got True\)"),
        ({"tie_word_embeddings": 1}, r"config.json: tie_word_embeddings: must be true or false \(got 1\)"),
        ({"rope_scaling": "linear"}, r"config.json: rope_scaling: must be an object of keys and values \(got str\)"),
        (
            {"rope_scaling": {"type": "yarn"}},
            r"config.json: rope_scaling: type: must be one of default, linear, .*got 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"config.json: rope_scaling: must be .*needs the number factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": -1}},
            r"config.json: rope_scaling factor: must be",
        ),
    ],
)
def test_an_error_of_a_config_names_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{message}") as error:
        Config.from_json({**SMOLLM, **change})
    assert "\n" not in str(error.value)


def test_other_errors_are_one_line_too(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"name: must be one of LLaMA-30B, .* \(got LLaMA-4\)"):
        Config.named("LLaMA-4")
    with pytest.raises(FileError, match="cannot be read"):
        Config.from_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FileError, match="not JSON"):
        Config.from_json(tmp_path / "config.json")
    with pytest.raises(ArgumentError, match=r"config.json: must be an object of keys and values \(got list\)"):
        Config.from_json([])  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ArgumentError, match=r"config.json: must be an object of keys and values \(got list\)"):
        Config.from_json(tmp_path / "config.json")
    with pytest.raises(ArgumentError, match=r"GGUF: llama.block_count: must be given"):
        Config.from_gguf({key: entry for key, entry in GGUF.items() if "block" not in key})
    with pytest.raises(ArgumentError, match=r"GGUF: llama.expert_used_count: must lie in 1..8 \(got 9\)"):
        Config.from_gguf({**GGUF, "llama.expert_used_count": 9})


def test_every_layer_answers_for_its_window() -> None:
    all_layers, unlimited = Config.from_json(MISTRAL), Config.from_json(SMOLLM)
    assert {all_layers.window_of(), all_layers.window_of(0), all_layers.window_of(31)} == {
        4096
    } and unlimited.window_of(3) is None
    two_layers = Config.from_json({**QWEN2, "use_sliding_window": True, "max_window_layers": 22})
    assert (two_layers.window, two_layers.window_layers) == (32768, (22, 23))
    assert [two_layers.window_of(layer) for layer in (0, 21, 22, 23)] == [None, None, 32768, 32768]
    for layer in (24, -1, 1.0, True):
        with pytest.raises(ArgumentError, match=r"layer: must be a number in 0\.\.23 \(got "):
            two_layers.window_of(layer)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="layer: must be given where only some layers have the window"):
        two_layers.window_of()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 5},
        {"use_sliding_window": True, "layer_types": [*["sliding_attention", "full_attention"] * 12]},
    ],
)
@pytest.mark.parametrize("source", [SMOLLM, LLAMA31, MISTRAL, MIXTRAL, QWEN2])
def test_a_config_is_read_back_as_it_was_written(source: dict[str, Any], change: dict[str, Any]) -> None:
    if "layer_types" in change and source is not QWEN2:
        return
    config = Config.from_json({**source, **change})
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_windows_of_some_layers_are_checked() -> None:
    plain_config = Config.from_json({**MISTRAL, "num_hidden_layers": 4})
    assert replace(plain_config, window_layers=(1, 3)).window_of(2) is None
    for wrong in ((), (3, 1), (1, 1), (4,), (-1,), [1], (True,), "1"):
        with pytest.raises(ArgumentError, match=r"^window_layers: must be "):
            replace(plain_config, window_layers=wrong)
    with pytest.raises(ArgumentError, match=r"^window_layers: must be None unless some layers have a window"):
        replace(plain_config, window=None, window_layers=(1,))
    with pytest.raises(ArgumentError, match=r"^window_layers: must be None in the config of a mistral"):
        replace(plain_config, window_layers=(1,)).to_json()


OF_ROPE: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "nothing": ({}, None),
    "a type alone": ({"scaling.type": "linear"}, None),
    "a factor alone": ({"scaling.factor": np.float32(4)}, {"rope_type": "linear", "factor": 4.0}),
    "both": ({"scaling.type": "linear", "scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "the older key": ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "both keys": ({"scaling.factor": 2.0, "scale_linear": 4.0}, {"rope_type": "linear", "factor": 2.0}),
    "no scaling": ({"scaling.type": "none", "scaling.factor": 4.0}, None),
    "a factor of 0": ({"scaling.factor": 0.0, "scale_linear": 4.0}, None),
    "a factor of 1": ({"scaling.factor": 1.0}, None),
    "of training": ({"scaling.factor": 4.0, "scaling.original_context_length": 2048, "scaling.finetuned": True},
                    {"rope_type": "linear", "factor": 4.0}),
    "attention of 1": ({"scaling.attn_factor": 1.0}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ROPE)
def test_scalings_of_gguf_are_read_as_llama_cpp_reads_them(name: str) -> None:
    keys, scaling = OF_ROPE[name]
    config = Config.from_gguf({**GGUF, **{f"llama.rope.{key}": setting for key, setting in keys.items()}})
    assert config.rope_scaling == scaling


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope.scaling.type": "yarn"}, r"rope\.scaling\.type: must be one of none, linear \(got 'yarn'\)"),
        ({"rope.scaling.type": "longrope"}, r"rope\.scaling\.type: must be one of none, linear"),
        ({"rope.scaling.type": 1}, r"rope\.scaling\.type: must be one of none, linear"),
        ({"rope.scaling.yarn_beta_fast": 32.0}, r"rope\.scaling\.yarn_beta_fast: must be missing: YaRN"),
        ({"rope.scaling.attn_factor": 1.5}, r"rope\.scaling\.attn_factor: must be 1: "),
        ({"rope.scaling.factor": -2.0}, r"rope\.scaling\.factor: must be a number above 0"),
        ({"rope.scaling.factor": True}, r"rope\.scaling\.factor: must be a number above 0"),
        ({"rope.scaling.factor": np.zeros(2)}, r"rope\.scaling\.factor: must be a number above 0"),
        ({"rope.scale_linear": "4"}, r"rope\.scale_linear: must be a number above 0"),
        ({"rope.scaling.attn_factor": np.zeros(2)}, r"rope\.scaling\.attn_factor: must be a number above 0"),
        ({"rope.dimension_count": np.zeros(2)}, r"rope\.dimension_count: must be head_dim, 128"),
        ({"expert_count": np.zeros(2)}, r"expert_count: must be an integer, 1 or more"),
        ({"embedding_length": 10**12}, r"embedding_length: must be at most 1048576"),
        ({"attention.layer_norm_rms_epsilon": None}, r"attention\.layer_norm_rms_epsilon: must be given"),
    ],
)
def test_what_gguf_metadata_cannot_say(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^GGUF: llama\.{message}") as error:
        Config.from_gguf({**GGUF, **{f"llama.{key}": setting for key, setting in keys.items()}})
    assert "\n" not in str(error.value)


def test_factors_per_pair_stand_alone() -> None:
    with pytest.raises(ArgumentError, match=r"rope\.scaling\.factor: must be missing beside a tensor of factors"):
        Config.from_gguf({**GGUF, "llama.rope.scaling.factor": 2.0}, rope_factors=[1.0] * 64)


def test_windows_of_gguf_are_ignored_as_in_llama_cpp() -> None:
    assert Config.from_gguf({**GGUF, "llama.attention.sliding_window": 4096}).window is None


JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 1.5, -0.0, 10**12, 10**400, float("nan"), float("inf"), "", "1", [], [1], [[]], {},
    {"a": {}}, {"rope_type": {}}, {"factor": [1]},
]  # fmt: skip
OF_ROPE_KEYS = ("rope_type", "type", "factor", "rope_theta", "low_freq_factor", "original_max_position_embeddings")


def read_or_refuse(read: Callable[[Any], Config], source: dict[str, Any]) -> None:
    """Accept a config that can be written and read back, or an error of one line."""
    try:
        config = read(source)
    except ArgumentError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    else:
        assert Config.from_json(config.to_json()) == config and config.window_of(0) in (None, config.window)


@pytest.mark.parametrize("source", [LLAMA31, MISTRAL, MIXTRAL, QWEN2], ids=["llama", "mistral", "mixtral", "qwen2"])
def test_junk_in_a_config_is_read_or_refused(source: dict[str, Any]) -> None:
    further = {"layer_types", "max_window_layers", "rope_parameters", "partial_rotary_factor", "head_dim",
               "original_max_position_embeddings", "max_position_embeddings", "per_layer_config"}  # fmt: skip
    for junk in JUNK:
        for key in source.keys() | further:
            read_or_refuse(Config.from_json, {**source, key: junk})
        for key in OF_ROPE_KEYS:
            read_or_refuse(Config.from_json, {**source, "rope_scaling": {**LLAMA31["rope_scaling"], key: junk}})


def test_junk_in_gguf_metadata_is_read_or_refused() -> None:
    further = ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor",
               "context_length", "attention.key_length", "attention.value_length", "vocab_size")  # fmt: skip
    keys = {*GGUF, *(f"llama.{key}" for key in further)}
    for junk in [*JUNK, np.zeros(3), np.uint32(7), np.float32(np.nan), ["a", "b"]]:
        for key in keys:
            read_or_refuse(Config.from_gguf, {**GGUF, key: junk})
