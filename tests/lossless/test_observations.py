"""What the session tells drafters equals what plain forwards of the committed text say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.drafters import Drafter, Needs
from adaptspec.types import DraftContext, DraftTree, ExtraRows, Observation
from tests.lossless.test_greedy import prompt, reference
from tests.target.families import FAMILIES, VOCAB


class Recorder(Drafter):
    """Proposes the true continuation among wrong siblings, asks for everything, and notes what it is told."""

    name = "recorder"
    isolate = False
    needs = Needs(target_top_k=3, taps=(1, 4), extra_rows=True)

    def __init__(self, truth: list[int]) -> None:
        self.truth = truth
        self.committed: list[int] = []
        self.start = 0
        self.contexts: list[DraftContext] = []
        self.observations: list[tuple[int, Observation]] = []

    def prefill(self, token_ids: np.ndarray, features: Any = None) -> None:
        self.committed = token_ids.tolist()
        self.start = len(token_ids) - 1
        self.features = features

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        self.contexts.append(context)
        done = len(self.committed) - self.start
        path = self.truth[done : done + min(3, context.max_depth)]
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in path:
            tokens += [(token + 1) % VOCAB, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.zeros(len(tokens)))

    def extra_rows(self, context: DraftContext, budget: int) -> ExtraRows:
        return ExtraRows(np.array([7, 9]), np.array([1, 2]), np.array([[True, False], [True, True]]))

    def observe(self, observation: Observation) -> None:
        self.observations.append((len(self.committed), observation))
        self.committed += observation.tokens.tolist()


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("cut", [False, True])
def test_every_field_is_right(padding: int, cut: bool) -> None:
    model = FAMILIES["llama"]("sdpa")
    input_ids = prompt()
    truth = reference(model, input_ids, max_new_tokens=20, eos_token_id=None)[0, input_ids.shape[1] :].tolist()
    eos = VOCAB + 1
    if cut:
        eos = next(token for place, token in enumerate(truth) if place % 4 == 2 and token not in truth[:place])
    recorder = Recorder(truth)
    spec = AdaptiveSpec([recorder], "fixed:recorder@6")
    padded = torch.cat([torch.zeros((1, padding), dtype=torch.long), input_ids], dim=1)
    mask = torch.cat([torch.zeros((1, padding), dtype=torch.long), torch.ones_like(input_ids)], dim=1)
    model.generate(
        padded,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=20,
        eos_token_id=eos,
        pad_token_id=0,
        custom_generate=spec,
    )
    result = spec.last_result
    assert result is not None
    assert result.stats.set_aside == {}
    assert result.finish_reason == ("eos" if cut else "length")
    whole = input_ids[0].tolist() + truth
    length = len(recorder.committed)
    assert recorder.committed == whole[:length]
    with torch.no_grad():
        output = model(torch.tensor([whole]), output_hidden_states=True)
    for tap in (1, 4):
        expected = output.hidden_states[tap][0, : input_ids.shape[1]] if tap < 4 else None
        if expected is not None:
            assert torch.allclose(recorder.features[tap], expected, atol=1e-3)
    for (position, observation), context, record in zip(
        recorder.observations, recorder.contexts, result.trace, strict=False
    ):
        assert record.position == position + padding
        assert context.root == whole[position - 1]
        assert context.length == position
        assert context.max_depth == 20 - (position - input_ids.shape[1]) - 1
        path = observation.verdict.path
        assert len(observation.verdict.token_ids) == len(observation.tokens)
        assert len(path) <= len(observation.tokens)
        rows = np.concatenate([[0], path + 1])
        assert observation.target_top_ids is not None
        assert observation.target_top_ids.shape == (len(observation.tree) + 1, 3)
        for offset, row in enumerate(rows.tolist()):
            best = output.logits[0, position - 1 + offset].topk(3).indices.tolist()
            assert observation.target_top_ids[row].tolist() == best
            assert torch.allclose(
                observation.features[1][offset], output.hidden_states[1][0, position - 1 + offset], atol=1e-3
            )
        with torch.no_grad():
            beside = model(torch.tensor([[*whole[:position], 7, 9]])).logits[0, -2:].argmax(-1).tolist()
        if observation.extra_argmax is not None:
            assert observation.extra_argmax.tolist() == beside
    assert any(observation.extra_argmax is not None for _, observation in recorder.observations)
    assert result.stats.mean_accepted_length > 2.5
