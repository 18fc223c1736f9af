"""The bound of attention can fail: what is wrong in silence is refused at every length, what only rounds is not."""

from typing import Any

import numpy as np
import pytest

from ptxlab import reference
from ptxlab.bench.attention import kvdata
from ptxlab.bench.attention.problem import SCALE
from ptxlab.kernels.attention import bound, common, ladder, sm80
from ptxlab.kernels.attention.sm90 import PROMOTE, SM90, roundings_of
from ptxlab.quant import quantize_kv
from ptxlab.spec.tolerance import Allowed, within
from tests.support import attention_faults as faults
from tests.support import attention_problems as problems
from tests.support import attention_rounded as rounded
from tests.support.attention_faults import every_data, refused

LENGTHS = (300, 4096, 32768)
HEADS = (8, 1)  # the fewest heads in which a fault has to show


def allowed_of(of: faults.Problem) -> dict[str, Allowed]:
    return SM90.allowed({"q": of.q, "cache": of.cache, "softmax_scale": SCALE, "window": 0, "blocks": 1})


@every_data
@pytest.mark.parametrize("length", LENGTHS)
def test_every_fault_is_refused_by_results_and_by_logarithms_alone(data: kvdata.Data, length: int) -> None:
    """Even if the kernel's own error is half of what it may be, and hides as much of the fault as it can."""
    of = faults.problem(data, HEADS, length)
    exact, rng = faults.Expected(of), np.random.default_rng(0)
    with_error = {
        name: Allowed(1.5 * allowed.each, 1.5 * allowed.rms)
        for name, allowed in allowed_of(of).items()
        if allowed.rms is not None
    }
    right = exact(of.right(1))
    assert not any(refused(one, one, allowed).any() for one, allowed in zip(right, with_error.values(), strict=True))
    for fault in faults.FAULTS:
        wanted = exact(of.with_other_lasts()) if fault is faults.last_token_lost else right
        for got, one, (name, allowed) in zip(exact(fault(of, rng)), wanted, with_error.items(), strict=True):
            found = refused(got, one, allowed)
            assert found.all(), f"{fault.__name__}: {found.sum()} of {len(found)} refused by {name}"


@every_data
@pytest.mark.parametrize(("length", "warps"), [(300, 2), (1000, 2), (4096, 4)])
def test_what_only_rounds_is_accepted(data: kvdata.Data, length: int, warps: int) -> None:
    """As tensor cores do, which truncate; with more tokens to a warp than there are between promotions."""
    for seed in range(max(1, 2048 // length)):
        of = faults.problem(data, HEADS, length, spare=1, seed=seed)
        out, lse = rounded.attention(of.q, of.cache, warps, 2 * PROMOTE)
        right = dict(zip(("out", "lse"), common.attention(of.q, of.cache, SCALE), strict=True))
        assert within({"out": out, "lse": lse}, right, allowed_of(of)) is None


@pytest.mark.parametrize("change", problems.CASES, ids=lambda change: change.__name__)
def test_hard_cases_that_only_round_are_accepted(change: problems.Change) -> None:
    """Equal scores, where all tokens are rounded alike; one that is all; queries and values of any size."""
    q, cache = problems.problem(0, (700,), change, Hq=4, Hkv=1, scheme="kv4")
    q = q.astype(np.float16)
    out, lse = rounded.attention(q, cache, 1, 2 * PROMOTE)
    right = dict(zip(("out", "lse"), common.attention(q, cache, SCALE), strict=True))
    logical = {"q": q, "cache": cache, "softmax_scale": SCALE, "window": 0, "blocks": 1}
    assert within({"out": out, "lse": lse}, right, SM90.allowed(logical)) is None


def test_zeros_are_no_attention_however_many_tokens_there_are() -> None:
    """Of a bell in everything, which the certain bound let pass from some length on."""
    rng, D = np.random.default_rng(0), 128
    q = rng.standard_normal((1, 2, D))
    k, v = (quantize_kv(rng.standard_normal((32768, 1, D), np.float32)) for _ in range(2))
    seen = np.ones((1, 32768), bool)
    out, _ = bound.allowed_error(q, k, v, seen, scale=SCALE, roundings=roundings_of(D, False), stored=bound.HALF)
    right = reference.attention(q, k.dequantize(), v.dequantize(), scale=SCALE)[0]
    assert within({"out": right}, {"out": right}, {"out": out}) is None
    assert within({"out": np.zeros_like(right)}, {"out": right}, {"out": out}) is not None


SPECS = (SM90, sm80.MMA, ladder.SPECS[0], ladder.SPECS[-1])


@pytest.mark.parametrize("change", problems.CASES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_no_bound_is_looser_than_the_certain_one(
    spec: Any, change: problems.Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = "kv8" if spec.name == "attention_kv8" else "kv4"
    q, cache = problems.problem(1, (3, 255, 256, 700), change, Hq=2, Hkv=1, scheme=scheme)
    logical: dict[str, Any] = {"q": q, "cache": cache, "softmax_scale": SCALE}
    if spec in ladder.SPECS:
        logical["q"] = q[:, 0].astype(np.float16)
    elif spec is SM90:
        logical["blocks"] = 1
    both = spec.allowed(logical)
    monkeypatch.setattr(bound, "_MANY", 1 << 30)
    for name, certain in spec.allowed(logical).items():
        assert (both[name].each <= certain.each).all()
        assert (both[name].each[:2] == certain.each[:2]).all(), "of few tokens it is certain"
        if certain.rms is not None:
            assert (both[name].rms <= certain.rms).all() and (both[name].rms > 0).all()


@pytest.mark.parametrize("roundings", [sm80.roundings_of, roundings_of], ids=["sm80", "sm90"])
@pytest.mark.parametrize("seen", [1, 255, 256])
def test_few_tokens_of_a_long_sequence_have_a_bound(roundings: Any, seen: int) -> None:
    """A window of less than what chance needs, in a cache so long that the certain bound is not computed for it."""
    L = 40_000
    tokens = quantize_kv(np.random.default_rng(0).standard_normal((L, 1, 8), dtype=np.float32))
    visible = np.arange(L)[None] >= L - seen
    of_8 = roundings(8, False)
    found = bound.allowed_error(
        np.ones((1, 1, 8)), tokens, tokens, visible, scale=0.3, roundings=of_8, stored=bound.HALF
    )
    assert all((each.each < 0.1).all() and (each.rms < 0.1).all() for each in found)
