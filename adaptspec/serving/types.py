"""What a serving stack tells the policy before and after a step, and what it is told. R rows, one per request."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np

EVIDENCE_LEVELS = 8
"""How finely drafters may say how sure they are: whole numbers from 0, -1 where nothing is known."""

OFF = "ar"
"""The arm that drafts nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """The batch before a step, whole: what one row is worth depends on what the others cost.

    Arrays may be given as lists; None stands for the value in brackets.

    Attributes:
        request_ids: [R], different.
        context_lengths: int64 [R], committed tokens.
        remaining: int64 [R], tokens that may still be emitted [no limit].
        speculate: bool [R], False where the request asked for no speculation [True].
        max_lengths: int64 [R], at most so many draft tokens on the row [no limit].
        decoding: bool [R], False where the row is still in its prompt: it is given no draft and does not count as part
            of the decode batch [True].
        prefill_tokens: prompt tokens that the same pass computes, over all rows.
        draft_budget: at most so many draft tokens in the whole step [no limit].
        available: by drafter, int64 [R]: how many tokens it is known to have for the row (0: it declines), -1 where
            that is unknown before it is asked. Lookups know; name only those that do.
        evidence: by drafter, int64 [R] in [0, EVIDENCE_LEVELS): how sure it is of the row, more is surer, -1 unknown.
        unavailable: drafters that cannot be asked in this step.

    Raises:
        ValueError: a wrong shape, a request twice or not hashable, a negative count, evidence out of range.
    """

    request_ids: Sequence[Hashable]
    context_lengths: np.ndarray
    remaining: np.ndarray | None = None
    speculate: np.ndarray | None = None
    max_lengths: np.ndarray | None = None
    decoding: np.ndarray | None = None
    prefill_tokens: int = 0
    draft_budget: int | None = None
    available: Mapping[str, np.ndarray] = field(default_factory=dict)
    evidence: Mapping[str, np.ndarray] = field(default_factory=dict)
    unavailable: Collection[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.request_ids, str):
            raise ValueError(f"request_ids must be a list of requests, got the string {self.request_ids!r}")
        ids = tuple(self.request_ids)
        count = len(ids)
        try:
            different = len(set(ids))
        except TypeError as error:
            raise ValueError(f"request_ids must be hashable: {error}") from error
        if different != count:
            raise ValueError("request_ids must be different, got one twice")
        fill = object.__setattr__
        fill(self, "request_ids", ids)
        fill(self, "context_lengths", counts("context_lengths", self.context_lengths, count))
        for name in ("remaining", "max_lengths"):
            if (value := getattr(self, name)) is not None:
                fill(self, name, counts(name, value, count))
        for name in ("speculate", "decoding"):
            if (value := getattr(self, name)) is not None:
                fill(self, name, flags(name, value, count))
        whole("prefill_tokens", self.prefill_tokens)
        if self.draft_budget is not None:
            whole("draft_budget", self.draft_budget)
        for name, most in (("available", None), ("evidence", EVIDENCE_LEVELS - 1)):
            given = mapping(name, getattr(self, name))
            if given:
                checked = {
                    key: counts(f"{name} of {key!r}", value, count, least=-1, most=most) for key, value in given.items()
                }
                fill(self, name, checked)
        if isinstance(self.unavailable, str):
            raise ValueError(f"unavailable must be a collection of drafters, got the string {self.unavailable!r}")

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What to do in one step. Rows are those of the context, in its order.

    Attributes:
        step_id: 1, 2, ... per policy.
        request_ids: [R].
        names: arms of the policy, "ar" first.
        arms: int64 [R], index into `names`.
        lengths: int64 [R], draft tokens to ask the row's drafter for; 0 where the arm is "ar". May be less than the
            arm's number where the row or the step may take no more.
        plan: what the batch as a whole does: "off", or the drafters in play, like "eagle3" and "eagle3+prompt-lookup".
        propensity: the probability with which the plan was chosen.
        reason: a key of `adaptspec.serving.choosing.REASONS`.
        refresh: drafters whose own state must be brought up to date in this step although they draft nothing.
        cold_tokens: int64 [R], committed tokens that the row's drafter has not seen yet and must catch up on.
        expected_tokens, expected_seconds: of the whole step, None where nothing is known.
        digest: hash of all that the policy was told and decided so far; equal on ranks that decide alike.
        memo: what the policy wants back.
    """

    step_id: int
    request_ids: tuple[Hashable, ...]
    names: tuple[str, ...]
    arms: np.ndarray
    lengths: np.ndarray
    plan: str = "off"
    propensity: float = 1.0
    reason: str = ""
    refresh: tuple[str, ...] = ()
    cold_tokens: np.ndarray | None = None
    expected_tokens: float | None = None
    expected_seconds: float | None = None
    digest: str = ""
    memo: Any = None

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def arm_names(self) -> list[str]:
        """[R], like "eagle3@4" and "ar"."""
        return [self.names[arm] for arm in self.arms.tolist()]

    @property
    def drafters(self) -> list[str | None]:
        """[R], who drafts for the row; None for nobody."""
        return [drafter_of(self.names[arm]) for arm in self.arms.tolist()]

    @property
    def off(self) -> bool:
        """Whether nobody drafts anything in this step."""
        return not self.lengths.any()

    def rows(self, drafter: str) -> np.ndarray:
        """int64, the rows for which `drafter` drafts."""
        return np.array([row for row, name in enumerate(self.drafters) if name == drafter], dtype=np.int64)

    def length(self, drafter: str) -> int:
        """The longest draft that `drafter` is asked for; 0 if it is not asked."""
        rows = self.rows(drafter)
        return int(self.lengths[rows].max()) if len(rows) else 0


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """What came of a step. Rows are those of the decision. Proposed, verified and accepted are three different things.

    Attributes:
        proposed: int64 [R], tokens that the drafter had for the row, padding not counted; 0 where it declined.
        verified: int64 [R], how many of them the target judged. A scheduler's budget or a grammar may have cut the
            rest off: that says nothing about the drafter.
        accepted: int64 [R], how many of them were accepted, bonus not counted.
        censored: bool [R], True where the row stopped for another reason than the next draft token being wrong: the end
            of the text, a stop string, a limit [False]. A draft that was accepted whole is censored anyway.
        emitted: int64 [R], tokens that the row gained, bonus counted [accepted + 1].
        observed: bool [R], False where there is nothing to tell, for example a request that was preempted [True].
        stale: bool [R], True where the drafter drafted although its own state lacked `cold_tokens` [False].
        padding: positions of the pass that held no real draft token (-1 fillers), over all rows.
        seconds: wall time of the whole step [the sum of the parts below].
        draft_seconds: by drafter, for all its rows together.
        verify_seconds: the target's pass with sampling.
        refresh_seconds: by drafter, catching up and `Decision.refresh`.
        policy_seconds: deciding and observing, as the stack measured it.

    Raises:
        ValueError: a wrong shape, a negative number, accepted > verified or verified > proposed.
    """

    proposed: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    censored: np.ndarray | None = None
    emitted: np.ndarray | None = None
    observed: np.ndarray | None = None
    stale: np.ndarray | None = None
    padding: int = 0
    seconds: float | None = None
    draft_seconds: Mapping[str, float] = field(default_factory=dict)
    verify_seconds: float | None = None
    refresh_seconds: Mapping[str, float] = field(default_factory=dict)
    policy_seconds: float = 0.0

    def __post_init__(self) -> None:
        count = len(np.atleast_1d(self.proposed))
        fill = object.__setattr__
        for name in ("proposed", "verified", "accepted"):
            fill(self, name, counts(name, getattr(self, name), count))
        for upper, lower in (("proposed", "verified"), ("verified", "accepted")):
            more, less = getattr(self, upper), getattr(self, lower)
            if np.count_nonzero(less > more):
                row = int((less > more).argmax())
                raise ValueError(f"{lower} must be <= {upper}, got {less[row]} of {more[row]} in row {row}")
        if self.emitted is not None:
            fill(self, "emitted", counts("emitted", self.emitted, count))
        for name in ("censored", "observed", "stale"):
            if (value := getattr(self, name)) is not None:
                fill(self, name, flags(name, value, count))
        whole("padding", self.padding)
        for name in ("seconds", "verify_seconds", "policy_seconds"):
            if (value := getattr(self, name)) is not None or name == "policy_seconds":
                fill(self, name, seconds(name, value))
        for name in ("draft_seconds", "refresh_seconds"):
            if given := mapping(name, getattr(self, name)):
                own = {drafter: seconds(f"{name} of {drafter!r}", value) for drafter, value in given.items()}
                fill(self, name, own)

    def __len__(self) -> int:
        return len(self.proposed)

    @property
    def wall_seconds(self) -> float | None:
        """`seconds`, or the sum of the parts; None if the time of the pass is unknown too."""
        if self.seconds is not None:
            return self.seconds
        if self.verify_seconds is None:
            return None
        return (
            self.verify_seconds
            + sum(self.draft_seconds.values())
            + sum(self.refresh_seconds.values())
            + self.policy_seconds
        )


def count_drafts(drafts: Iterable[Sequence[int]]) -> np.ndarray:
    """int64 [R], real draft tokens per row: those before the first negative one. Stacks fill rows up with -1.

    >>> count_drafts([[5, 6, -1], [], [-1, -1]]).tolist()
    [2, 0, 0]
    """
    found = []
    for draft in drafts:
        ids = draft if isinstance(draft, list) else list(draft)
        found.append(next((place for place, token in enumerate(ids) if token < 0), len(ids)))
    return np.array(found, dtype=np.int64)


def drafter_of(arm: str) -> str | None:
    """Who drafts when an arm is played: its name, with the vocabulary if there is one; None for "ar".

    >>> drafter_of("eagle3@4"), drafter_of("eagle3@4/fr:16384"), drafter_of("ar")
    ('eagle3', 'eagle3/fr:16384', None)
    """
    if arm == OFF:
        return None
    drafter, _, rest = arm.rpartition("@")
    _, slash, vocab = rest.partition("/")
    return f"{drafter}{slash}{vocab}"


def counts(name: str, value: Any, length: int, *, least: int = 0, most: int | None = None) -> np.ndarray:
    """int64 [length] within the limits, else ValueError."""
    array = np.asarray(value)
    if array.shape != (length,):
        raise ValueError(f"{name} must have shape [{length}], got {list(array.shape)}")
    if array.dtype.kind not in "iu":
        if length:
            raise ValueError(f"{name} must be whole numbers, got {array.dtype}")
        array = array.astype(np.int64)
    array = array.astype(np.int64, copy=False)
    if length and (array.min() < least or (most is not None and array.max() > most)):
        bad = int(((array < least) | (array > (array.max() if most is None else most))).argmax())
        limit = f">= {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"{name} must be {limit}, got {array[bad]} in row {bad}")
    return array


def flags(name: str, value: Any, length: int) -> np.ndarray:
    """bool [length], else ValueError."""
    array = np.asarray(value)
    if array.shape != (length,) or (length and array.dtype != np.bool_):
        raise ValueError(f"{name} must be bool of shape [{length}], got {array.dtype} {list(array.shape)}")
    return array.astype(np.bool_, copy=False)


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """`value` if it is a mapping, else ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping by drafter, got {value!r:.80}")
    return value


def whole(name: str, value: Any) -> int:
    """A whole number >= 0, else ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ValueError(f"{name} must be a whole number >= 0, got {value!r}")
    return int(value)


def seconds(name: str, value: Any) -> float:
    """A finite number >= 0, else ValueError."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, np.number))
        or not (isfinite(value) and value >= 0)
    ):
        raise ValueError(f"{name} must be >= 0 seconds and finite, got {value!r}")
    return float(value)
