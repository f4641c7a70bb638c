"""A proposer for vLLM (`method: custom_class`) whose drafter and draft length differ by request and by step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from adaptspec.serving import vllm_capture
from adaptspec.serving.chains import Chain, Vocabulary, chain_makers
from adaptspec.serving.policy import ServingPolicy
from adaptspec.serving.rows import Judged, Requests, Row, judge
from adaptspec.serving.types import Decision, StepContext, StepOutcome
from adaptspec.serving.vllm_settings import read_settings, request_limit

logger = logging.getLogger("adaptspec")


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A decision whose pass has not come back yet. `lengths` are those of the texts when it was taken."""

    decision: Decision
    drafts: list[Sequence[int]]
    lengths: list[int]
    stale: list[bool]
    draft_seconds: dict[str, float]
    refresh_seconds: dict[str, float]
    policy_seconds: float
    prefill_tokens: int
    started: float
    ended: float


class AdaptiveProposer(vllm_capture.PassListener):
    """Give it to vLLM as `speculative_config={"method": "custom_class", "model":
    "adaptspec.serving.vllm.AdaptiveProposer", "num_speculative_tokens": K}`, K being the longest draft.

    Settings are those of `adaptspec.serving.vllm_settings.Settings`, in `additional_config={"adaptspec": {...}}`.

    Raises:
        ValueError: settings or drafters that do not fit.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.longest = int(vllm_config.speculative_config.num_speculative_tokens)
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self.settings = settings = read_settings(vllm_config.additional_config, longest=self.longest)
        self._seats = int(vllm_config.scheduler_config.max_num_seqs)
        self._step_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self.off = settings.strategy == "fixed:ar" or not _first_of_its_group()
        vocabulary = Vocabulary(vllm_config.model_config.get_vocab_size(), dtype=vllm_config.model_config.dtype)
        makers = {}
        if not self.off:
            makers = chain_makers(
                list(settings.drafters), vocabulary=vocabulary, max_past_tokens=settings.max_past_tokens
            )
        self._cheap = [name for name in makers if name != "draft-model"]
        self._stateful = [name for name in makers if name == "draft-model"]
        self.policy: ServingPolicy = settings.policy(
            list(makers) or ["suffix"], uniform=False, most_rows=self._seats, stateful=self._stateful
        )
        self.requests = Requests(makers, max_context=settings.max_context, max_caches=settings.max_caches)
        self._names = vllm_capture.Fingerprints(max(settings.max_requests, self._seats))
        self.capture_refused = "the settings say so" if not settings.capture else self._hook()
        self._facts: vllm_capture.PassFacts | None = None
        self._limits: dict[Hashable, int] = {}
        self._pending: _Pending | None = None
        self._rest = self._empty = 0
        self._decided_for: frozenset[Hashable] = frozenset()
        self._log = _StepLog(settings.log_seconds)
        if not self.off:
            how = "captured" if self.capture_refused is None else f"recognised by content ({self.capture_refused})"
            logger.info("adaptspec drafts with %s; requests are %s", ", ".join(makers), how)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM hands its model over; drafts are made from tokens alone."""

    def begin_pass(self, scheduler_output: Any, runner: Any) -> None:
        """What the hook tells before each pass."""
        if self.off or self.capture_refused is not None:
            return
        if (problem := vllm_capture.runner_problem(runner)) is not None:
            self._refuse_capture(problem)
            return
        if scheduler_output.finished_req_ids:
            self._forget(scheduler_output.finished_req_ids)
        self._facts = vllm_capture.PassFacts(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.total_num_scheduled_tokens,
            scheduler_output.scheduled_spec_decode_tokens,
            runner,
            perf_counter(),
        )

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for the next pass, one list per row; empty for rows in their prompt, opted out, or not worth it."""
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self.off:
            return drafts
        started = perf_counter()
        facts, self._facts = self._facts, None
        if facts is not None and self._resting(facts.runner.input_batch.req_ids):
            return drafts
        rows = self._rows(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, facts)
        self._settle({row.request_id: row for row in rows}, facts, started, partial=len(rows) < len(drafts))
        rows = [row for row in rows if row.remaining != 0]  # the others have just got their last token
        ids = [row.request_id for row in rows]
        if not rows or self._resting(ids):
            return drafts
        peeked, peek_seconds = self._peek(rows)
        declined = not self._stateful and not any(chain.tokens for chains in peeked.values() for chain in chains)
        if declined and self._empty < self.settings.off_steps - 1:
            self._empty += 1  # nothing to decide
            return drafts
        self._empty = 0
        context = self._context(rows, peeked, _prefill_ahead(facts, sampled_token_ids))
        decision = self.policy.decide(context)
        pending = self._draft(rows, decision, peeked, peek_seconds, context.prefill_tokens, started)
        for row, draft in zip(rows, pending.drafts, strict=True):
            drafts[row.index] = list(draft)
        self._rest = self.settings.off_steps - 1 if decision.off else 0
        self._decided_for = frozenset(ids)
        self._pending = pending
        self._log.note(decision)
        return drafts

    def _resting(self, request_ids: Sequence[Hashable]) -> bool:
        """Whether the last decision was to draft nothing, it is settled, and it holds for everybody here."""
        if not self._rest or self._pending is not None or not self._decided_for.issuperset(request_ids):
            return False
        self._rest -= 1
        return True

    def _rows(
        self, sampled: list[list[int]], counts: np.ndarray, token_ids: np.ndarray, facts: vllm_capture.PassFacts | None
    ) -> list[Row]:
        """Rows that are past their prompt and have room left."""
        chosen = [i for i, tokens in enumerate(sampled) if tokens and int(counts[i]) < self.max_model_len]
        texts = [token_ids[i, : int(counts[i])] for i in chosen]
        free = [self.max_model_len - len(text) - 1 for text in texts]
        if facts is None:
            named, forgotten = self._names.name(
                [(text, len(sampled[i])) for i, text in zip(chosen, texts, strict=True)]
            )
            self._forget(forgotten)
            return [
                Row(i, name, text, sampled[i], len(text) - len(sampled[i]), min(self.longest, room))
                for i, name, text, room in zip(chosen, named, texts, free, strict=True)
            ]
        rows = []
        batch = facts.runner.input_batch
        for i, text, room in zip(chosen, texts, free, strict=True):
            request_id = batch.req_ids[i]
            prompt_length = int(batch.num_prompt_tokens[i])
            asked = getattr(facts.runner.requests.get(request_id), "sampling_params", None)
            limit = self._limits.get(request_id)
            if limit is None:
                limit = request_limit(getattr(asked, "extra_args", None), longest=self.longest)
                self._limits[request_id] = limit
            most = getattr(asked, "max_tokens", None)
            remaining = None if most is None else max(0, most - (len(text) - prompt_length))
            rows.append(Row(i, request_id, text, sampled[i], prompt_length, max(0, min(limit, room)), remaining))
        return rows

    def _peek(self, rows: list[Row]) -> tuple[dict[str, list[Chain]], dict[str, float]]:
        """What lookups have for every row, before anything is decided."""
        peeked, seconds = {}, {}
        for name in self._cheap:
            started = perf_counter()
            peeked[name] = [self.requests.draft(row, name, row.limit) for row in rows]
            seconds[name] = perf_counter() - started
        return peeked, seconds

    def _context(self, rows: list[Row], peeked: dict[str, list[Chain]], prefill_tokens: int) -> StepContext:
        count = len(rows)
        limits = np.fromiter((row.limit for row in rows), np.int64, count)
        far = self.max_model_len
        return StepContext(
            request_ids=[row.request_id for row in rows],
            context_lengths=np.fromiter((len(row.text) for row in rows), np.int64, count),
            remaining=np.fromiter((far if row.remaining is None else row.remaining for row in rows), np.int64, count),
            speculate=limits > 0,
            max_lengths=limits,
            prefill_tokens=prefill_tokens,
            draft_budget=max(0, self._step_tokens - count),
            available={
                name: np.fromiter((len(chain.tokens) for chain in chains), np.int64, count)
                for name, chains in peeked.items()
            },
            evidence={
                name: np.fromiter((chain.evidence for chain in chains), np.int64, count)
                for name, chains in peeked.items()
            },
        )

    def _draft(
        self,
        rows: list[Row],
        decision: Decision,
        peeked: dict[str, list[Chain]],
        peek_seconds: dict[str, float],
        prefill_tokens: int,
        started: float,
    ) -> _Pending:
        """Take or ask for what was decided."""
        decided = perf_counter()
        drafts: list[Sequence[int]] = []
        stale: list[bool] = []
        seconds: dict[str, float] = {}
        refresh = {name: self.requests.catch_up(rows, name) for name in decision.refresh}
        for place, (row, name, length) in enumerate(
            zip(rows, decision.drafters, decision.lengths.tolist(), strict=True)
        ):
            stale.append(name in self._stateful and length > 0 and self.requests.is_stale(row, name))
            if name is None or length == 0:
                drafts.append([])
            elif name in peeked:
                drafts.append(peeked[name][place].tokens[:length])
                seconds.setdefault(name, peek_seconds[name])
            else:
                begun = perf_counter()
                drafts.append(self.requests.draft(row, name, length).tokens[:length])
                seconds[name] = seconds.get(name, 0.0) + perf_counter() - begun
        unused = sum(value for name, value in peek_seconds.items() if name not in seconds)
        deciding = decided - started - sum(peek_seconds.values()) + unused
        return _Pending(
            decision,
            drafts,
            [len(row.text) for row in rows],
            stale,
            seconds,
            refresh,
            max(0.0, deciding),
            prefill_tokens,
            started,
            perf_counter(),
        )

    def _settle(
        self, rows: dict[Hashable, Row], facts: vllm_capture.PassFacts | None, now: float, *, partial: bool
    ) -> None:
        """Tell the policy what came of the pending decision."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        judged: list[Judged] = []
        observed: list[bool] = []
        emitted: list[int] = []
        for request_id, draft, length in zip(
            pending.decision.request_ids, pending.drafts, pending.lengths, strict=True
        ):
            row = rows.get(request_id)
            known = row is not None and row.before == length
            observed.append(known)
            if row is None or not known:
                judged.append(Judged(0, 0))
                emitted.append(0)
                continue
            scheduled = None if facts is None else facts.drafts.get(str(request_id), ())
            judged.append(judge(draft, row.sampled, scheduled))
            emitted.append(len(row.sampled))
        if not any(observed):
            return
        clean = self._is_clean(pending, rows, facts, partial=partial)
        begun = pending.ended if facts is None else facts.started
        self.policy.observe(
            pending.decision,
            StepOutcome(
                proposed=np.array([len(draft) for draft in pending.drafts]),
                verified=np.array([one.verified for one in judged]),
                accepted=np.array([one.accepted for one in judged]),
                emitted=np.array(emitted),
                observed=np.array(observed),
                stale=np.array(pending.stale),
                padding=sum(one.padding for one in judged),
                seconds=now - pending.started if clean else None,
                draft_seconds=pending.draft_seconds,
                verify_seconds=now - begun if clean else None,
                refresh_seconds=pending.refresh_seconds,
                policy_seconds=pending.policy_seconds,
            ),
        )

    @staticmethod
    def _is_clean(
        pending: _Pending, rows: dict[Hashable, Row], facts: vllm_capture.PassFacts | None, *, partial: bool
    ) -> bool:
        """Whether the pass was what the decision was told it would be, so that its time says something."""
        if facts is None:
            came = partial or any(name not in pending.decision.request_ids for name in rows)
        else:
            decoding = sum(1 + len(facts.drafts.get(str(name), ())) for name in rows)
            came = facts.total > decoding
        return came == (pending.prefill_tokens > 0)

    def _forget(self, request_ids: Any) -> None:
        for request_id in request_ids:
            self._limits.pop(request_id, None)
        self.requests.finish(request_ids)
        self.policy.finish(request_ids)

    def _hook(self) -> str | None:
        """Hook the model runner; the reason if that is not possible."""
        if not vllm_capture.permitted():
            return "vLLM has not loaded the plugin adaptspec"
        from vllm.v1.core.sched.output import SchedulerOutput
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        reason = vllm_capture.install(GPUModelRunner, SchedulerOutput)
        if reason is not None:
            logger.warning("adaptspec cannot capture request ids from this vLLM: %s", reason)
        return reason

    def _refuse_capture(self, reason: str) -> None:
        self.capture_refused = reason
        self._facts = None
        logger.warning("adaptspec cannot capture request ids from this vLLM: %s", reason)


