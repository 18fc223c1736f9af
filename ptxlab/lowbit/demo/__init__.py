"""`ptxlab demo`: real trained weights through every dequantiser, checked bit for bit, on whatever backend is here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxlab import registry, toolchain
from ptxlab.errors import UnavailableError
from ptxlab.hardware.words import F32
from ptxlab.io import downloads as shipped
from ptxlab.lowbit import audit, quant
from ptxlab.lowbit.bench import counts
from ptxlab.lowbit.layout import checkpoint
from ptxlab.runtime import run_spec
from ptxlab.spec import Arrays, KernelSpec

RANGES = (119, 120, 127)
GROUP = 64
TRAINED = "minilm"  # the name of what `ptxlab weights` downloads


@dataclass(frozen=True)
class DemoRow:
    """Results of one dequantiser on all matrices of the demo.

    Attributes:
        kernel: name.
        scheme: the quantisation whose weights it unpacks.
        weights: how many it unpacked.
        wrong: how many differ from the truth; nonzero only for kernels that are wrong by design.
        as_predicted: results equal the reference bit for bit (and the wrong ones are the predicted ones).
        overflows: overflowing weights by protective range, where the scheme has one.
        alu_per_8: ALU instructions per 8 weights in SASS, or None.
        alu_source: `measured` or the record that the count was taken from.
        relative_error: Frobenius norm of W - W' over that of W.
        backend: where it ran.
    """

    kernel: str
    scheme: str
    weights: int
    wrong: int
    as_predicted: bool
    overflows: dict[int, int] | None
    alu_per_8: float | None
    alu_source: str
    relative_error: float
    backend: str


@dataclass(frozen=True)
class DemoScheme:
    """A way to quantise, and the logical inputs that its dequantisers take."""

    title: str
    quantize: Callable[[F32], Any]
    logical: Callable[[Any], Arrays]
    audited_as: str | None = None


_LQQ = DemoScheme(
    f"LQQ g{GROUP}",
    lambda w: quant.quantize_lqq(w, group=GROUP),
    lambda q: {"q4": q.q4, "scale": q.group_scale, "offset": q.offset},
    "lqq",
)
_QOQ = DemoScheme(
    f"QoQ g{GROUP}",
    lambda w: quant.quantize_qoq(w, group=GROUP),
    lambda q: {"q4": q.q4, "scale": q.group_scale, "offset": q.offset},
    "qoq",
)
_QOQ_ZERO = DemoScheme(_QOQ.title, _QOQ.quantize, lambda q: {"q4": q.q4, "scale": q.group_scale, "zero": q.zero}, "qoq")
_CHANNEL = DemoScheme("channel", quant.quantize_qoq_channel, lambda q: {"q4": q.q4})
_CHANNEL_SIGNED = DemoScheme("channel", quant.quantize_qoq_channel, lambda q: {"q4": q.q4.view(np.int8) - np.int8(8)})
_CHANNEL_SIGNED_NIBBLES = DemoScheme("channel", quant.quantize_qoq_channel, lambda q: {"q4": q.q4 ^ np.uint8(8)})
_INT4_GROUPS = DemoScheme(
    f"INT4 g{GROUP}", lambda w: quant.quantize_int4(w, group=GROUP), lambda q: {"q4": q.q4, "scale": q.scale}
)

SCHEMES: dict[str, DemoScheme] = {
    "dequant_lqq": _LQQ,
    "dequant_lqq_unsigned": _LQQ,
    "dequant_qoq_vadd4": _QOQ,
    "dequant_qoq_vadd4_s32": _QOQ,
    "dequant_qoq_presub": _QOQ_ZERO,
    "dequant_qoq_saturating": _QOQ_ZERO,
    "dequant_qoq_channel": _CHANNEL,
    "dequant_int4_naive": _CHANNEL_SIGNED_NIBBLES,
    "dequant_comet": _CHANNEL_SIGNED,
    "dequant_u4_f16": _CHANNEL,
    "dequant_u4_f16_subnormal": _CHANNEL,
    "dequant_s4_f16": _INT4_GROUPS,
}


def weights(progress: shipped.Progress = lambda done, total: None) -> tuple[str, dict[str, F32]]:
    """Return the demo's weights: a line that names them, and matrices by name (f32 [N, K]).

    These are trained weights, downloaded if need be; `progress` is told of the download. Where they cannot be had,
    weights are generated.
    """
    try:
        path = shipped.fetch(TRAINED, progress) / "model.safetensors"
    except UnavailableError as error:
        return f"GENERATED weights with outlier channels, as there are no trained ones: {error}", _generate_weights()
    matrices = dict(checkpoint.encoder_matrices(path))
    return f"trained weights of all-MiniLM-L6-v2 ({len(matrices)} matrices of its six encoder layers)", matrices


def _generate_weights() -> dict[str, F32]:
    """Generate six matrices as in one layer of the trained model, with a channel in 64 ten times as large."""
    rng = np.random.default_rng(0)
    matrices = {}
    for index, (rows, columns) in enumerate([(384, 384)] * 4 + [(1536, 384), (384, 1536)]):
        w = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.05)
        w[:, rng.integers(0, columns, size=columns // 64)] *= 10
        matrices[f"synthetic.{index}"] = w
    return matrices


def rows(
    matrices: dict[str, F32], *, backend: str | None = None, advance: Callable[[str], None] = lambda _: None
) -> Iterator[DemoRow]:
    """Quantise all matrices and run every dequantiser on them; `advance` is told each kernel's name."""
    prepared_weights: dict[str, list[Any]] = {}
    overflows = {scheme: _overflows(matrices, scheme, advance) for scheme in ("lqq", "qoq")}
    for name, scheme in SCHEMES.items():
        if scheme.title not in prepared_weights:
            advance(f"quantise {scheme.title}")
            prepared_weights[scheme.title] = [scheme.quantize(w) for w in matrices.values()]
        advance(name)
        yield _row(registry.specs()[name], scheme, prepared_weights[scheme.title], matrices, overflows, backend)


