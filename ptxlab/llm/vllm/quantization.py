"""`PtxlabConfig`: which method vLLM's layers get with `--quantization ptxlab`."""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ptxlab.errors import ArgumentError
from ptxlab.llm.vllm import NAME
from ptxlab.llm.vllm.attention import KV4Impl
from ptxlab.llm.vllm.checkpoints import QuantizedCheckpoint, find_checkpoint
from ptxlab.llm.vllm.compressed_tensors import IntegerCheckpoint
from ptxlab.llm.vllm.head import Int8HeadMethod
from ptxlab.llm.vllm.kernels import LOWEST, ProductKernels
from ptxlab.llm.vllm.linear import FloatLinearMethod
from ptxlab.llm.vllm.options import ServingOptions

HEAD_IS_EMBEDDING = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")  # where it is tied
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class PtxlabConfig(QuantizationConfig):
    """`--quantization ptxlab`: every linear layer in W4A8; embeddings, norms and the head stay as they are.

    Attributes:
        checkpoint: what is quantised already, or None for a checkpoint of floats.
        kernels: of the layers' products.
    """

    def __init__(self, checkpoint: QuantizedCheckpoint | None = None) -> None:
        super().__init__()
        self.checkpoint, self.kernels = checkpoint, ProductKernels()

    def get_name(self) -> str:
        """Return the method's name."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes between the kernels."""
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the lowest compute capability times ten; `serving` refuses others, too."""
        major, minor = LOWEST
        return 10 * major + minor

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no files: a float checkpoint says nothing of how it is to be quantised."""
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return the method's name for checkpoints of compressed-tensors in W4A8, unless another method is asked for.

        vLLM 0.26 itself runs none of them in INT8 on a GPU.
        """
        is_claimed = user_quant in (None, NAME) and IntegerCheckpoint.from_config(hf_quant_cfg) is not None
        return NAME if is_claimed else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PtxlabConfig":
        """Return the configuration of a checkpoint in W4A8; raises ArgumentError for another quantised checkpoint."""
        return cls(find_checkpoint("", config))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Look at a folder that declares nothing, for QServe's weights.

        Raises ArgumentError for a model of another architecture than those that are supported, and for a packed folder
        that was written before folders declared themselves.
        """
        architectures = getattr(hf_config, "architectures", None) or []
        if not set(architectures) & set(ARCHITECTURES):
            rule = f"architecture must be one of {', '.join(ARCHITECTURES)}"
            raise ArgumentError(f"--quantization {NAME}: {model_name}", rule, ", ".join(architectures) or "none")
        if self.checkpoint is None:
            self.checkpoint = find_checkpoint(model_name, None)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method for linear layers and for a head in INT8, None for all others.

        Attention over our pages loses its sliding window for the cache, which then keeps all tokens, not for the
        kernels: vLLM 0.26 gives pages of a window the size of 8 bits, whatever the cache has.
        """
        if isinstance(layer, Attention) and isinstance(layer.impl, KV4Impl):
            layer.sliding_window = None
        vllm_config = get_current_vllm_config()
        self.kernels.use_tokens_of(vllm_config)
        if isinstance(layer, VocabParallelEmbedding):
            return self._head_method(layer, prefix, vllm_config)
        if not isinstance(layer, LinearBase):
            return None
        if self.checkpoint is not None:
            return self.checkpoint.linear_method(self.kernels, prefix, self.packed_modules_mapping)
        is_ours = vllm_config.attention_config.backend is AttentionBackendEnum.CUSTOM
        head_dim = vllm_config.model_config.get_head_size() if is_ours else None
        return FloatLinearMethod(self.kernels, prefix, ServingOptions.from_vllm(vllm_config), head_dim)

    def _head_method(
        self, layer: VocabParallelEmbedding, prefix: str, vllm_config: VllmConfig
    ) -> Int8HeadMethod | None:
        """Return the method of a head in INT8, None for a float head and for an embedding that is no head.

        vLLM's Qwen models take the embedding itself where the head is tied, its LLaMA models make one of both.
        """
        if ServingOptions.from_vllm(vllm_config).head != "int8":
            return None
        if isinstance(layer, ParallelLMHead):
            return Int8HeadMethod(self.kernels, prefix)
        config = vllm_config.model_config.hf_config
        is_head = config.tie_word_embeddings and {*config.architectures} & {*HEAD_IS_EMBEDDING}
        return Int8HeadMethod(self.kernels, prefix, is_embedding=True) if is_head else None
