"""Hypothesis strategies shared by the tests: boundary values by construction, ordinary values in between.

Shapes are small: 1 to 4 rows (R or N) of 1 to 4 groups of 32, 64 or 128 along K. Strategies that tests build for each
draw are remembered, as Hypothesis looks through a new one before its first draw, which takes longer than the draw.
"""

from functools import cache
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptxlab.lowbit.quant import GROUPS

Array: TypeAlias = npt.NDArray[Any]
Inputs: TypeAlias = dict[str, Array]

Q4_EDGES = (0, 1, 7, 8, 14, 15)
SCALE_EDGES = (1, 2, 15, 16)
UNCHECKED_SCALE_EDGES = (*SCALE_EDGES, 17, 255)
MINIMUM_EDGES = (-128, -119, -104, -1, 0, 119)
EXTENT_EDGES = (0, 1, 14, 15, 16, 22, 238, 239, 255)  # largest minus smallest q8 of a group


class Shape(NamedTuple):
    rows: int
    groups: int
    group: int

    @property
    def K(self) -> int:  # noqa: N802
        return self.groups * self.group


class IntegerGroups(NamedTuple):
    """Level-1 integers `q8` s8 [N, K] in groups of `group`."""

    q8: Array
    group: int


class WeightGroups(NamedTuple):
    """A matrix `w` f32 [N, K] whose level 1 is exactly `q8`, in groups of `group`."""

    w: Array
    q8: Array
    group: int


@cache
def shapes() -> st.SearchStrategy[Shape]:
    return st.builds(Shape, rows=st.integers(1, 4), groups=st.integers(1, 4), group=st.sampled_from(GROUPS))


@cache
def near_edges(edges: tuple[int, ...], lowest: int, highest: int) -> st.SearchStrategy[int]:
    """Draw integers in lowest..highest, half of them from `edges` as far as those lie inside."""
    inside = [edge for edge in edges if lowest <= edge <= highest]
    return st.sampled_from(inside) | st.integers(lowest, highest) if inside else st.integers(lowest, highest)


@cache
def mostly_constant(
    dtype: type[np.generic], shape: tuple[int, ...], elements: st.SearchStrategy[int]
) -> st.SearchStrategy[Any]:
    """Draw arrays that repeat one drawn element except at some drawn places.

    They are cheap to draw, and neighbours differ.
    """
    return hnp.arrays(dtype, shape, elements=elements, fill=elements)


