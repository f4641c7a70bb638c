"""The evolving buffer: its feeds, who goes out, and the alignment."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adaptspec.types import DraftTree, Observation, Verdict
from adaptspec.vocab import FrequencyList, HeadData, VocabHeads
from adaptspec.vocab.alignment import EVERY, Alignment
from adaptspec.vocab.evospec import EvoSpecHead
from adaptspec.vocab.long_tail import HALF_LIFE, NEIGHBOUR, PROMPT, SEEN, SUCCESSOR, TARGET_TOP, LongTail
from adaptspec.vocab.neighbours import COUNT, Neighbours

SIZE = 24


def alone(name: str = "evospec:4+3", *, head: torch.Tensor | None = None) -> tuple[VocabHeads, EvoSpecHead]:
    """Tokens 0 to 3 static, 4 to 6 in the buffer at first. Rows of an identity have no neighbours."""
    heads = VocabHeads((name,))
    rows = torch.eye(SIZE) if head is None else head
    heads.bind(rows, vocab_size=SIZE, data=HeadData(FrequencyList(np.arange(SIZE), SIZE)))
    (found,) = heads
    assert isinstance(found, EvoSpecHead)
    return heads, found


def commit(heads: VocabHeads, tokens: list[int], top: list[int] | None = None) -> None:
    verdict = Verdict(np.arange(len(tokens) - 1), np.array(tokens))
    ids = None if top is None else np.array(top)[:, None]
    heads.observe(Observation(DraftTree.empty(), verdict, verdict.token_ids, ids))


def test_eviction_order_by_hand() -> None:
    heads, head = alone()
    assert head.dynamic_tokens().tolist() == [4, 5, 6]
    heads.prefill(np.array([0, 1]))
    commit(heads, [10])  # all scores are 0, all equally unused: the lowest token goes
    assert head.dynamic_tokens().tolist() == [10, 5, 6]
    commit(heads, [5, 6])
    commit(heads, [11])  # 10 is the oldest of three that were seen once each: its score has decayed most
    assert head.dynamic_tokens().tolist() == [11, 5, 6]
    commit(heads, [0], [12])  # 0.5 as the target's word: not as good as any that was seen
    assert head.dynamic_tokens().tolist() == [11, 5, 6]
    commit(heads, [0], [12])
    commit(heads, [0], [12])  # 1.5 by now
    assert head.dynamic_tokens().tolist() == [11, 12, 6]
    commit(heads, [20, 21, 22, 23])  # more than there is room for: equal scores, the lower tokens first
    assert set(head.dynamic_tokens().tolist()) == {12, 20, 21}
    assert head.rows == 7


def test_equal_scores_go_by_last_use() -> None:
    heads, head = alone()
    heads.prefill(np.array([10, 0]))
    heads.prefill(np.array([11, 0]))
    tail = head._tail
    tail._score[[10, 11]], tail._scored_at[[10, 11]] = 0.0, tail.steps  # as after a very long time
    tail.last_use[6] = 0
    assert set(head.dynamic_tokens().tolist()) == {10, 11, 6}
    commit(heads, [12])
    assert set(head.dynamic_tokens().tolist()) == {10, 11, 12}  # 6 was never used
    tail._score[12] = 0.0
    commit(heads, [13])
    assert set(head.dynamic_tokens().tolist()) == {11, 12, 13}


def test_scores_of_the_feeds() -> None:
    rare = np.arange(SIZE) >= 4
    near = {8: (np.array([9]), np.array([0.5]))}
    tail = LongTail(rare, neighbours=lambda token: near.get(token, (np.zeros(0, np.int64), np.zeros(0))))
    assert tail.read_prompt(np.array([1, 8, 8, 2])).tolist() == [8, 9]
    assert tail.scores(np.array([8, 9])) == pytest.approx([2 * PROMPT, PROMPT * NEIGHBOUR * 0.5])
    gained = tail.read_step(np.array([10, 3]), np.array([11, 0, 11]))
    assert gained.tolist() == [10, 11]
    assert tail.scores(np.array([10, 11])) == pytest.approx([SEEN, 2 * TARGET_TOP])
    assert tail.scores(np.array([8])) == pytest.approx([2 * PROMPT * 0.5 ** (1 / HALF_LIFE)])
    # 10 followed 2: when 2 comes again, it is expected.
    assert tail.read_step(np.array([2]), np.zeros(0, np.int64)).tolist() == [10]
    assert tail.scores(np.array([10])) == pytest.approx([SEEN * 0.5 ** (1 / HALF_LIFE) + SUCCESSOR])


def test_the_buffer_lives_on_and_steps_may_wait() -> None:
    heads, head = alone()
    other_heads, other = alone()
    for request in range(3):
        for one in (heads, other_heads):
            one.prefill(np.array([0, 7 + request]))
            for token in range(100):
                commit(one, [(5 * token + request) % SIZE], [token % SIZE])
                if one is other_heads:
                    other.dynamic_tokens()  # taken in at once, and not when it is needed
        assert head.dynamic_tokens().tolist() == other.dynamic_tokens().tolist()
    assert not np.array_equal(head.dynamic_tokens(), [4, 5, 6])
    heads.reset()
    assert head.dynamic_tokens().tolist() == [4, 5, 6]


def test_a_neighbour_of_what_was_seen_comes_in() -> None:
    head_rows = torch.eye(SIZE)
    head_rows[9] = 3.0 * head_rows[8] + 0.1 * head_rows[10]
    heads, head = alone(head=head_rows)
    heads.prefill(np.array([0]))
    commit(heads, [8])
    assert {8, 9} <= set(head.dynamic_tokens().tolist())


def test_neighbours_are_the_nearest_by_cosine() -> None:
    rows = torch.randn((400, 32), generator=torch.Generator().manual_seed(0))
    among = np.arange(400) >= 100
    rows[250] = 2.0 * rows[20] + 0.3 * rows[21]
    rows[350] = -rows[20]
    neighbours = Neighbours(rows, np.arange(400), among=among)
    tokens, cosines = neighbours(20)
    unit = torch.nn.functional.normalize(rows, dim=1)
    exact = unit @ unit[20]
    assert tokens[0] == 250 and 350 not in tokens and len(tokens) == COUNT and (tokens >= 100).all()
    assert cosines == pytest.approx(exact[tokens].numpy(), abs=1e-5)
    assert (np.diff(cosines) <= 0).all() and neighbours(20) is neighbours(20)
    assert 300 not in neighbours(300)[0]  # not itself


def test_alignment_learns_what_the_target_says_and_changes_only_between_rounds() -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn((50, 16), generator=generator)
    states = torch.randn((4 * EVERY, 16), generator=generator)
    turn = torch.linalg.qr(torch.randn((16, 16), generator=generator)).Q
    wanted = (states + 0.5 * (states @ turn[:, :2]) @ turn[:, 2:4].T) @ head.T  # of rank 2
    alignment = Alignment(16, rank=4)

    def loss() -> float:
        scores = (alignment.apply(states) @ head.T).log_softmax(-1)
        return float(torch.nn.functional.kl_div(scores, wanted.softmax(-1), reduction="batchmean"))

    before = loss()
    assert torch.equal(alignment.apply(states), states)
    for number, (state, logits) in enumerate(zip(states, wanted, strict=True), start=1):
        frozen = alignment.apply(states[:1]).clone()
        top = logits.topk(8)
        with torch.inference_mode():
            alignment.add(state, top.indices.numpy(), top.values.numpy(), rows_of=lambda tokens: head[tokens])
        assert (not torch.equal(alignment.apply(states[:1]), frozen)) == (number % EVERY == 0)
    assert alignment.rounds == 4
    assert loss() < 0.9 * before
    with pytest.raises(ValueError, match="rank must be in"):
        Alignment(16, rank=17)


def test_alignment_is_off_unless_asked_for() -> None:
    heads, head = alone()
    assert not heads.needs_top_logits and head.state_dict()["alignment"] is None
    aligned, _ = alone("evospec:4+3+align")
    assert aligned.needs_top_logits and aligned.needs_top_k == 8
