"""The tree to verify, out of what the drafters propose: merge, value, and keep the nodes that pay.

The value of a node is the probability that it is accepted: the product of the conditionals along its path, calibrated
per drafter and mixed where several drafters speak. Siblings exclude each other, so values add up to expected accepted
tokens, and the best n nodes by value are the best tree of n nodes. Of the sizes, the one is taken that maximises

    1 + sum of the n best values - rate * seconds(n)

(Dinkelbach's form of tokens per second, with the long-run rate), over all n: seconds may have steps in them, and zero
nodes is an answer. Only for deterministic trees: a drawn token must not be dropped for what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaptspec.bandits.checks import check_between, check_count
from adaptspec.control.calibration import Calibrator, Judged, Placed, judge
from adaptspec.control.mixing import Mixer, Votes
from adaptspec.names import unknown_name
from adaptspec.trees import budget_order, path_scores
from adaptspec.trees._checks import check_deterministic
from adaptspec.trees.algebra import select_rows
from adaptspec.trees.cost_aware import VerifySeconds, step_seconds
from adaptspec.trees.merge import merge_shapes
from adaptspec.types import DraftTree


@dataclass(frozen=True, slots=True)
class Candidates:
    """Everything that was proposed in a step, as one valued tree.

    Attributes:
        names: who proposed, [M].
        trees: what each proposed, [M].
        tree: the merged tree [N]; scores are log values. Evidence: "conditional", the mixed conditionals, and
            "proposers", how many drafters proposed the node.
        origins: int64 [M, N], the row of each merged node in each proposed tree, -1 where it is not there.
        conditionals: float64 [M, N], calibrated, 0 where a drafter did not propose the node.
        placed: where each proposal is in its calibrator's tables, [M].
        votes: what the mixer knows of the nodes; None without a mixer.
    """

    names: tuple[str, ...]
    trees: tuple[DraftTree, ...]
    tree: DraftTree
    origins: np.ndarray
    conditionals: np.ndarray
    placed: tuple[Placed | None, ...] = ()
    votes: Votes | None = None


def value_candidates(
    trees: Sequence[DraftTree],
    names: Sequence[str],
    *,
    calibrators: Mapping[str, Calibrator],
    mixer: Mixer | None = None,
    local: np.ndarray | None = None,
) -> Candidates:
    """Merge deterministic trees and value every node.

    Args:
        trees: M proposals; empty ones are fine.
        names: the drafter of each.
        calibrators: by drafter.
        mixer: needed for more than one tree; its experts are in any order and may be more than `names`.
        local: per-request part of the mixer.

    Raises:
        ValueError: names that do not fit, a drafter without a calibrator or unknown to the mixer, a sampled tree, more
            than one tree without a mixer.
    """
    names = tuple(names)
    if len(names) != len(trees) or len(set(names)) != len(names):
        raise ValueError(f"names must be {len(trees)} different names, one per tree, got {list(names)}")
    for name in names:
        if name not in calibrators:
            raise unknown_name("drafter", name, calibrators)
        if mixer is not None and name not in mixer.names:
            raise unknown_name("expert", name, mixer.names)
    if mixer is None and len(trees) > 1:
        raise ValueError(f"mixer must be given for more than one tree, got {len(trees)} trees")

    singles, placed = [], []
    for name, tree in zip(names, trees, strict=True):
        values, place = calibrators[name].place(tree)
        singles.append(values)
        placed.append(place)
    if mixer is None:
        token_ids, parents = (trees[0].token_ids, trees[0].parents) if trees else (np.zeros(0, np.int64),) * 2
        origins = np.arange(len(token_ids))[None] if trees else np.zeros((0, 0), np.int64)
    else:
        # Columns of evidence have done their work in the calibrators; merging them would cost as much as all the rest.
        token_ids, parents, origins = merge_shapes(trees)
    conditionals = np.zeros(origins.shape)
    for row, places, values in zip(conditionals, origins, singles, strict=True):
        if values.size:
            np.multiply(values[places], places >= 0, out=row)
    votes = None
    if mixer is None:
        mixed = conditionals[0] if trees else np.zeros(0)
    else:
        mixed, votes = mixer.predict(parents, *_by_expert(names, mixer, origins, conditionals), local=local)
    valued = _valued(token_ids, parents, mixed, origins)
    return Candidates(names, tuple(trees), valued, origins, conditionals, tuple(placed), votes)


def _valued(token_ids: np.ndarray, parents: np.ndarray, mixed: np.ndarray, origins: np.ndarray) -> DraftTree:
    evidence = {"conditional": mixed, "proposers": (origins >= 0).sum(axis=0).astype(np.float64)}
    return DraftTree(token_ids, parents, path_scores(parents, np.log(mixed)), evidence=evidence)


def leave_out(candidates: Candidates, name: str, *, mixer: Mixer, local: np.ndarray | None = None) -> DraftTree:
    """The valued tree of all proposals but one drafter's: that of `value_candidates` without it, in less time.

    Raises:
        ValueError: a drafter that proposed nothing, or was not asked.
    """
    if name not in candidates.names:
        raise unknown_name("drafter", name, candidates.names)
    rest = [row for row, other in enumerate(candidates.names) if other != name]
    origins, conditionals = candidates.origins[rest], candidates.conditionals[rest]
    proposed = origins >= 0
    kept = np.flatnonzero(proposed.any(axis=0))
    # Rows come in the order in which merging the others would number them: by who proposed a node first, and where.
    first = proposed[:, kept].argmax(axis=0)
    kept = kept[np.lexsort((origins[first, kept], first))]
    position = np.full(origins.shape[1] + 1, -1, dtype=np.int64)  # the extra last entry maps ROOT = -1 to itself
    position[kept] = np.arange(len(kept))
    parents = position[candidates.tree.parents[kept]]
    origins, conditionals = origins[:, kept], conditionals[:, kept]
    names = tuple(candidates.names[row] for row in rest)
    mixed, _ = mixer.predict(parents, *_by_expert(names, mixer, origins, conditionals), local=local)
    return _valued(candidates.tree.token_ids[kept], parents, mixed, origins)


def fit_to_cost(
    tree: DraftTree,
    *,
    verify_curve: VerifySeconds,
    draft_seconds: float = 0.0,
    rate: float | None,
    max_nodes: int | None = None,
) -> tuple[DraftTree, np.ndarray]:
    """The nodes of a valued tree that pay, and what every size would earn.

    Args:
        tree: scores are log values, as in `Candidates.tree`.
        verify_curve: seconds of a verification with n draft nodes: an array from n = 0 on (fast) or a callable.
        draft_seconds: what drafting has cost. With a `rate` it is sunk and changes nothing.
        rate: tokens per second of the whole run; None maximises the tokens per second of this step alone.
        max_nodes: the largest tree allowed.

    Returns:
        The kept tree, rows in their old order; and float64 [K + 1], expected tokens of a step, bonus included, with
        the 0..K best nodes, K = min(N, max_nodes).

    Raises:
        ValueError: a sampled tree, costs that are too few or not positive, a negative rate or limit.
    """
    if rate is not None:
        check_between("rate", rate, low=0.0, high=1e12, open_low=False)
    if max_nodes is not None:
        check_count("max_nodes", max_nodes, minimum=0)
    check_deterministic(tree, "size by score")
    order = budget_order(tree)[:max_nodes]
    seconds = step_seconds(verify_curve, draft_seconds, len(order))
    expected = np.ones(len(order) + 1)
    np.exp(tree.scores[order], out=expected[1:])
    np.cumsum(expected, out=expected)
    size = int((expected / seconds if rate is None else expected - rate * seconds).argmax())
    if size == len(tree):
        return tree, expected
    rows = order[:size]
    rows.sort()
    return select_rows(tree, rows), expected


def assemble(
    trees: Sequence[DraftTree],
    names: Sequence[str],
    *,
    calibrators: Mapping[str, Calibrator],
    mixer: Mixer | None = None,
    verify_curve: VerifySeconds,
    draft_seconds: float = 0.0,
    rate: float | None,
    max_nodes: int | None = None,
    local: np.ndarray | None = None,
) -> tuple[DraftTree, np.ndarray]:
    """`value_candidates`, then `fit_to_cost`. With one tree and no mixer this is the budget "auto".

    Keep the `Candidates` in between to `learn` from the step.

    >>> tree, expected = assemble([DraftTree.chain([5, 6], np.log([0.8, 0.2]))], ["suffix"],
    ...     calibrators={"suffix": Calibrator()}, verify_curve=[1.0, 1.1, 1.5], rate=2.0)
    >>> tree.token_ids.tolist(), expected.round(2).tolist()
    ([5], [1.0, 1.8, 2.0])
    """
    candidates = value_candidates(trees, names, calibrators=calibrators, mixer=mixer, local=local)
    return fit_to_cost(
        candidates.tree, verify_curve=verify_curve, draft_seconds=draft_seconds, rate=rate, max_nodes=max_nodes
    )


def learn(
    candidates: Candidates,
    continuation: Sequence[int] | np.ndarray,
    *,
    calibrators: Mapping[str, Calibrator],
    mixer: Mixer | None = None,
    local: np.ndarray | None = None,
) -> None:
    """Teach every drafter's calibrator, and the mixer, what followed the root.

    Args:
        candidates: the whole proposals of the step, whatever part of them was verified.
        continuation: [T], the tokens that followed the root: `Observation.tokens`, or more once more are known.
        local: per-request part of the mixer, changed in place.
    """
    judged = judge(candidates.tree, continuation)
    if mixer is not None:
        arrays = _by_expert(candidates.names, mixer, candidates.origins, candidates.conditionals)
        mixer.update(candidates.tree, *arrays, continuation, local=local, judged=judged, votes=candidates.votes)
    placed = candidates.placed or (None,) * len(candidates.trees)
    for name, tree, origin, place in zip(candidates.names, candidates.trees, candidates.origins, placed, strict=True):
        own = judged if mixer is None else _own(judged, origin)
        calibrators[name].update(tree, continuation, judged=own, placed=place)


def _own(judged: Judged, origin: np.ndarray) -> Judged:
    """What the judgement of a merged tree says of one of the trees that it was made from."""
    rows, hits, depths = judged
    own = origin[rows]
    found = own.tolist()
    kept = [place for place, row in enumerate(found) if row >= 0]
    kept.sort(key=found.__getitem__)
    if len(kept) == len(found) and kept == list(range(len(found))):
        return own, hits, depths
    return own[kept], hits[kept], depths[kept]


def _by_expert(
    names: tuple[str, ...], mixer: Mixer, origins: np.ndarray, conditionals: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows in the order of the mixer's experts; who is not asked is silent."""
    if names == mixer.names:
        return origins, conditionals
    rows = [mixer.names.index(name) for name in names]
    shape = (len(mixer.names), origins.shape[1])
    all_origins, all_conditionals = np.full(shape, -1, dtype=np.int64), np.zeros(shape)
    all_origins[rows] = origins
    all_conditionals[rows] = conditionals
    return all_origins, all_conditionals
