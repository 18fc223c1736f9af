"""Operators on CPU tensors: `opcheck`, equality with the references, bad input, `torch.compile`."""

from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import quant
from ptxlab.layout import pack, stack_experts

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.torch

import ptxlab.torch  # noqa: E402

RNG = np.random.default_rng(0)
OPS = torch.ops.ptxlab


def normal(*shape: int, dtype: Any = torch.float16) -> Any:
    return torch.from_numpy(RNG.standard_normal(shape, dtype=np.float32)).to(dtype)


def test_linear() -> None:
    linear = torch.nn.Linear(128, 64, dtype=torch.float16)
    ours = ptxlab.torch.W4A8Linear.from_linear(linear)
    x = normal(3, 128)
    y = ours(x)
    packed = pack(quant.quantize_lqq(linear.weight.detach().float().numpy(), 64), "strips")
    acts = quant.quantize_activations(x.float().numpy())
    from ptxlab.kernels.gemm.common import gemm
    from ptxlab.layout import unpack

    want = gemm(unpack(packed), acts.q, acts.scale, linear.bias.detach().float().numpy(), OUT=0)
    assert np.array_equal(y.numpy(), want)
