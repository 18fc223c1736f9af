"""What the tests of the Python faces share."""

import pytest

from ptxlab.kernels.attention import append_api
from ptxlab.kernels.attention import device as attention
from ptxlab.kernels.gemm import device as gemm
from ptxlab.kernels.gemm import grouped_api
from ptxlab.kernels.quantize import api as quantize
from tests.support.fake_gpu import FakeGpu

REMEMBERED = [(gemm, "_prepared"), (gemm, "_shared"), (attention, "_prepared"), (attention, "_shared")]
REMEMBERED += [(module, "_plans") for module in (grouped_api, append_api, quantize)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU that isn't one, where nothing is remembered of earlier calls."""
    for module, name in REMEMBERED:
        monkeypatch.setattr(module, name, {})
    return FakeGpu(monkeypatch)
