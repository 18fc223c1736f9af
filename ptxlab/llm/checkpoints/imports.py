"""Checkpoints that others have quantised, as packed weights: exact where a scheme of ours holds their numbers.

QServe's weights with groups are exact as `lqq`, whatever their zeros. Weights with one scale per row and a zero point
in 0..15 are exact as `qoq_channel`. All others have float scales per group, where the kernels here take integers: they
become the nearest `lqq` of the same groups, or of smaller ones (`AffineWeight.nearest_lqq`). A group of ours that has
columns of several of theirs is dequantised and quantised from the beginning.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError, FileError, naming
from ptxlab.io.files import new_folder, require_new, sole_writer
from ptxlab.llm.checkpoints import folder as folders
from ptxlab.llm.checkpoints import open_model
from ptxlab.llm.checkpoints.foreign import UNKNOWN_RANGE, ForeignCheckpoint, ForeignMatrix, ForeignWeight
from ptxlab.llm.checkpoints.open import tensor_name
from ptxlab.llm.model.quantized import convert_ends, fused_parts, pack_layer
from ptxlab.lowbit.audit import relative_error
from ptxlab.lowbit.layout import LAYOUTS, buffer_shapes, pack
from ptxlab.lowbit.layout.checkpoint import write_checkpoint
from ptxlab.lowbit.layout.packed_weight import QuantizedWeight, require_no_overflow
from ptxlab.lowbit.layout.storage import announce, contents, header_fields, metadata
from ptxlab.lowbit.quant import (
    PROTECTIVE_RANGE,
    AffineWeight,
    LQQWeight,
    QoQChannelWeight,
    TwoLevelWeight,
    lqq_group,
)
from ptxlab.validate import is_one_of

_LQQ = ("q4", "group_scale", "minimum", "channel_scale")

Progress = Callable[[str, int], None]  # called with each matrix, or layer, that is done, and how many there are


@dataclass(frozen=True)
class ImportedMatrix:
    """The outcome of importing one matrix.

    `relative_error` is ||W - W'||_F / ||W||_F, W being what the file's numbers stand for; None where they were taken
    over exactly. Of the `groups`, `requantised` counts those quantised from the beginning, `overflows` those that the
    kernels would restore wrong; `overflow` says the first place and its values.
    """

    name: str
    format: str
    shape: tuple[int, int]
    scheme: str
    group: int
    relative_error: float | None
    requantised: int
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
    """Import a quantised checkpoint of a format of `foreign`, refusing groups that overflow s8 unless `unchecked`.

    A folder with config.json becomes the folder `out` of a quantised model, which `open_model` opens; a file, or a
    folder of files alone, becomes the safetensors file `out` of packed weights, all other tensors copied. Either
    appears when it is complete. Memory is bounded by the largest layer, or matrix.

    Args:
        source: file or folder, safetensors or of `torch.save`.
        out: what to make.
        layout: of the packing.
        unchecked: take over groups that overflow s8; the error otherwise names matrix, row and values.
        progress: of matrices, or layers.

    Raises FileError for a checkpoint that is broken or has no matrix of such a format, and where `out` is there or
    another process is writing it; ArgumentError for an unknown layout, a matrix whose size the layout does not take,
    and a group that overflows.
    """
    source, out = Path(source), Path(out)
    if not is_one_of(layout, LAYOUTS):
        raise ArgumentError("layout", f"must be one of {', '.join(LAYOUTS)}", layout)
    require_new(out)
    checkpoint = ForeignCheckpoint(source)
    if not checkpoint.matrices:
        raise FileError(f"{source}: no quantised matrix of QServe, compressed-tensors, GPTQ or AWQ")
    write = _write_model if (source / "config.json").is_file() else _write_file
    with sole_writer(out):
        require_new(out)  # another process may have finished it meanwhile
        return write(checkpoint, out, layout, unchecked, progress)


@dataclass(frozen=True)
class ConvertedWeight:
    """A weight for the kernels, its relative error (None: exact), and how many groups were quantised again."""

    weight: QuantizedWeight
    relative_error: float | None = None
    requantised: int = 0


def convert_parts(parts: Sequence[ForeignWeight]) -> ConvertedWeight:
    """Convert matrices of equal K, one below the other, for the kernels."""

    def join(weights: Iterable[Any], *fields: str) -> dict[str, Any]:
        return {name: np.concatenate([getattr(weight, name) for weight in weights]) for name in fields}

    two_level = [part for part in parts if isinstance(part, LQQWeight)]
    if len(two_level) == len(parts) and len({part.group for part in two_level}) == 1:
        return ConvertedWeight(LQQWeight(**join(parts, *_LQQ), protective_range=UNKNOWN_RANGE))
    affine = [_affine(part) if isinstance(part, LQQWeight) else part for part in parts]
    channels = [part.per_channel() for part in affine]
    if None not in channels:
        return ConvertedWeight(QoQChannelWeight(**join(channels, "q4", "scale", "zero")))
    group = min(lqq_group(part.column_groups) for part in affine)
    nearest_weights, requantised = zip(*(part.nearest_lqq(group) for part in affine), strict=True)
    weight = LQQWeight(**join(nearest_weights, *_LQQ), protective_range=PROTECTIVE_RANGE)
    floats = np.concatenate([part.dequantize() for part in affine])
    return ConvertedWeight(weight, relative_error(floats, weight), sum(requantised))


def _affine(weight: LQQWeight) -> AffineWeight:
    """Write the same numbers with float scales. A group of scale 0 has its minimum in every weight."""
    scale = np.maximum(weight.group_scale, 1).astype(np.float32)
    return AffineWeight(
        q4=weight.q4 * np.repeat(weight.group_scale > 0, weight.group, axis=1),
        scale=scale * weight.channel_scale[:, None],
        zero=-weight.minimum.astype(np.float32) / scale,
    )


def _write_file(
    checkpoint: ForeignCheckpoint, out: Path, layout: str, unchecked: bool, progress: Progress
) -> list[ImportedMatrix]:
    fields = {name: _fields(checkpoint, matrix, layout) for name, matrix in checkpoint.matrices.items()}
    announced = [tensor for tensor in checkpoint.tensors.values() if tensor.name not in fields]
    announced += [tensor for name, header in fields.items() for tensor in announce(name, header)]
    rows = []

    def arrays() -> Iterator[tuple[str, Any]]:
        for name in checkpoint.tensors:
            if name in fields:
                with naming(name):
                    conversion = convert_parts([checkpoint.weight(name)])
                    packed_weight = pack(conversion.weight, layout, unchecked=True)
                if not unchecked:
                    require_no_overflow(name, conversion.weight)
                rows.append(_row(checkpoint.matrices[name], conversion))
                yield from contents(name, packed_weight)
            else:
                yield name, checkpoint.file.read_bytes(name)
            progress(name, len(checkpoint.tensors))

    write_checkpoint(out, announced, arrays(), metadata(fields))
    return rows


def _fields(checkpoint: ForeignCheckpoint, matrix: ForeignMatrix, layout: str) -> dict[str, Any]:
    """Return the header that `convert_parts` will write for a matrix.

    A matrix without groups is read, because its zero points decide the scheme.
    """
    name, N, K = matrix.name, matrix.N, matrix.K
    if matrix.format.two_level:
        scheme, group, protective_range = "lqq", matrix.group, UNKNOWN_RANGE
    elif matrix.groups == 1 and checkpoint.weight(name).per_channel() is not None:  # type: ignore[union-attr]
        scheme, group, protective_range = "qoq_channel", K, 0
    else:
        scheme, group, protective_range = "lqq", lqq_group(checkpoint.column_groups(name)), PROTECTIVE_RANGE
    with naming(name):
        buffer_shapes(layout, scheme, N, K, group)
    return header_fields(layout, scheme, N, K, group, protective_range)


def _write_model(
    checkpoint: ForeignCheckpoint, out: Path, layout: str, unchecked: bool, progress: Progress
) -> list[ImportedMatrix]:
    model, tokenizer = open_model(checkpoint.path)
    config, rows = model.config, []
    formats = sorted({matrix.format.name for matrix in checkpoint.matrices.values()})
    with new_folder(out) as partial_folder:
        for index, layer in enumerate(model.layers):
            weights = {}
            for fused, parts in fused_parts(config).items():
                names = [tensor_name(part, index) for part in parts]
                if missing_name := next((name for name in names if name not in checkpoint.matrices), None):
                    raise FileError(f"{checkpoint.path}: {missing_name}: must be quantised, as {formats[0]} has others")
                foreign_weights = [checkpoint.weight(name) for name in names]
                for name, part in zip(names, foreign_weights, strict=True):
                    if isinstance(part, LQQWeight) and not unchecked:
                        require_no_overflow(name, part)
                with naming(names[0]):
                    conversion = convert_parts(foreign_weights)
                weights[fused] = conversion.weight
                rows.append(_row(checkpoint.matrices[names[0]], conversion, f"layer {index} {fused}"))
            with naming(f"layer {index}"):
                packed_layer = pack_layer(config, layer, weights, layout, unchecked=unchecked)
            folders.save_layer(partial_folder, index, packed_layer)
            progress(f"layer {index}", config.layers)
        recipe = {"steps": ["imported"], "formats": formats, "layout": layout, "model": config.name}
        ends = convert_ends(model, "float16")
        folders.save_ends(partial_folder, config, recipe, **ends)
        tokenizer.save(partial_folder)
    return rows


def _row(matrix: ForeignMatrix, conversion: ConvertedWeight, name: str = "") -> ImportedMatrix:
    weight = conversion.weight
    if isinstance(weight, TwoLevelWeight):
        scheme, group, overflows = "lqq", weight.group, weight.overflows()
    else:
        scheme, group, overflows = "qoq_channel", weight.shape[1], np.zeros(0, bool)
    first_overflow = ""
    try:
        require_no_overflow("", weight)
    except ArgumentError as overflow:
        first_overflow = str(overflow.value)
    return ImportedMatrix(
        name=name or matrix.name,
        format=matrix.format.name,
        shape=weight.shape,
        scheme=scheme,
        group=group,
        relative_error=conversion.relative_error,
        requantised=conversion.requantised,
        groups=overflows.size,
        overflows=int(overflows.sum()),
        overflow=first_overflow,
    )
