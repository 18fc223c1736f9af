"""What a `KernelRunner` takes of a GPU's memory, and how many pages or sequences a budget has room for."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.config import Config, require_config
from ptxlab.llm.model.inputs import input_bytes
from ptxlab.llm.model.pages import PAGE
from ptxlab.llm.model.quantized import QuantizedModel
from ptxlab.llm.model.runner import CHUNK, HEAD_ROWS, HEADS, OWN_KEYS, launch_sizes
from ptxlab.llm.model.weights import DTYPES
from ptxlab.lowbit.kernels.attention.prefill import CHUNKED
from ptxlab.lowbit.layout.packed_weight import SCHEMES, buffer_shapes
from ptxlab.lowbit.layout.packings import Shapes
from ptxlab.lowbit.layout.pages import page_bytes
from ptxlab.lowbit.quant import KV_SCHEMES
from ptxlab.validate import is_one_of, require_integer

RESERVE = 1_500_000_000  # driver, modules and graphs, cuBLAS, workspaces of kernels, what the allocator rounds up
MOST_BATCH = 256
_HALF, _WORD = 2, 4  # bytes of an f16 or bf16, of an f32 or s32
_ITEM = {"uint8": 1, "int8": 1, "uint32": 4, "int32": 4, "float32": 4, "uint16": 2, "float16": 2}


@dataclass(frozen=True)
class Footprint:
    """Bytes of a runner on a GPU.

    Attributes:
        weights: of all layers, packed, with norms, biases and routers.
        ends: embedding, LM head and the last norm.
        buffers: of launches of every size, tables of angles, logits.
        page: of the cache, 64 tokens in every layer.
        reserve: for what is not counted (`RESERVE`).
    """

    weights: int
    ends: int
    buffers: int
    page: int
    reserve: int = RESERVE

    @classmethod
    def of(
        cls,
        config: Config,
        batch: int,
        context: int,
        *,
        weights: int | None = None,
        inputs: int | None = None,
        scheme: str = "lqq",
        group: int = 128,
        dtype: str = "float16",
        chunk: int | None = None,
        head: str = "float16",
        cache: str = "kv4",
        own_keys: str = "cache",
    ) -> "Footprint":
        """Compute the footprint of a model of this shape, with a cache of the given scheme.

        `weights` are the bytes of its layers, `layer_bytes` of the scheme and group if None; `inputs` those of a token
        between the kernels, as a layer's products read it, W4A8's if None.
        """
        require_config("config", config)
        sizes = {"batch": batch, "context": context, "chunk": CHUNK if chunk is None else chunk, "group": group}
        for name, number in sizes.items():
            require_integer(name, number, 1)
            if number >= 1 << 31:
                raise ArgumentError(name, "must be below 2^31", number)
        for name, choice, choices in (
            ("scheme", scheme, SCHEMES),
            ("dtype", dtype, DTYPES),
            ("head", head, HEADS),
            ("cache", cache, KV_SCHEMES),
            ("own_keys", own_keys, OWN_KEYS),
        ):
            if not is_one_of(choice, choices):
                raise ArgumentError(name, f"must be one of {', '.join(choices)}", choice)
        chunk = min(CHUNK, batch * context) if chunk is None else chunk
        vocabulary = config.vocabulary * config.hidden * _HALF
        head_bytes = 0 if config.tied_head and dtype == "float16" else vocabulary
        if head == "int8":
            head_bytes = ceil_div(config.vocabulary, HEAD_ROWS) * HEAD_ROWS * (config.hidden + _WORD)
        max_pages = ceil_div(context, PAGE)
        launches = sum(launch_bytes(config, rows, max_pages, inputs=inputs) for rows in launch_sizes(batch))
        # Rows of prompts that attend by themselves are as those of decoding.
        prompt_sequences = batch if cache in CHUNKED else None
        launches += sum(
            launch_bytes(config, rows, max_pages, prompt_sequences, inputs=inputs) for rows in launch_sizes(chunk)
        )
        if own_keys == "16-bit":
            launches += sum(launch_sizes(chunk)) * config.kv_heads * config.head_dim * _HALF
        return cls(
            weights=config.layers * layer_bytes(config, scheme, group) if weights is None else weights,
            ends=vocabulary + head_bytes + config.hidden * _HALF,
            buffers=launches + context * config.head_dim * _WORD + batch * config.vocabulary * _HALF,
            page=config.layers * 2 * config.kv_heads * page_bytes(cache, PAGE, config.head_dim),
        )

    @classmethod
    def of_model(
        cls,
        model: QuantizedModel,
        batch: int,
        context: int,
        *,
        chunk: int | None = None,
        head: str = "float16",
        cache: str | None = None,
        own_keys: str = "cache",
    ) -> "Footprint":
        """Compute the footprint of a loaded model; `cache` is the model's own by default."""
        options: dict[str, Any] = {"chunk": chunk, "head": head, "own_keys": own_keys, **weights_of(model)}
        return cls.of(model.config, batch, context, cache=model.cache if cache is None else cache, **options)

    @property
    def fixed(self) -> int:
        """Bytes of everything but the pages."""
        return self.weights + self.ends + self.buffers + self.reserve

    def total(self, pages: int) -> int:
        """Compute the bytes with `pages` pages."""
        return self.fixed + pages * self.page

    def most_pages(self, gigabytes: float) -> int:
        """Count the pages that fit in `gigabytes` (10^9 bytes) beside the rest.

        Raises ArgumentError, with the figures, if not one fits.
        """
        pages = (budget(gigabytes) - self.fixed) // self.page
        if pages < 1:
            raise ArgumentError("memory", f"must be at least {self.describe(1)}", f"{gigabytes:g} GB")
        return pages

    def describe(self, pages: int) -> str:
        """Describe the memory needed with `pages` pages: the sum in GB and its parts.

        The sum is rounded up, so that a `budget` of these GB suffices.
        """
        gigabytes = ceil_div(self.total(pages), 10**7) / 100
        return f"{gigabytes:.2f} GB: {self} + {pages * self.page / 1e9:.2f} GB of {pages} pages"

    def __str__(self) -> str:
        parts = {"weights": self.weights, "embedding and head": self.ends, "buffers": self.buffers}
        parts["reserve"] = self.reserve
        return " + ".join(f"{nbytes / 1e9:.2f} GB of {name}" for name, nbytes in parts.items())


