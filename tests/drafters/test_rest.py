"""REST: retrieval, counting, scores, past outputs and state."""

from __future__ import annotations

from collections import Counter
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.drafters.datastore import build_datastore
from adaptspec.drafters.registry import make_drafter
from adaptspec.drafters.rest import CONTINUED, RestDrafter, frequent_prefixes, situation
from adaptspec.trees import trie_from_counts
from tests.drafters.driving import Vocabulary, ask, begin, commit, examples, paths, request


def stored(folder: Path, documents: list[list[int]], *, vocab_size: int = 100) -> Path:
    path = folder / "store"
    build_datastore(documents, path, vocab_size=vocab_size)
    return path


tables = st.lists(st.lists(st.integers(-1, 3), min_size=5, max_size=5), min_size=1, max_size=40)


@examples
@given(tables, st.integers(1, 30))
def test_prefixes_by_count(rows: list[list[int]], budget: int) -> None:
    rows = [row if -1 not in row else row[: row.index(-1)] + [-1] * (5 - row.index(-1)) for row in rows]
    tokens, parents, counts = frequent_prefixes(rows, budget)
    every = Counter(tuple(row[:depth]) for row in rows for depth in range(1, 6) if row[depth - 1] >= 0)
    found: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert parent < node
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found)
    assert [every[prefix] for prefix in found] == counts
    assert counts == sorted(every.values(), reverse=True)[:budget]
    trie = trie_from_counts(np.asarray(rows), budget=budget)
    assert not counts or trie.evidence["count"].tolist() == counts


def test_scores_by_hand(tmp_path: Path) -> None:
    path = stored(tmp_path, [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [0, 2, 7]])
    drafter = RestDrafter(path=path, depth=2)
    begin(drafter, [9, 1, 2])
    tree = ask(drafter, [9, 1, 2])
    first = CONTINUED[0, 1]  # 2 tokens matched, 3 continuations
    second = CONTINUED[1, 1]  # then 3 tokens, 2 continuations
    assert {path: exp(score) for path, score in paths(tree).items()} == pytest.approx(
        {
            (3,): first * 2 / 3,
            (6,): first / 3,
            (3, 4): first * 2 / 3 * second / 2,
            (3, 5): first * 2 / 3 * second / 2,
        }
    )
    assert tree.evidence["match_length"].tolist() == [2, 2, 2, 2]
    assert tree.evidence["count"].tolist() == [2, 1, 1, 1]
    assert tree.evidence["parent_count"].tolist() == [3, 3, 2, 2]
    assert paths(ask(drafter, [9, 1, 2], 2)).keys() == {(3,), (6,)}
    assert paths(ask(drafter, [9, 1, 2], max_depth=1)).keys() == {(3,), (6,)}


def test_the_longest_match_decides(tmp_path: Path) -> None:
    drafter = RestDrafter(path=stored(tmp_path, [[1, 2, 3, 4], [5, 2, 3, 6], [5, 2, 3, 6]]), depth=1)
    begin(drafter, [1, 2, 3])
    assert paths(ask(drafter, [1, 2, 3])).keys() == {(4,)}
    short = RestDrafter(path=tmp_path / "store", depth=1, longest=2)
    begin(short, [1, 2, 3])
    assert ask(short, [1, 2, 3]).token_ids.tolist() == [6, 4]


def test_without_evidence_it_declines(tmp_path: Path) -> None:
    empty = RestDrafter()
    begin(empty, [1, 2, 1, 2])
    assert len(ask(empty, [1, 2, 1, 2])) == 0
    drafter = RestDrafter(path=stored(tmp_path, [[1, 2, 3], [4, 3]]))
    for context in ([3], [2, 4], [7, 8], [4, 3]):  # one token; unknown pairs; nothing follows in the store
        begin(drafter, context)
        assert len(ask(drafter, context)) == 0
    many = RestDrafter(path=stored(tmp_path, [[4, 3]] * 300), max_continuations=300)
    begin(many, [4, 3])
    assert len(ask(many, [4, 3])) == 0


def test_many_continuations_count_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    documents = [[1, 2, *rng.integers(3, 7, 4).tolist()] for _ in range(600)]
    path = stored(tmp_path, documents)
    tree = None
    for limit in (128, 5000):
        drafter = RestDrafter(path=path, max_continuations=limit)
        begin(drafter, [1, 2])
        tree = ask(drafter, [1, 2], 40)
        assert tree.evidence["parent_count"][0] == (120 if limit == 128 else 600)  # every fifth, or all
    assert tree is not None
    expected = Counter(tuple(d[2 : 2 + n]) for d in documents for n in range(1, 5)).most_common(40)
    assert sorted(tree.evidence["count"].tolist()) == sorted(float(count) for _, count in expected)


