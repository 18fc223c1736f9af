"""Shapes of published decoders by name: the widths that say which matrices and heads a kernel meets."""

from dataclasses import dataclass

from ptxlab.errors import ArgumentError
from ptxlab.validate import is_one_of


@dataclass(frozen=True)
class ModelShape:
    """The widths of a decoder of the Llama family.

    Attributes:
        name: of the published model.
        hidden: width of the residual stream, H.
        ffn: width of the feed-forward part, F; of one expert where there are experts.
        heads: query heads, Hq.
        kv_heads: Hkv, which divides Hq.
        layers: their number.
        head_dim: D.
        experts: of a layer; 0 for a dense model.
        chosen_experts: how many of them a token takes.
    """

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    head_dim: int = 128
    experts: int = 0
    chosen_experts: int = 0

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(N, K) of a layer's weights in the order of their use; of the last two each expert has its own."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }


# LiquidGEMM's Table 1, and two more: LLaMA-3-70B, which COMET measures, and Qwen1.5-72B, which QServe and COMET do.
SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("LLaMA-30B", 6656, 17920, 52, 52, 60),
        ModelShape("LLaMA-2-7B", 4096, 11008, 32, 32, 32),
        ModelShape("LLaMA-2-13B", 5120, 13824, 40, 40, 40),
        ModelShape("LLaMA-2-70B", 8192, 28672, 64, 8, 80),
        ModelShape("LLaMA-3-8B", 4096, 14336, 32, 8, 32),
        ModelShape("LLaMA-3-70B", 8192, 28672, 64, 8, 80),
        ModelShape("Mistral-7B", 4096, 14336, 32, 8, 32),
        ModelShape("Yi-34B", 7168, 20480, 56, 8, 60),
        ModelShape("Mixtral-8x7B", 4096, 14336, 32, 8, 32, experts=8, chosen_experts=2),
        ModelShape("Qwen1.5-72B", 8192, 24576, 64, 64, 80),
    )
}


def shape_of(name: str, argument: str = "model") -> ModelShape:
    """Look up a published model's shape. Raises ArgumentError for a name that is not in `SHAPES`."""
    if not is_one_of(name, SHAPES):
        raise ArgumentError(argument, f"must be one of {', '.join(SHAPES)}", name)
    return SHAPES[name]
