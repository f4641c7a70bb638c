"""Profiles: written and read exactly, refused where they do not belong."""

from __future__ import annotations

import json

import pytest

from adaptspec.control.cost import CostModel, CostPrior, fingerprint
from adaptspec.types import Arm

HERE = fingerprint(device="cpu", dtype="float32", model="tiny", versions={"torch": "2.13"})
THERE = fingerprint(device="H200", dtype="bfloat16", model="tiny", versions={"torch": "2.13"})


def measured():
    costs = CostModel()
    for _ in range(10):
        for nodes in (0, 8, 16):
            costs.observe_verify(nodes, 1.0 + nodes / 8)
        costs.observe_draft("suffix", 8, 0.5)
        costs.observe_catch_up("suffix", 100, 2.0)
        costs.observe_overhead(0.25)
    return costs


def test_fingerprints():
    assert HERE == "device=cpu; dtype=float32; model=tiny; torch=2.13"
    versions = {"torch": "2", "adaptspec": "1"}
    assert fingerprint(device="c", dtype="d", model="m", versions=versions) == fingerprint(
        device="c", dtype="d", model="m", versions=dict(reversed(versions.items()))
    )
    for bad in ({"device": ""}, {"model": "a; b"}, {"dtype": 3}, {"versions": {"torch": None}}):
        with pytest.raises(ValueError, match="must be text that is not empty"):
            fingerprint(**({"device": "c", "dtype": "d", "model": "m", "versions": {}} | bad))


def test_a_profile_restores_exactly(tmp_path):
    costs = measured()
    costs.save_profile(tmp_path / "costs.json", fingerprint=HERE)
    loaded = CostModel()
    loaded.observe_verify(3, 9.0)
    loaded.load_profile(tmp_path / "costs.json", fingerprint=HERE)
    assert loaded.state_dict() == costs.state_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_a_profile_serves_other_priors(tmp_path):
    measured().save_profile(tmp_path / "costs.json", fingerprint=HERE)
    loaded = CostModel(verify_prior=CostPrior(5.0))
    loaded.load_profile(tmp_path / "costs.json", fingerprint=HERE)
    assert loaded.verify_seconds(8) == 2.0
    assert loaded.state_dict()["priors"]["verify"] == [5.0, 0.0]


def test_a_foreign_profile_is_refused(tmp_path):
    measured().save_profile(tmp_path / "costs.json", fingerprint=THERE)
    costs = CostModel()
    before = costs.state_dict()
    with pytest.raises(ValueError) as caught:
        costs.load_profile(tmp_path / "costs.json", fingerprint=HERE)
    assert "was measured with device=H200; dtype=bfloat16, here it is device=cpu; dtype=float32:" in str(caught.value)
    assert "foreign=True" in str(caught.value)
    assert costs.state_dict() == before


def test_a_foreign_profile_gives_the_shape(tmp_path):
    measured().save_profile(tmp_path / "costs.json", fingerprint=THERE)
    costs = CostModel()
    costs.load_profile(tmp_path / "costs.json", fingerprint=HERE, foreign=True)
    arm = Arm("suffix", 8)
    assert costs.verify_seconds(8) == 2.0
    assert costs.draft_seconds("suffix", 8) == 0.5
    assert costs.catch_up_seconds("suffix", 10) == pytest.approx(0.2)
    assert costs.overhead_seconds() == 0.25
    assert not costs.known(arm) and not costs.known(Arm.autoregressive())
    restored = CostModel()
    restored.load_state_dict(json.loads(json.dumps(costs.state_dict())))
    for model in (costs, restored):
        model.observe_verify(0, 10.0)
        model.observe_draft("suffix", 8, 5.0)
        model.observe_catch_up("suffix", 100, 20.0)
        model.observe_overhead(2.5)
        assert model.verify_curve(16)[[0, 8, 16]] == pytest.approx([10.0, 20.0, 30.0])
        assert model.step_seconds(arm, 8, cold_tokens=100) == pytest.approx(20.0 + 5.0 + 20.0 + 2.5)
        assert model.known(arm)


def test_own_measurements_stay_beside_a_foreign_profile(tmp_path):
    measured().save_profile(tmp_path / "costs.json", fingerprint=THERE)
    costs = CostModel()
    costs.observe_verify(8, 4.0)
    costs.observe_overhead(7.0)
    costs.observe_catch_up("suffix", 100, 50.0)
    costs.load_profile(tmp_path / "costs.json", fingerprint=HERE, foreign=True)
    assert costs.verify_curve(16)[[0, 8, 16]] == pytest.approx([2.0, 4.0, 6.0])
    assert costs.overhead_seconds() == 7.0
    assert costs.catch_up_seconds("suffix", 100) == 50.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a cost profile: not readable as JSON"),
        ("", "is not a cost profile: not readable as JSON"),
        ("[]", "is not a cost profile: state: a cost profile must be a mapping"),
        ("{}", "is not a cost profile: state: version of a cost profile is missing"),
        ('{"version": 2, "fingerprint": "x", "state": {}}', "is not a cost profile: state: version must be 1, got 2"),
        ('{"version": 1, "fingerprint": 3, "state": {}}', "fingerprint must be text and state a mapping"),
        ('{"version": 1, "fingerprint": "x", "state": {}, "more": 1}', "unknown field of a cost profile 'more'"),
        ('{"version": 1, "fingerprint": "x", "state": {}}', "version of the costs is missing"),
    ],
)
def test_damaged_profiles_are_refused(tmp_path, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        CostModel().load_profile(path, fingerprint="x")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "costs.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a cost profile"):
        CostModel().load_profile(path, fingerprint=HERE)


def test_a_truncated_profile_is_refused(tmp_path):
    path = tmp_path / "costs.json"
    measured().save_profile(path, fingerprint=HERE)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(ValueError, match="is not a cost profile"):
        CostModel().load_profile(path, fingerprint=HERE)


def test_a_missing_profile_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        CostModel().load_profile(tmp_path / "none.json", fingerprint=HERE)


def test_only_the_own_profile_is_overwritten(tmp_path):
    path = tmp_path / "costs.json"
    costs = measured()
    costs.save_profile(path, fingerprint=HERE)
    costs.observe_overhead(1.0)
    costs.save_profile(path, fingerprint=HERE)
    text = path.read_text()
    with pytest.raises(ValueError, match="give another path"):
        costs.save_profile(path, fingerprint=THERE)
    assert path.read_text() == text
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ValueError, match="is not a cost profile"):
        costs.save_profile(tmp_path / "notes", fingerprint=HERE)
    assert (tmp_path / "notes").read_text() == "mine"
