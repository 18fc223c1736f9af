"""A small model through whole recipes into a folder: what is in it, crashes, and what stops a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.errors import ArgumentError, FileError
from ptxlab.llm import model as models
from ptxlab.llm import recipe as steps
from ptxlab.llm.checkpoints import folder
from ptxlab.llm.checkpoints.open import dequantize_model
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.model import Config, FloatModel, floats, perplexity
from ptxlab.llm.recipe import RECIPES, Recipe, calibrate, quantize
from ptxlab.lowbit.layout import unpack
from tests.support import small_models
from tests.support.dispatching_array import DispatchingArray, to_device

CONFIG = Config(hidden=96, ffn=192, heads=6, kv_heads=2, head_dim=16, layers=2, vocabulary=60, tied_head=True)
BIASED = Config(
    hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, layers=2, vocabulary=60, qkv_bias=True, window=9, name="small"
)
UNTIED = replace(CONFIG, tied_head=False)
PACKED = {name: recipe.but(group=32) for name, recipe in RECIPES.items() if name not in ("atom", "fmpq")}
RNG = np.random.default_rng(0)
TEXT = RNG.integers(0, 60, (6, 40))


def small_model(config: Config = CONFIG) -> FloatModel:
    """Make a model whose residual channels differ much in size, as in trained models."""
    model = FloatModel.random(config)
    scale = np.where(np.arange(config.hidden) % 31 == 7, 12, 0.3).astype(np.float32)
    return FloatModel(
        **{**vars(model), "embedding": model.embedding * scale, "head": None if model.head is None else model.head / 4}
    )


def arrays(part: Any) -> dict[str, Any]:
    """List every array of a layer by its attribute."""
    arrays_by_name = {name: array for name, array in part.parts.items() if hasattr(array, "ndim")}
    for name in ("qkv", "o", "gate_up", "down"):
        arrays_by_name |= {f"{name}.{buffer}": array for buffer, array in getattr(part, name).buffers.items()}
    return arrays_by_name


def assert_same(first: Any, second: Any) -> None:
    assert first.config == second.config and first.recipe == second.recipe
    for a, b in zip(first.layers, second.layers, strict=True):
        assert arrays(a).keys() == arrays(b).keys()
        for name, array in arrays(a).items():
            np.testing.assert_array_equal(array, arrays(b)[name], strict=True, err_msg=name)
    for name in ("embedding", "final_norm", "head"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), strict=True)


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.default_cases("rtn-tied")
@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["tied", "biased"])
@pytest.mark.parametrize("name", PACKED)
def test_a_model_becomes_a_folder_that_computes_as_it_was_calibrated(name: str, config: Config, tmp_path: Path) -> None:
    model, recipe = small_model(config), PACKED[name]
    done: list[str] = []
    errors = quantize.quantize_model(model, TEXT, recipe, tmp_path / "out", progress=done.append)
    assert done == ["layer 0", "layer 1"] and list(errors) == [0, 1]
    loaded_model = folder.load(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing half-done beside it
    assert loaded_model.recipe["scheme"] == recipe.scheme
    assert loaded_model.config.tied_head == (config.tied_head and not recipe.rotate)
    for layer in loaded_model.layers:
        for matrix in ("qkv", "o", "gate_up", "down"):
            weight: Any = unpack(getattr(layer, matrix))
            assert not hasattr(weight, "overflows") or not weight.overflows().any()
    states = [dequantize_model(loaded_model).embed(TEXT[:1])]
    for index, layer in enumerate(calibrate.quantize_layers(calibrate.prepare_model(model, recipe), TEXT, recipe)):
        assert layer is not None
        ours = dequantize_model(loaded_model).layers[index]
        for matrix in ("q", "k", "v", "o", "gate", "up", "down"):
            if index == 0 or not recipe.is_calibrated:  # later ones saw the stored norms, in FP16
                np.testing.assert_array_equal(layer.floats[matrix], ours[matrix])
        states.append(dequantize_model(loaded_model).run_layer(states[-1], ours, recipe.numerics()))
    assert np.isfinite(states[-1]).all()


@pytest.mark.full
def test_the_whole_recipe_beats_rounding() -> None:
    """The measure is the squared error of the logits."""
    model, errors = small_model(), {}
    for name in ("rtn", "lqq"):
        recipe = PACKED[name]
        prepared = calibrate.prepare_model(model, recipe)
        layers = [layer for layer in calibrate.quantize_layers(prepared, TEXT, recipe) if layer]
        new = FloatModel(**{**vars(prepared), "layers": [layer.floats for layer in layers]})
        logits = new.logits(new.states([TEXT], recipe.numerics())[0])
        exact_logits = model.logits(model.states([TEXT])[0])
        errors[name] = float(((logits - exact_logits) ** 2).mean() / (exact_logits**2).mean())
    assert errors["lqq"] < 0.5 * errors["rtn"]


def test_a_width_without_a_hadamard_matrix_takes_a_random_rotation() -> None:
    model = FloatModel.random(replace(CONFIG, hidden=184, layers=1), dtype=np.float64)
    with pytest.raises(ArgumentError, match=r"n: must be a product of known orders .* \(got 184\)"):
        calibrate.prepare_model(model, RECIPES["lqq"])
    prepared_model = calibrate.prepare_model(model, RECIPES["lqq"].but(rotate="random"))
    logits = [source_model.logits(source_model.states([TEXT])[0]) for source_model in (model, prepared_model)]
    np.testing.assert_allclose(*logits, atol=1e-9 * np.abs(logits[0]).max())


@pytest.mark.full
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, model = PACKED["lqq"].but(rotate=None), small_model(BIASED)  # whose norms are rounded to FP16
    quantize.quantize_model(model, TEXT, recipe, tmp_path / "whole")

    def interrupt(label: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize.quantize_model(model, TEXT, recipe, tmp_path / "out", progress=interrupt)
    assert not (tmp_path / "out").exists()
    (tmp_path / ".out.partial" / ".layer_001.safetensors.1.tmp").write_bytes(b"torn")
    calls: list[int] = []
    quantise = calibrate.quantize_layer
    monkeypatch.setattr(calibrate, "quantize_layer", lambda *args: calls.append(1) or quantise(*args))
    assert list(quantize.quantize_model(model, TEXT, recipe, tmp_path / "out")) == [1]
    assert len(calls) == 1 and files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_run_that_was_killed_after_its_last_layer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(quantize.os, "replace", interrupt_folders)
        quantize.quantize_model(small_model(), TEXT, PACKED["rtn"], tmp_path / "out")
    changed = small_model()
    change_weight(changed, 1, "up")
    with pytest.raises(FileError, match="holds layers of another run, whose weights differs;"):
        quantize.quantize_model(changed, TEXT, PACKED["rtn"], tmp_path / "out")
    assert quantize.quantize_model(small_model(), TEXT, PACKED["rtn"], tmp_path / "out") == {}
    assert len(folder.load(tmp_path / "out").layers) == 2


def interrupt_folders(source: Path, target: Path) -> None:
    """Rename a file; interrupt the renaming of a folder."""
    if source.is_dir():
        raise KeyboardInterrupt
    source.rename(target)


def change_weight(model: FloatModel, layer: int, name: str) -> FloatModel:
    """Change the last element of a tensor of a layer."""
    model.layers[layer][name].flat[-1] += 1
    return model


OTHER_RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "another recipe": ({"recipe": PACKED["qoq"].but(clip_block=False)}, r"scheme differs \(lqq, now qoq\)"),
    "another setting": ({"recipe": PACKED["lqq"].but(damping=0.02)}, r"damping differs \(0.01, now 0.02\)"),
    "another text": ({"tokens": TEXT[1:]}, "text differs;"),
    "another layout": ({"layout": "qserve"}, r"layout differs \(strips, now qserve\)"),
    "another dtype": ({"dtype": "bfloat16"}, r"dtype differs \(float16, now bfloat16\)"),
    "another tokenizer": ({"tokenizer": True}, "tokenizer differs"),
    **{
        f"another {key}": ({"config": {key: setting}}, rf"config\.\w+ differs \(.*now {setting}\)")
        for key, setting in (("rope_base", 5e5), ("eps", 1e-6), ("context", 64))
    },
    "another name": ({"config": {"name": "other"}}, r"model differs \(, now other\)"),
    **{
        f"another {name} of layer {layer}": ({"weights": (layer, name)}, rf"weights\.layer {layer} differs;")
        for layer, name in ((0, "q"), (0, "down"), (1, "q"), (1, "up"), (1, "post_norm"))
    },
    **{
        f"another {name}": ({"ends": name}, rf"weights\.{name} differs;")
        for name in ("embedding", "final_norm", "head")
    },
    "another ptxlab": (
        {"version": "ptxlab.llm.recipe.quantize.__version__"},
        r"versions\.ptxlab differs \(.*, now 0\.0\)",
    ),
    "another NumPy": ({"version": "numpy.__version__"}, r"versions\.numpy differs \(.*, now 0\.0\)"),
}


@pytest.fixture(scope="module")
def interrupted_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interrupt a run after its first layer."""

    def kill(label: str) -> None:
        raise KeyboardInterrupt

    folder = tmp_path_factory.mktemp("run")
    with pytest.raises(KeyboardInterrupt):
        quantize.quantize_model(small_model(UNTIED), TEXT, PACKED["lqq"], folder / "out", progress=kill)
    return folder


