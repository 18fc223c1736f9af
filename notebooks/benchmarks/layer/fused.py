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
        public: its name among those that there are public versions of (`peers_layer.time_public_versions`), if it is.
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
            extra_kernels = reordering_kernels(M, K) if K in _REORDERED[0] and M in _REORDERED[1] else ()
            for kernel in (rmsnorm_kernel(M, K), silu_mul_kernel(M, K), quantize_kernel(M, K), *extra_kernels):
                yield measure_kernel(kernel, ceilings)
    for heads in HEADS:
        for T in TOKENS:
            progress(f"heads {heads[0]}/{heads[1]} of {heads[2]}, {T} tokens: rope_append_kv4")
            yield measure_kernel(rope_append_kernel(T, *heads), ceilings)


def warm(K: int) -> None:
    """Compile all that is launched at this width, in a process that ends then.

    The first width also compiles everything else.
    """
    kernels = [
        rmsnorm_kernel(1, K),
        silu_mul_kernel(1, K),
        quantize_kernel(1, K),
        *(reordering_kernels(1, K) if K in _REORDERED[0] else ()),
    ]
    kernels += [rope_append_kernel(1, *heads) for heads in HEADS if WIDTHS[0] == K]
    for kernel in kernels:
        kernel.call(**kernel.make())


def measure_kernel(kernel: Fused, ceilings: Ceilings) -> Row:
    """Time a kernel on data from memory and from the L2, beside copies of as many bytes.

    The results are checked on fresh arrays afterwards.
    """
    count = copies_beyond_l2(kernel.nbytes)
    count = count if count <= _MOST_COPIES else 1
    copies = [kernel.make() for _ in range(count)]
    cold = measure([partial(kernel.call, **arrays) for arrays in copies], replays=GEMM_REPLAYS)
    warm_us, chained_us = (
        measure([partial(kernel.call, **copies[0], programmatic=launches_early)], replays=GEMM_REPLAYS).us
        for launches_early in (False, True)
    )
    fresh = kernel.make()
    kernel.call(**fresh)
    check_note = kernel.check(fresh)
    figures = {"l2_us": warm_us, "chain_us": chained_us, "copies": float(count), **_copy_figures(kernel.nbytes, count)}
    return row_of(
        registry.specs()[kernel.kernel],
        MEASURE,
        kernel.sizes,
        cold,
        floor=(kernel.nbytes / ceilings.copy_tbps / 1e6, "copy"),
        checked=check_note,
        nbytes=kernel.nbytes,
        peers=peers_layer.time_public_versions(kernel.public, kernel.sizes["M"], kernel.sizes["K"], count)
        if kernel.public
        else {},
        more=figures,
    )


@cache
def _copy_figures(nbytes: int, copies: int) -> dict[str, float]:
    return {"copy_us": copy_us(nbytes, copies), "copy_l2_us": copy_us(nbytes, 1)}


def rmsnorm_kernel(M: int, K: int) -> Fused:
    """Prepare `rmsnorm_quantize` with a residual."""
    x, residual = _random_values(M, K) * np.float16(_SMALL), _random_values(M, K, seed=1)
    gamma = _random_values(1, K, seed=2)[0]
    make_output = _output_maker(M, K)

    def make() -> dict[str, Any]:
        return {"x": x.copy(), "gamma": gamma, "residual": residual.copy(), "out": make_output()}

    def call(x: Any, gamma: Any, programmatic: bool = False, **buffers: Any) -> Any:
        return rmsnorm_quantize(x, gamma, eps=EPS, programmatic=programmatic, **buffers)

    def check(arrays: dict[str, Any]) -> str:
        row_indices = _checked_rows(M)
        input_sum = (
            _fetch_rows(x, row_indices).astype(np.float32) + _fetch_rows(residual, row_indices).astype(np.float32)
        ).astype(np.float16)
        if not (_fetch_rows(arrays["residual"], row_indices) == input_sum).all():
            raise BenchmarkError(f"rmsnorm_quantize: wrong residual at M={M}, K={K}")
        v = input_sum.astype(np.float64)
        y = v / np.sqrt((v * v).mean(1, keepdims=True) + EPS) * gpu.to_host(gamma).astype(np.float64)
        return _check_rows("rmsnorm_quantize", arrays["out"], row_indices, y)

    nbytes = M * K * 7 + 8 * M + 2 * K
    kernel = "rmsnorm_quantize"
    return Fused(kernel, {"M": M, "K": K}, nbytes, make, call, check, public=kernel)


