"""`append_kv4`: a prompt and a decoding step into a KV cache, beside the time of copying as many bytes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ptxlab import gpu, quant, reference
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row, row_of
from ptxlab.bench.timing import copies_beyond_l2, measure
from ptxlab.errors import BenchmarkError
from ptxlab.kernels.attention.append import APPEND
from ptxlab.layout import KVCache, page_bytes, write_slots
from ptxlab.quant import KV_SCHEMES
from ptxlab.sources import of_kernel

MEASURE = "append"
HEAD_DIM, PAGE_SIZE = 128, 64
POINTS = ((64, "decode"), (4096, "prefill"))  # tokens: one of each sequence, or one sequence's
HEADS = (32, 8)
_PAGES = 64  # of a copy: a page for each sequence, or all of one
_POISON = 0xA5


def rows(ceilings: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Every point with as many heads as LLaMA-2-7B and LLaMA-3-8B, k rotated and as it is, then the other schemes."""
    for heads in HEADS:
        for tokens, what in POINTS:
            progress(f"append_kv4, {what}, {heads} heads")
            for rope in (True, False):
                yield appended(tokens, heads, "kv4", rope, ceilings)
            for scheme in KV_SCHEMES:
                if scheme != "kv4":
                    yield appended(tokens, heads, scheme, True, ceilings)


def variants() -> Iterator[dict[str, int]]:
    """The constants that all points are compiled with."""
    for heads in HEADS:
        for tokens, _ in POINTS:
            for scheme in KV_SCHEMES:
                for rope in (True, False):
                    yield APPEND.config_for(sizes_at(tokens, heads, scheme, rope))


def sizes_at(tokens: int, heads: int, scheme: str, rope: bool, copies: int = 1) -> dict[str, int]:
    """The spec's sizes."""
    known = KV_SCHEMES[scheme]
    sizes = {"T": tokens, "H": heads, "D": HEAD_DIM, "pages": copies * _PAGES, "size": PAGE_SIZE, "bits": known.bits}
    return {**sizes, "channel": int(known.by_channel), "R": tokens if rope else 0}


def moved_bytes(tokens: int, heads: int, scheme: str, rope: bool) -> int:
    """What has to be read and written: k and v, what becomes of them, slots, and with `rope` tables and positions."""
    floats = 2 * tokens * heads * HEAD_DIM * 2
    written = 2 * tokens * heads * page_bytes(scheme, PAGE_SIZE, HEAD_DIM) // PAGE_SIZE
    constants = 2 * heads * HEAD_DIM * 4 * (8 // KV_SCHEMES[scheme].bits) if KV_SCHEMES[scheme].by_channel else 0
    return floats + written + constants + 4 * tokens + (tokens * (4 + HEAD_DIM * 4) if rope else 0)


def slots_of(tokens: int) -> np.ndarray:
    """In the pages of one copy, s32 [tokens]: a prompt fills its pages; decoding adds one token to each of them."""
    token = np.arange(tokens)
    offset = token if tokens > _PAGES else token * PAGE_SIZE + np.random.default_rng(0).integers(0, PAGE_SIZE, tokens)
    return offset.astype(np.int32)


def appended(tokens: int, heads: int, scheme: str, rope: bool, ceilings: Ceilings) -> Row:
    """Time one call over copies that no call finds in the L2; every byte of every copy's pages is checked."""
    nbytes, known = moved_bytes(tokens, heads, scheme, rope), KV_SCHEMES[scheme]
    copies = copies_beyond_l2(nbytes)
    rng = np.random.default_rng(0)
    k, v = (gpu.to_device(x) for x in rng.standard_normal((2, tokens, heads, HEAD_DIM), np.float32).astype(np.float16))
    angles = rng.uniform(-4, 4, (tokens, HEAD_DIM // 2)).astype(np.float32)
    positions = rng.permutation(tokens).astype(np.int32)
    tables = [gpu.to_device(array) for array in (np.cos(angles), np.sin(angles), positions)] if rope else []
    pool = gpu.empty((copies * _PAGES, 2, heads, page_bytes(scheme, PAGE_SIZE, HEAD_DIM)), "uint8")
    gpu.fill_bytes(pool, _POISON)
    channel = quant.calibrate_kv(v, scheme) if known.by_channel else None
    shared = dict(zip(("cos", "sin", "positions"), tables, strict=False))
    for name in ("k", "v"):
        shared |= dict(zip((f"{name}_scale", f"{name}_zero"), channel or (), strict=False))

    sizes = sizes_at(tokens, heads, scheme, rope, copies)
    config = APPEND.config_for(sizes)
    everything = {**sizes, **config}
    kernel = gpu.load(of_kernel(APPEND.name)[0], APPEND.name, defines=config)
    calls, slots = [], slots_of(tokens)
    for copy in range(copies):
        own = {"k": k.copy(), "v": v.copy(), "slots": gpu.to_device(slots + np.int32(copy * _PAGES * PAGE_SIZE))}
        arguments = APPEND.arguments({**shared, **own, "pool": pool}, everything)
        calls.append(gpu.prepare(kernel, arguments, APPEND.launch(everything)))
    measured = measure(calls)
    right = _expected(k, v, scheme, channel, tables, gpu.to_device(slots))
    if not bool((pool.reshape(copies, *right.shape) == right).all()):
        raise BenchmarkError(f"{APPEND.name}: wrong bytes for {tokens} tokens of {heads} heads by {scheme}")
    return row_of(
        APPEND,
        of_kernel(APPEND.name)[0],
        MEASURE,
        sizes,
        measured,
        floor=(nbytes / ceilings.copy_tbps / 1e6, "copy"),
        checked="every byte equal to the quantiser's",
        nbytes=nbytes,
        variant=config,
    )


def _expected(k: Any, v: Any, scheme: str, channel: Any, tables: list[Any], slots: Any) -> Any:
    """The pages of one copy, on the device."""
    if tables:
        cos, sin, positions = tables
        k = reference.rope(k, cos[positions], sin[positions])
    pool = gpu.empty((_PAGES, 2, k.shape[1], page_bytes(scheme, PAGE_SIZE, HEAD_DIM)), "uint8")
    gpu.fill_bytes(pool, _POISON)
    cache = KVCache(
        pool=pool,
        block_table=slots[:1].reshape(1, 1),
        lengths=slots[:1],
        page_size=PAGE_SIZE,
        head_dim=HEAD_DIM,
        scheme=scheme,
        k_channel=channel,
        v_channel=channel,
    )
    write_slots(cache, quant.quantize_kv(k, scheme, channel), quant.quantize_kv(v, scheme, channel), slots)
    return pool