def test_past_outputs_are_found_and_prompts_only_on_demand() -> None:
    for include in (False, True):
        drafter = RestDrafter(include_prompts=include)
        request(drafter, [1, 2, 3, 4, 5, 6, 7], prompt=3)  # the first generated token is 4
        begin(drafter, [9, 4, 5])
        assert ask(drafter, [9, 4, 5]).token_ids.tolist() == [6, 7]
        begin(drafter, [9, 1, 2])
        assert ask(drafter, [9, 1, 2]).token_ids.tolist() == ([3, 4, 5, 6, 7] if include else [])


def test_a_request_does_not_see_itself() -> None:
    drafter = RestDrafter()
    begin(drafter, [1, 2, 3])
    commit(drafter, [1, 2])
    assert len(ask(drafter, [1, 2, 3, 1, 2])) == 0


def test_an_aborted_request_is_not_stored() -> None:
    drafter = RestDrafter()
    begin(drafter, [1, 2])
    commit(drafter, [3, 4])
    begin(drafter, [2, 3])
    assert len(ask(drafter, [2, 3])) == 0
    drafter.finish()
    drafter.finish()
    assert len(drafter.past) == 1


def test_datastore_and_past_outputs_together(tmp_path: Path) -> None:
    path = stored(tmp_path, [[1, 2, 3], [1, 2, 4]])
    for grow, expected in ((True, {(5,), (3,), (4,)}), (False, {(3,), (4,)}), (None, {(3,), (4,)})):
        drafter = RestDrafter(path=path, grow=grow)
        request(drafter, [0, 1, 2, 5], prompt=1)
        begin(drafter, [1, 2])
        assert paths(ask(drafter, [1, 2])).keys() == expected
    drafter.reset()
    begin(drafter, [1, 2])
    assert len(ask(drafter, [1, 2])) == 2


def test_large_token_ids(tmp_path: Path) -> None:
    document = [65_537, 131_071, 99_999, 65_536]
    from_file = RestDrafter(path=stored(tmp_path, [document], vocab_size=131_072))
    grown = RestDrafter()
    request(grown, [0, *document])
    for drafter in (from_file, grown):
        drafter.bind(Vocabulary(131_072))
        begin(drafter, document[:2])
        assert ask(drafter, document[:2]).token_ids.tolist() == document[2:]
        begin(drafter, [1, 65_535])  # 131,071 and 65,535 are the same in 16 bits
        assert len(ask(drafter, [1, 65_535])) == 0


def test_memory_is_bounded() -> None:
    drafter = RestDrafter(max_tokens=200)
    rng = np.random.default_rng(0)
    for _ in range(60):
        request(drafter, rng.integers(0, 50, 30).tolist())
        assert len(drafter.past) <= 200
        assert sum(index.tokens.nbytes + index.order.nbytes for index in drafter.past.indices()) <= 2 * 4 * (200 + 60)


def test_committed_tokens_correct_the_scores(tmp_path: Path) -> None:
    path = stored(tmp_path, [[1, 2, 3, 4]])
    drafter = RestDrafter(path=path)
    begin(drafter, [1, 2])
    before = ask(drafter, [1, 2]).scores
    commit(drafter, [9])  # 3 was offered after 2 matching tokens, and wrong
    begin(drafter, [1, 2])
    after = ask(drafter, [1, 2]).scores
    assert after[0] < before[0] and after[1] - after[0] == pytest.approx(before[1] - before[0])
    commit(drafter, [3, 9])  # right; then 4 after 3 matching tokens, wrong
    begin(drafter, [1, 2])
    last = ask(drafter, [1, 2]).scores
    assert last[0] > after[0] and last[1] - last[0] < after[1] - after[0]


def test_only_continuations_that_agree_so_far_count(tmp_path: Path) -> None:
    drafter = RestDrafter(path=stored(tmp_path, [[1, 2, 3, 4], [1, 2, 5, 6]]))
    begin(drafter, [1, 2])
    ask(drafter, [1, 2])
    commit(drafter, [3, 6])  # 6 was retrieved, but after 5
    acceptance = drafter.state_dict()["acceptance"]
    first, second = situation(2, 2), situation(3, 1)
    assert acceptance["trials"][[first, second]].tolist() == [1, 1] and acceptance["trials"].sum() == 2
    assert acceptance["hits"][[first, second], 0].tolist() == [1, 0]


