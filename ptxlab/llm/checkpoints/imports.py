"""Checkpoints that others have quantised, as packed weights: exact where a scheme of ours holds their numbers.

QServe's weights with groups are exact as `lqq`, whatever their zeros. Weights with one scale per row and a zero point
in 0..15 are exact as `qoq_channel`. All others have float scales per group, where the kernels here take integers: they
become the nearest `lqq` of the same groups (`AffineWeight.nearest_lqq`). Where groups are not contiguous, or no groups
of ours, weights are dequantised and quantised from the beginning.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError, FileError, naming
from ptxlab.io.files import require_folder
from ptxlab.llm.checkpoints import folder as folders
from ptxlab.llm.checkpoints import open_model
from ptxlab.llm.checkpoints.foreign import UNKNOWN_RANGE, ForeignCheckpoint, ForeignMatrix, ForeignWeight
from ptxlab.llm.checkpoints.open import tensor_name
from ptxlab.llm.model.quantized import FUSED, packed_layer, stored_ends
from ptxlab.lowbit.audit import relative_error
from ptxlab.lowbit.layout import LAYOUTS, buffer_shapes, pack
from ptxlab.lowbit.layout.checkpoint import write_checkpoint
from ptxlab.lowbit.layout.packed_weight import QuantizedWeight, require_no_overflow
from ptxlab.lowbit.layout.storage import announce, contents, header_fields, metadata
from ptxlab.lowbit.quant import (
    GROUPS,
    PROTECTIVE_RANGE,
    AffineWeight,
    LQQWeight,
    QoQChannelWeight,
    TwoLevelWeight,
    quantize_lqq,
)
from ptxlab.validate import is_one_of

_LQQ = ("q4", "group_scale", "minimum", "channel_scale")

Progress = Callable[[str, int], None]  # called with each matrix, or layer, that is done, and how many there are


@dataclass(frozen=True)
class ImportedMatrix:
    """What became of a matrix.

    `relative_error` is ||W - W'||_F / ||W||_F, W being what the file's numbers stand for; None where they were taken
    over exactly. `overflows` counts the groups that the kernels would restore wrong, of `groups`; `overflow` says the
    first place and its values.
    """

    name: str
    format: str
    shape: tuple[int, int]
    scheme: str
    group: int
    relative_error: float | None
    groups: int
    overflows: int
    overflow: str


def import_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    layout: str = "strips",
    unchecked: bool = False,
    progress: Progress = lambda name, total: None,
) -> list[ImportedMatrix]:
    """Import a quantised checkpoint of a format of `foreign`.

    A folder with config.json becomes the folder `out` of a quantised model, which `open_model` opens; a file, or a
    folder of files alone, becomes the safetensors file `out` of packed weights, all other tensors copied. Either
    appears when it is complete. Memory is bounded by the largest layer, or matrix.

    Args:
        source: file or folder, safetensors or of `torch.save`.
        out: what to make.
        layout: of the packing.
        unchecked: take groups over that overflow s8, which is refused otherwise, with the matrix, row and values.
        progress: of matrices, or layers.

    Raises FileError for a checkpoint that is broken or has no matrix of such a format, and where `out` is there;
    ArgumentError for an unknown layout, a matrix whose size the layout does not take, and a group that overflows.
    """
    source, out = Path(source), Path(out)
    if not is_one_of(layout, LAYOUTS):
        raise ArgumentError("layout", f"must be one of {', '.join(LAYOUTS)}", layout)
    if out.exists():
        raise FileError(f"{out}: is there already")
    require_folder(out)
    checkpoint = ForeignCheckpoint(source)
    if not checkpoint.matrices:
        raise FileError(f"{source}: no quantised matrix of QServe, compressed-tensors, GPTQ or AWQ")
    write = _write_model if (source / "config.json").is_file() else _write_file
    return write(checkpoint, out, layout, unchecked, progress)


def converted(parts: Sequence[ForeignWeight]) -> tuple[QuantizedWeight, float | None]:
    """Matrices of equal K, one below the other, for the kernels; and the relative error, None where it is exact."""

    def joined(some: Sequence[Any], *fields: str) -> dict[str, Any]:
        return {name: np.concatenate([getattr(each, name) for each in some]) for name in fields}

    one_group = len({part.group for part in parts}) == 1
    if one_group and all(isinstance(part, LQQWeight) for part in parts):
        return LQQWeight(**joined(parts, *_LQQ), protective_range=UNKNOWN_RANGE), None
    channels = [part.per_channel() for part in parts if isinstance(part, AffineWeight)]
    if len(channels) == len(parts) and None not in channels:
        return QoQChannelWeight(**joined(channels, "q4", "scale", "zero")), None
    floats = np.concatenate([part.dequantize() for part in parts])
    nearest = [part.nearest_lqq() if isinstance(part, AffineWeight) else None for part in parts]
    if one_group and None not in nearest:
        weight = LQQWeight(**joined(nearest, *_LQQ), protective_range=PROTECTIVE_RANGE)
    else:
        group = _group(floats.shape[1], min(part.group for part in parts))
        weight = quantize_lqq(floats, group, rounding="search")
    return weight, relative_error(floats, weight)


def _group(K: int, group: int) -> int:
    """The group of a matrix that is quantised again: the file's where kernels take it, else one that divides K."""
    return group if group in GROUPS else max((size for size in GROUPS[:2] if K % size == 0), default=GROUPS[0])


