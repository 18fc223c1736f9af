"""Every section, figure, table and equation that is cited exists in the document that is named with it."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests/sections.toml"
DOCUMENTS = tomllib.loads(TABLE.read_text())
PLACES = (
    *("ptxlab/**/*.py", "cuda_src/**/*.cu", "cuda_src/**/*.cuh", "ptx/**/*.ptx", "notebooks/*.py", "notebooks/*.ipynb"),
    *("notebooks/guide/**/*.md", "notebooks/report/**/*.py", "notebooks/benchmarks/**/*.py", "*.md", "tests/**/*.py"),
)

_NAMES = "|".join(DOCUMENTS)
_NUMBER = r"\d+(?:\.\d+)*"
_MARK = r"(?:§ ?|[Ss]ections? )"
_NEXT = rf"(?:,? and|,| to) (?:{_MARK}|(?={_NUMBER}\b(?!%| [a-z])))"  # "sections 4.2, 5.3", but not "section 4, 8 bits"
_SECTIONS = re.compile(rf"{_MARK}(?P<numbers>{_NUMBER}(?:{_NEXT}{_NUMBER})*)")
_NAMED = re.compile(rf"\b(?P<document>{_NAMES}) $")
_LINKED = re.compile(r"\]\([^)]+\),? $")  # a citation of another document, whose link stands before it
_UNMARKED = re.compile(rf"\b(?:{_NAMES}) {_NUMBER}(?=[),;:]|\.(?!\d)|$)")
_BREAK = re.compile(r"(?:\\n\",)?\n[ \t]*(?:\"|//+|#+)?[ \t]*")  # of lines, in a comment or in a cell of a notebook
_KINDS = {"Fig.": "figures", "Figure": "figures", "Table": "tables", "Eq.": "equations", "Equation": "equations"}
_NUMBERED = re.compile(
    rf"\b(?P<document>{_NAMES})(?:'s)?,?(?: {_MARK}{_NUMBER},)? \(?(?:its )?"
    rf"(?P<kind>{'|'.join(map(re.escape, _KINDS))}) (?P<number>\d+)"
)


def mistakes(text: str) -> Iterator[str]:
    """Name what is wrong with the citations of a text: `DOCUMENT §N`, `DOCUMENT section N`, `DOCUMENT Fig. N`.

    Further sections behind the first are those of the same document. Lines are joined, without their comment signs.
    """
    joined = _BREAK.sub(" ", text)
    for match in _SECTIONS.finditer(joined):
        preceding = joined[max(0, match.start() - 100) : match.start()]
        shown = f"{preceding[-60:]}{match.group()}"
        named = _NAMED.search(preceding)
        if named is None:
            if not _LINKED.search(preceding):
                yield f"names no document right before it: {shown!r}"
            continue
        document = named["document"]
        for number in re.findall(_NUMBER, match["numbers"]):
            if number not in DOCUMENTS[document]["sections"]:
                yield f"{document} has no section {number}: {shown!r}"
    for match in _UNMARKED.finditer(joined):
        yield f"a number without § or `section`: {match.group()!r}"
    for match in _NUMBERED.finditer(joined):
        document, count = match["document"], DOCUMENTS[match["document"]][_KINDS[match["kind"]]]
        if not 1 <= int(match["number"]) <= count:
            yield f"{document} has {count} {_KINDS[match['kind']]}: {match.group()!r}"


def files() -> list[Path]:
    """List code, kernels, guide, notebooks and tests; without this module, which makes mistakes on purpose."""
    paths = {path for place in PLACES for path in ROOT.glob(place)}
    return sorted(paths - {Path(__file__).resolve()})


@pytest.fixture(scope="module")
def texts() -> dict[Path, str]:
    """Read the texts of all files that name a document or a section."""
    read = {path: path.read_text() for path in files()}
    return {path: text for path, text in read.items() if any(word in text for word in (*DOCUMENTS, "§", "ection "))}


def test_every_citation_names_a_section_that_its_document_has(texts: dict[Path, str]) -> None:
    wrong = [f"{path.relative_to(ROOT)}: {mistake}" for path, text in texts.items() for mistake in mistakes(text)]
    assert not wrong, "\n".join(wrong)


def test_there_are_citations_of_every_document_in_code_kernels_and_guide(texts: dict[Path, str]) -> None:
    """The patterns find what they are to hold: a rule that finds nothing holds nothing."""
    for folder in ("ptxlab", "cuda_src", "notebooks/guide"):
        of_folder = [text for path, text in texts.items() if path.is_relative_to(ROOT / folder)]
        for document in DOCUMENTS:
            count = sum(len(re.findall(rf"\b{document} {_MARK}{_NUMBER}", text)) for text in of_folder)
            assert count > 1, f"{folder}: {count} citations of {document}"


def test_the_table_has_the_parent_of_every_section() -> None:
    for document, has in DOCUMENTS.items():
        assert all(has["sections"].values()), document
        above = {number.rpartition(".")[0] for number in has["sections"]} - {""}
        assert above <= set(has["sections"]), document


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(QServe §5.4)", "QServe has no section 5.4"),
        ("(QServe §5.2, §5.4)", "QServe has no section 5.4"),
        ("(QServe sections 4.2 and 5.4)", "QServe has no section 5.4"),
        ("LiquidGEMM §3 to §5 and §10", "LiquidGEMM has no section 10"),
        ("// as in (COMET section\n// 3.3)", "COMET has no section 3.3"),
        ("# (LiquidGEMM §4; QServe\n# §9.1)", "QServe has no section 9.1"),
        ("QServe's main loop (section 5.2)", "names no document"),
        ("the model (§3.2) of LiquidGEMM", "names no document"),
        ("one pass over a row (Atom 4.1)", "a number without §"),
        ("COMET's order (COMET 3).", "a number without §"),
        ("QServe's Fig. 19", "QServe has 18 figures"),
        ("(LiquidGEMM §7.2, Table 2)", "LiquidGEMM has 1 tables"),
        ("COMET, Eq. 1", "COMET has 0 equations"),
    ],
)
def test_a_wrong_citation_is_found(text: str, message: str) -> None:
    (mistake,) = mistakes(text)
    assert mistake.startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "(QServe §4.2, §5.3)",
        "(QServe sections 4.2, 5.3)",
        "(LiquidGEMM section 4, 8 bits; QServe §5.2.2, 13 of them)",
        "(LiquidGEMM §7.3, Fig. 13)",
        "[DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 3.5.2",
        "COMET 1.31x, Atom 980 TOPS",
    ],
)
def test_a_right_citation_passes(text: str) -> None:
    assert list(mistakes(text)) == []
