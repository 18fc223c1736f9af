"""W4A8 in vLLM's linear layers: what they do while they are loaded, and with activations."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.torch import operators as _operators  # noqa: F401  (defines torch.ops.ptxlab)
from ptxlab.llm.vllm import NAME
from ptxlab.llm.vllm.kernels import MatrixShape, ProductKernels
from ptxlab.llm.vllm.options import ServingOptions
from ptxlab.llm.vllm.packing import quantise_and_pack
from ptxlab.llm.vllm.rotation import rotate_back, rotate_values
from ptxlab.lowbit.kernels.gemm.ladder import layout_here


class W4A8LinearMethod(LinearMethodBase):
    """Method of one linear layer: what is loaded is packed and dropped before the next layer is loaded.

    The layer then has the buffers of a `PackedWeight` as parameters, in the layout that the kernels of this GPU read,
    and its bias in f32.

    Attributes:
        kernels: those of all layers.
        prefix: the layer's name.
        matrix: the packed weight's layout, scheme and sizes; set by `create_weights`, which knows them.
        names: of its buffers, likewise.
        is_packed: whether the layer has been loaded.
        is_dummy: whether vLLM fills what is loaded with numbers of its own.
    """

    uses_meta_device = True
    matrix: MatrixShape
    names: tuple[str, ...]

    def __init__(self, kernels: ProductKernels, prefix: str) -> None:
        self.kernels, self.prefix = kernels, prefix
        self.is_packed, self.is_dummy = False, get_current_vllm_config().load_config.load_format == "dummy"

    @abstractmethod
    def choose_format(self, K: int) -> tuple[str, int]:
        """Return scheme and group for K columns."""

    @abstractmethod
    def loaded_parameters(self, N: int, K: int, dtype: torch.dtype, weight_loader: Any) -> dict[str, nn.Parameter]:
        """Return parameters by the checkpoint's names for a matrix [N, K], without memory."""

    @abstractmethod
    def pack(self, layer: nn.Module, loaded: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the packed weight's buffers of the loaded parameters."""

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
        """Give the layer what the checkpoint has, without memory. Raises ArgumentError for sizes no kernel supports."""
        N, K = sum(output_partition_sizes), input_size_per_partition
        try:
            scheme, group = self.choose_format(K)
            self.matrix = MatrixShape(layout_here(scheme), scheme, N, K, group)
            self.names = tuple(self.matrix.shapes())
        except ArgumentError as error:
            raise self._error(error.rule, error.value) from None
        self.kernels.matrices.add(self.matrix)
        loader = extra_weight_attrs.get("weight_loader")
        for name, parameter in self.loaded_parameters(N, K, params_dtype, loader).items():
            layer.register_parameter(name, parameter)
        initialize_online_processing(layer)
        _count_early_bias(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack what was loaded where it is.

        vLLM asks a second time when all layers are loaded: then the memory that packing took goes back to the GPU, and
        kernels are compiled. Raises ArgumentError for a weight that cannot be packed, for one that the checkpoint has
        not, or has in part, and for one that is loaded anew.
        """
        progress = get_layerwise_info(layer)
        if self.is_packed:
            if progress.can_load() or not {*self.names} <= layer._parameters.keys() <= {*self.names, "bias"}:
                raise self._error("weights are loaded once", "a reload")
            gpu.free_pool()
            if layer.channel_scale.is_cuda:
                self.kernels.compile(layer.params_dtype)
            return
        if progress.load_numel < (progress.load_numel_total or 0) and not self.is_dummy:
            got = f"{progress.load_numel:,} of {progress.load_numel_total:,} numbers"
            raise self._error("the checkpoint must have all of the layer's weights", got)
        self.is_packed = True
        loaded_tensors = {name: parameter.data for name, parameter in layer.named_parameters() if name != "bias"}
        for name in loaded_tensors:
            delattr(layer, name)
        try:
            buffers = self.pack(layer, loaded_tensors)
        except ArgumentError as error:
            raise self._error(error.rule, error.value) from None
        for name in self.names:
            layer.register_parameter(name, nn.Parameter(buffers[name], requires_grad=False))
        if getattr(layer, "bias", None) is not None:
            layer.bias = nn.Parameter(layer.bias.data.float(), requires_grad=False)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + bias [.., N] of x [.., K], whose rows are quantised to INT8."""
        x_q, scale, token_sum = torch.ops.ptxlab.quantize_activations(x.reshape(-1, x.shape[-1]).contiguous())
        y = torch.ops.ptxlab.gemm_w4a8(
            x_q,
            scale,
            token_sum,
            [getattr(layer, name) for name in self.names],
            bias,
            layout=self.matrix.layout,
            scheme=self.matrix.scheme,
            group=self.matrix.group,
            out_dtype=x.dtype,
        )
        return y.view(*x.shape[:-1], y.shape[-1])

    def _error(self, rule: str, got: Any) -> ArgumentError:
        return ArgumentError(f"--quantization {NAME}: {self.prefix}", rule, got)


def _count_early_bias(layer: nn.Module) -> None:
    """Have a bias counted that is loaded ahead of the weight.

    vLLM gives a layer its bias behind `create_weights`, and prepares it for counting when the first weight is loaded. A
    bias that comes before would be missing in the count, and the layer be packed only when all others are loaded.
    """
    original, is_untried = layer.weight_loader, True

    def load_and_start_count(param: Tensor, loaded_weight: Tensor, *shard: Any) -> Any:
        nonlocal is_untried
        progress = get_layerwise_info(layer)
        if is_untried and progress.can_load() and not progress.load_numel:
            is_untried = False
            initialize_online_processing(layer)
            return param.weight_loader(param, loaded_weight, *shard)
        return original(param, loaded_weight, *shard)

    layer.weight_loader = load_and_start_count


class FloatLinearMethod(W4A8LinearMethod):
    """Method of a layer whose checkpoint has floats, which are rounded to nearest."""

    def __init__(
        self, kernels: ProductKernels, prefix: str, options: ServingOptions, rotated_head_dim: int | None
    ) -> None:
        super().__init__(kernels, prefix)
        self.options, self.rotated_head_dim = options, rotated_head_dim

    def choose_format(self, K: int) -> tuple[str, int]:
        """Return the options' scheme and the group that divides K."""
        return self.options.scheme, self.options.group_of(K)

    def loaded_parameters(self, N: int, K: int, dtype: torch.dtype, weight_loader: Any) -> dict[str, nn.Parameter]:
        """Return the float weight."""
        empty_weight = torch.empty(N, K, dtype=dtype, device="meta")
        return {
            "weight": ModelWeightParameter(data=empty_weight, input_dim=1, output_dim=0, weight_loader=weight_loader)
        }

    def pack(self, layer: nn.Module, loaded: dict[str, Tensor]) -> dict[str, Tensor]:
        """Quantise the weight, for rotated values where it makes or reads values."""
        weight, head_dim = loaded.pop("weight"), self.rotated_head_dim
        if head_dim is not None and isinstance(layer, QKVParallelLinear):
            values = slice(-layer.num_kv_heads * head_dim, None)
            weight = weight.float()
            weight[values] = rotate_values(weight[values], head_dim)
            if layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias.data.float(), requires_grad=False)
                layer.bias[values] = rotate_values(layer.bias[values], head_dim)
        elif head_dim is not None and self.prefix.endswith(".o_proj"):
            weight = rotate_back(weight, head_dim)
        return quantise_and_pack(weight, self.matrix.scheme, self.matrix.group, self.matrix.layout)
