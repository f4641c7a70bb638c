"""Recorded traces: the output is the target's own, and proposals are those of live sessions at the same positions."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.control.cost import CostModel
from adaptspec.control.trace import Trace
from adaptspec.control.trace_file import parse_trace, trace_bytes
from adaptspec.control.trace_reach import reaches, stops
from adaptspec.drafters import Drafter, Needs, make_drafter
from adaptspec.drafters.token_recycling import TokenRecyclingDrafter
from adaptspec.tracing import TracePrompt, TraceRecorder, record_trace
from adaptspec.trees import truncate
from adaptspec.types import DraftContext, DraftTree, Observation
from tests.control.trace_cases import same
from tests.target.families import FAMILIES, VOCAB

LOOKUPS = ("prompt-lookup", "suffix", "sam", "ngram-cache", "rest")
NODES = 24
MAX_NEW_TOKENS = 28
SEED = 10


@pytest.fixture(scope="module")
def model() -> Any:
    return FAMILIES["llama"]("sdpa")


@pytest.fixture
def eos(model: Any) -> Iterator[Any]:
    """Sets the model's end-of-sequence token for one test."""
    before = model.generation_config.eos_token_id

    def set_token(token: int) -> None:
        model.generation_config.eos_token_id = token

    yield set_token
    model.generation_config.eos_token_id = before


def prompts() -> list[TracePrompt]:
    """Texts that repeat themselves, so that lookups have evidence; the first one again, so that the past matters."""
    texts = [[(n % (5 + seed)) * 7 + 3 + seed for n in range(18 + seed)] for seed in (0, 1, 2, 0)]
    return [TracePrompt(str(number), "any", text) for number, text in enumerate(texts)]


def recorder(model: Any, drafters: Mapping[str, Drafter] | Sequence[str], **options: Any) -> TraceRecorder:
    if not isinstance(drafters, Mapping):
        drafters = {name: make_drafter(name) for name in drafters}
    settings = {"nodes": NODES, "max_new_tokens": MAX_NEW_TOKENS, "seed": SEED, "costs": CostModel()} | options
    return TraceRecorder(model, drafters, **settings)


def record(model: Any, drafters: Mapping[str, Drafter] | Sequence[str], **options: Any) -> Trace:
    made = recorder(model, drafters, **options)
    for prompt in prompts():
        made.record(prompt)
    trace = made.trace(fingerprint="test")
    trace.validate()
    return trace


def plain(model: Any, prompt: TracePrompt, *, max_new_tokens: int = MAX_NEW_TOKENS) -> list[int]:
    """Greedy generation by transformers."""
    ids = torch.tensor([list(prompt.token_ids)])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0
    )
    return made[0, ids.shape[1] :].tolist()


@dataclass
class Spy:
    """Notes what a drafter is asked, what it answers, and what it is told."""

    drafter: Drafter
    asked: list[tuple[DraftContext, int, DraftTree]] = field(default_factory=list)
    told: list[Observation] = field(default_factory=list)

    def __post_init__(self) -> None:
        propose, observe = self.drafter.propose, self.drafter.observe

        def spied(context: DraftContext, budget: int) -> DraftTree:
            tree = propose(context, budget)
            self.asked.append((context, budget, tree))
            return tree

        def overheard(observation: Observation) -> None:
            self.told.append(observation)
            observe(observation)

        self.drafter.propose, self.drafter.observe = spied, overheard  # type: ignore[method-assign]


# The output ----------------------------------------------------------------------------------------------------------


def test_the_output_is_plain_generation(model: Any) -> None:
    trace = record(model, [*LOOKUPS, "token-recycling", "layer-skip"])
    for prompt, request in zip(prompts(), trace.requests, strict=True):
        assert request.tokens.tolist() == plain(model, prompt)
        assert (request.name, request.domain, request.prompt_length) == (prompt.name, "any", len(prompt.token_ids))
    assert trace.nodes == dict.fromkeys([*LOOKUPS, "token-recycling", "layer-skip"], NODES)
    assert same(parse_trace(trace_bytes(trace)), trace)


@pytest.mark.parametrize("pool", [("suffix",), ("token-recycling", "suffix")])
def test_sampled_output_is_the_one_of_this_seed(model: Any, pool: Sequence[str]) -> None:
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@8", seed=SEED)
    trace = record(model, pool, temperature=0.9)
    for prompt, request in zip(prompts(), trace.requests, strict=True):
        ids = torch.tensor([list(prompt.token_ids)])
        live = spec.generate(model, ids, max_new_tokens=MAX_NEW_TOKENS, temperature=0.9)
        assert live.sequences[0, ids.shape[1] :].tolist() == request.tokens.tolist()
    assert trace.temperature == 0.9
    assert record(model, pool, temperature=0.9, seed=SEED + 1).requests[0].tokens.tolist() != (
        trace.requests[0].tokens.tolist()
    )


