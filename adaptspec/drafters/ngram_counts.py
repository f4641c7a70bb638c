"""Counts of which token followed which n-gram, to add to, to take back from, and to keep in a file.

A history is one integer: the last tokens of a text, 32 bits each, counted from 1 so that the zeros in front of a short
text equal no token. The n-gram of size n is its lowest 32 n bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np

EMPTY_HISTORY = 0

_BITS = 32
_TOKEN = (1 << _BITS) - 1
_ONCE = 1 << _BITS
_FORMAT = "adaptspec n-gram counts 1"
_NOTHING: Mapping[int, int] = {}
_times = itemgetter(1)


class Successors(NamedTuple):
    """What followed an n-gram.

    Attributes:
        size: of the n-gram.
        ranked: pairs (token, times), the one to draft first in front; not necessarily all.
        total: times of all successors.
        distinct: number of all successors.
    """

    size: int
    ranked: list[tuple[int, int]]
    total: int
    distinct: int


@dataclass(frozen=True, slots=True)
class NgramThresholds:
    """How much evidence an n-gram of size 1, 2, .. must have.

    Attributes:
        min_counts: how often it must have occurred with a successor.
        min_percents: the share that the drafted successor must have among its successors.
    """

    min_counts: tuple[int, ...]
    min_percents: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.min_counts) != len(self.min_percents):
            raise ValueError(
                f"min_counts and min_percents must be equally long, got {len(self.min_counts)} "
                f"and {len(self.min_percents)}"
            )
        if any(count < 1 for count in self.min_counts):
            raise ValueError(f"min_counts must be >= 1, got {self.min_counts}")
        if not all(0 <= percent <= 100 for percent in self.min_percents):
            raise ValueError(f"min_percents must be in [0, 100], got {self.min_percents}")


@dataclass(slots=True)
class _Several:
    """Counts of an n-gram with more than one successor; the top one is kept up to date."""

    counts: dict[int, int]
    total: int
    top: int


@dataclass(slots=True)
class NgramCounts:
    """Successor counts for the n-gram sizes `min_ngram` to `max_ngram`.

    Most n-grams have one successor: its count and token share one integer; more of them go to a dict.

    >>> counts = NgramCounts(min_ngram=1, max_ngram=2)
    >>> history = counts.extend(EMPTY_HISTORY, [3, 4, 5, 3, 4, 6])
    >>> counts.counts_of(counts.advance(counts.advance(EMPTY_HISTORY, 3), 4), 2)
    {5: 1, 6: 1}
    """

    min_ngram: int
    max_ngram: int
    _tables: list[dict[int, int | _Several]] = field(init=False)
    _long_to_short: list[tuple[int, int, dict[int, int | _Several]]] = field(init=False)
    """Per size, longest first: the size, the mask of its n-gram, its table."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"n-gram sizes must satisfy 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}"
            )
        sizes = range(self.min_ngram, self.max_ngram + 1)
        self._tables = [{} for _ in sizes]
        sized = [(size, (1 << _BITS * size) - 1, table) for size, table in zip(sizes, self._tables, strict=True)]
        self._long_to_short = sized[::-1]

    def __len__(self) -> int:
        """Number of n-grams of all sizes."""
        return sum(map(len, self._tables))

    def advance(self, history: int, token: int) -> int:
        """The history one token later."""
        return (history << _BITS | token + 1) & ((1 << _BITS * self.max_ngram) - 1)

    def extend(self, history: int, tokens: Iterable[int]) -> int:
        """Count that `tokens` followed `history`; returns the history behind them."""
        widest = (1 << _BITS * self.max_ngram) - 1
        sized = self._sized_tables()
        for token in tokens:
            for mask, least, table in sized:
                key = history & mask
                if key < least:  # the text is still shorter than this size
                    break
                entry = table.get(key)
                if entry is None:
                    table[key] = _ONCE | token
                elif type(entry) is int:
                    if entry & _TOKEN == token:
                        table[key] = entry + _ONCE
                    else:
                        first, times = entry & _TOKEN, entry >> _BITS
                        table[key] = _Several({first: times, token: 1}, times + 1, first)
                else:
                    counts = entry.counts
                    counts[token] = times = counts.get(token, 0) + 1
                    entry.total += 1
                    if times > counts[entry.top]:
                        entry.top = token
            history = (history << _BITS | token + 1) & widest
        return history

    def retract(self, history: int, tokens: Iterable[int]) -> None:
        """Take back one `extend(history, tokens)`."""
        for token in tokens:
            for mask, least, table in self._sized_tables():
                key = history & mask
                if key < least:
                    break
                entry = table[key]
                if type(entry) is int:
                    assert entry & _TOKEN == token, "retracted what was never added"
                    if entry >> _BITS == 1:
                        del table[key]
                    else:
                        table[key] = entry - _ONCE
                    continue
                counts = entry.counts
                entry.total -= 1
                counts[token] -= 1
                if counts[token] == 0:
                    del counts[token]
                if len(counts) == 1:
                    ((last, times),) = counts.items()
                    table[key] = times << _BITS | last
                elif token == entry.top:
                    entry.top = max(counts, key=counts.__getitem__)
            history = self.advance(history, token)

    def counts_of(self, history: int, size: int) -> dict[int, int]:
        """{token: times} of what followed the last `size` tokens of a history."""
        entry = self._tables[size - self.min_ngram].get(history & ((1 << _BITS * size) - 1))
        if entry is None:
            return {}
        return {entry & _TOKEN: entry >> _BITS} if type(entry) is int else dict(entry.counts)

    def decide(
        self,
        history: int,
        thresholds: NgramThresholds,
        *,
        limit: int = 1,
        preferred: Mapping[int, int] = _NOTHING,
    ) -> Successors | None:
        """Successors of the longest n-gram that the history ends with and that has enough evidence.

        Args:
            thresholds: cover sizes up to `max_ngram`.
            limit: number of successors wanted, >= 1.
            preferred: {token: weight >= 1}; the first one ranked has the largest product of times and weight (1 for
                tokens not named here), and it must pass the threshold.
        """
        min_counts = thresholds.min_counts
        for size, mask, table in self._long_to_short:
            entry = table.get(history & mask)
            if entry is None:
                continue
            if type(entry) is int:
                times = entry >> _BITS
                if times >= min_counts[size - 1]:
                    return Successors(size, [(entry & _TOKEN, times)], times, 1)
                continue
            counts, total, first = entry.counts, entry.total, entry.top
            if total < min_counts[size - 1]:
                continue
            if preferred:
                weights = {token: times * preferred.get(token, 1) for token, times in counts.items()}
                first = max(weights, key=weights.__getitem__)
            if 100 * counts[first] < thresholds.min_percents[size - 1] * total:
                continue
            ranked = [(first, counts[first])]
            if limit > 1:
                others = _most_frequent(counts, limit)
                ranked += [pair for pair in others if pair[0] != first][: limit - 1]
            return Successors(size, ranked, total, len(counts))
        return None

    def clear(self) -> None:
        """Forget all counts."""
        for table in self._tables:
            table.clear()

    def largest_token(self) -> int:
        """The largest token id in any n-gram or successor, -1 if there is none."""
        _, keys, tokens, _ = self._arrays()
        return max(
            (int(array.max()) for array in [*keys, *tokens] if array.size),
            default=-1,
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write all counts to one `.npz` file of 32-bit arrays."""
        rows, keys, tokens, counts = self._arrays()
        arrays = {"format": np.array(_FORMAT), "sizes": np.array([self.min_ngram, self.max_ngram], np.int64)}
        for i in range(len(rows)):
            arrays |= {f"rows{i}": rows[i], f"ngrams{i}": keys[i], f"tokens{i}": tokens[i], f"counts{i}": counts[i]}
        with Path(path).open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> NgramCounts:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is of another kind or damaged.
            OSError: it cannot be read.
        """
        wrong = f"path must be a file written by NgramCounts.save, got {str(path)!r}"
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except (ValueError, EOFError, BadZipFile) as error:
            raise ValueError(f"{wrong}: {error}") from error
        if str(arrays.get("format")) != _FORMAT or arrays.get("sizes", np.zeros(0)).shape != (2,):
            raise ValueError(wrong)
        loaded = cls(*map(int, arrays["sizes"]))
        for i, table in enumerate(loaded._tables):
            try:
                columns = [arrays[f"{name}{i}"] for name in ("rows", "ngrams", "tokens", "counts")]
            except KeyError as error:
                raise ValueError(f"{wrong}: {error} is missing") from error
            _fill(table, columns, loaded.min_ngram + i, wrong)
        return loaded

    def _sized_tables(self) -> list[tuple[int, int, dict[int, int | _Several]]]:
        """Per size: the mask of its n-gram, the least integer that is one, and its table."""
        sizes = range(self.min_ngram, self.max_ngram + 1)
        return [
            ((1 << _BITS * size) - 1, 1 << _BITS * (size - 1), table)
            for size, table in zip(sizes, self._tables, strict=True)
        ]

    def _arrays(self) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """Per size: first row of each n-gram [K + 1], n-grams [K, size], successors [R], their counts [R]."""
        all_rows, all_keys, all_tokens, all_counts = [], [], [], []
        for size, table in enumerate(self._tables, start=self.min_ngram):
            rows, keys, tokens, counts = [0], [], [], []
            for key in table:
                found = self.counts_of(key, size)
                keys.append([(key >> _BITS * i & _TOKEN) - 1 for i in reversed(range(size))])
                tokens.extend(found)
                counts.extend(found.values())
                rows.append(len(tokens))
            all_rows.append(np.array(rows, np.int64))
            all_keys.append(np.array(keys, np.int32).reshape(-1, size))
            all_tokens.append(np.array(tokens, np.int32))
            all_counts.append(np.array(counts, np.int64))
        return all_rows, all_keys, all_tokens, all_counts


def _most_frequent(counts: dict[int, int], limit: int) -> list[tuple[int, int]]:
    """The `limit` most frequent (token, times), first seen first on ties."""
    if len(counts) <= 32:  # where sorting everything is quicker than a heap
        return sorted(counts.items(), key=_times, reverse=True)[:limit]
    return heapq.nlargest(limit, counts.items(), key=_times)


def _fill(table: dict[int, int | _Several], columns: list[np.ndarray], size: int, wrong: str) -> None:
    """Enter the arrays of one size into its table; the reverse of `NgramCounts._arrays`."""
    rows, keys, tokens, counts = columns
    if any(column.dtype.kind != "i" for column in columns) or keys.ndim != 2 or keys.shape[1] != size:
        raise ValueError(f"{wrong}: arrays of n-gram size {size} have the wrong type or shape")
    well_formed = (
        rows.shape == (len(keys) + 1,)
        and tokens.shape == counts.shape == (int(rows[-1]),)
        and rows[0] == 0
        and (np.diff(rows) > 0).all()
        and (counts > 0).all()
        and (tokens >= 0).all()
        and (keys >= 0).all()
    )
    if not well_formed:
        raise ValueError(f"{wrong}: counts of n-gram size {size} are damaged")
    bounds, tokens_list, counts_list = rows.tolist(), tokens.tolist(), counts.tolist()
    for i, ngram in enumerate(keys.tolist()):
        key = 0
        for token in ngram:
            key = key << _BITS | token + 1
        start, end = bounds[i], bounds[i + 1]
        successors = dict(zip(tokens_list[start:end], counts_list[start:end], strict=True))
        if len(successors) == 1:
            table[key] = counts_list[start] << _BITS | tokens_list[start]
        else:
            top = max(successors, key=successors.__getitem__)
            table[key] = _Several(successors, sum(successors.values()), top)
