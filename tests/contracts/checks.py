"""What every drafter must do. Each check takes a case and raises AssertionError if the drafter does otherwise."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from adaptspec.drafters import Drafter
from adaptspec.types import DraftTree, Sampling
from tests.contracts.cases import DrafterCase, World

BUDGETS = (1, 8, 32, 64)
DEPTHS = (64, 1, 2, 5, 16)
START = 40
"""Committed tokens with which a request starts."""
ROOM = 160
"""Committed tokens after which a request is not continued: the tiny model's context is limited."""


def streams(vocab_size: int) -> dict[str, list[int]]:
    """Texts [T] of different habits, over few and over all token ids."""
    rng = np.random.default_rng(11)
    phrase = rng.integers(0, vocab_size, 7).tolist()
    noisy: list[int] = []
    while len(noisy) < 200:
        noisy += phrase
        noisy.append(int(rng.integers(vocab_size)))
    return {
        "random": rng.integers(0, vocab_size, 200).tolist(),
        "few tokens": rng.integers(0, 3, 200).tolist(),
        "noisy phrase": noisy[:200],
        "periodic": (phrase * 40)[:200],
        "constant": [vocab_size - 1] * 200,
    }


def new(case: DrafterCase, vocab_size: int = 64) -> tuple[World, Drafter]:
    """A world and a drafter that is bound to its target."""
    world = case.world(vocab_size)
    drafter = case.build(world)
    drafter.bind(world.target)
    return world, drafter


def same(a: DraftTree, b: DraftTree) -> bool:
    """Equal nodes and scores."""
    return (
        a.token_ids.tolist() == b.token_ids.tolist()
        and a.parents.tolist() == b.parents.tolist()
        and np.allclose(a.scores, b.scores, rtol=0, atol=1e-12)
        and a.siblings == b.siblings
    )


def check_tree(tree: DraftTree, *, vocab_size: int, budget: int, max_depth: int) -> None:
    """All promises of one tree."""
    assert isinstance(tree, DraftTree), f"propose must return a DraftTree, got {type(tree).__name__}"
    try:
        tree.validate(vocab_size=vocab_size, budget=budget)
    except ValueError as error:
        raise AssertionError(str(error)) from error
    depth = int(tree.depths().max(initial=0))
    assert depth <= max_depth, f"depth {depth} exceeds max_depth {max_depth}"
    above = np.concatenate([[0.0], tree.scores])[tree.parents + 1]
    assert (tree.scores <= above + 1e-9).all(), "a node scores higher than its parent"
    for name, column in tree.evidence.items():
        assert isinstance(column, np.ndarray) and column.shape == (len(tree),), f"evidence {name!r} is not [N]"
        assert column.dtype.kind == "f" and np.isfinite(column).all(), f"evidence {name!r} is not finite floats"
    if tree.siblings != "deterministic":
        assert tree.draft_rows is not None
        rows = np.asarray(tree.draft_probs, dtype=np.float64)
        used = rows[np.unique(tree.draft_rows[tree.draft_rows >= 0])]
        assert (used >= 0).all() and np.allclose(used.sum(axis=1), 1.0, atol=1e-3), "a row of q is no distribution"
        drawn = rows[tree.draft_rows[tree.parents + 1], tree.token_ids]
        assert (drawn > 0).all(), "a drawn token has q = 0"


def play(world: World, drafter: Drafter, *, text: list[int]) -> list[DraftTree]:
    """One request from prefill to `finish`; the proposals."""
    trees = run(world, drafter, text=text)
    drafter.finish()
    return trees


def run(world: World, drafter: Drafter, *, text: list[int]) -> list[DraftTree]:
    """One request that is left open; the proposals."""
    world.start(drafter, text, START)
    trees = []
    for step in range(world.steps):
        if len(world.committed) > ROOM:
            break
        trees.append(world.ask(drafter, 16, seed=step))
        world.commit(drafter, trees[-1])
    return trees


