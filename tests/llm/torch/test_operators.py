"""Operators on CPU tensors: `opcheck`, `torch.compile`, equality with the references, and what they refuse."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import PtxlabError
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.gemm.common import DTYPES, gemm, gemm_channel
from ptxlab.lowbit.kernels.quantize.rmsnorm import rmsnorm_quantize_reference
from ptxlab.lowbit.layout import gather, pack, stack_experts
from tests.support.torch_calls import (
    OPERATORS,
    D,
    Hkv,
    Hq,
    K,
    M,
    N,
    caches,
    every_call,
    gaussian,
    products,
    rope,
    weight,
)

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ops() -> Any:
    import ptxlab.llm.torch  # noqa: F401  (defines them)

    return torch.ops.ptxlab


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def bits(tensor: Any) -> np.ndarray:
    """Convert a tensor to NumPy, bfloat16 as its bits."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


@pytest.mark.default_cases("gemm_w8a8", "rmsnorm_quantize")
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, ops: Any, rng: np.random.Generator) -> None:
    args, options = every_call(rng)[name]
    torch.library.opcheck(getattr(ops, name).default, args, options)


@pytest.mark.full
def test_compiled_without_a_break(ops: Any, rng: np.random.Generator) -> None:
    """The graph holds all operators, and writes the tensors that each writes alone."""

    def layer(calls: dict[str, Any]) -> list[Any]:
        outputs = [getattr(ops, name)(*args, **options) for name, (args, options) in calls.items()]
        return [tensor for output in outputs for tensor in (output if isinstance(output, tuple | list) else [output])]

    eager, compiled = (every_call(np.random.default_rng(1)) for _ in range(2))
    expected_tensors, got = layer(eager), torch.compile(layer, fullgraph=True, backend="aot_eager")(compiled)
    for name, (args, _) in eager.items():
        expected_tensors += [tensor for tensor in args if isinstance(tensor, torch.Tensor)]
        got += [tensor for tensor in compiled[name][0] if isinstance(tensor, torch.Tensor)]
    for ours, theirs in zip(expected_tensors, got, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
@pytest.mark.parametrize(("scheme", "layout"), [("lqq", "strips"), ("qoq", "qserve"), ("qoq_channel", "strips")])
def test_gemm(scheme: str, layout: str, dtype: str, ops: Any, rng: np.random.Generator) -> None:
    (unpacked, buffers), of, bias = (
        weight(rng, scheme, layout),
        products(rng, getattr(torch, dtype)),
        torch.arange(N) / 8,
    )
    got = ops.gemm_w4a8(weight=buffers, bias=bias, layout=layout, scheme=scheme, **of)
    right = gemm_channel if scheme == "qoq_channel" else gemm
    expected = right(unpacked, of["x_q"].numpy(), of["x_scale"].numpy(), bias.numpy(), OUT=DTYPES.index(dtype))
    assert got.dtype == of["out_dtype"] and np.array_equal(bits(got), expected)


def test_gemm_sees_a_weight_that_was_written(ops: Any, rng: np.random.Generator) -> None:
    (_, first), (unpacked, second), of = weight(rng), weight(rng), products(rng)
    ops.gemm_w4a8(weight=first, layout="strips", scheme="lqq", **of)
    for target, source in zip(first, second, strict=True):
        target.copy_(source)
    got = ops.gemm_w4a8(weight=first, layout="strips", scheme="lqq", **of)
    assert np.array_equal(got.numpy(), gemm(unpacked, of["x_q"].numpy(), of["x_scale"].numpy(), OUT=0))


def test_grouped(ops: Any, rng: np.random.Generator) -> None:
    weights, of = [weight(rng)[0] for _ in range(3)], products(rng)
    buffers = list(
        map(
            torch.from_numpy,
            stack_experts([pack(weights_of_expert, "strips") for weights_of_expert in weights]).buffers.values(),
        )
    )
    bias, offsets = torch.arange(3 * N).view(3, N) / 8, torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    got = ops.gemm_w4a8_grouped(weights=buffers, offsets=offsets, bias=bias, scheme="lqq", **of)
    x, scale = of["x_q"].numpy(), of["x_scale"].numpy()
    parts = ((weights[0], slice(0, 2), bias[0]), (weights[2], slice(2, 3), bias[2]))
    expected = [gemm(weights_of_expert, x[rows], scale[rows], b.numpy(), OUT=0) for weights_of_expert, rows, b in parts]
    assert np.array_equal(got.numpy(), np.concatenate(expected))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rmsnorm(dtype: str, ops: Any, rng: np.random.Generator) -> None:
    x, residual, gamma = (gaussian(rng, *shape, dtype=getattr(torch, dtype)) for shape in ((M, K), (M, K), (K,)))
    inputs = [array.float().numpy() for array in (x, residual, gamma)]
    normed = torch.empty_like(x)
    got = ops.rmsnorm_quantize(x, gamma, residual, 1e-6, normed)
    expected = rmsnorm_quantize_reference(*inputs, 1e-6, 1, 32, 1, IN=int(dtype == "bfloat16"))
    for ours, right in zip((residual, normed, *got), expected, strict=True):
        assert np.array_equal(bits(ours), right)


@pytest.mark.parametrize(("scheme", "rotated"), [*((scheme, False) for scheme in quant.KV_SCHEMES), ("kv4", True)])
def test_cache(scheme: str, rotated: bool, ops: Any, rng: np.random.Generator) -> None:
    """Two sequences are written in two ways, and attended to."""
    cache_tensors, (cos, sin) = caches(rng, scheme, rotated), rope()
    qkv, positions = gaussian(rng, 5, (Hq + 2 * Hkv) * D), torch.tensor([0, 1, 2, 0, 7])
    slots = torch.tensor([0, 1, 2, 64, -1])
    q = ops.rope_append_kv4(qkv, cache_tensors["pool"], slots, cos, sin, positions, head_dim=D, **cache_tensors["how"])
    heads = qkv.float().numpy().reshape(5, -1, D)
    at = positions.numpy()
    turned = reference.rope(heads, cos.numpy()[at], sin.numpy()[at])
    assert np.array_equal(q.numpy(), turned[:, :Hq].astype(np.float16))
    cache = cache_tensors["cache"]
    cache.lengths[:] = 3, 1
    pages = cache.pool.copy()
    keys, values = gather(cache)
    for b, rows in enumerate((slice(0, 3), slice(3, 4))):
        for stored, x, channel in (
            (keys[b], cache.rotate(turned[rows, Hq : Hq + Hkv]), cache.k_channel),
            (values[b], heads[rows, Hq + Hkv :], cache.v_channel),
        ):
            assert np.array_equal(stored.dequantize(), quant.quantize_kv(x, scheme, channel).dequantize())
    cache.pool[...] = 0
    k, v = (qkv.view(5, -1, D)[:, start : start + Hkv].contiguous() for start in (Hq, Hq + Hkv))
    ops.append_kv4(k, v, cache_tensors["pool"], slots, cos, sin, positions, **cache_tensors["how"])
    assert np.array_equal(cache.pool, pages)
    table, lengths = torch.tensor([[0], [0], [0], [1], [1]], dtype=torch.int32), torch.tensor([1, 2, 3, 1, 0])
    out = ops.attention_kv4(q, cache_tensors["pool"], table, lengths.int(), window=2, scale=0.2, **cache_tensors["how"])
    for row, (b, L) in enumerate(((0, 1), (0, 2), (0, 3), (1, 1))):
        keys_and_values = keys[b].dequantize()[:L], values[b].dequantize()[:L]
        query = cache.rotate(q[row : row + 1].numpy())
        expected = reference.attention(query, *keys_and_values, scale=0.2, window=2)[0]
        assert np.array_equal(out[row : row + 1].numpy(), expected.astype(np.float32).astype(np.float16))
    assert (out[4] == 0).all()


def chunks(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any]]:
    """Make attention's arguments for two sequences of 3 and 1 tokens, of which 2 and 1 are queries.

    The second part is where the queries begin.
    """
    cache_tensors = caches(rng)
    k, v = (torch.from_numpy(rng.standard_normal((4, Hkv, D))).half() for _ in range(2))
    torch.ops.ptxlab.append_kv4(k, v, cache_tensors["pool"], torch.tensor([0, 1, 2, 64]))
    q, table = gaussian(rng, 3, Hq, D), torch.tensor([[0], [1]], dtype=torch.int32)
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    return [q, cache_tensors["pool"], table, torch.tensor([3, 1], dtype=torch.int32)], {"query_start_loc": starts}


