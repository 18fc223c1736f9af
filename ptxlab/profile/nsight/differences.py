"""Two profiles side by side: what differs, in words."""

from ptxlab.profile.nsight.page import FIGURES, Figure, Profile

MOST = 10  # differences that are told
_COUNTS = 1.1  # a count differs if it does by this factor
_POINTS = 5.0  # and a percentage if it does by so many points
# Said first, or with another figure, or no news where blocks do different work.
_UNSAID = ("time_us", "warp_instructions", "wavefronts", "occupancy_limit_pct", "blocks", "threads")


def differences(one: Profile, other: Profile) -> list[str]:
    """Describe how `one` differs from `other`, one sentence per difference.

    The time comes first, then what changed most.
    """
    mine, theirs = one.figures["time_us"], other.figures["time_us"]
    faster = (
        f"is {theirs / mine:.2f} times as fast as" if mine <= theirs else f"takes {mine / theirs:.2f} times as long as"
    )
    sentences = [f"{one.kernel} {faster} {other.kernel}: {mine:.1f} µs, not {theirs:.1f}."]
    if one.sizes != other.sizes:
        sentences.append(f"They did not do the same: {_sizes(one)} here, {_sizes(other)} there.")
    found = [_figure(figure, one, other) for figure in FIGURES if _differs(figure, one, other)]
    for reason in sorted({*one.stalls, *other.stalls}):
        here, there = (100 * profile.stalls.get(reason, 0) for profile in (one, other))
        if abs(here - there) >= _POINTS:
            label = f"stalls for {reason.replace('_', ' ')}"
            found.append((abs(here - there) / 100, _sentence(label, here, there, f"{here:.0f}%", f"{there:.0f}%")))
    return sentences + [words for _, words in sorted(found, key=lambda item: -item[0])[:MOST]]


def amount(figure: Figure, value: float | None) -> str:
    """Format a figure's value with its unit."""
    if value is None:
        return "-"
    short = f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
    return short + ("" if figure.unit.startswith("%") else " ") * bool(figure.unit) + figure.unit


def _differs(figure: Figure, one: Profile, other: Profile) -> bool:
    """Check whether a figure differs by enough to be mentioned."""
    here, there = one.figures.get(figure.name), other.figures.get(figure.name)
    if here is None or there is None or figure.name in _UNSAID:
        return False
    if figure.unit.startswith("%"):
        return abs(here - there) >= _POINTS
    return max(here, there) > _COUNTS * min(here, there)


def _figure(figure: Figure, one: Profile, other: Profile) -> tuple[float, str]:
    """Return the weight of a difference, to order by, and its sentence.

    The weight is points of a percentage; of anything else what the smaller lacks of the larger.
    """
    here, there = one.figures[figure.name], other.figures[figure.name]
    weight = abs(here - there) / 100 if figure.unit.startswith("%") else 1 - min(here, there) / max(here, there)
    return weight, _sentence(figure.label, here, there, amount(figure, here), amount(figure, there))


def _sentence(label: str, here: float, there: float, mine: str, theirs: str) -> str:
    return f"{label[0].upper()}{label[1:]}: {mine}, {'up' if here > there else 'down'} from {theirs}."


def _sizes(profile: Profile) -> str:
    return " ".join(f"{name}={size}" for name, size in profile.sizes.items()) or "sizes unknown"
