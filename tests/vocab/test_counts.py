"""Frequency lists: counting, files, and what is chosen from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from adaptspec.vocab import FrequencyList, HeadData, VocabHeads, count_tokens, load_frequencies, save_frequencies
from adaptspec.vocab import counts as counts_module


def test_counting() -> None:
    counted = count_tokens([np.array([5, 1, 5]), [], [1, 5, 0]], vocab_size=7, source="texts")
    assert (counted.vocab_size, counted.source) == (7, "texts")
    assert counted.token_ids.tolist() == [5, 1, 0, 2, 3, 4, 6]
    with pytest.raises(ValueError, match="in \\[0, 3\\)"):
        count_tokens([[3]], vocab_size=3)
    with pytest.raises(ValueError, match="vocab_size must be >= 1"):
        count_tokens([], vocab_size=0)


@pytest.mark.parametrize("suffix", [".safetensors", ".json", ".npy"])
def test_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"list{suffix}"
    save_frequencies(path, FrequencyList(np.array([4, 0, 2]), 9, "answers"))
    loaded = load_frequencies(path)
    assert loaded.token_ids.tolist() == [4, 0, 2]
    assert (loaded.vocab_size, loaded.source) == ((None, "") if suffix == ".npy" else (9, "answers"))


def test_published_lists_are_read_without_running_code(tmp_path: Path) -> None:
    torch.save([7, 3, 1], tmp_path / "freq_3.pt")
    assert load_frequencies(tmp_path / "freq_3.pt").token_ids.tolist() == [7, 3, 1]
    torch.save(torch.tensor([7, 3]), tmp_path / "freq_2.pt")
    assert load_frequencies(tmp_path / "freq_2.pt").token_ids.tolist() == [7, 3]
    torch.save(Path("evil"), tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="holds no frequency list"):
        load_frequencies(tmp_path / "evil.pt")


def test_what_is_no_list(tmp_path: Path) -> None:
    for name, content in (
        ("a.json", "{"),
        ("b.json", json.dumps({"ids": [1]})),
        ("c.json", json.dumps([1, 1])),
        ("d.json", json.dumps([0.5])),
        ("e.json", json.dumps([-1])),
        ("f.json", json.dumps([])),
        ("g.json", json.dumps({"token_ids": [9], "vocab_size": 9})),
        ("h.npy", "text"),
        ("i.safetensors", "text"),
        ("j.pt", "text"),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=f"{name} holds no frequency list"):
            load_frequencies(tmp_path / name)
    with pytest.raises(ValueError, match="must end in .safetensors, .json, .npy, .pt"):
        load_frequencies(tmp_path / "k.txt")
    with pytest.raises(ValueError, match="must end in .safetensors, .json or .npy"):
        save_frequencies(tmp_path / "k.pt", FrequencyList(np.array([1])))
    with pytest.raises(FileNotFoundError):
        load_frequencies(tmp_path / "none.npy")


def test_lists_of_other_vocabularies_are_refused(tmp_path: Path) -> None:
    head = torch.randn(8, 4)
    heads = VocabHeads(("fr:2",))
    for frequencies in (FrequencyList(np.arange(4), 4), FrequencyList(np.arange(9), 9), FrequencyList(np.array([8]))):
        with pytest.raises(ValueError, match="another vocabulary|for a vocabulary of"):
            heads.bind(head, vocab_size=8, data=HeadData(frequencies))
    with pytest.raises(ValueError, match="needs 2 tokens, the frequency list names 1"):
        heads.bind(head, vocab_size=8, data=HeadData(FrequencyList(np.array([3]))))
    save_frequencies(tmp_path / "list.json", FrequencyList(np.array([3, 6, 1]), 8))
    chosen = VocabHeads((f"fr:2:{tmp_path / 'list.json'}",))
    chosen.bind(head, vocab_size=8, data=HeadData(FrequencyList(np.arange(8))))  # a path says more
    assert [h.logits(head[:1], depth=1)[0].tolist() for h in chosen] == [[3, 6]]


def test_specials_take_the_place_of_the_rarest(tmp_path: Path) -> None:
    heads = VocabHeads(("fr:3",))
    heads.bind(torch.randn(8, 4), vocab_size=8, keep=(7, 5), data=HeadData(FrequencyList(np.array([5, 4, 3, 2, 1]))))
    assert heads["fr:3"].logits(torch.randn(1, 4), depth=1)[0].tolist() == [4, 5, 7]
    assert heads["fr:3"].rows == 3


def test_shipped_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "frequencies").mkdir()
    monkeypatch.setattr(counts_module.pretrained, "__file__", str(tmp_path / "__init__.py"))
    head = torch.randn(8, 4)
    save_frequencies(tmp_path / "frequencies" / "target-8.safetensors", FrequencyList(np.array([6, 1, 0]), 8))
    found = {}
    for name in ("fr:2", "trim:2"):
        heads = VocabHeads((name,))
        heads.bind(head, vocab_size=8)
        found[name] = heads[name].logits(head[:1], depth=1)[0].tolist()
    assert found == {"fr:2": [1, 6], "trim:2": [1, 6]}  # what the target said stands in for texts
    save_frequencies(tmp_path / "frequencies" / "text-8.safetensors", FrequencyList(np.array([2, 3]), 8))
    heads = VocabHeads(("fr:2",))
    heads.bind(head, vocab_size=8)
    assert heads["fr:2"].logits(head[:1], depth=1)[0].tolist() == [2, 3]
