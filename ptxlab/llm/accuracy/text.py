"""Text to calibrate and to evaluate with, and the windows of tokens that perplexity is measured on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.io import downloads as weights
from ptxlab.io.files import read_text
from ptxlab.llm.accuracy.wiki_dump import read_wiki
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.validate import require_integer

TEXTS = ("wikipedia", "lee")
CALIBRATION = 47  # articles of the 95 of wikipedia


@dataclass(frozen=True)
class Corpus:
    """Documents of a text; the two parts are disjoint.

    Attributes:
        calibration: documents to calibrate with; empty except for `wikipedia`.
        evaluation: documents to evaluate.
    """

    calibration: tuple[str, ...]
    evaluation: tuple[str, ...]


def open_text(source: str | Path = "wikipedia", progress: weights.Progress = lambda done, total: None) -> Corpus:
    """Open a text by name or from a file.

    Args:
        source: "wikipedia" (95 articles, the first 47 for calibration), "lee" (300 news items), or a UTF-8 file, which
            is one document. Named texts are downloaded unless they are cached.
        progress: called during the download with (bytes done, bytes in total).

    Raises FileError for a file that cannot be read, UnavailableError where the download fails.
    """
    if str(source) not in TEXTS:
        return Corpus((), (read_text(Path(source)),))
    folder = weights.fetch("wikipedia", progress)
    wiki, lee = (folder / file.name for file in weights.KNOWN["wikipedia"].files)
    if source == "lee":
        return Corpus((), (read_text(lee),))
    articles = read_wiki(wiki)
    return Corpus(tuple(articles[:CALIBRATION]), tuple(articles[CALIBRATION:]))


def tokens_of(documents: tuple[str, ...], tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Encode documents as tokens [T], with an empty line between documents."""
    return tokenizer.encode("\n\n".join(documents))


def windows(tokens: npt.NDArray[np.integer], length: int = 2048, count: int | None = None) -> npt.NDArray[np.integer]:
    """Cut tokens [T] into windows [W, length]: all consecutive windows, or `count` of them, evenly spread.

    Raises ArgumentError if the tokens do not fill one window, or `count` windows.
    """
    for name, number, lower_bound in (("length", length, 2), ("windows", 1 if count is None else count, 1)):
        require_integer(name, number, lower_bound)
    available_windows = len(tokens) // length
    if not available_windows:
        raise ArgumentError("length", f"at most {len(tokens)}, the tokens of the text", length)
    if available_windows < (count or 1):
        raise ArgumentError("windows", f"at most {available_windows}, as the text has {len(tokens)} tokens", count or 1)
    all_windows = tokens[: available_windows * length].reshape(available_windows, length)
    return all_windows if count is None else all_windows[np.arange(count) * available_windows // count]
