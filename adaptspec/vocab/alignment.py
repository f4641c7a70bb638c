"""A head that is brought closer to the target while it is in use, by few numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

EVERY = 64
"""Pairs between two rounds of training."""

STEPS = 4
KEPT = 256
"""The newest pairs, from which a round draws its batches."""

BATCH = 64
LEARNING_RATE = 0.02


class Alignment:
    """Low-rank correction of the hidden states that a head multiplies: logits W (h + B A h), A [r, H] and B [H, r].

    Pairs of a hidden state and the target's most likely tokens with their logits are kept; after every `EVERY` new ones
    a few steps of Adam lower KL(target || head), both taken over the tokens of the batch. Between rounds the weights
    stand still, so that all of one step's q come from the same head. B starts at zero: nothing changes before the
    first round.

    After EvoSpec (2605.27390), whose code is not public: the form of the correction and of the loss is ours.

    Args:
        hidden_size: H.
        rank: r.
        seed: of A and of the batches.
    """

    def __init__(self, hidden_size: int, *, rank: int = 8, seed: int = 0) -> None:
        if not 1 <= rank <= hidden_size:
            raise ValueError(f"rank must be in [1, {hidden_size}], got {rank}")
        self.rank = rank
        generator = torch.Generator().manual_seed(seed)
        self._down = torch.randn((rank, hidden_size), generator=generator) / hidden_size**0.5
        self._up = torch.zeros((hidden_size, rank))
        self._rng = np.random.default_rng(seed)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._new = 0
        self.rounds = 0

    def apply(self, hidden: torch.Tensor) -> torch.Tensor:
        """Corrected hidden states [M, H]."""
        if not self.rounds:
            return hidden
        down, up = self._down.to(hidden), self._up.to(hidden)
        return hidden + (hidden @ down.T) @ up.T

    def add(
        self,
        hidden: torch.Tensor,
        token_ids: np.ndarray,
        logits: np.ndarray,
        *,
        rows_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Keep a pair, and train if it is time.

        Args:
            hidden: [H], not corrected.
            token_ids, logits: int64 [k] and float32 [k], the target's; only tokens that the head has a row for.
            rows_of: token ids -> the head's rows [n, H].
        """
        if not len(token_ids):
            return
        with torch.inference_mode(False):
            kept = hidden.detach().to("cpu", torch.float32, copy=True)
            self._pairs.append((kept, torch.as_tensor(token_ids), torch.as_tensor(logits, dtype=torch.float32)))
        del self._pairs[:-KEPT]
        self._new += 1
        if self._new >= EVERY:
            self._new = 0
            self._train(rows_of)

    def _train(self, rows_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            down, up = (matrix.clone().requires_grad_() for matrix in (self._down, self._up))
            moments = [(torch.zeros_like(matrix), torch.zeros_like(matrix)) for matrix in (down, up)]
            for number in range(1, STEPS + 1):
                chosen = self._rng.choice(len(self._pairs), size=min(BATCH, len(self._pairs)), replace=False)
                batch = [self._pairs[index] for index in chosen]
                hidden = torch.stack([pair[0] for pair in batch])
                tokens = torch.unique(torch.cat([pair[1] for pair in batch]))
                rows = rows_of(tokens).to("cpu", torch.float32, copy=True)
                target = torch.full((len(batch), len(tokens)), -torch.inf)
                for row, (_, ids, logits) in enumerate(batch):
                    target[row, torch.searchsorted(tokens, ids)] = logits
                target = torch.softmax(target, dim=-1)
                scores = torch.log_softmax((hidden + (hidden @ down.T) @ up.T) @ rows.T, dim=-1)
                loss = torch.nn.functional.kl_div(scores, target, reduction="batchmean")
                gradients = torch.autograd.grad(loss, [down, up])
                for matrix, gradient, moment in zip((down, up), gradients, moments, strict=True):
                    _adam(matrix, gradient, *moment, number=number)
            self._down, self._up = down.detach(), up.detach()
        self.rounds += 1

    def state_dict(self) -> dict[str, Any]:
        """The correction, the kept pairs, and the random state."""
        width = max((len(ids) for _, ids, _ in self._pairs), default=0)
        tokens = np.full((len(self._pairs), width), -1, dtype=np.int64)  # -1 and -inf fill up
        logits = np.full(tokens.shape, -np.inf, dtype=np.float32)
        for row, (_, ids, values) in enumerate(self._pairs):
            tokens[row, : len(ids)], logits[row, : len(ids)] = ids.numpy(), values.numpy()
        return {
            "down": self._down.numpy().copy(),
            "up": self._up.numpy().copy(),
            "hidden": torch.stack([pair[0] for pair in self._pairs]).numpy() if self._pairs else np.zeros((0, 0)),
            "tokens": tokens,
            "logits": logits,
            "rounds": self.rounds,
            "new": self._new,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises ValueError on a damaged state or one of another size."""
        loaded = {}
        for name, shape in (("down", self._down.shape), ("up", self._up.shape)):
            array = np.asarray(state.get(name))
            if array.shape != tuple(shape) or array.dtype.kind != "f" or not np.isfinite(array).all():
                raise ValueError(f"state: {name} must be finite numbers of shape {list(shape)}, got {array.shape}")
            loaded[name] = torch.from_numpy(array.astype(np.float32))
        counts = [state.get(name) for name in ("rounds", "new")]
        for name, value in zip(("rounds", "new"), counts, strict=True):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"state: {name} must be a whole number >= 0, got {value!r}")
        pairs = self._read_pairs(state)
        rng = np.random.default_rng(0)
        try:
            rng.bit_generator.state = state.get("rng")
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"state: rng must be the state of a random generator: {error}") from error
        self._rng = rng
        self._down, self._up = loaded["down"], loaded["up"]
        self._pairs, (self.rounds, self._new) = pairs, counts

    def _read_pairs(self, state: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        hidden, tokens, logits = (np.asarray(state.get(name)) for name in ("hidden", "tokens", "logits"))
        count, size = len(hidden) if hidden.ndim == 2 else -1, self._down.shape[1]
        if not 0 <= count <= KEPT or (count and hidden.shape[1] != size) or hidden.dtype.kind != "f":
            raise ValueError(f"state: hidden must be at most {KEPT} rows of {size} numbers, got shape {hidden.shape}")
        if tokens.ndim != 2 or len(tokens) != count or tokens.dtype.kind != "i" or logits.shape != tokens.shape:
            raise ValueError(f"state: tokens and logits must have {count} rows, got {tokens.shape} and {logits.shape}")
        if not np.isfinite(hidden).all() or not np.isfinite(logits[tokens >= 0]).all():
            raise ValueError("state: hidden and logits must be finite")
        pairs = []
        for row in range(count):
            known = tokens[row] >= 0
            values = hidden[row], tokens[row][known], logits[row][known].astype(np.float32)
            pairs.append(tuple(torch.from_numpy(np.array(value)) for value in values))
        return pairs


@torch.no_grad()
def _adam(
    matrix: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, *, number: int
) -> None:
    """Step `number` of Adam (Kingma and Ba 2014) in place. torch's own loads its compiler first, which takes seconds in
    the middle of a request."""
    mean.lerp_(gradient, 0.1)
    square.lerp_(gradient.square(), 0.001)
    size = (square / (1.0 - 0.999**number)).sqrt_().add_(1e-8)
    matrix.addcdiv_(mean, size, value=-LEARNING_RATE / (1.0 - 0.9**number))
