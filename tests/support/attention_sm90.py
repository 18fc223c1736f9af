"""`attention_kv4_sm90` as it is compiled for every part of its contract, its problems, and a checked launch."""

from typing import Any, NamedTuple

import pytest

from ptxlab import kernels
from ptxlab.kernels.attention import sm90
from ptxlab.kernels.attention.sm90 import SM90, AttentionTileSm90
from ptxlab.spec import Arrays
from tests.support import attention_problems as problems

SOURCE = kernels.find(SM90.name)[1][0]


class Variant(NamedTuple):
    """Every head dim, page size, scheme, dtype is somewhere, and every number of tokens that a warp takes."""

    D: int
    page: int
    bits: int
    channel: int
    T: int
    ratio: int
    BF16: int
    tile: AttentionTileSm90

    def sizes(self, window: int, blocks: int) -> dict[str, Any]:
        known = {"page": self.page, "bits": self.bits, "channel": self.channel, "softmax_scale": self.D**-0.5}
        return {**known, "window": window, "blocks": blocks}

    @property
    def config(self) -> dict[str, int]:
        constants = {"D": self.D, "PAGE": self.page, "BITS": self.bits, "CHANNEL": self.channel, "BF16": self.BF16}
        room = sm90.room_for(self.T * self.ratio)
        often = {"PROMOTE": self.tile.TOKENS}  # after every tile, so that short sequences go that way as well
        return {**constants, **often, "SLOTS": sm90.SLOTS, "COLUMNS": room, **self.tile._asdict()}

    def problem(
        self, seed: int, lengths: tuple[int, ...], change: problems.Change, Hkv: int, window: int, blocks: int
    ) -> tuple[Arrays, Arrays]:
        """(logical inputs, arguments)."""
        return problems.of_variant(SM90, self, seed, lengths, change, Hkv, window=window, blocks=blocks)


VARIANTS = (
    Variant(128, 64, 4, 0, T=1, ratio=1, BF16=0, tile=AttentionTileSm90(64, 2, 4, 1)),
    Variant(128, 16, 4, 0, T=3, ratio=4, BF16=1, tile=AttentionTileSm90(16, 4, 2, 1)),
    Variant(128, 32, 8, 0, T=1, ratio=16, BF16=0, tile=AttentionTileSm90(32, 4, 4, 1)),
    Variant(64, 32, 4, 1, T=8, ratio=3, BF16=0, tile=AttentionTileSm90(32, 2, 3, 1)),
    Variant(256, 16, 4, 0, T=1, ratio=8, BF16=1, tile=AttentionTileSm90(16, 8, 2, 1)),
    Variant(64, 64, 8, 1, T=2, ratio=2, BF16=0, tile=AttentionTileSm90(64, 3, 3, 1)),
)
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v[:-1])))


def check(variant: Variant, logical: Arrays, arrays: Arrays, backend: str, **how: Any) -> Arrays:
    """What it says, held against the reference within its bound; nothing handed over is left."""
    sizes = variant.sizes(logical["window"], logical["blocks"])
    return problems.check(SM90, logical, backend, arrays, sizes=sizes, config=variant.config, **how)
