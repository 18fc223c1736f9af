"""A program of `run_limited`: encode a text by a tokenizer.json that may take any time and memory."""

MOST_TOKENS = 33  # per character of the text: the bytes of the longest form of compatibility, that of U+FDFA


def answer(request: dict[str, str]) -> list[int]:
    """Return the ids of request["text"] by the tokenizer of request["definition"]."""
    import tokenizers

    text = request["text"]
    ids: list[int] = tokenizers.Tokenizer.from_str(request["definition"]).encode(text, add_special_tokens=False).ids
    if len(ids) > MOST_TOKENS * (len(text) + 1):
        raise ValueError(f"it gives {len(ids)} tokens")
    return ids
