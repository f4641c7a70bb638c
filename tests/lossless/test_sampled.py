"""Sampled output: the target's own tokens for drafts that are not sampled, its exact law for those that are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from adaptspec import AdaptiveSpec
from adaptspec.drafters import make_drafter
from adaptspec.drafters.draft_model import DraftModel
from tests import tiny_models
from tests.contracts.cases import names
from tests.drafters.cell_cases import tiny_cell
from tests.lossless.test_greedy import drafter_for, prompt
from tests.target.families import FAMILIES

SMALL_VOCAB = 6


@pytest.fixture(scope="module")
def model() -> Any:
    return FAMILIES["llama"]("sdpa")


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}])
@pytest.mark.parametrize("name", names(alike=False))
def test_a_seed_gives_the_same_tokens_whatever_the_draft(name: str, options: dict[str, Any], model: Any) -> None:
    """The target walk uses one uniform per emitted token."""
    drafter = drafter_for(name)
    if name == "draft-model":  # its trees are deterministic, its chains are sampled
        drafter = DraftModel(FAMILIES["llama"]("eager"), branching=2)
    if name == "eagle1":
        drafter = make_drafter(name, path=tiny_cell("eagle1"), siblings="deterministic")
    outputs = []
    for arm in ("ar", f"{drafter.name}@8"):
        spec = AdaptiveSpec([drafter], f"fixed:{arm}", seed=5)
        outputs.append([spec.generate(model, prompt(n), max_new_tokens=25, **options).sequences for n in (20, 23)])
    for alone, drafted in zip(*outputs, strict=True):
        assert torch.equal(alone, drafted)


def test_seeds_differ_and_repeat(model: Any) -> None:
    def run(seed: int) -> torch.Tensor:
        return (
            AdaptiveSpec(["suffix"], seed=seed).generate(model, prompt(), max_new_tokens=25, temperature=1.5).sequences
        )

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_torch_seed_rules_the_transformers_way(model: Any) -> None:
    spec = AdaptiveSpec(["suffix"], "fixed:suffix@8")

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.generate(
            prompt(),
            attention_mask=torch.ones_like(prompt()),
            do_sample=True,
            temperature=1.5,
            max_new_tokens=25,
            custom_generate=spec,
        )

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


@pytest.fixture(scope="module")
def small_pair() -> tuple[Any, Any]:
    """A target and a draft model over six tokens, alike but not equal."""
    target = tiny_models.make_llama(vocab_size=SMALL_VOCAB, layers=2, seed=0)
    draft = tiny_models.make_llama(vocab_size=SMALL_VOCAB, layers=2, seed=0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        for parameter in target.parameters():
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
        for parameter, other in zip(draft.parameters(), target.parameters(), strict=True):
            parameter.copy_(other + 0.2 * other.std() * torch.randn_like(other) if other.dim() > 1 else other)
    return target, draft


def exact_law(
    model: Any, input_ids: torch.Tensor, *, length: int, temperature: float, top_k: int
) -> dict[tuple[int, ...], float]:
    """The target's joint law of the next `length` tokens, by running every continuation."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown = {}
        for tokens, weight in law.items():
            with torch.no_grad():
                ids = torch.cat([input_ids, torch.tensor([tokens], dtype=torch.long).reshape(1, -1)], dim=1)
                scores = model(ids).logits[0, -1].double() / temperature
            if top_k:
                scores[scores < scores.topk(top_k).values[-1]] = -torch.inf
            for token, probability in enumerate(torch.softmax(scores, -1).tolist()):
                if probability > 0:
                    grown[(*tokens, token)] = weight * probability
        law = grown
    return law


SAMPLED_CASES = [
    ("auto", 1.0, 0),
    ("auto", 0.6, 4),
    ("token-wise", 1.0, 0),
    ("traversal", 1.0, 0),
]
RUNS = 500


@pytest.mark.parametrize(("verifier", "temperature", "top_k"), SAMPLED_CASES)
def test_sampled_drafts_keep_the_joint_law(
    verifier: str, temperature: float, top_k: int, small_pair: tuple[Any, Any]
) -> None:
    """G-test on the joint of three tokens over whole sessions with a sampling draft model."""
    target, draft = small_pair
    input_ids = torch.tensor([[1, 4, 2, 5]])
    spec = AdaptiveSpec([DraftModel(draft, max_depth=3)], "fixed:draft-model@3", seed=11, verifier=verifier)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(RUNS):
        result = spec.generate(
            target, input_ids, max_new_tokens=4, temperature=temperature, top_k=top_k, eos_token_id=SMALL_VOCAB + 50
        )
        counts[tuple(result.sequences[0, 4:7].tolist())] += 1
        accepted += sum(record.accepted for record in result.trace)
    assert accepted > RUNS // 2, "the draft is never accepted, so nothing is tested"
    law = exact_law(target, input_ids, length=3, temperature=temperature, top_k=top_k)
    assert set(counts) <= set(law)
    assert p_value(counts, law, RUNS) > 0.001 / len(SAMPLED_CASES)


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float], runs: int) -> float:
    """Of the G-test, rare outcomes pooled."""
    common = [outcome for outcome, probability in law.items() if probability * runs >= 5]
    expected = [law[outcome] * runs for outcome in common]
    observed = [counts[outcome] for outcome in common]
    if runs - sum(expected) > 1e-6:
        expected.append(runs - sum(expected))
        observed.append(runs - sum(observed))
    return float(stats.power_divergence(observed, expected, lambda_="log-likelihood").pvalue)


def test_the_test_notices_another_law(small_pair: tuple[Any, Any]) -> None:
    """Samples of the draft model itself fail the test that the sessions pass."""
    target, draft = small_pair
    input_ids = torch.tensor([[1, 4, 2, 5]])
    law = exact_law(target, input_ids, length=3, temperature=1.0, top_k=0)
    other = exact_law(draft, input_ids, length=3, temperature=1.0, top_k=0)
    rng = np.random.default_rng(0)
    outcomes = list(other)
    drawn = rng.choice(len(outcomes), size=RUNS, p=np.array(list(other.values())) / sum(other.values()))
    assert p_value(Counter(outcomes[i] for i in drawn), law, RUNS) < 0.001 / len(SAMPLED_CASES)


def test_typical_is_named_lossy(small_pair: tuple[Any, Any]) -> None:
    target, draft = small_pair
    spec = AdaptiveSpec([DraftModel(draft, max_depth=3)], "fixed:draft-model@3", verifier="typical")
    result = spec.generate(target, torch.tensor([[1, 4, 2, 5]]), max_new_tokens=8, temperature=1.0)
    assert result.stats.lossless is False
