"""Folders of QServe: integers of 4 bits in its order, one scale per row and, in groups, integer scales and zeros."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from vllm.model_executor.parameter import ChannelQuantScaleParameter, GroupQuantScaleParameter, ModelWeightParameter

from ptxlab.errors import ArgumentError, FileError
from ptxlab.llm.checkpoints.foreign import ForeignCheckpoint, qserve_weight
from ptxlab.llm.checkpoints.imports import convert_parts
from ptxlab.llm.checkpoints.torch_file import open_checkpoint
from ptxlab.llm.vllm.kernels import ProductKernels
from ptxlab.llm.vllm.linear import W4A8LinearMethod
from ptxlab.llm.vllm.options import CHANNEL
from ptxlab.llm.vllm.packing import pack_quantised
from ptxlab.lowbit.quant import LQQWeight, QoQChannelWeight

_MARK = ".s1_scales"  # of a tensor's name
_TILE = 32  # rows of a tile of `qweight`


@dataclass(frozen=True)
class QServeCheckpoint:
    """The kind of the tensors of such a folder, which has no quantization_config.

    Attributes:
        group: columns that share a second-level scale; None for one scale per row.
    """

    is_sliceable: ClassVar[bool] = False  # columns of a tile are not cut for several GPUs
    has_rotated_values: ClassVar[bool] = False
    group: int | None

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Return what a folder holds, or None unless it has tensors of QServe; vLLM reports what cannot be read.

        Raises FileError for tensors that do not fit together, and where matrices have different groups.
        """
        try:
            names = open_checkpoint(folder).tensors
        except FileError:
            return None
        if not any(name.endswith(_MARK) for name in names):
            return None
        matrices = ForeignCheckpoint(folder).matrices.values()
        kinds = {(matrix.format.name, matrix.group if matrix.format.two_level else None) for matrix in matrices}
        if len(kinds) > 1:
            got = "; ".join(f"{name}, group {group}" for name, group in sorted(kinds, key=str))
            raise FileError(f"{folder}: all matrices must be of QServe and of one group (got {got})")
        return cls(kinds.pop()[1])

    def linear_method(self, kernels: ProductKernels, prefix: str, merged: Mapping[str, list[str]]) -> W4A8LinearMethod:
        """Return the method of the layer `prefix`."""
        return QServeLinearMethod(kernels, prefix, self.group)

    def __str__(self) -> str:
        groups = "a scale per channel" if self.group is None else f"groups of {self.group}"
        return f"weights W4A8 (QServe's integers, {groups})"


class QServeLinearMethod(W4A8LinearMethod):
    """Method of a layer whose checkpoint is QServe's: exact, as `lqq` in groups and `qoq_channel` without."""

    def __init__(self, kernels: ProductKernels, prefix: str, checkpoint_group: int | None) -> None:
        super().__init__(kernels, prefix)
        self.checkpoint_group = checkpoint_group

    def choose_format(self, K: int) -> tuple[str, int]:
        """Return the checkpoint's."""
        return (CHANNEL, K) if self.checkpoint_group is None else ("lqq", self.checkpoint_group)

    def loaded_parameters(self, N: int, K: int, dtype: torch.dtype, weight_loader: Any) -> dict[str, nn.Parameter]:
        """Return QServe's tensors; rows of tiles lie behind one another, so that those of merged matrices do, too."""

        def empty(kind: torch.dtype, *shape: int) -> dict[str, Any]:
            return {"data": torch.empty(*shape, dtype=kind, device="meta"), "weight_loader": weight_loader}

        if N % _TILE or K % _TILE:
            raise self._error(f"N and K must be multiples of {_TILE}", f"N={N}, K={K}")
        half_parameters = {"s1_scales": ChannelQuantScaleParameter(output_dim=0, **empty(torch.float16, N))}
        weight = ModelWeightParameter(input_dim=1, output_dim=0, **empty(torch.int8, N, K // 2))
        if self.checkpoint_group is None:
            half_parameters["s1_szeros"] = ChannelQuantScaleParameter(output_dim=0, **empty(torch.float16, N))
            return {"qweight": weight, **half_parameters}
        constants = {
            name: GroupQuantScaleParameter(
                input_dim=0, output_dim=1, **empty(torch.int8, K // self.checkpoint_group, N)
            )
            for name in ("s2_scales", "s2_zeros")
        }
        return {"qweight": weight, **half_parameters, **constants}

    def pack(self, layer: nn.Module, loaded: dict[str, Tensor]) -> dict[str, Tensor]:
        """Pack the integers, which the host puts into rows. Raises ArgumentError for a zero that is no integer."""
        arrays = {name: tensor.cpu().numpy() for name, tensor in loaded.items()}
        floats = {name: array.astype("float32") for name, array in arrays.items() if name.startswith("s1_")}
        qweight = loaded["qweight"]
        loaded.clear()
        quantised_weight = convert_parts([qserve_weight(arrays | floats)]).weight
        expected_class = QoQChannelWeight if self.checkpoint_group is None else LQQWeight
        if not isinstance(quantised_weight, expected_class):
            raise ArgumentError("s1_szeros", "must be integers 0..15 times s1_scales", "others")
        return pack_quantised(quantised_weight, qweight, self.matrix.layout)
