"""What the tests of the Python faces share."""

import pytest

from ptxlab.kernels.attention import appendface
from ptxlab.kernels.attention import device as attention
from ptxlab.kernels.gemm import device as gemm
from ptxlab.kernels.gemm import groupedface
from ptxlab.kernels.quantize import face as quantize
from tests.support.fake_gpu import FakeGpu

REMEMBERED = [(gemm, "_prepared"), (gemm, "_shared"), (attention, "_prepared"), (attention, "_shared")]
REMEMBERED += [(module, "_plans") for module in (groupedface, appendface, quantize)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU that isn't one, where nothing is remembered of earlier calls."""
    for module, name in REMEMBERED:
        monkeypatch.setattr(module, name, {})
    return FakeGpu(monkeypatch)
