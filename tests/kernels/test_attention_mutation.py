"""Would the bound notice? Small mistakes in the source of attention kernels, each wherever it has a place."""

from dataclasses import replace

import numpy as np
import pytest

from ptxlab import emulator, kernels
from ptxlab.errors import EmulationError, VerificationError
from ptxlab.kernels.attention import ladder, sm80
from ptxlab.runtime import run_spec
from ptxlab.sources import Source
from ptxlab.spec import Arrays, KernelSpec
from ptxlab.verify import compare
from tests import attention_problems as problems

# (as it is, a mistake)
LADDER = (
    ("kv_head = head / (Hq / Hkv)", "kv_head = head % Hkv"),
    ("if (t >= length) continue;", "if (t > length) continue;"),
    ("slot < rest", "slot <= rest"),
    ("1.4426950408889634f", "1.0f"),
    ("sum > 0 ? ", "true ? "),
    ("? weight_unit / sum", "? 1 / sum"),
    ("8 * (i % 4) + i % 8 / 4 * 4", "4 * (i % 8)"),
    ("mask = 1; mask < PARTS", "mask = 2; mask < PARTS"),
    ("- most)", ")"),
    ("{ return low_of(i) + 2; }", "{ return low_of(i) + 4; }"),
    ("leading_power(largest)", "leading_power(1)"),
    ("leading_power(heaviest) / 512", "leading_power(1) / 512"),
    ("PAGE * ROW + i % 16 * 16", "PAGE * ROW + i % 8 * 16"),
)
MMA = (
    ("0x1p14f", "0x1p17f"),
    ("power / count_of(r)", "power"),
    ("zero * column_sum[n][b]", "0"),
    ("at.walk.length - T + 1 +", "at.walk.length - T +"),
    ("token < limit - window", "token <= limit - window"),
    ("if (token >= inside) k = v = NEUTRAL;", ""),
    ("l[n][b] *= less[n][b], zeros[n][b] *= less[n][b];", "l[n][b] *= less[n][b];"),
    ("p0 * v_inverse[i][h]", "p0"),
    ("page[j] + part * pitch + offset * ROW", "page[j] + part * pitch"),
    ("min(page, last)", "page"),
    ("0x1p24f / count_of(r)", "0x1p24f"),
)


def mistaken(spec: KernelSpec, change: tuple[str, str]) -> Source:
    source = kernels.find(spec.name)[1][0]
    before, after = change
    assert before in source.text
    return replace(source, text=source.text.replace(before, after))


def problems_of(spec: KernelSpec) -> list[tuple[Arrays, dict[str, float]]]:
    """(logical inputs, sizes): no tokens, part of a page, huge scores, small values, heads in groups; a window."""
    found: list[tuple[Arrays, dict[str, float]]] = []
    changes = problems.nothing, problems.scores_beyond_fp16, problems.large_and_small_values
    for change, page, window in zip(changes, (64, 16, 32), (0, 100, 60), strict=True):
        if spec is sm80.MMA:
            q, cache = problems.problem(
                3, (500, 0, 70), change, Hq=8, Hkv=2, scheme="kv4", T=2, page_size=page, spare=0
            )
            logical = {"q": q, "cache": cache, "softmax_scale": 0.088, "window": window}
            sizes = {"page": page, "bits": 4, "channel": 0, "blocks": 1, "softmax_scale": 0.088, "window": window}
        else:
            q, cache = problems.problem(3, (150, 0, 70), change, Hq=4, Hkv=2, scheme=spec.name.split("_")[1])
            logical = {"q": q[:, 0].astype(np.float16), "cache": cache, "softmax_scale": 0.088}
            sizes = {"softmax_scale": 0.088}
        found.append((logical, sizes))
    return found


def is_noticed(spec: KernelSpec, source: Source) -> bool:
    for logical, sizes in problems_of(spec):
        inputs = spec.pack(logical)
        inputs["q"] = inputs["q"].astype(np.float16)
        try:
            outcome = run_spec(spec, source, inputs, sizes=sizes, backend="emulator", checks=emulator.CHECKS)
            compare(spec, outcome.outputs, logical)
        except (EmulationError, VerificationError):
            return True
        if outcome.findings:
            return True
    return False


SPECS = (*ladder.SPECS, sm80.MMA)
PLACES = [
    (spec, change)
    for spec, changes in (*((step, LADDER) for step in ladder.SPECS), (sm80.MMA, MMA))
    for change in changes
    if change[0] in kernels.find(spec.name)[1][0].text
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_kernel_itself_is_right(spec: KernelSpec) -> None:
    assert not is_noticed(spec, kernels.find(spec.name)[1][0])


@pytest.mark.parametrize(("spec", "change"), PLACES, ids=lambda x: getattr(x, "name", None) or x[0])
def test_a_mistake_is_noticed(spec: KernelSpec, change: tuple[str, str]) -> None:
    assert is_noticed(spec, mistaken(spec, change))


def test_every_mistake_has_a_place() -> None:
    assert {change for _, change in PLACES} == {*LADDER, *MMA}
