"""Folders of `ptxlab quantize --recipe` and `ptxlab import`: packed weights, which are loaded as they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from vllm.model_executor.utils import set_weight_attrs

from ptxlab.errors import ArgumentError
from ptxlab.llm.checkpoints.folder import CONFIG_VERSION, METHOD
from ptxlab.llm.vllm.kernels import MatrixShape, ProductKernels
from ptxlab.llm.vllm.linear import W4A8LinearMethod
from ptxlab.llm.vllm.packing import repack
from ptxlab.lowbit.layout.packed_weight import SCHEMES
from ptxlab.validate import is_integer, is_one_of

_CONFIG = "quantization_config"
_LAYOUT = "strips"  # of weights in folders


@dataclass(frozen=True)
class PackedCheckpoint:
    """The quantization_config of such a folder.

    Attributes:
        scheme, group: of most matrices.
        has_rotated_values: whether values are rotated head by head.
        exceptions: (scheme, group) of other matrices by the layers' names.
    """

    is_sliceable: ClassVar[bool] = False  # a packed matrix is not cut for several GPUs
    scheme: str
    group: int
    has_rotated_values: bool = False
    exceptions: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self | None:
        """Return what a quantization_config says, or None for another method's.

        Raises ArgumentError for weights in another packing than the kernels here read, or of another version.
        """
        if config.get("quant_method") != METHOD:
            return None
        if config.get("version") != CONFIG_VERSION:
            raise ArgumentError(f"{_CONFIG}: version", f"must be {CONFIG_VERSION}", config.get("version"))
        if config.get("kv_cache") is not None:
            rule = "must be absent: vLLM's caches have scales by token; `ptxlab quantize --kv kv4` makes such a folder"
            raise ArgumentError(f"{_CONFIG}: kv_cache", rule, config["kv_cache"])
        exceptions = config.get("exceptions", {})
        if not isinstance(exceptions, Mapping):
            raise ArgumentError(f"{_CONFIG}: exceptions", "must be settings by layer", type(exceptions).__name__)
        formats = {name: _settings(f"{_CONFIG}: exceptions: {name}", fields) for name, fields in exceptions.items()}
        return cls(*_settings(_CONFIG, config), config.get("rotated_values") is True, formats)

    def linear_method(self, kernels: ProductKernels, prefix: str, merged: Mapping[str, list[str]]) -> W4A8LinearMethod:
        """Return the method of the layer `prefix`."""
        return PackedLinearMethod(kernels, prefix, *self.exceptions.get(prefix, (self.scheme, self.group)))

    def __str__(self) -> str:
        exceptions_text = f", {len(self.exceptions)} matrices otherwise" if self.exceptions else ""
        groups = "a scale per channel" if self.scheme == "qoq_channel" else f"groups of {self.group}"
        return f"weights W4A8 (packed, {self.scheme}, {groups}{exceptions_text})"


def _settings(name: str, config: Any) -> tuple[str, int]:
    """Return scheme and group; ArgumentError for what no kernel here reads."""
    if not isinstance(config, Mapping):
        raise ArgumentError(name, "must be settings", type(config).__name__)
    scheme, group, layout = (config.get(key) for key in ("scheme", "group", "layout"))
    if not is_one_of(scheme, SCHEMES):
        raise ArgumentError(f"{name}: scheme", f"must be one of {', '.join(SCHEMES)} in vLLM", scheme)
    if layout != _LAYOUT or config.get("interleaved", False):
        rule = f"must be {_LAYOUT}, rows in their own order; `ptxlab import FOLDER --out NEW` rewrites the folder"
        raise ArgumentError(f"{name}: layout", rule, f"{layout}, interleaved" if layout == _LAYOUT else layout)
    if not is_integer(group):
        raise ArgumentError(f"{name}: group", "must be an integer", group)
    return str(scheme), group


class PackedLinearMethod(W4A8LinearMethod):
    """Method of a layer whose checkpoint has the packed weight's buffers by the names that they keep."""

    def __init__(self, kernels: ProductKernels, prefix: str, scheme: str, group: int) -> None:
        super().__init__(kernels, prefix)
        self.stored_format = scheme, group

    def choose_format(self, K: int) -> tuple[str, int]:
        """Return the folder's scheme and group."""
        return self.stored_format

    def loaded_parameters(self, N: int, K: int, dtype: torch.dtype, weight_loader: Any) -> dict[str, nn.Parameter]:
        """Return the buffers."""
        parameters = {}
        for name, (kind, shape) in self._stored_matrix().shapes().items():
            empty_buffer = torch.empty(shape, dtype=getattr(torch, kind), device="meta")
            parameters[name] = nn.Parameter(empty_buffer, requires_grad=False)
            set_weight_attrs(parameters[name], {"weight_loader": self._load_whole})
        return parameters

    def pack(self, layer: nn.Module, loaded: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers as they are, or repacked for the kernels of this GPU."""
        stored_matrix = self._stored_matrix()
        return loaded if stored_matrix == self.matrix else repack(loaded, stored_matrix, self.matrix.layout)

    def _stored_matrix(self) -> MatrixShape:
        return replace(self.matrix, layout=_LAYOUT)

    def _load_whole(self, param: Tensor, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
        """Copy a whole buffer into `param`, a name that vLLM passes.

        Raises ArgumentError for any shard id, since matrices of one product are packed as one, and for another dtype or
        shape than `param` has.
        """
        if loaded_shard_id is not None:
            raise self._error("matrices of one product must be packed as one", f"part {loaded_shard_id} alone")
        expected, got = ((tensor.dtype, [*tensor.shape]) for tensor in (param, loaded_weight))
        if got != expected:
            raise self._error(f"packed weights must be {expected[0]} {expected[1]}", f"{got[0]} {got[1]}")
        param.data.copy_(loaded_weight)
