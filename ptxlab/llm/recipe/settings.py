"""`Recipe`: the steps of quantising a model and their settings; and the named recipes."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.numerics import FakeQuantized
from ptxlab.llm.recipe.gptq import DAMPING
from ptxlab.llm.recipe.grids import Array, ChannelGrid, Grid, LQQGrid, QoQGrid, SymmetricGrid
from ptxlab.llm.recipe.rotation import hadamard, random_orthogonal
from ptxlab.lowbit.quant.atom import ACTIVATION_CLIP
from ptxlab.lowbit.quant.fmpq import BLOCKS, MOST_INT8, OUTLIER
from ptxlab.lowbit.quant.inputs import GROUPS, check_protective_range
from ptxlab.lowbit.quant.kv import BY_CHANNEL
from ptxlab.lowbit.quant.level1 import PROTECTIVE_RANGE
from ptxlab.validate import is_one_of, require_number

PACKED = ("lqq", "qoq", "qoq_channel")  # schemes that the kernels support as they are; int4 in Atom's order
ROTATIONS: Mapping[str, Callable[[int], Any]] = {"hadamard": hadamard, "random": random_orthogonal}
SCHEMES = (*PACKED, "int4", "int8", None)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The steps in their order; a step that is None or False is left out.

    Attributes:
        rotate: the residual stream, by a `hadamard` matrix or a `random` orthogonal one.
        rotate_heads: every head's values, by a Hadamard matrix.
        smooth_keys: SmoothAttention's exponent.
        smooth: the exponents (alpha, beta) of smoothing down's input.
        smooth_heads: the exponents (alpha, beta) of smoothing o's input through the rows of v; not with rotate_heads.
        smooth_search: SmoothQuant's strengths, of which each product but o gets the one with the least error of its
            output.
        reorder: sort the input channels of o and down by magnitude.
        clip: search each group's levels: for the least error of the product's `output`, or of the `weights`.
        clip_block: choose a clip ratio for q and one for k by the error of the attention block's output (QServe §4.3.4,
            Eq. 10); needs clip `output`, whose levels are kept where no ratio has a smaller error.
        gptq: round by GPTQ; else to nearest.
        damping: of GPTQ.
        scheme: of the weights: lqq, which is also the form of QoQ as released (PostScale); qoq (QServe §4.1);
            qoq_channel; int4 (symmetric); int8 (per row), which can only be measured; None leaves them floats.
        group: weights per scale; None with int4 is one scale per row, and per token of the activations.
        protective_range: of level 1.
        acts: bits of the activations, 8 per token or 4 in groups, or None.
        kept: channels of each input that stay INT8 beside 4-bit ones, the largest by their squares (Atom).
        kept_bits: bits of the kept channels: 8, or 16 for FP16.
        int8: share of the 4-bit activations' groups that may be INT8, those of the largest channels, up to the last
            one with an outlier (COMET's FMPQ); the weights stay in 4 bits. None: no such groups.
        outlier: times the median channel's largest magnitude, from where a channel is an outlier to `int8`.
        act_clip: the largest 4-bit activation, relative to the largest magnitude of its group.
        kv: one of `CACHE_FORMATS`, or None; a scheme by channel is calibrated.

    Raises ArgumentError for a value that no recipe can have.
    """

    rotate: str | None = None
    rotate_heads: bool = False
    smooth_keys: float | None = None
    smooth: tuple[float, float] | None = None
    smooth_heads: tuple[float, float] | None = None
    smooth_search: tuple[float, ...] | None = None
    reorder: bool = False
    clip: str | None = None
    clip_block: bool = False
    gptq: bool = False
    damping: float = DAMPING
    scheme: str | None = "lqq"
    group: int | None = 64
    protective_range: int = PROTECTIVE_RANGE
    acts: int | None = 8
    kept: int = 0
    kept_bits: int = 8
    int8: float | None = None
    outlier: float = OUTLIER
    act_clip: float = 1.0
    kv: str | None = "kv4"

    def __post_init__(self) -> None:
        if not is_one_of(self.rotate, (*ROTATIONS, None)):
            raise ArgumentError("rotate", f"must be one of {', '.join(ROTATIONS)} or None", self.rotate)
        if not is_one_of(self.scheme, SCHEMES):
            raise ArgumentError("scheme", f"must be one of {', '.join(map(str, SCHEMES))}", self.scheme)
        if self.scheme in ("lqq", "qoq") and not is_one_of(self.group, GROUPS):
            raise ArgumentError("group", f"must be one of {', '.join(map(str, GROUPS))}", self.group)
        if not is_one_of(self.clip, ("output", "weights", None)):
            raise ArgumentError("clip", "must be output, weights or None", self.clip)
        if self.smooth_keys is not None:
            require_number("smooth_keys", self.smooth_keys, 0, 1)
        for name, exponents in (("smooth", self.smooth), ("smooth_heads", self.smooth_heads)):
            if exponents is None:
                continue
            if not isinstance(exponents, tuple) or len(exponents) != 2:
                raise ArgumentError(name, "must be (alpha, beta) or None", repr(exponents))
            for exponent in exponents:
                require_number(name, exponent, 0, 1)
        if self.smooth_heads is not None and self.rotate_heads:
            raise ArgumentError("smooth_heads", "must be None with rotate_heads", self.smooth_heads)
        if self.clip_block and (self.clip != "output" or self.scheme not in PACKED):
            got = f"clip {self.clip}, scheme {self.scheme}"
            raise ArgumentError("clip_block", f"needs clip output and scheme {', '.join(PACKED)}", got)
        if self.smooth_search is not None:
            if self.smooth is not None:
                raise ArgumentError("smooth", "must be None where smooth_search is given", self.smooth)
            if not isinstance(self.smooth_search, tuple) or not self.smooth_search:
                raise ArgumentError("smooth_search", "must be a tuple of strengths, or None", repr(self.smooth_search))
            if self.scheme not in PACKED or self.acts != 8:
                got = f"scheme {self.scheme}, acts {self.acts}"
                raise ArgumentError("smooth_search", f"needs scheme {', '.join(PACKED)} and 8-bit activations", got)
            for strength in self.smooth_search:
                require_number("smooth_search", strength, 0, 1)
        check_protective_range(self.protective_range)
        if self.int8 is not None:
            require_number("int8", self.int8, 0, 1)
            if (self.scheme, self.acts, self.kept) != ("int4", 4, 0):
                got = f"scheme {self.scheme}, acts {self.acts}, kept {self.kept}"
                raise ArgumentError("int8", "needs scheme int4, 4-bit activations and no kept channels", got)
            if not is_one_of(self.group, BLOCKS):
                rule = f"must be one of {', '.join(map(str, BLOCKS))} with INT8 blocks"
                raise ArgumentError("group", rule, self.group)
        require_number("outlier", self.outlier, 0, float("inf"))
        require_number("damping", self.damping, 0, 1)
        require_number("act_clip", self.act_clip, 0.01, 1)
        self.numerics()  # checks what it takes

    @property
    def is_calibrated(self) -> bool:
        """True if the recipe needs a calibration text."""
        return self.needs_peaks or self.needs_hessian or self.calibrates_cache or self.smooth_search is not None

    @property
    def calibrates_cache(self) -> bool:
        """True if the recipe calibrates constants by channel of the KV cache."""
        return self.kv in BY_CHANNEL

    @property
    def needs_peaks(self) -> bool:
        """True if the recipe needs max|x| of every channel of the keys and of the inputs of o and down."""
        smooths = any(exponents is not None for exponents in (self.smooth_keys, self.smooth, self.smooth_heads))
        return smooths or self.reorder

    @property
    def needs_hessian(self) -> bool:
        """True if the recipe needs H = Xᵀ X of every input."""
        return self.clip == "output" or self.gptq or self.reorders

    @property
    def reorders(self) -> bool:
        """True if every matrix has an order of its input's channels."""
        return bool(self.kept) or self.int8 is not None

    def numerics(self) -> FakeQuantized:
        """Return the numerics of a model of this recipe."""
        return FakeQuantized(
            acts=self.acts,
            kv=self.kv,
            group=self.group,
            kept=self.kept,
            kept_bits=self.kept_bits,
            clip=self.act_clip,
        )

    def grid(self, w: Array, ratio: Array | None = None) -> Grid:
        """Return the scheme's grid for a matrix float [N, K], with the clip ratios [N] of its rows (`Grid.ratio`)."""
        grid = self._grid(w)
        grid.ratio = ratio
        return grid

    def _grid(self, w: Array) -> Grid:
        if self.scheme in ("lqq", "qoq"):
            two_level = LQQGrid if self.scheme == "lqq" else QoQGrid
            assert self.group is not None
            return two_level(w, self.group, clip=self.clip is not None, protective_range=self.protective_range)
        if self.scheme == "qoq_channel":
            return ChannelGrid(w, clip=self.clip is not None)
        if self.scheme == "int8":
            return SymmetricGrid(w, None, bits=8, clip=self.clip is not None)
        return SymmetricGrid(w, self.group, kept=self.kept, kept_bits=self.kept_bits, clip=self.clip is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        settings = asdict(self).items()
        return {name: list(setting) if isinstance(setting, tuple) else setting for name, setting in settings}

    @classmethod
    def settings_of(cls, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return recorded settings (`to_json`) with the defaults of those that an earlier version did not have."""
        return {**cls().to_json(), **recorded}

    def but(self, **changes: Any) -> "Recipe":
        """Return a copy with other settings."""
        return replace(self, **changes)


_FULL = Recipe(
    rotate="hadamard",
    rotate_heads=True,
    smooth_keys=0.5,
    smooth=(0.3, 0.7),
    reorder=True,
    clip="output",
    gptq=True,
)
RECIPES: Mapping[str, Recipe] = {
    "lqq": _FULL,
    "qoq": _FULL.but(scheme="qoq", clip_block=True),
    "qoq_released": _FULL.but(clip=None),  # with an 8-bit zero ("PostScale"), which is LQQ's form, and no clipping
    "qoq_channel": _FULL.but(scheme="qoq_channel", smooth=(0.1, 0.9), reorder=False, clip_block=True),
    # LiquidServe's (LiquidGEMM §6): SmoothQuant, its strength searched, and a static cache of 8 bits.
    "liquid": Recipe(smooth_search=tuple(i / 10 for i in range(11)), kv="kv8_channel"),
    "atom": Recipe(scheme="int4", acts=4, kept=64, act_clip=ACTIVATION_CLIP, clip="output", gptq=True),
    "fmpq": Recipe(scheme="int4", acts=4, int8=MOST_INT8, clip="output", gptq=True),
    "rtn": Recipe(),
}


def find_recipe(name: str) -> Recipe:
    """Return a recipe by name. Raises ArgumentError for a name that is not in `RECIPES`."""
    if not is_one_of(name, RECIPES):
        raise ArgumentError("recipe", f"must be one of {', '.join(RECIPES)}", name)
    return RECIPES[name]
