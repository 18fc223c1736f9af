"""`W4A8Linear` on the CPU."""

from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.lowbit import quant
from ptxlab.lowbit.kernels.gemm.common import DTYPES, gemm
from ptxlab.lowbit.layout import pack

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.torch


@pytest.fixture
def linear_class() -> Any:
    """Return the layer's class, which needs PyTorch to import."""
    from ptxlab.llm.torch import W4A8Linear

    return W4A8Linear


def linear(dtype: Any = torch.float16, bias: bool = True, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Linear(128, 64, bias=bias, dtype=dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_is_the_reference_of_the_rounded_weight(dtype: str, bias: bool, linear_class: Any) -> None:
    layer = linear(getattr(torch, dtype), bias)
    x = torch.randn(2, 3, 128).to(layer.weight.dtype)
    y = linear_class.from_linear(layer, "lqq", 64)(x)
    weight = quant.quantize_lqq(layer.weight.detach().float().numpy(), 64)
    acts = quant.quantize_activations(x.float().numpy().reshape(6, 128))
    added = layer.bias.detach().float().numpy() if bias else None
    expected = gemm(weight, acts.q, acts.scale, added, OUT=DTYPES.index(dtype))
    assert y.dtype == layer.weight.dtype and y.shape == (2, 3, 64)
    output = y.view(torch.uint16) if dtype == "bfloat16" else y
    assert np.array_equal(output.numpy().reshape(6, 64), expected)
    assert (y - layer(x)).abs().max() < 0.2 * layer(x).abs().max()  # and near to what it was


@pytest.mark.parametrize("scheme", ["lqq", "qoq", "qoq_channel"])
def test_state_survives(scheme: str, linear_class: Any, tmp_path: Any) -> None:
    ours, restored = linear_class.from_linear(linear(), scheme), linear_class.from_linear(linear(seed=1), scheme)
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    x = torch.randn(3, 128).half()
    assert not torch.equal(ours(x), restored(x))
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(ours(x), restored(x))


def test_state_of_another_format_is_refused_and_nothing_loaded(linear_class: Any) -> None:
    """LQQ and QoQ have buffers of the same shapes."""
    ours, foreign = linear_class.from_linear(linear(), "lqq"), linear_class.from_linear(linear(seed=1), "qoq")
    states = {name: buffer.clone() for name, buffer in ours.state_dict().items()}
    with pytest.raises(ArgumentError, match=r"W4A8Linear: _extra_state: must be .*'lqq'.*got .*'qoq'"):
        ours.load_state_dict(foreign.state_dict())
    assert all(torch.equal(buffer, states[name]) for name, buffer in ours.state_dict().items())


def test_casts_move_it_only(linear_class: Any) -> None:
    ours = linear_class.from_linear(linear())
    dtypes = {name: buffer.dtype for name, buffer in ours.named_buffers()}
    torch.nn.Sequential(ours).to(torch.bfloat16).half()
    assert {name: buffer.dtype for name, buffer in ours.named_buffers()} == dtypes
    assert ours.to("meta").device.type == "meta"
    assert "128, 64, lqq, group=64, strips, bias=True, dtype=float16" in repr(ours)


BAD = {
    "must be an nn.Linear": lambda kind: kind.from_linear(torch.zeros(3)),
    "scheme: must be one of lqq": lambda kind: kind.from_linear(linear(), "int4"),
    "group: must be one of 32, 64, 128": lambda kind: kind.from_linear(linear(), group=48),
    "K must be a positive multiple of 32": lambda kind: kind.from_linear(torch.nn.Linear(40, 64), "qoq_channel"),
    "dtype: must be one of float16": lambda kind: kind.from_linear(linear(torch.float64)),
    "weight: must be a PackedWeight": lambda kind: kind(torch.zeros(3)),
    "bias: must be [64]": lambda kind: kind(
        pack(quant.quantize_lqq(np.ones((64, 128), np.float32), 64), "strips"), torch.ones(3)
    ),
    "x: dtype float16 as the layer": lambda kind: kind.from_linear(linear())(torch.zeros(3, 128)),
    "x: must be [.., 128]": lambda kind: kind.from_linear(linear())(torch.zeros(3, 64).half()),
    "x: must be on cpu as the weight (got meta)": lambda kind: kind.from_linear(linear())(
        torch.zeros(3, 128, dtype=torch.float16, device="meta")
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_line(message: str, linear_class: Any) -> None:
    with pytest.raises(ArgumentError) as error:
        BAD[message](linear_class)
    assert message in str(error.value) and "\n" not in str(error.value)
