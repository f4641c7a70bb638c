"""Training the two policies of Learning to Draft on recorded trees.

The paper (arXiv 2603.01639) trains with PPO on live rollouts. Here every position is recorded with what each choice of
depth and size would have given, which is known exactly because decoding is lossless, so the expected reward of both
policies needs no sampling:

    J = mean over positions of  sum_d  c_d s_d  sum_a pi(a | x_d) r(d, a),     c_d = product over d' < d of (1 - s_d'),

s_d the chance to stop at depth d (1 at the last one), pi the size policy, x_d what both see there, and r = (accepted +
1) / seconds, the paper's reward. Gradient ascent on J with a small bonus for entropy that fades is policy gradient with
neither sampling noise nor a critic; both policies learn at once and adapt to each other, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from adaptspec.drafters.draft_policies import DEPTHS, FEATURES, SIZES, DraftPolicies, Network

_FADES = 0.5
"""Share of training after which there is no bonus for entropy."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """How the policies are trained.

    Attributes:
        steps: of Adam.
        batch: positions per step; all of them if there are fewer.
        hidden: units of each policy.
        lr: falls to 0 along a cosine.
        entropy: bonus at the start, in units of the mean reward.
        held_out: share of prompts that are only looked at.
    """

    steps: int = 1500
    batch: int = 1024
    hidden: int = 32
    lr: float = 5e-3
    entropy: float = 0.02
    held_out: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not self.lr > 0.0 or not self.entropy >= 0.0:
            raise ValueError(f"lr must be > 0 and entropy >= 0, got {self.lr} and {self.entropy}")
        if not 0.0 <= self.held_out < 1.0:
            raise ValueError(f"held_out must be in [0, 1), got {self.held_out}")


def train_policies(
    features: np.ndarray,
    accepted: np.ndarray,
    seconds: np.ndarray,
    *,
    prompts: np.ndarray | None = None,
    drafter: str = "griffin",
    settings: PolicySettings | None = None,
    card: dict[str, Any] | None = None,
    report: Callable[[int, float], None] = lambda step, reward: None,
) -> DraftPolicies:
    """Train both policies. P positions, D depths, A sizes, F features.

    Args:
        features: [P, D, F].
        accepted: [P, D, A], draft tokens.
        seconds: [P, D, A], of a whole step.
        prompts: int [P], which prompt each position is of; whole prompts are held out. None: nothing is.
        card: to note in the policies, beside what training knows.
        report: called after every step with its number and the expected reward.

    Returns:
        policies whose card says what they reach: "reward" with the mean reward of the policies, of the best static
        choice (chosen on the training positions) and of the best choice at every position, and "held_out" with the same
        for held-out prompts.

    Raises:
        ValueError: arrays of shapes that do not fit, none or impossible values.
    """
    settings = PolicySettings() if settings is None else settings
    shape = (len(features), len(DEPTHS))
    for name, array, wanted in (
        ("features", features, (*shape, FEATURES)),
        ("accepted", accepted, (*shape, len(SIZES))),
        ("seconds", seconds, (*shape, len(SIZES))),
    ):
        if array.shape != wanted or not np.isfinite(array).all():
            raise ValueError(f"{name} must be finite numbers {list(wanted)}, got {list(array.shape)}")
    if not len(features):
        raise ValueError("features must hold at least one position, got none")
    if not (seconds > 0).all() or not (accepted >= 0).all():
        raise ValueError("seconds must be > 0 and accepted >= 0")
    if prompts is not None and len(prompts) != len(features):
        raise ValueError(f"prompts must have {len(features)} entries, one per position, got {len(prompts)}")
    rewards = (accepted + 1.0) / seconds
    held = _held_out(prompts, settings) if prompts is not None else np.zeros(len(features), dtype=bool)
    x = features[~held].astype(np.float64)
    mean, spread = x.mean(axis=(0, 1)), np.maximum(x.std(axis=(0, 1)), 1e-3)
    depth, size = _train((x - mean) / spread, rewards[~held], settings=settings, report=report)
    policies = DraftPolicies(mean, spread, depth, size, drafter)
    best = np.unravel_index(rewards[~held].mean(axis=0).argmax(), rewards.shape[1:])
    static = (int(best[0]), int(best[1]))
    found = {
        **(card or {}),
        "positions": int((~held).sum()),
        "settings": {name: getattr(settings, name) for name in PolicySettings.__slots__},
        "static": {"depth": DEPTHS[static[0]], "size": SIZES[static[1]]},
        "reward": _rewards(policies, features[~held], rewards[~held], static),
    }
    if held.any():
        found["held_out"] = {"positions": int(held.sum()), **_rewards(policies, features[held], rewards[held], static)}
    return DraftPolicies(mean, spread, depth, size, drafter, found)


def play(policies: DraftPolicies, features: np.ndarray) -> tuple[int, int]:
    """What the policies choose at one position [D, F]: an index of `DEPTHS` and one of `SIZES`."""
    row = next((row for row in range(len(DEPTHS) - 1) if policies.stops(features[row])), len(DEPTHS) - 1)
    return row, SIZES.index(policies.nodes(features[row]))


def _held_out(prompts: np.ndarray, settings: PolicySettings) -> np.ndarray:
    """bool [P]; at least one prompt is on each side if there are two and any share is to be held out."""
    names = np.unique(prompts)
    count = min(len(names) - 1, max(1, round(settings.held_out * len(names)))) if settings.held_out else 0
    chosen = np.random.default_rng([settings.seed, 2]).permutation(names)[:count]
    return np.isin(prompts, chosen)


def _train(
    x: np.ndarray, rewards: np.ndarray, *, settings: PolicySettings, report: Callable[[int, float], None]
) -> tuple[Network, Network]:
    draw = torch.Generator().manual_seed(settings.seed)
    depth, size = _perceptron(settings.hidden, 1, draw), _perceptron(settings.hidden, len(SIZES), draw)
    inputs, gains = torch.from_numpy(x).float(), torch.from_numpy(rewards / rewards.mean()).float()
    optimiser = torch.optim.Adam([*depth.parameters(), *size.parameters()], lr=settings.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, settings.steps)
    for step in range(settings.steps):
        rows = slice(None)
        if len(inputs) > settings.batch:
            rows = torch.randint(len(inputs), (settings.batch,), generator=draw)
        seen, gain = inputs[rows], gains[rows]
        stop = depth(seen[:, :-1])[..., 0]
        chosen = torch.log_softmax(size(seen), dim=-1)
        last = torch.zeros_like(stop[:, :1])
        # Chances as logarithms: of going on to each depth, and of stopping there.
        reached = torch.cat([last, nn.functional.logsigmoid(-stop).cumsum(dim=1)], dim=1)
        ended = reached + torch.cat([nn.functional.logsigmoid(stop), last], dim=1)
        chances = ended[..., None] + chosen
        value = (chances.exp() * gain).sum(dim=(1, 2)).mean()
        bonus = settings.entropy * max(0.0, 1.0 - step / (_FADES * settings.steps))
        loss = -value + bonus * (chances.exp() * chances).sum(dim=(1, 2)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        report(step + 1, float(value.detach() * rewards.mean()))
    return _network(depth), _network(size)


def _perceptron(hidden: int, out: int, draw: torch.Generator) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, out))
    with torch.no_grad():
        layers[0].weight.copy_(torch.randn(layers[0].weight.shape, generator=draw) / FEATURES**0.5)
        layers[2].weight.copy_(0.01 * torch.randn(layers[2].weight.shape, generator=draw))
        layers[0].bias.zero_()
        layers[2].bias.zero_()
    return layers


def _network(layers: nn.Sequential) -> Network:
    arrays = [layers[0].weight, layers[0].bias, layers[2].weight, layers[2].bias]
    return Network(*(array.detach().double().numpy() for array in arrays))


def _rewards(
    policies: DraftPolicies, features: np.ndarray, rewards: np.ndarray, static: tuple[int, int]
) -> dict[str, float]:
    """Mean rewards, tokens per second of single steps."""
    mine = [float(rewards[(i, *play(policies, features[i].astype(np.float64)))]) for i in range(len(features))]
    return {
        "policies": round(float(np.mean(mine)), 4),
        "static": round(float(rewards[:, static[0], static[1]].mean()), 4),
        "best_at_every_position": round(float(rewards.max(axis=(1, 2)).mean()), 4),
    }
