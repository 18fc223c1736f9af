"""A whole model rounded to nearest: the quantisers' own weights, fused and packed."""

from dataclasses import replace

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.llm.accuracy.text import open_text, tokens_of, windows
from ptxlab.llm.checkpoints import open_model
from ptxlab.llm.checkpoints.open import dequantize_model
from ptxlab.llm.model import FloatModel, QuantizedModel, perplexity
from ptxlab.llm.model.decoder import EXACT
from ptxlab.llm.model.numerics import FakeQuantized
from ptxlab.lowbit import quant
from ptxlab.lowbit.layout import pack, unpack
from tests.support.layers import TINY_MODEL

QWEN = replace(TINY_MODEL, layers=1, qkv_bias=True, tied_head=False)


def test_weights_are_the_quantisers_fused_and_packed() -> None:
    model, progress = FloatModel.random(QWEN), []
    rounded = QuantizedModel.rounded(model, "lqq", 32, progress=progress.append)
    layer, packed_layer = model.layers[0], rounded.layers[0]
    right = pack(
        quant.quantize_lqq(np.concatenate([layer["q"], layer["k"], layer["v"]]), 32, rounding="levels"), "strips"
    )
    assert all(np.array_equal(right.buffers[name], array) for name, array in packed_layer.qkv.buffers.items())
    gate_up = np.concatenate([layer["gate"], layer["up"]])
    assert np.abs(unpack(packed_layer.gate_up).dequantize() - gate_up).max() < 0.1 * np.abs(gate_up).max()
    assert np.array_equal(packed_layer.qkv_bias, np.concatenate([layer["q_bias"], layer["k_bias"], layer["v_bias"]]))
    assert np.array_equal(packed_layer.input_norm, layer["input_norm"].astype(np.float16))
    for name in ("embedding", "head", "final_norm"):
        assert np.array_equal(getattr(rounded, name), getattr(model, name).astype(np.float16)), name
    assert rounded.recipe["group"] == 32 and progress == ["layer 0"]


@pytest.mark.parametrize(("scheme", "kind"), [("qoq", quant.QoQWeight), ("qoq_channel", quant.QoQChannelWeight)])
def test_other_schemes_and_bfloat16(scheme: str, kind: type) -> None:
    rounded = QuantizedModel.rounded(FloatModel.random(TINY_MODEL), scheme, 32, dtype="bfloat16", layout="qserve")
    assert isinstance(unpack(rounded.layers[1].down), kind) and rounded.layers[1].down.layout == "qserve"
    assert rounded.final_norm.dtype == np.uint16 and rounded.embedding.dtype == np.float16 and rounded.head is None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"scheme": "awq"}, r"scheme: must be one of lqq, qoq, qoq_channel \(got awq\)"),
        ({"group": 48}, r"group: must be one of 32, 64, 128 \(got 48\)"),
        ({"group": 64}, r"w: K must be a multiple of the group \(got K=96, group=64\)"),  # of down
        ({"rounding": "up"}, r"rounding: must be one of nearest, ceiling, search, levels \(got up\)"),
        ({"dtype": "float32"}, r"dtype: must be one of float16, bfloat16 \(got float32\)"),
        ({"layout": "tiles"}, r"layout: must be one of .* \(got tiles\)"),
    ],
)
def test_bad_settings_are_refused(how: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        QuantizedModel.rounded(FloatModel.random(TINY_MODEL), **{"group": 32, **how})  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.usefixtures("smollm2", "wikipedia")
def test_the_trained_model_loses_at_most_a_quarter_as_served() -> None:
    """SmolLM2's perplexity is 1.23x as high with quantised weights, activations and cache by default.

    The text is three windows of 512 tokens.
    """
    model, tokenizer = open_model("smollm2")
    text = windows(tokens_of(open_text().evaluation, tokenizer), 512, 3)
    of_floats = perplexity(model, text)
    quantized = dequantize_model(QuantizedModel.rounded(model))
    of_weights, as_served = (perplexity(quantized, text, numerics) for numerics in (EXACT, FakeQuantized()))
    assert as_served <= 1.25 * of_floats and of_weights <= 1.08 * of_floats
