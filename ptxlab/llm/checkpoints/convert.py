"""A checkpoint in, a checkpoint of packed 4-bit weights out: tensor by tensor, in memory for the largest one."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError, FileError, VerificationError
from ptxlab.llm.model.weights import quantiser
from ptxlab.lowbit.layout import PackedWeight, buffer_shapes, load, pack, unpack
from ptxlab.lowbit.layout.checkpoint import FLOATS, Checkpoint, TensorInfo, write_checkpoint
from ptxlab.lowbit.layout.packed_weight import QuantizedWeight
from ptxlab.lowbit.layout.storage import METADATA_KEY, announce, contents, header_fields, metadata
from ptxlab.lowbit.quant import PROTECTIVE_RANGE
from ptxlab.lowbit.quant.inputs import check_protective_range

_EMBEDDING = re.compile(r"embed|(^|[._])w[tp]e\b", re.IGNORECASE)  # embed_tokens, position_embeddings, wte, wpe
_LISTED = 8  # tensors that one message names

Progress = Callable[[str], None]  # called with the name of each tensor that is done with


@dataclass(frozen=True)
class PlannedTensor:
    """The plan for one tensor: `fields` describe the packed weight, or are None with the `reason` for a copy.

    `selected`: it is a matrix under the pattern, so that a copy deserves a word.
    """

    source: TensorInfo
    fields: dict[str, Any] | None
    reason: str = ""
    selected: bool = True

    @property
    def described(self) -> str:
        """Name, dtype and shape, for a message."""
        return f"{self.source.name} {self.source.dtype} {list(self.source.shape)}"

    @property
    def announced(self) -> list[TensorInfo]:
        """Tensors of the new file that the tensor becomes."""
        return announce(self.source.name, self.fields) if self.fields else [self.source]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the new file."""
        return sum(tensor.nbytes for tensor in self.announced)

    @property
    def bits(self) -> float:
        """Bits per element in the new file, constants and padding included."""
        return 8 * self.nbytes / max(1, prod(self.source.shape))


@dataclass
class Conversion:
    """The conversion that `plan` has found; `write` makes the new file, `verify` loads it again."""

    checkpoint: Checkpoint
    tensors: list[PlannedTensor]
    _digests: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def steps(self) -> int:
        """Number of progress reports that `write` and `verify` make together."""
        return len(self.tensors) + len(self._packed)

    def write(self, out: str | os.PathLike[str], progress: Progress | None = None) -> None:
        """Quantise, pack and write every planned tensor and copy the others, whole or not at all.

        Raises ArgumentError, with the tensor's name, for values that the quantiser refuses (NaN, infinity, unusable
        scales) and for a group that the kernels would restore wrong (at a protective range that is too wide); for two
        tensors that would have one name, and for a file that is the checkpoint itself; FileError if the file cannot be
        written.
        """
        if os.path.exists(out) and os.path.samefile(out, self.checkpoint.path):
            raise ArgumentError("out", "must be another file than the checkpoint, which would be lost", out)
        announced = [new_tensor for tensor in self.tensors for new_tensor in tensor.announced]
        fields_by_name = {tensor.source.name: tensor.fields for tensor in self._packed if tensor.fields}
        write_checkpoint(out, announced, self._contents(progress), self.checkpoint.metadata | metadata(fields_by_name))

    def verify(self, out: str | os.PathLike[str], progress: Progress | None = None) -> None:
        """Load every packed weight of the written file; raises VerificationError if one differs in any bit."""
        for tensor in self._packed:
            name = tensor.source.name
            if _digest(unpack(load(out, name))) != self._digests[name]:
                raise VerificationError(f"{out}: {name} does not load as it was written")
            if progress:
                progress(name)

    @property
    def _packed(self) -> list[PlannedTensor]:
        return [tensor for tensor in self.tensors if tensor.fields]

    def _contents(self, progress: Progress | None) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for tensor in self.tensors:
            name = tensor.source.name
            if tensor.fields:
                weight, packed = self._quantize(name, tensor.fields)
                self._digests[name] = _digest(weight)
                yield from contents(name, packed)
            else:
                yield name, self.checkpoint.read_bytes(name)
            if progress:
                progress(name)

    def _quantize(self, name: str, fields: dict[str, Any]) -> tuple[QuantizedWeight, PackedWeight]:
        try:
            quantise = quantiser(fields["scheme"], protective_range=fields["protective_range"])
            weight = quantise(self.checkpoint.read(name), fields["group"])
            return weight, pack(weight, fields["layout"])
        except ArgumentError as error:
            raise ArgumentError(name, error.rule, error.value) from None


