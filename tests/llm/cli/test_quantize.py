"""`ptxlab quantize` as a person or a script meets it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ptxlab.llm.accuracy import steps as accuracy
from ptxlab.llm.accuracy.text import Corpus
from ptxlab.llm.checkpoints import folder as folders
from ptxlab.llm.checkpoints.open import open_model
from ptxlab.llm.model import NumpyRunner, generate
from ptxlab.lowbit import layout
from tests.support.small_models import write_folder

TEXT = "the cat and the dog and the other cat\n" * 40


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    w = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    save_file({"layer.0.up": w, "layer.0.odd": w[:3], "layer.0.bias": w[0]}, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def test_it_writes_a_checkpoint_that_loads(cli: Any, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    options = ("--scheme", "qoq", "--group", "32", "--layout", "qserve", "--tensor", "*.0.*", "--out", out)
    code, output, err = cli("quantize", checkpoint, *options)
    assert code == 0 and err == ""
    text = " ".join(output.split())
    assert "qoq ±119, group 32, qserve; loaded again, equal in every bit" in text
    assert "layer.0.up 64x128 32,768 4,864 4.75" in text
    assert "copied layer.0.odd F32 [3, 128]: N must be a positive multiple of 8 (N=3)" in text and "bias" not in text
    assert "1 packed, 2 copied:" in text
    assert layout.load(out).layout == "qserve"


def test_as_json(cli: Any, checkpoint: Path, tmp_path: Path) -> None:
    code, output, _ = cli("quantize", checkpoint, "--out", tmp_path / "out.safetensors", "--json")
    rows = {row["tensor"]: row for row in json.loads(output)}
    assert code == 0 and list(rows) == ["layer.0.bias", "layer.0.odd", "layer.0.up"]
    assert rows["layer.0.up"] == {
        "tensor": "layer.0.up",
        "shape": [64, 128],
        "packed": {"layout": "strips", "arch": "sm_90a", "scheme": "lqq", "N": 64, "K": 128, "group": 64,
                   "protective_range": 119},
        "copied_because": "",
        "bytes_before": 32768,
        "bytes": 4608,
    }  # fmt: skip
    assert rows["layer.0.bias"]["packed"] is None and rows["layer.0.bias"]["copied_because"] == "not a matrix"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layout", "zigzag"), "layout: must be one of row_major, qserve, dual_mma, comet, strips (got zigzag)"),
        (("--scheme", "awq"), "scheme: must be one of lqq, qoq, qoq_channel (got awq)"),
        (("--group", "48"), "group: must be one of 32, 64, 128 (got 48)"),
        (("--range", "128"), "protective_range: must be an integer in 1..127 (got 128)"),
        (("--range", "119", "--scheme", "qoq_channel"), "--range is for lqq and qoq: qoq_channel has one level"),
        (("--range", "127"), "layer.0.up: must restore to -128..127, unless unchecked"),
        (("--tensor", "*gone"), "pattern: must match a tensor of"),
        (("--tensor", "*bias"), "in.safetensors: no tensor can be packed: layer.0.bias F32 [128]: not a matrix"),
        (("--out", "no/such/folder/out"), "cannot be written: no/such/folder is no folder"),
    ],
)
def test_bad_input_is_one_line(
    cli: Any, checkpoint: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "out.safetensors"
    code, output, err = cli("quantize", checkpoint, "--out", out, *options)
    assert code == 2 and message in err and err.count("\n") == 1 and output == ""
    assert not out.exists()


def test_a_file_that_is_there_is_kept(cli: Any, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert cli("quantize", checkpoint, "--out", out)[0] == 0
    first_file = out.read_bytes()
    assert cli("quantize", checkpoint, "--out", out, "--scheme", "qoq") == (2, "", f"error: {out}: is there already\n")
    assert out.read_bytes() == first_file


def test_the_range_that_is_proved_is_offered(cli: Any, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    code, output, _ = cli("quantize", checkpoint, "--range", "120", "--out", out)
    assert code == 0 and "lqq ±120, group 64" in output
    weight = layout.unpack(layout.load(out))
    assert weight.protective_range == 120 and np.abs(weight.exact_level1()).max() >= 120
    assert cli("audit", out)[1].splitlines()[-1].startswith("safe by proof: lqq ±120")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a trained model's folder, with head sizes that the kernels take, and a text."""
    (tmp_path / "text.txt").write_text(TEXT)
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    return write_folder(tmp_path / "model", "smollm", **sizes)


