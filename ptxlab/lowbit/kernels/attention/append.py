"""New keys and values into the pages of a KV cache, in one launch (QServe §5.1).

`append_kv4` takes keys and values, `rope_append_kv4` what the QKV projection leaves: it rotates the queries as well,
and writes the rotated keys if they are wanted.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.attention.common import FORM, ROTATED_CONSTANTS
from ptxlab.lowbit.layout import HEAD_DIMS, PAGE_SIZES, KVCache, page_bytes, write_slots
from ptxlab.lowbit.quant import KV_SCHEMES
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows
from ptxlab.spec.dtypes import ByVariant, convert_to_dtype, round_to_dtype

DTYPES = ("float16", "bfloat16")  # of k and v, by BF16
INDICES = ("int32", "int64")  # of slots and positions, by INDEX
MOST_BYTES = 2**37  # of a pool: places are counted in units of 32 bytes
_MOST_THREADS = 256  # of a block
_ROWS, _CHANNEL_ROWS = 2, 4  # of a thread: by channel they share its constants
_BUSY = 2**18  # threads that are left when each has more rows than one
_CHANNELS = ("k_scale", "k_zero", "v_scale", "v_zero")


def scheme_of(bits: int, channel: int) -> str:
    """Return the name of a scheme from its sizes in the spec."""
    return f"kv{bits}{'_channel' if channel else ''}"


def _lanes(s: Sizes) -> int:
    """Count the lanes of a row, with 16 values each, or 8 by channel."""
    lanes: int = s["D"] // (8 if s["channel"] else 16)
    return lanes


def _choose(s: Sizes) -> dict[str, int]:
    """Choose the constants, with as many rows per thread as leave the GPU busy."""
    rows = _CHANNEL_ROWS if s["channel"] else _ROWS
    while rows > 1 and _parts(s) * s["T"] * s["H"] * _lanes(s) < rows * _BUSY:
        rows //= 2
    page = {"HEAD_DIM": s["D"], "PAGE": s["size"], "BITS": s["bits"], "CHANNEL": s["channel"]}
    return {**page, "BF16": 0, "INDEX": 0, "ROWS": rows}


def _parts(s: Sizes) -> int:
    """Count the parts of H heads that a token has: keys, values, and with `ratio` queries."""
    part_count: int = s.get("ratio", 0) + 2
    return part_count


def _launch(s: Sizes) -> Launch:
    """Return the launch of tiles of tokens, of K and V in turn, by groups of heads.

    A group has whole warps; by token it has ROWS heads or more.
    """
    tiles, groups, threads = _geometry(s)
    return Launch((2 * tiles, groups, 1), (threads, 1, 1))


def _launch_fused(s: Sizes) -> Launch:
    """Return the launch of tiles of tokens by groups of heads, for Q, K and V one after the other."""
    tiles, groups, threads = _geometry(s)
    return Launch((tiles, groups, _parts(s)), (threads, 1, 1))


def _geometry(s: Sizes) -> tuple[int, int, int]:
    """Compute the number of tiles of tokens, of groups of heads, and of threads of a group."""
    lanes, rows = _lanes(s), s["ROWS"]
    groups = ceil_div(s["H"] * lanes, _MOST_THREADS)
    threads = ceil_div(s["H"], groups) * lanes
    multiple = max(32, 1 if s["channel"] else rows * lanes)
    threads = ceil_div(threads, multiple) * multiple
    return ceil_div(s["T"], rows), ceil_div(s["H"] * lanes, threads), threads


def _example_fused(rng: np.random.Generator, *, ratio: int, kept: int, pitch: int, **sizes: int) -> Arrays:
    """Draw tokens as `_example` does, and their queries."""
    logical = _example(rng, **sizes)
    k, v = logical.pop("k"), logical.pop("v")
    logical = {name: array for name, array in logical.items() if name not in ("k_pitch", "v_pitch")}
    q = rng.standard_normal((len(k), ratio * k.shape[1], k.shape[2]), dtype=np.float32)
    qkv = np.concatenate([q, k, v], axis=1).reshape(len(k), -1)
    return {"qkv": qkv, "heads": k.shape[1], "kept": kept, "pitch": pitch, **logical}


def _example(
    rng: np.random.Generator,
    *,
    T: int,
    H: int,
    D: int,
    pages: int,
    size: int,
    bits: int,
    channel: int,
    R: int,
    k_pitch: int = 0,
    v_pitch: int = 0,
) -> Arrays:
    """Draw tokens for all slots of the pool, in any order, and padding; keys have outliers, one token is zeros."""
    scheme, slot_count = scheme_of(bits, channel), pages * size
    k, v = rng.standard_normal((2, T, H, D), dtype=np.float32)
    k[:, :, :: D // 4] *= 20
    k[T // 2] = 0
    slots = rng.permutation(np.concatenate([np.arange(slot_count), -1 - np.arange(T - slot_count)])).astype(np.int32)
    logical: Arrays = {"k": k, "v": v, "slots": slots, "page_size": size, "pages": pages, "scheme": scheme}
    logical |= {"k_pitch": k_pitch, "v_pitch": v_pitch}
    if R:
        angles = rng.uniform(-4, 4, (R, D // 2)).astype(np.float32)
        logical |= {"cos": np.cos(angles), "sin": np.sin(angles), "positions": rng.integers(0, R, T, dtype=np.int32)}
    if channel:
        constants = [quant.calibrate_kv(x[: T // 2], scheme) for x in (k, v)]  # so that the others are clipped
        logical |= {"k_channel": constants[0], "v_channel": constants[1]}
    return logical


def _pack(logical: Arrays) -> Arrays:
    constants = [*logical.get("k_channel", ()), *logical.get("v_channel", ())]
    constant_arrays = dict(zip(_CHANNELS, constants, strict=True)) if constants else {}
    if KV_SCHEMES[logical["scheme"]].bits == 8:  # symmetric
        constant_arrays = {name: array for name, array in constant_arrays.items() if name.endswith("scale")}
    pitches = {"k": "k_pitch", "v": "v_pitch", "qkv": "pitch"}
    rows = {name: pad_rows(logical[name], logical[of]) for name, of in pitches.items() if name in logical}
    names = ("slots", "cos", "sin", "positions")
    return rows | {name: logical[name] for name in names if name in logical} | constant_arrays


def pad_rows(x: np.ndarray, pitch: int) -> np.ndarray:
    """Lay rows [T, ...] out as the kernels take them: [T, pitch], NaN behind each row."""
    rows = x.reshape(len(x), -1)
    padded_rows = np.full((len(x), pitch), np.nan, x.dtype)
    padded_rows[:, : rows.shape[1]] = rows
    return padded_rows


def rows_with_gaps(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return rows as [T, pitch]; behind the last row of a flat array with gaps there are zeros."""
    if array.size == shape[0] * shape[1]:
        return array.reshape(shape)
    rows = np.zeros(shape, array.dtype)
    rows.reshape(-1)[: array.size] = array
    return rows


