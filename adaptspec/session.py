"""One request's loop, and the only module that knows target, drafters, verifier and controller at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from adaptspec.control.controller import Controller, StepContext, StepOutcome
from adaptspec.control.history import History
from adaptspec.drafters.base import Drafter
from adaptspec.proposing import Proposer
from adaptspec.target.base import Scored, Target
from adaptspec.target.hf import feature_rows
from adaptspec.target.rows import TargetRows, TokenBuffer, best_ids, top_ids
from adaptspec.types import (
    Decision,
    DraftContext,
    DraftTree,
    ExtraRows,
    Observation,
    PairedRows,
    Sampling,
    StepRecord,
    Verdict,
)
from adaptspec.verify import VERIFIERS, choose_verifier, sample, verify_greedy

OnStep = Callable[[StepRecord, list[int]], None]
ShouldStop = Callable[[torch.Tensor], bool]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a request ends.

    Attributes:
        max_new_tokens: at least 1.
        eos_token_ids: generation ends with the first of these.
        should_stop: asked with all tokens [1, T] after every new token (stop strings, time limits); None if there is
            nothing to ask.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    should_stop: ShouldStop | None = None


@dataclass(slots=True)
class Clock:
    """Splits a step's wall time: each `lap` returns the seconds since the one before."""

    target: Target
    last: float = field(default_factory=lambda: perf_counter())

    def lap(self) -> float:
        self.target.synchronize()
        now = perf_counter()
        seconds, self.last = now - self.last, now
        return seconds


@dataclass(slots=True)
class Proposals:
    """Trees, seconds and offered rows by `Arm.source`, what catching up took by drafter, and the rows that one drafter
    adds to the pass."""

    proposed: dict[str, DraftTree] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    catch_up_tokens: dict[str, int] = field(default_factory=dict)
    catch_up_seconds: dict[str, float] = field(default_factory=dict)
    offered: dict[str, ExtraRows | PairedRows] = field(default_factory=dict)
    extra: ExtraRows | PairedRows | None = None
    extra_owner: str = ""