def test_the_models_own_processors_are_applied(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without = record(model, ["suffix"])
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 1.7)
    trace = record(model, ["suffix", "token-recycling"])
    for prompt, request in zip(prompts(), trace.requests, strict=True):
        assert request.tokens.tolist() == plain(model, prompt)
    assert without.requests[0].tokens.tolist() != trace.requests[0].tokens.tolist()


def test_an_end_in_the_middle_and_at_once(model: Any, eos: Any) -> None:
    truth = plain(model, prompts()[0])
    middle = next(place for place in range(8, len(truth)) if truth[place] not in truth[:place])
    for place in (0, middle):
        eos(truth[place])
        made = recorder(model, [*LOOKUPS, "token-recycling"])
        request = made.record(prompts()[0])
        assert request.tokens.tolist() == truth[: place + 1]
        assert all(len(proposals.offsets) == place + 1 for proposals in request.proposals.values())
        later = made.record(prompts()[1])
        assert later.tokens.tolist() == plain(model, prompts()[1])
        trace = made.trace(fingerprint="test")
        trace.validate()
        assert same(parse_trace(trace_bytes(trace)), trace)


def test_prompts_of_one_token_and_outputs_of_one_token(model: Any) -> None:
    one = TracePrompt("one", "any", [5])
    request = recorder(model, [*LOOKUPS, "token-recycling"]).record(one)
    assert request.prompt_length == 1 and request.tokens.tolist() == plain(model, one)
    short = recorder(model, LOOKUPS, max_new_tokens=1).record(one)
    assert short.tokens.tolist() == plain(model, one, max_new_tokens=1) and short.positions == 0


def test_the_context_ends_the_output_as_live(model: Any) -> None:
    """The model's context holds 256 tokens; the last positions leave no room for a draft."""
    ids = [(n % 9) * 5 + 3 for n in range(246)]
    request = recorder(model, ["prompt-lookup"]).record(TracePrompt("long", "any", ids))
    live = AdaptiveSpec([], "fixed:ar").generate(model, torch.tensor([ids]), max_new_tokens=MAX_NEW_TOKENS)
    assert live.finish_reason == "context"
    assert request.tokens.tolist() == live.sequences[0, len(ids) :].tolist()
    sizes = request.proposals["prompt-lookup"].sizes().tolist()
    assert sizes == [0, *(256 - 246 - 1 - position for position in range(1, 10))], "nothing matches the first token"


# The proposals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LOOKUPS, "token-recycling"])
def test_proposals_are_those_of_a_live_session_where_it_stops(model: Any, name: str) -> None:
    """The core promise. Live steps commit several tokens at once, the recording one by one."""
    witness = Spy(make_drafter("suffix"))
    pool = {other: make_drafter(other) for other in (*LOOKUPS, "token-recycling")}
    trace = record(model, {**pool, "witness": witness.drafter})
    live = Spy(make_drafter(name))
    spec = AdaptiveSpec([live.drafter], f"fixed:{name}@{NODES}", seed=SEED)
    contexts = iter(witness.asked)
    proposed = 0
    for prompt, request in zip(prompts(), trace.requests, strict=True):
        live.asked.clear()
        result = spec.generate(model, torch.tensor([list(prompt.token_ids)]), max_new_tokens=MAX_NEW_TOKENS)
        recorded = {context.length: context for context, _, _ in (next(contexts) for _ in range(request.positions - 1))}
        lengths = reaches(request, name).lengths(NODES)
        visited = [record.position - request.prompt_length - 1 for record in result.trace]
        assert visited == stops(lengths).tolist()
        assert [record.emitted for record in result.trace] == lengths[visited].tolist()
        for context, budget, tree in live.asked:
            same_place = recorded[context.length]
            for what in ("root", "max_depth", "sampling"):
                assert getattr(context, what) == getattr(same_place, what)
            assert budget == NODES
            traced = request.proposals[name].tree(context.length - request.prompt_length - 1)
            assert traced.state_bytes() == tree.state_bytes()
            assert all(traced.evidence[key].tobytes() == tree.evidence[key].tobytes() for key in traced.evidence)
            if name != "rest":  # it corrects its scores by how far each step got, which is one token here
                assert traced.scores.tobytes() == tree.scores.tobytes()
            proposed += len(tree) > 0
    assert proposed >= 4, "the comparison must have something to compare"