def _write_file(
    checkpoint: ForeignCheckpoint, out: Path, layout: str, unchecked: bool, progress: Progress
) -> list[ImportedMatrix]:
    fields = {name: _fields(checkpoint, matrix, layout) for name, matrix in checkpoint.matrices.items()}
    announced = [info for info in checkpoint.tensors.values() if info.name not in fields]
    announced += [info for name, each in fields.items() for info in announce(name, each)]
    rows = []

    def arrays() -> Iterator[tuple[str, Any]]:
        for name in checkpoint.tensors:
            if name in fields:
                with naming(name):
                    weight, error = converted([checkpoint.weight(name)])
                    packed = pack(weight, layout, unchecked=True)
                if not unchecked:
                    require_no_overflow(name, weight)
                rows.append(_row(checkpoint.matrices[name], weight, error))
                yield from contents(name, packed)
            else:
                yield name, checkpoint.file.read_bytes(name)
            progress(name, len(checkpoint.tensors))

    write_checkpoint(out, announced, arrays(), metadata(fields))
    return rows


def _fields(checkpoint: ForeignCheckpoint, matrix: ForeignMatrix, layout: str) -> dict[str, Any]:
    """The header of what `converted` makes of a matrix. Without groups the zero points decide, so it is read."""
    name, N, K = matrix.name, matrix.N, matrix.K
    if matrix.format.two_level:
        scheme, group, protective_range = "lqq", K // matrix.groups, UNKNOWN_RANGE
    elif matrix.groups == 1 and checkpoint.weight(name).per_channel() is not None:  # type: ignore[union-attr]
        scheme, group, protective_range = "qoq_channel", K, 0
    else:
        scheme, group, protective_range = "lqq", _group(K, K // matrix.groups), PROTECTIVE_RANGE
    with naming(name):
        buffer_shapes(layout, scheme, N, K, group)
    return header_fields(layout, scheme, N, K, group, protective_range)


def _write_model(
    checkpoint: ForeignCheckpoint, out: Path, layout: str, unchecked: bool, progress: Progress
) -> list[ImportedMatrix]:
    model, tokenizer = open_model(checkpoint.path)
    config, rows = model.config, []
    formats = sorted({matrix.format.name for matrix in checkpoint.matrices.values()})
    partial = out.with_name(f".{out.name}.import")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir()
    try:
        for index, layer in enumerate(model.layers):
            weights = {}
            for fused, parts in FUSED.items():
                names = [tensor_name(part, index) for part in parts]
                if lacking := next((name for name in names if name not in checkpoint.matrices), None):
                    raise FileError(f"{checkpoint.path}: {lacking}: must be quantised, as {formats[0]} has others")
                each = [checkpoint.weight(name) for name in names]
                for name, part in zip(names, each, strict=True):
                    if isinstance(part, LQQWeight) and not unchecked:
                        require_no_overflow(name, part)
                with naming(names[0]):
                    weights[fused], error = converted(each)
                rows.append(_row(checkpoint.matrices[names[0]], weights[fused], error, f"layer {index} {fused}"))
            with naming(f"layer {index}"):
                packed = packed_layer(config, layer, weights, layout, unchecked=unchecked)
            folders.save_layer(partial, index, packed)
            progress(f"layer {index}", config.layers)
        about = {"steps": ["imported"], "formats": formats, "layout": layout, "model": config.name}
        ends = stored_ends(model, "float16")
        folders.save_ends(partial, config, about, **ends)
        tokenizer.save(partial)
        os.replace(partial, out)
    except OSError as error:
        raise FileError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return rows


def _row(matrix: ForeignMatrix, weight: QuantizedWeight, error: float | None, name: str = "") -> ImportedMatrix:
    if isinstance(weight, TwoLevelWeight):
        scheme, group, overflows = "lqq", weight.group, weight.overflows()
    else:
        scheme, group, overflows = "qoq_channel", weight.shape[1], np.zeros(0, bool)
    first = ""
    try:
        require_no_overflow("", weight)
    except ArgumentError as overflow:
        first = str(overflow.value)
    return ImportedMatrix(
        name=name or matrix.name,
        format=matrix.format.name,
        shape=weight.shape,
        scheme=scheme,
        group=group,
        relative_error=error,
        groups=overflows.size,
        overflows=int(overflows.sum()),
        overflow=first,
    )
