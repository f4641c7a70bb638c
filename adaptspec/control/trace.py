"""Position-indexed traces: what every drafter would have proposed at every position of the target's own output.

The output does not depend on what is drafted, so one recorded output serves every policy, whichever positions it
stops at. Indexed by token position and not by step, because policies land on different positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adaptspec.types import DraftTree

MOST_NODES = 2**15 - 1
"""Largest budget of a trace: files keep node numbers in 16 bits."""
_SCORE_NOISE = 1e-9


@dataclass(frozen=True, slots=True)
class Proposals:
    """What one drafter would have proposed at the positions 0..P-1 of one output.

    The trees are stored one after the other; `offsets[p]` to `offsets[p + 1]` are the nodes of position p.

    Attributes:
        offsets: int64 [P + 1], from 0, never decreasing.
        token_ids: int64 [M].
        parents: int64 [M], node numbers inside their own tree; -1 for children of the root.
        scores: float64 [M], as in `DraftTree`.
        evidence: float64 [M] per name, as in `DraftTree`.
    """

    offsets: np.ndarray
    token_ids: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    evidence: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, trees: Sequence[DraftTree]) -> Proposals:
        """One tree per position. Evidence that only some of the trees carry is NaN at the nodes of the others.

        Raises:
            ValueError: a tree with sampled siblings: what it proposed says nothing about what it would propose again.
        """
        for tree in trees:
            if tree.siblings != "deterministic":
                raise ValueError(f"siblings of a traced tree must be 'deterministic', got {tree.siblings!r}")

        def joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
            return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)

        names = dict.fromkeys(name for tree in trees for name in tree.evidence)
        missing = {len(tree): np.full(len(tree), np.nan) for tree in trees}
        return cls(
            np.cumsum([0, *map(len, trees)], dtype=np.int64),
            joined([tree.token_ids for tree in trees], np.int64),
            joined([tree.parents for tree in trees], np.int64),
            joined([tree.scores for tree in trees], np.float64),
            {
                name: joined([tree.evidence.get(name, missing[len(tree)]) for tree in trees], np.float64)
                for name in names
            },
        )

    def tree(self, position: int) -> DraftTree:
        """The deterministic tree proposed at a position; empty where the drafter declined."""
        start, stop = self.offsets[position], self.offsets[position + 1]
        if start == stop:
            return DraftTree.empty()
        part = slice(start, stop)
        evidence = {name: column[part] for name, column in self.evidence.items()}
        return DraftTree(self.token_ids[part], self.parents[part], self.scores[part], evidence=evidence)

    def sizes(self) -> np.ndarray:
        """int64 [P], nodes proposed at each position."""
        return np.diff(self.offsets)

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [M] each: the position of every node, and the row of its parent among all M rows, M for the root."""
        positions = np.repeat(np.arange(len(self.offsets) - 1), self.sizes())
        above = np.where(self.parents < 0, len(self.parents), self.parents + self.offsets[positions])
        return positions, above

    def validate(self, *, positions: int, nodes: int) -> None:
        """Check every promise the arrays make.

        Args:
            positions: P.
            nodes: budget, the largest tree that is allowed.

        Raises:
            ValueError: names the field, the offending position and value, and what is allowed.
        """
        _check_array("offsets", self.offsets, np.int64, positions + 1)
        count = len(self.token_ids)
        _check_array("token_ids", self.token_ids, np.int64, count)
        _check_array("parents", self.parents, np.int64, count)
        _check_array("scores", self.scores, np.float64, count)
        for name, column in self.evidence.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"evidence must be named by texts that are not empty, got {name!r}")
            _check_array(f"evidence {name!r}", column, np.float64, count)
        sizes = self.sizes()
        if self.offsets[0] != 0 or self.offsets[-1] != count or (sizes < 0).any():
            raise ValueError(f"offsets must run from 0 to {count} and never decrease, got {self.offsets}")
        if (bad := sizes > nodes).any():
            position = int(bad.argmax())
            raise ValueError(f"a tree may have at most {nodes} nodes, got {sizes[position]} at position {position}")
        at, above = self.places()
        number = np.arange(count) - self.offsets[at]
        bad_parents = (self.parents < -1) | (self.parents >= number)
        for name, values, bad, allowed in (
            ("token_ids", self.token_ids, (self.token_ids < 0) | (self.token_ids >= 2**31), "be in [0, 2**31)"),
            ("parents", self.parents, bad_parents, "satisfy -1 <= parents[i] < i"),
            ("scores", self.scores, ~(self.scores <= _SCORE_NOISE), "be log-probabilities <= 0"),
        ):
            if bad.any():
                row = int(bad.argmax())
                raise ValueError(
                    f"{name} must {allowed}, got {values[row]} at node {number[row]} of position {at[row]}"
                )
        # Children of the root share one row in `above`, whichever tree they are of.
        siblings = np.where(above == count, count + at, above) * 2**31 + self.token_ids
        if len(np.unique(siblings)) != count:
            raise ValueError("siblings must carry different tokens, got a duplicate")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One output of the target and what could have been drafted for it.

    Position p has the root `tokens[p]`; what is drafted there continues with `tokens[p + 1]`.

    Attributes:
        name: which prompt (and turn) it answers, unique in a trace.
        domain: its category.
        prompt_length: tokens of the prompt.
        tokens: int64 [T], the output; the first token comes from the prefill.
        proposals: by drafter, each over P = T - 1 positions.
    """

    name: str
    domain: str
    prompt_length: int
    tokens: np.ndarray
    proposals: Mapping[str, Proposals]

    @property
    def positions(self) -> int:
        """P: where something could be drafted."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests in the order in which they were answered, and what steps cost on the machine that did.

    Attributes:
        requests: see `TracedRequest`.
        nodes: per drafter, the budget it was asked for at every position. The proposal for a smaller one is the first
            nodes of it (`budget_order`), as in live play under a policy; asked for less alone, the drafters that choose
            a match to suit the budget ("suffix", "rest") sometimes answer otherwise.
        max_new_tokens: longest output.
        temperature: of the target.
        costs: `CostModel.state_dict()`, measured while recording.
        fingerprint: of the machine and model, see `adaptspec.control.cost.fingerprint`.
        provenance: how it was made: command, versions, seed.
    """

    requests: tuple[TracedRequest, ...]
    nodes: Mapping[str, int]
    max_new_tokens: int
    temperature: float
    costs: Mapping[str, Any]
    fingerprint: str
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Check that all parts are possible and fit together.

        Raises:
            ValueError: names the request, the drafter, the field, its value, and what is allowed.
        """
        if not self.nodes:
            raise ValueError("nodes must name at least one drafter, got none")
        for drafter, nodes in self.nodes.items():
            if not isinstance(drafter, str) or not drafter:
                raise ValueError(f"nodes must be by the names of drafters, got {drafter!r}")
            _check_whole(f"nodes of drafter {drafter!r}", nodes, 1, MOST_NODES)
        _check_whole("max_new_tokens", self.max_new_tokens, 1)
        if not isinstance(self.temperature, int | float) or not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be >= 0 and finite, got {self.temperature!r}")
        seen: set[str] = set()
        for request in self.requests:
            if request.name in seen:
                raise ValueError(f"names of requests must be different, got {request.name!r} twice")
            seen.add(request.name)
            try:
                self._check_request(request)
            except ValueError as error:
                raise ValueError(f"request {request.name!r}: {error}") from error

    def _check_request(self, request: TracedRequest) -> None:
        for name, text in (("name", request.name), ("domain", request.domain)):
            if not isinstance(text, str) or not text:
                raise ValueError(f"{name} must be a text that is not empty, got {text!r}")
        _check_whole("prompt_length", request.prompt_length, 1)
        tokens = request.tokens
        _check_array("tokens", tokens, np.int64, None)
        if not 1 <= len(tokens) <= self.max_new_tokens:
            raise ValueError(f"tokens must be 1 to max_new_tokens = {self.max_new_tokens} tokens, got {len(tokens)}")
        if ((tokens < 0) | (tokens >= 2**31)).any():
            raise ValueError(f"tokens must be in [0, 2**31), got {tokens.min()} to {tokens.max()}")
        if request.proposals.keys() != self.nodes.keys():
            found = ", ".join(request.proposals) or "none"
            raise ValueError(f"proposals must be of the drafters {', '.join(self.nodes)}, got {found}")
        for drafter, nodes in self.nodes.items():
            try:
                request.proposals[drafter].validate(positions=request.positions, nodes=nodes)
            except ValueError as error:
                raise ValueError(f"drafter {drafter!r}: {error}") from error


def _check_array(name: str, array: Any, dtype: type, length: int | None) -> None:
    wanted = "T" if length is None else length
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype or length not in (None, len(array)):
        got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{name} must be {np.dtype(dtype)} [{wanted}], got {got}")


def _check_whole(name: str, value: Any, least: int, most: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number in [{least}, {most}], got {value!r}")
