"""Small random models of five families of `transformers`: quantised, they generate the tokens of our own runner."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.errors import ArgumentError, PtxlabError
from ptxlab.llm.model import NumpyRunner, QuantizedModel, generate
from ptxlab.llm.recipe import Recipe
from tests.support.torch_models import FAMILIES, small_model

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.torch

CONTEXT, TOKENS = 64, 12
PROMPTS = [[5, 7, 11, 13, 17, 19], [23, 29, 31]]


def quantize_nearest(model: Any) -> QuantizedModel:
    from ptxlab.llm.torch.models import float_model

    dtype = str(model.dtype).removeprefix("torch.")
    return QuantizedModel.rounded(float_model(model), group=64, rounding="nearest", dtype=dtype)


def generate_by_transformers(model: Any, prompts: list[list[int]], **how: Any) -> tuple[list[list[int]], Any]:
    """Return the tokens that `model.generate` adds to prompts padded on the left, and its cache."""
    from ptxlab.llm.torch import KV4Cache

    cache, longest = KV4Cache(model, len(prompts), CONTEXT), max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    generated = model.generate(
        padded, attention_mask=real, past_key_values=cache, max_new_tokens=TOKENS, do_sample=False, **how
    )
    return generated[:, longest:].tolist(), cache


def generate_by_runner(model: QuantizedModel, prompts: list[list[int]]) -> tuple[list[list[int]], NumpyRunner]:
    """Return the tokens that `NumpyRunner` adds to prompts, and the runner."""
    runner = NumpyRunner(model, len(prompts), CONTEXT)
    return np.array(list(generate(runner, prompts, TOKENS))).T.tolist(), runner


@pytest.mark.default_cases("mixtral-padded")
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generates_the_tokens_of_our_runner(family: str, prompts: list[list[int]]) -> None:
    """Its caches have the same bytes too."""
    from ptxlab.llm.torch import quantize_model

    model = small_model(family)
    ready = quantize_nearest(model)
    expected, runner = generate_by_runner(ready, prompts)
    generated, cache = generate_by_transformers(quantize_model(model, ready), prompts)
    assert generated == expected and len({*generated[0]}) > 3
    for pool, of_runner in zip(cache.pools, runner.caches, strict=True):
        assert np.array_equal(pool.numpy(), of_runner.pool)


def test_packed_weights_are_repacked_for_the_kernels_of_the_target() -> None:
    """No kernel of Ampere takes strips."""
    from ptxlab.llm.torch import quantize_model

    model = small_model("llama")
    ready = quantize_nearest(model)
    with gpu.compiling_for("sm_80"):
        quantize_model(model, ready)
    layouts = {module.layout for module in model.modules() if isinstance(getattr(module, "layout", None), str)}
    assert ready.layers[0].o.layout == "strips" and layouts == {"qserve"}


SLIDING, FULL = "sliding_attention", "full_attention"
CARRIED: dict[str, tuple[str, dict[str, Any]]] = {
    "window of some layers": ("windows", {}),
    "window by type": ("windows", {"layer_types": [SLIDING, FULL]}),
    "window of LLaMA, which has none": ("llama", {"sliding_window": 3}),
    "old and new rope keys": ("smollm", {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 99.0}),
    "head of its own": ("smollm", {}),
    "experts": ("mixtral", {}),
}


@pytest.mark.parametrize("name", CARRIED)
def test_floats_of_a_model_are_its_own(name: str) -> None:
    """Hold logits to 2e-5 of the largest, whatever of a file's oddities the model carries."""
    from ptxlab.llm.torch.models import float_model

    family, changes = CARRIED[name]
    model, exact = small_model(family, **changes), small_model(family, "float32", **changes)
    if name == "head of its own":  # as of a file that holds a head which its config denies
        for carrier in (model, exact):
            carrier.lm_head.weight = torch.nn.Parameter(carrier.lm_head.weight.detach().flip(0))
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    tokens, ours = torch.arange(24)[None] % 90, float_model(model)
    with torch.no_grad():
        expected = exact(tokens).logits.numpy()
    logits = ours.logits(ours.states([tokens.numpy()])[0])
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()


def test_a_head_of_its_own_is_kept() -> None:
    from ptxlab.llm.torch import quantize_model

    model = small_model("smollm")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    head = model.lm_head.weight.detach().clone()
    assert torch.equal(quantize_model(model).lm_head.weight, head) and not model.config.tie_word_embeddings


def test_bfloat16_has_the_bytes_of_our_runner() -> None:
    """The head's logits are bfloat16 there, and float16 here; so not all tokens agree."""
    from ptxlab.llm.torch import KV4Cache, quantize_model

    model = small_model("qwen2", "bfloat16")
    ready = quantize_nearest(model)
    runner = NumpyRunner(ready, 1, CONTEXT)
    runner.prefill(PROMPTS[:1])
    cache = KV4Cache(quantize_model(model, ready), 1, CONTEXT)
    model(torch.tensor(PROMPTS[:1]), past_key_values=cache)
    for pool, of_runner in zip(cache.pools, runner.caches, strict=True):
        assert np.array_equal(pool.numpy(), of_runner.pool)


