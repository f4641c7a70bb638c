"""The example in CONTRIBUTING.md is a complete drafter that keeps the contract and the output."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec import AdaptiveSpec, DraftContext, Drafter, DraftTree, Observation, Sampling, Verdict
from adaptspec.drafters.registry import DRAFTERS, make_drafter
from tests.contracts import checks
from tests.contracts.cases import DrafterCase, ScriptedWorld

NAME = "last-successor"


def example() -> str:
    """The only Python block of the document."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return code


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drafter]:
    """The example, registered for one test."""
    before = dict(DRAFTERS)
    exec(compile(example(), "CONTRIBUTING.md", "exec"), ModuleType("contributed").__dict__)
    yield make_drafter(NAME)
    DRAFTERS.clear()
    DRAFTERS.update(before)


def test_it_is_as_short_as_promised() -> None:
    body = example().partition("@register_drafter")[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 30


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_it_follows_the_house_style(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--stdin-filename", "example.py", "-"],
        input=example(),
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout


def test_it_drafts_what_followed_last_time(drafter: Drafter) -> None:
    def propose(root: int, budget: int, max_depth: int = 9) -> list[int]:
        context = DraftContext(root, 7, max_depth, Sampling(), np.random.default_rng(0))
        return drafter.propose(context, budget).token_ids.tolist()

    drafter.prefill(np.array([5, 6, 7, 5, 8, 6]))
    assert propose(6, 4) == [7, 5, 8, 6]
    assert propose(6, 2) == [7, 5]
    assert propose(6, 4, max_depth=1) == [7]
    assert propose(9, 4) == []
    tokens = np.array([9, 5])
    drafter.observe(Observation(DraftTree.empty(), Verdict(np.array([0]), tokens), tokens))
    assert propose(6, 3) == [9, 5, 8]


def test_it_keeps_the_drafter_contract(drafter: Drafter) -> None:
    case = DrafterCase(build=lambda world: make_drafter(NAME), world=ScriptedWorld, lookup=True)
    for budget in checks.BUDGETS:
        for text in checks.streams(64).values():
            checks.check_validity(case, text=text, vocab_size=64, budget=budget)
    checks.check_large_ids(case)
    checks.check_short_contexts(case)
    checks.check_drafts_something(case)
    checks.check_idempotence(case)
    checks.check_determinism(case, sampling=Sampling(temperature=1.0))
    checks.check_sampling(case)
    checks.check_multi_token_commits(case)
    checks.check_reset(case)
    checks.check_state_is_all_that_stays(case, finished=True)
    checks.check_foreign_states(case)


def test_it_speeds_up_a_model_and_changes_nothing(drafter: Drafter, tiny_llama: Any) -> None:
    prompt = torch.tensor([[3, 4, 5, 6, 3, 4, 5, 6, 3]])
    alone = tiny_llama.generate(prompt, max_new_tokens=60, do_sample=False, eos_token_id=-1)
    spec = AdaptiveSpec(pool=[NAME], strategy=f"fixed:{NAME}@8")
    result = spec.generate(tiny_llama, prompt, max_new_tokens=60, eos_token_id=-1)
    assert torch.equal(result.sequences, alone)
    assert result.stats.steps < 60
