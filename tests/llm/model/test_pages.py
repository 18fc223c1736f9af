"""Pages of a cache: who has them is counted, and a shared page holds the tokens that a sequence begins with."""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ptxlab.llm.model.pages import PAGE, Pages, prefixes

COUNT = 6


def tokens_of(kinds: list[int]) -> list[int]:
    """Return a page of equal tokens for each kind."""
    return [kind for kind in kinds for _ in range(PAGE)]


class PageMachine(RuleBasedStateMachine):
    """Sequences that come and go; `content` is what was last written to each page, with all that precedes it."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(COUNT)
        self.sequences: list[tuple[list[int], list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(kinds=st.lists(st.integers(0, 2), min_size=1, max_size=4), is_held=st.booleans())
    def begin(self, kinds: list[int], is_held: bool) -> None:
        """Share what is there, and take and write the other pages, if there are enough."""
        pages_held = self.pages.share(tokens_of(kinds))
        for i, page in enumerate(pages_held):
            assert self.content[page] == tuple(kinds[: i + 1])
        if len(kinds) - len(pages_held) > len(self.pages.free):
            self.pages.release(pages_held)
            return
        for i in range(len(pages_held), len(kinds)):
            pages_held.append(self.pages.take())
            self.content[pages_held[-1]] = tuple(kinds[: i + 1])
        if is_held:
            self.pages.register(tokens_of(kinds), pages_held)
        self.sequences.append((kinds, pages_held))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        _, pages_held = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pages.release(pages_held)

    @invariant()
    def users_are_counted(self) -> None:
        users = Counter(page for _, pages_held in self.sequences for page in pages_held)
        assert self.pages.users.tolist() == [users[page] for page in range(COUNT)]
        assert sorted(self.pages.free) == [page for page in range(COUNT) if not users[page]]

    @invariant()
    def sequences_keep_what_they_wrote(self) -> None:
        for kinds, pages_held in self.sequences:
            assert [self.content[page] for page in pages_held] == [tuple(kinds[: i + 1]) for i in range(len(kinds))]


TestPages = PageMachine.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=20)


def test_the_page_that_was_used_longest_ago_is_taken_and_the_first_of_a_sequence_last() -> None:
    pages = Pages(5)
    first, second = ([pages.take(), pages.take()] for _ in range(2))
    pages.register(tokens_of([0, 1]), first)
    pages.register(tokens_of([2, 3]), second)
    pages.release(second)
    pages.release(first)
    assert [pages.take() for _ in range(5)] == [4, second[1], second[0], first[1], first[0]]
    assert pages.share(tokens_of([0, 1])) == []


def test_a_page_is_named_by_all_that_precedes_it() -> None:
    first, second = ([*prefixes(tokens_of(kinds))] for kinds in ([0, 1], [2, 1]))
    assert len({*first, *second}) == 4
    assert [*prefixes([*tokens_of([0, 1]), 7])] == first and [*prefixes([0] * (PAGE - 1))] == []
