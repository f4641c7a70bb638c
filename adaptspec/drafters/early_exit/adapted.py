"""What Kangaroo and CATS share: adapters on early layers of the target, bound, fed and kept up to date."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from adaptspec.drafters.base import Needs
from adaptspec.drafters.headed import HeadedDrafter
from adaptspec.drafters.lookup import whole_number
from adaptspec.types import Observation

if TYPE_CHECKING:
    from adaptspec.drafters.early_exit.adapter import Adapters
    from adaptspec.drafters.early_exit.adapter_rows import AdapterRows
    from adaptspec.target.base import Target
    from adaptspec.target.hf import HFTarget
    from adaptspec.vocab import VocabHead


class Adapted(HeadedDrafter):
    """Runs the first layers of the target, behind which the verify pass goes on, and adapters between them and the
    target's head.

    Args:
        path: a folder of trained weights, a published checkpoint where there are any, `Adapters`, or None for the
            weights shipped for the target.
        exit: the layer of a published checkpoint, which does not say it; None for its authors' choice.
    """

    kind: ClassVar[str] = ""
    """Of the adapters."""

    def __init__(self, path: str | os.PathLike[str] | Adapters | None = None, *, exit: int | None = None) -> None:
        super().__init__()
        self.path = path
        self.published_exit = None if exit is None else whole_number("exit", exit, 1)
        self._target: HFTarget | None = None
        self._exits: tuple[int, ...] = ()
        self._rows: tuple[AdapterRows, ...] = ()

    def bind(self, target: Target) -> None:
        from adaptspec.drafters.early_exit.adapter_rows import AdapterRows
        from adaptspec.drafters.early_exit.adapter_weights import load_adapters
        from adaptspec.drafters.target_parts import target_parts
        from adaptspec.target.hf import HFTarget
        from adaptspec.target.views import with_layers

        parts = target_parts(target, drafter=self.name)
        assert isinstance(target, HFTarget)
        self._target = target
        bound = (parts.embed, parts.head.data_ptr(), parts.device, parts.dtype, parts.special_ids)
        if self._bound == bound:  # a target is made per request, the model behind it is mostly the same
            return
        with_layers(target.model, [0])  # says whether its layers can be run apart
        adapters = load_adapters(
            self.path,
            name=self.name,
            kind=self.kind,
            shipped=self.weights,
            target=target,
            exit=self.published_exit,
        )
        adapters = adapters.to(device=parts.device, dtype=parts.dtype).eval().requires_grad_(False)
        heads = self._head_sets()
        heads.bind([parts.head], vocab_size=parts.vocab_size, keep=parts.special_ids)
        self._exits = adapters.config.exits
        self.needs = Needs(
            taps=self._exits,
            target=True,
            target_top_k=heads.needs_top_k,
            prompt_top_k=heads.needs_prompt_top_k,
            target_top_logits=heads.needs_top_logits,
        )
        self._rows = tuple(AdapterRows(adapter) for adapter in adapters.exits)
        self._bound = bound

    def prefill(
        self, token_ids: np.ndarray, features: Mapping[int, Any] | None = None, top_ids: np.ndarray | None = None
    ) -> None:
        self._open()
        self._head_sets().prefill(token_ids, top_ids)
        for rows in self._rows:
            rows.start()
        self._push(features)
        for rows in self._rows:
            rows.settle()

    def observe(self, observation: Observation) -> None:
        self._open()
        super().observe(observation)
        self._push(observation.features)

    @property
    def lag(self) -> int:
        # Rows of the last step are run by every proposal.
        return self._rows[0].lag if self._rows else 0

    def catch_up(self) -> None:
        for rows in self._rows:
            rows.settle(but_last=True)

    def finish(self) -> None:
        super().finish()
        for rows in self._rows:
            rows.start()

    def reset(self) -> None:
        super().reset()
        for rows in self._rows:
            rows.start()

    def _push(self, features: Mapping[int, Any] | None) -> None:
        if features is None or any(layer not in features for layer in self._exits):
            raise ValueError(f"{self.name} needs the hidden states after the layers {list(self._exits)}")
        for layer, rows in zip(self._exits, self._rows, strict=True):
            rows.push(features[layer])

    def _head(self, vocab: str) -> VocabHead:
        return self._head_sets()[0][vocab]

    def _open(self) -> HFTarget:
        if self._target is None:
            raise RuntimeError(f"{self.name} has no target yet; call bind first")
        return self._target
