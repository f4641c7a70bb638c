"""REST: look the end of the context up in a datastore and draft what followed it there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from heapq import heappop, heappush
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptspec.drafters.acceptance import AcceptanceTable
from adaptspec.drafters.datastore import LONGEST_MATCH, Datastore, longest_match
from adaptspec.drafters.growing_store import GrowingStore, Segment
from adaptspec.drafters.lookup import LookupDrafter, pack_state, unpack_state, whole_number
from adaptspec.drafters.registry import register_drafter
from adaptspec.trees import trie_from_counts
from adaptspec.types import ROOT, DraftTree

if TYPE_CHECKING:
    from adaptspec.target.base import Target

FEW = 128
"""Up to so many continuations dictionaries count faster than sorts do."""


def frequent_prefixes(rows: list[list[int]], budget: int) -> tuple[list[int], list[int], list[int]]:
    """The `budget` most frequent prefixes of a few continuations as a trie: tokens, parents and counts.

    A prefix is never more frequent than its own prefixes, so taking them in falling order of their count puts parents
    first. Only prefixes that are taken are split further, which makes this several times faster on few rows than
    `adaptspec.trees.trie_from_counts`, to which it is equal but for ties: they go to the prefix found first.

    Args:
        rows: M continuations of D tokens; negative from their end on.
    """
    tokens: list[int] = []
    parents: list[int] = []
    counts: list[int] = []
    heap: list[tuple[int, int, int, int, int, list[list[int]]]] = []
    serial = 0
    node, depth, inside = ROOT, 0, rows
    while len(tokens) < budget:
        if depth < len(rows[0]):
            groups: dict[int, list[list[int]]] = {}
            for row in inside:
                if row[depth] >= 0:
                    groups.setdefault(row[depth], []).append(row)
            for token, group in groups.items():
                heappush(heap, (-len(group), serial, token, node, depth, group))
                serial += 1
        if not heap:
            break
        negative, _, token, parent, depth, inside = heappop(heap)
        node = len(tokens)
        depth += 1
        tokens.append(token)
        parents.append(parent)
        counts.append(-negative)
    return tokens, parents, counts


LENGTH_STEPS = (2, 3, 4, 6, 8, 12, 16)
COUNT_STEPS = (1, 2, 4, 16)

CONTINUED = np.array(
    [
        [0.20, 0.25, 0.30, 0.45],
        [0.28, 0.40, 0.35, 0.42],
        [0.30, 0.42, 0.40, 0.45],
        [0.60, 0.62, 0.65, 0.65],
        [0.70, 0.72, 0.75, 0.75],
        [0.80, 0.82, 0.85, 0.85],
        [0.90, 0.92, 0.95, 0.95],
    ]
)
"""[7, 4]: how often one of the retrieved tokens is right, by matched tokens (from `LENGTH_STEPS` on) and by how many
continuations there are (from `COUNT_STEPS` on). Up to 5 matched tokens measured with a 135M-parameter model (9 prompts,
1M tokens of code and manuals in the store); beyond that assumed."""

LENGTH_ROW = np.searchsorted(LENGTH_STEPS, np.arange(LENGTH_STEPS[-1] + 1), side="right") - 1


def situation(length: int, count: int) -> int:
    """Row of the acceptance table for `length` matched tokens and `count` continuations."""
    row = int(LENGTH_ROW[min(length, LENGTH_STEPS[-1])])
    return max(row, 0) * len(COUNT_STEPS) + sum(count >= step for step in COUNT_STEPS) - 1


@register_drafter("rest")
class RestDrafter(LookupDrafter):
    """Retrieval from a datastore, from past outputs, or both.

    He et al. 2023, arXiv 2311.08252, section 3. The longest suffix of the context, from 16 down to 2 tokens, that
    occurs in the store is found by binary search in a suffix array; the 10 tokens after each occurrence (at most
    `max_continuations`, evenly spaced) are the candidates; the `budget` most frequent prefixes of these are the draft.
    No match, no draft.

    Without a `path` the store is empty at first and takes in the output of every finished request. Scores multiply,
    along the path, P(one of the retrieved tokens is right | tokens matched so far, continuations) and the node's share
    of the continuations; the former comes from a table that is corrected by every committed step. Evidence:
    "match_length" (of the context), "count" and "parent_count" in continuations.

    Args:
        path: a datastore file (`adaptspec.drafters.datastore.build_datastore`).
        grow: also store finished outputs; None means "only without a path".
        include_prompts: store prompts with the outputs.
        longest, shortest: suffix lengths that are looked up.
        depth: tokens taken after a match.
        max_continuations: occurrences taken into account, 5,000 in the paper. With 1M tokens stored, 128 evenly spaced
            ones gave the same accepted length, and with more of them a proposal can take over a millisecond.
        max_tokens: past outputs kept, in tokens (12 bytes each); the oldest go first.
        tokenizer_fingerprint: refuse a datastore that was built with another tokenizer.

    Raises:
        FileNotFoundError, ValueError: no such datastore, or a damaged or foreign one.
    """

    summary = "retrieval from a datastore or past outputs (2311.08252)"

    def __init__(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        grow: bool | None = None,
        include_prompts: bool = False,
        longest: int = LONGEST_MATCH,
        shortest: int = 2,
        depth: int = 10,
        max_continuations: int = FEW,
        max_tokens: int = 262_144,
        tokenizer_fingerprint: str | None = None,
    ) -> None:
        super().__init__()
        if not (grow is None or isinstance(grow, bool)):
            raise ValueError(f"grow must be True, False or None, got {grow!r}")
        if not isinstance(include_prompts, bool):
            raise ValueError(f"include_prompts must be True or False, got {include_prompts!r}")
        self.grow = path is None if grow is None else grow
        self.include_prompts = include_prompts
        self.shortest = whole_number("shortest", shortest, 1, LONGEST_MATCH)
        self.longest = whole_number("longest", longest, self.shortest, LONGEST_MATCH)
        self.depth = whole_number("depth", depth, 1)
        self.max_continuations = whole_number("max_continuations", max_continuations, 1)
        self.past = GrowingStore(max_tokens=whole_number("max_tokens", max_tokens, 0))
        self.datastore = None if path is None else Datastore.open(path, tokenizer_fingerprint=tokenizer_fingerprint)
        self._acceptance = AcceptanceTable(CONTINUED.reshape(-1, 1))
        self._tokens: list[int] = []
        self._prompt_length = 0
        self._indices = self._searched()
        self._retrieved: tuple[int, np.ndarray] | None = None

    def bind(self, target: Target) -> None:
        """Raises ValueError when the datastore's token ids go beyond the target's vocabulary."""
        super().bind(target)
        if self.datastore is not None and self.datastore.vocab_size > target.vocab_size:
            raise ValueError(
                f"the datastore has token ids of a vocabulary of {self.datastore.vocab_size}, "
                f"the target has {target.vocab_size}"
            )

    def _searched(self) -> list[Any]:
        return self.past.indices() + ([] if self.datastore is None else [self.datastore.index])

    def _knows_tokens(self) -> bool:
        return len(self.past) > 0

    def _begin(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._prompt_length = len(tokens) - 1
        self._retrieved = None

    def _draft(self, budget: int, max_depth: int) -> DraftTree:
        match = longest_match(
            self._indices, self._tokens[-self.longest :], longest=self.longest, shortest=self.shortest
        )
        if not match.length:
            return DraftTree.empty()
        rows = match.continuations(self.depth, limit=self.max_continuations)
        rows = rows[rows[:, 0] >= 0]  # nothing follows at the end of a document
        total = len(rows)
        if not total:
            return DraftTree.empty()
        self._retrieved = match.length, rows
        rows = rows[:, :max_depth]
        if total <= FEW:
            tokens, parents, counts = frequent_prefixes(rows.tolist(), budget)
        else:
            trie = trie_from_counts(rows, budget=budget)
            tokens, parents = trie.token_ids.tolist(), trie.parents.tolist()
            counts = trie.evidence["count"].astype(np.int64).tolist()
        table = self._acceptance.log_probabilities()[:, 0].tolist()
        lengths: list[int] = []
        scores: list[float] = []
        above: list[int] = []
        for parent, count in zip(parents, counts, strict=True):
            length, score, around = (
                (match.length, 0.0, total) if parent < 0 else (lengths[parent] + 1, scores[parent], counts[parent])
            )
            lengths.append(length)
            above.append(around)
            scores.append(score + table[situation(length, around)] + log(count / around))
        return DraftTree(
            np.asarray(tokens, np.int64),
            np.asarray(parents, np.int64),
            np.asarray(scores, np.float64),
            evidence={
                "match_length": np.full(len(tokens), float(match.length)),
                "count": np.asarray(counts, np.float64),
                "parent_count": np.asarray(above, np.float64),
            },
        )

    def _extend(self, tokens: list[int]) -> None:
        self._calibrate(tokens)
        self._tokens += tokens

    def _calibrate(self, committed: list[int]) -> None:
        """Count where one of the tokens retrieved for this step was the committed one."""
        if self._retrieved is None:
            return
        length, rows = self._retrieved
        self._retrieved = None
        for depth, token in enumerate(committed[: rows.shape[1]]):
            column = rows[:, depth]
            if (column < 0).all():
                break
            same = column == token
            right = bool(same.any())
            self._acceptance.record(situation(length + depth, len(rows)), 0 if right else None)
            if not right:
                break
            rows = rows[same]

    def _end(self) -> None:
        if self.grow:
            self.past.add(self._tokens if self.include_prompts else self._tokens[self._prompt_length :])
            self._indices = self._searched()
        self._tokens = []
        self._retrieved = None

    def _forget(self) -> None:
        self.past.clear()
        self._acceptance.reset()
        self._indices = self._searched()
        self._tokens = []
        self._retrieved = None

    def state_dict(self) -> dict[str, Any]:
        """Past outputs and acceptance counts; a datastore file is not part of the state."""
        documents = [document for segment in self.past.segments for document in segment.documents]
        state = pack_state(self.name, self._vocab_size, {"max_tokens": self.past.max_tokens}, documents)
        segments = [len(segment.documents) for segment in self.past.segments]
        return {**state, "segments": segments, "acceptance": self._acceptance.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or not {"segments", "acceptance"} <= set(state):
            raise ValueError(f"state of drafter {self.name!r} must be a mapping with the keys segments and acceptance")
        vocab_size, _, documents = unpack_state(
            {key: value for key, value in state.items() if key not in ("segments", "acceptance")},
            name=self.name,
            vocab_size=self._vocab_size,
            settings={"max_tokens": self.past.max_tokens},
        )
        if not isinstance(state["segments"], list):
            raise ValueError(f"segments of the state must be a list, got {type(state['segments']).__name__}")
        sizes = [whole_number("segments of the state", size, 1) for size in state["segments"]]
        if sum(sizes) != len(documents) or not all(map(len, documents)):
            raise ValueError(
                f"segments of the state must add up to its {len(documents)} non-empty outputs, got {sizes}"
            )
        if (total := sum(map(len, documents))) > self.past.max_tokens:
            raise ValueError(f"outputs of the state must be at most {self.past.max_tokens} tokens, got {total}")
        acceptance = AcceptanceTable(self._acceptance.prior)
        acceptance.load_state_dict(state["acceptance"])
        self.reset()
        self._vocab_size = vocab_size if vocab_size is not None else self._vocab_size
        self._acceptance = acceptance
        arrays = iter([np.asarray(document, np.int32) for document in documents])
        self.past.segments = [Segment.of([next(arrays) for _ in range(size)]) for size in sizes]
        self._indices = self._searched()
