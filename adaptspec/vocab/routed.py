"""Heads that look at the hidden state before they choose rows: what CORAL and DynaSpec share."""

from __future__ import annotations

import copy
from abc import abstractmethod
from pathlib import Path

import numpy as np
import torch

from adaptspec.kernels.vocab_head import TopTokens, vocab_head
from adaptspec.pretrained import shipped_folder
from adaptspec.vocab.base import HeadData, VocabHead, check_k
from adaptspec.vocab.microspec import named
from adaptspec.vocab.routers import ROUTERS, Router, load_router


class RoutedHead(VocabHead):
    """Rows in groups, of which a router picks some for each call. All hidden states of one call share the picked
    groups, so that one product computes them; special tokens and the router's floor are always in.

    Args:
        path: of the router's weights folder, None for the shipped one.
    """

    weights = "trained router"

    def __init__(self, name: str, path: Path | None) -> None:
        super().__init__(name)
        self.path = path
        self._router: Router | None = None

    def _bound(self, data: HeadData) -> None:
        router = self._find_router(data)
        device, count, width = self.weight.device, *self.weight.shape
        if (router.row_count, router.hidden_size) != (count, width):
            raise ValueError(
                f"the router of vocab {self.name!r} is for a head of {router.row_count} rows and hidden size "
                f"{router.hidden_size}, this one has {count} and {width}; train one for it "
                f"(adaptspec.vocab.train_router) and write {self.kind}:FOLDER"
            )
        self._router = copy.deepcopy(router).to(device=device, dtype=self.weight.dtype).eval()
        group_of = router.group_of.cpu().numpy()
        order = np.argsort(group_of, kind="stable")
        self.sizes = np.bincount(group_of, minlength=router.groups)
        always = np.union1d(self._row_of[self.keep], router.floor.cpu().numpy())
        self._always = torch.from_numpy(always).to(device)
        ends = np.cumsum(self.sizes)[:-1]
        elsewhere = ~np.isin(order, always)  # rows of a group that are not computed anyway
        groups = list(zip(np.split(order, ends), np.split(elsewhere, ends), strict=True))
        self._blocks = [torch.from_numpy(block[own]).to(device) for block, own in groups]
        self._columns = [None if own.all() else torch.from_numpy(np.flatnonzero(own)) for _, own in groups]
        self._tokens = torch.from_numpy(self._token_of).to(device)
        self._bound_groups()
        # On a CPU every group is one block of memory; the head itself is, where groups are ranges of rows.
        in_place = bool((order == np.arange(count)).all())
        self._sorted = None
        if device.type == "cpu":
            sorted_rows = self.weight if in_place else self.weight.index_select(0, torch.from_numpy(order))
            self._sorted = sorted_rows.split(self.sizes.tolist())
            self._always_rows = self.weight.index_select(0, self._always)

    def _bound_groups(self) -> None:
        """Check or derive what depends on the groups."""

    @abstractmethod
    def _pick(self, scores: np.ndarray, *, depth: int) -> np.ndarray:
        """The groups to compute, given each one's highest score [G] over the hidden states."""

    @torch.inference_mode()
    def groups(self, hidden: torch.Tensor, *, depth: int) -> np.ndarray:
        """int64, the groups computed for hidden states [M, H], the most likely first."""
        if self._router is None:
            raise RuntimeError(f"vocab {self.name!r} has no head yet; call bind first")
        scores = self._scores(self._router(hidden)).amax(dim=0)
        return self._pick(scores.float().cpu().numpy(), depth=depth)

    def _scores(self, outputs: torch.Tensor) -> torch.Tensor:
        """[M, G] in [0, 1] from the router's outputs."""
        return torch.sigmoid(outputs)

    def logits(self, hidden: torch.Tensor, *, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.groups(hidden, depth=depth).tolist()
        rows = torch.cat([self._always, *(self._blocks[group] for group in chosen)])
        if self._sorted is None:
            return self._tokens[rows], hidden @ self.weight[rows].T
        parts = [hidden @ self._always_rows.T, *(self._product(hidden, group) for group in chosen)]
        return self._tokens[rows], torch.cat(parts, dim=1)

    def top(self, hidden: torch.Tensor, *, k: int, depth: int) -> TopTokens:
        if self._sorted is not None:
            return super().top(hidden, k=k, depth=depth)
        check_k(k)
        chosen = self.groups(hidden, depth=depth).tolist()
        rows = torch.cat([self._always, *(self._blocks[group] for group in chosen)]).to(torch.int32)
        return named(vocab_head(hidden, self.weight, rows, k=k), self._tokens)

    def _product(self, hidden: torch.Tensor, group: int) -> torch.Tensor:
        """Logits of a group without the rows that are always computed."""
        assert self._sorted is not None
        logits, columns = hidden @ self._sorted[group].T, self._columns[group]
        return logits if columns is None else logits.index_select(1, columns)

    def _find_router(self, data: HeadData) -> Router:
        given = data.routers.get(self.kind)
        if given is not None and self.path is None:
            if not isinstance(given, ROUTERS[self.kind]):
                raise ValueError(f"router of {self.name!r} must be {ROUTERS[self.kind].__name__}, got {type(given)}")
            return given
        folder = shipped_folder(self.kind) if self.path is None else self.path
        if folder is None:
            raise ValueError(
                f"vocab {self.name!r} needs a trained router and none is shipped; train one "
                f"(adaptspec.vocab.train_router) and write {self.kind}:FOLDER"
            )
        return load_router(folder, kind=self.kind)


def read_number_and_path(argument: str) -> tuple[int | None, Path | None]:
    """Of "ROWS", "FOLDER" or "ROWS:FOLDER"."""
    first, _, rest = argument.partition(":")
    if first.isdecimal():
        return int(first), Path(rest) if rest else None
    return None, Path(argument) if argument else None
