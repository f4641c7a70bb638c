"""How often a drafter is right: its own evidence, turned into acceptance probabilities by counting.

What is estimated is *conditional*: P(node accepted | its parent was). Let c be the cell of a node by evidence and
depth, C the same for all depths, and r = exp(score - score of the parent) the drafter's own opinion. With h hits in n
trials

    P(C) = (h_C + s r) / (n_C + s),        P(c) = (h_c + s P(C)) / (n_c + s):

the posterior mean under a Beta prior worth s trials, centred first on the drafter's opinion, then on the broader cell.

Verification is lossless, so the realised text does not depend on which tree was verified. A trial is therefore *every*
candidate whose parent lies on the realised path, whether or not it was in the verified tree: the child that carries the
realised token is a hit, its siblings are misses. About nodes whose parent is off the path, and about those deeper than
the realised text reaches, nothing is known. Where that text ends depends on tokens before the node only, hence leaving
these nodes out does not bias the estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptspec.bandits.checks import check_between
from adaptspec.bandits.state import check_equal, read_array, read_float
from adaptspec.control.drift import DriftWatch, Trials
from adaptspec.names import unknown_name
from adaptspec.types import ROOT, DraftTree

MOST = 0.999
"""Siblings exclude each other: their probabilities never add up to more than this."""

LEAST = 1e-4
"""No candidate is taken to be less likely than this."""

_LOWEST_SCORE = -700.0


def _steps(*starts: int) -> np.ndarray:
    """Bin of each whole number from 0 to the last start; bin b begins at starts[b]."""
    return np.searchsorted(starts, np.arange(starts[-1] + 1), side="right") - 1


_LENGTH_BIN = _steps(0, 2, 3, 4, 5, 7, 10, 16, 32)
_DEPTH_BIN = _steps(0, 2, 3, 5, 9, 17)
_RANK_BIN = _steps(0, 1, 2, 3, 4, 5, 6, 8, 16)
_COARSE_RANK_BIN = _steps(0, 1, 2, 4)
_SHARE_EDGES = np.array([0.1, 0.25, 0.45, 0.6, 0.7, 0.85, 0.95])
_PROBABILITY_EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])

LENGTHS, DEPTHS, RANKS, COARSE_RANKS = (
    int(bins[-1]) + 1 for bins in (_LENGTH_BIN, _DEPTH_BIN, _RANK_BIN, _COARSE_RANK_BIN)
)
SHARES, PROBABILITIES = len(_SHARE_EDGES) + 1, len(_PROBABILITY_EDGES) + 1


def _bins(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    return table.take(values.astype(np.intp), mode="clip")


def _by_counts(evidence: Mapping[str, np.ndarray], ratio: np.ndarray) -> np.ndarray:
    # Half a count on top keeps 1 of 1, 2 of 2 and 20 of 20 apart, so one feature holds both frequency and count.
    share = evidence["count"] / (evidence["parent_count"] + 0.5)
    return _by_length(evidence, ratio) * SHARES + _SHARE_EDGES.searchsorted(share, side="right")


def _by_length(evidence: Mapping[str, np.ndarray], ratio: np.ndarray) -> np.ndarray:
    return _bins(_LENGTH_BIN, evidence["match_length"])


def _by_log_prob_and_rank(evidence: Mapping[str, np.ndarray], ratio: np.ndarray) -> np.ndarray:
    return _by_log_prob(evidence, ratio) * COARSE_RANKS + _bins(_COARSE_RANK_BIN, evidence["rank"])


def _by_log_prob(evidence: Mapping[str, np.ndarray], ratio: np.ndarray) -> np.ndarray:
    return _PROBABILITY_EDGES.searchsorted(np.exp(evidence["log_prob"]), side="right")


def _by_rank(evidence: Mapping[str, np.ndarray], ratio: np.ndarray) -> np.ndarray:
    return _bins(_RANK_BIN, evidence["rank"])


def _by_score(evidence: Mapping[str, np.ndarray], ratio: np.ndarray) -> np.ndarray:
    return _PROBABILITY_EDGES.searchsorted(ratio, side="right")


@dataclass(frozen=True, slots=True)
class Binning:
    """One way to sort nodes into cells: `columns` of the evidence it needs, number of cells, cell of every node."""

    columns: tuple[str, ...]
    cells: int
    place: Callable[[Mapping[str, np.ndarray], np.ndarray], np.ndarray]


BINNINGS: dict[str, Binning] = {
    "counts": Binning(("match_length", "count", "parent_count"), LENGTHS * SHARES, _by_counts),
    "match": Binning(("match_length",), LENGTHS, _by_length),
    "ranked-log-prob": Binning(("log_prob", "rank"), PROBABILITIES * COARSE_RANKS, _by_log_prob_and_rank),
    "log-prob": Binning(("log_prob",), PROBABILITIES, _by_log_prob),
    "rank": Binning(("rank",), RANKS, _by_rank),
    "score": Binning((), PROBABILITIES, _by_score),
}
"""In order of preference: the first whose columns a tree has is used. All are crossed with the depth."""


def binning_of(tree: DraftTree) -> str:
    """Name in `BINNINGS` of how the nodes of `tree` are sorted into cells."""
    evidence = tree.evidence
    return next(name for name, binning in BINNINGS.items() if all(column in evidence for column in binning.columns))


def judge(tree: DraftTree, continuation: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the realised tokens say about a deterministic tree, verified or not.

    Args:
        continuation: [T], the tokens that followed the root, as far as they are known; for the verified tree its
            accepted tokens and the bonus token.

    Returns:
        int64 [K] rows whose parent is on the realised path and whose outcome is known, in row order; bool [K] whether
        the row carries the realised token; int64 [K] depths.

    >>> tree = DraftTree(np.array([3, 4, 5, 6]), np.array([-1, -1, 0, 1]), np.zeros(4))
    >>> [column.tolist() for column in judge(tree, [3, 9])]    # 5 is a miss at depth 2; 6 is below a wrong parent
    [[0, 1, 2], [True, False, False], [1, 1, 2]]
    """
    _check_deterministic(tree)
    tokens = continuation.tolist() if isinstance(continuation, np.ndarray) else list(continuation)
    known = len(tokens)
    rows: list[int] = []
    hits: list[bool] = []
    depths: list[int] = []
    depth_below = {ROOT: 1} if known else {}  # of the children of each path node
    for row, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)):
        depth = depth_below.get(parent)
        if depth is None:
            continue
        hit = token == tokens[depth - 1]
        rows.append(row)
        hits.append(hit)
        depths.append(depth)
        if hit and depth < known:
            depth_below[row] = depth + 1
    return np.array(rows, dtype=np.int64), np.array(hits, dtype=np.bool_), np.array(depths, dtype=np.int64)


