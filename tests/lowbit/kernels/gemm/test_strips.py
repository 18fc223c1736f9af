"""The kernels for weights in strips: exact in every tile, on one or many blocks, early and late; built as meant."""

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator, registry
from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.lowbit import quant
from ptxlab.lowbit.kernels.gemm import small_tiles, strips, strips_tiles
from ptxlab.lowbit.kernels.gemm.common import DTYPES, GROUPS
from ptxlab.lowbit.kernels.gemm.strips import (
    LARGE,
    LARGE_CHANNEL,
    LARGE_CHANNEL_TILES,
    LARGE_TILES,
    SMALL,
    SMALL_CHANNEL,
    SMALL_CHANNEL_FRAGMENTS,
    SMALL_FRAGMENTS,
)
from ptxlab.lowbit.kernels.gemm.strips_tiles import NO_GROUPS, StripChoice, StripTile
from ptxlab.runtime import run_spec
from ptxlab.spec import KernelSpec
from tests.support import gemm_checks as checks
from tests.support import gemm_problems
from tests.support.axes import on_every_backend
from tests.support.random_weights import weight_of

SOURCES = {spec.name: registry.find(spec.name)[1][0] for spec in strips.SPECS}
Config = dict[str, int]


# Tiles that the emulator runs in a moment. Matrices of up to 200 rows have 13 strips or fewer, so that tiles differ in
# height, and warps, MMAs and whole warp groups have no strip.
LARGE_CONFIGS = tuple(
    StripChoice(StripTile(*tile), strips, stages, split).constants
    for tile, strips, stages, split in (
        ((8, 2, 1, 1, 128), 7, 2, 1),
        ((16, 1, 2, 1, 256), 4, 4, 1),
        ((16, 1, 3, 1, 128), 3, 6, 2),
        ((32, 1, 1, 2, 512), 8, 2, 1),
        ((16, 2, 1, 2, 128), 16, 3, 4),
        ((8, 4, 1, 1, 256), 13, 2, 1),
        ((64, 3, 1, 1, 128), 11, 3, 1),
        ((16, 2, 2, 1, 512), 5, 4, 2),
    )
)
# Strips at a time, and warps that share a stage of 512, 1024 or 2048 channels: the last are for 16 tokens at most, as a
# box of X in fragments has 256 rows.
SMALL_CONFIGS = (
    {"ROWS": 1, "SLICES": 4, "STAGES": 3},
    {"ROWS": 1, "SLICES": 16, "STAGES": 2},
    {"ROWS": 2, "SLICES": 8, "STAGES": 2},
    {"ROWS": 4, "SLICES": 4, "STAGES": 3},
)


def ids(config: Any) -> str:
    return "-".join(f"{name}{constant}" for name, constant in dict(config).items())


def spec_for(logical: Mapping[str, Any], small: bool, order: int) -> KernelSpec:
    """Return the spec of the kernel for this weight and ORDER of activations."""
    if isinstance(logical["weight"], quant.QoQChannelWeight):
        return ((LARGE_CHANNEL, LARGE_CHANNEL_TILES), (SMALL_CHANNEL, SMALL_CHANNEL_FRAGMENTS))[small][order]
    return ((LARGE, LARGE_TILES), (SMALL, SMALL_FRAGMENTS))[small][order]


def output(spec: KernelSpec, logical: Mapping[str, Any], backend: str, config: Config, **options: Any) -> np.ndarray:
    """Run a kernel under the emulator's checks and return Y; `config` overrides chosen constants.

    Only weights of groups can do without token sums.
    """
    (M, K), weight = logical["x"].shape, logical["weight"]
    sizes = {"M": M, "N": len(weight.q4), "K": K}
    if "g" in spec.symbols:
        sizes["g"] = weight.group
    else:
        config = {**config, "SIGNED": 0}
    rows = {"rows": config.get("BM") or strips_tiles.choose(sizes).tile.BM} if "rows" in spec.symbols else {}
    sizes |= rows
    config = {**spec.config_for(sizes), **config}
    inputs = spec.pack({**logical, **rows})
    if config["SIGNED"]:
        del inputs["x_sum"]  # the kernel is given a null pointer
    return checks.run_checked(spec, inputs, backend, sizes=sizes, config=config, **options)


