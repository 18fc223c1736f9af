"""The attention backend: pages, metadata of made-up batches against NumPy attention, what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.lowbit import quant, reference

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]
Configured = Callable[..., Any]
CACHE = "int4_per_token_head"


def serve_small(configured: Configured, cache: str = CACHE) -> Any:
    from tests.support.served_model import ServedModel

    return ServedModel(configured(kv_cache_dtype=cache), sequences=4)


@pytest.fixture
def small_model(configured: Configured) -> Any:
    return serve_small(configured)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("dtype", "scheme"), [(CACHE, "kv4"), ("int8_per_token_head", "kv8")])
def test_a_page_of_vllm_is_one_of_ptxlab(vllm: None, dtype: str, scheme: str, head_dim: int) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    from ptxlab.llm.vllm.attention import KV4Backend
    from ptxlab.lowbit.layout import KVCache

    mode = get_kv_quant_mode(dtype)
    spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=head_dim, dtype=torch.uint8, kv_quant_mode=mode)
    shape = KV4Backend.get_kv_cache_shape(5, 64, 2, head_dim, dtype)
    assert np.prod(shape[1:]) == spec.page_size_bytes
    cache = KVCache.empty(5, 1, 2, head_dim, scheme=scheme, like=torch.empty(0))
    assert tuple(cache.pool.shape) == shape and KV4Backend.get_kv_cache_block_dim(64, 2, head_dim, dtype) == 0


BATCHES = {  # sequences: tokens in the cache already, new tokens
    "decodes": [(70, 1), (3, 1), (128, 1)],
    "prompts": [(0, 70), (0, 1), (0, 9)],
    "mixed": [(70, 1), (3, 1), (0, 40)],
    "chunk behind a prefix": [(64, 33)],
    "decodes and chunks": [(5, 1), (64, 20), (100, 2)],
    "several queries each": [(70, 3), (5, 3), (0, 3)],
}


@pytest.mark.parametrize("mode", ["4 bits", "4 bits, batch-invariant", "8 bits"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("name", BATCHES)
def test_batches_against_numpy(configured: Configured, name: str, window: int | None, mode: str) -> None:
    from ptxlab.llm.vllm.attention import KV4Impl

    of_8_bits, invariant = mode == "8 bits", mode.endswith("invariant")
    cache, scheme = ("int8_per_token_head", "kv8") if of_8_bits else (CACHE, "kv4")
    small_model = serve_small(configured, cache)
    small_model.builder.is_batch_invariant = invariant
    rng, (Hq, Hkv, D) = np.random.default_rng(0), (4, 1, 64)
    layer = next(iter(small_model.config.compilation_config.static_forward_context.values()))
    impl = KV4Impl(Hq, D, 0.2, Hkv, None, window, cache)
    if name == "several queries each":
        small_model.builder.reorder_batch_threshold = 3
    rows = [(s, done, [0] * new) for s, (done, new) in enumerate(BATCHES[name])]
    lengths = [done + new for done, new in BATCHES[name]]
    keys, values = ([rng.standard_normal((L, Hkv, D)).astype(np.float16) for L in lengths] for _ in range(2))
    prefix = small_model.batch([(s, 0, [0] * done) for s, done, _ in rows])
    batch = small_model.batch(rows)

    def append(part: Callable[[Any, int], Any], slots: Any) -> None:
        k, v = (np.concatenate([part(tokens, done) for tokens, (_, done, _) in zip(of, rows, strict=True)])
                for of in (keys, values))  # fmt: skip
        impl.do_kv_cache_update(layer, torch.from_numpy(k), torch.from_numpy(v), layer.kv_cache, slots)

    append(lambda tokens, done: tokens[:done], prefix.slot_mapping.long())
    append(lambda tokens, done: tokens[done:], batch.slot_mapping)
    tokens = batch.num_actual_tokens
    q = rng.standard_normal((tokens + 2, Hq, D)).astype(np.float16)  # two rows of padding
    output = torch.full((tokens + 2, Hq, D), 7.0, dtype=torch.float16)
    metadata = small_model.builder.build(0, batch)
    assert not invariant or (metadata.decodes is None and metadata.decode_tokens == 0 and metadata.is_batch_invariant)
    of_pieces = [len(rows.rows) // len(rows.lengths) for rows in metadata.prompts if rows.rows is not None]
    assert of_8_bits or not of_pieces
    assert not of_8_bits or (of_pieces == []) == (name in ("decodes", "several queries each"))
    impl.forward(layer, torch.from_numpy(q), None, None, layer.kv_cache, metadata, output)
    assert (output[tokens:] == 7).all()
    for (s, _, new), start in zip(rows, batch.query_start_loc.tolist(), strict=False):
        rotated = reference.rotate_heads(keys[s].astype(np.float32)), values[s].astype(np.float32)
        k, v = (quant.quantize_kv(of, scheme).dequantize() for of in rotated)
        rows_of = slice(start, start + len(new))
        queries = reference.rotate_heads(q[rows_of].astype(np.float32))
        expected, _ = reference.attention(queries, k, v, scale=0.2, window=window)
        assert np.allclose(output[rows_of].numpy(), expected, rtol=2**-10, atol=2**-12)


def test_decodes_are_views_that_graphs_read_anew(small_model: Any) -> None:
    batch = small_model.batch([(0, 5, [0]), (1, 9, [0])], padding=2)
    batch.num_actual_tokens, batch.query_start_loc_cpu = 4, torch.arange(5, dtype=torch.int32)  # as a full graph pads
    metadata = small_model.builder.build_for_cudagraph_capture(batch)
    assert metadata.prompts == () and metadata.decode_tokens == metadata.tokens == 4
    assert metadata.decodes.lengths.data_ptr() == batch.seq_lens.data_ptr()
    assert metadata.decodes.block_table.data_ptr() == batch.block_table_tensor.data_ptr()


def test_padding_leaves_finite_rows(small_model: Any) -> None:
    from ptxlab.llm.vllm.attention import KV4Impl

    layer = next(iter(small_model.config.compilation_config.static_forward_context.values()))
    impl = KV4Impl(2, 64, 0.125, 1, kv_cache_dtype=CACHE)
    batch = small_model.batch([(0, 5, [0])], padding=1)
    batch.num_actual_tokens = 2
    output = torch.full((2, 2, 64), torch.nan, dtype=torch.float16)
    metadata = small_model.builder.build_for_cudagraph_capture(batch)
    impl.forward(layer, torch.ones(2, 2, 64).half(), None, None, layer.kv_cache, metadata, output)
    assert output.isfinite().all() and (output[1] == 0).all()


def test_a_run_that_measures_memory_has_no_metadata(small_model: Any) -> None:
    from ptxlab.llm.vllm.attention import KV4Impl

    impl = KV4Impl(2, 64, 0.125, 1, kv_cache_dtype=CACHE)
    output = torch.full((3, 2, 64), torch.nan)
    impl.forward(None, output, None, None, None, None, output)
    assert (output == 0).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    {
        "head_dim": ({"head_size": 96}, "head_size not supported"),
        "sinks": ({"has_sink": True}, "attention sinks not supported"),
        "MLA": ({"use_mla": True}, "MLA not supported"),
        "cache": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        "block": ({"block_size": 16}, "block_size not supported"),
        "Turing": ({"device_capability": (7, 5)}, "need compute capability 8.0 to 9.0 (Ampere, Ada, Hopper), not 7.5"),
        "Ampere": ({"device_capability": (8, 0)}, None),
        "Ada": ({"device_capability": (8, 9)}, None),
        "Blackwell": ({"device_capability": (10, 0)}, "(Ampere, Ada, Hopper), not 10.0"),
        "encoder": ({"attn_type": "encoder"}, "attention type encoder not supported"),
        "batch invariance, windows": ({"use_batch_invariant": True}, None),
        "8 bits": ({"kv_cache_dtype": "int8_per_token_head"}, None),
    }.values(),
)
def test_what_is_not_supported_is_refused_with_the_reason(
    vllm: None, changes: dict[str, Any], reason: str | None
) -> None:
    from vllm.platforms.interface import DeviceCapability

    from ptxlab.llm.vllm.attention import KV4Backend

    configuration: dict[str, Any] = {
        "head_size": 128, "dtype": torch.float16, "kv_cache_dtype": CACHE, "block_size": 64,
        "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": (9, 0), "attn_type": "decoder",
        "has_sliding_window": True, **changes,
    }  # fmt: skip
    configuration["device_capability"] = DeviceCapability(*configuration["device_capability"])
    reasons = KV4Backend.validate_configuration(**configuration)
    assert reasons == [] if reason is None else any(reason in text for text in reasons)


def test_batch_invariance_needs_4_bits(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.interface import DeviceCapability

    from ptxlab.llm.vllm.attention import KV4Backend

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    combination: dict[str, Any] = {
        "head_size": 128, "dtype": torch.float16, "block_size": 64, "use_mla": False, "has_sink": False,
        "use_sparse": False, "use_mm_prefix": False, "device_capability": DeviceCapability(9, 0),
    }  # fmt: skip
    assert KV4Backend.supports_combination(kv_cache_dtype=CACHE, **combination) is None
    reason = KV4Backend.supports_combination(kv_cache_dtype="int8_per_token_head", **combination)
    assert reason == "VLLM_BATCH_INVARIANT=1 needs a cache of 4 bits, not int8_per_token_head"
    combination["device_capability"] = DeviceCapability(8, 9)
    reason = KV4Backend.supports_combination(kv_cache_dtype=CACHE, **combination)
    assert reason == "VLLM_BATCH_INVARIANT=1 needs compute capability 9.0, not 8.9"


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "capped logits"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "layers that share a cache"),
        ({"num_heads": 34, "num_kv_heads": 2}, "more than 16 query heads of a kv head"),
    ],
)
def test_layers_that_are_not_supported_are_refused(vllm: None, options: dict[str, Any], feature: str) -> None:
    from ptxlab.llm.vllm.attention import KV4Impl

    sizes = {"num_heads": 2, "head_size": 64, "scale": 1.0, "kv_cache_dtype": CACHE}
    with pytest.raises(ArgumentError, match=f"does not support {feature} yet"):
        KV4Impl(**{**sizes, **options})


def test_attention_that_is_not_causal_is_refused(small_model: Any) -> None:
    batch = small_model.batch([(0, 5, [0])])
    batch.causal = False
    with pytest.raises(ArgumentError, match="must be causal"):
        small_model.builder.build(0, batch)
