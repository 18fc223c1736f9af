"""`Pages`: which pages of a cache are free, which are shared, and which tokens a free page still holds.

A page that is wholly written is named by a hash of its tokens and of all that precede them, so that a sequence which
begins with the same tokens takes it instead of computing it (prefix caching, vLLM's scheme). Only whole pages are
shared, and a sequence writes to later pages alone, so none is ever copied.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

PAGE = 64  # tokens of a page of the cache


class Pages:
    """The pages of one pool.

    Attributes:
        count: how many there are.
        users: sequences that have each page, s32 [count].
        free: pages that no sequence has, least recently used last; the last one is taken next. A page keeps its content
            until it is taken.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.users: npt.NDArray[np.int32] = np.zeros(count, np.int32)
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(reversed(range(count)))
        self._by_prefix: dict[bytes, int] = {}
        self._prefix_of: dict[int, bytes] = {}

    def take(self) -> int:
        """Return a free page for one sequence, whose content is forgotten. Raises KeyError if there is none."""
        page, _ = self.free.popitem()
        if prefix := self._prefix_of.pop(page, None):
            del self._by_prefix[prefix]
        self.users[page] = 1
        return page

    def share(self, tokens: Sequence[int]) -> list[int]:
        """Take the pages that hold the beginning of these tokens for one more sequence; return them in order."""
        shared_pages = []
        for prefix in prefixes(tokens):
            page = self._by_prefix.get(prefix)
            if page is None:
                break
            self.free.pop(page, None)
            self.users[page] += 1
            shared_pages.append(page)
        return shared_pages

    def register(self, tokens: Sequence[int], pages: Iterable[int]) -> None:
        """Note that these pages of a sequence hold its tokens, as far as these fill them.

        A page whose tokens another one holds already is not shared.
        """
        for prefix, page in zip(prefixes(tokens), pages, strict=False):
            if prefix not in self._by_prefix and page not in self._prefix_of:
                self._by_prefix[prefix], self._prefix_of[page] = page, prefix

    def release(self, pages: Sequence[int]) -> None:
        """Give back a sequence's pages. Pages that no sequence holds then are free; the first ones are kept longest."""
        for page in reversed(pages):
            self.users[page] -= 1
            if not self.users[page]:
                self.free[page] = None
                if page in self._prefix_of:
                    self.free.move_to_end(page, last=False)


def prefixes(tokens: Sequence[int]) -> Iterator[bytes]:
    """Yield a hash for every whole page of tokens, of the page's and of all that precede them."""
    array, prefix = np.asarray(tokens, np.int32), b""
    for page in array[: len(array) // PAGE * PAGE].reshape(-1, PAGE):
        prefix = hashlib.sha256(prefix + page.tobytes()).digest()
        yield prefix
