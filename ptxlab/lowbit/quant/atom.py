"""Atom's W4A4: INT4 with a scale per row and group; a few outlier channels, reordered to the end, in INT8 (Atom §4).

Weights and activations are quantised alike, row by row. Paper and released code (efeslab/Atom) differ; `AtomRules`
names the differences, `ATOM_PAPER` and `ATOM_CODE` are the two sets.

                       paper                           code
    scale              2 max|x| c / (2^n - 1)          max|x| c / (2^(n-1) - 1)
    activations        divided by their scale,         multiplied by the scale's FP32 reciprocal,
                       ties to even                    ties away from zero (its CUDA kernels)
    weights            a scale per output channel      a scale per two neighbouring output channels
    order              outliers to the end             all channels by ascending size

c clips the INT4 groups; outliers are never clipped. The code clips activations in its simulation alone: its CUDA
kernels have c = 1. Scales are FP16 in both.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F16, F32, S8
from ptxlab.lowbit.quant.groups import dequantize_groups, integer_groups
from ptxlab.lowbit.quant.inputs import as_float32, channel_vector, extremes, float_matrix, strip_of
from ptxlab.validate import is_integer, is_one_of

ATOM_GROUPS = (64, 128)
ATOM_OUTLIERS = (0, 64, 128)
ACTIVATION_CLIP, WEIGHT_CLIP = 0.9, 0.85
METRICS = ("square_sum", "max")


@dataclass(frozen=True)
class AtomRules:
    """Rules in which the paper and its code differ; see the module.

    Attributes:
        half_steps: the range of n bits has 2^n - 1 steps from -max to max, so 7.5 or 127.5 on either side; else 7 or
            127.
        reciprocal: activations are multiplied by an FP32 reciprocal and rounded half away from zero.
        rows: neighbouring rows of a weight that share their scales.
        sorts: the channel order sorts all channels, not the outliers alone.
    """

    half_steps: bool
    reciprocal: bool
    rows: int
    sorts: bool

    def steps(self, bits: int) -> float:
        """Return the number of steps by which a group's largest magnitude is divided."""
        return (1 << bits - 1) - (0.5 if self.half_steps else 1)


ATOM_PAPER = AtomRules(half_steps=True, reciprocal=False, rows=1, sorts=False)
ATOM_CODE = AtomRules(half_steps=False, reciprocal=True, rows=2, sorts=True)


@dataclass(frozen=True, eq=False)
class AtomRows:
    """Rows of a weight or of activations in Atom's order: INT4 channels first, then the outliers.

    `q4` s8 [R, K] in -8..7 with `scale4` f16 [R, K/g]; `q8` s8 [R, outliers] with `scale8` f16 [R], 1 where there
    are none.
    """

    q4: S8
    scale4: F16
    q8: S8
    scale8: F16

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, all channels)."""
        rows, K = self.q4.shape
        return rows, K + self.q8.shape[1]

    @property
    def group(self) -> int:
        """INT4 channels per scale."""
        return int(self.q4.shape[1] // self.scale4.shape[1])

    @property
    def scales(self) -> F16:
        """Scales of all groups, then of the outliers: f16 [R, K/g + 1]."""
        all_scales: F16 = np.concatenate([self.scale4, self.scale8[:, None]], axis=1)
        return all_scales

    def dequantize(self) -> F32:
        """Compute q·scale as f32 [R, K + outliers], in Atom's channel order."""
        parts = dequantize_groups(self.q4, self.scale4), dequantize_groups(self.q8, self.scale8[:, None])
        all_weights: F32 = np.concatenate(parts, axis=1)
        return all_weights


def channel_sizes(x: npt.NDArray[Any], metric: str = "square_sum") -> npt.NDArray[np.float64]:
    """Measure every channel of calibration activations x float [T, K], f64 [K], for `outlier_order`.

    `square_sum`, the diagonal of XᵀX, adds up over batches; of `max` take the larger. Raises ArgumentError for bad
    input (`inputs.as_float_matrix`) or an unknown metric.
    """
    if not is_one_of(metric, METRICS):
        raise ArgumentError("metric", f"must be one of {', '.join(METRICS)}", metric)
    x = float_matrix("x", x)
    extremes("x", x)
    step = strip_of(x, x.shape[1])
    parts = [as_float32(x[i : i + step]).astype(np.float64) for i in range(0, len(x), step)]
    by_maximum = metric == "max"
    strip_sizes = np.stack([np.abs(part).max(axis=0) if by_maximum else (part * part).sum(axis=0) for part in parts])
    sizes: npt.NDArray[np.float64] = strip_sizes.max(axis=0) if by_maximum else strip_sizes.sum(axis=0)
    return sizes


