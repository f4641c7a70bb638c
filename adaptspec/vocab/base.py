"""What a vocabulary head is: it decides which rows of a language-model head a drafter computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from adaptspec.kernels.vocab_head import MAX_K, TopTokens
from adaptspec.kernels.vocab_head.reference import top_tokens
from adaptspec.types import Observation

if TYPE_CHECKING:
    from adaptspec.vocab.counts import FrequencyList

__all__ = ["HeadData", "TopTokens", "VocabHead"]


@dataclass(frozen=True, slots=True)
class HeadData:
    """What heads may be given besides the matrix, instead of what is shipped for the target.

    Attributes:
        frequencies: token ids by falling frequency, for the heads that keep the most frequent ones.
        routers: trained routers by the kind of head ("coral", "dynaspec").
    """

    frequencies: FrequencyList | None = None
    routers: Mapping[str, torch.nn.Module] = field(default_factory=dict)


class VocabHead(ABC):
    """The rows of one head under one name. Life: `bind` once per head; then per request `prefill`, any number of
    `logits` / `top` / `observe`, and `finish`. What was learnt over requests stays until `reset`.

    A reduced head gives the very logits of the full one for the rows that it computes, and q is the softmax over these
    rows alone. That is what a tree's `draft_probs` must hold, so reducing a head never changes the target's output.

    Class attributes:
        kind: the first part of the name.
        summary: one line for people.
        weights: what must lie ready for it: nothing, a list of token ids, or a router trained for this very head.

    Attributes:
        name: as it stands in an `Arm`, for example "fr:16384".
        needs_prompt_top_k: the target's k most likely tokens after every token of the prompt, 0 for none.
        needs_top_k: the same after every verified row (`Observation.target_top_ids`).
        needs_top_logits: with their logits (`Observation.target_top_logits`).
        weight: [R, H], the head's own memory, which may be tied to the target's embeddings and is only read.
        vocab_size: of the target.
    """

    kind: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    weights: ClassVar[Literal["none", "frequency list", "trained router"]] = "none"
    needs_prompt_top_k: int = 0
    needs_top_k: int = 0
    needs_top_logits: bool = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.vocab_size = 0
        self._facts: tuple[object, ...] | None = None
        self._given_ids: torch.Tensor | None = None
        self._data: HeadData | None = None

    @classmethod
    @abstractmethod
    def parse(cls, name: str, argument: str) -> VocabHead:
        """The head called `name`, of which `argument` stands behind the first colon ("" without one).

        Raises:
            ValueError: an argument that this kind of head does not take.
        """

    def bind(
        self,
        weight: torch.Tensor,
        *,
        token_ids: torch.Tensor | None = None,
        vocab_size: int,
        keep: Sequence[int] = (),
        data: HeadData | None = None,
    ) -> None:
        """Meet a head; once for every request, and cheap if nothing has changed. What was learnt stays.

        Args:
            weight: [R, H], a drafter's own head or the target's. Never written to.
            token_ids: int64 [R], the target's token of each row, all different; None if row i is token i.
            vocab_size: of the target.
            keep: tokens that are always among the rows (end of text, chat markers), where the head has a row for them.
            data: lists and routers instead of those shipped.

        Raises:
            ValueError: shapes that do not fit, a token outside the vocabulary, or data that is missing or foreign.
        """
        if weight.dim() != 2 or not weight.is_floating_point() or not len(weight):
            raise ValueError(f"weight must be floating point of shape [R, H], got {weight.dtype} {list(weight.shape)}")
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be >= 1, got {vocab_size}")
        version = None if weight.is_inference() else weight._version  # what is copied of it must not grow old
        facts = (weight.data_ptr(), weight.dtype, weight.device, tuple(weight.shape), version, vocab_size, tuple(keep))
        same_tokens = token_ids is self._given_ids  # kept, so that the identity means something
        if facts == self._facts and same_tokens and data is self._data:
            return
        self._facts = None
        self._given_ids, self._data = token_ids, data
        self.weight = weight.detach()
        self.vocab_size = vocab_size
        self._token_of = np.arange(len(weight), dtype=np.int64)
        if token_ids is not None:
            if token_ids.shape != (len(weight),) or token_ids.is_floating_point():
                raise ValueError(
                    f"token_ids must be whole numbers of shape [{len(weight)}], one per row, got {token_ids.dtype} "
                    f"{list(token_ids.shape)}"
                )
            self._token_of = token_ids.cpu().numpy().astype(np.int64)
        _check_tokens("token_ids", self._token_of, vocab_size)
        self._row_of = np.full(vocab_size, -1, dtype=np.int32)
        self._row_of[self._token_of] = np.arange(len(weight), dtype=np.int32)
        if (self._row_of >= 0).sum() != len(weight):
            raise ValueError("token_ids must be all different, got a repeated one")
        wanted = np.unique(np.asarray(list(keep), dtype=np.int64))
        _check_tokens("keep", wanted, vocab_size)
        self.keep = wanted[self._row_of[wanted] >= 0]
        self._bound(HeadData() if data is None else data)
        self._facts = facts

    @abstractmethod
    def _bound(self, data: HeadData) -> None:
        """Build what `logits` needs; `weight`, `keep` and the maps of rows are set."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows computed per hidden state now; before `bind` 0."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor, *, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens in use and their logits.

        Args:
            hidden: [M, H], of the type of `weight`.
            depth: of the tokens that are predicted, 1 for children of the root.

        Returns:
            int64 [C], all different, and [M, C]; -inf where a hidden state does not use a token.
        """

    def top(self, hidden: torch.Tensor, *, k: int, depth: int) -> TopTokens:
        """The `k` <= 32 most likely tokens per hidden state, with log-probabilities normalised over the rows in use."""
        check_k(k)
        ids, logits = self.logits(hidden, depth=depth)
        return top_tokens(logits.float(), ids, k=k)

    def probabilities(self, hidden: torch.Tensor, *, depth: int, temperature: float = 1.0) -> torch.Tensor:
        """q for `DraftTree.draft_probs`: float32 [M, V] over the whole vocabulary, 0 outside the rows in use."""
        if not temperature > 0.0:
            raise ValueError(f"temperature must be > 0, got {temperature}")
        ids, logits = self.logits(hidden, depth=depth)
        whole = logits.new_zeros((len(hidden), self.vocab_size), dtype=torch.float32)
        return whole.index_copy_(1, ids, torch.softmax(logits.float() / temperature, dim=-1))

    def prefill(self, token_ids: np.ndarray, top_ids: np.ndarray | None = None) -> None:  # noqa: B027
        """A request starts.

        Args:
            token_ids: int64 [T], all committed tokens, the root last.
            top_ids: int64 [T - 1, k] with k >= `needs_prompt_top_k`; None if that is 0.
        """

    def observe(self, observation: Observation) -> None:  # noqa: B027
        """A step was verified."""

    def finish(self) -> None:  # noqa: B027
        """The request ended."""

    def reset(self) -> None:  # noqa: B027
        """Forget everything learnt."""

    def state_dict(self) -> dict[str, Any]:
        """What was learnt over requests, as plain Python and numpy values; empty if nothing is."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises ValueError on a foreign or damaged state."""
        if state:
            raise ValueError(f"vocabulary head {self.name!r} keeps no state, got the keys {', '.join(sorted(state))}")

    def _rows_of(self, token_ids: np.ndarray) -> np.ndarray:
        """int32, the rows of tokens; tokens without a row are left out."""
        rows = self._row_of[token_ids]
        return rows[rows >= 0]


def check_k(k: int) -> None:
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k must be in [1, {MAX_K}], got {k}")


def _check_tokens(name: str, ids: np.ndarray, vocab_size: int) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise ValueError(f"{name} must be in [0, {vocab_size}), got {bad}")
