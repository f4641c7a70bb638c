"""What every vocabulary head promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adaptspec.types import Arm
from adaptspec.vocab import VOCAB_HEADS, HeadData, VocabHeads, check_vocab, make_head, register_vocab_head
from adaptspec.vocab.full import FullHead
from tests.vocab.vocab_cases import HIDDEN, KEEP, NAMES, VOCAB_SIZE, bound, data, hidden, prompt, step, weight

EXACT = [name for name in NAMES if not name.endswith("align")]


def used(names: tuple[str, ...] = NAMES) -> VocabHeads:
    """Heads in the middle of a request."""
    heads = bound(names)
    heads.prefill(*prompt())
    for seed in range(5):
        for head in heads:
            head.top(hidden(1, seed=seed), k=2, depth=1)
        heads.observe(step(seed))
    return heads


def test_every_kind_is_tested() -> None:
    assert {name.partition(":")[0] for name in NAMES} == set(VOCAB_HEADS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [1, 4])
def test_logits_are_those_of_the_full_head(name: str, depth: int) -> None:
    states = hidden()
    ids, logits = used()[name].logits(states, depth=depth)
    whole = states @ weight().T
    in_use = logits > -torch.inf
    torch.testing.assert_close(logits[in_use], whole[:, ids][in_use], atol=1e-5, rtol=1e-5)
    assert len(ids.unique()) == len(ids) and in_use.any(dim=1).all()


@pytest.mark.parametrize("name", NAMES)
def test_top_and_q_are_the_softmax_over_the_rows_in_use(name: str) -> None:
    head, states = used()[name], hidden()
    ids, logits = head.logits(states, depth=2)
    top = head.top(states, k=4, depth=2)
    q = head.probabilities(states, depth=2, temperature=0.7)
    for row in range(len(states)):
        finite = logits[row] > -torch.inf
        names, own = ids[finite], logits[row][finite]
        order = own.argsort(descending=True)
        assert top.ids[row].tolist() == names[order][:4].tolist()
        torch.testing.assert_close(top.log_probs[row], own.log_softmax(0)[order][:4], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(top.log_sum_exp[row], own.logsumexp(0), atol=1e-5, rtol=1e-5)
        expected = torch.zeros(VOCAB_SIZE)
        expected[names] = (own / 0.7).softmax(0)
        torch.testing.assert_close(q[row], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_specials_are_always_in(name: str) -> None:
    heads = bound()
    for phase in range(3):
        ids, logits = heads[name].logits(hidden(1, seed=phase), depth=1 + 3 * phase)
        assert set(KEEP) <= set(ids[logits[0] > -torch.inf].tolist())
        heads.prefill(*prompt(phase, length=60))
        for seed in range(10):
            heads.observe(step(seed))
        heads.finish()


@pytest.mark.parametrize("name", NAMES)
def test_a_tied_head_is_never_written_to(name: str) -> None:
    embedding = torch.nn.Embedding(VOCAB_SIZE, HIDDEN)
    with torch.no_grad():
        embedding.weight.copy_(weight())
    before = embedding.weight.detach().clone()
    heads = bound((name,), head=embedding.weight)
    heads.prefill(*prompt())
    for seed in range(70):  # long enough for an alignment
        heads[name].top(hidden(2, seed=seed), k=3, depth=1)
        heads.observe(step(seed))
    heads.finish()
    assert torch.equal(embedding.weight, before) and embedding.weight.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_own_rows_are_named_by_their_target_tokens(name: str) -> None:
    shuffled = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    plain, own = bound((name,)), VocabHeads((name,))
    routers = {kind: _shuffled(router, shuffled) for kind, router in data().routers.items()}
    own.bind(
        weight()[shuffled],
        token_ids=shuffled,
        vocab_size=VOCAB_SIZE,
        keep=KEEP,
        data=HeadData(data().frequencies, routers),
    )
    for heads in (plain, own):
        heads.prefill(*prompt())
        heads.observe(step())
    for depth in (1, 3):
        one, two = (heads[name].top(hidden(), k=5, depth=depth) for heads in (plain, own))
        assert torch.equal(one.ids, two.ids)
        torch.testing.assert_close(one.log_probs, two.log_probs, atol=1e-5, rtol=1e-5)


def _shuffled(router: torch.nn.Module, order: torch.Tensor) -> torch.nn.Module:
    import copy

    moved = copy.deepcopy(router)
    place = order.argsort()
    moved.group_of, moved.floor = router.group_of[order], place[router.floor]
    return moved


def test_a_head_of_fewer_rows_than_tokens() -> None:
    tokens = torch.arange(0, VOCAB_SIZE, 3)
    heads = VocabHeads(("full", "fr:20", "microspec:30", "evospec:20+5"))
    heads.bind(weight()[tokens], token_ids=tokens, vocab_size=VOCAB_SIZE, keep=KEEP, data=data())
    heads.prefill(*prompt())
    for seed in range(30):
        heads.observe(step(seed))
    for head in heads:
        ids, logits = head.logits(hidden(), depth=1)
        assert (ids % 3 == 0).all() and len(ids) == head.rows <= len(tokens)
        torch.testing.assert_close(logits, hidden() @ weight()[ids].T, atol=1e-5, rtol=1e-5)
        assert head.probabilities(hidden(), depth=1)[:, tokens].sum(1) == pytest.approx([1.0] * 3)
    assert 2 not in heads["fr:20"].logits(hidden(), depth=1)[0] and 299 not in KEEP[:2]  # no row, so it cannot be kept


@pytest.mark.parametrize("name", NAMES)
def test_binding_again_changes_nothing_unless_the_weights_did(name: str) -> None:
    head = weight().clone()
    heads = bound((name,), head=head)
    heads.prefill(*prompt())
    heads.observe(step())
    heads.finish()
    first = heads[name].top(hidden(), k=4, depth=1)
    heads.bind(head, vocab_size=VOCAB_SIZE, keep=KEEP, data=data())
    assert torch.equal(heads[name].top(hidden(), k=4, depth=1).ids, first.ids)
    head.mul_(-1.0)  # in place: copies of rows would be stale
    heads.bind(head, vocab_size=VOCAB_SIZE, keep=KEEP, data=data())
    if heads.needs_prompt_top_k:
        heads.prefill(*prompt())
    ids, logits = heads[name].logits(hidden(), depth=1)
    in_use = logits > -torch.inf
    torch.testing.assert_close(logits[in_use], (hidden() @ head.T)[:, ids][in_use], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_state_restores_exactly_before_and_after_bind(name: str) -> None:
    one = used((name,))
    one.finish()
    before, after = VocabHeads((name,)), bound((name,))
    before.load_state_dict(one.state_dict())
    before.bind(weight(), vocab_size=VOCAB_SIZE, keep=KEEP, data=data())
    after.load_state_dict(one.state_dict())
    for heads in (one, before, after):
        heads.prefill(*prompt(8))
        for seed in range(20, 90):
            heads[name].top(hidden(1, seed=seed), k=2, depth=1)
            heads.observe(step(seed))
        heads.finish()
    ids, logits = one[name].logits(hidden(), depth=1)
    for heads in (before, after):
        other_ids, other_logits = heads[name].logits(hidden(), depth=1)
        assert torch.equal(ids, other_ids) and torch.equal(logits, other_logits)
    one.reset()
    if one.needs_prompt_top_k:
        one.prefill(*prompt())
        after = bound((name,))
        after.prefill(*prompt())
    else:
        after = bound((name,))
    assert torch.equal(one[name].top(hidden(), k=4, depth=1).ids, after[name].top(hidden(), k=4, depth=1).ids)


def test_damaged_and_foreign_states_are_refused() -> None:
    heads = used()
    state = heads.state_dict()
    assert set(state) == {"evospec:60+10", "evospec:60+10+align"}
    with pytest.raises(ValueError, match="unknown vocab in the state: 'evospec:60"):
        bound(("full",)).load_state_dict(state)
    with pytest.raises(ValueError, match="keeps no state, got the keys rows"):
        bound().load_state_dict({"fr:100": {"rows": 1}})
    good = state["evospec:60+10"]
    for key, value, message in (
        ("static", 59, "another head"),
        ("alignment", {}, "another head"),
        ("tokens_of_rows", np.zeros(10, int), "10 different tokens"),
        ("tokens_of_rows", np.arange(9), "10 different tokens"),
        ("tokens_of_rows", np.arange(1000, 1010), "tokens of the head outside the static ones"),
        ("tail", {**good["tail"], "steps": -1}, "steps must be"),
        ("tail", {**good["tail"], "scores": good["tail"]["scores"] - 9.0}, "scores must be"),
        ("tail", {**good["tail"], "last_use": good["tail"]["last_use"] + 99}, "last_use must be in"),
        ("tail", {**good["tail"], "tokens": good["tail"]["tokens"][:-1]}, "scores must be"),
        ("tail", {**good["tail"], "successors": np.zeros((1, 3), int)}, "with counts >= 1"),
    ):
        before = heads["evospec:60+10"].state_dict()
        with pytest.raises(ValueError, match=message):
            heads.load_state_dict({"evospec:60+10": {**good, key: value}})
        assert str(heads["evospec:60+10"].state_dict()) == str(before)
    aligned = state["evospec:60+10+align"]
    for key in ("down", "rounds", "rng"):
        with pytest.raises(ValueError, match=key):
            wrong = {**aligned, "alignment": {**aligned["alignment"], key: None}}
            heads.load_state_dict({"evospec:60+10+align": wrong})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ful", "unknown vocab 'ful'; did you mean 'full'"),
        ("full:3", "takes no argument"),
        ("fr", "number of rows >= 1"),
        ("fr:", "ends in a colon"),
        ("fr:0", "number of rows >= 1"),
        ("fr:-4", "number of rows >= 1"),
        ("trim:many", "number of rows >= 1"),
        ("microspec:0", "number of rows >= 1"),
        ("evospec:100", "must look like evospec:16384\\+512"),
        ("evospec:0+4", "at least 1 row of each kind"),
        ("coral:0", "at least 1 group"),
        ("dynaspec:0", "at least 1 row"),
    ],
)
def test_bad_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fr:301", "asks for 301 rows, the head has 300"),
        ("fr:2", "3 special tokens, which are more than 2 rows"),
        ("microspec:2", "3 special tokens, more than 2 rows"),
        ("evospec:290+20", "asks for 310 rows"),
        ("coral:7", "at most 6 groups"),
        ("fr:10:no-such.npy", "no such file"),
        ("coral:no-such-folder", "no-such-folder holds no card.json"),
    ],
)
def test_names_that_do_not_fit_the_head(name: str, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        bound((name,))


def test_what_is_not_shipped_says_how_to_get_it() -> None:
    for name, message in (("fr:10", "adaptspec.vocab.count_tokens"), ("coral:2", "adaptspec.vocab.train_router")):
        heads = VocabHeads((name,))
        with pytest.raises(ValueError, match=message):
            heads.bind(weight(), vocab_size=VOCAB_SIZE)


def test_bad_heads_and_calls() -> None:
    heads = VocabHeads()
    for options, message in (
        ({"weight": weight()[0]}, "weight must be floating point"),
        ({"weight": weight(), "token_ids": torch.arange(4)}, "token_ids must be whole numbers of shape"),
        ({"weight": weight(), "token_ids": torch.zeros(VOCAB_SIZE, dtype=torch.int64)}, "all different"),
        ({"weight": weight(), "keep": (VOCAB_SIZE,)}, "keep must be in"),
        ({"weight": weight(), "vocab_size": 299}, "token_ids must be in"),
        ({"weight": weight(), "vocab_size": 0}, "vocab_size must be >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            heads.bind(**{"vocab_size": VOCAB_SIZE, **options})
    with pytest.raises(ValueError, match="unknown vocab 'fr:9'"):
        heads["fr:9"]
    with pytest.raises(ValueError, match="list of one or more names"):
        VocabHeads("full")
    with pytest.raises(ValueError, match="different names"):
        VocabHeads(("full", "full"))
    with pytest.raises(ValueError, match="top_ids must have 3 columns"):
        bound().prefill(prompt()[0])
    with pytest.raises(ValueError, match="temperature must be > 0"):
        bound()["full"].probabilities(hidden(), depth=1, temperature=0.0)
    for name in NAMES:
        with pytest.raises(ValueError, match="k must be in"):
            used((name,))[name].top(hidden(), k=33, depth=1)


def test_names_are_parts_of_arms() -> None:
    for name in (*NAMES, "fr:100:lists/my list.json", "evospec:60+10+align:a/b.pt"):
        assert check_vocab([name]) == (name,)
        assert Arm.parse(f"eagle3@8/{name}") == Arm("eagle3", 8, name)


def test_registration() -> None:
    with pytest.raises(ValueError, match="free of"):
        register_vocab_head("a:b")
    with pytest.raises(TypeError, match="VocabHead class"):
        register_vocab_head("other")(int)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="already taken"):
        register_vocab_head("full")(type("Other", (FullHead,), {}))
