"""What a verifier is: its facts, its registry, and the two arguments that every sampling rule takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from adaptspec.types import SIBLINGS, DraftTree, Siblings, Verdict

Verify = Callable[..., Verdict]
"""`(tree, target_probs, rng) -> Verdict`; the greedy rule is `(tree, target_argmax) -> Verdict`."""


class Rows(Protocol):
    """Target probabilities per verified row: a [N + 1, V] tensor or array, or an object that computes a row when asked.

    Rules read only the rows that they need, each of them once.
    """

    def __getitem__(self, row: int, /) -> Any: ...


class Uniforms(Protocol):
    """The source of randomness: `numpy.random.Generator`, or anything with its `random()` in [0, 1)."""

    def random(self) -> float: ...


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """A verification rule and the trees it is right for.

    Attributes:
        name: how users select it.
        summary: one line.
        siblings: the ways of choosing siblings that the rule is right for; trees with others are refused.
        shape: "chain" takes only trees in which no node has more than one child.
        lossless: the emitted tokens follow the target's distribution.
        reads: "argmax" rules take the target's argmax per row, the others probabilities and a source of uniforms.
        uses_draft_probs: the rule looks at q where siblings were drawn.
        verify: the rule; raises ValueError for a tree it is not right for.
    """

    name: str
    summary: str
    siblings: tuple[Siblings, ...]
    shape: Literal["chain", "tree"]
    lossless: bool
    reads: Literal["argmax", "probabilities"]
    uses_draft_probs: bool
    verify: Verify

    @property
    def label(self) -> str:
        """The name to print: says so when the rule is lossy."""
        return self.name if self.lossless else f"{self.name} (lossy)"

    def objection(self, tree: DraftTree) -> str | None:
        """Why the rule must not verify this tree; None if it may. The empty tree suits every rule."""
        if not len(tree):
            return None
        if tree.siblings not in self.siblings:
            return (
                f"verifier {self.name!r} is right only for siblings {' or '.join(self.siblings)}, got {tree.siblings!r}"
            )
        if self.shape == "chain" and tree.parents.tolist() != list(range(-1, len(tree) - 1)):
            return f"verifier {self.name!r} takes only chains, got a tree in which a node has more than one child"
        drawn = tree.siblings != "deterministic"
        if drawn and self.uses_draft_probs and (tree.draft_probs is None or tree.draft_rows is None):
            return f"verifier {self.name!r} needs draft_probs and draft_rows for {tree.siblings} siblings, got None"
        return None


VERIFIERS: dict[str, VerifierInfo] = {}


def register_verifier(
    name: str,
    *,
    summary: str,
    siblings: tuple[Siblings, ...] = SIBLINGS,
    shape: Literal["chain", "tree"] = "tree",
    lossless: bool = True,
    reads: Literal["argmax", "probabilities"] = "probabilities",
    uses_draft_probs: bool = True,
) -> Callable[[Verify], Verify]:
    """Decorator: makes a rule selectable by `name` and has it refuse trees that it is not right for.

    The keywords are the attributes of `VerifierInfo`.
    """

    def decorate(function: Verify) -> Verify:
        @functools.wraps(function)
        def checked(tree: DraftTree, *arguments: Any, **options: Any) -> Verdict:
            if (problem := info.objection(tree)) is not None:
                raise ValueError(problem)
            return function(tree, *arguments, **options)

        info = VerifierInfo(name, summary, siblings, shape, lossless, reads, uses_draft_probs, checked)
        VERIFIERS[name] = info
        return checked

    return decorate


def make_verdict(path: Sequence[int], token_ids: Sequence[int]) -> Verdict:
    """A `Verdict` from Python sequences."""
    return Verdict(np.array(path, dtype=np.int64), np.array(token_ids, dtype=np.int64))


def children_of(tree: DraftTree) -> list[list[int]]:
    """Per row (root first, then the nodes) the children in stored order, which is the order they were drawn in."""
    children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for node, parent in enumerate(tree.parents.tolist()):
        children[parent + 1].append(node)
    return children
