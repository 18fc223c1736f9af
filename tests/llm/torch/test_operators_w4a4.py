"""Operators of W4A4 and W4Ax on CPU tensors: `opcheck`, `torch.compile`, the public calls' numbers, what is refused."""

from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab.errors import PtxlabError
from ptxlab.lowbit.layout import AtomActivations, AtomWeight, BlockActivations, BlockWeight
from ptxlab.lowbit.layout.atom_operands import ATOM_LAYOUTS
from tests.support.torch_calls import FOUR_BIT_OPERATORS, M, N, four_bit_calls

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.torch
CHANNELS = 256


@pytest.fixture(scope="module")
def ops() -> Any:
    import ptxlab.llm.torch  # noqa: F401  (defines them)

    return torch.ops.ptxlab


def numpy_of(tensor: Any) -> np.ndarray:
    """Return it as NumPy's, bfloat16 as its bits."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


@pytest.mark.full
@pytest.mark.parametrize("name", FOUR_BIT_OPERATORS)
@pytest.mark.parametrize("to", ATOM_LAYOUTS)
def test_opcheck(name: str, to: str, ops: Any) -> None:
    args, options = four_bit_calls(np.random.default_rng(0), to)[name]
    torch.library.opcheck(getattr(ops, name).default, args, options)


@pytest.mark.full
def test_compiled_without_a_break(ops: Any) -> None:
    def layer(calls: dict[str, Any]) -> list[Any]:
        outputs = [getattr(ops, name)(*args, **options) for name, (args, options) in calls.items()]
        return [tensor for parts in outputs for tensor in (parts if isinstance(parts, tuple | list) else [parts])]

    eager, compiled = (four_bit_calls(np.random.default_rng(1)) for _ in range(2))
    expected, got = layer(eager), torch.compile(layer, fullgraph=True, backend="aot_eager")(compiled)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(expected, got, strict=True))


@pytest.mark.default_cases("strips")
@pytest.mark.parametrize("to", ATOM_LAYOUTS)
def test_numbers_are_those_of_the_kernels(to: str, ops: Any) -> None:
    """Compare with the emulator; the gate's exp may move an integer by a step, so of that the scales are compared."""
    calls = four_bit_calls(np.random.default_rng(2), to)
    for name in FOUR_BIT_OPERATORS[:3]:
        args, options = calls[name]
        arrays = [argument.numpy().copy() if isinstance(argument, torch.Tensor) else argument for argument in args]
        got = getattr(ops, name)(*args, **options)
        if name == "rmsnorm_reorder_quantize":
            x, gamma, place, residual, eps, normed = arrays
            tensors = {"residual": residual, "eps": eps, "normed": normed}
            right = ptxlab.rmsnorm_reorder_quantize(x, gamma, place, **tensors, **options, backend="emulator")
            assert np.array_equal(args[3].numpy(), residual) and np.array_equal(args[5].numpy(), normed)
        else:
            right = getattr(ptxlab, name)(*arrays, **options, backend="emulator")
        if name != "silu_mul_reorder_quantize":
            assert np.array_equal(got[0].numpy(), right.x)
            assert (got[2].numel() == 0) if right.x8 is None else np.array_equal(got[2].numpy(), right.x8)
        np.testing.assert_allclose(got[1].numpy().astype(float), right.scale.astype(float), rtol=2**-9)
    (x, scale, x8, buffers, bias), options = calls["gemm_w4a4"]
    of = {"K": CHANNELS - 64, "outliers": 64, "group": 64}
    order = {"strips": "bytes", "rows": "pairs"}[to]
    eight = x8.numpy() if to == "rows" else None
    four = AtomActivations(layout=order, M=M, **of, x=x.numpy(), scale=scale.numpy(), x8=eight)
    names = ["strips"] if to == "strips" else ["w4", "w8", "w_scale"]
    packed = dict(zip(names, (buffer.numpy() for buffer in buffers), strict=True))
    weight = AtomWeight(layout=to, N=N, **of, buffers=packed)
    y = ptxlab.gemm_w4a4(four, weight, bias=bias.numpy(), out_dtype="bfloat16", backend="emulator")
    assert np.array_equal(numpy_of(ops.gemm_w4a4(x, scale, x8, buffers, bias, **options)), y)
    (x, scale, x8, buffers), options = calls["gemm_w4ax"]
    sizes = {"K4": CHANNELS - 128, "K8": 128}
    eight = x8.numpy() if to == "rows" else None
    order = {"strips": "joined", "rows": "pairs"}[to]
    blocks = BlockActivations(layout=order, M=M, **sizes, x=x.numpy(), scale=scale.numpy(), x8=eight)
    names = ["strips"] if to == "strips" else ["w", "w_scale"]
    packed = dict(zip(names, (buffer.numpy() for buffer in buffers), strict=True))
    y = ptxlab.gemm_w4ax(
        blocks, BlockWeight(layout=to, N=N, **sizes, buffers=packed), out_dtype="bfloat16", backend="emulator"
    )
    assert np.array_equal(numpy_of(ops.gemm_w4ax(x, scale, x8, buffers, **options)), y)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("reorder_quantize", {"group": 32}, r"group: must be one of 64, 128 \(got 32\)"),
        ("reorder_quantize", {"int8": 1}, r"reorder_quantize: outliers: must be left out with int8"),
        ("reorder_quantize", {"layout": "joined"}, r"reorder_quantize: layout: must be one of bytes, pairs"),
        ("silu_mul_reorder_quantize", {"int8": 3}, r"silu_mul_reorder_quantize: int8: must be 0..2 blocks \(got 3\)"),
        ("gemm_w4a4", {"layout": "qserve"}, r"gemm_w4a4: layout: must be one of strips, rows \(got qserve\)"),
        ("gemm_w4a4", {"N": 72}, r"gemm_w4a4: weight: strips: must be uint8 \[5, "),
        ("gemm_w4a4", {"outliers": 128}, r"gemm_w4a4: "),
        ("gemm_w4a4", {"out_dtype": torch.int32}, r"gemm_w4a4: out_dtype: must be one of float16, bfloat16, float32"),
        ("gemm_w4ax", {"K8": 100}, r"gemm_w4ax: K4: must be a multiple of 128"),
    ],
)
def test_what_is_refused_in_a_line(name: str, changes: dict[str, Any], message: str, ops: Any) -> None:
    args, options = four_bit_calls(np.random.default_rng(0))[name]
    with pytest.raises(PtxlabError, match=message) as error:
        getattr(ops, name)(*args, **{**options, **changes})
    assert "\n" not in str(error.value)