@pytest.mark.smoke
def test_a_recipe_rotates_and_rounds() -> None:
    """Rotation unties the head."""
    from ptxlab.llm.torch import quantize_model
    from ptxlab.llm.torch.models import _quantize_by_recipe, float_model

    recipe, model = Recipe(rotate="hadamard", rotate_heads=True, clip="weights"), small_model("smollm")
    ready = _quantize_by_recipe(float_model(model), recipe, None, "strips", "float16", lambda label: None)
    expected, _ = generate_by_runner(ready, PROMPTS)
    assert not model.lm_head.weight.equal(quantize_model(model, recipe).model.embed_tokens.weight)
    assert generate_by_transformers(model, PROMPTS)[0] == expected


@pytest.mark.full
@pytest.mark.parametrize("family", ["mistral", "mixtral"])
def test_a_step_compiles_without_a_break(family: str) -> None:
    """The prompt runs in eager mode, then steps run as one graph."""
    from ptxlab.llm.torch import KV4Cache, quantize_model

    model = quantize_model(small_model(family, num_hidden_layers=1))
    expected, _ = generate_by_transformers(model, PROMPTS[:1])
    cache, tokens, generated = KV4Cache(model, 1, CONTEXT), torch.tensor(PROMPTS[:1]), []
    step = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        logits = model(tokens, past_key_values=cache).logits
        for i in range(3):
            generated.append(int(logits[0, -1].argmax()))
            position = torch.tensor([[len(PROMPTS[0]) + i]])
            logits = step(torch.tensor([generated[-1:]]), past_key_values=cache, position_ids=position).logits
    assert generated == expected[0][:3]


@pytest.mark.full
def test_generate_compiles_one_step_for_all_lengths() -> None:
    """A step's inputs have the same shapes and strides at every length: CUDA graphs are recorded for each."""
    from transformers.generation.configuration_utils import CompileConfig

    from ptxlab.llm.torch import KV4Cache, quantize_model

    steps: list[set[Any]] = []

    def backend(graph: Any, example: Any) -> Any:
        def run(*args: Any) -> Any:
            numbers = [argument for argument in args if isinstance(argument, int)]
            steps.append({*numbers, *(argument.stride() for argument in args if isinstance(argument, torch.Tensor))})
            return graph(*args)

        return run

    model = quantize_model(small_model(num_hidden_layers=1))
    config = CompileConfig(backend=backend, mode=None)
    config._compile_all_devices = True
    prompts = torch.tensor([[0, 0, 7, 11], [13, 17, 19, 23]])
    options = {"past_key_values": KV4Cache(model, 2, CONTEXT), "do_sample": False, "compile_config": config}
    model.generate(prompts, attention_mask=(prompts != 0).long(), max_new_tokens=6, **options)
    assert len(steps) == 5 and all(argument == steps[0] for argument in steps)


def test_a_mask_of_new_tokens_has_strides_of_its_own() -> None:
    """The strides of its part of the whole mask would change at every length."""
    from ptxlab.llm.torch.cache import real_tokens

    wide, wider = (real_tokens(q_length=1, attention_mask=torch.ones(2, n, dtype=torch.bool)) for n in (8, 9))
    assert wide is not None and wider is not None and wide.stride() == wider.stride() == (1, 1)


@pytest.mark.full
def test_inductor_takes_attention_on_the_cpu() -> None:
    """An argument that may be written must be there: PyTorch 2.13 fails to lower one result of a call without it."""
    from ptxlab.llm.torch import KV4Cache, quantize_model
    from ptxlab.llm.torch.cache import Past, attend_kv4

    model = quantize_model(small_model(num_hidden_layers=1))
    cache = KV4Cache(model, 2, CONTEXT)
    past = Past(cache, cache.pools[0], cache.rows(torch.tensor([[0], [0]]), None, 2))
    q = torch.randn(2, model.config.num_attention_heads, 1, cache.head_dim).half()

    def attend(q: Any) -> Any:
        return attend_kv4(model, q, past, past, None)[0]

    assert torch.equal(torch.compile(attend, fullgraph=True)(q), attend(q))


