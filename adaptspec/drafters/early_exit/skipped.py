"""Which attention and feed-forward sub-layers a shortened target leaves out, and the file that says so."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from adaptspec.target.hf import HFTarget

FORMAT = "adaptspec-layers"
VERSION = 1
_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
_OWN_KEYS = ("format", "version", "attention", "mlp")


@dataclass(frozen=True, slots=True)
class SkippedLayers:
    """Sub-layers left out (Draft & Verify, arXiv 2309.08168, section 4.1: z* over attention and MLP layers).

    Attributes:
        attention, mlp: layers whose attention or feed-forward part is left out, counted from 0; a layer in both is left
            out whole.

    >>> SkippedLayers((2, 1), (2,))
    SkippedLayers(attention=(1, 2), mlp=(2,))
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("attention", "mlp"):
            layers = getattr(self, name)
            if not isinstance(layers, Sequence) or isinstance(layers, str):
                raise ValueError(f"{name} must be layer numbers, got {layers!r}")
            for layer in layers:
                if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
                    raise ValueError(f"{name} must hold whole numbers >= 0, got {layer!r}")
            object.__setattr__(self, name, tuple(sorted(set(layers))))

    def view(self, target: HFTarget) -> torch.nn.Module:
        """The target's model without them; it shares every parameter.

        Raises:
            ValueError: layers that the target does not have, or parts of them that cannot be told apart; or nothing
                would be left.
        """
        from adaptspec.target.views import shallow_copy, with_modules

        layers = target.layout.layers
        count = len(layers)
        for name in ("attention", "mlp"):
            if getattr(self, name) and getattr(self, name)[-1] >= count:
                raise ValueError(f"{name} must hold layers in [0, {count}), got {list(getattr(self, name))}")
        both = set(self.attention) & set(self.mlp)
        if len(both) == count:
            raise ValueError(f"at least one of the {count} layers must be left")
        kept, places = [], []
        for number, layer in enumerate(layers):
            if number in both:
                continue
            if number in self.attention or number in self.mlp:
                names = _ATTENTION if number in self.attention else _MLP
                name = next((name for name in names if name in layer._modules), None)
                if name is None:
                    raise ValueError(
                        f"{type(layer).__name__} has no part called {', '.join(names)}; leave out whole layers"
                    )
                layer = shallow_copy(layer)
                layer._modules[name] = _nothing(attention=number in self.attention)
            kept.append(layer)
            places.append(number)
        return with_modules(target.model, kept, places)


def middle_layers(count: int) -> tuple[int, ...]:
    """Every second layer of the middle half of `count`: what is left out where nothing better is known."""
    return tuple(range(count // 4 + 1, count - count // 4, 2))


def save_skipped(path: str | os.PathLike[str], skipped: SkippedLayers, card: Mapping[str, Any]) -> None:
    """Write a file that `load_skipped` reads and `draft-verify:FILE` names.

    Args:
        card: plain values for JSON; under "target" the `target_fingerprint` of the model that it was found for.

    Raises:
        ValueError: a card without a target, with a key of the file itself, or that JSON cannot hold.
    """
    from adaptspec.files import whole_file

    if taken := sorted(set(card) & set(_OWN_KEYS)):
        raise ValueError(f"card must not hold {', '.join(taken)}")
    if not isinstance(card.get("target"), dict):
        raise ValueError("card must hold the target's fingerprint under 'target'")
    own = {"format": FORMAT, "version": VERSION, "attention": skipped.attention, "mlp": skipped.mlp}
    try:
        text = json.dumps({**own, **card}, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"card must hold plain values for JSON: {error}") from error
    with whole_file(path) as file:
        file.write(text.encode())


def load_skipped(path: str | os.PathLike[str], target: HFTarget) -> SkippedLayers:
    """What `save_skipped` wrote, for the same target.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a damaged file, one of another format or version, or one for another target.
    """
    from adaptspec.drafters.cell_weights import check_target

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; write one with `adaptspec train layers`")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no file of skipped layers")
    if found.get("version") != VERSION:
        raise ValueError(f"{path}: version must be {VERSION}, got {found.get('version')!r}")
    if missing := [name for name in ("attention", "mlp") if not isinstance(found.get(name), list)]:
        raise ValueError(f"{path} is damaged: {' and '.join(missing)} must be lists of layers")
    check_target(found, target, where=str(path))
    try:
        return SkippedLayers(tuple(found["attention"]), tuple(found["mlp"]))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _nothing(*, attention: bool) -> torch.nn.Module:
    """A module that adds nothing to the residual stream."""
    import torch

    class Nothing(torch.nn.Module):
        def forward(self, *args: Any, **options: Any) -> Any:
            nothing = torch.zeros_like(args[0] if args else options["hidden_states"])
            return (nothing, None) if attention else nothing

    return Nothing()
