"""Drafters per request: what they say, what they share, what they forget."""

from __future__ import annotations

import numpy as np
import pytest

from adaptspec.drafters.suffix import SuffixDrafter
from adaptspec.serving.chains import (
    CHAIN_DRAFTERS,
    ChainDrafter,
    ObservedSuccessors,
    Vocabulary,
    best_path,
    chain_makers,
    evidence_level,
)
from adaptspec.types import DraftContext, DraftTree, Observation, Sampling, Verdict

LOOKUPS = ("suffix", "prompt-lookup", "token-recycling")


def make(name: str, **options: int) -> ChainDrafter:
    return chain_makers([name], vocabulary=Vocabulary(100), **options)[name]()


def text(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@pytest.mark.parametrize("name", LOOKUPS)
def test_what_came_before_comes_again(name: str) -> None:
    drafter = make(name)
    assert drafter.draft(text(5, 6, 7, 8, 9, 5, 6), 2).tokens == [7, 8]
    assert drafter.seen == 7
    chain = drafter.draft(text(5, 6, 7, 8, 9, 5, 6, 7, 8), 3)  # two tokens at once
    assert chain.tokens[0] == 9
    assert 0 <= chain.evidence < 8


@pytest.mark.parametrize("name", LOOKUPS)
def test_declines_where_nothing_repeats_and_takes_in_what_it_missed(name: str) -> None:
    drafter = make(name)
    assert drafter.draft(text(1, 2, 3, 4), 4).tokens == []
    drafter.catch_up(text(1, 2, 3, 4, 50, 51))
    assert drafter.seen == 6
    assert drafter.draft(text(1, 2, 3, 4, 50, 51, 9, 50), 1).tokens == [51]


def test_longer_matches_are_surer() -> None:
    for name in ("suffix", "prompt-lookup"):
        short = make(name).draft(text(5, 6, 7, 8, 1, 6), 1)
        sure = make(name).draft(text(*range(20, 40), 1, *range(20, 39)), 1)
        assert sure.tokens == [39]
        assert sure.evidence > short.evidence


def test_prompt_lookup_goes_on_with_itself() -> None:
    assert make("prompt-lookup").draft(text(9, 5, 6, 5, 6), 5).tokens == [5, 6, 5, 6, 5]


def test_suffix_drafts_as_the_drafter_of_the_library() -> None:
    """Requests in turns, each ending and joining the past, against one `SuffixDrafter` that sees them one by one."""
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, 50, 8) for _ in range(6)]
    texts = [np.concatenate([phrases[i] for i in rng.integers(0, 6, 12)]).astype(np.int32) for _ in range(4)]
    own = SuffixDrafter(tree=False)
    maker = chain_makers(["suffix"], vocabulary=Vocabulary(50))["suffix"]
    drafted = 0
    for whole in texts:
        shared = maker()
        own.prefill(whole[:20].astype(np.int64))
        for end in range(20, len(whole), 3):
            if end > 20:
                new = whole[end - 3 : end].astype(np.int64)
                own.observe(Observation(DraftTree.empty(), Verdict(np.zeros(0, np.int64), new), new))
            context = DraftContext(int(whole[end - 1]), end, 6, Sampling(), rng)
            tree = own.propose(context, 6)
            chain = shared.draft(whole[:end], 6)
            assert chain.tokens == tree.token_ids.tolist()
            drafted += len(chain.tokens)
        own.finish()
        shared.finish(19)
    assert drafted > 200


def test_requests_at_the_same_time_share_the_past() -> None:
    """One ends between two drafts of the other, several times, until the memory has turned over."""
    makers = chain_makers(["suffix"], vocabulary=Vocabulary(1000), max_past_tokens=60)
    rng = np.random.default_rng(1)
    staying = makers["suffix"]()
    seen = rng.integers(0, 1000, 30).astype(np.int32)
    assert staying.draft(seen, 4).tokens == []
    for _ in range(12):
        passing = makers["suffix"]()
        output = rng.integers(0, 1000, 25).astype(np.int32)
        passing.catch_up(np.concatenate([text(1, 2), output]))
        passing.finish(2)
        seen = np.concatenate([seen, output[:6]])
        assert staying.draft(seen, 4).tokens == output[6:10].tolist()


def test_the_prompt_is_not_remembered_as_output() -> None:
    makers = chain_makers(["suffix"], vocabulary=Vocabulary(100))
    late = makers["suffix"]()
    late.catch_up(text(1, 2, 3, 4, 5, 6, 7, 8))  # asked only after four tokens were generated
    late.finish(4)
    assert makers["suffix"]().draft(text(90, 1, 2), 2).tokens == []
    assert makers["suffix"]().draft(text(90, 5, 6), 2).tokens == [7, 8]


def test_successors_stand_firm_after_repetition() -> None:
    table = ObservedSuccessors()
    table.extend([1, 2] * 4)
    table.extend([1, 3])
    assert table.chain(1, 1) == ([2], 2)
    table.extend([1, 3, 1, 3])
    assert table.chain(1, 1)[0] == [3]
    assert len(table) == 3


def test_recycling_is_shared_by_all_requests() -> None:
    makers = chain_makers(["token-recycling"], vocabulary=Vocabulary(100))
    makers["token-recycling"]().catch_up(text(1, 2, 3, 4))
    assert makers["token-recycling"]().draft(text(9, 2), 8).tokens == [3, 4]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["sufix"], "did you mean 'suffix'"),
        (["rest"], "needs more than the stack hands out"),
        (["suffix", "suffix"], "'suffix' twice"),
        (["suffix:path"], "takes no path, got 'path'"),
        (["draft-model"], "write 'draft-model:PATH'"),
        ([3], "must be names, got 3"),
    ],
)
def test_names_that_do_not_fit(names: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        chain_makers(names, vocabulary=Vocabulary(100))
    assert set(LOOKUPS) < set(CHAIN_DRAFTERS)


def test_the_best_path_of_a_tree() -> None:
    tree = DraftTree(
        np.array([5, 6, 7, 8, 9]), np.array([-1, -1, 1, 0, 1]), np.log(np.array([0.3, 0.6, 0.2, 0.29, 0.4]))
    )
    assert best_path(tree).tolist() == [1, 4]
    assert best_path(DraftTree.chain([1, 2])).tolist() == [0, 1]
    assert evidence_level(tree) == 2
    assert evidence_level(DraftTree.chain([1])) == -1
