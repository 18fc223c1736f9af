"""Claims about layouts: every map a bijection, every packing undone by its inverse, every swizzle free of conflicts.

Packings move nibbles and bytes and never look at them: an element's place follows from its index alone. So packing the
digits of the index and reading them back tells the place of every element, and holds for all values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.arithmetic import ceil_div
from ptxlab.hardware import fragments as maps
from ptxlab.hardware.banks import bank_use
from ptxlab.hardware.descriptors import swizzle
from ptxlab.hardware.words import F16, S8, U8
from ptxlab.lowbit import layout
from ptxlab.lowbit.layout import foreign_orders, nibbles, pack, unpack
from ptxlab.lowbit.quant import LQQWeight, QoQChannelWeight, QoQWeight
from ptxlab.lowbit.quant.activations import QuantizedActivations
from ptxlab.lowbit.quant.atom import ATOM_GROUPS, ATOM_OUTLIERS, AtomRows
from ptxlab.lowbit.quant.fmpq import BLOCK, BlockRows
from ptxlab.lowbit.quant.kv import KV_SCHEMES, QuantizedKV
from ptxlab.prove.claims import Claim, register
from ptxlab.prove.solve import Enumeration

_SIZES = ((64, 256), (136, 384))  # whole tiles, and rows and columns to pad
_TOKENS = ((64, 256), (19, 384))
_KINDS = (LQQWeight, QoQWeight, QoQChannelWeight)
_SPANS = (32, 64, 128)
Sizes = dict[str, int]
Original = tuple[Sizes, Any]  # what is packed, an array or an object of arrays
Originals = Callable[[], Iterable[Original]]
Through = Callable[[Any, Sizes], Any]


@register
def fragments() -> Iterator[Claim]:
    """Yield a claim per fragment map: each element of the matrix has one place in one register of one lane."""
    for fragment in _fragments():
        yield Claim(
            subject="fragment maps",
            name=fragment.name,
            text="(lane, register, element) -> (row, column) is a bijection, and gather after scatter the identity",
            build=partial(_is_map, fragment),
        )


def _fragments() -> list[maps.Fragment]:
    """List every fragment of ldmatrix, mma and wgmma, each name once."""
    operands = product((maps.mma_a, maps.mma_b), (128, 256), (4, 8, 16, 32))  # of so many bits in a row
    fragments = [
        *(maps.ldmatrix(count, trans) for count in (1, 2, 4) for trans in (False, True)),
        *(of(row // bits, bits) for of, row, bits in operands),
        *(maps.mma_c(bits) for bits in (16, 32)),
        maps.wgmma_a(),
        *(maps.wgmma_d(n, True, bits) for bits in (16, 32) for n in range(8, 257, 8)),
    ]
    return list({fragment.name: fragment for fragment in fragments}.values())


@register
def packings() -> Iterator[Claim]:
    """Yield the claims that `unpack(pack(w)) == w` for every layout of every kind of operand."""
    for subject, name, originals, pack_and_unpack in _packings():
        yield Claim(
            subject=subject,
            name=name,
            text="unpack after pack is the identity on every array: integers, scales, offsets, the order of channels",
            build=partial(_returns, originals, pack_and_unpack),
        )
    for name, read in (
        ("QServe's nibbles", lambda octets: foreign_orders.unpack_qserve(octets.view(np.int8).reshape(64, -1))),
        ("QServe's constants", lambda octets: _nibbles_of(foreign_orders.qserve_rows(octets.reshape(-1, 64)))),
        ("eight along rows", lambda octets: foreign_orders.unpack_words(_words(octets), 0)),
        ("eight along columns", lambda octets: foreign_orders.unpack_words(_words(octets), 1)),
        ("AWQ's eight", lambda octets: foreign_orders.unpack_words(_words(octets), 1, foreign_orders.AWQ_COLUMNS)),
    ):
        yield Claim(
            subject="packings of other projects",
            name=name,
            text="every nibble of a file becomes one element of the matrix",
            build=partial(_reads_each_once, read),
        )


def _packings() -> Iterator[tuple[str, str, Originals, Through]]:
    """Yield each packing to try: subject, name, the arrays to pack, and the function that packs and unpacks them."""
    pack_function: Callable[..., Any]
    through: Through
    for name, low, pack_function, unpack_function in (
        ("eight weights", 0, nibbles.pack_u4, nibbles.unpack_u4),
        ("eight signed weights", -8, nibbles.pack_s4, nibbles.unpack_s4),
        ("COMET's word", -8, nibbles.pack_comet, nibbles.unpack_comet),
        ("an MMA's word", 0, nibbles.pack_mma, nibbles.unpack_mma),
        ("pairs", -8, layout.pack_pairs, layout.unpack_pairs),
    ):
        yield "nibbles", name, partial(_matrices, 16, low), partial(_through, pack_function, unpack_function)
    for layout_name, kind in product(layout.LAYOUTS, _KINDS):
        through = partial(_through_pack, layout_name)
        yield f"packing {layout_name}", f"{kind.__name__} comes back", partial(_weights, kind), through
    for kind in _KINDS:
        through = partial(_through_pack, "strips", interleaved=True)
        yield "packing strips", f"{kind.__name__}, gate and up in turns", partial(_weights, kind, (64, 144)), through
    yield "packing of experts", "each comes back", partial(_weights, LQQWeight), _through_experts
    for layout_name in layout.ATOM_LAYOUTS:
        through = partial(_through, partial(layout.pack_atom, layout=layout_name), layout.unpack_atom)
        yield "packing W4A4 weights", layout_name, _atom_rows, through
        yield (
            "packing W4A4 weights",
            f"{layout_name}, reordered",
            _reordered_rows,
            partial(_through_reordered, layout_name),
        )
        yield "packing W4Ax weights", layout_name, partial(_block_rows, False), partial(_through_blocks, layout_name)
    for layout_name in layout.ATOM_ORDERS.values():
        pack_function = partial(layout.pack_atom_activations, layout=layout_name)
        through = partial(_through, pack_function, layout.unpack_atom_activations)
        yield "packing W4A4 activations", layout_name, _atom_rows, through
    for layout_name in layout.BLOCK_ORDERS.values():
        pack_function = partial(layout.pack_block_activations, layout=layout_name)
        through = partial(_through, pack_function, layout.unpack_block_activations)
        yield "packing W4Ax activations", layout_name, partial(_block_rows, True), through
    for order, rows in (("row_major", None), ("fragment", None), ("tiles", 8), ("tiles", 64), ("tiles", 256)):
        name = f"swizzled tiles of {rows}" if rows else order
        pack_function = partial(layout.pack_activations, layout=order, rows=rows)
        yield "orders of activations", name, _activations, partial(_through, pack_function, layout.unpack_activations)
    for scheme in KV_SCHEMES:
        yield "pages of the KV cache", scheme, partial(_tokens, scheme), _through_pages
        yield "pages of the KV cache", f"{scheme}, in a pool", partial(_tokens, scheme), _through_pool


# There and back


def _through(pack_function: Callable[[Any], Any], unpack_function: Callable[[Any], Any], x: Any, _: Sizes) -> Any:
    return unpack_function(pack_function(x))


def _through_pack(layout_name: str, weight: Any, _: Sizes, **options: bool) -> Any:
    return unpack(pack(weight, layout_name, unchecked=True, **options))


def _through_experts(weight: LQQWeight, _: Sizes) -> Any:
    """Stack the weight as the second of two experts and take it out again."""
    reversed_weight = replace(weight, q4=weight.q4[::-1].copy())
    return unpack(
        layout.stack_experts([pack(expert, "strips", unchecked=True) for expert in (reversed_weight, weight)]).expert(1)
    )


def _through_reordered(layout_name: str, arrays: dict[str, Any], _: Sizes) -> dict[str, Any]:
    rows = {name: x for name, x in arrays.items() if name != "order"}
    packed_weight = layout.pack_reordered(AtomRows(**rows), arrays["order"], layout_name)
    return {**vars(packed_weight.rows), "order": packed_weight.order}


def _through_blocks(layout_name: str, rows: BlockRows, sizes: Sizes) -> BlockRows:
    return layout.unpack_block_weight(layout.pack_block_weight(rows, sizes["int8"], layout_name))


def _through_pages(kv: QuantizedKV, sizes: Sizes) -> QuantizedKV:
    channel = (kv.scale, kv.zero) if KV_SCHEMES[kv.scheme].by_channel else None
    pages = layout.pack_pages(kv, sizes["page"])
    return layout.unpack_pages(pages, kv.scheme, sizes["D"], sizes["page"], sizes["tokens"], channel)


def _through_pool(kv: QuantizedKV, sizes: Sizes) -> QuantizedKV:
    """Write tokens as the values of the second of two sequences and read them back.

    The sequences' pages lie in random order in the pool, with other tokens as keys and as the first sequence.
    """
    channel = (kv.scale, kv.zero) if KV_SCHEMES[kv.scheme].by_channel else None
    tokens, heads, D = kv.shape
    pages_per_sequence = ceil_div(tokens, sizes["page"])
    options: dict[str, Any] = {
        "page_size": sizes["page"],
        "scheme": kv.scheme,
        "k_channel": channel,
        "v_channel": channel,
    }
    cache = layout.KVCache.empty(2, pages_per_sequence, heads, D, **options)
    cache.block_table[:] = np.random.default_rng(0).permutation(2 * pages_per_sequence).reshape(2, pages_per_sequence)
    cache.lengths[:] = tokens
    reversed_tokens = replace(kv, values=kv.values[::-1].copy())
    layout.scatter(cache, [reversed_tokens, reversed_tokens], [reversed_tokens, kv])
    return layout.gather(cache)[1][1]


# What is packed: integers and constants are digits of their own index, in every base that tells them apart


def _digits(size: int, base: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the digits of 0..size-1 in `base`, least significant first: one array [size] per digit."""
    index = np.arange(size)
    while True:
        yield index % base
        index = index // base
        if not index.any():
            return


