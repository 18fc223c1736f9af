"""Channels in Atom's and COMET's order to INT4 and INT8, alone, behind RMSNorm and a gate: every bit, and the calls."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxlab
from ptxlab import emulator, gpu, registry
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.lowbit import layout, quant, reference
from ptxlab.lowbit.kernels.gemm.w4ax import gemm_blocks
from ptxlab.lowbit.kernels.quantize.atom import (
    COMET,
    ORDERS,
    REORDER,
    RMSNORM_REORDER,
    RULES,
    SILU_MUL_REORDER,
    reorder_reference,
)
from ptxlab.lowbit.kernels.quantize.gated import compute_gate
from ptxlab.lowbit.kernels.quantize.rmsnorm import normalize_rows
from ptxlab.lowbit.layout import AtomActivations, BlockActivations
from ptxlab.runtime import Kernel, by_name, run_spec
from ptxlab.runtime.verify import Job, verify
from ptxlab.spec.dtypes import convert_to_dtype
from tests.support import chains, sync_mutants
from tests.support.axes import on_every_backend
from tests.support.fake_gpu import DeviceArray, FakeGpu
from tests.support.strategies import floats

DTYPES = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype("float32")}
EPS = 1e-5
PLACE = quant.channel_places(np.arange(256)[::-1])
RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: str = "float16") -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def have_equal_bits(actual: AtomActivations, rows: quant.AtomRows) -> bool:
    """Tell whether every bit is equal, those of the padding included."""
    expected = layout.pack_atom_activations(rows, actual.layout).arrays
    return all(
        np.array_equal(array.view(np.uint8), expected[name].view(np.uint8)) for name, array in actual.arrays.items()
    )


@st.composite
def orders(draw: st.DrawFn, blocks: int) -> dict[str, Any]:
    """Draw channels of whole groups, their places, and the options of the call by name."""
    group, outliers = draw(st.sampled_from(quant.ATOM_GROUPS)), draw(st.sampled_from(quant.ATOM_OUTLIERS))
    channels = group * draw(st.integers(1, blocks * 128 // group)) + outliers
    order = np.random.default_rng(draw(st.integers(0, 99))).permutation(channels)
    return {
        "place": quant.channel_places(order if draw(st.booleans()) else np.arange(channels)),
        "group": group,
        "outliers": outliers,
        "layout": draw(st.sampled_from(ORDERS)),
        "clip": draw(st.sampled_from((1.0, 0.9, 0.01))),
        "rules": draw(st.sampled_from(RULES)),
    }


@st.composite
def problems(draw: st.DrawFn, blocks: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Draw rows of any magnitude whose scales FP16 can hold."""
    options = draw(orders(blocks))
    dtype = DTYPES[draw(st.sampled_from(names))]
    x = draw(floats(dtype, (draw(st.integers(1, 4)), len(options["place"]))))
    tame = np.ldexp(np.frexp(wide(x))[0], draw(st.integers(-30, 10))).astype(dtype)
    return {"x": np.where(np.abs(wide(x)) < 2.0**15, x, tame) if draw(st.booleans()) else tame, **options}


def rows_of(y: np.ndarray, place: np.ndarray, *, outliers: int, group: int, clip: float, rules: Any, **_: Any) -> Any:
    return quant.quantize_atom_activations(y[:, np.argsort(place)], group, outliers, clip=clip, rules=rules)


def check(backend: str, x: np.ndarray, place: np.ndarray, **how: Any) -> None:
    assert have_equal_bits(ptxlab.reorder_quantize(x, place, backend=backend, **how), rows_of(wide(x), place, **how))


@pytest.mark.full
@given(problem=problems(4, tuple(DTYPES)))
@settings(max_examples=25)
def test_every_bit(problem: dict[str, Any]) -> None:
    check("emulator", **problem)


@pytest.mark.long(20)
@pytest.mark.gpu
@given(problem=problems(60, tuple(DTYPES)))
@settings(max_examples=200)
def test_every_bit_on_the_gpu(problem: dict[str, Any]) -> None:
    check("gpu", **problem)


def check_norm(backend: str, x: np.ndarray, residual: np.ndarray | None, place: np.ndarray, **how: Any) -> None:
    """Assert that y has the bits of `normalize_rows`, in any order, and so have the integers made of it."""
    gamma = np.random.default_rng(1).uniform(-2, 2, x.shape[1]).astype(x.dtype)
    written, new_residual = np.empty_like(x), None if residual is None else residual.copy()
    arguments = {"residual": new_residual, "normed": written, "eps": EPS, "backend": backend}
    activations = ptxlab.rmsnorm_reorder_quantize(x, gamma, place, **arguments, **how)
    v = x if residual is None else (wide(x) + wide(residual)).astype(x.dtype)
    assert new_residual is None or np.array_equal(new_residual.view(np.uint16), v.view(np.uint16))
    y = normalize_rows(wide(v), wide(gamma), EPS)
    assert np.array_equal(written.view(np.uint16), y.astype(x.dtype).view(np.uint16))
    assert have_equal_bits(activations, rows_of(y, place, **how))