def steps() -> int:
    """Count the calls that `rows` makes to `advance`."""
    return len(SCHEMES) + len({scheme.title for scheme in SCHEMES.values()}) + 2


def next_commands() -> list[tuple[str, str]]:
    """List commands to try next that work on this machine: each with what it shows."""
    assembler = [("ptxlab sass dequant_qoq_vadd4 dequant_qoq_vadd4_s32", "machine code of two spellings")]
    return [
        ("ptxlab show dequant_lqq", "the kernel, commented"),
        ("ptxlab verify --all", "every kernel against its reference"),
        *([] if toolchain.missing() else assembler),
        ("ptxlab doctor", "what else this machine could do"),
    ]


def _row(
    spec: KernelSpec,
    scheme: DemoScheme,
    quantised: list[Any],
    matrices: dict[str, F32],
    overflows: dict[str, dict[int, int]],
    backend: str | None,
) -> DemoRow:
    source = registry.find(spec.name)[1][0]
    wrong_count, is_as_predicted, used_backend = 0, True, ""
    for weight in quantised:
        logical = scheme.logical(weight)
        outcome = run_spec(spec, source, spec.pack(logical), backend=backend)
        got, used_backend = outcome.outputs["out"], outcome.backend
        is_as_predicted &= np.array_equal(got, spec.reference(**logical))
        if spec.wrong is not None:
            is_missed = got != spec.wrong.truth(**logical)
            wrong_count += int(is_missed.sum())
            is_as_predicted &= np.array_equal(is_missed, spec.wrong.misses(**logical))
    alu, origin = counts.alu_per_8(source)
    return DemoRow(
        kernel=spec.name,
        scheme=scheme.title,
        weights=sum(w.size for w in matrices.values()),
        wrong=wrong_count,
        as_predicted=bool(is_as_predicted),
        overflows=overflows.get(scheme.audited_as or ""),
        alu_per_8=alu,
        alu_source=origin,
        relative_error=_relative_error(quantised, matrices),
        backend=used_backend,
    )


def _relative_error(quantised: list[Any], matrices: dict[str, F32]) -> float:
    """Compute the Frobenius norm of all differences over that of all weights."""
    squared_error = sum(
        float(np.square(q.dequantize() - w, dtype=np.float64).sum())
        for q, w in zip(quantised, matrices.values(), strict=True)
    )
    squared_weights = sum(float(np.square(w, dtype=np.float64).sum()) for w in matrices.values())
    return float(np.sqrt(squared_error / squared_weights))


def _overflows(matrices: dict[str, F32], scheme: str, advance: Callable[[str], None]) -> dict[int, int]:
    """Count overflowing weights by protective range, over all matrices."""
    advance(f"audit {scheme}")
    totals = dict.fromkeys(RANGES, 0)
    for w in matrices.values():
        for row in audit.audit_matrix(w, schemes=(scheme,), ranges=RANGES, group=GROUP):
            totals[row.protective_range] += row.overflows
    return totals
