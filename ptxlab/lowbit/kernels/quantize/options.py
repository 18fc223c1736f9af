"""Options of the calls that quantise activations."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxlab.lowbit import reference
from ptxlab.lowbit.kernels.options import LaunchOptions, Rule, early_launch, option
from ptxlab.lowbit.kernels.quantize.atom import RULES
from ptxlab.lowbit.quant.atom import ACTIVATION_CLIP, ATOM_OUTLIERS, ATOM_PAPER, AtomRules
from ptxlab.validate import is_one_of

_OUTLIERS = ", ".join(map(str, ATOM_OUTLIERS))


def _is_number(number: Any, low: float, high: float) -> bool:
    return isinstance(number, int | float | np.number) and not isinstance(number, bool) and bool(low <= number <= high)


def _epsilon() -> Any:
    return option("1e-30 to 1.", Rule("a number in 1e-30..1", lambda eps: _is_number(eps, 1e-30, 1)), default=1e-5)


def _activation() -> Any:
    names = ", ".join(reference.ACTIVATIONS)
    rule = Rule(f"must be one of {names}", lambda activation: is_one_of(activation, reference.ACTIVATIONS), show=str)
    text = "`silu`, g / (1 + exp(-g)), or `gelu_tanh`, GELU's form by a hyperbolic tangent."
    return option(text, rule, default="silu")


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizeOptions(LaunchOptions):
    """Options of `quantize_activations`; once they are checked, `rows` is a number."""

    layout: str = option(
        "order of x_q: `row_major`, `fragment` (operand B of mma.sync) or `tiles` (swizzled, for wgmma); see"
        " `layout.activations`.",
        default="row_major",
    )
    rows: int | None = option("tokens of a tile, a multiple of 8 in 8..256; for `tiles` alone.", default=None)
    programmatic: bool = early_launch(", for which it waits by itself before it reads x or writes anything.")


@dataclass(frozen=True, kw_only=True, eq=False)
class NormOptions(QuantizeOptions):
    """Options of `rmsnorm_quantize`."""

    eps: float = _epsilon()


@dataclass(frozen=True, kw_only=True, eq=False)
class GateOptions(QuantizeOptions):
    """Options of `silu_mul_quantize`."""

    activation: str = _activation()


@dataclass(frozen=True, kw_only=True, eq=False)
class ReorderOptions(LaunchOptions):
    """Options of `reorder_quantize`; once they are checked, `layout` is a name."""

    outliers: int = option(
        "0, 64 or 128; C less these is a multiple of the group.",
        Rule(f"must be one of {_OUTLIERS}", lambda outliers: is_one_of(outliers, ATOM_OUTLIERS), show=str),
        default=128,
    )
    group: int = option("64 or 128.", default=128)
    layout: str | None = option(
        "`bytes` for weights in strips, `pairs` for weights in rows; with `int8` `joined` and `pairs`. By default that"
        " for strips.",
        default=None,
    )
    clip: float = option(
        "of a group's largest magnitude what its scale is made for, 0.001 to 1.",
        Rule("a number in 0.001..1", lambda clip: _is_number(clip, 0.001, 1)),
        default=ACTIVATION_CLIP,
    )
    rules: AtomRules = option(  # noqa: RUF009, a field
        "`quant.ATOM_PAPER` or `quant.ATOM_CODE`: how scales are made and values are rounded.",
        Rule(
            "must be quant.ATOM_PAPER or quant.ATOM_CODE",
            lambda rules: isinstance(rules, AtomRules) and rules in RULES,
        ),
        default=ATOM_PAPER,
    )
    int8: int | None = option(
        "of COMET: how many blocks of 128, those of the last places, are INT8. Then outliers, group, clip and rules,"
        " which are Atom's, must be left out.",
        default=None,
    )
    programmatic: bool = early_launch(", for which it waits by itself before it reads x or writes anything.")


@dataclass(frozen=True, kw_only=True, eq=False)
class NormReorderOptions(ReorderOptions):
    """Options of `rmsnorm_reorder_quantize`."""

    eps: float = _epsilon()


@dataclass(frozen=True, kw_only=True, eq=False)
class GateReorderOptions(ReorderOptions):
    """Options of `silu_mul_reorder_quantize`."""

    activation: str = _activation()
