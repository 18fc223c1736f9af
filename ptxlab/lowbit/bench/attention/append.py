"""`append_kv4`: a prompt and a decoding step into a KV cache, beside the time of copying as many bytes.

`Appending` is its part of a whole decoding step: the new tokens that it rotates and writes before attention reads them.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row, row_of
from ptxlab.errors import BenchmarkError
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.bench.attention.problem import Problem
from ptxlab.lowbit.bench.shapes import HEAD_DIM, PAGE
from ptxlab.lowbit.kernels.attention.append import APPEND, ROTATED
from ptxlab.lowbit.layout import KVCache, page_bytes, write_slots
from ptxlab.lowbit.quant import KV_SCHEMES
from ptxlab.runtime.launching import Call, allocate_poisoned, prepare_launches
from ptxlab.runtime.timing import copies_beyond_l2, measure

MEASURE = "append"
POINTS = ((64, "decode"), (4096, "prefill"))  # tokens: one of each sequence, or one sequence's
HEADS = (32, 8)
_PAGES = 64  # of a copy: a page for each sequence, or all of one
_TABLES = "cos", "sin", "positions"


def rows(ceilings: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure every point with the heads of LLaMA-2-7B and LLaMA-3-8B, k rotated or not, then the other schemes."""
    for heads in HEADS:
        for tokens, phase in POINTS:
            progress(f"append_kv4, {phase}, {heads} heads")
            for rope in (True, False):
                yield measure_append(tokens, heads, "kv4", rope, ceilings)
            for scheme in KV_SCHEMES:
                if scheme != "kv4":
                    yield measure_append(tokens, heads, scheme, True, ceilings)


def variants() -> Iterator[dict[str, int]]:
    """Yield the constants of every variant that the points are compiled with."""
    for heads, (tokens, _), scheme, rope in product(HEADS, POINTS, KV_SCHEMES, (True, False)):
        yield APPEND.config_for(sizes_at(tokens, heads, scheme, rope))


def sizes_at(tokens: int, heads: int, scheme: str, rope: bool, copies: int = 1) -> dict[str, int]:
    """Return the spec's sizes for so many tokens and heads."""
    kv_scheme = KV_SCHEMES[scheme]
    sizes = {"T": tokens, "H": heads, "D": HEAD_DIM, "pages": copies * _PAGES, "size": PAGE, "bits": kv_scheme.bits}
    sizes |= {"channel": int(kv_scheme.by_channel), "R": tokens if rope else 0}
    return sizes | {"k_pitch": heads * HEAD_DIM, "v_pitch": heads * HEAD_DIM}