class Session:
    """Generates one sequence.

    Args:
        target: open for this request only.
        drafters: by the name arms use.
        controller: decides each step.
        sampling: what the logits processors amount to, told to drafters.
        processors: transformers `LogitsProcessorList`, applied per node along its own path.
        verifier: a name of `adaptspec.verify.VERIFIERS`, used for the trees it is right for, or "auto".
        limits: when to end.
        rng: decides samples; one uniform per emitted token for drafts that are not sampled.
        proposer: asks drafters and sets faulty ones aside.
        on_step: called with the record and the tokens of every step.
        history: what reports are made of; one of its own if None.
    """

    def __init__(
        self,
        *,
        target: Target,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        proposer: Proposer,
        sampling: Sampling,
        processors: Any,
        verifier: str,
        limits: Limits,
        rng: np.random.Generator,
        on_step: OnStep | None = None,
        history: History | None = None,
    ) -> None:
        self.target = target
        self.drafters = drafters
        self.controller = controller
        self.proposer = proposer
        self.sampling = sampling
        self.processors = processors
        self.verifier = verifier
        self.limits = limits
        self.rng = rng
        self.draft_rng = rng.spawn(1)[0]  # its own stream: how much a drafter draws must not move the target's samples
        self.on_step = on_step
        self.history = History() if history is None else history
        self.trace: list[StepRecord] = []
        self.new_tokens = 0
        self.finish_reason: str | None = None
        self.prefill_seconds = 0.0
        self.top_k = max((d.needs.target_top_k for d in drafters.values()), default=0)
        self.wants_top_logits = any(d.needs.target_top_logits for d in drafters.values())
        self.laggards = [name for name, drafter in drafters.items() if type(drafter).lag is not Drafter.lag]
        self.tokens: TokenBuffer | None = None

    def run(self, prompt: torch.Tensor, *, prefix: torch.Tensor | None = None) -> torch.Tensor:
        """All tokens [1, T] of the finished sequence.

        Args:
            prompt: int64 [P], what the model reads.
            prefix: padding before the prompt, which only logits processors and the result contain.
        """
        try:
            self._prefill(prompt, prefix)
            while self.finish_reason is None:
                self.step()
            for name, drafter in self.proposer.healthy(self.drafters).items():
                self.proposer.call(name, drafter.finish)
        finally:
            self.proposer.close()
            self.target.close()
        assert self.tokens is not None
        return self.tokens.tensor()

    def step(self) -> StepRecord:
        """plan -> propose -> assemble -> score -> verify -> commit -> observe -> learn -> record."""
        assert self.tokens is not None
        clock = Clock(self.target)
        context = StepContext(self.tokens.length, self._remaining(), self.proposer.set_aside, self._lags())
        decision = self.controller.select(context)
        controller_seconds = clock.lap()
        trees = self._propose(decision, clock)
        assembly = self.controller.assemble(decision, trees.proposed)
        tree = assembly.tree
        if isinstance(trees.extra, PairedRows) and not self._pairs_fit(trees.extra, tree, decision):
            trees.extra = None
        controller_seconds += clock.lap()
        scored = self.target.score(self._root(), tree, trees.extra)
        rows = TargetRows(scored.logits, tree=tree, tokens=self.tokens, processors=self.processors)
        verdict = self._verify(rows, tree)
        verify_seconds = clock.lap()
        probabilities = self._probabilities(rows, verdict)
        controller_seconds += clock.lap()
        self.target.commit(verdict.path)
        commit_seconds = clock.lap()
        emitted = self._emit(verdict.token_ids)
        other_seconds = clock.lap()
        self._observe(trees.extra_owner, scored, tree, verdict, emitted)
        self.history.judge(decision, trees.proposed, emitted, verified=tree, valued=self.controller.valued)
        observe_seconds = clock.lap()
        record = StepRecord(
            step_id=decision.step_id,
            position=self.tokens.length - len(emitted),
            arm=str(assembly.arm),
            propensity=decision.propensity,
            drafted=sum(len(proposed) for proposed in trees.proposed.values()),
            verified=len(tree),
            accepted=len(verdict.path),
            emitted=len(emitted),
            draft_seconds=sum(seconds for name, seconds in trees.seconds.items() if name in assembly.used),
            evaluate_seconds=sum(seconds for name, seconds in trees.seconds.items() if name not in assembly.used),
            verify_seconds=verify_seconds,
            commit_seconds=commit_seconds,
            observe_seconds=observe_seconds,
            controller_seconds=controller_seconds,
            other_seconds=other_seconds,
            fault=self.proposer.take_fault(),
            catch_up_seconds=sum(trees.catch_up_seconds.values()),
        )
        notes = self.controller.update(
            decision,
            StepOutcome(
                record,
                tree,
                trees.proposed,
                emitted,
                trees.seconds,
                extra_rows=0 if trees.extra is None else trees.extra.count(len(tree)),
                finished=self.finish_reason is not None,
                target_probs=None if probabilities is None else probabilities[: len(emitted)],
                catch_up_tokens=trees.catch_up_tokens,
                catch_up_seconds=trees.catch_up_seconds,
                offered_rows=trees.offered,
            ),
        )
        record = replace(
            record,
            controller_seconds=controller_seconds + clock.lap(),
            expected_tokens=notes.expected_tokens,
            expected_seconds=notes.expected_seconds,
            gain=notes.gain,
            reason=notes.reason,
            digest=notes.digest,
        )
        self.trace.append(record)
        self.history.add(record)
        if self.on_step is not None:
            self.on_step(record, emitted.tolist())
        return record

    def _prefill(self, prompt: torch.Tensor, prefix: torch.Tensor | None) -> None:
        clock = Clock(self.target)
        self.controller.begin()
        taps = sorted({tap for drafter in self.drafters.values() for tap in drafter.needs.taps})
        self.target.tap(tuple(taps))
        top_k = max((drafter.needs.prompt_top_k for drafter in self.drafters.values()), default=0)
        scored = self.target.prefill(prompt, top_k=top_k) if top_k else self.target.prefill(prompt)
        self.tokens = TokenBuffer(prompt if prefix is None else torch.cat([prefix.cpu(), prompt.cpu()]))
        self._offset = self.tokens.length - len(prompt)
        rows = TargetRows(scored.logits, tree=DraftTree.empty(), tokens=self.tokens, processors=self.processors)
        first = self._verify(rows, DraftTree.empty()).token_ids
        self._emit(first)
        if self.finish_reason is None:
            committed = self.tokens.numpy()[self._offset :].copy()
            for name, drafter in self.proposer.healthy(self.drafters).items():
                wanted: list[Any] = [{tap: scored.features[tap] for tap in drafter.needs.taps}]
                if drafter.needs.prompt_top_k:
                    wanted.append(scored.top_ids)
                self.proposer.call(name, lambda d=drafter, w=wanted: d.prefill(committed, *w))
        self.prefill_seconds = clock.lap()
        self.history.begin(self.prefill_seconds)
        if self.on_step is not None:
            self.on_step(_prefill_record(self.tokens.length - 1, self.prefill_seconds), first.tolist())

    def _propose(self, decision: Decision, clock: Clock) -> Proposals:
        """Ask the drafters of the decision, each under the clock. Only the played one may add rows to the pass."""
        proposals = Proposals()
        depth = self._max_depth()
        if depth < 1:
            return proposals
        assert self.tokens is not None
        length = self.tokens.length - self._offset
        whole = DraftContext(self._root(), length, depth, self.sampling, self.draft_rng, rate=decision.rate)
        for arm in decision.asked:
            if arm.drafter in self.proposer.set_aside:
                continue
            drafter = self.drafters[arm.drafter]
            if lag := self._lag(arm.drafter):
                self.proposer.call(arm.drafter, drafter.catch_up)
                proposals.catch_up_tokens[arm.drafter] = lag
                proposals.catch_up_seconds[arm.drafter] = clock.lap()
                if arm.drafter in self.proposer.set_aside:
                    continue
            context = whole if arm.vocab == "full" else replace(whole, vocab=arm.vocab)
            tree, rows = self.proposer.propose(arm, drafter, context)
            proposals.proposed[arm.source] = tree
            proposals.seconds[arm.source] = clock.lap()
            if rows is not None:
                proposals.offered[arm.source] = rows
                if arm.source == decision.arm.source or decision.first_only:
                    proposals.extra, proposals.extra_owner = rows, arm.drafter
            if decision.first_only and len(tree):
                break
        extra = proposals.extra
        if isinstance(extra, ExtraRows) and extra.depths.max(initial=0) > self._free_positions():
            proposals.extra = None  # the last positions of the context belong to the draft
        return proposals

    def _pairs_fit(self, extra: PairedRows, tree: DraftTree, decision: Decision) -> bool:
        """Whether the budget, which counts all rows but the root's, and the context have room for paired rows."""
        budget = decision.arm.budget
        within = budget == "auto" or len(tree) + extra.count(len(tree)) <= budget
        return within and int(tree.depths().max(initial=0)) + 1 <= self._free_positions()

    def _lag(self, name: str) -> int:
        """Tokens that a drafter must catch up on."""
        if name not in self.laggards or name in self.proposer.set_aside:
            return 0
        drafter = self.drafters[name]
        lag = self.proposer.call(name, lambda: drafter.lag)
        return lag if isinstance(lag, int) else 0

    def _lags(self) -> dict[str, int]:
        return {name: lag for name in self.laggards if (lag := self._lag(name))}

    def _verify(self, rows: TargetRows, tree: DraftTree) -> Verdict:
        if self.sampling.greedy:
            return verify_greedy(tree, rows.argmax())
        if len(tree) == 0:
            token = sample(rows[0], self.rng.random())
            return Verdict(np.zeros(0, np.int64), np.asarray([token], np.int64))
        named = VERIFIERS.get(self.verifier)
        fits = named is not None and named.objection(tree) is None
        return choose_verifier(tree, greedy=False, name=self.verifier if fits else "auto").verify(tree, rows, self.rng)

    def _probabilities(self, rows: TargetRows, verdict: Verdict) -> np.ndarray | None:
        """[A + 1, V], before the tokens are committed: processors look at what precedes each row."""
        if self.sampling.greedy or not self.controller.wants_probabilities:
            return None
        return torch.stack([rows[row] for row in (0, *(verdict.path + 1).tolist())]).cpu().numpy()

    def _emit(self, token_ids: np.ndarray) -> np.ndarray:
        """Commit the tokens up to the first that ends the request. Returns the committed ones."""
        assert self.tokens is not None
        limits = self.limits
        ids = token_ids.tolist()
        count = 0
        for count, token in enumerate(ids, start=1):
            if token in limits.eos_token_ids:
                self.finish_reason = "eos"
            elif limits.should_stop is not None and limits.should_stop(self.tokens.stage(ids[:count])):
                self.finish_reason = "stop"
            elif self.new_tokens + count >= limits.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        self.tokens.append(ids[:count])
        self.new_tokens += count
        limit = self.target.context_limit
        if self.finish_reason is None and limit is not None and self.tokens.length - self._offset > limit:
            self.finish_reason = "context"
        return token_ids[:count]

    def _observe(
        self, extra_owner: str, scored: Scored, tree: DraftTree, verdict: Verdict, emitted: np.ndarray
    ) -> None:
        if self.finish_reason is not None and len(emitted) < len(verdict.token_ids):
            verdict = Verdict(verdict.path[: max(0, len(emitted) - 1)], emitted)
        top = top_logits = None
        if self.top_k:
            top = top_ids(scored.logits, self.top_k)
            if self.wants_top_logits:
                columns = torch.from_numpy(top).to(scored.logits.device)
                top_logits = scored.logits.gather(1, columns).float().cpu().numpy()
        features = feature_rows(scored.features, verdict.path) if scored.features else {}
        extra = None if scored.extra_logits is None else best_ids(scored.extra_logits)[1]
        paired = None if scored.paired is None else feature_rows({0: scored.paired}, verdict.path)[0]
        for name, drafter in self.proposer.healthy(self.drafters).items():
            own_extra, own_paired = (extra, paired) if name == extra_owner else (None, None)
            observation = Observation(tree, verdict, emitted, top, features, own_extra, top_logits, own_paired)
            self.proposer.call(name, lambda d=drafter, o=observation: d.observe(o))

    def _root(self) -> int:
        assert self.tokens is not None
        return int(self.tokens.numpy()[-1])

    def _remaining(self) -> int:
        return self.limits.max_new_tokens - self.new_tokens

    def _max_depth(self) -> int:
        """Deepest useful node: one token of the step is the bonus, and every node needs a position in the context."""
        return min(self._remaining() - 1, self._free_positions())

    def _free_positions(self) -> int:
        """Positions of the context behind the root."""
        assert self.tokens is not None
        limit = self.target.context_limit
        return 2**31 if limit is None else limit - (self.tokens.length - self._offset)


def _prefill_record(position: int, seconds: float) -> StepRecord:
    return StepRecord(0, position, "prefill", 1.0, 0, 0, 0, 1, 0.0, 0.0, seconds, 0.0, 0.0, 0.0, 0.0)
