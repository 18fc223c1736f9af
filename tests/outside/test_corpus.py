"""The harness of the corpus, on a corpus of three kernels made here: each comes out as what it is."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.outside import corpus

CASES = """
import time
import numpy as np
from tests.outside.corpus import case

SCALE = 'extern "C" __global__ void scale(float* x, float s) {{ x[threadIdx.x{0}] *= s; {1} }}'
mine = case("mine", "1.0", source="scale.cu", judged="by hand")


def run(emulate, text, factor=2):
    x = np.arange(32, dtype=np.float32)
    out = emulate(text, x, np.float32(2), grid=1, block=32)
    np.testing.assert_array_equal(out.x, factor * x)


@mine
def right(emulate, arch):
    run(emulate, SCALE.format("", ""))


@mine
def wrong(emulate, arch):
    run(emulate, SCALE.format("", ""), 3)


@mine
def fault(emulate, arch):
    run(emulate, SCALE.format(" + 1", ""))


@mine
def refused(emulate, arch):
    run(emulate, SCALE.format("", "x[0] = *new float[4];"))


@mine
def racy(emulate, arch):
    x = np.zeros(1, np.float32)
    emulate('extern "C" __global__ void racy(float* x) {{ x[0] = threadIdx.x; }}'.replace("{{", "{").replace("}}", "}"),
            x, grid=1, block=64)


@mine
def endless(emulate, arch):
    time.sleep(60)


@mine
def crashed(emulate, arch):
    raise KeyError("a mistake of the case")
"""


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, corpus.Case]:
    (tmp_path / "cases_three.py").write_text(CASES)
    monkeypatch.setattr(sys, "path", [*sys.path])
    loaded = corpus.load(tmp_path)
    sys.modules.pop("cases_three")
    return {case.name: case for case in loaded}


@pytest.mark.full
def test_what_came_out_of_each(cases: dict[str, corpus.Case], tmp_path: Path) -> None:
    outcomes = {name: corpus.attempt(case, tmp_path) for name, case in cases.items() if name != "endless"}
    assert {name: outcome.result for name, outcome in outcomes.items()} == {
        **{name: name for name in ("right", "wrong", "fault", "refused", "crashed")}, "racy": "right",
    }  # fmt: skip
    assert [finding["kind"] for finding in outcomes["racy"].findings] == ["race"]
    assert outcomes["right"].forms and outcomes["right"].seconds > 0 and not outcomes["right"].findings
    assert outcomes["refused"].why.endswith("malloc on the device is not emulated")
    assert outcomes["crashed"].why.startswith("KeyError: 'a mistake of the case' (cases_three.py:")
    assert cases["right"].judged == "by hand"


@pytest.mark.full
def test_a_kernel_that_does_not_end_is_ended(cases: dict[str, corpus.Case], tmp_path: Path) -> None:
    assert corpus.run(cases["endless"], tmp_path, seconds=0.5).result == "unfinished"


def test_the_record_names_no_path_of_this_machine() -> None:
    text = corpus.RECORD.read_text(encoding="utf-8")
    for entry in json.loads(text)["kernels"]:
        assert entry["result"] in ("right", "wrong", "refused", "fault", "unfinished") and entry["version"]
        assert "\n" not in entry["why"] and (entry["judged"] or not entry["findings"]), entry["name"]
    assert not re.findall(r"(?<![\w.>:/\]])/(?:\w[\w.+-]*/){2,}", text)  # an absolute path of some depth