def _halves(*shape: int) -> F16:
    """Build an FP16 array of numbers that each occur once, none a NaN."""
    return np.arange(np.prod(shape), dtype=np.uint16).view(np.float16).reshape(shape)


def _matrices(base: int, low: int) -> Iterator[Original]:
    for N, K in _SIZES:
        for digit in _digits(N * K, base):
            yield {"N": N, "K": K}, (digit + low).reshape(N, K).astype(np.int8 if low else np.uint8)


def _weights(kind: type, rows: tuple[int, ...] = (64, 136)) -> Iterator[Original]:
    """Yield weights whose nibbles hold the digits of their index.

    Each constant of a group holds a digit of the group's index.
    """
    for N, K in zip(rows, (256, 384), strict=True):
        for group in (32, 64, 128) if kind is not QoQChannelWeight else (K,):
            group_digits = list(_digits(N * K // group, 8))
            for number, digit in enumerate(_digits(N * K, 16)):
                q4, constants = digit.reshape(N, K).astype(np.uint8), group_digits[number % len(group_digits)]
                yield {"N": N, "K": K, "group": group}, _weight(kind, q4, constants, group)


def _weight(kind: type, q4: U8, digit: npt.NDArray[np.int64], group: int) -> Any:
    N, K = q4.shape
    rows = np.arange(N, dtype=np.float32)
    if kind is QoQChannelWeight:
        return QoQChannelWeight(q4, rows, (np.arange(N) % 16).astype(np.uint8))
    constant = digit.reshape(N, K // group).astype(np.uint8)
    level2 = {"minimum": -constant.astype(np.int8)} if kind is LQQWeight else {"zero": constant}
    return kind(q4=q4, group_scale=constant + np.uint8(1), channel_scale=rows, protective_range=119, **level2)


def _atom_rows() -> Iterator[Original]:
    for (N, K), group, outliers in product(((64, 256), (136, 320)), ATOM_GROUPS, ATOM_OUTLIERS):
        if K % group:
            continue
        scale8 = _halves(N, 2)[:, 1] if outliers else np.ones(N, np.float16)
        q8 = list(_signed_matrices(N, outliers, 256))
        for number, q4 in enumerate(_signed_matrices(N, K, 16)):
            rows = AtomRows(q4, _halves(N, K // group), q8[number % len(q8)], scale8)
            yield {"N": N, "K": K, "group": group, "outliers": outliers}, rows


def _reordered_rows() -> Iterator[Original]:
    for sizes, atom_rows in _atom_rows():
        yield sizes, {**vars(atom_rows), "order": np.random.default_rng(0).permutation(atom_rows.shape[1])}


def _block_rows(mixed: bool) -> Iterator[Original]:
    """Yield BlockRows: INT4 weights, or activations (`mixed`) whose last `int8` blocks are INT8.

    Weights come once for each `int8` too, as their packing depends on it.
    """
    for N, K in _SIZES:
        for int8 in range(K // BLOCK + 1):
            first_int8 = K - int8 * BLOCK if mixed else K
            for number, q4 in enumerate(_signed_matrices(N, K, 16)):
                q8 = list(_signed_matrices(N, K, 256))
                q = np.concatenate([q4[:, :first_int8], q8[number % len(q8)][:, first_int8:]], axis=1)
                yield {"N": N, "K": K, "int8": int8}, BlockRows(q, _halves(N, K // BLOCK), int8 if mixed else 0)


def _signed_matrices(N: int, K: int, base: int) -> Iterator[S8]:
    for digit in _digits(N * K, base):
        yield (digit - base // 2).reshape(N, K).astype(np.int8)


def _activations() -> Iterator[Original]:
    for M, K in _TOKENS:
        for q in _signed_matrices(M, K, 256):
            numbers = np.arange(M)
            yield {"M": M, "K": K}, QuantizedActivations(q, numbers.astype(np.float32), numbers.astype(np.int32))


def _tokens(scheme: str) -> Iterator[Original]:
    kv_format, heads = KV_SCHEMES[scheme], 3
    for page, D in product(layout.PAGE_SIZES, layout.HEAD_DIMS):
        tokens = 2 * page + 5
        shape = (heads, D) if kv_format.by_channel else (tokens, heads)
        scale = np.arange(1, np.prod(shape) + 1, dtype=kv_format.constant).reshape(shape)
        zero = scale % 16 if not kv_format.low else np.zeros_like(scale)
        for digit in _digits(tokens * heads * D, kv_format.high - kv_format.low + 1):
            values = (digit + kv_format.low).reshape(tokens, heads, D).astype(kv_format.dtype)
            yield {"page": page, "D": D, "tokens": tokens}, QuantizedKV(scheme, values, scale, zero)


# Deciding


def _returns(originals: Originals, there_and_back: Through) -> Enumeration:
    """Check that each original comes back equal in all its arrays."""
    cases = 0
    for sizes, original in originals():
        returned_arrays = there_and_back(original, sizes)
        for name, array in _arrays(original).items():
            returned = _arrays(returned_arrays)[name]
            if not np.array_equal(array, returned):
                is_wrong = np.not_equal(array, returned) if np.shape(array) == np.shape(returned) else np.ones(1)
                return Enumeration(cases, {**sizes, name: int(np.flatnonzero(is_wrong)[0])})
            cases += np.size(array)
    return Enumeration(cases)


def _arrays(x: Any) -> Mapping[str, Any]:
    return {"element": x} if isinstance(x, np.ndarray) else x if isinstance(x, dict) else vars(x)


def _nibbles_of(octets: U8) -> U8:
    return np.stack([octets & 15, octets >> 4])


def _words(octets: U8) -> npt.NDArray[np.int32]:
    return octets.view(np.int32).reshape(32, -1)


def _reads_each_once(read: Callable[[Any], U8], size: int = 64 * 256) -> Enumeration:
    """Check that `read` returns each nibble of `size` bytes exactly once.

    The nibbles hold the digits of their index.
    """
    positions = np.zeros(2 * size, np.int64)
    for place, digit in enumerate(_digits(2 * size, 16)):
        positions += read((digit[::2] | digit[1::2] << 4).astype(np.uint8)).reshape(-1).astype(np.int64) << 4 * place
    return _is_bijection(positions)


def _is_map(fragment: maps.Fragment) -> Enumeration:
    """Check that a fragment map is a bijection, and that gather after scatter is the identity."""
    places = _is_bijection(fragment.rows * fragment.shape[1] + fragment.cols)
    if places.counterexample is not None:
        return places
    dtype, base = f"u{max(fragment.bits, 8) // 8}", min(256, 1 << fragment.bits)
    digits = _digits(places.cases, base)
    matrices: list[Original] = [({}, digit.reshape(fragment.shape).astype(dtype)) for digit in digits]
    return _returns(lambda: matrices, lambda x, _: fragment.gather(fragment.scatter(x)))


def _is_bijection(places: npt.NDArray[Any]) -> Enumeration:
    places = places.reshape(-1)
    missed_places = np.flatnonzero(np.bincount(places, minlength=places.size) != 1)
    return Enumeration(places.size, {"place": int(missed_places[0])} if missed_places.size else None)


@register
def swizzles() -> Iterator[Claim]:
    """Yield the claims on the shared-memory swizzles of TMA and wgmma."""
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


def _is_involution(span: int) -> Enumeration:
    addresses = np.arange(0, 8 * 128, 16)
    swizzled = swizzle(addresses, span)
    if not np.array_equal(swizzle(swizzled, span), addresses):
        return Enumeration(len(addresses), {"address": int(addresses[(swizzle(swizzled, span) != addresses).argmax()])})
    return _is_bijection(swizzled // 16)


def _without_conflicts(span: int) -> Enumeration:
    """Check each phase of a warp's 16-byte access to eight rows of one column for bank conflicts."""
    rows = np.arange(32)
    columns = np.arange(0, span, 16)[:, None]
    banks = bank_use(swizzle(rows * span + columns, span), 16, store=True)
    conflict_places = np.flatnonzero(banks.conflicts)
    return Enumeration(banks.conflicts.size, {"column": int(conflict_places[0])} if conflict_places.size else None)