def silu_mul_kernel(M: int, K: int) -> Fused:
    """Prepare `silu_mul_quantize`."""
    gate_up = _random_values(M, 2 * K)
    make_output = _output_maker(M, K)

    def check(arrays: dict[str, Any]) -> str:
        row_indices = _checked_rows(M)
        gate, up = np.split(_fetch_rows(gate_up, row_indices).astype(np.float64), 2, axis=1)
        return _check_rows("silu_mul_quantize", arrays["out"], row_indices, gate / (1 + np.exp(-gate)) * up)

    def make() -> dict[str, Any]:
        return {"gate_up": gate_up.copy(), "out": make_output()}

    nbytes = M * K * 5 + 8 * M
    kernel = "silu_mul_quantize"
    return Fused(kernel, {"M": M, "K": K}, nbytes, make, silu_mul_quantize, check, public=kernel)


def quantize_kernel(M: int, K: int) -> Fused:
    """Prepare `quantize_activations`."""
    x = _random_values(M, K)
    make_output = _output_maker(M, K)

    def check(arrays: dict[str, Any]) -> str:
        row_indices = _checked_rows(M)
        return _check_rows(
            "quantize_activations", arrays["out"], row_indices, _fetch_rows(x, row_indices).astype(np.float64)
        )

    def make() -> dict[str, Any]:
        return {"x": x.copy(), "out": make_output()}

    nbytes = M * K * 3 + 8 * M
    sizes, public = {"M": M, "K": K}, "quantize_activations"
    return Fused("quantize_activations_s8", sizes, nbytes, make, quantize_activations, check, public)


def reordering_kernels(M: int, width: int, outliers: int = 128, group: int = 128) -> Iterator[Fused]:
    """Prepare the kernels that reorder channels, for Hopper.

    They are `reorder_quantize`, `rmsnorm_reorder_quantize` with a residual and `silu_mul_reorder_quantize`.
    """
    sizes = {"M": M, "K": width - outliers, "outliers": outliers, "g": group}
    x, residual, gamma = (
        _random_values(M, width) * np.float16(_SMALL),
        _random_values(M, width, seed=1),
        _random_values(1, width, seed=2)[0],
    )
    gate_up = _random_values(M, 2 * width, seed=3)
    order = np.random.default_rng(4).permutation(width)
    place = gpu.to_device(channel_places(order))
    options: dict[str, Any] = {"outliers": outliers, "group": group}
    zeros = gpu.to_device(np.zeros((M, width), np.float16))

    def make_out() -> AtomActivations:
        output: AtomActivations = reorder_quantize(zeros, place, **options)
        return output

    written_bytes = sum(int(array.nbytes) for array in make_out().arrays.values())

    def kernel(name: str, function: Callable[..., Any], nbytes: int, exact: Callable[..., Any], **inputs: Any) -> Fused:
        def make() -> dict[str, Any]:
            return {**{key: array.copy() for key, array in inputs.items()}, "place": place, "out": make_out()}

        def check(arrays: dict[str, Any]) -> str:
            row_indices = _checked_rows(M)
            return _check_groups(name, arrays["out"], row_indices, exact(row_indices, arrays)[:, order])

        return Fused(name, sizes, nbytes + place.nbytes + written_bytes, make, partial(function, **options), check)

    def plain_floats(row_indices: np.ndarray, _: dict[str, Any]) -> Any:
        return _fetch_rows(x, row_indices).astype(np.float64)

    def norm_floats(row_indices: np.ndarray, arrays: dict[str, Any]) -> Any:
        input_sum = (
            _fetch_rows(x, row_indices).astype(np.float32) + _fetch_rows(residual, row_indices).astype(np.float32)
        ).astype(np.float16)
        if not (_fetch_rows(arrays["residual"], row_indices) == input_sum).all():
            raise BenchmarkError(f"rmsnorm_reorder_quantize: wrong residual at M={M}, {width} channels")
        v = input_sum.astype(np.float64)
        return v / np.sqrt((v * v).mean(1, keepdims=True) + EPS) * gpu.to_host(gamma).astype(np.float64)

    def gate_floats(row_indices: np.ndarray, _: dict[str, Any]) -> Any:
        gate, up = np.split(_fetch_rows(gate_up, row_indices).astype(np.float64), 2, axis=1)
        return gate / (1 + np.exp(-gate)) * up

    row_bytes = 2 * M * width
    yield kernel("reorder_quantize", reorder_quantize, row_bytes, plain_floats, x=x)
    norm_with_eps = partial(rmsnorm_reorder_quantize, eps=EPS)
    arrays = {"x": x, "residual": residual, "gamma": gamma}
    yield kernel("rmsnorm_reorder_quantize", norm_with_eps, 3 * row_bytes + 2 * width, norm_floats, **arrays)
    yield kernel("silu_mul_reorder_quantize", silu_mul_reorder_quantize, 2 * row_bytes, gate_floats, gate_up=gate_up)


