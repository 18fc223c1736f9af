"""What `append_kv4` and `rope_append_kv4` are given in tests, and what is wanted of them.

Among it are rows where a rounding, a level or a bound is at stake.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ptxlab
from ptxlab import gpu, registry
from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.attention.append import APPEND, ROPE_APPEND, table_rows
from ptxlab.lowbit.layout import KVCache, page_bytes, write_slots
from ptxlab.lowbit.quant import KV_SCHEMES
from ptxlab.runtime import Outcome, run_spec
from ptxlab.sources import Source

ON_GPU = pytest.mark.skipif(gpu.why_not("sm_80") is not None, reason="the kernel runs on sm_80")
BACKENDS = ("emulator", pytest.param("gpu", marks=[pytest.mark.gpu, ON_GPU]))
DTYPES = (np.dtype("float16"), np.dtype(ml_dtypes.bfloat16))
RNG = np.random.default_rng(0)


@dataclass(frozen=True, eq=False)
class Problem:
    """A call, on the host."""

    k: np.ndarray
    v: np.ndarray
    cache: KVCache
    slots: np.ndarray
    rope: tuple[np.ndarray, ...] | None = None

    @property
    def expected_pool(self) -> np.ndarray:
        """Pool after the call."""
        has_slot, cache = self.slots >= 0, replace(self.cache, pool=self.cache.pool.copy())
        k, v = self.k.astype(np.float32)[has_slot], self.v.astype(np.float32)[has_slot]
        if self.rope is not None:
            cos, sin, *positions = self.rope
            token_positions = (positions[0] if positions else np.arange(len(has_slot)))[has_slot]
            k = reference.rope(k, cos[token_positions], sin[token_positions])
        if cache.rotated:
            k = reference.rotate_heads(k)
        keys, values = (quant.quantize_kv(x, cache.scheme, c) for x, c in ((k, cache.k_channel), (v, cache.v_channel)))
        write_slots(cache, keys, values, self.slots[has_slot])
        pool: np.ndarray = cache.pool
        return pool

    def check(self, backend: str) -> None:
        """Compare the public call's pool with the expected one; all other bytes of the pool stay."""
        cache = replace(self.cache, pool=self.cache.pool.copy())
        ptxlab.append_kv4(self.k, self.v, cache, self.slots, rope=self.rope, backend=backend)
        assert np.array_equal(cache.pool, self.expected_pool)

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """Arrays by argument of the kernel."""
        inputs = {name: bits(x).reshape(len(x), -1) for name, x in (("k", self.k), ("v", self.v))} | {
            "slots": self.slots
        }
        inputs |= dict(zip(("cos", "sin", "positions"), self.rope or (), strict=False))
        for name, channel in (("k", self.cache.k_channel), ("v", self.cache.v_channel)):
            inputs |= dict(zip((f"{name}_scale", f"{name}_zero"), channel or (), strict=False))
        return inputs

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the spec `append_kv4`."""
        (T, H, D), cache, kv_scheme = self.k.shape, self.cache, KV_SCHEMES[self.cache.scheme]
        sizes = {"T": T, "H": H, "D": D, "pages": cache.pages, "size": cache.page_size, "bits": kv_scheme.bits}
        sizes |= {"channel": int(kv_scheme.by_channel), "R": 0 if self.rope is None else len(self.rope[0])}
        return sizes | {"k_pitch": H * D, "v_pitch": H * D}

    def run(self, source: Any = None, rows: int = 0, **options: Any) -> tuple[np.ndarray, Outcome]:
        """Run a source (by default the kernel's) with all checks; return the pool and the emulator's outcome.

        `rows` sets the rows per thread, if given.
        """
        cache, inputs, sizes = self.cache, self.inputs, self.sizes
        config = APPEND.config_for(sizes) | {"BF16": DTYPES.index(self.k.dtype)}
        config |= {"INDEX": int(self.slots.dtype == np.int64), "ROTATED": int(cache.rotated)}
        config |= {"ROWS": rows} if rows else {}
        source, pool = source or registry.find(APPEND.name)[1][0], cache.pool.copy()
        options |= {"backend": "emulator", "checks": ("race", "init", "lanes")}
        return pool, run_spec(APPEND, source, inputs, sizes=sizes, out={"pool": pool}, config=config, **options)


@dataclass(frozen=True, eq=False)
class FusedProblem:
    """A call of `rope_append_kv4`: queries [T, Hq, D] beside a problem's keys and values, with a rotation.

    With `with_keys` the rotated keys are expected, too, as heads behind those of q.
    """

    q: np.ndarray
    kv: Problem
    with_keys: bool = True

    @property
    def qkv(self) -> np.ndarray:
        """Queries, keys and values as the GEMM writes them, [T, (Hq + 2 Hkv) D]."""
        return np.concatenate([self.q, self.kv.k, self.kv.v], axis=1).reshape(len(self.q), -1)

    @property
    def expected_rows(self) -> np.ndarray:
        """Expected rotated rows, bfloat16 as its bits; a position outside the tables takes their last row."""
        cos, sin, *positions = self.kv.rope or ()
        table_indices = table_rows(positions[0] if positions else np.arange(len(self.q)), len(cos))
        x = np.concatenate([self.q, self.kv.k], axis=1) if self.with_keys else self.q
        rotated: np.ndarray = bits(
            reference.rope(x.astype(np.float32), cos[table_indices], sin[table_indices]).astype(x.dtype)
        )
        return rotated

    def check(self, backend: str) -> None:
        """Compare the public call's q, keys and pool with the expected ones; the pool is that of `append_kv4`."""
        cache, keys = (
            replace(self.kv.cache, pool=self.kv.cache.pool.copy()),
            bits(np.empty_like(self.kv.k)),
        )
        options: dict[str, Any] = {
            "rope": self.kv.rope or (),
            "backend": backend,
            "keys": keys if self.with_keys else None,
        }
        q = ptxlab.rope_append_kv4(bits(self.qkv), cache, self.kv.slots, **options)
        rotated_rows = np.concatenate([q, keys], axis=1) if self.with_keys else q
        assert np.array_equal(rotated_rows, self.expected_rows) and np.array_equal(cache.pool, self.kv.expected_pool)

    def run(self, source: Any = None, rows: int = 0) -> tuple[np.ndarray, np.ndarray, Outcome]:
        """Run the kernel as `Problem.run` does; return the rotated rows, the pool and the emulator's outcome."""
        cache, inputs = self.kv.cache, self.kv.inputs
        inputs = {name: array for name, array in inputs.items() if name not in ("k", "v")} | {"qkv": bits(self.qkv)}
        sizes = {name: size for name, size in self.kv.sizes.items() if name not in ("k_pitch", "v_pitch")}
        sizes |= {
            "ratio": self.q.shape[1] // cache.num_kv_heads,
            "kept": int(self.with_keys),
            "pitch": self.qkv.shape[1],
        }
        config = ROPE_APPEND.config_for(sizes) | {"BF16": DTYPES.index(self.q.dtype)}
        config |= {"INDEX": int(self.kv.slots.dtype == np.int64), "ROTATED": int(cache.rotated)}
        config |= {"ROWS": rows} if rows else {}
        source, pool = source or registry.find(ROPE_APPEND.name)[1][0], cache.pool.copy()
        dtype = np.uint16 if self.q.dtype == DTYPES[1] else np.float16
        q, keys = (np.full(x.shape, 0xA5A5, np.uint16).view(dtype) for x in (self.q, self.kv.k))
        outcome = run_spec(
            ROPE_APPEND,
            source,
            inputs,
            sizes=sizes,
            out={"pool": pool, "q": q} | ({"keys": keys} if self.with_keys else {}),
            config=config,
            backend="emulator",
            checks=("race", "init", "lanes"),
        )
        return np.concatenate([q, keys], axis=1) if self.with_keys else q, pool, outcome


def bits(x: np.ndarray) -> np.ndarray:
    """View bfloat16 as its bits, as NumPy and CuPy hold it."""
    return x.view(np.uint16) if x.dtype == DTYPES[1] else x


def replace_in_source(source: Source, old: str, new: str) -> Source:
    """Inline the header that both kernels share, and replace one place of the source."""
    header = '#include "kv_rows.cuh"\n'
    assert header in source.text
    header_text = (Path(source.path).parents[1] / "include" / "kv_rows.cuh").read_text().replace("#pragma once\n", "")
    text = source.text.replace(header, header_text)
    assert text.count(old) == 1
    return replace(source, text=text.replace(old, new))


def make_problem(
    k: np.ndarray,
    v: np.ndarray,
    scheme: str,
    page_size: int,
    *,
    pages: int = 0,
    index: Any = np.int32,
    rope: Any = None,
) -> Problem:
    """Make a problem that writes tokens to random slots in a pool of random bytes.

    Every fourth token is padding.
    """
    T, H, D = k.shape
    pages = pages or ceil_div(T, page_size) + 1
    slots = RNG.permutation(pages * page_size)[:T].astype(index)
    slots[RNG.permutation(T)[: T // 4]] = -RNG.integers(1, 2**30)
    pool = RNG.integers(0, 256, (pages, 2, H, page_bytes(scheme, page_size, D)), dtype=np.uint8)
    constants: list[Any] = [None, None]
    if KV_SCHEMES[scheme].by_channel:
        samples = RNG.standard_normal((2, 9, H, D), dtype=np.float32)  # other ones: values are beyond them, and ties
        constants = [quant.calibrate_kv(np.rint(x * 4) / 4, scheme) for x in samples]
    table, lengths = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    page_layout = {"page_size": page_size, "head_dim": D, "scheme": scheme}
    cache = KVCache(
        pool=pool, block_table=table, lengths=lengths, k_channel=constants[0], v_channel=constants[1], **page_layout
    )
    return Problem(k, v, cache, slots, rope)


def draw_rotations(T: int, D: int, index: Any, positions: bool) -> tuple[np.ndarray, ...]:
    """Draw rotary tables, and positions on request, as arguments of an append."""
    rows = 50 if positions else T + 1
    angles = RNG.uniform(-9, 9, (rows, D // 2)).astype(np.float32)
    position_array = (RNG.integers(0, rows, T).astype(index),) if positions else ()
    return (np.cos(angles), np.sin(angles), *position_array)


def gaussian_kv(T: int, H: int, D: int, dtype: np.dtype = DTYPES[0]) -> tuple[np.ndarray, np.ndarray]:
    k, v = RNG.standard_normal((2, T, H, D), dtype=np.float32)
    k[:, :, 3] *= 40
    return k.astype(dtype), v.astype(dtype)


def draw_scales(rows: int, precision: int) -> np.ndarray:
    """Draw f32 [rows] with significands of `precision` bits."""
    significand = RNG.integers(2 ** (precision - 1), 2**precision, rows)
    return np.ldexp(significand, RNG.integers(-14, 1, rows) - precision + 1).astype(np.float32)


def draw_ties(scale: np.ndarray, D: int, bits: int) -> np.ndarray:
    """Draw f32 [rows, D], a half and an integer times the row's scale, so that each element is a tie.

    The extremes of a row give it exactly that scale.
    """
    largest = 2 ** (bits - 1) - 1
    quotients = RNG.integers(-largest, largest, (len(scale), D)) + np.float32(0.5)
    quotients[:, 0], quotients[:, 1] = -largest, largest + 1
    x: np.ndarray = quotients.astype(np.float32) * scale[:, None]
    return x


def draw_rotated_ties(rows: int, bits: int) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Draw f16 [rows, 1, 64], equal within pairs, and tables that rotate it.

    The rotated values are ties of an f16 scale, or lie next to ties.
    """
    scale = draw_scales(rows, 11)
    x, targets = RNG.uniform(1, 2, (rows, 32)).astype(np.float16), draw_ties(scale, 32, bits)
    sin = (targets * RNG.integers(-6, 7, targets.shape) * 2.0**-26).astype(np.float32)
    x[:, :2], sin[:, :2] = 1, 0  # the extremes stay
    cos = (targets / x.astype(np.float32)).astype(np.float32)
    half, half_step = rows // 2, np.ldexp(np.float32(0.5), np.frexp(scale)[1] - 11)
    cos[half:, 2:] = np.abs(cos[half:, 2:])  # of the others the scale itself is a tie of f16
    cos[half:, 0], cos[half:, 1] = 0, ((scale + half_step) * (2**bits - 1))[half:]
    return np.concatenate([x, x], axis=1)[:, None], (cos, sin)


def draw_beyond_the_levels(rows: int, bits: int) -> np.ndarray:
    """Draw f16 [rows, 1, 64] of three kinds in turn.

    Scales so small that they are rounded by up to a half of themselves, so that the zero and what lies at the other end
    are clipped; extremes that are both rounded up; and zeros.
    """
    levels = 2**bits - 1
    kinds = [
        RNG.integers(-int(1.49 * levels), 1, (rows, 64)) * 2.0**-24,
        np.clip(RNG.integers(-levels, levels + 1, (rows, 64)), -levels / 2, levels / 2) * 0.25,
        np.zeros((rows, 64)),
    ]
    kinds[0][:, :2] = -int(1.49 * levels) * 2.0**-24, 0
    x: np.ndarray = np.choose(np.arange(rows)[:, None] % 3, kinds).astype(np.float16)[:, None]
    return x


def extreme_constants_problem(scheme: str) -> Problem:
    """Make a problem by channel whose quotients are infinite, tiny, or ties."""
    k, v = gaussian_kv(40, 2, 64)
    scale = np.exp2(RNG.integers(-126, 120, (2, 64))).astype(np.float32)
    scale[:, ::2] = draw_scales(64, 6).reshape(2, 32)
    for x, channel_scale in ((k, scale), (v, scale[::-1])):
        x[:, :, ::2] = (RNG.integers(-31, 32, (40, 2, 32)) / 2 * channel_scale[:, ::2]).astype(np.float16)
    zero = RNG.integers(0, 16, (2, 64)).astype(np.float32) * (scheme == "kv4_channel")
    problem = make_problem(k, v, scheme, 16)
    cache = replace(problem.cache, k_channel=(scale, zero), v_channel=(scale[::-1].copy(), zero))
    return replace(problem, cache=cache)


def huge_quotients_problem(scheme: str) -> Problem:
    """Make a problem by channel whose quotients exceed any f32, of both signs."""
    k, v = (x * np.float32(1e38) for x in np.where(RNG.random((2, 9, 2, 64)) < 0.5, -3, 3))
    problem = make_problem(k.astype(DTYPES[1]), v.astype(DTYPES[1]), scheme, 16)
    constants = (np.full((2, 64), 2.0**-90, np.float32), np.zeros((2, 64), np.float32))
    return replace(problem, cache=replace(problem.cache, k_channel=constants, v_channel=constants))


def near_ties_problem(scheme: str, tiny: bool, tokens: int = 64) -> Problem:
    """Make a problem by channel whose keys a rotation makes any f32 next to a tie of their channel's scale."""
    kv_scheme, heads = KV_SCHEMES[scheme], 2
    exponents = np.full(64, -126) if tiny else RNG.integers(-99, 99, 64)
    scale = RNG.uniform(1, 2, (heads, 64)).astype(np.float32) * np.exp2(exponents).astype(np.float32)
    scale[:, 32:] = scale[:, :32] = scale[:1, :32]  # pairs and heads have one cosine
    zero = np.float32(kv_scheme.high // 2) * np.ones_like(scale) * (kv_scheme.low == 0)
    quotients = RNG.integers(-(kv_scheme.high // 2), kv_scheme.high // 2, (tokens, 32)) + 0.5
    cos = (quotients * scale[0, :32]).astype(np.float32)
    cos = (cos.view(np.int32) + RNG.integers(-1, 2, cos.shape, dtype=np.int32)).view(np.float32)
    ones = np.ones((tokens, heads, 64), np.float16)
    problem = make_problem(ones, ones, scheme, 16, rope=(cos, np.zeros_like(cos)))
    return replace(problem, cache=replace(problem.cache, k_channel=(scale, zero), v_channel=(scale, zero)))
