"""`GeneratedText`: the text of tokens as they come, up to an end token or a stop string."""

from collections.abc import Sequence

from ptxlab.errors import ArgumentError
from ptxlab.llm.checkpoints.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # what a character decodes to while tokens of it are lacking


class GeneratedText:
    """The text of a sequence so far.

    Attributes:
        tokens: up to the one that ends it, which is not among them; with those of a stop string.
        ends: the tokens that end it: the model's, and stop strings that are special tokens.
        ended: whether an end token or a stop string came.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """Begin an empty text; it ends before the first of the texts `stop`.

        Raises ArgumentError for an empty `stop` text.
        """
        require_stop(stop)
        token_ids = {text: tokenizer.encode(text).tolist() for text in stop}
        token_ids = {text: ids for text, ids in token_ids.items() if len(ids) == 1 and not tokenizer.decode(ids)}
        self.tokens: list[int] = []
        self.ended, self._tokenizer, self._shown = False, tokenizer, 0
        self.ends = frozenset(tokenizer.ends).union(*token_ids.values())
        self._stop = [text for text in stop if text not in token_ids]

    @property
    def text(self) -> str:
        """The text without the stop string."""
        text = self._tokenizer.decode(self.tokens)
        return text[: min((stop_place for stop in self._stop if (stop_place := text.find(stop)) >= 0), default=None)]

    def append(self, token: int) -> None:
        """Append one token; tokens after the end are left out."""
        if self.ended or token in self.ends:
            self.ended = True
            return
        self.tokens.append(token)
        if self._stop:
            text = self._tokenizer.decode(self.tokens)
            self.ended = any(stop in text for stop in self._stop)

    def fresh(self, *, whole: bool = False) -> str:
        """Return the text that was not shown yet.

        A character whose tokens are incomplete waits, and what may be the beginning of a stop string, unless no more
        is to come: the text is `whole`.
        """
        text = self.text
        if not whole and not self.ended:
            if text.endswith(_BROKEN):
                return ""
            text = text[: len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)]
        shown_length, self._shown = self._shown, max(self._shown, len(text))
        return text[shown_length:]


def require_stop(stop: Sequence[str]) -> None:
    """Raise ArgumentError unless these are texts that may stop another."""
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ArgumentError("stop", "must be texts, none of them empty", repr(stop)[:40])


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest beginning of `stop` that the text ends with."""
    return next(length for length in range(min(len(text), len(stop)), -1, -1) if text.endswith(stop[:length]))