@pytest.mark.parametrize("name", ["prompt-lookup", "sam", "ngram-cache"])
def test_smaller_budgets_are_cut_out_of_larger_ones(model: Any, name: str) -> None:
    """Exact for drafters that do not choose their match by the budget."""
    widest = record(model, [name])
    proposed = 0
    for budget in (1, 6):
        smaller = record(model, [name], nodes=budget)
        for wide, narrow in zip(widest.requests, smaller.requests, strict=True):
            for position in range(wide.positions):
                tree = truncate(wide.proposals[name].tree(position), budget)
                asked = narrow.proposals[name].tree(position)
                assert tree.state_bytes() == asked.state_bytes() and tree.scores.tobytes() == asked.scores.tobytes()
                proposed += len(wide.proposals[name].tree(position)) > budget
    assert proposed >= 5


def test_drafters_remember_earlier_requests(model: Any) -> None:
    first, *_, again = record(model, ["suffix"]).requests
    assert again.tokens.tolist() == first.tokens.tolist()
    gained = [int(reaches(request, "suffix").lengths(NODES).sum()) for request in (first, again)]
    assert gained[1] > gained[0]


class Listener(TokenRecyclingDrafter):
    """Notes what it is told, and whether it is a copy; proposes at most `width` nodes."""

    copied = False

    def __init__(self, width: int = NODES) -> None:
        super().__init__()
        self.width = width
        self.notes: list[tuple[bool, Observation]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Listener:
        twin = object.__new__(Listener)
        for key, value in self.__dict__.items():
            twin.__dict__[key] = value if key == "notes" else copy.deepcopy(value, memo)
        twin.copied = True
        return twin

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        return super().propose(context, min(budget, self.width))

    def observe(self, observation: Observation) -> None:
        self.notes.append((self.copied, observation))
        super().observe(observation)


def test_learners_are_told_of_their_own_steps_as_live(model: Any, eos: Any) -> None:
    """Two of them at once, each as if it were played alone; the second output ends inside what one of them foresaw."""
    widths = {"a": 5, "b": NODES}
    traced = {name: Listener(width) for name, width in widths.items()}
    made = recorder(model, {**traced, "lookup": make_drafter("suffix")})
    live = {name: Listener(width) for name, width in widths.items()}
    specs = {name: AdaptiveSpec([one], f"fixed:token-recycling@{NODES}") for name, one in live.items()}
    last = plain(model, prompts()[1])[9]
    for place in (0, 1, 2):
        eos(last if place == 1 else VOCAB + 1)
        request = made.record(prompts()[place])
        for spec in specs.values():
            spec.generate(model, torch.tensor([prompts()[place].token_ids]), max_new_tokens=MAX_NEW_TOKENS)
            assert spec.last_result is not None
            assert spec.last_result.stats.new_tokens == len(request.tokens)
        if place == 1:
            _, told = live["b"].notes[-1]
            above = int(told.verdict.path[-1]) if len(told.verdict.path) else -1
            assert ((told.tree.parents == above) & (told.tree.token_ids == last)).any(), "it was foreseen"
    for name in widths:
        own = [told for copied, told in traced[name].notes if not copied]
        assert len(own) == len(live[name].notes)
        assert max(len(told.tokens) for told in own) > 2, "steps of several tokens are what this is about"
        for ours, (_, theirs) in zip(own, live[name].notes, strict=True):
            assert ours.tree.state_bytes() == theirs.tree.state_bytes()
            assert ours.verdict.path.tolist() == theirs.verdict.path.tolist()
            assert ours.tokens.tolist() == theirs.tokens.tolist() == ours.verdict.token_ids.tolist()
            assert ours.target_top_ids is not None
            assert ours.target_top_ids.tolist() == theirs.target_top_ids.tolist()
        for told in (told for copied, told in traced[name].notes if copied):
            assert len(told.tree) == 0 and len(told.tokens) == 1 and told.target_top_ids.shape == (1, 8)
    own, copies = ([told for copied, told in traced["b"].notes if copied is kind] for kind in (False, True))
    assert sum(len(told.tokens) for told in own) == sum(request.positions for request in made.requests)
    assert len(copies) > 5


def test_between_its_steps_a_learner_knows_no_more_than_the_text(model: Any) -> None:
    """Copies are told what the target says at the root, in the words of a plain forward."""
    listener = Listener()
    request = recorder(model, {"a": listener}).record(prompts()[0])
    whole = torch.tensor([[*prompts()[0].token_ids, *request.tokens.tolist()]])
    with torch.no_grad():
        expected = model(whole).logits[0].topk(8).indices[len(prompts()[0].token_ids) :]
    position = checked = 0
    for copied, told in listener.notes:
        assert told.target_top_ids is not None
        # A step is told after the copies that it needed; its first row is the one where it began.
        assert told.target_top_ids[0].tolist() in expected.tolist()
        if copied:
            checked += 1
        else:
            assert told.target_top_ids[0].tolist() == expected[position].tolist()
            position += len(told.tokens)
    assert checked > 3


@pytest.mark.parametrize("name", ["prompt-lookup", "suffix", "sam", "ngram-cache"])
def test_own_steps_change_nothing_for_drafters_of_the_text_alone(model: Any, name: str) -> None:
    """Whether a drafter learns from verified nodes is asked of the object: this one says so and does not look."""
    claiming = make_drafter(name)
    claiming.needs = Needs(target_top_k=2)  # type: ignore[misc]
    trace = record(model, {"plain": make_drafter(name), "claiming": claiming})
    for request in trace.requests:
        ours, theirs = request.proposals["plain"], request.proposals["claiming"]
        for field_name in ("offsets", "token_ids", "parents", "scores"):
            assert getattr(ours, field_name).tobytes() == getattr(theirs, field_name).tobytes()
    assert any(len(request.proposals["plain"].token_ids) for request in trace.requests)


def test_passes_hold_a_learners_tree_only_where_its_steps_begin(model: Any) -> None:
    witness = Spy(make_drafter("sam"))
    pool = {"learner": make_drafter("token-recycling"), "witness": witness.drafter}
    request = recorder(model, pool).record(prompts()[0])
    proposals = request.proposals["learner"]
    begins = set(stops(reaches(request, "learner").lengths(NODES)).tolist())
    expected = [size if place in begins else 0 for place, size in enumerate(proposals.sizes().tolist())]
    assert [len(told.tree) for told in witness.told] == expected
    assert sum(expected) < sum(proposals.sizes())


def test_without_learners_nothing_is_verified(model: Any) -> None:
    lookup = Spy(make_drafter("suffix"))
    request = recorder(model, {"suffix": lookup.drafter}).record(prompts()[0])
    assert len(lookup.told) == request.positions
    assert all(len(o.tree) == 0 and o.target_top_ids is None and len(o.tokens) == 1 for o in lookup.told)


# Costs, faults, refusals ---------------------------------------------------------------------------------------------


def test_costs_are_learnt_while_recording(model: Any) -> None:
    costs = CostModel()
    made = recorder(model, ["suffix", "sam"], costs=costs)
    request = made.record(prompts()[0])
    rows = {(row["part"], row["drafter"]): row for row in costs.to_table()}
    # At the last position nothing is asked: its one token is the bonus.
    assert {key: row["count"] for key, row in rows.items()} == {
        ("draft", "suffix"): request.positions - 1,
        ("draft", "sam"): request.positions - 1,
        ("overhead", None): request.positions,
    }
    assert rows["draft", "suffix"]["nodes"] == NODES and rows["draft", "suffix"]["seconds"] > 0
    assert made.trace(fingerprint="test").costs == costs.state_dict()


def test_record_trace_measures_verification_first(model: Any) -> None:
    trace = record_trace(
        model,
        {"suffix": make_drafter("suffix")},
        prompts()[:2],
        nodes=3,
        max_new_tokens=5,
        contexts=(30, 250),
        provenance={"who": "test"},
    )
    trace.validate()
    assert [request.name for request in trace.requests] == ["0", "1"]
    assert [request.tokens.tolist() for request in trace.requests] == [
        plain(model, prompt, max_new_tokens=5) for prompt in prompts()[:2]
    ]
    costs = CostModel()
    costs.load_state_dict(trace.costs)
    sizes = {row["nodes"] for row in costs.to_table() if row["part"] == "verify"}
    assert sizes == {0, 1, 2, 3}
    assert "device=cpu" in trace.fingerprint and "dtype=float32" in trace.fingerprint
    assert trace.provenance == {"who": "test"} and trace.nodes == {"suffix": 3} and trace.max_new_tokens == 5


class Faulty(Drafter):
    """Fails at the fourth proposal of every request."""

    name = "faulty"
    isolate = False

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def prefill(self, token_ids: np.ndarray, features: Any = None) -> None:
        self.calls = 0

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        self.calls += 1
        if self.calls == 4:
            raise self.error
        return DraftTree.chain([1, 2])

    def observe(self, observation: Observation) -> None:
        """Nothing to keep."""


def test_a_faulty_drafter_declines_for_the_rest_of_the_request(model: Any) -> None:
    costs = CostModel()
    made = recorder(model, {"faulty": Faulty(RuntimeError("boom")), "suffix": make_drafter("suffix")}, costs=costs)
    request, again = made.record(prompts()[0]), made.record(prompts()[1])
    assert request.tokens.tolist() == plain(model, prompts()[0])
    for found in (request, again):
        assert found.proposals["faulty"].sizes().tolist() == [2, 2, 2] + [0] * (found.positions - 3)
    reference = recorder(model, ["suffix"]).record(prompts()[0])
    assert request.proposals["suffix"].token_ids.tolist() == reference.proposals["suffix"].token_ids.tolist()
    reason = "faulty: RuntimeError: boom"
    assert made.trace(fingerprint="test").provenance == {"set_aside": dict.fromkeys("01", {"faulty": reason})}
    counts = {row["drafter"]: row["count"] for row in costs.to_table() if row["part"] == "draft"}
    assert counts["faulty"] == 6, "the failed call says nothing about what drafting takes"


def test_an_interrupted_request_leaves_nothing_behind(model: Any) -> None:
    drafter = Faulty(KeyboardInterrupt())
    made = recorder(model, {"faulty": drafter})
    drafter.error, interrupt = RuntimeError("only a fault"), drafter.error
    made.record(prompts()[0])
    drafter.error = interrupt
    with pytest.raises(KeyboardInterrupt):
        made.record(prompts()[1])
    assert [request.name for request in made.requests] == ["0"]
    drafter.error = RuntimeError("only a fault")
    assert made.record(prompts()[1]).tokens.tolist() == plain(model, prompts()[1])


class Sampler(Faulty):
    """Says that it picks, and samples."""

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        q = np.full((1, VOCAB), 1.0 / VOCAB)
        return DraftTree.chain([1], [-4.0], siblings="iid", draft_probs=q, draft_rows=np.array([0, -1]))


def test_what_cannot_be_traced_is_refused_with_the_reason(model: Any) -> None:
    from tests import tiny_models

    with pytest.raises(ValueError, match="'lookahead' cannot be traced: it adds rows of its own to every verification"):
        recorder(model, ["lookahead"])
    draft = make_drafter("draft-model", path=tiny_models.make_llama(vocab_size=VOCAB))
    with pytest.raises(
        ValueError, match=r"'d' cannot be traced at a temperature above 0: it samples its drafts \(iid\)"
    ):
        recorder(model, {"d": draft}, temperature=0.5)
    assert recorder(model, {"d": draft}).record(prompts()[0]).proposals["d"].sizes().max() == 8
    network = make_drafter("suffix")
    network.needs = Needs(target_top_k=2, taps=(1,))  # type: ignore[misc]
    with pytest.raises(
        ValueError, match="'n' cannot be traced: it learns from verified nodes, .* and it runs a network"
    ):
        recorder(model, {"n": network})
    with pytest.raises(ValueError, match="siblings of a traced tree must be 'deterministic', got 'iid'"):
        recorder(model, {"s": Sampler(RuntimeError())}).record(prompts()[0])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"nodes": 0}, "nodes must be a whole number >= 1, got 0"),
        ({"nodes": 1025}, "nodes must be <= 1024, got 1025"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number >= 1, got 0"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"temperature": -0.5}, "temperature must be >= 0 and finite, got -0.5"),
        ({"drafters": {}}, "drafters must hold at least one drafter, got none"),
    ],
)
def test_bad_settings_are_named(model: Any, options: dict[str, Any], problem: str) -> None:
    drafters = options.pop("drafters", ["suffix"])
    with pytest.raises(ValueError, match=problem):
        recorder(model, drafters, **options)


def test_bad_prompts_are_named(model: Any) -> None:
    made = recorder(model, ["suffix"])
    made.record(prompts()[0])
    with pytest.raises(ValueError, match="names of prompts must be different, got '0' twice"):
        made.record(prompts()[0])
    with pytest.raises(ValueError, match="input_ids must not be empty"):
        made.record(TracePrompt("empty", "any", []))
    with pytest.raises(ValueError, match=r"input_ids must be in \[0, 96\), got 96"):
        made.record(TracePrompt("foreign", "any", [96]))
    assert len(made.requests) == 1
