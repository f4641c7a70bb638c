"""Records of growing trees say what live steps do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec
from adaptspec.drafters import make_drafter
from adaptspec.drafters.draft_policies import DEPTHS, FEATURES, SIZES
from adaptspec.tracing import TracePrompt
from adaptspec.tracing.growth import (
    Grown,
    GrowthRecords,
    accepted_within,
    judge_growth,
    read_growth,
    record_growth,
)
from adaptspec.types import DraftTree
from tests.drafters.cell_cases import tiny_cell, tiny_llama
from tests.drafters.policy_cases import fixed_policies

PROMPTS = [TracePrompt("a", "", [11, 3, 50, 7, 7, 29]), TracePrompt("b", "", [8, 8, 41, 2, 19])]
TOKENS = 20


def griffin() -> Any:
    return make_drafter("griffin", path=tiny_cell("griffin"), branching=4, max_depth=12)


@pytest.fixture(scope="module")
def recorded() -> tuple[Any, GrowthRecords]:
    model = tiny_llama()
    model.generation_config.eos_token_id = None
    model.config.max_position_embeddings = 8192  # costs of 240 nodes are measured behind one another
    told: list[str] = []
    records, fingerprint = record_growth(model, griffin(), PROMPTS, max_new_tokens=TOKENS, progress=told.append)
    assert told == ["a", "b"] and "threads" in fingerprint
    return model, records


def test_records_are_what_live_steps_accept(recorded: tuple[Any, GrowthRecords]) -> None:
    model, records = recorded
    for number, choices in enumerate([[(3, 10), (6, 240)], [(12, 20)]]):
        prompt, first = PROMPTS[number], int(np.flatnonzero(records.prompts == number)[0])
        for depth, size in choices:
            policies = fixed_policies(depth=depth, size=size)
            drafter = make_drafter("griffin-ltd", path=policies, drafter=griffin())
            spec = AdaptiveSpec([drafter], "fixed:griffin-ltd@240")
            result = spec.generate(model, torch.tensor([prompt.token_ids]), max_new_tokens=TOKENS)
            accepted = records.accepted[first, DEPTHS.index(depth), SIZES.index(size)]
            assert result.trace[0].accepted == accepted


def test_records_hold_together(recorded: tuple[Any, GrowthRecords], tmp_path: Path) -> None:
    _, records = recorded
    assert 4 < len(records.features) <= 2 * TOKENS and set(records.prompts.tolist()) == {0, 1}
    assert (np.diff(records.accepted, axis=2) >= 0).all() and records.accepted.max() <= 12
    assert (records.accepted[:, 0] <= 3).all()
    assert (np.diff(records.seconds, axis=1) > 0).all() and (np.diff(records.seconds, axis=2) >= 0).all()
    assert np.allclose(records.features[:, :, 0], np.array(DEPTHS) / 12)
    records.save(tmp_path / "r.npz")
    again = read_growth(tmp_path / "r.npz")
    assert all(np.array_equal(getattr(again, name), getattr(records, name)) for name in GrowthRecords.__slots__)


def whole_tree() -> DraftTree:
    """Best first: a chain of 13, with a sibling of its first node that is third best."""
    parents = np.array([-1, 0, -1, *([1] + list(range(3, 13)))])
    return DraftTree(np.arange(14), parents, -0.1 * np.arange(14.0))


def test_places_are_those_among_the_nodes_there_were() -> None:
    tree = whole_tree()
    path = [0, 1, *range(3, 14)]
    found = accepted_within(tree, path)
    assert found[0].tolist() == [3] * 24  # four nodes in all at depth 3
    assert found[3, 0] == 9 and found[3, 1] == 12  # the tenth best is the ninth of the chain
    assert accepted_within(tree, []).max() == 0


def test_a_hidden_end_is_no_end() -> None:
    def grown() -> list[Any]:
        one = Grown(whole_tree(), 9, np.zeros((4, FEATURES)), np.arange(1.0, 5.0))
        return [one, None]

    chain = [0, 1, *range(3, 14)]
    root = 63
    assert judge_growth(grown(), np.array([root, *chain[:5]])) == []
    (left,) = judge_growth(grown(), np.array([root, *chain[:5], 62]))
    assert left.accepted is not None and left.accepted[3, -1] == 5
    (whole,) = judge_growth(grown(), np.array([root, *chain[:12]]))
    assert whole.accepted is not None and whole.accepted[3, -1] == 12


def test_bad_records(tmp_path: Path) -> None:
    (tmp_path / "r.npz").write_bytes(b"no")
    with pytest.raises(ValueError, match="holds no records of growing trees"):
        read_growth(tmp_path / "r.npz")
    good = GrowthRecords(
        np.zeros((1, len(DEPTHS), FEATURES)),
        np.zeros((1, len(DEPTHS), len(SIZES))),
        np.ones((1, len(DEPTHS), len(SIZES))),
        np.zeros(1),
    )
    good.save(tmp_path / "g.npz")
    whole = (tmp_path / "g.npz").read_bytes()
    flipped = whole[:200] + bytes(30) + whole[230:]
    np.save(tmp_path / "array.npy", np.zeros(3))
    for content in (b"", b"PK\x03\x04junk", whole[: len(whole) // 2], flipped, (tmp_path / "array.npy").read_bytes()):
        (tmp_path / "r.npz").write_bytes(content)
        with pytest.raises(ValueError, match="holds no records of growing trees"):
            read_growth(tmp_path / "r.npz")
    for version, message in (([1, 1], "of version 1"), (1, "features must have shape")):
        np.savez(tmp_path / "o.npz", version=version, features=1, accepted=1, seconds=1, prompts=1)
        with pytest.raises(ValueError, match=message):
            read_growth(tmp_path / "o.npz")
    np.savez(tmp_path / "o.npz", version=1, other=np.zeros(2))
    with pytest.raises(ValueError, match="holds no records of growing trees of version 1"):
        read_growth(tmp_path / "o.npz")
    with pytest.raises(ValueError, match="at least one prompt, got none"):
        record_growth(tiny_llama(), griffin(), [])
    with pytest.raises(ValueError, match="drafter must be a feature-recursive one"):
        record_growth(tiny_llama(), "lookahead", PROMPTS)
