"""Folders of trained weights: written whole, read exactly, refused when damaged."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaptspec import pretrained
from adaptspec.pretrained import load_weights, read_card, save_weights, shipped_folder, shipped_names, without_base

STATE = {
    "fc.weight": torch.randn((6, 9), generator=torch.Generator().manual_seed(0)) * torch.arange(6.0)[:, None],
    "norm.weight": torch.linspace(0.5, 1.5, 9),
    "token_ids": torch.tensor([5, 3, 60_000]),
    "scalar": torch.tensor(2.5),
}
CARD = {"kind": "eagle3", "steps": 12, "target": {"layers": 4}}


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    for bits, error in ((8, 0.5 / 127), (16, 2.0**-8), (32, 0.0)):
        save_weights(tmp_path / "deep" / str(bits), STATE, CARD, bits=bits)
        state, card = load_weights(tmp_path / "deep" / str(bits))
        assert card == CARD and read_card(tmp_path / "deep" / str(bits))["bits"] == bits
        assert state.keys() == STATE.keys()
        for name in ("norm.weight", "token_ids", "scalar"):
            assert torch.equal(state[name], STATE[name]) and state[name].dtype == STATE[name].dtype
        rows = STATE["fc.weight"].abs().amax(1, keepdim=True)
        assert ((state["fc.weight"] - STATE["fc.weight"]).abs() <= error * rows + 1e-12).all()
        assert torch.equal(state["fc.weight"][0], torch.zeros(9))  # a row of zeros has no scale
    packed = load_file(tmp_path / "deep" / "8" / pretrained.WEIGHTS_FILE)
    assert packed["fc.weight"].dtype == torch.int8 and packed["fc.weight"].abs().max() == 127
    assert packed["fc.weight.scale"].shape == (6,)


@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 96])
def test_4_bits_share_a_scale_over_32_columns(tmp_path: Path, columns: int) -> None:
    matrix = torch.randn((5, columns), generator=torch.Generator().manual_seed(columns))
    matrix[1] = 0.0
    matrix[2, -1] = 100.0  # spoils no group but its own
    save_weights(tmp_path, {"a": matrix, "b": torch.tensor([1, 2])}, CARD, bits=4)
    state, card = load_weights(tmp_path)
    assert card == CARD and torch.equal(state["b"], torch.tensor([1, 2])) and state["a"].shape == matrix.shape
    for start in range(0, columns, 32):
        group, found = matrix[:, start : start + 32], state["a"][:, start : start + 32]
        largest = group.abs().amax(1, keepdim=True)
        scale = (largest / 7).half().float().clamp(min=1e-9)
        plain = ((group / scale).round() * scale - group).square().sum(1)
        assert ((found - group).square().sum(1) <= plain + 1e-9).all()
        assert ((found - group).abs() <= 0.45 * largest).all()
        assert ((found - group).abs().amax(1)[largest[:, 0] > 0] > 0).any() or columns % 32 == 1
    packed = load_file(tmp_path / pretrained.WEIGHTS_FILE)
    assert packed["a"].shape == (5, (columns + 1) // 2) and packed["a"].dtype == torch.uint8
    again = tmp_path / "again"  # what came back is kept exactly
    save_weights(again, state, CARD, bits=4)
    assert torch.allclose(load_weights(again)[0]["a"], state["a"], rtol=1e-3)


def test_4_bits_of_the_wrong_shape_are_refused(tmp_path: Path) -> None:
    save_weights(tmp_path, STATE, CARD, bits=4)
    file, card = tmp_path / pretrained.WEIGHTS_FILE, tmp_path / pretrained.CARD_FILE
    packed = load_file(file)
    for name, tensor in (("fc.weight", packed["fc.weight"][:, :4]), ("fc.weight.scale", torch.ones(6, 2).half())):
        save_file({**packed, name: tensor.contiguous()}, file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        card.write_text(json.dumps({**json.loads(card.read_text()), "sha256": digest}))
        with pytest.raises(ValueError, match=r"fc\.weight in .* must h"):
            load_weights(tmp_path)
    with pytest.raises(ValueError, match="a must be at most"):
        save_weights(tmp_path, {"a": torch.full((1, 1), 1e9)}, {}, bits=4)


def test_16_bit_tensors_and_views_can_be_written(tmp_path: Path) -> None:
    shared = torch.randn(4, 4)
    save_weights(tmp_path, {"a": shared.T, "b": shared, "c": shared[0].half(), "d": shared.bfloat16()}, {}, bits=32)
    state, _ = load_weights(tmp_path)
    assert torch.equal(state["a"], shared.T) and torch.equal(state["b"], shared)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    save_weights(tmp_path, STATE, CARD)
    file = tmp_path / pretrained.WEIGHTS_FILE
    whole = file.read_bytes()
    for damaged in (whole[:-10], whole[:40], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="weights.safetensors is damaged, or not the file that its card describes"):
            load_weights(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no weights.safetensors"):
        load_weights(tmp_path)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change a card, or with `tensors_in_file` the weights and the checksum with them."""
    import hashlib

    if (tensors := changes.pop("tensors_in_file", None)) is not None:
        save_file(tensors, folder / pretrained.WEIGHTS_FILE)
        changes["sha256"] = hashlib.sha256((folder / pretrained.WEIGHTS_FILE).read_bytes()).hexdigest()
    path = folder / pretrained.CARD_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    save_weights(tmp_path, STATE, CARD)
    packed = load_file(tmp_path / pretrained.WEIGHTS_FILE)
    without = {name: tensor for name, tensor in packed.items() if name != "norm.weight"}
    rewrite(tmp_path, tensors_in_file=without)
    with pytest.raises(ValueError, match="lacks the tensor 'norm.weight'"):
        load_weights(tmp_path)
    rewrite(tmp_path, tensors_in_file={**packed, "norm.weight": torch.zeros(8)})
    with pytest.raises(ValueError, match=r"norm.weight in .* must have shape \[9\], got \[8\]"):
        load_weights(tmp_path)
    rewrite(tmp_path, tensors_in_file={**packed, "fc.weight.scale": torch.zeros(5)})
    with pytest.raises(ValueError, match="must be one scale per row"):
        load_weights(tmp_path)
    rewrite(tmp_path, tensors_in_file=packed, version=2)
    with pytest.raises(ValueError, match="version must be 1, got 2"):
        load_weights(tmp_path)
    rewrite(tmp_path, version=1, tensors=None)
    with pytest.raises(ValueError, match="must list tensors and sha256"):
        load_weights(tmp_path)
    rewrite(tmp_path, format="something")
    with pytest.raises(ValueError, match="is no card of adaptspec weights"):
        load_weights(tmp_path)
    (tmp_path / pretrained.CARD_FILE).write_text("{")
    with pytest.raises(ValueError, match=r"card.json is damaged"):
        load_weights(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no card.json: it is no folder of trained weights"):
        load_weights(tmp_path / "nowhere")


def test_what_cannot_be_written_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_weights(tmp_path, STATE, CARD)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for state, card, options, message in (
        ({}, {}, {}, "at least one tensor"),
        (STATE, {}, {"bits": 5}, "bits must be one of 4, 8, 16, 32, got 5"),
        ({"a.scale": torch.zeros(2)}, {}, {}, "must not end in '.scale'"),
        ({"a": [1.0]}, {}, {}, "a must be a tensor, got list"),
        ({"a": torch.tensor([float("nan")])}, {}, {}, "a must be finite"),
        (STATE, {"sha256": "x"}, {}, "card must not hold sha256"),
        (STATE, {"a": torch.zeros(1)}, {}, "card must hold plain values"),
    ):
        with pytest.raises(ValueError, match=message):
            save_weights(tmp_path, state, card, **options)

    def fail(source: str, target: Path) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        save_weights(tmp_path, {"a": torch.zeros(3)}, {})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_shipped_weights_are_found_by_name() -> None:
    assert shipped_folder("nothing-of-this-name") is None and shipped_folder("..") is None
    for name in shipped_names():
        folder = shipped_folder(name)
        assert folder is not None
        state, card = load_weights(folder)
        assert state and card["kind"] and card["answers"]


def test_weights_may_sit_on_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = {"base": tmp_path / "base"}
    monkeypatch.setattr("adaptspec.pretrained.store.shipped_folder", lambda name: shipped.get(name))
    save_weights(shipped["base"], STATE, CARD, bits=4)
    base, _ = load_weights(shipped["base"])
    save_weights(tmp_path / "rounded", base, CARD, bits=8)
    own, _ = without_base({**load_weights(tmp_path / "rounded")[0], "more.weight": torch.ones(3, 2)}, CARD, "base")
    assert list(own) == ["more.weight"]
    more = {**base, "more.weight": torch.ones(3, 2)}
    own, card = without_base(more, CARD, "base")
    assert list(own) == ["more.weight"]
    save_weights(tmp_path / "on", own, card, bits=32)
    state, found = load_weights(tmp_path / "on")
    assert state.keys() == more.keys() and all(torch.equal(state[name], more[name]) for name in more)
    assert found == {**CARD, "base": {"name": "base", "sha256": read_card(shipped["base"])["sha256"]}}
    for wrong, message in (
        ({**more, "fc.weight": base["fc.weight"][:5]}, "must hold all 4 tensors"),
        ({**more, "fc.weight": base["fc.weight"] + 1.0}, "must hold all 4 tensors of 'base' as they are, and others"),
        (base, "and others"),
        ({"more.weight": torch.ones(3, 2)}, "must hold all 4 tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            without_base(wrong, CARD, "base")
    with pytest.raises(ValueError, match="base must be the name of shipped weights .*, got 'other'"):
        without_base(more, CARD, "other")
    save_weights(shipped["base"], {**STATE, "scalar": torch.tensor(1.0)}, CARD, bits=4)
    with pytest.raises(ValueError, match="belongs on the weights 'base' of another version"):
        load_weights(tmp_path / "on")
    shipped.clear()
    with pytest.raises(ValueError, match="belongs on the weights 'base' of another version"):
        load_weights(tmp_path / "on")