@pytest.mark.full
def test_a_model_by_a_recipe_is_measured(cli: Any, folder: Path, tmp_path: Path) -> None:
    """The model has two layers, and the whole recipe runs.

    `tests/llm/cli/test_generate.py` has text of it.
    """
    out, text = tmp_path / "out", tmp_path / "text.txt"
    options = (
        "--recipe",
        "lqq",
        "--group",
        "32",
        "--range",
        "120",
        "--text",
        text,
        "--samples",
        4,
        "--length",
        32,
        "--out",
        out,
    )
    code, output, err = cli("quantize", folder, *options, "--json")
    assert (code, err) == (0, "")
    report = json.loads(output)
    assert report["recipe"]["gptq"] and report["recipe"]["group"] == 32
    assert report["recipe"]["protective_range"] == 120
    assert [0 < error < 0.05 for of in report["errors"].values() for error in of.values()] == 8 * [True]
    assert {path.name for path in out.iterdir()} == {
        "config.json", "ends.safetensors", "generation_config.json", "layer_000.safetensors", "layer_001.safetensors",
        "recipe.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    code, output, _ = cli("perplexity", out, "--text", text, "--length", 64, "--json")
    exact_report = json.loads(cli("perplexity", folder, "--text", text, "--length", 64, "--json")[1])["perplexity"]
    assert code == 0 and np.log(json.loads(output)["perplexity"]) == pytest.approx(np.log(exact_report), rel=0.004)


def test_a_model_with_experts_is_measured_and_continues_a_text(cli: Any, folder: Path, tmp_path: Path) -> None:
    """Mixtral's rows of the table are products, not experts.

    The text is short, so that experts are rounded.
    """
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    model, out = write_folder(tmp_path / "experts", "mixtral", **sizes), tmp_path / "out"
    text = ("--text", tmp_path / "text.txt", "--length", 32, "--backend", "numpy")
    code, output, err = cli("quantize", model, "--recipe", "lqq", *text, "--samples", 8, "--out", out)
    assert code == 0 and "relative squared error" in output and "of experts the mean" in output
    rule = "experts rounded to nearest, which fewer than 256 tokens of the text take: 0, 1, 2, 3"
    assert f"layer 1: {rule}" in output
    code, output, _ = cli("perplexity", out, *text, "--json")
    exact_report = json.loads(cli("perplexity", model, *text, "--json")[1])["perplexity"]
    assert code == 0 and np.log(json.loads(output)["perplexity"]) == pytest.approx(np.log(exact_report), rel=0.004)
    for source in (out, model):
        code, output, _ = cli("generate", "the", "--model", source, "--tokens", 2, "--backend", "numpy", "--json")
        assert code == 0 and len(json.loads(output)["tokens"][0]) == 2
    code, _, err = cli("quantize", model, "--recipe", "atom", *text, "--samples", 8, "--out", tmp_path / "other")
    assert code == 2 and "recipe: W4A4 is for dense models: grouped GEMMs are W4A8's (got 4 experts)" in err


@pytest.mark.full
@pytest.mark.parametrize("options", [("atom",), ("fmpq", "--int8", 0.5)], ids=["atom", "fmpq"])
def test_w4a4_is_measured_and_continues_a_text(
    cli: Any, folder: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text_options = ("--text", text, "--length", 32)
    code, output, err = cli(
        "quantize", folder, "--recipe", *options, *text_options, "--samples", 2, "--out", out, "--json"
    )
    assert (code, err) == (0, "")
    settings = json.loads(output)["recipe"]
    of = settings["kept"], settings["int8"], settings["outlier"]
    assert of == ((64, None, 6.0) if options == ("atom",) else (0, 0.5, 0.0))  # a share that is asked for is filled
    seen = {bits: json.loads(cli("perplexity", out, *text_options, "--acts", bits, "--json")[1]) for bits in (4, 8)}
    whole = json.loads(cli("perplexity", out, *text_options, "--json")[1])
    assert (whole["acts"], whole["kv"]) == (4, 4) and whole["perplexity"] == seen[4]["perplexity"]
    assert whole["perplexity"] != seen[8]["perplexity"]
    assert np.log(seen[8]["perplexity"]) == pytest.approx(np.log(whole["perplexity"]), rel=0.03)
    code, output, _ = cli("generate", "the cat", "--model", out, "--tokens", 3, "--backend", "numpy", "--json")
    assert code == 0 and len(json.loads(output)["tokens"][0]) == 3
    code, _, notes = cli("generate", "the cat", "--model", out, "--tokens", 2, "--backend", "numpy")
    assert code == 0 and f"{'W4A4' if options == ('atom',) else 'W4Ax'}, KV4 with rotated keys, on NumPy" in notes


@pytest.mark.full
def test_qserve_per_channel_is_measured_and_continues_a_text(cli: Any, folder: Path, tmp_path: Path) -> None:
    """Run QServe's A100 setting as a whole model: no groups in the folder, and the text of its runner."""
    out, text = tmp_path / "out", tmp_path / "text.txt"
    sample_options = ("--text", text, "--length", 32)
    assert cli("quantize", folder, "--recipe", "qoq_channel", *sample_options, "--samples", 2, "--out", out)[0] == 0
    model = folders.load(out)
    assert model.recipe["clip_block"] and model.recipe["smooth_heads"] is None
    for name, (_, K) in model.config.matrices.items():
        weight = getattr(model.layers[0], name)
        assert (weight.scheme, weight.group) == ("qoq_channel", K)
    exact, ours = (
        json.loads(cli("perplexity", path, *sample_options, "--json")[1])["perplexity"] for path in (folder, out)
    )
    assert np.log(ours) == pytest.approx(np.log(exact), rel=0.008) and ours != exact
    options = ("--tokens", 4, "--backend", "numpy")
    code, output, _ = cli("generate", "the cat", "--model", out, *options, "--json")
    prompt = open_model(folder)[1].encode("the cat").tolist()
    tokens = [int(step[0]) for step in generate(NumpyRunner(model, 1, 100), [prompt], 4)]
    assert code == 0 and json.loads(output)["tokens"][0] == tokens
    assert "W4A8, KV4 with rotated keys, on NumPy" in cli("generate", "the cat", "--model", out, *options)[2]


def test_what_a_recipe_reports(cli: Any, folder: Path, tmp_path: Path) -> None:
    options = ("--recipe", "qoq_channel", "--text", tmp_path / "text.txt", "--samples", 2, "--length", 32)
    code, output, _ = cli("quantize", folder, *options, "--out", tmp_path / "out")
    assert code == 0 and "relative squared error" in output and "layer 1" in output and "written: " in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--recipe", "best"), "recipe: must be one of lqq, qoq"),
        (("--rotation", "random"), "--rotation needs --recipe"),
        (("--recipe", "lqq", "--rotation", "left"), "rotate: must be one of hadamard, random or None (got left)"),
        (("--recipe", "atom", "--group", "128", "--length", "8", "--text", "TEXT"), "K: must be more than the 128"),
        (("--recipe", "fmpq", "--group", "32"), "group: must be one of 64, 128 with INT8 blocks (got 32)"),
        (("--recipe", "fmpq", "--int8", "1.5"), "int8: must be a number in 0..1 (got 1.5)"),
        (("--recipe", "atom", "--int8", "0.1"), "--int8 is for --recipe fmpq"),
        (("--int8", "0.1"), "--int8 needs --recipe"),
        (("--kv", "kv8_channel"), "--kv needs --recipe"),
        (("--recipe", "rtn", "--kv", "kv8"), "--kv expects kv4, kv4_channel or kv8_channel, got kv8"),
        (("--recipe", "lqq", "--scheme", "qoq"), "--scheme is for a file without --recipe"),
        (("--recipe", "lqq", "--range", "0"), "protective_range: must be an integer in 1..127 (got 0)"),
        (("--recipe", "lqq", "--samples", "0"), "--samples expects an integer, 1 or more, got 0"),
        (("--recipe", "lqq", "--seed", "-1"), "--seed expects an integer, 0 or more, got -1"),
        (("--recipe", "lqq", "--backend", "tpu"), "--backend expects gpu or numpy, got tpu"),
        (("--recipe", "lqq", "--length", "9999", "--text", "TEXT"), "length: at most the text's"),
        (("--recipe", "rtn", "--length", "8", "--text", "TEXT", "--layout", "spiral"), "layout: must be one of"),
    ],
)  # fmt: skip
def test_options_of_a_recipe_that_cannot_be(
    cli: Any, folder: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    arguments = [tmp_path / "text.txt" if option == "TEXT" else option for option in options]
    code, _, err = cli("quantize", folder, *arguments, "--out", tmp_path / "out")
    assert code == 2 and message in " ".join(err.split()) and not (tmp_path / "out").exists()


@pytest.mark.full
def test_accuracy_of_a_few_rows(cli: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Corpus((TEXT,), (TEXT,))
    monkeypatch.setattr("ptxlab.llm.cli.models.open_text", lambda source, progress: text)
    sizes = ("--length", 32, "--windows", 2, "--samples", 2, "--sample-length", 32)
    only = ("--only", "alone/KV?", "--only", "Atom/GPTQ", "--only", "FMPQ/?0% *", "--only", "channel/GPTQ")
    only += ("--only", "g64/reordering")
    options = (*only, "--seeds", 2, *sizes)
    code, output, err = cli("accuracy", folder, *options, "--out", tmp_path / "record.json")
    assert (code, err) == (0, "")
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["windows"] == {"wikipedia": [2, 32]} and record["start"] == "mixed"
    rows = {(row["ladder"], row["step"], row["seed"]): row["perplexity"]["wikipedia"] for row in record["rows"]}
    shares = [(f"{share}% of the blocks in INT8", seed) for share, seed in ((10, 0), (20, 0), (20, 1), (40, 0))]
    assert 0 < record["rows"][-2]["bytes"] < record["rows"][0]["bytes"]
    kv = [("alone", "KV8", 0), ("alone", "KV4", 0)]
    assert [*rows] == [
        ("float", "float32", 0),
        *kv,
        ("channel", "GPTQ", 0),
        ("channel", "GPTQ", 1),
        ("g64", "reordering", 0),
        ("Atom", "GPTQ", 0),
        *(("FMPQ", step, seed) for step, seed in shares),
    ]
    exact = rows["float", "float32", 0]
    assert abs(np.log(rows[kv[0]] / exact)) < abs(np.log(rows[kv[1]] / exact)) < 1  # of a log of 77
    assert rows["channel", "GPTQ", 0] != rows["channel", "GPTQ", 1] and f"{exact:.5g}" in output
    command = ("accuracy", folder, "--seeds", 2, *sizes, "--out", tmp_path / "record.json")
    monkeypatch.setattr(accuracy, "quantize_layers", lambda *_: pytest.fail("that was measured before"))
    assert cli(*command, *options[:4])[0] == 0
    assert json.loads((tmp_path / "record.json").read_text())["rows"] == record["rows"]
    assert cli(*command, "--only", "schemes, rounded/LQQ")[0] == 0  # of the same recipe as g64/reordering
    assert len(json.loads((tmp_path / "record.json").read_text())["rows"]) == len(record["rows"]) + 1
    for row in record["rows"]:
        del row["recipe"]["clip_block"]  # as before there was such a setting
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert cli(*command, *options[:4])[0] == 0
    code, _, err = cli(*command, "--samples", 3)
    assert code == 2 and "record.json: is there already, of another calibration: [2, 32], not [3, 32]" in err
    for older in ({"step": "float64"}, {"recipe": record["rows"][1]["recipe"]}):
        (tmp_path / "record.json").write_text(json.dumps({**record, "rows": [{**record["rows"][0], **older}]}))
        code, _, err = cli(*command)
        assert code == 2 and "record.json: rows must be those of this version's table" in err
    code, _, err = cli("accuracy", folder, "--length", 10**6)
    assert code == 2 and "--length expects at most" in err
    assert cli("accuracy", folder, "--only", "nothing")[0] == 2