def problems(**limits: int) -> st.SearchStrategy[dict[str, Any]]:
    return gemm_problems.lqq(**limits) | gemm_problems.qoq(**limits) | gemm_problems.channel(**limits)


def measured_tiles(group: int) -> Iterator[tuple[KernelSpec, Config, int]]:
    """Yield every tile of both cost tables, with and without a cluster, and the most tokens that it is tried with.

    Of kinds that come in several widths, the widest and one between are yielded.
    """
    between = [tile._replace(BM=tile.BM - 16) for tile in strips_tiles.COSTS if tile.BM >= 64]
    for tile in (*strips_tiles.COSTS, *between):
        for split in strips_tiles._splits(tile, group):
            stages = strips_tiles._stages(tile, tile.strips, split, group)
            large = LARGE if group else LARGE_CHANNEL
            yield large, StripChoice(tile, tile.strips, stages, split).constants, 2 * tile.BM
    for narrow in small_tiles.COSTS:
        for BM in (8,) if narrow.BM == 8 else (16, 24, 32):
            wide = narrow._replace(BM=BM)
            sizes = {"M": BM, "N": 1112, "K": 1344, **({"g": group} if group else {})}
            small = SMALL if group else SMALL_CHANNEL
            yield small, {**wide._asdict(), "STAGES": small_tiles._stages(wide, sizes)}, BM


MEASURED = {group: list(measured_tiles(group)) for group in (*GROUPS, NO_GROUPS)}


def ids_of(cases: list[tuple[KernelSpec, Config, int]]) -> list[str]:
    return [f"{spec.name}-{ids(config)}" for spec, config, _ in cases]


signed, order, mode = st.integers(0, 1), st.integers(0, 1), st.sampled_from(emulator.MODES)