@pytest.mark.full
@given(problem=problems(4, ("float16", "bfloat16")), added=st.booleans())
@settings(max_examples=15)
def test_every_bit_of_a_normed_row(problem: dict[str, Any], added: bool) -> None:
    problem["residual"] = normal(*problem["x"].shape).astype(problem["x"].dtype) if added else None
    check_norm("emulator", **problem)


@pytest.mark.default_cases("0-emulator")
@on_every_backend
@pytest.mark.parametrize("pairs", [0, 1])
def test_run_by_name_sizes_say_what_is_written(pairs: int, backend: str) -> None:
    sizes = {"M": 2, "K": 128, "outliers": 128, "g": 128, "pairs": pairs, "code": 0, "clip": 0.9}
    logical = REORDER.example(RNG, **sizes)
    inputs = {"x": logical["x"].astype(np.float16), "place": logical["place"]}
    out = by_name.run("reorder_quantize", backend=backend, **inputs, **sizes).outputs
    assert out["x_q"].dtype == (np.uint8 if pairs else np.int8)
    ptxlab.runtime.verify.compare(REORDER, out, logical, REORDER.config_for(sizes))
    wrong = {"x_q": out["x_q"].view(np.int8 if pairs else np.uint8)}
    with pytest.raises(ArgumentError, match="reorder_quantize: x_q: dtype "):
        by_name.run("reorder_quantize", backend=backend, out=wrong, **inputs, **sizes)


@pytest.mark.default_cases("bytes-gelu_tanh-emulator")
@on_every_backend
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("order", ORDERS)
def test_an_open_gate_is_exact(order: str, activation: str, backend: str) -> None:
    """The sum 1 + exp(-20) is 1: the product remains, of which every bit is known."""
    gate, up = (20 + np.abs(wide(normal(3, 512)))).astype(np.float16), normal(3, 512)
    place = quant.channel_places(RNG.permutation(512))
    options: dict[str, Any] = {"outliers": 64, "group": 64, "layout": order, "clip": 0.9, "rules": quant.ATOM_PAPER}
    both = np.concatenate([gate, up], axis=1)
    activations = ptxlab.silu_mul_reorder_quantize(both, place, activation=activation, backend=backend, **options)
    assert have_equal_bits(activations, rows_of(wide(gate) * wide(up), place, **options))


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("code", [0, 1])
def test_gates_are_near_and_both_orders_agree(code: int, backend: str) -> None:
    """The gates have all sizes, nearly shut ones included; packed, the same integers are two a byte."""
    gate_up = (wide(normal(6, 1280)) * np.geomspace(0.01, 40, 6, dtype=np.float32)[:, None]).astype(np.float16)
    logical = {"gate_up": wide(gate_up), "place": quant.channel_places(RNG.permutation(640)), "activation": code}
    options = {"outliers": 128, "g": 128, "code": code, "clip": 0.9}
    outputs = {}
    for pairs in (0, 1):
        sizes = {"M": 6, "K": 512, "pairs": pairs, "activation": code, **options}
        config = SILU_MUL_REORDER.config_for(sizes)
        inputs = {"gate_up": gate_up, "place": logical["place"]}
        (source,) = registry.find(SILU_MUL_REORDER.name)[1]
        outcome = run_spec(SILU_MUL_REORDER, source, inputs, sizes=sizes, backend=backend, config=config)
        ptxlab.runtime.verify.compare(SILU_MUL_REORDER, outcome.outputs, {**logical, **options, "pairs": pairs}, config)
        outputs[pairs] = outcome.outputs
    assert np.array_equal(layout.unpack_pairs(outputs[1]["x_q"]), outputs[0]["x_q"][:, :512])
    assert np.array_equal(outputs[1]["x8"], outputs[0]["x_q"][:, 512:])
    assert np.array_equal(outputs[1]["x_scale"], outputs[0]["x_scale"])


def test_a_gate_may_be_off_only_near_ties() -> None:
    """This tests the bound itself.

    Hardly any integer may differ, none by more than a step, and no scale but by its last bit.
    """
    sizes = {"M": 8, "K": 3968, "outliers": 128, "g": 128, "pairs": 0, "code": 0, "clip": 0.9, "activation": 0}
    logical = SILU_MUL_REORDER.example(np.random.default_rng(0), **sizes)
    allowed = SILU_MUL_REORDER.allowed(logical)
    integers, scales = allowed["x_q"].per_element, allowed["x_scale"].per_element
    assert integers.min() == 0 and integers.max() <= 2 and (integers > 0).mean() < 1e-2
    scale = SILU_MUL_REORDER.expected(logical)["x_scale"].astype(np.float64)
    assert (scales <= 2.0**-10 * scale).all() and (scales > 0).mean() < 0.05


