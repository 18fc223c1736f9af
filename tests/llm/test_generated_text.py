"""Text of tokens as they come: whole characters, and nothing of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.errors import ArgumentError
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.generated_text import GeneratedText
from tests.support.small_models import tokenizer as small_tokenizer

TOKENIZER = Tokenizer((299,), small_tokenizer())


def test_characters_are_shown_whole() -> None:
    text, shown = GeneratedText(TOKENIZER), []
    for token in TOKENIZER.encode("aé€!").tolist():
        text.append(token)
        shown.append(text.fresh())
    assert shown == ["a", "", "é", "", "", "€", "!"]
    text.append(TOKENIZER.encode("é").tolist()[0])
    assert text.fresh() == "" and text.fresh(whole=True) == "\ufffd"
    text.append(299)
    text.append(7)
    assert text.ended and len(text.tokens) == 8


@given(st.text("thé \n", max_size=20), st.lists(st.text("the \n", min_size=1, max_size=4), max_size=3))
def test_it_ends_before_the_stop_string_that_is_complete_first(written: str, stop: list[str]) -> None:
    """No part of the stop string is shown, and all text before it is, however tokens cut it."""
    tokens = TOKENIZER.encode(written).tolist()
    beginnings = [TOKENIZER.decode(tokens[: n + 1]) for n in range(len(tokens))]
    stopped = next((text for text in beginnings if any(one in text for one in stop)), None)
    right = written if stopped is None else stopped[: min(stopped.find(one) for one in stop if one in stopped)]
    text, shown = GeneratedText(TOKENIZER, stop), ""
    for token in tokens:
        text.append(token)
        shown += text.fresh()
        assert right.startswith(shown)
    assert text.ended == (stopped is not None)
    assert shown + text.fresh(whole=True) == text.text == right


@pytest.mark.parametrize("word", ["<turn>", "<end>"])
def test_a_special_token_stops_though_it_has_no_text(word: str) -> None:
    text = GeneratedText(TOKENIZER, [word])
    (token,) = TOKENIZER.encode(word).tolist()
    text.append(9)
    text.append(token)
    assert text.ended and text.tokens == [9] and {token, 299} == text.ends


@pytest.mark.parametrize("stop", ["a", [""], [3]])
def test_a_stop_string_is_a_text(stop: list[str]) -> None:
    with pytest.raises(ArgumentError, match=r"^stop: must be texts, none of them empty"):
        GeneratedText(TOKENIZER, stop)
