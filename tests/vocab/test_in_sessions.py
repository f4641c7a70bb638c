"""Vocabularies on the way from `AdaptiveSpec` through a request to a drafter, and back into records and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec, Arm, DraftContext, Drafter, DraftTree, Observation, register_drafter
from adaptspec.calibrating import measure_samples
from adaptspec.control.cost import CostModel
from adaptspec.drafters.base import Needs
from adaptspec.drafters.registry import DRAFTERS
from adaptspec.target.hf import HFTarget
from adaptspec.tracing import TracePrompt, TraceRecorder
from adaptspec.vocab import FrequencyList, HeadData, VocabHeads, make_head
from tests.tiny_models import make_llama

NAMES = ("full", "fr:24", "microspec:30", "evospec:20+6")
PROMPT = torch.tensor([[5, 9, 11, 5, 9, 30, 2, 41, 5, 9]])


class HeadDrafter(Drafter):
    """Drafts one token with the target's own head on an embedding: often right on no model, but never wrong in form."""

    name = "head"
    isolate = False
    takes_vocab = True

    def __init__(self) -> None:
        self.heads = VocabHeads(self.vocab)
        self.seen: list[str] = []
        self.prompt_top: np.ndarray | None = None

    def use_vocab(self, names: Sequence[str]) -> None:
        super().use_vocab(names)
        self.heads = VocabHeads(names)

    def bind(self, target: Any) -> None:
        self.embedding = target.model.get_input_embeddings()
        size = target.vocab_size
        self.heads.bind(
            target.model.get_output_embeddings().weight,
            vocab_size=size,
            keep=target.special_ids(),
            data=HeadData(FrequencyList(np.arange(size), size)),
        )
        self.needs = Needs(target_top_k=self.heads.needs_top_k, prompt_top_k=self.heads.needs_prompt_top_k)

    def prefill(
        self, token_ids: np.ndarray, features: Mapping[int, Any] | None = None, top_ids: np.ndarray | None = None
    ) -> None:
        self.prompt_top = top_ids
        self.heads.prefill(token_ids, top_ids)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        self.seen.append(context.vocab)
        with torch.inference_mode():
            hidden = self.embedding(torch.tensor([context.root]))
            top = self.heads[context.vocab].top(hidden, k=min(3, budget), depth=1)
        ids = top.ids[0].numpy()
        return DraftTree(ids, np.full(len(ids), -1), top.log_probs[0].double().numpy())

    def observe(self, observation: Observation) -> None:
        self.heads.observe(observation)

    def finish(self) -> None:
        self.heads.finish()

    def state_dict(self) -> dict[str, Any]:
        return self.heads.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.heads.load_state_dict(state)


class TwoArguments(Drafter):
    """Of before there were prompts' top tokens."""

    name = "two-arguments"
    isolate = False

    def prefill(self, token_ids: np.ndarray, features: object = None) -> None:
        self.root = int(token_ids[-1])

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        assert context.vocab == "full"
        return DraftTree.chain([self.root])

    def observe(self, observation: Observation) -> None:
        self.root = int(observation.tokens[-1])


@pytest.mark.parametrize("vocab", NAMES)
def test_output_is_the_targets_with_every_vocabulary(tiny_llama: Any, vocab: str) -> None:
    drafter = HeadDrafter()
    spec = AdaptiveSpec([drafter, TwoArguments()], f"fixed:head@4/{vocab}", vocab=NAMES)
    result = spec.generate(tiny_llama, PROMPT, max_new_tokens=20)
    plain = tiny_llama.generate(PROMPT, max_new_tokens=20, do_sample=False)
    assert torch.equal(result.sequences, plain)
    assert set(drafter.seen) == {vocab} and not spec.report().faults
    assert {record.arm for record in result.trace} == {str(Arm("head", 4, vocab))}


