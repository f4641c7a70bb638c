"""From packs to tensors: which rows a drafter runs in training, what each of them reads and what it is to predict.

Row i of a text takes the target's hidden state of position i and the token of position i + 1, and predicts token i + 2.
At step k of the recursion it has moved on: it takes token i + 1 + k and predicts token i + 2 + k, which the target
predicts from position i + 1 + k. A batch holds all of that per row, so nothing downstream shifts anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from adaptspec.training.feature_store import FeatureStore
from adaptspec.training.packs import Pack


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one pack; K is the number of steps.

    Attributes:
        features: int64 [R], the token whose hidden state each row starts from.
        positions: int64 [R], its place in its text.
        inputs: int64 [R, K], the token that step k takes (an index into the pack).
        labels: int64 [R, K], the token that step k is to predict, -1 where the text has ended.
        answers: bool [R, K], that token is part of an answer.
        repeated: bool [R], another row of the pack has the same text before and behind it.
        visible: bool [R, R].
    """

    features: np.ndarray
    positions: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray
    answers: np.ndarray
    repeated: np.ndarray
    visible: np.ndarray


def pack_rows(pack: Pack, *, steps: int, first: int = 0) -> Rows:
    """Rows of a pack.

    The last `steps` rows of the prompt read or predict tokens of the answer, so every answer has rows of its own for
    them; all rows before are shared.

    Args:
        steps: of the recursion, K.
        first: position of the first row; -1 for models that take the first token, too.
    """
    shared = max(first, pack.prompt_length - 1 - steps)  # rows first .. shared - 1
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    sizes = []
    prompt = np.arange(pack.prompt_length)
    for number in range(-1, len(pack.answer_lengths)):
        indices = prompt if number < 0 else pack.indices(number)
        begin, end = (first, shared) if number < 0 else (shared, len(indices) - 2)
        positions = np.arange(begin, max(begin, end))
        places = positions[:, None] + 1 + np.arange(steps)[None, :]
        inputs = indices[np.minimum(places, len(indices) - 1)]
        ahead = places + 1
        labels = np.where(ahead < len(indices), indices[np.minimum(ahead, len(indices) - 1)], -1)
        parts.append((positions, indices[np.maximum(positions, 0)], inputs, labels))
        sizes.append(len(positions))
    positions = np.concatenate([part[0] for part in parts])
    labels = np.concatenate([part[3] for part in parts])
    owner = np.repeat(np.arange(-1, len(pack.answer_lengths)), sizes)
    visible = np.tri(len(owner), dtype=bool) & ((owner[None, :] == owner[:, None]) | (owner[None, :] < 0))
    return Rows(
        features=np.concatenate([part[1] for part in parts]),
        positions=positions,
        inputs=np.concatenate([part[2] for part in parts]),
        labels=labels,
        answers=labels >= pack.prompt_length,
        repeated=owner > 0,
        visible=visible,
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of several packs, padded. B packs, R rows, K steps, k target tokens.

    Attributes:
        features: per tap [B, R, H].
        tokens: int64 [B, R, K], what each step takes.
        positions: int64 [B, R].
        mask: bool [B, R, R]; padding sees itself.
        weights: [B, R, K], 0 where there is nothing to predict.
        labels: int64 [B, R, K], row of the reduced head of the token to predict, -1 if it has none.
        top_rows: int64 [B, R, K, k], the same for the target's most likely tokens.
        top_log_probs: [B, R, K, k].
        inside: [B, R, K], the target's probability of all tokens that have a row.
        argmax: int64 [B, R, K], the target's most likely token (its id).
        own: int64 [B, R], the token of each row's position.
        next_features: per tap [B, R, K, H], the hidden states that step k ought to have given; empty unless asked for.
        draw: seeds whatever is drawn at random from this batch; set by the trainer.
    """

    features: tuple[torch.Tensor, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    labels: torch.Tensor
    top_rows: torch.Tensor
    top_log_probs: torch.Tensor
    inside: torch.Tensor
    argmax: torch.Tensor
    own: torch.Tensor
    next_features: tuple[torch.Tensor, ...] = ()
    draw: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Rows with something to predict at the first step."""
        return int((self.weights[..., 0] > 0).sum())


class Batches:
    """Batches out of a `FeatureStore`.

    Args:
        chosen: packs, as (part, place).
        taps: in the order in which the drafter fuses them.
        steps: K.
        batch_rows: padded rows per batch.
        prompt_weight: of rows that predict tokens of the prompt, against 1 for the answer's.
        first: see `pack_rows`.
        next_features: give them, too.
        device: where the tensors go.
    """

    def __init__(
        self,
        store: FeatureStore,
        chosen: Sequence[tuple[int, int]],
        *,
        taps: Sequence[int],
        steps: int,
        batch_rows: int = 2048,
        prompt_weight: float = 0.5,
        first: int = 0,
        next_features: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        if not chosen:
            raise ValueError("there are no texts to make batches of")
        for name, value in (("steps", steps), ("batch_rows", batch_rows)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if not 0.0 <= prompt_weight <= 1.0:
            raise ValueError(f"prompt_weight must be in [0, 1], got {prompt_weight}")
        self.store, self.taps, self.steps, self.batch_rows = store, tuple(taps), steps, batch_rows
        self.prompt_weight, self.first, self.next_features, self.device = prompt_weight, first, next_features, device
        self._chosen = [c for c in chosen if len(store.parts[c[0]].packs[c[1]]) > 2 - first]
        if not self._chosen:
            raise ValueError("all texts are too short to learn from")
        self._sizes = np.array([self._rows(c) for c in self._chosen])
        self._row_of = np.full(int(store.rows.max()) + 1, -1, dtype=np.int64)
        self._row_of[store.rows] = np.arange(len(store.rows))

    def order(self, *, seed: int, epoch: int) -> list[list[int]]:
        """The batches of one epoch: packs of similar length together, the batches shuffled. A function of its
        arguments, so that a resumed run sees what an uninterrupted one sees."""
        generator = np.random.default_rng([seed, epoch])
        jitter = self._sizes * generator.uniform(1.0, 1.15, len(self._sizes))
        batches: list[list[int]] = []
        longest = 0
        for i in np.argsort(-jitter, kind="stable").tolist():
            longest = max(longest, int(self._sizes[i]))
            if not batches or (len(batches[-1]) + 1) * longest > self.batch_rows:
                batches.append([])
                longest = int(self._sizes[i])
            batches[-1].append(i)
        return [batches[i] for i in generator.permutation(len(batches))]

    def all(self) -> Iterator[Batch]:
        """Every pack once, the longest first."""
        order = sorted(self.order(seed=0, epoch=0), key=lambda batch: -int(self._sizes[batch].max()))
        return (self.make(members) for members in order)

    def make(self, members: Sequence[int]) -> Batch:
        """One batch of packs, by their numbers in `order`."""
        made = []
        for i in members:
            part, place = self._chosen[i]
            pack = self.store.parts[part].packs[place]
            made.append((part, place, pack, pack_rows(pack, steps=self.steps, first=self.first)))
        count, width, steps = len(made), max(len(m[3].positions) for m in made), self.steps
        top_k = self.store.parts[0].top_ids.shape[1]
        hidden = {tap: self.store.parts[0].taps[tap].shape[1] for tap in self.taps}
        features = {tap: np.zeros((count, width, hidden[tap]), np.uint16) for tap in self.taps}
        following = {
            tap: np.zeros((count, width, steps, hidden[tap]), np.uint16) for tap in self.taps if self.next_features
        }
        tokens = np.zeros((count, width, steps), np.int64)
        positions = np.zeros((count, width), np.int64)
        mask = np.broadcast_to(np.eye(width, dtype=bool), (count, width, width)).copy()
        weights = np.zeros((count, width, steps), np.float32)
        labels = np.full((count, width, steps), -1, np.int64)
        top_rows = np.full((count, width, steps, top_k), -1, np.int64)
        top_log_probs = np.zeros((count, width, steps, top_k), np.float32)
        inside = np.ones((count, width, steps), np.float32)
        argmax = np.zeros((count, width, steps), np.int64)
        own = np.zeros((count, width), np.int64)
        for row, (number, place, pack, rows) in enumerate(made):
            part = self.store.parts[number]
            start, size = int(part.starts[place]), len(rows.positions)
            valid = rows.labels >= 0
            weight = np.where(rows.answers, 1.0, np.where(rows.repeated[:, None], 0.0, self.prompt_weight))
            weights[row, :size] = weight * valid
            tokens[row, :size] = pack.token_ids[rows.inputs]
            positions[row, :size] = rows.positions
            own[row, :size] = pack.token_ids[rows.features]
            mask[row, :size, :size] = rows.visible
            labels[row, :size] = np.where(valid, self._head_rows(pack.token_ids[rows.labels]), -1)
            # What step k takes is the token from which the target predicts what step k is to predict.
            sources = start + rows.inputs
            ids = part.top_ids[sources]
            top_rows[row, :size] = self._head_rows(ids)
            top_log_probs[row, :size] = part.top_log_probs[sources]
            inside[row, :size] = part.inside[sources]
            argmax[row, :size] = ids[..., 0]
            for tap in self.taps:
                features[tap][row, :size] = part.taps[tap][start + rows.features]
                if self.next_features:
                    following[tap][row, :size] = part.taps[tap][sources]
        return Batch(
            features=tuple(self._states(features[tap]) for tap in self.taps),
            tokens=self._tensor(tokens),
            positions=self._tensor(positions),
            mask=self._tensor(mask),
            weights=self._tensor(weights),
            labels=self._tensor(labels),
            top_rows=self._tensor(top_rows),
            top_log_probs=self._tensor(top_log_probs),
            inside=self._tensor(inside),
            argmax=self._tensor(argmax),
            own=self._tensor(own),
            next_features=tuple(self._states(states) for states in following.values()),
        )

    def _rows(self, chosen: tuple[int, int]) -> int:
        pack = self.store.parts[chosen[0]].packs[chosen[1]]
        shared = max(self.first, pack.prompt_length - 1 - self.steps)
        ends = [pack.prompt_length + length - 2 - shared for length in pack.answer_lengths]
        return shared - self.first + sum(max(0, end) for end in ends)

    def _head_rows(self, token_ids: np.ndarray) -> np.ndarray:
        known = token_ids < len(self._row_of)
        return np.where(known, self._row_of[np.where(known, token_ids, 0)], -1)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _states(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.view(np.int16)).to(self.device).view(torch.bfloat16).float()


def split_held_out(
    store: FeatureStore, *, share: float = 0.05, seed: int = 0
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Packs for training and held-out packs, split by prompt: no prompt is on both sides.

    Whether a prompt is held out depends on its number and the seed only, not on what else is there.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"share must be in (0, 1), got {share}")
    packs = store.packs()
    prompts = sorted({store.parts[part].packs[place].prompt for part, place in packs})
    if len(prompts) < 2:
        raise ValueError("answers to at least two prompts are needed: one to learn from, one to be held out")
    draws = {prompt: float(np.random.default_rng([seed, prompt]).random()) for prompt in prompts}
    held = {prompt for prompt in prompts if draws[prompt] < share} or {min(prompts, key=lambda p: draws[p])}
    if len(held) == len(prompts):
        held.discard(max(prompts, key=lambda p: draws[p]))
    chosen = [store.parts[part].packs[place].prompt in held for part, place in packs]
    return [c for c, out in zip(packs, chosen, strict=True) if not out], [
        c for c, out in zip(packs, chosen, strict=True) if out
    ]
