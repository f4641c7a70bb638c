"""The store of past outputs: what is kept, in how many segments."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adaptspec.drafters.datastore import longest_match
from adaptspec.drafters.growing_store import GrowingStore
from tests.drafters.driving import examples


def kept(store: GrowingStore) -> list[list[int]]:
    return [document.tolist() for segment in store.segments for document in segment.documents]


@examples
@given(st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=30), st.integers(0, 160))
def test_the_newest_documents_are_kept(documents: list[list[int]], max_tokens: int) -> None:
    store = GrowingStore(max_tokens=max_tokens)
    added: list[list[int]] = []
    for document in documents:
        store.add(document)
        if cut := document[len(document) - min(len(document), max_tokens) :]:
            added.append(cut)
        remembered = kept(store)
        assert len(store) == sum(map(len, remembered)) <= max_tokens
        assert remembered == added[len(added) - len(remembered) :]
        if len(remembered) < len(added) and max(map(len, added)) <= max_tokens // 4:
            assert len(store) > max_tokens - max_tokens // 4


@examples
@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=20), st.lists(st.integers(0, 2), min_size=2))
def test_segments_answer_as_one_index(documents: list[list[int]], context: list[int]) -> None:
    store = GrowingStore(max_tokens=1000)
    for document in documents:
        store.add(document)
    match = longest_match(store.indices(), context)
    length = 0
    for size in range(2, min(16, len(context)) + 1):
        suffix = context[-size:]
        if any(d[i : i + size] == suffix for d in documents for i in range(len(d) - size + 1)):
            length = size
    assert match.length == length


def test_segments_merge_like_binary_digits() -> None:
    store = GrowingStore(max_tokens=10_000)
    sizes = []
    for i in range(8):
        store.add([i] * 10)
        sizes.append([len(segment.index) for segment in store.segments])
    assert sizes[:4] == [[10], [20], [20, 10], [40]]
    assert sizes[7] == [80]


def test_segments_stay_few_and_short() -> None:
    store = GrowingStore(max_tokens=4000)
    for i in range(2000):
        store.add([i % 7] * (5 + i % 11))
        lengths = [len(segment.index) for segment in store.segments]
        assert max(lengths) <= 1000 and sum(lengths) <= 4000
        assert len(lengths) <= 20
    assert sum(lengths) >= 3000


def test_eviction_is_first_in_first_out() -> None:
    store = GrowingStore(max_tokens=40)
    for i in range(10):
        store.add([i] * 10)
    assert kept(store) == [[i] * 10 for i in (6, 7, 8, 9)]
    store.add(list(range(100)))
    assert kept(store) == [list(range(60, 100))]
    store.clear()
    assert len(store) == 0 and store.indices() == []


def test_a_store_without_room_remembers_nothing() -> None:
    store = GrowingStore(max_tokens=0)
    store.add([1, 2, 3])
    assert len(store) == 0
