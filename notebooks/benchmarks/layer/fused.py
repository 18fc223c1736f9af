"""The kernels between GEMMs and attention, each beside a copy of its bytes, `torch.compile`'s version and Liger's.

Each is timed over buffers that together exceed the L2, unless that takes more than `_MOST_COPIES` of them: then the
launch is all that counts. It is also timed on the same buffers again and again, as in a decoder's chain, launched
plainly and programmatically.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from benchmarks import peers_layer
from benchmarks.layer_shapes import NARROW
from ptxlab import gpu, registry
from ptxlab.arithmetic import ceil_div
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.copying import copy_us
from ptxlab.bench.record import Row, row_of
from ptxlab.errors import BenchmarkError
from ptxlab.lowbit import reference
from ptxlab.lowbit.bench import shapes
from ptxlab.lowbit.bench.shapes import HEAD_DIM, PAGE
from ptxlab.lowbit.kernels.attention import append_kv4, rope_append_kv4
from ptxlab.lowbit.kernels.quantize import (
    quantize_activations,
    reorder_quantize,
    rmsnorm_quantize,
    rmsnorm_reorder_quantize,
    silu_mul_quantize,
    silu_mul_reorder_quantize,
)
from ptxlab.lowbit.layout import AtomActivations, KVCache, page_bytes
from ptxlab.lowbit.quant import ATOM_PAPER, channel_places
from ptxlab.lowbit.quant.atom import ACTIVATION_CLIP
from ptxlab.runtime.timing import GEMM_REPLAYS, copies_beyond_l2, measure

MEASURE = "fused"
TOKENS = (1, 16, 64, 256, 1024, 4096)
WIDTHS = (4096, 8192, 11008, 28672)
HEADS = *((*heads, HEAD_DIM) for heads in shapes.HEADS), (NARROW.heads, NARROW.kv_heads, NARROW.head_dim)
EPS = peers_layer.EPS
_REORDERED = (4096, 11008), (1, 64, 1024)  # widths and tokens of W4A4's quantisers, which no layer here has
_MOST_COPIES = 1024  # of a call's buffers; where more would be needed to exceed the L2, they are in it
_CHECKED = 8  # rows, spread over all
_SMALL = 1 / 64  # what is added to the residual again and again must not overflow it


@dataclass(frozen=True)
class Fused:
    """Fused kernel at one size.

    Attributes:
        kernel: its name.
        sizes: that tell it from others.
        nbytes: read and written by a call.
        make: arrays of one call.
        call: of arrays, perhaps launched programmatically.
        check: of arrays after a call; returns what was checked. Raises BenchmarkError for wrong results.
        public: its name among those that there are public versions of (`peers_layer.fused`), if it is.
    """

    kernel: str
    sizes: dict[str, int]
    nbytes: int
    make: Callable[[], dict[str, Any]]
    call: Callable[..., Any]
    check: Callable[[dict[str, Any]], str]
    public: str | None = None


def rows(ceilings: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure every fused kernel at every size, W4A4's kernels at some."""
    for K in WIDTHS:
        for M in reversed(TOKENS):  # the largest first: `torch.compile`'s kernels are tuned to it
            progress(f"{M} x {K}: fused kernels")
            others = reordering(M, K) if K in _REORDERED[0] and M in _REORDERED[1] else ()
            for fused in (normed(M, K), gated(M, K), quantised(M, K), *others):
                yield timed(fused, ceilings)
    for heads in HEADS:
        for T in TOKENS:
            progress(f"heads {heads[0]}/{heads[1]} of {heads[2]}, {T} tokens: rope_append_kv4")
            yield timed(appended(T, *heads), ceilings)


def warm(K: int) -> None:
    """Compile all that is launched at this width, in a process that ends then.

    The first width also compiles everything else.
    """
    made = [normed(1, K), gated(1, K), quantised(1, K), *(reordering(1, K) if K in _REORDERED[0] else ())]
    made += [appended(1, *heads) for heads in HEADS if WIDTHS[0] == K]
    for each in made:
        each.call(**each.make())


