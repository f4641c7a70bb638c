"""Recording how trees of a feature-recursive drafter grow: what Learning to Draft trains on."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from adaptspec.drafters import Drafter
from adaptspec.drafters.draft_policies import DEPTHS, FEATURES, MOST_DEPTH, SIZES, describe_tree
from adaptspec.drafters.sized import SizedDrafter, make_backbone
from adaptspec.files import whole_file
from adaptspec.tracing.recorder import TracePrompt, TraceRecorder, measured_costs
from adaptspec.types import DraftContext, DraftTree

_ALL_NODES = 1 << 14
"""More than any tree has that grows to `MOST_DEPTH`: nothing is cut."""

VERSION = 1


@dataclass(frozen=True, slots=True)
class GrowthRecords:
    """What every choice of depth and size would have given at positions of the target's own output. P positions, D
    depths (`DEPTHS`), A sizes (`SIZES`), F features.

    Attributes:
        features: float32 [P, D, F], of the tree when it is so deep, see `describe_tree`.
        accepted: int16 [P, D, A], draft tokens that the target would have accepted of its best nodes.
        seconds: float32 [P, D, A], of a whole step: drafting so deep, verifying so many nodes, and the rest.
        prompts: int32 [P], which prompt.
    """

    features: np.ndarray
    accepted: np.ndarray
    seconds: np.ndarray
    prompts: np.ndarray

    def __post_init__(self) -> None:
        count, shape = self.features.shape[:1], (len(DEPTHS), len(SIZES))
        for name, wanted in (
            ("features", (*count, len(DEPTHS), FEATURES)),
            ("accepted", (*count, *shape)),
            ("seconds", (*count, *shape)),
            ("prompts", count),
        ):
            if getattr(self, name).shape != wanted:
                raise ValueError(f"{name} must have shape {list(wanted)}, got {list(getattr(self, name).shape)}")
        if not (self.seconds > 0).all():
            raise ValueError("seconds must be > 0")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `read_growth` reads."""
        arrays = {name: getattr(self, name) for name in GrowthRecords.__slots__}
        with whole_file(Path(path)) as file:
            np.savez_compressed(file, version=VERSION, **arrays)


def read_growth(path: str | os.PathLike[str]) -> GrowthRecords:
    """Read a file of `GrowthRecords.save`. Raises ValueError if it is something else."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} holds no records of growing trees: {error}") from error
    if arrays.pop("version", np.zeros(0)).tolist() != VERSION or set(arrays) != set(GrowthRecords.__slots__):
        raise ValueError(f"{path} holds no records of growing trees of version {VERSION}")
    return GrowthRecords(**arrays)


def record_growth(
    model: torch.nn.Module,
    drafter: str | Drafter,
    prompts: Sequence[TracePrompt],
    *,
    max_new_tokens: int = 128,
    tokenizer: Any = None,
    progress: Callable[[str], None] = lambda name: None,
) -> tuple[GrowthRecords, str]:
    """Answer prompts greedily, one token per pass, and let the drafter's tree grow to `MOST_DEPTH` at every position.

    Positions at which the end of the answer hides how far a draft would have come are left out. Seconds of drafting are
    the median of what reaching each depth took, those of verification and of the rest of a step come from the cost
    model, measured on this machine before and while recording: single times are noisy, and what a step costs does not
    depend on what is accepted in it.

    Args:
        drafter: a feature-recursive one, see `make_backbone`.
        progress: told the name of every prompt before it is answered.

    Returns:
        the records, and the machine's fingerprint.

    Raises:
        ValueError: a drafter of another kind, no prompts, or answers so short that no position is left.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    grower = Grower(drafter)
    contexts = sorted({1 << (len(prompt.token_ids) + max_new_tokens - 1).bit_length() for prompt in prompts})
    costs, fingerprint = measured_costs(model, nodes=max(SIZES), contexts=contexts, tokenizer=tokenizer)
    recorder = TraceRecorder(
        model, {"growing": grower}, max_new_tokens=max_new_tokens, costs=costs, tokenizer=tokenizer
    )
    found: list[Grown] = []
    numbers: list[int] = []
    for number, prompt in enumerate(prompts):
        progress(prompt.name)
        grower.grown.clear()
        request = recorder.record(prompt)
        if prompt.name in recorder.set_aside:
            raise ValueError(f"the drafter failed: {'; '.join(recorder.set_aside[prompt.name].values())}")
        kept = judge_growth(grower.grown, request.tokens)
        found += kept
        numbers += [number] * len(kept)
    if not found:
        raise ValueError(f"no position is left: answers must be longer than {MOST_DEPTH} tokens")
    draft = np.median([one.seconds for one in found], axis=0)
    lengths = np.array([one.length for one in found])
    verify = np.empty((len(found), len(SIZES)))
    for length in np.unique(lengths).tolist():
        verify[lengths == length] = costs.verify_curve(max(SIZES), context=length)[list(SIZES)]
    seconds = draft[None, :, None] + verify[:, None, :] + costs.overhead_seconds()
    return (
        GrowthRecords(
            np.stack([one.features for one in found]).astype(np.float32),
            np.stack([one.accepted for one in found]).astype(np.int16),
            seconds.astype(np.float32),
            np.array(numbers, dtype=np.int32),
        ),
        fingerprint,
    )


