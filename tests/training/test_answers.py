"""Answers: decoded together as one by one, and a run cut short goes on to the same corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.training.answers import write_answers
from adaptspec.training.batched_decode import BatchedDecoder, Sequencing, choose_tokens
from adaptspec.training.corpus import CorpusWriter, read_answers
from adaptspec.training.jobs import PromptTokens, plan_jobs


def generate(model: Any, prompt: np.ndarray, count: int, stop: int | None) -> list[int]:
    """Greedy, one by one, without any cache."""
    ids = list(map(int, prompt))
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == stop:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_batched_greedy_answers_are_those_of_single_generation(target: Any, prompts: list[Any], batch: int) -> None:
    common = np.bincount(np.concatenate([generate(target, p.token_ids, 8, None) for p in prompts[:4]])).argmax()
    decoder = BatchedDecoder(target, batch=batch, max_new_tokens=8, stop_ids=[int(common)])
    ended = list(decoder.run([Sequencing(i, p.token_ids) for i, p in enumerate(prompts)]))
    assert sorted(sequence.key for sequence in ended) == list(range(len(prompts)))
    assert 0 < sum(sequence.finished for sequence in ended) < len(ended)
    for sequence in ended:
        assert sequence.answer == generate(target, sequence.prompt, 8, int(common))
        assert sequence.finished == (sequence.answer[-1] == common)


def test_same_prompts_share_a_prefill_and_give_the_same(target: Any, prompts: list[Any]) -> None:
    decoder = BatchedDecoder(target, batch=2, max_new_tokens=6)
    runs = 0
    whole = decoder._prompt_logits

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return whole(*arguments)

    decoder._prompt_logits = counted  # type: ignore[method-assign]
    order = [0, 0, 0, 1, 1, 0]
    ended = list(decoder.run([Sequencing(i, prompts[p].token_ids) for i, p in enumerate(order)]))
    assert runs == 3
    for sequence in ended:
        assert sequence.answer == generate(target, prompts[order[sequence.key]].token_ids, 6, None)


def test_a_sliding_window_is_kept(prompts: list[Any]) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=5, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(1)
    model = MistralForCausalLM(config).eval()
    ended = list(
        BatchedDecoder(model, batch=3, max_new_tokens=8).run(
            [Sequencing(i, p.token_ids) for i, p in enumerate(prompts[:5])]
        )
    )
    for sequence in ended:
        assert sequence.answer == generate(model, sequence.prompt, 8, None)


def test_sampling_follows_the_softmax_of_the_temperature() -> None:
    generator = np.random.default_rng(0)
    logits = torch.tensor([[1.0, 3.0, 2.0, -50.0]]).repeat(4000, 1)
    chosen = choose_tokens(logits, temperatures=[0.7] * 4000, draws=generator.random(4000).tolist())
    found = np.bincount(chosen, minlength=4) / 4000
    assert np.abs(found - torch.softmax(logits[0] / 0.7, 0).numpy()).max() < 0.025
    mixed = choose_tokens(logits[:2], temperatures=[0.0, 1.0], draws=[0.0, 0.9999])
    assert mixed.tolist() == [1, 0]  # the tail of the order by probability
    with pytest.raises(ValueError, match="NaN"):
        choose_tokens(torch.tensor([[1.0, float("nan")]]), temperatures=[0.0], draws=[0.0])


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(a.token_ids, b.token_ids)
        and (a.prompt_length, a.prompt, a.sample, a.temperature, a.finished)
        == (b.prompt_length, b.prompt, b.sample, b.temperature, b.finished)
        for a, b in zip(left, right, strict=True)
    )


def test_a_killed_run_goes_on_to_the_same_corpus(
    target: Any, prompts: list[Any], corpus: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptspec.training.answers.SHARD_ANSWERS", 4)
    settings = {"origin": {"model": "tiny"}, "samples": 3, "max_new_tokens": 14, "batch": 5}

    class Killed(Exception):
        pass

    def kill(state: Any) -> None:
        if state.answers >= 8:
            raise Killed

    with pytest.raises(Killed):
        write_answers(target, prompts, tmp_path / "a", **settings, report=kill)
    half = read_answers(tmp_path / "a")
    assert 8 <= len(half) < len(corpus)
    (tmp_path / "a" / ".shard-00009.npz.x.part").write_bytes(b"left behind by a kill")
    done = write_answers(target, prompts, tmp_path / "a", **{**settings, "batch": 3})
    assert (done.answers, done.total) == (len(corpus), len(corpus))
    assert same(read_answers(tmp_path / "a"), corpus)
    again = write_answers(target, prompts, tmp_path / "a", **settings)
    assert again.new_tokens == 0 and same(read_answers(tmp_path / "a"), corpus)


def test_a_budget_of_time_ends_a_run_early(target: Any, prompts: list[Any], tmp_path: Path) -> None:
    done = write_answers(target, prompts, tmp_path / "a", origin={}, max_new_tokens=14, minutes=1e-9)
    assert done.answers == 0 and read_answers(tmp_path / "a") == []


def test_parts_write_the_corpus_of_one_process(
    target: Any, prompts: list[Any], corpus: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptspec.training.answers.SHARD_ANSWERS", 4)
    settings = {"origin": {"model": "tiny"}, "samples": 3, "max_new_tokens": 14, "batch": 5}
    counts = []

    def others(state: Any) -> None:  # while the first part is under way, the others run
        if not counts:
            counts.append(state.total)
            for number in (2, 3):
                counts.append(write_answers(target, prompts, tmp_path / "a", **settings, part=(number, 3)).total)

    write_answers(target, prompts, tmp_path / "a", **settings, part=(1, 3), report=others)
    assert sum(counts) == len(corpus) and min(counts) > 0
    assert same(read_answers(tmp_path / "a"), corpus)
    for part in ((0, 1), (3, 2)):
        with pytest.raises(ValueError, match="part must be"):
            write_answers(target, prompts, tmp_path / "b", **settings, part=part)
    with pytest.raises(ValueError, match="part 9999/9999 has no prompts"):
        write_answers(target, prompts, tmp_path / "b", **settings, part=(9999, 9999))


def test_other_answers_are_not_mixed_in(target: Any, prompts: list[Any], tmp_path: Path) -> None:
    write_answers(target, prompts, tmp_path / "a", origin={}, max_new_tokens=14, minutes=1e-9)
    with pytest.raises(ValueError, match="seed = 0, this run has 1"):
        write_answers(target, prompts, tmp_path / "a", origin={}, max_new_tokens=14, seed=1)
    with pytest.raises(ValueError, match="prompts = "):
        write_answers(target, prompts[:5], tmp_path / "a", origin={}, max_new_tokens=14)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        write_answers(target, prompts, tmp_path / "b", origin={}, max_new_tokens=14)


def test_stored_ids_are_narrow_and_a_damaged_shard_is_named(answers_folder: Path, tmp_path: Path) -> None:
    with np.load(next(answers_folder.glob("shard-*.npz"))) as shard:
        assert shard["token_ids"].dtype == np.uint16
    assert CorpusWriter(tmp_path / "wide", origin={}, vocab_size=1 << 17).dtype == np.uint32
    (tmp_path / "corpus.json").write_bytes((answers_folder / "corpus.json").read_bytes())
    (tmp_path / "shard-00000.npz").write_bytes(b"PK no zip")
    with pytest.raises(ValueError, match=r"shard-00000\.npz is damaged"):
        read_answers(tmp_path)
    (tmp_path / "corpus.json").write_text(json.dumps({"format": "x"}))
    with pytest.raises(ValueError, match="does not describe answers"):
        read_answers(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder of answers"):
        read_answers(tmp_path / "nowhere")


def test_jobs_are_balanced_greedy_first_and_cheap_to_batch(prompts: list[Any]) -> None:
    jobs = plan_jobs(prompts, samples=3, temperatures=[0.7, 1.0], window=6)
    assert len(set(jobs)) == len(jobs)
    greedy, sampled = jobs[:12], jobs[12:]
    assert {job.prompt for job in greedy} == set(range(12)) and {job.temperature for job in greedy} == {0.0}
    assert {job.temperature for job in sampled} == {0.7, 1.0}
    # Three prompts against nine: three times as many samples each, so that both domains weigh the same.
    count = {name: sum(prompts[job.prompt].domain == name for job in sampled) for name in ("common", "rare")}
    assert count == {"common": 18, "rare": 18}
    lengths = [len(prompts[job.prompt].token_ids) for job in greedy[:6]]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 0}, "samples must be >= 1, got 0"),
        ({"temperatures": [0.0]}, "temperatures must be > 0"),
        ({"temperatures": []}, "temperatures must not be empty"),
        ({"batch": 0}, "batch must be >= 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"minutes": 0.0}, "minutes must be > 0"),
        ({"max_prompt_tokens": 2}, "all prompts are longer than max_prompt_tokens = 2"),
        ({"max_new_tokens": 200}, "the model's context holds 128"),
    ],
)
def test_bad_arguments(target: Any, prompts: list[Any], tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_answers(target, prompts, tmp_path / "a", origin={}, **{"max_new_tokens": 14, **change})


def test_an_empty_prompt_is_refused(target: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is empty"):
        write_answers(target, [PromptTokens(np.zeros(0, np.int64))], tmp_path / "a", origin={})
    with pytest.raises(ValueError, match="prompts must not be empty"):
        write_answers(target, [], tmp_path / "a", origin={})
