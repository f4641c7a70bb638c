"""The library's policies on many replicas at once: every array holds a row per replica."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from adaptspec.names import unknown_name

POLICIES = ("hedge", "ucb", "exp3")


def merge_interval(sharing: str) -> int:
    """0 for never, 1 for one learner, else the steps between merges.

    Raises:
        ValueError: none of "isolated", "shared" and "merged:N".
    """
    kind, _, number = sharing.partition(":")
    if kind == "merged" and number.isdecimal() and int(number) > 1:
        return int(number)
    if sharing not in ("isolated", "shared"):
        raise ValueError(f"sharing must be 'isolated', 'shared' or 'merged:N' with N > 1, got {sharing!r}")
    return int(sharing == "shared")


class Learner(ABC):
    """One policy on every replica. All arrays are [replicas, arms].

    Attributes:
        full_information: learns from all arms.
        step: decisions so far.
        sums: by name, what adds up over replicas.
    """

    full_information = False

    def __init__(self, replicas: int, arms: int, seed: int) -> None:
        self.replicas, self.arms = replicas, arms
        self.step = 0
        self.sums: dict[str, np.ndarray] = {"rounds": np.zeros((replicas, 1))}
        self.base: dict[str, np.ndarray] = {}
        self._rng = np.random.default_rng([seed, 11])
        self._chosen = np.zeros(replicas, dtype=np.int64)

    def select(self) -> np.ndarray:
        """int64 [replicas]."""
        self.step += 1
        self._chosen = self._choose()
        return self._chosen

    @abstractmethod
    def _choose(self) -> np.ndarray:
        """int64 [replicas]."""

    def learn_played(self, gains: np.ndarray, alive: np.ndarray) -> None:
        """Gains [replicas] of the arms that were played; not asked of learners with full information."""
        raise NotImplementedError

    def learn_all(self, gains: np.ndarray, observed: np.ndarray) -> None:
        """Gains and mask of all arms; asked of learners with full information only."""
        raise NotImplementedError

    def merge(self, *, shared: bool) -> None:
        """Everyone begins again from base + the sum of what each learnt since; `shared`: that is every step."""
        for name, values in self.sums.items():
            base = self.base.get(name, np.zeros_like(values[:1]))
            merged = base + (values - base).sum(axis=0, keepdims=True)
            self.base[name] = merged
            values[:] = merged
        self._merged()

    def _merged(self) -> None:
        """Recompute what follows from the sums."""

    def _draw(self, probabilities: np.ndarray) -> np.ndarray:
        """One arm per replica."""
        cumulative = np.cumsum(probabilities, axis=1)
        place = self._rng.random((self.replicas, 1)) * cumulative[:, -1:]
        return np.minimum((cumulative <= place).sum(axis=1), self.arms - 1)


class Fixed(Learner):
    """Always one arm."""

    def __init__(self, replicas: int, arms: int, seed: int, *, arm: int) -> None:
        super().__init__(replicas, arms, seed)
        self._always = np.full(replicas, arm, dtype=np.int64)

    def _choose(self) -> np.ndarray:
        return self._always

    def learn_played(self, gains: np.ndarray, alive: np.ndarray) -> None:
        """Nothing."""


class Hedge(Learner):
    """`adaptspec.bandits.Hedge`, anytime rate sqrt(8 ln N / t)."""

    full_information = True

    def __init__(self, replicas: int, arms: int, seed: int) -> None:
        super().__init__(replicas, arms, seed)
        self.sums["gains"] = np.zeros((replicas, arms))
        self._probabilities = np.full((replicas, arms), 1.0 / arms)

    def _choose(self) -> np.ndarray:
        rate = np.sqrt(8.0 * math.log(self.arms) / (self.sums["rounds"] + 1.0))
        scores = self.sums["gains"]
        weights = np.exp(rate * (scores - scores.max(axis=1, keepdims=True)))
        self._probabilities = weights / weights.sum(axis=1, keepdims=True)
        return self._draw(self._probabilities)

    def learn_all(self, gains: np.ndarray, observed: np.ndarray) -> None:
        mass = np.where(observed, self._probabilities, 0.0)
        mixture = (mass * gains).sum(axis=1, keepdims=True) / np.maximum(mass.sum(axis=1, keepdims=True), 1e-300)
        seen = observed.any(axis=1, keepdims=True)
        self.sums["gains"] += np.where(observed, gains, mixture) * seen
        self.sums["rounds"] += seen


class UCB(Learner):
    """`adaptspec.bandits.UCB1`: mean + sqrt(2 ln t / n)."""

    def __init__(self, replicas: int, arms: int, seed: int) -> None:
        super().__init__(replicas, arms, seed)
        self.sums |= {"counts": np.zeros((replicas, arms)), "gains": np.zeros((replicas, arms))}

    def _choose(self) -> np.ndarray:
        counts = self.sums["counts"]
        log_t = np.log(np.maximum(self.sums["rounds"], 1.0))
        known = np.maximum(counts, 1.0)
        scores = self.sums["gains"] / known + np.sqrt(2.0 * log_t / known)
        # Arms never observed come first, in turn; replicas begin at different ones, as they would by chance.
        turn = (np.arange(self.arms)[None, :] - np.arange(self.replicas)[:, None]) % self.arms
        return np.where(counts > 0.0, scores, 1e6 - turn).argmax(axis=1)

    def learn_played(self, gains: np.ndarray, alive: np.ndarray) -> None:
        at = np.arange(self.replicas), self._chosen
        self.sums["counts"][at] += alive
        self.sums["gains"][at] += gains * alive
        self.sums["rounds"][:, 0] += alive


class EXP3(Learner):
    """`adaptspec.bandits.EXP3`, exploration min(1, sqrt(K ln K / ((e - 1) t)))."""

    def __init__(self, replicas: int, arms: int, seed: int) -> None:
        super().__init__(replicas, arms, seed)
        self.sums["estimates"] = np.zeros((replicas, arms))
        self._probabilities = np.full((replicas, arms), 1.0 / arms)

    def _choose(self) -> np.ndarray:
        start = self.arms * math.log(self.arms) / (math.e - 1.0)
        gamma = np.minimum(1.0, np.sqrt(start / (self.sums["rounds"] + 1.0)))
        scores = self.sums["estimates"]
        weights = np.exp(gamma / self.arms * (scores - scores.max(axis=1, keepdims=True)))
        shares = weights / weights.sum(axis=1, keepdims=True)
        self._probabilities = (1.0 - gamma) * shares + gamma / self.arms
        return self._draw(self._probabilities)

    def learn_played(self, gains: np.ndarray, alive: np.ndarray) -> None:
        at = np.arange(self.replicas), self._chosen
        self.sums["estimates"][at] += gains * alive / self._probabilities[at]
        self.sums["rounds"][:, 0] += alive


def make_learner(policy: str, arms: Sequence[str], *, replicas: int, seed: int) -> Learner:
    """A learner by name.

    Raises:
        ValueError: unknown policy or arm.
    """
    if policy.startswith("fixed:"):
        arm = policy.removeprefix("fixed:")
        if arm not in arms:
            raise unknown_name("arm", arm, arms)
        return Fixed(replicas, len(arms), seed, arm=list(arms).index(arm))
    kinds: dict[str, type[Learner]] = {"hedge": Hedge, "ucb": UCB, "exp3": EXP3}
    if policy not in kinds:
        raise unknown_name("policy", policy, [*POLICIES, *(f"fixed:{arm}" for arm in arms)])
    return kinds[policy](replicas, len(arms), seed)
