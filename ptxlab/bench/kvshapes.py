"""The batches that decode attention is measured at: those of the stored peers, single long sequences, ragged ones."""

from typing import NamedTuple

import numpy as np

from ptxlab.layout import page_bytes

HEAD_DIM, PAGE = 128, 64
HEADS = ((32, 32), (32, 8), (64, 8))  # query heads, kv heads
BATCHES, LENGTHS = (1, 16, 64, 128, 256), (1024, 4096)  # of the stored peers
LONG = (32768, 131072)  # tokens of a single sequence
RAGGED_BATCH, RAGGED_MOST = 64, 8192


class Batch(NamedTuple):
    """Query heads, kv heads, and how many tokens each sequence has, the new one included."""

    Hq: int
    Hkv: int
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        longest = max(self.lengths)
        exact = "" if min(self.lengths) == longest else "up to "
        return f"heads {self.Hq}/{self.Hkv}, {len(self.lengths)} x {exact}{longest}"

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(self.lengths)

    @property
    def sizes(self) -> dict[str, int]:
        """What tells it from the others in a record; L is the longest sequence."""
        return {"Hq": self.Hq, "Hkv": self.Hkv, "B": len(self.lengths), "L": max(self.lengths)}

    @property
    def place(self) -> tuple[int, ...]:
        """Where the stored peers are found."""
        return tuple(self.sizes.values())

    def kv_bytes(self, scheme: str = "kv4") -> int:
        """Of all keys and values with their scales and zeros: what has to be read."""
        return self.tokens * self.Hkv * 2 * page_bytes(scheme, PAGE, HEAD_DIM) // PAGE

    def pages(self) -> list[int]:
        """Pages that each sequence takes."""
        return [-(-length // PAGE) for length in self.lengths]


def even(heads: tuple[int, int], batch: int, length: int) -> Batch:
    """Sequences of equal length."""
    return Batch(*heads, (length,) * batch)


def points(heads: tuple[int, int]) -> list[Batch]:
    """The batches of the stored peers, by length, and single long sequences."""
    batches = [even(heads, batch, length) for length in LENGTHS for batch in BATCHES]
    return [*batches, *(even(heads, 1, length) for length in LONG)]


def ragged(heads: tuple[int, int]) -> Batch:
    """Lengths that are log-uniform between 1 and 8192; the same at every call."""
    drawn = np.exp(np.random.default_rng(0).uniform(0, np.log(RAGGED_MOST), RAGGED_BATCH))
    return Batch(*heads, tuple(int(length) for length in np.rint(drawn)))


def evened(batch: Batch) -> Batch:
    """As many sequences with as many tokens altogether, of lengths that differ by one at most."""
    least, over = divmod(batch.tokens, len(batch.lengths))
    return batch._replace(lengths=tuple(least + (b < over) for b in range(len(batch.lengths))))
