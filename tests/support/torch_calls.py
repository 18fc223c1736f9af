"""A call of each operator of `ptxlab.llm.torch`, of CPU tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.layout import (
    ATOM_ORDERS,
    BLOCK_ORDERS,
    KVCache,
    pack,
    pack_atom,
    pack_atom_activations,
    pack_block_activations,
    pack_block_weight,
    stack_experts,
    write_slots,
)

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

M, N, K, D, Hq, Hkv = 3, 64, 128, 64, 4, 2
OPERATORS = (
    "quantize_activations", "gemm_w4a8", "gemm_w4a8_grouped", "gemm_w8a8", "rmsnorm_quantize", "silu_mul_quantize",
    "append_kv4", "rope_append_kv4", "attention_kv4", "attention_kv4_out",
)  # fmt: skip
FOUR_BIT_OPERATORS = (
    "reorder_quantize", "rmsnorm_reorder_quantize", "silu_mul_reorder_quantize", "gemm_w4a4", "gemm_w4ax",
)  # fmt: skip
EXPERT_OPERATORS = ("route_tokens", "combine_experts")
SCHEMES: dict[str, Callable[[Any], Any]] = {
    "lqq": lambda w: quant.quantize_lqq(w, 64),
    "qoq": lambda w: quant.quantize_qoq(w, 64),
    "qoq_channel": quant.quantize_qoq_channel,
}


def gaussian(rng: np.random.Generator, *shape: int, dtype: Any = torch.float16) -> Any:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(dtype)


def weight(rng: np.random.Generator, scheme: str = "lqq", layout: str = "strips") -> tuple[Any, list[Any]]:
    """Make a quantised weight [N, K], and its packed buffers as tensors."""
    quantized = SCHEMES[scheme](rng.standard_normal((N, K), dtype=np.float32))
    return quantized, [torch.from_numpy(buffer) for buffer in pack(quantized, layout).buffers.values()]


def products(rng: np.random.Generator, dtype: Any = torch.float16) -> dict[str, Any]:
    """Make the arguments of `gemm_w4a8` but its weight."""
    x = torch.from_numpy(rng.integers(-128, 128, (M, K), dtype=np.int8))
    scale = torch.from_numpy(rng.uniform(1e-3, 1e-2, M).astype(np.float32))
    return {"x_q": x, "x_scale": scale, "x_sum": x.sum(1, dtype=torch.int32), "group": 64, "out_dtype": dtype}


def caches(rng: np.random.Generator, scheme: str = "kv4", rotated: bool = False) -> dict[str, Any]:
    """Make an empty cache of two sequences, one page each, as the operators take it."""
    by_channel: dict[str, Any] = {}
    channel = None
    if scheme.endswith("channel"):
        constants = quant.calibrate_kv(rng.standard_normal((20, Hkv, D), dtype=np.float32), scheme)
        by_channel = {"k_channel": constants, "v_channel": constants}
        channel = [torch.from_numpy(constant) for constant in (*constants, *constants)]
    cache = KVCache.empty(2, 1, Hkv, D, scheme=scheme, rotated=rotated, **by_channel)
    options = {"scheme": scheme, "channel": channel, "rotated": rotated}
    return {"cache": cache, "pool": torch.from_numpy(cache.pool), "how": options}


def rope(positions: int = 64) -> tuple[Any, Any]:
    cos, sin = map(torch.from_numpy, reference.rope_tables(np.arange(positions), D))
    return cos, sin


def every_call(rng: np.random.Generator) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Make the arguments of a call of each operator."""
    x, (_, buffers), product_options = gaussian(rng, M, K), weight(rng), products(rng)
    x_q, scale, x_sum = product_options.pop("x_q"), product_options.pop("x_scale"), product_options.pop("x_sum")
    experts = [
        torch.from_numpy(array) for array in stack_experts([pack(weight(rng)[0], "strips")] * 2).buffers.values()
    ]
    offsets, slots = torch.tensor([0, 1, M], dtype=torch.int32), torch.tensor([0, 1, -1])
    pool, (cos, sin), positions = caches(rng)["pool"], rope(), torch.tensor([0, 1, 0])
    table, lengths = torch.tensor([[0], [0], [1]], dtype=torch.int32), torch.tensor([1, 2, 0], dtype=torch.int32)
    full = caches(rng)
    k, v = (quant.quantize_kv(array) for array in rng.standard_normal((2, 4, Hkv, D), dtype=np.float32))
    write_slots(full["cache"], k, v, np.array([0, 1, 64, 65]))
    qkv, q = gaussian(rng, M, (Hq + 2 * Hkv) * D), gaussian(rng, M, Hq, D)
    _, of_keys, of_values = qkv.split([Hq * D, Hkv * D, Hkv * D], dim=1)  # whose rows lie apart
    attention = q, full["pool"], table, lengths
    of_rows = torch.from_numpy(rng.integers(-127, 128, (N, K), dtype=np.int8))
    options = {"window": 8, "workspace": torch.zeros(8, dtype=torch.uint8)}
    return {
        "quantize_activations": ((x,), {}),
        "gemm_w4a8": (
            (x_q, scale, x_sum, buffers, torch.ones(N)),
            {"layout": "strips", "scheme": "lqq", **product_options},
        ),
        "gemm_w4a8_grouped": ((x_q, scale, x_sum, experts, offsets), {"scheme": "lqq", **product_options}),
        "gemm_w8a8": ((x_q, scale, x_sum, of_rows, torch.ones(N)), {"out_dtype": product_options["out_dtype"]}),
        "rmsnorm_quantize": ((x, gaussian(rng, K), gaussian(rng, M, K), 1e-6, torch.empty_like(x)), {}),
        "silu_mul_quantize": ((x,), {}),
        "append_kv4": ((of_keys.view(M, Hkv, D), of_values.view(M, Hkv, D), pool, slots, cos, sin, positions), {}),
        "rope_append_kv4": ((qkv, pool, slots, cos, sin, positions), {"head_dim": D}),
        "attention_kv4": (attention, {**options}),
        "attention_kv4_out": ((*attention, torch.empty_like(q), torch.empty(M, Hq)), {**options}),
    }