@pytest.mark.parametrize("strategy", ["hedge", "ucb", "mixture", "draft-then-choose", "exp3"])
def test_strategies_play_every_vocabulary_in_requests(tiny_llama: Any, strategy: str) -> None:
    drafter = HeadDrafter()
    spec = AdaptiveSpec([drafter, TwoArguments()], strategy, budgets=(2, 4), vocab=NAMES, guard=None)
    assert [str(arm) for arm in spec.arms[:4]] == ["ar", "head@2", "head@4", "head@2/fr:24"]
    assert [arm.vocab for arm in spec.arms if arm.drafter == "two-arguments"] == ["full", "full"]
    plain = tiny_llama.generate(PROMPT, max_new_tokens=50, do_sample=False)
    for _ in range(2):
        assert torch.equal(spec.generate(tiny_llama, PROMPT, max_new_tokens=50).sequences, plain)
    assert set(drafter.seen) == set(NAMES) and not spec.report().faults
    asked = {line.drafter for line in spec.report().drafters}
    assert {"head", "head/fr:24", "head/microspec:30", "head/evospec:20+6"} <= asked
    drawn = {line.drafter for line in spec.report().costs.draft}
    assert {"head", "head/fr:24"} <= drawn


@pytest.mark.parametrize("chunk", [3, 512])
def test_top_tokens_of_the_prompt(tiny_llama: Any, chunk: int) -> None:
    target = HFTarget(tiny_llama, prefill_chunk=chunk)
    scored = target.prefill(PROMPT[0], top_k=3)
    with torch.inference_mode():
        logits = tiny_llama(PROMPT).logits[0]
    assert scored.top_ids.tolist() == logits.topk(3).indices.tolist()
    torch.testing.assert_close(scored.logits, logits[-1:], atol=1e-5, rtol=1e-5)
    assert target.prefill(PROMPT[0]).top_ids is None


def test_prompt_logits_are_computed_only_where_wanted(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    prefill = HFTarget.prefill

    def spy(self: HFTarget, token_ids: torch.Tensor, *, top_k: int = 0) -> Any:
        asked.append(top_k)
        return prefill(self, token_ids, top_k=top_k)

    monkeypatch.setattr(HFTarget, "prefill", spy)
    for vocab, expected in (("fr:24", 0), ("microspec:30", 3)):
        drafter = HeadDrafter()
        AdaptiveSpec([drafter], f"fixed:head@2/{vocab}", vocab=[vocab]).generate(tiny_llama, PROMPT, max_new_tokens=4)
        assert asked[-1] == expected
        assert (drafter.prompt_top is None) == (expected == 0)
    assert drafter.prompt_top.shape == (PROMPT.shape[1], 3)


def test_bad_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown vocab 'ful'; did you mean 'full'"):
        AdaptiveSpec([HeadDrafter()], vocab=["ful"])
    with pytest.raises(ValueError, match="number of rows >= 1"):
        AdaptiveSpec([HeadDrafter()], vocab=["fr:0"])
    with pytest.raises(ValueError, match="list of one or more names"):
        AdaptiveSpec([HeadDrafter()], vocab="full")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no drafter of the pool has a head of its own"):
        AdaptiveSpec(["suffix"], vocab=["fr:24"])
    with pytest.raises(ValueError, match="vocab of drafter 'suffix' must be 'full'"):
        AdaptiveSpec(["suffix", HeadDrafter()], "fixed:suffix@4/fr:24", vocab=["fr:24"])
    with pytest.raises(ValueError, match="unknown vocab 'frr'"):
        AdaptiveSpec([HeadDrafter()], "fixed:head@4/frr:24")
    with pytest.raises(ValueError, match="different names"):
        TwoArguments().use_vocab(["full", "full"])


def test_arms_given_whole_and_fixed_ones_bring_their_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "head", HeadDrafter)
    spec = AdaptiveSpec(["head@4/fr:24", "suffix@8"])
    assert spec.drafters["head"].vocab == ("fr:24",) and spec.drafters["suffix"].vocab == ("full",)
    assert [str(arm) for arm in spec.arms] == ["ar", "head@4/fr:24", "suffix@8"]
    spec = AdaptiveSpec(["head"], "fixed:head@4/microspec", vocab=["fr:24"])
    assert spec.drafters["head"].vocab == ("fr:24", "microspec")


def test_a_drafter_of_two_objects_is_told_again(tiny_llama: Any) -> None:
    drafter = HeadDrafter()
    one = AdaptiveSpec([drafter], "fixed:head@2/fr:24", vocab=["fr:24"])
    two = AdaptiveSpec([drafter], "fixed:head@2/full", vocab=["full"])
    for spec, vocab in ((one, "fr:24"), (two, "full"), (one, "fr:24")):
        spec.generate(tiny_llama, PROMPT, max_new_tokens=6)
        assert drafter.seen[-1] == vocab and not spec.report().faults