@pytest.mark.parametrize("case", OTHER_RUNS)
def test_another_run_does_not_go_on_with_these_layers(
    case: str, interrupted_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a run begins with, down to one weight, is known; the message names what differs."""
    change, message = OTHER_RUNS[case]
    model = small_model(UNTIED)
    if "weights" in change:
        change_weight(model, *change["weights"])
    if "ends" in change:
        model = replace(model, **{change["ends"]: getattr(model, change["ends"]) * np.float32(1.5)})
    if "version" in change:
        monkeypatch.setattr(change["version"], "0.0")
    model = replace(model, config=replace(UNTIED, **change.get("config", {})))
    layers = files(interrupted_run / ".out.partial")
    with pytest.raises(FileError, match=rf"\.out\.partial: holds layers of another run, whose {message}") as error:
        quantize.quantize_model(
            model,
            change.get("tokens", TEXT),
            change.get("recipe", PACKED["lqq"]),
            interrupted_run / "out",
            tokenizer=Tokenizer((1,), small_models.tokenizer()) if "tokenizer" in change else None,
            layout=change.get("layout", "strips"),
            dtype=change.get("dtype", "float16"),
        )
    assert "\n" not in str(error.value) and files(interrupted_run / ".out.partial") == layers
    assert [path.name for path in interrupted_run.iterdir()] == [".out.partial"]


def test_another_layout_and_bfloat16(tmp_path: Path) -> None:
    quantize.quantize_model(small_model(), TEXT, PACKED["rtn"], tmp_path / "out", layout="qserve", dtype="bfloat16")
    loaded_model = folder.load(tmp_path / "out")
    assert {layer.down.layout for layer in loaded_model.layers} == {"qserve"}
    assert {layer.dtype for layer in loaded_model.layers} == {"bfloat16"} and loaded_model.final_norm.dtype == np.uint16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_saved_loads_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    model = models.QuantizedModel.rounded(small_model(BIASED), "lqq", 32, dtype=dtype)
    folder.save(model, tmp_path)
    assert_same(folder.load(tmp_path), model)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Qwen2ForCausalLM"], dtype)
    assert config["quantization_config"] == {
        "quant_method": "ptxlab", "version": 1, "layout": "strips", "scheme": "lqq", "group": 32,
    }  # fmt: skip


def test_matrices_packed_otherwise_are_exceptions_by_name(tmp_path: Path) -> None:
    model = models.QuantizedModel.rounded(small_model(), "lqq", 32)
    by_channel = models.QuantizedModel.rounded(small_model(), "qoq_channel")
    mixed = replace(model, layers=[model.layers[0], replace(model.layers[1], o=by_channel.layers[1].o)])
    folder.save(mixed, tmp_path)
    of_o = {"layout": "strips", "scheme": "qoq_channel", "group": 96}
    assert folder.packing_config(tmp_path, 2)["exceptions"] == {"model.layers.1.self_attn.o_proj": of_o}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 7, "context": 4096, "head_dim": 24},
        {"qkv_bias": True, "tied_head": True, "activation": "gelu_tanh"},
        {"qkv_bias": True, "window": 7, "rope_base": 5e5, "eps": 1e-6, "name": "some"},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"experts": 8, "chosen_experts": 2, "window": 7},
    ],
)
def test_a_config_comes_back_from_its_keys(changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **{"tied_head": False, **changes})
    assert Config.from_json(config.to_json()) == config


def damaged_recipe(path: Path) -> None:
    recipe = json.loads((path / "recipe.json").read_text())
    recipe["recipe"]["group"] = 64
    (path / "recipe.json").write_text(json.dumps(recipe))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "recipe.json").unlink(), "no quantised model: no recipe.json"),
        (damaged_recipe, "the digest must be that of the recipe"),
        (lambda path: (path / "recipe.json").write_text("[]"), "must hold schema, digest and recipe"),
        (lambda path: (path / "layer_001.safetensors").unlink(), "layer_001.safetensors: no such file"),
        (lambda path: (path / "config.json").write_text("{}"), "config.json: model_type"),
        (
            lambda path: (path / "layer_001.safetensors").write_bytes(
                (path / "layer_001.safetensors").read_bytes()[:-9]
            ),
            "not a readable safetensors",
        ),
        (
            lambda path: (path / "ends.safetensors").write_bytes((path / "layer_001.safetensors").read_bytes()),
            r"embed_tokens.weight must be \[60, 96\]",
        ),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path: Path, damage: Any, message: str) -> None:
    folder.save(models.QuantizedModel.rounded(small_model(), "lqq", 32), tmp_path)
    damage(tmp_path)
    with pytest.raises(FileError, match=message) as error:
        folder.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "text", "error", "message"),
    [
        (
            RECIPES["atom"].but(kept_bits=16),
            TEXT,
            ArgumentError,
            "recipe: scheme must be one of lqq, qoq, qoq_channel to be packed, or int4 with 4-bit .* measured: ptxlab",
        ),
        (RECIPES["atom"], TEXT, ArgumentError, r"qkv: K: must be a positive multiple of the group 64 \(got 32\)"),
        (RECIPES["fmpq"], TEXT, ArgumentError, r"qkv: K: must be a positive multiple of the group 64 \(got 96\)"),
        (RECIPES["lqq"], TEXT, ArgumentError, "qkv: weight: K must be a multiple of the group"),
        (PACKED["lqq"], TEXT[:0], ArgumentError, "tokens: this recipe needs a text"),
    ],
)
def test_a_recipe_that_does_not_fit_leaves_nothing(
    tmp_path: Path, recipe: Recipe, text: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quantize.quantize_model(small_model(), text, recipe, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_layer_that_cannot_be_quantised_is_named(tmp_path: Path) -> None:
    model = small_model()
    model.layers[1]["gate"][3, 4] = np.inf  # type: ignore[index]
    with pytest.raises(ArgumentError, match=r"layer 1: w: must be finite in float32 \(got w\[3, 4\] is inf\)"):
        quantize.quantize_model(model, TEXT[:0], PACKED["rtn"], tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"layer 0: w: K less 64 must be a multiple of the group"):
        list(calibrate.quantize_layers(small_model(), TEXT, RECIPES["atom"]))


@pytest.mark.parametrize("name", ["embedding", "final_norm", "head"])
def test_what_float16_does_not_hold_is_refused(tmp_path: Path, name: str) -> None:
    model = small_model(BIASED)
    model = replace(model, **{name: getattr(model, name) * 1e6})
    message = rf"^{name}: must lie in ±65504 to be stored in float16 \(got "
    with pytest.raises(ArgumentError, match=message):
        models.QuantizedModel.rounded(model, "lqq", 32)
    with pytest.raises(ArgumentError, match=message):
        quantize.quantize_model(model, TEXT, PACKED["rtn"], tmp_path / "out")
    assert not list(tmp_path.iterdir())
    if name == "final_norm":
        assert models.QuantizedModel.rounded(model, "lqq", 32, dtype="bfloat16").final_norm.dtype == np.uint16


def test_a_file_in_the_place_of_the_unfinished_folder(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").write_text("")
    with pytest.raises(FileError, match=r"\.out\.partial: cannot be made: File exists"):
        quantize.quantize_model(small_model(), TEXT, PACKED["rtn"], tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": -1}, "count: must be an integer, 1 or more"),
        ({"length": 0}, "length: must be an integer, 1 or more"),
        ({"seed": -1}, "seed: must be an integer, 0 or more"),
        ({"length": 241}, r"length: at most the text's 240 tokens \(got 241\)"),
    ],
)
def test_samples_that_no_text_has(options: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        calibrate.draw_samples(TEXT.reshape(-1), **{"count": 1, "length": 4, **options})


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is there already"):
        quantize.quantize_model(small_model(), TEXT, PACKED["rtn"], tmp_path)


def test_a_weight_that_would_overflow_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.LQQGrid, "candidates", levels_that_leave_s8)
    with pytest.raises(ArgumentError, match=r"layer 0: weight: must restore to -128..127"):
        quantize.quantize_model(small_model(), TEXT, PACKED["rtn"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def levels_that_leave_s8(grid: Any, group: int, w: Any) -> Any:
    """Make levels up to 16·15 - 100 = 140.

    Scales are so small that the largest weights take the last level.
    """
    step, minimum = np.full(w.shape[1], 16.0), np.full(w.shape[1], -100.0)
    return steps.Levels(grid.scale / 2, step, minimum), (step, minimum)


@pytest.fixture
def one_sample_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run calibration samples one by one, as on a CPU: the same sums in the same order."""
    monkeypatch.setattr(floats, "_ELEMENTS", 1)


@pytest.mark.default_cases("rtn", "qoq_released")
@pytest.mark.usefixtures("one_sample_at_a_time")
@pytest.mark.parametrize("name", RECIPES)
def test_every_step_dispatches_on_device_arrays(name: str) -> None:
    """The arrays of a GPU, whose library refuses NumPy's, give the same layer."""
    four_bits = name in ("atom", "fmpq")
    model = small_model(replace(CONFIG, hidden=128, heads=8) if four_bits else CONFIG)
    recipe = RECIPES[name] if four_bits else RECIPES[name].but(group=32)
    host = next(calibrate.quantize_layers(calibrate.prepare_model(model, recipe), TEXT, recipe))
    moved = FloatModel(
        config=model.config,
        embedding=DispatchingArray(model.embedding),
        layers=[{name: DispatchingArray(array) for name, array in layer.items()} for layer in model.layers],
        final_norm=DispatchingArray(model.final_norm),
    )
    device = next(calibrate.quantize_layers(calibrate.prepare_model(moved, recipe), to_device(TEXT), recipe))
    assert host is not None and device is not None
    for name, w in host.floats.items():
        np.testing.assert_allclose(device.floats[name].array, w, rtol=1e-5, atol=1e-6)


@pytest.mark.default_cases("lqq")
@pytest.mark.usefixtures("one_sample_at_a_time")
@pytest.mark.parametrize("name", ["lqq", "liquid", "atom", "fmpq"])
def test_a_model_of_device_arrays_becomes_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The folder is packed and written too, and read again to calibrate the next layer on."""
    monkeypatch.setattr(gpu, "is_device_array", lambda array: isinstance(array, DispatchingArray))
    monkeypatch.setattr(gpu, "device_info", lambda: None)
    monkeypatch.setattr(gpu, "to_device", DispatchingArray)
    monkeypatch.setattr(gpu, "to_host", DispatchingArray.get)
    model, recipe = small_model(BIASED), PACKED.get(name)
    if recipe is None:
        model, recipe = small_model(replace(BIASED, hidden=128, heads=8, ffn=192)), RECIPES[name].but(clip=None)
    for place, source_model in (("host", model), ("device", model.to_device())):
        quantize.quantize_model(source_model, TEXT, recipe, tmp_path / place)
    assert files(tmp_path / "host") == files(tmp_path / "device")


@pytest.mark.gpu
@pytest.mark.parametrize("name", PACKED)
def test_on_a_gpu_a_recipe_gives_the_same_model(cupy: Any, tmp_path: Path, name: str) -> None:
    """But for sums in another order. GPTQ hands every rounding on to the columns behind it: in NumPy, too, an embedding
    that differs by 1e-7 gives other levels to half of the second layer. So what has seen no rounding yet is compared
    by its levels, and all by the error of its output."""
    model, recipe = small_model(), PACKED[name]
    text = np.tile(TEXT, (1, 4))
    errors = [
        quantize.quantize_model(model, text, recipe, tmp_path / place)
        for place, model in (("host", model), ("device", model.to_device()))
    ]
    host, device = (folder.load(tmp_path / place) for place in ("host", "device"))
    assert host.recipe == device.recipe and host.config == device.config
    levels = [unpack(model.layers[0].qkv).q4 for model in (host, device)]
    assert (levels[0] == levels[1]).mean() > 0.99
    for index, of in errors[0].items():
        for matrix, error in of.items():
            assert errors[1][index][matrix] == (None if error is None else pytest.approx(error, rel=0.1))
    numerics = recipe.numerics()
    on_host, on_device = (perplexity(dequantize_model(model), TEXT, numerics) for model in (host, device))
    assert np.log(on_device) == pytest.approx(np.log(on_host), rel=0.05)


def test_a_setting_that_one_run_lacks_differs() -> None:
    """It differs even if it is null in the other, as a later version's would be."""
    earlier, now = {"config": {"a": 1}}, {"config": {"a": 1, "b": None}}
    assert quantize._difference(earlier, now) == "config.b differs (absent, now None)"
