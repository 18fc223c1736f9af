"""Other projects' checkpoints against packers that put every weight into its place by itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ptxlab.errors import FileError
from ptxlab.llm.checkpoints.foreign import ForeignCheckpoint, qserve_rows, unpack_qserve, unpack_words
from ptxlab.lowbit.quant import AffineWeight, LQQWeight
from tests.support import foreign_files
from tests.support.foreign_files import FORMATS, OF_AWQ, STRAIGHT, quantize_as, refused_mutants, write_torch

RNG = np.random.default_rng(0)
W = (RNG.standard_normal((64, 128)) / 10).astype(np.float32)
Q4 = RNG.integers(0, 16, (64, 128)).astype(np.uint8)


def write_checkpoint(path: Path, arrays: dict[str, np.ndarray], **quantization: Any) -> Path:
    """Write a file with the matrix `q.weight` and a norm, and the given quantisation in a config beside it."""
    tensors = {f"q.{part}": array for part, array in arrays.items()} | {"norm.weight": np.ones(8, np.float16)}
    if quantization:
        (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file(tensors, path / "model.safetensors")
    return path / "model.safetensors"


def open_weight(path: Path, arrays: dict[str, np.ndarray], **quantization: Any) -> Any:
    return ForeignCheckpoint(write_checkpoint(path, arrays, **quantization)).weight("q.weight")


def test_orders() -> None:
    """The first tile of QServe is computed by hand, as both of its converters have it.

    A byte's nibbles are 16 rows apart.
    """
    assert (unpack_qserve(foreign_files.qserve_nibbles(Q4)) == Q4).all()
    packed = foreign_files.qserve_nibbles(Q4).view(np.uint8).ravel()
    for byte, (row, k) in {0: (0, 0), 3: (0, 3), 4: (8, 0), 8: (0, 16), 16: (0, 4), 64: (1, 0), 511: (15, 31)}.items():
        assert packed[byte] == Q4[row, k] + 16 * Q4[row + 16, k]
    constants = RNG.integers(-128, 128, (64, 3))
    assert (qserve_rows(foreign_files.qserve_constants(constants)) == constants).all()
    assert foreign_files.qserve_constants(np.arange(64)[:, None])[0, :6].tolist() == [0, 8, 16, 24, 1, 9]
    for order in (STRAIGHT, OF_AWQ):
        assert (unpack_words(foreign_files.pack_words(Q4, order), 1, tuple(order)) == Q4).all()
    assert (unpack_words(np.ascontiguousarray(foreign_files.pack_words(Q4.T, STRAIGHT).T), 0) == Q4).all()
    assert unpack_words(np.array([[0x76543210]], np.int32), 1, tuple(OF_AWQ)).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("container", ["safetensors", "torch"])
def test_qserve_with_any_zeros(group: int, container: str, tmp_path: Path) -> None:
    """PostScale's zeros are no multiples of the scales: w = (q4·s2 + zero)·s1."""
    q4, s1, s2, zeros = foreign_files.quantize_two_levels(W, group)
    assert (zeros % s2).any()
    arrays = foreign_files.qserve(q4, s1, s2, zeros)
    path = write_checkpoint(tmp_path, arrays)
    if container == "torch":
        path = write_torch(tmp_path / "quant_model.pt", {f"q.{part}": array for part, array in arrays.items()})
    weight = ForeignCheckpoint(path).weight("q.weight")
    assert isinstance(weight, LQQWeight) and weight.group == group and not weight.overflows().any()
    assert (weight.q4 == q4).all() and (weight.group_scale == s2).all() and (weight.minimum == zeros).all()
    expected = (q4 * np.repeat(s2, group, axis=1) + np.repeat(zeros, group, axis=1)) * s1[:, None].astype(np.float32)
    np.testing.assert_array_equal(weight.dequantize(), expected.astype(np.float32))
    assert np.abs(weight.dequantize() - W).max() < 0.03