def outlier_order(
    sizes: npt.NDArray[Any], outliers: int = 128, *, rules: AtomRules = ATOM_PAPER
) -> npt.NDArray[np.intp]:
    """Sort channels by their `sizes` float [K] as Atom does: x[:, order] has the `outliers` largest at its end.

    Of equal ones the later channel is the larger. The others keep their order unless the rules sort. Raises
    ArgumentError for outliers that are no integer of 0 or more, and sizes that are not finite, not a vector, or not
    more than the outliers.
    """
    if not is_integer(outliers) or outliers < 0:
        raise ArgumentError("outliers", "must be an integer of 0 or more", outliers)
    sizes = channel_vector("sizes", sizes)
    if len(sizes) <= outliers:
        raise ArgumentError("sizes", f"must be a vector of more than {outliers} channels", f"shape {sizes.shape}")
    ascending: npt.NDArray[np.intp] = np.argsort(sizes, kind="stable")
    if _check_rules(rules).sorts:
        return ascending
    first_outlier = len(sizes) - outliers
    return np.concatenate([np.sort(ascending[:first_outlier]), np.sort(ascending[first_outlier:])])


def channel_places(order: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
    """Invert a channel order: s16 [K] with order[places[k]] = k, as the fused kernels take an order.

    Raises ArgumentError for what is no permutation of 0..K-1, or of more than 32,768 channels.
    """
    is_order = isinstance(order, np.ndarray) and order.ndim == 1 and order.dtype.kind in "iu"
    if not is_order or not 1 <= len(order) <= 1 << 15 or not np.array_equal(np.sort(order), np.arange(len(order))):
        raise ArgumentError("order", "must be a permutation of 0..K-1, K up to 32768", f"shape {np.shape(order)}")
    return np.argsort(order).astype(np.int16)


def quantize_atom_weight(
    w: npt.NDArray[Any],
    group: int | None = 128,
    outliers: int = 128,
    *,
    clip: float = WEIGHT_CLIP,
    rules: AtomRules = ATOM_PAPER,
) -> AtomRows:
    """Quantise w float [N, K + outliers], whose columns are in Atom's order: the last `outliers` become INT8.

    Without a `group` (None) all INT4 channels of a row are one. Raises ArgumentError for bad input
    (`inputs.as_float_matrix`), a group other than 64 and 128, outliers other than 0, 64 and 128, INT4 channels that are
    no multiple of the group, a clip outside (0, 1], N that is no multiple of the rows that share a scale, and a scale
    beyond FP16.
    """
    return _quantize("w", w, group, outliers, clip, replace(_check_rules(rules), reciprocal=False))


def quantize_atom_activations(
    x: npt.NDArray[Any],
    group: int | None = 128,
    outliers: int = 128,
    *,
    clip: float = ACTIVATION_CLIP,
    rules: AtomRules = ATOM_PAPER,
) -> AtomRows:
    """Quantise x float [M, K + outliers], whose columns are in Atom's order: the last `outliers` become INT8.

    Every token has scales of its own. Raises ArgumentError as `quantize_atom_weight` does.
    """
    return _quantize("x", x, group, outliers, clip, replace(_check_rules(rules), rows=1))


def _check_rules(rules: AtomRules) -> AtomRules:
    if not isinstance(rules, AtomRules):
        raise ArgumentError("rules", "must be AtomRules (ATOM_PAPER, ATOM_CODE)", type(rules).__name__)
    return rules


def _quantize(
    name: str, x: npt.NDArray[Any], group: int | None, outliers: int, clip: float, rules: AtomRules
) -> AtomRows:
    x = float_matrix(name, x)
    if not is_one_of(group, (*ATOM_GROUPS, None)):
        raise ArgumentError("group", f"must be {', '.join(map(str, ATOM_GROUPS))} or None", group)
    if not is_one_of(outliers, ATOM_OUTLIERS):
        raise ArgumentError("outliers", f"must be one of {', '.join(map(str, ATOM_OUTLIERS))}", outliers)
    R, K = x.shape[0], x.shape[1] - outliers
    group = max(K, 1) if group is None else group
    if group > K or K % group:
        rule = "channels but the outliers must be a positive multiple of the group"
        raise ArgumentError(name, rule, f"{x.shape[1]} channels, {outliers} outliers, group={group}")
    if isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip <= 1:
        raise ArgumentError("clip", "must lie in (0, 1]", clip)
    if R % rules.rows:
        raise ArgumentError(name, f"rows must be a multiple of {rules.rows}, which share a scale", R)
    extremes(name, x)
    integers = partial(integer_groups, name, rows=rules.rows, reciprocal=rules.reciprocal)
    q4, scale4 = integers(x[:, :K].reshape(R, -1, group), 4, rules.steps(4), clip=clip)
    q4 = q4.reshape(R, K)
    if not outliers:
        return AtomRows(q4, scale4, q4[:, :0], np.ones_like(scale4[:, 0]))
    q8, scale8 = integers(x[:, K:].reshape(R, 1, -1), 8, rules.steps(8))
    return AtomRows(q4, scale4, q8.reshape(R, outliers), scale8[:, 0])
