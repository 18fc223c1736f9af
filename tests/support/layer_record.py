"""What decoder layers took, as nobody measured it: for the tables, figures and targets made of records of the suite."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks import layer
from benchmarks import layer_shapes as shapes
from benchmarks.layer import decoder, ends, fused
from benchmarks.peers_layer import MIXES, MixTime
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Record, Row
from ptxlab.llm.layer_chain import batch_of
from ptxlab.llm.model import Config
from ptxlab.runtime.timing import Measured
from tests.support import fake_rows

CEILINGS = Ceilings(4.6, 4.2)
SLOWDOWN = 1.25  # time over the floor, of all layers that are ours
PEER_SLOWDOWNS = {
    "fp16": 4.0,
    "fp8_row": 2.2,
    "fp8_tensor": 2.0,
    "humming_chn": 1.5,
    "humming_g128": 1.6,
}  # mixes over ours
BITS = 4 + 16 / 128  # of a weight
OTHERS = (
    *("rmsnorm_quantize qkv_in", "rope_append_kv4 q", "quantize_activations o_in"),
    "rmsnorm_quantize gate_up_in",
)


def work(config: Config, B: int) -> list[shapes.Work]:
    gemms = []
    for name, (N, K) in config.matrices.items():
        rows = shapes.rows_of(config, name, B)
        gemms.append(shapes.Work(f"gemm {name}", int(N * K * BITS / 8), 2 * rows * N * K))
    return [*gemms, shapes.Work("attention", batch_of(config, B).kv_bytes(), 0)]


def layer_row(config: Config, B: int) -> Row:
    """Make up a layer's row: every operation alone takes 1.2 times its floor, the others 2 µs each."""
    operations = work(config, B)
    us = {operation.name: 1.2 * operation.us(CEILINGS) for operation in operations} | dict.fromkeys(OTHERS, 2.0)
    part = {
        name: name.split()[0] if name in dict.fromkeys(operation.name for operation in operations) else "others"
        for name in us
    }
    layer_us = SLOWDOWN * sum(operation.us(CEILINGS) for operation in operations)
    names = [name for name in MIXES if not config.experts or name in ("fp16", "fp8_row")]
    mixes = {
        f"{name}/sdpa": MixTime(
            PEER_SLOWDOWNS[name] * layer_us,
            0.6 * PEER_SLOWDOWNS[name] * layer_us,
            0.5 * PEER_SLOWDOWNS[name] * layer_us,
        )
        for name in names
    }
    peers, columns = layer.summarize_mixes(config, B, mixes)
    measured = Measured(layer_us, layer_us, layer_us, 1755.0)
    alone = decoder.Alone(us, part)
    return decoder.row_at(config, B, measured, operations, alone, CEILINGS, "nothing: made up", peers, columns)


def fused_rows() -> Iterator[Row]:
    """Make up the fused kernels' rows: 1.25 times the time of a copy, which takes 1 µs more than its bytes."""
    for width in fused.WIDTHS:
        for M in fused.TOKENS:
            for kernel, bytes_per_element in (("rmsnorm_quantize", 7), ("silu_mul_quantize", 5)):
                floor = M * width * bytes_per_element / CEILINGS.copy_tbps / 1e6
                times = {"copy_us": floor + 1, "copy_l2_us": 1.5, "l2_us": 2.0, "chain_us": 1.4}
                yield fake_rows.row(
                    floor,
                    1.25 * (floor + 1) / floor,
                    M * width * bytes_per_element,
                    kernel=kernel,
                    measure=layer.FUSED,
                    sizes={"M": M, "K": width},
                    limit="copy",
                    peers={"torch_compile": 2 * (floor + 1), "liger_f16": 2.5 * (floor + 1)},
                    more=times,
                )


def span_rows() -> Iterator[Row]:
    """Make up a layer of five launches; the third begins 0.5 µs before the second has ended."""
    for name, B in layer.TIMELINE_LAYERS:
        launches = [("norm", 0.0, 2.0), ("gemm", 2.5, 12.0), ("rope", 11.5, 13.0), ("attention", 13.5, 20.0)]
        names = ("rmsnorm_quantize qkv_in", "gemm qkv", "rope_append_kv4 q", "attention")
        again = [(kernel, begin + 21, end + 21) for kernel, begin, end in launches]
        yield from layer.spans_of(Config.named(name), B, [*launches, *again], names, 20.5)


def narrow_rows() -> Iterator[Row]:
    """Make up the rows of a layer with heads of 64."""
    for B in layer.BATCHES:
        base = layer_row(layer.NARROW, B)
        yield replace(base, measure=layer.D64, sizes=base.sizes | {"D": 64})


def epilogue_rows() -> Iterator[Row]:
    """Make up the epilogues' rows: a residual add takes 0.5 µs off a layer, SiLU·mul adds 1."""
    for name in ends.MODELS:
        base = layer_row(Config.named(name), 16)
        for epilogue in ends.ALL:
            layer_us = base.time_us - 0.5 * epilogue.residual + epilogue.silu_mul
            sizes = base.sizes | {part: int(enabled) for part, enabled in epilogue._asdict().items()}
            columns = {"predicted_us": base.time_us - 0.25 * epilogue.residual}
            yield replace(base, measure=layer.EPILOGUES, sizes=sizes, time_us=layer_us, more=columns)


def record() -> Record:
    rows = [layer_row(config, B) for config in layer.CONFIGS for B in layer.BATCHES]
    device = {"name": "NVIDIA H200", "slug": "h200"}
    ceilings = CEILINGS.to_json()
    every = (*fused_rows(), *rows, *span_rows(), *narrow_rows(), *epilogue_rows())
    return Record("layer", device, {}, ceilings, every, commit="0123456789abcdef", date="2026-11-23T00:00:00")
