"""The plugin's entry point, and what it makes of vLLM's configuration."""

import logging
import tomllib
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest

from ptxlab.errors import ArgumentError

Configured = Callable[..., Any]


@pytest.fixture
def plugin_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Capture also the messages of vLLM's loggers, which do not propagate."""
    logger = logging.getLogger("vllm.ptxlab")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_vllm_finds_it_by_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["ptxlab"].partition(":")
    assert callable(getattr(import_module(module), name))


def test_another_version_of_vllm_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    from ptxlab.llm.vllm import register

    monkeypatch.setattr(metadata, "version", lambda name: "0.33.0+cu130")
    register()
    assert "made for vLLM 0.26.0, this is 0.33.0: --quantization ptxlab is not available" in plugin_log.text


def test_the_flag_alone_is_enough(configured: Configured, plugin_log: pytest.LogCaptureFixture) -> None:
    config = configured()
    assert config.cache_config.cache_dtype == "int4_per_token_head"
    assert config.attention_config.backend.name == "CUSTOM"
    assert type(config.quant_config).__name__ == "PtxlabConfig"
    assert "weights W4A8 (lqq, groups of 128, or 64 where 128 does not divide)" in plugin_log.text
    assert "cache kv4, keys and values rotated, in pages of 64 tokens, attention of ptxlab" in plugin_log.text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cache_of_16_bits_is_vllms(configured: Configured, dtype: str, plugin_log: pytest.LogCaptureFixture) -> None:
    config = configured(kv_cache_dtype=dtype)
    assert (config.cache_config.cache_dtype, config.attention_config.backend) == (dtype, None)
    assert f"cache {dtype}, attention of vLLM" in plugin_log.text


def test_options_are_part_of_the_key_of_compiled_graphs(configured: Configured) -> None:
    hashes = {
        configured(additional_config={"ptxlab": chosen}).compute_hash()
        for chosen in ({}, {"scheme": "qoq"}, {"group": 64}, {"scheme": "qoq_channel"})
    }
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        "scheme": ({"additional_config": {"ptxlab": {"scheme": "int4"}}}, "scheme: must be one of lqq, qoq"),
        "group": ({"additional_config": {"ptxlab": {"group": 48}}}, "group: must be one of 32, 64, 128"),
        "channel": ({"additional_config": {"ptxlab": {"scheme": "qoq_channel", "group": 64}}}, "none for qoq_channel"),
        "unknown": ({"additional_config": {"ptxlab": {"bits": 3}}}, "must be options of scheme, group"),
        "mapping": ({"additional_config": {"ptxlab": "qoq"}}, "must be a mapping of options"),
        "LoRA": ({"enable_lora": True}, "does not support LoRA adapters yet"),
        "float32": ({"dtype": "float32"}, "torch.float32 is not supported for quantization method ptxlab"),
    }.values(),
)
def test_unsupported_options_are_refused(configured: Configured, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configured(**arguments)


def test_sleep_mode_is_refused(configured: Configured) -> None:
    from ptxlab.llm.vllm.serving import configure

    config = configured()
    config.model_config.enable_sleep_mode = True  # which vLLM itself refuses on this platform
    with pytest.raises(ArgumentError, match="does not support sleep mode yet"):
        configure(config)


def test_other_architectures_are_refused(configured: Configured) -> None:
    with pytest.raises(ValueError, match=r"architecture must be one of LlamaForCausalLM, .* \(got GPTNeoXForCausalLM"):
        configured(changes={"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"})


@pytest.mark.parametrize("capability", [(7, 5), (10, 0)])
def test_other_gpus_are_refused(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(type(current_platform), "capability", DeviceCapability(*capability))
    got = "{}.{}".format(*capability)
    rule = rf"(needs a GPU of compute capability 8.0 to 9.0 \(Ampere, Ada, Hopper\) \(got {got}|Minimum capability: 80)"
    with pytest.raises(ValueError, match=rule):
        configured()


def test_checkpoints_that_are_quantised_otherwise_are_refused(vllm: None) -> None:
    from ptxlab.llm.vllm.quantization import PtxlabConfig

    with pytest.raises(ArgumentError, match=r"--quantization ptxlab: needs a checkpoint of floats, .* \(got fp8\)"):
        PtxlabConfig.from_config({"quant_method": "fp8"})


def test_a_model_without_the_flag_is_vllms(configured: Configured) -> None:
    config = configured(quantization=None)
    assert (config.quant_config, config.attention_config.backend) == (None, None)
    assert config.cache_config.cache_dtype == "auto"


def test_a_registration_that_did_not_take_is_raised(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptxlab.llm.vllm import serving

    monkeypatch.setattr(serving, "register_backend", lambda member: lambda backend: backend)
    monkeypatch.setattr(serving, "get_quantization_config", lambda name: None)
    with pytest.raises(RuntimeError, match="not the plugin's method and attention backend"):
        serving.register_with_vllm()


def test_errors_are_those_of_ptxlab(configured: Configured) -> None:
    """vLLM wraps them in its own only where pydantic makes the configuration."""
    with pytest.raises((ArgumentError, ValueError)) as raised:
        configured(enable_lora=True)
    assert "--quantization ptxlab: does not support LoRA adapters yet" in str(raised.value)
