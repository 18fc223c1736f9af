"""The matrices of the GEMM benchmark: those of a decoder layer, N output channels x K input channels."""

from dataclasses import dataclass

TOKENS = (4, 16, 32, 64, 128, 256)
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
