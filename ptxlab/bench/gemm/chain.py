"""The four GEMMs of a decoder layer one after the other, where each may begin while the one before it ends.

In one CUDA graph, launched programmatically (PDL) where a kernel waits by itself, over weights that no chain finds in
the L2. Beside it the same chain launched plainly, and cuBLAS's.
"""

from collections.abc import Callable, Iterator, Sequence

from ptxlab import cost, gpu
from ptxlab.bench import peers
from ptxlab.bench.gemm import headline
from ptxlab.bench.gemm.points import StreamTime
from ptxlab.bench.gemm.problem import GemmLaunches, expected, first_tokens, launches, packed_bytes, source_of, tokens
from ptxlab.bench.record import Row, row_of
from ptxlab.bench.shapes import CHAINS, FEW_TOKENS, GROUP, Layer
from ptxlab.bench.timing import GEMM_REPLAYS, Measured, copies_beyond_l2, in_turn, measure
from ptxlab.spec import Arrays, evaluate

MEASURE = "chain"


def rows(stream_us: StreamTime, progress: Callable[[str], None]) -> Iterator[Row]:
    """Every model at every number of tokens of a step of decoding."""
    for layers in CHAINS:
        progress(f"{layers[0].model}: chain")
        beside = peers.cublas_chain([(layer.N, layer.K) for layer in layers], FEW_TOKENS)
        logical = [{**headline.weight_of(layer), **tokens(layer, max(FEW_TOKENS))} for layer in layers]
        for M in FEW_TOKENS:
            yield chain(layers, M, [first_tokens(inputs, M) for inputs in logical], stream_us, beside[M])


def chain(
    layers: Sequence[Layer], M: int, logical: Sequence[Arrays], stream_us: StreamTime, beside: dict[str, float]
) -> Row:
    """Time the GEMMs of `layers` in this order, and check what every one of them wrote."""
    links = [headline.at(layer, M) for layer in layers]
    nbytes = [packed_bytes(step.spec, sizes) for step, sizes in links]
    operations = sum(int(evaluate(step.spec.operations, sizes)) for step, sizes in links)
    right = [expected(step.spec, inputs) for (step, _), inputs in zip(links, logical, strict=True)]

    def timed(programmatic: bool) -> tuple[Measured, list[GemmLaunches]]:
        copies = copies_beyond_l2(sum(nbytes))
        ready = [
            launches(step, sizes, inputs, copies=copies, programmatic=programmatic)
            for (step, sizes), inputs in zip(links, logical, strict=True)
        ]
        rounds = zip(*(link.calls for link in ready), strict=True)
        return measure([in_turn(calls) for calls in rounds], replays=GEMM_REPLAYS), ready

    plain, _ = timed(False)
    measured, ready = timed(True)
    checked = [link.check(bits) for link, bits in zip(ready, right, strict=True)]
    return row_of(
        links[0][0].spec,
        source_of(links[0][0]),
        MEASURE,
        {"hidden": layers[0].K, "M": M, "g": GROUP},
        measured,
        floor=cost.gemm_floor(stream_us(sum(nbytes)), operations, gpu.device_info().slug),
        checked="; ".join(checked),
        nbytes=sum(link.step.spec.bytes_moved({**link.sizes, **link.variant}) for link in ready),
        rate=(operations / measured.us / 1e6, "TOPS"),
        operations=operations,
        peers=beside,
        activations=headline.ORDER,
        kernel=", ".join(dict.fromkeys(step.spec.name for step, _ in links)),
        face=headline.FACE,
        more={"plain_us": plain.us, "stream_us": stream_us(sum(nbytes)), "packed_bytes": sum(nbytes)},
    )
