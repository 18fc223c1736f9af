"""The matrices of the GEMM benchmark: those of a decoder layer, N output channels x K input channels."""

from dataclasses import dataclass

TOKENS = (4, 16, 32, 64, 128, 256)  # of the ladder
GROUP = 128


@dataclass(frozen=True)
class Layer:
    """One weight matrix of a model."""

    model: str
    part: str
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.model} {self.part}"


LAYERS = (
    Layer("7B", "QKV", 12288, 4096),
    Layer("7B", "O", 4096, 4096),
    Layer("7B", "gate+up", 22016, 4096),
    Layer("7B", "down", 4096, 11008),
    Layer("70B", "QKV", 10240, 8192),
    Layer("70B", "O", 8192, 8192),
    Layer("70B", "gate+up", 57344, 8192),
    Layer("70B", "down", 8192, 28672),
    Layer("Mixtral", "gate+up", 28672, 4096),  # one expert
    Layer("Mixtral", "down", 4096, 14336),
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
CHAINS = (LAYERS[:4], LAYERS[4:8])

# Mixtral-8x7B: so many experts, of which each token takes so many.
MIXTRAL = LAYERS[8:]
EXPERTS, CHOSEN_EXPERTS = 8, 2
ROUTED_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def decoder(model: str, hidden: int, intermediate: int, heads: int, kv_heads: int) -> tuple[Layer, ...]:
    """The four matrices of a model by its published configuration."""
    head = hidden // heads
    return (
        Layer(model, "QKV", hidden + 2 * kv_heads * head, hidden),
        Layer(model, "O", hidden, hidden),
        Layer(model, "gate+up", 2 * intermediate, hidden),
        Layer(model, "down", hidden, intermediate),
    )


# Other models, at odd numbers of tokens. Twelve of their matrices, SWEPT, are in the sweep that the costs of tiles were
# fitted to (`notebooks/results/h200/sweeps`), also at SWEPT_TOKENS; four are in none, nor are the other tokens.
UNTUNED = (
    *decoder("Yi-34B", 7168, 20480, 56, 8),
    *decoder("Qwen1.5-72B", 8192, 24576, 64, 64),
    *decoder("LLaMA-13B", 5120, 13824, 40, 40),
    *decoder("LLaMA-3-8B", 4096, 14336, 32, 8),
)
SWEPT = frozenset(
    {
        *((9216, 7168), (7168, 7168), (40960, 7168), (7168, 20480), (8192, 8192)),
        *((15360, 5120), (5120, 5120), (5120, 13824), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    }
)
UNTUNED_TOKENS = (3, 17, 33, 100, 200)
SWEPT_TOKENS = (33, 100, 200)
