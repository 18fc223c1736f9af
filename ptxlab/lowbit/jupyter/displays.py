"""What packed weights look like in a notebook."""

from ptxlab.jupyter import page
from ptxlab.jupyter.displays import lowest_arch, title_line
from ptxlab.jupyter.page import chip, element, table
from ptxlab.lowbit.jupyter import maps
from ptxlab.lowbit.jupyter.drawing import HolderView
from ptxlab.lowbit.layout import PackedWeight


def of_weight(weight: PackedWeight) -> str:
    """Render a packed weight: its buffers, and which lane gets what of a tile."""
    chips = [chip(weight.scheme), chip(f"[{weight.N}, {weight.K}]"), chip(lowest_arch(weight.arch))]
    chips += [chip(f"groups of {weight.group}")] if weight.group < weight.K else []
    bits = f"{8 * weight.nbytes / (weight.N * weight.K):.2f} bits per weight"
    buffers = [
        (element("code", name), str(array.dtype), str(list(array.shape)), element("td", f"{array.nbytes:,}", cls="num"))
        for name, array in weight.buffers.items()
    ]
    return page.page(
        title_line(weight.layout, *chips, chip(bits)),
        table(("buffer", "dtype", "shape", "bytes"), buffers),
        HolderView(maps.find(weight.layout)).body(),
    )
