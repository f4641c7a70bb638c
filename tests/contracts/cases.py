"""How the drafter contract suite builds each registered drafter and the world it lives in.

A drafter that `make_drafter(name)` builds needs no entry here: it is put into a `ModelWorld` if it taps or runs the
target, else into a `ScriptedWorld`. Any other needs an entry in `CASES`, or the suite fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from adaptspec.drafters import DRAFTERS, Drafter, Needs, make_drafter
from adaptspec.drafters.griffin_gs import StaticTree
from adaptspec.types import DraftContext, DraftTree, ExtraRows, Observation, Sampling, Verdict
from tests import tiny_models
from tests.drafters.cell_variants import DRAFTER_VARIANTS, SAME_CODE
from tests.drafters.policy_cases import random_policies

GREEDY = Sampling()


class World(ABC):
    """What one drafter sees of one request after the other: a target that continues each text in one way.

    Attributes:
        vocab_size: V.
        shortest: fewest committed tokens with which a request can start.
        steps: steps of a request that are worth their time.
        habits: of the texts in `checks.streams`, those worth trying one after the other.
        committed: tokens of the current request, root included.
    """

    shortest = 1
    steps = 12
    habits: tuple[str, ...] = ("random", "few tokens", "noisy phrase", "periodic", "constant")

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.committed: list[int] = []
        self._extra: ExtraRows | None = None

    @property
    @abstractmethod
    def target(self) -> Any:
        """What `bind` is given."""

    @abstractmethod
    def start(self, drafter: Drafter, text: Sequence[int], split: int) -> None:
        """Prefill a request that starts with `split` committed tokens of `text`; how it goes on is up to the world."""

    @abstractmethod
    def oracle(self, count: int) -> list[int]:
        """The next tokens that the target will commit."""

    @abstractmethod
    def commit(self, drafter: Drafter, tree: DraftTree) -> list[int]:
        """Verify a tree, tell the drafter, return the committed tokens."""

    def context(self, *, max_depth: int = 64, sampling: Sampling = GREEDY, seed: int = 0) -> DraftContext:
        """The context of the next proposal."""
        rng = np.random.default_rng(seed)
        return DraftContext(self.committed[-1], len(self.committed), max_depth, sampling, rng)

    def ask(
        self,
        drafter: Drafter,
        budget: int,
        *,
        max_depth: int = 64,
        sampling: Sampling = GREEDY,
        seed: int = 0,
    ) -> DraftTree:
        """A tree; extra rows of the drafter take part in the next `commit`."""
        context = self.context(max_depth=max_depth, sampling=sampling, seed=seed)
        tree = drafter.propose(context, budget)
        self._extra = drafter.extra_rows(context, budget) if drafter.needs.extra_rows else None
        return tree


class VocabularyOnly:
    """A target for drafters that read nothing of it but the vocabulary size."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


