"""Quantised checkpoints of other projects, as weights: which tensors make a matrix, and where each nibble lies in them.

A format is known by the last parts of its tensors' names. Of `..q_proj.qweight` and `..q_proj.scales` the matrix is
called `..q_proj.weight`, as where it is not quantised. All shapes are checked before anything is read.

`QServe`      qweight s8 [N, K/2] in tiles of 32 rows x 32 k, row of tiles by row, 512 bytes each. Byte
              16·lane + 8·h + 4·p + j of a tile, lane 4·r + c, has in its low nibble row r + 8·p, k 16·h + 4·c + j, in
              its high nibble the row 16 below. s1_scales f16 [N]. Per group: s2_scales, s2_zeros s8 [K/g, N], of each
              32 rows in the order 0, 8, 16, 24, 1, 9, ..; w = (q4·s2_scales + s2_zeros)·s1_scales, the sum modulo 256.
              Per channel: s1_szeros f16 [N]; w = q4·s1_scales - s1_szeros.
`compressed-tensors`
              packed: weight_packed s32 [N, K/8], eight weights a word, the first in the lowest bits, 8 added to each;
              weight_zero_point likewise, along N. Or weight s8 [N, K] in -8..7, weight_zero_point s8 [N, G].
              weight_scale [N, G]; w = (q - zero)·scale. weight_g_idx s32 [K], each k's group, or -1 throughout.
`GPTQ`        qweight s32 [K/8, N], eight weights of a column a word; qzeros s32 [G, N/8]; scales f16 [G, N];
              g_idx s32 [K], each k's group; w = (q4 - zero)·scale. Version 1 stores zero - 1: AutoGPTQ subtracts from
              each zero point modulo 16, GPTQModel and AutoRound from the word, which borrows. Version 2 stores zero.
`AWQ`         qweight s32 [K, N/8], qzeros s32 [G, N/8]: the nibbles of a word, lowest first, are columns 0, 2, 4, 6, 1,
              3, 5, 7 of eight; scales f16 [G, N]; w = (q4 - qzeros)·scale.

K need be no multiple of the group size that a config declares: the last group is shorter. Scales may be negative.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError, FileError, in_file, naming
from ptxlab.hardware.words import F32, U8
from ptxlab.llm.checkpoints.declared import AWQ, GPTQ, INTEGERS, PACKED, WHOLE_ROW, Declaration, read_declarations
from ptxlab.llm.checkpoints.torch_file import open_checkpoint
from ptxlab.lowbit.layout.checkpoint import FLOATS, TensorInfo
from ptxlab.lowbit.layout.foreign_orders import AWQ_COLUMNS, qserve_rows, unpack_qserve, unpack_words
from ptxlab.lowbit.layout.storage import METADATA_KEY
from ptxlab.lowbit.quant import AffineWeight, LQQWeight
from ptxlab.lowbit.quant.inputs import extremes

ForeignWeight: TypeAlias = LQQWeight | AffineWeight
Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = Mapping[str, Array]
_INTEGERS = {"I8": np.int8, "U8": np.uint8, "I32": np.int32, "I64": np.int64}
UNKNOWN_RANGE = 127  # of level 1, which no file says


@dataclass(frozen=True)
class ForeignMatrix:
    """A matrix of a format: its tensors by the last part of their names; `group` columns share constants."""

    name: str
    format: "ForeignFormat"
    declared: Declaration
    tensors: Mapping[str, str]
    N: int
    K: int
    groups: int
    group: int


@dataclass(frozen=True)
class ForeignFormat:
    """A format: the names that a matrix needs and those that it may have beside, its sizes and its weight.

    `shapes(N, K, G)` are those of its tensors, dtypes "float" for any of `FLOATS`; `sizes` gives N, K and G (1 without
    groups) by the shapes found, or None where they are another format's.
    """

    name: str
    needs: tuple[str, ...]
    sizes: Callable[[Mapping[str, tuple[int, ...]]], tuple[int, int, int] | None]
    shapes: Callable[[int, int, int], dict[str, tuple[str, tuple[int, ...]]]]
    weight: Callable[[ForeignMatrix, Arrays], ForeignWeight]
    two_level: bool = False  # integer scales per group: an LQQWeight


class ForeignCheckpoint:
    """A checkpoint with matrices of these formats, read as if they were floats: `tensors` and `read` as `Checkpoint`'s.

    `matrices` are the quantised ones by name, `weight` gives their integers; the others are as the file has them.

    Raises FileError: no readable checkpoint; a matrix some of whose tensors are missing, or have other dtypes or shapes
    than the rest demands; a config of another method, with settings that the formula has not, or that contradicts the
    tensors.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.declared = read_declarations(self.path if self.path.is_dir() else self.path.parent)
        self.file = open_checkpoint(path)
        if METADATA_KEY in self.file.metadata:
            raise FileError(f"{self.path}: holds packed weights already")
        self.matrices: dict[str, ForeignMatrix] = {}
        self.tensors: dict[str, TensorInfo] = {}
        modules: dict[str, dict[str, TensorInfo]] = {}
        for name, tensor in self.file.tensors.items():
            if not name.isprintable():
                raise FileError(f"{self.path}: a tensor's name must be printable (got {name[:40]!r})")
            module, _, part = name.rpartition(".")
            modules.setdefault(module, {})[part] = tensor
        for module, parts in modules.items():
            if _MARKS & parts.keys():
                self._add_matrix(f"{module}.weight", {part: parts.pop(part) for part in _PARTS & parts.keys()})
            self.tensors |= {tensor.name: tensor for tensor in parts.values()}
        if (declared_format := self.declared[0].format) and not self.matrices:
            raise FileError(f"{self.path}: no matrix is quantised, where the config declares {declared_format}")

    def read(self, name: str) -> Array:
        """Read the tensor `name`: f32 [N, K] of a quantised matrix, otherwise what the file's own `read` returns."""
        return self.weight(name).dequantize() if name in self.matrices else self.file.read(name)

    def weight(self, name: str) -> ForeignWeight:
        """Read the integers and constants of a quantised matrix.

        Raises FileError for scales that are not finite, values that no 4 bits have, and constants that contradict the
        config.
        """
        matrix = self.matrices[name]
        with in_file(self.path), naming(name):
            arrays = {part: self._read_array(tensor) for part, tensor in matrix.tensors.items()}
            return matrix.format.weight(matrix, arrays)

    def column_groups(self, name: str) -> Array:
        """Return the group of each column of a matrix, int32 [K]; its weights are not read."""
        matrix = self.matrices[name]
        with in_file(self.path), naming(name):
            parts = _INDICES & matrix.tensors.keys()
            return _column_groups(matrix, {part: self._read_array(matrix.tensors[part]) for part in parts})

    def zero_biases(self) -> set[str]:
        """Find the biases of quantised matrices that are zero throughout: AutoGPTQ gives one to every matrix."""
        zero = set()
        for name in self.matrices:
            bias = name.removesuffix("weight") + "bias"
            if bias in self.tensors and not self.file.read(bias).any():
                zero.add(bias)
        return zero

    def _add_matrix(self, name: str, parts: dict[str, TensorInfo]) -> None:
        """Recognise the format of a matrix by its parts, and add it to `matrices`."""
        shapes = {part: tensor.shape for part, tensor in parts.items()}
        for format in _FORMATS:
            if not {*format.needs} <= parts.keys():
                continue
            if len(shapes[format.needs[0]]) != 2 or (sizes := format.sizes(shapes)) is None:
                continue
            self._check_tensors(format, parts, *sizes)
            declaration = self._declared_of(name, format, parts, *sizes)
            N, K, groups = sizes
            group = _group_size(declaration, K, groups)
            tensors = {part: tensor.name for part, tensor in parts.items()}
            self.matrices[name] = ForeignMatrix(name, format, declaration, tensors, N, K, groups, group)
            self.tensors[name] = TensorInfo(name, (N, K), "F32", 4 * N * K)
            return
        listed_shapes = ", ".join(f"{part} {[*shape]}" for part, shape in sorted(shapes.items()))
        nearest_format = max(_FORMATS, key=lambda format: len({*format.needs} & parts.keys()) - 0.1 * len(format.needs))
        missing_parts = [part for part in nearest_format.needs if part not in parts]
        rule = (
            f"{nearest_format.name} needs {', '.join(missing_parts)}"
            if missing_parts
            else f"not the shapes of {nearest_format.name}"
        )
        raise FileError(f"{self.path}: {name}: {rule} (got {listed_shapes})")

    def _check_tensors(self, format: ForeignFormat, parts: dict[str, TensorInfo], N: int, K: int, groups: int) -> None:
        expected_shapes = format.shapes(N, K, groups)
        for part, tensor in parts.items():
            if part not in expected_shapes:
                raise FileError(f"{self.path}: {tensor.name}: not known in {format.name}")
            kind, shape = expected_shapes[part]
            if tensor.shape != shape or (tensor.dtype not in FLOATS if kind == "float" else tensor.dtype != kind):
                got = f"{tensor.dtype} {[*tensor.shape]}"
                raise FileError(f"{self.path}: {tensor.name}: must be {kind} {[*shape]} in {format.name} (got {got})")

    def _declared_of(
        self, name: str, format: ForeignFormat, parts: dict[str, TensorInfo], N: int, K: int, groups: int
    ) -> Declaration:
        """Find the declaration that a matrix is of. Raises FileError where none is, or several that read otherwise."""
        with in_file(self.path), naming(name):
            if not N or not K or not groups:
                raise ArgumentError("shape", "must not be empty", f"N={N}, K={K}, {groups} groups")
            matching, errors = [], []
            for declaration in self.declared:
                try:
                    _check_declared(name, declaration, format, {*parts}, K, groups)
                    matching.append(declaration)
                except ArgumentError as error:
                    errors.append(error)
            if not matching and len(errors) > 1:
                raise ArgumentError(
                    "config_groups", "must have the groups of every matrix", f"{groups} groups of K={K}"
                )
            if not matching:
                raise errors[0]
            sizes = sorted({_group_size(declaration, K, groups) for declaration in matching})
            if len(sizes) > 1:
                rule = f"must tell the size of {groups} groups of K={K}"
                raise ArgumentError("config_groups", rule, " or ".join(map(str, sizes)))
        return min(
            matching, key=lambda declaration: declaration.symmetric is not False
        )  # one without zero points would fit too

    def _read_array(self, name: str) -> Array:
        """Read a tensor of the file: integers as stored, floats as f32, which must be finite."""
        tensor = self.file.tensors[name]
        if tensor.dtype in _INTEGERS:
            return self.file.read_bytes(name).view(_INTEGERS[tensor.dtype]).reshape(tensor.shape)
        floats = self.file.read(name).astype(np.float32, copy=False)
        extremes(name.rpartition(".")[2], floats)  # all are finite
        return floats


