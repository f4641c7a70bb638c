"""Decoding many sequences at once: slots of different lengths in one key-value cache, refilled as answers end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

from adaptspec.target.compat import attention_implementation
from adaptspec.target.layout import inspect_model
from adaptspec.target.rows import top_ids

TOP = 64
"""Sampled tokens come from the most likely `TOP`: a draw over a whole vocabulary takes longer than the model does."""


@dataclass(slots=True)
class Sequencing:
    """One sequence while it is being decoded.

    Attributes:
        key: whatever the caller wants to find it by.
        prompt: int64 [P].
        temperature: 0 is greedy.
        generator: draws one number per sampled token; its own, so that a sequence does not depend on its neighbours.
        answer: tokens so far, the end-of-text token included.
        finished: an end-of-text token came.
    """

    key: Any
    prompt: np.ndarray
    temperature: float = 0.0
    generator: np.random.Generator | None = None
    answer: list[int] = field(default_factory=list)
    finished: bool = False


class _SlotLayer(DynamicLayer):
    """Keys and values [B, Hkv, capacity, D] of one layer. Each slot is written at its own position and holds garbage
    behind it, which masks hide."""

    is_sliding = False

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__()
        self.slots, self.capacity = slots, capacity
        self.filling: int | None = None  # the slot that a prefill writes, None while all slots decode
        self.rows = self.positions = torch.zeros(0, dtype=torch.long)
        self.visible = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        # Zeros, because a masked NaN is still NaN once it is multiplied by a weight of zero.
        shape = (self.slots, key_states.shape[1], self.capacity)
        self.keys = key_states.new_zeros((*shape, key_states.shape[3]))
        self.values = value_states.new_zeros((*shape, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.filling is not None:
            length = key_states.shape[2]
            self.keys[self.filling, :, :length] = key_states[0]
            self.values[self.filling, :, :length] = value_states[0]
            return key_states, value_states
        self.keys[self.rows, :, self.positions] = key_states[:, :, 0]
        self.values[self.rows, :, self.positions] = value_states[:, :, 0]
        return self.keys[:, :, : self.visible], self.values[:, :, : self.visible]

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return (query_length if isinstance(query_length, int) else len(query_length)), 0


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """The prompt prefilled last, the slot that holds its keys and values, and the logits [1, V] behind it."""

    prompt: np.ndarray
    slot: int
    logits: torch.Tensor


class BatchedDecoder:
    """Continuous batching for any target that `HFTarget` supports.

    A slot whose sequence has ended takes the next one of the queue; when the queue is empty, the batch shrinks.
    Neighbours in the queue with the same prompt share one prefill.
    Greedy answers equal those of one-by-one generation up to rounding: a matrix product of other height differs in
    its last bits (in float32 that has not been seen to change a token, in bfloat16 it changes about one in sixty).

    Args:
        model: a transformers causal language model in eval mode, on any device.
        batch: slots.
        max_new_tokens: longest answer, the end-of-text token included.
        stop_ids: end-of-text tokens.

    Raises:
        ValueError: a number out of range, or a model that is not supported.
    """

    def __init__(
        self, model: torch.nn.Module, *, batch: int = 64, max_new_tokens: int = 256, stop_ids: Sequence[int] = ()
    ) -> None:
        for name, value in (("batch", batch), ("max_new_tokens", max_new_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.model = model
        self.layout = inspect_model(model)
        self.batch = batch
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(int(token) for token in stop_ids)
        weight = model.get_input_embeddings().weight
        self.device, self.dtype = weight.device, weight.dtype
        self._source: _Prefilled | None = None

    @torch.inference_mode()
    def run(self, sequences: Sequence[Sequencing], *, go_on: Callable[[], bool] = lambda: True) -> Iterator[Sequencing]:
        """Decode all of `sequences`, in this order, and give each one out as it ends.

        Args:
            go_on: asked before every step; once it says no, sequences under way are dropped and the iterator ends.

        Raises:
            ValueError: a prompt is empty, or longer than the model's context leaves room for.
        """
        sequences = list(sequences)
        for sequence in sequences:
            self._check(sequence)
        if not sequences:
            return
        slots = min(self.batch, len(sequences))
        longest = max(len(sequence.prompt) for sequence in sequences)
        cache = Cache(layers=[_SlotLayer(slots, longest + self.max_new_tokens) for _ in range(len(self.layout.layers))])
        self._source = None
        queue = iter(sequences)
        active: list[Sequencing | None] = [None] * slots
        while True:
            for slot in range(len(active)):
                while active[slot] is None and (following := next(queue, None)) is not None:
                    if not go_on():
                        return
                    self._prefill(cache, slot, following)
                    if self._ended(following):
                        yield following
                    else:
                        active[slot] = following
            alive = [slot for slot, sequence in enumerate(active) if sequence is not None]
            if not alive:
                return
            if len(alive) < len(active):
                self._shrink(cache, alive)
                active = [active[slot] for slot in alive]
            if not go_on():
                return
            self._step(cache, active)
            for slot, sequence in enumerate(active):
                if self._ended(sequence):
                    active[slot] = None
                    yield sequence

    def _check(self, sequence: Sequencing) -> None:
        length, limit = len(sequence.prompt), self.layout.context_limit
        if length == 0:
            raise ValueError(f"the prompt of {sequence.key!r} is empty")
        if limit is not None and length + self.max_new_tokens > limit:
            raise ValueError(
                f"the prompt of {sequence.key!r} has {length} tokens and the answer up to {self.max_new_tokens}; "
                f"the model's context holds {limit}"
            )

    def _ended(self, sequence: Sequencing) -> bool:
        sequence.finished = sequence.answer[-1] in self.stop_ids
        return sequence.finished or len(sequence.answer) >= self.max_new_tokens

    def _prefill(self, cache: Cache, slot: int, sequence: Sequencing) -> None:
        source, prompt = self._source, sequence.prompt
        if source is not None and np.array_equal(source.prompt, prompt):
            # The prompt's rows are still there: a slot writes behind its prompt only, until another prompt takes it.
            if source.slot != slot:
                for layer in cache.layers:
                    layer.keys[slot, :, : len(prompt)] = layer.keys[source.slot, :, : len(prompt)]
                    layer.values[slot, :, : len(prompt)] = layer.values[source.slot, :, : len(prompt)]
        else:
            self._source = source = _Prefilled(prompt, slot, self._prompt_logits(cache, slot, prompt))
        self._append([sequence], source.logits)

    def _prompt_logits(self, cache: Cache, slot: int, prompt: np.ndarray) -> torch.Tensor:
        """Run the prompt into a slot; logits [1, V] after its last token."""
        for layer in cache.layers:
            layer.filling = slot
        ids = torch.from_numpy(np.ascontiguousarray(prompt, dtype=np.int64)).to(self.device)[None]
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.layout.cache_argument: cache},
        )
        for layer in cache.layers:
            layer.filling = None
        return output.logits[:, -1]

    def _step(self, cache: Cache, active: list[Sequencing]) -> None:
        """One token for every slot."""
        # The last token of each answer is the input, so its position is one before the length.
        lengths = np.array([len(sequence.prompt) + len(sequence.answer) - 1 for sequence in active])
        positions = torch.from_numpy(lengths).to(self.device)
        visible = int(lengths.max()) + 1
        rows = torch.arange(len(active), device=self.device)
        for layer in cache.layers:
            layer.rows, layer.positions, layer.visible = rows, positions, visible
        ids = torch.tensor([sequence.answer[-1] for sequence in active], device=self.device)
        with attention_implementation(self.model.config, self.layout.attention):
            output = self.model(
                input_ids=ids[:, None],
                position_ids=positions[:, None],
                attention_mask=self._masks(positions, visible),
                use_cache=True,
                **{self.layout.cache_argument: cache},
            )
        self._append(active, output.logits[:, -1])

    def _masks(self, positions: torch.Tensor, visible: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [B, 1, group, S], one per attention kind."""
        keys = torch.arange(visible, device=self.device)[None]
        hidden = keys > positions[:, None]
        masks = {}
        for kind in self.layout.kinds:
            out = hidden
            if kind == "sliding_attention" and self.layout.window is not None:
                out = hidden | (keys <= positions[:, None] - self.layout.window)
            mask = torch.zeros(out.shape, dtype=self.dtype, device=self.device)
            mask.masked_fill_(out, torch.finfo(self.dtype).min)
            masks[kind] = mask[:, None, None].expand(-1, 1, self.layout.group, -1)
        return masks if self.layout.mapping else next(iter(masks.values()))

    def _append(self, sequences: list[Sequencing], logits: torch.Tensor) -> None:
        tokens = choose_tokens(
            logits,
            temperatures=[sequence.temperature for sequence in sequences],
            draws=[0.0 if s.generator is None else s.generator.random() for s in sequences],
        )
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.answer.append(int(token))

    def _shrink(self, cache: Cache, alive: list[int]) -> None:
        self._source = None
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[alive], layer.values[alive]
            layer.slots = len(alive)


