"""Routers: what training brings, and which groups are picked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from adaptspec.pretrained import save_weights
from adaptspec.vocab import HeadData, VocabHeads, load_router, save_router, train_router
from adaptspec.vocab.coral import CoralHead
from adaptspec.vocab.dynaspec import LEAST, SHRINK, DynaSpecHead
from adaptspec.vocab.routed import RoutedHead
from adaptspec.vocab.train_router import cluster_rows
from tests.vocab.vocab_cases import HIDDEN, VOCAB_SIZE, bound, data, hidden, weight


def head_of(name: str) -> RoutedHead:
    (head,) = bound((name,))
    assert isinstance(head, RoutedHead)
    return head


@pytest.mark.parametrize("kind", ["coral", "dynaspec"])
def test_training_lowers_the_loss_and_covers_more_than_chance(kind: str) -> None:
    features = hidden(1200, seed=1)
    top = (features @ weight().T).topk(3).indices
    router, came = train_router(features, top, kind=kind, weight=weight(), groups=10, floor=0, steps=150)
    assert np.mean(came.losses[-10:]) < 0.95 * np.mean(came.losses[:10])
    assert came.coverage[2] > 0.5 > 0.3 and came.coverage[-1] == 1.0 and (np.diff(came.coverage) >= 0).all()
    again, _ = train_router(features, top, kind=kind, weight=weight(), groups=10, floor=0, steps=150)
    for name, tensor in router.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)  # same seed, same weights


def test_the_floor_holds_the_commonest_tokens() -> None:
    features = hidden(200)
    top = torch.full((200, 2), 5)
    top[:20] = 9
    router, came = train_router(features, top, kind="coral", weight=weight(), groups=4, floor=2, steps=1)
    assert router.floor.tolist() == [5, 9] and came.coverage[0] == 1.0


def test_clusters_hold_similar_rows_and_none_is_empty() -> None:
    centres = torch.eye(4, HIDDEN)
    rows = (centres.repeat_interleave(20, 0) + 0.01 * torch.randn(80, HIDDEN)) * torch.rand(80, 1).add(0.1)
    found = cluster_rows(rows, 4, seed=3)
    assert len(found.unique()) == 4
    spread = cluster_rows(torch.ones(6, 3), 5)  # all alike
    assert torch.bincount(spread, minlength=5).min() >= 1
    with pytest.raises(ValueError, match="groups must be in"):
        cluster_rows(rows, 81)


def test_coral_computes_the_groups_that_get_most() -> None:
    head = head_of("coral:2")
    assert isinstance(head, CoralHead) and head.sizes.tolist() == [50] * 6
    states = hidden(1)
    shares = torch.softmax(data().routers["coral"](states), dim=-1)[0]
    assert head.groups(states, depth=1).tolist() == shares.topk(2).indices.tolist()
    ids, _ = head.logits(states, depth=1)
    always = set(head._always.tolist())
    picked = {50 * int(group) + i for group in shares.topk(2).indices for i in range(50)}
    assert set(ids.tolist()) == picked | always and len(ids) <= head.rows == 100 + len(always)


def test_the_budget_of_dynaspec_shrinks_with_depth() -> None:
    head = head_of("dynaspec:80")
    assert isinstance(head, DynaSpecHead)
    assert [head.budget_at(depth) for depth in (1, 2, 3)] == [80, round(80 * SHRINK), round(80 * SHRINK**2)]
    assert head.budget_at(50) == round(80 * LEAST)
    sizes = [len(head.logits(hidden(1), depth=depth)[0]) for depth in (1, 2, 4, 9)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] <= head.rows
    scores = head._router(hidden(1)).sigmoid()[0].numpy()
    picked = head.groups(hidden(1), depth=1)
    assert picked.tolist() == np.argsort(-scores, kind="stable")[: len(picked)].tolist()
    following = np.argsort(-scores, kind="stable")[len(picked)]
    assert head.sizes[picked].sum() <= 80 < head.sizes[picked].sum() + head.sizes[following]
    assert len(head_of("dynaspec:1").groups(hidden(1), depth=1)) == 1


def test_states_of_one_call_share_their_groups() -> None:
    head = head_of("coral:2")
    states = torch.cat([hidden(1, seed=seed) for seed in range(6)])
    ids, logits = head.logits(states, depth=1)
    assert len(ids) <= head.rows and logits.shape == (6, len(ids))
    single = max((float(torch.softmax(head._router(s[None]), -1).max()), i) for i, s in enumerate(states))
    first = int(head.groups(states, depth=1)[0])
    assert first == int(head._router(states[single[1]][None]).argmax())  # the surest of all


def test_files(tmp_path: Path) -> None:
    for kind, router in data().routers.items():
        save_router(tmp_path / kind, router, {"steps": 60})
        loaded = load_router(tmp_path / kind, kind=kind)
        assert torch.equal(loaded.group_of, router.group_of)
        torch.testing.assert_close(loaded(hidden()), router(hidden()), atol=0.1, rtol=0.1)  # 8 bits
        heads = VocabHeads((f"{kind}:{tmp_path / kind}",))
        heads.bind(weight(), vocab_size=VOCAB_SIZE)
    with pytest.raises(ValueError, match="must hold weights of kind 'coral', got 'dynaspec'"):
        load_router(tmp_path / "dynaspec", kind="coral")
    with pytest.raises(ValueError, match="unknown router 'corl'"):
        load_router(tmp_path / "coral", kind="corl")
    save_weights(tmp_path / "other", {"a": torch.ones(2, 2)}, {"kind": "coral", "config": {}})
    with pytest.raises(ValueError, match="holds no router"):
        load_router(tmp_path / "other", kind="coral")


def test_routers_for_other_heads_are_refused() -> None:
    heads = VocabHeads(("coral:2",))
    with pytest.raises(ValueError, match="is for a head of 300 rows and hidden size 16, this one has 299 and 16"):
        heads.bind(weight()[:299], vocab_size=VOCAB_SIZE, data=data())
    wrong = HeadData(None, {"coral": data().routers["dynaspec"]})
    with pytest.raises(ValueError, match="must be CoralRouter"):
        heads.bind(weight(), vocab_size=VOCAB_SIZE, data=wrong)


def test_the_router_handed_over_is_not_changed() -> None:
    router = data().routers["coral"]
    heads = VocabHeads(("coral:2",))
    heads.bind(weight().bfloat16(), vocab_size=VOCAB_SIZE, data=data())
    assert heads["coral:2"].top(hidden().bfloat16(), k=2, depth=1).ids.shape == (3, 2)
    assert next(router.parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "corla"}, "unknown router 'corla'; did you mean 'coral'"),
        ({"features": torch.zeros(9, 3)}, "features must have shape"),
        ({"top_ids": torch.zeros(8, 2, dtype=torch.int64)}, "top_ids must be whole numbers of shape \\[9, k\\]"),
        ({"top_ids": torch.zeros(9, 2)}, "top_ids must be whole numbers"),
        ({"top_ids": torch.full((9, 2), -1)}, "top_ids must be >= 0"),
        ({"token_ids": torch.arange(4)}, "token_ids must have shape"),
        ({"groups": 301}, "groups must be in \\[1, 300\\]"),
        ({"floor": -1}, "floor must be in"),
        ({"steps": 0}, "steps must be in"),
        ({"batch": 0}, "batch must be in"),
        ({"top_ids": torch.full((9, 2), 400)}, "at least 2 positions"),
    ],
)
def test_bad_training_input(options: dict[str, object], message: str) -> None:
    good = {"features": torch.zeros(9, HIDDEN), "top_ids": torch.zeros(9, 2, dtype=torch.int64), "kind": "coral"}
    with pytest.raises(ValueError, match=message):
        train_router(**{**good, "weight": weight(), **options})  # type: ignore[arg-type]
