"""What the suite `prefill` measures: queries of one sequence behind a context that is in its cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.bench.shapes import HEAD_DIM, Batch

QUERIES = (128, 512, 2048, 8192)
CONTEXTS = (0, 2048, 8192, 32768, 131072)
HEADS = ((32, 8), (64, 8), (32, 32))
OTHER_DIMS = {64: (32, 8), 256: (16, 8)}  # heads
OTHER_POINTS = ((512, 8192), (2048, 0), (2048, 8192), (2048, 32768))  # queries, context
SHORT, ALONE, BYTES = "short", "alone", "bytes"
SHORT_CONTEXTS = (0, 8192, 32768)
FEW_QUERIES, FAR_CONTEXTS = 128, (32768, 131072)  # queries and contexts whose bytes from DRAM have a target


@dataclass(frozen=True)
class Chunk:
    """Queries of one sequence, whose own keys and values are in the cache too.

    Attributes:
        queries: new tokens.
        context: tokens before them.
        heads: of queries, of keys.
        D: dimensions of a head.
    """

    queries: int
    context: int
    heads: tuple[int, int]
    D: int = HEAD_DIM

    def __str__(self) -> str:
        return f"{self.queries} queries over {self.context}, heads {self.heads[0]}/{self.heads[1]} of {self.D}"

    @property
    def batch(self) -> Batch:
        """The cache: one sequence with all its tokens."""
        return Batch(*self.heads, (self.context + self.queries,), self.D)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that identify the chunk in a record; T is the number of new tokens, C that of the earlier tokens."""
        return {"T": self.queries, "C": self.context, "Hq": self.heads[0], "Hkv": self.heads[1], "D": self.D}

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products over the pairs of query and visible key."""
        pairs = self.queries * self.context + self.queries * (self.queries + 1) // 2
        return 4 * pairs * self.heads[0] * self.D

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries in FP16; the results have as many."""
        return 2 * self.queries * self.heads[0] * self.D


GRID = (
    *(Chunk(T, C, heads) for heads in HEADS for C in CONTEXTS for T in QUERIES),
    *(Chunk(T, C, heads, D) for D, heads in OTHER_DIMS.items() for T, C in OTHER_POINTS),
)


@dataclass(frozen=True)
class ChunkSelection:
    """Chunks that are measured, and whether peers are measured beside them."""

    chunks: tuple[Chunk, ...] = GRID
    peers: bool = True


def part(words: Sequence[str]) -> ChunkSelection:
    """Parse the words of `--only`: heads, `D=64`, `T=512`, `C=8192`, `short`, `alone`.

    All of a kind is measured if no word names one of it. `short` are the rows that have targets, at heads 32/8. Raises
    ArgumentError for another word.
    """
    kinds = (
        {f"{Hq}/{Hkv}": chunks_of(heads=(Hq, Hkv)) for Hq, Hkv in HEADS},
        {f"D={D}": chunks_of(D=D) for D in (HEAD_DIM, *OTHER_DIMS)},
        {f"T={T}": chunks_of(queries=T) for T in QUERIES},
        {f"C={C}": chunks_of(context=C) for C in CONTEXTS},
        {SHORT: _short()},
    )
    known_words = [*(word for kind in kinds for word in kind), ALONE, BYTES]
    for word in words:
        if word not in known_words:
            raise ArgumentError("only", f"one of {', '.join(known_words)}", word)
    selected = set(GRID)
    for kind in kinds:
        if named_kinds := [kind[word] for word in words if word in kind]:
            selected &= set().union(*named_kinds)
    if not selected:
        raise ArgumentError("only", "words that some chunk of the grid fits", ", ".join(words))
    return ChunkSelection(tuple(chunk for chunk in GRID if chunk in selected), peers=ALONE not in words)


def chunks_of(**fields: object) -> set[Chunk]:
    """Find the chunks of the grid whose fields have these values."""
    return {
        chunk for chunk in GRID if all(getattr(chunk, name) == wanted_value for name, wanted_value in fields.items())
    }


def _short() -> set[Chunk]:
    """Return the chunks whose rate or bytes have a target, at the first heads."""
    rates = {Chunk(T, C, HEADS[0]) for T, C in product(QUERIES[1:], SHORT_CONTEXTS)}
    return rates | {Chunk(FEW_QUERIES, C, HEADS[0]) for C in FAR_CONTEXTS}
