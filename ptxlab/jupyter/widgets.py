"""Sliders: the dequantisation identities under one's fingers, and the explorer of layouts."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ptxlab.errors import UnavailableError
from ptxlab.jupyter import maps
from ptxlab.jupyter.drawing import HolderView
from ptxlab.jupyter.identities import LANES, identities

if TYPE_CHECKING:
    from ipywidgets import VBox


def dequant_sliders(q4: tuple[int, ...] = (15, 3, 0, 9), s1: int = 15, minimum: int = -104) -> "VBox":
    """Sliders for four q4, s1 and min over `identities`, which says what these may be.

    Raises:
        ArgumentError: a value out of its range.
        UnavailableError: ipywidgets is not installed.
    """
    ui = _ipywidgets()
    identities(q4, s1, minimum)
    weights = [_slider(f"q4, lane {lane}", q4[lane], 0, 15) for lane in range(LANES)]
    scale, least = _slider("s1", s1, 1, max(s1, 20)), _slider("min", minimum, -128, 127)

    def show(values: Mapping[str, int]) -> str:
        lanes = tuple(values[slider.description] for slider in weights)
        return identities(lanes, values["s1"], values["min"])._repr_html_()

    columns = ui.HBox([ui.VBox(weights[::-1]), ui.VBox([scale, least])])
    return _linked(columns, [*weights, scale, least], show)


def layout_explorer(name: str = "dual_mma", lane: int = 0) -> "VBox":
    """A list of all maps and a slider for the lane over `who_holds`.

    Raises:
        ArgumentError: no such map, or no such lane.
        UnavailableError: ipywidgets is not installed.
    """
    ui = _ipywidgets()
    maps.find(name).held_by(lane)
    choice = ui.Dropdown(options=list(maps.known()), value=name, description="map")
    slider = _slider("lane", lane, 0, maps.find(name).lanes - 1)

    def show(values: Mapping[str, Any]) -> str:
        slider.max = maps.find(values["map"]).lanes - 1
        return HolderView(maps.find(values["map"]), min(values["lane"], slider.max))._repr_html_()

    return _linked(ui.HBox([choice, slider]), [choice, slider], show)


def _linked(above: Any, controls: list[Any], show: Callable[[Mapping[str, Any]], str]) -> "VBox":
    """Controls over a page that follows them."""
    ui = _ipywidgets()
    below = ui.HTML()

    def update(_: object = None) -> None:
        below.value = show({control.description: control.value for control in controls})

    for control in controls:
        control.observe(update, names="value")
    update()
    return ui.VBox([above, below])


def _slider(description: str, value: int, low: int, high: int) -> Any:
    return _ipywidgets().IntSlider(value=value, min=low, max=high, description=description)


def _ipywidgets() -> Any:
    try:
        import ipywidgets
    except ImportError:
        raise UnavailableError("ipywidgets: needed for sliders; python -m pip install 'ptxlab[jupyter]'") from None
    return ipywidgets
