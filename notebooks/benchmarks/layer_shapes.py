"""The decoder layers that are measured, and the least that each of their operations has to move and to multiply."""

from typing import NamedTuple

from ptxlab.bench.ceilings import Ceilings
from ptxlab.llm.layer_chain import LENGTH
from ptxlab.llm.model import Config
from ptxlab.lowbit.bench.shapes import GROUP

BATCHES = (1, 4, 16, 64, 128, 256)
TOPS = 1920.0  # INT8 operations, 10^12 per second: wgmma with its operands resident, as measured on an H200

_SEVENTY = Config.named("LLaMA-2-70B")
CONFIGS = (
    Config.named("LLaMA-2-7B"),
    *(_SEVENTY.share(parts) for parts in (1, 2, 4, 8)),  # whole, and one GPU's; the all-reduces are in no time
    Config.named("LLaMA-3-8B"),
    Config.named("Mixtral-8x7B"),
)
NARROW = Config(  # heads of 64
    hidden=2048, ffn=8192, heads=32, kv_heads=8, head_dim=64, layers=16, vocabulary=128256, name="LLaMA-3.2-1B"
)


class Work(NamedTuple):
    """The least that an operation reads from device memory, and how much its products multiply."""

    name: str
    nbytes: int
    operations: int

    def us(self, ceilings: Ceilings) -> float:
        """Compute the work's floor in us, by the ceiling of reads or by `TOPS`, whichever is longer."""
        return max(self.nbytes / ceilings.read_tbps, self.operations / TOPS) / 1e6


def sizes_of(config: Config, B: int) -> dict[str, int]:
    """Return the sizes that identify a layer in a record."""
    widths = {"hidden": config.hidden, "ffn": config.ffn, "Hq": config.heads, "Hkv": config.kv_heads}
    return {**widths, "E": config.experts, "B": B, "L": LENGTH, "g": GROUP}


def config_of(sizes: dict[str, int]) -> Config | None:
    """Find the config with these sizes (`sizes_of`), or return None."""
    return next((config for config in CONFIGS if sizes_of(config, sizes["B"]) == sizes), None)


def rows_of(config: Config, matrix: str, B: int) -> int:
    """Return the rows of a GEMM's activations: tokens, or tokens times the experts that each token chooses."""
    return B * config.chosen_experts if config.experts and matrix in ("gate_up", "down") else B
