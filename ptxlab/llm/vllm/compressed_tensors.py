"""Checkpoints of compressed-tensors in W4A8: symmetric 4-bit integers, activations in INT8 per token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.parameter import ChannelQuantScaleParameter, GroupQuantScaleParameter, ModelWeightParameter

from ptxlab.errors import ArgumentError
from ptxlab.llm.vllm import log
from ptxlab.llm.vllm.kernels import ProductKernels
from ptxlab.llm.vllm.linear import W4A8LinearMethod
from ptxlab.llm.vllm.options import CHANNEL
from ptxlab.llm.vllm.packing import pack_integers
from ptxlab.lowbit.quant import GROUPS

FORMAT = "int-quantized"  # integers in bytes
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class IntegerCheckpoint:
    """The quantization_config of such a checkpoint.

    Attributes:
        group: columns that share a scale; None for one scale per row.
        ignore: layers that are left in floats, by name or pattern.
    """

    is_sliceable: ClassVar[bool] = True
    has_rotated_values: ClassVar[bool] = False
    group: int | None
    ignore: tuple[str, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self | None:
        """Return what a quantization_config says, or None unless all that it quantises is in W4A8 with INT8."""
        groups = [*config.get("config_groups", {}).values()]
        if config.get("quant_method") != "compressed-tensors" or not groups:
            return None
        kinds = {
            (weights.get("strategy"), weights.get("group_size")) for weights in (group["weights"] for group in groups)
        }
        for layers in groups:
            written_format = layers.get("format") or config.get("format")
            if written_format != FORMAT or not _is_w4a8(layers["weights"], layers.get("input_activations") or {}):
                return None
            if layers.get("output_activations") or layers.get("targets") != ["Linear"]:
                return None
        strategy, group = kinds.pop()
        if kinds or strategy not in ("group", "channel") or config.get("kv_cache_scheme"):
            return None
        return cls(group if strategy == "group" else None, tuple(config.get("ignore") or ()))

    def linear_method(self, kernels: ProductKernels, prefix: str, merged: Mapping[str, list[str]]) -> LinearMethodBase:
        """Return the method of the layer `prefix`; `merged` names the parts of merged layers."""
        if should_ignore_layer(prefix, self.ignore, merged):
            return UnquantizedLinearMethod()
        return IntegerLinearMethod(kernels, prefix, self)

    def __str__(self) -> str:
        groups = "a scale per channel" if self.group is None else f"groups of {self.group}"
        return f"weights W4A8 (the checkpoint's integers, {groups})"


def _is_w4a8(weights: Mapping[str, Any], activations: Mapping[str, Any]) -> bool:
    required_settings = ((weights, _WEIGHTS), (activations, _ACTIVATIONS))
    do_agree = all(
        stated_settings.get(name) == setting
        for stated_settings, settings in required_settings
        for name, setting in settings.items()
    )
    return do_agree and not weights.get("actorder")


class IntegerLinearMethod(W4A8LinearMethod):
    """Method of a layer whose checkpoint has 4-bit integers: exact where scales allow, else near (`pack_integers`)."""

    def __init__(self, kernels: ProductKernels, prefix: str, checkpoint: IntegerCheckpoint) -> None:
        super().__init__(kernels, prefix)
        self.checkpoint = checkpoint

    def choose_format(self, K: int) -> tuple[str, int]:
        """Return `qoq_channel` for one scale per row, else `lqq` in the checkpoint's groups, or in parts of them."""
        if self.checkpoint.group is None:
            return CHANNEL, K
        for group in sorted(GROUPS, reverse=True):
            if self.checkpoint.group % group == 0 and K % self.checkpoint.group == 0:
                return "lqq", group
        rule = f"the checkpoint's groups must divide K and be multiples of {min(GROUPS)}"
        raise ArgumentError("weight", rule, f"groups of {self.checkpoint.group}, K={K}")

    def loaded_parameters(self, N: int, K: int, dtype: torch.dtype, weight_loader: Any) -> dict[str, nn.Parameter]:
        """Return integers and scales."""
        integers = torch.empty(N, K, dtype=torch.int8, device="meta")
        scales = torch.empty(N, K // (self.checkpoint.group or K), dtype=dtype, device="meta")
        weight = ModelWeightParameter(data=integers, input_dim=1, output_dim=0, weight_loader=weight_loader)
        if self.checkpoint.group is None:
            scale = ChannelQuantScaleParameter(data=scales, output_dim=0, weight_loader=weight_loader)
        else:
            scale = GroupQuantScaleParameter(data=scales, input_dim=1, output_dim=0, weight_loader=weight_loader)
        return {"weight": weight, "weight_scale": scale}

    def pack(self, layer: nn.Module, loaded: dict[str, Tensor]) -> dict[str, Tensor]:
        """Pack the integers, and log the error where scales had to be rounded."""
        group = None if self.matrix.scheme == CHANNEL else self.matrix.group
        buffers, error = pack_integers(loaded.pop("weight"), loaded.pop("weight_scale"), group, self.matrix.layout)
        if error:
            log.info(
                "ptxlab: %s: packed with a relative error of %.4f, as scales of groups are rounded", self.prefix, error
            )
        return buffers
