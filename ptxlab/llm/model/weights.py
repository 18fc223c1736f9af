"""`LayerWeights`: the packed weights of one decoder layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.config import Config, require_config
from ptxlab.lowbit import quant
from ptxlab.lowbit.kernels.gemm import layout_here
from ptxlab.lowbit.kernels.operation import dtype_of
from ptxlab.lowbit.kernels.transfer import copy_to_device
from ptxlab.lowbit.layout import ExpertWeights, PackedWeight, ReorderedWeight, pack, stack_experts, unpack
from ptxlab.lowbit.layout import packed_weight as w4a8
from ptxlab.lowbit.layout import reordered as w4a4
from ptxlab.lowbit.layout.packed_weight import QuantizedWeight
from ptxlab.lowbit.quant.kv import BY_CHANNEL
from ptxlab.lowbit.quant.tiled import BLOCK_K, BLOCK_ROWS, repeat_to_shape, with_arrays
from ptxlab.runtime.arguments import check_flags
from ptxlab.spec.dtypes import convert_to_dtype
from ptxlab.validate import is_one_of, require_integer, shape_of

DTYPES = ("float16", "bfloat16")  # of what lies between the kernels
DEFAULT_CACHE = "kv4"  # the cache of a layer that has no constants by channel
RANDOM_OUTLIERS = 128  # channels in INT8 of random W4A4 weights, as Atom has them (Atom §4.1)


def quantiser(
    scheme: str, rounding: quant.Rounding = "nearest", protective_range: int = quant.PROTECTIVE_RANGE
) -> Callable[[Any, int], QuantizedWeight]:
    """Return the function that quantises a matrix [N, K] in groups of a given size.

    `rounding` is of LQQ's scales, `protective_range` of level 1, which qoq_channel has not got. Raises ArgumentError
    for an unknown scheme.
    """
    quantisers: Mapping[str, Callable[[Any, int], QuantizedWeight]] = {
        "lqq": lambda w, group: quant.quantize_lqq(w, group, protective_range, rounding),
        "qoq": lambda w, group: quant.quantize_qoq(w, group, protective_range),
        "qoq_channel": lambda w, _: quant.quantize_qoq_channel(w),
    }
    if not is_one_of(scheme, quantisers):
        raise ArgumentError("scheme", f"must be one of {', '.join(quantisers)}", scheme)
    return quantisers[scheme]


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerWeights:
    """Weights of one layer, NumPy or CuPy arrays; with experts, `gate_up` and `down` hold every expert's.

    The matrices are W4A8's (`PackedWeight`) or, all of them, W4A4's (`ReorderedWeight`).

    Attributes:
        config: its numbers.
        qkv: queries, keys and values, [(Hq + 2·Hkv)·D, H].
        o: [H, Hq·D].
        gate_up: gate above up, [2·F, H], or in turns (`PackedWeight.interleaved`).
        down: [H, F].
        input_norm: of RMSNorm before attention, f16 or bf16 [H] (bf16 as its bits, uint16); decides the layer's dtype.
        post_norm: of RMSNorm before the feed-forward part, likewise.
        qkv_bias: f32 [(Hq + 2·Hkv)·D], where the model has one.
        router: [E, H] of the same dtype, where it has experts.
        cache: the scheme of the KV cache by channel that it is calibrated for, or kv4 where it is for none.
        k_channel: (scale, zero) f32 [2, Hkv, D] of keys in that scheme (`quant.calibrate_kv`); None with kv4.
        v_channel: of values, likewise.

    Raises ArgumentError, which names the attribute, for a shape that is not the config's.
    """

    config: Config
    qkv: Any  # PackedWeight or ReorderedWeight
    o: Any
    gate_up: Any  # or ExpertWeights
    down: Any
    input_norm: Any = field(repr=False)
    post_norm: Any = field(repr=False)
    qkv_bias: Any = field(default=None, repr=False)
    router: Any = field(default=None, repr=False)
    cache: str = DEFAULT_CACHE
    k_channel: Any = field(default=None, repr=False)
    v_channel: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        config = self.config
        require_config("config", config)
        for name, (N, K) in config.matrices.items():
            weight, experts = getattr(self, name), config.experts if name in ("gate_up", "down") else 0
            dense_kind = ReorderedWeight if isinstance(self.qkv, ReorderedWeight) else PackedWeight
            kind, suffix = (ExpertWeights, f" of {experts} experts") if experts else (dense_kind, "")
            got = (weight.N, weight.K, getattr(weight, "E", 0)) if isinstance(weight, kind) else type(weight).__name__
            if got != (N, K, experts):
                raise ArgumentError(name, f"must be {kind.__name__} [{N}, {K}]{suffix}", got)
        shapes: dict[str, tuple[int, ...]] = {"input_norm": (config.hidden,), "post_norm": (config.hidden,)}
        shapes["qkv_bias"] = (config.qkv_width,) if config.qkv_bias else ()
        shapes["router"] = (config.experts, config.hidden) if config.experts else ()
        if not is_one_of(self.cache, (DEFAULT_CACHE, *BY_CHANNEL)):
            rule = f"must be {DEFAULT_CACHE}, or one by channel: {', '.join(BY_CHANNEL)}"
            raise ArgumentError("cache", rule, self.cache)
        constants = (2, config.kv_heads, config.head_dim) if self.cache in BY_CHANNEL else ()
        shapes |= {"k_channel": constants, "v_channel": constants}
        for name, shape in shapes.items():
            array = getattr(self, name)
            if shape_of(array) != shape or (not shape and array is not None):
                raise ArgumentError(
                    name, f"must be an array {list(shape)}" if shape else "must be None", _describe(array)
                )
        for name in ("k_channel", "v_channel") if constants else ():
            if dtype_of(getattr(self, name)) != "float32":
                raise ArgumentError(name, "must be float32", dtype_of(getattr(self, name)))
        on_gpu = gpu.is_device_array(self.input_norm)
        for name, part in self.parts.items():
            if any(gpu.is_device_array(array) != on_gpu for array in getattr(part, "buffers", {"": part}).values()):
                place = "on the GPU" if on_gpu else "on the host"
                raise ArgumentError(name, f"must be {place}, as input_norm is", f"not {place}")
        if self.router is not None and dtype_of(self.router) != self.dtype:
            raise ArgumentError("router", f"must be {self.dtype}, as input_norm is", dtype_of(self.router))

    @classmethod
    def random(
        cls,
        config: Config,
        seed: int = 0,
        scheme: str = "lqq",
        *,
        group: int = 128,
        layout: str = "strips",
        interleaved: bool = False,
        dtype: str = "float16",
        on_device: bool = False,
    ) -> Self:
        """Make random weights of standard deviation K^-0.5: a block of each matrix is quantised and repeated.

        Args:
            config: of the layer.
            seed: 0 or more; other layers have other weights by another seed.
            scheme: `lqq`, `qoq`, in groups of `group`, or `qoq_channel`; of W4A4 `atom`, with 128 outliers, or `fmpq`,
                a fifth of whose blocks are INT8.
            group: 32, 64 or 128; of W4A4 64 or 128; `qoq_channel` ignores it.
            layout: of the packing.
            interleaved: gate and up in turns: `decode_layer` ends their product with SiLU·mul. Not of experts.
            dtype: of what lies between the kernels, `float16` or `bfloat16`.
            on_device: repeat and pack on the GPU, which takes seconds for what takes minutes on the host.
        """
        require_config("config", config)
        check_flags(on_device=on_device, interleaved=interleaved)
        if on_device:
            gpu.device_info()  # or the reason why there is none
        if not is_one_of(scheme, (*w4a8.SCHEMES, *w4a4.SCHEMES)):
            raise ArgumentError("scheme", f"must be one of {', '.join((*w4a8.SCHEMES, *w4a4.SCHEMES))}", scheme)
        if scheme in w4a4.SCHEMES and (config.experts or interleaved):
            got = f"{config.experts} experts, interleaved={interleaved}"
            raise ArgumentError("scheme", f"{scheme} is for dense layers whose rows are in order", got)
        if not is_one_of(dtype, DTYPES):
            raise ArgumentError("dtype", f"must be one of {', '.join(DTYPES)}", dtype)
        require_integer("seed", seed)
        rng = np.random.default_rng(seed)
        place: Callable[[Any], Any] = gpu.to_device if on_device else lambda array: array

        def random_matrix(N: int, K: int, interleaved: bool = False) -> Any:
            if scheme in w4a4.SCHEMES:
                return _random_reordered(rng, N, K, scheme, group, layout, place)
            block = rng.standard_normal((min(N, BLOCK_ROWS), min(K, BLOCK_K)), dtype=np.float32) / np.sqrt(K)
            quantised_block = quantiser(scheme)(block.astype(np.float32), group)
            return pack(repeat_to_shape(with_arrays(quantised_block, place), N, K), layout, interleaved=interleaved)

        def norm() -> Any:
            return place(convert_to_dtype(rng.uniform(0.5, 1.5, config.hidden).astype(np.float32), dtype))

        weights: dict[str, Any] = {}
        for name, size in config.matrices.items():
            experts = config.experts if name in ("gate_up", "down") else 0
            turns = interleaved and name == "gate_up"
            matrices = [random_matrix(*size, turns) for _ in range(experts or 1)]
            weights[name] = stack_experts(matrices) if experts else matrices[0]
        if config.qkv_bias:
            weights["qkv_bias"] = place(rng.standard_normal(config.qkv_width, dtype=np.float32))
        if config.experts:
            router = rng.standard_normal((config.experts, config.hidden), dtype=np.float32)
            weights["router"] = place(convert_to_dtype((router / np.sqrt(config.hidden)).astype(np.float32), dtype))
        return cls(config=config, input_norm=norm(), post_norm=norm(), **weights)

    @property
    def four_bit_inputs(self) -> bool:
        """True if the matrices are W4A4's, which read 4-bit activations."""
        return isinstance(self.qkv, ReorderedWeight)

    @property
    def dtype(self) -> str:
        """Name of the dtype of activations between the kernels."""
        return dtype_of(self.input_norm)

    @property
    def parts(self) -> dict[str, Any]:
        """Weights and constants that the layer has, by attribute."""
        names = [attribute.name for attribute in fields(self) if attribute.name not in ("config", "cache")]
        attributes = {name: getattr(self, name) for name in names}
        return {name: part for name, part in attributes.items() if part is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, padding included."""
        return sum(int(part.nbytes) for part in self.parts.values())

    def in_layout(self, layout: str) -> Self:
        """Repack every matrix but those of experts in a layout, bit for bit, where it lies."""
        repacked: dict[str, Any] = {}
        for name, part in self.parts.items():
            if getattr(part, "layout", layout) == layout:
                continue
            if isinstance(part, PackedWeight):
                repacked[name] = pack(unpack(part), layout)
            elif isinstance(part, ReorderedWeight):
                repacked[name] = part.in_layout(layout)
        return replace(self, **repacked) if repacked else self

    def in_layout_here(self, backend: str | None = None) -> Self:
        """Repack for kernels that run here, as `in_layout`, unless one takes the matrices as they are."""
        return self.in_layout(layout_here(self.o.scheme, backend, now=self.o.layout))

    def to_device(self) -> "LayerWeights":
        """Copy NumPy arrays to the GPU. Raises UnavailableError if there is none."""
        gpu.device_info()  # or the reason why there is none
        moved_weights: LayerWeights = with_arrays(self, copy_to_device)
        return moved_weights


def _random_reordered(
    rng: np.random.Generator, N: int, K: int, scheme: str, group: int, layout: str, place: Callable[[Any], Any]
) -> ReorderedWeight:
    """Make a random W4A4 matrix whose input has a random order of channels.

    A block of INT4 channels is repeated, as in W4A8's.
    """
    outliers = RANDOM_OUTLIERS if scheme == "atom" else 0
    w4a4.check_reordered(K, outliers)
    size = min(N, BLOCK_ROWS), min(K - outliers, BLOCK_K) + outliers
    block = rng.standard_normal(size, dtype=np.float32) / np.float32(np.sqrt(K))
    rows = quant.quantize_atom_weight(block, group, outliers)
    q4 = repeat_to_shape(place(rows.q4), N, K - outliers)
    scale4 = repeat_to_shape(place(rows.scale4), N, (K - outliers) // group)
    q8 = repeat_to_shape(place(rows.q8), N, outliers) if outliers else q4[:, :0]
    repeated_rows = quant.AtomRows(q4, scale4, q8, repeat_to_shape(place(rows.scale8), N, 1))
    int8 = None if scheme == "atom" else round(K // group * quant.fmpq.MOST_INT8)
    return w4a4.pack_reordered(repeated_rows, rng.permutation(K), layout, int8=int8, clip=quant.atom.ACTIVATION_CLIP)


def _describe(array: Any) -> str:
    return f"shape {list(shape_of(array))}" if hasattr(array, "shape") else type(array).__name__