@pytest.mark.parametrize("code", [0, 1, COMET])
def test_a_gate_may_be_off_wherever_its_error_changes_an_integer(code: int) -> None:
    """Gates near every tie of their group are moved by their error to either side.

    An integer that changes is in the bound.
    """
    rng, groups, clip = np.random.default_rng(code), 256, 1.0 if code == COMET else 0.9
    steps = RULES[min(code, 1)].steps(4)
    pairs = rng.uniform(0.5, 3, (1 << 20, 2)).astype(np.float16)
    sizes = compute_gate(wide(pairs), 0, 0)[0][:, 0]
    ascending = np.argsort(sizes)
    largest = ascending[rng.integers(len(ascending) // 2, len(ascending), groups)]
    scale = sizes[largest, None] * clip / steps  # by which the second rules do not divide once it is rounded
    ties = (np.arange(7) + 0.5) * (scale if code == 1 else scale.astype(np.float16).astype(np.float64))
    near = ascending[np.searchsorted(sizes, ties, sorter=ascending).clip(0, len(ascending) - 1)]
    row = np.zeros((groups, 128), np.intp)
    row[:, 0], row[:, 1:8], row[:, 8:] = largest, near, ascending[0]
    gate_up = wide(np.moveaxis(pairs[row], -1, 1).reshape(groups, 256))
    options = {"place": np.arange(128, dtype=np.int16), "outliers": 0, "g": 128, "pairs": 1, "code": code, "clip": clip}
    logical = {"gate_up": gate_up, "activation": 0, **options}
    right, allowed = SILU_MUL_REORDER.expected(logical), SILU_MUL_REORDER.allowed(logical)
    h, relative = compute_gate(gate_up, 0, 0)
    changed = 0
    for _ in range(4):
        moved = h * (1 + relative * rng.choice((-1, 1), h.shape))
        for name, got in zip(
            ("x_q", "x8", "x_scale"), reorder_reference(moved.astype(np.float32), **options, IN=2), strict=True
        ):
            differs = got != right[name]
            assert not (differs & (allowed[name].per_element == 0)).any(), name
            changed += int(differs.sum())
    assert changed > 20


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("channels", [128, 4096, 8192, 8320, 16384, 32768])
def test_rows_of_any_width(channels: int, backend: str) -> None:
    """A row takes a block of one warp up to one of 16, or clusters of two and of four.

    Channels go from any block to any other.
    """
    options: dict[str, Any] = {"outliers": 0 if channels == 128 else 128, "group": 128, "clip": 0.9}
    place = quant.channel_places(np.random.default_rng(0).permutation(channels))
    x = normal(2, channels)
    for order, rules in zip(ORDERS, RULES, strict=True):
        check(backend, x, place, layout=order, rules=rules, **options)
    check_norm(backend, x, normal(2, channels), place, layout="bytes", rules=quant.ATOM_PAPER, **options)


def test_by_hand() -> None:
    """Channel 0 is the outlier block's first; a group's scale is max / 7.5, clipped values end at 7 and -8."""
    x = np.zeros((1, 256), np.float32)
    x[0, :4] = 1000, 7.5, -7.5, 3.0
    place = np.r_[128, np.arange(0, 127), np.arange(129, 256), 127].astype(np.int16)
    activations = ptxlab.reorder_quantize(x, place, clip=1, backend="emulator")
    assert activations.x[0, 128] == 127 and activations.scale[0, 1] == np.float16(1000 / 127.5)
    assert (
        activations.scale[0, 0] == 1
        and activations.x[0, :3].tolist() == [7, -8, 3]
        and (activations.scale[0, 2:] == 1).all()
    )


@on_every_backend
@pytest.mark.parametrize(("rules", "ties"), [*zip(RULES, ([0, 2, 2, 0, 0], [1, 2, 3, -1, 0]), strict=True)])
def test_ties(rules: quant.AtomRules, ties: list[int], backend: str) -> None:
    """A scale of 1 makes ties: the paper's rules round them to even, the code's away from zero.

    A value below a tie goes to zero.
    """
    x = np.zeros((1, 128), np.float32)
    x[0, :6] = 0.5, 1.5, 2.5, -0.5, np.nextafter(np.float32(0.5), np.float32(0)), rules.steps(4)
    options: dict[str, Any] = {"outliers": 0, "clip": 1, "rules": rules, "backend": backend}
    activations = ptxlab.reorder_quantize(x, np.arange(128, dtype=np.int16), **options)
    assert activations.x[0, :6].tolist() == [*ties, 7] and activations.scale[0, 0] == 1


def test_places_that_there_are_not_write_nowhere() -> None:
    """The GPU checks no place; in the emulator a store outside is an error."""
    place = np.arange(256, dtype=np.int16)
    place[:3] = -1, 256, 32767
    sizes = {"K": 192, "outliers": 64, "g": 64, "pairs": 0, "code": 0, "clip": 1.0}
    outputs = ptxlab.run("reorder_quantize", x=X, place=place, unchecked=True, backend="emulator", **sizes).outputs
    assert (outputs["x_q"][:, 64:192] == 7).all() and (outputs["x_q"][:, 192:] == 127).all()


@on_every_backend
def test_groups_that_no_host_lets_through(backend: str) -> None:
    """A NaN, or a value too large for a scale, shows in the scale of its own group; zeros have scale 1."""
    x = np.ones((5, 384), np.float32)
    x[0, 3], x[1, 140], x[2, 300], x[3, 2], x[4] = np.nan, np.inf, -np.inf, 1e6, 0
    sizes = {"M": 5, "K": 256, "outliers": 128, "g": 128, "pairs": 0, "code": 0, "clip": 1.0}
    config = {**REORDER.config_for(sizes), "IN": 2}
    inputs = {"x": x, "place": np.arange(384, dtype=np.int16)}
    source = registry.find(REORDER.name)[1][0]
    outputs = run_spec(REORDER, source, inputs, sizes=sizes, backend=backend, config=config).outputs
    bad = ~np.isfinite(outputs["x_scale"][:, :3])
    assert bad.tolist() == [[i == 0, i == 1, i == 2] if i < 3 else [i == 3, False, False] for i in range(5)]
    assert (outputs["x_scale"][4] == 1).all() and not outputs["x_q"][4].any()
    with pytest.raises(ArgumentError, match=r"group's largest magnitude over 7.5 must be an FP16 number .*1e\+06 in"):
        ptxlab.reorder_quantize(x[3:4], inputs["place"], clip=1, backend="emulator")


@pytest.mark.parametrize("random", [False, True])
def test_the_way_through_shared_memory_has_few_conflicts(random: bool) -> None:
    """There are none while channels stay in order.

    Otherwise there are about as many as 32 random banks have (3.5 passes).
    """
    order = np.random.default_rng(0).permutation(4096) if random else np.arange(4096)
    sizes = {"M": 1, "K": 3968, "outliers": 128, "g": 128, "pairs": 0, "code": 0, "clip": 0.9}
    inputs = {"x": normal(1, 4096), "place": quant.channel_places(order)}
    source = registry.find(REORDER.name)[1][0]
    outcome = run_spec(REORDER, source, inputs, sizes=sizes, backend="emulator", count_banks=True)
    for access in outcome.shared:
        passes = access.wavefronts / access.requests
        assert passes == 1 if not random or access.text.startswith("ld") else 2.5 < passes < 4.5, access.text


@pytest.mark.full
def test_what_follows_is_the_product() -> None:
    """Norm, order and GEMM are as near to the float product as Atom's INT4 is."""
    x, gamma, w = normal(4, 512), normal(512), wide(normal(64, 512))
    x[:, 5] *= 30
    y = reference.rms_norm(wide(x), wide(gamma), EPS)
    order = quant.outlier_order(quant.channel_sizes(y.astype(np.float32)), 64)
    rows = quant.quantize_atom_weight(w[:, order], 64, 64)
    for name, layout_of_x in layout.ATOM_ORDERS.items():
        tokens = ptxlab.rmsnorm_reorder_quantize(
            x, gamma, quant.channel_places(order), outliers=64, group=64, layout=layout_of_x, backend="emulator"
        )
        product = ptxlab.gemm_w4a4(tokens, ptxlab.pack_atom(rows, name), out_dtype="float32", backend="emulator")
        right = y @ w.T
        assert np.linalg.norm(product - right) < 0.15 * np.linalg.norm(right)


# --- COMET's blocks --------------------------------------------------------------------------------------------------


def have_equal_block_bits(actual: BlockActivations, y: np.ndarray, place: np.ndarray, int8: int) -> bool:
    """Tell whether every bit is that of the quantiser on the host, those of the padding included."""
    expected = layout.pack_block_activations(quant.quantize_blocks(y[:, np.argsort(place)], int8), actual.layout)
    assert (actual.M, actual.K4, actual.K8) == (expected.M, expected.K4, expected.K8)
    return actual.arrays.keys() == expected.arrays.keys() and all(
        np.array_equal(array.view(np.uint8), expected.arrays[name].view(np.uint8))
        for name, array in actual.arrays.items()
    )


@st.composite
def block_problems(draw: st.DrawFn, most_blocks: int, names: tuple[str, ...]) -> dict[str, Any]:
    blocks = draw(st.integers(1, most_blocks))
    order = np.random.default_rng(draw(st.integers(0, 99))).permutation(blocks * 128)
    x = draw(floats(dtype := DTYPES[draw(st.sampled_from(names))], (draw(st.integers(1, 4)), blocks * 128)))
    tame = np.ldexp(np.frexp(wide(x))[0], draw(st.integers(-30, 10))).astype(dtype)  # whose scales FP16 has
    return {
        "x": tame,
        "place": quant.channel_places(order if draw(st.booleans()) else np.arange(blocks * 128)),
        "int8": draw(st.integers(0, blocks)),
        "layout": draw(st.sampled_from([*layout.BLOCK_ORDERS.values()])),
    }


def check_blocks(backend: str, x: np.ndarray, place: np.ndarray, int8: int, layout: str) -> None:
    activations = ptxlab.reorder_quantize(x, place, int8=int8, layout=layout, backend=backend)
    assert have_equal_block_bits(activations, wide(x), place, int8)


@pytest.mark.full
@given(problem=block_problems(4, tuple(DTYPES)))
@settings(max_examples=20)
def test_every_bit_of_blocks(problem: dict[str, Any]) -> None:
    check_blocks("emulator", **problem)


@pytest.mark.gpu
@given(problem=block_problems(64, tuple(DTYPES)))
@settings(max_examples=200)
def test_every_bit_of_blocks_on_the_gpu(problem: dict[str, Any]) -> None:
    check_blocks("gpu", **problem)


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize(
    ("blocks", "int8", "order"), [(1, 0, "pairs"), (1, 1, "joined"), (9, 4, "pairs"), (86, 17, "joined")]
)
def test_normed_and_gated_blocks(blocks: int, int8: int, order: str, backend: str) -> None:
    """A row takes a warp, a block or a cluster, with scales in whole eights and beyond.

    Of a gate wide open every bit is known.
    """
    place = quant.channel_places(np.random.default_rng(0).permutation(blocks * 128))
    x, gamma = normal(2, blocks * 128), normal(blocks * 128)
    options: dict[str, Any] = {"int8": int8, "layout": order, "backend": backend}
    activations = ptxlab.rmsnorm_reorder_quantize(x, gamma, place, eps=EPS, **options)
    assert have_equal_block_bits(activations, normalize_rows(wide(x), wide(gamma), EPS), place, int8)
    gate = (20 + np.abs(wide(x))).astype(np.float16)
    up = normal(*x.shape)
    activations = ptxlab.silu_mul_reorder_quantize(np.concatenate([gate, up], axis=1), place, **options)
    assert have_equal_block_bits(activations, wide(gate) * wide(up), place, int8)


@on_every_backend
def test_a_block_by_hand(backend: str) -> None:
    """Scales are max / 7 and max / 127; of a pair the second is high; ties go to even; every INT8 block has a scale."""
    x = np.zeros((1, 384), np.float32)
    x[0, [0, 1, 2, 3]], x[0, [128, 129]], x[0, 256] = (7, -2.5, 3.5, 1), (127, -1), 12.7
    activations = ptxlab.reorder_quantize(x, np.arange(384, dtype=np.int16), int8=2, backend=backend)
    assert activations.x[0, :2].tolist() == [0xE7, 0x14] and activations.x.shape == (1, 64 + 256)
    assert activations.x[0, 64:66].tolist() == [127, 255] and activations.x[0, 192] == 127
    assert activations.scale[0].tolist() == [1, 1, np.float16(0.1), 1, 1, 1, 1, 1]


@pytest.mark.full
@on_every_backend
def test_two_launches_from_floats_to_comets_product(backend: str) -> None:
    """The integers have the bits of the host's quantiser, and the product is near the float product."""
    x, w = normal(5, 384), wide(normal(64, 384))
    x[:, ::97] *= 30
    order = quant.outlier_order(quant.channel_sizes(wide(x), "max"), 128)
    rows = quant.quantize_block_weight(w[:, order])
    for weights, activations in layout.BLOCK_ORDERS.items():
        tokens = ptxlab.reorder_quantize(x, quant.channel_places(order), int8=1, layout=activations, backend=backend)
        weight = ptxlab.pack_block_weight(rows, 1, weights)
        y = ptxlab.gemm_w4ax(tokens, weight, out_dtype="float32", backend=backend)
        assert np.array_equal(y, gemm_blocks(rows, quant.quantize_blocks(wide(x)[:, order], 1)))
        right = wide(x) @ w.T
        assert np.linalg.norm(y - right) < 0.2 * np.linalg.norm(right)


@pytest.mark.full
def test_blocks_into_given_arrays_and_of_no_tokens() -> None:
    x, place = normal(3, 256), PLACE
    out = ptxlab.reorder_quantize(np.ones_like(x), place, int8=1, backend="emulator")
    assert ptxlab.reorder_quantize(x, place, int8=1, out=out, backend="emulator") is out
    assert have_equal_block_bits(out, wide(x), place, 1)
    empty = ptxlab.reorder_quantize(x[:0], place, int8=1, backend="emulator")
    assert (empty.M, empty.K4, empty.K8, empty.layout) == (0, 128, 128, "joined")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"int8": 3}, "reorder_quantize: int8: must be 0..2 blocks (got 3)"),
        ({"int8": -1}, "reorder_quantize: int8: must be 0..2 blocks (got -1)"),
        ({"int8": True}, "reorder_quantize: int8: must be 0..2 blocks (got True)"),
        ({"int8": "1"}, "reorder_quantize: int8: must be 0..2 blocks (got 1)"),
        ({"outliers": 64}, "reorder_quantize: outliers: must be left out with int8: it is Atom's (got 64)"),
        ({"group": 64}, "reorder_quantize: group: must be left out with int8: it is Atom's (got 64)"),
        ({"clip": 1}, "reorder_quantize: clip: must be left out with int8: it is Atom's (got 1)"),
        ({"layout": "bytes"}, "reorder_quantize: layout: must be one of joined, pairs with int8 (got bytes)"),
        ({"x": np.ones((2, 192), np.float16)}, "channels: must be a positive multiple of 128 (got 192)"),
        ({"x": np.full((2, 256), 1e6, np.float32)}, "magnitude over 7 must be an FP16 number (got 1e+06 in row 0"),
        ({"out": np.ones(3)}, "reorder_quantize: out: must be BlockActivations (got ndarray)"),
    ],
)
def test_bad_input_to_blocks_is_refused(change: dict[str, Any], message: str) -> None:
    x = np.ones((2, 256), np.float16)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        ptxlab.reorder_quantize(**{"x": x, "place": PLACE, "int8": 1, "backend": "emulator", **change})


