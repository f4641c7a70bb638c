"""Losses against sums written out over whole distributions."""

from __future__ import annotations

import math

import pytest
import torch

from adaptspec.training.losses import (
    Objective,
    Targets,
    acceptance,
    cross_entropy,
    feature_distance,
    kl,
    lk_alpha,
    lk_lambda,
    top_cross_entropy,
)

VOCAB, ROWS, COUNT = 12, 7, 40


def case(listed: int) -> tuple[torch.Tensor, Targets, torch.Tensor, torch.Tensor]:
    """Draft logits, targets with `listed` tokens, the target's whole distributions, and which tokens have rows."""
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(2.0 * torch.randn((COUNT, VOCAB), generator=generator, dtype=torch.float64), dim=1)
    tokens = torch.tensor([0, 2, 3, 5, 7, 8, 11])
    row_of = torch.full((VOCAB,), -1)
    row_of[tokens] = torch.arange(ROWS)
    logits = torch.randn((COUNT, ROWS), generator=generator, dtype=torch.float64)
    top = p.topk(listed, dim=1)
    labels = row_of[torch.multinomial(p, 1, generator=generator)[:, 0]]
    assert (labels < 0).any() and (row_of[top.indices] < 0).any()
    return logits, Targets(row_of[top.indices], top.values.log(), p[:, tokens].sum(dim=1), labels), p, tokens


