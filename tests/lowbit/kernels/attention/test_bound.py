"""The bound of attention can fail: what is wrong in silence is refused at every length, what only rounds is not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.lowbit import reference
from ptxlab.lowbit.bench.attention import kvdata
from ptxlab.lowbit.bench.attention.problem import SCALE
from ptxlab.lowbit.bench.shapes import HEAD_DIM, PAGE
from ptxlab.lowbit.kernels.attention import bound, common, ladder, sm80, sm90
from ptxlab.lowbit.kernels.attention import exact as bit_exact
from ptxlab.lowbit.kernels.attention.roundings import HALF
from ptxlab.lowbit.kernels.attention.sm90 import PROMOTE, SM90, AttentionTileSm90, roundings_of
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.quant import quantize_kv
from ptxlab.lowbit.reference.tensor_cores import hopper_mma
from ptxlab.sources import sources_of_kernel
from ptxlab.spec.tolerance import Allowed, describe_mismatch
from tests.support import attention_faults as faults
from tests.support import attention_problems as problems
from tests.support import tensor_cores
from tests.support.attention_faults import every_data, misses_bound
from tests.support.attention_variants import AMPERE, HOPPER, Variant, parametrize_variants
from tests.support.tensor_cores import ampere_mma

LENGTHS = (300, 4096, 32768)
HEADS = (8, 1)  # the fewest heads in which a fault has to show


def allowed_of(of: faults.Problem) -> dict[str, Allowed]:
    return SM90.allowed({"q": of.q, "cache": of.cache, "softmax_scale": SCALE, "window": 0, "blocks": 1})


@pytest.mark.default_cases("300-spread", "300-one_sign", "4096-dominant")
@every_data
@pytest.mark.parametrize("length", LENGTHS)
def test_every_fault_is_refused_by_results_and_by_logarithms_alone(data: kvdata.Data, length: int) -> None:
    """A fault is refused even if the kernel's own error is half of what it may be.

    That error hides as much of the fault as it can.
    """
    of = faults.problem(data, HEADS, length)
    exact, rng = faults.Expected(of), np.random.default_rng(0)
    with_error = {
        name: Allowed(1.5 * allowed.per_element, 1.5 * allowed.rms)
        for name, allowed in allowed_of(of).items()
        if allowed.rms is not None
    }
    right = exact(of.unchanged_draws(1))
    assert not any(
        misses_bound(expected_array, expected_array, allowed).any()
        for expected_array, allowed in zip(right, with_error.values(), strict=True)
    )
    for fault in faults.FAULTS:
        expected = exact(of.replace_last_tokens()) if fault is faults.drop_last_token else right
        for got, expected_array, (name, allowed) in zip(
            exact(fault(of, rng)), expected, with_error.items(), strict=True
        ):
            is_refused = misses_bound(got, expected_array, allowed)
            assert is_refused.all(), f"{fault.__name__}: {is_refused.sum()} of {len(is_refused)} refused by {name}"


def results_of_truncating_mmas(q: np.ndarray, cache: KVCache, warps: int) -> dict[str, np.ndarray]:
    """Compute the kernel's results on an H200, whose MMAs truncate, with `warps` warps that take tiles in turns."""
    tile = AttentionTileSm90(64, warps, 4, 1)
    variant = Variant(HEAD_DIM, PAGE, 4, 0, T=1, ratio=q.shape[2] // cache.num_kv_heads, tile=tile)
    config = {**variant.config, "PROMOTE": 2 * PROMOTE}
    options: dict[str, Any] = {
        "softmax_scale": SCALE,
        "blocks": 1,
        "config": config,
        "arithmetic": bit_exact.TRUNCATING,
    }
    return dict(zip(("out", "lse"), bit_exact.attention(q, cache, **options), strict=True))


@pytest.mark.default_cases("1000-2-dominant")
@every_data
@pytest.mark.parametrize(("length", "warps"), [(300, 2), (1000, 2), (4096, 4)])
def test_what_only_rounds_is_accepted(data: kvdata.Data, length: int, warps: int) -> None:
    """A warp has more tokens than there are between two promotions."""
    for seed in range(max(1, 2048 // length)):
        of = faults.problem(data, HEADS, length, spare=1, seed=seed)
        right = dict(zip(("out", "lse"), common.attention(of.q, of.cache, SCALE), strict=True))
        assert describe_mismatch(results_of_truncating_mmas(of.q, of.cache, warps), right, allowed_of(of)) is None


@pytest.mark.default_cases("equal_scores", "nothing", "one_dominant_score")
@pytest.mark.parametrize("change", problems.CASES, ids=lambda change: change.__name__)
def test_hard_cases_that_only_round_are_accepted(change: problems.Change) -> None:
    """The scores are equal, where all tokens are rounded alike, or one is all.

    Queries and values have any size.
    """
    q, cache = problems.problem(0, (700,), change, Hq=4, Hkv=1, scheme="kv4")
    q = q.astype(np.float16)
    right = dict(zip(("out", "lse"), common.attention(q, cache, SCALE), strict=True))
    logical = {"q": q, "cache": cache, "softmax_scale": SCALE, "window": 0, "blocks": 1}
    assert describe_mismatch(results_of_truncating_mmas(q, cache, 1), right, SM90.allowed(logical)) is None


@pytest.mark.full
def test_zeros_are_no_attention_however_many_tokens_there_are() -> None:
    """Zeros stay outside the bound on Gaussian inputs, where the certain bound accepted them from some length on."""
    rng, D = np.random.default_rng(0), 128
    q = rng.standard_normal((1, 2, D))
    k, v = (quantize_kv(rng.standard_normal((32768, 1, D), np.float32)) for _ in range(2))
    seen = np.ones((1, 32768), bool)
    out, _ = bound.allowed_error(q, k, v, seen, scale=SCALE, roundings=roundings_of(D, False), stored=HALF)
    right = reference.attention(q, k.dequantize(), v.dequantize(), scale=SCALE)[0]
    assert describe_mismatch({"out": right}, {"out": right}, {"out": out}) is None
    assert describe_mismatch({"out": np.zeros_like(right)}, {"out": right}, {"out": out}) is not None


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
    monkeypatch.setattr(bound, "_LONG", 1 << 30)
    for name, certain in spec.allowed(logical).items():
        assert (both[name].per_element <= certain.per_element).all()
        assert (both[name].per_element[:2] == certain.per_element[:2]).all(), "of few tokens it is certain"
        if certain.rms is not None:
            assert (both[name].rms <= certain.rms).all() and (both[name].rms > 0).all()


@pytest.mark.parametrize("roundings", [sm80.roundings_of, roundings_of], ids=["sm80", "sm90"])
@pytest.mark.parametrize("seen", [1, 255, 256])
def test_few_tokens_of_a_long_sequence_have_a_bound(roundings: Any, seen: int) -> None:
    """The window has fewer tokens than chance needs.

    The cache is so long that the certain bound is not computed for it.
    """
    L = 40_000
    tokens = quantize_kv(np.random.default_rng(0).standard_normal((L, 1, 8), dtype=np.float32))
    visible = np.arange(L)[None] >= L - seen
    of_8 = roundings(8, False)
    bounds = bound.allowed_error(np.ones((1, 1, 8)), tokens, tokens, visible, scale=0.3, roundings=of_8, stored=HALF)
    assert all((error.per_element < 0.1).all() and (error.rms < 0.1).all() for error in bounds)


LENGTH = 131072


def launcher(of: faults.Problem) -> Callable[[faults.Draws], dict[str, Any]]:
    """Return a function that launches the kernel once for every table and length.

    It returns out f16 [draws, 1, 1, Hq, D] and lse f32 [draws, 1, 1, Hq].
    """
    Hkv, Hq = of.cache.num_kv_heads, of.q.shape[2]
    sizes: dict[str, Any] = {"B": 1, "T": 1, "Hq": Hq, "Hkv": Hkv, "D": HEAD_DIM, "P": of.cache.block_table.shape[1]}
    sizes |= {"pages": of.cache.pages, "page": PAGE, "bits": 4, "channel": 0, "window": 0, "softmax_scale": SCALE}
    sizes["blocks"] = sm90.blocks_for(sizes, gpu.device_info().sms)
    config = SM90.config_for(sizes)
    sizes |= config
    kernel = gpu.load(sources_of_kernel(SM90.name)[0], SM90.name, defines=config)
    geometry = SM90.launch(sizes)
    handed_over = {
        name: gpu.zeros(SM90.arg(name).resolve(sizes), str(SM90.arg(name).dtype)) for name in ("partial", "stats")
    }

    def launch(draws: faults.Draws) -> dict[str, Any]:
        tables, lengths = (gpu.to_device(np.ascontiguousarray(x, np.int32)) for x in draws)
        out = gpu.empty((len(tables), 1, 1, Hq, HEAD_DIM), np.float16)
        lse = gpu.empty((len(tables), 1, 1, Hq), np.float32)
        gpu.fill_bytes(out, 0xFF), gpu.fill_bytes(lse, 0xFF)
        for i in range(len(tables)):
            inputs = {"q": of.q, "pool": of.cache.pool, "table": tables[i : i + 1], "lengths": lengths[i : i + 1]}
            written = {"out": out[i], "lse": lse[i], **handed_over}
            gpu.prepare(kernel, SM90.arguments({**inputs, **written}, sizes), geometry)()
        return {"out": out, "lse": lse}

    return launch


@pytest.mark.long(40)
@pytest.mark.gpu
@pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="attention_kv4_sm90 runs on Hopper only")
@every_data
@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (8, 1)], ids=lambda heads: f"{heads[0]}-{heads[1]}")
def test_every_fault_is_refused_at_131072_tokens(
    data: kvdata.Data, heads: tuple[int, int], record_property: Callable[[str, object], None]
) -> None:
    """Wrong pages or lengths are refused by results and by logarithms alone, in 1,000 draws of each.

    Right launches are accepted.
    """
    host, rng = faults.problem(data, heads, LENGTH, spare=faults.DRAWS), np.random.default_rng(0)
    of = replace(host, q=gpu.to_device(host.q), cache=replace(host.cache, pool=gpu.to_device(host.cache.pool)))
    placed = {name: gpu.to_device(getattr(of.cache, name)) for name in ("block_table", "lengths")}
    logical = {"q": of.q, "cache": replace(of.cache, **placed), "softmax_scale": SCALE, "window": 0, "blocks": 1}
    allowed = {name: error for name, error in SM90.allowed(logical).items() if name in ("out", "lse")}
    exact, launch = faults.Expected(of), launcher(of)

    def results_for(draws: faults.Draws) -> dict[str, Any]:
        return dict(zip(allowed, exact(draws), strict=True))

    right, other_results = results_for(of.unchanged_draws(1)), results_for(of.replace_last_tokens())
    for draws, expected in ((of.unchanged_draws(3), right), (of.replace_last_tokens(), other_results)):
        actual = launch(draws)
        problem = describe_mismatch(actual, expected, allowed)
        assert problem is None, problem
    for name, error in allowed.items():
        off = np.abs(actual[name] - other_results[name])
        rms = np.sqrt((off**2).mean(axis=-1))
        size = float(np.sqrt((other_results[name] ** 2).mean()))
        measured = {
            "max": float(off.max()),
            "rms": float(rms.max()),
            "of allowed": float((off / error.per_element).max()),
            "rms of allowed": float((rms / error.rms).max()),
        }
        for figure, number in measured.items():
            record_property(f"{name} {figure}", number)
        shown = ", ".join(f"{figure} {number:.2e}" for figure, number in measured.items())
        print(f"\n{data.__name__} {heads[0]}/{heads[1]} {name} (RMS {size:.2e}): error {shown}")
    for fault in faults.FAULTS:
        expected, actual = other_results if fault is faults.drop_last_token else right, launch(fault(of, rng))
        for name in allowed:
            by_name = misses_bound(actual[name], expected[name], allowed[name])
            assert bool(by_name.all()), f"{fault.__name__}: {int(by_name.sum())} of {len(by_name)} refused by {name}"


