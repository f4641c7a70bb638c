"""Draft first, then decide: one tree out of all proposals, as large as pays, or the best single proposal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from adaptspec.bandits.state import read_array, read_float, read_int
from adaptspec.control.added_rows import AddedRows
from adaptspec.control.assembly import Candidates, fit_to_cost, learn, leave_out, value_candidates
from adaptspec.control.calibration import Calibrator, judge
from adaptspec.control.catching_up import CATCH_UP_STEPS, CatchUpAllowance
from adaptspec.control.controller import Assembly, Controller, Digest, StepContext, StepNotes, StepOutcome
from adaptspec.control.cost import CostModel
from adaptspec.control.mixing import Mixer
from adaptspec.control.rate import RunningRate
from adaptspec.control.step_costs import cheap_together, observe_step
from adaptspec.trees import truncate
from adaptspec.types import Arm, Decision, DraftTree

Mode = Literal["mixture", "draft-then-choose"]

PROBE_SHARE = 0.02
"""How often a drafter that does not seem to pay is asked all the same."""

WORTH_RATE = 0.05
"""Weight of the latest step in a drafter's running worth."""

PROBE_RATE = 0.25
"""The same for a step at which it was asked by chance only: there are few of them."""

FIRST_ASKS = 20
"""So often every drafter is asked, with every vocabulary, before it is judged; the dearest ones less often."""

FIRST_LOSS = 1.0
"""Tokens per step: a drafter that loses more is judged after `FEWEST_ASKS`."""

FEWEST_ASKS = 3

PROBE_LOSS = 0.006
"""Tokens per step that probing all drafters may cost: one that nearly pays is asked often, a dear one seldom."""

MOST_PROBES = 0.06

LEAST_PROBES = 0.005
"""Share of the steps at which any drafter is asked."""

VOCAB_RATE = 0.01
"""Weight of the latest step in what a vocabulary is known to gain, once it is the mean of fewer steps no longer."""

WORTH_BINS = 4
"""A drafter's worth is kept apart by how many tokens the step before gained: 1, 2 to 3, 4 to 7, more."""

SURVEY = (0.0, 1.0, 0.25, 0.5)
"""Shares of the candidates that are verified in turn at the start, to learn what sizes cost."""

SURVEY_AGAIN = (1.0, 0.5, 0.25, 1.0, 0.5, 0.25, 0.0)
"""The same after a change: twice, because one measurement alone is not believed against what is known."""

SURPRISE = 1.25
SURPRISES = 3
"""So many steps in a row whose verification took so much more or less than expected are a change."""

SURVEY_PAUSE = 25
"""Least steps between two surveys."""

REENTRY = 25
"""After so many steps in a row in which nothing was worth verifying, one node is verified to see what it costs now."""