def expert_calls(
    rng: np.random.Generator, dtype: Any = torch.float16
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Make the arguments of a call of each operator around the grouped products.

    Each of seven tokens goes to two of five experts.
    """
    tokens, E, k = 7, 5, 2
    x = torch.from_numpy(rng.integers(-127, 128, (tokens, K), dtype=np.int8))
    scale, sums = gaussian(rng, tokens, dtype=torch.float32).abs(), x.sum(1, dtype=torch.int32)
    place = torch.from_numpy(rng.permutation(tokens * k).astype(np.int32)).view(tokens, k)
    share = torch.from_numpy(rng.uniform(0, 1, (tokens, k)).astype(np.float32))
    return {
        "route_tokens": (
            (x, scale, sums, gaussian(rng, tokens, K, dtype=dtype), gaussian(rng, E, K, dtype=dtype), k),
            {},
        ),
        "combine_experts": ((gaussian(rng, tokens * k, K, dtype=dtype), place, share), {}),
    }


def four_bit_calls(
    rng: np.random.Generator, to: str = "strips", out_dtype: Any = torch.bfloat16
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Make the arguments of a call of each operator of W4A4 and W4Ax, for weights in that layout."""
    channels, outliers, group, int8 = 256, 64, 64, 1
    order = rng.permutation(channels)
    place = torch.from_numpy(quant.channel_places(order))
    x, gate_up = gaussian(rng, M, channels), gaussian(rng, M, 2 * channels)
    w, floats = rng.standard_normal((2, N, channels), dtype=np.float32)
    of_atom = {"outliers": outliers, "group": group, "layout": ATOM_ORDERS[to]}
    of_blocks = {"int8": int8, "layout": BLOCK_ORDERS[to]}
    four = pack_atom(quant.quantize_atom_weight(w[:, order], group, outliers), to)
    blocks = pack_block_weight(quant.quantize_block_weight(w[:, order]), int8, to)
    activations = quant.quantize_atom_activations(floats[:M, order], group, outliers)
    read = pack_atom_activations(activations, ATOM_ORDERS[to])
    read_blocks = pack_block_activations(quant.quantize_blocks(floats[:M, order], int8), BLOCK_ORDERS[to])

    def tensors(operand: Any) -> list[Any]:
        x8 = np.empty((M, 0), np.int8) if operand.x8 is None else operand.x8
        return [torch.from_numpy(part) for part in (operand.x, operand.scale, x8)]

    of_four, of_block = ([torch.from_numpy(buffer) for buffer in weight.buffers.values()] for weight in (four, blocks))
    options = {"layout": to, "N": N, "out_dtype": out_dtype}
    return {
        "reorder_quantize": ((x, place), of_atom),
        "rmsnorm_reorder_quantize": (
            (x, gaussian(rng, channels), place, gaussian(rng, M, channels), 1e-6, torch.empty_like(x)), of_blocks,
        ),
        "silu_mul_reorder_quantize": ((gate_up, place), of_blocks),
        "gemm_w4a4": (
            (*tensors(read), of_four, torch.ones(N)), {**options, "outliers": outliers, "group": group},
        ),
        "gemm_w4ax": ((*tensors(read_blocks), of_block), {**options, "K8": 128 * int8}),
    }  # fmt: skip
