"""What `--quantization ptxlab` makes of vLLM's configuration, and what it refuses."""

from dataclasses import asdict
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ptxlab import __version__
from ptxlab.errors import ArgumentError
from ptxlab.llm.vllm import NAME, log
from ptxlab.llm.vllm.attention import CACHE_DTYPES, PAGE, KV4Backend
from ptxlab.llm.vllm.checkpoints import find_checkpoint
from ptxlab.llm.vllm.kernels import CAPABILITIES, is_served
from ptxlab.llm.vllm.options import ServingOptions
from ptxlab.llm.vllm.quantization import ARCHITECTURES, PtxlabConfig
from ptxlab.lowbit.kernels.attention.call import MOST_TOKENS

DEFAULT_CACHE = "int4_per_token_head"


class _ServedConfig(VerifyAndUpdateConfig):
    """vLLM calls it with the whole configuration of a model of these architectures, before anything depends on it."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        if vllm_config.model_config.quantization == NAME:
            configure(vllm_config)


def register_with_vllm() -> None:
    """Register the method, the backend and the defaults; raises RuntimeError unless vLLM then has them."""
    register_quantization_config(NAME)(PtxlabConfig)
    register_backend(AttentionBackendEnum.CUSTOM)(KV4Backend)
    for architecture in ARCHITECTURES:
        existing = MODELS_CONFIG_MAP.setdefault(architecture, _ServedConfig)
        if existing is not _ServedConfig:
            raise RuntimeError(f"ptxlab: {existing.__name__} already updates the configuration of {architecture}")
    registered_classes = get_quantization_config(NAME), AttentionBackendEnum.CUSTOM.get_class()
    if registered_classes != (PtxlabConfig, KV4Backend):
        raise RuntimeError(f"ptxlab: vLLM has {registered_classes}, not the plugin's method and attention backend")


def configure(vllm_config: VllmConfig) -> None:
    """Choose cache and attention where the user has not, and log one line that says what is served.

    The options become part of `additional_config`, and so of the key under which vLLM keeps compiled graphs.

    Raises ArgumentError for options and features of vLLM that are not supported.
    """
    options = ServingOptions.from_vllm(vllm_config)
    model = vllm_config.model_config
    checkpoint = find_checkpoint(model.model, getattr(model.hf_config, "quantization_config", None))
    if checkpoint is not None and options.quantises_otherwise:
        raise ArgumentError(
            f"--additional-config: {NAME}", "scheme and group must be left out for a quantised checkpoint", options
        )
    parallel_ranks = vllm_config.parallel_config.tensor_parallel_size
    if checkpoint is not None and not checkpoint.is_sliceable and parallel_ranks > 1:
        raise ArgumentError(
            f"--tensor-parallel-size: {model.model}", "must be 1 for packed weights, for now", parallel_ranks
        )
    _refuse(vllm_config)
    settings = {**asdict(options), "version": __version__}
    vllm_config.additional_config = {**vllm_config.additional_config, NAME: settings}
    cache, attention = vllm_config.cache_config, vllm_config.attention_config
    if cache.cache_dtype == "auto" and attention.backend in (None, AttentionBackendEnum.CUSTOM):
        cache.cache_dtype = DEFAULT_CACHE
    if cache.cache_dtype in CACHE_DTYPES and attention.backend is None:
        attention.backend = AttentionBackendEnum.CUSTOM
    rotated_values = "keys and values" if checkpoint is None or checkpoint.has_rotated_values else "keys"
    cache_description = _describe_cache(cache.cache_dtype, attention.backend, rotated_values)
    head = ", lm_head in INT8" if options.head == "int8" else ""
    log.info("ptxlab %s: %s%s; %s", __version__, checkpoint or options, head, cache_description)


def _describe_cache(dtype: str, backend: Any, rotated: str) -> str:
    if backend is not AttentionBackendEnum.CUSTOM:
        return f"cache {dtype}, attention of vLLM"
    return f"cache {CACHE_DTYPES[dtype]}, {rotated} rotated, in pages of {PAGE} tokens, attention of ptxlab"


def _refuse(vllm_config: VllmConfig) -> None:
    """Raise ArgumentError for the first feature of vLLM that the plugin does not support."""
    capability = current_platform.get_device_capability()
    if not current_platform.is_cuda() or not is_served(capability):
        got = "none" if capability is None else capability.as_version_str()
        raise ArgumentError(f"--quantization {NAME}", f"needs a GPU of compute capability {CAPABILITIES}", got)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    unsupported = {
        "LoRA adapters": vllm_config.lora_config is not None,
        "sleep mode": model.enable_sleep_mode,
        "weight transfer": vllm_config.weight_transfer_config is not None,
        "experts": model.is_moe,
        "context parallelism": max(
            parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
        ) > 1,
        "micro-batches (DBO)": parallel.enable_dbo,
        "speculative decoding other than ngram": speculative is not None and speculative.method != "ngram",
        f"more than {MOST_TOKENS - 1} speculative tokens": speculative is not None
        and (speculative.num_speculative_tokens or 0) >= MOST_TOKENS,
    }  # fmt: skip
    for feature, is_used in unsupported.items():
        if is_used:
            raise ArgumentError(f"--quantization {NAME}", f"does not support {feature} yet", model.model)