@dataclass(slots=True)
class Grown:
    """A whole tree at one position, and what reaching each depth of `DEPTHS` took; judged once the text is known."""

    tree: DraftTree
    length: int
    features: np.ndarray
    seconds: np.ndarray
    accepted: np.ndarray | None = None


class Grower(SizedDrafter):
    """Grows whole trees, keeps them, and proposes nothing."""

    name = "growing"

    def __init__(self, drafter: str | Drafter) -> None:
        super().__init__(make_backbone(drafter, max_depth=MOST_DEPTH))
        self.grown: list[Grown | None] = []

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        levels: list[np.ndarray] = []
        features: list[np.ndarray] = []
        times: list[float] = []

        def note(depth: int, scores: np.ndarray) -> bool:
            levels.append(scores)
            if depth in DEPTHS:
                times.append(perf_counter())
                features.append(describe_tree(levels, length=context.length))
            return False

        if context.max_depth < MOST_DEPTH:  # the answer ends before a draft so deep could
            self.grown.append(None)
            return DraftTree.empty()
        begun = perf_counter()
        tree = self.backbone.propose(context, _ALL_NODES, stop=note)
        whole = len(features) == len(DEPTHS)
        self.grown.append(Grown(tree, context.length, np.stack(features), np.array(times) - begun) if whole else None)
        return DraftTree.empty()


def judge_growth(grown: Sequence[Grown | None], tokens: np.ndarray) -> list[Grown]:
    """The trees of the positions of one answer, judged by how it went on; without those whose end it hides.

    Args:
        grown: per position, the root is the token there.
        tokens: int64 [T], the answer.
    """
    judged = []
    for position, one in enumerate(grown):
        if one is None:
            continue
        following = tokens[position + 1 :].tolist()
        path = _follow(one.tree, following)
        if len(path) == len(following) and len(path) < MOST_DEPTH:
            continue
        one.accepted = accepted_within(one.tree, path)
        judged.append(one)
    return judged


def accepted_within(tree: DraftTree, path: Sequence[int]) -> np.ndarray:
    """int64 [D, A], nodes of a path that are among the best of a tree that grew to each depth, for every size.

    Args:
        tree: all nodes, best first.
        path: nodes from the root down.
    """
    depths, nodes = tree.depths(), np.asarray(path, dtype=np.int64)
    found = np.zeros((len(DEPTHS), len(SIZES)), dtype=np.int64)
    for row, depth in enumerate(DEPTHS):
        place = np.cumsum(depths <= depth) - 1  # among the nodes that there were at this depth
        reached = place[nodes[:depth]]
        found[row] = (reached[:, None] < np.array(SIZES)).sum(axis=0)
    return found


def _follow(tree: DraftTree, tokens: Sequence[int]) -> list[int]:
    """Nodes that spell the text from the root down."""
    children: Mapping[tuple[int, int], int] = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
    }
    path: list[int] = []
    for token in tokens:
        node = children.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path