@pytest.mark.full
@pytest.mark.parametrize("config", LARGE_CONFIGS, ids=ids)
@given(
    logical=problems(tokens=70, rows=200, groups=9),
    signed=signed,
    order=order,
    mode=mode,
    sms=st.sampled_from((1, 3, 132)),
)
@settings(max_examples=8)
def test_accumulators_are_exact_in_the_emulator(
    config: Config, logical: dict[str, Any], signed: int, order: int, mode: str, sms: int
) -> None:
    """A block has many tiles on few SMs, and the ring goes on from one to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strips_tiles, "SMS", sms)
        spec = spec_for(logical, small=False, order=order)
        y = output(spec, logical, "emulator", {**config, "SIGNED": signed}, mode=mode)
    assert np.array_equal(y, spec.reference(**logical))


@pytest.mark.full
@pytest.mark.parametrize(("WN", "WK", "stages"), [(1, 2, 5), (2, 2, 5), (1, 3, 7)])
def test_warp_groups_along_k_take_turns_at_a_slot(WN: int, WK: int, stages: int) -> None:
    """Copies come in any order, and no warp group takes a slot that another one waits for; three rounds and a stage."""
    config = StripChoice(StripTile(8, WN, WK, MN=1, BK=128), 4 * WN, stages, 1).constants | {"SIGNED": 1}
    logical = LARGE.example(np.random.default_rng(0), M=8, N=64 * WN, K=128 * (3 * stages + 1), g=64)
    for mode, seed in (("early", 0), ("late", 0), ("late", 1), ("late", 2)):
        y = output(LARGE, logical, "emulator", config, mode=mode, seed=seed)
        assert np.array_equal(y, LARGE.reference(**logical)), (mode, seed)


@pytest.mark.full
@on_every_backend
def test_more_tokens_than_a_band(backend: str) -> None:
    """Nineteen token tiles make a band of sixteen and a narrower one.

    Each band is over three row tiles.
    """
    logical = LARGE.example(np.random.default_rng(0), M=150, N=96, K=128, g=64)
    config = {**LARGE_CONFIGS[0], "STRIPS": 2, "SIGNED": 1}
    assert np.array_equal(output(LARGE, logical, backend, config), LARGE.reference(**logical))


@pytest.mark.full
@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=ids)
@given(data=st.data(), signed=signed, order=order, mode=mode, sms=st.sampled_from((1, 3, 132)))
@settings(max_examples=10)
def test_a_few_tokens_are_exact_in_the_emulator(
    config: Config, data: st.DataObject, signed: int, order: int, mode: str, sms: int
) -> None:
    """A block has many strips on few SMs, so that both tiles of sums take turns."""
    logical = data.draw(problems(tokens=16 if config["SLICES"] == 16 else 32, rows=200, groups=18))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strips_tiles, "SMS", sms)
        spec = spec_for(logical, small=True, order=order)
        y = output(spec, logical, "emulator", {**config, "SIGNED": signed}, mode=mode)
    assert np.array_equal(y, spec.reference(**logical))


@pytest.mark.long(30)
@pytest.mark.gpu
@given(data=st.data(), config=st.sampled_from(({}, *LARGE_CONFIGS)), signed=signed, order=order)
def test_accumulators_are_exact_on_the_gpu(config: Config, data: st.DataObject, signed: int, order: int) -> None:
    logical = data.draw(problems(tokens=300, rows=1200, groups=20))
    config, spec = {**config, "SIGNED": signed}, spec_for(logical, small=False, order=order)
    checks.assert_exact_twice(lambda: output(spec, logical, "gpu", config), spec.reference(**logical))


@pytest.mark.long(30)
@pytest.mark.gpu
@given(data=st.data(), config=st.sampled_from(({}, *SMALL_CONFIGS)), signed=signed, order=order)
def test_a_few_tokens_are_exact_on_the_gpu(config: Config, data: st.DataObject, signed: int, order: int) -> None:
    logical = data.draw(problems(tokens=16 if config.get("SLICES") == 16 else 32, rows=4800, groups=36))
    config, spec = {**config, "SIGNED": signed}, spec_for(logical, small=True, order=order)
    checks.assert_exact_twice(lambda: output(spec, logical, "gpu", config), spec.reference(**logical))


@pytest.mark.gpu
@pytest.mark.parametrize("signed", [0, 1])
@pytest.mark.parametrize(("spec", "config", "tokens"), MEASURED[64], ids=ids_of(MEASURED[64]))
def test_every_tile_of_known_cost_is_exact(spec: KernelSpec, config: Config, tokens: int, signed: int) -> None:
    """The blocks of a cluster have two rounds of the ring and a stage, the last one ragged."""
    K = config["BK"] * (2 * config["STAGES"] + 1) * config["SPLIT"] - 64 if spec is LARGE else 1344
    for M in (tokens - 3, tokens):
        logical = spec.example(np.random.default_rng(M), M=M, N=1112, K=K, g=64)
        y = output(spec, logical, "gpu", {**config, "SIGNED": signed})
        assert np.array_equal(y, spec.reference(**logical)), M


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "config", "tokens"), MEASURED[NO_GROUPS], ids=ids_of(MEASURED[NO_GROUPS]))
def test_every_tile_of_known_cost_is_exact_per_channel(spec: KernelSpec, config: Config, tokens: int) -> None:
    """The problems include wgmma over a long K, where a register that is overwritten under one shows."""
    for M, N, K in ((tokens - 3, 1112, 1312), (tokens, *((4096, 4096) if spec is LARGE_CHANNEL else (1112, 1344)))):
        logical = spec.example(np.random.default_rng(M), M=M, N=N, K=K)
        for _ in range(3):
            assert np.array_equal(output(spec, logical, "gpu", config), spec.reference(**logical)), (M, N, K)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 3, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 200, 256, 300, 512])
@pytest.mark.parametrize("N", [1088, 30016])
def test_every_chosen_tile_is_exact(M: int, N: int) -> None:
    """M and N leave the last tile ragged, and K the last stage; every order of activations is tried."""
    logical = LARGE.example(np.random.default_rng(M), M=M, N=N, K=448, g=64)
    expected = LARGE.reference(**logical)
    for spec in (LARGE, LARGE_TILES, *((SMALL, SMALL_FRAGMENTS) if M <= 32 else ())):
        for signed in (0, 1):
            assert np.array_equal(output(spec, logical, "gpu", {"SIGNED": signed}), expected), (spec.args, signed)
    logical = LARGE_CHANNEL.example(np.random.default_rng(M), M=M, N=N, K=448)
    expected = LARGE_CHANNEL.reference(**logical)
    for small, order in ((False, 0), (False, 1), *(((True, 0), (True, 1)) if M <= 32 else ())):
        assert np.array_equal(output(spec_for(logical, small, order), logical, "gpu", {}), expected), (small, order)


SCALED = [
    (LARGE, LARGE_CONFIGS[0]),
    (LARGE, LARGE_CONFIGS[2]),
    (LARGE, LARGE_CONFIGS[4]),
    (SMALL, SMALL_CONFIGS[2]),
    (LARGE_CHANNEL, LARGE_CONFIGS[4]),
    (SMALL_CHANNEL, SMALL_CONFIGS[2]),
]


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize(
    ("spec", "config"),
    SCALED,
    ids=["few tokens", "along K", "cluster", "small", "per channel", "small per channel"],
)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.int32])
def test_scaled_outputs_are_the_epilogue_in_float32(dtype: Any, spec: KernelSpec, config: Config, backend: str) -> None:
    """The bits are those of acc * x_scale * w_scale + bias.

    Each operation is rounded to float32, then once to the output.
    """
    OUT = DTYPES.index(np.dtype(dtype).name)
    signed = (OUT + SCALED.index((spec, config))) % 2
    groups = {"g": 64} if "g" in spec.symbols else {}
    logical = spec.example(np.random.default_rng(OUT), M=29, N=136, K=448, **groups)
    logical = checks.with_zeros(logical, with_bias=not signed)
    y = output(spec, logical, backend, {**config, "OUT": OUT, "SIGNED": signed})
    exact, weight = spec.reference(logical["weight"], logical["x"]), logical["weight"]
    w_scale = weight.channel_scale if groups else weight.scale
    checks.assert_scaled_in_float32(y, exact, dtype, logical["x_scale"], w_scale, logical.get("bias"))
    bits = f"u{y.itemsize}"
    assert np.array_equal(y.view(bits), spec.expected(logical, {"OUT": OUT})["y"].view(bits))


@pytest.mark.full
@pytest.mark.parametrize("spec", strips.SPECS, ids=lambda spec: spec.name)
@on_every_backend
def test_the_extremes_add_up_without_a_rounding(spec: KernelSpec, backend: str) -> None:
    """Bytes of 255 are multiplied by -128 over a long K.

    These are the largest sums from which 128 times the token's is subtracted.
    """
    N, K = 8, 4096
    ones = np.ones((N, K // 128), np.uint8)
    q4, minimum = np.full((N, K), 15, np.uint8), np.full((N, K // 128), -113, np.int8)
    weight = weight_of(quant.LQQWeight, q4, ones * 16, 127, minimum=minimum)
    x = np.full((3, K), -128, np.int8)
    for signed in (0, 1):
        y = output(spec, {"weight": weight, "x": x}, backend, {"SIGNED": signed})
        assert np.array_equal(y, np.full((3, N), -128 * 127 * K, np.int32))


@pytest.mark.default_cases("emulator-0-15-gemm_w4a8_small_sm90")
@pytest.mark.parametrize("spec", [SMALL_CHANNEL, LARGE_CHANNEL], ids=lambda spec: spec.name)
@pytest.mark.parametrize(("q", "zero"), [(15, 0), (0, 15), (15, 15), (0, 0)])
@on_every_backend
def test_the_extremes_per_channel_add_up_without_a_rounding(q: int, zero: int, spec: KernelSpec, backend: str) -> None:
    """Nibbles and zero points at both ends are multiplied by activations at both ends.

    K is long, with a ragged last block.
    """
    N, K = 8, 4128
    weight = quant.QoQChannelWeight(np.full((N, K), q, np.uint8), np.ones(N, np.float32), np.full(N, zero, np.uint8))
    x = np.stack([np.full(K, number, np.int8) for number in (-128, -127, 127)])
    y = output(spec, {"weight": weight, "x": x}, backend, {})
    assert np.array_equal(y, (q - zero) * K * np.array([[-128], [-127], [127]]) * np.ones((1, N), np.int32))


@pytest.mark.full
def test_the_zero_points_leave_with_the_token_sum() -> None:
    """The kernel subtracts the channel's zero point times the given sum."""
    sizes = {"M": 5, "N": 40, "K": 256}
    logical = LARGE_CHANNEL.example(np.random.default_rng(0), **sizes)
    for spec in (SMALL_CHANNEL, LARGE_CHANNEL):
        inputs = spec.pack(logical)
        inputs["x_sum"] += np.arange(5, dtype=np.int32)
        config = spec.config_for(sizes)
        outcome = run_spec(spec, SOURCES[spec.name], inputs, unchecked=True, backend="emulator", config=config)
        expected = spec.reference(**logical) - np.arange(5)[:, None] * logical["weight"].zero.astype(np.int32)
        assert np.array_equal(outcome.outputs["y"], expected)
        with pytest.raises(ArgumentError, match=rf"^{spec.name}: w_zero: w_zero <= 15 \(got w_zero\[1\] = 16\)"):
            inputs = spec.pack(logical)
            inputs["w_zero"][1] = 16
            run_spec(spec, SOURCES[spec.name], inputs, backend="emulator", config=config)