def test_parts_of_tensors_are_taken() -> None:
    """Positions and activations may be columns of larger tensors.

    The kernels themselves take whole tensors.
    """
    from ptxlab.llm.torch import KV4Cache, W4A8Linear, quantize_model

    model, tokens = quantize_model(small_model()), torch.tensor([[5, 7, 11], [13, 17, 19]])
    logits = []
    for positions in (torch.tensor([[3], [3]]), torch.arange(4).expand(2, 4).contiguous()[:, -1:]):
        cache = KV4Cache(model, 2, CONTEXT)
        model(tokens, past_key_values=cache)
        logits.append(model(tokens[:, :1], past_key_values=cache, position_ids=positions).logits)
    assert torch.equal(*logits)
    linear, x = W4A8Linear.from_linear(torch.nn.Linear(64, 32, dtype=torch.float16)), torch.randn(3, 128).half()
    assert torch.equal(linear(x[:, 64:]), linear(x[:, 64:].clone()))


@pytest.mark.full
def test_reset_begins_anew_and_beams_are_copied() -> None:
    from ptxlab.llm.torch import quantize_model

    model = quantize_model(small_model())
    first, cache = generate_by_transformers(model, PROMPTS)
    pools = [pool.clone() for pool in cache.pools]
    cache.reorder_cache(torch.tensor([1, 1]))
    for pool, pool_before in zip(cache.pools, pools, strict=True):
        assert torch.equal(pool.view(2, -1)[0], pool_before.view(2, -1)[1])
    assert int(cache.get_seq_length()) == len(PROMPTS[0]) + TOKENS - 1
    cache.reset()
    assert cache.get_seq_length() == 0
    tokens = torch.tensor(PROMPTS[:1] * 2)
    generated = model.generate(tokens, past_key_values=cache, max_new_tokens=TOKENS, do_sample=False)
    assert generated[0, len(PROMPTS[0]) :].tolist() == first[0]


def calibrated_model() -> QuantizedModel:
    """Make a model with constants of a cache by channel, all 1."""
    model = quantize_nearest(small_model())
    constants = np.stack([np.ones((1, 64), np.float32), np.zeros((1, 64), np.float32)])
    layers = [replace(layer, cache="kv8_channel", k_channel=constants, v_channel=constants) for layer in model.layers]
    return replace(model, layers=layers)


def generate_cached(context: int = CONTEXT, batch: int = 1) -> Any:
    from ptxlab.llm.torch import KV4Cache, quantize_model

    model = quantize_model(small_model())
    tokens, cache = torch.tensor(PROMPTS[:1]), KV4Cache(model, batch, context)
    return model.generate(tokens, past_key_values=cache, max_new_tokens=TOKENS, do_sample=False)


def attend_once(of: Any = None, attention: str = "ptxlab_kv4") -> Any:
    """Run the model with a cache of another model, or another implementation of attention."""
    from ptxlab.llm.torch import KV4Cache, quantize_model

    model = quantize_model(small_model())
    cache = KV4Cache(of or model, 1, CONTEXT)
    if attention == "crop":
        return cache.crop(3)
    model.set_attn_implementation(attention)
    return model(torch.tensor(PROMPTS[:1]), past_key_values=cache)


def quantize(model: Any, recipe: Any = "rtn", **how: Any) -> Any:
    from ptxlab.llm.torch import quantize_model

    return quantize_model(model, recipe, **how)


def mixed_dtypes() -> Any:
    model = small_model()
    model.model.layers[1].mlp.up_proj.float()
    return model


def model_on_two_devices() -> Any:
    """Make a model whose last norm is on another device."""
    model = small_model()
    model.model.norm.to("meta")
    return model


def model_with_nan() -> Any:
    model = small_model()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    return model


def quantized_experts(layout: str) -> QuantizedModel:
    from ptxlab.llm.torch.models import float_model

    return QuantizedModel.rounded(float_model(small_model("mixtral")), group=64, rounding="nearest", layout=layout)


def gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=1, vocab_size=96)
    return transformers.GPT2LMHeadModel(config).half()


