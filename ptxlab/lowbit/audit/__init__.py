"""What a two-level scheme would do to given weights: overflow, clipping, error, at each protective range."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F32
from ptxlab.lowbit import layout, reference
from ptxlab.lowbit.layout.checkpoint import FLOATS, Checkpoint, TensorInfo
from ptxlab.lowbit.quant import GROUPS, Level1Weight, TwoLevelWeight, quantize_level1, quantize_lqq, quantize_qoq
from ptxlab.lowbit.quant.inputs import as_float_matrix

Progress = Callable[[int, int, str], None]  # tensors done, tensors in all, the one that comes next

SCHEMES: dict[str, Callable[..., TwoLevelWeight]] = {
    "qoq": quantize_qoq,
    "lqq": quantize_lqq,
    "lqq_ceiling": partial(quantize_lqq, rounding="ceiling"),
    "lqq_search": partial(quantize_lqq, rounding="search"),
}


@dataclass(frozen=True)
class AuditRow:
    """Audit of one tensor under one scheme at one protective range.

    `overflows` counts the weights whose reconstructed integer leaves s8 (with LQQ their byte then carries into the
    next weight), `unsafe_groups` the groups that they are in, `clipped` the weights that the clamp of q4 moves further
    than rounding would. `relative_error` is ||W - W'||_F / ||W||_F with the integers as they would be without
    overflow, 0 for an all-zero matrix. Of a weight that is already packed the original is not known, nor these two:
    None.
    """

    tensor: str
    scheme: str
    protective_range: int
    group: int
    weights: int
    overflows: int
    unsafe_groups: int
    clipped: int | None
    relative_error: float | None


@dataclass(frozen=True)
class AuditTotal:
    """Sums over all tensors under one scheme at one protective range.

    Errors are over the tensors whose original is known.
    """

    scheme: str
    protective_range: int
    tensors: int
    groups: int
    weights: int
    overflows: int
    unsafe_groups: int
    mean_error: float | None
    worst_error: float | None

    @property
    def overflow_share(self) -> float:
        """Share of all weights that overflow."""
        return self.overflows / max(1, self.weights)


@dataclass(frozen=True)
class SkippedTensor:
    """Tensor that was not audited, and the reason."""

    tensor: str
    reason: str


def audit_matrix(
    w: npt.NDArray[Any],
    *,
    schemes: Sequence[str] = ("qoq", "lqq"),
    ranges: Sequence[int] = (119, 120, 127),
    group: int = 128,
    tensor: str = "w",
) -> list[AuditRow]:
    """Audit w float [N, K] under each of `schemes` (keys of `SCHEMES`) at each protective range; schemes vary slowest.

    Raises ArgumentError for an unknown scheme and for whatever the quantisers refuse.
    """
    _check_schemes(schemes)
    floats = as_float_matrix("w", w)
    level1 = {protective_range: quantize_level1(floats, protective_range) for protective_range in ranges}
    rows = []
    for scheme in schemes:
        for protective_range in ranges:
            weight = SCHEMES[scheme](floats, group=group, protective_range=protective_range)
            rows.append(
                AuditRow(
                    tensor=tensor,
                    scheme=scheme,
                    protective_range=protective_range,
                    group=group,
                    weights=floats.size,
                    overflows=_count_overflows(weight),
                    unsafe_groups=int(weight.overflows().sum()),
                    clipped=_count_clipped(weight, level1[protective_range]),
                    relative_error=relative_error(floats, weight),
                )
            )
    return rows


def audit_file(
    path: str | os.PathLike[str],
    *,
    pattern: str = "*",
    schemes: Sequence[str] = ("qoq", "lqq"),
    ranges: Sequence[int] = (119, 120, 127),
    group: int = 128,
    progress: Progress | None = None,
) -> Iterator[AuditRow | SkippedTensor]:
    """Audit every float matrix of a safetensors file whose name matches the shell-style `pattern`, one at a time.

    Packed weights (`ptxlab quantize`) are unpacked and audited as they are, under their own scheme. Other tensors under
    the pattern, and matrices that the quantisers refuse, come as `SkippedTensor`. Memory is bounded by the largest.
    Raises, before the first tensor is read: FileError for a file that is not safetensors, ArgumentError for an unknown
    scheme, range or group and for a pattern that matches nothing.
    """
    checkpoint = Checkpoint(path)
    packed_weights = layout.packed_names(path) if layout.METADATA_KEY in checkpoint.metadata else []
    packed_owners = set(packed_weights)  # of a packed weight's buffers: `up.weight` of `up.weight.blocks`
    whole_names = [name for name in checkpoint.tensors if name.rpartition(".")[0] not in packed_owners]
    names = [name for name in (*packed_weights, *whole_names) if fnmatchcase(name, pattern)]
    if not names:
        raise ArgumentError("pattern", f"must match a tensor of {path}", pattern)
    # Nothing that is wrong with the arguments may look like something wrong with a tensor.
    audit_matrix(np.zeros((1, max(GROUPS)), np.float32), schemes=schemes, ranges=ranges, group=group)

    def rows() -> Iterator[AuditRow | SkippedTensor]:
        for done_count, name in enumerate(names):
            if progress is not None:
                progress(done_count, len(names), name)
            if name in packed_owners:
                yield _audit_packed(name, layout.load(path, name, unchecked=True))
                continue
            reason = _why_not(checkpoint.tensors[name], group)
            if reason:
                yield SkippedTensor(name, reason)
                continue
            w = checkpoint.read(name)
            try:
                yield from audit_matrix(w, schemes=schemes, ranges=ranges, group=group, tensor=name)
            except ArgumentError as error:  # NaN, infinity, or a scale out of range
                yield SkippedTensor(name, str(error))
        if progress is not None:
            progress(len(names), len(names), "")

    return rows()


def totals(rows: Iterable[AuditRow]) -> list[AuditTotal]:
    """Sum up the rows of each scheme and protective range, in the order of the rows."""
    kinds: dict[tuple[str, int], list[AuditRow]] = {}
    for row in rows:
        kinds.setdefault((row.scheme, row.protective_range), []).append(row)
    totals_by_kind = []
    for (scheme, protective_range), kind_rows in kinds.items():
        errors = [row.relative_error for row in kind_rows if row.relative_error is not None]
        totals_by_kind.append(
            AuditTotal(
                scheme=scheme,
                protective_range=protective_range,
                tensors=len(kind_rows),
                groups=sum(row.weights // row.group for row in kind_rows),
                weights=sum(row.weights for row in kind_rows),
                overflows=sum(row.overflows for row in kind_rows),
                unsafe_groups=sum(row.unsafe_groups for row in kind_rows),
                mean_error=fmean(errors) if errors else None,
                worst_error=max(errors, default=None),
            )
        )
    return totals_by_kind


def _audit_packed(name: str, packed: layout.PackedWeight) -> AuditRow:
    """Audit a packed weight as it is; only weights of two levels can overflow."""
    weight = layout.unpack(packed)
    two_level = weight if isinstance(weight, TwoLevelWeight) else None
    return AuditRow(
        tensor=name,
        scheme=packed.scheme,
        protective_range=packed.protective_range,
        group=packed.group,
        weights=packed.N * packed.K,
        overflows=_count_overflows(two_level) if two_level else 0,
        unsafe_groups=int(two_level.overflows().sum()) if two_level else 0,
        clipped=None,
        relative_error=None,
    )


def _why_not(tensor: TensorInfo, group: int) -> str:
    if len(tensor.shape) != 2:
        return f"not a matrix (shape {list(tensor.shape)})"
    if tensor.dtype not in FLOATS:
        return f"not floats (dtype {tensor.dtype})"
    if tensor.shape[1] % group:
        return f"K is not a multiple of the group (K={tensor.shape[1]}, group={group})"
    return ""


def _check_schemes(schemes: Sequence[str]) -> None:
    for scheme in schemes:
        if scheme not in SCHEMES:
            raise ArgumentError("schemes", f"must be among {', '.join(SCHEMES)}", scheme)


def _count_overflows(weight: TwoLevelWeight) -> int:
    return int((~reference.fits_s8(weight.exact_level1())).sum())


def _count_clipped(weight: TwoLevelWeight, level1: Level1Weight) -> int:
    distance = np.abs(weight.exact_level1() - level1.q8)
    return int((2 * distance > np.repeat(weight.group_scale, weight.group, axis=1)).sum())


def relative_error(w: F32, weight: TwoLevelWeight) -> float:
    """Compute ||W - W'||_F / ||W||_F, where W' is the quantised weight without overflow."""
    difference = w - reference.scale_rows(weight.exact_level1(), weight.channel_scale)
    norm = _norm(w)
    return _norm(difference) / norm if norm else 0.0


def _norm(matrix: F32) -> float:
    return float(np.sqrt(np.einsum("nk,nk->", matrix, matrix, dtype=np.float64)))  # float64 without a float64 copy
