"""Texts by name and from files, and windows of tokens."""

import bz2
from pathlib import Path

import numpy as np
import pytest

from ptxlab.errors import ArgumentError, FileError
from ptxlab.io import downloads as weights
from ptxlab.llm.accuracy.text import Corpus, open_text, tokens_of, windows
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from tests.support.small_models import tokenizer


@pytest.fixture
def wikipedia_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write small files of `wikipedia` (95 articles, two news items), and have them taken for the fetched ones."""
    wiki, lee = (tmp_path / file.name for file in weights.KNOWN["wikipedia"].files)
    pages = "".join(f"<page><revision><text>{i} {'word ' * 200}</text></revision></page>" for i in range(95))
    wiki.write_bytes(bz2.compress(f"<mediawiki>{pages}</mediawiki>".encode()))
    lee.write_text("First.\nSecond.\n")
    monkeypatch.setattr(weights, "fetch", lambda name, progress: tmp_path)
    return tmp_path


def test_what_calibrates_is_not_evaluated(wikipedia_files: Path) -> None:
    corpus = open_text()
    first = [int(article.split()[0]) for article in (*corpus.calibration, *corpus.evaluation)]
    assert first == list(range(95)) and (len(corpus.calibration), len(corpus.evaluation)) == (47, 48)


def test_other_texts_are_one_document(wikipedia_files: Path, tmp_path: Path) -> None:
    assert open_text("lee") == Corpus((), ("First.\nSecond.\n",))
    (tmp_path / "mine.txt").write_text("Zwölf\n", encoding="utf-8")
    assert open_text(tmp_path / "mine.txt") == open_text(str(tmp_path / "mine.txt")) == Corpus((), ("Zwölf\n",))
    (tmp_path / "mine.txt").write_bytes(b"\xff")
    for name in ("mine.txt", "nosuch.txt"):
        with pytest.raises(FileError, match=rf"{name}: cannot be read: "):
            open_text(tmp_path / name)


def test_documents_are_apart() -> None:
    documents_tokenizer = Tokenizer((), tokenizer())
    assert tokens_of(("a", "b"), documents_tokenizer).tolist() == tokenizer().encode("a\n\nb").ids


def test_windows_are_all_or_evenly_spread() -> None:
    tokens = np.arange(107)
    every = windows(tokens, 10)
    assert every.shape == (10, 10) and (every.reshape(-1) == tokens[:100]).all()
    assert windows(tokens, 10, 4)[:, 0].tolist() == [0, 20, 50, 70]
    assert (windows(tokens, 10, 10) == every).all() and windows(tokens, 107).shape == (1, 107)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 108}, r"length: at most 107, the tokens of the text \(got 108\)"),
        ({"length": 10, "count": 11}, r"windows: at most 10, as the text has 107 tokens \(got 11\)"),
        ({"length": 1}, r"length: must be an integer, 2 or more \(got 1\)"),
        ({"count": 0}, r"windows: must be an integer, 1 or more \(got 0\)"),
        ({"length": 2.5}, r"length: must be an integer, 2 or more \(got 2.5\)"),
    ],
)
def test_windows_that_do_not_fit(options: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{message}$"):
        windows(np.arange(107), **options)


@pytest.mark.full
@pytest.mark.usefixtures("wikipedia")
def test_the_text_as_it_is_shipped() -> None:
    """It has 95 articles."""
    corpus = open_text()
    text = "\n\n".join(corpus.calibration + corpus.evaluation)
    assert (len(corpus.calibration), len(corpus.evaluation), len(text)) == (47, 48, 2_546_666)
    assert text.startswith("Anarchism is a political philosophy that advocates self-governed societies based on")
    assert text.count("{{") + text.count("[[") + text.count("<ref") < 20
    assert len(open_text("lee").evaluation[0].splitlines()) == 300