def choose_tokens(logits: torch.Tensor, *, temperatures: Sequence[float], draws: Sequence[float]) -> np.ndarray:
    """One token per row: the most likely at temperature 0, else by inverse transform among the `TOP` most likely.

    Args:
        logits: [B, V].
        temperatures: B of them.
        draws: B numbers in [0, 1), used by rows of temperature > 0.

    Returns:
        int64 [B].

    Raises:
        ValueError: NaN in the logits.
    """
    if not torch.isfinite(logits.amax(dim=-1)).all():
        raise ValueError("the target's logits hold NaN or nothing finite")
    warm = np.flatnonzero(np.asarray(temperatures) > 0.0)
    if logits.device.type == "cpu":
        chosen = logits.float().numpy().argmax(axis=-1)  # numpy's argmax is vectorised, torch's is not
    else:
        chosen = logits.argmax(dim=-1).cpu().numpy()
    if len(warm):
        rows = logits[torch.from_numpy(warm).to(logits.device)]
        ids = top_ids(rows, TOP)
        scores = rows.gather(1, torch.from_numpy(ids).to(rows.device)).float().cpu().numpy().astype(np.float64)
        scores = (scores - scores[:, :1]) / np.asarray(temperatures)[warm, None]
        cumulated = np.exp(scores).cumsum(axis=1)
        drawn = (cumulated <= np.asarray(draws)[warm, None] * cumulated[:, -1:]).sum(axis=1)
        chosen[warm] = ids[np.arange(len(warm)), np.minimum(drawn, ids.shape[1] - 1)]
    return chosen