def test_results_of_the_other_kind_are_refused() -> None:
    options: dict[str, Any] = {"backend": "emulator"}
    x = np.ones((2, 256), np.float16)
    blocks, atoms = ptxlab.reorder_quantize(x, PLACE, int8=1, **options), ptxlab.reorder_quantize(x, PLACE, **options)
    with pytest.raises(ArgumentError, match=r"out: must be AtomActivations \(got BlockActivations\)"):
        ptxlab.reorder_quantize(x, PLACE, out=blocks, **options)
    with pytest.raises(ArgumentError, match=r"out: must be BlockActivations \(got AtomActivations\)"):
        ptxlab.reorder_quantize(x, PLACE, int8=1, out=atoms, **options)
    with pytest.raises(ArgumentError, match=r"out: must have M=2, K4=0, K8=256, layout=joined \(got M=2, K4=128, "):
        ptxlab.reorder_quantize(x, PLACE, int8=2, out=blocks, **options)


def test_blocks_on_device_arrays(fake: FakeGpu) -> None:
    x, place = DeviceArray(normal(3, 256)), DeviceArray(PLACE)
    activations = ptxlab.reorder_quantize(x, place, int8=1, programmatic=True)
    arrays = {name: array.host for name, array in activations.arrays.items()}
    assert (
        have_equal_block_bits(replace(activations, **arrays), wide(x.host), PLACE, 1)
        and fake.geometries[0].programmatic
    )
    loads, allocations = fake.loads, fake.allocations
    fake.capturing = True
    assert ptxlab.reorder_quantize(x, place, int8=1, out=activations, programmatic=True) is activations
    assert (fake.loads, fake.allocations) == (loads, allocations)


