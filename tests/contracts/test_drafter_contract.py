"""Every registered drafter keeps the contract of `adaptspec.drafters.base.Drafter`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from adaptspec.drafters import DRAFTERS, Needs
from adaptspec.types import SIBLINGS, Sampling
from tests.contracts import checks
from tests.contracts.cases import CASES, DrafterCase, case_for, names

NAMES = sorted(DRAFTERS)
DISTINCT = names(alike=False)
LOOKUPS = [name for name in NAMES if case_for(name).lookup]
LARGE_VOCABULARY = 70_000
"""Above 2^16: token ids that 16 bits would cut off."""


@pytest.fixture(params=DISTINCT)
def case(request: pytest.FixtureRequest) -> DrafterCase:
    return case_for(request.param)


def test_there_is_no_case_for_an_unknown_drafter() -> None:
    assert set(CASES) <= set(DRAFTERS)


@pytest.mark.parametrize("name", NAMES)
def test_class_attributes(name: str) -> None:
    drafter = case_for(name).build(case_for(name).world(64))
    assert drafter.name == name and DRAFTERS[name].summary and isinstance(drafter.needs, Needs)
    assert drafter.siblings in SIBLINGS and isinstance(drafter.isolate, bool)


@pytest.mark.parametrize("name", names(alike=True))
def test_a_drafter_with_other_weights_has_no_code_of_its_own(name: str) -> None:
    other = case_for(name).like
    assert other in DISTINCT
    for attribute in (set(dir(DRAFTERS[name])) | set(dir(DRAFTERS[other]))) - case_for(name).own:
        ours, theirs = (getattr(DRAFTERS[one], attribute, None) for one in (name, other))
        assert (
            ours is theirs or not callable(ours) or attribute in ("__class__", "__init_subclass__", "__subclasshook__")
        )
    checks.check_validity(case_for(name), text=checks.streams(64)["random"], vocab_size=64, budget=32)
    checks.check_sampling(case_for(name))


def test_the_package_imports_no_torch() -> None:
    code = "import sys, adaptspec.drafters; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("budget", checks.BUDGETS)
@pytest.mark.parametrize("habit", sorted(checks.streams(64)))
def test_trees_are_valid(case: DrafterCase, habit: str, budget: int) -> None:
    checks.check_validity(case, text=checks.streams(64)[habit], vocab_size=64, budget=budget)


@pytest.mark.parametrize("habit", ["noisy phrase", "constant", "random"])
def test_large_token_ids(case: DrafterCase, habit: str) -> None:
    text = checks.streams(LARGE_VOCABULARY)[habit]
    assert max(text) > 2**16
    checks.check_validity(case, text=text, vocab_size=LARGE_VOCABULARY, budget=32)


@pytest.mark.parametrize("name", LOOKUPS)
def test_large_token_ids_come_back(name: str) -> None:
    checks.check_large_ids(case_for(name))


def test_short_contexts(case: DrafterCase) -> None:
    checks.check_short_contexts(case)


def test_something_is_drafted(case: DrafterCase) -> None:
    checks.check_drafts_something(case)


def test_discarded_proposals_change_nothing(case: DrafterCase) -> None:
    checks.check_idempotence(case)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_determinism(case: DrafterCase, temperature: float) -> None:
    checks.check_determinism(case, sampling=Sampling(temperature=temperature))


def test_sampling(case: DrafterCase) -> None:
    checks.check_sampling(case)


@pytest.mark.parametrize("name", LOOKUPS)
def test_multi_token_commits_equal_single_ones(name: str) -> None:
    checks.check_multi_token_commits(case_for(name))


def test_reset_forgets(case: DrafterCase) -> None:
    checks.check_reset(case)


@pytest.mark.parametrize("finished", [True, False])
def test_state_is_all_that_stays(case: DrafterCase, finished: bool) -> None:
    checks.check_state_is_all_that_stays(case, finished=finished)


def test_foreign_and_damaged_states_are_refused(case: DrafterCase) -> None:
    checks.check_foreign_states(case)
