"""Reading rows, and sampling with one uniform."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from adaptspec.verify import rows, sample
from adaptspec.verify.rows import as_row, draw, excess, residual, without

LAST = np.nextafter(1.0, 0.0)


@st.composite
def distributions(draw_from, size=None):
    size = size or draw_from(st.integers(1, 40))
    weights = draw_from(hnp.arrays(np.float64, size, elements=st.sampled_from([0.0, 0.0, 1e-30, 1e-9, 0.3, 1.0, 7.0])))
    weights[draw_from(st.integers(0, size - 1))] += 1.0
    return weights / weights.sum()


@given(distributions(), st.floats(0, 1), st.sampled_from([np.float32, np.float64]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_sample_inverts_the_cumulative_distribution(p, u, dtype):
    p = p.astype(dtype)
    token = sample(p, u)
    total = p.sum(dtype=np.float64)
    assert p[token] > 0
    assert p[:token].sum(dtype=np.float64) <= u * total + 1e-12
    assert u * total <= p[: token + 1].sum(dtype=np.float64) + 1e-12
    assert sample(torch.from_numpy(p), u) == token


@pytest.mark.parametrize("size", [1, 2047, 2048, 2049, 2304, 5000])
def test_long_rows_give_the_same_tokens_as_a_plain_running_sum(size):
    rng = np.random.default_rng(size)
    p = rng.dirichlet(np.full(size, 0.05))
    p[rng.random(size) < 0.5] = 0.0
    p[size // 2] += 1e-3
    p /= p.sum()
    plain = np.minimum(p.cumsum().searchsorted(us := rng.random(300), side="right"), size - 1)
    assert [sample(p, u) for u in us] == plain.tolist()


@pytest.mark.parametrize("size", [8, 3000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zeros_at_both_ends_are_never_sampled(size, dtype):
    p = np.zeros(size, dtype)
    p[size // 2 - 1 : size // 2 + 2] = 1 / 3
    for row in (p, torch.from_numpy(p)):
        assert sample(row, 0.0) == size // 2 - 1
        assert sample(row, LAST) == sample(row, 1.0) == size // 2 + 1


def test_rows_off_by_float_error_are_taken_as_they_are():
    p = np.array([0.3, 0.3, 0.4], np.float32)
    assert sample(p * np.float32(1 + 1e-6), LAST) == sample(p * np.float32(1 - 1e-3), LAST) == 2


def test_half_precision_rows():
    p = torch.tensor([0.25, 0.0, 0.75])
    for dtype in (torch.float16, torch.bfloat16):
        assert [sample(p.to(dtype), u) for u in (0.0, 0.24, 0.26, LAST)] == [0, 0, 2, 2]
        assert as_row(p.to(dtype), name="p").tolist() == [0.25, 0.0, 0.75]


def test_rows_that_need_gradients():
    assert sample(torch.tensor([0.5, 0.5], requires_grad=True), 0.7) == 1


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("bad", [[0.5, float("nan")], [1.5, -0.5], [0.0, 0.0], [float("inf"), 0.5], [3.0, 4.0]])
def test_bad_rows_raise_and_are_named(bad, on_device, monkeypatch):
    monkeypatch.setattr(rows, "_stays_on_device", lambda tensor: on_device)
    for values in (np.array(bad), torch.tensor(bad)):
        with pytest.raises(ValueError, match=r"target_probs\[7\] must hold probabilities"):
            sample(values, 0.5, name="target_probs[7]")
        with pytest.raises(ValueError, match=r"target_probs\[7\] must hold probabilities"):
            as_row(values, name="target_probs[7]")


def test_bad_shapes_and_uniforms_raise():
    with pytest.raises(ValueError, match=r"p must have shape \[V\], got \[2, 2\]"):
        sample(np.full((2, 2), 0.25), 0.5, name="p")
    with pytest.raises(ValueError, match=r"shape \[V\], got \[0\]"):
        sample(np.zeros(0), 0.5)
    with pytest.raises(ValueError, match=r"q must have shape \[3\], got \[2\]"):
        as_row([0.5, 0.5], name="q", like=np.full(3, 1 / 3))
    for u in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"u must be in \[0, 1\]"):
            sample(np.array([1.0]), u)


def test_as_row_never_aliases_its_input():
    source = np.array([0.5, 0.5])
    as_row(source, name="p")[0] = 9.0
    assert source.tolist() == [0.5, 0.5]


def test_rows_of_two_kinds_meet_where_the_target_is(monkeypatch):
    monkeypatch.setattr(rows, "_stays_on_device", lambda tensor: True)
    tensor, array = torch.tensor([0.25, 0.75], dtype=torch.float32), np.array([0.25, 0.75], np.float32)
    assert isinstance(as_row(array, name="q", like=as_row(tensor, name="p")), torch.Tensor)
    assert isinstance(as_row(tensor, name="q", like=as_row(array, name="p")), np.ndarray)
    assert as_row(array, name="q", like=as_row(tensor, name="p")).dtype == torch.float64


def test_a_running_sum_that_steps_at_a_zero_still_gives_a_possible_token(monkeypatch):
    # Parallel sums on a device are not monotone to the last bit; a running sum with a false step stands for one.
    class Skewed(torch.Tensor):
        def double(self):
            return self

        def cumsum(self, dim):
            return torch.tensor([0.0, 0.5, 0.6, 1.0], dtype=torch.float64)

    monkeypatch.setattr(rows, "_stays_on_device", lambda tensor: True)
    row = torch.tensor([0.0, 0.5, 0.0, 0.5], dtype=torch.float64).as_subclass(Skewed)
    assert sample(row, 0.55) == 1


@given(distributions(6), distributions(6), st.floats(0, LAST), st.floats(0.0, 1.0))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_residuals_are_distributions_and_same_on_tensors(p, q, u, weight):
    def on_device(x):
        return torch.from_numpy(x)

    p, q = as_row(p, name="p"), as_row(q, name="q")
    for second in (q, None):
        row = residual(p, second, 2)
        assert row.min() >= 0
        assert row.sum() == pytest.approx(1.0)
        assert p[draw(row, u)] > 0
        tensor_row = residual(on_device(p), None if second is None else on_device(second), 2)
        np.testing.assert_allclose(tensor_row.numpy(), row, atol=1e-15)
        _, total = excess(p, second, 2, weight=weight)
        assert 0.0 <= total <= 1.0 + 1e-12
    left = without(q, 2)
    assert left[2] == 0
    assert left.sum() == pytest.approx(1.0) or not left.any()


def test_residual_of_equal_rows_is_the_row():
    p = as_row([0.2, 0.8], name="p")
    assert residual(p, p.copy(), 0).tolist() == p.tolist()
    assert residual(np.array([0.0, 1.0]), None, 1).tolist() == [0.0, 1.0]
