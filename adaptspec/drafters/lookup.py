"""What drafters that copy from text they have seen share: one life cycle, option checks, and the store's format.

A lookup drafter needs nothing from the target but the committed tokens, keeps what it indexes of a request until
`finish`, and never samples: its trees are deterministic at every temperature.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from adaptspec.drafters.base import Drafter
from adaptspec.types import DraftContext, DraftTree, Observation

if TYPE_CHECKING:
    from adaptspec.target.base import Target

LARGEST_VOCABULARY = 2**31 - 1
"""Token stores hold 32-bit integers."""


def whole_number(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """`value` as it is, if it is a whole number in range.

    Raises:
        ValueError: it is not; names the option, the value and the range.
    """
    allowed = f">= {minimum}" if maximum is None else f"in [{minimum}, {maximum}]"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be a whole number {allowed}, got {value!r}")
    if value < minimum or (maximum is not None and value > maximum):
        raise ValueError(f"{name} must be {allowed}, got {value}")
    return int(value)


def real_number(name: str, value: object, minimum: float, maximum: float = float("inf")) -> float:
    """`value` as a float, if it is a finite number in range.

    Raises:
        ValueError: it is not; names the option, the value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not minimum <= value <= maximum:
        raise ValueError(f"{name} must be a number in [{minimum:g}, {maximum:g}], got {value!r}")
    if value == float("inf"):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)


def share(name: str, value: object) -> float:
    """`value` as a float, if it is a number in [0, 1).

    Raises:
        ValueError: it is not; names the option and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}")
    return float(value)


def switch(name: str, value: object) -> bool:
    """`value` as it is, if it is True or False.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def token_list(name: str, token_ids: object, vocab_size: int | None) -> list[int]:
    """Token ids [T] as plain integers.

    Raises:
        ValueError: not one-dimensional, not integers, or outside [0, vocab_size).
    """
    array = np.asarray(token_ids)
    if array.size == 0 and array.ndim == 1:
        return []
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be one-dimensional integers, got shape {array.shape}, dtype {array.dtype}")
    limit = LARGEST_VOCABULARY if vocab_size is None else vocab_size
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= limit:
        raise ValueError(f"{name} must be in [0, {limit}), got {low if low < 0 else high}")
    return array.tolist()


def survival_scores(match_length: int, depth: int) -> np.ndarray:
    """Log-probabilities [D] that a copy goes on for 1, 2, .. `depth` tokens after a match of `match_length`.

    P(d more | m so far) = n / (n + d) with n = m - 1/2: matches have no typical length, the longer one has lasted the
    longer it will last. Fitted to greedy answers of a small chat model, where it is within about 0.1 of the observed
    shares.
    """
    effective = match_length - 0.5
    return -np.log1p(np.arange(1, depth + 1) / effective)


def copied_chain(text: array[int], start: int, limit: int, *, match_length: int, periodic: bool) -> DraftTree:
    """The chain text[start], text[start + 1], .. of at most `limit` tokens, up to a negative token.

    Args:
        periodic: at the end of the text, go on with what was copied, as if it stood there.
    """
    copied = text[start : start + limit].tolist()
    if periodic and copied:
        while len(copied) < limit:
            copied.extend(copied[: limit - len(copied)])
    else:
        end = next((i for i, token in enumerate(copied) if token < 0), len(copied))
        del copied[end:]
    if not copied:
        return DraftTree.empty()
    evidence = {"match_length": np.full(len(copied), float(match_length))}
    return DraftTree.chain(copied, survival_scores(match_length, len(copied)), evidence=evidence)


