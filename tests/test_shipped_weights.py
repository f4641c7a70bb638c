"""The weights that come along: complete, small, described, and lossless on the model they are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaptspec import AdaptiveSpec
from adaptspec.cli.pool import weights_for
from adaptspec.drafters import DRAFTERS, make_drafter
from adaptspec.pretrained import __main__ as table
from adaptspec.pretrained import load_weights, read_card, shipped_folder, shipped_names
from adaptspec.results import GenerationResult
from adaptspec.target.hf import HFTarget
from adaptspec.vocab.counts import shipped_frequencies, shipped_sizes

DOCS = Path(__file__).parent.parent / "docs"
SHIPPED = (
    *("cats", "confu", "coral", "dflash", "draft-model", "dynaspec", "eagle1", "eagle3", "eagle3-lk", "griffin"),
    *("hydra", "kangaroo", "medusa", "mtp1", "mtp1-lk", "mtp3", "taps", "treeflash"),
)
RULES = ("griffin-gs", "griffin-ltd")
TRAINED = tuple(sorted(name for name, cls in DRAFTERS.items() if cls.weights in SHIPPED + RULES))
PROMPTS = ("List three fruits and a colour for each.", "def area(width, height):")
VOCABULARIES = ("fr:16384", "trim:8192", "evospec:8192+256", "microspec", "coral", "dynaspec")


def test_which_weights_come_along() -> None:
    assert shipped_names() == SHIPPED
    assert shipped_sizes() == [49152]


@pytest.mark.parametrize("name", SHIPPED)
def test_weights_are_whole_small_and_described(name: str) -> None:
    folder = shipped_folder(name)
    assert folder is not None and sorted(path.name for path in folder.iterdir()) == ["card.json", "weights.safetensors"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 7e6
    state, card = load_weights(folder)
    assert state and card["answers"]["origin"]["model"] == "embedded" and card["answers"]["tokens"] > 100_000
    assert card["command"][:2] == ["adaptspec", "train"]
    assert not [word for word in card["command"] if word.startswith("/")]
    assert len(json.dumps(read_card(folder))) < 50_000


def test_all_of_them_together_are_small() -> None:
    package = Path(table.__file__).parent
    assert sum(path.stat().st_size for path in package.rglob("*") if path.suffix in (".safetensors", ".json")) <= 40e6


def test_the_docs_show_the_cards_as_they_are() -> None:
    assert table.markdown() in (DOCS / "weights.md").read_text(encoding="utf-8")


def test_every_drafter_plays_on_the_embedded_model() -> None:
    for name, cls in DRAFTERS.items():
        assert not cls.weights or weights_for(cls.weights) == ["embedded"], name


def test_frequency_lists_fit_the_model() -> None:
    for kind in ("text", "target"):
        assert len(shipped_frequencies(kind, 49152).token_ids) == 49152


@pytest.fixture(scope="module")
def alone(embedded_model: tuple[Any, Any]) -> dict[str, list[int]]:
    """What the target says to each prompt without speculation."""
    plain = AdaptiveSpec(strategy="fixed:ar")
    return {prompt: _generate(embedded_model, plain, prompt).sequences[0].tolist() for prompt in PROMPTS}


def _generate(embedded_model: tuple[Any, Any], spec: AdaptiveSpec, prompt: str) -> GenerationResult:
    model, tokenizer = embedded_model
    result = spec.generate(model, tokenizer(prompt, return_tensors="pt").input_ids, max_new_tokens=20)
    assert not [step.fault for step in result.trace if step.fault]
    return result


@pytest.mark.parametrize("name", TRAINED)
def test_greedy_output_is_the_target_s(embedded_model: tuple[Any, Any], alone: dict[str, list[int]], name: str) -> None:
    spec = AdaptiveSpec([name], strategy=f"fixed:{name}@16", budgets=(16,))
    results = {prompt: _generate(embedded_model, spec, prompt) for prompt in PROMPTS}
    assert {prompt: result.sequences[0].tolist() for prompt, result in results.items()} == alone
    assert max(result.stats.acceptance_rate for result in results.values()) > 0.0  # it was trained on this model


@pytest.mark.parametrize("name", TRAINED)
def test_another_target_is_told_how_to_get_weights(tiny_llama: Any, name: str) -> None:
    said = (
        "not trained for this target: .*; make one" if name in RULES else "no weights for this target: .*; train some"
    )
    with pytest.raises(ValueError, match=f"{said} with `adaptspec train"):
        make_drafter(name).bind(HFTarget(tiny_llama))


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_greedy_output_with_a_reduced_vocabulary_is_the_target_s(
    embedded_model: tuple[Any, Any], alone: dict[str, list[int]], vocab: str
) -> None:
    spec = AdaptiveSpec(["eagle3"], strategy=f"fixed:eagle3@8/{vocab}", budgets=(8,), vocab=(vocab,))
    found = {prompt: _generate(embedded_model, spec, prompt).sequences[0].tolist() for prompt in PROMPTS}
    assert found == alone
