from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ptlf.batch import Batch
from ptlf.model import Model
from ptlf.objectives import OBJECTIVES
from ptlf.objectives.barlow_twins import cross_correlation_loss, standardise


def make(name: str, **settings):
    torch.manual_seed(0)
    kind = OBJECTIVES[name]
    small = {"projection": 12} if hasattr(kind.Config(), "projection") else {}
    return kind(kind.Config(name=name, **small, **settings), nn.Identity(), 6, classes=3)


def batch(size: int = 8) -> Batch:
    return Batch(torch.zeros(size, 4, 4, 3, dtype=torch.uint8), torch.arange(size) % 3, torch.zeros(2, size, 1))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_is_finite_and_reaches_every_parameter(name: str) -> None:
    objective = make(name)
    features = [torch.randn(8, 6, requires_grad=True) for _ in range(2)]
    loss = objective.loss(features, batch())
    loss.backward()
    assert loss.ndim == 0
    assert loss.isfinite()
    assert all(f.grad is not None and f.grad.abs().sum() > 0 for f in features)
    assert all(p.grad is not None for p in objective.parameters())


def test_simsiam_by_hand() -> None:
    """-(cos(p1, z2) + cos(p2, z1)) / 2, with no gradient through z as a target."""
    objective = make("simsiam", bottleneck=5)
    a, b = torch.randn(2, 8, 6)
    z = [objective.projector(v).detach() for v in (a, b)]
    p = [objective.predictor(v).detach() for v in z]

    def cosine(x, y):
        return np.mean([np.dot(u, v) / np.linalg.norm(u) / np.linalg.norm(v) for u, v in zip(x, y, strict=True)])

    expected = -(cosine(p[0].numpy(), z[1].numpy()) + cosine(p[1].numpy(), z[0].numpy())) / 2
    assert objective.loss([a, b], batch()).item() == pytest.approx(expected, abs=1e-5)
    a.requires_grad_()
    with torch.no_grad():
        for parameter in objective.predictor.parameters():
            parameter.zero_()  # predictions no longer depend on anything: only a target could pass a gradient
        objective.predictor[3].bias.fill_(1.0)
    objective.loss([a, b], batch()).backward()
    assert a.grad.abs().max() < 1e-6


def test_barlow_twins_by_hand() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 16, 5))
    columns = [(v - v.mean(0)) / v.std(0, ddof=1) for v in (a, b)]
    c = columns[0].T @ columns[1] / 16
    expected = sum((1 - c[i, i]) ** 2 for i in range(5))
    expected += 0.3 * sum(c[i, j] ** 2 for i in range(5) for j in range(5) if i != j)
    assert cross_correlation_loss(torch.tensor(a), torch.tensor(b), 0.3).item() == pytest.approx(expected, abs=1e-9)


def test_barlow_twins_survives_a_constant_column() -> None:
    z = torch.randn(8, 4)
    z[:, 2] = 3.0
    z.requires_grad_()
    loss = cross_correlation_loss(z, torch.randn(8, 4), 5e-3)
    loss.backward()
    assert loss.isfinite()
    assert z.grad.isfinite().all()
    assert standardise(z)[:, 2].abs().max() == 0


def test_heads_stay_float32_under_bf16() -> None:
    """bf16 in the encoder only: the head sees float32 features and computes in float32."""
    seen = []
    objective = make("barlow_twins")
    objective.projector.register_forward_hook(lambda module, given, made: seen.append((given[0].dtype, made.dtype)))
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 6))
    encoder.register_forward_hook(lambda module, given, made: seen.append(made.dtype))
    model = Model(encoder, objective, torch.bfloat16)
    model.objective.loss(model.encode([torch.randn(8, 3, 2, 2), torch.randn(8, 3, 2, 2)]), batch())
    assert seen == [torch.bfloat16, torch.bfloat16, *[(torch.float32, torch.float32)] * 2]
