"""A program: encode a text by a tokenizer.json that may take any time and memory. `guard` runs it and stops it.

It reads a JSON list of the two from stdin and writes the ids as a JSON list to stdout; an error is the last line of
stderr. It imports nothing of ptxlab, so that it starts in a moment.
"""

import json
import sys

MOST_TOKENS = 32  # per character of the text; bytes of characters are 4 at most, forms of compatibility 18


def main(memory: int) -> int:
    """Encode stdin's text in so many bytes of memory; return the exit status."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))
    except ImportError:  # Windows has no such limit; the time is bounded all the same
        pass
    import tokenizers

    definition, text = json.load(sys.stdin)
    try:
        ids = tokenizers.Tokenizer.from_str(definition).encode(text, add_special_tokens=False).ids
    except BaseException as error:  # a panic of the library is no Exception
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return 1
    if len(ids) > MOST_TOKENS * (len(text) + 1):
        print(f"it gives {len(ids)} tokens", file=sys.stderr)
        return 1
    json.dump(ids, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
