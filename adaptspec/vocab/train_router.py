"""Training the routers of CORAL and DynaSpec on hidden states and what the target said after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.nn import functional

from adaptspec.names import unknown_name
from adaptspec.vocab.routers import ROUTERS, ClusterRouter, CoralRouter, Router

RouterKind = Literal["coral", "dynaspec"]

GROUPS: dict[str, int] = {"coral": 16, "dynaspec": 192}
"""Groups by default."""

FLOOR = 512
"""Rows that are always computed: so many of the tokens that the target named most in the training data, and never more
than a sixteenth of the head unless asked for."""

HELD_OUT = 0.1


@dataclass(frozen=True, slots=True)
class RouterTraining:
    """What came of a training run.

    Attributes:
        losses: one per step.
        coverage: by number of groups picked, from 1 on: share of held-out hidden states whose most likely token lies in
            those groups or in the floor.
    """

    losses: Sequence[float]
    coverage: Sequence[float]


def train_router(
    features: torch.Tensor,
    top_ids: torch.Tensor,
    *,
    kind: RouterKind,
    weight: torch.Tensor,
    token_ids: torch.Tensor | None = None,
    groups: int | None = None,
    floor: int | None = None,
    steps: int = 500,
    batch: int = 256,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> tuple[Router, RouterTraining]:
    """A router for one head.

    "coral": groups are ranges of rows of equal size, the loss is the cross-entropy with the share of the target's top
    tokens in each. "dynaspec": groups are k-means clusters of the rows at length 1, the loss is the binary
    cross-entropy with whether a cluster holds one of the target's top tokens.

    Args:
        features: [T, H], what the head multiplies: a drafter's head inputs, or the target's final hidden states.
        top_ids: int64 [T, k], the target's most likely tokens after each, most likely first.
        weight: [R, H], the head, which is only read.
        token_ids: int64 [R], the token of each row; None if row i is token i.
        groups: G; default 16 and 192.
        floor: rows that are always computed; default: 512, or a sixteenth of a small head.
        steps, batch, learning_rate: of Adam; a tenth of the positions is held out.

    Returns:
        The router in float32 on the CPU, and what came of it.

    Raises:
        ValueError: shapes that do not fit, numbers out of range, an unknown kind, or features without a token that the
            head has a row for.
    """
    if kind not in ROUTERS:
        raise unknown_name("router", kind, ROUTERS)
    count = GROUPS[kind] if groups is None else groups
    rows, hidden_size = weight.shape
    floor = min(FLOOR, rows // 16) if floor is None else floor
    _check(features, top_ids, weight, token_ids, count=count, floor=floor, steps=steps, batch=batch)
    top_rows = _rows_of(top_ids.cpu(), rows=rows, token_ids=None if token_ids is None else token_ids.cpu())
    known = (top_rows[:, 0] >= 0).nonzero().flatten()  # positions whose most likely token has a row
    if len(known) < 2:
        raise ValueError(
            f"features must hold at least 2 positions whose token the head has a row for, got {len(known)}"
        )
    generator = torch.Generator().manual_seed(seed)
    order = known[torch.randperm(len(known), generator=generator)]
    held_out = max(1, int(HELD_OUT * len(order)))
    test, train = order[:held_out], order[held_out:]

    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        common = _commonest(top_rows[train], rows=rows, count=floor)
        if kind == "coral":
            router: Router = CoralRouter(hidden_size, torch.arange(rows) * count // rows, common)
        else:
            router = ClusterRouter(hidden_size, cluster_rows(weight, count, seed=seed), common)
        optimizer = torch.optim.Adam(router.parameters(), lr=learning_rate)
        losses = []
        for _ in range(steps):
            chosen = train[torch.randint(len(train), (batch,), generator=generator)]
            outputs = router(features[chosen].to("cpu", torch.float32))
            wanted = _wanted(top_rows[chosen], router.group_of, groups=router.groups)
            if kind == "coral":
                loss = functional.cross_entropy(outputs, wanted / wanted.sum(dim=1, keepdim=True))
            else:
                loss = functional.binary_cross_entropy_with_logits(outputs, wanted.clamp(max=1.0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    router = router.eval().requires_grad_(False)
    return router, RouterTraining(losses, _coverage(router, features[test].cpu().float(), top_rows[test, 0]))


@torch.no_grad()
def cluster_rows(weight: torch.Tensor, count: int, *, rounds: int = 8, seed: int = 0) -> torch.Tensor:
    """int64 [R] in [0, count): k-means of rows at length 1, by cosine. Every cluster holds at least one row."""
    rows = functional.normalize(weight.detach().cpu().float(), dim=1)
    if not 1 <= count <= len(rows):
        raise ValueError(f"groups must be in [1, {len(rows)}], got {count}")
    generator = torch.Generator().manual_seed(seed)
    centres = rows[torch.randperm(len(rows), generator=generator)[:count]].clone()
    nearest = torch.zeros(len(rows), dtype=torch.int64)
    for _ in range(rounds):
        best = [(part @ centres.T).max(dim=1) for part in rows.split(8192)]
        nearest = torch.cat([found.indices for found in best])
        cosines = torch.cat([found.values for found in best])
        sizes = torch.bincount(nearest, minlength=count)
        for empty in (sizes == 0).nonzero().flatten().tolist():  # takes the row that fits worst where it is
            far = int(torch.where(sizes[nearest] > 1, cosines, torch.inf).argmin())
            sizes[nearest[far]] -= 1
            nearest[far], cosines[far], sizes[empty] = empty, torch.inf, 1
        sums = torch.zeros_like(centres).index_add_(0, nearest, rows)
        centres = functional.normalize(sums, dim=1)
    return nearest


def _check(
    features: torch.Tensor,
    top_ids: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor | None,
    *,
    count: int,
    floor: int,
    steps: int,
    batch: int,
) -> None:
    rows, hidden_size = weight.shape
    if features.dim() != 2 or features.shape[1] != hidden_size:
        raise ValueError(f"features must have shape [T, {hidden_size}], got {list(features.shape)}")
    if top_ids.dim() != 2 or len(top_ids) != len(features) or top_ids.is_floating_point() or not top_ids.shape[1]:
        raise ValueError(f"top_ids must be whole numbers of shape [{len(features)}, k], got {list(top_ids.shape)}")
    if len(top_ids) and int(top_ids.min()) < 0:
        raise ValueError(f"top_ids must be >= 0, got {int(top_ids.min())}")
    if token_ids is not None and token_ids.shape != (rows,):
        raise ValueError(f"token_ids must have shape [{rows}], one per row, got {list(token_ids.shape)}")
    for name, value, low, high in (
        ("groups", count, 1, rows),
        ("floor", floor, 0, rows),
        ("steps", steps, 1, 10**9),
        ("batch", batch, 1, 10**9),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name} must be in [{low}, {high}], got {value}")


def _rows_of(top_ids: torch.Tensor, *, rows: int, token_ids: torch.Tensor | None) -> torch.Tensor:
    """int64 [T, k], -1 where the head has no row."""
    tokens = torch.arange(rows) if token_ids is None else token_ids.to(torch.int64)
    row_of = torch.full((int(max(int(tokens.max()), int(top_ids.max()))) + 1,), -1, dtype=torch.int64)
    row_of[tokens] = torch.arange(rows)
    return row_of[top_ids.to(torch.int64)]


def _commonest(top_rows: torch.Tensor, *, rows: int, count: int) -> torch.Tensor:
    counts = np.bincount(top_rows[top_rows >= 0].numpy(), minlength=rows)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


def _wanted(top_rows: torch.Tensor, group_of: torch.Tensor, *, groups: int) -> torch.Tensor:
    """float32 [n, G], how many of the target's top tokens each group holds."""
    known = top_rows >= 0
    wanted = torch.zeros((len(top_rows), groups))
    return wanted.scatter_add_(1, group_of[top_rows.clamp(min=0)], known.float())


def _coverage(router: Router, features: torch.Tensor, rows: torch.Tensor) -> list[float]:
    order = router(features).argsort(dim=1, descending=True, stable=True)
    place = (order == router.group_of[rows][:, None]).float().argmax(dim=1)
    place[torch.isin(rows, router.floor)] = 0
    counts = torch.bincount(place, minlength=router.groups)
    return (counts.cumsum(0) / len(rows)).tolist()
