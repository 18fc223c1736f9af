"""Would anybody notice? Small mistakes in the source of `append_kv4`."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ptxlab import kernels
from ptxlab.errors import EmulationError
from ptxlab.kernels.attention.append import APPEND
from tests.support import append_problems as problems

CHANGES = {
    "a reciprocal of one part": ("fmaf(x, high, __fmul_rn(x, low))", "__fmul_rn(x, high)"),
    "a quotient that is not corrected": ("return fmaf(fmaf(-near, s, x), r, near);", "return near;"),
    "a quotient that is not cut off": ("fminf(__fmul_rn(x, r), 0x1p100f)", "__fmul_rn(x, r)"),
    "a reciprocal for tiny scales": ("return most <= high - low;", "return true;"),
    "a scale by a reciprocal": ("float(LEVELS)))", "1.0f) * (1.0f / LEVELS))"),
    "a scale rounded down": ("__float2half_rn(__f", "__float2half_rz(__f"),
    "a range without 0": ("range.include({0, 0});", ""),
    "a scale of 0": ("__half2float(rounded) == 0 ?", "false ?"),
    "no upper bound": ("max(min(rounded(quotient) + zero, LEVELS), 0)", "max(rounded(quotient) + zero, 0)"),
    "no lower bound": ("max(min(rounded(quotient) + zero, LEVELS), 0)", "min(rounded(quotient) + zero, LEVELS)"),
    "a fused difference": ("__fsub_rn(__fmul_rn(x[i], cos[i]), __f", "fmaf(x[i], cos[i], -__f"),
    "a fused sum": ("__fadd_rn(__fmul_rn(x[PAIRS + i], cos[i]), __f", "fmaf(x[PAIRS + i], cos[i], __f"),
    "tokens beyond the last": ("slot[i] = t < tokens ? slots[t] : -1", "slot[i] = slots[t]"),
    "positions of padding": ("min(size_t(position[i]), size_t(turns - 1))", "position[i]"),
    "positions beyond the last": ("positions && t < tokens ?", "positions ?"),
    "heads beyond the last": ("at < 0 || head + i / TOKENS >= heads", "at < 0"),
    "constants of heads beyond the last": ("slot[0] >= 0 && head + own < heads", "slot[0] >= 0"),
    "no lower bound by channel": ("fmaxf(quotient[j](rows[i][j]), -127.0f)", "quotient[j](rows[i][j])"),
    "half of a neighbour's word": ("odd ? first : second", "odd ? second : first"),
    "no wait for the kernel before": ("ptxlab::wait_for_predecessors();", ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_kernel_is_noticed(change: str) -> None:
    (source,) = kernels.find(APPEND.name)[1]
    old, new = CHANGES[change]
    assert source.text.count(old) == 1
    changed = replace(source, text=source.text.replace(old, new))
    assert any(is_killed(problem, changed) for problem in battery())


def battery() -> list[problems.Problem]:
    """Problems of which a wrong kernel fails one."""
    x = problems.ties(problems.scales(64, 7), 64, 4).astype(np.float16)[:, None]
    turned, rope = problems.rotated_to_ties(128, 4)
    beyond = problems.beyond_the_levels(40, 4)
    padded = problems.problem_of(*problems.normal(9, 3, 64), "kv4", 16, rope=problems.rotations(9, 64, np.int32, True))
    padded.rope[2][padded.slots < 0] = 2**31 - 1
    full = problems.problem_of(*problems.normal(9, 3, 64), "kv4", 16, pages=1)
    full = replace(full, slots=np.arange(9, dtype=np.int32) + 7)
    return [
        problems.problem_of(x, np.abs(x), "kv4", 16),
        problems.problem_of(beyond, beyond, "kv4", 16),
        problems.problem_of(turned, turned, "kv4", 16, rope=rope),
        problems.any_constants("kv4_channel"),
        problems.huge("kv4_channel"),
        problems.next_to_ties("kv4_channel", tiny=False),
        problems.next_to_ties("kv4_channel", tiny=True),
        padded,
        full,
    ]


def is_killed(problem: problems.Problem, source: Any) -> bool:
    try:
        pool, outcome = problem.run(source, rows=4)
    except EmulationError:  # a stray access
        return True
    return bool(outcome.findings) or not np.array_equal(pool, problem.wanted)


def test_the_kernel_itself_passes() -> None:
    (source,) = kernels.find(APPEND.name)[1]
    assert not any(is_killed(problem, source) for problem in battery())