def test_what_heads_learnt_is_saved(tiny_llama: Any, tmp_path: Path) -> None:
    spec = AdaptiveSpec([HeadDrafter()], "fixed:head@2/evospec:20+6", vocab=["evospec:20+6"])
    spec.generate(tiny_llama, PROMPT, max_new_tokens=30)
    before = spec.drafters["head"].heads["evospec:20+6"].dynamic_tokens()
    spec.save(tmp_path / "state")
    loaded = AdaptiveSpec.load(tmp_path / "state", pool=[HeadDrafter()])
    loaded.engine.target(tiny_llama, None)
    assert loaded.drafters["head"].heads["evospec:20+6"].dynamic_tokens().tolist() == before.tolist()
    assert before.tolist() != list(range(20, 26))


def test_calibration_measures_every_vocabulary(tiny_llama: Any) -> None:
    drafter = HeadDrafter()
    drafter.use_vocab(["full", "fr:24"])
    samples = measure_samples(HFTarget(tiny_llama), {"head": drafter}, sizes=(0, 2), contexts=(32,), repeats=2)
    assert {arm for _, arm in samples.draft} == {Arm("head", 2), Arm("head", 2, "fr:24")}
    assert all(len(seconds) == 2 for seconds in samples.draft.values())
    assert drafter.seen[:4] in (["full", "fr:24", "fr:24", "full"], ["fr:24", "full", "full", "fr:24"])
    costs = samples.teach(CostModel())
    for vocab in ("full", "fr:24"):
        assert costs.known(Arm("head", 2, vocab), context=32)
    assert {row["vocab"] for row in samples.summary()["draft"]} == {"full", "fr:24"}


def test_traces_hold_every_vocabulary(tiny_llama: Any) -> None:
    drafter = HeadDrafter()
    drafter.use_vocab(["full", "fr:24"])
    costs = CostModel()
    costs.observe_verify(0, 0.01)
    recorder = TraceRecorder(tiny_llama, {"head": drafter}, nodes=2, max_new_tokens=6, costs=costs)
    request = recorder.record(TracePrompt("a", "chat", PROMPT[0].tolist()))
    assert set(request.proposals) == {"head", "head/fr:24"}
    assert recorder.trace(fingerprint="here").nodes == {"head": 2, "head/fr:24": 2}
    assert set(drafter.seen) == {"full", "fr:24"}


class TappingHeadDrafter(HeadDrafter):
    """Runs a network on the target's hidden states, and says what it needs only once it is bound."""

    def bind(self, target: Any) -> None:
        super().bind(target)
        self.needs = Needs(self.needs.target_top_k, (1,), prompt_top_k=self.needs.prompt_top_k)


def test_heads_that_learn_from_verified_nodes_cannot_be_traced(tiny_llama: Any) -> None:
    drafter = TappingHeadDrafter()
    drafter.use_vocab(["microspec"])
    costs = CostModel()
    costs.observe_verify(0, 0.01)
    with pytest.raises(ValueError, match="learns from verified nodes"):
        TraceRecorder(tiny_llama, {"head": drafter}, nodes=2, max_new_tokens=6, costs=costs)


def test_special_tokens_of_a_target(tiny_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert HFTarget(model).special_ids() == (1, 2)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert HFTarget(model, tokenizer=tokenizer).special_ids() == (0, 1, 2)
    model.generation_config.eos_token_id = [2, 40]
    assert HFTarget(model).special_ids() == (1, 2, 40)


def test_heads_on_tied_weights_leave_the_target_alone() -> None:
    model = make_llama()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    before = model.get_input_embeddings().weight.detach().clone()
    spec = AdaptiveSpec([HeadDrafter()], "hedge", budgets=(2,), vocab=[*NAMES, "evospec:20+6+align"], guard=None)
    for _ in range(2):
        spec.generate(model, PROMPT, max_new_tokens=40)
    assert torch.equal(model.get_input_embeddings().weight, before)


def test_registration_of_an_own_drafter() -> None:
    register_drafter("own-head-for-a-test")(type("Own", (HeadDrafter,), {}))
    try:
        spec = AdaptiveSpec(["own-head-for-a-test"], vocab=["full", "fr:24"])
        assert {arm.vocab for arm in spec.arms} == {"full", "fr:24"}
        assert make_head("fr:24").name == "fr:24"
    finally:
        del DRAFTERS["own-head-for-a-test"]
