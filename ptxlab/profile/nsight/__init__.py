"""Nsight Compute: counters of launches (`launches`), whole reports (`collect`, `read`), and a launch on a page."""

from ptxlab.profile.nsight.differences import amount, differences
from ptxlab.profile.nsight.ncu import FAILED, INSTALL, SETS, collect, counters, launches, marked_launches, version
from ptxlab.profile.nsight.page import BUSY, FIGURES, METRICS, Carrier, Figure, Profile, load, profile_of, save
from ptxlab.profile.nsight.report import ISSUING, ProfiledLaunch, SampledInstruction, read, require_reader

__all__ = [
    "BUSY",
    "FAILED",
    "FIGURES",
    "INSTALL",
    "ISSUING",
    "METRICS",
    "SETS",
    "Carrier",
    "Figure",
    "Profile",
    "ProfiledLaunch",
    "SampledInstruction",
    "amount",
    "collect",
    "counters",
    "differences",
    "launches",
    "load",
    "marked_launches",
    "profile_of",
    "read",
    "require_reader",
    "save",
    "version",
]