def timed(fused: Fused, ceilings: Ceilings) -> Row:
    """Time a kernel on data from memory and from the L2, beside copies of as many bytes.

    The results are checked on fresh arrays afterwards.
    """
    count = copies_beyond_l2(fused.nbytes)
    count = count if count <= _MOST_COPIES else 1
    copies = [fused.make() for _ in range(count)]
    cold = measure([partial(fused.call, **arrays) for arrays in copies], replays=GEMM_REPLAYS)
    warm, chained = (
        measure([partial(fused.call, **copies[0], programmatic=early)], replays=GEMM_REPLAYS).us
        for early in (False, True)
    )
    fresh = fused.make()
    fused.call(**fresh)
    checked = fused.check(fresh)
    more = {"l2_us": warm, "chain_us": chained, "copies": float(count), **_copy(fused.nbytes, count)}
    return row_of(
        registry.specs()[fused.kernel],
        MEASURE,
        fused.sizes,
        cold,
        floor=(fused.nbytes / ceilings.copy_tbps / 1e6, "copy"),
        checked=checked,
        nbytes=fused.nbytes,
        peers=peers_layer.fused(fused.public, fused.sizes["M"], fused.sizes["K"], count) if fused.public else {},
        more=more,
    )


@cache
def _copy(nbytes: int, copies: int) -> dict[str, float]:
    return {"copy_us": copy_us(nbytes, copies), "copy_l2_us": copy_us(nbytes, 1)}


def normed(M: int, K: int) -> Fused:
    """Prepare `rmsnorm_quantize` with a residual."""
    x, residual = _values(M, K) * np.float16(_SMALL), _values(M, K, seed=1)
    gamma = _values(1, K, seed=2)[0]
    out = _packed(M, K)

    def make() -> dict[str, Any]:
        return {"x": x.copy(), "gamma": gamma, "residual": residual.copy(), "out": out()}

    def call(x: Any, gamma: Any, programmatic: bool = False, **more: Any) -> Any:
        return rmsnorm_quantize(x, gamma, eps=EPS, programmatic=programmatic, **more)

    def check(arrays: dict[str, Any]) -> str:
        at = _checked(M)
        total = (_taken(x, at).astype(np.float32) + _taken(residual, at).astype(np.float32)).astype(np.float16)
        if not (_taken(arrays["residual"], at) == total).all():
            raise BenchmarkError(f"rmsnorm_quantize: wrong residual at M={M}, K={K}")
        v = total.astype(np.float64)
        y = v / np.sqrt((v * v).mean(1, keepdims=True) + EPS) * gpu.to_host(gamma).astype(np.float64)
        return _right("rmsnorm_quantize", arrays["out"], at, y)

    nbytes = M * K * 7 + 8 * M + 2 * K
    name = "rmsnorm_quantize"
    return Fused(name, {"M": M, "K": K}, nbytes, make, call, check, public=name)


def gated(M: int, K: int) -> Fused:
    """Prepare `silu_mul_quantize`."""
    gate_up = _values(M, 2 * K)
    out = _packed(M, K)

    def check(arrays: dict[str, Any]) -> str:
        at = _checked(M)
        gate, up = np.split(_taken(gate_up, at).astype(np.float64), 2, axis=1)
        return _right("silu_mul_quantize", arrays["out"], at, gate / (1 + np.exp(-gate)) * up)

    def make() -> dict[str, Any]:
        return {"gate_up": gate_up.copy(), "out": out()}

    nbytes = M * K * 5 + 8 * M
    name = "silu_mul_quantize"
    return Fused(name, {"M": M, "K": K}, nbytes, make, silu_mul_quantize, check, public=name)


def quantised(M: int, K: int) -> Fused:
    """Prepare `quantize_activations`."""
    x = _values(M, K)
    out = _packed(M, K)

    def check(arrays: dict[str, Any]) -> str:
        at = _checked(M)
        return _right("quantize_activations", arrays["out"], at, _taken(x, at).astype(np.float64))

    def make() -> dict[str, Any]:
        return {"x": x.copy(), "out": out()}

    nbytes = M * K * 3 + 8 * M
    sizes, public = {"M": M, "K": K}, "quantize_activations"
    return Fused("quantize_activations_s8", sizes, nbytes, make, quantize_activations, check, public)