@pytest.mark.full
@pytest.mark.parametrize("spec", [REORDER, RMSNORM_REORDER, SILU_MUL_REORDER], ids=lambda spec: spec.name)
def test_blocks_of_a_row_do_not_depend_on_the_batch(spec: Any) -> None:
    sizes = next(sizes for sizes in spec.example_sizes if sizes["code"] == COMET)
    (source,) = registry.find(spec.name)[1]
    verdict = ptxlab.runtime.verify.check_rows(Job(spec, source, "emulator", {**sizes, "M": 4}))
    assert verdict.passed, verdict.detail


# --- the calls -------------------------------------------------------------------------------------------------------

HOW: dict[str, Any] = {"outliers": 64, "group": 64}
GAMMA = np.ones(256, np.float16)


@pytest.mark.full
def test_into_given_arrays_and_of_no_tokens() -> None:
    x, gate_up = normal(3, 256), normal(3, 512)
    for order in ORDERS:
        options: dict[str, Any] = {**HOW, "layout": order, "backend": "emulator"}
        out = ptxlab.reorder_quantize(np.ones_like(x), PLACE, **options)
        for call, given_ in (
            (ptxlab.reorder_quantize, (x, PLACE)),
            (ptxlab.rmsnorm_reorder_quantize, (x, GAMMA, PLACE)),
            (ptxlab.silu_mul_reorder_quantize, (gate_up, PLACE)),
        ):
            new = call(*given_, **options)
            assert call(*given_, out=out, **options) is out
            assert all(np.array_equal(array, getattr(out, name)) for name, array in new.arrays.items())
            empty = call(given_[0][:0], *given_[1:], **options)
            assert (empty.M, empty.K, empty.layout) == (0, 192, order)


