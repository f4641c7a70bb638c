"""Views of a transformers model: other module objects on the way to something that is replaced, the same parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from adaptspec.target.layout import decoder_layers


def with_layers(model: torch.nn.Module, keep: Sequence[int]) -> torch.nn.Module:
    """A view of a causal language model that runs only the decoder layers `keep`; it shares every parameter and leaves
    the model as it is.

    Raises:
        ValueError: the model is spread over devices by hooks that are tied to the original modules.
    """
    layers = _layers(model)
    return with_modules(model, [layers[k] for k in keep], keep)


def with_modules(model: torch.nn.Module, layers: Sequence[torch.nn.Module], places: Sequence[int]) -> torch.nn.Module:
    """A view that runs `layers` in place of its decoder layers.

    Args:
        places: the decoder layer that each of them stands for, which tells its kind of attention.

    Raises:
        ValueError: see `with_layers`.
    """
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise ValueError("skipping layers is not supported for a model that device_map spreads over several devices")
    backbone, attribute = decoder_layers(model)
    view = shallow_copy(backbone)
    view._modules[attribute] = torch.nn.ModuleList(layers)
    kinds = getattr(backbone.config, "layer_types", None)
    if kinds is not None and len(set(kinds)) > 1:  # else the one config, whose attention is switched per forward
        view.config = copy.copy(backbone.config)
        view.config.layer_types = [kinds[k] for k in places]
    return replace_module(model, backbone, view)


def headless(model: Any) -> torch.nn.Module:
    """A view that gives hidden states [.., H] in place of logits."""
    return replace_module(model, model.get_output_embeddings(), torch.nn.Identity())


def shallow_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Another module object with the same children and parameters."""
    clone = copy.copy(module)
    clone.__dict__["_modules"] = dict(module._modules)
    return clone


def replace_module(root: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> torch.nn.Module:
    """A copy of the module objects on the way from `root` to `old`, ending in `new`."""
    if root is old:
        return new
    clone = shallow_copy(root)
    for name, child in root._modules.items():
        if child is not None and any(module is old for module in child.modules()):
            clone._modules[name] = replace_module(child, old, new)
    return clone


def _layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    backbone, attribute = decoder_layers(model)
    return getattr(backbone, attribute)