def floats(dtype: np.dtype, shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """Draw numbers by their bits, so that all magnitudes are alike.

    Zeros, the largest and denormal ones are among them.
    """
    bits = {2: np.uint16, 4: np.uint32}[dtype.itemsize]
    top = np.array([ml_dtypes.finfo(dtype).max], dtype).view(bits)[0]
    magnitudes = st.sampled_from([0, 1, int(top), int(top) // 2]) | st.integers(0, int(top))
    sign = 1 << (8 * dtype.itemsize - 1)
    elements = st.tuples(magnitudes, st.booleans()).map(lambda pair: pair[0] | (sign if pair[1] else 0))
    return hnp.arrays(bits, shape, elements=elements, fill=st.just(0)).map(lambda array: array.view(dtype))


@cache
def q4_matrix(rows: int, K: int) -> st.SearchStrategy[Array]:
    """Draw q4 u8 [rows, K] in 0..15."""
    return mostly_constant(np.uint8, (rows, K), near_edges(Q4_EDGES, 0, 15))


@cache
def words(rows: int, count: int) -> st.SearchStrategy[Array]:
    """Draw words u32 [rows, count] of any bits."""
    edges = (0, 0x0F0F0F0F, 0x7F7F7F7F, 0x80808080, 0xF0F0F0F0, 0xFFFFFFFF)
    return mostly_constant(np.uint32, (rows, count), near_edges(edges, 0, 2**32 - 1))


@cache
def scales(shape: Shape, checked: bool = True) -> st.SearchStrategy[Array]:
    """Draw level-2 scales u8 [R, K/g]: 1..16, or any byte if not `checked`."""
    edges, lowest, highest = (SCALE_EDGES, 1, 16) if checked else (UNCHECKED_SCALE_EDGES, 0, 255)
    return hnp.arrays(np.uint8, (shape.rows, shape.groups), elements=near_edges(edges, lowest, highest))


@st.composite
def lqq_inputs(draw: st.DrawFn, checked: bool = True) -> Inputs:
    """Draw q4 u8 [R, K], scale u8 and offset u8 [R, K/g].

    Checked: what quantising at protective range 119 can give, 9 <= q4·scale + offset <= 255 in every lane. Unchecked:
    any bytes (q4 stays a nibble), so lanes carry into each other.
    """
    shape = draw(shapes())
    q4, scale = draw(q4_matrix(shape.rows, shape.K)), draw(scales(shape, checked))
    minimum = near_edges(MINIMUM_EDGES, *((-119, 119) if checked else (-128, 127)))
    offset = draw(hnp.arrays(np.uint8, scale.shape, elements=minimum.map(lambda m: m + 128)))
    if checked:
        q4 = np.minimum(q4, np.repeat((255 - offset) // scale, shape.group, axis=1))
    return {"q4": q4, "scale": scale, "offset": offset}


@st.composite
def qoq_inputs(draw: st.DrawFn, checked: bool = True) -> Inputs:
    """Draw q4 u8 [R, K]; scale u8, zero u8 (0..15) and offset s8 = -zero·scale modulo 256, [R, K/g].

    Checked: what quantising at protective range 119 can give, (q4 - zero)·scale fits s8 in every lane. Unchecked: any
    scale byte.
    """
    shape = draw(shapes())
    q4, scale = draw(q4_matrix(shape.rows, shape.K)), draw(scales(shape, checked))
    zero = draw(hnp.arrays(np.uint8, scale.shape, elements=near_edges(Q4_EDGES, 0, 15)))
    if checked:
        zero = np.minimum(zero, 127 // scale)
        q4 = np.minimum(q4, np.repeat(zero + 127 // scale, shape.group, axis=1))
    offset = (-zero.astype(np.int32) * scale % 256).astype(np.uint8).view(np.int8)
    return {"q4": q4, "scale": scale, "zero": zero, "offset": offset}


@st.composite
def int4_inputs(draw: st.DrawFn) -> Inputs:
    """Draw q4 s8 [R, K] in -8..7, and scale f16 [R, K/g].

    The scale is above zero, and 8 times it is finite; subnormal scales are among them.
    """
    shape = draw(shapes())
    q4 = draw(mostly_constant(np.int8, (shape.rows, shape.K), near_edges((-8, -1, 0, 1, 7), -8, 7)))
    bits = near_edges((1, 0x3FF, 0x400, 0x3C00, 0x6FFF), 1, 0x6FFF)  # from 2^-24 to 8188
    scale = draw(hnp.arrays(np.uint16, (shape.rows, shape.groups), elements=bits)).view(np.float16)
    return {"q4": q4, "scale": scale}


@cache
@st.composite
def integer_group(draw: st.DrawFn, group: int, lowest: int = -119, highest: int = 119) -> Array:
    """Draw one group of level-1 integers int64 [group], of a boundary extent.

    It is constant, two-valued, a ramp, or arbitrary.
    """
    extent = draw(near_edges(EXTENT_EDGES, 0, highest - lowest))
    low = draw(near_edges(MINIMUM_EDGES, lowest, highest - extent))
    kind = draw(st.sampled_from(("two-valued", "ramp", "arbitrary")))  # extent 0 makes each of them constant
    if kind == "two-valued":
        return low + extent * draw(mostly_constant(np.int64, (group,), st.integers(0, 1)))
    if kind == "ramp":
        return low + np.arange(group) * extent // (group - 1)
    return draw(mostly_constant(np.int64, (group,), st.integers(low, low + extent)))


@st.composite
def integer_groups(draw: st.DrawFn, lowest: int = -119, highest: int = 119) -> IntegerGroups:
    """Draw level-1 integers in lowest..highest, group by group as `integer_group` does."""
    shape = draw(shapes())
    count = shape.rows * shape.groups
    groups = [draw(integer_group(shape.group, lowest, highest)) for _ in range(count)]
    return IntegerGroups(np.stack(groups).astype(np.int8).reshape(shape.rows, shape.K), shape.group)


@st.composite
def weight_groups(draw: st.DrawFn) -> WeightGroups:
    """Draw floats whose level-1 integers are known.

    They are integers times a power of two, with the range itself in every row.
    """
    q8, group = draw(integer_groups())
    q8[:, draw(st.integers(0, q8.shape[1] - 1))] = draw(st.sampled_from((-119, 119)))
    q8 *= draw(hnp.arrays(np.int8, (len(q8), 1), elements=st.integers(0, 1), fill=st.just(1)))  # some rows are zero
    exponents = draw(hnp.arrays(np.int32, (len(q8), 1), elements=st.integers(-20, 20)))
    return WeightGroups(np.ldexp(q8.astype(np.float32), exponents), q8, group)
