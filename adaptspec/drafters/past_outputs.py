"""A bounded memory of past outputs in a suffix automaton.

A suffix automaton cannot forget its oldest text, so a successor is grown next to it: once the automaton is half full,
every output also goes to the successor, which takes over when the next output would not fit any more. What is
remembered are therefore whole outputs, the newest ones, between half of and all of `max_tokens` tokens (less only
where a single output is longer than half), at the price of inserting about half of the outputs twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from adaptspec.drafters.suffix_automaton import SuffixAutomaton


class PastOutputs:
    """First in, first out, by whole outputs.

    Args:
        max_tokens: tokens remembered at most; of a longer output only the end is kept. 0 remembers nothing.
        count_length: see `SuffixAutomaton`.
    """

    def __init__(self, *, max_tokens: int, count_length: int = 0) -> None:
        self.max_tokens = max_tokens
        self.count_length = count_length
        self.automaton = SuffixAutomaton(count_length=count_length)
        self._successor = SuffixAutomaton(count_length=count_length)
        self._tokens = 0
        self._successor_tokens = 0
        self._shared = 0

    def __len__(self) -> int:
        """Tokens remembered."""
        return self._tokens

    @property
    def shared(self) -> int:
        """How many of the newest outputs the successor holds, too."""
        return self._shared

    def add(self, output: Sequence[int]) -> None:
        """Remember one output; drops the oldest ones if there is no room."""
        if self.max_tokens == 0 or not len(output):
            return
        output = output[-self.max_tokens :]
        if self._tokens + len(output) > self.max_tokens:
            self._take_over()
        if self._tokens + len(output) > self.max_tokens:
            self._take_over()  # one output as long as all of the memory
        self._insert(output, both=2 * self._tokens >= self.max_tokens)

    def outputs(self) -> list[list[int]]:
        """What is remembered, oldest first."""
        outputs: list[list[int]] = [[]]
        for token in self.automaton.text:
            if token >= 0:
                outputs[-1].append(token)
            else:
                outputs.append([])
        return outputs[:-1]

    def clear(self) -> None:
        """Forget everything."""
        self._take_over()
        self._take_over()

    def restore(self, outputs: Sequence[Sequence[int]], *, shared: int) -> None:
        """Remember exactly `outputs`, of which the successor holds the last `shared`.

        Raises:
            ValueError: an output is empty, they are more than `max_tokens`, or `shared` is not among them.
        """
        total = sum(map(len, outputs))
        if total > self.max_tokens:
            raise ValueError(f"outputs of the state must be at most {self.max_tokens} tokens, got {total}")
        if not all(map(len, outputs)):
            raise ValueError("outputs of the state must not be empty")
        if not 0 <= shared <= len(outputs):
            raise ValueError(f"shared of the state must be in [0, {len(outputs)}], got {shared}")
        self.clear()
        for i, output in enumerate(outputs):
            self._insert(output, both=i >= len(outputs) - shared)

    def _insert(self, output: Sequence[int], *, both: bool) -> None:
        self.automaton.extend(output)
        self.automaton.end_sequence()
        self._tokens += len(output)
        if both:
            self._successor.extend(output)
            self._successor.end_sequence()
            self._successor_tokens += len(output)
            self._shared += 1

    def _take_over(self) -> None:
        self.automaton, self._tokens = self._successor, self._successor_tokens
        self._successor = SuffixAutomaton(count_length=self.count_length)
        self._successor_tokens = self._shared = 0