class LookupDrafter(Drafter):
    """A drafter that copies from committed text. A subclass keeps the index; this class keeps the order of calls.

    Until `bind` any token id below 2^31 is taken; after it, ids must be below the target's vocabulary size.
    """

    isolate: ClassVar[bool] = False

    def __init__(self) -> None:
        self._vocab_size: int | None = None
        self._length = 0

    def bind(self, target: Target) -> None:
        """Raises ValueError when what was learnt belongs to another vocabulary, or V does not fit 32 bits."""
        vocab_size = whole_number("vocab_size of the target", target.vocab_size, 1, LARGEST_VOCABULARY)
        if self._vocab_size not in (None, vocab_size) and self._knows_tokens():
            raise ValueError(
                f"drafter {self.name!r} has learnt from a target with a vocabulary of {self._vocab_size}; "
                f"call reset() before binding one of {vocab_size}"
            )
        self._vocab_size = vocab_size

    def prefill(self, token_ids: np.ndarray, features: Mapping[int, Any] | None = None) -> None:
        tokens = token_list("token_ids", token_ids, self._vocab_size)
        if not tokens:
            raise ValueError("token_ids must hold at least the root, got none")
        self._length = len(tokens)
        self._begin(tokens)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        if budget < 0:
            raise ValueError(f"budget must be >= 0, got {budget}")
        self._require_request("propose")
        if context.length != self._length:
            raise ValueError(
                f"context.length must be {self._length}, the tokens drafter {self.name!r} was told of, "
                f"got {context.length}"
            )
        if budget == 0:
            return DraftTree.empty()
        return self._draft(budget, context.max_depth)

    def observe(self, observation: Observation) -> None:
        self._require_request("observe")
        tokens = observation.tokens.tolist()
        self._length += len(tokens)
        self._extend(tokens)

    def finish(self) -> None:
        if self._length:
            self._end()
            self._length = 0

    def reset(self) -> None:
        self._length = 0
        self._forget()

    def _require_request(self, call: str) -> None:
        if not self._length:
            raise RuntimeError(f"{call} needs an open request: call prefill first")

    @abstractmethod
    def _begin(self, tokens: list[int]) -> None:
        """Index a new request in place of whatever an unfinished one has left."""

    @abstractmethod
    def _extend(self, tokens: list[int]) -> None:
        """Index newly committed tokens."""

    @abstractmethod
    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        """A tree for budget >= 1 nodes; does not change the index."""

    @abstractmethod
    def _end(self) -> None:
        """Release the request's index; keep what later requests may use."""

    @abstractmethod
    def _forget(self) -> None:
        """Release everything, what was learnt over requests included."""

    def _knows_tokens(self) -> bool:
        """Whether something learnt over requests depends on the vocabulary."""
        return False


STATE_VERSION = 1


def pack_state(
    name: str, vocab_size: int | None, settings: Mapping[str, int], outputs: Sequence[Any]
) -> dict[str, Any]:
    """State of a store of past outputs.

    Args:
        name: the drafter's.
        settings: whole numbers on which the meaning of the outputs depends.
        outputs: token sequences, oldest first.
    """
    return {
        "drafter": name,
        "version": STATE_VERSION,
        "vocab_size": vocab_size,
        "settings": dict(settings),
        "outputs": [np.asarray(output, dtype=np.int32) for output in outputs],
    }


def unpack_state(
    state: Mapping[str, Any], *, name: str, vocab_size: int | None, settings: Mapping[str, int | None]
) -> tuple[int | None, dict[str, int], list[list[int]]]:
    """Vocabulary size, settings and outputs of `pack_state`, checked.

    Args:
        settings: the settings that the loading drafter has; None where any whole number >= 0 will do.

    Raises:
        ValueError: the state belongs to another drafter, version, vocabulary or setting, or is damaged.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state of drafter {name!r} must be a mapping, got {type(state).__name__}")
    keys = {"drafter", "version", "vocab_size", "settings", "outputs"}
    if set(state) != keys:
        raise ValueError(
            f"state of drafter {name!r} must have the keys {', '.join(sorted(keys))}, "
            f"got {', '.join(sorted(map(str, state))) or 'none'}"
        )
    if state["drafter"] != name:
        raise ValueError(f"state must be of drafter {name!r}, got one of {state['drafter']!r}")
    if state["version"] != STATE_VERSION:
        raise ValueError(f"version of the state must be {STATE_VERSION}, got {state['version']!r}")
    saved_size = state["vocab_size"]
    if saved_size is not None:
        saved_size = whole_number("vocab_size of the state", saved_size, 1, LARGEST_VOCABULARY)
        if vocab_size not in (None, saved_size):
            raise ValueError(f"vocab_size of the state must be {vocab_size}, got {saved_size}")
    saved = state["settings"]
    if not isinstance(saved, Mapping) or set(saved) != set(settings):
        raise ValueError(f"settings of the state must be {', '.join(sorted(settings))}, got {saved!r}")
    checked = {key: whole_number(f"{key} of the state", value, 0) for key, value in saved.items()}
    for key, value in settings.items():
        if value is not None and checked[key] != value:
            raise ValueError(f"{key} of the state must be {value} as in this drafter, got {checked[key]}")
    outputs = state["outputs"]
    if not isinstance(outputs, list):
        raise ValueError(f"outputs of the state must be a list, got {type(outputs).__name__}")
    size = saved_size if saved_size is not None else vocab_size
    return saved_size, checked, [token_list(f"outputs[{i}] of the state", o, size) for i, o in enumerate(outputs)]
