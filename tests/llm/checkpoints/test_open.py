"""Models of folders and of GGUF files: layers read when asked for, and what does not fit refused before."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ptxlab.errors import FileError
from ptxlab.io import downloads as weights
from ptxlab.io.downloads import ShippedData, ShippedFile
from ptxlab.llm.checkpoints import open_model
from ptxlab.llm.checkpoints.open import dequantize_model
from ptxlab.llm.model import Config, FloatModel, LayerWeights, QuantizedModel
from ptxlab.lowbit.layout import unpack
from ptxlab.lowbit.layout.checkpoint import CheckpointFolder
from tests.support.small_models import CONFIGS, random_tokens, tensors, tokenizer, write_folder, write_gguf


def logits(model: FloatModel) -> Any:
    return model.logits(model.states([random_tokens()])[0])


@pytest.mark.parametrize("family", ["smollm", "llama3", "qwen2", "mixtral"])
def test_gguf_is_the_folder(family: str, tmp_path: Path) -> None:
    """llama.cpp's order of q's and k's rows, its names, LLaMA-3's scaling as a tensor, biases, the tied head, stacks of
    experts."""
    folder, _ = open_model(write_folder(tmp_path, family))
    file, _ = open_model(write_gguf(tmp_path / "model.gguf", family))
    assert np.abs(logits(file) - logits(folder)).max() < 1e-5
    assert file.config.tied_head is (family in ("smollm", "qwen2")) and (file.head is None) == file.config.tied_head


def test_a_factor_alone_scales_a_gguf_linearly(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    folder, _ = open_model(write_folder(tmp_path, "smollm", rope_scaling=scaling))
    file, _ = open_model(write_gguf(tmp_path / "model.gguf", "smollm", rope_scaling_factor=4.0, sliding_window=3))
    assert file.config.rope_scaling == folder.config.rope_scaling == scaling
    assert np.abs(logits(file) - logits(folder)).max() < 1e-5


def test_a_quantised_gguf_is_dequantised(tmp_path: Path) -> None:
    plain_file, _ = open_model(write_gguf(tmp_path / "plain.gguf", "smollm"))
    model, _ = open_model(str(write_gguf(tmp_path / "model.gguf", "smollm", "Q8_0")))
    errors = [np.abs(model.layers[i][name] - w).max() for i in range(2) for name, w in plain_file.layers[i].items()]
    assert 0 < max(errors) < 0.01 and model.layers[0]["q"].dtype == np.float32


def test_layers_are_read_when_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    of_file = CheckpointFolder.read
    monkeypatch.setattr(CheckpointFolder, "read", lambda self, name: read.append(name) or of_file(self, name))
    model, _ = open_model(write_folder(tmp_path, "llama3", shards=3))
    assert sorted(read) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    del read[:]
    assert (model.layers[-1]["q"] == model.layers[1]["q"]).all() and len(model.layers) == 2
    assert len(read) == 18 and all(name.startswith("model.layers.1.") for name in read)
    with pytest.raises(IndexError):
        model.layers[2]


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_shards_and_dtypes(dtype: str, tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    rounded = {name: array.astype(kind) for name, array in tensors(CONFIGS["smollm"]).items()}
    write_folder(tmp_path, "smollm", shards=2)
    for path in tmp_path.glob("*.safetensors"):
        save_file({name: rounded[name] for name in load_file(path)}, path)
    model, _ = open_model(tmp_path)
    right = rounded["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(model.layers[1]["up"], right, strict=True)


def test_old_checkpoints_and_copies_of_a_tied_head(tmp_path: Path) -> None:
    write_folder(tmp_path, "smollm")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    extra_tensors = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    extra_tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors | extra_tensors, path)
    assert open_model(tmp_path)[0].head is None


def edit_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    """Return an edit of the tensors in model.safetensors."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return write


def edit_config(**changes: Any) -> Callable[[Path], None]:
    """Return an edit that changes config.json."""
    return lambda folder: (folder / "config.json").write_text(json.dumps({**CONFIGS["smollm"], **changes})) and None


def write_larger_tokenizer(folder: Path) -> None:
    """Write a tokenizer with more tokens than the model has."""
    larger_tokenizer = tokenizer()
    larger_tokenizer.add_tokens([f"word {i}" for i in range(40)])
    larger_tokenizer.save(str(folder / "tokenizer.json"))