def _check_declared(
    name: str, declared: Declaration, format: ForeignFormat, parts: set[str], K: int, groups: int
) -> None:
    """Raise ArgumentError unless the tensors of a matrix are what is declared."""
    if declared.format not in (None, format.name):
        raise ArgumentError("format", f"must be {declared.format}, as the config says", format.name)
    if name.removesuffix(".weight") in declared.ignored:
        raise ArgumentError("format", "must not be quantised, as the config says", format.name)
    size = _group_size(declared, K, groups)
    if ceil_div(K, size) != groups or (K % groups and format.two_level):
        rule = f"must be of {size} columns, as the config says" if declared.group_size else "must divide K"
        raise ArgumentError("groups", rule, f"{groups} groups of K={K}")
    if declared.symmetric is False and not any("zero" in part for part in parts):
        raise ArgumentError("zero points", "must be there, as the config says", "none")
    if declared.act_order and groups > 1 and not _INDICES & parts:
        raise ArgumentError("g_idx", "must be there, as the config says that groups follow activations", "none")


def _group_size(declared: Declaration, K: int, groups: int) -> int:
    """Return the columns of a group: of all but the last one, which may have fewer."""
    if declared.group_size is None:
        return max(1, K // groups)
    return K if declared.group_size == WHOLE_ROW else min(declared.group_size, K)


# --- the formats -----------------------------------------------------------------------------------------------------


def qserve_weight(arrays: Arrays) -> ForeignWeight:
    """Convert QServe's tensors, keyed by the last part of their names; with `s2_scales` the weight has groups.

    Raises ArgumentError for constants that no such weight has.
    """
    return _qserve_groups(arrays) if "s2_scales" in arrays else _qserve_channel(arrays)


def _qserve_groups(arrays: Arrays) -> LQQWeight:
    """Convert QServe's weight of groups; its zeros are integers whatever the scale, and become LQQ's minimum.

    Some zeros are -255..0 modulo 256. Where such a zero reads as positive and its group overflows by that, 256 is
    subtracted. The group's smallest nibble moves from q4 into the minimum, which is a signed byte then. The integers
    stay the same.
    """
    q4, scale = unpack_qserve(arrays["qweight"]), qserve_rows(arrays["s2_scales"])
    if scale.min() < 0:
        raise ArgumentError("s2_scales", "must be 0 or more", int(scale.min()))
    minimum = qserve_rows(arrays["s2_zeros"]).astype(np.int16)
    groups = q4.reshape(*scale.shape, -1)
    lowest = groups.min(axis=2)
    restored_lowest = lowest * scale.astype(np.int16) + minimum
    is_wrapped = (minimum > 0) & (restored_lowest >= 128) & (restored_lowest < 384)
    groups -= np.where(is_wrapped, lowest, 0).astype(np.uint8)[:, :, None]
    return LQQWeight(
        q4=q4,
        group_scale=scale.view(np.uint8),
        minimum=np.where(is_wrapped, restored_lowest - 256, minimum).astype(np.int8),
        channel_scale=arrays["s1_scales"],
        protective_range=UNKNOWN_RANGE,
    )


def _qserve_channel(arrays: Arrays) -> AffineWeight:
    """Convert QServe's weight per channel, whose file has zero·scale rounded to FP16.

    Where the product is an integer's, the zero is that integer.
    """
    scale, scaled_zeros = arrays["s1_scales"], arrays["s1_szeros"]
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = np.where(scaled_zeros == 0, 0, scaled_zeros / scale).astype(np.float32)
    if not np.isfinite(zero).all():
        raise ArgumentError("s1_szeros", "must be finite multiples of s1_scales", "infinity")
    rounded_zero = np.rint(zero)
    zero = np.where(
        np.abs(rounded_zero * scale - scaled_zeros) <= np.abs(scaled_zeros) * 2.0**-10 + 2.0**-24, rounded_zero, zero
    )
    return AffineWeight(
        q4=unpack_qserve(arrays["qweight"]), scale=scale[:, None], zero=zero.astype(np.float32)[:, None]
    )


def _compressed_words(matrix: ForeignMatrix, arrays: Arrays) -> AffineWeight:
    shape = tuple(arrays["weight_shape"].tolist())
    if shape != (matrix.N, matrix.K):
        raise ArgumentError("weight_shape", f"4 bits in weight_packed are {[matrix.N, matrix.K]}", [*shape])
    zero = arrays.get("weight_zero_point")
    if zero is not None:
        zero = unpack_words(zero, 0)[: matrix.N]
    return _affine(matrix, unpack_words(arrays["weight_packed"], 1), arrays["weight_scale"], zero, arrays)


def _compressed_integers(matrix: ForeignMatrix, arrays: Arrays) -> AffineWeight:
    q = arrays["weight"]
    if q.min() < -8 or q.max() > 7:
        raise ArgumentError("weight", "must be of 4 bits, -8..7", f"{q.min()}..{q.max()}")
    zero = arrays.get("weight_zero_point")
    zero = None if zero is None else zero.astype(np.int16) + 8
    return _affine(matrix, (q + 8).astype(np.uint8), arrays["weight_scale"], zero, arrays)


def _gptq(matrix: ForeignMatrix, arrays: Arrays) -> AffineWeight:
    zero = _gptq_zeros(arrays["qzeros"], matrix.declared)
    return _affine(matrix, unpack_words(arrays["qweight"], 0).T, arrays["scales"].T, zero.T, arrays)


def _gptq_zeros(qzeros: Array, declared: Declaration) -> U8:
    """Unpack zero points of the version that the config names. If all are a version's middle, it is that version.

    Files of version 2 are in use that a config calls version 1, and reversed: symmetric ones, which only this tells.
    """
    stored_zeros = unpack_words(qzeros, 1)
    symmetric_version = (
        {8: 2, 7: 1}.get(int(stored_zeros[0, 0])) if (stored_zeros == stored_zeros[0, 0]).all() else None
    )
    version = declared.version or 1
    if symmetric_version not in (None, version):
        if declared.symmetric is False:
            rule = f"must not all be {stored_zeros[0, 0]} in version {version} where the config's sym is false"
            raise ArgumentError("qzeros", rule, "the middle of the other version")
        version = symmetric_version
    if version == 2:
        return stored_zeros
    if declared.borrows:
        return unpack_words((qzeros.view(np.uint32) + np.uint32(0x11111111)).view(np.int32), 1)
    zero: U8 = stored_zeros + np.uint8(1) & np.uint8(15)
    return zero


def _awq(matrix: ForeignMatrix, arrays: Arrays) -> AffineWeight:
    q4, zero = (unpack_words(arrays[part], 1, AWQ_COLUMNS) for part in ("qweight", "qzeros"))
    return _affine(matrix, q4.T, arrays["scales"].T, zero.T, arrays)


def _affine(matrix: ForeignMatrix, q4: Array, scale: F32, zero: Array | None, arrays: Arrays) -> AffineWeight:
    """Make a weight of unpacked arrays and the file's column groups; without zero points it is symmetric around 8."""
    zero = np.full(scale.shape, 8) if zero is None else zero
    if matrix.declared.symmetric and (zero != 8).any():
        raise ArgumentError("zero points", "must be 8, as the config says", f"{zero.min()}..{zero.max()}")
    group_indices = _column_groups(matrix, arrays)
    columns_per_group = matrix.K // matrix.groups
    is_regular = matrix.K % matrix.groups == 0 and (group_indices == np.arange(matrix.K) // columns_per_group).all()
    return AffineWeight(
        q4=np.ascontiguousarray(q4),
        scale=np.ascontiguousarray(scale),
        zero=np.ascontiguousarray(zero, dtype=np.float32),
        group_of=None if is_regular else group_indices,
    )


def _column_groups(matrix: ForeignMatrix, arrays: Arrays) -> Array:
    """Return the group of each column: as the file has it, else in the columns' order."""
    ordered_groups = (np.arange(matrix.K) // matrix.group).astype(np.int32)
    part = next(iter(_INDICES & arrays.keys()), None)
    if part is None or (part == "weight_g_idx" and (arrays[part] == -1).all()):
        return ordered_groups
    index = arrays[part]
    if index.min() < 0 or index.max() >= matrix.groups:
        raise ArgumentError(part, f"must lie in 0..{matrix.groups - 1}", f"{index.min()}..{index.max()}")
    if (counts := np.bincount(index)).max() > matrix.group:
        rule = f"must give a group {matrix.group} columns"
        raise ArgumentError(part, rule, f"{counts.max()} in group {counts.argmax()}")
    return index


def _qserve_sizes(qweight: tuple[int, ...], groups: int) -> tuple[int, int, int] | None:
    N, K = qweight[0], 2 * qweight[1]
    return None if N % 32 or K % 32 else (N, K, groups)


_FORMATS = (
    ForeignFormat(
        "QServe per group",
        ("qweight", "s1_scales", "s2_scales", "s2_zeros"),
        lambda shapes: _qserve_sizes(shapes["qweight"], (*shapes["s2_scales"], 0)[0]),
        lambda N, K, G: {
            "qweight": ("I8", (N, K // 2)),
            "s1_scales": ("float", (N,)),
            "s2_scales": ("I8", (G, N)),
            "s2_zeros": ("I8", (G, N)),
        },
        lambda _, arrays: qserve_weight(arrays),
        two_level=True,
    ),
    ForeignFormat(
        "QServe per channel",
        ("qweight", "s1_scales", "s1_szeros"),
        lambda shapes: _qserve_sizes(shapes["qweight"], 1),
        lambda N, K, G: {
            "qweight": ("I8", (N, K // 2)),
            "s1_scales": ("float", (N,)),
            "s1_szeros": ("float", (N,)),
        },
        lambda _, arrays: qserve_weight(arrays),
    ),
    ForeignFormat(
        PACKED,
        ("weight_packed", "weight_scale", "weight_shape"),
        lambda shapes: (shapes["weight_packed"][0], 8 * shapes["weight_packed"][1], (*shapes["weight_scale"], 1, 1)[1]),
        lambda N, K, G: {
            "weight_packed": ("I32", (N, K // 8)),
            "weight_scale": ("float", (N, G)),
            "weight_shape": ("I64", (2,)),
            "weight_zero_point": ("I32", (ceil_div(N, 8), G)),
            "weight_g_idx": ("I32", (K,)),
        },
        _compressed_words,
    ),
    ForeignFormat(
        INTEGERS,
        ("weight", "weight_scale"),
        lambda shapes: (shapes["weight"][0], shapes["weight"][1], (*shapes["weight_scale"], 1, 1)[1]),
        lambda N, K, G: {
            "weight": ("I8", (N, K)),
            "weight_scale": ("float", (N, G)),
            "weight_zero_point": ("I8", (N, G)),
        },
        _compressed_integers,
    ),
    ForeignFormat(
        GPTQ,
        ("qweight", "qzeros", "scales"),
        lambda shapes: (
            (shapes["qweight"][1], 8 * shapes["qweight"][0], shapes["scales"][0])
            if shapes["qweight"][1:] == shapes["scales"][1:]
            else None
        ),
        lambda N, K, G: {
            "qweight": ("I32", (K // 8, N)),
            "qzeros": ("I32", (G, N // 8)),
            "scales": ("float", (G, N)),
            "g_idx": ("I32", (K,)),
        },
        _gptq,
    ),
    ForeignFormat(
        AWQ,
        ("qweight", "qzeros", "scales"),
        lambda shapes: (
            (8 * shapes["qweight"][1], shapes["qweight"][0], shapes["scales"][0])
            if shapes["scales"][1:] == (8 * shapes["qweight"][1],)
            else None
        ),
        lambda N, K, G: {
            "qweight": ("I32", (K, N // 8)),
            "qzeros": ("I32", (G, N // 8)),
            "scales": ("float", (G, N)),
        },
        _awq,
    ),
)
_PARTS = {part for format in _FORMATS for part in format.shapes(32, 32, 1)}
_MARKS = _PARTS - {"weight"}
_INDICES = {"g_idx", "weight_g_idx"}