def _first_of_its_group() -> bool:
    """Whether this worker's drafts are those that vLLM uses: with tensor parallelism, only the first rank's are."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, model_parallel_is_initialized

    return not model_parallel_is_initialized() or get_tensor_model_parallel_rank() == 0


def _prefill_ahead(facts: vllm_capture.PassFacts | None, sampled: list[list[int]]) -> int:
    """Prompt tokens to expect in the next pass: rows still in their prompt get another chunk like the last."""
    if facts is None:
        return sum(not tokens for tokens in sampled)
    ids = facts.runner.input_batch.req_ids
    return sum(facts.scheduled.get(ids[i], 0) for i, tokens in enumerate(sampled) if not tokens)


class _StepLog:
    """Says now and then what was decided."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._plans: Counter[str] = Counter()
        self._since: float | None = None

    def note(self, decision: Decision) -> None:
        """Count one decision."""
        if not self._seconds:
            return
        self._plans[f"{decision.plan}@{int(decision.lengths.max(initial=0))}"] += 1
        now = perf_counter()
        if self._since is None:
            self._since = now
        if now - self._since >= self._seconds:
            total = self._plans.total()
            shares = ", ".join(f"{plan} {count / total:.0%}" for plan, count in self._plans.most_common(6))
            logger.info("adaptspec decided %d steps in %.0f s: %s", total, now - self._since, shares)
            self._plans.clear()
            self._since = now
