"""The arms of a controller: drafters x budgets x vocabularies, and no speculation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from adaptspec.types import Arm

Budget = int | Literal["auto"]


def check_budgets(budgets: Iterable[Budget]) -> tuple[Budget, ...]:
    """Budgets in order without repeats; 0 stands for no speculation, which is an arm anyway.

    Raises:
        ValueError: not whole numbers in [0, 1024] or "auto", or none given.
    """
    if isinstance(budgets, (int, str)):
        raise ValueError(f"budgets must be a sequence such as (8, 16, 32), got {budgets!r}")
    checked: list[Budget] = []
    for budget in budgets:
        if budget != "auto" and (isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget <= 1024):
            raise ValueError(f"budgets must be whole numbers in [0, 1024] or 'auto', got {budget!r}")
        if budget not in checked:
            checked.append(budget)
    if not checked:
        raise ValueError("budgets must not be empty")
    return tuple(checked)


def make_arms(
    drafters: Sequence[str],
    *,
    budgets: Sequence[Budget],
    vocab: Sequence[str] | Mapping[str, Sequence[str]],
    explicit: Sequence[Arm] = (),
) -> tuple[Arm, ...]:
    """No speculation first, then every drafter at every budget and vocabulary, then arms that were given whole.

    Args:
        vocab: of all drafters, or by drafter.
    """
    arms = [Arm.autoregressive()]
    for drafter in drafters:
        names = vocab[drafter] if isinstance(vocab, Mapping) else vocab
        arms += [Arm(drafter, budget, name) for name in names for budget in budgets if budget != 0]
    arms += explicit
    return tuple(dict.fromkeys(arms))
