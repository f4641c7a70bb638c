"""Token stores that answer "what followed this context before": an index in memory, and the same index in a file."""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from adaptspec.files import whole_file

SEPARATOR = -1
"""Stands before, between and after documents in the token array; matches nothing and ends every continuation."""

LONGEST_MATCH = 16
"""Positions are sorted by this many tokens of left context; longer matches cannot be told apart."""

MAGIC = b"ADSPSTOR"
VERSION = 1
HEADER = struct.Struct("<8sIIqqqI64sI")
HEADER_BYTES = 128


def sort_by_left_context(tokens: np.ndarray, *, width: int = LONGEST_MATCH) -> np.ndarray:
    """Positions of all tokens (separators left out), sorted by the `width` tokens that end there, last token first.

    This is the suffix array of the reversed text (Manber & Myers 1993), by prefix doubling: ranks over `s` tokens at
    `i` and at `i - s` give ranks over `2 s`. It stops at `width`, because longer matches are never asked for. Ties
    keep text order. Takes ceil(log2(width)) + 1 stable sorts of T keys and about 40 bytes per token while it runs.

    Args:
        tokens: int32 [T], first entry `SEPARATOR`.
    """
    assert len(tokens) and tokens[0] == SEPARATOR
    rank = tokens.astype(np.int64) + 1
    bound = int(rank.max()) + 1
    order = np.argsort(rank, kind="stable")
    span = 1
    while span < width and bound < len(tokens):
        step = min(span, width - span)
        before = np.zeros_like(rank)
        before[step:] = rank[:-step]
        key = rank * bound + before
        order = np.argsort(key, kind="stable")
        key = key[order]
        dense = np.zeros_like(rank)
        np.cumsum(key[1:] != key[:-1], out=dense[1:])
        rank[order] = dense
        bound = int(dense[-1]) + 1
        span += step
    order = order[tokens[order] != SEPARATOR]
    return order.astype(np.int32 if len(tokens) < 2**31 else np.int64)


def join_documents(documents: Iterable[Any], *, vocab_size: int | None = None) -> np.ndarray:
    """int32 [T]: the documents with a separator before, between and after them; empty documents are left out.

    Raises:
        ValueError: a document is not a flat sequence of whole numbers in [0, vocab_size).
    """
    separator = np.full(1, SEPARATOR, np.int32)
    parts = [separator]
    limit = 2**31 if vocab_size is None else vocab_size
    for number, document in enumerate(documents):
        ids = np.asarray(document)
        if ids.size == 0:
            continue
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"sequences must hold flat lists of token ids, got {ids.dtype} {list(ids.shape)} at document {number}"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= limit:
            raise ValueError(f"token ids must be in [0, {limit}), got {low if low < 0 else high} in document {number}")
        parts += [ids.astype(np.int32), separator]
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """Tokens and their positions sorted by left context; finds where a context occurred by binary search.

    Sorting by what stands *before* a position nests the matches: all positions that match n + 1 tokens are a range
    inside the range that matches n, so one narrowing walk answers every suffix length.

    Attributes:
        tokens: int32 [T], documents between separators.
        order: int32 or int64 [P], positions in the order of `sort_by_left_context`.
    """

    tokens: np.ndarray
    order: np.ndarray
    _token_view: memoryview = field(init=False, repr=False, compare=False)
    _order_view: memoryview = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Reading one element of a memoryview costs a third of reading it from an array.
        object.__setattr__(self, "_token_view", memoryview(self.tokens))
        object.__setattr__(self, "_order_view", memoryview(self.order))

    @classmethod
    def build(cls, documents: Iterable[Any], *, vocab_size: int | None = None) -> Self:
        """Index documents (token id sequences); no continuation runs from one into the next."""
        tokens = join_documents(documents, vocab_size=vocab_size)
        return cls(tokens, sort_by_left_context(tokens))

    def __len__(self) -> int:
        """Tokens stored, separators not counted."""
        return len(self.order)

    def narrow(self, low: int, high: int, token: int, back: int) -> tuple[int, int]:
        """The part of the range [low, high) of `order` whose tokens `back` places before the position are `token`.

        The range must match on the places before that already (`back = 0`: the whole range).
        """
        tokens = self._token_view
        order = self._order_view

        def key(position: int) -> int:
            return tokens[position - back]

        if high - low == 1:  # the usual case beyond a few tokens
            return low, high if key(order[low]) == token else low
        first = bisect_left(order, token, low, high, key=key)
        if first == high or key(order[first]) != token:
            return first, first
        return first, bisect_right(order, token, first, high, key=key)