def start_tokens(folder: Path) -> None:
    """Write a template that begins with a token which the model does not have."""
    definition = json.loads((folder / "tokenizer.json").read_text())
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    specials = {"<s>": {"id": "<s>", "ids": [301], "tokens": ["<s>"]}}
    template = {"type": "TemplateProcessing", "single": single, "pair": single[1:], "special_tokens": specials}
    (folder / "tokenizer.json").write_text(json.dumps({**definition, "post_processor": template}))


UP = "model.layers.1.mlp.up_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r": no config\.json: not a Hugging Face model"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json: not JSON: .+"),
    "family": (edit_config(model_type="gpt2"), r"config\.json: model_type: must be one of .* \(got 'gpt2'\)"),
    "experts": (
        edit_config(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
        r"model\.layers\.0\.block_sparse_moe\.experts\.0\.w1\.weight: missing",
    ),
    "10^12 layers": (edit_config(num_hidden_layers=10**12), r"num_hidden_layers: must be at most 8192 \(got 1\d+\)"),
    "8,000 layers": (edit_config(num_hidden_layers=8000), r"model\.layers\.2\.self_attn\.q_proj\.weight: missing"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"no \.safetensors file"),
    "cut off": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]),
        r"model\.safetensors: not a readable safetensors file .+",
    ),
    "missing": (edit_tensors(lambda t: t.pop(UP)), rf"{UP}: missing"),
    "shape": (edit_tensors(lambda t: t.update({UP: t[UP][:-1]})), rf"{UP}: must be \[64, 32\] \(got \[63, 32\]\)"),
    "transposed": (edit_tensors(lambda t: t.update({UP: t[UP].T.copy()})), rf"{UP}: must be \[64, 32\] \(got .*\)"),
    "dtype": (edit_tensors(lambda t: t.update({UP: t[UP].astype(np.int8)})), rf"{UP}: dtype must be .* \(got I8\)"),
    "unknown": (
        edit_tensors(lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": np.zeros(32, np.float32)})),
        r"model\.layers\.0\.self_attn\.o_proj\.bias: not known in a model of this family",
    ),
    "NaN": (
        edit_tensors(lambda t: t["model.norm.weight"].__setitem__(3, np.nan)),
        r"model\.norm\.weight: must be finite in float32 \(got model\.norm\.weight\[3\] is nan\)",
    ),
    "vocabulary": (edit_config(vocab_size=260), r"embed_tokens\.weight: must be \[260, 32\] \(got \[300, 32\]\)"),
    "too many tokens": (write_larger_tokenizer, r"tokenizer: at most 300 tokens \(got 301\)"),
    "start tokens": (start_tokens, r"tokenizer: start tokens must be below 300 \(got 301\)"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"no tokenizer\.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused(case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    change(write_folder(tmp_path, "smollm"))
    with pytest.raises(FileError, match=rf"^{tmp_path}.*{message}$") as error:
        open_model(tmp_path)
    assert "\n" not in str(error.value)


def test_infinity_in_a_layer_is_refused_when_it_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path, "smollm")
    edit_tensors(lambda tensors: tensors[UP].__setitem__((5, 7), np.inf))(tmp_path)
    model, _ = open_model(tmp_path)
    assert model.layers[0]
    with pytest.raises(FileError, match=rf"{UP}: must be finite in float32 \(got .*\[5, 7\] is inf\)$"):
        model.layers[1]


def edit_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    """Return an edit of the index of shards."""

    def write(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index_json = json.loads(path.read_text())
        change(index_json["weight_map"])
        path.write_text(json.dumps(index_json))

    return write


FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
GATE = "model.layers.1.mlp.gate_proj.weight"
SHARDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard is missing": (lambda f: (f / SECOND).unlink(), rf"{SECOND}: no such file"),
    "in another file": (
        edit_index(lambda names: names.update({GATE: FIRST})),
        rf"index\.json: {GATE} is not in {FIRST}",
    ),
    "in no file": (edit_index(lambda names: names.update(more=FIRST)), rf"index\.json: more is not in {FIRST}"),
    "outside": (edit_index(lambda names: names.update({GATE: "../a"})), r"files of its own folder \(got \.\./a\)"),
    "no map": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": [1]}'),
        r"index\.json: not an index with a weight_map of file names",
    ),
    "twice": (lambda f: shutil.copy(f / SECOND, f / FIRST), r"model\S* is in model-00001-of-00002\.safetensors too"),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARDS)
