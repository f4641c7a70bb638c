"""N-gram counts against scanning the text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.drafters.ngram_counts import EMPTY_HISTORY, NgramCounts, NgramThresholds, Successors
from tests.drafters.driving import examples

ANY = NgramThresholds((1,) * 6, (0,) * 6)

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=40))
sizes = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def scan(texts: list[list[int]], ngram: tuple[int, ...]) -> Counter[int]:
    size = len(ngram)
    return Counter(
        text[i + size] for text in texts for i in range(len(text) - size) if tuple(text[i : i + size]) == ngram
    )


def history_of(counts: NgramCounts, tokens: list[int] | tuple[int, ...]) -> int:
    history = EMPTY_HISTORY
    for token in tokens:
        history = counts.advance(history, token)
    return history


def everything(counts: NgramCounts) -> list[list[list[int]]]:
    return [[array.tolist() for array in column] for column in counts._arrays()]


def assert_counts(counts: NgramCounts, sequences: list[list[int]]) -> None:
    ngrams = 0
    for size in range(counts.min_ngram, counts.max_ngram + 1):
        seen = {tuple(text[i : i + size]) for text in sequences for i in range(len(text) - size)}
        ngrams += len(seen)
        for ngram in seen:
            expected = scan(sequences, ngram)
            assert counts.counts_of(history_of(counts, ngram), size) == expected
            found = counts.decide(history_of(counts, ngram), ANY)
            assert found is not None and found.size == size
            assert (found.total, found.distinct) == (expected.total(), len(expected))
            assert expected[found.ranked[0][0]] == found.ranked[0][1] == max(expected.values())
    assert len(counts) == ngrams


@examples
@given(texts, sizes, st.integers(1, 5))
def test_counts_are_those_of_a_scan(text: list[int], bounds: tuple[int, int], chunk: int) -> None:
    counts = NgramCounts(*bounds)
    history = EMPTY_HISTORY
    for start in range(0, len(text), chunk):
        history = counts.extend(history, text[start : start + chunk])
    assert history == history_of(counts, text)
    assert_counts(counts, [text])


@examples
@given(st.lists(texts, max_size=5), sizes, st.data())
def test_what_is_retracted_was_never_there(
    sequences: list[list[int]], bounds: tuple[int, int], data: st.DataObject
) -> None:
    counts = NgramCounts(*bounds)
    for text in sequences:
        counts.extend(EMPTY_HISTORY, text)
    left = list(sequences)
    while left:
        gone = left.pop(data.draw(st.integers(0, len(left) - 1)))
        counts.retract(EMPTY_HISTORY, gone)
        assert_counts(counts, left)
    assert len(counts) == 0


@examples
@given(st.lists(texts, min_size=1, max_size=3), texts, st.integers(1, 3), st.integers(0, 100), st.integers(1, 3))
def test_the_longest_ngram_with_enough_evidence_decides(
    sequences: list[list[int]], context: list[int], min_count: int, percent: int, limit: int
) -> None:
    counts = NgramCounts(1, 3)
    for text in sequences:
        counts.extend(EMPTY_HISTORY, text)
    thresholds = NgramThresholds((min_count, min_count, 1), (percent, percent, percent / 2))
    found = counts.decide(history_of(counts, context), thresholds, limit=limit)
    for size in (3, 2, 1):
        seen = scan(sequences, tuple(context[len(context) - size :])) if len(context) >= size else Counter()
        most = max(seen.values(), default=0)
        enough = seen.total() >= thresholds.min_counts[size - 1]
        if seen and enough and 100 * most >= thresholds.min_percents[size - 1] * seen.total():
            assert found is not None
            assert (found.size, found.total, found.distinct) == (size, seen.total(), len(seen))
            assert all(seen[token] == times for token, times in found.ranked)
            assert [times for _, times in found.ranked] == sorted(seen.values(), reverse=True)[:limit]
            assert len(dict(found.ranked)) == len(found.ranked)
            return
    assert found is None


def test_preferred_tokens_go_first_if_they_pass() -> None:
    counts = NgramCounts(1, 1)
    for token in (8, 8, 8, 9, 9):
        counts.extend(EMPTY_HISTORY, [1, token])
    history = history_of(counts, [1])
    lax, strict = NgramThresholds((1,), (40,)), NgramThresholds((1,), (50,))
    assert counts.decide(history, lax) == Successors(1, [(8, 3)], 5, 2)
    assert counts.decide(history, lax, limit=2, preferred={9: 100}) == Successors(1, [(9, 2), (8, 3)], 5, 2)
    assert counts.decide(history, strict, preferred={9: 100}) is None


def test_thresholds_are_inclusive_and_per_size() -> None:
    counts = NgramCounts(1, 2)
    for successor in (7, 7, 6):
        counts.extend(EMPTY_HISTORY, [1, 2, successor])
    history = history_of(counts, [1, 2])
    for min_counts, percents, size in (
        ((3, 3), (66, 66), 2),
        ((3, 4), (66, 66), 1),
        ((3, 3), (66, 67), 1),
        ((4, 4), (0, 0), None),
        ((1, 1), (67, 67), None),
    ):
        found = counts.decide(history, NgramThresholds(min_counts, percents))
        assert (None if found is None else found.size) == size


@examples
@given(st.lists(texts, max_size=3), sizes)
def test_a_saved_file_gives_the_same_counts(sequences: list[list[int]], bounds: tuple[int, int]) -> None:
    import tempfile

    counts = NgramCounts(*bounds)
    for text in sequences:
        counts.extend(EMPTY_HISTORY, [token + 69_998 for token in text])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.npz"
        counts.save(path)
        loaded = NgramCounts.load(path)
    assert everything(loaded) == everything(counts)
    assert (loaded.min_ngram, loaded.max_ngram) == bounds
    assert loaded.largest_token() == counts.largest_token()
    loaded.extend(EMPTY_HISTORY, [1, 2, 1, 2])  # goes on counting
    counts.extend(EMPTY_HISTORY, [1, 2, 1, 2])
    assert everything(loaded) == everything(counts)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    counts = NgramCounts(2, 2)
    counts.extend(EMPTY_HISTORY, [1, 2, 3, 1, 2, 4])
    path = tmp_path / "counts.npz"
    counts.save(path)
    with np.load(path) as file:
        arrays = dict(file)
    for name, value in (
        ("format", np.array("something else")),
        ("sizes", np.array([2, 3])),
        ("sizes", np.array([2])),
        ("rows0", arrays["rows0"][:-1]),
        ("counts0", -arrays["counts0"]),
        ("tokens0", arrays["tokens0"].astype(float)),
        ("ngrams0", arrays["ngrams0"][:, :1]),
        ("ngrams0", np.zeros(3, np.int32)),
    ):
        broken = tmp_path / "broken.npz"
        np.savez(broken, **{**arrays, name: value})
        with pytest.raises(ValueError, match="path must be a file written by NgramCounts.save"):
            NgramCounts.load(broken)
    broken.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="path must be a file written by NgramCounts.save"):
        NgramCounts.load(broken)
    with pytest.raises(FileNotFoundError):
        NgramCounts.load(tmp_path / "absent.npz")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NgramCounts(0, 2), "1 <= min_ngram <= max_ngram, got 0 and 2"),
        (lambda: NgramCounts(3, 2), "1 <= min_ngram <= max_ngram, got 3 and 2"),
        (lambda: NgramThresholds((1, 2), (50,)), "equally long"),
        (lambda: NgramThresholds((0,), (50,)), "min_counts must be >= 1"),
        (lambda: NgramThresholds((1,), (101,)), "min_percents must be in"),
    ],
)
def test_arguments_are_checked(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