@dataclass(frozen=True, slots=True)
class Match:
    """Where the longest known suffix of a context occurred.

    Attributes:
        length: tokens of the suffix, 0 if even the shortest allowed one is unknown.
        ranges: (index, low, high): the positions `index.order[low:high]` end with the suffix.
    """

    length: int
    ranges: tuple[tuple[TokenIndex, int, int], ...] = ()

    @property
    def count(self) -> int:
        """Occurrences."""
        return sum(high - low for _, low, high in self.ranges)

    def continuations(self, depth: int, *, limit: int) -> np.ndarray:
        """int32 [M, depth], the tokens after up to `limit` occurrences; `SEPARATOR` from the end of a document on.

        With more occurrences than `limit`, evenly spaced ones are taken; they are ordered by what stands before the
        suffix, so every left context keeps its share.
        """
        stride = max(1, -(-self.count // limit))
        places = np.arange(1, depth + 1)
        parts = []
        for index, low, high in self.ranges:
            positions = index.order[low:high:stride].astype(np.int64)[:, None] + places
            parts.append(index.tokens[np.minimum(positions, len(index.tokens) - 1)])
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        ended = rows == SEPARATOR
        if ended.any():
            rows[np.logical_or.accumulate(ended, axis=1)] = SEPARATOR
        return rows


def longest_match(
    indices: Sequence[TokenIndex], context: Sequence[int], *, longest: int = LONGEST_MATCH, shortest: int = 2
) -> Match:
    """The longest suffix of `context`, between `shortest` and `longest` tokens, that occurs in any of `indices`."""
    ranges = [(index, 0, len(index)) for index in indices]
    length = 0
    for back in range(min(longest, len(context))):
        token = context[-1 - back]
        narrower = []
        for index, low, high in ranges:
            low, high = index.narrow(low, high, token, back)
            if low < high:
                narrower.append((index, low, high))
        if not narrower:
            break
        ranges = narrower
        length = back + 1
    return Match(length, tuple(ranges)) if length >= shortest else Match(0)


@dataclass(frozen=True, slots=True)
class Datastore:
    """A `TokenIndex` in a file, memory-mapped, so that a large one costs no memory and opens at once.

    File (little-endian): a 128-byte header (magic, version, bytes per position, T, P, vocabulary size, CRC-32 of the
    payload, tokenizer fingerprint, CRC-32 of the header), then int32 [T] tokens (T even), int32 or int64 [P] positions.
    Eight bytes per token below 2^31 tokens. Ids are 32 bits wide: 16-bit stores corrupt ids above 65,535.
    """

    index: TokenIndex
    vocab_size: int
    tokenizer_fingerprint: str | None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        vocab_size: int | None = None,
        tokenizer_fingerprint: str | None = None,
        check_content: bool = True,
    ) -> Self:
        """Map a file that `build_datastore` wrote.

        Args:
            vocab_size: refuse a store with ids beyond this vocabulary.
            tokenizer_fingerprint: refuse a store made with another tokenizer; not compared if the store has none.
            check_content: compare the checksum of the payload, which reads the file once (about 1 s per GB).

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: not a datastore, damaged, of another version, or of another vocabulary.
        """
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
            raise ValueError(f"{os.fspath(path)} is not a datastore: it does not start with a datastore header")
        _, version, width, n_tokens, n_positions, vocab, payload_crc, label, header_crc = HEADER.unpack_from(header)
        if version != VERSION:
            raise ValueError(f"datastore {os.fspath(path)} has format version {version}, this release reads {VERSION}")
        if header_crc != zlib.crc32(header[: HEADER.size - 4]) or width not in (4, 8) or not 0 < n_positions < n_tokens:
            raise ValueError(f"datastore {os.fspath(path)} is damaged: its header does not match its checksum")
        expected = HEADER_BYTES + 4 * n_tokens + width * n_positions
        if size != expected:
            raise ValueError(f"datastore {os.fspath(path)} is damaged: expected {expected} bytes, got {size}")
        fingerprint = label.rstrip(b"\0").decode("ascii") or None
        if vocab_size is not None and vocab > vocab_size:
            raise ValueError(
                f"datastore {os.fspath(path)} has token ids of a vocabulary of {vocab}, the target has {vocab_size}"
            )
        if None not in (fingerprint, tokenizer_fingerprint) and fingerprint != tokenizer_fingerprint:
            raise ValueError(
                f"datastore {os.fspath(path)} was built with another tokenizer: "
                f"fingerprint {fingerprint}, expected {tokenizer_fingerprint}"
            )
        if check_content and _file_crc(path) != payload_crc:
            raise ValueError(f"datastore {os.fspath(path)} is damaged: its content does not match its checksum")
        tokens = np.memmap(path, "<i4", "r", HEADER_BYTES, (n_tokens,))
        order = np.memmap(path, f"<i{width}", "r", HEADER_BYTES + 4 * n_tokens, (n_positions,))
        # Plain views: every slice of a np.memmap would pay for making another np.memmap.
        return cls(TokenIndex(tokens.view(np.ndarray), order.view(np.ndarray)), vocab, fingerprint)


def _file_crc(path: str | os.PathLike[str]) -> int:
    crc = 0
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        for chunk in iter(partial(file.read, 1 << 20), b""):
            crc = zlib.crc32(chunk, crc)
    return crc


def build_datastore(
    sequences: Iterable[Any],
    out_path: str | os.PathLike[str],
    *,
    vocab_size: int,
    tokenizer_fingerprint: str | None = None,
) -> int:
    """Write a datastore file from token id sequences, one per document (texts, past outputs).

    The file appears under its name only when it is complete. Returns the number of tokens stored.

    Raises:
        ValueError: no tokens, ids outside [0, vocab_size), or a fingerprint that is not up to 64 ASCII characters.
    """
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or not 0 < vocab_size <= 2**31:
        raise ValueError(f"vocab_size must be a whole number in [1, 2**31], got {vocab_size!r}")
    label = tokenizer_fingerprint or ""
    if len(label) > 64 or not label.isascii():
        raise ValueError(f"tokenizer_fingerprint must be at most 64 ASCII characters, got {label!r}")
    index = TokenIndex.build(sequences, vocab_size=vocab_size)
    if not len(index):
        raise ValueError("sequences must hold at least one token, got none")
    # An even number of tokens keeps 64-bit positions behind them aligned.
    tokens = np.pad(index.tokens, (0, len(index.tokens) % 2), constant_values=SEPARATOR).astype("<i4")
    order = index.order.astype(f"<i{index.order.itemsize}")
    crc = zlib.crc32(order, zlib.crc32(tokens))
    fields = (MAGIC, VERSION, order.itemsize, len(tokens), len(order), vocab_size, crc, label.encode("ascii"))
    header = HEADER.pack(*fields, 0)[:-4]
    header += struct.pack("<I", zlib.crc32(header))
    with whole_file(out_path) as file:
        file.write(header.ljust(HEADER_BYTES, b"\0"))
        tokens.tofile(file)
        order.tofile(file)
    return len(index)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over the tokenizer's token -> id map: equal exactly if all ids mean the same tokens."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256("\n".join(f"{id_} {token!r}" for token, id_ in vocabulary).encode()).hexdigest()


def build_from_text(paths: Iterable[str | os.PathLike[str]], tokenizer: Any, out_path: str | os.PathLike[str]) -> int:
    """Write a datastore from UTF-8 text files, one document each. Returns the number of tokens stored.

    Args:
        tokenizer: a transformers tokenizer; its vocabulary size and fingerprint are kept in the file.
    """
    documents = (
        tokenizer(Path(path).read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"] for path in paths
    )
    return build_datastore(
        documents, out_path, vocab_size=len(tokenizer), tokenizer_fingerprint=tokenizer_fingerprint(tokenizer)
    )
