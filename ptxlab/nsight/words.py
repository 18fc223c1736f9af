"""Two profiles side by side: what differs, in words."""

from ptxlab.nsight.page import FIGURES, Figure, Profile

_COUNTS = 1.1  # a count differs if it does by this factor
_POINTS = 5.0  # and a percentage if it does by so many points
_UNSAID = ("time_us", "warp_instructions", "blocks", "threads")  # said first; said per weight; no merit in themselves


def differences(one: Profile, other: Profile) -> list[str]:
    """What `one` does otherwise than `other`, a sentence each: first the time, then what changed most."""
    mine, theirs = one.figures["time_us"], other.figures["time_us"]
    sentences = [
        f"{one.kernel} takes {mine / theirs:.2f} of the time of {other.kernel}: {mine:.1f} for {theirs:.1f} µs."
    ]
    if one.sizes != other.sizes:
        sentences.append(f"They did not do the same: {_sizes(one)} here, {_sizes(other)} there.")
    found = [
        (_weight(figure, one, other), _sentence(figure, one, other)) for figure in FIGURES if _told(figure, one, other)
    ]
    for reason in sorted({*one.stalls, *other.stalls}):
        here, there = (100 * profile.stalls.get(reason, 0) for profile in (one, other))
        if abs(here - there) >= _POINTS:
            words = f"{_more(here, there)} of the stalls are {reason.replace('_', ' ')}: {here:.0f}% for {there:.0f}%."
            found.append((abs(here - there) / 100, words))
    return sentences + [words for _, words in sorted(found, key=lambda item: -item[0])]


def amount(figure: Figure, value: float | None) -> str:
    """A figure's value as it is shown, with its unit."""
    if value is None:
        return "-"
    short = f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
    return short + (f"{figure.unit}" if figure.unit.startswith("%") else f" {figure.unit}").rstrip()


def _told(figure: Figure, one: Profile, other: Profile) -> bool:
    """Whether a figure differs by enough to be told."""
    here, there = one.figures.get(figure.name), other.figures.get(figure.name)
    if here is None or there is None or figure.name in _UNSAID:
        return False
    if figure.unit.startswith("%"):
        return abs(here - there) >= _POINTS
    return max(here, there) > _COUNTS * min(here, there)


def _weight(figure: Figure, one: Profile, other: Profile) -> float:
    """How much a difference says, to order by: points of a percentage, else the smaller part that is missing."""
    here, there = one.figures[figure.name], other.figures[figure.name]
    return abs(here - there) / 100 if figure.unit.startswith("%") else 1 - min(here, there) / max(here, there)


def _sentence(figure: Figure, one: Profile, other: Profile) -> str:
    here, there = one.figures[figure.name], other.figures[figure.name]
    label = f"{figure.label} busy" if figure.unit == "%" else figure.label
    return f"{_more(here, there)} {label}: {amount(figure, here)} for {amount(figure, there)}."


def _more(here: float, there: float) -> str:
    return "More" if here > there else "Less"


def _sizes(profile: Profile) -> str:
    return " ".join(f"{name}={size}" for name, size in profile.sizes.items()) or "sizes unknown"