def reordering(M: int, width: int, outliers: int = 128, group: int = 128) -> Iterator[Fused]:
    """Prepare the kernels that reorder channels, for Hopper.

    They are `reorder_quantize`, `rmsnorm_reorder_quantize` with a residual and `silu_mul_reorder_quantize`.
    """
    sizes = {"M": M, "K": width - outliers, "outliers": outliers, "g": group}
    x, residual, gamma = _values(M, width) * np.float16(_SMALL), _values(M, width, seed=1), _values(1, width, seed=2)[0]
    gate_up = _values(M, 2 * width, seed=3)
    order = np.random.default_rng(4).permutation(width)
    place = gpu.to_device(channel_places(order))
    how: dict[str, Any] = {"outliers": outliers, "group": group}
    nothing = gpu.to_device(np.zeros((M, width), np.float16))

    def out() -> AtomActivations:
        made: AtomActivations = reorder_quantize(nothing, place, **how)
        return made

    written = sum(int(array.nbytes) for array in out().arrays.values())

    def fused(name: str, function: Callable[..., Any], nbytes: int, exact: Callable[..., Any], **of: Any) -> Fused:
        def make() -> dict[str, Any]:
            return {**{each: array.copy() for each, array in of.items()}, "place": place, "out": out()}

        def check(arrays: dict[str, Any]) -> str:
            at = _checked(M)
            return _right_in_groups(name, arrays["out"], at, exact(at, arrays)[:, order])

        return Fused(name, sizes, nbytes + place.nbytes + written, make, partial(function, **how), check)

    def plain(at: np.ndarray, _: dict[str, Any]) -> Any:
        return _taken(x, at).astype(np.float64)

    def normed(at: np.ndarray, arrays: dict[str, Any]) -> Any:
        total = (_taken(x, at).astype(np.float32) + _taken(residual, at).astype(np.float32)).astype(np.float16)
        if not (_taken(arrays["residual"], at) == total).all():
            raise BenchmarkError(f"rmsnorm_reorder_quantize: wrong residual at M={M}, {width} channels")
        v = total.astype(np.float64)
        return v / np.sqrt((v * v).mean(1, keepdims=True) + EPS) * gpu.to_host(gamma).astype(np.float64)

    def gated(at: np.ndarray, _: dict[str, Any]) -> Any:
        gate, up = np.split(_taken(gate_up, at).astype(np.float64), 2, axis=1)
        return gate / (1 + np.exp(-gate)) * up

    row = 2 * M * width
    yield fused("reorder_quantize", reorder_quantize, row, plain, x=x)
    with_eps = partial(rmsnorm_reorder_quantize, eps=EPS)
    arrays = {"x": x, "residual": residual, "gamma": gamma}
    yield fused("rmsnorm_reorder_quantize", with_eps, 3 * row + 2 * width, normed, **arrays)
    yield fused("silu_mul_reorder_quantize", silu_mul_reorder_quantize, 2 * row, gated, gate_up=gate_up)


