"""The most frequent tokens, and a buffer of rare ones that follows the text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaptspec.kernels.dense_rows import DenseRows
from adaptspec.kernels.vocab_head import TopTokens
from adaptspec.types import Observation
from adaptspec.vocab.alignment import Alignment
from adaptspec.vocab.base import HeadData, VocabHead
from adaptspec.vocab.counts import choose_tokens
from adaptspec.vocab.frequency import find_frequencies
from adaptspec.vocab.long_tail import LongTail
from adaptspec.vocab.microspec import named
from adaptspec.vocab.neighbours import Neighbours
from adaptspec.vocab.registry import register_vocab_head

_ARGUMENT = re.compile(r"(?P<static>\d+)\+(?P<dynamic>\d+)(?P<align>\+align)?(?::(?P<path>.+))?")

ALIGN_TOP = 8
"""Of the target's tokens so many teach the alignment."""

WAITING = 64
"""Steps that may wait to be taken in until the head is used again."""


@register_vocab_head("evospec")
class EvoSpecHead(VocabHead):
    """EvoSpec (2605.27390; no public code, so the rules are ours): the S most frequent tokens and D rows that change.

    Rare tokens gain by four feeds: what was committed and what the target wanted at the verified nodes, the prompt,
    tokens whose rows of the head lie close to such ones, and rare successors of the latest token. A token that has
    gained takes the dynamic row of the lowest score, or of the one not seen for longest among equals, unless its own
    score is lower still. See `LongTail`. The buffer lives on from request to request; the number of rows never changes.

    "evospec:16384+512" takes the shipped list, "evospec:16384+512:PATH" another one. "evospec:16384+512+align" also
    corrects the head towards the target while in use, see `Alignment`; its logits are then no longer the head's own.

    Args:
        static, dynamic: S and D.
        path: of the frequency list.
        align: see above.
    """

    summary = "frequent tokens and a buffer of rare ones that follows the text: evospec:STATIC+DYNAMIC (EvoSpec)"
    weights = "frequency list"
    needs_top_k = 1

    def __init__(self, name: str, static: int, dynamic: int, *, path: Path | None = None, align: bool = False) -> None:
        super().__init__(name)
        if static < 1 or dynamic < 1:
            raise ValueError(f"vocab {name!r} must have at least 1 row of each kind, got {static} and {dynamic}")
        self.static = static
        self.dynamic = dynamic
        self.path = path
        self.align = align
        if align:
            self.needs_top_k, self.needs_top_logits = ALIGN_TOP, True
        self._alignment: Alignment | None = None
        self._dense: DenseRows | None = None
        self._fixed = np.zeros(0, dtype=np.int64)
        self._buffer = np.zeros(0, dtype=np.int64)
        self._loaded: Mapping[str, Any] | None = None
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._root_hidden: torch.Tensor | None = None

    @classmethod
    def parse(cls, name: str, argument: str) -> EvoSpecHead:
        match = _ARGUMENT.fullmatch(argument)
        if match is None:
            raise ValueError(
                f"vocab {name!r} must look like evospec:16384+512, evospec:16384+512+align or evospec:16384+512:PATH"
            )
        path = match["path"]
        align = match["align"] is not None
        return cls(name, int(match["static"]), int(match["dynamic"]), path=Path(path) if path else None, align=align)

    def _bound(self, data: HeadData) -> None:
        learnt = self._loaded if self._dense is None else self.state_dict()
        available = self._row_of >= 0
        frequencies = find_frequencies(self.path, data, kind="target", vocab_size=self.vocab_size)
        count = self.static + self.dynamic
        self._fixed = choose_tokens(frequencies, self.static, keep=self.keep, available=available, name=self.name)
        first = choose_tokens(frequencies, count, keep=self._fixed, available=available, name=self.name)
        self._first = first[~np.isin(first, self._fixed)]
        rare = available.copy()
        rare[self._fixed] = False
        self._neighbours = Neighbours(self.weight, self._token_of, among=rare)
        self._tail = LongTail(rare, neighbours=self._neighbours)
        self._tokens = torch.from_numpy(self._token_of).to(self.weight.device)
        self._alignment = Alignment(self.weight.shape[1]) if self.align else None
        self._dense = DenseRows(self.weight, self._row_of[np.concatenate([self._fixed, self._first])], count)
        self._buffer = self._first.copy()
        self._waiting.clear()
        if learnt:
            self._restore(learnt)
        self._loaded = None

    @property
    def rows(self) -> int:
        return 0 if self._dense is None else len(self._dense)

    def dynamic_tokens(self) -> np.ndarray:
        """int64 [D], the tokens in the dynamic rows, by slot."""
        self._take_in()
        return self._buffer.copy()

    def prefill(self, token_ids: np.ndarray, top_ids: np.ndarray | None = None) -> None:
        self._take_in()
        self._root_hidden = None
        self._admit(self._tail.read_prompt(token_ids))

    def observe(self, observation: Observation) -> None:
        if self._alignment is not None:
            self._learn_alignment(observation)
        top = observation.target_top_ids
        self._waiting.append((observation.tokens, np.zeros(0, np.int64) if top is None else top[:, 0]))
        if len(self._waiting) > WAITING:
            self._take_in()

    def finish(self) -> None:
        self._take_in()
        self._root_hidden = None

    def reset(self) -> None:
        self._loaded = None
        if self._dense is not None:
            self._dense = None
            self._bound(HeadData() if self._data is None else self._data)

    def logits(self, hidden: torch.Tensor, *, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        dense = self._ready()
        return self._tokens[dense.ids.to(torch.int64)], dense.logits(self._aligned(hidden, depth=depth))

    def top(self, hidden: torch.Tensor, *, k: int, depth: int) -> TopTokens:
        dense = self._ready()
        return named(dense.top(self._aligned(hidden, depth=depth), k=k), self._tokens)

    def _aligned(self, hidden: torch.Tensor, *, depth: int) -> torch.Tensor:
        if self._alignment is None:
            return hidden
        if depth == 1:
            self._root_hidden = hidden[0]
        return self._alignment.apply(hidden)

    def _learn_alignment(self, observation: Observation) -> None:
        """The hidden state that the root's children were drafted from, and the target's word on them."""
        hidden, self._root_hidden = self._root_hidden, None
        top, logits = observation.target_top_ids, observation.target_top_logits
        if hidden is None or top is None or logits is None:
            return
        ids, values = top[0, :ALIGN_TOP], logits[0, :ALIGN_TOP]
        known = self._row_of[ids] >= 0
        assert self._alignment is not None
        self._alignment.add(hidden, ids[known], values[known], rows_of=self._head_rows)

    def _head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = torch.from_numpy(self._row_of[token_ids.numpy()])
        return self.weight.index_select(0, rows.to(self.weight.device))

    def _ready(self) -> DenseRows:
        self._take_in()
        if self._dense is None:
            raise RuntimeError(f"vocab {self.name!r} has no head yet; call bind first")
        return self._dense

    def _take_in(self) -> None:
        waiting, self._waiting = self._waiting, []
        for tokens, top in waiting:
            self._admit(self._tail.read_step(tokens, top))

    def _admit(self, gained: np.ndarray) -> None:
        """Give dynamic rows to tokens that have gained, the best first."""
        assert self._dense is not None
        entering = np.setdiff1d(gained, self._buffer)
        if not len(entering):
            return
        scores = self._tail.scores(entering)
        best = np.lexsort((entering, -scores))[: self.dynamic]
        own = self._tail.scores(self._buffer)
        slots = np.lexsort((self._buffer, self._tail.last_use[self._buffer], own))[: len(best)]
        admitted = scores[best] >= own[slots]  # falling against rising: true up to some place
        entering, slots = entering[best][admitted], slots[admitted]
        if len(entering):
            self._buffer[slots] = entering
            self._dense.replace(slots + self.static, self._row_of[entering])

    def state_dict(self) -> dict[str, Any]:
        if self._dense is None:
            return dict(self._loaded or {})
        self._take_in()
        return {
            "static": self.static,
            "tokens_of_rows": self._buffer.copy(),
            "tail": self._tail.state_dict(),
            "alignment": None if self._alignment is None else self._alignment.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`; before `bind` it is kept and checked there. An empty one forgets what was learnt."""
        if not state:
            self.reset()
            return
        if missing := {"static", "tokens_of_rows", "tail", "alignment"} - state.keys():
            raise ValueError(f"state of vocab {self.name!r} lacks {', '.join(sorted(missing))}")
        if state["static"] != self.static or (state["alignment"] is None) is self.align:
            raise ValueError(f"state is of another head than {self.name!r}")
        tokens = np.asarray(state["tokens_of_rows"])
        if tokens.shape != (self.dynamic,) or tokens.dtype.kind not in "iu" or len(np.unique(tokens)) < len(tokens):
            raise ValueError(f"state: tokens_of_rows must be {self.dynamic} different tokens, got {tokens.shape}")
        if self._dense is None:
            self._loaded = dict(state)
        else:
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        assert self._dense is not None
        tokens = np.asarray(state["tokens_of_rows"], dtype=np.int64)
        inside = (tokens >= 0) & (tokens < self.vocab_size)
        if not inside.all() or (self._row_of[tokens] < 0).any() or np.isin(tokens, self._fixed).any():
            raise ValueError("state: tokens_of_rows must be tokens of the head outside the static ones")
        tail = LongTail(self._tail.rare, neighbours=self._neighbours)
        tail.load_state_dict(state["tail"])
        if self._alignment is not None:
            self._alignment.load_state_dict(state["alignment"])
        self._tail, self._buffer = tail, tokens.copy()
        self._dense.truncate(self.static)
        self._dense.replace(np.arange(self.static, self.static + self.dynamic), self._row_of[tokens])
