"""`attention_kv4_mma_sm80` as it is compiled for every part of its contract, its problems, and a checked launch."""

from typing import Any, NamedTuple

import pytest

from ptxlab import kernels
from ptxlab.kernels.attention import sm80
from ptxlab.spec import Arrays
from tests.support import attention_problems as problems

SPEC = sm80.MMA
SOURCE = kernels.find(SPEC.name)[1][0]


class Variant(NamedTuple):
    """What the kernel is compiled for: every head dim, page size, scheme, dtype and number of columns is somewhere."""

    D: int
    page: int
    bits: int
    channel: int
    T: int
    ratio: int
    BF16: int = 0

    @property
    def sizes(self) -> dict[str, Any]:
        return {"page": self.page, "bits": self.bits, "channel": self.channel, "softmax_scale": self.D**-0.5}

    def config(self, Hkv: int) -> dict[str, int]:
        shape = {"D": self.D, "T": self.T, "Hq": Hkv * self.ratio, "Hkv": Hkv}
        return {**SPEC.config_for({**self.sizes, **shape}), "BF16": self.BF16}

    def problem(
        self, seed: int, lengths: tuple[int, ...], change: problems.Change, Hkv: int, window: int
    ) -> tuple[Arrays, Arrays]:
        """(logical inputs, arguments)."""
        return problems.of_variant(SPEC, self, seed, lengths, change, Hkv, window=window)


VARIANTS = (
    Variant(128, 64, 4, 0, T=1, ratio=1),
    Variant(128, 16, 4, 0, T=3, ratio=4, BF16=1),
    Variant(128, 32, 8, 0, T=1, ratio=16),
    Variant(64, 32, 4, 1, T=8, ratio=3),
    Variant(256, 16, 4, 0, T=1, ratio=8, BF16=1),
    Variant(64, 64, 8, 1, T=2, ratio=2),
)
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v)))


def check(variant: Variant, logical: Arrays, arrays: Arrays, backend: str, **how: Any) -> Arrays:
    """One block sees everything: what it says is held against the reference, within its bound."""
    sizes = {**variant.sizes, "window": logical["window"], "blocks": 1}
    config = variant.config(logical["cache"].num_kv_heads)
    return problems.check(SPEC, logical, backend, arrays, sizes=sizes, config=config, **how)
