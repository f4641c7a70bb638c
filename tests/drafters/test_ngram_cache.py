"""The n-gram cache drafter: which cache decides, and what becomes of past outputs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.drafters import make_drafter
from adaptspec.drafters.ngram_cache import LAX, STRICT, NgramCacheDrafter
from adaptspec.drafters.ngram_counts import EMPTY_HISTORY, NgramCounts, NgramThresholds
from tests.drafters.driving import Vocabulary, ask, begin, commit, examples, paths, request

texts = st.lists(st.integers(0, 2), min_size=2, max_size=30)


def static_file(folder: Path, sequences: list[list[int]], *, size: int = 2) -> Path:
    counts = NgramCounts(size, size)
    for sequence in sequences:
        counts.extend(EMPTY_HISTORY, sequence)
    path = folder / "counts.npz"
    counts.save(path)
    return path


@examples
@given(texts, st.lists(texts, max_size=3))
def test_a_greedy_chain_is_the_one_a_scan_finds(text: list[int], past: list[list[int]]) -> None:
    drafter = NgramCacheDrafter(branches=1)
    for output in past:
        request(drafter, output, prompt=0)
    begin(drafter, text)
    draft = ask(drafter, text, 10).token_ids.tolist()
    so_far: list[int] = []
    for token in [*draft, -1]:
        # Only the committed text is counted; drafted tokens extend the n-gram, not the counts.
        expected = decided_by_scan(text, so_far, past)
        if expected is None or len(so_far) == 10:
            break
        assert token == expected
        so_far.append(token)


def decided_by_scan(text: list[int], draft: list[int], past: list[list[int]]) -> int | None:
    extended = text + draft
    for sequences, thresholds in (([text], LAX), (past, STRICT)):
        for size in (4, 3, 2, 1):
            if len(extended) < size:
                continue
            ngram = extended[len(extended) - size :]
            followers = [
                sequence[i + size]
                for sequence in sequences
                for i in range(len(sequence) - size)
                if sequence[i : i + size] == ngram
            ]
            if len(followers) < thresholds.min_counts[size - 1]:
                continue
            most = max(map(followers.count, followers))
            if 100 * most >= thresholds.min_percents[size - 1] * len(followers):
                tied = {token for token in followers if followers.count(token) == most}
                return tied.pop() if len(tied) == 1 else None
    return -1


def test_the_context_goes_before_the_dynamic_cache() -> None:
    drafter = NgramCacheDrafter(branches=1)
    for _ in range(5):
        request(drafter, [1, 2, 3, 7], prompt=0)
    assert drafts_after(drafter, [1, 2, 3]) == [7]
    assert drafts_after(drafter, [1, 2, 3, 8, 1, 2, 3]) == [8, 1, 2, 3, 8, 1]


def drafts_after(drafter: NgramCacheDrafter, text: list[int], budget: int = 6) -> list[int]:
    begin(drafter, text)
    return ask(drafter, text, budget).token_ids.tolist()


def test_the_dynamic_cache_is_strict_where_the_context_is_lax() -> None:
    drafter = NgramCacheDrafter(branches=1)
    request(drafter, [1, 2, 3, 4, 7], prompt=0)
    assert drafts_after(drafter, [1, 2, 3, 4]) == []  # one occurrence is enough in the context only
    assert drafts_after(drafter, [1, 2, 3, 4, 7, 1, 2, 3, 4], 1) == [7]
    request(drafter, [1, 2, 3, 4, 7], prompt=0)
    assert drafts_after(drafter, [1, 2, 3, 4]) == [7]


def test_only_outputs_are_remembered() -> None:
    drafter = NgramCacheDrafter(branches=1)
    for _ in range(4):
        request(drafter, [1, 2, 3, 4, 5, 6, 7, 8], prompt=4)
    assert drafts_after(drafter, [1, 2, 3]) == []
    assert drafts_after(drafter, [5, 6]) == [7, 8]


def test_past_outputs_leave_first_in_first_out() -> None:
    drafter = NgramCacheDrafter(branches=1, max_past_tokens=13)
    for output in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [6, 7, 8]):
        request(drafter, output, prompt=0)
    assert drafts_after(drafter, [1, 2, 3, 4]) == [5]
    request(drafter, [6, 7, 8], prompt=0)  # 16 tokens: the oldest five leave
    assert drafts_after(drafter, [1, 2, 3, 4]) == []
    assert drafts_after(drafter, [6, 7]) == []  # bigrams need three occurrences
    request(drafter, [6, 7, 8], prompt=0)
    assert drafts_after(drafter, [6, 7]) == [8]
    assert drafter._past_tokens == 9
    request(drafter, list(range(100, 140)), prompt=0)  # of a longer output the end is kept
    assert drafter._past_tokens == 13 and list(drafter._past) == [list(range(127, 140))]
    assert len(drafter._dynamic) == 12 + 11 + 10 + 9


def test_a_static_cache_is_asked_last_and_prefers_among_the_others(tmp_path: Path) -> None:
    path = static_file(tmp_path, [[1, 2, 9], [1, 2, 9], [1, 2, 5], [4, 4, 6], [4, 4, 6]])
    drafter = make_drafter(f"ngram-cache:{path}", branches=1)
    assert drafts_after(drafter, [1, 2]) == [9]
    assert drafts_after(drafter, [1, 2, 5, 1, 2], 1) == [9]  # the context has too little evidence
    assert drafts_after(drafter, [1, 2, 5, 1, 2, 5, 1, 2], 1) == [5]
    assert drafts_after(drafter, [1, 2, 9, 1, 2, 7, 1, 2], 1) == [9]
    assert drafts_after(drafter, [1, 2, 7, 1, 2, 9, 1, 2], 1) == [9]
    plain = NgramCacheDrafter(branches=1)
    assert drafts_after(plain, [1, 2, 7, 1, 2, 9, 1, 2], 1) == [7]
    drafter.reset()
    assert drafts_after(drafter, [4, 4]) == [6], "reset forgets what was learnt, not what was given"


def test_scores_multiply_and_evidence_is_what_was_counted() -> None:
    drafter = NgramCacheDrafter(branches=2, max_ngram=2, lax=NgramThresholds((1, 1), (0, 0)))
    text = [1, 2, 1, 2, 1, 3, 1]
    begin(drafter, text)
    tree = ask(drafter, text, 3)
    # Bigram (3, 1) is new; 1 was followed by 2, 2, 3: three times, two distinct, context of one token.
    found = paths(tree)
    assert found[(2,)] == pytest.approx(math.log(2 / 5))
    assert found[(3,)] == pytest.approx(math.log(1 / 5))
    # Bigram (1, 2) was followed by 1 twice, context of two tokens.
    assert found[(2, 1)] == pytest.approx(math.log(2 / 5) + math.log(2 / 2.5))
    assert {name: column.tolist() for name, column in tree.evidence.items()} == {
        "match_length": [1.0, 2.0, 1.0],
        "count": [2.0, 2.0, 1.0],
        "parent_count": [3.0, 2.0, 3.0],
        "rank": [0.0, 0.0, 1.0],
    }


def test_agreement_over_the_whole_ngram_grows_more_certain() -> None:
    text = [*range(20), 0, 1, 2, 3]
    drafter = NgramCacheDrafter()
    begin(drafter, text)
    tree = ask(drafter, text, 3)
    assert tree.scores == pytest.approx([math.log(4 / 5), math.log(4 / 6), math.log(4 / 7)])


def test_branches_share_the_budget_best_first() -> None:
    drafter = NgramCacheDrafter(branches=3, lax=NgramThresholds((1, 1, 1, 1), (0, 0, 0, 0)))
    text = [1, 2, 1, 2, 1, 3, 1, 4, 1]
    begin(drafter, text)
    tree = ask(drafter, text, 8)
    assert [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == -1] == [2, 3, 4]
    assert (tree.scores[:-1] >= tree.scores[1:]).all(), "nodes come in the order of their scores"


def test_vocabularies_must_fit(tmp_path: Path) -> None:
    drafter = make_drafter("ngram-cache", path=static_file(tmp_path, [[1, 2, 300]]))
    with pytest.raises(ValueError, match=r"the static cache must hold token ids in \[0, 300\), got 300"):
        drafter.bind(Vocabulary(300))
    drafter.bind(Vocabulary(301))
    request(drafter, [1, 2, 3])
    with pytest.raises(ValueError, match="call reset"):
        drafter.bind(Vocabulary(500))
    drafter.reset()
    drafter.bind(Vocabulary(500))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ngram": 17}, "max_ngram must be in"),
        ({"min_ngram": 5}, "min_ngram must be in"),
        ({"max_ngram": 5}, "lax must be NgramThresholds for sizes up to 5"),
        ({"strict": NgramThresholds((1,), (1,))}, "strict must be NgramThresholds for sizes up to 4"),
        ({"branches": 0}, "branches must be >= 1"),
        ({"max_past_tokens": -1}, "max_past_tokens must be >= 0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter("ngram-cache", **options)


def test_static_ngrams_must_not_be_longer_than_the_others(tmp_path: Path) -> None:
    path = static_file(tmp_path, [[1, 2, 3, 4]], size=3)
    with pytest.raises(ValueError, match="must be at most 2 tokens long"):
        make_drafter("ngram-cache", path=path, max_ngram=2)


def test_states_with_too_many_tokens_are_refused() -> None:
    drafter = NgramCacheDrafter(max_past_tokens=10)
    request(drafter, [1, 2, 3], prompt=0)
    state = drafter.state_dict()
    with pytest.raises(ValueError, match="max_past_tokens of the state must be 5"):
        NgramCacheDrafter(max_past_tokens=5).load_state_dict(state)
    state["outputs"] = state["outputs"] * 4
    with pytest.raises(ValueError, match="must be at most 10 tokens, got 12"):
        drafter.load_state_dict(state)


def test_the_context_is_released() -> None:
    drafter = NgramCacheDrafter()
    begin(drafter, [1, 2, 3])
    commit(drafter, [4, 5])
    drafter.finish()
    assert drafter._context is None and drafter._output == []
