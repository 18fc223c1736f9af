"""A model in W4A4 by Atom's recipe and by COMET's: its folder, its floats, and the integers that the kernels take."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError, FileError
from ptxlab.llm.checkpoints import folder
from ptxlab.llm.checkpoints.open import dequantize_model
from ptxlab.llm.model import Config, FloatModel, KernelRunner, NumpyRunner, QuantizedModel, perplexity
from ptxlab.llm.model.decoder import Layer, Numerics
from ptxlab.llm.model.numpy_runner import GroupProduct
from ptxlab.llm.model.quantized import FUSED, numerics_of
from ptxlab.llm.recipe import RECIPES, Recipe, calibrate
from ptxlab.llm.recipe.quantize import quantize_model
from ptxlab.lowbit import layout, quant, reference
from ptxlab.lowbit.kernels.gemm.w4a4 import gemm_atom
from ptxlab.lowbit.kernels.gemm.w4ax import gemm_blocks
from ptxlab.lowbit.layout import ReorderedWeight, pack_reordered

CONFIG = Config(hidden=128, ffn=192, heads=2, kv_heads=1, head_dim=64, layers=2, vocabulary=60, qkv_bias=True)
TEXT = np.random.default_rng(0).integers(0, 60, (4, 40))
FOUR_BITS = {"atom": RECIPES["atom"], "fmpq": RECIPES["fmpq"].but(int8=0.5, outlier=2.0)}


def small_model() -> FloatModel:
    """Make a model whose residual channels, and rows of up, differ much in size."""
    model, rng = FloatModel.random(CONFIG), np.random.default_rng(3)
    layers = [{**layer, "up": layer["up"] * rng.choice([0.3, 8], (192, 1), p=[0.9, 0.1])} for layer in model.layers]
    layers = [{name: array.astype(np.float32) for name, array in layer.items()} for layer in layers]
    scale = np.where(np.arange(128) % 31 == 7, 12, 0.3).astype(np.float32)
    return replace(model, embedding=model.embedding * scale, layers=layers)


@pytest.fixture(scope="module", params=FOUR_BITS)
def quantized_folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path, QuantizedModel]:
    """Quantise a model; return the recipe, the folder that it makes, and the model in it."""
    recipe, out = FOUR_BITS[request.param], tmp_path_factory.mktemp("w4a4") / "out"
    quantize_model(small_model(), TEXT, recipe, out, layout="rows" if request.param == "fmpq" else "strips")
    return recipe, out, folder.load(out)


@pytest.mark.default_cases("fmpq")
def test_a_folder_holds_what_the_recipe_computed(
    quantized_folder: tuple[Recipe, Path, QuantizedModel], tmp_path: Path
) -> None:
    """Every float of the first layer is equal.

    When the folder is loaded and written again, every byte is.
    """
    recipe, out, model = quantized_folder
    right = next(calibrate.quantize_layers(calibrate.prepare_model(small_model(), recipe), TEXT, recipe))
    assert right is not None
    floats = dequantize_model(model).layers[0]
    assert floats.keys() == right.floats.keys()
    for name, array in right.floats.items():
        same = array.astype(np.float16) if name.endswith("norm") else array
        np.testing.assert_array_equal(floats[name], same, err_msg=name)
    folder.save(model, tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name
    for name in FUSED:
        weight = getattr(model.layers[0], name)
        assert isinstance(weight, ReorderedWeight)
        assert (weight.scheme, weight.clip) == (("atom", 0.9) if recipe.kept else ("fmpq", 1))


def test_it_computes_as_the_recipe_says(quantized_folder: tuple[Recipe, Path, QuantizedModel]) -> None:
    recipe, _, model = quantized_folder
    assert numerics_of(model.layers[0]) == recipe.numerics()


def test_the_order_of_down_is_folded_into_gate_and_up_for_comet_alone(
    quantized_folder: tuple[Recipe, Path, QuantizedModel],
) -> None:
    """The input of down comes in order; the channels of largest magnitude are in the INT8 block at its end."""
    recipe, _, model = quantized_folder
    floats = dequantize_model(model)
    in_place = np.array_equal(floats.layers[0]["down_order"], np.arange(192))
    assert in_place == (recipe.int8 is not None)
    assert not np.array_equal(floats.layers[0]["o_order"], np.arange(128))

    class Peaks(Numerics):
        def product(self, name: str, x: Any, layer: Layer) -> Any:
            if name == "down":
                peaks.append(np.abs(x).max(axis=(0, 1)))
            return numerics.product(name, x, layer)

    peaks: list[Any] = []
    numerics = recipe.numerics()
    for sample in TEXT:
        floats.run_layer(floats.embed(sample[None]), floats.layers[0], Peaks())
    if recipe.int8 is not None:
        assert int(floats.layers[0]["down_int8"]) == 1
        largest = np.max(peaks, axis=0)
        assert np.median(largest[-64:]) > 2 * np.median(largest[:-64])


def test_folding_an_order_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe, fold = small_model(), FOUR_BITS["fmpq"].but(clip=None, gptq=False), calibrate.fold_down_order
    monkeypatch.setattr(calibrate, "fold_down_order", lambda layer: layer)
    plain = next(calibrate.quantize_layers(model, TEXT, recipe))
    assert plain is not None and not np.array_equal(plain.floats["down_order"], np.arange(192))
    x, numerics = model.embed(TEXT), recipe.numerics()
    states, folded_states = (model.run_layer(x, layer.floats, numerics) for layer in (plain, fold(plain)))
    np.testing.assert_allclose(folded_states, states, rtol=1e-4, atol=1e-5)  # sums in another order


def test_text_is_the_one_of_fake_quantisation(quantized_folder: tuple[Recipe, Path, QuantizedModel]) -> None:
    """Logits of the integers beside those of floats that are rounded at the same places, but not to FP16 in between:
    that moves some 4-bit activations by a whole step. An input in another order is off by 1 or so."""
    recipe, _, model = quantized_folder
    tokens = TEXT[0]
    runner = NumpyRunner(model, 1, len(tokens), rotated=False)
    runner.prefill([tokens[:4].tolist()])
    logits = np.concatenate([runner.decode(tokens[i : i + 1]) for i in range(4, len(tokens))])
    floats, exact = dequantize_model(model), small_model()
    expected = floats.logits(floats.states([tokens[None]], recipe.numerics())[0])[0, 4:]
    error, loss = relative(logits, expected), relative(exact.logits(exact.states([tokens[None]])[0])[0, 4:], expected)
    assert error < 0.75 * loss < 0.075, (error, loss)


@pytest.mark.long(30)
@pytest.mark.gpu
@pytest.mark.parametrize("name", FOUR_BITS)
def test_on_a_gpu_a_recipe_gives_the_same_model(cupy: Any, tmp_path: Path, name: str) -> None:
    """Sums in another order move a weight to the next level here and there.

    The model is measured on the GPU.
    """
    recipe, model, text = FOUR_BITS[name], small_model(), np.tile(TEXT, (1, 4))
    for place, source_model in (("host", model), ("device", model.to_device())):
        quantize_model(source_model, text, recipe, tmp_path / place)
    host, device = (folder.load(tmp_path / place) for place in ("host", "device"))
    for fused in FUSED:
        a, b = (getattr(source_model.layers[0], fused) for source_model in (host, device))
        assert (a.scheme, a.int8, a.clip) == (b.scheme, b.int8, b.clip)
        assert (a.order == b.order).mean() > 0.8 and relative(a.dequantize(), b.dequantize()) < 0.1
    numerics = recipe.numerics()
    on_host = perplexity(dequantize_model(host), TEXT, numerics)
    on_device = perplexity(dequantize_model(device).to_device(), TEXT, numerics)
    assert np.log(on_device) == pytest.approx(np.log(on_host), rel=0.05)


def relative(array: Any, expected: Any) -> float:
    return float(np.linalg.norm(array - expected) / np.linalg.norm(expected))


def problem(scheme: str, to: str) -> tuple[ReorderedWeight, Any, Any, Any]:
    """Make a weight [24, 320] and its order, activations [5, 320], and a bias."""
    rng = np.random.default_rng(5)
    w, x = rng.standard_normal((24, 320)).astype(np.float32), rng.standard_normal((5, 320)).astype(np.float32)
    order = rng.permutation(320)
    x[:, order[-64:]] *= 20
    rows = quant.quantize_atom_weight(w[:, order], 64, 64 if scheme == "atom" else 0)
    int8 = None if scheme == "atom" else 2
    return pack_reordered(rows, order, to, int8=int8, clip=0.8), rows, x, rng.standard_normal(24).astype(np.float32)


@pytest.mark.parametrize("to", layout.ATOM_LAYOUTS)
@pytest.mark.parametrize("scheme", ["atom", "fmpq"])
def test_a_product_is_the_kernels_reference(scheme: str, to: str, tmp_path: Path) -> None:
    packed, rows, x, bias = problem(scheme, to)
    layout.save(packed, tmp_path / "w.safetensors", "up")
    loaded = layout.load_reordered(tmp_path / "w.safetensors")
    assert vars(loaded).keys() == vars(packed).keys() and loaded.nbytes == packed.nbytes
    order, product = loaded.order, GroupProduct(loaded, bias)
    read = product.quantize(x)
    if scheme == "atom":
        right = quant.quantize_atom_activations(x[:, order], 64, 64, clip=0.8)
        expected = gemm_atom(rows, right, bias)
    else:
        blocks = quant.quantize_blocks(x[:, order], 2, 64)
        weight = quant.BlockRows(rows.q4, rows.scale4)
        sums = [blocks.q[:, k : k + 64].astype(int) @ weight.q[:, k : k + 64].T.astype(int) for k in range(0, 320, 64)]
        expected = reference.gemm_add_groups(sums, blocks.scale, weight.scale) + bias
        right = blocks
    for name, array in vars(right).items():
        np.testing.assert_array_equal(getattr(read, name), array, err_msg=name)
    np.testing.assert_array_equal(product(read, "float32"), expected, strict=True)
    np.testing.assert_array_equal(loaded.dequantize()[:, order], rows.dequantize())


def test_blocks_of_128_are_what_comets_kernel_computes() -> None:
    rng = np.random.default_rng(1)
    w, x = rng.standard_normal((8, 384)).astype(np.float32), rng.standard_normal((3, 384)).astype(np.float32)
    rows = quant.quantize_atom_weight(w, 128, 0)
    product = GroupProduct(pack_reordered(rows, np.arange(384), int8=1))
    right = gemm_blocks(quant.BlockRows(rows.q4, rows.scale4), quant.quantize_blocks(x, 1))
    np.testing.assert_array_equal(product(product.quantize(x), "float32"), right, strict=True)


def test_kernels_of_a_layer_take_blocks_of_128(quantized_folder: tuple[Recipe, Path, QuantizedModel]) -> None:
    if quantized_folder[0].int8 is None:
        assert KernelRunner(quantized_folder[2], 1, 16, backend="emulator").model is quantized_folder[2]
        return
    with pytest.raises(ArgumentError, match=r"weights.qkv: must be in blocks of 128 in W4Ax; .* \(got 64\)"):
        KernelRunner(quantized_folder[2], 1, 16, backend="emulator")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": "awq"}, r"scheme: must be one of atom, fmpq \(got awq\)"),
        ({"int8": 1}, r"int8: must be 0..0 with atom, K=320 \(got 1\)"),
        ({"clip": 0.0}, r"clip: must be a number in 0.01..1 \(got 0.0\)"),
        ({"scheme": "fmpq", "clip": 1.0}, r"outliers: must be 0 with fmpq \(got 64\)"),
        ({"K": 64}, r"K: must be more than the 64 outliers \(got 64\)"),
        ({"version": 1}, r"version: must be 2 \(got 1\)"),
        ({"buffers": {}}, r"buffers\[place\]: must be int16 \[320\] \(got NoneType\)"),
        ({"buffers": {"place": np.zeros(320, np.int16)}}, r"place\]: must be a permutation of 0..319"),
        ({"buffers": {"place": np.arange(320, dtype=np.int16)}}, r"buffers: must be strips \(got none\)"),
    ],
)
def test_a_reordered_weight_of_mismatched_fields_is_refused(changes: dict[str, Any], message: str) -> None:
    packed, *_ = problem("atom", "strips")
    with pytest.raises(ArgumentError, match=message):
        ReorderedWeight(**{**vars(packed), **changes})


def test_a_damaged_folder_is_refused_in_one_line(
    quantized_folder: tuple[Recipe, Path, QuantizedModel], tmp_path: Path
) -> None:
    """The order names a channel twice."""
    _, out, _ = quantized_folder
    for path in out.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "layer_001.safetensors"
    raw = bytearray(path.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    begin = 8 + int.from_bytes(raw[:8], "little") + header["model.layers.1.self_attn.o_proj.place"]["data_offsets"][0]
    raw[begin : begin + 2] = raw[begin + 2 : begin + 4]
    path.write_bytes(raw)
    with pytest.raises(FileError, match=r"self_attn.o_proj: buffers\[place\]: must be a permutation") as error:
        folder.load(tmp_path)
    assert "\n" not in str(error.value)
