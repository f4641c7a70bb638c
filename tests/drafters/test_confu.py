"""ConFu: added rows leave ordinary ones alone, are what they should be, and count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.control.controller import FixedController, StepOutcome
from adaptspec.control.cost import CostModel
from adaptspec.drafters import make_drafter
from adaptspec.drafters.cell_weights import CellWeights
from adaptspec.drafters.cells import Cell, make_cell
from adaptspec.target import hf
from adaptspec.target.hf import HFTarget
from adaptspec.types import DraftTree, PairedRows
from tests import tiny_models
from tests.drafters.cell_cases import Request, same_proposal, tiny_config, tiny_confu_cell, tiny_llama
from tests.lossless.test_greedy import reference

PROMPT = [11, 3, 50, 7, 7, 29, 40, 3]
TREE = DraftTree(np.array([5, 6, 7, 8, 9, 10]), np.array([-1, -1, 0, 1, 2, 2]), np.zeros(6))
PROMPTS = 3


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def cell() -> Cell:
    return tiny_confu_cell()


def rows_of(model: Any, cell: Any, *, scale: float = 1.0) -> PairedRows:
    def vectors(tokens: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            return scale * cell.contemplate(model.get_input_embeddings()(torch.from_numpy(tokens)))

    return PairedRows(scale * cell.soft_prompts.weight.detach(), vectors, 4)


def opened(model: Any) -> HFTarget:
    target = HFTarget(model)
    target.tap((2, 4))
    target.prefill(torch.tensor(PROMPT[:-1]))
    return target


def by_hand(model: Any, cell: Any, tokens: list[int]) -> torch.Tensor:
    """The future token behind a text: one plain forward of soft prompts, text and contemplate token, and a mask."""
    rows = rows_of(model, cell)
    embeddings = model.get_input_embeddings()(torch.tensor(tokens))
    inputs = torch.cat([rows.prompts, embeddings, rows.embed(np.array(tokens[-1:]))])[None]
    positions = torch.cat([torch.arange(PROMPTS), torch.arange(len(tokens) + 1)])[None]
    visible = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool).tril()
    visible[PROMPTS:-1, :PROMPTS] = False
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    kept: list[torch.Tensor] = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda module, args, output: kept.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        model(inputs_embeds=inputs, position_ids=positions, attention_mask=mask, use_cache=False)
    handle.remove()
    return kept[0].reshape(-1, 32)[-1]


@torch.no_grad()
def test_paired_rows_are_what_a_plain_forward_gives(model: Any, cell: Any) -> None:
    target = opened(model)
    found = target.score(PROMPT[-1], TREE, rows_of(model, cell)).paired
    assert found is not None and found.shape == (7, 32)
    for node, path in ((-1, []), (1, [6]), (4, [5, 7, 9]), (5, [5, 7, 10])):
        assert torch.allclose(found[node + 1], by_hand(model, cell, [*PROMPT, *path]), atol=1e-4)
    target.commit(np.array([0, 2, 5]))
    assert torch.allclose(target.paired(10, rows_of(model, cell)), found[6], atol=1e-4)
    with pytest.raises(ValueError, match=r"tap of paired rows must be one of \[2, 4\], which are tapped, got 3"):
        target.paired(10, PairedRows(cell.soft_prompts.weight, rows_of(model, cell).embed, 3))


def play_and_keep(model: Any, drafter: Any) -> list[torch.Tensor]:
    """All that three steps of verification computed; the drafter is asked before each of them."""
    request = Request(model, drafter, PROMPT)
    kept = []
    for bonus in (4, 60, 9):
        asked = request.ask(12)
        assert len(asked) == 12
        scored = request.target.score(request.tokens[-1], TREE)
        kept += [scored.logits.clone(), *(scored.features[tap].clone() for tap in (1, 2, 4))]
        request.target.rollback(request.target.length)
        request.commit(TREE, [0, 2, 5], bonus)
    return kept


def test_verification_is_bit_for_bit_the_same_with_and_without_contemplate_rows(model: Any, cell: Any) -> None:
    drafter = make_drafter("confu", path=cell)
    passes: list[int] = []
    plain_paired = HFTarget.paired

    def counted(self: HFTarget, token: int, rows: PairedRows) -> torch.Tensor:
        passes.append(token)
        return plain_paired(self, token, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFTarget, "paired", counted)
        with_rows = play_and_keep(model, drafter)
        assert passes == [40, 10, 10]
        patch.setattr(HFTarget, "paired", lambda self, token, rows: torch.zeros(32))
        without_rows = play_and_keep(model, make_drafter("confu", path=cell))
    assert all(torch.equal(a, b) for a, b in zip(with_rows, without_rows, strict=True))


def logits_beside(model: Any, cell: Any, scale: float) -> torch.Tensor:
    return opened(model).score(PROMPT[-1], TREE, rows_of(model, cell, scale=scale)).logits.clone()


def test_in_one_pass_ordinary_rows_do_not_depend_on_the_added_ones(model: Any, cell: Any) -> None:
    beside = logits_beside(model, cell, 1.0)
    assert torch.equal(beside, logits_beside(model, cell, -30.0))
    assert torch.allclose(beside, opened(model).score(PROMPT[-1], TREE).logits, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_added_rows_that_are_no_numbers_do_not_spoil_the_others(value: float, model: Any, cell: Any) -> None:
    """A mask adds to scores, and NaN plus anything is NaN."""
    target, rows = opened(model), rows_of(model, cell)
    prompts = rows.prompts.clone()
    prompts[1, 0] = value
    scored = target.score(PROMPT[-1], TREE, PairedRows(prompts, rows.embed, rows.tap))
    assert scored.paired is None
    assert torch.equal(scored.logits, opened(model).score(PROMPT[-1], TREE).logits)
    path = np.array([0, 2])
    target.commit(path)
    plain = HFTarget(model)
    text = [*PROMPT, *TREE.token_ids[path].tolist()]
    plain.prefill(torch.tensor(text))
    assert torch.allclose(
        target.score(9, DraftTree.empty()).logits, plain.score(9, DraftTree.empty()).logits, atol=1e-4
    )


@pytest.mark.parametrize("fault", ["nodes see soft prompts", "nodes see their own contemplate row"])
def test_rows_that_are_seen_are_noticed(fault: str, model: Any, cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = hf.pair_rows

    def wrong(depths: np.ndarray, visible: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        depths, wide = right(depths, visible, **options)
        rows = len(visible)
        if fault == "nodes see soft prompts":
            wide[:rows, rows : rows + PROMPTS] = True
        else:
            wide[:rows, rows + PROMPTS :] = np.eye(rows, dtype=bool)
        return depths, wide

    monkeypatch.setattr(hf, "pair_rows", wrong)
    assert not torch.equal(logits_beside(model, cell, 1.0), logits_beside(model, cell, -30.0))


def test_contemplate_rows_do_not_see_each_other(model: Any, cell: Any) -> None:
    whole = opened(model).score(PROMPT[-1], TREE, rows_of(model, cell)).paired
    rows = rows_of(model, cell)

    def others(tokens: np.ndarray) -> torch.Tensor:
        vectors = rows.embed(tokens).clone()
        vectors[:-1] *= 5.0
        return vectors

    changed = opened(model).score(PROMPT[-1], TREE, PairedRows(rows.prompts, others, 4)).paired
    assert whole is not None and changed is not None
    assert torch.equal(whole[-1], changed[-1]) and not torch.allclose(whole[:-1], changed[:-1], atol=1e-2)


def test_a_window_hides_no_soft_prompt() -> None:
    from tests.target.families import FAMILIES

    model = FAMILIES["gemma3"]("sdpa")
    window = model.config.sliding_window
    text = [(7 * i) % 50 + 3 for i in range(window + 9)]
    hidden = model.config.hidden_size
    draw = torch.Generator().manual_seed(0)
    last = len(model.model.layers)
    vector = torch.randn((1, hidden), generator=draw)
    found = []
    for seed in (1, 2):
        target = HFTarget(model)
        target.tap((1, last))  # layer 1 is a sliding one
        target.prefill(torch.tensor(text))
        prompts = torch.randn((2, hidden), generator=torch.Generator().manual_seed(seed))
        found.append(target.paired(text[-1], PairedRows(prompts, lambda tokens: vector, 1)))
    assert not torch.allclose(found[0], found[1], atol=1e-4)


def test_both_ways_draft_alike_and_without_a_future_it_is_eagle3(model: Any, cell: Any) -> None:
    apart = Request(model, make_drafter("confu", path=cell, contemplate="apart"), PROMPT)
    paired = Request(model, make_drafter("confu", path=cell, contemplate="paired"), PROMPT)
    kind = {name: value for name, value in cell.state_dict().items() if name in eagle_cell().state_dict()}
    eagle = eagle_cell()
    eagle.load_state_dict(kind)
    plain = Request(model, make_drafter("eagle3", path=eagle), PROMPT)
    assert same_proposal(paired.ask(25), plain.ask((25 - 1 - PROMPTS) // 2))  # no pass has told it the future yet
    assert not same_proposal(apart.ask(10), plain.ask(10))
    rows = paired.drafter.extra_rows(paired.context(), 25)
    assert isinstance(rows, PairedRows) and apart.drafter.extra_rows(apart.context(), 25) is None
    scored = paired.target.score(PROMPT[-1], TREE, rows)
    assert scored.paired is not None
    future = scored.paired[6]
    paired.target.rollback(paired.target.length)
    for request in (apart, paired, plain):
        request.commit(TREE, [0, 2, 5], 33)
    paired.drafter._future = future  # what `observe` would have been told by a session
    assert same_proposal(apart.ask(10), paired.ask(24))
    assert not same_proposal(apart.ask(10), plain.ask(10))


def eagle_cell() -> Cell:
    return make_cell(tiny_config("eagle3-own", kind="eagle3")).eval()


def test_what_it_drafts_depends_on_the_text_alone(model: Any, cell: Any) -> None:
    request = Request(model, make_drafter("confu", path=cell), PROMPT)
    for path, ask in (([0, 2], True), ([], False), ([1, 3], False), ([], True)):
        if ask:
            request.ask(8)
        request.commit(TREE, path, 21)
        if not ask:
            request.drafter.catch_up()
        fresh = Request(model, make_drafter("confu", path=cell), request.tokens)
        assert same_proposal(request.ask(20), fresh.ask(20))


@pytest.mark.parametrize("budget", [1, 6, 7, 20])
def test_the_budget_counts_every_row(budget: int, model: Any, cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[StepOutcome] = []
    rows: list[int] = []
    drafter = make_drafter("confu", path=cell, contemplate="paired")
    spec = AdaptiveSpec([drafter], f"fixed:confu@{budget}")
    update = FixedController.update
    forward = HFTarget._forward

    def kept(self: Any, decision: Any, outcome: StepOutcome) -> Any:
        outcomes.append(outcome)
        return update(self, decision, outcome)

    def counted(self: HFTarget, ids: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        rows.append(len(ids))
        return forward(self, ids, *args, **options)

    monkeypatch.setattr(FixedController, "update", kept)
    monkeypatch.setattr(HFTarget, "_forward", counted)
    prompt = torch.tensor([PROMPT])
    result = spec.generate(model, prompt, max_new_tokens=24)
    assert torch.equal(result.sequences, reference(model, prompt, max_new_tokens=24))
    assert result.stats.set_aside == {}
    for outcome, there in zip(outcomes, rows[1:], strict=True):
        nodes = outcome.record.verified
        assert there == nodes + 1 + outcome.extra_rows and there - 1 <= budget
        assert outcome.extra_rows in (0, PROMPTS + nodes + 1)
    assert any(outcome.extra_rows for outcome in outcomes) == (budget >= PROMPTS + 3)


def test_costs_are_learnt_for_all_rows() -> None:
    from dataclasses import replace

    from adaptspec.control.step_costs import observe_step
    from adaptspec.types import StepRecord

    record = StepRecord(1, 9, "confu@13", 1.0, 4, 4, 1, 2, *[0.0] * 7)
    cost = CostModel()
    outcome = StepOutcome(replace(record, verify_seconds=0.7), TREE, {}, np.array([1]), extra_rows=8)
    for _ in range(3):
        observe_step(cost, outcome, asked=())
    assert cost.verify_seconds(12) == pytest.approx(0.7, rel=0.05)


def test_a_tree_of_another_arm_leaves_no_room(model: Any, cell: Any) -> None:
    """Strategies that cut the widest proposal to the played budget: no row too many."""
    drafter = make_drafter("confu", path=cell, contemplate="paired")
    spec = AdaptiveSpec([drafter], "hedge", budgets=(4, 24), seed=0)
    prompt = torch.tensor([PROMPT])
    assert torch.equal(
        spec.generate(model, prompt, max_new_tokens=40).sequences, reference(model, prompt, max_new_tokens=40)
    )


def test_weights_that_are_no_numbers_are_refused(model: Any) -> None:
    broken = tiny_confu_cell()
    with torch.no_grad():
        broken.contemplates.weight[0, 0] = np.nan
    drafter = make_drafter("confu", path=broken)
    with pytest.raises(ValueError, match="has NaN or infinite values in the tensors contemplates.weight"):
        drafter.bind(HFTarget(model))


def test_a_context_that_holds_no_soft_prompts(cell: Any) -> None:
    model = tiny_llama()
    model.config.max_position_embeddings = PROMPTS
    drafter = make_drafter("confu", path=cell)
    for _ in range(2):
        with pytest.raises(ValueError, match="confu has 3 soft prompts, the target's context 3 positions"):
            drafter.bind(HFTarget(model))


def test_apart_computes_no_logits(model: Any, cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = opened(model)
    calls: list[int] = []
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: calls.append(1))
    target.paired(PROMPT[-2], rows_of(model, cell))
    assert not calls


def test_bad_options(model: Any, cell: Any) -> None:
    with pytest.raises(ValueError, match="max_depth must be a whole number >= 1, got 2.5"):
        make_drafter("confu", max_depth=2.5)
    with pytest.raises(ValueError, match="unknown contemplate 'pair'; did you mean 'paired'"):
        make_drafter("confu", contemplate="pair")
    with pytest.raises(ValueError, match="confu has no weights for this target"):
        make_drafter("confu").bind(HFTarget(tiny_models.make_llama(layers=4)))
    with pytest.raises(ValueError, match="is a cell of kind 'eagle3', confu needs 'confu'"):
        make_drafter("confu", path=CellWeights(eagle_cell())).bind(HFTarget(model))
    sizes = {"kind": "confu", "taps": (1, 2, 4)}
    with pytest.raises(ValueError, match="needs soft_prompts, contemplates and mixed"):
        tiny_config("eagle3-own", **sizes)
    with pytest.raises(ValueError, match="mixed must be at most contemplates = 2, got 3"):
        tiny_config("eagle3-own", **sizes, soft_prompts=1, contemplates=2, mixed=3)
    with pytest.raises(ValueError, match="soft_prompts is an option of confu, not of 'eagle3'"):
        tiny_config("eagle3-own", soft_prompts=1)
