"""What 4-bit activations would do to a model: by matrix, the share of 8-bit channels and the errors, on a text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.decoder import EXACT, Layer, Numerics
from ptxlab.llm.model.floats import FloatModel, Tokens
from ptxlab.llm.model.quantized import FUSED
from ptxlab.lowbit.audit import SkippedTensor
from ptxlab.lowbit.quant import (
    channel_sizes,
    int8_blocks,
    outlier_order,
    quantize_atom_activations,
    quantize_atom_weight,
    quantize_block_weight,
    quantize_blocks,
)
from ptxlab.lowbit.quant.atom import ATOM_GROUPS
from ptxlab.lowbit.quant.fmpq import MOST_INT8, OUTLIER
from ptxlab.lowbit.quant.inputs import as_float_matrix
from ptxlab.validate import is_one_of, require_number

INPUT_SCHEMES = ("atom", "fmpq")


@dataclass(frozen=True)
class InputRow:
    """A matrix and its input under one scheme, both rounded to nearest.

    `outliers` counts the channels whose largest magnitude is more than `fmpq.OUTLIER` times the median channel's,
    `channels8` those in INT8: with atom as many as a group has, with fmpq whole blocks. Errors are relative, in
    Frobenius norms: of the weight, of the input, and of their product.
    """

    tensor: str
    scheme: str
    group: int
    channels: int
    outliers: int
    channels8: int
    weight_error: float
    input_error: float
    output_error: float

    @property
    def share8(self) -> float:
        """Share of channels in INT8, 0 to 1."""
        return self.channels8 / self.channels


@dataclass(frozen=True)
class InputTotal:
    """Totals over every matrix under one scheme: the share of 8-bit channels, mean and worst error of the products."""

    scheme: str
    group: int
    tensors: int
    share8: float
    mean_error: float
    worst_error: float
    worst: str


def audit_input(
    w: npt.NDArray[Any],
    x: npt.NDArray[Any],
    *,
    schemes: tuple[str, ...] = INPUT_SCHEMES,
    group: int = 128,
    most: float = MOST_INT8,
    tensor: str = "w",
) -> list[InputRow]:
    """Audit a matrix w float [N, K] with calibration activations x float [T, K] under each scheme.

    Args:
        w: the matrix.
        x: its input; the order of the channels is made of it as well.
        schemes: of `INPUT_SCHEMES`.
        group: channels per scale, 64 or 128; with atom as many outliers.
        most: with fmpq, share of the blocks that may be INT8.
        tensor: how the rows are called.

    Raises ArgumentError for an unknown scheme, and for whatever the quantisers refuse.
    """
    check_options(schemes, group, most)
    w, x = as_float_matrix("w", w), as_float_matrix("x", x)
    if w.shape[1] != x.shape[1]:
        raise ArgumentError("x", f"must have {w.shape[1]} channels, as w has", x.shape[1])
    peaks, squares, exact = channel_sizes(x, "max"), channel_sizes(x), x @ w.T
    rows = []
    weight: Any
    rounded_input: Any
    for scheme in schemes:
        if scheme == "atom":
            channels8, order = group, outlier_order(squares, group)
            weight = quantize_atom_weight(w[:, order], group, group)
            rounded_input = quantize_atom_activations(x[:, order], group, group)
        else:
            channels8 = int8_blocks(peaks, most=most, block=group) * group
            order = outlier_order(peaks, channels8) if channels8 < len(peaks) else np.arange(len(peaks))
            weight = quantize_block_weight(w[:, order], group)
            rounded_input = quantize_blocks(x[:, order], channels8 // group, group)
        w_rounded, x_rounded = weight.dequantize(), rounded_input.dequantize()
        rows.append(
            InputRow(
                tensor=tensor,
                scheme=scheme,
                group=group,
                channels=len(peaks),
                outliers=int((peaks > OUTLIER * np.median(peaks)).sum()),
                channels8=channels8,
                weight_error=_relative(w_rounded, w[:, order]),
                input_error=_relative(x_rounded, x[:, order]),
                output_error=_relative(x_rounded @ w_rounded.T, exact),
            )
        )
    return rows


def audit_model(
    model: FloatModel,
    tokens: Tokens,
    *,
    pattern: str = "*",
    schemes: tuple[str, ...] = INPUT_SCHEMES,
    group: int = 128,
    most: float = MOST_INT8,
    progress: Callable[[str], None] = lambda name: None,
) -> Iterator[InputRow | SkippedTensor]:
    """Audit the matrices of a model, `layers.0.qkv` and so on, on what they read in a text [S, T], computed in floats.

    Matrices of the same input are one. Those whose channels do not divide into groups come as `SkippedTensor`. Memory
    holds a layer and its inputs. Raises ArgumentError, before anything is computed: as `audit_input` does for options,
    and for a pattern that matches nothing.
    """
    check_options(schemes, group, most)
    if model.config.experts:
        raise ArgumentError("model", "must be dense: W4A4 has no experts", f"{model.config.experts} experts")
    names = {(i, fused): f"layers.{i}.{fused}" for i in range(model.config.layers) for fused in FUSED}
    selected_places = {place for place, name in names.items() if fnmatchcase(name, pattern)}
    if not selected_places:
        raise ArgumentError("pattern", "must match a matrix such as layers.0.qkv", pattern)

    def rows() -> Iterator[InputRow | SkippedTensor]:
        states = [model.embed(batch) for batch in model.batches(tokens)]
        for index in range(1 + max(i for i, _ in selected_places)):
            layer, inputs = model.layers[index], _Inputs()
            for i, x in enumerate(states):
                states[i] = model.run_layer(x, layer, inputs, index=index)
            for fused, parts in FUSED.items():
                name = names[index, fused]
                progress(name)
                if (index, fused) not in selected_places:
                    continue
                w, x = np.concatenate([layer[part] for part in parts]), np.concatenate(inputs.seen[parts[0]])
                try:
                    yield from audit_input(w, x, schemes=schemes, group=group, most=most, tensor=name)
                except ArgumentError as error:
                    yield SkippedTensor(name, str(error))

    return rows()


def input_totals(rows: list[InputRow]) -> list[InputTotal]:
    """Return one total per scheme, in the order in which the rows name the schemes."""
    totals = []
    for scheme in dict.fromkeys(row.scheme for row in rows):
        scheme_rows = [row for row in rows if row.scheme == scheme]
        worst_row = max(scheme_rows, key=lambda row: row.output_error)
        totals.append(
            InputTotal(
                scheme=scheme,
                group=worst_row.group,
                tensors=len(scheme_rows),
                share8=sum(row.channels8 for row in scheme_rows) / sum(row.channels for row in scheme_rows),
                mean_error=fmean(row.output_error for row in scheme_rows),
                worst_error=worst_row.output_error,
                worst=worst_row.tensor,
            )
        )
    return totals


def check_options(schemes: tuple[str, ...], group: int, most: float) -> None:
    """Raise ArgumentError for options that there are not."""
    for scheme in schemes:
        if not is_one_of(scheme, INPUT_SCHEMES):
            raise ArgumentError("schemes", f"must be among {', '.join(INPUT_SCHEMES)}", scheme)
    if not is_one_of(group, ATOM_GROUPS):
        raise ArgumentError("group", f"must be one of {', '.join(map(str, ATOM_GROUPS))}", group)
    require_number("most", most, 0, 1)


class _Inputs(Numerics):
    """Keeps what every matrix reads, [tokens, K], by its name."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {}

    def product(self, name: str, x: Any, layer: Layer) -> Any:
        self.seen.setdefault(name, []).append(x.reshape(-1, x.shape[-1]))
        return EXACT.product(name, x, layer)


def _relative(approximate: Any, exact: Any) -> float:
    norm = float(np.linalg.norm(exact))
    return float(np.linalg.norm(approximate - exact)) / norm if norm else 0.0