def check_validity(case: DrafterCase, *, text: list[int], vocab_size: int, budget: int) -> None:
    """Trees are valid, within the budget and the depth, at temperature 0 deterministic."""
    world, drafter = new(case, vocab_size)
    world.start(drafter, text, START)
    for step in range(world.steps):
        if len(world.committed) > ROOM:
            break
        depth = DEPTHS[step % len(DEPTHS)]
        tree = world.ask(drafter, budget, max_depth=depth, seed=step)
        check_tree(tree, vocab_size=vocab_size, budget=budget, max_depth=depth)
        assert tree.siblings == "deterministic", "a sampled tree at temperature 0"
        world.commit(drafter, tree)
    drafter.finish()


def check_large_ids(case: DrafterCase) -> None:
    """A lookup gives back token ids above 2^16 as they were."""
    world, drafter = new(case, 70_000)
    text = [69_999, 65_536, 69_998, 66_000, 65_537] * 40
    for _ in range(2):  # some learn from finished requests only
        world.start(drafter, text, START)
        accepted = 0
        for step in range(world.steps):
            accepted += len(world.commit(drafter, world.ask(drafter, 16, seed=step))) - 1
        drafter.finish()
    assert accepted > 0, "no draft was right in a text that only repeats itself"


def check_short_contexts(case: DrafterCase) -> None:
    """One or two committed tokens are a request, too."""
    for length in (1, 2, 3):
        world, drafter = new(case)
        world.start(drafter, [5, 5, 6, 5, 5, 6], max(length, world.shortest))
        for budget in (1, 64):
            tree = world.ask(drafter, budget)
            check_tree(tree, vocab_size=world.vocab_size, budget=budget, max_depth=64)
        world.commit(drafter, tree)
        check_tree(world.ask(drafter, 8), vocab_size=world.vocab_size, budget=8, max_depth=64)
        drafter.finish()


def check_drafts_something(case: DrafterCase) -> None:
    """A text that repeats itself, in a second request that repeats the first, gives evidence to every drafter."""
    world, drafter = new(case)
    text = streams(64)["periodic"]
    trees = play(world, drafter, text=text) + play(world, drafter, text=text)
    assert any(len(tree) for tree in trees), "nothing was ever drafted"


def check_idempotence(case: DrafterCase) -> None:
    """Proposals that are thrown away change nothing."""
    for habit in new(case)[0].habits:
        world, drafter = new(case)
        twin_world, twin = new(case)
        for w, d in ((world, drafter), (twin_world, twin)):
            w.start(d, streams(64)[habit], START)
        for step in range(6):
            discarded = world.ask(drafter, 64, seed=99)
            world.ask(drafter, 3, max_depth=2, seed=98)
            first = world.ask(drafter, 16, seed=step)
            again = world.ask(drafter, 64, seed=99)
            assert same(discarded, again), "the same question got another answer"
            final = world.ask(drafter, 16, seed=step)
            assert same(first, final), "the same question got another answer"
            only = twin_world.ask(twin, 16, seed=step)
            assert same(final, only), "a discarded proposal changed a later one"
            assert world.commit(drafter, final) == twin_world.commit(twin, only)


def check_determinism(case: DrafterCase, *, sampling: Sampling) -> None:
    """Equal histories and equal generators give equal trees."""
    text = streams(64)["noisy phrase"]
    runs = []
    for _ in range(2):
        world, drafter = new(case)
        world.start(drafter, text, START)
        trees = []
        for step in range(world.steps):
            trees.append(world.ask(drafter, 16, max_depth=8, sampling=sampling, seed=step))
            world.commit(drafter, trees[-1])
        runs.append(trees)
    assert all(same(a, b) for a, b in zip(*runs, strict=True)), "not deterministic"


def check_sampling(case: DrafterCase) -> None:
    """At a temperature, trees are deterministic or drawn as the class says, from a distribution that is told."""
    sampling = Sampling(temperature=0.8, top_p=0.95)
    for habit in new(case)[0].habits:
        world, drafter = new(case)
        world.start(drafter, streams(64)[habit], START)
        for step in range(6):
            tree = world.ask(drafter, 16, max_depth=8, sampling=sampling, seed=step)
            check_tree(tree, vocab_size=world.vocab_size, budget=16, max_depth=8)
            allowed = ("deterministic", drafter.siblings)
            assert tree.siblings in allowed, f"siblings are {tree.siblings}, the drafter says {drafter.siblings}"
            world.commit(drafter, tree)


