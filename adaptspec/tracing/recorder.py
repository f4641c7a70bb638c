"""The recorder: one pass, one token, and one proposal of every drafter per position."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adaptspec.calibrating import CONTEXT, machine_fingerprint, measure_costs
from adaptspec.control.controller import Assembly, Controller, StepContext, StepNotes, StepOutcome
from adaptspec.control.cost import MAX_NODES, CostModel
from adaptspec.control.trace import Proposals, Trace, TracedRequest
from adaptspec.drafters import Drafter
from adaptspec.generation import Engine, check_generation_config, check_input_ids, limits_of, sampling_of
from adaptspec.proposing import Proposer
from adaptspec.session import Session
from adaptspec.target.hf import HFTarget
from adaptspec.target.rows import TargetRows, check_processors
from adaptspec.tracing.own_steps import OwnSteps
from adaptspec.trees import merge
from adaptspec.types import Arm, Decision, DraftTree, Sampling, Verdict


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """What is to be answered: a name that is unique in the trace, a domain, and the token ids that the model reads."""

    name: str
    domain: str
    token_ids: Sequence[int]


class TraceRecorder:
    """Answers prompts one token per verification pass, and keeps what every drafter would have proposed on the way.

    At every position each drafter is asked for its widest tree, with the depth limit that a live `Session` has there,
    and is then told of the one token that the target chose. What drafters learn over requests stays in them, as live.
    The output is the one of `AdaptiveSpec.generate` with this seed: it does not depend on drafts that are picked.

    Drafters that learn from the target's top tokens at verified nodes (`Needs.target_top_k`) are played along their own
    steps (`OwnSteps`): a pass verifies the merged tree of those of them that begin a step there, and only one token of
    it is committed. Where their steps begin, their proposals are those of a live session that plays them alone with
    this budget. All others see, and propose, what they do live.

    Refused are drafters whose proposals cannot be known position by position: those that add rows of their own to every
    pass (their state is a history of passes), and those that sample their siblings (the draw is part of the step).

    Args:
        model: a transformers causal language model.
        drafters: by name; bound to the model here. One that was told of several vocabularies (`Drafter.use_vocab`) is
            asked with each, and recorded as so many drafters, named as `Arm.source` says.
        nodes: budget that every drafter is asked for; smaller budgets are cut out of it.
        max_new_tokens: longest output.
        temperature: 0 is greedy.
        seed: of sampled outputs.
        costs: seconds of verification, measured on this machine (`measured_costs`); drafting and the rest of a step
            are learnt while recording.
        tokenizer: to compare vocabularies with draft models.
        draft_timeout: seconds after which a drafter is set aside for the request and counts as declining.

    Raises:
        ValueError: no drafters, one that cannot be traced, or a number out of range.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        drafters: Mapping[str, Drafter],
        *,
        nodes: int = 64,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
        costs: CostModel,
        tokenizer: Any = None,
        draft_timeout: float = 10.0,
    ) -> None:
        self.sampling = Sampling(temperature)
        for name, value, least in (("nodes", nodes, 1), ("max_new_tokens", max_new_tokens, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
        if nodes > MAX_NODES:
            raise ValueError(f"nodes must be <= {MAX_NODES}, got {nodes}")
        if not drafters:
            raise ValueError("drafters must hold at least one drafter, got none")
        for name, drafter in drafters.items():
            check_traceable(name, drafter, greedy=self.sampling.greedy)
        self.model = model
        self.drafters: dict[str, Drafter] = {
            name: OwnSteps(drafter) if drafter.needs.target_top_k else drafter for name, drafter in drafters.items()
        }
        self.nodes = nodes
        self.max_new_tokens = max_new_tokens
        self.costs = costs
        self.requests: list[TracedRequest] = []
        self.set_aside: dict[str, dict[str, str]] = {}
        self._tokenizer = tokenizer
        self._controller = _RecordingController(self.drafters, nodes=nodes, costs=costs)
        self.names = self._controller.names
        self._engine = Engine(
            drafters=self.drafters, controller=self._controller, verifier="auto", draft_timeout=draft_timeout
        )
        self._rng = np.random.default_rng(seed)
        self._engine.target(model, tokenizer)  # drafters meet the target now, so that what does not fit shows early
        for name, drafter in drafters.items():  # and some know only now what they need
            check_traceable(name, drafter, greedy=self.sampling.greedy)

    def record(self, prompt: TracePrompt) -> TracedRequest:
        """Answer one prompt. A call that fails or is interrupted leaves no request behind.

        Raises:
            ValueError: the name is taken, or the prompt is empty, too long, or outside the vocabulary.
        """
        if any(request.name == prompt.name for request in self.requests):
            raise ValueError(f"names of prompts must be different, got {prompt.name!r} twice")
        ids = torch.tensor([list(prompt.token_ids)], dtype=torch.long, device=self.model.device)
        check_input_ids(ids, self.model)
        tokens, faults = self._generate(ids)
        steps = self._controller.steps
        assert len(steps) == len(tokens) - 1
        empty = DraftTree.empty()
        request = TracedRequest(
            prompt.name,
            prompt.domain,
            ids.shape[1],
            tokens,
            {name: Proposals.of([step.get(name, empty) for step in steps]) for name in self.names},
        )
        self.requests.append(request)
        if faults:
            self.set_aside[prompt.name] = faults
        return request

    def trace(self, *, fingerprint: str, provenance: Mapping[str, Any] | None = None) -> Trace:
        """What was recorded so far. Drafters that were set aside are added to the provenance."""
        origin = dict(provenance or {})
        if self.set_aside:
            origin["set_aside"] = dict(self.set_aside)
        return Trace(
            tuple(self.requests),
            dict.fromkeys(self.names, self.nodes),
            self.max_new_tokens,
            self.sampling.temperature,
            self.costs.state_dict(),
            fingerprint,
            origin,
        )

    def _generate(self, ids: torch.Tensor) -> tuple[np.ndarray, dict[str, str]]:
        """The output, and why drafters were set aside. transformers makes processors and limits out of the model's own
        settings, as for `AdaptiveSpec.generate`."""
        seed = int(self._rng.integers(2**62))
        engine = self._engine
        faults: dict[str, str] = {}

        def decode(
            model: Any,
            input_ids: torch.Tensor,
            logits_processor: Any = None,
            stopping_criteria: Any = None,
            generation_config: Any = None,
            **model_kwargs: Any,
        ) -> torch.Tensor:
            check_generation_config(generation_config)
            check_processors(logits_processor)
            with engine.request(model, self._tokenizer) as target:
                session = _OneTokenSession(
                    target=target,
                    drafters=self.drafters,
                    controller=self._controller,
                    proposer=Proposer(vocab_size=target.vocab_size, timeout=engine.draft_timeout),
                    sampling=sampling_of(generation_config),
                    processors=logits_processor,
                    verifier=engine.verifier,
                    limits=limits_of(stopping_criteria, generation_config, prompt_length=input_ids.shape[1]),
                    rng=np.random.default_rng(seed),
                )
                sequences = session.run(input_ids[0])
            faults.update(session.proposer.set_aside)
            return sequences

        options: dict[str, Any] = {"do_sample": False}
        if not self.sampling.greedy:
            options = {"do_sample": True, "temperature": self.sampling.temperature, "top_k": 0, "top_p": 1.0}
        sequences = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.max_new_tokens,
            num_beams=1,
            num_return_sequences=1,
            pad_token_id=self.model.generation_config.pad_token_id or 0,  # one sequence is never padded
            custom_generate=decode,
            **options,
        )
        return sequences[0, ids.shape[1] :].numpy().copy(), faults


def record_trace(
    model: torch.nn.Module,
    drafters: Mapping[str, Drafter],
    prompts: Iterable[TracePrompt],
    *,
    nodes: int = 64,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    tokenizer: Any = None,
    contexts: Sequence[int] = (256,),
    provenance: Mapping[str, Any] | None = None,
) -> Trace:
    """Measure what steps cost here, answer all prompts, and return the trace. See `TraceRecorder`.

    Args:
        contexts: lengths of text behind which verification is timed.
        provenance: stored with the trace.
    """
    costs, fingerprint = measured_costs(model, nodes=nodes, contexts=contexts, tokenizer=tokenizer)
    recorder = TraceRecorder(
        model,
        drafters,
        nodes=nodes,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        costs=costs,
        tokenizer=tokenizer,
    )
    for prompt in prompts:
        recorder.record(prompt)
    return recorder.trace(fingerprint=fingerprint, provenance=provenance)


def measured_costs(
    model: torch.nn.Module, *, nodes: int, contexts: Sequence[int], tokenizer: Any = None
) -> tuple[CostModel, str]:
    """Seconds of verifying 0, 1, 2, 4, ... up to `nodes` nodes behind each context, and the machine's fingerprint.

    Shorter contexts than `adaptspec.calibrating.CONTEXT` cost the same; they are measured there, where there is room.
    """
    sizes = {0, nodes, *(1 << exponent for exponent in range(nodes.bit_length()))}
    target = HFTarget(model, tokenizer=tokenizer)
    lengths = [min(max(context, CONTEXT), target.context_limit or context) for context in contexts]
    return measure_costs(target, {}, sizes=sorted(sizes), contexts=lengths), machine_fingerprint(target)


def check_traceable(name: str, drafter: Drafter, *, greedy: bool) -> None:
    """Raises ValueError, with the reason, for a drafter whose proposals cannot be known position by position."""
    if drafter.needs.extra_rows:
        raise ValueError(
            f"drafter {name!r} cannot be traced: it adds rows of its own to every verification pass, so that what it"
            " proposes depends on which passes there were and not on the text alone"
        )
    if drafter.needs.target_top_k and (drafter.needs.target or drafter.needs.taps):
        raise ValueError(
            f"drafter {name!r} cannot be traced: it learns from verified nodes, so that copies of it are needed between"
            " its steps, and it runs a network"
        )
    if drafter.siblings != "deterministic" and not greedy:
        raise ValueError(
            f"drafter {name!r} cannot be traced at a temperature above 0: it samples its drafts ({drafter.siblings}),"
            " so what it proposes differs from one time to the next"
        )


class _RecordingController(Controller):
    """Asks every drafter at every step, and has verified what those proposed that begin a step of their own.

    Attributes:
        names: what is recorded: a drafter, or a drafter with one of its vocabularies.
        steps: of the current request, the trees by name.
    """

    def __init__(self, drafters: Mapping[str, Drafter], *, nodes: int, costs: CostModel) -> None:
        self.steps: list[Mapping[str, DraftTree]] = []
        self._asked = tuple(Arm(name, nodes, vocab) for name, drafter in drafters.items() for vocab in drafter.vocab)
        self.names = tuple(arm.source for arm in self._asked)
        self._learners = {name: drafter for name, drafter in drafters.items() if isinstance(drafter, OwnSteps)}
        self._costs = costs

    def drafters_in_play(self, names: Collection[str]) -> list[str]:
        return list(names)

    def begin(self) -> None:
        self.steps = []

    def select(self, context: StepContext) -> Decision:
        return Decision(len(self.steps) + 1, Arm.autoregressive(), asked=self._asked)

    def assemble(self, decision: Decision, trees: Mapping[str, DraftTree]) -> Assembly:
        beginning = {name: one for name, one in self._learners.items() if one.beginning and name in trees}
        tree, origins = merge([trees[name] for name in beginning])
        for learner, origin in zip(beginning.values(), origins, strict=True):
            mine = np.flatnonzero(origin >= 0)
            learner.place(np.append(0, 1 + mine[np.argsort(origin[mine])]))
        return Assembly(tree, decision.arm, frozenset())

    def update(self, decision: Decision, outcome: StepOutcome) -> StepNotes:
        self.steps.append(outcome.trees)
        record = outcome.record
        if record.fault is None:  # a call that failed or timed out is no measure of drafting
            for arm in self._asked:
                if arm.source in outcome.draft_seconds:  # replayed under this name, which stands for the vocabulary too
                    self._costs.observe_draft(arm.source, arm.budget, outcome.draft_seconds[arm.source])
            self._costs.observe_overhead(record.overhead_seconds)
        return StepNotes()


class _OneTokenSession(Session):
    """Commits one token per pass, whatever the verified tree foresaw."""

    def _verify(self, rows: TargetRows, tree: DraftTree) -> Verdict:
        root = TargetRows(rows.logits[:1], tree=DraftTree.empty(), tokens=rows.tokens, processors=rows.processors)
        return super()._verify(root, DraftTree.empty())
