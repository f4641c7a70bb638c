"""The search finds the sub-layers that add nothing, by agreement with the target and by seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.drafters.early_exit.skipped import SkippedLayers
from adaptspec.target.hf import HFTarget
from adaptspec.training.layer_search import (
    Agreement,
    PassSeconds,
    measure_seconds,
    search_layers,
    tokens_per_second,
)
from tests.target.families import FAMILIES, VOCAB
from tests.target.tape import TapeCapture

SECONDS = PassSeconds(rest=1.0, attention=1.0, mlp=2.0, verify_row=0.1)


def zeroed(family: str = "llama") -> Any:
    """Layer 2 adds nothing, and neither does the attention of layer 0."""
    model = FAMILIES[family]("sdpa")
    with torch.no_grad():
        for layer in (0, 2):
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.zero_()
    return model


def texts(count: int = 3) -> list[tuple[np.ndarray, int]]:
    return [((np.arange(20 + i) * (13 + 2 * i) + 5) % VOCAB, 6 + i) for i in range(count)]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_agreement_is_that_of_first_draft_tokens(family: str) -> None:
    """Against proposals, position by position; and whole where nothing of account is left out."""
    from adaptspec.drafters.model_rows import ModelRows

    model = zeroed(family)
    target = HFTarget(model)
    free, costly = SkippedLayers((0, 2), (2,)), SkippedLayers((1,), (3,))
    shares = Agreement(target, texts()).shares([SkippedLayers(), free, costly])
    assert shares[:2] == [1.0, 1.0]
    hits, count = 0, 0
    view = costly.view(target)
    for tokens, prompt in texts():
        for place in range(prompt - 1, len(tokens)):
            target.prefill(torch.from_numpy(tokens[: place + 1]))
            said = target.prefill(torch.from_numpy(tokens[: place + 1])).logits[-1].argmax()
            if place:
                target.prefill(torch.from_numpy(tokens[:place]))
                rows = ModelRows(target, root_cached=False, model=view)
                hits += int(rows.run(tokens[place : place + 1], np.array([-1]))[0].argmax() == said)
                count += 1
    assert shares[2] == pytest.approx(hits / count)
    assert shares[2] < 0.9


def test_texts_longer_than_the_memory_of_graphs() -> None:
    """Long texts are read in a target that replays graphs as in one that does not."""
    model = zeroed()
    long = [((np.arange(200) * 13 + 5) % VOCAB, 6)]
    candidates = [SkippedLayers(), SkippedLayers((1,), (1,))]
    shares = Agreement(HFTarget(model, graphs=TapeCapture()), long).shares(candidates)
    assert shares == Agreement(HFTarget(model), long).shares(candidates) and shares[0] == 1.0


def test_what_is_free_is_found() -> None:
    target = HFTarget(zeroed())
    reported: list[int] = []
    found = search_layers(
        target, texts(), seconds=SECONDS, tries=40, seed=1, report=lambda tried, best: reported.append(tried)
    )
    assert set(found.skipped.mlp) >= {2} and set(found.skipped.attention) >= {0, 2}
    assert found.agreement >= 0.9 and found.tried <= 40 and reported == sorted(set(reported))
    free = tokens_per_second(SkippedLayers((0, 2), (2,)), 1.0, seconds=SECONDS, layers=4, max_depth=8)[0]
    assert found.tokens_per_second >= free > found.autoregressive == 1.0 / 13.0
    again = search_layers(target, texts(), seconds=SECONDS, tries=40, seed=1)
    assert again == found


def test_tokens_per_second_by_hand() -> None:
    """Draft 13 - 3 = 10 seconds, verify 13 + 0.1 k: with a = 0.5 a chain of 1 gives 1.5 / 23.1."""
    speed, depth = tokens_per_second(SkippedLayers((1,), (1,)), 0.5, seconds=SECONDS, layers=4, max_depth=4)
    assert depth == 1 and speed == pytest.approx(1.5 / 23.1)
    longest = tokens_per_second(SkippedLayers((0, 1, 2, 3), (0, 1, 2)), 1.0, seconds=SECONDS, layers=4, max_depth=5)
    assert longest == (pytest.approx(6 / (5 * 3.0 + 13.5)), 5)
    assert tokens_per_second(SkippedLayers(), 0.0, seconds=SECONDS, layers=4, max_depth=2)[1] == 1
    for options, message in (
        ({"agreement": 1.5}, "agreement must be in"),
        ({"max_depth": 0}, "max_depth must be >= 1"),
    ):
        values = {"agreement": 0.5, "max_depth": 4, **options}
        with pytest.raises(ValueError, match=message):
            tokens_per_second(
                SkippedLayers(), values["agreement"], seconds=SECONDS, layers=4, max_depth=values["max_depth"]
            )


def test_seconds_are_measured() -> None:
    seconds = measure_seconds(HFTarget(FAMILIES["llama"]("sdpa")), prompt=torch.arange(12), repeats=2)
    assert seconds.draft(SkippedLayers(), 4) > 0.0
    assert seconds.verify(9, 4) >= seconds.verify(1, 4)
    with pytest.raises(ValueError, match="repeats must be >= 1"):
        measure_seconds(HFTarget(FAMILIES["llama"]("sdpa")), prompt=torch.arange(12), repeats=0)
    with pytest.raises(ValueError, match="attention must be >= 0 and finite, got -1.0"):
        PassSeconds(1.0, -1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="longer than 0 seconds"):
        PassSeconds(0.0, 0.0, 0.0, 0.0)


def test_bad_searches() -> None:
    target = HFTarget(FAMILIES["llama"]("sdpa"))
    with pytest.raises(ValueError, match="tries must be >= 1, got 0"):
        search_layers(target, texts(), seconds=SECONDS, tries=0)
    with pytest.raises(ValueError, match="texts must not be empty"):
        search_layers(target, [], seconds=SECONDS)
    with pytest.raises(ValueError, match="got 5 tokens, 5 of prompt"):
        Agreement(target, [(np.arange(5), 5)])