def _check_deterministic(tree: DraftTree) -> None:
    if tree.siblings != "deterministic":
        raise ValueError(f"siblings of a calibrated tree must be 'deterministic', got {tree.siblings!r}")


@dataclass(slots=True)
class _Table:
    """Hits and trials of the broad cells [C] and of the cells by depth [C * DEPTHS]."""

    broad_hits: np.ndarray
    broad_trials: np.ndarray
    hits: np.ndarray
    trials: np.ndarray

    def posterior(self, broad: np.ndarray, cells: np.ndarray, ratio: np.ndarray, strength: float) -> np.ndarray:
        """float64 [N], P(c) of nodes in these cells."""
        values = (self.broad_hits[broad] + strength * ratio) / (self.broad_trials[broad] + strength)
        return (self.hits[cells] + strength * values) / (self.trials[cells] + strength)

    @classmethod
    def empty(cls, cells: int) -> _Table:
        return cls(np.zeros(cells), np.zeros(cells), np.zeros(cells * DEPTHS), np.zeros(cells * DEPTHS))


_FIELDS = ("broad_hits", "broad_trials", "hits", "trials")

Judged = tuple[np.ndarray, np.ndarray, np.ndarray]
"""What `judge` returns."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tree in the tables of a calibrator, so that learning from it need not look everything up again.

    Attributes:
        binning: name in `BINNINGS`.
        broad, cells: int64 [N].
        posterior: float64 [N], before siblings are made to fit.
        updates: of the calibrator so far; after another one the posterior is of yesterday.
    """

    binning: str
    broad: np.ndarray
    cells: np.ndarray
    posterior: np.ndarray
    updates: int


def _count(hits: np.ndarray, trials: np.ndarray, cells: np.ndarray, outcomes: np.ndarray, keep: float) -> None:
    """One trial after the other, since several may fall into one cell."""
    for cell, outcome in zip(cells.tolist(), outcomes.tolist(), strict=True):
        trials[cell] = trials[cell] * keep + 1.0
        hits[cell] = hits[cell] * keep + outcome


