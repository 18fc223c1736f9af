"""Colours of the schemes in pictures."""

from ptxlab.plot import BLUE, ORANGE

SCHEME_COLOURS = {"qoq": ORANGE, "lqq": BLUE, "lqq_ceiling": "#74add1", "lqq_search": "#1b3a5f"}