class ScriptedWorld(World):
    """A target that continues with the rest of the text, again and again. Off that path its opinions are arbitrary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._target = VocabularyOnly(vocab_size)
        self._text: list[int] = []

    @property
    def target(self) -> VocabularyOnly:
        return self._target

    def start(self, drafter: Drafter, text: Sequence[int], split: int) -> None:
        self._text = list(text)
        self.committed = self._text[:split]
        drafter.prefill(np.asarray(self.committed, dtype=np.int64))

    def oracle(self, count: int) -> list[int]:
        first = len(self.committed)
        return [self._text[i % len(self._text)] for i in range(first, first + count)]

    def commit(self, drafter: Drafter, tree: DraftTree) -> list[int]:
        depths = tree.depths()
        truth = self.oracle(int(depths.max(initial=0)) + 1)
        path = follow(tree, truth)
        tokens = np.asarray(truth[: len(path) + 1], dtype=np.int64)
        top = None
        if drafter.needs.target_top_k:
            best = (np.concatenate([[self.committed[-1]], tree.token_ids]) * 31 + 17) % self.vocab_size
            best[0] = truth[0]
            best[path + 1] = truth[1 : len(path) + 1]
            top = (best[:, None] + np.arange(drafter.needs.target_top_k)) % self.vocab_size
        extra = None
        if self._extra is not None:
            extra = (self._extra.token_ids * 31 + self._extra.depths * 7 + 3) % self.vocab_size
            self._extra = None
        self.committed += tokens.tolist()
        drafter.observe(Observation(tree, Verdict(path, tokens), tokens, top, {}, extra))
        return tokens.tolist()


class ModelWorld(World):
    """A tiny random Llama, decoded greedily. Only the first tokens of a text count: the model goes on by itself."""

    shortest = 2
    steps = 6
    habits = ("random", "periodic")

    def __init__(self, vocab_size: int, *, layers: int = 4) -> None:
        from adaptspec.target.hf import HFTarget

        super().__init__(vocab_size)
        self._target = HFTarget(_tiny_llama(vocab_size, layers))
        self._judge = HFTarget(_tiny_llama(vocab_size, layers))

    @property
    def target(self) -> Any:
        return self._target

    def start(self, drafter: Drafter, text: Sequence[int], split: int) -> None:
        import torch

        self._target.tap(tuple(sorted(drafter.needs.taps)))
        prompt = [token % self.vocab_size for token in text[: split - 1]]
        scored = self._target.prefill(torch.tensor(prompt))
        self.committed = [*prompt, int(scored.logits[-1].argmax())]
        features = {tap: scored.features[tap] for tap in drafter.needs.taps}
        drafter.prefill(np.asarray(self.committed, dtype=np.int64), features)

    def oracle(self, count: int) -> list[int]:
        import torch

        tokens: list[int] = []
        for _ in range(count):
            tokens.append(int(self._judge.prefill(torch.tensor(self.committed + tokens)).logits[-1].argmax()))
        return tokens

    def commit(self, drafter: Drafter, tree: DraftTree) -> list[int]:
        from adaptspec.target.hf import feature_rows

        scored = self._target.score(self.committed[-1], tree, self._extra)
        best = scored.logits.argmax(-1).tolist()
        path: list[int] = []
        row = 0
        for node, (token, parent) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
            if parent == row - 1 and token == best[row]:
                path.append(node)
                row = node + 1
        accepted = np.asarray(path, dtype=np.int64)
        tokens = np.asarray([best[0], *(best[node + 1] for node in path)], dtype=np.int64)
        self._target.commit(accepted)
        self.committed += tokens.tolist()
        wanted = drafter.needs.target_top_k
        top = scored.logits.topk(wanted, dim=-1).indices.numpy() if wanted else None
        extra = None if scored.extra_logits is None else scored.extra_logits.argmax(-1).numpy()
        self._extra = None
        features = feature_rows(scored.features, accepted) if scored.features else {}
        paired = None if scored.paired is None else feature_rows({0: scored.paired}, accepted)[0]
        verdict = Verdict(accepted, tokens)
        drafter.observe(Observation(tree, verdict, tokens, top, features, extra, paired=paired))
        return tokens.tolist()


def follow(tree: DraftTree, truth: Sequence[int]) -> np.ndarray:
    """Nodes on the path that spells `truth`, the first child where several carry the token."""
    path: list[int] = []
    parent = -1
    for node, (token, above) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
        if above == parent and token == truth[len(path)]:
            path.append(node)
            parent = node
    return np.asarray(path, dtype=np.int64)


@lru_cache(maxsize=4)
def _tiny_llama(vocab_size: int, layers: int) -> Any:
    return tiny_models.make_llama(vocab_size=vocab_size, layers=layers)


@lru_cache(maxsize=2)
def _random_heads(kind: str) -> Any:
    """Small random heads for any model of hidden size 32; Hydra's with a prefix layer, and thus with a cache."""
    import torch

    from adaptspec.drafters.hydra_heads import HydraConfig, HydraHeads
    from adaptspec.drafters.medusa_heads import MedusaConfig, MedusaHeads

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if kind == "medusa":
            module: Any = MedusaHeads(MedusaConfig(32, heads=3))
        else:
            sizes = {"attention_heads": 4, "key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
            module = HydraHeads(HydraConfig(32, heads=3, prefix=True, **sizes))
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return module


@lru_cache(maxsize=8)
def _random_cell(variant: str) -> Any:
    """A small random cell for any model of hidden size 32 and 4 layers or more."""
    from tests.drafters.cell_cases import tiny_cell

    return tiny_cell(variant)


BLOCK_DRAFTERS = ("dflash", "ddtree", "treeflash", "taps")


@lru_cache(maxsize=4)
def _random_block(drafter: str) -> Any:
    """Small random block-parallel modules for any model of hidden size 32 and 4 layers or more."""
    from tests.drafters.block_cases import tiny_block

    return tiny_block(drafter)


def _sizable(**options: Any) -> Drafter:
    """What rules for depth and size are tested on."""
    return make_drafter("griffin", path=_random_cell("griffin"), **options)


@lru_cache(maxsize=2)
def _random_confu_cell() -> Any:
    from tests.drafters.cell_cases import tiny_confu_cell

    return tiny_confu_cell()


@lru_cache(maxsize=2)
def _random_adapters(kind: str) -> Any:
    from tests.drafters.exit_cases import tiny_adapters

    return tiny_adapters(kind)


@dataclass(frozen=True, slots=True)
class DrafterCase:
    """How to test one drafter.

    Attributes:
        build: a new drafter, not yet bound, for a world.
        world: a new world for a vocabulary size; V = 64 and V = 70,000 are asked for.
        lookup: the next proposal depends on the committed tokens only, not on the steps that committed them.
        like: the drafter that has the same code, if this one differs from it in weights and defaults only; it is then
            not put through every test again.
        own: methods in which it differs all the same: they keep nothing, and have tests of their own.
    """

    build: Callable[[World], Drafter]
    world: Callable[[int], World]
    lookup: bool
    like: str | None = None
    own: frozenset[str] = frozenset()


CASES: dict[str, DrafterCase] = {
    **{
        name: DrafterCase(
            build=lambda world, name=name: make_drafter(name, path=_random_heads(name)), world=ModelWorld, lookup=False
        )
        for name in ("medusa", "hydra")
    },
    **{
        name: DrafterCase(
            build=lambda world, name=name: make_drafter(name, path=_random_cell(DRAFTER_VARIANTS[name])),
            world=ModelWorld,
            lookup=False,
            like=SAME_CODE.get(name),
        )
        for name in DRAFTER_VARIANTS
    },
    **{
        name: DrafterCase(
            build=lambda world, name=name: make_drafter(name, path=_random_block(name)),
            world=ModelWorld,
            lookup=False,
            like=None if name == "ddtree" else "ddtree",
            own=frozenset(["__init__", "_draft", "budget_of"] if name in ("treeflash", "taps") else []),
        )
        for name in BLOCK_DRAFTERS
    },
    "confu": DrafterCase(
        build=lambda world: make_drafter("confu", path=_random_confu_cell()), world=ModelWorld, lookup=False
    ),
    "griffin-gs": DrafterCase(
        build=lambda world: make_drafter("griffin-gs", path=StaticTree(3, 20), drafter=_sizable()),
        world=ModelWorld,
        lookup=False,
    ),
    "griffin-ltd": DrafterCase(
        build=lambda world: make_drafter("griffin-ltd", path=random_policies(), drafter=_sizable(max_depth=12)),
        world=ModelWorld,
        lookup=False,
    ),
    "draft-model": DrafterCase(
        build=lambda world: make_drafter("draft-model", path=_tiny_llama(world.vocab_size, 2)),
        world=ModelWorld,
        lookup=False,
    ),
    "layer-skip": DrafterCase(
        build=lambda world: make_drafter("layer-skip", min_confidence=0.0),  # a random model is confident of nothing
        world=ModelWorld,
        lookup=False,
    ),
    "draft-verify": DrafterCase(
        build=lambda world: make_drafter("draft-verify", threshold=0.0), world=ModelWorld, lookup=False
    ),
    "kangaroo": DrafterCase(
        build=lambda world: make_drafter("kangaroo", path=_random_adapters("kangaroo"), min_confidence=0.0),
        world=ModelWorld,
        lookup=False,
    ),
    "cats": DrafterCase(
        build=lambda world: make_drafter("cats", path=_random_adapters("cats")), world=ModelWorld, lookup=False
    ),
    "cats-chain": DrafterCase(
        build=lambda world: make_drafter("cats-chain", path=_random_adapters("cats")),
        world=ModelWorld,
        lookup=False,
        like="cats",
    ),
    "cats-eagle": DrafterCase(
        build=lambda world: make_drafter(
            "cats-eagle",
            path=_random_adapters("cats"),
            eagle=make_drafter("eagle3", path=_random_cell("eagle3")),
            min_probability=0.01,
        ),
        world=ModelWorld,
        lookup=False,
    ),
}
"""Entries for drafters that need more than a name."""


def case_for(name: str) -> DrafterCase:
    """The entry of `CASES`, or the default."""
    if name in CASES:
        return CASES[name]
    needs = DRAFTERS[name].needs
    assert isinstance(needs, Needs), f"needs of drafter {name!r} depend on the instance: give it an entry in CASES"
    return DrafterCase(
        build=lambda world: make_drafter(name),
        world=ModelWorld if needs.taps or needs.target else ScriptedWorld,
        lookup=needs == Needs() and DRAFTERS[name].siblings == "deterministic",
    )


def names(*, alike: bool) -> list[str]:
    """Registered drafters that are (`alike`) or are not another one with other weights."""
    return [name for name in sorted(DRAFTERS) if (case_for(name).like is not None) == alike]
