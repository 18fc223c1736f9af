"""Fixtures of the layer's tests."""

import pytest

from tests.support.fake_gpu import FakeGpu


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Replace the GPU by a fake whose device arrays are NumPy's."""
    return FakeGpu(monkeypatch)
