"""What configs declare: the settings that decide how a file is read, in every writer's spelling, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from ptxlab.errors import FileError
from ptxlab.llm.checkpoints.declared import Declaration, read_declarations
from ptxlab.llm.checkpoints.foreign import ForeignCheckpoint

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def in_groups(*, group: Any = None, **changes: Any) -> dict[str, Any]:
    """Make a config of compressed-tensors; `group` changes its only group, whose weights are `WEIGHTS`."""
    groups = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, **(group or {})}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return config | changes


def weights(**changes: Any) -> dict[str, Any]:
    return in_groups(group={"weights": WEIGHTS | changes})


def write(folder: Path, **files: Any) -> Path:
    """Write JSON files by their stems; a `config` file gets the quantisation alone."""
    for stem, content in files.items():
        text = json.dumps({"quantization_config": content} if stem == "config" else content)
        (folder / f"{stem}.json").write_text(text)
    return folder


DECLARED = {
    "nothing": ({}, Declaration()),
    "a model in floats": ({"config": None}, Declaration()),
    "AutoGPTQ": ({"config": GPTQ}, Declaration("GPTQ", 128, True)),
    "AutoGPTQ's own file": (
        {"quantize_config": {"bits": 4, "group_size": -1, "desc_act": True}},
        Declaration("GPTQ", -1, act_order=True),
    ),
    "the same in both files": ({"config": GPTQ, "quantize_config": GPTQ}, Declaration("GPTQ", 128, True)),
    "version 1": ({"config": GPTQ | {"checkpoint_format": "gptq"}}, Declaration("GPTQ", 128, True, 1)),
    "GPTQModel": (
        {
            "config": GPTQ
            | {"sym": False, "format": "gptq_v2", "checkpoint_format": "gptq_v2", "pack_dtype": "int32"}
            | {"method": "gptq", "dynamic": {"-:.*lm_head": {}}, "rotation": None}
            | {"meta": {"quantizer": ["gptqmodel:5.0.0"]}}
        },
        Declaration("GPTQ", 128, False, 2, borrows=True),
    ),
    "AutoRound as GPTQ": (
        {"config": GPTQ | {"provider": "auto-round"}, "quantization_config": {"bits": 4, "data_type": "int"}},
        Declaration("GPTQ", 128, True, borrows=True),
    ),
    "AutoRound": ({"config": AUTO_ROUND}, Declaration("GPTQ", 32, True, 1, borrows=True)),
    "AutoRound, GPTQModel's packing": (
        {"config": AUTO_ROUND | {"packing_format": "auto_round:gptqmodel", "extra_config": {"lm_head": {"bits": 16}}}},
        Declaration("GPTQ", 32, True, 2, borrows=True),
    ),
    "AutoRound, AWQ's packing": (
        {"config": AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}},
        Declaration("AWQ", 32, True, borrows=True),
    ),
    "AutoAWQ": (
        {"config": AWQ | {"modules_to_not_convert": ["lm_head"]}},
        Declaration("AWQ", 128, False, ignored=("lm_head",)),
    ),
    "AutoAWQ's own file": (
        {"quant_config": {"w_bit": 4, "q_group_size": 64, "zero_point": False, "version": "GEMM"}},
        Declaration("AWQ", 64, True),
    ),
    "compressed-tensors": (
        {"config": in_groups(ignore=["lm_head"])},
        Declaration("compressed-tensors, packed", 128, True, ignored=("lm_head",)),
    ),
    "without a strategy": (
        {"config": weights(strategy=None, symmetric=False, actorder="group")},
        Declaration("compressed-tensors, packed", 128, False, act_order=True),
    ),
    "W4A8": (
        {
            "config": in_groups(
                group={
                    "weights": {"num_bits": 4, "strategy": "channel"},
                    "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
                },
                format="int-quantized",
                sparsity_config={"format": "dense"},
            )
        },
        Declaration("compressed-tensors, integers", -1, True),
    ),
    "two groups alike": (
        {"config": in_groups(config_groups={name: {"targets": [name], "weights": WEIGHTS} for name in "ab"})},
        Declaration("compressed-tensors, packed", 128, True),
    ),
}


@pytest.mark.parametrize("case", DECLARED)
def test_what_a_config_declares(case: str, tmp_path: Path) -> None:
    files, expected = DECLARED[case]
    assert read_declarations(write(tmp_path, **files)) == (expected,)


METHODS = ("hqq", "bitsandbytes", "fp8", "eetq", "quanto", "aqlm", "torchao", "mxfp4", "marlin")
REFUSED = {
    **{method: ({"config": {"quant_method": method}}, rf"quant_method: must be .*got {method}") for method in METHODS},
    "bitsandbytes of old": ({"config": {"load_in_4bit": True}}, "quant_method: must be one of .*got bitsandbytes"),
    "no object": ({"config": [4]}, r"config\.json: quantization_config: must be an object"),
    "bits": ({"config": GPTQ | {"bits": 8}}, r"bits: must be 4 \(got 8\)"),
    "two files, bits": (
        {"config": GPTQ, "quantize_config": GPTQ | {"bits": 3}},
        r"bits: must be the same in config\.json and quantize_config\.json \(got 4 and 3\)",
    ),
    "two files, sym": ({"config": GPTQ, "quantize_config": GPTQ | {"sym": False}}, "sym: must be the same in"),
    "two files, method": ({"config": AWQ, "quantize_config": {"bits": 4}}, "quant_method: must be the same in"),
    "two spellings": (
        {"config": GPTQ | {"format": "gptq", "checkpoint_format": "gptq_v2"}},
        r"checkpoint_format: must be gptq or gptq_v2 \(got gptq_v2 and gptq\)",
    ),
    "two bits": ({"config": AWQ | {"w_bit": 3}}, "bits: must be that of w_bit too"),
    "a group of 0": ({"config": GPTQ | {"group_size": 0}}, "group_size: must be a positive integer, or -1"),
    "a group in text": ({"config": GPTQ | {"group_size": "128"}}, "group_size: must be a positive integer, or -1"),
    "no boolean": ({"config": GPTQ | {"sym": "yes"}}, "sym: must be true or false"),
    "Marlin": ({"config": GPTQ | {"checkpoint_format": "marlin"}}, "checkpoint_format: must be gptq or gptq_v2"),
    "Marlin of old": ({"config": GPTQ | {"is_marlin_format": True}}, "is_marlin_format: must be False"),
    "words of 16 bits": ({"config": GPTQ | {"pack_dtype": "int16"}}, "pack_dtype: must be int32"),
    "a rotation": ({"config": GPTQ | {"rotation": "hadamard"}}, r"rotation: must be unset \(got hadamard\)"),
    "bits of modules": ({"config": GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}}, r"dynamic: must only .*got \+:"),
    "dynamic a list": ({"config": GPTQ | {"dynamic": ["-:a"]}}, "dynamic: must be an object"),
    "bits of layers": ({"config": AUTO_ROUND | {"extra_config": {"a.b": {"bits": 8}}}}, r"extra_config: .*got a\.b"),
    "8-bit activations": ({"config": AUTO_ROUND | {"act_bits": 8}}, "act_bits: must be 16 or 32"),
    "MXFP": ({"config": AUTO_ROUND | {"data_type": "mx_fp"}}, "data_type: must be int"),
    "LLM Compressor's packing": (
        {"config": AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}},
        "packing_format: must be one of auto_round:auto_gptq, ",
    ),
    **{
        version: ({"config": AWQ | {"version": version}}, rf"version: must be gemm \(got {version.lower()}\)")
        for version in ("GEMV", "gemv_fast", "marlin", "exllama", "ipex")
    },
    "llm-awq": ({"config": AWQ | {"backend": "llm-awq"}}, "backend: must be autoawq"),
    "AWQ with both": ({"config": AWQ | {"sym": True}}, "zero_point: must be False where sym is True"),
    "names that are none": ({"config": AWQ | {"modules_to_not_convert": "lm_head"}}, "must be a list of names"),
    "no groups": ({"config": in_groups(config_groups={})}, "config_groups: must be an object of objects"),
    "a preset": ({"config": in_groups(config_groups={"W4A16": ["Linear"]})}, "config_groups: must be an object of"),
    "no weights": ({"config": in_groups(group={"weights": None})}, "config_groups: must have weights"),
    "weights of 8 bits": ({"config": weights(num_bits=8)}, r"group_0\.weights\.num_bits: must be 4 \(got 8\)"),
    "weights of unsaid bits": ({"config": in_groups(group={"weights": {}})}, "num_bits: must be 4 .got 8"),
    "floats": ({"config": weights(type="float")}, r"weights\.type: must be int \(got float\)"),
    "blocks": ({"config": weights(strategy="block")}, r"weights\.strategy: must be group or channel \(got block\)"),
    "one scale": ({"config": weights(strategy=None, group_size=None)}, "must be group or channel .got tensor"),
    "a group of a row": ({"config": weights(strategy="channel")}, "group_size: must be one of strategy channel"),
    "no group": ({"config": weights(group_size=None)}, r"group_size: must be one of strategy group \(got None\)"),
    "an order": ({"config": weights(actorder="random")}, r"weights\.actorder: must be "),
    "another format": ({"config": in_groups(format="float-quantized")}, r"format: must be pack-quantized or int-"),
    "Marlin 2:4": ({"config": in_groups(format="marlin-24")}, r"format: must be .*got marlin-24"),
    "a format of the group": ({"config": in_groups(group={"format": "nvfp4-pack-quantized"})}, r"format: .*got nvfp4"),
    "sparsity": ({"config": in_groups(sparsity_config={"format": "sparse-24-bitmask"})}, "sparsity_config: must be"),
    "a KV cache": ({"config": in_groups(kv_cache_scheme={"num_bits": 8})}, "kv_cache_scheme: must be unset"),
    "transforms": ({"config": in_groups(transform_config={"R1": {}})}, "transform_config: must be unset"),
    "static inputs": (
        {"config": in_groups(group={"input_activations": {"num_bits": 8, "dynamic": False}})},
        r"input_activations\.dynamic: must be True \(got False\)",
    ),
    "outputs": ({"config": in_groups(group={"output_activations": {"num_bits": 8}})}, "output_activations: must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_config_may_not_declare(case: str, tmp_path: Path) -> None:
    """Refuse in one line, before anything of the checkpoint is read: there is none."""
    files, message = REFUSED[case]
    with pytest.raises(FileError, match=message) as error:
        ForeignCheckpoint(write(tmp_path, **files))
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.full
def test_values_of_any_type_are_taken_or_refused(tmp_path: Path) -> None:
    """The values are tried in every setting of every config above, of compressed-tensors also in its weights'."""

    def outcome(config: dict[str, Any]) -> str:
        try:
            read_declarations(write(tmp_path, config=config))
        except FileError as error:
            return str(error)
        return ""

    odd = (None, True, 0, -7, 1e300, "", "x", [], [[]], {}, {"x": {}}, [{"x": None}])
    configs = [files["config"] for files, _ in (*DECLARED.values(), *REFUSED.values()) if files.get("config")]
    keys = sorted({key for config in configs if isinstance(config, dict) for key in config})
    seen = [
        outcome(base | {key: odd_value})
        for base in (GPTQ, AWQ, AUTO_ROUND, in_groups())
        for key in keys
        for odd_value in odd
    ]
    seen += [outcome(weights(**{key: odd_value})) for key in (*WEIGHTS, "actorder", "dynamic") for odd_value in odd]
    for key in ("weights", "input_activations", "output_activations", "format"):
        seen += [outcome(in_groups(group={key: odd_value})) for odd_value in odd]
    assert seen.count("") > 500 and len(seen) - seen.count("") > 500 and not any("\n" in message for message in seen)