class EvidenceController(Controller):
    """Asks drafters, calibrates what they propose, and verifies the nodes that pay.

    "mixture": all proposals become one tree, in which every drafter is an expert that predicts the next token at the
    nodes it proposes (see `Mixer`). "draft-then-choose": the proposal that promises most is verified alone. With one
    drafter both are the budget "auto". How many nodes are verified follows from their calibrated values and the cost
    table; zero is an answer.

    A drafter whose own time matters is asked only while the tokens it adds are worth that time, and now and then to
    find out whether they are again. Of several vocabularies of one drafter one is asked at a time: the one whose tokens
    are most worth its time, and now and then another. Each is calibrated, and trusted in the mixture, apart.

    What a size costs is known only once it was tried: the first steps, those after a change of speed, and one step in
    fifty try sizes other than the best one, no speculation among them.

    Only drafts that are picked, not sampled, are used: dropping a drawn token for what it is would not be lossless.
    Verification by the target walk keeps the output exact at any temperature.

    Args:
        names: the drafters, in a fixed order.
        cost: learns seconds.
        mode: see above.
        vocab: the vocabularies of the drafters that have several, or one that is not the full one.
        max_nodes: most nodes to ask of each drafter and to verify.
        label: the arm that step records name in mode "mixture".
        seed: of the probes.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        cost: CostModel,
        mode: Mode = "mixture",
        vocab: Mapping[str, Sequence[str]] | None = None,
        max_nodes: int = 64,
        label: Arm | None = None,
        seed: int = 0,
    ) -> None:
        if not names:
            raise ValueError("names must not be empty: there is nothing to draft with")
        self._arms = {
            arm.source: arm
            for name in dict.fromkeys(names)
            for arm in (Arm(name, max_nodes, head) for head in (vocab or {}).get(name, ("full",)))
        }
        self.names = tuple(self._arms)
        self._sources: dict[str, list[int]] = {}
        for index, arm in enumerate(self._arms.values()):
            self._sources.setdefault(arm.drafter, []).append(index)
        self.cost = cost
        self.mode = mode
        self.max_nodes = max_nodes
        self.label = label or Arm("mixture", "auto")
        self.rate = RunningRate()
        self.calibrators = {name: Calibrator() for name in self.names}
        self.mixer = Mixer(self.names) if mode == "mixture" and len(self.names) > 1 else None
        self._local = self.mixer.new_local() if self.mixer else None
        self._gained = np.zeros((len(self.names), WORTH_BINS))  # tokens that each added to a step, verification paid
        self._judged = np.zeros((len(self.names), WORTH_BINS))
        self._latest = 0  # bin of the step before
        self._cheap: frozenset[str] = frozenset()
        self._only_probed: set[str] = set()
        self._kept = DraftTree.empty()
        self._without: dict[str, DraftTree] = {}  # what would have been verified without a drafter that costs time
        self._asked = np.zeros(len(self.names), dtype=np.int64)
        self._added = np.zeros(len(self.names))  # tokens that each added to its steps, for drafters of several sources
        self._rng = np.random.default_rng(seed)
        self._candidates: list[Candidates] = []
        self._position = 0
        self._steps = 0
        self._survey = list(SURVEY)
        self._since_survey = 0
        self._surprises = 0
        self._probe = 1.0
        self._idle = 0
        self._probing = False
        self._reason = ""
        self._expected = 1.0
        self._digest = Digest()
        self._allowance = CatchUpAllowance()
        self._added_rows = AddedRows()  # only the drafter of a label like "lookahead@auto" adds its rows

    @property
    def valued(self) -> Sequence[Candidates]:
        return tuple(self._candidates)

    def drafters_in_play(self, names: Collection[str]) -> list[str]:
        return [name for name in self._sources if name in names]

    def begin(self) -> None:
        self._candidates, self._without, self._latest = [], {}, 0
        self._local = self.mixer.new_local() if self.mixer else None

    def select(self, context: StepContext) -> Decision:
        self._steps += 1
        self._position = context.length
        self._probe = float(self._rng.random())
        self._cheap = cheap_together(self.cost, list(self._arms.values()))
        self._only_probed.clear()
        chances = self._rng.random(len(self.names))  # drawn always: the stream must not depend on times
        worths = [self._worth(index) for index in range(len(self.names))]
        probes = [chance < self._probe_share(index, worths) for index, chance in enumerate(chances.tolist())]
        asked = []
        for drafter, sources in self._sources.items():
            if drafter in context.unavailable:
                continue
            index = self._source_to_ask(sources, probes, worths)
            name, probe, worth = self.names[index], probes[index], worths[index]
            catch_up = 0.0
            if cold := context.cold_tokens.get(drafter, 0):
                catch_up = self.cost.catch_up_seconds(drafter, cold)
                worth -= self.rate.value * catch_up / CATCH_UP_STEPS
            wanted = name in self._cheap or worth > 0.0 or self._is_new(index, worth)
            if probe and not wanted:
                probe = catch_up == 0.0 or self._allowance.take(catch_up)
                if probe:
                    self._only_probed.add(name)
            if probe or wanted:
                asked.append(self._arms[name])
        label = self.label if asked else Arm.autoregressive()
        return Decision(self._steps, label, asked=tuple(asked), rate=self.rate.value)

    def _worth(self, index: int) -> float:
        """Tokens that a source adds to a step like this one, minus what its time is worth."""
        return float(self._gained[index, self._latest]) - self.rate.value * self._draft_seconds(index)

    def _probe_share(self, index: int, worths: Sequence[float]) -> float:
        """Of the steps at which a source is asked by chance: in place of another vocabulary, or of nothing."""
        rivals = self._sources[self._arms[self.names[index]].drafter]
        loss = max(0.0, *(worths[rival] for rival in rivals)) - worths[index]
        allowed = PROBE_LOSS / len(self.names)
        return min(MOST_PROBES, max(LEAST_PROBES, allowed / max(loss, allowed)))

    def _is_new(self, index: int, worth: float) -> bool:
        """Whether it is too early to judge a source."""
        asked = self._asked[index]
        return bool(asked < FEWEST_ASKS or (asked < FIRST_ASKS and worth > -FIRST_LOSS))

    def _source_to_ask(self, sources: Sequence[int], probes: Sequence[bool], worths: Sequence[float]) -> int:
        """Which vocabulary of a drafter: each so often at first, then a probed one, else the one that promises most."""
        if len(sources) == 1:
            return sources[0]
        if new := [index for index in sources if self._is_new(index, worths[index])]:
            return min(new, key=lambda index: self._asked[index])
        if probed := [index for index in sources if probes[index]]:
            return min(probed, key=lambda index: self._asked[index])
        return max(sources, key=lambda index: self._added[index] - self.rate.value * self._draft_seconds(index))

    def _draft_seconds(self, index: int) -> float:
        arm = self._arms[self.names[index]]
        return self.cost.draft_seconds(arm.drafter, arm.budget, vocab=arm.vocab)

    def assemble(self, decision: Decision, trees: Mapping[str, DraftTree]) -> Assembly:
        picked = {name: tree for name, tree in trees.items() if tree.siblings == "deterministic"}
        self._candidates, self._without, self._expected = [], {}, 1.0
        for name in trees:
            self._asked[self.names.index(name)] += 1
        if self.mode == "mixture":
            candidates, self._kept = self._mixed(picked)
            tree, arm = self._sized(candidates, self._kept), decision.arm
        else:
            candidates, self._kept, winner = self._chosen(picked)
            tree = self._sized(candidates, self._kept)
            arm = replace(self._arms[winner], budget="auto") if len(tree) else Arm.autoregressive()
        if len(tree):
            self._expected = 1.0 + float(np.exp(tree.scores).sum())
        return Assembly(tree, arm, frozenset(trees))

    def update(self, decision: Decision, outcome: StepOutcome) -> StepNotes:
        record = outcome.record
        expected_verify = self.cost.verify_seconds(record.verified + outcome.extra_rows, context=record.position)
        expected = expected_verify + self.cost.overhead_seconds()
        expected += sum(self._draft_seconds(self.names.index(arm.source)) for arm in decision.asked)
        self._notice_change(expected_verify, record.verify_seconds)
        observe_step(self.cost, outcome, asked=decision.asked)
        self._added_rows.learn(outcome.offered_rows)
        self._weigh(outcome.tokens)
        self._latest = min(WORTH_BINS, record.emitted.bit_length()) - 1
        gain = record.emitted - self.rate.value * record.seconds
        self.rate.add(record.emitted, record.seconds)
        self._allowance.earn(record.seconds)
        for candidates in self._candidates:
            learn(candidates, outcome.tokens, calibrators=self.calibrators, mixer=self.mixer, local=self._local)
        self._candidates = []
        return StepNotes(self._reason, self._expected, expected, gain, self._digest.add(outcome.tokens, gain))

    def trust_costs(self) -> None:
        self._survey.clear()

    def _sized(self, candidates: DraftTree, best: DraftTree) -> DraftTree:
        """The best tree, or one of another size to learn what it costs."""
        most = min(len(candidates), self.max_nodes)
        if self._survey and most:
            self._reason = "survey"
            return truncate(candidates, round(self._survey.pop(0) * most))
        self._idle = self._idle + 1 if most and not len(best) else 0
        if self._idle >= REENTRY:
            self._idle, self._probing, self._reason = 0, True, "probe"
            return truncate(candidates, 1)
        if self._probe < PROBE_SHARE and len(best):
            self._probing, self._reason = True, "probe"
            size = (0, len(best) // 2, 2 * len(best) + 1)[int(self._probe * 3.0 / PROBE_SHARE)]
            return truncate(candidates, min(size, most))
        self._reason = "pays" if len(best) else "nothing pays" if most else "no draft"
        return best

    def _notice_change(self, expected: float, measured: float) -> None:
        """Start a survey of sizes when verification has become faster or slower."""
        self._since_survey += 1
        changed = not expected / SURPRISE <= measured <= expected * SURPRISE
        self._surprises = self._surprises + 1 if changed else 0
        surprised = changed if self._probing else self._surprises >= SURPRISES
        self._probing = False
        if surprised and not self._survey and self._since_survey >= SURVEY_PAUSE:
            self._survey, self._since_survey, self._surprises = list(SURVEY_AGAIN), 0, 0

    def _mixed(self, trees: Mapping[str, DraftTree]) -> tuple[DraftTree, DraftTree]:
        """All candidates as one valued tree, and the part of it that pays."""
        if not trees:
            return DraftTree.empty(), DraftTree.empty()
        candidates = value_candidates(
            list(trees.values()), list(trees), calibrators=self.calibrators, mixer=self.mixer, local=self._local
        )
        self._candidates = [candidates]
        kept, _ = self._fit(candidates.tree)
        for name in trees:
            if self._is_weighed(name):
                if self.mixer is None or len(trees) == 1:
                    rest = DraftTree.empty()
                else:
                    rest = leave_out(candidates, name, mixer=self.mixer, local=self._local)
                self._without[name] = self._fit(rest)[0]
        return candidates.tree, kept

    def _chosen(self, trees: Mapping[str, DraftTree]) -> tuple[DraftTree, DraftTree, str]:
        """The best single proposal, valued, the part of it that pays, and whose it is."""
        fits = {}
        for name, tree in trees.items():
            self._candidates.append(value_candidates([tree], [name], calibrators=self.calibrators))
            fits[name] = self._fit(self._candidates[-1].tree)
        if not fits:
            return DraftTree.empty(), DraftTree.empty(), ""
        ranked = sorted(fits, key=lambda name: -fits[name][1])
        winner = ranked[0]
        for name in trees:
            if self._is_weighed(name):
                others = [other for other in ranked if other != name]
                self._without[name] = fits[others[0]][0] if others else DraftTree.empty()
        return self._candidates[list(trees).index(winner)].tree, fits[winner][0], winner

    def _is_weighed(self, name: str) -> bool:
        """Whether it matters what a source adds: its time does, or there are others of its drafter."""
        return name not in self._cheap or len(self._sources[self._arms[name].drafter]) > 1

    def _weigh(self, tokens: np.ndarray) -> None:
        """Take in what each drafter that costs time added to the step: what the tree that was chosen gained, minus what
        the one without the drafter would have gained, minus its time."""
        if not self._without:
            return
        curve, rate = self._curve(), self.rate.value

        def gained(tree: DraftTree) -> float:
            hits = float(judge(tree, tokens)[1].sum()) if len(tree) else 0.0
            return hits - rate * float(curve[len(tree)])

        with_all = gained(self._kept)
        for name, rest in self._without.items():
            index = self.names.index(name)
            added = with_all - gained(rest)
            self._added[index] += max(1.0 / max(1, self._asked[index]), VOCAB_RATE) * (added - self._added[index])
            cell = index, self._latest
            self._judged[cell] += 1.0
            weight = PROBE_RATE if name in self._only_probed else max(WORTH_RATE, 1.0 / self._judged[cell])
            self._gained[cell] += weight * (added - self._gained[cell])
        self._without = {}

    def _fit(self, tree: DraftTree) -> tuple[DraftTree, float]:
        """The nodes that pay, and expected tokens minus what their seconds are worth."""
        curve = self._curve()
        rate = self.rate.value
        kept, expected = fit_to_cost(
            tree, verify_curve=curve, rate=rate if rate > 0.0 else None, max_nodes=self.max_nodes
        )
        return kept, float(expected[len(kept)]) - rate * float(curve[len(kept)])

    def _curve(self) -> np.ndarray:
        return self._added_rows.verify_curve(self.cost, self.label.source, self.max_nodes, context=self._position)

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, between requests."""
        return {
            "mode": self.mode,
            "names": list(self.names),
            "calibrators": {name: calibrator.state_dict() for name, calibrator in self.calibrators.items()},
            "mixer": None if self.mixer is None else self.mixer.state_dict(),
            "cost": self.cost.state_dict(),
            "rate": self.rate.state(),
            "gained": self._gained.tolist(),
            "judged": self._judged.tolist(),
            "added": self._added.tolist(),
            "latest": self._latest,
            "asked": self._asked.tolist(),
            "survey": [self._survey, self._since_survey, self._surprises, self._idle],
            "counts": [self._steps, self._digest.value],
            "rng": self._rng.bit_generator.state,
            "allowance": self._allowance.seconds,
            "added_rows": self._added_rows.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises ValueError on a state of other drafters or another mode."""
        for key, mine in (("mode", self.mode), ("names", list(self.names))):
            if state.get(key) != mine:
                raise ValueError(f"state: {key} must be {mine}, got {state.get(key)!r}")
        for name, calibrator in self.calibrators.items():
            calibrator.load_state_dict(state["calibrators"][name])
        if self.mixer is not None:
            self.mixer.load_state_dict(state["mixer"])
        self.cost.load_state_dict(state["cost"])
        self.rate = RunningRate(*(float(value) for value in state["rate"]))
        self._gained = read_array(state, "gained", self._gained.shape)
        self._judged = read_array(state, "judged", self._judged.shape, minimum=0.0)
        self._added = read_array(state, "added", self._added.shape)
        self._latest = read_int(state, "latest", minimum=0, maximum=WORTH_BINS - 1)
        self._asked = np.array(state["asked"], dtype=np.int64)
        survey, self._since_survey, self._surprises, self._idle = state["survey"]
        self._survey = list(survey)
        self._steps, self._digest.value = (int(count) for count in state["counts"])
        self._allowance = CatchUpAllowance(read_float(state, "allowance"))
        self._added_rows = AddedRows.from_state(state.get("added_rows", {}))
        self._rng.bit_generator.state = state["rng"]
