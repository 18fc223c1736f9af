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
    code, _, said = cli("bench", "torch")
    assert code and "torch is ptxlab.torch.bench" in said


def test_every_operator_is_timed() -> None:
    from ptxlab.torch.bench import operator_calls

    calls = operator_calls(512, 3, "cpu")
    for call in calls.values():
        call()
    assert {*calls} == {"nothing", *OPERATORS} - {"gemm_w4a8_grouped"}
