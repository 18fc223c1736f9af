"""`ptxlab perplexity` on small models of every kind: what it prints is what the library computes."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.llm.accuracy.text import windows
from ptxlab.llm.checkpoints import folder, open_model
from ptxlab.llm.checkpoints.open import dequantize_model
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.model import Config, LayerWeights, QuantizedModel, perplexity
from ptxlab.llm.model.numerics import FakeQuantized
from tests.support.small_models import CONFIGS, tokenizer, write_folder, write_gguf

TEXT = "the cat and the dog\n" * 30


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def tokens() -> Any:
    return np.array(tokenizer().encode(TEXT).ids)


def report_perplexity(cli: Any, *arguments: object) -> dict[str, Any]:
    code, out, err = cli("perplexity", *arguments, "--json")
    assert (code, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    return report


@pytest.mark.full
def test_a_folder_and_a_gguf(cli: Any, tmp_path: Path, text: Path, tokens: Any) -> None:
    path = write_folder(tmp_path / "model", "smollm")
    model, _ = open_model(path)
    report = report_perplexity(cli, path, "--text", text, "--length", 16)
    all_windows = windows(tokens, 16)
    assert report["perplexity"] == pytest.approx(perplexity(model, all_windows))
    assert (report["windows"], report["tokens"], report["backend"]) == (len(all_windows), all_windows.size, "numpy")
    assert (report["kv"], report["acts"]) == (32, 32) and report["seconds"] > 0
    gguf = report_perplexity(cli, write_gguf(tmp_path / "model.gguf", "smollm"), "--text", text, "--length", 16)
    assert gguf["perplexity"] == pytest.approx(report["perplexity"], rel=1e-5)


def test_options_quantise_activations_or_cache(cli: Any, tmp_path: Path, text: Path, tokens: Any) -> None:
    path = write_folder(tmp_path / "model", "qwen2")
    model, _ = open_model(path)
    options = ("--text", text, "--length", 16, "--windows", 3)
    for arguments, numerics in (
        (("--kv", 8), FakeQuantized(acts=None, kv="kv8")),
        (("--kv", 4), FakeQuantized(acts=None, kv="kv4")),
        (("--acts", 8), FakeQuantized(acts=8, kv=None)),
    ):
        expected = perplexity(model, windows(tokens, 16, 3), numerics)
        assert report_perplexity(cli, path, *options, *arguments)["perplexity"] == pytest.approx(expected)
    code, out, _ = cli("perplexity", path, *options, "--kv", 4)
    assert code == 0 and out.startswith("perplexity ") and "\n" not in out.strip()
    for part in ("48 tokens, 3 windows of 16", "activations float32, KV cache 4 bits", " s on this CPU"):
        assert part in out


def test_a_quantised_folder(cli: Any, tmp_path: Path, text: Path, tokens: Any) -> None:
    """Its weights are those of the kernels; activations and cache too, unless asked otherwise."""
    config = Config.from_json({**CONFIGS["smollm"], "hidden_size": 128, "intermediate_size": 128})
    layers, out = [LayerWeights.random(config, seed) for seed in range(2)], tmp_path / "quantized"
    embedding = np.random.default_rng(0).standard_normal((300, 128)).astype(np.float16)
    quantized = QuantizedModel(config=config, embedding=embedding, layers=layers, final_norm=layers[0].input_norm)
    out.mkdir()
    folder.save(quantized, out)
    Tokenizer((), tokenizer()).save(out)
    options, three_windows = ("--text", text, "--length", 16, "--windows", 3), windows(tokens, 16, 3)
    of_weights = report_perplexity(cli, out, *options, "--kv", 32, "--acts", 32)["perplexity"]
    whole = report_perplexity(cli, out, *options)
    assert of_weights == pytest.approx(perplexity(dequantize_model(quantized), three_windows))
    assert (whole["kv"], whole["acts"]) == (4, 8)
    assert whole["perplexity"] == pytest.approx(perplexity(dequantize_model(quantized), three_windows, FakeQuantized()))


def test_models_side_by_side(cli: Any, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure each as alone, on the same windows; a GGUF file of the first model has its perplexity."""
    first, second = write_folder(tmp_path / "first", "smollm"), write_folder(tmp_path / "second", "qwen2")
    same = write_gguf(tmp_path / "same.gguf", "smollm")
    options = ("--text", text, "--length", 16, "--windows", 3)
    report = report_perplexity(cli, first, same, second, *options)
    assert (report["windows"], report["length"], report["tokens"], report["backend"]) == (3, 16, 48, "numpy")
    single_runs = [report_perplexity(cli, model, *options)["perplexity"] for model in (first, same, second)]
    models = report["models"]
    assert [figures["model"] for figures in models] == [str(first), str(same), str(second)]
    assert [figures["perplexity"] for figures in models] == pytest.approx(single_runs)
    assert [figures["ratio"] for figures in models] == pytest.approx([1, 1, single_runs[2] / single_runs[0]], rel=1e-5)
    assert all((figures["kv"], figures["acts"]) == (32, 32) and figures["seconds"] > 0 for figures in models)
    monkeypatch.chdir(tmp_path)
    options = ("--text", "text.txt", "--length", 16, "--windows", 3, "--kv", 4)
    code, out, _ = cli("perplexity", "first", "second", *options)
    assert code == 0 and out.startswith("perplexity on text.txt: 48 tokens, 3 windows of 16")
    assert re.search(r"first +[\d.e+]+ +1\.0000 +float32 +4 bits +\d+\.\d *\n", out) and "s on this CPU" in out


def test_models_that_cut_the_text_otherwise_are_not_compared(cli: Any, tmp_path: Path, text: Path) -> None:
    first, second = write_folder(tmp_path / "first", "smollm"), write_folder(tmp_path / "second", "smollm")
    file = second / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["model"]["merges"] = settings["model"]["merges"][:1]
    file.write_text(json.dumps(settings))
    rule = "perplexities of other tokens cannot be compared"
    refusal = f"error: {first} and {second} cut {text} into different tokens: {rule}\n"
    assert cli("perplexity", first, second, "--text", text, "--length", 16) == (2, "", refusal)


def test_bad_input_is_one_line(cli: Any, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_folder(tmp_path / "model", "smollm")
    monkeypatch.setattr(gpu, "available", lambda: False)
    for arguments, message in (
        (("nosuch",), "nosuch: no model: a folder, a .gguf file, or one of smollm2"),
        ((path, "--kv", 5), "--kv expects 4, 8 or 32, got 5"),
        ((path, "--acts", 4), "--acts expects 8 or 32, got 4"),
        ((path, "--backend", "cpu"), "--backend expects gpu or numpy, got cpu; nearest: gpu"),
        (
            (path, "--length", 9, "--text", tmp_path / "nosuch"),
            f"{tmp_path / 'nosuch'}: cannot be read: No such file or directory",
        ),
        (
            (path, "--text", text, "--windows", 9, "--length", 100),
            "windows: at most 4, as the text has 450 tokens (got 9)",
        ),
        ((path, "--text", text, "--length", 129), "--length expects at most 128, the model's context, got 129"),
        ((path, "--text", text, "--length", 0), "length: must be an integer, 2 or more (got 0)"),
    ):
        assert cli("perplexity", *arguments) == (2, "", f"error: {message}\n")