def rope_append_kernel(T: int, Hq: int, Hkv: int, D: int) -> Fused:
    """Prepare `rope_append_kv4` for T sequences with heads of D dimensions.

    Each sequence appends one token at the end of a page of its own.
    """
    width = (Hq + 2 * Hkv) * D
    qkv = _random_values(T, width)
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
        expected = cache()
        k, v = heads[:, Hq : Hq + Hkv].copy(), heads[:, Hq + Hkv :].copy()
        append_kv4(k, v, expected, slots, rope=rope)
        if not bool((arrays["cache"].pool == expected.pool).all()):
            raise BenchmarkError(f"rope_append_kv4: pages other than append_kv4's at T={T}, heads {Hq}/{Hkv} of {D}")
        row_indices = _checked_rows(T)
        cos, sin = (gpu.to_host(table)[np.full(len(row_indices), PAGE - 1)] for table in rope[:2])
        q = reference.rope(_fetch_rows(heads, row_indices)[:, :Hq], cos, sin).astype(np.float64)
        if np.abs(_fetch_rows(arrays["out"], row_indices) - q).max() > 2**-10 * np.abs(q).max():
            raise BenchmarkError(f"rope_append_kv4: wrong queries at T={T}, heads {Hq}/{Hkv} of {D}")
        return f"every byte of the pages equal to append_kv4's; queries of {len(row_indices)} tokens to the reference's"

    moved_bytes = T * width * 2 + T * Hq * D * 2 + T * 2 * Hkv * page_bytes("kv4", PAGE, D) // PAGE
    nbytes = moved_bytes + T * (D * 4 + 8)
    return Fused("rope_append_kv4", {"M": T, "Hq": Hq, "Hkv": Hkv, "D": D}, nbytes, make, call, check)


def _random_values(M: int, K: int, seed: int = 0) -> Any:
    """Make random f16 [M, K] on the device; up to 64 different rows are repeated."""
    distinct_rows = np.random.default_rng(seed).standard_normal((min(M, 64), K), dtype=np.float32).astype(np.float16)
    return np.tile(gpu.to_device(distinct_rows), (ceil_div(M, len(distinct_rows)), 1))[:M].copy()


def _output_maker(M: int, K: int) -> Callable[[], Any]:
    """Return a function that makes activations [M, K] as an output buffer."""
    zeros = gpu.to_device(np.zeros((M, K), np.float16))
    return lambda: quantize_activations(zeros)


def _checked_rows(M: int) -> np.ndarray:
    return np.unique(np.linspace(0, M - 1, _CHECKED).astype(int))


def _fetch_rows(array: Any, rows: np.ndarray) -> np.ndarray:
    """Copy rows of a device array to the host."""
    return gpu.to_host(array[gpu.to_device(rows)])


def _check_rows(name: str, packed: Any, row_indices: Any, y: np.ndarray) -> str:
    """Compare rows `row_indices` with floats f64, and return the claim.

    Scales agree, values are within rounding of y / scale, and sums are those of the values. Raises BenchmarkError
    otherwise.
    """
    scale = _fetch_rows(packed.scale, row_indices).astype(np.float64)[:, None]
    values, sums = _fetch_rows(packed.x_q, row_indices).astype(np.float64), _fetch_rows(packed.token_sum, row_indices)
    expected = np.abs(y).max(1, keepdims=True) / 127
    steps = np.abs(values - y / scale).max()
    if np.abs(scale / expected - 1).max() > 1e-5 or steps > 0.5 + 1e-3 or (values.sum(1) != sums).any():
        raise BenchmarkError(f"{name}: wrong results at M={packed.M}, K={packed.K}")
    return (
        f"{len(row_indices)} rows within {steps:.4f} of a step of float64, scales within 1e-5, sums those of the values"
    )


def _check_groups(name: str, packed: AtomActivations, row_indices: Any, y: np.ndarray) -> str:
    """Compare rows `row_indices` with floats f64 in Atom's order: scales and values, within their rounding."""
    K, scales = packed.K, _fetch_rows(packed.scale, row_indices).astype(np.float64)
    values, steps, scale_error = _fetch_rows(packed.x, row_indices).astype(np.float64), 0.0, 0.0
    for group, first_channel in enumerate(range(0, K + packed.outliers, packed.group)):
        columns, bits = slice(first_channel, first_channel + packed.group), 4 if first_channel < K else 8
        if bits == 8:
            group, columns = K // packed.group, slice(K, None)
        clip, limit = (ACTIVATION_CLIP, 7) if bits == 4 else (1.0, 127)
        scale = scales[:, group, None]
        expected = np.abs(y[:, columns]).max(1, keepdims=True) * clip / ATOM_PAPER.steps(bits)
        scale_error = max(scale_error, np.abs(scale / expected - 1).max())
        steps = max(steps, np.abs(values[:, columns] - (y[:, columns] / scale).clip(-limit - 1, limit)).max())
    if scale_error > 2.0**-11 + 1e-5 or steps > 0.5 + 1e-3:
        raise BenchmarkError(f"{name}: wrong results at M={packed.M}, K={K}, outliers={packed.outliers}")
    return f"{len(row_indices)} rows within {steps:.4f} of a step of float64, scales within FP16's rounding"