def weights_of(model: QuantizedModel) -> dict[str, Any]:
    """Return the options of `Footprint.of` that depend on a loaded model's weights and not only on its shapes.

    The scheme of its cache is not among them.
    """
    layers = model.layers
    footprint_options = {"weights": sum(layer.nbytes for layer in layers), "dtype": layers[0].dtype}
    if not layers[0].four_bit_inputs:
        return footprint_options
    matrices = model.config.matrices.items()
    return {**footprint_options, "inputs": sum(input_bytes(getattr(layers[0], name), K) for name, (_, K) in matrices)}


def budget(gigabytes: float) -> int:
    """Convert gigabytes (10^9 bytes) to bytes.

    Raises ArgumentError unless it is a number above 0, up to 10^9.
    """
    if not isinstance(gigabytes, int | float) or not 0 < gigabytes <= 10**9:
        raise ArgumentError("memory", "must be a number of gigabytes above 0, at most 10^9", repr(gigabytes))
    return round(gigabytes * 10**9)


def largest_batch(
    config: Config, gigabytes: float, tokens: int, *, most: int = MOST_BATCH, pages: int | None = None, **options: Any
) -> int:
    """Find the largest batch of sequences of `tokens` tokens that fits in memory, up to `most`; 0 if not one fits.

    `pages` are as many as all of them need, unless a number is given, which they share; `options` is that of
    `Footprint.of`. Raises ArgumentError where even the weights do not fit.
    """
    require_integer("tokens", tokens, 1)
    require_integer("most", most, 1)
    Footprint.of(config, 1, tokens, **options).most_pages(gigabytes)
    batches = range(1, most + 1)
    return bisect_right(batches, 0, key=lambda batch: excess(config, batch, gigabytes, tokens, pages=pages, **options))


def require_batch(
    config: Config, batch: int, gigabytes: float, tokens: int, *, pages: int | None = None, **options: Any
) -> None:
    """Raise ArgumentError, with the figures, for a batch that does not fit a memory; see `largest_batch`."""
    if excess(config, batch, gigabytes, tokens, pages=pages, **options) > 0:
        largest_size = largest_batch(config, gigabytes, tokens, most=batch, pages=pages, **options)
        name = config.name or "this model"
        rule = f"must be at most {largest_size} for sequences of {tokens} tokens of {name} in {gigabytes:g} GB"
        footprint = Footprint.of(config, batch, tokens, **options)
        need_text = footprint.describe(batch * ceil_div(tokens, PAGE) if pages is None else pages)
        raise ArgumentError("batch", rule, f"{batch}, which needs {need_text}")


def excess(
    config: Config, batch: int, gigabytes: float, tokens: int, *, pages: int | None = None, **options: Any
) -> int:
    """Compute the bytes by which a batch exceeds `gigabytes`; 0 or below if it fits."""
    require_integer("batch", batch, 1)
    footprint = Footprint.of(config, batch, tokens, **options)
    return footprint.total(batch * ceil_div(tokens, PAGE) if pages is None else pages) - budget(gigabytes)


def layer_bytes(config: Config, scheme: str = "lqq", group: int = 128, layout: str = "strips") -> int:
    """Compute the bytes of a layer's weights (`LayerWeights.nbytes`) without making them."""
    total = 2 * config.hidden * _HALF
    for name, (N, K) in config.matrices.items():
        shapes = buffer_shapes(layout, scheme, N, K, K if scheme == "qoq_channel" else group)
        total += _nbytes(shapes) * (config.experts if config.experts and name in ("gate_up", "down") else 1)
    total += config.qkv_width * _WORD if config.qkv_bias else 0
    return total + config.experts * config.hidden * _HALF


def launch_bytes(
    config: Config, rows: int, max_pages: int, sequences: int | None = None, *, inputs: int | None = None
) -> int:
    """Return the bytes between the kernels of a launch of so many rows (`LayerBuffers` and the step around it).

    The rows are those of decoding, or of prompts of so many sequences; `inputs` as of `Footprint.of`.
    """
    H, F, attended = config.hidden, config.ffn, config.heads * config.head_dim
    rows_per_token = max(1, config.chosen_experts)
    # Stream's ends; qkv, q, attention, ...
    floats = 3 * H + config.qkv_width + 2 * attended + H + 2 * F * rows_per_token + H
    activations = (H, attended, *(H, F) * rows_per_token)
    nbytes = floats * _HALF + (sum(K + 2 * _WORD for K in activations) if inputs is None else inputs)
    if config.experts:
        nbytes += H + 2 * _WORD + (H + rows_per_token * H) * _HALF + 3 * rows_per_token * _WORD
    words = (3 + 1) * rows if sequences is None else 3 * rows + 1  # tokens, positions, slots, increments or starts
    words += (rows if sequences is None else 2 * sequences) + (sequences or rows) * max_pages  # lengths, starts, table
    return rows * nbytes + words * _WORD + (config.experts + 1) * _WORD * bool(config.experts)


def _nbytes(shapes: Shapes) -> int:
    total = 0
    for dtype, shape in shapes.values():
        count = 1
        for size in shape:
            count *= size
        total += count * _ITEM[dtype]
    return total