def test_attention_of_chunks_is_that_of_their_rows(ops: Any, rng: np.random.Generator) -> None:
    (q, pool, table, lengths), options = chunks(rng)
    of_rows = torch.tensor([2, 3, 1], dtype=torch.int32)
    expected = ops.attention_kv4(q, pool, table[[0, 0, 1]].contiguous(), of_rows)
    out = torch.empty_like(q)
    ops.attention_kv4_out(q, pool, table, lengths, out, **options)
    assert torch.equal(ops.attention_kv4(q, pool, table, lengths, **options), expected) and torch.equal(out, expected)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 3], r"query_start_loc: must be int32 \[3\]"),
        ([0, 2, 2], "query_start_loc: must rise from 0 to the 3 queries"),
        ([0, 1, 3], r"lengths: a sequence's length must include its queries \(got 1 tokens, 2 queries in sequence 1"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(
    ops: Any, rng: np.random.Generator, starts: list[int], message: str
) -> None:
    arguments, _ = chunks(rng)
    with pytest.raises(PtxlabError, match=message):
        ops.attention_kv4(*arguments, query_start_loc=torch.tensor(starts, dtype=torch.int32))


def call_changed(name: str, **changes: Any) -> Callable[[Any], Any]:
    """Return a call of an operator with other arguments: by number `a0` .. or by name."""

    def call(ops: Any) -> Any:
        args, options = every_call(np.random.default_rng(0))[name]
        by_number = {int(key[1:]): argument for key, argument in changes.items() if key[1:].isdigit()}
        args = tuple(by_number.get(i, argument) for i, argument in enumerate(args))
        return getattr(ops, name)(*args, **options | {k: v for k, v in changes.items() if not k[1:].isdigit()})

    return call


BAD = {
    "x: must be float16 or bfloat16 or float32 [M, K]": call_changed(
        "quantize_activations", a0=torch.zeros(3, 64).int()
    ),
    "x: width % 32 == 0": call_changed("quantize_activations", a0=torch.zeros(3, 40)),
    "x: must be finite": call_changed("quantize_activations", a0=torch.full((1, 32), torch.nan)),
    "x_q: must be int8 [M, K]": call_changed("gemm_w4a8", a0=torch.zeros(3, 128)),
    "x_scale: must be float32 [3]": call_changed("gemm_w4a8", a1=torch.ones(3).half()),
    "x_sum: the sum of token 0": call_changed("gemm_w4a8", a2=torch.full((3,), 99999, dtype=torch.int32)),
    "weight: must be strips, channel_scale": call_changed("gemm_w4a8", a3=[torch.ones(64)]),
    "weight: strips: must be uint8": call_changed("gemm_w4a8", group=32),
    "scheme: must be one of": call_changed("gemm_w4a8", scheme="int3"),
    "bias: must be float32 [64]": call_changed("gemm_w4a8", a4=torch.ones(8)),
    "out_dtype: must be one of": call_changed("gemm_w4a8", out_dtype=torch.float64),
    "offsets: must rise from 0 to 3": call_changed("gemm_w4a8_grouped", a4=torch.tensor([0, 2, 1], dtype=torch.int32)),
    "gamma: must be float16 [128]": call_changed("rmsnorm_quantize", a1=torch.ones(128)),
    "residual: must be float16": call_changed("rmsnorm_quantize", a2=torch.ones(3, 128).bfloat16()),
    "gate_up: width % 64 == 0": call_changed("silu_mul_quantize", a0=torch.zeros(3, 96).half()),
    "activation: must be one of silu": call_changed("silu_mul_quantize", activation="relu"),
    "qkv: must be [T, (Hq + 4)·64]": call_changed("rope_append_kv4", a0=torch.zeros(3, 192).half()),
    "slots: must be distinct": call_changed("rope_append_kv4", a2=torch.tensor([1, 1, 2])),
    "slots: must be below 128": call_changed("append_kv4", a3=torch.tensor([128, 1, 2])),
    "rope positions: must lie in 0..63": call_changed("append_kv4", a6=torch.tensor([64, 1, 2])),
    "cos, sin: must be given both": call_changed("append_kv4", a5=None),
    "pool: must be uint8": call_changed("append_kv4", a2=torch.zeros(2, 2, 2, 4608, dtype=torch.uint8)),
    "cache.block_table: pages in use": call_changed("attention_kv4", a2=torch.full((3, 1), 5, dtype=torch.int32)),
    "lengths: must be int32 [3]": call_changed("attention_kv4", a3=torch.ones(2, dtype=torch.int32)),
    "scheme: must be one of kv4": call_changed("attention_kv4", scheme="kv2"),
    "rotated: must be False for kv4_channel": call_changed(
        "append_kv4",
        a2=torch.zeros(2, 2, 2, 2048, dtype=torch.uint8),
        scheme="kv4_channel",
        rotated=True,
        channel=[torch.ones(2, 64)] * 4,
    ),
    "k_channel: must be (scale, zero)": call_changed(
        "attention_kv4", a1=torch.zeros(2, 2, 2, 2048, dtype=torch.uint8), scheme="kv4_channel"
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_line(message: str, ops: Any) -> None:
    with pytest.raises(PtxlabError) as error:
        BAD[message](ops)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_nothing_is_written_by_a_call_that_fails(ops: Any, rng: np.random.Generator) -> None:
    x, residual = gaussian(rng, 2, K), gaussian(rng, 2, K)
    x[1, 5] = torch.inf
    residual_before = residual.clone()
    with pytest.raises(PtxlabError, match="finite"):
        ops.rmsnorm_quantize(x, torch.ones(K).half(), residual)
    assert torch.equal(residual, residual_before)
