"""Tables and pictures of profiles in `notebooks/guide/profiling.md`, from the records."""

from pathlib import Path

import pandas as pd

from ptxlab.lowbit.bench import stalls
from ptxlab.profile import nsight
from ptxlab.profile.nsight import Profile
from report import RESULTS
from report.frames import markdown

COMPARED = "gemm_w4a8_sm90", "gemm_w4a8_lqq_imfp_sm90"  # the page in the guide: the former beside the latter
_SPELLING = {
    "qoq": "`__vadd4`, emulated",
    "lqq": "XOR; the addition is in the multiplication",
}
_UNSIGNED = "none: the token sum takes it back"


def load_profile(kernel: str, slug: str = "h200") -> Profile | None:
    """Load the recorded profile of a kernel, or return None if there is none.

    It is in `notebooks/results/<gpu>/profiles/<kernel>.json`.
    """
    path = profile_path(kernel, slug)
    return nsight.load(path) if path.is_file() else None


def profile_path(kernel: str, slug: str = "h200") -> Path:
    """Return the path of a kernel's recorded profile."""
    return RESULTS / slug / "profiles" / f"{kernel}.json"


def load_compared() -> list[Profile]:
    """Load the two profiles that the guide compares; return an empty list unless both are recorded."""
    profiles = [profile for profile in map(load_profile, COMPARED) if profile is not None]
    return profiles if len(profiles) == len(COMPARED) else []


def profile_section() -> str:
    """Describe the differences of the two profiles, and link the picture of a profile."""
    profiles = load_compared()
    if not profiles:
        return "Not recorded yet.\n"
    lines = "\n".join(f"- {sentence}" for sentence in nsight.differences(*profiles))
    picture = "A launch on a page: what the units did, what warps waited for, and where](notebooks/figures/profile.png)"
    return f"{lines}\n\n![{picture}\n\n{_origin(profiles[0].device, profiles[0].origin, 'ptxlab profile')}\n"


def stalls_section() -> str:
    """Build the table of the share of stalls at the subtraction, kernel by kernel (LiquidGEMM §3.2)."""
    record = stalls.find_record()
    if record is None:
        return "Not recorded yet.\n"
    lines = []
    for kernel in stalls.KERNELS:
        places = {
            f"{layer.part}, M = {M}": record.at(kernel, str(layer), M) for layer in stalls.FFN for M in stalls.TOKENS
        }
        rows = {place: row for place, row in places.items() if row}
        dequantise_shares = sorted(row.dequantise for row in rows.values())
        executed_subtractions = min(row.executed.get("subtract", 0) for row in rows.values())
        line = {
            "kernel": f"`{kernel}`",
            "subtraction": next(
                (spelling for scheme, spelling in _SPELLING.items() if f"_{scheme}_" in kernel), _UNSIGNED
            ),
            "instructions of it per weight": f"{executed_subtractions:.2g}",
        }
        line |= {place: f"{row.subtract:.0%}" for place, row in rows.items()}
        lines.append(line | {"all of the dequantisation": f"{dequantise_shares[0]:.0%} to {dequantise_shares[-1]:.0%}"})
    note_on_shares = (
        "Shares of the sampled warps that did not issue. `gemm_w4a8_qoq_sm80` has QServe's main loop. For QServe itself"
        " LiquidGEMM reports 21% on an H800, without an M."
    )
    origin = _origin(record.device["name"], record.origin, "ptxlab stalls")
    return f"{markdown(pd.DataFrame(lines), left=2)}\n{note_on_shares} {origin}\n"


def _origin(device: str, origin: dict[str, str], command: str) -> str:
    """Describe in a sentence how a profile was measured."""
    date_and_commit = f"{origin['date'][:10]}, commit {origin['commit'][:10]}, ncu {origin['ncu']}"
    return f"Measured on one {device}: `{command}`, {date_and_commit}."
