"""One word, one meaning, and families that stand beside each other."""

import re
from collections import defaultdict
from pathlib import Path

import ptxlab

PACKAGE = Path(ptxlab.__file__).parent
PUBLIC = re.compile(r"^class ([A-Z]\w*)", re.MULTILINE)


def test_every_public_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in PUBLIC.findall(path.read_text()):
            places[name].append(str(path.relative_to(PACKAGE)))
    assert {name for name, of in places.items() if len(of) > 1 and any("kernels" in place for place in of)} == set()


def test_attention_imports_nothing_of_a_gemm() -> None:
    modules = sorted((PACKAGE / "kernels" / "attention").rglob("*.py"))
    assert modules and [str(path) for path in modules if "kernels.gemm" in path.read_text()] == []
