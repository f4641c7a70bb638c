"""An online suffix automaton over token sequences, with occurrence counts of everything short enough to matter.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985). Every state stands for substrings
that end at the same places; `link` leads to the longest suffix that ends at more places. At most 2 T states and 3 T
transitions for T tokens, amortised constant work per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np

ROOT_STATE = 0
"""The state of the empty string."""

_NONE = -1


class SuffixAutomaton:
    """Substrings of one growing text, or of several texts separated by `end_sequence`.

    States are numbers into flat 32-bit arrays. Most states have one transition, which is stored inline; further ones
    go to a dict per state. Separators are unique negative tokens, so no match ever spans two sequences.

    Args:
        count_length: occurrences are counted for substrings of up to this many tokens; 0 counts nothing.

    >>> automaton = SuffixAutomaton(count_length=4)
    >>> automaton.extend([5, 6, 7, 5, 6])
    >>> automaton.longest_repeat()          # [5, 6] ended at position 2 before
    (2, 2)
    """

    def __init__(self, *, count_length: int = 0) -> None:
        self.count_length = count_length
        self.text = array("i")
        """All tokens, separators (negative) included."""
        self.length = array("i", [0])
        """Longest substring of each state."""
        self.link = array("i", [_NONE])
        self.first_end = array("i", [0])
        """Where the first occurrence of each state ends: the position in `text` of the token behind it."""
        self.count = array("i", [0])
        """Occurrences of each state's substrings of at most `count_length` tokens."""
        self._token = array("i", [_NONE])
        self._target = array("i", [_NONE])
        self._more: dict[int, dict[int, int]] = {}
        self._last = ROOT_STATE
        self._separators = 0
        # The state that holds the last `count_length` tokens (fewer at the start), and how many these are.
        self._window = ROOT_STATE
        self._window_length = 0

    def __len__(self) -> int:
        return len(self.text)

    @property
    def states(self) -> int:
        """Number of states, the root included."""
        return len(self.length)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens (each >= 0) to the text."""
        length, link, first_end, count = self.length, self.link, self.first_end, self.count
        inline_token, inline_target, more = self._token, self._target, self._more
        text, last = self.text, self._last
        position = len(text)
        counting = self.count_length > 0
        prefix_states: list[int] | None = [] if counting and position == 0 else None
        for token in tokens:
            text.append(token)
            position += 1
            current = len(length)
            length.append(length[last] + 1)
            link.append(ROOT_STATE)
            first_end.append(position)
            count.append(0)
            inline_token.append(_NONE)
            inline_target.append(_NONE)
            # Suffixes that were never followed by this token now are, by the new state.
            state, found = last, _NONE
            while state >= 0:
                known = inline_token[state]
                if known == token:
                    found = inline_target[state]
                    break
                if known == _NONE:
                    inline_token[state] = token
                    inline_target[state] = current
                else:
                    branches = more.get(state)
                    if branches is None:
                        more[state] = {token: current}
                    elif token in branches:
                        found = branches[token]
                        break
                    else:
                        branches[token] = current
                state = link[state]
            if found >= 0:
                if length[found] == length[state] + 1:
                    link[current] = found
                else:
                    link[current] = self._split(state, token, found)
                    link[found] = link[current]
            last = current
            if prefix_states is not None:
                prefix_states.append(current)
            elif counting:
                self._count_suffixes(token)
        self._last = last
        if prefix_states:
            self._count_all(prefix_states)

    def _split(self, state: int, token: int, found: int) -> int:
        """Give the shorter substrings of `found`, which now end at one more place, a state of their own."""
        length, link, inline_token, inline_target = self.length, self.link, self._token, self._target
        clone = len(length)
        length.append(length[state] + 1)
        link.append(link[found])
        self.first_end.append(self.first_end[found])
        self.count.append(self.count[found])
        inline_token.append(inline_token[found])
        inline_target.append(inline_target[found])
        more = self._more
        if found in more:
            more[clone] = dict(more[found])
        while state >= 0:
            if inline_token[state] == token:
                if inline_target[state] != found:
                    break
                inline_target[state] = clone
            elif more[state][token] != found:
                break
            else:
                more[state][token] = clone
            state = link[state]
        return clone

    def _count_suffixes(self, token: int) -> None:
        """Count the new occurrence of every suffix of at most `count_length` tokens.

        The walk starts at the window state and not at the last one: in periodic text as many links as tokens lie
        between the two.
        """
        length, link, count = self.length, self.link, self.count
        window, reach = self._window, self._window_length
        # If this token has split the window state, the two parts still have the same successor by this token.
        window = self.step(window, token)
        if reach < self.count_length:
            self._window_length = reach + 1
        elif length[link[window]] >= reach:
            window = link[window]
        self._window = window
        while window > 0:
            count[window] += 1
            window = link[window]

    def _count_all(self, prefix_states: list[int]) -> None:
        """Count a whole first text at once: every end of a state's substrings is an end of its link's, too."""
        length, link = self.length, self.link
        count = [0] * len(length)
        for state in prefix_states:
            count[state] = 1
        for state in np.argsort(np.array(length), kind="stable")[:0:-1].tolist():  # longest first, without the root
            count[link[state]] += count[state]
        count[ROOT_STATE] = 0
        self.count = array("i", count)
        window, reach = self._last, min(len(self.text), self.count_length)
        while length[link[window]] >= reach:
            window = link[window]
        self._window, self._window_length = window, reach

    def end_sequence(self) -> None:
        """Append a separator that occurs nowhere else: what follows is another text."""
        self._separators += 1
        self.extend((_NONE - self._separators,))
        # Shared suffixes of the next text and this one must not reach over the separator.
        self._window = ROOT_STATE
        self._window_length = 0

    def step(self, state: int, token: int) -> int:
        """The state after `token`, or -1."""
        if self._token[state] == token:
            return self._target[state]
        branches = self._more.get(state)
        return _NONE if branches is None else branches.get(token, _NONE)

    def follow(self, state: int, matched: int, tokens: Iterable[int]) -> tuple[int, int]:
        """Read on in another text: the state and length of the longest suffix that occurs here.

        Args:
            state: where the text so far led.
            matched: how many of its last tokens match.
            tokens: the tokens that come next.
        """
        inline_token, inline_target, more = self._token, self._target, self._more
        link, length = self.link, self.length
        for token in tokens:
            while True:
                if inline_token[state] == token:
                    state = inline_target[state]
                    matched += 1
                    break
                branches = more.get(state)
                if branches is not None and token in branches:
                    state = branches[token]
                    matched += 1
                    break
                if state == ROOT_STATE:
                    matched = 0
                    break
                state = link[state]
                matched = length[state]
        return state, matched

    def transitions(self, state: int) -> Iterator[tuple[int, int]]:
        """Pairs (token, state), first seen first; separators are left out."""
        if self._token[state] >= 0:
            yield self._token[state], self._target[state]
        branches = self._more.get(state)
        if branches is not None:
            for token, target in branches.items():
                if token >= 0:
                    yield token, target

    def branching(self, state: int) -> int:
        """Number of transitions, separators included."""
        branches = self._more.get(state)
        return (self._token[state] != _NONE) + (0 if branches is None else len(branches))

    def longest_repeat(self) -> tuple[int, int]:
        """Length of the longest suffix of the text that occurred before, and where its first occurrence ends."""
        state = self.link[self._last]
        return (0, 0) if state <= 0 else (self.length[state], self.first_end[state])

    def suffix_states(self, *, max_length: int) -> Iterator[tuple[int, int]]:
        """States of the text's suffixes of at most `max_length` tokens: pairs (state, longest suffix length in it)."""
        assert max_length <= self.count_length, "the window does not reach that far"
        yield from self.shorter_suffixes(self._window, self._window_length, max_length=max_length)

    def shorter_suffixes(self, state: int, matched: int, *, max_length: int) -> Iterator[tuple[int, int]]:
        """From a match of `matched` tokens down to one token: pairs (state, longest suffix length in it)."""
        link, length = self.link, self.length
        while state > 0 and length[link[state]] >= max_length:
            state = link[state]
        matched = min(matched, max_length)
        while state > 0:
            yield state, min(matched, length[state])
            state = link[state]
