"""Lookahead: the window's layout, how it moves, the pool, and whole requests on targets that are known functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.drafters.lookahead import FIRST_SIBLING, LookaheadDrafter, NgramPool, spread_tokens, window_layout
from adaptspec.types import DraftContext, DraftTree, ExtraRows, Observation, Sampling, Verdict
from tests.drafters.driving import ask, begin, commit, examples, paths

Next = Callable[[Sequence[int]], int]


def context_of(tokens: Sequence[int], *, max_depth: int = 100) -> DraftContext:
    return DraftContext(tokens[-1], len(tokens), max_depth, Sampling(), np.random.default_rng(0))


def visible_tokens(rows: ExtraRows, row: int) -> list[int]:
    """The tokens after the root that a row sees, by position; itself the last one."""
    seen = np.flatnonzero(rows.visible[row])
    by_depth = sorted((int(rows.depths[i]), int(rows.token_ids[i]), int(i)) for i in seen)
    assert [depth for depth, _, _ in by_depth] == list(range(1, len(by_depth) + 1)), "positions have a gap or collide"
    assert by_depth[-1][2] == row, "a row must stand at the end of what it sees"
    return [token for _, token, _ in by_depth]


def follow(tree: DraftTree, committed: Sequence[int], following: Next) -> tuple[list[int], list[int]]:
    """Accepted nodes and committed tokens of a greedy step."""
    path: list[int] = []
    text = list(committed)
    while True:
        text.append(following(text))
        above = path[-1] if path else -1
        found = np.flatnonzero((tree.parents == above) & (tree.token_ids == text[-1]))
        if not len(found):
            return path, text[len(committed) :]
        path.append(int(found[0]))


def step(
    drafter: LookaheadDrafter, committed: list[int], following: Next, *, budget: int = 64, rows_fit: bool = True
) -> list[int]:
    """One greedy step of a target that is the function `following`; the tokens it committed."""
    tree = ask(drafter, committed, budget)
    rows = drafter.extra_rows(context_of(committed), budget) if rows_fit else None
    argmax = None
    if rows is not None:
        seen = [committed + visible_tokens(rows, row) for row in range(len(rows.token_ids))]
        argmax = np.asarray([following(text) for text in seen], np.int64)
    path, tokens = follow(tree, committed, following)
    ids = np.asarray(tokens, np.int64)
    drafter.observe(Observation(tree, Verdict(np.asarray(path, np.int64), ids), ids, extra_argmax=argmax))
    committed += tokens
    return tokens


def scramble(text: Sequence[int]) -> int:
    """The next token depends on the last one only: a walk over 0 .. 100."""
    return (text[-1] * 7 + 3) % 101


def periodic(text: Sequence[int]) -> int:
    """Counts to 11 and starts again, whatever came before the last token."""
    return (text[-1] + 1) % 12


def two_back(text: Sequence[int]) -> int:
    """The next token depends on the last two."""
    return (3 * text[-1] + text[-2] + 1) % 23


def test_layout_of_two_levels_and_three_columns() -> None:
    depths, visible = window_layout(2, 3)
    # Rows: level 0 columns 1, 2 (column 0 is the root), level 1 columns 0, 1, 2.
    assert depths.tolist() == [1, 2, 1, 2, 3]
    assert visible.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]


@given(st.integers(1, 6), st.integers(2, 10))
@examples
def test_every_row_sees_one_gapless_sequence(levels: int, columns: int) -> None:
    depths, visible = window_layout(levels, columns)
    count = levels * columns - 1
    assert depths.shape == (count,) and visible.shape == (count, count) and visible.diagonal().all()
    # Token ids that name level and column, so that what is seen can be read off.
    token_ids = np.arange(1, levels * columns)
    rows = ExtraRows(token_ids, depths, visible)
    for row, name in enumerate(token_ids.tolist()):
        level, column = divmod(name, columns)
        expected = [*range(1, column + 1), *(above * columns + column for above in range(1, level + 1))]
        assert visible_tokens(rows, row) == expected
        assert depths[row] == level + column


def test_the_window_by_hand() -> None:
    drafter = LookaheadDrafter(window=2, ngram=3, guesses=2, pool_from_prompt=False)
    prompt = [10, 20, 30, 35, 40]
    begin(drafter, prompt)
    first = drafter.extra_rows(context_of(prompt), 8)
    assert first is not None
    a, b = spread_tokens(prompt, 2)
    assert (a, b) == (35, 20)
    assert first.token_ids.tolist() == [a, b] and first.depths.tolist() == [1, 2]
    observe(drafter, [50], extra=[61, 62])
    # New tokens: 50 after the root 40, 61 after a, 62 after b. The window is not full, so level 0 stays, and all of it
    # moves one place to the left: the root takes the place of a.
    assert sorted(drafter.pool.ngrams()) == sorted([(40, 50), (a, 61), (b, 62)])
    second = drafter.extra_rows(context_of([*prompt, 50]), 8)
    assert second is not None
    assert second.token_ids.tolist() == [b, 61, 62] and second.depths.tolist() == [1, 1, 2]
    observe(drafter, [61], extra=[0, 71, 72])
    # Column 0 was guessed to hold a, but holds the root 50: its n-gram starts after it.
    assert set(drafter.pool.ngrams()) == {(40, 50), (a, 61), (61, 71), (b, 62, 72)}
    third = drafter.extra_rows(context_of([*prompt, 50, 61]), 8)
    assert third is not None
    assert third.token_ids.tolist() == [62, 71, 72] and third.depths.tolist() == [1, 1, 2]
    observe(drafter, [51, 62], extra=[0, 81, 82])
    # Now the root is what column 0 had guessed.
    assert (61, 71, 81) in drafter.pool.ngrams() and (62, 72, 82) in drafter.pool.ngrams()
    last = drafter.extra_rows(context_of([*prompt, 50, 61, 51, 62]), 8)
    assert last is not None
    assert last.token_ids.tolist() == [72, 81, 82]


def observe(drafter: LookaheadDrafter, tokens: list[int], *, extra: list[int] | None) -> None:
    ids = np.asarray(tokens, np.int64)
    verdict = Verdict(np.arange(len(ids) - 1), ids)
    argmax = None if extra is None else np.asarray(extra, np.int64)
    drafter.observe(Observation(DraftTree.chain(ids[:-1]), verdict, ids, extra_argmax=argmax))


@pytest.mark.parametrize(("window", "ngram", "guesses"), [(7, 5, 7), (2, 2, 1), (3, 4, 2), (5, 3, 7), (2, 6, 3)])
def test_pooled_ngrams_are_what_the_target_would_write(window: int, ngram: int, guesses: int) -> None:
    drafter = LookaheadDrafter(window=window, ngram=ngram, guesses=guesses, pool_from_prompt=False)
    committed = [5, 17, 90, 2]
    begin(drafter, committed)
    for _ in range(40):
        step(drafter, committed, scramble)
        for key, *tail in drafter.pool.ngrams():
            text = [key]
            for token in tail:
                text.append(scramble(text))
                assert token == text[-1]
    assert committed[4:] == [scramble(committed[i - 1 : i]) for i in range(4, len(committed))]
    assert max(len(gram) for gram in drafter.pool.ngrams()) == ngram


@pytest.mark.parametrize("following", [periodic, two_back])
def test_texts_that_repeat_are_accepted_in_blocks(following: Next) -> None:
    drafter = LookaheadDrafter(pool_from_prompt=False)
    committed = [3, 4]
    begin(drafter, committed)
    lengths = [len(step(drafter, committed, following)) for _ in range(60)]
    assert lengths[0] == 1
    assert np.mean(lengths[20:]) > 3
    assert max(lengths) == 5  # N - 1 drafted tokens and the bonus token


def test_jacobi_rows_find_a_text_in_which_nothing_comes_twice() -> None:
    drafter = LookaheadDrafter(pool_from_prompt=False)
    committed = [0]
    begin(drafter, committed)
    lengths = []
    while len(committed) < 500:
        lengths.append(len(step(drafter, committed, len)))  # the next token is the position: rows must stand right
    assert committed == list(range(len(committed)))
    assert sum(lengths) / len(lengths) > 1.5


def test_rows_do_not_depend_on_what_was_accepted() -> None:
    drafters = [LookaheadDrafter(pool_from_prompt=False) for _ in range(2)]
    histories = [[1, 2, 3], [1, 2, 3]]
    for drafter, history in zip(drafters, histories, strict=True):
        begin(drafter, history)
    for number in range(6):
        given_rows = [d.extra_rows(context_of(h), 8) for d, h in zip(drafters, histories, strict=True)]
        a, b = given_rows
        assert a is not None and b is not None
        assert a.token_ids.tolist() == b.token_ids.tolist() and (a.visible == b.visible).all()
        extra = [(number * 50 + i) % 97 for i in range(len(a.token_ids))]
        for drafter, history, tokens in zip(drafters, histories, ([7], [7, 8, 9]), strict=True):
            observe(drafter, tokens, extra=extra)
            history += tokens


def test_asking_again_gives_the_same_rows() -> None:
    drafter = LookaheadDrafter(pool_from_prompt=False)
    committed = [3, 4, 5]
    begin(drafter, committed)
    for _ in range(6):
        first = drafter.extra_rows(context_of(committed), 8)
        ask(drafter, committed)
        again = drafter.extra_rows(context_of(committed), 64)
        assert first is not None and again is not None
        assert first.token_ids.tolist() == again.token_ids.tolist()
        step(drafter, committed, periodic)


def test_full_window_size() -> None:
    drafter = LookaheadDrafter()
    committed = list(range(20))
    begin(drafter, committed)
    sizes = []
    for _ in range(6):
        rows = drafter.extra_rows(context_of(committed), 8)
        assert rows is not None
        sizes.append(len(rows.token_ids))
        step(drafter, committed, periodic)
    assert sizes == [9, 17, 23, 27, 27, 27]


def test_steps_without_rows_leave_the_window() -> None:
    drafter = LookaheadDrafter(pool_from_prompt=False)
    committed = [3, 4, 5]
    begin(drafter, committed)
    for _ in range(5):
        step(drafter, committed, periodic)
    before = drafter.extra_rows(context_of(committed), 8)
    grams = drafter.pool.ngrams()
    step(drafter, committed, periodic, rows_fit=False)  # another drafter's step
    drafter.extra_rows(context_of(committed), 8)
    observe(drafter, [periodic(committed)], extra=None)  # asked for, but there was no room
    committed.append(periodic(committed))
    after = drafter.extra_rows(context_of(committed), 8)
    assert before is not None and after is not None
    assert before.token_ids.tolist() == after.token_ids.tolist() and drafter.pool.ngrams() == grams


def test_values_for_rows_that_were_not_asked_for_are_ignored() -> None:
    drafter = LookaheadDrafter(pool_from_prompt=False)
    begin(drafter, [3, 4, 5])
    observe(drafter, [6], extra=[0] * 9)
    assert drafter.pool.ngrams() == []
    rows = drafter.extra_rows(context_of([3, 4, 5, 6]), 8)
    assert rows is not None and len(rows.token_ids) == 9
    observe(drafter, [7], extra=list(range(10, 19)))
    grams = drafter.pool.ngrams()
    assert grams
    observe(drafter, [8], extra=list(range(30, 47)))  # as many as there would be rows now
    assert drafter.pool.ngrams() == grams


def test_no_rows_for_the_last_token() -> None:
    drafter = LookaheadDrafter()
    begin(drafter, [1, 2])
    assert drafter.extra_rows(context_of([1, 2], max_depth=1), 8) is None
    observe(drafter, [3], extra=None)
    assert drafter.extra_rows(context_of([1, 2, 3], max_depth=2), 8) is not None


def test_values_for_other_rows_are_refused() -> None:
    drafter = LookaheadDrafter()
    begin(drafter, [1, 2])
    drafter.extra_rows(context_of([1, 2]), 8)
    with pytest.raises(ValueError, match="extra_argmax must have 9 entries, one per extra row, got 3"):
        observe(drafter, [3], extra=[1, 2, 3])


def test_the_draft_by_hand() -> None:
    drafter = LookaheadDrafter(pool_from_prompt=False)
    begin(drafter, [9, 1])
    for tail in [(2, 3, 4), (2, 5), (6,)]:
        drafter.pool.add(1, tail)
    tree = ask(drafter, [9, 1])
    # The most recent guess first: 6 is sibling 0, 2 is sibling 1; below 2 first 5, then 3.
    second = [0.6 * 0.5 * (1 - first) for first in FIRST_SIBLING]
    expected = {
        (6,): FIRST_SIBLING[0],
        (2,): second[0],
        (2, 5): second[0] * FIRST_SIBLING[1],
        (2, 3): second[0] * second[1],
        (2, 3, 4): second[0] * second[1] * FIRST_SIBLING[2],
    }
    assert {path: np.exp(score) for path, score in paths(tree).items()} == pytest.approx(expected)
    assert tree.token_ids.tolist() == [6, 2, 5, 3, 4]
    assert tree.evidence["rank"].tolist() == [0, 1, 0, 1, 0]
    assert tree.evidence["count"].tolist() == [1, 2, 1, 1, 1]
    assert tree.evidence["parent_count"].tolist() == [3, 3, 2, 2, 1]
    assert ask(drafter, [9, 1], 2).token_ids.tolist() == [6, 2]
    assert ask(drafter, [9, 1], max_depth=1).token_ids.tolist() == [6, 2]


def test_without_evidence_it_declines() -> None:
    drafter = LookaheadDrafter(pool_from_prompt=False)
    begin(drafter, [1, 2, 1, 2, 1, 2, 1])
    assert len(ask(drafter, [1, 2, 1, 2, 1, 2, 1])) == 0


def test_ngrams_of_the_committed_text() -> None:
    drafter = LookaheadDrafter(ngram=3)
    text = [1, 2, 3, 4]
    begin(drafter, text)
    assert drafter.pool.ngrams() == [(1, 2, 3), (2, 3, 4)]
    commit(drafter, [5, 1])
    assert drafter.pool.ngrams() == [(1, 2, 3), (2, 3, 4), (3, 4, 5), (4, 5, 1)]
    assert ask(drafter, [*text, 5, 1]).token_ids.tolist() == [2, 3]
    drafter.finish()
    begin(drafter, [1])
    assert len(ask(drafter, [1])) == 0


def test_committed_tokens_correct_the_scores() -> None:
    drafter = LookaheadDrafter(ngram=3)
    text = [1, 2, 3, 1]
    begin(drafter, text)
    before = ask(drafter, text).scores
    commit(drafter, [2, 9])  # 2 was right, 3 wrong
    begin(drafter, text)
    after = ask(drafter, text).scores
    assert after[0] > before[0] and after[1] - after[0] < before[1] - before[0]


def test_the_pool_keeps_the_latest_guesses() -> None:
    pool = NgramPool(guesses=2, max_keys=10)
    for tail in [(1, 2), (3, 4), (1, 2), (5, 6)]:
        pool.add(0, tail)
    assert pool.get(0) == [(5, 6), (1, 2)]  # (1, 2) was seen again after (3, 4)
    assert pool.get(7) == []


def test_the_pool_keeps_the_longer_of_two_guesses_that_agree() -> None:
    pool = NgramPool(guesses=3, max_keys=10)
    pool.add(0, (1, 2, 3))
    pool.add(0, (4,))
    pool.add(0, (1, 2))
    assert pool.get(0) == [(1, 2, 3), (4,)]
    pool.add(0, (4, 5))
    assert pool.get(0) == [(4, 5), (1, 2, 3)]


def test_the_pool_is_bounded() -> None:
    pool = NgramPool(guesses=3, max_keys=5)
    for i in range(1000):
        pool.add(i % 9, (i, i + 1))
        assert len(pool) <= 5 and all(len(pool.get(key)) <= 3 for key in range(9))
    assert list(dict.fromkeys(gram[0] for gram in pool.ngrams())) == [5, 6, 7, 8, 0]  # 999 % 9 == 0
    pool.add(5, (0, 0))
    pool.add(77, (1, 1))
    assert pool.get(5) and pool.get(77) and not pool.get(6)


@examples
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=3)), max_size=40))
def test_adding_a_pools_ngrams_rebuilds_it(added: list[tuple[int, list[int]]]) -> None:
    pool, copy = (NgramPool(guesses=3, max_keys=3) for _ in range(2))
    for key, tail in added:
        pool.add(key, tuple(tail))
        tails = pool.get(key)
        assert not any(a != b and a == b[: len(a)] for a in tails for b in tails), "a guess is contained in another"
    for key, *tail in pool.ngrams():
        copy.add(key, tuple(tail))
    assert copy.ngrams() == pool.ngrams()
    assert [copy.get(key) for key in range(4)] == [pool.get(key) for key in range(4)]


def test_a_kept_pool_is_part_of_the_state() -> None:
    drafter = LookaheadDrafter(keep_pool=True, max_keys=40)
    committed = [3, 4, 5, 6, 7]
    begin(drafter, committed)
    for _ in range(30):
        step(drafter, committed, scramble)
    drafter.finish()
    copy = LookaheadDrafter(keep_pool=True, max_keys=40)
    copy.load_state_dict(drafter.state_dict())
    for d in (drafter, copy):
        begin(d, committed[:10])
    assert len(ask(drafter, committed[:10])) > 0
    assert paths(ask(drafter, committed[:10])) == paths(ask(copy, committed[:10]))
    forgetful = LookaheadDrafter()
    with pytest.raises(ValueError, match="keep_pool of the state must be 0 as in this drafter, got 1"):
        forgetful.load_state_dict(drafter.state_dict())


def test_foreign_ngrams_are_refused() -> None:
    drafter = LookaheadDrafter(keep_pool=True)
    state = drafter.state_dict()
    for wrong in ([1], [1, 2, 3, 4, 5, 6]):
        with pytest.raises(ValueError, match="must be n-grams of 2 to 5 tokens"):
            drafter.load_state_dict({**state, "outputs": [np.asarray(wrong, np.int32)]})
    with pytest.raises(ValueError, match="must be a mapping with the key acceptance"):
        drafter.load_state_dict({key: value for key, value in state.items() if key != "acceptance"})


def test_first_tokens_of_the_window_are_spread_over_the_prompt() -> None:
    prompt = list(range(100, 200))
    chosen = spread_tokens(prompt, 10)
    assert chosen == spread_tokens(prompt, 10) and len(set(chosen)) == 10
    assert np.ptp(chosen) > 80
    assert spread_tokens([7], 3) == [7, 7, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1}, "window must be >= 2, got 1"),
        ({"ngram": 1}, "ngram must be >= 2, got 1"),
        ({"guesses": 0}, "guesses must be >= 1, got 0"),
        ({"max_keys": 0}, "max_keys must be >= 1, got 0"),
        ({"window": 2.5}, "window must be a whole number"),
        ({"keep_pool": 1}, "keep_pool must be True or False, got 1"),
        ({"pool_from_prompt": None}, "pool_from_prompt must be True or False, got None"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LookaheadDrafter(**options)
