"""The guide's list of what the emulator refuses: every reason that the code has, and each example is refused so."""

import re
from pathlib import Path

import numpy as np
import pytest

from ptxlab.emulator.front import refusals
from ptxlab.errors import SourceError, UnknownInstruction
from tests.support.small_kernels import kernel_text, run_text

PAGE = Path(__file__).parents[2] / "notebooks/guide/emulator.md"
ROWS = re.findall(r"^\| (.+ not emulated)(?: \(.+\))? \| `(.+;)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_guide_lists_every_reason() -> None:
    constants = {text for text in vars(refusals).values() if isinstance(text, str) and text.endswith("not emulated")}
    reasons = {*refusals.INSTRUCTIONS.values(), *refusals.SPECIALS.values(), *constants}
    assert {reason for reason, _ in ROWS} == reasons and len(constants) > 3


@pytest.mark.parametrize(("reason", "example"), ROWS, ids=[example.split()[0] for _, example in ROWS])
def test_an_example_is_refused(reason: str, example: str) -> None:
    with pytest.raises((UnknownInstruction, SourceError), match=re.escape(reason)):
        run_text(kernel_text(example, outside=".func again { call again; ret; }"), np.zeros(1))
