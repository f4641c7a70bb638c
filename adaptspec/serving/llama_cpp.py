"""llama-cpp-python: a draft model for `Llama(draft_model=AdaptiveDraft())` that turns itself off where drafts cost more
than they save.

`Llama` calls it once per round with the whole text and tells it nothing: what was accepted is the difference between
two calls. One sequence at a time, chains only. Nothing of llama_cpp is imported: it asks for a callable, no more.

With any draft model `Llama` copies the logits of every token, prompts included, out of llama.cpp, drafts or not.
`attach` limits that to the passes that verify a draft.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from adaptspec.drafters.lookup import whole_number
from adaptspec.serving.chains import Vocabulary, chain_makers
from adaptspec.serving.policy import ServingPolicy
from adaptspec.serving.rows import Requests, Row, judge
from adaptspec.serving.types import Decision, StepContext, StepOutcome

_NOTHING = np.zeros(0, np.intc)
_ANY_VOCABULARY = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """A decision and the draft that came of it, until the next call shows what was accepted."""

    decision: Decision
    draft: list[int]
    length: int
    draft_seconds: dict[str, float]
    policy_seconds: float
    started: float


class AdaptiveDraft:
    """Drafts from the text and from past outputs, of a length that pays, or nothing.

    Args:
        drafters: "suffix", "prompt-lookup", "token-recycling".
        lengths: draft lengths to choose among, besides none.
        strategy, objective, guard, seed: see `ServingPolicy`. The default guard keeps 0.97 of the speed without
            drafts.
        max_context: longer texts are not looked up in.
        max_past_tokens: past outputs remembered.
        off_rounds: once it is decided to draft nothing, the next decision is taken so many rounds later: in between,
            being off costs nothing. Where nothing can be drafted, one is taken in every so many rounds.

    Raises:
        ValueError: an unknown drafter or a value out of range.

    >>> draft = AdaptiveDraft(strategy="fixed:prompt-lookup@4", guard=None)
    >>> draft(np.array([5, 6, 7, 8, 5, 6], dtype=np.intc)).tolist()
    [7, 8, 5, 6]
    """

    def __init__(
        self,
        drafters: Sequence[str] = ("suffix",),
        *,
        lengths: Sequence[int] = (2, 4, 8, 16),
        strategy: str = "hedge",
        objective: Literal["throughput", "accepted_length"] = "throughput",
        guard: float | None = 0.03,
        seed: int = 0,
        max_context: int = 32_768,
        max_past_tokens: int = 100_000,
        off_rounds: int = 8,
    ) -> None:
        if isinstance(drafters, str) or not drafters:
            raise ValueError(f"drafters must be a list of names, got {drafters!r}")
        if "draft-model" in (name.partition(":")[0] for name in drafters):
            raise ValueError("drafter 'draft-model' would need its model's tokens in llama.cpp; use lookups")
        if not lengths:
            raise ValueError("lengths must name at least one draft length, got none")
        self.lengths = tuple(sorted({whole_number("lengths", length, 1) for length in lengths}))
        self.off_rounds = whole_number("off_rounds", off_rounds, 1)
        makers = chain_makers(
            list(drafters),
            vocabulary=Vocabulary(_ANY_VOCABULARY),
            max_past_tokens=whole_number("max_past_tokens", max_past_tokens, 0),
        )
        self.drafters = tuple(makers)
        self.policy = ServingPolicy(
            [f"{name}@{length}" for name in makers for length in self.lengths],
            strategy,
            objective=objective,
            guard=guard,
            seed=seed,
        )
        self._requests = Requests(makers, max_context=whole_number("max_context", max_context, 1), max_caches=1)
        self._never = strategy == "fixed:ar"
        self._request = 0
        self._prompt_length = 0
        self._text = _NOTHING
        self._round: _Round | None = None
        self._rest = self._empty = 0

    def attach(self, llama: Any) -> None:
        """Let `llama`, made with this object as its `draft_model`, keep logits only where a draft is verified.

        While attached it gives no logprobs, and stopping criteria that look at logits see none. Its buffer for logits
        also gets a row for every position of the context: one of fewer, which it has by default, is overrun by drafts
        in longer texts.

        Raises:
            ValueError: another draft model's, or a `Llama` that is not the one this was written for, with the reason.
        """
        if getattr(llama, "draft_model", None) is not self:
            raise ValueError("llama must be made with draft_model= this object")
        if problem := _llama_problem(llama):
            raise ValueError(f"adaptspec cannot attach to this llama_cpp: {problem}")
        rows, columns = llama.scores.shape
        if rows < llama.n_ctx():
            llama.scores = np.ndarray((llama.n_ctx(), columns), dtype=llama.scores.dtype)
        evaluate = llama.eval

        def eval_with_few_logits(tokens: Sequence[int]) -> None:
            drafted = [] if self._round is None else self._round.draft
            behind = list(tokens[1:])
            llama._logits_all = bool(behind) and behind == drafted[: len(behind)]
            evaluate(tokens)

        llama.eval = eval_with_few_logits
        llama._logits_all = False

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """A draft behind `input_ids` [T], the whole text; empty for none."""
        if self._never or not len(input_ids):
            return _NOTHING
        started = perf_counter()
        sampled = self._sampled(input_ids)
        if sampled is None:
            self._begin(input_ids)
            sampled = input_ids[-1:].tolist()
        row = Row(0, self._request, input_ids, sampled, self._prompt_length, self.lengths[-1])
        self._settle(row, started)
        self._text = np.array(input_ids, dtype=np.intc)
        if self._rest:
            self._rest -= 1
            return _NOTHING
        return np.asarray(self._propose(row, started), dtype=np.intc)

    def _sampled(self, text: NDArray[np.intc]) -> list[int] | None:
        """What the request gained since the last call, None if this is another request."""
        before = len(self._text)
        drafted = len(self._round.draft) if self._round is not None else 0
        if not before < len(text) <= before + drafted + 1 or not np.array_equal(text[:before], self._text):
            return None
        return text[before:].tolist()

    def _begin(self, text: NDArray[np.intc]) -> None:
        """Another request: its first token has just been sampled."""
        self._requests.finish([self._request])
        self.policy.finish([self._request])
        self._request += 1
        self._prompt_length = len(text) - 1
        self._round = None

    def _settle(self, row: Row, now: float) -> None:
        last, self._round = self._round, None
        if last is None:
            return
        result = judge(last.draft, row.sampled, None)
        self.policy.observe(
            last.decision,
            StepOutcome(
                proposed=[len(last.draft)],
                verified=[result.verified],
                accepted=[result.accepted],
                emitted=[len(row.sampled)],
                seconds=now - last.started,
                draft_seconds=last.draft_seconds,
                policy_seconds=last.policy_seconds,
            ),
        )

    def _propose(self, row: Row, started: float) -> list[int]:
        peeked, seconds = {}, {}
        for name in self.drafters:
            begun = perf_counter()
            peeked[name] = self._requests.draft(row, name, row.limit)
            seconds[name] = perf_counter() - begun
        if not any(chain.tokens for chain in peeked.values()) and self._empty < self.off_rounds - 1:
            self._empty += 1  # nothing to decide; now and then the policy shall see what a round without a draft takes
            return []
        self._empty = 0
        decision = self.policy.decide(
            StepContext(
                request_ids=[row.request_id],
                context_lengths=[len(row.text)],
                max_lengths=[row.limit],
                available={name: [len(chain.tokens)] for name, chain in peeked.items()},
                evidence={name: [chain.evidence] for name, chain in peeked.items()},
            )
        )
        name, length = decision.drafters[0], int(decision.lengths[0])
        draft: list[int] = []
        used: dict[str, float] = {}
        if name is not None and length:
            draft = peeked[name].tokens[:length]
            used[name] = seconds[name]
        self._rest = self.off_rounds - 1 if decision.off else 0
        deciding = perf_counter() - started - sum(used.values())
        self._round = _Round(decision, draft, len(row.text), used, max(0.0, deciding), started)
        return draft


def _llama_problem(llama: Any) -> str | None:
    """What `attach` relies on and a `Llama` has not; None if it has all."""
    for name in ("eval", "scores", "n_ctx", "_logits_all"):
        if not hasattr(llama, name):
            return f"{type(llama).__name__} has no {name}"
    found = tuple(inspect.signature(llama.eval).parameters)
    if found != ("tokens",):
        return f"eval takes ({', '.join(found)}), expected is (tokens)"
    if not isinstance(llama._logits_all, bool):
        return f"_logits_all is {llama._logits_all!r}, expected is True or False"
    return None