def test_qserve_with_zeros_that_wrap(tmp_path: Path) -> None:
    """PreScale's zero·scale of a group below 0 is up to 255, a byte that wraps.

    The same integers come out.
    """
    q4 = RNG.integers(8, 16, (64, 128)).astype(np.uint8)
    s2, zeros = np.full((64, 2), 16), np.full((64, 2), -15 * 16)
    exact = q4.astype(int) * 16 - 240
    assert exact.min() == -112 and exact.max() == 0
    weight = open_weight(tmp_path, foreign_files.qserve(q4, np.ones(64), s2, zeros))
    assert (weight.exact_level1() == exact).all() and (weight.level1() == exact).all() and not weight.overflows().any()
    s2[5, 0] = zeros[5, 0] = 0  # a group of zeros
    assert not open_weight(tmp_path, foreign_files.qserve(q4, np.ones(64), s2, zeros)).exact_level1()[5, :64].any()
    zeros[3, 1] = 0  # and a group that does overflow, 8·16..15·16
    weight = open_weight(tmp_path, foreign_files.qserve(q4, np.ones(64), s2, zeros))
    assert np.argwhere(weight.overflows()).tolist() == [[3, 1]] and weight.exact_level1()[3, 64:].max() == 240


@pytest.mark.parametrize("zero", [0, 7, 15])
def test_qserve_per_channel(zero: int, tmp_path: Path) -> None:
    scale = RNG.uniform(1e-4, 1, 64).astype(np.float16)
    weight = open_weight(tmp_path, foreign_files.qserve_channel(Q4, scale, np.full(64, zero)))
    exact = weight.per_channel()
    assert (exact.zero == zero).all() and (exact.scale == scale).all() and (exact.q4 == Q4).all()


def test_qserve_per_channel_with_zeros_between(tmp_path: Path) -> None:
    arrays = foreign_files.qserve_channel(Q4, np.full(64, 0.5), np.full(64, 7.25))
    weight = open_weight(tmp_path, arrays)
    assert weight.per_channel() is None
    np.testing.assert_array_equal(weight.dequantize(), (Q4 - np.float32(7.25)) / 2)


@pytest.mark.parametrize(
    ("symmetric", "group", "N"), [(True, 32, 64), (False, 128, 64), (True, 128, 61), (False, 32, 61)]
)
def test_compressed_tensors(symmetric: bool, group: int, N: int, tmp_path: Path) -> None:
    """Zero points of eight rows are a word, whose end is padding where N is no multiple of 8."""
    q4, scale, zero = foreign_files.quantize_affine(W[:N], group, symmetric=symmetric)
    weight = open_weight(tmp_path, foreign_files.compressed_tensors(q4, scale, None if symmetric else zero))
    check(weight, q4, scale, zero, group)
    assert (weight.per_channel() is not None) == (group == 128)
    if symmetric:
        check(open_weight(tmp_path, foreign_files.compressed_integers(q4, scale)), q4, scale, zero, group)


def check(weight: AffineWeight, q4: Any, scale: Any, zero: Any, group: int) -> None:
    assert (weight.q4 == q4).all() and (weight.scale == scale).all() and (weight.zero == zero).all()
    per_weight = [np.repeat(array.astype(np.float32), group, axis=1) for array in (scale, zero)]
    np.testing.assert_array_equal(weight.dequantize(), (q4 - per_weight[1]) * per_weight[0])


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}


def test_both_versions_of_gptq(tmp_path: Path) -> None:
    """The first stores the zero point less 1: 0 as 15."""
    q4, scale, zero = foreign_files.quantize_affine(W, 64)
    zero[:3, 0] = 0
    check(open_weight(tmp_path, foreign_files.gptq(q4, scale, zero)), q4, scale, zero, 64)
    second = foreign_files.gptq(q4, scale, zero, stored=0)
    check(open_weight(tmp_path, second, **GPTQ, checkpoint_format="gptq_v2"), q4, scale, zero, 64)


