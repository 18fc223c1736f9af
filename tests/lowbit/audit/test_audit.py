import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from ptxlab.errors import ArgumentError, FileError
from ptxlab.lowbit import layout
from ptxlab.lowbit.audit import SCHEMES, AuditRow, SkippedTensor, audit_file, audit_matrix, totals
from ptxlab.lowbit.layout.checkpoint import Checkpoint
from ptxlab.lowbit.quant import quantize_lqq, quantize_qoq
from ptxlab.sources import results_dir


def gaussian(N=4, K=256, seed=0):
    return np.random.default_rng(seed).standard_normal((N, K)).astype(np.float32)


def test_rows_come_scheme_by_scheme():
    rows = audit_matrix(gaussian(), schemes=("lqq", "qoq"), ranges=(119, 127), group=64, tensor="up")
    assert [(row.scheme, row.protective_range) for row in rows] == [
        ("lqq", 119),
        ("lqq", 127),
        ("qoq", 119),
        ("qoq", 127),
    ]
    assert {(row.tensor, row.group, row.weights) for row in rows} == {("up", 64, 1024)}
    assert all(type(field) in (str, int, float) for row in rows for field in dataclasses.asdict(row).values())


def test_totals_by_scheme_and_range():
    """The totals are over two matrices, one twice the other's size.

    A packed row without an error counts too.
    """
    rows = [*audit_matrix(gaussian(), ranges=(119, 127), tensor="a"), *audit_matrix(gaussian(8), ranges=(119, 127))]
    packed = AuditRow("p", "lqq", 119, 64, 128, 7, 1, None, None)
    by_scheme_and_range = totals([*rows, packed])
    assert [(t.scheme, t.protective_range) for t in by_scheme_and_range] == [
        ("qoq", 119),
        ("qoq", 127),
        ("lqq", 119),
        ("lqq", 127),
    ]
    for t in by_scheme_and_range:
        summed_rows = [row for row in rows if (row.scheme, row.protective_range) == (t.scheme, t.protective_range)]
        extra = [packed] if (t.scheme, t.protective_range) == ("lqq", 119) else []
        assert (t.tensors, t.weights, t.groups) == (2 + len(extra), 12 * 256 + 128 * len(extra), 24 + 2 * len(extra))
        assert t.overflows == sum(row.overflows for row in summed_rows) + 7 * len(extra)
        assert t.unsafe_groups == sum(row.unsafe_groups for row in summed_rows) + len(extra)
        assert t.overflow_share == t.overflows / t.weights
        assert t.mean_error == pytest.approx(sum(row.relative_error for row in summed_rows) / 2)
        assert t.worst_error == max(row.relative_error for row in summed_rows)
    assert totals([packed])[0].mean_error is None and totals([]) == []


def test_the_papers_overflow_is_counted():
    w = np.zeros((2, 128), np.float32)
    w[:, :2] = -113, 120
    row, lqq = audit_matrix(w, ranges=(120,))
    assert (row.scheme, row.overflows) == ("qoq", 2)
    assert (lqq.scheme, lqq.overflows) == ("lqq", 0)
    assert [row.overflows for row in audit_matrix(w, ranges=(119,))] == [0, 0]


def test_error_is_measured_without_the_overflow():
    """The integer -113 comes back as -112 and 120 as 128.

    These are errors of 1 and 8, not of 248.
    """
    w = np.zeros((1, 128), np.float32)
    w[0, :2] = -113, 120
    (row,) = audit_matrix(w, schemes=("qoq",), ranges=(120,))
    assert row.overflows == 1
    assert row.relative_error == pytest.approx(np.hypot(1, 8) / np.hypot(113, 120))


def test_clipping_is_counted():
    w = np.zeros((1, 128), np.float32)
    w[0, :3] = 22, 16, 119  # the first group: range 22, scale 1 by rounding to nearest
    w[0, 64:], w[0, 2], w[0, 64] = 119, 0, 119
    nearest, ceiling = audit_matrix(w, schemes=("lqq", "lqq_ceiling"), ranges=(119,), group=64)
    assert (nearest.clipped, ceiling.clipped) == (2, 0)


def test_error_of_a_finished_weight():
    w = gaussian()
    (row,) = audit_matrix(w, schemes=("lqq",), ranges=(119,))
    restored = quantize_lqq(w, group=128).dequantize()
    assert row.relative_error == pytest.approx(np.linalg.norm(w - restored) / np.linalg.norm(w), rel=1e-5)


def test_zero_matrix_and_the_default_rows():
    rows = audit_matrix(np.zeros((2, 128), np.float16))
    assert [(row.scheme, row.protective_range) for row in rows] == [
        (scheme, protective_range) for scheme in ("qoq", "lqq") for protective_range in (119, 120, 127)
    ]
    assert all((row.overflows, row.clipped, row.relative_error) == (0, 0, 0) for row in rows)


