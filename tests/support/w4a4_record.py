"""A record of `python -m benchmarks gemm --only w4a4` that nobody measured: for the report."""

from collections.abc import Iterator

from ptxlab import registry
from ptxlab.bench.record import Record, Row
from ptxlab.lowbit.bench.gemm.problem import packed_bytes, sizes_at
from ptxlab.lowbit.bench.gemm.w4a4 import COMPARED, LADDER_LAYER, MEASURES
from ptxlab.lowbit.bench.shapes import LLAMA, Layer
from tests.support import fake_rows

SLOWDOWN = {"gemm_w4a8_sm90": 1.1, "gemm_w8a8_sm90": 1.2, "gemm_w4a4_sm90": 1.32, "gemm_w4ax_sm90": 1.43}
IN_SOFTWARE = 100.0  # kernels for INT4 tensor cores


def row(name: str, measure: str, layer: Layer, M: int) -> Row:
    spec = registry.specs()[name]
    sizes = sizes_at(spec, layer, M)
    face = {"face": "gemm_w4a8"} if name == "gemm_w4a8_sm90" else {}
    floor = layer.N * layer.K * M / 1e9  # the same for all, so that times compare as slowdowns do
    nbytes = spec.bytes_moved({**spec.config_for(sizes), "OUT": 0, **sizes})
    columns = {"packed_bytes": packed_bytes(spec, sizes), "stream_us": floor}
    peers = {"cublas_fp8": floor * 1.0, "cublas_int8": floor * 1.4}
    slowdown = SLOWDOWN.get(name, IN_SOFTWARE)
    return fake_rows.row(
        floor, slowdown, nbytes, 2 * M * layer.N * layer.K, kernel=name, measure=measure, sizes=sizes, limit="made up",
        peers=peers, more=columns, activations="row_major", **face,
    )  # fmt: skip


def rows() -> Iterator[Row]:
    for layer in LLAMA:
        for M in COMPARED:
            yield row("gemm_w4a8_sm90", "headline", layer, M)
            yield row("gemm_w8a8_sm90", "w8a8", layer, M)
            for measure, specs in MEASURES.items():
                names = [spec.name for spec in specs if layer == LADDER_LAYER or spec.name.endswith("_sm90")]
                yield from (row(name, measure, layer, M) for name in names)


def record() -> Record:
    device = {"name": "made-up H200", "slug": "h200", "driver": "0", "sms": 132}
    return Record("gemm_w4a4", device, {}, {"read_tbps": 4.65, "copy_tbps": 4.26}, tuple(rows()), commit="0" * 40)