def check_multi_token_commits(case: DrafterCase) -> None:
    """For a lookup, four tokens in one step are the same as four steps."""
    for text in streams(64).values():
        world, drafter = new(case)
        twin_world, twin = new(case)
        for w, d in ((world, drafter), (twin_world, twin)):
            w.start(d, text, START)
        for _ in range(4):
            chain = DraftTree.chain(world.oracle(3))
            together = world.commit(drafter, chain)
            assert len(together) == 4
            apart: list[int] = []
            for _ in range(4):
                apart += twin_world.commit(twin, DraftTree.empty())
            assert together == apart
            a, b = world.ask(drafter, 32), twin_world.ask(twin, 32)
            assert a.token_ids.tolist() == b.token_ids.tolist() and a.parents.tolist() == b.parents.tolist()


def check_reset(case: DrafterCase) -> None:
    """After `reset` nothing is left of earlier requests, open ones included."""
    texts = streams(64)
    world, drafter = new(case)
    empty = copy.deepcopy(drafter.state_dict())
    play(world, drafter, text=texts["periodic"])
    run(world, drafter, text=texts["few tokens"])
    drafter.reset()
    assert same_state(drafter.state_dict(), empty), "reset left something in the state"
    fresh_world, fresh = new(case)
    for text in (texts["periodic"], texts["noisy phrase"]):
        assert_same_run(play(world, drafter, text=text), play(fresh_world, fresh, text=text), "reset did not forget")


def check_state_is_all_that_stays(case: DrafterCase, *, finished: bool) -> None:
    """What one request leaves to the next is what `state_dict` holds: restored elsewhere it gives the same drafts."""
    texts = streams(64)
    world, drafter = new(case)
    play(world, drafter, text=texts["noisy phrase"])
    (play if finished else run)(world, drafter, text=texts["few tokens"])
    state = drafter.state_dict()
    check_plain(state)
    kept = copy.deepcopy(state)
    copy_world, restored = new(case)
    play(copy_world, restored, text=texts["periodic"])
    restored.load_state_dict(state)
    assert same_state(restored.state_dict(), kept), "loading and saving again gives another state"
    for text in (texts["few tokens"], texts["noisy phrase"], texts["random"]):
        assert_same_run(
            play(world, drafter, text=text), play(copy_world, restored, text=text), "the restored drafter differs"
        )
    assert same_state(state, kept), "the state that was handed out changed afterwards"
    assert same_state(drafter.state_dict(), restored.state_dict())


def check_foreign_states(case: DrafterCase) -> None:
    """States of something else, or damaged ones, are refused with ValueError and change nothing."""
    world, drafter = new(case)
    play(world, drafter, text=streams(64)["noisy phrase"])
    state = drafter.state_dict()
    kept = copy.deepcopy(state)
    damaged: list[Any] = [{"of something else": 1}, {**state, "of something else": 1}]
    for key in state:
        damaged.append({other: value for other, value in state.items() if other != key})
        damaged.append({**state, key: "garbage"})
        damaged.append({**state, key: [-7, "garbage"]})
    for wrong in damaged:
        try:
            drafter.load_state_dict(wrong)
        except ValueError:
            pass
        else:
            raise AssertionError(f"a damaged state was taken: {wrong!r:.200}")
        assert same_state(drafter.state_dict(), kept), "a refused state changed the drafter"


def check_plain(value: Any) -> None:
    """Only plain Python and numpy values."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            assert isinstance(key, str | int), f"state has a key {key!r}"
            check_plain(item)
    elif isinstance(value, list | tuple):
        for item in value:
            check_plain(item)
    else:
        plain = value is None or isinstance(value, bool | int | float | str | bytes | np.ndarray | np.generic)
        assert plain, f"state holds a {type(value).__name__}"
        assert not isinstance(value, np.ndarray) or value.dtype != object, "state holds an object array"


def same_state(a: Any, b: Any) -> bool:
    """Equal nested plain and numpy values."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f")
    return bool(a == b)


def assert_same_run(a: list[DraftTree], b: list[DraftTree], message: str) -> None:
    assert len(a) == len(b) and all(map(same, a, b)), message
