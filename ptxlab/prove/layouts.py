"""Claims about layouts: every map a bijection, every packing undone by its inverse, every swizzle free of conflicts.

Packings move nibbles and bytes and never look at them: an element's place follows from its index alone. So packing the
digits of the index and reading them back tells the place of every element, and holds for all values.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.layout import LAYOUTS, pack, unpack
from ptxlab.layout import fragments as maps
from ptxlab.layout.activations import from_fragment_order, from_swizzled_tiles, to_fragment_order, to_swizzled_tiles
from ptxlab.layout.banks import bank_use
from ptxlab.layout.descriptors import swizzle
from ptxlab.prove.claims import Claim, register
from ptxlab.prove.solve import Enumeration
from ptxlab.quant import LQQWeight, QoQChannelWeight, QoQWeight
from ptxlab.reference.packed import U8

_SIZES = ((64, 256), (136, 384))  # whole tiles, and rows and columns to pad
_KINDS = (LQQWeight, QoQWeight, QoQChannelWeight)
_SPANS = (32, 64, 128)


@register
def fragments() -> Iterator[Claim]:
    """Fragment maps: each element of the matrix has one place in one register of one lane."""
    known = [maps.ldmatrix(count, trans) for count in (1, 2, 4) for trans in (False, True)]
    known += [of(k) for of in (maps.mma_a, maps.mma_b) for k in maps.MMA_K]
    known += [maps.mma_c(16), maps.mma_c(32), maps.wgmma_a(), *(maps.wgmma_d(n) for n in maps.WGMMA_N)]
    for fragment in known:
        yield Claim(
            subject="fragment maps",
            name=fragment.name,
            text="(lane, register, element) -> (row, column) is a bijection onto the matrix",
            build=partial(_is_bijection, fragment.rows * fragment.shape[1] + fragment.cols),
        )


@register
def packings() -> Iterator[Claim]:
    """`unpack(pack(w)) == w` for every layout, scheme and group."""
    for layout in LAYOUTS:
        for kind in _KINDS:
            yield Claim(
                subject=f"packing {layout}",
                name=f"{kind.__name__} comes back",
                text="unpack after pack is the identity on nibbles, scales and offsets, in groups of 32, 64, 128",
                build=partial(_round_trips, layout, kind),
            )
    orders: dict[str, tuple[Any, Any]] = {"fragment order": (to_fragment_order, from_fragment_order)}
    for rows in (8, 64, 256):
        orders[f"swizzled tiles of {rows}"] = (
            partial(to_swizzled_tiles, rows=rows),
            partial(from_swizzled_tiles, rows=rows),
        )
    for name, (there, back) in orders.items():
        yield Claim(
            subject="orders of activations",
            name=name,
            text="reading back after storing is the identity",
            build=partial(_activations_return, there, back),
        )


@register
def swizzles() -> Iterator[Claim]:
    """The shared-memory swizzles of TMA and wgmma."""
    for span in _SPANS:
        yield Claim(
            subject="swizzles",
            name=f"{span} bytes: bijection",
            text="exchanges 16-byte columns within 1,024 bytes, and twice is once",
            build=partial(_is_involution, span),
        )
        yield Claim(
            subject="swizzles",
            name=f"{span} bytes: no bank conflict",
            text=f"eight rows of {span} bytes: any 16-byte column of all rows takes one wavefront",
            build=partial(_without_conflicts, span),
        )


def _is_bijection(places: npt.NDArray[Any]) -> Enumeration:
    places = places.reshape(-1)
    missed = np.flatnonzero(np.bincount(places, minlength=places.size) != 1)
    return Enumeration(places.size, {"place": int(missed[0])} if missed.size else None)


def _digits(size: int, base: int) -> Iterator[npt.NDArray[np.int64]]:
    """The digits of 0..size-1, least significant first."""
    index = np.arange(size)
    while True:
        yield index % base
        index = index // base
        if not index.any():
            return


def _round_trips(layout: str, kind: type) -> Enumeration:
    cases = 0
    for N, K in _SIZES:
        for group in (32, 64, 128) if kind is not QoQChannelWeight else (K,):
            of_groups = list(_digits(N * K // group, 8))
            for digit, nibbles in enumerate(_digits(N * K, 16)):
                weight = _weight(kind, nibbles.reshape(N, K).astype(np.uint8), of_groups[digit % len(of_groups)], group)
                back = unpack(pack(weight, layout, unchecked=True))
                for field, array in vars(weight).items():
                    other = getattr(back, field)
                    if not np.array_equal(array, other):
                        at = int(np.flatnonzero((array != other).reshape(-1))[0])
                        return Enumeration(cases, {"N": N, "K": K, "group": group, field: at})
                cases += N * K
    return Enumeration(cases)


def _weight(kind: type, q4: U8, digit: npt.NDArray[np.int64], group: int) -> Any:
    """A weight of these nibbles, whose groups carry a digit of their index in every constant."""
    N, K = q4.shape
    rows = np.arange(N, dtype=np.float32)
    if kind is QoQChannelWeight:
        return QoQChannelWeight(q4, rows, (np.arange(N) % 16).astype(np.uint8))
    constant = digit.reshape(N, K // group).astype(np.uint8)
    level2 = {"minimum": -constant.astype(np.int8)} if kind is LQQWeight else {"zero": constant}
    return kind(q4=q4, group_scale=constant + np.uint8(1), channel_scale=rows, protective_range=119, **level2)


def _activations_return(there: Any, back: Any) -> Enumeration:
    cases = 0
    for M, K in ((64, 256), (19, 200)):
        for digit in _digits(M * K, 128):
            x = digit.reshape(M, K).astype(np.int8)
            if not np.array_equal(back(there(x), M, K), x):
                return Enumeration(cases, {"M": M, "K": K})
            cases += M * K
    return Enumeration(cases)


def _is_involution(span: int) -> Enumeration:
    addresses = np.arange(0, 8 * 128, 16)
    there = swizzle(addresses, span)
    if not np.array_equal(swizzle(there, span), addresses):
        return Enumeration(len(addresses), {"address": int(addresses[(swizzle(there, span) != addresses).argmax()])})
    return _is_bijection(there // 16)


def _without_conflicts(span: int) -> Enumeration:
    """Each phase of a warp's 16-byte access: eight rows, one column."""
    rows = np.arange(32)
    columns = np.arange(0, span, 16)[:, None]
    use = bank_use(swizzle(rows * span + columns, span), 16, store=True)
    wrong = np.flatnonzero(use.conflicts)
    return Enumeration(use.conflicts.size, {"column": int(wrong[0])} if wrong.size else None)
