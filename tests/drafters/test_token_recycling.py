"""Token Recycling: what is written to the matrix, how it is read out, scores and state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptspec.drafters.token_recycling import (
    EMPTY,
    RANK_ACCEPTANCE,
    SUCCESSORS,
    TokenRecyclingDrafter,
    prompt_successors,
)
from adaptspec.trees import fill_by_successor, greedy_template
from adaptspec.types import DraftTree, Observation, Verdict
from tests.drafters.driving import Vocabulary, ask, begin, commit, examples, paths


def tell(
    drafter: TokenRecyclingDrafter, tree: DraftTree, accepted: list[int], tokens: list[int], top: list[list[int]]
) -> None:
    """One step whose verify pass gave `top`, one row for the root and one per node."""
    ids = np.asarray(tokens, np.int64)
    verdict = Verdict(np.asarray(accepted, np.int64), ids)
    drafter.observe(Observation(tree, verdict, ids, target_top_ids=np.asarray(top, np.int64)))


def eight(*tokens: int) -> list[int]:
    """A row of 8 successors that starts with `tokens`."""
    return [*tokens, *range(90, 98)][:SUCCESSORS]


def bare(**options: Any) -> TokenRecyclingDrafter:
    return TokenRecyclingDrafter(seed_from_prompt=False, **options)


def test_all_verified_nodes_fill_the_matrix() -> None:
    drafter = bare()
    begin(drafter, [50, 1])
    assert len(ask(drafter, [50, 1])) == 0
    # The root 1 was verified with two drafted children, 2 (accepted) and 3 (rejected).
    tree = DraftTree(np.array([2, 3]), np.array([-1, -1]), np.zeros(2))
    tell(drafter, tree, [0], [2, 4], [eight(2, 5), eight(4, 6), eight(1, 7)])
    begin(drafter, [50, 1])
    found = paths(ask(drafter, [50, 1], 80))
    for path in [(2,), (5,), (2, 4), (2, 6)]:
        assert path in found
    assert (5, 90) not in found, "5 was never verified: its subtree must be missing"
    assert not any(len(path) > 2 for path in found), "4 and 6 were never verified"
    begin(drafter, [50, 3])  # rejected, and still known
    assert paths(ask(drafter, [50, 3], 80)).keys() >= {(1,), (7,), (1, 2), (1, 5), (1, 2, 4)}
    begin(drafter, [50, 4])
    assert len(ask(drafter, [50, 4])) == 0


def test_the_last_verification_counts() -> None:
    drafter = bare()
    begin(drafter, [50, 1])
    tell(drafter, DraftTree.empty(), [], [1], [eight(2)])
    tell(drafter, DraftTree.empty(), [], [1], [eight(3)])
    assert ask(drafter, [50, 1, 1, 1], 1).token_ids.tolist() == [3]


def test_a_token_verified_twice_in_one_step() -> None:
    # Token 7 stands at nodes 0, 1 and 2 (0 -> 1 is a path, 2 hangs below 1).
    tree = DraftTree(np.array([7, 7, 7, 8]), np.array([-1, 0, 1, -1]), np.zeros(4))
    top = [eight(7), eight(10), eight(11), eight(12), eight(13)]
    for accepted, expected in (([], 10), ([0], 10), ([0, 1], 11), ([0, 1, 2], 12)):
        drafter = bare()
        begin(drafter, [50, 1])
        tell(drafter, tree, accepted, [7] * len(accepted) + [60], top)
        begin(drafter, [50, 7])
        assert ask(drafter, [50, 7], 1).token_ids.tolist() == [expected]


def test_trees_of_other_drafters_count_too() -> None:
    drafter = bare()
    begin(drafter, [50, 1])
    commit(drafter, [2, 3])  # without target_top_ids: nothing to learn
    assert len(ask(drafter, [50, 1, 2, 3])) == 0
    chain = DraftTree.chain([4, 5])
    tell(drafter, chain, [0], [4, 6], [eight(4), eight(6), eight(9)])
    begin(drafter, [50, 3])
    assert (4, 6) in paths(ask(drafter, [50, 3]))


def test_short_and_long_rows() -> None:
    drafter = bare()
    begin(drafter, [50, 1])
    tell(drafter, DraftTree.empty(), [], [2], [[3, 4]])
    tell(drafter, DraftTree.empty(), [], [1], [list(range(20, 40))])
    assert set(ask(drafter, [50, 1, 2, 1], 80).token_ids.tolist()) == {3, 4}
    begin(drafter, [50, 2])
    tree = ask(drafter, [50, 2], 80)
    assert set(tree.token_ids[tree.parents == -1].tolist()) == set(range(20, 28))


matrices = st.lists(
    st.lists(st.integers(0, 11), min_size=8, max_size=8, unique=True) | st.none(), min_size=12, max_size=12
)


@examples
@given(matrices, st.integers(0, 11), st.integers(1, 90), st.integers(1, 8))
def test_the_fill_equals_the_shared_builder(
    matrix: list[list[int] | None], root: int, budget: int, max_depth: int
) -> None:
    drafter = bare()
    drafter.bind(Vocabulary(12))
    begin(drafter, [root])
    for token, row in enumerate(matrix):
        if row is not None:
            chain = DraftTree.chain([token])
            begin(drafter, [0])
            tell(drafter, chain, [], [0], [matrix[0] or [EMPTY] * 8, row])
    begin(drafter, [root])
    drafter._acceptance.reset()
    tree = ask(drafter, [root], budget, max_depth=max_depth)
    table = np.full((12, SUCCESSORS), EMPTY)
    for token, row in enumerate(matrix):
        if row is not None:
            table[token] = row
    template = greedy_template(RANK_ACCEPTANCE, budget=80)
    expected = fill_by_successor(template, root, table, budget=budget, max_depth=max_depth)
    assert tree.token_ids.tolist() == expected.token_ids.tolist()
    assert tree.parents.tolist() == expected.parents.tolist()
    assert tree.scores == pytest.approx(expected.scores)
    if len(tree):
        assert tree.evidence["rank"].tolist() == expected.evidence["rank"].tolist()


def test_smaller_budgets_are_prefixes() -> None:
    drafter = full_matrix()
    begin(drafter, [0])
    whole = ask(drafter, [0], 100)
    assert len(whole) == 80 and int(whole.depths().max()) == len(RANK_ACCEPTANCE)
    assert (np.diff(whole.scores) <= 1e-12).all()
    for budget in (1, 2, 7, 33, 64):
        part = ask(drafter, [0], budget)
        assert part.token_ids.tolist() == whole.token_ids[:budget].tolist()
        assert part.parents.tolist() == whole.parents[:budget].tolist()


def full_matrix() -> TokenRecyclingDrafter:
    drafter = bare()
    begin(drafter, [0])
    tree = DraftTree(np.arange(1, 40), np.full(39, -1), np.zeros(39))
    top = [[(token * 8 + rank + 1) % 40 for rank in range(8)] for token in range(40)]
    tell(drafter, tree, [], [0], top)
    drafter._acceptance.reset()
    return drafter


def test_scores_by_hand() -> None:
    drafter = full_matrix()  # the successors of 0 are 1 .. 8, of 1 they are 9 .. 16
    found = paths(ask(drafter, [0, 0], 80))
    assert np.exp(found[(1,)]) == pytest.approx(RANK_ACCEPTANCE[0, 0])
    assert np.exp(found[(2,)]) == pytest.approx(RANK_ACCEPTANCE[0, 1])
    assert np.exp(found[(1, 10)]) == pytest.approx(RANK_ACCEPTANCE[0, 0] * RANK_ACCEPTANCE[1, 1])


def test_committed_tokens_correct_the_scores() -> None:
    drafter = full_matrix()
    before = paths(ask(drafter, [0, 0], 80))
    # 2 is the second successor of 0, 17 the first of 2, and 30 no successor of 17.
    tell(drafter, DraftTree.empty(), [], [2, 17, 30], [[(0 * 8 + rank + 1) % 40 for rank in range(8)]])
    assert drafter._acceptance.trials.tolist() == [1, 1, 1, 0, 0, 0]
    assert drafter._acceptance.hits[0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert drafter._acceptance.hits[1, 0] == 1 and drafter._acceptance.hits[2].sum() == 0
    begin(drafter, [0])
    after = paths(ask(drafter, [0], 80))
    assert after[(2,)] > before[(2,)] and after[(1,)] < before[(1,)]


def test_the_prompt_seeds_empty_rows() -> None:
    prompt = [1, 2, 1, 3, 1, 3, 1, 4, 9, 1]
    drafter = TokenRecyclingDrafter()
    begin(drafter, prompt)
    tree = ask(drafter, prompt, 80)
    # 3 followed 1 twice; 4 and 2 once, 4 more recently.
    assert tree.token_ids[tree.parents == -1].tolist() == [3, 4, 2]
    tell(drafter, DraftTree.empty(), [], [1], [eight(5)])
    begin(drafter, prompt)
    assert ask(drafter, prompt, 1).token_ids.tolist() == [5], "the target's own successors must stay"
    unseeded = bare()
    begin(unseeded, prompt)
    assert len(ask(unseeded, prompt)) == 0


@examples
@given(st.lists(st.integers(0, 5), min_size=2, max_size=60), st.integers(1, 4))
def test_prompt_successors_equal_a_scan(text: list[int], width: int) -> None:
    tokens, table = prompt_successors(np.asarray(text), width)
    assert tokens.tolist() == sorted(set(text[:-1]))
    for token, row in zip(tokens.tolist(), table.tolist(), strict=True):
        after = [text[i + 1] for i in range(len(text) - 1) if text[i] == token]
        last = {b: i for i, b in enumerate(after)}
        ranked = sorted(set(after), key=lambda b: (-after.count(b), -last[b]))[:width]
        assert row == ranked + [EMPTY] * (width - len(ranked))


def test_large_token_ids() -> None:
    drafter = TokenRecyclingDrafter()
    drafter.bind(Vocabulary(131_072))
    begin(drafter, [65_536, 131_071, 65_536])
    assert ask(drafter, [65_536, 131_071, 65_536], 4).token_ids.tolist() == [131_071, 65_536, 131_071, 65_536]
    begin(drafter, [7, 65_535])
    assert len(ask(drafter, [7, 65_535])) == 0


def test_the_matrix_outlives_the_request_and_not_a_reset() -> None:
    drafter = full_matrix()
    drafter.finish()
    begin(drafter, [3])
    assert len(ask(drafter, [3])) == 64
    drafter.reset()
    begin(drafter, [3])
    assert len(ask(drafter, [3])) == 0


def test_memory_is_the_vocabulary() -> None:
    drafter = TokenRecyclingDrafter()
    drafter.bind(Vocabulary(1000))
    rng = np.random.default_rng(0)
    for _ in range(20):
        begin(drafter, rng.integers(0, 1000, 300).tolist())
        tell(drafter, DraftTree.empty(), [], [5], [rng.permutation(1000)[:8].tolist()])
    assert drafter._matrix.nbytes == 1001 * 8 * 4


def test_state_holds_filled_rows_only_and_restores() -> None:
    drafter = full_matrix()
    tell(drafter, DraftTree.empty(), [], [2, 17, 30], [[(0 * 8 + rank + 1) % 40 for rank in range(8)]])
    state = drafter.state_dict()
    assert state["tokens"].tolist() == list(range(40)) and state["successors"].shape == (40, 8)
    copy = TokenRecyclingDrafter(seed_from_prompt=False)
    copy.bind(Vocabulary(5000))
    copy.load_state_dict({**state, "vocab_size": 5000})
    for d in (drafter, copy):
        begin(d, [3])
    assert paths(ask(drafter, [3], 80)) == paths(ask(copy, [3], 80))
    assert (copy.state_dict()["successors"] == state["successors"]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "in version 1, got 'token-recycling' in version 2"),
        ({"drafter": "rest"}, "must be of drafter 'token-recycling'"),
        ({"tokens": np.zeros(40, np.int32)}, "must be different, got a duplicate"),
        ({"tokens": np.arange(40) + 30}, r"tokens of the state must be in \[0, 49\], got 30 to 69"),
        ({"successors": np.full((40, 8), 50)}, r"successors of the state must be in \[-1, 49\], got 50 to 50"),
        ({"successors": np.zeros((40, 7), np.int32)}, r"must be integers of shape \(40, 8\)"),
        ({"successors": np.zeros((40, 8))}, "must be integers of shape"),
        ({"vocab_size": 60}, "vocab_size of the state must be 50, got 60"),
        ({"acceptance": {}}, "must have the keys hits and trials"),
        ({"more": 1}, "must have the keys acceptance, drafter, successors, tokens, version, vocab_size"),
    ],
)
def test_damaged_states_are_refused(change: dict[str, Any], message: str) -> None:
    state = {**full_matrix().state_dict(), "vocab_size": 50}
    drafter = bare()
    drafter.bind(Vocabulary(50))
    with pytest.raises(ValueError, match=message):
        drafter.load_state_dict({**state, **change})
    assert len(drafter.state_dict()["tokens"]) == 0
    drafter.load_state_dict(state)


def test_another_vocabulary_is_refused() -> None:
    drafter = TokenRecyclingDrafter()
    drafter.bind(Vocabulary(50))
    begin(drafter, [1, 2, 3])
    with pytest.raises(ValueError, match="call reset"):
        drafter.bind(Vocabulary(60))


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="seed_from_prompt must be True or False, got 1"):
        TokenRecyclingDrafter(seed_from_prompt=1)  # type: ignore[arg-type]