def moved_bytes(tokens: int, heads: int, scheme: str, rope: bool) -> int:
    """Count the bytes to read and write: k and v, their quantised tokens, slots; with `rope` tables and positions."""
    floats = 2 * tokens * heads * HEAD_DIM * 2
    written_bytes = 2 * tokens * heads * page_bytes(scheme, PAGE, HEAD_DIM) // PAGE
    constants = 2 * heads * HEAD_DIM * 4 * (8 // KV_SCHEMES[scheme].bits) if KV_SCHEMES[scheme].by_channel else 0
    return floats + written_bytes + constants + 4 * tokens + (tokens * (4 + HEAD_DIM * 4) if rope else 0)


def slots_of(tokens: int) -> np.ndarray:
    """Choose slots in the pages of one copy, s32 [tokens]: a prompt fills its pages, decoding adds a token to each."""
    token = np.arange(tokens)
    offset = token if tokens > _PAGES else token * PAGE + np.random.default_rng(0).integers(0, PAGE, tokens)
    return offset.astype(np.int32)


def measure_append(tokens: int, heads: int, scheme: str, rope: bool, ceilings: Ceilings) -> Row:
    """Time one call over copies that no call finds in the L2; every byte of every copy's pages is checked."""
    nbytes = moved_bytes(tokens, heads, scheme, rope)
    copies, rng = copies_beyond_l2(nbytes), np.random.default_rng(0)
    k, v = _random_tokens(rng, tokens, heads)
    tables = [*_angles(rng, tokens), gpu.to_device(rng.permutation(tokens).astype(np.int32))] if rope else []
    pool = _pages(copies * _PAGES, heads, scheme)
    channel = quant.calibrate_kv(v, scheme) if KV_SCHEMES[scheme].by_channel else None
    shared_arguments = {"pool": pool, **dict(zip(_TABLES, tables, strict=False))}
    for name in ("k", "v"):
        shared_arguments |= dict(zip((f"{name}_scale", f"{name}_zero"), channel or (), strict=False))

    sizes, slots = sizes_at(tokens, heads, scheme, rope, copies), slots_of(tokens)
    copy_arrays = (
        {"k": _rows(k), "v": _rows(v), "slots": gpu.to_device(slots + np.int32(copy * _PAGES * PAGE))}
        for copy in range(copies)
    )
    config = APPEND.config_for(sizes)
    _, calls = prepare_launches(APPEND, sizes, config, ({**shared_arguments, **arrays} for arrays in copy_arrays))
    measured = measure(calls)
    expected_pages = _expected_pages(k, v, scheme, channel, tables, gpu.to_device(slots))
    if not bool((pool.reshape(copies, *expected_pages.shape) == expected_pages).all()):
        raise BenchmarkError(f"{APPEND.name}: wrong bytes for {tokens} tokens of {heads} heads by {scheme}")
    return row_of(
        APPEND,
        MEASURE,
        sizes,
        measured,
        floor=(nbytes / ceilings.copy_tbps / 1e6, "copy"),
        checked="every byte equal to the quantiser's",
        nbytes=nbytes,
        variant=config,
    )


class Appending:
    """Random keys and values for the last token of every sequence of a problem; the cache's constants are per token."""

    def __init__(self, problem: Problem) -> None:
        rng, lengths = np.random.default_rng(1), np.array(problem.batch.lengths, np.int32)
        self._of = problem
        self._k, self._v = _random_tokens(rng, len(lengths), problem.batch.Hkv)
        self._tables = [*_angles(rng, int(lengths.max())), gpu.to_device(lengths - 1)]
        pages = gpu.to_host(problem.caches[0].block_table)[np.arange(len(lengths)), (lengths - 1) // PAGE]
        self._slots = pages * PAGE + (lengths - 1) % PAGE  # s32 [B], of the first copy

    def calls(self, programmatic: bool) -> list[Call]:
        """Prepare one launch per copy of the cache."""
        pool, copies = self._of.caches[0].pool, len(self._of.caches)
        sizes = sizes_at(len(self._slots), self._of.batch.Hkv, "kv4", rope=True)
        sizes |= {"pages": len(pool), "R": len(self._tables[0])}
        shared_arguments = {
            "k": _rows(self._k),
            "v": _rows(self._v),
            "pool": pool,
            **dict(zip(_TABLES, self._tables, strict=True)),
        }
        arrays = ({**shared_arguments, "slots": gpu.to_device(self._at(copy))} for copy in range(copies))
        spec = ROTATED[0] if self._of.caches[0].rotated else APPEND
        return prepare_launches(spec, sizes, spec.config_for(sizes), arrays, programmatic=programmatic)[1]

    def check(self) -> None:
        """Raise BenchmarkError unless every copy has the new tokens as the quantiser makes them, and nothing else."""
        problem, pool, pages = self._of, self._of.caches[0].pool, self._slots // PAGE
        token_pages = np.arange(len(pages), dtype=np.int32)  # a page for each new token
        expected_cache = replace(
            problem.caches[0], pool=pool[gpu.to_device(pages)], block_table=gpu.to_device(token_pages[:, None])
        )
        _write(expected_cache, self._k, self._v, self._tables, gpu.to_device(token_pages * PAGE + self._slots % PAGE))
        for copy in range(len(problem.caches)):
            if not bool((pool[gpu.to_device(self._at(copy) // PAGE)] == expected_cache.pool).all()):
                raise BenchmarkError(f"{APPEND.name}: wrong bytes for the new tokens of {problem.batch}")

    def _at(self, copy: int) -> Any:
        """Return the slots of one copy's new tokens, s32 [B]."""
        return self._slots + np.int32(copy * self._of.pages * PAGE)


def _random_tokens(rng: np.random.Generator, tokens: int, heads: int) -> tuple[Any, Any]:
    """Draw random keys and values f16 [T, H, D] on the device."""
    k, v = rng.standard_normal((2, tokens, heads, HEAD_DIM), np.float32).astype(np.float16)
    return gpu.to_device(k), gpu.to_device(v)


def _rows(x: Any) -> Any:
    """Copy keys or values as the kernel takes them, [T, H·D]."""
    return x.reshape(len(x), -1).copy()


def _angles(rng: np.random.Generator, positions: int) -> tuple[Any, Any]:
    """Compute cosines and sines f32 [R, D/2] of random angles, on the device."""
    angles = rng.uniform(-4, 4, (positions, HEAD_DIM // 2)).astype(np.float32)
    return gpu.to_device(np.cos(angles)), gpu.to_device(np.sin(angles))


def _pages(count: int, heads: int, scheme: str) -> Any:
    return allocate_poisoned((count, 2, heads, page_bytes(scheme, PAGE, HEAD_DIM)), "uint8")


def _expected_pages(k: Any, v: Any, scheme: str, channel: Any, tables: list[Any], slots: Any) -> Any:
    """Compute the pages of one copy that `append_kv4` should write, on the device."""
    cache = KVCache(
        pool=_pages(_PAGES, k.shape[1], scheme),
        block_table=slots[:1].reshape(1, 1),
        lengths=slots[:1],
        page_size=PAGE,
        head_dim=HEAD_DIM,
        scheme=scheme,
        k_channel=channel,
        v_channel=channel,
    )
    _write(cache, k, v, tables, slots)
    return cache.pool


def _write(cache: KVCache, k: Any, v: Any, tables: list[Any], slots: Any) -> None:
    """Write the tokens as `append_kv4` should, with the quantiser; rotate k first if there are `tables`.

    `tables` are cosines, sines and positions.
    """
    if tables:
        cos, sin, positions = tables
        k = reference.rope(k, cos[positions], sin[positions])
    write_slots(cache, cache.quantize_keys(k), cache.quantize_values(v), slots)
