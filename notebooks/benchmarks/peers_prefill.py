"""Attention of chunks by other projects: FlashAttention 3 and INT4 attention of vLLM, and PyTorch for heads of 256.

They take the keys and values that ours restores from its cache, in FP16 or rounded further. vLLM 0.26 is needed only
here; what cannot be imported or launched is named in the record.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import peers
from benchmarks.chunks import Chunk
from ptxlab.lowbit.bench.attention.problem import Problem
from ptxlab.lowbit.bench.shapes import PAGE
from ptxlab.lowbit.layout import gather
from ptxlab.runtime.timing import Measured, copies_beyond_l2, measure

FA3, FA3_FP8, SDPA, INT4 = "fa3_f16", "fa3_fp8", "sdpa_f16", "vllm_int4"
TOLERANCES = {FA3: 1e-2, FA3_FP8: 0.25, SDPA: 1e-2, INT4: 0.5}  # of the largest result
FA3_DIMS = (64, 128)
SETTLE_MS = 300.0  # each runs by itself before it is timed: at the power limit their clocks differ
INT4_HEADS, INT4_OPERATIONS = (32, 8), 1.2e12  # of chunks that INT4 runs on; larger ones take it seconds


@dataclass(frozen=True)
class FloatCache:
    """Queries and a cache in FP16, as tensors of PyTorch; a peer rotates over copies of the cache.

    Attributes:
        chunk: whose they are.
        q: [T, Hq, D].
        k, v: tokens in order [L, Hkv, D].
        copies: how many of the cache there are: one, or enough to exceed the L2.
    """

    chunk: Chunk
    q: Any
    k: Any
    v: Any
    copies: int

    @classmethod
    def of(cls, chunk: Chunk, q: Any, problem: Problem, *, once: bool) -> "FloatCache":
        """Dequantise the problem's cache to FP16; one copy if `once`, otherwise enough to exceed the L2."""
        import torch

        k, v = (
            torch.from_dlpack(head_tensors[0].dequantize().astype("float16"))
            for head_tensors in gather(problem.caches[0])
        )
        nbytes = k.nbytes + v.nbytes + chunk.query_bytes
        return cls(chunk, torch.from_dlpack(q), k, v, 1 if once else copies_beyond_l2(nbytes))

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return int(self.k.shape[0])

    def pages(self, x: Any) -> Any:
        """Return tokens as pages [copies * pages, 64, Hkv, D] in the order of `tables`; free places are zeros."""
        import torch

        pages = -(-self.length // PAGE)
        padded = x.new_zeros((pages * PAGE, *x.shape[1:]))
        padded[: self.length] = x
        shuffled = torch.empty_like(padded).view(pages, PAGE, *x.shape[1:])
        shuffled[self.order] = padded.view_as(shuffled)
        return shuffled.repeat(self.copies, 1, 1, 1)

    @property
    def order(self) -> Any:
        """Page of the pool for each page of the sequence."""
        import torch

        generator = torch.Generator(self.q.device).manual_seed(0)
        return torch.randperm(-(-self.length // PAGE), generator=generator, device=self.q.device)

    def tables(self) -> list[Any]:
        """Return the block table s32 [1, pages] of each copy."""
        order = self.order.int()
        return [(order + len(order) * copy)[None] for copy in range(self.copies)]

    def integers(self, *values: int) -> Any:
        """Return s32 values on the device."""
        import torch

        return torch.tensor(values, dtype=torch.int32, device=self.q.device)


@dataclass(frozen=True)
class PeerLaunches:
    """Calls of a peer, one per copy of the cache, and what they write, [copies, T, Hq, D]."""

    calls: list[Callable[[], Any]]
    outputs: Any


def names_for(chunk: Chunk) -> tuple[str, ...]:
    """Name the peers that a chunk is measured beside."""
    if chunk.D not in FA3_DIMS:
        return (SDPA,)
    figure = chunk.heads == INT4_HEADS and chunk.operations <= INT4_OPERATIONS
    return (FA3, FA3_FP8, *((INT4,) if figure else ()))


def launches(name: str, cache: FloatCache) -> PeerLaunches:
    """Prepare the calls of a peer; raises what its library raises."""
    return {FA3: _fa3, FA3_FP8: _fa3_fp8, SDPA: _sdpa, INT4: _int4}[name](cache)


def measure_peer(peer: PeerLaunches, replays: int) -> Measured:
    """Time a peer's calls as ours are timed."""
    return measure(peer.calls, replays=replays, settle_ms=SETTLE_MS, capture=peers.capture)


def _outputs(cache: FloatCache, dtype: Any) -> Any:
    import torch

    return torch.full((cache.copies, *cache.q.shape), torch.nan, dtype=dtype, device=cache.q.device)


def _fa3(cache: FloatCache, dtype: Any = None) -> PeerLaunches:
    """Prepare FlashAttention 3 over pages of 64 tokens, causal.

    Operands are cast to `dtype`, if given.
    """
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    is_fp8 = dtype is not None
    q, k, v = (x.to(dtype) if is_fp8 else x for x in (cache.q, cache.pages(cache.k), cache.pages(cache.v)))
    outputs = _outputs(cache, torch.bfloat16 if is_fp8 else torch.float16)
    unit_scales = torch.ones((1, cache.chunk.heads[1]), device=q.device) if is_fp8 else None
    attend = partial(
        flash_attn_varlen_func,
        q,
        k,
        v,
        max_seqlen_q=cache.chunk.queries,
        cu_seqlens_q=cache.integers(0, cache.chunk.queries),
        max_seqlen_k=cache.length,
        seqused_k=cache.integers(cache.length),
        causal=True,
        q_descale=unit_scales,
        k_descale=unit_scales,
        v_descale=unit_scales,
        fa_version=3,
    )
    tables = zip(cache.tables(), outputs, strict=True)
    return PeerLaunches([partial(attend, block_table=table, out=out) for table, out in tables], outputs)


def _fa3_fp8(cache: FloatCache) -> PeerLaunches:
    """Prepare FlashAttention 3 in E4M3 with scales of 1; results in BF16."""
    import torch

    return _fa3(cache, torch.float8_e4m3fn)


def _sdpa(cache: FloatCache) -> PeerLaunches:
    """Prepare PyTorch's attention by the backend that it chooses, [1, Hq, L, D].

    The KV heads are repeated, one for each query head.
    """
    import torch
    from torch.nn.attention.bias import causal_lower_right

    chunk, ratio = cache.chunk, cache.chunk.heads[0] // cache.chunk.heads[1]
    q = cache.q.transpose(0, 1)[None].contiguous()
    k, v = (x.transpose(0, 1).repeat_interleave(ratio, 0)[None].contiguous() for x in (cache.k, cache.v))
    mask, outputs = causal_lower_right(chunk.queries, cache.length), _outputs(cache, torch.float16)

    def attend(k: Any, v: Any, out: Any) -> None:
        out.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1))

    copies = [(k, v), *((k.clone(), v.clone()) for _ in range(cache.copies - 1))]
    return PeerLaunches([partial(attend, *pair, out) for pair, out in zip(copies, outputs, strict=True)], outputs)


def _int4(cache: FloatCache) -> PeerLaunches:
    """Prepare vLLM's attention on an `int4_per_token_head` cache, in Triton.

    vLLM's own writer quantises the same keys and values.
    """
    import torch
    from vllm.v1.attention.ops.int4_per_token_head import reshape_and_cache_int4, unified_attention_int4

    order, pages = cache.tables(), -(-cache.length // PAGE)
    shape = (pages * cache.copies, PAGE, cache.chunk.heads[1])
    byte_options = {"dtype": torch.uint8, "device": cache.q.device}
    k, v = (torch.zeros((*shape, cache.chunk.D // 2), **byte_options) for _ in range(2))
    scales = {
        scale_name: torch.zeros(shape, device=cache.q.device) for scale_name in ("k_scale_cache", "v_scale_cache")
    }
    token = torch.arange(cache.length, device=cache.q.device)
    for table in order:
        slots = table[0].long()[token // PAGE] * PAGE + token % PAGE
        reshape_and_cache_int4(cache.k, cache.v, k, v, slots, **scales)
    outputs = _outputs(cache, torch.float16)
    attend = partial(
        unified_attention_int4,
        cache.q,
        k,
        v,
        cu_seqlens_q=cache.integers(0, cache.chunk.queries),
        max_seqlen_q=cache.chunk.queries,
        seqused_k=cache.integers(cache.length),
        max_seqlen_k=cache.length,
        softmax_scale=cache.chunk.D**-0.5,
        window_size=(-1, -1),
        softcap=0.0,
        **dict.fromkeys(("sinks", "alibi_slopes", "qq_bias", "output_scale", "mm_prefix_range")),
        use_alibi_sqrt=False,
        **scales,
    )
    tables = zip(order, outputs, strict=True)
    return PeerLaunches([partial(attend, out=out, block_table=table) for table, out in tables], outputs)
