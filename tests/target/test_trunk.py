"""Verify passes that go on from rows which went through the first layers equal whole ones, and run nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.drafters import make_drafter
from adaptspec.target import trunk as trunks
from adaptspec.target.hf import HFTarget, feature_rows
from adaptspec.target.trunk import Trunk
from adaptspec.types import DraftTree, ExtraRows
from tests.drafters.exit_cases import tiny_adapters
from tests.lossless.test_greedy import prompt, reference
from tests.target.families import EAGER_ONLY, FAMILIES, VOCAB

TOLERANCE = 2e-5
"""Largest difference, relative to the largest number, of two float32 passes of different shapes."""
TREE = DraftTree(np.array([5, 6, 7, 8, 9, 10, 11]), np.array([-1, -1, 0, 1, 1, 3, 2]), np.zeros(7))
EXTRA = ExtraRows(np.array([20, 21]), np.array([1, 2]), np.array([[1, 0], [1, 1]], dtype=bool))
ROOT = 17


def text(length: int) -> torch.Tensor:
    return (torch.arange(length) * 29 + 7) % VOCAB


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max().clamp_min(1.0))


def grow(target: HFTarget) -> Trunk:
    """Four rows: the root and a child after 3 layers, a grandchild after 1, and one that no tree holds."""
    trunk = target.trunk()
    trunk.run(np.array([ROOT]), np.array([-1]), layers=1)
    trunk.run(np.array([6]), np.array([0]), layers=1)
    trunk.deepen(2, layers=3)
    trunk.run(np.array([50, 8]), np.array([0, 1]), layers=1)
    return trunk


def worst(model: Any, *, length: int, extra: ExtraRows | None = None) -> float:
    """Difference of resumed and whole passes: logits, taps, and the logits after the next commit."""
    pair = HFTarget(model), HFTarget(model)
    for target in pair:
        target.tap((1, 2, 4))
        target.prefill(text(length))
    grow(pair[1])
    whole, resumed = (target.score(ROOT, TREE, extra) for target in pair)
    path = np.array([1, 3, 5])
    found = [difference(resumed.logits, whole.logits)]
    for tap, states in feature_rows(whole.features, path).items():
        found.append(difference(feature_rows(resumed.features, path)[tap], states))
    if extra is not None:
        found.append(difference(resumed.extra_logits, whole.extra_logits))
    for target in pair:
        target.commit(path)
    following = [target.score(40, TREE).logits for target in pair]
    return max(*found, difference(following[1], following[0]))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_resumed_pass_equals_a_whole_one(family: str) -> None:
    model = FAMILIES[family]("eager" if family in EAGER_ONLY else "sdpa")
    assert worst(model, length=21) < TOLERANCE


def test_extra_rows_and_short_prefixes() -> None:
    assert worst(FAMILIES["llama"]("eager"), length=3, extra=EXTRA) < TOLERANCE
    assert worst(FAMILIES["gemma3"]("sdpa"), length=4, extra=EXTRA) < TOLERANCE


def test_drafts_longer_than_a_window() -> None:
    """Rows of the trunk beyond a sliding window are hidden from rows that come later."""
    model = FAMILIES["mistral-window"]("sdpa")  # of 8 tokens
    chain = DraftTree.chain((np.arange(12) * 7 + 1) % VOCAB)
    pair = HFTarget(model), HFTarget(model)
    for target in pair:
        target.prefill(text(5))
    trunk = pair[1].trunk()
    for row, token in enumerate([ROOT, *chain.token_ids[:9].tolist()]):
        trunk.run(np.array([token]), np.array([row - 1]), layers=2)
    whole, resumed = (target.score(ROOT, chain).logits for target in pair)
    assert difference(resumed, whole) < TOLERANCE


def test_growing_and_deepening_give_the_hidden_states_after_so_many_layers() -> None:
    model = FAMILIES["qwen3"]("sdpa")
    target = HFTarget(model)
    target.prefill(text(6))
    trunk = target.trunk()
    early = [trunk.run(np.array([t]), np.array([i - 1]), layers=1) for i, t in enumerate((ROOT, 6, 8))]
    middle = trunk.deepen(3, layers=3)
    ids = torch.cat([text(6), torch.tensor([ROOT, 6, 8])])[None]
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    assert difference(torch.cat(early), states[1][0, 6:]) < TOLERANCE
    assert difference(middle, states[3][0, 6:]) < TOLERANCE
    assert len(trunk) == 3


@pytest.mark.parametrize(
    "write",
    [
        lambda target: target.run_rows(np.array([3]), np.zeros(1, np.int64), np.ones((1, 1), dtype=bool)),
        lambda target: target.rollback(target.length),
        lambda target: target.trunk(),
    ],
)
def test_a_trunk_lasts_until_something_else_is_written(write: Callable[[HFTarget], Any]) -> None:
    target = HFTarget(FAMILIES["llama"]("sdpa"))
    target.prefill(text(9))
    expected = target.score(ROOT, TREE).logits
    target.rollback(9)
    grow(target)
    write(target)
    target.rollback(9)
    assert torch.equal(target.score(ROOT, TREE).logits, expected)


def test_another_root_is_a_whole_pass() -> None:
    target = HFTarget(FAMILIES["llama"]("sdpa"))
    target.prefill(text(9))
    expected = target.score(3, TREE).logits
    target.rollback(9)
    grow(target)
    assert torch.equal(target.score(3, TREE).logits, expected)


def unplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trunk, "_place", lambda self, layer, rows: None)


def misread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trunk, "_known", lambda self, ids, parents: np.minimum(np.arange(len(ids)), 1))


def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = HFTarget._masks
    monkeypatch.setattr(HFTarget, "_masks", lambda self, d, v, columns, **o: masks(self, d, v, d, **o))


@pytest.mark.parametrize("fault", [unplaced, misread])
def test_faults_are_noticed(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert worst(FAMILIES["llama"]("sdpa"), length=9) > 1e-2


def test_a_window_that_knows_no_earlier_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    untold(monkeypatch)
    with pytest.raises(AssertionError):
        test_drafts_longer_than_a_window()


def test_an_unknown_family_is_tried_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    good = FAMILIES["llama"]("sdpa")
    good.config.model_type = "never-heard-of"
    assert trunks.resumable(HFTarget(good))
    assert worst(good, length=9) < TOLERANCE

    bad = FAMILIES["llama"]("sdpa")
    bad.config.model_type = "never-heard-of"
    entering = trunks._entering
    monkeypatch.setattr(trunks, "_entering", lambda layer, hidden: entering(layer, None))
    target = HFTarget(bad)
    assert not trunks.resumable(target)
    target.prefill(text(9))
    expected = target.score(ROOT, TREE).logits
    target.rollback(9)
    grow(target)
    assert torch.equal(target.score(ROOT, TREE).logits, expected)


def test_misuse_names_the_value() -> None:
    target = HFTarget(FAMILIES["llama"]("sdpa"))
    with pytest.raises(RuntimeError, match="call prefill first"):
        target.trunk()
    target.prefill(text(4))
    trunk = target.trunk()
    root = np.array([ROOT])
    with pytest.raises(ValueError, match=r"layers must be in \[1, 3\], got 4"):
        trunk.run(root, np.array([-1]), layers=4)
    with pytest.raises(ValueError, match="or -1 for the root, got"):
        trunk.run(root, np.array([0]), layers=2)
    trunk.run(root, np.array([-1]), layers=2)
    with pytest.raises(ValueError, match=r"layers must be in \[1, 2\], got 3"):
        trunk.run(np.array([5]), np.array([0]), layers=3)
    with pytest.raises(ValueError, match=r"parents must be rows in \[0, 1\), or -1 for the root, got \[1\]"):
        trunk.run(np.array([5]), np.array([1]), layers=1)
    with pytest.raises(ValueError, match=r"rows must be the first ones of one level, in \[1, 1\], got 2"):
        trunk.deepen(2, layers=3)
    with pytest.raises(ValueError, match=r"layers must be in \[3, 3\], got 2"):
        trunk.deepen(1, layers=2)


DRAFTERS: dict[str, Callable[[], Any]] = {
    "kangaroo": lambda: make_drafter("kangaroo", path=tiny_adapters("kangaroo"), min_confidence=0.0),
    "cats": lambda: make_drafter("cats", path=tiny_adapters("cats"), branching=3),
    "cats-chain": lambda: make_drafter("cats-chain", path=tiny_adapters("cats")),
    "layer-skip": lambda: make_drafter("layer-skip", exit=2, min_confidence=0.0),
}


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_no_row_goes_through_a_layer_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"]("sdpa")
    counts = np.zeros(4, dtype=int)
    left_out = np.zeros(4, dtype=int)  # rows of trunks that the verified tree does not hold
    find = Trunk._known

    def known(self: Trunk, ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        found = find(self, ids, parents)
        left_out[:] += (np.delete(self._levels, np.unique(found[found >= 0]))[:, None] > np.arange(4)).sum(axis=0)
        return found

    def count(layer: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            counts[layer] += args[0].shape[1]

        return hook

    expected = reference(model, prompt(), max_new_tokens=16)
    monkeypatch.setattr(Trunk, "_known", known)
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(count(number))
    spec = AdaptiveSpec([DRAFTERS[name]()], f"fixed:{name}@24")
    result = spec.generate(model, prompt(), max_new_tokens=16)
    assert torch.equal(result.sequences, expected) and result.stats.set_aside == {}
    assert sum(record.drafted for record in result.trace) > 20
    rows = prompt().shape[1] + sum(1 + record.verified for record in result.trace if record.arm != "prefill")
    assert counts.tolist() == (rows + left_out).tolist()
    assert not left_out.any() or (name.startswith("cats") and not left_out[3] and left_out[0] < rows)
