"""Specs of somebody's own, with their sources beside them."""

from pathlib import Path

from ptxlab import registry, sources


def test_a_source_that_changed_is_read_again(tmp_path: Path) -> None:
    """A process such as a notebook's reads the `.ptx` again, though the `.py` beside it is as before."""
    spec, ptx = tmp_path / "mine.py", tmp_path / "dequant_lqq.ptx"
    spec.write_text("from ptxlab.lowbit.kernels.dequant import SPECS\n\nMINE = SPECS[0]\n")
    first = sources.sources_of_kernel("dequant_lqq")[0].text
    for text in (first, first + "// changed\n"):
        ptx.write_text(text)
        ((resolved, (source,), entry),) = registry.resolve_all(str(spec))
        assert resolved is not None and resolved.name == entry == "dequant_lqq" and source.text == text
