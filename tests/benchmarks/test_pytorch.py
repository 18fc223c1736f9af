"""The suite `torch`, as far as it needs no GPU."""

from typing import Any

import pytest

from ptxlab.errors import PtxlabError
from tests.support.torch_calls import OPERATORS

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.torch


@pytest.mark.full
def test_every_operator_is_timed() -> None:
    from benchmarks.pytorch import operator_calls

    calls = operator_calls(512, 3, "cpu")
    for call, floor in calls.values():
        outputs, allocated = (tensor if isinstance(tensor, tuple) else (tensor,) for tensor in (call(), floor()))
        assert [(tensor.shape, tensor.dtype) for tensor in outputs if tensor is not None] == [
            (tensor.shape, tensor.dtype) for tensor in allocated if tensor is not None
        ]
    assert {*calls} == {*OPERATORS}


@pytest.mark.full
def test_a_compiled_model_may_part_where_a_token_is_nearly_as_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of two sequences are compared up to the first token that differs."""
    import torch

    from benchmarks import pytorch as suite

    def output_of(logits: torch.Tensor) -> Any:
        tokens = torch.cat([torch.zeros(2, suite.PROMPT, dtype=torch.int64), logits.argmax(-1)], dim=1)
        return type("", (), {"sequences": tokens, "logits": logits.half().unbind(1)})

    eager = torch.zeros(2, suite.SHORT_RUN, 5)
    eager[..., 3], eager[1, 1, 2] = 65.0, 64.0
    compiled = eager.clone()
    logits_by_mode = {True: eager, False: compiled}
    monkeypatch.setattr(
        suite, "_generate", lambda *_, disable_compile, **how: output_of(logits_by_mode[disable_compile])
    )
    assert suite._compare_with_eager(None, 2, None) == "8 tokens of each sequence equal to the eager model's"
    compiled[1, 1, 2], compiled[1, 2:] = 66.0, eager[1, 2:].flip(-1)
    claim = suite._compare_with_eager(None, 2, None)
    assert claim.endswith(", but for 1, which part where logits of the same tokens are 0.010 deviations apart (rms)")
    compiled[0] = eager[0].flip(-1)
    with pytest.raises(PtxlabError, match=r"generate, batch 2: .* are 0\.8. standard deviations apart"):
        suite._compare_with_eager(None, 2, None)


@pytest.mark.full
def test_a_step_that_other_work_hides_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import pytorch as suite

    seconds = {suite.SHORT_RUN: 2.0, suite.LONG_RUN: 1.0}
    clock = [0.0]

    def generate(model: Any, B: int, cache: Any, tokens: int) -> None:
        clock[0] += seconds[tokens]

    monkeypatch.setattr(suite, "_generate", generate)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(suite.time, "perf_counter", lambda: clock[0])
    with pytest.raises(PtxlabError, match="generate, batch 2: 72 tokens took less time than 8; leave the host idle"):
        suite.step_us(None, 2, None)
    seconds[suite.LONG_RUN] = 2.0 + 64e-3
    assert suite.step_us(None, 2, None) == pytest.approx((1e3, 1e3, 1e3))
