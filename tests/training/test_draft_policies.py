"""The learner of Learning to Draft finds what is best where that is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from adaptspec.drafters.draft_policies import DEPTHS, FEATURES, SIZES
from adaptspec.training.draft_policies import PolicySettings, play, train_policies

FAST = PolicySettings(steps=250, batch=256, lr=0.02)
POSITIONS = 300


def world(seed: int = 0) -> dict[str, np.ndarray]:
    """Positions of two kinds that a feature tells apart. Easy text is accepted to any depth, a token per level, as long
    as there are 60 nodes; hard text up to 2 tokens with any tree. Drafting a level takes 1 second, verifying a node
    0.01, and a step 2. So 12 levels and 60 nodes are best in easy text, 3 levels and 10 nodes in hard text."""
    rng = np.random.default_rng(seed)
    easy = rng.random(POSITIONS) < 0.5
    features = rng.normal(size=(POSITIONS, len(DEPTHS), FEATURES))
    features[:, :, 3] += np.where(easy, 3.0, -3.0)[:, None]
    depths, sizes = np.array(DEPTHS), np.array(SIZES)
    reach = np.where(sizes >= 60, depths[:, None], 3)
    accepted = np.where(easy[:, None, None], reach, 2)
    seconds = np.broadcast_to(2.0 + 0.1 * depths[:, None] + 0.01 * sizes, accepted.shape)
    return {"features": features, "accepted": accepted, "seconds": seconds, "easy": easy}


def learnt(data: dict[str, np.ndarray], **options: Any) -> Any:
    arrays = {name: data[name] for name in ("features", "accepted", "seconds")}
    return train_policies(**arrays, **{"settings": FAST, **options})


def share_right(policies: Any, data: dict[str, np.ndarray]) -> float:
    """Positions at which the policies choose what is best there."""
    rewards = (data["accepted"] + 1) / data["seconds"]
    right = 0
    for i, features in enumerate(data["features"]):
        best = np.unravel_index(rewards[i].argmax(), rewards[i].shape)
        right += play(policies, features) == best
    return right / len(rewards)


def test_both_policies_find_the_known_optimum() -> None:
    policies = learnt(world())
    assert share_right(policies, world(1)) > 0.95
    figures = policies.card["reward"]
    assert figures["policies"] > 0.98 * figures["best_at_every_position"] > 1.1 * figures["static"]


def test_what_they_see_decides() -> None:
    data = world()
    blind = {**data, "features": np.random.default_rng(5).normal(size=data["features"].shape)}
    policies = learnt(blind)
    figures = policies.card["reward"]
    assert figures["policies"] < 0.97 * figures["best_at_every_position"]
    assert policies.card["static"] == {"depth": 12, "size": 60}


@pytest.mark.parametrize("fault", ["seconds are left out", "accepted of another position"])
def test_wrong_rewards_are_noticed(fault: str) -> None:
    data = world()
    if fault == "seconds are left out":
        policies = learnt({**data, "seconds": np.ones_like(data["seconds"])})
    else:
        policies = learnt({**data, "accepted": np.roll(data["accepted"], 1, axis=0)})
    assert share_right(policies, world(1)) < 0.8


def test_equal_seeds_give_equal_policies() -> None:
    few = PolicySettings(steps=20)
    first, again, other = (learnt(world(), settings=s) for s in (few, few, PolicySettings(steps=20, seed=1)))
    assert all(np.array_equal(a, b) for a, b in zip(first.arrays().values(), again.arrays().values(), strict=True))
    assert not np.array_equal(first.depth.hidden, other.depth.hidden)


def test_whole_prompts_are_held_out() -> None:
    data = world()
    policies = learnt(data, prompts=np.arange(POSITIONS) // 30, settings=PolicySettings(steps=5))
    assert policies.card["positions"] == 240 and policies.card["held_out"]["positions"] == 60
    assert "held_out" not in learnt(data, prompts=np.zeros(POSITIONS), settings=PolicySettings(steps=5)).card


def test_bad_records() -> None:
    data = world()
    with pytest.raises(ValueError, match=r"accepted must be finite numbers \[300, 4, 24\], got \[300, 4, 23\]"):
        learnt({**data, "accepted": data["accepted"][..., 1:]})
    with pytest.raises(ValueError, match="seconds must be > 0"):
        learnt({**data, "seconds": 0.0 * data["seconds"]})
    with pytest.raises(ValueError, match="prompts must have 300 entries, one per position, got 2"):
        learnt(data, prompts=np.zeros(2))
    with pytest.raises(ValueError, match="at least one position, got none"):
        learnt({name: array[:0] for name, array in data.items()})
    with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
        PolicySettings(steps=0)
