"""The nouns that every other module shares: numpy and the standard library only, never torch.

Shape legend used in the whole package: B batch, N draft nodes, T tokens, V vocabulary, D depth, H hidden.
Lengths: `accepted_length` always includes the bonus token; acceptance rates never do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import numpy as np

ROOT = -1
"""Parent index of the nodes that directly continue the last committed token."""

Siblings = Literal["deterministic", "iid", "without-replacement"]
SIBLINGS: tuple[Siblings, ...] = ("deterministic", "iid", "without-replacement")


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens arranged as a tree below the last committed token.

    Nodes are stored parents first. Row 0 of anything "per verified row" (target logits, argmax, top-k, `draft_rows`)
    belongs to the root, row i + 1 to node i.

    Attributes:
        token_ids: int64 [N].
        parents: int64 [N], `parents[i] < i`; `ROOT` (-1) means child of the last committed token.
        scores: float64 [N], the drafter's estimate of the log-probability that the whole path down to the node is
            accepted; at most 0 and never above the parent's. Uncalibrated: comparable inside one tree only.
        siblings: how the children of one node were chosen. "deterministic": picked, q is one-hot. "iid": drawn
            independently from q (repeats possible). "without-replacement": drawn one after the other from q
            renormalised over what is left; children are stored in the order in which they were drawn.
        draft_probs: [R, V] array or tensor of draft distributions q, None for deterministic trees.
        draft_rows: int64 [N + 1]: `draft_rows[i + 1]` is the row of `draft_probs` from which the children of node i
            were drawn (`draft_rows[0]`: of the root), -1 where there are no children.
        evidence: what the drafter knows about each node, one float array [N] per name (for example "match_length",
            "count", "rank"); used to calibrate acceptance.
    """

    token_ids: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    siblings: Siblings = "deterministic"
    draft_probs: Any = None
    draft_rows: np.ndarray | None = None
    evidence: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> DraftTree:
        """The tree of a drafter that declines: no nodes."""
        return _EMPTY

    @classmethod
    def chain(cls, token_ids: Any, scores: Any = None, **fields: Any) -> DraftTree:
        """A single path. `scores` defaults to 0 (certain) at every node."""
        ids = np.asarray(token_ids, dtype=np.int64)
        values = np.zeros(len(ids)) if scores is None else np.asarray(scores, dtype=np.float64)
        return cls(ids, np.arange(-1, len(ids) - 1, dtype=np.int64), values, **fields)

    def __len__(self) -> int:
        return len(self.token_ids)

    def depths(self) -> np.ndarray:
        """int64 [N], 1 for children of the root."""
        parents = self.parents.tolist()
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return np.asarray(depths, dtype=np.int64)

    def validate(self, *, vocab_size: int, budget: int | None = None) -> None:
        """Check every promise the arrays make.

        Raises:
            ValueError: names the field, the offending node and value, and what is allowed.
        """
        n = len(self.token_ids)
        for name in ("token_ids", "parents", "scores"):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.shape != (n,):
                shape = getattr(array, "shape", type(array).__name__)
                raise ValueError(f"{name} must be a numpy array of shape [{n}], got {shape}")
        for name in ("token_ids", "parents"):
            if getattr(self, name).dtype.kind != "i":
                raise ValueError(f"{name} must have a signed integer dtype, got {getattr(self, name).dtype}")
        if self.siblings not in SIBLINGS:
            raise ValueError(f"siblings must be one of {', '.join(SIBLINGS)}, got {self.siblings!r}")
        if budget is not None and n > budget:
            raise ValueError(f"a tree may have at most budget = {budget} nodes, got {n}")
        if n == 0:
            return
        if (bad := (self.token_ids < 0) | (self.token_ids >= vocab_size)).any():
            i = int(bad.argmax())
            raise ValueError(f"token_ids must be in [0, {vocab_size}), got {int(self.token_ids[i])} at node {i}")
        if (bad := (self.parents < ROOT) | (self.parents >= np.arange(n))).any():
            i = int(bad.argmax())
            raise ValueError(f"parents must satisfy -1 <= parents[i] < i, got {int(self.parents[i])} at node {i}")
        if not (self.scores <= 1e-9).all():  # also catches NaN
            i = int((~(self.scores <= 1e-9)).argmax())
            raise ValueError(f"scores are log-probabilities and must be <= 0, got {float(self.scores[i])} at node {i}")
        if self.siblings == "deterministic":
            if self.draft_probs is not None or self.draft_rows is not None:
                raise ValueError("a deterministic tree has no draft_probs and no draft_rows")
        else:
            if self.draft_probs is None or self.draft_rows is None:
                raise ValueError(f"a tree with {self.siblings} siblings needs draft_probs and draft_rows")
            if tuple(self.draft_rows.shape) != (n + 1,):
                raise ValueError(f"draft_rows must have shape [{n + 1}], got {list(self.draft_rows.shape)}")
            if tuple(self.draft_probs.shape)[1:] != (vocab_size,):
                raise ValueError(
                    f"draft_probs must have {vocab_size} columns, got shape {list(self.draft_probs.shape)}"
                )
            rows = self.draft_rows[self.parents + 1]
            if (bad := (rows < 0) | (rows >= len(self.draft_probs))).any():
                i = int(bad.argmax())
                raise ValueError(f"draft_rows has no distribution for the parent of node {i}")
        if self.siblings != "iid":
            keys = (self.parents + 1) * vocab_size + self.token_ids
            if len(np.unique(keys)) != n:
                raise ValueError("siblings must carry different tokens, got a duplicate")

    def state_bytes(self) -> bytes:
        """The arrays as bytes, for digests in step records."""
        return self.token_ids.tobytes() + self.parents.tobytes()