def append_reference(
    k: np.ndarray,
    v: np.ndarray,
    slots: np.ndarray,
    page_size: int,
    pages: int,
    scheme: str,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    k_channel: tuple[Any, Any] | None = None,
    v_channel: tuple[Any, Any] | None = None,
    rotated: bool = False,
    BF16: int = 0,
    INDEX: int = 0,
    **pitches: int,
) -> np.ndarray:
    """Compute the reference: a pool u8 [pages, 2, H, page_bytes] of zeros after k and v f32 [T, H, D] are appended.

    `BF16` sets the dtype in which k and v are stored first.
    """
    (_, H, D), is_token = k.shape, slots >= 0
    pool = np.zeros((pages, 2, H, page_bytes(scheme, page_size, D)), np.uint8)
    cache = KVCache(
        pool=pool,
        block_table=np.zeros((0, 1), np.int32),
        lengths=np.zeros(0, np.int32),
        page_size=page_size,
        head_dim=D,
        scheme=scheme,
        k_channel=k_channel,
        v_channel=v_channel,
        rotated=rotated,
    )
    k, v = (round_to_dtype(x, DTYPES[BF16])[is_token] for x in (k, v))
    if cos is not None and sin is not None:
        table_row = (np.arange(len(slots)) if positions is None else positions)[is_token]
        k = reference.rope(k, cos[table_row], sin[table_row])
    write_slots(cache, cache.quantize_keys(k), cache.quantize_values(v), slots[is_token])
    return pool