@pytest.mark.full
def test_an_h200_cuts_off_as_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heaviest token's value is 0, with a zero point of 2: of the others' part of the sum 2⁻¹⁵ is the last bit.

    This very number came out on an H200. Sums that are rounded only once are far nearer.
    """
    tensor_cores.patch_emulator(hopper_mma, monkeypatch)
    variant, at = HOPPER[3], (0, 6, 3, 25)
    logical, arrays = variant.problem(1, (5,), problems.one_dominant_score, Hkv=3)
    out = variant.check(logical, arrays)["out"]
    assert out[at] == np.float16(2.2470951080322266e-05)
    assert SM90.reference is not None
    assert abs(float(out[at]) - SM90.reference(**logical)[0][at]) > 1e-6


# Where products differ most in size, and subnormal ones meet ordinary ones; and nothing of the kind.
CHANGES = (problems.nothing, problems.queries_below_fp16, problems.large_and_small_values)


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@parametrize_variants(*AMPERE, *HOPPER)
def test_tensor_cores_stay_within_the_bound(
    variant: Variant, change: problems.Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few tokens of several heads, and tiles of one head, in turns: each with every variant and every change."""
    tensor_cores.patch_emulator(hopper_mma if variant.tile else ampere_mma, monkeypatch)
    turn = ((*AMPERE, *HOPPER).index(variant) + CHANGES.index(change)) % 2
    lengths, Hkv = (((5,), 3), ((75, 0, 1), 1))[turn]
    variant.check(*variant.problem(1, lengths, change, Hkv))
