"""Searching the sub-layers that a target can draft without (Draft & Verify, arXiv 2309.08168, section 4.1).

The paper searches with Bayesian optimisation on measured decoding. Here a candidate is judged by two things that can be
had from one pass over a text: how often the shortened model says what the target says, and how many sub-layers it runs.
With their measured seconds these give the tokens per second that chains of the best length would bring.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from adaptspec.drafters.early_exit.skipped import SkippedLayers, middle_layers
from adaptspec.target.compat import attention_implementation
from adaptspec.target.hf import HFTarget
from adaptspec.types import DraftTree

_CHUNK = 256
"""Rows per pass of a shortened model, which bounds the memory of their mask."""


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """What passes of one target take.

    Attributes:
        rest: of a pass of one row without any sub-layer: embedding, final norm, head.
        attention, mlp: of one such sub-layer on one row.
        verify_row: that every further row adds to a verify pass.
    """

    rest: float
    attention: float
    mlp: float
    verify_row: float

    def __post_init__(self) -> None:
        for name in ("rest", "attention", "mlp", "verify_row"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")
        if self.rest + self.attention + self.mlp <= 0.0:
            raise ValueError("a pass must take longer than 0 seconds")

    def draft(self, skipped: SkippedLayers, layers: int) -> float:
        """Seconds of a pass of one row without the sub-layers."""
        kept = self.attention * (layers - len(skipped.attention)) + self.mlp * (layers - len(skipped.mlp))
        return self.rest + kept

    def verify(self, rows: int, layers: int) -> float:
        """Seconds of a pass of the whole target."""
        return self.draft(SkippedLayers(), layers) + self.verify_row * (rows - 1)


def tokens_per_second(
    skipped: SkippedLayers, agreement: float, *, seconds: PassSeconds, layers: int, max_depth: int
) -> tuple[float, int]:
    """What greedy chains of the best length bring, and that length: (1 + a + ... + a^k) / (k draft + verify(k + 1)),
    if each token is right with probability a, whatever came before.

    >>> seconds = PassSeconds(rest=1.0, attention=0.5, mlp=0.5, verify_row=0.0)
    >>> tokens_per_second(SkippedLayers((0, 1), (0, 1)), 1.0, seconds=seconds, layers=4, max_depth=3)
    (0.2857142857142857, 3)
    """
    if not 0.0 <= agreement <= 1.0:
        raise ValueError(f"agreement must be in [0, 1], got {agreement}")
    if max_depth < 1:
        raise ValueError(f"max_depth must be >= 1, got {max_depth}")
    draft = seconds.draft(skipped, layers)
    found = []
    for depth in range(1, max_depth + 1):
        tokens = sum(agreement**i for i in range(depth + 1))
        found.append((tokens / (depth * draft + seconds.verify(depth + 1, layers)), depth))
    return max(found, key=lambda pair: pair[0])


def measure_seconds(target: HFTarget, *, prompt: torch.Tensor, repeats: int = 5, rows: int = 8) -> PassSeconds:
    """Measure passes behind a prompt: medians of `repeats`.

    Args:
        prompt: int64 [T].
        rows: of the larger verify pass.
    """
    if repeats < 1 or rows < 2:
        raise ValueError(f"repeats must be >= 1 and rows >= 2, got {repeats} and {rows}")
    layers = tuple(range(len(target.layout.layers)))
    root = int(prompt[-1])
    chain = DraftTree.chain(np.full(rows - 1, root))
    target.prefill(prompt)
    passes: dict[str, Callable[[], object]] = {
        "whole": lambda: target.score(root, DraftTree.empty()),
        "rows": lambda: target.score(root, chain),
    }
    for name, skipped in (
        ("attention", SkippedLayers(attention=layers)),
        ("mlp", SkippedLayers(mlp=layers)),
    ):
        view = skipped.view(target)
        passes[name] = lambda view=view: target.run_rows(
            np.array([root]), np.zeros(1, np.int64), np.ones((1, 1), dtype=bool), model=view
        )
    taken: dict[str, float] = {}
    try:
        for name, run in passes.items():
            times = []
            for _ in range(repeats + 1):  # the first one warms up
                target.synchronize()
                started = perf_counter()
                run()
                target.synchronize()
                times.append(perf_counter() - started)
                target.rollback(len(prompt))
            taken[name] = statistics.median(times[1:])
    finally:
        target.close()
    parts = {name: max(0.0, taken["whole"] - taken[name]) for name in ("attention", "mlp")}
    return PassSeconds(
        rest=max(0.0, taken["whole"] - sum(parts.values())),
        attention=parts["attention"] / len(layers),
        mlp=parts["mlp"] / len(layers),
        verify_row=max(0.0, taken["rows"] - taken["whole"]) / (rows - 1),
    )


class Agreement:
    """How often shortened models say what the target says after the tokens of texts.

    Every row of a shortened model sees what its first draft token would see: the target's own keys and values of the
    text before it, and itself.

    Args:
        target: the whole model; texts are read on a cache of their own, since one that graphs run on cannot grow.
        texts: int64 [T] each, and how many tokens of each are a prompt: only what follows counts.

    Raises:
        ValueError: no text, or one without an answer.
    """

    def __init__(self, target: HFTarget, texts: Sequence[tuple[np.ndarray, int]]) -> None:
        if not texts:
            raise ValueError("texts must not be empty")
        for tokens, prompt in texts:
            if not 1 <= prompt < len(tokens):
                raise ValueError(
                    f"a text must hold a prompt and an answer, got {len(tokens)} tokens, {prompt} of prompt"
                )
        self._target = HFTarget(target.model, graphs=False)
        self._texts = texts

    @torch.inference_mode()
    def shares(self, candidates: Sequence[SkippedLayers]) -> list[float]:
        """The share of tokens per candidate. Each text is read once by the target, then by all candidates."""
        target = self._target
        views = [candidate.view(target) for candidate in candidates]
        hits, count = np.zeros(len(views)), 0
        for tokens, prompt in self._texts:
            ids = torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int64))
            best = target.prefill(ids, top_k=1).top_ids
            assert best is not None
            first = prompt - 1  # the last token of the prompt predicts the first of the answer
            count += len(tokens) - first
            for i, view in enumerate(views):
                for start in range(first, len(tokens), _CHUNK):
                    stop = min(start + _CHUNK, len(tokens))
                    said = self._said(view, ids, start, stop)
                    hits[i] += int((said == best[start:stop, 0]).sum())
        target.close()
        return (hits / count).tolist()

    def _said(self, view: torch.nn.Module, ids: torch.Tensor, start: int, stop: int) -> np.ndarray:
        """The most likely token after each of some tokens of the text, which is cached."""
        target = self._target
        rows, length = stop - start, target.length
        cache = target.cache
        assert cache is not None
        cache.reserve(length + rows)
        positions = torch.arange(start, stop)
        with attention_implementation(target.model.config, target.layout.attention):
            output = view(
                input_ids=ids[None, start:stop].to(target.device),
                position_ids=positions[None].to(target.device),
                attention_mask=self._masks(positions),
                use_cache=True,
                **{target.layout.cache_argument: cache},
            )
        target.rollback(length)
        return output.logits[0].argmax(dim=-1).cpu().numpy()

    def _masks(self, positions: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [1, 1, R, length + R], one per attention kind."""
        target, layout = self._target, self._target.layout
        keys = torch.arange(target.length)[None, :]
        own = torch.eye(len(positions), dtype=torch.bool)
        masks = {}
        for kind in layout.kinds:
            seen = keys < positions[:, None]
            if kind == "sliding_attention" and layout.window is not None:
                seen = seen & (keys > positions[:, None] - layout.window)
            hidden = ~torch.cat([seen, own], dim=1)
            mask = torch.zeros(hidden.shape, dtype=target.dtype).masked_fill_(hidden, torch.finfo(target.dtype).min)
            masks[kind] = mask[None, None].to(target.device)
        return masks if layout.mapping else next(iter(masks.values()))