def test_kl_is_the_part_of_the_full_kl_that_the_rows_decide() -> None:
    logits, targets, p, tokens = case(VOCAB)
    q = torch.softmax(logits, dim=1)
    for i in range(COUNT):
        inside = sum(float(p[i, t]) for t in tokens)
        expected = sum(
            float(p[i, t]) * math.log(float(p[i, t]) / inside / float(q[i, r])) for r, t in enumerate(tokens)
        )
        assert float(kl(logits, targets)[i]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    # The chain rule: for any full q whose rows are these logits, KL(p || q) is this and what does not depend on it.
    others = torch.tensor([t for t in range(VOCAB) if t not in tokens.tolist()])
    for outside in (-1.0, 2.0):
        full = torch.full((COUNT, VOCAB), outside, dtype=torch.float64)
        full[:, tokens] = logits
        full_q = torch.softmax(full, dim=1)
        whole = (p * (p / full_q).log()).sum(dim=1)
        mass_p = torch.stack([p[:, tokens].sum(1), p[:, others].sum(1)], 1)
        mass_q = torch.stack([full_q[:, tokens].sum(1), full_q[:, others].sum(1)], 1)
        masses = (mass_p * (mass_p / mass_q).log()).sum(dim=1)
        given = p[:, others] / mass_p[:, 1:]
        rest = mass_p[:, 1] * (given * (given / (full_q[:, others] / mass_q[:, 1:])).log()).sum(dim=1)
        assert torch.allclose(whole - masses - rest, kl(logits, targets), atol=1e-5)


def test_alpha_is_the_overlap() -> None:
    logits, targets, p, tokens = case(VOCAB)
    q = torch.softmax(logits, dim=1)
    expected = torch.tensor([[min(float(p[i, t]), float(q[i, r])) for r, t in enumerate(tokens)] for i in range(COUNT)])
    assert torch.allclose(acceptance(logits, targets).float(), expected.sum(dim=1), atol=1e-5)
    assert torch.allclose(lk_alpha(logits, targets), -acceptance(logits, targets).log())


def test_merging_tokens_bounds_both() -> None:
    logits, exact, _, _ = case(VOCAB)
    for listed in (1, 3, 6):
        _, some, _, _ = case(listed)
        assert (kl(logits, some) <= kl(logits, exact) + 1e-5).all()
        assert (acceptance(logits, some) >= acceptance(logits, exact) - 1e-6).all()
        assert not torch.allclose(kl(logits, some), kl(logits, exact), atol=1e-3)


@pytest.mark.parametrize("eta", [0.0, 1.0, 3.0])
def test_lk_lambda_and_its_gradient(eta: float) -> None:
    logits, targets, _, _ = case(VOCAB)
    logits.requires_grad_(True)
    lk_lambda(logits, targets, eta=eta).sum().backward()
    found = logits.grad.clone()
    share = torch.exp(-eta * acceptance(logits, targets)).detach()
    pieces = [torch.autograd.grad(part.sum(), logits)[0] for part in (kl(logits, targets), acceptance(logits, targets))]
    assert torch.allclose(found, share[:, None] * pieces[0] - (1.0 - share)[:, None] * pieces[1], atol=1e-9)
    if eta == 0.0:
        assert torch.allclose(lk_lambda(logits, targets, eta=eta), kl(logits, targets))


def test_cross_entropies() -> None:
    logits, targets, p, tokens = case(VOCAB)
    log_q = torch.log_softmax(logits, dim=1)
    for i in range(COUNT):
        label = int(targets.labels[i])
        assert float(cross_entropy(logits, targets)[i]) == pytest.approx(0.0 if label < 0 else -float(log_q[i, label]))
        best = [int(t) for t in p[i].argsort(descending=True)[:4]]
        rows = {int(t): r for r, t in enumerate(tokens)}
        expected = -sum(float(p[i, t]) * float(log_q[i, rows[t]]) for t in best if t in rows)
        assert float(top_cross_entropy(logits, targets, count=4)[i]) == pytest.approx(expected, abs=1e-6)


def test_feature_distance_by_hand() -> None:
    predicted, wanted = torch.tensor([[0.5, 3.0]]), torch.tensor([[0.0, 0.0]])
    assert float(feature_distance(predicted, wanted)) == pytest.approx((0.5 * 0.25 + 2.5) / 2)


def test_objectives_put_parts_together() -> None:
    logits, targets, _, _ = case(VOCAB)
    logits, some = logits.float(), torch.ones((COUNT, 4))
    wanted = torch.zeros((COUNT, 4))
    distance = feature_distance(some, wanted)
    features = {"predicted": some, "wanted": wanted}
    assert torch.allclose(Objective("feature")(logits, targets, **features), distance + 0.1 * kl(logits, targets))
    griffin = distance + 0.1 * kl(logits, targets) + 0.5 * top_cross_entropy(logits, targets, count=10)
    assert torch.allclose(Objective("griffin")(logits, targets, **features), griffin)
    assert torch.allclose(Objective("ce")(logits, targets), cross_entropy(logits, targets))
    assert torch.allclose(Objective("lk-lambda", eta=1.0)(logits, targets), lk_lambda(logits, targets, eta=1.0))


@pytest.mark.parametrize("name", ["ce", "kl", "lk-alpha", "lk-lambda"])
def test_gradients_are_finite_where_the_draft_is_sure(name: str) -> None:
    logits, targets, _, _ = case(3)
    for scale in (1e3, 0.0):
        sharp = (scale * logits.float()).requires_grad_(True)
        Objective(name)(sharp, targets).sum().backward()
        assert torch.isfinite(sharp.grad).all()


def test_descending_the_kl_reaches_the_target() -> None:
    logits, targets, p, tokens = case(VOCAB)
    logits = torch.zeros_like(logits).requires_grad_(True)
    optimiser = torch.optim.Adam([logits], lr=0.1)
    for _ in range(300):
        optimiser.zero_grad()
        kl(logits, targets).sum().backward()
        optimiser.step()
    inside = p[:, tokens] / p[:, tokens].sum(dim=1, keepdim=True)
    assert (torch.softmax(logits, dim=1) - inside).abs().max() < 0.02


def test_bad_objectives() -> None:
    with pytest.raises(ValueError, match="unknown loss 'lk-lambada'; did you mean 'lk-lambda'"):
        Objective("lk-lambada")
    with pytest.raises(ValueError, match="eta must be >= 0"):
        Objective("kl", eta=-1.0)
    logits, targets, _, _ = case(3)
    with pytest.raises(ValueError, match=r"count must be in \[1, 3\], got 4"):
        top_cross_entropy(logits, targets, count=4)
