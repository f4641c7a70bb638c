"""Tokens whose rows of a head point in a similar direction."""

from __future__ import annotations

import numpy as np
import torch

COUNT = 4
"""Neighbours of a token."""

SKETCH = 64
CANDIDATES = 32
"""Rows are first compared in a random projection on so many dimensions; so many of them are then compared exactly."""

REMEMBERED = 1 << 14


class Neighbours:
    """The `COUNT` nearest rows by cosine, found when first asked for and then remembered.

    Args:
        weight: [R, H].
        token_of: int64 [R].
        among: bool [V], the tokens that may be neighbours.
    """

    def __init__(self, weight: torch.Tensor, token_of: np.ndarray, *, among: np.ndarray) -> None:
        self._weight = weight
        self._tokens = token_of[among[token_of]]
        self._rows = torch.from_numpy(np.flatnonzero(among[token_of])).to(weight.device)
        self._row_of = np.full(len(among), -1, dtype=np.int64)
        self._row_of[token_of] = np.arange(len(token_of))
        self._sketches: torch.Tensor | None = None
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, token: int) -> tuple[np.ndarray, np.ndarray]:
        """Neighbours of a token, nearest first, and their cosines where above 0."""
        found = self._known.get(token)
        if found is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            found = self._known[token] = self._search(token)
        return found

    @torch.inference_mode()
    def _search(self, token: int) -> tuple[np.ndarray, np.ndarray]:
        if self._sketches is None:
            generator = torch.Generator().manual_seed(0)
            self._projection = torch.randn((self._weight.shape[1], SKETCH), generator=generator).to(self._weight.device)
            self._sketches = torch.cat([self._unit(part) @ self._projection for part in self._rows.split(4096)])
        own = self._unit(torch.tensor([int(self._row_of[token])], device=self._weight.device))
        rough = (own @ self._projection @ self._sketches.T)[0]
        places = rough.topk(min(CANDIDATES, len(rough))).indices
        cosines = (self._unit(self._rows[places]) @ own[0]).cpu().numpy()
        tokens = self._tokens[places.cpu().numpy()]
        order = np.lexsort((tokens, -cosines))
        order = order[(tokens[order] != token) & (cosines[order] > 0.0)][:COUNT]
        return tokens[order], cosines[order].astype(np.float64)

    def _unit(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the head at length 1, float32."""
        return torch.nn.functional.normalize(self._weight.index_select(0, rows).float(), dim=1)
