"""`attention_kv4_mma_sm80` and `attention_kv4_sm90` as they are compiled for every part of their contract: problems of
each, and checked launches."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from ptxlab import emulator, registry
from ptxlab.lowbit.kernels.attention import sm80, sm90
from ptxlab.lowbit.kernels.attention.sm90 import SM90, AttentionTileSm90
from ptxlab.runtime import Outcome, run_spec
from ptxlab.sources import Source
from ptxlab.spec import Arrays, KernelSpec
from ptxlab.spec.dtypes import convert_to_dtype
from tests.support import attention_problems as problems


class Variant(NamedTuple):
    """Compile-time shape of a kernel: `attention_kv4_sm90` with a `tile`, `attention_kv4_mma_sm80` without."""

    D: int
    page: int
    bits: int
    channel: int
    T: int
    ratio: int
    BF16: int = 0
    tile: AttentionTileSm90 | None = None

    def __str__(self) -> str:
        return "-".join(map(str, (self.spec.name.rpartition("_")[2], *self[:-1])))

    @property
    def spec(self) -> KernelSpec:
        return sm80.MMA if self.tile is None else SM90

    @property
    def source(self) -> Source:
        return registry.find(self.spec.name)[1][0]

    @property
    def dtype(self) -> str:
        """Dtype of queries and results, by name."""
        return sm80.DTYPES[self.BF16]

    def sizes(self, window: int = 0, blocks: int = 1) -> dict[str, Any]:
        sizes = {"page": self.page, "bits": self.bits, "channel": self.channel, "softmax_scale": self.D**-0.5}
        return {**sizes, "window": window, "blocks": blocks}

    @property
    def config(self) -> dict[str, int]:
        if self.tile is None:
            return {**self.spec.config_for(self.sizes() | self.shape(1)), "BF16": self.BF16}
        constants = {
            "HEAD_DIM": self.D,
            "PAGE": self.page,
            "BITS": self.bits,
            "CHANNEL": self.channel,
            "BF16": self.BF16,
        }
        columns = sm90.compiled_columns(self.T * self.ratio)
        promotion = {"PROMOTE": self.tile.TOKENS}  # after every tile, so that short sequences go that way as well
        return {**constants, **promotion, **sm90.FIXED, "COLUMNS": columns, **self.tile._asdict()}

    def shape(self, Hkv: int) -> dict[str, int]:
        return {"Hq": Hkv * self.ratio, "Hkv": Hkv, "T": self.T, "D": self.D}

    def problem(
        self,
        seed: int,
        lengths: tuple[int, ...],
        change: problems.Change = problems.nothing,
        Hkv: int = 1,
        window: int = 0,
        blocks: int = 1,
    ) -> tuple[Arrays, Arrays]:
        """Make a problem: (logical inputs, arguments)."""
        scheme = sm80.scheme_of(self.bits, self.channel)
        q, cache = problems.problem(seed, lengths, change, scheme=scheme, page_size=self.page, **self.shape(Hkv))
        logical = {"q": q, "cache": cache, "softmax_scale": self.D**-0.5, "window": window}
        logical |= {"blocks": blocks} if self.tile else {}
        return logical, {**self.spec.pack(logical), "q": convert_to_dtype(q, self.dtype)}

    def run(
        self,
        logical: Arrays,
        arrays: Arrays,
        backend: str = "emulator",
        constants: Mapping[str, int] = {},
        **options: Any,
    ) -> Outcome:
        """Launch the kernel with `constants` constants, without a check of its results."""
        sizes, config = self.sizes(logical["window"], logical.get("blocks", 1)), {**self.config, **constants}
        return run_spec(self.spec, self.source, arrays, sizes=sizes, config=config, backend=backend, **options)

    def check(self, logical: Arrays, arrays: Arrays, backend: str = "emulator", **options: Any) -> Arrays:
        """Run the kernel and compare its results with the reference within the bound.

        The buffers in which blocks hand over partial results have to be empty afterwards.
        """
        sizes = self.sizes(logical["window"], logical.get("blocks", 1))
        return problems.check(self.spec, logical, backend, arrays, sizes=sizes, config=self.config, **options)


# Every head dim, page size, scheme, dtype and number of columns is somewhere, and of tokens that a warp takes.
AMPERE = (
    Variant(128, 64, 4, 0, T=1, ratio=1),
    Variant(128, 16, 4, 0, T=3, ratio=4, BF16=1),
    Variant(128, 32, 8, 0, T=1, ratio=16),
    Variant(64, 32, 4, 1, T=8, ratio=3),
    Variant(256, 16, 4, 0, T=1, ratio=8, BF16=1),
    Variant(64, 64, 8, 1, T=2, ratio=2),
)
_TILES = ((64, 2, 4, 1), (16, 4, 2, 1), (32, 4, 4, 1), (32, 2, 3, 1), (16, 8, 2, 1), (64, 3, 3, 1))
HOPPER = tuple(v._replace(tile=AttentionTileSm90(*tile)) for v, tile in zip(AMPERE, _TILES, strict=True))


def problem_strategies(
    tokens: int, sequences: int, *, gpu: bool = False, **extra: Any
) -> dict[str, st.SearchStrategy[Any]]:
    """Build the strategies of problems for `given`: the arguments of `Variant.problem`, and `extra`.

    In the emulator its mode is drawn too.
    """
    common: dict[str, st.SearchStrategy[Any]] = {
        "lengths": st.lists(st.integers(0, tokens), min_size=1, max_size=sequences).map(tuple),
        "Hkv": st.integers(1, 3 if gpu else 2),
        "window": st.sampled_from((0, 1, 100, 1000) if gpu else (0, 1, 20, 64, 1000)),
        "blocks": st.sampled_from((1, 132, 264)) if gpu else st.integers(1, 9),
        "seed": st.integers(0, 2**32 - 1),
        "change": st.sampled_from(problems.CASES),
    }
    return common | ({} if gpu else {"mode": st.sampled_from(emulator.MODES)}) | extra


def parametrize_variants(*variants: Variant) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("variant", variants, ids=str)
