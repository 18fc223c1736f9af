"""What is measured: the matrices of decoder layers, N output channels x K input channels, and batches of sequences."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.kernels.gemm.strips_tiles import NO_GROUPS
from ptxlab.lowbit.layout import page_bytes
from ptxlab.lowbit.model_shapes import shape_of

TOKENS = (4, 16, 32, 64, 128, 256)  # of the ladder
GROUP = 128


@dataclass(frozen=True)
class Layer:
    """Weight matrix of a model."""

    model: str
    part: str
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.model} {self.part}"


_PARTS = {"qkv": "QKV", "o": "O", "gate_up": "gate+up", "down": "down"}


def decoder(name: str, label: str = "") -> tuple[Layer, ...]:
    """Return the four matrices of a model (`model_shapes`), one expert's if there are experts; records use `label`."""
    matrices = shape_of(name).matrices
    return tuple(Layer(label or name, part, *matrices[key]) for key, part in _PARTS.items())


_MIXTRAL = shape_of("Mixtral-8x7B")
LAYERS = (
    *decoder("LLaMA-2-7B", "7B"),
    *decoder("LLaMA-2-70B", "70B"),
    *decoder(_MIXTRAL.name, "Mixtral")[2:],
)
# Where every step is taken apart, in machine code and by ncu: the largest matrix shows the steady state best.
DISSECTED = LAYERS[6]
DISSECTED_TOKENS = (16, 256)

# What `gemm_w4a8` launches: on LLaMA-2, alone and in the order of a decoder layer.
LLAMA = LAYERS[:8]
ALL_TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 2048, 8192)
MOST_FEW = 256  # up to so many tokens a step of decoding has
FEW_TOKENS = tuple(M for M in ALL_TOKENS if M <= MOST_FEW)
GROUPS = (GROUP, 64)
PER_CHANNEL = NO_GROUPS  # as a group
CHAINS = (LAYERS[:4], LAYERS[4:8])

# Experts of a layer, of which each token takes so many.
MIXTRAL = LAYERS[8:]
EXPERTS, CHOSEN_EXPERTS = _MIXTRAL.experts, _MIXTRAL.chosen_experts
ROUTED_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


# Other models, at odd numbers of tokens. Twelve of their matrices, SWEPT, are in the sweep that the costs of tiles were
# fitted to (`notebooks/results/h200/sweeps`), also at SWEPT_TOKENS; four are in none, nor are the other tokens.
UNTUNED = (
    *decoder("Yi-34B"),
    *decoder("Qwen1.5-72B"),
    *decoder("LLaMA-2-13B", "LLaMA-13B"),
    *decoder("LLaMA-3-8B"),
)
SWEPT = frozenset(
    {
        *((9216, 7168), (7168, 7168), (40960, 7168), (7168, 20480), (8192, 8192)),
        *((15360, 5120), (5120, 5120), (5120, 13824), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    }
)
UNTUNED_TOKENS = (3, 17, 33, 100, 200)
SWEPT_TOKENS = (33, 100, 200)

# Decode attention: the batches of the stored peers, single long sequences, ragged ones.
HEAD_DIM, PAGE = 128, 64
HEADS = tuple((c.heads, c.kv_heads) for c in map(shape_of, ("LLaMA-2-7B", "LLaMA-3-8B", "LLaMA-2-70B")))
BATCHES, LENGTHS = (1, 16, 64, 128, 256), (1024, 4096)  # of the stored peers
LONG = (32768, 131072)  # tokens of a single sequence
RAGGED_BATCH, RAGGED_MOST = 64, 8192


class Batch(NamedTuple):
    """Query heads, kv heads, each sequence's number of tokens (the new one included), and dimensions of a head."""

    Hq: int
    Hkv: int
    lengths: tuple[int, ...]
    D: int = HEAD_DIM

    def __str__(self) -> str:
        longest_length = max(self.lengths)
        bound_words = "" if min(self.lengths) == longest_length else "up to "
        dimensions = "" if self.D == HEAD_DIM else f" of {self.D}"
        return f"heads {self.Hq}/{self.Hkv}{dimensions}, {len(self.lengths)} x {bound_words}{longest_length}"

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(self.lengths)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that tell the batch from others in a record; L is the longest sequence."""
        return {"Hq": self.Hq, "Hkv": self.Hkv, "B": len(self.lengths), "L": max(self.lengths)}

    @property
    def place(self) -> tuple[int, ...]:
        """Key of the batch among the stored peers."""
        return tuple(self.sizes.values())

    def kv_bytes(self, scheme: str = "kv4") -> int:
        """Count the bytes of all keys and values with their scales and zeros, which attention has to read."""
        return self.tokens * self.Hkv * 2 * page_bytes(scheme, PAGE, self.D) // PAGE

    def pages(self) -> list[int]:
        """List the number of pages that each sequence takes."""
        return [ceil_div(length, PAGE) for length in self.lengths]


def even(heads: tuple[int, int], batch: int, length: int, D: int = HEAD_DIM) -> Batch:
    """Build a batch of sequences of equal length."""
    return Batch(*heads, (length,) * batch, D)


# QServe's Table 1: LLaMA-2-7B's heads, 64 sequences.
TABLE1_LENGTHS = (128, 256, 512, 1024, 1536)
TABLE1 = tuple(even(HEADS[0], 64, length) for length in TABLE1_LENGTHS)


def batches(heads: tuple[int, int]) -> list[Batch]:
    """List the batches of the stored peers, by length, and single long sequences."""
    all_even = [even(heads, batch, length) for length in LENGTHS for batch in BATCHES]
    return [*all_even, *(even(heads, 1, length) for length in LONG)]


def ragged_batch(heads: tuple[int, int]) -> Batch:
    """Draw a batch with lengths that are log-uniform between 1 and 8192; the same at every call."""
    drawn_lengths = np.exp(np.random.default_rng(0).uniform(0, np.log(RAGGED_MOST), RAGGED_BATCH))
    return Batch(*heads, tuple(int(length) for length in np.rint(drawn_lengths)))


def even_batch_like(batch: Batch) -> Batch:
    """Build a batch of as many sequences and tokens, whose lengths differ by one at most."""
    shortest_length, longer = divmod(batch.tokens, len(batch.lengths))
    return batch._replace(lengths=tuple(shortest_length + (b < longer) for b in range(len(batch.lengths))))
