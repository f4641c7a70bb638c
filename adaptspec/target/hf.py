"""A transformers causal language model as a `Target`: tree forward, hidden-state taps, key-value compaction."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from adaptspec.target.base import Scored, Target
from adaptspec.target.compat import GrowingCache, attention_implementation
from adaptspec.target.graphed import GraphedModel, choose_capture, graphed_model
from adaptspec.target.graphs import Capture, GraphCounts, Outputs, TreeRows
from adaptspec.target.layout import TESTED_FAMILIES, Layout, inspect_model
from adaptspec.target.paired import pair_rows
from adaptspec.target.rows import top_ids
from adaptspec.target.static_forward import FixedCache
from adaptspec.target.tree_kernel import MOST_ROWS, tree_forward, uses_kernel
from adaptspec.target.trunk import Trunk
from adaptspec.target.views import headless
from adaptspec.types import DraftTree, ExtraRows, PairedRows

_PROBED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_PROBE_TOLERANCE = 2e-2
"""Largest difference, relative to the spread of the logits, between a tree forward and a plain one (bf16 rounding)."""


class HFTarget(Target):
    """Wraps a decoder-only transformers model of full or sliding-window attention. The model is not changed.

    Sliding-window layers keep their whole history here and are masked by position, so trees cross the window exactly.
    A family outside `TESTED_FAMILIES` is probed once: a small branching tree must give the logits of its paths.
    On a GPU, draft rows attend through the tree-attention kernel where it covers the model (see `uses_kernel`), and
    passes are replayed as CUDA graphs (see `adaptspec.target.graphed`): the logits and features of a `score` are then
    valid until the next one.

    Args:
        model: a transformers causal language model, on any device, in float32, bfloat16 or float16.
        tokenizer: used to compare vocabularies with draft models; may be None.
        prefill_chunk: prompt tokens per forward pass.
        graphs: whether to replay passes as CUDA graphs; None: where there is a GPU and a model that can be captured,
            unless `ADAPTSPEC_GRAPHS=off`. A `Capture` makes graphs in a way of its own, on any device.

    Raises:
        TypeError, ValueError: the model is not supported, with the reason; or graphs are asked for and not possible.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        tokenizer: Any = None,
        prefill_chunk: int = 512,
        graphs: bool | Capture | None = None,
    ) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be >= 1, got {prefill_chunk}")
        self.layout: Layout = inspect_model(model)
        self.model = model
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.context_limit = self.layout.context_limit
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.get_input_embeddings().weight.dtype
        self.length = 0
        self.cache: GrowingCache | None = None
        self._taps: tuple[int, ...] = ()
        self._tapped: dict[int, torch.Tensor] = {}
        self._trunk: Trunk | None = None
        self._views: dict[tuple[int, int], torch.nn.Module] = {}
        self._headless: torch.nn.Module | None = None
        self._kernel = uses_kernel(model, self.layout)
        self._capture = choose_capture(model, self.layout, graphs)
        self._graphs: GraphedModel | None = None  # while a sequence is open on its cache
        family = getattr(model.config, "model_type", "")
        if family not in TESTED_FAMILIES and model not in _PROBED:
            self._probe()
            _PROBED.add(model)

    def tap(self, layers: tuple[int, ...]) -> None:
        """Ask for the hidden states after `k` layers for each k in `layers` (1 to the number of layers)."""
        count = len(self.layout.layers)
        for layer in layers:
            if not 1 <= layer <= count:
                raise ValueError(f"tap must be in [1, {count}], got {layer}")
        self._taps = tuple(layers)

    def special_ids(self) -> tuple[int, ...]:
        """Tokens that end, open or structure a text, ascending: those of the model's generation config, and with a
        tokenizer its special tokens. Reduced vocabularies keep them."""
        config = getattr(self.model, "generation_config", None)
        found: set[int] = set()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(config, name, None)
            found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
        if self.tokenizer is not None:
            found.update(self.tokenizer.all_special_ids)
            added = getattr(self.tokenizer, "added_tokens_decoder", {})
            found.update(number for number, token in added.items() if token.special)
        return tuple(sorted(token for token in found if 0 <= token < self.vocab_size))

    @torch.inference_mode()
    def prefill(self, token_ids: torch.Tensor, *, top_k: int = 0) -> Scored:
        count = len(token_ids)
        if count == 0:
            raise ValueError("token_ids must not be empty")
        if self.context_limit is not None and count > self.context_limit:
            raise ValueError(f"the prompt has {count} tokens, the model's context holds {self.context_limit}")
        self.cache = self._open_graphs(count) or GrowingCache(len(self.layout.layers), count + 256)
        self.length = 0
        token_ids = token_ids.to(self.device)
        logits = None
        features: dict[int, list[torch.Tensor]] = {layer: [] for layer in self._taps}
        top: list[np.ndarray] = []
        for start in range(0, count, self.prefill_chunk):
            chunk = token_ids[start : start + self.prefill_chunk]
            rows = len(chunk)
            causal = np.tri(rows, dtype=bool)
            kept = 0 if top_k else 1
            logits = self._forward(chunk, np.arange(rows), causal, logits_to_keep=kept, plain=start == 0)
            if top_k:
                top.append(top_ids(logits, top_k))
            for layer in self._taps:
                features[layer].append(self._tapped[layer])
            self.length += rows
        assert logits is not None
        if self._graphs is not None:
            self._graphs.prepare(count)
        tapped = {layer: torch.cat(parts) for layer, parts in features.items()}
        return Scored(logits[-1:], tapped, top_ids=np.concatenate(top) if top else None)

    @torch.inference_mode()
    def score(self, root: int, tree: DraftTree, extra: ExtraRows | PairedRows | None = None) -> Scored:
        if isinstance(extra, PairedRows):
            return self._score_paired(root, tree, extra)
        trunk = self._take_trunk()
        if len(tree) == 0 and extra is None and trunk is None:
            return Scored(self._run(np.array([root]), _ONE_DEPTH, _ONE_VISIBLE), self._tapped)
        rows = len(tree) + 1
        ids, depths, visible = tree_rows(root, tree)
        if extra is not None:
            ids = np.concatenate([ids, extra.token_ids])
            depths = np.concatenate([depths, extra.depths])
            wide = np.zeros((len(ids), len(ids)), dtype=bool)
            wide[:rows, :rows] = visible
            wide[rows:, 0] = True
            wide[rows:, rows:] = extra.visible
            visible = wide
        logits = None
        if trunk is not None:
            parents = np.full(len(ids), -1, np.int64)
            parents[1:rows] = tree.parents + 1
            logits = trunk.finish(ids, depths, visible, parents)
        if logits is None:
            logits = self._run(ids, depths, visible)
        features = {layer: hidden[:rows] for layer, hidden in self._tapped.items()}
        return Scored(logits[:rows], features, None if extra is None else logits[rows:])

    def _score_paired(self, root: int, tree: DraftTree, extra: PairedRows) -> Scored:
        """`score` with paired rows in the same pass, which differs from one without them by rounding only.

        Rows hidden by a mask still spoil a pass with NaN or infinite states, so it is then run again without them.
        """
        self._check_tap(extra)
        self._take_trunk()
        ids, depths, visible = tree_rows(root, tree)
        rows, prompts = len(ids), len(extra.prompts)
        depths, visible = pair_rows(depths, visible, prompts=prompts, length=self.length)
        nodes = self.model.get_input_embeddings()(torch.from_numpy(ids).to(self.device))
        vectors = torch.cat([nodes, self._vectors(extra.prompts), self._vectors(extra.embed(ids))])
        blind = np.zeros(len(depths), dtype=bool)
        blind[rows : rows + prompts] = True
        kept = torch.arange(rows, device=self.device)
        logits = self._forward(vectors, depths, visible, logits_to_keep=kept, blind=blind)
        added = self._tapped[extra.tap][rows:]
        if not bool(torch.isfinite(added).all()):
            self._open_cache().set_length(self.length)
            return self.score(root, tree)
        features = {layer: hidden[:rows] for layer, hidden in self._tapped.items()}
        return Scored(logits, features, paired=added[prompts:])

    @torch.inference_mode()
    def paired(self, token: int, extra: PairedRows) -> torch.Tensor:
        """The hidden state [H] of the row paired with `token`, the last one in the cache, in a pass of its own. The
        cache is as before afterwards, so later passes are bit for bit what they are without this one."""
        self._check_tap(extra)
        self._take_trunk()
        prompts = len(extra.prompts)
        depths, visible = pair_rows(
            np.full(1, -1, np.int64), np.ones((1, 1), dtype=bool), prompts=prompts, length=self.length
        )
        vectors = torch.cat([self._vectors(extra.prompts), self._vectors(extra.embed(np.array([token])))])
        blind = np.arange(prompts + 1) < prompts
        if self._headless is None:
            self._headless = headless(self.model)  # nobody asks for logits
        try:
            self._forward(vectors, depths[1:], visible[1:, 1:], logits_to_keep=1, blind=blind, model=self._headless)
        finally:
            self._open_cache().set_length(self.length)
        return self._tapped[extra.tap][-1]

    def _check_tap(self, extra: PairedRows) -> None:
        if extra.tap not in self._taps:
            raise ValueError(f"tap of paired rows must be one of {list(self._taps)}, which are tapped, got {extra.tap}")

    def _vectors(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors.to(device=self.device, dtype=self.dtype)

    @torch.inference_mode()
    def commit(self, path: np.ndarray) -> None:
        cache = self._open_cache()
        accepted = len(path)
        if accepted and path[-1] != accepted - 1:  # rows of a chain that starts at node 0 already lie in place
            cache.keep_rows(self.length + 1, torch.from_numpy(np.ascontiguousarray(path)))
        self.length += 1 + accepted
        cache.set_length(self.length)

    def rollback(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be in [0, {self.length}], got {length}")
        self.length = length
        self._trunk = None
        self._open_cache().set_length(length)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close(self)
            self._graphs = None
        self.cache = None
        self._trunk = None
        self._tapped = {}
        self.length = 0

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run_rows(
        self,
        token_ids: np.ndarray,
        depths: np.ndarray,
        visible: np.ndarray,
        *,
        model: torch.nn.Module | None = None,
    ) -> torch.Tensor:
        """Forward rows behind whatever the cache holds and leave their keys and values there: for drafters that run
        this model step by step. Undo with `rollback` or keep with `keep`.

        Args:
            token_ids: int64 [R].
            depths: int64 [R], position minus `length`.
            visible: bool [R, W], what each row sees of the W rows behind the first `length` (the last R are its own).
            model: a view of the same model with fewer layers.

        Returns:
            logits [R, V].
        """
        self._take_trunk()
        with torch.inference_mode():
            if model is None:
                logits = self._run(token_ids, depths, visible)
                return logits if self._graphs is None else logits.clone()  # drafters keep them
            ids = torch.from_numpy(np.ascontiguousarray(token_ids)).to(self.device)
            return self._forward(ids, depths, visible, model=model)

    def trunk(self) -> Trunk:
        """Begin rows behind the prefix that go through the first layers only, for early-exit drafters; the next `score`
        goes on from them. An earlier trunk is forgotten.

        Raises:
            RuntimeError: no sequence is open.
        """
        self._open_cache().set_length(self.length)
        self._trunk = Trunk(self)
        return self._trunk

    def _take_trunk(self) -> Trunk | None:
        """The trunk, which something else than drafting is now going to use or to overwrite. A pass that is replayed
        as a graph is faster than one that is resumed and launched operation by operation."""
        trunk, self._trunk = self._trunk, None
        if trunk is not None and self.cache is not None:
            self.cache.set_length(self.length)
        return trunk if self._graphs is None else None

    @torch.inference_mode()
    def keep(self, rows: np.ndarray) -> None:
        """Keep `rows` (ascending, counted from `length`) of what was run since, forget the rest."""
        cache = self._open_cache()
        if len(rows) and rows[-1] != len(rows) - 1:
            cache.keep_rows(self.length, torch.from_numpy(np.ascontiguousarray(rows)))
        self.length += len(rows)
        cache.set_length(self.length)

    def _open_cache(self) -> GrowingCache:
        if self.cache is None:
            raise RuntimeError("no sequence is open; call prefill first")
        return self.cache

    @property
    def graph_counts(self) -> GraphCounts | None:
        """What the graphs of this model did since it was first used; None for a target without graphs."""
        if self._capture is None:
            return None
        return graphed_model(self.model, self.layout, self._capture).counts

    def _open_graphs(self, tokens: int) -> FixedCache | None:
        """The cache that the model's graphs run on, empty; None if this sequence runs without graphs."""
        self.close()
        if self._capture is None:
            return None
        graphs = graphed_model(self.model, self.layout, self._capture)
        cache = graphs.open(self, tokens=tokens, taps=self._taps)
        self._graphs = None if cache is None else graphs
        return cache

    def _leave_graphs(self, tokens: int) -> GrowingCache:
        """Go on with a cache that grows."""
        assert self._graphs is not None and isinstance(self.cache, FixedCache)
        cache = self.cache.moved(tokens + 256)
        self._graphs.close(self, outgrown=tokens)
        self._graphs = None
        self.cache = cache
        return cache

    def _run(self, ids: np.ndarray, depths: np.ndarray, visible: np.ndarray) -> torch.Tensor:
        """Logits [R, V] of R rows: from a graph where they see all that lies behind the prefix, else by a forward."""
        rows, width = visible.shape
        before = width - rows

        def forward() -> torch.Tensor:
            there = torch.from_numpy(np.ascontiguousarray(ids)).to(self.device)
            return self._forward(there, depths, visible, plain=width == 1 and self.layout.window is None)

        def plain() -> Outputs:
            logits = forward()
            return {"logits": logits, **{f"tap {k}": hidden for k, hidden in self._tapped.items()}}

        if self._graphs is None or not self._graphs.gives(self._taps) or not visible[:, :before].all():
            return forward()
        # Rows that all see, a chain that a drafter runs token by token, are as good as prefix.
        tree = TreeRows(ids, depths - before, visible[:, before:], self.length + before)
        outputs = self._graphs.run(tree, plain=plain)
        self._tapped = {k: outputs[f"tap {k}"] for k in self._taps}
        self._open_cache().set_length(self.length + width)
        return outputs["logits"]

    def _forward(
        self,
        ids: torch.Tensor,
        depths: np.ndarray,
        visible: np.ndarray,
        *,
        logits_to_keep: int | torch.Tensor = 0,
        plain: bool = False,
        model: torch.nn.Module | None = None,
        columns: np.ndarray | None = None,
        blind: np.ndarray | None = None,
    ) -> torch.Tensor:
        """One forward of R rows at positions `length + depths`. With `plain` the model makes its own causal mask.

        Args:
            ids: int64 [R], or in floating point the vectors [R, H] that the first layer reads.
            columns: int64 [W], depths of all rows behind the prefix, None if those of this forward are enough.
            blind: bool [R], rows that see nothing of the prefix, None for none.
        """
        vectors = ids.is_floating_point()
        cache, total = self._open_cache(), self.length + visible.shape[1]
        if self._graphs is not None and total > cache.capacity:
            cache = self._leave_graphs(total)
        cache.reserve(total)
        positions = (torch.from_numpy(depths) + self.length).to(self.device)
        if self._kernel and len(ids) <= MOST_ROWS and not vectors:
            mask = None
            attention = tree_forward(self.model, length=self.length, visible=visible)
        else:
            mask = None
            if not plain:
                mask = self._masks(depths, visible, depths if columns is None else columns, blind=blind)
            attention = attention_implementation(self.model.config, self.layout.attention)
        with self._recording(), attention:
            output = (model or self.model)(
                **{"inputs_embeds" if vectors else "input_ids": ids[None]},
                position_ids=positions[None],
                attention_mask=mask,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self.layout.cache_argument: cache},
            )
        return output.logits[0]

    def _masks(
        self, depths: np.ndarray, visible: np.ndarray, columns: np.ndarray, *, blind: np.ndarray | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [1, 1, group * R, length + W], one per attention kind."""
        rows, width = visible.shape
        total = self.length + width
        lowest = torch.finfo(self.dtype).min
        tail = torch.zeros((rows, width), dtype=self.dtype)
        tail.masked_fill_(torch.from_numpy(~visible), lowest)
        full = torch.zeros((rows, total), dtype=self.dtype)
        full[:, self.length :] = tail
        if blind is not None:
            full[torch.from_numpy(blind), : self.length] = lowest
        masks: dict[str, torch.Tensor] = {}
        for kind in self.layout.kinds:
            mask = full
            window = self.layout.window
            if kind == "sliding_attention" and window is not None and total > window:
                # A row at position p sees keys at positions p - window + 1 .. p. Visible draft rows are ancestors or
                # the row itself; their positions are known for the last rows, those of this forward at least.
                position = torch.from_numpy(depths) + self.length
                keys = torch.arange(self.length)[None, :]
                mask = full.clone()
                mask[:, : self.length].masked_fill_(keys <= position[:, None] - window, lowest)
                # Columns before the prefix's own end are soft prompts, which no window hides.
                own = torch.from_numpy((columns[None, :] <= depths[:, None] - window) & (columns[None, :] >= 0))
                mask[:, total - len(columns) :].masked_fill_(own, lowest)
            masks[kind] = mask.repeat(self.layout.group, 1)[None, None].to(self.device)
        return masks if self.layout.mapping else next(iter(masks.values()))

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Collect the tapped hidden states [R, H] of the forward inside the block."""
        if not self._taps:
            yield
            return
        self._tapped = {}

        def hook(layer: int) -> Any:
            def record(module: torch.nn.Module, args: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                self._tapped[layer] = hidden[0] if hidden.dim() == 3 else hidden

            return record

        handles = [self.layout.layers[k - 1].register_forward_hook(hook(k)) for k in self._taps]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _probe(self) -> None:
        """Compare a branching tree with its paths run plainly.

        Raises:
            ValueError: the logits differ, so this architecture does something with rows that trees do not know.
        """
        ids = (torch.arange(7) * 37 + 11) % self.vocab_size
        tokens = ids[3:].numpy()
        tolerance = _PROBE_TOLERANCE if self.dtype == torch.float32 else 10 * _PROBE_TOLERANCE
        try:
            self.prefill(ids[:2])
            tree_logits = self.score(
                int(ids[2]), DraftTree(tokens, np.array([-1, 0, -1, 2]), np.zeros(4))
            ).logits.float()
            for path in ([0, 1], [2, 3]):
                plain = self.prefill(torch.cat([ids[:3], torch.from_numpy(tokens[path])])).logits[-1].float()
                difference = float((tree_logits[path[-1] + 1] - plain).abs().max() / plain.std().clamp_min(1e-6))
                if not difference < tolerance:
                    raise ValueError(
                        f"{type(self.model).__name__} gives other logits for a tree than for its paths "
                        f"(difference {difference:.2g} of their spread); this architecture is not supported"
                    )
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{type(self.model).__name__} cannot score a tree, it is not supported: {error}"
            ) from error
        finally:
            self.close()


_ONE_DEPTH = np.zeros(1, np.int64)
_ONE_VISIBLE = np.ones((1, 1), dtype=bool)


def tree_rows(root: int, tree: DraftTree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids [N + 1], depths [N + 1] and visibility [N + 1, N + 1] of the root and the nodes."""
    rows = len(tree) + 1
    ids = np.empty(rows, np.int64)
    ids[0] = root
    ids[1:] = tree.token_ids
    visible = np.zeros((rows, rows), dtype=bool)
    visible[0, 0] = True
    for i, parent in enumerate(tree.parents.tolist(), start=1):
        row = visible[i]
        row[:] = visible[parent + 1]
        row[i] = True
    return ids, visible.sum(axis=1) - 1, visible


def feature_rows(features: Mapping[int, torch.Tensor], path: np.ndarray) -> dict[int, torch.Tensor]:
    """Hidden states [A + 1, H] of the root and the accepted path, per tap."""
    rows = torch.from_numpy(np.concatenate([[0], path + 1]))
    return {layer: hidden.index_select(0, rows.to(hidden.device)) for layer, hidden in features.items()}
