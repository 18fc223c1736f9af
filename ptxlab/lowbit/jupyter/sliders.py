"""Sliders over the dequantisation identities and over layouts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ptxlab.jupyter.widgets import link_controls, require_ipywidgets, slider
from ptxlab.lowbit.jupyter import maps
from ptxlab.lowbit.jupyter.drawing import HolderView
from ptxlab.lowbit.jupyter.identities import LANES, identities

if TYPE_CHECKING:
    from ipywidgets import VBox


def dequant_sliders(q4: tuple[int, ...] = (15, 3, 0, 9), s1: int = 15, minimum: int = -104) -> "VBox":
    """Show sliders for four q4, s1 and min over `identities`, which limits their values.

    Raises:
        ArgumentError: a value out of its range.
        UnavailableError: ipywidgets is not installed.
    """
    ui = require_ipywidgets()
    identities(q4, s1, minimum)
    weights = [slider(f"q4, lane {lane}", q4[lane], 0, 15) for lane in range(LANES)]
    scale_slider, minimum_slider = slider("s1", s1, 1, max(s1, 20)), slider("min", minimum, -128, 127)

    def show(values: Mapping[str, int]) -> str:
        lanes = tuple(values[control.description] for control in weights)
        return identities(lanes, values["s1"], values["min"])._repr_html_()

    columns = ui.HBox([ui.VBox(weights[::-1]), ui.VBox([scale_slider, minimum_slider])])
    return link_controls(columns, [*weights, scale_slider, minimum_slider], show)


def layout_explorer(name: str = "dual_mma", lane: int = 0) -> "VBox":
    """Show a list of all maps and a slider for the lane over `who_holds`.

    Raises:
        ArgumentError: no such map, or no such lane.
        UnavailableError: ipywidgets is not installed.
    """
    ui = require_ipywidgets()
    maps.find(name).held_by(lane)
    choice = ui.Dropdown(options=list(maps.maps_by_name()), value=name, description="map")
    lane_slider = slider("lane", lane, 0, maps.find(name).lanes - 1)

    def show(values: Mapping[str, Any]) -> str:
        lane_slider.max = maps.find(values["map"]).lanes - 1
        return HolderView(maps.find(values["map"]), min(values["lane"], lane_slider.max))._repr_html_()

    return link_controls(ui.HBox([choice, lane_slider]), [choice, lane_slider], show)