_EMPTY = DraftTree(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier decided.

    Attributes:
        path: int64 [A], accepted nodes from the root down; ascending because parents come first.
        token_ids: int64 [A + 1], the accepted tokens and then the bonus token.
    """

    path: np.ndarray
    token_ids: np.ndarray

    @property
    def bonus(self) -> int:
        """The token sampled from the target after the last accepted node."""
        return int(self.token_ids[-1])

    @property
    def accepted_length(self) -> int:
        """Tokens gained by the step, bonus included."""
        return len(self.token_ids)


_ARM_PATTERN = re.compile(r"(?P<drafter>.+)@(?P<budget>auto|\d+)(?:/(?P<vocab>[^@]+))?")


@dataclass(frozen=True, slots=True, order=True)
class Arm:
    """One choice: which drafter, how many nodes the target verifies, and which vocabulary the draft head computes.

    `budget` counts draft nodes, not the root; "auto" sizes the tree at every step.

    >>> str(Arm.parse("eagle3@32/fr:16384")), Arm.parse("ar") == Arm.autoregressive()
    ('eagle3@32/fr:16384', True)
    """

    drafter: str
    budget: int | Literal["auto"] = 0
    vocab: str = "full"

    def __post_init__(self) -> None:
        if not self.drafter:
            raise ValueError("drafter must not be empty")
        if self.budget != "auto":
            if isinstance(self.budget, bool) or not isinstance(self.budget, int):
                raise ValueError(f"budget must be a whole number or 'auto', got {self.budget!r}")
            if self.budget < 0:
                raise ValueError(f"budget must be >= 0, got {self.budget}")
            if self.drafter != "ar" and self.budget == 0:
                raise ValueError(f"budget of {self.drafter!r} must be >= 1 or 'auto'; no speculation is the arm 'ar'")
        if self.drafter == "ar" and (self.budget != 0 or self.vocab != "full"):
            raise ValueError("the arm 'ar' drafts nothing: it takes no budget and no vocab")

    @classmethod
    def autoregressive(cls) -> Arm:
        """No speculation."""
        return cls("ar", 0)

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read `drafter@budget`, `drafter@budget/vocab`, or `ar`.

        Raises:
            ValueError: the text is not of this form.
        """
        if isinstance(text, str) and text.strip() == "ar":
            return cls.autoregressive()
        match = _ARM_PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"arm must look like drafter@budget, drafter@budget/vocab or ar, got {text!r}")
        budget = match["budget"]
        return cls(match["drafter"], "auto" if budget == "auto" else int(budget), match["vocab"] or "full")

    @property
    def source(self) -> str:
        """What a proposal of this arm is filed under: arms of one source differ in budget only. The drafter's name,
        and its vocabulary unless that is the full one.

        >>> Arm("eagle3", 32).source, Arm("eagle3", 32, "fr:16384").source
        ('eagle3', 'eagle3/fr:16384')
        """
        return self.drafter if self.vocab == "full" else f"{self.drafter}/{self.vocab}"

    def __str__(self) -> str:
        if self.drafter == "ar":
            return "ar"
        return f"{self.drafter}@{self.budget}" + ("" if self.vocab == "full" else f"/{self.vocab}")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's next token is chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), Real):
                raise ValueError(f"{name} must be a number, got {getattr(self, name)!r}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be >= 0 and finite, got {self.temperature}")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number >= 0 (0 = off), got {self.top_k!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter is told when it is asked to propose.

    Attributes:
        root: the last committed token, whose continuation is drafted.
        length: committed tokens, prompt and root included.
        max_depth: deeper nodes can never be emitted (tokens left to generate, context limit); at least 1.
        sampling: the target's settings; a drafter that samples should use the same.
        rng: the only source of randomness a drafter may use.
        vocab: which rows of its head a drafter computes (`Arm.vocab`), for drafters that take one.
        rate: tokens per second that the run makes. A drafter that runs once per depth may stop where a further pass is
            expected to bring less; 0: draft what was asked for.
    """

    root: int
    length: int
    max_depth: int
    sampling: Sampling
    rng: np.random.Generator
    vocab: str = "full"
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What a drafter is told after a step.

    Attributes:
        tree: the tree that the target verified (not necessarily this drafter's).
        verdict: the accepted path and the tokens now committed.
        tokens: int64 [A + 1], tokens committed in this step: `verdict.token_ids`, shorter when generation stopped.
        target_top_ids: int64 [N + 1, k], the target's k most likely tokens after the root and after every node,
            rejected ones too, most likely first; None if no drafter asked (`Needs.target_top_k`).
        features: per tap of `Needs.taps`, a tensor [A + 1, H] for the root and the accepted nodes.
        extra_argmax: int64 [E], the target's argmax at the extra rows the drafter asked for, else None.
        target_top_logits: float32 [N + 1, k], the logits of `target_top_ids`; None if no drafter asked
            (`Needs.target_top_logits`).
        paired: a tensor [A + 1, H], hidden states of the rows paired with the root and the accepted nodes, if the
            drafter asked for `PairedRows` and they were run; else None.
    """

    tree: DraftTree
    verdict: Verdict
    tokens: np.ndarray
    target_top_ids: np.ndarray | None = None
    features: Mapping[int, Any] = field(default_factory=dict)
    extra_argmax: np.ndarray | None = None
    target_top_logits: np.ndarray | None = None
    paired: Any = None


@dataclass(frozen=True, slots=True)
class ExtraRows:
    """Rows a drafter adds to the verify pass for its own use (Lookahead). They are never committed, and neither the
    root nor any node attends to them.

    Attributes:
        token_ids: int64 [E].
        depths: int64 [E], position relative to the root (root is 0).
        visible: bool [E, E]; row i attends to the prefix, the root and extra row j where `visible[i, j]`.
            The diagonal must be set.
    """

    token_ids: np.ndarray
    depths: np.ndarray
    visible: np.ndarray

    def count(self, nodes: int) -> int:
        """Rows that are added to a pass of the root and `nodes` nodes."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PairedRows:
    """Rows that a drafter pairs with the root and every node of whatever tree is verified (ConFu). They are vectors,
    not tokens, are never committed, and neither the root nor any node attends to them.

    Soft prompts stand at positions 0 .. P - 1 and see each other causally and nothing else. The row paired with a node
    stands one position behind it and sees what the node sees, the node, the soft prompts, and itself.

    Attributes:
        prompts: tensor [P, H], what the first layer reads at the soft prompts.
        embed: int64 [M] tokens of root and nodes -> tensor [M, H], what it reads at the rows paired with them.
        tap: the hidden states after so many layers are wanted of the paired rows; among the target's taps.
    """

    prompts: Any
    embed: Callable[[np.ndarray], Any]
    tap: int

    def count(self, nodes: int) -> int:
        """Rows that are added to a pass of the root and `nodes` nodes."""
        return len(self.prompts) + nodes + 1


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do in one step.

    Attributes:
        step_id: 1, 2, ... per controller; feedback refers to it.
        arm: what is played.
        propensity: the probability with which it was chosen.
        asked: drafters to ask and with which budget: the played one, and those that are only learnt from.
        first_only: ask in this order, and no further once one has proposed something.
        rate: told to drafters as what their time is worth, see `DraftContext.rate`.
    """

    step_id: int
    arm: Arm
    propensity: float = 1.0
    asked: tuple[Arm, ...] = ()
    first_only: bool = False
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of a run's record. All times in seconds; `drafted` and `verified` count nodes without the root.

    Attributes:
        draft_seconds: of the drafters whose proposals were played.
        evaluate_seconds: of drafters that were asked only to learn from.
        catch_up_seconds: bringing drafters up that had not been asked for a while; charged to the run, not to the arm.
        expected_tokens, expected_seconds: what the controller expected of the step; None if it expects nothing.
        gain: tokens emitted minus what the charged seconds are worth at the run's rate so far.
        reason: why the step was decided as it was, a key of `adaptspec.control.controller.REASONS`.
        digest: hash of all that the controller was told up to this step; equal on replicas that decide alike.
    """

    step_id: int
    position: int
    arm: str
    propensity: float
    drafted: int
    verified: int
    accepted: int
    emitted: int
    draft_seconds: float
    evaluate_seconds: float
    verify_seconds: float
    commit_seconds: float
    observe_seconds: float
    controller_seconds: float
    other_seconds: float
    fault: str | None = None
    catch_up_seconds: float = 0.0
    expected_tokens: float | None = None
    expected_seconds: float | None = None
    gain: float | None = None
    reason: str = ""
    digest: str = ""

    @property
    def overhead_seconds(self) -> float:
        """Deciding, committing, observing and the rest: what is neither a draft nor a verification."""
        return self.commit_seconds + self.observe_seconds + self.controller_seconds + self.other_seconds

    @property
    def seconds(self) -> float:
        """Wall time of the step."""
        return (
            self.draft_seconds
            + self.evaluate_seconds
            + self.catch_up_seconds
            + self.verify_seconds
            + self.commit_seconds
            + self.observe_seconds
            + self.controller_seconds
            + self.other_seconds
        )
