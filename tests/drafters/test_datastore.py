"""The token index against scanning the text, and the datastore file."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.drafters import datastore
from adaptspec.drafters.datastore import (
    HEADER,
    HEADER_BYTES,
    LONGEST_MATCH,
    SEPARATOR,
    Datastore,
    TokenIndex,
    build_datastore,
    build_from_text,
    join_documents,
    longest_match,
    sort_by_left_context,
    tokenizer_fingerprint,
)
from tests.drafters.driving import examples

documents = st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=5)
contexts = st.lists(st.integers(0, 3), min_size=1, max_size=20)


def scan(corpus: list[list[int]], context: list[int], longest: int, shortest: int) -> tuple[int, list[list[int]]]:
    """Length of the longest known suffix, and everything that followed its occurrences."""
    for length in range(min(longest, len(context)), shortest - 1, -1):
        suffix = context[-length:]
        found = [
            document[end:]
            for document in corpus
            for end in range(length, len(document) + 1)
            if document[end - length : end] == suffix
        ]
        if found:
            return length, found
    return 0, []


def rows_of(tails: list[list[int]], depth: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple((tail + [SEPARATOR] * depth)[:depth]) for tail in tails)


@examples
@given(st.lists(documents, min_size=1, max_size=3), contexts, st.integers(1, 16), st.integers(1, 4))
def test_retrieval_equals_a_scan(
    stores: list[list[list[int]]], context: list[int], longest: int, shortest: int
) -> None:
    indices = [TokenIndex.build(store) for store in stores]
    match = longest_match(indices, context, longest=longest, shortest=shortest)
    length, tails = scan([document for store in stores for document in store], context, longest, shortest)
    assert match.length == length and match.count == len(tails)
    if length:
        rows = match.continuations(5, limit=10_000)
        assert Counter(map(tuple, rows.tolist())) == rows_of(tails, 5)


@examples
@given(documents, st.integers(1, LONGEST_MATCH))
def test_positions_are_sorted_by_what_stands_before(corpus: list[list[int]], width: int) -> None:
    tokens = join_documents(corpus)
    order = sort_by_left_context(tokens, width=width).tolist()
    assert sorted(order) == np.flatnonzero(tokens != SEPARATOR).tolist()

    def left_context(position: int) -> list[int]:
        left = tokens[max(0, position - width + 1) : position + 1][::-1].tolist()
        return left[: left.index(SEPARATOR)] if SEPARATOR in left else left

    contexts = [left_context(position) for position in order]
    assert contexts == sorted(contexts)


def test_a_known_text() -> None:
    index = TokenIndex.build([[7, 1, 2, 3], [9, 1, 2, 4, 5], [1, 2]])
    match = longest_match([index], [8, 8, 1, 2])
    assert (match.length, match.count) == (2, 3)
    rows = sorted(match.continuations(3, limit=10).tolist())
    assert rows == [[-1, -1, -1], [3, -1, -1], [4, 5, -1]]
    longer = longest_match([index], [5, 9, 1, 2])
    assert longer.length == 3 and longer.continuations(2, limit=10).tolist() == [[4, 5]]
    assert longest_match([index], [2, 9]).length == 0
    assert longest_match([index], [2, 9], shortest=1).length == 1


def test_a_match_does_not_reach_into_the_document_before() -> None:
    index = TokenIndex.build([[1, 2], [3, 4]])
    assert longest_match([index], [2, 3]).length == 0


def test_too_many_occurrences_are_sampled_evenly() -> None:
    # What follows [5, 6] depends on the token before it: 3 left contexts, 100 occurrences each.
    index = TokenIndex.build([[left, 5, 6, 10 + left] for left in (1, 2, 3) for _ in range(100)])
    match = longest_match([index], [0, 5, 6])
    assert match.count == 300
    rows = match.continuations(1, limit=30)
    assert Counter(rows[:, 0].tolist()) == {11: 10, 12: 10, 13: 10}
    assert len(match.continuations(1, limit=7)) <= 7


def test_large_token_ids() -> None:
    index = TokenIndex.build([[65_535, 65_536, 131_071, 2**31 - 1]])
    assert longest_match([index], [65_536, 131_071]).continuations(1, limit=1).tolist() == [[2**31 - 1]]
    assert longest_match([index], [65_535 - 65_536 + 65_536, 0]).length == 0


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1, -1], r"token ids must be in \[0, 10\), got -1 in document 1"),
        ([10], r"token ids must be in \[0, 10\), got 10 in document 1"),
        ([0.5], "sequences must hold flat lists of token ids, got float64"),
        ([[1, 2]], "sequences must hold flat lists of token ids"),
    ],
)
def test_documents_are_checked(tmp_path: Path, document: list[int], message: str) -> None:
    path = tmp_path / "store"
    with pytest.raises(ValueError, match=message):
        build_datastore([[1], document], path, vocab_size=10)
    assert list(tmp_path.iterdir()) == []


def test_files_round_trip(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    corpus = [rng.integers(0, 70_000, size=size) for size in (50, 1, 0, 700)]
    path = tmp_path / "store"
    assert build_datastore(iter(corpus), path, vocab_size=70_000, tokenizer_fingerprint="abc") == 751
    assert [file.name for file in tmp_path.iterdir()] == ["store"]
    store = Datastore.open(path, vocab_size=70_000, tokenizer_fingerprint="abc")
    assert (store.vocab_size, store.tokenizer_fingerprint, len(store.index)) == (70_000, "abc", 751)
    built = TokenIndex.build(corpus)
    assert store.index.tokens.tolist() == [*built.tokens.tolist(), SEPARATOR]  # padded to an even number
    assert (store.index.order == built.order).all()
    assert path.stat().st_size == HEADER_BYTES + 4 * (len(built.tokens) + 1) + 4 * 751
    context = corpus[3][100:116].tolist()
    match = longest_match([store.index], context)
    assert match.length == 16 and match.continuations(10, limit=5).tolist() == [corpus[3][116:126].tolist()]


@pytest.mark.parametrize("corpus", [[[1, 2, 3]], [[1, 2, 3], [4]]])
def test_positions_of_64_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: list[list[int]]) -> None:
    def wide(tokens: np.ndarray) -> np.ndarray:
        return sort_by_left_context(tokens).astype(np.int64)

    monkeypatch.setattr(datastore, "sort_by_left_context", wide)
    path = tmp_path / "store"
    build_datastore(corpus, path, vocab_size=10)
    store = Datastore.open(path)
    assert store.index.order.dtype.itemsize == 8
    assert longest_match([store.index], [1, 2]).continuations(2, limit=5).tolist() == [[3, -1]]


def test_a_padded_vocabulary_fits_and_a_smaller_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "store"
    build_datastore([[1, 2, 3]], path, vocab_size=100)
    assert Datastore.open(path, vocab_size=128).vocab_size == 100
    assert Datastore.open(path, tokenizer_fingerprint="any").tokenizer_fingerprint is None
    with pytest.raises(ValueError, match="vocabulary of 100, the target has 99"):
        Datastore.open(path, vocab_size=99)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    build_datastore([[1, 2, 3]], path, vocab_size=100, tokenizer_fingerprint="first")
    with pytest.raises(ValueError, match="another tokenizer: fingerprint first, expected second"):
        Datastore.open(path, tokenizer_fingerprint="second")


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    build_datastore([[1, 2, 3, 1, 2]], path, vocab_size=10, tokenizer_fingerprint="abc")
    whole = path.read_bytes()
    checked = [*range(HEADER.size), *range(HEADER_BYTES, len(whole))]
    for place in checked:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="datastore"):
            Datastore.open(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a datastore"),
        (b"PK\x03\x04" + b"\0" * 500, "is not a datastore"),
        (b"ADSPSTOR", "is not a datastore"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "store"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Datastore.open(path)


def test_cut_off_files_other_versions_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "store"
    build_datastore([[1, 2, 3]], path, vocab_size=10)
    whole = path.read_bytes()
    for changed in (whole[:-1], whole + b"\0", whole[:HEADER_BYTES]):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=f"expected {len(whole)} bytes, got {len(changed)}"):
            Datastore.open(path)
    header = whole[:8] + struct.pack("<I", 2) + whole[12 : HEADER.size - 4]
    path.write_bytes(header + struct.pack("<I", zlib.crc32(header)) + whole[HEADER.size :])
    with pytest.raises(ValueError, match="format version 2, this release reads 1"):
        Datastore.open(path)
    with pytest.raises(FileNotFoundError):
        Datastore.open(tmp_path / "missing")


def test_a_failed_build_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    build_datastore([[1, 2, 3]], path, vocab_size=10)
    before = path.read_bytes()

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(datastore.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        build_datastore([[4, 5, 6]], path, vocab_size=10)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, r"vocab_size must be a whole number in \[1, 2\*\*31\], got 0"),
        ({"vocab_size": 10, "tokenizer_fingerprint": "x" * 65}, "at most 64 ASCII characters"),
        ({"vocab_size": 10, "tokenizer_fingerprint": "é"}, "at most 64 ASCII characters"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_datastore([[1]], tmp_path / "store", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sequences must hold at least one token"):
        build_datastore([[]], tmp_path / "store", vocab_size=10)


class Letters:
    """A tokenizer with one token per letter."""

    def __init__(self, letters: str) -> None:
        self.letters = letters

    def __len__(self) -> int:
        return len(self.letters)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert add_special_tokens is False
        return {"input_ids": [self.letters.index(letter) for letter in text]}

    def get_vocab(self) -> dict[str, int]:
        return {letter: i for i, letter in enumerate(self.letters)}


def test_building_from_text_files(tmp_path: Path) -> None:
    tokenizer = Letters("abcdeé")
    for name, text in (("one.txt", "abcd"), ("two.txt", "éabe")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    path = tmp_path / "store"
    assert build_from_text([tmp_path / "one.txt", tmp_path / "two.txt"], tokenizer, path) == 8
    store = Datastore.open(path, vocab_size=6, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer))
    rows = longest_match([store.index], [0, 1]).continuations(2, limit=9).tolist()
    assert sorted(rows) == [[2, 3], [4, -1]]
    swapped = Letters("abcdée")
    assert len(swapped) == len(tokenizer)
    with pytest.raises(ValueError, match="another tokenizer"):
        Datastore.open(path, tokenizer_fingerprint=tokenizer_fingerprint(swapped))