@pytest.mark.parametrize("writer", [{"meta": {"quantizer": ["gptqmodel:2.0.0"]}}, {"provider": "auto-round"}])
def test_zeros_that_borrow_from_the_next(writer: dict[str, Any], tmp_path: Path) -> None:
    """Read zero points of writers that subtract 1 from all of a word at once."""
    q4, scale, zero = foreign_files.quantize_affine(W, 64)
    zero[:3, 0], zero[15, 1] = 0, 0
    arrays = foreign_files.gptq(q4, scale, zero, stored=0)
    arrays["qzeros"] = (arrays["qzeros"].view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    check(open_weight(tmp_path, arrays, **GPTQ, **writer, checkpoint_format="gptq"), q4, scale, zero, 64)


@pytest.mark.parametrize("label", [None, "gptq", "gptq_v2"])
@pytest.mark.parametrize("sym", [True, None])
@pytest.mark.parametrize("stored", [-1, 0])
def test_the_version_of_a_symmetric_file_is_that_of_its_zeros(
    label: str | None, sym: bool | None, stored: int, tmp_path: Path
) -> None:
    """Zeros that are all 7, or all 8, are the middle of one version, whatever the config calls it."""
    q4, scale, zero = foreign_files.quantize_affine(W, 64, symmetric=True)
    arrays = foreign_files.gptq(q4, scale, zero, stored=stored)
    check(open_weight(tmp_path, arrays, **GPTQ, sym=sym, checkpoint_format=label), q4, scale, zero, 64)


CONTRADICTIONS = {  # format, config, change of its arrays' q4, scale and zero, message
    "symmetric GPTQ of other zeros": ("gptq", {"sym": True}, {}, r"zero points: must be 8.*got \d+\.\.\d+"),
    "symmetric GPTQ of one other zero": ("gptq", {"sym": True}, {"one_zero": 9}, r"zero points: must be 8.*got 8\.\.9"),
    "asymmetric GPTQ, version 2's middle": ("gptq", {"sym": False}, {"zeros": 9}, "qzeros: must not all be 8 in"),
    "asymmetric GPTQ, version 1's middle": (
        "gptq", {"sym": False, "checkpoint_format": "gptq_v2"}, {"zeros": 8}, "qzeros: must not all be 7 in version 2",
    ),
    "symmetric AWQ of other zeros": ("awq", {"quant_method": "awq", "zero_point": False}, {}, "zero points: must be 8"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_zeros_that_contradict_the_config(case: str, tmp_path: Path) -> None:
    format, config, change, message = CONTRADICTIONS[case]
    q4, scale, zero = foreign_files.quantize_affine(W, 64)
    if change:
        zero[:] = change.get("zeros", 8)
        zero[5, 1] = change.get("one_zero", zero[5, 1])
    arrays = foreign_files.awq(q4, scale, zero) if format == "awq" else foreign_files.gptq(q4, scale, zero)
    with pytest.raises(FileError, match=rf"q\.weight: {message}"):
        open_weight(tmp_path, arrays, **{**GPTQ, **config})


@pytest.mark.parametrize("desc_act", [True, False, None])
def test_gptq_in_order_of_activation(desc_act: bool | None, tmp_path: Path) -> None:
    """The file's own order counts, even if the config denies one, as in files with act_group_aware."""
    q4, scale, zero = foreign_files.quantize_affine(W, 64)
    order = RNG.permutation(np.arange(128) // 64)
    weight = open_weight(tmp_path, foreign_files.gptq(q4, scale, zero, order), **GPTQ, desc_act=desc_act)
    np.testing.assert_array_equal(weight.dequantize(), (q4 - zero[:, order].astype(np.float32)) * scale[:, order])
    in_order = open_weight(tmp_path, foreign_files.gptq(q4, scale, zero), **GPTQ, desc_act=desc_act)
    check(in_order, q4, scale, zero, 64)


@pytest.mark.parametrize("format", ["gptq", "w4a16"])
def test_an_order_that_the_file_lacks(format: str, tmp_path: Path) -> None:
    arrays, config = dict(quantize_as(format, W)), {**GPTQ, "desc_act": True}
    arrays.pop("g_idx", None)
    if format == "w4a16":
        config = packed_config(64, actorder="group")
    with pytest.raises(FileError, match=r"q\.weight: g_idx: must be there, as the config says"):
        open_weight(tmp_path, arrays, **config)


def test_indices_of_groups_that_no_writer_set(tmp_path: Path) -> None:
    """compressed-tensors begins with -1 throughout. All 0 would put every column into one group."""
    q4, scale, zero = foreign_files.quantize_affine(W, 64, symmetric=True)
    arrays = foreign_files.compressed_tensors(q4, scale) | {"weight_g_idx": np.full(128, -1, np.int32)}
    check(open_weight(tmp_path, arrays), q4, scale, zero, 64)
    with pytest.raises(FileError, match=r"weight_g_idx: must give a group 64 columns \(got 128 in group 0\)"):
        open_weight(tmp_path, arrays | {"weight_g_idx": np.zeros(128, np.int32)})


def packed_config(group: int, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, **changes}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize("format", ["gptq", "awq", "w4a16", "w4a8"])
@pytest.mark.parametrize(("K", "group"), [(160, 128), (96, 64), (96, 128), (72, 32)])
def test_a_last_group_that_is_shorter(format: str, K: int, group: int, tmp_path: Path) -> None:
    """A multiple of the group size is no rule of these formats, and K over the number of groups not their size."""
    q4 = RNG.integers(0, 16, (64, K)).astype(np.uint8)
    order = np.arange(K) // group
    scale = RNG.uniform(0.01, 0.1, (64, order[-1] + 1)).astype(np.float16)
    zero = np.full(scale.shape, 8, np.uint8)
    config = packed_config(group) | ({"format": "int-quantized"} if format == "w4a8" else {})
    match format:
        case "gptq":
            arrays, config = foreign_files.gptq(q4, scale, zero, order), {**GPTQ, "group_size": group}
        case "awq":
            arrays, config = foreign_files.awq(q4, scale, zero), {**GPTQ, "quant_method": "awq", "group_size": group}
        case "w4a16":
            arrays = foreign_files.compressed_tensors(q4, scale)
        case _:
            arrays = foreign_files.compressed_integers(q4, scale)
    weight = open_weight(tmp_path, arrays, **config)
    np.testing.assert_array_equal(weight.dequantize(), (q4 - np.float32(8)) * scale[:, order])


def test_scales_that_are_negative_or_0(tmp_path: Path) -> None:
    q4, scale, zero = foreign_files.quantize_affine(W, 64, symmetric=True)
    scale[::2] *= -1
    scale[5, 1] = 0
    check(open_weight(tmp_path, foreign_files.gptq(q4, scale, zero)), q4, scale, zero, 64)


@pytest.mark.parametrize(("bias", "is_zero"), [([0.0] * 64, True), ([0.0] * 63 + [1.0], False), (None, False)])
def test_biases_of_zero_are_told_from_others(bias: list[float] | None, is_zero: bool, tmp_path: Path) -> None:
    arrays = foreign_files.gptq(*foreign_files.quantize_affine(W, 64))
    if bias:
        arrays["bias"] = np.array(bias, np.float16)
    assert ForeignCheckpoint(write_checkpoint(tmp_path, arrays)).zero_biases() == ({"q.bias"} if is_zero else set())


def test_awq(tmp_path: Path) -> None:
    q4, scale, zero = foreign_files.quantize_affine(W, 32)
    check(open_weight(tmp_path, foreign_files.awq(q4, scale, zero), bits=4, group_size=32), q4, scale, zero, 32)


def test_a_square_matrix_of_8_columns_is_told_by_its_scales(tmp_path: Path) -> None:
    """GPTQ and AWQ have the same names."""
    q4, scale, zero = foreign_files.quantize_affine(W[:, :64], 64)
    for form in (foreign_files.gptq, foreign_files.awq):
        check(open_weight(tmp_path, form(q4, scale, zero)), q4, scale, zero, 64)


def test_the_rest_is_as_the_file_has_it(tmp_path: Path) -> None:
    file = ForeignCheckpoint(write_checkpoint(tmp_path, quantize_as("gptq", W)))
    assert {*file.tensors} == {"q.weight", "norm.weight"} and {*file.matrices} == {"q.weight"}
    assert file.tensors["q.weight"].shape == (64, 128) and file.read("norm.weight").tolist() == [1] * 8
    assert np.abs(file.read("q.weight") - W).max() < 0.03


def test_names_are_printable(tmp_path: Path) -> None:
    save_file({"a\nb": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"name must be printable \(got 'a\\nb'\)"):
        ForeignCheckpoint(tmp_path / "model.safetensors")


def drop(*parts: str) -> Any:
    """Return a change that drops arrays."""
    return lambda arrays: [arrays.pop(part) for part in parts]


def edit(part: str, change: Any) -> Any:
    """Return a change that replaces an array by `change` of it."""
    return lambda arrays: arrays.update({part: np.array(change(arrays[part]), order="C")})


def put(part: str, index: Any, number: Any) -> Any:
    """Return a change that sets an element of an array."""
    return lambda arrays: arrays[part].__setitem__(index, number)


BAD = {  # format, change, message
    "no scales of groups": ("qserve", drop("s2_scales", "s2_zeros"), "QServe per .* needs s"),
    "no zeros": ("qserve", drop("s2_zeros"), r"QServe per group needs s2_zeros \(got qweight \[64, 64\], "),
    "no rows": ("qserve", drop("s1_scales"), "QServe per group needs s1_scales"),
    "fewer rows": ("qserve", edit("s1_scales", lambda a: a[:32]), r"s1_scales: must be float \[64\] .*got F16 \[32\]"),
    "rows of no tile": ("qserve", edit("qweight", lambda a: a[:40]), "not the shapes of QServe per group"),
    "a vector": ("qserve", edit("qweight", np.ravel), "not the shapes"),
    "groups apart": ("qserve", edit("s2_zeros", lambda a: a[:1]), r"s2_zeros: must be I8 \[2, 64\] .*got I8 \[1, 64\]"),
    "no group": (
        "qserve",
        lambda a: [edit(part, lambda x: x[:0])(a) for part in ("s2_scales", "s2_zeros")],
        r"shape: must not be empty \(got N=64, K=128, 0 groups\)",
    ),
    "groups that do not divide K": (
        "qserve",
        lambda a: [edit(part, lambda x: np.repeat(x, 3, axis=0)[:3])(a) for part in ("s2_scales", "s2_zeros")],
        r"groups: must divide K \(got 3 groups of K=128\)",
    ),
    "scales of words": ("qserve", edit("s2_scales", lambda a: a.astype(np.int32)), "s2_scales: must be I8 .*got I32"),
    "a negative scale": ("qserve", put("s2_scales", (1, 3), -4), r"s2_scales: must be 0 or more \(got -4\)"),
    "NaN": ("qserve", put("s1_scales", 5, np.nan), r"s1_scales: must be finite in float32 \(got s1_scales\[5\] is nan"),
    "scales of 0 that give infinity": ("qserve_channel", put("s1_scales", 5, 0), "s1_szeros: must be finite multiples"),
    "8 bits": ("w4a16", put("weight_shape", 1, 64), r"weight_shape: 4 bits in weight_packed are \[64, 128\] .*\[64, 6"),
    "no shape": ("w4a16", drop("weight_shape"), "compressed-tensors, packed needs weight_shape"),
    "packed scale of a tensor": ("w4a16", edit("weight_scale", lambda a: a[0, 0]),
                                 r"weight_scale: must be .* \[64, 1\]"),
    "packed scales in a row": ("w4a16", edit("weight_scale", lambda a: a[:, 0]), r"weight_scale: must be .* \[64, 1\]"),
    "integers of 8 bits": ("w4a8", put("weight", (0, 0), 8), r"weight: must be of 4 bits, -8\.\.7 \(got -7\.\.8\)"),
    "floats of 8 bits": ("w4a8", edit("weight", lambda a: a.view(np.uint8)), "weight: must be I8 .*got U8"),
    "a scale of a tensor": ("w4a8", edit("weight_scale", lambda a: a[0, 0]), r"weight_scale: must be float \[64, 1\]"),
    "no zeros of GPTQ": ("gptq", drop("qzeros"), "needs qzeros"),
    "GPTQ of 8 bits": ("gptq", edit("qzeros", lambda a: np.repeat(a, 2, axis=1)), r"qzeros: must be I32 \[2, 8\]"),
    "a group beyond": ("gptq", put("g_idx", 9, 2), r"g_idx: must lie in 0\.\.1 \(got 0\.\.2\)"),
    "a group below": ("gptq", put("g_idx", 9, -1), r"g_idx: must lie in 0\.\.1 \(got -1\.\.1\)"),
    "AWQ of another version": ("awq", edit("qweight", np.transpose), "not the shapes of"),
    "AWQ with an order": ("awq", lambda a: a.update(g_idx=np.zeros(128, np.int32)), "q.g_idx: not known in AWQ"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_arrays_that_do_not_fit_the_format_are_refused(case: str, tmp_path: Path) -> None:
    format, change, message = BAD[case]
    arrays = {part: array.copy() for part, array in quantize_as(format, W).items()}
    change(arrays)
    with pytest.raises(FileError, match=message) as error:
        open_weight(tmp_path, arrays)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("format", "stated", "message"),
    [
        ("gptq", {"bits": 8}, r"the config's bits: must be 4 \(got 8\)"),
        ("gptq", {"group_size": 128}, r"q\.weight: groups: must be of 128 columns, as the config says \(got 2 groups"),
        ("gptq", {"group_size": -1}, r"q\.weight: groups: must be of 128 columns, as the config says"),
        ("gptq", {"quant_method": "awq"}, r"q\.weight: format: must be AWQ, as the config says \(got GPTQ\)"),
        (
            "gptq",
            {**GPTQ, "modules_to_not_convert": ["q"]},
            r"q\.weight: format: must not be quantised, as the config says",
        ),
        ("w4a16", packed_config(128), r"q\.weight: groups: must be of 128 columns, as"),
        ("w4a16", {**packed_config(64), "format": "int-quantized"}, r"must be compressed-tensors, integers, as the"),
        ("w4a16", packed_config(64, symmetric=False), r"q\.weight: zero points: must be there, as the config says"),
        ("w4a16_asymmetric", packed_config(64), r"q\.weight: zero points: must be 8, as the config says"),
        (
            "w4a16",
            {**packed_config(64), "ignore": ["q"]},
            r"q\.weight: format: must not be quantised, as the config says",
        ),
        ("qserve", {"group_size": 48}, r"q\.weight: groups: must be of 48 columns, as the config says"),
    ],
)
def test_a_config_that_contradicts(format: str, stated: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=message):
        open_weight(tmp_path, quantize_as(format, W), **stated)


def of_groups(*weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Make a config of compressed-tensors with several groups.

    The weights of each have these changes to groups of 64.
    """
    configs = [packed_config(64, **change)["config_groups"]["group_0"] for change in weights]
    return packed_config(64) | {"config_groups": {f"group_{i}": config for i, config in enumerate(configs)}} | changes


@pytest.mark.parametrize(
    ("group", "K"), [(32, 128), (64, 128), (128, 128), (64, 96), (32, 80)], ids=lambda size: f"{size}"
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_several_groups_of_a_config(symmetric: bool, group: int, K: int, tmp_path: Path) -> None:
    """Take the group that the tensors of a matrix fit."""
    q4 = RNG.integers(0, 16, (64, K)).astype(np.uint8)
    order = np.arange(K) // group
    scale = RNG.uniform(0.01, 0.1, (64, order[-1] + 1)).astype(np.float16)
    zero = np.full(scale.shape, 8) if symmetric else RNG.integers(0, 16, scale.shape)
    config = of_groups({"group_size": 32}, {}, {"strategy": "channel", "group_size": None})
    if not symmetric:
        asymmetric = [{**group["weights"], "symmetric": False} for group in config["config_groups"].values()]
        config = of_groups(*({}, *asymmetric))
    arrays = foreign_files.compressed_tensors(q4, scale, None if symmetric else zero)
    weight = open_weight(tmp_path, arrays, **config)
    expected = (q4 - zero[:, order].astype(np.float32)) * scale[:, order]
    np.testing.assert_array_equal(weight.dequantize(), expected)


def test_groups_of_a_config_that_do_not_tell_their_size(tmp_path: Path) -> None:
    arrays = foreign_files.compressed_tensors(*foreign_files.quantize_affine(W[:, :96], 48, symmetric=True)[:2])
    rule = r"q\.weight: config_groups: must tell the size of 2 groups of K=96 \(got 64 or 80\)"
    with pytest.raises(FileError, match=rule):
        open_weight(tmp_path, arrays, **of_groups({}, {"group_size": 80}))
    with pytest.raises(
        FileError, match=r"config_groups: must have the groups of every matrix \(got 2 groups of K=96\)"
    ):
        open_weight(tmp_path, arrays, **of_groups({"group_size": 32}, {"group_size": 16}))


def test_a_config_of_a_file_in_floats(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no matrix is quantised, where the config declares GPTQ"):
        open_weight(tmp_path, {"weight": np.ones((8, 8), np.float16)}, **GPTQ)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FileError, match=r"config\.json: not JSON"):
        ForeignCheckpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize("format", FORMATS)
def test_mutated_files_are_read_or_refused(format: str, tmp_path: Path) -> None:
    """The 500 mutants of each file have changed bytes of the header or the tensors, or are cut off."""
    path = write_checkpoint(tmp_path, quantize_as(format, W[:32, :64], 32))

    def read() -> None:
        file = ForeignCheckpoint(path)
        for name in file.matrices:
            file.weight(name)

    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert 100 < refused_mutants(path, read, header) < 500