def _score_ratio(scores: np.ndarray, all_scores: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """P(node | parent) in the drafter's own opinion, in [LEAST, MOST]."""
    # The root's score is 0: ROOT = -1 picks the last entry. -inf minus -inf would be NaN.
    padded = np.zeros(len(all_scores) + 1)
    np.maximum(all_scores, _LOWEST_SCORE, out=padded[:-1])
    ratio = padded[:-1] if scores is all_scores else np.maximum(scores, _LOWEST_SCORE)
    ratio = np.exp(ratio - padded[parents])
    np.maximum(ratio, LEAST, out=ratio)
    return np.minimum(ratio, MOST, out=ratio)


class Calibrator:
    """Acceptance probabilities for the trees of one drafter, learnt while it is in use.

    How nodes are sorted into cells follows from the evidence that the trees carry (`BINNINGS`): matched length x share
    of the counts, log-probability x rank, rank, or the drafter's own score ratio; each crossed with six bins of depth.
    Memory is bounded: one small table per binning met. When hits and predictions part for good, the counts from before
    are forgotten at once (`DriftWatch`).

    Args:
        strength: s, the trials that a prior counts for.
        memory: trials a cell remembers; older ones fade with (1 - 1 / memory) per trial of the same cell.

    Raises:
        ValueError: an option is out of range.

    >>> calibrator = Calibrator(strength=2.0)
    >>> tree = DraftTree.chain([5, 6], np.log([0.5, 0.25]))
    >>> calibrator.update(tree, [5, 6, 7])
    >>> calibrator.conditional(tree).round(3).tolist()      # broad cell: (2 + 2 * 0.5) / (2 + 2) = 0.75
    [0.833, 0.833]
    """

    def __init__(self, *, strength: float = 8.0, memory: float = 1000.0) -> None:
        self.strength = check_between("strength", strength, low=0.0, high=1e6)
        self.memory = check_between("memory", memory, low=1.0, high=1e9)
        self._tables: dict[str, _Table] = {}
        self._watch = DriftWatch()
        self._updates = 0

    def conditional(self, tree: DraftTree) -> np.ndarray:
        """float64 [N]: P(node accepted | its parent was), in (0, 1); siblings add up to at most 0.999.

        Raises:
            ValueError: a sampled tree.
        """
        return self.place(tree)[0]

    def place(self, tree: DraftTree) -> tuple[np.ndarray, Placed | None]:
        """`conditional`, and for `update` how it came about; None where nothing was learnt of such trees yet."""
        _check_deterministic(tree)
        if not len(tree):
            return np.zeros(0), None
        name = binning_of(tree)
        groups = tree.parents + 1
        ratio = _score_ratio(tree.scores, tree.scores, tree.parents)
        table = self._tables.get(name)
        placed = None
        if table is None:
            values = ratio
        else:
            broad = BINNINGS[name].place(tree.evidence, ratio)
            cells = broad * DEPTHS + _bins(_DEPTH_BIN, tree.depths())
            values = table.posterior(broad, cells, ratio, self.strength)
            placed = Placed(name, broad, cells, values, self._updates)
        values = np.maximum(values, LEAST)
        sums = np.bincount(groups, values)
        if sums.max() > MOST:
            values *= (MOST / np.maximum(sums, MOST))[groups]
        return values, placed

    def update(
        self,
        tree: DraftTree,
        continuation: Sequence[int] | np.ndarray,
        *,
        judged: Judged | None = None,
        placed: Placed | None = None,
    ) -> None:
        """Learn from what followed the root. Call it once per tree, for the tree that was verified and for others.

        Args:
            tree: what the drafter proposed, whole: not only what was verified of it.
            continuation: as in `judge`.
            judged: what `judge` says, if that is known already.
            placed: what `place` said of the tree, to save time.

        Raises:
            ValueError: a sampled tree.
        """
        rows, hits, depths = judge(tree, continuation) if judged is None else judged
        if not rows.size:
            return
        if placed is not None and placed.updates == self._updates:
            name, broad, cells = placed.binning, placed.broad[rows], placed.cells[rows]
            posterior = placed.posterior[rows]
        else:
            name = binning_of(tree)
            binning = BINNINGS[name]
            table = self._tables.get(name)
            if table is None:
                table = self._tables[name] = _Table.empty(binning.cells)
            evidence = {column: tree.evidence[column][rows] for column in binning.columns}
            ratio = _score_ratio(tree.scores[rows], tree.scores, tree.parents[rows])
            broad = binning.place(evidence, ratio)
            cells = broad * DEPTHS + _bins(_DEPTH_BIN, depths)
            posterior = table.posterior(broad, cells, ratio, self.strength)
        self._updates += 1
        predicted = np.minimum(np.maximum(posterior, LEAST), MOST)
        trials = Trials(name, broad, cells, hits)
        changed = self._watch.add(trials, predicted)
        if changed is not None:
            self._tables = {}
        keep = 1.0 - 1.0 / self.memory
        for part in [trials] if changed is None else changed:
            table = self._tables.get(part.binning)
            if table is None:
                table = self._tables[part.binning] = _Table.empty(BINNINGS[part.binning].cells)
            _count(table.broad_hits, table.broad_trials, part.broad, part.hits, keep)
            _count(table.hits, table.trials, part.cells, part.hits, keep)

    def state_dict(self) -> dict[str, Any]:
        """Settings and counts as plain values."""
        tables = {
            name: {field: getattr(table, field).tolist() for field in _FIELDS} for name, table in self._tables.items()
        }
        watch = self._watch.state_dict()
        return {"strength": self.strength, "memory": self.memory, "tables": tables, "watch": watch}

    @classmethod
    def merge(cls, states: Sequence[Mapping[str, Any]], *, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One state with the trials of all replicas: base + sum(state - base), cells over their memory scaled down.

        Raises:
            ValueError: states of other settings, or damaged ones.
        """
        replicas = [cls._restored(state) for state in (*states, *([] if base is None else [base]))]
        merged, *rest = replicas
        start = replicas.pop() if base is not None else cls(strength=merged.strength, memory=merged.memory)
        for other in rest:
            for field in ("strength", "memory"):
                if getattr(other, field) != getattr(merged, field):
                    raise ValueError(
                        f"states must agree on {field}, got {getattr(merged, field)} and {getattr(other, field)}"
                    )
        tables = {}
        for name in dict.fromkeys(name for replica in replicas for name in replica._tables):
            empty = _Table.empty(BINNINGS[name].cells)
            first = start._tables.get(name, empty)
            sums = {}
            for field in _FIELDS:
                before = getattr(first, field)
                learnt = sum(getattr(replica._tables.get(name, empty), field) - before for replica in replicas)
                sums[field] = np.maximum(before + learnt, 0.0)
            for hits, trials in (("broad_hits", "broad_trials"), ("hits", "trials")):
                scale = merged.memory / np.maximum(sums[trials], merged.memory)
                sums[trials] *= scale
                sums[hits] = np.minimum(sums[hits] * scale, sums[trials])
            tables[name] = _Table(*(sums[field] for field in _FIELDS))
        merged._tables = tables
        return merged.state_dict()

    @classmethod
    def _restored(cls, state: Mapping[str, Any]) -> Calibrator:
        calibrator = cls(strength=read_float(state, "strength"), memory=read_float(state, "memory"))
        calibrator.load_state_dict(state)
        return calibrator

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts.

        Raises:
            ValueError: other settings, or not the counts of such tables.
        """
        check_equal(state, "strength", self.strength)
        check_equal(state, "memory", self.memory)
        saved = state.get("tables")
        if not isinstance(saved, Mapping):
            raise ValueError(f"state: tables must be a mapping, got {saved!r:.80}")
        tables: dict[str, _Table] = {}
        for name, arrays in saved.items():
            if name not in BINNINGS:
                raise unknown_name("binning", name, BINNINGS)
            if not isinstance(arrays, Mapping):
                raise ValueError(f"state: table {name} must be a mapping, got {arrays!r:.80}")
            broad, limit = BINNINGS[name].cells, self.memory * (1.0 + 1e-9)
            sizes = (broad, broad, broad * DEPTHS, broad * DEPTHS)
            table = _Table(
                *(
                    read_array(arrays, field, (size,), minimum=0.0, maximum=limit)
                    for field, size in zip(_FIELDS, sizes, strict=True)
                )
            )
            if (table.hits > table.trials).any() or (table.broad_hits > table.broad_trials).any():
                raise ValueError(f"state: hits of table {name} must not exceed its trials")
            tables[name] = table
        sizes = {name: (binning.cells, binning.cells * DEPTHS) for name, binning in BINNINGS.items()}
        self._watch.load_state_dict(state.get("watch"), sizes=sizes)
        self._tables = tables
        self._updates += 1
