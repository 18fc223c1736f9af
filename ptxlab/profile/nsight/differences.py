"""Two profiles side by side: what differs, in words."""

from ptxlab.profile.nsight.page import FIGURES, Figure, Profile

MAX_DIFFERENCES = 10  # differences that are told
_COUNTS = 1.1  # a count differs if it does by this factor
_POINTS = 5.0  # and a percentage if it does by so many points
# Said first, or with another figure, or no news where blocks do different work.
_LEFT_OUT = ("time_us", "warp_instructions", "wavefronts", "occupancy_limit_pct", "blocks", "threads")


def differences(profile: Profile, baseline: Profile) -> list[str]:
    """Describe how `profile` differs from `baseline`, one sentence per difference.

    The time comes first, then what changed most.
    """
    time_us, baseline_us = profile.figures["time_us"], baseline.figures["time_us"]
    speed_sentence = (
        f"is {baseline_us / time_us:.2f} times as fast as"
        if time_us <= baseline_us
        else f"takes {time_us / baseline_us:.2f} times as long as"
    )
    sentences = [f"{profile.kernel} {speed_sentence} {baseline.kernel}: {time_us:.1f} µs, not {baseline_us:.1f}."]
    if profile.sizes != baseline.sizes:
        sentences.append(f"They did not do the same: {_sizes(profile)} here, {_sizes(baseline)} there.")
    weighted_sentences = [
        _figure_difference(figure, profile, baseline) for figure in FIGURES if _differs(figure, profile, baseline)
    ]
    for reason in sorted({*profile.stalls, *baseline.stalls}):
        percent, baseline_percent = (
            100 * compared_profile.stalls.get(reason, 0) for compared_profile in (profile, baseline)
        )
        if abs(percent - baseline_percent) >= _POINTS:
            label = f"stalls for {reason.replace('_', ' ')}"
            weighted_sentences.append(
                (
                    abs(percent - baseline_percent) / 100,
                    _sentence(label, percent, baseline_percent, f"{percent:.0f}%", f"{baseline_percent:.0f}%"),
                )
            )
    return sentences + [
        sentence for _, sentence in sorted(weighted_sentences, key=lambda weighted: -weighted[0])[:MAX_DIFFERENCES]
    ]


def amount(figure: Figure, number: float | None) -> str:
    """Format a figure's value with its unit."""
    if number is None:
        return "-"
    short_number = f"{number:,.0f}" if number >= 1000 or number == int(number) else f"{number:.3g}"
    return short_number + ("" if figure.unit.startswith("%") else " ") * bool(figure.unit) + figure.unit


def _differs(figure: Figure, profile: Profile, baseline: Profile) -> bool:
    """Check whether a figure differs by enough to be mentioned."""
    number, baseline_number = profile.figures.get(figure.name), baseline.figures.get(figure.name)
    if number is None or baseline_number is None or figure.name in _LEFT_OUT:
        return False
    if figure.unit.startswith("%"):
        return abs(number - baseline_number) >= _POINTS
    return max(number, baseline_number) > _COUNTS * min(number, baseline_number)


def _figure_difference(figure: Figure, profile: Profile, baseline: Profile) -> tuple[float, str]:
    """Return the weight of a difference, to order by, and its sentence.

    The weight is points of a percentage; of anything else what the smaller lacks of the larger.
    """
    number, baseline_number = profile.figures[figure.name], baseline.figures[figure.name]
    weight = (
        abs(number - baseline_number) / 100
        if figure.unit.startswith("%")
        else 1 - min(number, baseline_number) / max(number, baseline_number)
    )
    return weight, _sentence(
        figure.label, number, baseline_number, amount(figure, number), amount(figure, baseline_number)
    )


def _sentence(label: str, number: float, baseline_number: float, text: str, baseline_text: str) -> str:
    return (
        f"{label[0].upper()}{label[1:]}: {text}, {'up' if number > baseline_number else 'down'} from {baseline_text}."
    )


def _sizes(profile: Profile) -> str:
    return " ".join(f"{name}={size}" for name, size in profile.sizes.items()) or "sizes unknown"
