"""The two policies of Learning to Draft: what they see of a tree, and their weights on disk. numpy only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from typing import Any

import numpy as np

from adaptspec.files import whole_file

FORMAT = "adaptspec-draft-policies"
VERSION = 1
EVERY = 3
"""Levels drafted between two decisions to go on (Learning to Draft, arXiv 2603.01639)."""

MOST_DEPTH = 12
STEP = 10
MOST_NODES = 240
SIZES = tuple(range(STEP, MOST_NODES + 1, STEP))
"""Sizes that can be chosen, 24 of them."""

DEPTHS = tuple(range(EVERY, MOST_DEPTH + 1, EVERY))
TOP = 8
"""Path scores of the last level that are looked at."""

LOWEST = -16.0
FEATURES = 2 + TOP + len(SIZES)


def describe_tree(levels: Sequence[np.ndarray], *, length: int) -> np.ndarray:
    """What both policies see of a tree, float64 [`FEATURES`]: its depth, the committed tokens (a logarithm), the best
    path scores of its last level, and the expected accepted tokens of its best s nodes for every s of `SIZES`.

    Args:
        levels: per depth the path log-probabilities of the nodes seen there, one level at least.
        length: committed tokens.
    """
    last = np.sort(levels[-1])[::-1][:TOP]
    found = np.full(FEATURES, -1.0)
    found[0] = len(levels) / MOST_DEPTH
    found[1] = log2(max(1, length)) / 16.0
    found[2 : 2 + len(last)] = np.maximum(last, LOWEST) / -LOWEST
    masses = np.exp(np.sort(np.concatenate(levels))[::-1][:MOST_NODES])
    expected = np.cumsum(masses)
    found[2 + TOP :] = expected[np.minimum(SIZES, len(expected)) - 1] / MOST_DEPTH
    return found


@dataclass(frozen=True, slots=True)
class Network:
    """A perceptron with one hidden layer: out @ tanh(hidden @ x + hidden_bias) + out_bias."""

    hidden: np.ndarray
    hidden_bias: np.ndarray
    out: np.ndarray
    out_bias: np.ndarray

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self.out @ np.tanh(self.hidden @ x + self.hidden_bias) + self.out_bias


@dataclass(frozen=True, slots=True)
class DraftPolicies:
    """When to stop drafting and how many nodes to propose.

    Attributes:
        mean, spread: float64 [`FEATURES`], of the features in training.
        depth: features -> [1], above 0: stop.
        size: features -> [24], the size with the largest is taken.
        drafter: whose trees they were trained on, as `make_drafter` takes it.
        card: what is known about the training.
    """

    mean: np.ndarray
    spread: np.ndarray
    depth: Network
    size: Network
    drafter: str = "griffin"
    card: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = {
            "mean": (FEATURES,),
            "spread": (FEATURES,),
            **_shapes("depth", hidden=self.depth.hidden_bias.size, out=1),
            **_shapes("size", hidden=self.size.hidden_bias.size, out=len(SIZES)),
        }
        for name, array in self.arrays().items():
            if array.shape != shapes[name] or not np.isfinite(array).all():
                raise ValueError(f"{name} must be finite numbers {list(shapes[name])}, got {list(array.shape)}")
        if not (self.spread > 0).all():
            raise ValueError("spread must be > 0")

    def arrays(self) -> dict[str, np.ndarray]:
        """All weights by name."""
        parts = {"depth": self.depth, "size": self.size}
        named = {
            f"{name}.{part}": getattr(network, part) for name, network in parts.items() for part in Network.__slots__
        }
        return {"mean": self.mean, "spread": self.spread, **named}

    def stops(self, features: np.ndarray) -> bool:
        """Whether to draft no deeper."""
        return bool(self.depth((features - self.mean) / self.spread)[0] > 0.0)

    def nodes(self, features: np.ndarray) -> int:
        """How many nodes to propose."""
        return SIZES[int(self.size((features - self.mean) / self.spread).argmax())]

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], *, drafter: str, card: Mapping[str, Any]) -> DraftPolicies:
        """The inverse of `arrays`. Raises ValueError if one is missing, or of another shape."""
        wanted = ("mean", "spread", *(f"{name}.{part}" for name in ("depth", "size") for part in Network.__slots__))
        if lacking := [name for name in wanted if name not in arrays]:
            raise ValueError(f"the policies lack {', '.join(lacking)}")
        found = {name: np.asarray(arrays[name], dtype=np.float64) for name in wanted}
        networks = {
            name: Network(*(found[f"{name}.{part}"] for part in Network.__slots__)) for name in ("depth", "size")
        }
        return cls(found["mean"], found["spread"], **networks, drafter=drafter, card=card)


def save_policies(path: str | os.PathLike[str], policies: DraftPolicies) -> None:
    """Write policies as a safetensors file with their card in it, whole or not at all; an older file is replaced."""
    from safetensors.numpy import save

    arrays = {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in policies.arrays().items()}
    own = {"format": FORMAT, "version": VERSION, "drafter": policies.drafter}
    data = save(arrays, metadata={"card": json.dumps({**own, **policies.card})})
    with whole_file(Path(path)) as file:
        file.write(data)


def read_policies(path: str | os.PathLike[str]) -> DraftPolicies:
    """Read a file of `save_policies`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is something else, of another version, or damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no file of draft policies: {path}")
    hint = "make one with: adaptspec train griffin-ltd"
    try:
        with safe_open(path, framework="np") as file:
            card = json.loads((file.metadata() or {}).get("card", "{}"))
            if not isinstance(card, dict) or (card.pop("format", None), card.pop("version", None)) != (FORMAT, VERSION):
                raise ValueError(f"{path} holds no draft policies of version {VERSION}; {hint}")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no draft policies: {error}; {hint}") from error
    drafter = card.pop("drafter", None)
    if not isinstance(drafter, str) or not drafter:
        raise ValueError(f"{path} is damaged: it names no drafter")
    try:
        return DraftPolicies.of(arrays, drafter=drafter, card=card)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _shapes(name: str, *, hidden: int, out: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.hidden": (hidden, FEATURES),
        f"{name}.hidden_bias": (hidden,),
        f"{name}.out": (out, hidden),
        f"{name}.out_bias": (out,),
    }