def plan(
    path: str | os.PathLike[str],
    *,
    scheme: str = "lqq",
    group: int = 64,
    layout: str = "strips",
    pattern: str = "*",
    protective_range: int = PROTECTIVE_RANGE,
) -> Conversion:
    """Decide which tensors of a safetensors file are packed: float matrices [N, K] under the shell-style `pattern`.

    N must be a multiple of 8 and K of the group (qoq_channel, which has no groups: of 32). Embeddings are tables to
    look up, not to multiply by: they are packed only if the pattern itself names one (`*word_embeddings*`). All others
    are copied. Reads nothing but the header. Raises FileError for a file that is not safetensors or of which nothing
    can be packed (with the reason per tensor), ArgumentError for an unknown scheme, group or layout, for a pattern that
    matches no tensor, for a protective range outside 1..127, and for a file that is packed already.
    """
    check_protective_range(protective_range)
    checkpoint = Checkpoint(path)
    buffer_shapes(layout, scheme, 8, 128, 128 if scheme == "qoq_channel" else group)  # refuses bad arguments
    if METADATA_KEY in checkpoint.metadata:
        raise ArgumentError("path", "must not hold packed weights already", path)
    tensors = [
        _plan(tensor_info, scheme, group, layout, pattern, protective_range)
        for tensor_info in checkpoint.tensors.values()
    ]
    matched = [tensor for tensor in tensors if fnmatchcase(tensor.source.name, pattern)]
    if not matched:
        raise ArgumentError("pattern", f"must match a tensor of {path}", pattern)
    if not any(tensor.fields for tensor in matched):
        reasons = [f"{tensor.described}: {tensor.reason}" for tensor in sorted(matched, key=lambda t: not t.selected)]
        remainder = [f"and {len(reasons) - _LISTED} more"] if len(reasons) > _LISTED else []
        raise FileError(f"{path}: no tensor can be packed: {'; '.join(reasons[:_LISTED] + remainder)}")
    return Conversion(checkpoint, tensors)


def _plan(
    tensor: TensorInfo, scheme: str, group: int, layout: str, pattern: str, protective_range: int
) -> PlannedTensor:
    if not fnmatchcase(tensor.name, pattern):
        return PlannedTensor(tensor, None, "not selected", selected=False)
    if len(tensor.shape) != 2:
        return PlannedTensor(tensor, None, "not a matrix", selected=False)
    if tensor.dtype not in FLOATS:
        return PlannedTensor(tensor, None, f"not of {', '.join(FLOATS)}")
    if _EMBEDDING.search(tensor.name) and not _EMBEDDING.search(pattern):
        return PlannedTensor(tensor, None, "an embedding, which the pattern does not name")
    (N, K), channel = tensor.shape, scheme == "qoq_channel"
    try:
        buffer_shapes(layout, scheme, N, K, K if channel else group)
    except ArgumentError as error:
        return PlannedTensor(tensor, None, f"{error.rule} ({error.value})")
    group_fields = (K, 0) if channel else (group, protective_range)
    return PlannedTensor(tensor, header_fields(layout, scheme, N, K, *group_fields))


def _digest(weight: QuantizedWeight) -> str:
    digest = hashlib.sha256()
    for name, array in vars(weight).items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
