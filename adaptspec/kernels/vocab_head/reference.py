"""The head in plain torch: the specification, and what runs on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SPARE = 16  # entries looked at beyond the k largest, for those that equal the last one


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The k most likely tokens per row, most likely first.

    Attributes:
        ids: int64 [M, k], -1 where fewer than k logits are above -inf.
        log_probs: float32 [M, k], normalised over the rows in use.
        log_sum_exp: float32 [M], of the logits in use; -inf where none is above -inf, NaN where one is NaN or +inf.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    log_sum_exp: torch.Tensor


def vocab_head(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor | None, *, k: int, gathered: bool
) -> TopTokens:
    """See `adaptspec.kernels.vocab_head.vocab_head`. In 16 bits the matrix product rounds logits to the weights' type
    here, which the kernel does not."""
    rows = weight if gathered or ids is None else weight.index_select(0, ids.clamp(min=0))
    logits = (hidden @ rows.T).float()
    if ids is not None and (unused := ids < 0).any():
        logits.masked_fill_(unused, -torch.inf)
    return top_tokens(logits, ids, k=k)


def top_tokens(logits: torch.Tensor, ids: torch.Tensor | None, *, k: int) -> TopTokens:
    """`TopTokens` of float32 logits [M, V'] that belong to the tokens `ids` [V']."""
    count, width = logits.shape
    token_ids = logits.new_full((count, k), -1, dtype=torch.int64)
    log_probs = logits.new_full((count, k), -torch.inf)
    if count == 0 or width == 0:
        return TopTokens(token_ids, log_probs, logits.new_full((count,), -torch.inf))
    values, places = _first_of_equals(logits, min(k, width))
    # Vectorised several times better than logsumexp. The largest logit is exact in it: 0 - log(sum of exp(x - max)).
    log_softmax = torch.log_softmax(logits, dim=-1).gather(1, places)
    nothing = values == -torch.inf
    found = places if ids is None else ids.to(torch.int64)[places]
    token_ids[:, : places.shape[1]] = found.masked_fill(nothing, -1)
    log_probs[:, : places.shape[1]] = log_softmax.masked_fill(nothing, -torch.inf)
    log_sum_exp = torch.where(nothing[:, 0], -torch.inf, values[:, 0] - log_softmax[:, 0])
    return TopTokens(token_ids, log_probs, log_sum_exp)


def _first_of_equals(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest per row and their places; `topk` leaves open which of several equal ones it takes, of which there
    are many in 16 bits."""
    seen = min(k + _SPARE, logits.shape[1])
    values, places = logits.topk(seen, dim=-1)
    places, order = places.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    places = places.gather(1, order)
    unsure = (values[:, -1] == values[:, k - 1]) & (values[:, -1] > -torch.inf)  # others may be equal, and come first
    values, places = values[:, :k].contiguous(), places[:, :k].contiguous()
    if seen < logits.shape[1]:
        for row in unsure.nonzero().flatten().tolist():
            candidates = (logits[row] >= values[row, -1]).nonzero().flatten()
            order = logits[row, candidates].sort(descending=True, stable=True).indices[:k]
            places[row] = candidates[order]
            values[row] = logits[row, places[row]]
    return values, places
