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
from adaptspec.control.calibration import Calibrator
from adaptspec.control.mixing import Mixer
from adaptspec.names import unknown_name
from adaptspec.trees import budget_order, merge, path_scores, paying_budget, truncate
from adaptspec.trees.cost_aware import VerifySeconds
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
    """

    names: tuple[str, ...]
    trees: tuple[DraftTree, ...]
    tree: DraftTree
    origins: np.ndarray
    conditionals: np.ndarray


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

    singles = [calibrators[name].conditional(tree) for name, tree in zip(names, trees, strict=True)]
    if mixer is None:
        bare = trees[0] if trees else DraftTree.empty()
        origins = np.arange(len(bare))[None] if trees else np.zeros((0, 0), np.int64)
    else:
        # Columns of evidence have done their work in the calibrators; merging them would cost as much as all the rest.
        bare, origins = merge([DraftTree(tree.token_ids, tree.parents, tree.scores) for tree in trees])
    conditionals = np.zeros(origins.shape)
    for row, places, values in zip(conditionals, origins, singles, strict=True):
        if values.size:
            np.multiply(values[places], places >= 0, out=row)
    if mixer is None:
        mixed = conditionals[0] if trees else np.zeros(0)
    else:
        mixed = mixer.mix(bare, *_by_expert(names, mixer, origins, conditionals), local=local)
    valued = DraftTree(
        bare.token_ids,
        bare.parents,
        path_scores(bare.parents, np.log(mixed)),
        evidence={"conditional": mixed, "proposers": (origins >= 0).sum(axis=0).astype(np.float64)},
    )
    return Candidates(names, tuple(trees), valued, origins, conditionals)


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
        tree = truncate(tree, check_count("max_nodes", max_nodes, minimum=0))
    expected = np.ones(len(tree) + 1)
    np.exp(tree.scores[budget_order(tree)], out=expected[1:])
    np.cumsum(expected, out=expected)
    size = paying_budget(tree, verify_curve, draft_seconds=draft_seconds, tokens_per_second=rate)
    return truncate(tree, size), expected


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
    if mixer is not None:
        arrays = _by_expert(candidates.names, mixer, candidates.origins, candidates.conditionals)
        mixer.update(candidates.tree, *arrays, continuation, local=local)
    for name, tree in zip(candidates.names, candidates.trees, strict=True):
        calibrators[name].update(tree, continuation)


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