@dataclass(frozen=True, slots=True)
class Found:
    """The best candidate of a search.

    Attributes:
        skipped: the sub-layers.
        agreement: share of tokens on which it says what the target says.
        tokens_per_second: predicted for greedy chains of the length `depth`.
        autoregressive: the same without drafts.
        tried: different candidates.
    """

    skipped: SkippedLayers
    agreement: float
    tokens_per_second: float
    depth: int
    autoregressive: float
    tried: int


def search_layers(
    target: HFTarget,
    texts: Sequence[tuple[np.ndarray, int]],
    *,
    seconds: PassSeconds,
    tries: int = 100,
    width: int = 4,
    max_depth: int = 8,
    seed: int = 0,
    report: Callable[[int, Found], None] = lambda tried, best: None,
) -> Found:
    """Greedy local search: from the best set so far, flip one sub-layer or swap two, `width` candidates at a time.

    Args:
        texts: see `Agreement`.
        seconds: see `measure_seconds`.
        tries: different candidates looked at.
        report: called after every round.

    Raises:
        ValueError: numbers out of range; see `Agreement`.
    """
    for name, value in (("tries", tries), ("width", width), ("max_depth", max_depth)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    layers = len(target.layout.layers)
    agreement = Agreement(target, texts)
    rng = np.random.default_rng(seed)
    middle = np.zeros((2, layers), dtype=bool)
    middle[:, middle_layers(layers)] = True
    seen: set[bytes] = set()
    best: Found | None = None
    chosen = middle
    wave = [middle]
    while wave and len(seen) < tries:
        wave = wave[: tries - len(seen)]
        seen.update(one.tobytes() for one in wave)
        candidates = [SkippedLayers(*(tuple(np.flatnonzero(part).tolist()) for part in one)) for one in wave]
        for one, skipped, share in zip(wave, candidates, agreement.shares(candidates), strict=True):
            speed, depth = tokens_per_second(skipped, share, seconds=seconds, layers=layers, max_depth=max_depth)
            if best is None or speed > best.tokens_per_second:
                chosen = one
                best = Found(skipped, share, speed, depth, 1.0 / seconds.verify(1, layers), len(seen))
        assert best is not None
        report(len(seen), best)
        wave = _neighbours(chosen, seen, rng=rng, count=width)
    assert best is not None
    return Found(best.skipped, best.agreement, best.tokens_per_second, best.depth, best.autoregressive, len(seen))


def _neighbours(chosen: np.ndarray, seen: set[bytes], *, rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Different sets one flip or one swap away that have not been seen; fewer where there are hardly any left."""
    found: dict[bytes, np.ndarray] = {}
    for _ in range(20 * count):
        one = chosen.copy()
        flat = one.reshape(-1)
        inside, outside = np.flatnonzero(flat), np.flatnonzero(~flat)
        swap = len(inside) > 0 and len(outside) > 0 and rng.random() < 0.5
        picked = [rng.choice(inside), rng.choice(outside)] if swap else [rng.integers(flat.size)]
        flat[picked] ^= True
        if not one.all() and one.tobytes() not in seen:
            found[one.tobytes()] = one
        if len(found) == count:
            break
    return list(found.values())
