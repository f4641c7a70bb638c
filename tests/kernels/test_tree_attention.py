"""`tree_attention`: the reference against its definition and attention along paths; starts the kernel's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from adaptspec.kernels import backend
from adaptspec.kernels.tree_attention import pack_ancestors, tree_attention
from adaptspec.kernels.tree_attention.reference import unpack_ancestors
from tests.kernels.addresses import narrow_addresses
from tests.kernels.attention_cases import Case, attend_in_float64, random_tree
from tests.kernels.mutants import mutated

TOLERANCE = 4e-6
"""Largest absolute difference in float32, values being of size 1: some rounding steps."""

CASES = {
    "one node": Case(nodes=1, heads=1),
    "groups": Case(heads=6, groups=2, nodes=6),
    "no prefix": Case(prefix=0),
    "ragged lengths": Case(prefix=40, lengths=(40, 0, 17), nodes=2),  # NaN lies behind the lengths
    "wide tree": Case(nodes=70, heads=1, prefix=3),
    "rows run earlier": Case(before=37, nodes=4),
    "blind row": Case(prefix=0, blind=True),
    "soft cap": Case(softcap=2.0, spread=4.0),
}


def test_the_kernel_in_the_interpreter(run_interpreted: Callable[..., None]) -> None:
    run_interpreted("test_tree_attention.py", at_least=40)


def test_the_kernel_in_models(run_interpreted: Callable[..., None]) -> None:
    run_interpreted("test_in_models.py", at_least=12)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_equals_the_definition(name: str) -> None:
    inputs = CASES[name].inputs()
    before = backend.calls["tree_attention", "reference"]
    output = tree_attention(**inputs)
    assert backend.calls["tree_attention", "reference"] == before + 1
    assert output.transpose(1, 2).is_contiguous()
    difference = output.double() - attend_in_float64(**inputs).nan_to_num(0.0)
    assert not difference.isnan().any()
    assert float(difference.abs().max()) <= TOLERANCE * max(1.0, CASES[name].spread)


def test_a_node_attends_as_the_last_token_of_its_path() -> None:
    """Without masks and words: torch's own causal attention over the prefix and the path."""
    inputs = Case(heads=4, groups=4, nodes=7).inputs()
    output = tree_attention(**inputs)
    visible = random_tree(7, seed=0)
    for node in range(7):
        path = np.flatnonzero(visible[node])
        keys = torch.cat([inputs["prefix_keys"], inputs["tree_keys"][:, :, path]], dim=2)
        values = torch.cat([inputs["prefix_values"], inputs["tree_values"][:, :, path]], dim=2)
        query = inputs["query"][:, :, node : node + 1]
        alone = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=inputs["scale"])
        assert float((output[:, :, node] - alone[:, :, 0]).abs().max()) <= TOLERANCE


def test_half_precision_is_computed_in_float32() -> None:
    inputs = Case(dtype=torch.bfloat16, prefix=30).inputs()
    output = tree_attention(**inputs)
    assert output.dtype == torch.bfloat16
    assert float((output - attend_in_float64(**inputs)).abs().max()) <= 2**-8  # half a step of numbers from 1 to 2


def test_packing_is_undone_by_unpacking() -> None:
    for width in (1, 63, 64, 65, 130):
        visible = random_tree(width, seed=width)
        words = pack_ancestors(visible)
        assert words.dtype == np.int64 and words.shape == (width, -(-width // 64))
        assert np.array_equal(unpack_ancestors(torch.from_numpy(words)[None], width)[0].numpy(), visible)
    assert pack_ancestors(np.eye(64, dtype=bool))[63, 0] == -(2**63)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 3, 5, 16)}, "query heads must be a multiple of the 2 key-value heads, got 3"),
        ({"query": torch.zeros(1, 4, 5, 257)}, r"head size must be in \[1, 256\], got 257"),
        (
            {"prefix_values": torch.zeros(1, 2, 19, 16)},
            r"prefix_values must have shape \[1, 2, 20, 16\], got \[1, 2, 19",
        ),
        ({"tree_values": torch.zeros(1, 2, 4, 16)}, r"tree_values must have shape \[1, 2, 5, 16\]"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, r"lengths must have shape \[1\], got \[2\]"),
        ({"lengths": torch.zeros(1)}, "lengths must be int64, got torch.float32"),
        ({"ancestors": torch.zeros(1, 5, 2, dtype=torch.int64)}, r"ancestors must have shape \[1, 5, 1\]"),
        ({"ancestors": torch.zeros(1, 5, 1, dtype=torch.int32)}, "ancestors must be int64, got torch.int32"),
        ({"tree_keys": torch.zeros(1, 2, 5, 16).half()}, "tree_keys must have the dtype of query, torch.float32"),
        ({"tree_keys": torch.zeros(1, 2, 16, 5).mT}, "tree_keys must have stride 1 along D, got 5"),
        ({"softcap": 0.0}, "softcap must be > 0 or None, got 0.0"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    inputs = Case(heads=4, groups=2).inputs()
    with pytest.raises(ValueError, match=message):
        tree_attention(**{**inputs, **change})


def test_addresses_are_computed_in_64_bits() -> None:
    """A cache of more than 2 ** 31 elements is ordinary: 128 sequences of 8192 tokens, 8 heads of 256."""
    from adaptspec.kernels.tree_attention import triton as kernels

    for specialisation in (kernels.SPECIALISATIONS[1], kernels.SPECIALISATIONS[-1]):
        assert narrow_addresses(specialisation, data="bf16|f32") == []
    for old, new in (
        ("sequence = (tl.program_id(2) // groups).to(tl.int64)", "sequence = tl.program_id(2) // groups"),
        ("offset = position.to(tl.int64)", "offset = position"),
        ("cell = tl.program_id(0).to(tl.int64) * BLOCK_CELLS", "cell = tl.program_id(0) * BLOCK_CELLS"),
    ):
        with mutated("adaptspec.kernels.tree_attention.triton", old, new) as mutant:
            both = (mutant.SPECIALISATIONS[1], mutant.SPECIALISATIONS[-1])
            assert any(narrow_addresses(specialisation, data="bf16|f32") for specialisation in both)
