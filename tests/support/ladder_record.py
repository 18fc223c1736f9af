"""A record of the suite `gemm` that nobody measured: for the tables and figures that are made of such records."""

from collections.abc import Sequence

from ptxlab import registry
from ptxlab.bench.record import Record, Row
from ptxlab.lowbit import kernels
from ptxlab.lowbit.bench.gemm.problem import packed_bytes, sizes_at, variant
from ptxlab.lowbit.bench.shapes import DISSECTED, DISSECTED_TOKENS, LAYERS, TOKENS, Layer
from tests.support import fake_rows

NAMES = [spec.name for spec in kernels.gemm.STEPS]
# Time over the floor at few and at many tokens, step by step.
SLOWDOWN = dict(
    zip(
        NAMES,
        ((2.2, 4.0), (2.1, 3.8), (2.0, 3.2), (1.9, 2.4), (1.7, 2.0), (1.9, 1.9), (1.35, 1.4), (1.3, 1.35)),
        strict=True,
    )
)
COUNTED = {
    "ncu_ns": 60_000.0, "ncu_cycles": 105_000.0, "tensor_pct": 40.0, "issue_pct": 30.0, "alu_pct": 20.0,
    "fma_pct": 10.0, "lsu_pct": 5.0, "dram_pct": 70.0, "l2_pct": 40.0, "warp_instructions": 3e7, "active_warps": 12.0,
    "stall_long_scoreboard": 2.5, "stall_barrier": 1.5, "stall_wait": 0.7, "stall_gmma": 0.9,
}  # fmt: skip


def row(name: str, layer: Layer, M: int) -> Row:
    spec = registry.specs()[name]
    sizes = sizes_at(spec, layer, M)
    slowdown_of_few, slowdown_of_many = SLOWDOWN[name]
    counted = COUNTED if layer == DISSECTED and M in DISSECTED_TOKENS else {}
    return fake_rows.gemm(
        packed_bytes(spec, sizes),
        2 * M * layer.N * layer.K,
        (slowdown_of_few + (slowdown_of_many - slowdown_of_few) * M / 256) * (1 + 4000 / layer.N / 8),
        kernel=name,
        measure="gemm",
        sizes=sizes,
        variant=variant(spec, sizes),
        more={"registers": 128, "local_bytes": 0, **counted},
    )


def record(names: Sequence[str] = tuple(NAMES)) -> Record:
    rows = tuple(row(name, layer, M) for layer in LAYERS for name in names for M in TOKENS)
    device = {"name": "made-up H200", "slug": "h200", "driver": "0", "sms": 132}
    return Record("gemm", device, {}, {"read_tbps": 4.65, "copy_tbps": 4.26}, rows, commit="0" * 40)
