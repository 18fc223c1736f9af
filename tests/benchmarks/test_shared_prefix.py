"""Times to the first token: of prompts that share the pages that they should, and of those that share none."""

import pytest

from benchmarks.shared_prefix import first_token_times
from ptxlab.errors import BenchmarkError
from ptxlab.llm.model import NumpyRunner
from tests.support.small_prompts import quantized_model


def test_prompts_take_turns_and_share_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, computed = NumpyRunner(quantized_model(), 1, 128, chunk=128, pages=8), list[int]()
    extend = runner.extend
    monkeypatch.setattr(runner, "extend", lambda new: computed.append(len(new[0])) or extend(new))
    shared, new = first_token_times(runner, tokens=70, pages=1, repeats=2)
    assert len(shared) == len(new) == 2 and min(*shared, *new) > 0
    assert computed == [70, 6] * 3


def test_a_prompt_that_shares_other_pages_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = NumpyRunner(quantized_model(), 1, 128, chunk=128, pages=8)
    monkeypatch.setattr(runner, "register_pages", lambda *_: None)
    with pytest.raises(BenchmarkError, match="a prompt shares 0 pages instead of 1"):
        first_token_times(runner, tokens=70, pages=1, repeats=1)
