"""Published systems by the names that leaderboards give them, and the setting of ours that stands for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adaptspec.types import Arm

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class System:
    """One row of a leaderboard.

    Attributes:
        name: as the table shows it.
        published: what the leaderboards call it, as `plain` writes it: "EAGLE-3" and "Eagle3" are both "eagle3".
        drafter: ours; "" for a strategy.
        vocab: kind of vocabulary head, "full" for the whole head.
        strategy: ours; "" for a fixed arm.
        budgets: nodes that its tables were measured with, or ours where they name none.
        containing: what the published configuration must hold.
        note: what is otherwise than published.
    """

    name: str
    published: tuple[str, ...]
    drafter: str = ""
    vocab: str = "full"
    strategy: str = ""
    budgets: tuple[int, ...] = (16,)
    containing: str = ""
    note: str = ""

    def measures(self, setting: str) -> bool:
        """Whether a setting of `adaptspec bench` is one of this system.

        >>> system = System("FR-Spec", ("frspec",), "eagle3", vocab="fr")
        >>> system.measures("eagle3@8/fr:16384"), system.measures("eagle3@8"), system.measures("hedge")
        (True, False, False)
        """
        if self.strategy:
            return setting == self.strategy
        try:
            arm = Arm.parse(setting)
        except ValueError:
            return False
        return arm.drafter == self.drafter and arm.vocab.partition(":")[0] == self.vocab

    def rows(self, published: pd.DataFrame) -> pd.DataFrame:
        """The published figures of this system."""
        own = published["method"].map(plain).isin(self.published)
        if self.containing:
            own &= published["configuration"].str.contains(self.containing, regex=False)
        return published[own]

    def settings(self) -> tuple[str, ...]:
        """What to measure, as `--pool` or `--strategies` of `adaptspec bench` name it."""
        if self.strategy:
            return (self.strategy,)
        return tuple(f"{self.drafter}@{budget}" for budget in self.budgets)


def plain(name: str) -> str:
    """Letters, digits and "+" of a name, in small letters.

    >>> plain("EAGLE-3 Lλ LK"), plain("Griffin+GS"), plain("CATS w/ EAGLE")
    ('eagle3llk', 'griffin+gs', 'catsweagle')
    """
    return "".join(c for c in name.lower() if c == "+" or (c.isascii() and c.isalnum()))


BASELINES = ("ar", "vanilla")
"""No speculation, against which speeds in tokens/s become speed-ups."""

_CHAIN, _TREE = "chain base", "tree base"
_MTP = "published with several requests at a time, ours with one"

SYSTEMS = (
    System("Lookahead", ("lookahead",), "lookahead"),
    System("REST", ("rest",), "rest"),
    System("Medusa", ("medusa",), "medusa"),
    System("EAGLE", ("eagle",), "eagle2", budgets=(30,), note="EAGLE-2's dynamic tree"),
    System("EAGLE-self, chain", ("eagleself",), "eagle1", budgets=(5,), containing=_CHAIN),
    System("EAGLE-self, tree", ("eagleself",), "eagle-self", budgets=(26,), containing=_TREE),
    System("EAGLE-3", ("eagle3", "eagle3kl"), "eagle3", budgets=(16, 30, 60)),
    System("EAGLE-3, LK loss", ("eagle3llk",), "eagle3-lk", budgets=(16, 60)),
    System("ConFu", ("confu",), "confu", budgets=(30, 60)),
    System("GRIFFIN", ("griffin",), "griffin", budgets=(60,)),
    System("GRIFFIN+GS", ("griffin+gs",), "griffin-gs", budgets=(60,)),
    System("GRIFFIN+LTD", ("griffin+ltd",), "griffin-ltd", budgets=(60,)),
    System("MTP, cross-entropy", ("mtporiginal",), "mtp1", budgets=(4,), note="ours trained with KL"),
    System("MTP, KL loss", ("mtpkl",), "mtp1", budgets=(4,)),
    System("MTP, LK loss", ("mtpllk",), "mtp1-lk", budgets=(4,)),
    System(
        "MTP, one layer (DeepSeek, GLM, Qwen3.5, JoyAI)",
        ("deepseekv3", "deepseekv32", "glm5", "glm47flash", "qwen3535ba3b", "joyaillmflash"),
        "mtp1",
        budgets=(4,),
        note=_MTP,
    ),
    System("MTP, three layers (MiMo, Step)", ("mimov2flash", "step35flash"), "mtp3", budgets=(4,), note=_MTP),
    System("DFlash", ("dflash",), "dflash", budgets=(16,)),
    System("DDTree", ("ddtree",), "ddtree", budgets=(16, 64)),
    System("TreeFlash", ("treeflash",), "treeflash", budgets=(16, 64)),
    System("TAPS", ("taps",), "taps", budgets=(16, 64)),
    System("Kangaroo", ("kangaroo",), "kangaroo", budgets=(6,)),
    System("CATS, chain", ("cats",), "cats-chain", budgets=(6,), containing=_CHAIN),
    System("CATS with EAGLE, tree", ("catsweagle",), "cats-eagle", budgets=(40,), containing=_TREE),
    System("FR-Spec", ("frspec",), "eagle3", vocab="fr", budgets=(30,)),
    System("CORAL", ("coral",), "eagle3", vocab="coral", budgets=(30,)),
    System("DynaSpec", ("dynaspec",), "eagle3", vocab="dynaspec", budgets=(30,)),
    System("MicroSpec", ("microspec",), "eagle3", vocab="microspec", budgets=(30,)),
    System("UCB", ("ucb",), strategy="ucb"),
    System("EXP3", ("exp3",), strategy="exp3"),
    System("HedgeSpec", ("hedgespec",), strategy="hedge"),
)


def unknown(methods: Iterable[str]) -> list[str]:
    """Published names that no system here stands for."""
    known = {name for system in SYSTEMS for name in system.published} | set(BASELINES)
    return sorted({method for method in methods if plain(method) not in known})
