"""What the tests of the public calls share."""

import pytest

from ptxlab.lowbit.kernels import operation
from tests.support.fake_gpu import FakeGpu


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Fake a GPU that remembers nothing of earlier calls."""
    for name in ("_prepared", "_ready", "_memory"):
        monkeypatch.setattr(operation, name, {})
    return FakeGpu(monkeypatch)