def rope_append_reference(
    qkv: np.ndarray,
    slots: np.ndarray,
    heads: int,
    page_size: int,
    pages: int,
    scheme: str,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    kept: int = 0,
    BF16: int = 0,
    pitch: int = 0,
    **cache_options: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the reference from qkv f32 [T, (Hq + 2 H)·D]: (q, keys, pool).

    q is rotated and rounded once. The keys are too, or there are none. The pool is that of `appended`.
    """
    (T, R), D = (len(qkv), len(cos)), 2 * cos.shape[1]
    heads_of_token = qkv.reshape(T, -1, D)
    q, k, v = heads_of_token[:, : -2 * heads], heads_of_token[:, -2 * heads : -heads], heads_of_token[:, -heads:]
    table_row = table_rows(positions, R)
    pool = append_reference(k, v, slots, page_size, pages, scheme, cos, sin, positions, BF16=BF16, **cache_options)
    q, k = (
        convert_to_dtype(reference.rope(round_to_dtype(x, DTYPES[BF16]), cos[table_row], sin[table_row]), DTYPES[BF16])
        for x in (q, k)
    )
    return q, k[: kept * T], pool


def table_rows(positions: np.ndarray, rows: int) -> np.ndarray:
    """Return the rows of the tables that the kernels read: the last row for positions outside the tables."""
    return np.where((positions < 0) | (positions >= rows), rows - 1, positions)


_CACHE_RULES = (
    f"D in {HEAD_DIMS}",
    f"size in {PAGE_SIZES}",
    "bits in (4, 8)",
    "channel in (0, 1)",
    "1 <= H <= 4096",
    "1 <= T < 2**31 - 4",
    f"pages*2*H*size*(D*bits//8 + 4*(1 - channel)) <= {MOST_BYTES}",
)


def pitch_rules(pitch: str, width: str) -> tuple[str, ...]:
    """State the rules of rows that begin `pitch` elements apart: whole vectors of 16 bytes, none in two rows."""
    return f"{width} <= {pitch} < 2**31", f"{pitch} % 8 == 0"


_POOL = Arg("pool", "uint8", ("pages", "2", "H", "size*(D*bits//8 + 4*(1 - channel))"), "out")
_PLACES = ByVariant("INDEX", INDICES)


def _after_values(tables_optional: bool) -> tuple[Arg, ...]:
    """Return the arguments after the appended values, which both kernels take."""
    return (
        _POOL,
        Arg("slots", _PLACES, ("T",)),
        Arg("cos", "float32", ("R", "D//2"), optional=tables_optional),
        Arg("sin", "float32", ("R", "D//2"), optional=tables_optional),
        Arg("positions", _PLACES, ("T",), optional=True),
        *(Arg(name, "float32", ("H", "D"), optional=True) for name in _CHANNELS),
        Arg("T", "int32", role="scalar"),
        Arg("H", "int32", role="scalar"),
        Arg("R", "int32", role="scalar"),
    )


APPEND = KernelSpec(
    name="append_kv4",
    summary="new keys and values, rotated and quantised, into the pages of a cache (QServe §5.1)",
    args=(
        Arg("k", ByVariant("BF16", DTYPES), ("T", "k_pitch")),
        Arg("v", ByVariant("BF16", DTYPES), ("T", "v_pitch")),
        *_after_values(tables_optional=True),
        Arg("k_pitch", "int32", role="scalar"),
        Arg("v_pitch", "int32", role="scalar"),
    ),
    launch=_launch,
    choose=lambda s: {**_choose(s), "ROPE": int(s["R"] > 0)},
    rules=(*_CACHE_RULES, "0 <= R < 2**31", *pitch_rules("k_pitch", "H*D"), *pitch_rules("v_pitch", "H*D")),
    value_rules=("slots < pages*size",),
    example=_example,
    pack=_pack,
    reference=append_reference,
    arch="sm_80",
    tolerance_reason="every operation is IEEE's: each byte is compared for equality",
    example_sizes=sizes_rows(
        "T H D pages size bits channel R k_pitch v_pitch",
        (65, 2, 128, 1, 64, 4, 0, 0, 256, 256),
        (70, 1, 64, 2, 32, 4, 0, 90, 192, 72),
        (35, 3, 256, 2, 16, 8, 0, 5, 768, 1024),
        (36, 2, 128, 2, 16, 4, 1, 40, 264, 256),
        (33, 5, 64, 1, 32, 8, 1, 0, 320, 320),
    ),
    after_wait=("k", "v", "slots", "cos", "sin", "positions", *_CHANNELS),
    batch="T",
)

ROPE_APPEND = replace(
    APPEND,
    name="rope_append_kv4",
    summary="what the QKV projection leaves: queries rotated, keys and values into a cache's pages (QServe §5.1)",
    args=(
        Arg("qkv", ByVariant("BF16", DTYPES), ("T", "pitch")),
        Arg("q", ByVariant("BF16", DTYPES), ("T", "ratio*H", "D"), "out"),
        Arg("keys", ByVariant("BF16", DTYPES), ("kept*T", "H", "D"), "out"),
        *_after_values(tables_optional=False),
        Arg("pitch", "int32", role="scalar"),
    ),
    launch=_launch_fused,
    choose=lambda s: {**_choose(s), "KEYS": s["kept"]},
    rules=(
        *_CACHE_RULES,
        "1 <= R < 2**31",
        "1 <= ratio <= 4096",
        "kept in (0, 1)",
        *pitch_rules("pitch", "(ratio + 2)*H*D"),
    ),
    example=_example_fused,
    reference=rope_append_reference,
    example_sizes=sizes_rows(
        "T H ratio D pages size bits channel R kept pitch",
        (65, 2, 1, 128, 1, 64, 4, 0, 90, 1, 768),
        (35, 3, 2, 256, 2, 16, 8, 0, 5, 0, 3080),
        (36, 2, 3, 64, 2, 16, 4, 1, 40, 1, 640),
        (33, 1, 2, 128, 1, 32, 8, 1, 7, 0, 576),
    ),
    after_wait=("qkv",),
)
SPECS = (APPEND, ROPE_APPEND)


def _rotated_form(spec: KernelSpec) -> KernelSpec:
    """Return the form for caches whose keys are rotated."""
    return replace(
        spec,
        form=FORM,
        summary=f"{spec.summary}; keys rotated by a Hadamard matrix",
        choose=lambda s: {**spec.config_for(s), **ROTATED_CONSTANTS},
        example=lambda rng, **sizes: {**spec.example(rng, **sizes), "rotated": True},
        example_sizes=tuple(sizes for sizes in spec.example_sizes if not sizes["channel"]),
    )


ROTATED = tuple(map(_rotated_form, SPECS))
