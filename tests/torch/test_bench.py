"""The suite `torch`, as far as it needs no GPU."""

from typing import Any

import pytest

from ptxlab import bench
from ptxlab.errors import PtxlabError
from tests.support.torch_calls import OPERATORS

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.torch


def test_the_command_knows_the_suite(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(suite: str, **_: Any) -> Any:
        raise PtxlabError(f"{suite} is {bench.SUITES[suite].__module__}")

    monkeypatch.setattr(bench, "SUITES", {**bench.SUITES})
    monkeypatch.setattr(bench, "run_suite", run)
    monkeypatch.setattr(bench, "resumed_path", lambda *_: None)  # by the name of the GPU
    code, _, said = cli("bench", "torch")
    assert code and "torch is ptxlab.torch.bench" in said


def test_every_operator_is_timed() -> None:
    from ptxlab.torch.bench import operator_calls

    calls = operator_calls(512, 3, "cpu")
    for call, floor in calls.values():
        made, allocated = (each if isinstance(each, tuple) else (each,) for each in (call(), floor()))
        assert [(each.shape, each.dtype) for each in made if each is not None] == [
            (each.shape, each.dtype) for each in allocated if each is not None
        ]
    assert {*calls} == {*OPERATORS}


def test_a_compiled_model_may_part_where_a_token_is_nearly_as_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the eager model, of two sequences; at token 1 of the second, 64 is next to 65."""
    import torch

    from ptxlab.torch import bench as suite

    logits = torch.zeros(2, suite.FEW, 5)
    logits[..., 3], logits[1, 1, 2], logits[1, 1, 4] = 65.0, 64.0, 50.0
    tokens = torch.cat([torch.zeros(2, suite.PROMPT, dtype=torch.int64), logits.argmax(-1)], dim=1)
    eager, compiled = type("", (), {"sequences": tokens, "logits": logits.half().unbind(1)}), tokens.clone()
    monkeypatch.setattr(suite, "_generated", lambda *_, **how: eager if how else compiled)
    assert suite._same_as_eager(None, 2, None) == "8 tokens of each sequence equal to the eager model's"
    compiled[1, suite.PROMPT + 1 :] = 2
    assert suite._same_as_eager(None, 2, None).endswith(", but for 1 that part at a margin of 0.030 at most")
    compiled[1, suite.PROMPT + 1] = 4
    with pytest.raises(PtxlabError, match=r"at token 1 of sequence 1, 0\.4[0-9] standard deviations"):
        suite._same_as_eager(None, 2, None)
