"""A suffix automaton that grows by one token at a time and knows how often each short string occurs in it.

Construction: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text". A state stands for all
strings that end at the same places; its link leads to the longest of their suffixes that also ends elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ROOT = 0
BOUNDARY = -1  # ends a text; no token has this id


@dataclass(slots=True, kw_only=True)
class Cursor:
    """The longest suffix of some text that occurs in an automaton, within its horizon: a state, and that length."""

    state: int = ROOT
    length: int = 0


class SuffixAutomaton:
    """Of one growing text, or of several one after the other with a boundary between.

    horizon: occurrences are counted for strings of up to so many tokens. Growing takes amortised constant time a
    token, and at most `horizon` steps more for the counts, whatever the text's length. Raises ValueError for a horizon
    below 1.
    """

    def __init__(self, horizon: int) -> None:
        if horizon < 1:
            raise ValueError(f"A suffix automaton needs a horizon of at least 1 token, got {horizon}.")
        self.horizon = horizon
        self.num_tokens = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._last = ROOT
        self._recent = Cursor()  # the newest `horizon` tokens

    @property
    def num_states(self) -> int:
        """At most twice the tokens."""
        return len(self._next)

    @property
    def newest(self) -> Cursor:
        """Where the text itself ends, within the horizon."""
        return Cursor(state=self._recent.state, length=self._recent.length)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens (or BOUNDARY) to the text."""
        for token in token_ids:
            self._append(token)
            self.num_tokens += 1
            # The new occurrence counts for every suffix within the horizon: the cursor's state and those it links to.
            state = self._recent.state
            while state >= 0:
                self._count[state] += 1
                state = self._link[state]

    def _append(self, token: int) -> None:
        new = self._state(self._length[self._last] + 1, {}, 0)
        above = self._last
        while above >= 0 and token not in self._next[above]:
            self._next[above][token] = new
            above = self._link[above]
        self._last = new
        if above < 0:
            self._link[new] = ROOT
        else:
            old = self._next[above][token]
            if self._length[old] > self._length[above] + 1:
                old = self._split(old, above, token)
            self._link[new] = old
        self.advance(self._recent, token)

    def _split(self, old: int, above: int, token: int) -> int:
        """Give the strings of `old` that `above` reaches a state of their own: they now end at one more place."""
        upper = self._state(self._length[above] + 1, dict(self._next[old]), self._count[old])
        self._link[upper], self._link[old] = self._link[old], upper
        while above >= 0 and self._next[above].get(token) == old:
            self._next[above][token] = upper
            above = self._link[above]
        return upper

    def _state(self, length: int, following: dict[int, int], count: int) -> int:
        self._next.append(following)
        self._link.append(ROOT)
        self._length.append(length)
        self._count.append(count)
        return len(self._next) - 1

    def advance(self, cursor: Cursor, token: int) -> None:
        """Append a token to the text that a cursor follows (which may be another text than the automaton's)."""
        self._settle(cursor)
        while cursor.state != ROOT and token not in self._next[cursor.state]:
            cursor.state = self._link[cursor.state]
            cursor.length = self._length[cursor.state]
        if token in self._next[cursor.state]:
            cursor.state = self._next[cursor.state][token]
            cursor.length = min(cursor.length + 1, self.horizon)
            self._settle(cursor)

    def _settle(self, cursor: Cursor) -> None:
        """Splits since, or the horizon, may have moved the cursor's string into a state further up."""
        while cursor.state != ROOT and cursor.length <= self._length[self._link[cursor.state]]:
            cursor.state = self._link[cursor.state]

    def contexts(self, cursor: Cursor, longest: int) -> Iterator[Cursor]:
        """The suffixes of the cursor's string that differ in what followed them, of at most `longest` tokens, longest
        first; the empty one is left out.
        """
        self._settle(cursor)
        state, length = cursor.state, min(cursor.length, longest)
        while state != ROOT:
            above = self._link[state]
            if self._next[state] and self._length[above] < longest:
                yield Cursor(state=state, length=length)
            state, length = above, min(self._length[above], longest)

    def continuations(self, state: int) -> list[tuple[int, int, int]]:
        """Tokens that followed a state's strings: (token, times, the state after it), most often first, then by id.

        The times are exact where the state's shortest string and the token are within the horizon.
        """
        found = [(token, self._count[after], after) for token, after in self._next[state].items() if token != BOUNDARY]
        return sorted(found, key=lambda one: (-one[1], one[0]))

    def count(self, token_ids: Sequence[int]) -> int:
        """How often a string occurs. Raises ValueError if it is longer than the horizon."""
        if len(token_ids) > self.horizon:
            raise ValueError(f"Occurrences are counted up to {self.horizon} tokens, not {len(token_ids)}.")
        state = ROOT
        for token in token_ids:
            if token not in self._next[state]:
                return 0
            state = self._next[state][token]
        return self._count[state]
