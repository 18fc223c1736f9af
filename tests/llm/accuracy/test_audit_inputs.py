"""The audit of 4-bit activations: outliers in few blocks, errors by hand, a model's matrices on what they read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ptxlab.errors import ArgumentError
from ptxlab.llm.accuracy.audit_inputs import InputRow, audit_input, audit_model, input_totals
from ptxlab.llm.model import Config, FloatModel
from ptxlab.lowbit import quant
from ptxlab.lowbit.audit import SkippedTensor
from tests.support.small_models import write_folder

RNG = np.random.default_rng(0)
W, X = RNG.standard_normal((48, 640)).astype(np.float32), RNG.standard_normal((60, 640)).astype(np.float32)
OUTLIERS = RNG.choice(640, 70, replace=False)


def with_outliers() -> np.ndarray:
    x = X.copy()
    x[:, OUTLIERS] *= 40
    return x


def test_outliers_fill_blocks_up_to_the_share_that_is_allowed() -> None:
    """The 70 of 640 channels fill two blocks of 64, or one of 128."""
    for group, max_share, channels8 in ((64, 0.2, 128), (64, 0.1, 64), (64, 0.0, 0), (128, 0.2, 128), (64, 1.0, 128)):
        (row,) = audit_input(W, with_outliers(), schemes=("fmpq",), group=group, most=max_share)
        assert (row.outliers, row.channels8, row.share8) == (70, channels8, channels8 / 640), (group, max_share)
    (plain,) = audit_input(W, X, schemes=("fmpq",), most=1.0)
    assert plain.channels8 == plain.outliers == 0


def test_errors_are_those_of_the_quantised_product() -> None:
    x = with_outliers()
    atom, fmpq = audit_input(W, x, group=64, tensor="up")
    assert (atom.tensor, atom.scheme, fmpq.scheme, atom.channels8) == ("up", "atom", "fmpq", 64)
    order = quant.outlier_order(quant.channel_sizes(x), 64)
    w4, x4 = quant.quantize_atom_weight(W[:, order], 64, 64), quant.quantize_atom_activations(x[:, order], 64, 64)
    exact = x.astype(np.float64) @ W.T.astype(np.float64)
    product = x4.dequantize().astype(np.float64) @ w4.dequantize().T.astype(np.float64)
    assert atom.output_error == pytest.approx(np.linalg.norm(product - exact) / np.linalg.norm(exact), rel=1e-4)
    error = np.linalg.norm(w4.dequantize() - W[:, order]) / np.linalg.norm(W)
    assert atom.weight_error == pytest.approx(error, rel=1e-4)
    all_int4, in_int8 = (audit_input(W, x, schemes=("fmpq",), group=64, most=share)[0] for share in (0, 0.2))
    assert in_int8.input_error < all_int4.input_error / 3 and in_int8.weight_error > 0


def test_matrices_of_a_model_read_what_the_layers_before_make() -> None:
    config = Config(hidden=128, ffn=96, heads=2, kv_heads=1, head_dim=64, layers=2, vocabulary=60)
    model, tokens = FloatModel.random(config), RNG.integers(0, 60, (2, 12))
    seen: list[str] = []
    audit = list(audit_model(model, tokens, schemes=("fmpq",), group=64, progress=seen.append))
    assert [row.tensor for row in audit] == seen == [f"layers.{i}.{name}" for i in (0, 1) for name in
                                                      ("qkv", "o", "gate_up", "down")]  # fmt: skip
    skipped = [row for row in audit if isinstance(row, SkippedTensor)]
    assert [row.tensor for row in skipped] == ["layers.0.down", "layers.1.down"] and "multiple of 64" in skipped[
        0
    ].reason
    x = model.run_layer(model.embed(tokens), model.layers[0])
    normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.eps) * model.layers[1]["input_norm"]
    w = np.concatenate([model.layers[1][name] for name in "qkv"])
    (alone,) = audit_input(w, normed.reshape(-1, 128), schemes=("fmpq",), group=64)
    second = next(row for row in audit if row.tensor == "layers.1.qkv")
    assert isinstance(second, InputRow) and second.output_error == pytest.approx(alone.output_error, rel=1e-3)
    rows = [row for row in audit if isinstance(row, InputRow)]
    (total,) = input_totals(rows)
    assert total.tensors == 6 and total.worst_error == max(row.output_error for row in rows)
    assert total.mean_error == pytest.approx(np.mean([row.output_error for row in rows]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schemes": ("atom", "lqq")}, r"schemes: must be among atom, fmpq \(got lqq\)"),
        ({"group": 32}, r"group: must be one of 64, 128 \(got 32\)"),
        ({"most": 2}, r"most: must be a number in 0..1 \(got 2\)"),
        ({"x": X[:, :128]}, r"x: must have 640 channels, as w has \(got 128\)"),
        ({"x": X * np.nan}, r"x: must be finite"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        audit_input(**{"w": W, "x": X, **options})


@pytest.mark.full
def test_the_command_audits_a_model(cli: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 192}
    folder = write_folder(tmp_path / "model", "smollm", **sizes)
    (tmp_path / "text.txt").write_text("the cat and the dog\n" * 30)
    sample_options = ("--text", tmp_path / "text.txt", "--samples", 2, "--length", 16)
    command = ("audit", folder, "--scheme", "atom", "--scheme", "fmpq", "--group", 64, *sample_options)
    code, output, err = cli(*command, "--out", tmp_path / "audit.json")
    assert (code, err) == (0, "")
    rows = json.loads((tmp_path / "audit.json").read_text())
    assert len(rows) == 16 and json.loads(cli(*command, "--json")[1]) == rows
    assert "INT8 channels" in output and "10 of 16 rows" in output
    worst = max((row for row in rows if row["scheme"] == "atom"), key=lambda row: row["output_error"])
    assert f"{worst['output_error']:.4f}" in output and worst["tensor"] in output
    save_file({"w": W}, tmp_path / "w.safetensors")
    for arguments, message in (
        ((folder, "--scheme", "atom", "--scheme", "lqq"), "schemes: must be among atom, fmpq (got lqq)"),
        ((folder, "--scheme", "fmpq", "--range", 119), "--range is not for atom and fmpq"),
        ((folder, "--scheme", "fmpq", "--int8", 3), "most: must be a number in 0..1 (got 3"),
        ((folder, "--scheme", "fmpq", "--samples", 0), "--samples expects an integer, 1 or more, got 0"),
        ((folder, "--scheme", "lqq", "--samples", 2), "--samples is for atom and fmpq"),
        (
            (folder, "--scheme", "fmpq", *sample_options, "--tensor", "up"),
            "pattern: must match a matrix such as layers.0.qkv",
        ),
        ((tmp_path / "w.safetensors", "--scheme", "fmpq", *sample_options), "w.safetensors: "),
    ):
        code, output, err = cli("audit", *arguments)
        assert code == 2 and message in err and err.count("\n") == 1 and output == "", arguments