@pytest.mark.full
def test_torch_keeps_its_kind_and_its_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(wide(normal(3, 256))).bfloat16()
    activations = ptxlab.reorder_quantize(x, torch.from_numpy(PLACE), layout="pairs", backend="emulator", **HOW)
    assert activations.x.dtype == torch.uint8 and activations.scale.dtype == torch.float16
    rows = rows_of(x.float().numpy(), PLACE, **HOW, clip=0.9, rules=quant.ATOM_PAPER)
    arrays = {name: array.numpy() for name, array in activations.arrays.items()}
    assert have_equal_bits(replace(activations, **arrays), rows)


X, NAN, TWICE = np.ones((2, 256), np.float16), np.ones((2, 256), np.float16), PLACE.copy()
NAN[1, 7], TWICE[9] = np.nan, 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[0]}, "reorder_quantize: x: must be a matrix [M, K] (got shape (256,))"),
        ({"x": X.astype(np.float64)}, "reorder_quantize: x: dtype float16 or bfloat16 or float32 (got float64)"),
        ({"x": NAN}, "x: must be finite in float32 (got x[1, 7] is nan)"),
        ({"place": PLACE[:128]}, "reorder_quantize: place: shape [256] (got [128])"),
        ({"place": PLACE.astype(np.int32)}, "reorder_quantize: place: dtype int16 (got int32)"),
        ({"place": None}, "reorder_quantize: place: an array [256] of int16 (got NoneType)"),
        ({"place": TWICE}, "reorder_quantize: place: must be a permutation of 0..255 (got no 246)"),
        ({"outliers": 32}, "reorder_quantize: outliers: must be one of 0, 64, 128 (got 32)"),
        ({"x": X[:, :64], "outliers": 64}, "reorder_quantize: outliers: must leave INT4 channels of 64 (got 64)"),
        ({"group": 32}, "group: must be one of 64, 128 (got 32)"),
        ({"group": 128}, "K: must be a positive multiple of the group 128 (got 192)"),
        ({"layout": "tiles"}, "reorder_quantize: layout: must be one of bytes, pairs (got tiles)"),
        ({"clip": 0}, "reorder_quantize: clip: a number in 0.001..1 (got 0)"),
        ({"clip": "much"}, "reorder_quantize: clip: a number in 0.001..1 (got 'much')"),
        ({"rules": replace(quant.ATOM_CODE, rows=4)}, "rules: must be quant.ATOM_PAPER or quant.ATOM_CODE (got Atom"),
        ({"out": X}, "reorder_quantize: out: must be AtomActivations (got ndarray)"),
        ({"programmatic": 1}, "reorder_quantize: programmatic: must be True or False (got 1)"),
        ({"backend": "cpu"}, "backend: one of gpu, emulator (got cpu)"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        ptxlab.reorder_quantize(**{"x": X, "place": PLACE, "backend": "emulator", **HOW, **change})


def test_the_others_refuse_what_they_share() -> None:
    options: dict[str, Any] = {**HOW, "backend": "emulator"}
    wide_row = np.ones((1, 32832), np.float16)
    with pytest.raises(ArgumentError, match=r"ceil_div\(K, 128\)\*128 \+ ceil_div\(outliers, 128\)\*128 <= 32768"):
        ptxlab.reorder_quantize(wide_row, np.zeros(32832, np.int16), **options)
    with pytest.raises(ArgumentError, match=r"rmsnorm_reorder_quantize: residual: must not share memory with x"):
        ptxlab.rmsnorm_reorder_quantize(X, GAMMA, PLACE, residual=X, **options)
    with pytest.raises(ArgumentError, match=r"rmsnorm_reorder_quantize: eps: a number in 1e-30..1 \(got 0\)"):
        ptxlab.rmsnorm_reorder_quantize(X, GAMMA, PLACE, eps=0, **options)
    with pytest.raises(ArgumentError, match=r"silu_mul_reorder_quantize: activation: must be one of silu, gelu_tanh"):
        ptxlab.silu_mul_reorder_quantize(np.ones((2, 512), np.float16), PLACE, activation="relu", **options)
    out = ptxlab.reorder_quantize(X, PLACE, **options)
    with pytest.raises(ArgumentError, match=r"out: must have M=1, K=192, .*layout=bytes \(got M=2, K=192, "):
        ptxlab.silu_mul_reorder_quantize(np.ones((1, 512), np.float16), PLACE, out=out, **options)
    with pytest.raises(ArgumentError, match=r"reorder_quantize: place: must be a permutation of 0..255 \(got no 246\)"):
        ptxlab.run("reorder_quantize", x=X, place=TWICE, K=192, outliers=64, g=64, pairs=0, code=0, clip=1.0,
                   backend="emulator")  # fmt: skip
    with pytest.raises(ArgumentError, match=r"order: must be a permutation of 0..K-1, K up to 32768"):
        quant.channel_places(np.array([0, 2]))


def test_device_arrays(fake: FakeGpu) -> None:
    x, place = DeviceArray(normal(3, 256)), DeviceArray(PLACE)
    activations = ptxlab.reorder_quantize(x, place, programmatic=True, **HOW)
    arrays = {name: array.host for name, array in activations.arrays.items()}
    assert have_equal_bits(
        replace(activations, **arrays), rows_of(wide(x.host), PLACE, **HOW, clip=0.9, rules=quant.ATOM_PAPER)
    )
    assert fake.geometries[0].programmatic
    loads, allocations = fake.loads, fake.allocations
    fake.capturing = True
    assert ptxlab.reorder_quantize(x, place, out=activations, programmatic=True, **HOW) is activations
    assert (fake.loads, fake.allocations) == (loads, allocations)
    with pytest.raises(ArgumentError, match=r"reorder_quantize: out: must be given in a capture"):
        ptxlab.reorder_quantize(x, place, **HOW)
    fake.capturing, fake.arch = False, 75
    with pytest.raises(UnavailableError, match=r"reorder_quantize: it runs on sm_80, and this is sm_75; pass backend="):
        ptxlab.reorder_quantize(x, place, clip=0.8, **HOW)


# --- what synchronises -----------------------------------------------------------------------------------------------

SYNCHRONISED = {  # in a block, and in a cluster of two
    "norm": (RMSNORM_REORDER, {"K": 896, "added": 1, "kept": 0, "eps": EPS}),
    "norm in a cluster": (RMSNORM_REORDER, {"K": 8192, "added": 1, "kept": 0, "eps": EPS}),
    "alone in a cluster": (REORDER, {"K": 8192}),
    "gate in a cluster": (SILU_MUL_REORDER, {"K": 8192, "activation": 0}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", SYNCHRONISED)
def test_every_missing_wait_is_noticed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks or a wrong result show it, early or late."""
    spec, sizes = SYNCHRONISED[case]
    sizes = {"M": 2, "outliers": 128, "g": 128, "pairs": 0, "code": 0, "clip": 0.9, **sizes}
    (source,) = registry.find(spec.name)[1]
    logical = spec.example(np.random.default_rng(0), **sizes)
    config = spec.config_for(sizes)
    arrays = {name: convert_to_dtype(array, "float16") for name, array in spec.pack(logical).items()}
    kernel = Kernel.of(spec, source, config)

    def check_all() -> None:
        for mode in emulator.MODES:
            inputs = {name: array.copy() for name, array in arrays.items()}
            outcome = run_spec(
                spec, source, inputs, sizes=sizes, backend="emulator", checks=emulator.CHECKS, mode=mode, config=config
            )
            assert outcome.findings == ()
            ptxlab.runtime.verify.compare(spec, outcome.outputs, logical, config)

    check_all()
    for (opcode, place), copies in sync_mutants.statements_by_place(kernel).items():
        with monkeypatch.context() as patch:
            assert sync_mutants.diagnosis(sync_mutants.apply_change(kernel, copies), check_all, patch), (
                f"{opcode} of {place}"
            )


@pytest.mark.full
@pytest.mark.parametrize("spec", [REORDER, RMSNORM_REORDER, SILU_MUL_REORDER], ids=lambda spec: spec.name)
def test_the_kernel_before_is_waited_for(spec: Any) -> None:
    """Without the wait every input but gamma and the places is read too early."""
    (source,) = registry.find(spec.name)[1]
    wait = "    ptxlab::wait_for_predecessors();\n"
    assert source.text.count(wait) == 1 and not {"gamma", "place"} & set(spec.after_wait)
    job = Job(spec, replace(source, text=source.text.replace(wait, "")), "emulator", spec.example_sizes[1])
    assert "ahead of griddepcontrol.wait" in verify(job).detail


# --- on a GPU --------------------------------------------------------------------------------------------------------

ON_GPU = pytest.mark.skipif(gpu.why_not("sm_90") is not None, reason="needs sm_90")


@pytest.mark.long(20)
@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("K", [4096, 28672])
@pytest.mark.parametrize("M", [1, 33, 1000])
@pytest.mark.parametrize("int8", [None, 3])
def test_a_programmatic_chain_is_the_plain_chain(int8: int | None, M: int, K: int) -> None:
    """A norm reads the rows of the norm before it, written while the gate between them runs.

    So a stale byte goes on to the end.
    """
    import cupy

    x, gamma = cupy.asarray(normal(M, K)), cupy.asarray(normal(K))
    place = cupy.asarray(quant.channel_places(RNG.permutation(K)))
    half = cupy.asarray(quant.channel_places(RNG.permutation(K // 2)))
    first, second, residual = (cupy.zeros((M, K), cupy.float16) for _ in range(3))
    out, gated = ptxlab.reorder_quantize(x, place, int8=int8), ptxlab.silu_mul_reorder_quantize(x, half, int8=int8)

    def chain(programmatic: bool) -> None:
        for read, written in pairwise([x, *[first, second] * 6]):
            options = {"out": out, "programmatic": programmatic, "int8": int8}
            ptxlab.rmsnorm_reorder_quantize(read, gamma, place, residual=residual, normed=written, **options)
            ptxlab.silu_mul_reorder_quantize(written, half, **{**options, "out": gated})
            ptxlab.reorder_quantize(written, place, **options)

    written = (residual, first, second, out.x, out.scale, gated.x, gated.scale)
    chains.assert_same_bits_as_plain(chain, written)
