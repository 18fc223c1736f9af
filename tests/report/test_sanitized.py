"""`python -m report --check` names the kernels that no record of the sanitizers has."""

import json
from pathlib import Path

import pytest

from ptxlab import registry
from ptxlab.profile.nsight.sanitizer import TOOLS
from report import __main__ as command


def test_a_kernel_that_one_tool_has_not_seen_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    everything = [*registry.specs()]
    assert command.not_sanitized() == [f"in no record of the sanitizers: {', '.join(everything)}"]
    (tmp_path / "h200").mkdir()
    first = [{"tool": tool, "kernels": everything[:-2]} for tool in TOOLS]
    last = [{"tool": tool, "kernels": everything[-2:]} for tool in TOOLS[1:]] + [{"tool": TOOLS[0], "kernels": []}]
    last[-1]["kernels"] = everything[-1:]
    for name, verdicts in {"sanitizers": first, "sanitizers_attention": last}.items():
        (tmp_path / "h200" / f"{name}.json").write_text(json.dumps(verdicts))
    assert command.not_sanitized() == [f"in no record of the sanitizers: {everything[-2]}"]
    last[-1]["kernels"] = everything[-2:]
    (tmp_path / "h200" / "sanitizers_attention.json").write_text(json.dumps(last))
    assert command.not_sanitized() == []