@pytest.mark.full
def test_the_weights_leave_with_the_token_sum() -> None:
    """The kernel subtracts 128 times the given sum."""
    logical = LARGE.example(np.random.default_rng(0), M=5, N=40, K=256, g=128)
    for spec in strips.SPECS:
        inputs = spec.pack(logical)
        inputs["x_sum"] += np.arange(5, dtype=np.int32)
        config = {**spec.config_for({"M": 5, "N": 40, "K": 256, "g": 128}), "SIGNED": 0}
        options = {"sizes": {"g": 128}, "backend": "emulator", "config": config}
        with pytest.raises(
            ArgumentError, match=rf"^{spec.name}: x_sum: the sum of token 1 over K is -?\d+ \(got x_sum\[1\]"
        ):
            run_spec(spec, SOURCES[spec.name], inputs, **options)
        outcome = run_spec(spec, SOURCES[spec.name], inputs, unchecked=True, **options)
        assert np.array_equal(outcome.outputs["y"], spec.reference(**logical) - 128 * np.arange(5)[:, None])


def distinct_tiles(group: int) -> list[Any]:
    """List the benched tiles, each once, in a cluster if possible, as that has the more code (the later case).

    Stages and splits change no registers: all 100 tiles that are benched in groups of 128 have those of these 61.
    """
    return list(
        {
            (spec.name, ids({**config, "STAGES": 0, "SPLIT": 0})): (spec, config, tokens)
            for spec, config, tokens in MEASURED[group]
        }.values()
    )