BAD = {
    "model: must be a model of transformers (got Linear)": lambda: quantize(torch.nn.Linear(3, 3)),
    "model_type: must be one of llama, mistral, mixtral, qwen2 (got 'gpt2')": lambda: quantize(gpt2()),
    "model: must be a causal model (got LlamaModel)": lambda: quantize(small_model().model),
    "recipe: must be of a model in strips where it has experts (got qserve)": lambda: quantize(
        small_model("mixtral"), quantized_experts("qserve")
    ),
    "must be of a model with experts=4 (got experts=2)": lambda: quantize(
        small_model("mixtral"), quantize_nearest(small_model("mixtral", num_local_experts=2))
    ),
    "must be of float16 or bfloat16 (got float32)": lambda: quantize(small_model(dtype="float32")),
    "model.layers.1.mlp.up_proj.weight: must be float16 on cpu as the embedding (got float32 on cpu": lambda: quantize(
        mixed_dtypes()
    ),
    "model.norm.weight: must be float16 on cpu as the embedding (got float16 on meta": lambda: quantize(
        model_on_two_devices()
    ),
    "must not be quantised yet": lambda: quantize(quantize(small_model())),
    "recipe: must be one of lqq": lambda: quantize(small_model(), "int3"),
    "recipe: must be a Recipe or its name, of scheme lqq": lambda: quantize(small_model(), "atom"),
    "recipe: kv: must not be by channel: a KV4Cache has scales by token": lambda: quantize(small_model(), "liquid"),
    "recipe: must be of a model without a cache by channel": lambda: quantize(small_model(), calibrated_model()),
    "must be of a model with hidden=64 (got hidden=128)": lambda: quantize(
        small_model(), quantize_nearest(small_model(hidden_size=128))
    ),
    "must be of a model of float16 (got bfloat16)": lambda: quantize(
        small_model(), quantize_nearest(small_model(dtype="bfloat16"))
    ),
    "must be finite": lambda: quantize(model_with_nan()),
    "must be of a model with window_layers=(1,) (got window_layers=(0,))": lambda: quantize(
        small_model("windows"), quantize_nearest(small_model("windows", layer_types=[SLIDING, FULL]))
    ),
    "model: max_position_embeddings: must be at most 1048576 (got 10000000)": lambda: quantize(
        small_model(max_position_embeddings=10**7)
    ),
    "attention_bias: must be false": lambda: quantize(small_model(attention_bias=True)),
    "past_key_values must be a ptxlab.llm.torch.KV4Cache(model, batch, context) (got DynamicCache)": lambda: quantize(
        small_model()
    )(torch.tensor(PROMPTS[:1])),
    "KV4Cache: must be of this model: 2 layers, 1 kv heads of 64 (got 1 layers, 1 kv heads of 64)": lambda: attend_once(
        of=small_model(num_hidden_layers=1)
    ),
    "KV4Cache: must be of this model: 2 layers, 1 kv heads of 64 (got 2 layers, 2 kv heads of 64)": lambda: attend_once(
        of=small_model("qwen2")
    ),
    "attn_implementation: must be ptxlab_kv4 for a quantised model (got sdpa)": lambda: attend_once(attention="sdpa"),
    "KV4Cache: tokens are appended by the layers of quantize_model": lambda: attend_once(
        of=small_model(), attention="crop"
    ),
    "KV4Cache: no more than the context of 8 tokens (got position 8)": lambda: generate_cached(8),
    "KV4Cache: batch: must be that of the tokens, 1 (got 2)": lambda: generate_cached(batch=2),
    "KV4Cache: context: must be an integer, 1 or more (got 0)": lambda: generate_cached(0),
    "attn_implementation=ptxlab_kv4: for models of quantize_model (got LlamaAttention)": lambda: small_model(
        attn_implementation="ptxlab_kv4"
    )(torch.tensor(PROMPTS[:1])),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_line(message: str) -> None:
    with pytest.raises(PtxlabError) as error:
        BAD[message]()
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.full
def test_a_quantised_state_is_loaded_into_another_model_of_its_shape() -> None:
    """Its `generate` goes on where the cache ends."""
    from ptxlab.llm.torch import KV4Cache

    model, restored = quantize(small_model("qwen2")), quantize(small_model("qwen2"))
    for tensor in restored.state_dict().values():
        tensor.zero_()
    restored.load_state_dict(model.state_dict())
    first, cache = generate_by_transformers(model, PROMPTS[:1])
    prompt = torch.tensor([PROMPTS[0] + first[0] + [9, 8]])
    options = {"max_new_tokens": 3, "do_sample": False}
    expected = restored.generate(prompt, past_key_values=KV4Cache(restored, 1, CONTEXT), **options)
    assert torch.equal(model.generate(prompt, past_key_values=cache, **options), expected)


def test_a_quantised_state_of_experts_is_loaded_into_another_model() -> None:
    from ptxlab.llm.torch import KV4Cache

    model, empty = quantize(small_model("mixtral")), quantize(small_model("mixtral"))
    for tensor in empty.state_dict().values():
        tensor.zero_()
    state, tokens = model.state_dict(), torch.tensor(PROMPTS[:1])
    empty.load_state_dict(state)
    logits = [of(tokens, past_key_values=KV4Cache(of, 1, CONTEXT)).logits for of in (model, empty)]
    assert torch.equal(*logits) and "4 x 64, 256, lqq, group=64, float16" in str(model.model.layers[0].mlp)
    larger = quantize(small_model("mixtral", num_local_experts=5))
    with pytest.raises(ArgumentError, match=r"^W4A8Grouped: .*gate_up_proj\._extra_state: must be .*'E': 5"):
        larger.load_state_dict(state)


def test_a_model_that_is_refused_is_what_it_was() -> None:
    model = model_with_nan()
    with pytest.raises(ArgumentError, match="layer 1"):
        quantize(model)
    assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"
    assert model.config._attn_implementation != "ptxlab_kv4"