def appended(T: int, Hq: int, Hkv: int, D: int) -> Fused:
    """Prepare `rope_append_kv4` for T sequences with heads of D dimensions.

    Each sequence appends one token at the end of a page of its own.
    """
    width = (Hq + 2 * Hkv) * D
    qkv = _values(T, width)
    rng = np.random.default_rng(3)
    angles = rng.uniform(-4, 4, (PAGE, D // 2)).astype(np.float32)
    rope = gpu.to_device(np.cos(angles)), gpu.to_device(np.sin(angles)), gpu.to_device(np.full(T, PAGE - 1, np.int32))
    slots = gpu.to_device((rng.permutation(T) * PAGE + PAGE - 1).astype(np.int32))

    def cache() -> KVCache:
        pool = gpu.empty((T, 2, Hkv, page_bytes("kv4", PAGE, D)), np.uint8)
        gpu.fill_bytes(pool, 0)
        table, lengths = gpu.to_device(np.arange(T, dtype=np.int32)[:, None]), gpu.to_device(np.full(T, PAGE, np.int32))
        return KVCache(pool=pool, block_table=table, lengths=lengths, page_size=PAGE, head_dim=D)

    def make() -> dict[str, Any]:
        return {"qkv": qkv.copy(), "cache": cache(), "out": gpu.empty((T, Hq, D), np.float16)}

    def call(qkv: Any, cache: KVCache, out: Any, programmatic: bool = False) -> Any:
        return rope_append_kv4(qkv, cache, slots, rope=rope, out=out, programmatic=programmatic)

    def check(arrays: dict[str, Any]) -> str:
        heads = qkv.reshape(T, -1, D)
        right = cache()
        k, v = heads[:, Hq : Hq + Hkv].copy(), heads[:, Hq + Hkv :].copy()
        append_kv4(k, v, right, slots, rope=rope)
        if not bool((arrays["cache"].pool == right.pool).all()):
            raise BenchmarkError(f"rope_append_kv4: pages other than append_kv4's at T={T}, heads {Hq}/{Hkv} of {D}")
        at = _checked(T)
        cos, sin = (gpu.to_host(table)[np.full(len(at), PAGE - 1)] for table in rope[:2])
        q = reference.rope(_taken(heads, at)[:, :Hq], cos, sin).astype(np.float64)
        if np.abs(_taken(arrays["out"], at) - q).max() > 2**-10 * np.abs(q).max():
            raise BenchmarkError(f"rope_append_kv4: wrong queries at T={T}, heads {Hq}/{Hkv} of {D}")
        return f"every byte of the pages equal to append_kv4's; queries of {len(at)} tokens to the reference's"

    moved = T * width * 2 + T * Hq * D * 2 + T * 2 * Hkv * page_bytes("kv4", PAGE, D) // PAGE
    nbytes = moved + T * (D * 4 + 8)
    return Fused("rope_append_kv4", {"M": T, "Hq": Hq, "Hkv": Hkv, "D": D}, nbytes, make, call, check)


def _values(M: int, K: int, seed: int = 0) -> Any:
    """Make random f16 [M, K] on the device; up to 64 different rows are repeated."""
    some = np.random.default_rng(seed).standard_normal((min(M, 64), K), dtype=np.float32).astype(np.float16)
    return np.tile(gpu.to_device(some), (ceil_div(M, len(some)), 1))[:M].copy()


def _packed(M: int, K: int) -> Callable[[], Any]:
    """Return a function that makes activations [M, K] as an output buffer."""
    some = gpu.to_device(np.zeros((M, K), np.float16))
    return lambda: quantize_activations(some)


def _checked(M: int) -> np.ndarray:
    return np.unique(np.linspace(0, M - 1, _CHECKED).astype(int))


def _taken(array: Any, rows: np.ndarray) -> np.ndarray:
    """Copy rows of a device array to the host."""
    return gpu.to_host(array[gpu.to_device(rows)])


def _right(name: str, packed: Any, at: Any, y: np.ndarray) -> str:
    """Compare rows `at` with floats f64, and return the claim.

    Scales agree, values are within rounding of y / scale, and sums are those of the values. Raises BenchmarkError
    otherwise.
    """
    scale = _taken(packed.scale, at).astype(np.float64)[:, None]
    values, sums = _taken(packed.x_q, at).astype(np.float64), _taken(packed.token_sum, at)
    expected = np.abs(y).max(1, keepdims=True) / 127
    steps = np.abs(values - y / scale).max()
    if np.abs(scale / expected - 1).max() > 1e-5 or steps > 0.5 + 1e-3 or (values.sum(1) != sums).any():
        raise BenchmarkError(f"{name}: wrong results at M={packed.M}, K={packed.K}")
    return f"{len(at)} rows within {steps:.4f} of a step of float64, scales within 1e-5, sums those of the values"


def _right_in_groups(name: str, packed: AtomActivations, at: Any, y: np.ndarray) -> str:
    """Compare rows `at` with floats f64 in Atom's order: scales and values, within their rounding."""
    K, stored = packed.K, _taken(packed.scale, at).astype(np.float64)
    values, steps, off = _taken(packed.x, at).astype(np.float64), 0.0, 0.0
    for g, k in enumerate(range(0, K + packed.outliers, packed.group)):
        here, bits = slice(k, k + packed.group), 4 if k < K else 8
        if bits == 8:
            g, here = K // packed.group, slice(K, None)
        clip, most = (ACTIVATION_CLIP, 7) if bits == 4 else (1.0, 127)
        scale = stored[:, g, None]
        expected = np.abs(y[:, here]).max(1, keepdims=True) * clip / ATOM_PAPER.steps(bits)
        off = max(off, np.abs(scale / expected - 1).max())
        steps = max(steps, np.abs(values[:, here] - (y[:, here] / scale).clip(-most - 1, most)).max())
    if off > 2.0**-11 + 1e-5 or steps > 0.5 + 1e-3:
        raise BenchmarkError(f"{name}: wrong results at M={packed.M}, K={K}, outliers={packed.outliers}")
    return f"{len(at)} rows within {steps:.4f} of a step of float64, scales within FP16's rounding"