# Groups of 128 have the most live values; of the most constants, without token sums, and of none, every fourth.
COMPILED = [
    *((*case, 128, 0) for case in distinct_tiles(128)),
    *((*case, 32, 1) for case in distinct_tiles(32)[::4]),
    *((*case, NO_GROUPS, 0) for case in distinct_tiles(NO_GROUPS)[1::4]),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("spec", "config", "tokens", "group", "signed"),
    COMPILED,
    ids=[f"{spec.name}-{ids(config)}-GROUP{group}" for spec, config, _, group, _ in COMPILED],
)
def test_no_tile_spills_or_waits_for_its_own_wgmma(
    spec: KernelSpec, config: Config, tokens: int, group: int, signed: int
) -> None:
    sizes = {"M": tokens, "N": 4096, "K": 4096, **({"g": group} if group else {})}
    config = {**spec.config_for(sizes), **config, "OUT": 0, "SIGNED": signed}
    checks.compile_checked(spec, config, sizes)


@pytest.mark.parametrize("M", [1, 8, 16])
@pytest.mark.parametrize("g", GROUPS)
def test_all_that_the_contract_admits_fits_shared_memory(M: int, g: int) -> None:
    """The longest K still leaves a ring of two stages."""
    K = 204800 // (8 * ceil_div(M, 8))
    K -= K % 1024
    sizes = {"M": M, "N": 4096, "K": K, "g": g}
    SMALL.check_sizes(sizes)
    config = SMALL.config_for(sizes)
    assert config["STAGES"] >= 2 and SMALL.launch({**sizes, **config}).shared_bytes <= strips_tiles.ROOM
