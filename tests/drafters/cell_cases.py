"""Random cells of every kind for the tiny Llama, and a request that is driven by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from adaptspec.drafters.cells import Cell, CellConfig, make_cell
from adaptspec.drafters.feature_recursive import FeatureRecursive
from adaptspec.target.hf import HFTarget
from adaptspec.types import DraftContext, DraftTree, Observation, Sampling, Verdict
from tests import tiny_models
from tests.drafters.cell_variants import LAYERS, VARIANTS


def tiny_config(variant: str, **changes: Any) -> CellConfig:
    options = {**VARIANTS[variant], **changes}
    taps = (1, 2, 4) if options["kind"] == "eagle3" else (LAYERS,)
    return CellConfig(
        **{
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "taps": taps,
            **options,
        }
    )


def tiny_cell(variant: str, *, seed: int = 0, **changes: Any) -> Cell:
    """A random cell whose norms and matrices all matter."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        cell = make_cell(tiny_config(variant, **changes))
        for parameter in cell.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(1.5 * torch.randn_like(parameter) / parameter.shape[1] ** 0.5)
    return cell.eval()


def tiny_confu_cell(*, seed: int = 0) -> Cell:
    """The same for ConFu, with taps of EAGLE-3."""
    sizes = {"soft_prompts": 3, "contemplates": 5, "mixed": 2}
    return tiny_cell("eagle3-own", seed=seed, kind="confu", taps=(1, 2, 4), **sizes)


def tiny_llama(vocab_size: int = 64) -> Any:
    """The target of these tests: its final norm differs from 1, so that leaving it out shows."""
    model = tiny_models.make_llama(vocab_size=vocab_size, layers=LAYERS)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(0.5, 1.5, 32))
        model.model.embed_tokens.weight.mul_(20.0)
    return model


class Request:
    """A request on one target; what is accepted is up to the test, which may commit any tokens."""

    def __init__(self, model: Any, drafter: FeatureRecursive, tokens: list[int]) -> None:
        self.target = HFTarget(model)
        self.drafter = drafter
        drafter.bind(self.target)
        self.tokens = list(tokens)
        self.target.tap(drafter.needs.taps)
        features = self.target.prefill(torch.tensor(tokens[:-1])).features
        drafter.prefill(np.array(tokens), features)

    def context(self, **options: Any) -> DraftContext:
        values = {"max_depth": 64, "sampling": Sampling(), "rng": np.random.default_rng(0), **options}
        return DraftContext(self.tokens[-1], len(self.tokens), **values)

    def ask(self, budget: int = 24, **options: Any) -> DraftTree:
        tree = self.drafter.propose(self.context(**options), budget)
        tree.validate(vocab_size=self.target.vocab_size, budget=budget)
        return tree

    def commit(self, tree: DraftTree, path: list[int], bonus: int) -> None:
        """Verify a tree, accept a path of its nodes and a bonus token."""
        from adaptspec.target.hf import feature_rows

        accepted = np.asarray(path, dtype=np.int64)
        features = feature_rows(self.target.score(self.tokens[-1], tree).features, accepted)
        tokens = np.append(tree.token_ids[accepted], bonus).astype(np.int64)
        self.target.commit(accepted)
        self.tokens += tokens.tolist()
        self.drafter.observe(Observation(tree, Verdict(accepted, tokens), tokens, None, features))


def same_proposal(a: DraftTree, b: DraftTree) -> bool:
    """Equal nodes, and scores equal but for rounding."""
    return (
        a.token_ids.tolist() == b.token_ids.tolist()
        and a.parents.tolist() == b.parents.tolist()
        and np.allclose(a.scores, b.scores, rtol=0, atol=2e-4)
    )
