"""The quantisation method of vLLM's linear layers: float weights become W4A8 while they are loaded."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, QKVParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.torch import operators as _operators  # noqa: F401  (defines torch.ops.ptxlab)
from ptxlab.llm.vllm import NAME
from ptxlab.llm.vllm.attention import KV4Impl
from ptxlab.llm.vllm.kernels import MatrixShape, compile_products, token_counts
from ptxlab.llm.vllm.options import ServingOptions
from ptxlab.llm.vllm.packing import LAYOUT, quantise_and_pack
from ptxlab.llm.vllm.rotation import rotate_back, rotate_values
from ptxlab.lowbit.layout import buffer_shapes

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class PtxlabConfig(QuantizationConfig):
    """`--quantization ptxlab`: every linear layer in W4A8; embeddings, norms and the head stay as they are.

    Attributes:
        matrices: of layers whose kernels are not compiled yet.
        tokens: numbers of tokens for which they will be.
    """

    def __init__(self) -> None:
        super().__init__()
        self.matrices: set[MatrixShape] = set()
        self.tokens: tuple[int, ...] = ()

    def get_name(self) -> str:
        """Return the method's name."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes between the kernels."""
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the compute capability times ten; `serving` refuses those above, too."""
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no files: a float checkpoint says nothing of how it is to be quantised."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PtxlabConfig":
        """Raise ArgumentError: checkpoints that are quantised already are not supported yet."""
        raise ArgumentError(f"--quantization {NAME}", "needs a checkpoint of floats", config.get("quant_method"))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Raise ArgumentError for a model of another architecture than those that are supported."""
        architectures = getattr(hf_config, "architectures", None) or []
        if not set(architectures) & set(ARCHITECTURES):
            rule = f"architecture must be one of {', '.join(ARCHITECTURES)}"
            raise ArgumentError(f"--quantization {NAME}: {model_name}", rule, ", ".join(architectures) or "none")

    def get_quant_method(self, layer: nn.Module, prefix: str) -> "W4A8LinearMethod | None":
        """Return the method for linear layers, None for all others.

        Attention over our pages loses its sliding window for the cache, which then keeps all tokens, not for the
        kernels: vLLM 0.26 gives pages of a window the size of 8 bits, whatever the cache has.
        """
        if isinstance(layer, Attention) and isinstance(layer.impl, KV4Impl):
            layer.sliding_window = None
        if not isinstance(layer, LinearBase):
            return None
        vllm_config = get_current_vllm_config()
        self.tokens = self.tokens or token_counts(vllm_config)
        is_ours = vllm_config.attention_config.backend is AttentionBackendEnum.CUSTOM
        head_dim = vllm_config.model_config.get_head_size() if is_ours else None
        return W4A8LinearMethod(self, ServingOptions.from_vllm(vllm_config), prefix, rotated_head_dim=head_dim)

    def compile_kernels(self, dtype: torch.dtype) -> None:
        """Compile the kernels of all layers that have been loaded, for products of that dtype."""
        matrices, self.matrices = self.matrices, set()
        if matrices:
            compile_products(matrices, self.tokens, dtype)


class W4A8LinearMethod(LinearMethodBase):
    """Method of one linear layer: its float weight is loaded, quantised, packed and dropped before the next one.

    The layer then has the buffers of a `PackedWeight` in `strips` as parameters, and its bias in f32.
    """

    uses_meta_device = True

    def __init__(
        self, config: PtxlabConfig, options: ServingOptions, prefix: str, *, rotated_head_dim: int | None
    ) -> None:
        self.config, self.options, self.prefix, self.rotated_head_dim = config, options, prefix, rotated_head_dim
        self.scheme, self.group, self.names = options.scheme, 0, tuple[str, ...]()

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give the layer a float weight [N, K] without memory. Raises ArgumentError for sizes no kernel supports."""
        N, K = sum(output_partition_sizes), input_size_per_partition
        self.group = self.options.group_of(self.prefix, K)
        try:
            self.names = tuple(buffer_shapes(LAYOUT, self.scheme, N, K, self.group))
        except ArgumentError as error:
            raise ArgumentError(f"--quantization {NAME}: {self.prefix}", error.rule, error.value) from None
        self.config.matrices.add(MatrixShape(self.scheme, N, K, self.group))
        weight = ModelWeightParameter(
            data=torch.empty(N, K, dtype=params_dtype, device="meta"),
            input_dim=1,
            output_dim=0,
            weight_loader=extra_weight_attrs.get("weight_loader"),
        )
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Quantise and pack the weight where it is.

        vLLM asks a second time when all layers are loaded: then the memory that quantising took goes back to the GPU,
        and kernels are compiled. Raises ArgumentError for a weight that cannot be quantised, and for one that is loaded
        anew.
        """
        if "weight" not in layer._parameters:
            gpu.free_pool()
            if layer.channel_scale.is_cuda:
                self.config.compile_kernels(layer.params_dtype)
            return
        if self.names[0] in layer._parameters:
            raise ArgumentError(f"--quantization {NAME}: {self.prefix}", "weights are loaded once", "a reload")
        weight = layer.weight.data
        del layer.weight
        if self.rotated_head_dim is not None:
            weight = self._fold_rotation(layer, weight, self.rotated_head_dim)
        try:
            buffers = quantise_and_pack(weight, self.scheme, self.group)
        except ArgumentError as error:
            raise ArgumentError(f"--quantization {NAME}: {self.prefix}", error.rule, error.value) from None
        for name in self.names:
            layer.register_parameter(name, nn.Parameter(buffers[name], requires_grad=False))
        if getattr(layer, "bias", None) is not None:
            layer.bias = nn.Parameter(layer.bias.data.float(), requires_grad=False)

    def _fold_rotation(self, layer: nn.Module, weight: Tensor, head_dim: int) -> Tensor:
        """Return the weight for rotated values, where it makes or reads values; the bias is changed in place."""
        if isinstance(layer, QKVParallelLinear):
            values = slice(-layer.num_kv_heads * head_dim, None)
            weight = weight.float()
            weight[values] = rotate_values(weight[values], head_dim)
            if layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias.data.float(), requires_grad=False)
                layer.bias[values] = rotate_values(layer.bias[values], head_dim)
        elif self.prefix.endswith(".o_proj"):
            weight = rotate_back(weight, head_dim)
        return weight

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + bias [.., N] of x [.., K], whose rows are quantised to INT8."""
        x_q, scale, token_sum = torch.ops.ptxlab.quantize_activations(x.reshape(-1, x.shape[-1]).contiguous())
        y = torch.ops.ptxlab.gemm_w4a8(
            x_q,
            scale,
            token_sum,
            [getattr(layer, name) for name in self.names],
            bias,
            layout=LAYOUT,
            scheme=self.scheme,
            group=self.group,
            out_dtype=x.dtype,
        )
        return y.view(*x.shape[:-1], y.shape[-1])
