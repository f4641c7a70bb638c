"""Prediction with expert advice, token by token: what several calibrated drafters say together.

Below one node u of a merged tree every drafter m that proposes children of u is an expert. It gives its own children
p_m(x), and r_m = 1 - sum p_m to everything else. The experts are pooled in the log domain (a softmax over the merged
children of u and "other"). With K(u) the experts that speak below u and S(x) those that propose x,

    z_x     = sum_{m in K(u)} a_m w[S(x), m] log(p_m(x) if m proposes x else r_m) + b[S(x)],
    z_other = sum_{m in K(u)} a_m v[K(u), m] log r_m + c[K(u)],
    P(x | u) = exp z_x / (exp z_other + sum_{y below u} exp z_y),
    a_m     = sum_x p_m(x) / |S(x)| / sum_x p_m(x): experts that propose the same share one vote.

Weights start at w = v = 1, b = c = 0. Then one expert alone is believed as it is, experts that agree are averaged
(geometrically), and experts that propose different tokens are multiplied, so an unsure one hardly touches a sure one.
From there the weights are learnt online, by gradient steps on the log loss -log P(what came). Keying them by S(x) is
what lets agreement count for more, or less, than it does at the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptspec.bandits.checks import check_between
from adaptspec.bandits.state import check_equal, read_array, read_float
from adaptspec.control.calibration import Judged, judge
from adaptspec.types import DraftTree

MOST_EXPERTS = 8
"""There is a row of weights per set of experts, 2 ** M of them."""

_LEAST = 0.005
_LARGEST_SLOPE = 3.0
_LARGEST_BIAS = 4.0


@dataclass(frozen=True, slots=True)
class Votes:
    """What experts say of n nodes in g groups of siblings, whatever they are trusted.

    Attributes:
        features, other_features: float64 [M + 1, n] and [M + 1, g], what the weights are multiplied with.
        keys, other_keys: int64 [n] and [g], rows of the weights.
    """

    features: np.ndarray
    other_features: np.ndarray
    keys: np.ndarray
    other_keys: np.ndarray

    def at(self, rows: np.ndarray, groups: np.ndarray) -> Votes:
        """The part about some nodes and groups."""
        return Votes(
            self.features.take(rows, axis=1),
            self.other_features.take(groups, axis=1),
            self.keys[rows],
            self.other_keys[groups],
        )


class Mixer:
    """Mixed acceptance probabilities for merged trees, with weights that are learnt while it is in use.

    The learning rate after t mixed predictions is rate * (1 + boost / (1 + t / warmup)). A request may add a part of
    its own, an array from `new_local` that the caller keeps: it learns with `local_rate` and is forgotten with the
    request, while the shared weights go on.

    Args:
        names: the experts, at most 8.
        rate: slow learning rate. 0.02 did well on real traces, 0.1 did not.
        boost, warmup: how much faster the first predictions teach, and how many they are.
        local_rate: learning rate of the per-request part.

    Raises:
        ValueError: an option is out of range, or names that are not 1 to 8 different ones.

    >>> mixer = Mixer(["a"])
    >>> mixer.mix(DraftTree.chain([7]), np.array([[0]]), np.array([[0.8]])).round(3)
    array([0.8])
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        rate: float = 0.02,
        boost: float = 4.0,
        warmup: float = 100.0,
        local_rate: float = 0.02,
    ) -> None:
        self.names = tuple(names)
        experts = len(self.names)
        if not 1 <= experts <= MOST_EXPERTS or len(set(self.names)) != experts:
            raise ValueError(f"names must be 1 to {MOST_EXPERTS} different names, got {list(names)}")
        self.rate = check_between("rate", rate, low=0.0, high=1.0)
        self.boost = check_between("boost", boost, low=0.0, high=100.0, open_low=False)
        self.warmup = check_between("warmup", warmup, low=0.0, high=1e9)
        self.local_rate = check_between("local_rate", local_rate, low=0.0, high=1.0)
        self._bits = 1 << np.arange(experts)
        self._predictions = 0.0
        # Row S for nodes proposed by the set S, row 2 ** M + K for "other" where K speaks. Last column: the bias.
        self._weights = np.ones((2 << experts, experts + 1))
        self._weights[:, experts] = 0.0

    def new_local(self) -> np.ndarray:
        """The per-request part at the start of a request: float64 [2 * 2 ** M, M + 1] of zeros."""
        return np.zeros_like(self._weights)

    def mix(
        self, tree: DraftTree, origins: np.ndarray, conditionals: np.ndarray, *, local: np.ndarray | None = None
    ) -> np.ndarray:
        """float64 [N]: P(node accepted | its parent was), below 1 in sum over siblings.

        Args:
            tree: the merged tree.
            origins: int64 [M, N] from `adaptspec.trees.merge`, one row per expert; -1 where it did not propose.
            conditionals: float64 [M, N], each expert's calibrated conditional; not looked at where origins is -1.
            local: the per-request part.

        Raises:
            ValueError: arrays of another shape.
        """
        return self.predict(tree.parents, origins, conditionals, local=local)[0]

    def predict(
        self, parents: np.ndarray, origins: np.ndarray, conditionals: np.ndarray, *, local: np.ndarray | None = None
    ) -> tuple[np.ndarray, Votes]:
        """What `mix` says, and what `update` would compute again otherwise. The group of a node is its parent's row
        plus one.

        Args:
            parents: int64 [N], of the merged tree.
            origins, conditionals, local: as in `mix`.

        Raises:
            ValueError: arrays of another shape.
        """
        self._check(len(parents), origins, conditionals, local)
        groups, count = parents + 1, len(parents) + 1
        votes = self._votes(groups, count, origins >= 0, conditionals)
        return self._weighed(votes, groups, count, local)[0], votes

    def update(
        self,
        tree: DraftTree,
        origins: np.ndarray,
        conditionals: np.ndarray,
        continuation: Sequence[int] | np.ndarray,
        *,
        local: np.ndarray | None = None,
        judged: Judged | None = None,
        votes: Votes | None = None,
    ) -> None:
        """One gradient step from every prediction about a token that is known now.

        Args:
            tree, origins, conditionals: as in `mix`; the whole merged tree, not only what was verified of it.
            continuation: [T], the tokens that followed the root.
            local: the per-request part, changed in place.
            judged: what `judge` says, if that is known already.
            votes: what `predict` found of the same tree, to save time.

        Raises:
            ValueError: arrays of another shape, or a sampled tree.
        """
        self._check(len(tree), origins, conditionals, local)
        rows, hits, depths = judge(tree, continuation) if judged is None else judged
        if not rows.size:
            return
        groups = depths - 1  # one group of siblings per depth, below consecutive nodes of the path
        count = int(depths.max())
        if votes is None:
            told = self._votes(groups, count, origins[:, rows] >= 0, conditionals[:, rows])
        else:
            above = np.empty(count, dtype=np.int64)
            above[groups] = tree.parents[rows] + 1
            told = votes.at(rows, above)
        mixed, other = self._weighed(told, groups, count, local)
        missed = 1.0 - np.bincount(groups, hits, count)
        keys = np.concatenate((told.keys, told.other_keys))
        slopes = np.concatenate(((mixed - hits) * told.features, (other - missed) * told.other_features), axis=1).T
        rate = self.rate * (1.0 + self.boost / (1.0 + self._predictions / self.warmup))
        _descend(self._weights, rate, keys, slopes, lowest_slope=0.0)
        if local is not None:
            _descend(local, self.local_rate, keys, slopes, lowest_slope=-_LARGEST_SLOPE)
        self._predictions += count

    def _votes(self, groups: np.ndarray, count: int, proposed: np.ndarray, conditionals: np.ndarray) -> Votes:
        """On n nodes in `count` groups of siblings."""
        experts, nodes = proposed.shape
        likely = np.where(proposed, conditionals, _LEAST)
        np.minimum(np.maximum(likely, _LEAST, out=likely), 1.0 - _LEAST, out=likely)
        likely *= proposed
        places = (groups + count * np.arange(experts)[:, None]).ravel()
        shape = (experts, count)
        sums = np.bincount(places, likely.ravel(), experts * count).reshape(shape)
        shared = likely / np.maximum(proposed.sum(axis=0), 1)
        votes = np.bincount(places, shared.ravel(), experts * count).reshape(shape) / np.maximum(sums, _LEAST)
        speaking = sums > 0.0
        log_rest = np.log(1.0 - np.minimum(sums, 1.0 - _LEAST))  # 0 where the expert is silent

        features = np.ones((experts + 1, nodes))
        log_likely = np.log(np.maximum(likely, _LEAST))
        np.multiply(np.where(proposed, log_likely, log_rest[:, groups]), votes[:, groups], out=features[:experts])
        other_features = np.ones((experts + 1, count))
        np.multiply(log_rest, votes, out=other_features[:experts])
        return Votes(features, other_features, self._bits @ proposed, self._bits @ speaking + (1 << experts))

    def _weighed(
        self, votes: Votes, groups: np.ndarray, count: int, local: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """float64 [n], P(node accepted | its parent was), and [count], P(none of them | the parent was accepted)."""
        weights, other_weights = self._weights[votes.keys], self._weights[votes.other_keys]
        if local is not None:
            weights += local[votes.keys]
            other_weights += local[votes.other_keys]
        # Slopes, biases and features are bounded, so exp cannot overflow.
        odds = np.exp(np.einsum("nk,kn->n", weights, votes.features))
        other_odds = np.exp(np.einsum("nk,kn->n", other_weights, votes.other_features))
        total = np.bincount(groups, odds, count) + other_odds
        return odds / total[groups], other_odds / total

    def _check(self, nodes: int, origins: np.ndarray, conditionals: np.ndarray, local: np.ndarray | None) -> None:
        shape = (len(self.names), nodes)
        for name, array, expected in (
            ("origins", origins, shape),
            ("conditionals", conditionals, shape),
            ("local", local, self._weights.shape),
        ):
            if array is not None and array.shape != expected:
                raise ValueError(f"{name} must have shape {list(expected)}, got {list(array.shape)}")

    def state_dict(self) -> dict[str, Any]:
        """Settings and shared weights as plain values; per-request parts belong to their requests."""
        return {**self._settings(), "predictions": self._predictions, "weights": self._weights.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the shared weights.

        Raises:
            ValueError: other experts or settings, or not the weights of such a mixer.
        """
        for key, value in self._settings().items():
            check_equal(state, key, value)
        predictions = read_float(state, "predictions", minimum=0.0)
        largest = max(_LARGEST_SLOPE, _LARGEST_BIAS)
        self._weights = read_array(state, "weights", self._weights.shape, minimum=-largest, maximum=largest)
        self._predictions = predictions

    @classmethod
    def merge(cls, states: Sequence[Mapping[str, Any]], *, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One state: the replicas' weights averaged by what each predicted since `base`, within the usual bounds.

        Raises:
            ValueError: states of other experts or settings, or damaged ones.
        """
        merged, *others = (cls._restored(state) for state in states)
        start = cls._restored(base) if base is not None else None
        for other in (*others, *([] if start is None else [start])):
            if other._settings() != merged._settings():
                raise ValueError(f"states must agree on settings, got {merged._settings()} and {other._settings()}")
        before = 0.0 if start is None else start._predictions
        counts = np.array([max(0.0, mixer._predictions - before) for mixer in (merged, *others)])
        if counts.sum() > 0.0:
            weights = np.stack([mixer._weights for mixer in (merged, *others)])
            merged._weights = np.tensordot(counts / counts.sum(), weights, axes=1)
        merged._predictions = before + float(counts.sum())
        return merged.state_dict()

    @classmethod
    def _restored(cls, state: Mapping[str, Any]) -> Mixer:
        settings = {key: state.get(key) for key in ("names", "rate", "boost", "warmup", "local_rate")}
        if not isinstance(settings["names"], list):
            raise ValueError(f"state: names must be a list, got {settings['names']!r:.80}")
        names = settings.pop("names")
        mixer = cls(names, **settings)
        mixer.load_state_dict(state)
        return mixer

    def _settings(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "rate": self.rate,
            "boost": self.boost,
            "warmup": self.warmup,
            "local_rate": self.local_rate,
        }


def _descend(weights: np.ndarray, rate: float, keys: np.ndarray, slopes: np.ndarray, *, lowest_slope: float) -> None:
    """weights[keys] -= rate * slopes, in place and within bounds; repeated keys add up."""
    np.subtract.at(weights, keys, rate * slopes)
    touched = weights[keys]
    np.maximum(np.minimum(touched, _LARGEST_SLOPE), lowest_slope, out=touched)
    touched[:, -1] = np.maximum(np.minimum(weights[keys, -1], _LARGEST_BIAS), -_LARGEST_BIAS)
    weights[keys] = touched
