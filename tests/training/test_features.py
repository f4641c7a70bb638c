"""Features and batches: packed texts give what single texts give, and every number lies where it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.training.batches import Batches, pack_rows, split_held_out
from adaptspec.training.corpus import Answer
from adaptspec.training.feature_store import open_features
from adaptspec.training.features import prepare_features
from adaptspec.training.packs import make_packs


def states(part: Any, tap: int) -> torch.Tensor:
    return torch.from_numpy(np.array(part.taps[tap]).view(np.int16)).view(torch.bfloat16).float()


def test_packed_texts_have_the_features_of_single_texts(target: Any, store: Any, corpus: list[Any]) -> None:
    by_name = {(answer.prompt, answer.sample): answer for answer in corpus}
    seen = 0
    for part in store.parts:
        for start, pack in zip(part.starts, part.packs, strict=True):
            for number, sample in enumerate(pack.samples):
                answer = by_name[pack.prompt, sample]
                indices = start + pack.indices(number)
                assert np.array_equal(pack.token_ids[pack.indices(number)], answer.token_ids)
                assert np.array_equal(pack.positions()[pack.indices(number)], np.arange(len(answer.token_ids)))
                with torch.inference_mode():
                    output = target(input_ids=torch.from_numpy(answer.token_ids)[None], output_hidden_states=True)
                for tap in (1, 2, 3):  # the last entry of hidden_states has gone through the final norm
                    wanted = output.hidden_states[tap][0].to(torch.bfloat16).float()
                    assert torch.allclose(states(part, tap)[indices], wanted, rtol=0.02, atol=0.02)
                last = target.model.norm(states(part, 4)[indices])
                assert torch.allclose(last, output.hidden_states[4][0], rtol=0.05, atol=0.05)
                log_p = torch.log_softmax(output.logits[0].double(), dim=-1)
                best = log_p.topk(8, dim=-1)
                found = torch.from_numpy(part.top_log_probs[indices]).double()
                assert torch.allclose(found, best.values, atol=1e-3)
                inside = log_p[:, torch.from_numpy(store.rows)].exp().sum(dim=1)
                assert torch.allclose(torch.from_numpy(part.inside[indices]).double(), inside, atol=1e-4)
                assert (
                    log_p.gather(1, torch.from_numpy(part.top_ids[indices]).long()) - best.values
                ).abs().max() < 1e-3
                seen += 1
    assert seen == len(corpus)


def test_the_head_has_the_most_frequent_tokens_and_those_to_keep(store: Any, corpus: list[Any]) -> None:
    counts = np.bincount(np.concatenate([a.token_ids[a.prompt_length :] for a in corpus]), minlength=64)
    assert len(store.rows) == 48 and 2 in store.rows
    others = np.setdiff1d(np.arange(64), store.rows)
    assert counts[others].max() <= np.sort(counts[np.setdiff1d(store.rows, [2])])[0]


def test_answers_that_came_later_and_taps_are_added(target: Any, corpus: list[Any], store: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rows": 48, "keep": (2,), "top_k": 8, "most_tokens": 40}
    first = prepare_features(target, corpus[:20], tmp_path / "f", taps=(2,), part_tokens=150, **options)
    assert len(first.parts) > 1
    (tmp_path / "f" / ".part-half").mkdir()  # left behind by a kill
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("f/part-*/tap-2.npy")}
    more = prepare_features(target, corpus, tmp_path / "f", taps=(2, 4), part_tokens=150, **options)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert not (tmp_path / "f" / ".part-half").exists()
    names = [(pack.prompt, sample) for part in more.parts for pack in part.packs for sample in pack.samples]
    assert sorted(names) == [(answer.prompt, answer.sample) for answer in corpus]
    assert np.array_equal(more.rows, first.rows)

    def of(store: Any, tap: int) -> dict[Any, torch.Tensor]:
        return {
            (pack.prompt, sample): states(part, tap)[start + pack.indices(number)]
            for part in store.parts
            for start, pack in zip(part.starts, part.packs, strict=True)
            for number, sample in enumerate(pack.samples)
        }

    for tap in (2, 4):
        whole, grown = of(store, tap), of(more, tap)
        assert all(torch.allclose(grown[name], whole[name], rtol=0.02, atol=0.02) for name in whole)
    with pytest.raises(ValueError, match="lacks the taps"):
        open_features(tmp_path / "f", taps=(3,))
    with pytest.raises(ValueError, match="row_count = 48, got 32"):
        prepare_features(target, corpus, tmp_path / "f", taps=(2,), **{**options, "rows": 32})
    with pytest.raises(ValueError, match="not among these"):
        prepare_features(target, corpus[:5], tmp_path / "f", taps=(2,), **options)


@pytest.mark.parametrize("first", [0, -1])
@pytest.mark.parametrize("steps", [1, 3])
def test_rows_of_a_pack_read_and_predict_the_right_tokens(corpus: list[Any], steps: int, first: int) -> None:
    texts = {(answer.prompt, answer.sample): answer.token_ids for answer in corpus}
    for pack in make_packs(corpus, most_tokens=50):
        rows = pack_rows(pack, steps=steps, first=first)
        owners: dict[int, list[int]] = {}
        for number, sample in enumerate(pack.samples):
            text = texts[pack.prompt, sample]
            own = [*pack.indices(number), -1]
            touched = np.concatenate([rows.inputs, rows.labels], axis=1)
            mine = [r for r in range(len(touched)) if np.isin(touched[r], own).all()]
            owners[number] = mine
            assert rows.positions[mine].tolist() == list(range(first, len(text) - 2))
            for r in mine:
                i = int(rows.positions[r])
                assert pack.token_ids[rows.features[r]] == text[max(i, 0)]
                for k in range(steps):
                    if i + 2 + k < len(text):
                        assert pack.token_ids[rows.inputs[r, k]] == text[i + 1 + k]
                        assert pack.token_ids[rows.labels[r, k]] == text[i + 2 + k]
                        assert rows.answers[r, k] == (i + 2 + k >= pack.prompt_length)
                    else:
                        assert rows.labels[r, k] == -1 and not rows.answers[r, k]
                before = [other for other in mine if rows.positions[other] <= i]
                assert np.flatnonzero(rows.visible[r]).tolist() == sorted(before)
        # Each predicted answer token belongs to one row, each predicted prompt token to one that is not repeated.
        shared = set(owners[0]) - {r for number in owners if number for r in owners[number]}
        assert len(pack.samples) == 1 or all(not rows.repeated[r] for r in shared)
        labels = rows.labels[:, 0]
        counted = labels[(rows.answers[:, 0] | ~rows.repeated) & (labels >= 0)]
        assert len(counted) == len(set(counted.tolist())) == len(pack) - 2 - first


def test_batches_hold_every_row_once_and_pad_with_nothing(store: Any) -> None:
    batches = Batches(store, store.packs(), taps=(2, 4), steps=2, batch_rows=120, prompt_weight=0.25)
    order = batches.order(seed=1, epoch=0)
    assert sorted(i for members in order for i in members) == list(range(len(store.packs())))
    assert order == batches.order(seed=1, epoch=0) != batches.order(seed=1, epoch=1)
    total = sum(len(pack) - 2 for part in store.parts for pack in part.packs)
    counted = 0
    for members in order:
        batch = batches.make(members)
        size, width = batch.positions.shape
        assert size * width <= 120 or size == 1
        assert [f.shape for f in batch.features] == [(size, width, 32)] * 2
        assert set(batch.weights.unique().tolist()) <= {0.0, 0.25, 1.0}
        assert batch.mask[:, torch.arange(width), torch.arange(width)].all()
        counted += int((batch.weights[..., 0] > 0).sum())
        known = batch.labels >= 0
        assert (batch.labels[known] < len(store.rows)).all()
        assert (store.rows[batch.labels[..., 0][known[..., 0]]] == batch.tokens[..., 1][known[..., 0]].numpy()).all()
    assert counted == total


def test_held_out_prompts_are_in_no_batch_of_training(store: Any) -> None:
    learn, held = split_held_out(store, share=0.3, seed=0)
    prompts = [{store.parts[a].packs[b].prompt for a, b in side} for side in (learn, held)]
    assert all(prompts) and not prompts[0] & prompts[1] and len(learn) + len(held) == len(store.packs())
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\), got 1.5"):
        split_held_out(store, share=1.5)


def test_bad_arguments(target: Any, corpus: list[Any], store: Any, tmp_path: Path) -> None:
    for change, message in (
        ({"taps": (5,)}, r"taps must be in \[1, 4\], got 5"),
        ({"rows": 0}, "rows must be >= 1, got 0"),
        ({"batch_tokens": 0}, "batch_tokens must be >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_features(target, corpus, tmp_path / "f", **{"taps": (1,), **change})
    with pytest.raises(ValueError, match="answers must not be empty"):
        prepare_features(target, [], tmp_path / "f", taps=(1,))
    with pytest.raises(ValueError, match="holds no features"):
        open_features(tmp_path, taps=(1,))
    with pytest.raises(ValueError, match="prompt_weight must be in"):
        Batches(store, store.packs(), taps=(1,), steps=1, prompt_weight=2.0)
    with pytest.raises(ValueError, match="no texts"):
        Batches(store, [], taps=(1,), steps=1)
    with pytest.raises(ValueError, match="begin with different prompts"):
        make_packs([Answer(np.arange(5) + i, 3, 0, i, 0.0, True) for i in range(2)])