def test_nothing_is_counted_where_nothing_was_offered(tmp_path: Path) -> None:
    drafter = RestDrafter(path=stored(tmp_path, [[1, 2, 3]]))
    kept = drafter.state_dict()["acceptance"]["trials"].copy()
    begin(drafter, [1, 2])
    commit(drafter, [3])  # no proposal was asked for
    ask(drafter, [1, 2, 3])
    commit(drafter, [4])  # it declined
    begin(drafter, [1, 2])
    ask(drafter, [1, 2])
    commit(drafter, [3, 5])  # one trial; the store ends there
    assert (drafter.state_dict()["acceptance"]["trials"] - kept).sum() == 1


@pytest.mark.parametrize(
    ("length", "count", "row"),
    [
        (1, 1, (0, 0)),
        (2, 3, (0, 1)),
        (5, 1, (2, 0)),
        (6, 15, (3, 2)),
        (15, 16, (5, 3)),
        (16, 999, (6, 3)),
        (40, 1, (6, 0)),
    ],
)
def test_situations(length: int, count: int, row: tuple[int, int]) -> None:
    assert situation(length, count) == np.ravel_multi_index(row, CONTINUED.shape)


def trained() -> RestDrafter:
    drafter = RestDrafter(max_tokens=100)
    rng = np.random.default_rng(1)
    for _ in range(12):
        tokens = rng.integers(0, 4, 14).tolist()
        begin(drafter, tokens[:2])
        for end in range(2, 14):
            ask(drafter, tokens[:end])
            commit(drafter, tokens[end : end + 1])
        drafter.finish()
    return drafter


def test_state_restores_the_same_drafts() -> None:
    drafter = trained()
    copy = RestDrafter(max_tokens=100)
    copy.load_state_dict(drafter.state_dict())
    rng = np.random.default_rng(2)
    for _ in range(8):
        tokens = rng.integers(0, 4, 12).tolist()
        for d in (drafter, copy):
            begin(d, tokens)
        a, b = ask(drafter, tokens), ask(copy, tokens)
        assert paths(a) == paths(b) and a.token_ids.tolist() == b.token_ids.tolist()
        for d in (drafter, copy):
            commit(d, [1, 2])
            d.finish()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments": [1]}, "segments of the state must add up"),
        ({"segments": [0]}, "segments of the state must be >= 1"),
        ({"segments": "x"}, "segments of the state must be a list"),
        ({"outputs": [np.zeros(101, np.int32)], "segments": [1]}, "at most 100 tokens, got 101"),
        ({"drafter": "suffix"}, "must be of drafter 'rest', got one of 'suffix'"),
        ({"settings": {"max_tokens": 7}}, "max_tokens of the state must be 100"),
        ({"acceptance": {"hits": 1}}, "must have the keys hits and trials"),
    ],
)
def test_damaged_states_are_refused(change: dict[str, Any], message: str) -> None:
    drafter = trained()
    before = len(drafter.past)
    with pytest.raises(ValueError, match=message):
        drafter.load_state_dict({**drafter.state_dict(), **change})
    assert len(drafter.past) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grow": 1}, "grow must be True, False or None, got 1"),
        ({"include_prompts": 1}, "include_prompts must be True or False, got 1"),
        ({"shortest": 0}, r"shortest must be in \[1, 16\], got 0"),
        ({"longest": 17}, r"longest must be in \[2, 16\], got 17"),
        ({"longest": 2, "shortest": 3}, r"longest must be in \[3, 16\], got 2"),
        ({"depth": 0}, "depth must be >= 1, got 0"),
        ({"max_continuations": 0}, "max_continuations must be >= 1, got 0"),
        ({"max_tokens": -1}, "max_tokens must be >= 0, got -1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RestDrafter(**options)


def test_a_store_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    drafter = make_drafter(f"rest:{stored(tmp_path, [[1, 2, 3]])}")
    with pytest.raises(ValueError, match="a vocabulary of 100, the target has 99"):
        drafter.bind(Vocabulary(99))
    drafter.bind(Vocabulary(128))


def test_a_missing_or_foreign_store_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        make_drafter(f"rest:{tmp_path / 'missing'}")
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not a datastore"):
        make_drafter(f"rest:{tmp_path / 'other'}")
    build_datastore([[1]], tmp_path / "store", vocab_size=9, tokenizer_fingerprint="first")
    with pytest.raises(ValueError, match="another tokenizer"):
        RestDrafter(path=tmp_path / "store", tokenizer_fingerprint="second")
