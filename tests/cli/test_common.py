from __future__ import annotations

import pytest

from adaptspec.cli import common
from adaptspec.cli.settings import StepCounter, Workbench, arms_of, distinct
from adaptspec.drafters import DRAFTERS
from tests.cli.fakes import echo


def test_names_may_be_repeated_or_separated_by_commas() -> None:
    assert common.split_names(["a, b:c/d.bin", "e", "a", ""]) == ("a", "b:c/d.bin", "e")
    assert common.split_names(None) == ()


def test_budgets() -> None:
    assert common.parse_budgets("8, 32,8,auto") == (8, 32, "auto")
    for text in ("8,x", "-1", "1.5"):
        with pytest.raises(ValueError, match="budgets must be whole numbers"):
            common.parse_budgets(text)
    with pytest.raises(ValueError, match="budgets must not be empty"):
        common.parse_budgets(",")


def test_default_pool_is_registered_and_needs_no_path() -> None:
    assert "suffix" in common.default_pool()
    assert set(common.default_pool()) <= set(common.path_free_drafters()) <= set(DRAFTERS)
    assert common.choose_pool(None) == common.default_pool()


def test_pool_all_and_additions() -> None:
    assert set(common.choose_pool(["all"])) == set(common.path_free_drafters())
    assert common.choose_pool(["suffix@4,all"])[-1] == "suffix@4"
    assert common.choose_pool(["suffix,prompt-lookup"]) == ("suffix", "prompt-lookup")


def test_unknown_names_suggest_the_right_one() -> None:
    with pytest.raises(ValueError, match="unknown drafter 'sufix'; did you mean 'suffix'"):
        common.make_pool(["sufix"])
    with pytest.raises(ValueError, match="unknown strategy 'fxed'"):
        common.choose_strategies(["fxed"])
    with pytest.raises(ValueError, match="arm must look like"):
        common.choose_strategies(["fixed:suffix"])


def test_pool_entries_become_drafters_and_arms() -> None:
    drafter, *arms = common.make_pool(["suffix", "ar", "prompt-lookup@4"])
    assert drafter.name == "suffix" and [str(arm) for arm in arms] == ["ar", "prompt-lookup@4"]
    assert common.is_arm("a@4/fr:8") and not common.is_arm("rest:folder@home/store.bin")


def test_arms_cross_budgets_and_vocabularies() -> None:
    arms = arms_of("medusa", budgets=(0, 4, 8), vocab=("full", "fr:8"))
    assert [str(arm) for arm in arms] == ["medusa@4", "medusa@8", "medusa@4/fr:8", "medusa@8/fr:8"]
    assert [str(arm) for arm in arms_of("suffix", budgets=(4,), vocab=("fr:8",))] == ["suffix@4"]  # it has no head
    assert [str(arm) for arm in arms_of("rest:a/b.bin", budgets=(4,), vocab=("full",))] == ["rest@4"]
    assert [str(arm) for arm in arms_of("suffix@2", budgets=(4, 8), vocab=("full",))] == ["suffix@2"]
    assert arms_of("ar", budgets=(4,), vocab=("full",)) == []


def test_strategies_by_option() -> None:
    assert common.choose_strategies(["none"]) == ()
    assert common.choose_strategies(["fixed:suffix@4"]) == ("fixed:suffix@4",)
    assert common.choose_strategies(None) == common.default_strategies()
    assert set(common.default_strategies()) <= set(common.available_strategies())
    assert set(common.choose_strategies(["all"])) == set(common.available_strategies())


def test_default_strategy_without_learners_is_an_arm_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "default_strategies", lambda: ())
    assert common.default_strategy(["rest:store.bin", "suffix"]) == "fixed:rest@16"
    assert common.default_strategy(["suffix@4"]) == "fixed:suffix@4"
    monkeypatch.setattr(common, "default_strategies", lambda: ("hedge", "ucb"))
    assert common.default_strategy(["suffix"]) == "hedge"


def test_settings_of_one_name_are_kept_once() -> None:
    first, second, other = echo("a", []), echo("a", []), echo("b", [])
    assert distinct([first, other, second]) == [first, other]


def test_step_counter_leaves_the_prompt_out() -> None:
    import torch

    counter = StepCounter()
    counter.put(torch.tensor([[1, 2, 3]]))
    assert counter.first_seconds is None
    counter.put(torch.tensor([4]))
    counter.put(torch.tensor([5, 6]))
    counter.end()
    assert counter.lengths == [1, 2] and counter.first_seconds is not None


def test_drafters_that_learn_are_fresh_and_others_are_shared() -> None:
    bench = Workbench(model=None, tokenizer=None)
    first, second = bench._drafters(["suffix", "prompt-lookup"]), bench._drafters(["suffix", "prompt-lookup"])
    assert first[0] is not second[0]  # remembers past outputs
    assert first[1] is second[1]  # looks at this text only
