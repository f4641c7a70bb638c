"""Training the adapters of early-exit drafters: what they read, how they run over whole texts, how they begin.

An adapter reads the target's hidden state of a token after its exit layer and predicts what the target says after that
very token. The states of drafted tokens are the target's own as well, because its first layers run when it drafts, so
there is no recursion to be trained: step k of a row only stands k tokens further on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from adaptspec.drafters.cells import CellCache
from adaptspec.drafters.early_exit.adapter import EXITS, AdapterConfig, Adapters
from adaptspec.drafters.early_exit.published import default_exit
from adaptspec.drafters.target_parts import TargetParts
from adaptspec.training.batches import Batch
from adaptspec.training.initial import cell_config
from adaptspec.training.unroll import Step

_COPIED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "input_layernorm")


def default_exits(kind: str, layers: int) -> tuple[int, ...]:
    """Exit layers of a target of `layers` layers: Kangaroo's, and CATS' 3 and 10 of about 30 (arXiv 2605.11186).

    Raises:
        ValueError: a target with too few layers.
    """
    if layers <= EXITS[kind]:
        raise ValueError(f"{kind} needs a target of more than {EXITS[kind]} layers, got {layers}")
    if kind == "kangaroo":
        return (default_exit(layers),)
    first = min(3, max(1, layers // 4))
    return first, max(first + 1, layers // 3)


def check_exits(kind: str, exits: Sequence[int], layers: int) -> tuple[int, ...]:
    """Raise ValueError unless these layers can be the exits of a kind."""
    chosen = tuple(exits)
    if len(chosen) != EXITS[kind] or list(chosen) != sorted(set(chosen)) or not 1 <= chosen[0] <= chosen[-1] < layers:
        raise ValueError(
            f"taps of {kind!r} must be {EXITS[kind]} ascending layers in [1, {layers - 1}], got {list(chosen)}"
        )
    return chosen


def make_adapters(
    kind: str, exits: Sequence[int], *, parts: TargetParts, layers: Sequence[nn.Module], seed: int, copy: bool = True
) -> Adapters:
    """New adapters of the target's own sizes; with `copy` each begins as the attention of the layer that follows its
    exit, and with the target's final norm, so that it starts as an early exit does.

    Args:
        layers: the target's decoder layers.
    """
    sizes = cell_config(parts, kind="eagle1").to_dict()
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names = (*names, "rms_norm_eps", "rope_theta", "rope_scaling")
    config = AdapterConfig(kind=kind, exits=tuple(exits), **{name: sizes[name] for name in names})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapters = Adapters(config)
    if copy:
        with torch.no_grad():
            for exit, adapter in zip(config.exits, adapters.exits, strict=True):
                for name in _COPIED:
                    _copy(_part(adapter, name), _part(layers[exit], name))
                _copy(adapter.norm, parts.norm)
    return adapters


class ExitRollout:
    """Adapters over whole texts.

    Args:
        module: trained in place. The first adapter drafts; the others predict the same tokens (`Step.also`).
    """

    first = -1

    def __init__(self, module: Adapters) -> None:
        self.module = module

    def steps(self, batch: Batch, count: int) -> Iterator[Step]:
        adapters = self.module.exits
        mask = batch.mask
        diagonal = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device).expand_as(mask)
        cache = CellCache()
        for step in range(count):
            if step:
                mask = torch.cat([mask, diagonal], dim=2)
            where: dict[str, Any] = {"positions": batch.positions + 1 + step, "mask": mask[:, None]}
            drafted = adapters[0](batch.next_features[0][:, :, step], cache=cache, **where)
            also = ()
            if not step:
                pairs = zip(adapters[1:], batch.next_features[1:], strict=True)
                also = tuple(adapter(states[:, :, 0], **where) for adapter, states in pairs)
            yield Step(drafted, also=also)

    def target_feature(self, batch: Batch, step: int) -> torch.Tensor:
        raise ValueError("adapters predict no hidden states of the target")


def _part(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _copy(mine: Any, theirs: Any) -> None:
    weight = getattr(theirs, "weight", None)
    if weight is not None and weight.shape == mine.weight.shape:
        mine.weight.copy_(weight)
