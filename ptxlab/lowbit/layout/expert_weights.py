"""The packed weights of a layer's experts as one: what a grouped GEMM takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.layout.description import Described
from ptxlab.lowbit.layout.packed_weight import PackedWeight
from ptxlab.validate import is_integer, shape_of


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertWeights(Described):
    """`E` weights [N, K] in one packing, made by `stack_experts`.

    `buffers` are those of a `PackedWeight`, NumPy or CuPy, with the expert as another axis in front. Raises
    ArgumentError if one of them has another number of experts.
    """

    layout: str
    scheme: str
    E: int
    N: int
    K: int
    group: int
    protective_range: int  # the widest of all
    buffers: Mapping[str, npt.NDArray[Any]] = field(repr=False)

    def __post_init__(self) -> None:
        if not is_integer(self.E) or self.E < 1 or not isinstance(self.buffers, Mapping):
            raise ArgumentError("E, buffers", "an integer, 1 or more, and arrays by name", f"{self.E}, {self.buffers}")
        if scalars := [name for name, array in self.buffers.items() if not shape_of(array)]:
            raise ArgumentError(f"buffers[{scalars[0]}]", "must be an array", type(self.buffers[scalars[0]]).__name__)
        for expert in {0, self.E - 1}:
            self.expert(expert)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, padding included."""
        return sum(int(array.nbytes) for array in self.buffers.values())

    def expert(self, index: int) -> PackedWeight:
        """Return a view of one expert's weight; raise ArgumentError if there is no such expert."""
        if not is_integer(index) or not 0 <= index < self.E:
            raise ArgumentError("expert", f"must be in 0..{self.E - 1}", index)
        first_axes = {name: array.shape[:1] for name, array in self.buffers.items()}
        if any(shape != (self.E,) for shape in first_axes.values()):
            raise ArgumentError("buffers", f"must have {self.E} experts in front", first_axes)
        return PackedWeight(
            layout=self.layout,
            scheme=self.scheme,
            N=self.N,
            K=self.K,
            group=self.group,
            protective_range=self.protective_range,
            buffers={name: array[index] for name, array in self.buffers.items()},
        )


@break_graph
def stack_experts(weights: Sequence[PackedWeight]) -> ExpertWeights:
    """Copy the weights of all experts, in the given order, into one ExpertWeights.

    Raises ArgumentError: none given, something else than a PackedWeight, or one that differs from the first in layout,
    scheme, N, K or group.
    """
    weights = list(weights) if isinstance(weights, Sequence) else []
    if not weights:
        raise ArgumentError("weights", "must be one PackedWeight or more", "none")
    shared_fields = ("layout", "scheme", "N", "K", "group")
    for expert, weight in enumerate(weights):
        if not isinstance(weight, PackedWeight):
            raise ArgumentError(f"weights[{expert}]", "must be a PackedWeight (layout.pack)", type(weight).__name__)
        if weight.interleaved:
            raise ArgumentError(f"weights[{expert}]", "must not be interleaved: grouped GEMMs have no epilogue", True)
        for name in shared_fields:
            if getattr(weight, name) != getattr(weights[0], name):
                rule = f"must have {name} {getattr(weights[0], name)} as the first"
                raise ArgumentError(f"weights[{expert}]", rule, getattr(weight, name))
    return ExpertWeights(
        **{name: getattr(weights[0], name) for name in shared_fields},
        E=len(weights),
        protective_range=max(weight.protective_range for weight in weights),
        buffers={name: np.stack([weight.buffers[name] for weight in weights]) for name in weights[0].buffers},
    )