def test_broken_shards_are_refused(case: str, tmp_path: Path) -> None:
    change, message = SHARDS[case]
    write_folder(tmp_path, "smollm", shards=2)
    assert GATE in load_file(tmp_path / SECOND)
    change(tmp_path)
    with pytest.raises(FileError, match=rf"^{tmp_path}.*{message}$"):
        open_model(tmp_path)


GGUF: dict[str, tuple[dict[str, Any], str]] = {
    "context": ({"rope_dimension_count": 4}, r"GGUF: llama\.rope\.dimension_count: must be head_dim, 8 \(got 4\)"),
    "heads": ({"head_count_kv": 3}, r"GGUF: llama\.attention\.head_count_kv: must divide the 4 query heads \(got 3\)"),
    "layers": ({"block_count": 3}, r"blk\.2\.attn_q\.weight: missing"),
    "fewer layers": ({"block_count": 1}, r"blk\.1\.attn_k\.weight: not known in a model of this family"),
    "tokenizer": ({"tokenizer_model": "bert"}, r"tokenizer\.ggml\.model: must be gpt2 or llama \(got bert\)"),
}


@pytest.mark.parametrize("case", GGUF)
def test_a_gguf_that_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    change, message = GGUF[case]
    path = write_gguf(tmp_path / "model.gguf", "smollm", **change)
    with pytest.raises(FileError, match=rf"^{path}: {message}$"):
        open_model(path)


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"nosuch: no model: a folder, a \.gguf file, or one of smollm2$"):
        open_model("nosuch")
    (tmp_path / "model.gguf").write_bytes(b"GGML")
    with pytest.raises(FileError, match=r"model\.gguf: not a readable GGUF file"):
        open_model(tmp_path / "model.gguf")


def test_a_name_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "a.gguf", "smollm")
    file = ShippedFile("a.gguf", path.stat().st_size, "")
    shipped = ShippedData("smollm2", "model", "", "", "p", "1", 0, "", (file,))
    monkeypatch.setattr(weights, "KNOWN", {"smollm2": shipped})
    monkeypatch.setattr(weights, "fetch", lambda name, progress: tmp_path)
    model, found_tokenizer = open_model("smollm2")
    assert model.config.layers == 2 and found_tokenizer.vocabulary == 300


def test_rope_factors_are_positive_and_one_a_pair() -> None:
    sizes: Any = {"hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "layers": 1, "vocabulary": 9}
    for factors in ([1.0] * 3, [1, 1, 0, 1], [1, 1, float("nan"), 1]):
        with pytest.raises(ValueError, match="per_pair needs 4 factors above 0"):
            Config(**sizes, rope_scaling={"rope_type": "per_pair", "factors": factors})
    halved = Config(**sizes, rope_scaling={"rope_type": "per_pair", "factors": [2.0] * 4})
    plain = Config(**sizes)
    for table, expected in zip(halved.rope_tables(np.arange(0, 20, 2)), plain.rope_tables(10), strict=True):
        assert (table == expected).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_quantised_model_is_dequantised_by_layers(dtype: str) -> None:
    config = Config.from_json({**CONFIGS["qwen2"], "hidden_size": 128, "intermediate_size": 128})
    layers = [LayerWeights.random(config, seed, dtype=dtype) for seed in range(2)]
    embedding = np.random.default_rng(0).standard_normal((300, 128)).astype(np.float16)
    norm = layers[0].input_norm
    dequantized = dequantize_model(QuantizedModel(config=config, embedding=embedding, layers=layers, final_norm=norm))
    assert dequantized.head is None and dequantized.embedding.dtype == dequantized.final_norm.dtype == np.float32
    for layer, packed in zip(dequantized.layers, layers, strict=True):
        assert {name: w.shape for name, w in layer.items() if w.ndim == 2} == config.separate_matrices
        for name, parts in {"qkv": "q k v", "o": "o", "gate_up": "gate up", "down": "down"}.items():
            together = np.concatenate([layer[part] for part in parts.split()])
            np.testing.assert_array_equal(together, unpack(getattr(packed, name)).dequantize(), strict=True)
        biases = [layer[f"{part}_bias"] for part in "qkv"]
        np.testing.assert_array_equal(np.concatenate(biases), packed.qkv_bias, strict=True)
        assert layer["input_norm"].min() > 0 and layer["post_norm"].dtype == np.float32
    assert np.isfinite(logits(dequantized)).all()