def test_scale_and_dtype_do_not_change_the_figures():
    half = gaussian().astype(np.float16)
    assert audit_matrix(half) == audit_matrix(half.astype(np.float32)) == audit_matrix(half.astype(np.float64))
    tiny = audit_matrix(gaussian() * np.float32(2.0**-100), schemes=SCHEMES)
    assert tiny == audit_matrix(gaussian(), schemes=SCHEMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schemes": ("awq",)}, r"schemes: must be among qoq, lqq, lqq_ceiling, lqq_search \(got awq\)"),
        ({"ranges": (119, 200)}, r"protective_range: must be an integer in 1\.\.127 \(got 200\)"),
        ({"group": 100}, "group: must be one of 32, 64, 128"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        audit_matrix(gaussian(), **arguments)
    path = tmp_path / "w.safetensors"
    save_file({"w": gaussian()}, path)
    with pytest.raises(ArgumentError, match=message):
        audit_file(path, **arguments)


def test_file_tensor_by_tensor(tmp_path):
    path, broken = tmp_path / "model.safetensors", gaussian()
    broken[2, 5] = np.nan
    tensors = {
        "a.weight": gaussian(),
        "b.bias": gaussian()[0].copy(),
        "c.ids": np.ones((2, 128), np.int64),
        "d.weight": gaussian(K=192),
        "e.weight": broken,
        "f.weight": gaussian(K=128).astype(np.float16),
    }
    save_file(tensors, path)
    steps = []
    audited = list(audit_file(path, schemes=("lqq",), ranges=(119,), progress=lambda *step: steps.append(step)))
    by_name = {tensor_audit.tensor: tensor_audit for tensor_audit in audited}
    assert list(by_name) == list(Checkpoint(path).tensors) and len(audited) == 6
    assert [by_name["a.weight"]] == audit_matrix(
        tensors["a.weight"], schemes=("lqq",), ranges=(119,), tensor="a.weight"
    )
    assert isinstance(by_name["f.weight"], AuditRow) and by_name["f.weight"].weights == 4 * 128
    assert by_name["b.bias"] == SkippedTensor("b.bias", "not a matrix (shape [256])")
    assert by_name["c.ids"] == SkippedTensor("c.ids", "not floats (dtype I64)")
    assert by_name["d.weight"].reason == "K is not a multiple of the group (K=192, group=128)"
    assert by_name["e.weight"].reason == "w: must be finite in float32 (got w[2, 5] is nan)"
    assert [step[:2] for step in steps] == [(done, 6) for done in range(7)]
    assert [step[2] for step in steps] == [*by_name, ""]


def test_a_pattern_selects_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"layer.0.up": gaussian(), "layer.1.up": gaussian(), "head": gaussian()}, path)
    names = [row.tensor for row in audit_file(path, pattern="layer.*", schemes=("qoq",), ranges=(119,))]
    assert sorted(names) == ["layer.0.up", "layer.1.up"]
    with pytest.raises(ArgumentError, match=r"pattern: must match a tensor of .*model.safetensors \(got Layer\.\*\)"):
        audit_file(path, pattern="Layer.*")


def test_refuses_a_file_that_is_not_safetensors(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(FileError, match="not a readable safetensors file"):
        audit_file(path)


@pytest.fixture(scope="module")
def layer_audits(minilm):
    """Audit one layer of the demo checkpoint under every scheme: {(scheme, range): rows of its six matrices}."""
    rows = list(audit_file(minilm, pattern="encoder.layer.3.*weight", schemes=SCHEMES, group=64))
    audited = [row for row in rows if isinstance(row, AuditRow)]
    keys = {(row.scheme, row.protective_range) for row in audited}
    table = {key: [row for row in audited if (row.scheme, row.protective_range) == key] for key in keys}
    assert len(rows) - len(audited) == 2, "the two LayerNorm vectors are skipped"
    assert all(len(matrices) == 6 for matrices in table.values())
    return table


def total(rows, field):
    return sum(getattr(row, field) for row in rows)


@pytest.mark.full
def test_trained_weights_overflow_only_without_the_protective_range(layer_audits):
    for scheme in SCHEMES:
        assert total(layer_audits[scheme, 119], "overflows") == 0
        assert total(layer_audits[scheme, 127], "overflows") > 0
    assert total(layer_audits["qoq", 120], "overflows") > 0
    assert total(layer_audits["lqq", 120], "overflows") == 0


@pytest.mark.full
def test_trained_weights_errors(layer_audits):
    """LQQ beats QoQ a little; rounding the scale up costs error, searching for it gains; ceiling never clips."""
    schemes = ("lqq_search", "lqq", "qoq", "lqq_ceiling")
    for matrices in zip(*(layer_audits[scheme, 119] for scheme in schemes), strict=True):
        errors = [row.relative_error for row in matrices]
        assert errors == sorted(errors), dict(zip(schemes, errors, strict=True))
        assert errors[0] > 0.08 and errors[-1] < 0.12
    assert total(layer_audits["lqq_ceiling", 119], "clipped") == 0
    assert total(layer_audits["lqq", 119], "clipped") > 0


def test_the_recorded_audit_is_what_the_checkpoint_gives(minilm) -> None:
    recorded = json.loads((results_dir() / "audit" / "all-MiniLM-L6-v2.json").read_text())
    name = "encoder.layer.3.intermediate.dense.weight"
    audited = audit_file(minilm, pattern=name, schemes=tuple(SCHEMES))
    assert [dataclasses.asdict(row) for row in audited] == [row for row in recorded if row["tensor"] == name]


@pytest.mark.parametrize(("protective_range", "clean"), [(119, True), (127, False)])
def test_a_packed_checkpoint_is_audited_as_it_is(tmp_path, protective_range, clean):
    """The packed weights of `ptxlab quantize` are audited under their own scheme, and their buffers not as tensors."""
    w = np.zeros((8, 128), np.float32)
    w[:, :2] = (-113, 127 if protective_range == 127 else 119)  # a group that overflows at range 127, not at 119
    weight = quantize_qoq(w, group=128, protective_range=protective_range)
    packed = layout.pack(weight, "qserve", unchecked=True)
    layout.save(packed, tmp_path / "packed.safetensors", "up.weight")
    (row,) = audit_file(tmp_path / "packed.safetensors")
    assert (row.tensor, row.scheme, row.protective_range) == ("up.weight", "qoq", protective_range)
    assert row.weights == 8 * 128 and row.clipped is None and row.relative_error is None
    assert (row.overflows, row.unsafe_groups) == ((0, 0) if clean else (8, 8))
