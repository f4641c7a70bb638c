"""Cells against their equations, batched against cached, and the training recursion against drafting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.drafters.cells import Cell, CellCache, CellConfig, make_cell
from adaptspec.drafters.cells.recursion import Recursion
from tests.drafters import cell_specification as specification
from tests.drafters.cell_cases import tiny_cell, tiny_config
from tests.drafters.cell_variants import VARIANTS

ROWS = 6
VOCAB = 20
EMBEDDING = torch.randn((VOCAB, 32), generator=torch.Generator().manual_seed(1))
FINAL_NORM = torch.linspace(0.5, 1.5, 32)


def lend_norm(cell: Cell) -> Cell:
    """The cell with a final norm that is not the identity."""
    norm = torch.nn.RMSNorm(32, eps=cell.config.rms_norm_eps)
    with torch.no_grad():
        norm.weight.copy_(FINAL_NORM)
    cell.use_final_norm(norm)
    return cell


def text(cell: Cell, *, batch: int = 1, rows: int = ROWS) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Tokens [B, T + 1] and features [B, T, H] per tap; row i takes feature i and token i + 1."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (batch, rows + 1), generator=generator)
    return tokens, [3.0 * torch.randn((batch, rows, 32), generator=generator) for _ in cell.config.taps]


def window_mask(config: CellConfig, rows: int) -> torch.Tensor | None:
    """Causal, within the sliding window if the cell has one."""
    if config.sliding_window is None:
        return None
    place = torch.arange(rows)
    seen = (place <= place[:, None]) & (place > place[:, None] - config.sliding_window)
    return seen[None, None]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_forward_is_what_the_equations_say(variant: str) -> None:
    cell = lend_norm(tiny_cell(variant))
    tokens, features = text(cell, batch=2)
    positions = torch.arange(ROWS).expand(2, ROWS)
    weights = cell.state_dict()
    for layer in range(cell.config.num_layers):
        with torch.no_grad():
            hidden = cell.fuse(features)
            head_input, following = cell(
                EMBEDDING[tokens[:, 1:]],
                hidden,
                positions=positions,
                mask=window_mask(cell.config, ROWS),
                step=layer,
            )
        rows = []
        for i in range(ROWS):
            fused = specification.fused([tap[1, i] for tap in features], weights, cell.config, FINAL_NORM)
            assert torch.allclose(hidden[1, i], fused, atol=1e-4)
            rows.append((EMBEDDING[tokens[1, i + 1]], fused, i))
        for i, (wanted_input, wanted_following) in enumerate(
            specification.cell_rows(rows, weights, cell.config, layer=layer)
        ):
            assert torch.allclose(head_input[1, i], wanted_input, atol=2e-4)
            assert torch.allclose(following[1, i], wanted_following, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_rows_equal_a_batched_forward(variant: str, dtype: torch.dtype) -> None:
    cell = lend_norm(tiny_cell(variant)).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    tokens, features = text(cell, batch=2)
    embeddings, positions = EMBEDDING[tokens[:, 1:]].to(dtype), torch.arange(ROWS).expand(2, ROWS)
    mask = window_mask(cell.config, ROWS)
    with torch.inference_mode():
        hidden = torch.stack([tap.to(dtype) for tap in features]).mean(0)
        for layer in range(cell.config.num_layers):
            whole, _ = cell(embeddings, hidden, positions=positions, mask=mask, step=layer)
            cache = CellCache(cell.config.num_layers)
            for first, last in ((0, 3), (3, 4), (4, 6)):  # several rows, one row, several behind cached ones
                part, following = cell(
                    embeddings[:, first:last],
                    hidden[:, first:last],
                    positions=positions[:, first:last],
                    mask=None if mask is None else mask[:, :, first:last, :last],
                    cache=cache,
                    step=layer,
                )
                assert part.dtype == following.dtype == dtype
                assert torch.allclose(part, whole[:, first:last], atol=tolerance, rtol=tolerance)
            assert cache.length(layer) == ROWS


def unrolled(cell: Cell, tokens: torch.Tensor, features: list[torch.Tensor], *, steps: int) -> Iterator[torch.Tensor]:
    """Training's recursion over a batch of texts, all positions at once; yields head inputs [B, T', H] per step.

    While every step has a layer of its own, its rows are causal; the last layer is reused by rows that see the causal
    ones up to their own place and, of the later steps, only what continues it.
    """
    count = tokens.shape[1] - steps  # rows that have all tokens
    cache = CellCache(cell.config.num_layers)
    hidden = cell.fuse([tap[:, :count] for tap in features])
    layers = cell.config.num_layers
    causal = torch.ones((count, count), dtype=torch.bool).tril()
    if cell.config.sliding_window is not None:
        causal &= ~torch.ones((count, count), dtype=torch.bool).tril(-cell.config.sliding_window)
    for step in range(steps):
        reused = max(0, step - layers + 1)
        mask = torch.cat([causal, *[torch.eye(count, dtype=torch.bool)] * reused], dim=1)
        if cell.config.sliding_window is not None and reused:
            place = torch.arange(count)
            mask[:, :count] &= place > place[:, None] + reused - cell.config.sliding_window
        positions = (torch.arange(count) + reused).expand(len(tokens), count)
        embeddings = EMBEDDING[tokens[:, 1 + step : 1 + step + count]].to(hidden.dtype)
        head_input, hidden = cell(
            embeddings, hidden, positions=positions, mask=mask[None, None], cache=cache, step=step
        )
        yield head_input


def drafted_along(cell: Cell, tokens: torch.Tensor, features: list[torch.Tensor], *, rows: int, steps: int) -> Any:
    """Head inputs after the root at `rows` and the tokens behind it, by the code that drafts."""
    recursion = Recursion(cell, lambda ids: EMBEDDING[ids].to(features[0].dtype))
    recursion.push(tokens[1 : rows + 1].numpy(), dict(zip(cell.config.taps, (f[:rows] for f in features), strict=True)))
    recursion.settle()
    found = [recursion.root()]
    for step in range(1, steps):
        found.append(recursion.draft(tokens[rows + step : rows + step + 1].numpy(), np.array([step - 1])))
    return torch.cat(found)


def training_equals_drafting(cell: Cell, *, steps: int = 5) -> bool:
    """Whether both give the same for every position that both can start from; in float64, where nothing is blurred."""
    tokens, features = text(cell.double(), batch=2, rows=11)
    cell._final_norm[0].double()
    features = [tap.double() for tap in features]
    with torch.no_grad():
        by_step = list(unrolled(cell, tokens, features, steps=steps))
    count = by_step[0].shape[1]
    for rows in range(cell.config.num_layers, count + 1):
        drafted = drafted_along(cell, tokens[1], [tap[1] for tap in features], rows=rows, steps=steps)
        wanted = torch.stack([head_input[1, rows - 1] for head_input in by_step])
        if not torch.allclose(drafted, wanted, atol=1e-8, rtol=1e-8):
            return False
    return True


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_unrolls_what_drafting_does(variant: str) -> None:
    assert training_equals_drafting(lend_norm(tiny_cell(variant)))


@contextmanager
def changed(owner: Any, name: str, make: Any) -> Iterator[None]:
    """A method replaced by `make(method)`."""
    method = getattr(owner, name)
    setattr(owner, name, make(method))
    try:
        yield
    finally:
        setattr(owner, name, method)


def later_positions(run: Any) -> Any:
    """Draft rows one place too far to the right."""

    def mutant(self: Recursion, *args: Any, positions: torch.Tensor, **options: Any) -> Any:
        return run(self, *args, positions=positions + (self._depth > 0), **options)

    return mutant


def own_token(push: Any) -> Any:
    """The feature of token i with the embedding of token i."""

    def mutant(self: Recursion, token_ids: np.ndarray, features: Any) -> None:
        push(self, np.concatenate([[0], token_ids[:-1]]), features)

    return mutant


@pytest.mark.parametrize("mutant", [("_run", later_positions), ("push", own_token)], ids=["position", "pairing"])
@pytest.mark.parametrize("variant", ["eagle1", "eagle3", "griffin", "mtp3"])
def test_wrong_positions_and_pairs_are_noticed(variant: str, mutant: tuple[str, Any]) -> None:
    cell = lend_norm(tiny_cell(variant))
    with changed(Recursion, *mutant):
        assert not training_equals_drafting(cell)


def test_gradients_reach_every_parameter_through_later_steps() -> None:
    for variant in ("eagle3-own", "mtp3"):
        cell = lend_norm(tiny_cell(variant)).train()
        tokens, features = text(cell, batch=2)
        last = list(unrolled(cell, tokens, features, steps=cell.config.num_layers + 1))[-1]
        last.square().sum().backward()
        missing = [name for name, parameter in cell.named_parameters() if parameter.grad is None]
        assert missing == [f"layers.{layer}.norm.weight" for layer in (0, 1)] * (variant == "mtp3")


def test_a_lent_norm_is_not_part_of_the_cell() -> None:
    cell = lend_norm(tiny_cell("eagle1"))
    assert not any("final_norm" in name for name in cell.state_dict())
    assert all(parameter is not cell._final_norm[0].weight for parameter in cell.parameters())
    bare = tiny_cell("eagle1")
    with pytest.raises(RuntimeError, match="use_final_norm first"):
        bare.fuse([torch.zeros(1, 32)])
    with pytest.raises(ValueError, match=r"one tensor per tap \[4\], got 2"):
        bare.fuse([torch.zeros(1, 32)] * 2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_configs_survive_being_written(variant: str) -> None:
    config = tiny_config(variant)
    assert CellConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "eagle4"}, "unknown kind of cell 'eagle4'; did you mean"),
        ({"hidden_size": 0}, "hidden_size must be a whole number >= 1, got 0"),
        ({"num_attention_heads": 3}, "multiple of num_key_value_heads, got 3 and 2"),
        ({"head_dim": 7}, "rotary_dim must be even and at most head_dim = 7, got 7"),
        ({"rotary_dim": 10}, "rotary_dim must be even and at most head_dim = 8, got 10"),
        ({"taps": ()}, "taps must name at least one layer"),
        ({"taps": (0, 1)}, "taps must be a whole number >= 1, got 0"),
        ({"kind": "mtp", "taps": (1, 2, 4)}, r"'mtp' takes one tap, got \[1, 2, 4\]"),
        ({"final_norm": True}, "final_norm needs exactly one tap"),
        ({"num_layers": 2}, "num_layers of a cell of kind 'eagle3' must be 1, got 2"),
        ({"bias": True}, "bias is an option of eagle1 and griffin, not of 'eagle3'"),
        ({"rope_theta": 0.0}, "rope_theta must be > 0"),
    ],
)
def test_impossible_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config("eagle3", **changes)


def test_impossible_config_values() -> None:
    values = tiny_config("eagle3").to_dict()
    with pytest.raises(ValueError, match="unknown field of the config of a cell 'head_size'"):
        CellConfig.from_dict({**values, "head_size": 8})
    with pytest.raises(ValueError, match="lacks head_dim, taps"):
        CellConfig.from_dict({name: value for name, value in values.items() if name not in ("head_dim", "taps")})
    with pytest.raises(ValueError, match="must be a CellConfig, got dict"):
        make_cell(values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rope_type of rope_scaling"):
        make_cell(tiny_config("eagle3", rope_scaling={"rope_type": "magic"}))


def test_scaled_rotary_embeddings_differ_from_plain_ones() -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    scaled = make_cell(tiny_config("eagle3", rope_scaling=rope)).rotary.frequencies
    plain = make_cell(tiny_config("eagle3")).rotary.frequencies
    assert torch.allclose(plain, 10_000.0 ** -(torch.arange(4) / 4))
    assert scaled[0] == plain[0] and torch.allclose(scaled[-1], plain[-1] / 8)


def test_the_cache_keeps_and_forgets_rows() -> None:
    cache = CellCache()
    rows = torch.arange(10.0).view(1, 1, 10, 1)
    with torch.inference_mode():
        cache.append(0, rows[:, :, :6], rows[:, :, :6])
        cache.truncate(4)
        keys, _ = cache.append(0, rows[:, :, 8:], -rows[:, :, 8:])
        assert keys.flatten().tolist() == [0, 1, 2, 3, 8, 9]
        cache.keep(torch.tensor([0, 5, 2]))
        keys, values = cache.append(0, rows[:, :, 7:8], rows[:, :, 7:8])
        assert keys.flatten().tolist() == [0, 9, 2, 7] and values.flatten().tolist() == [0, -9, 2, 7]
        many = torch.zeros(1, 1, 600, 1)
        assert cache.append(0, many, many)[0].flatten()[:4].tolist() == [0, 9, 2, 7]
    with pytest.raises(ValueError, match=r"length must be in \[0, 604\], got 605"):
        cache.truncate(605)
    with pytest.raises(ValueError, match=r"rows must be in \[0, 604\), got \[604\]"):
        cache.keep(torch.tensor([604]))
    with pytest.raises(ValueError, match="layers must be >= 1, got 0"):
        CellCache(0)
