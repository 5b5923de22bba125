import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from ptlf import objectives
from ptlf.core.batch import Batch
from ptlf.model import Model
from ptlf.objectives import OBJECTIVES
from ptlf.objectives.objective import each_view, mlp
from ptlf.objectives.redundancy import barlow_twins_loss, standardise_columns


def make(name: str, **settings):
    torch.manual_seed(0)
    kind = OBJECTIVES[name]
    small = {"projection": 12, "hidden": 10, "queue": 20}
    known = {field.name for field in dataclasses.fields(kind.Config)}
    chosen = {key: value for key, value in {**small, **settings}.items() if key in known}
    return kind(kind.Config(name=name, **chosen), nn.Linear(6, 6), 6, classes=3)


def targets(objective, made: Batch) -> Batch:
    """The batch as the model hands it to the objective."""
    return Model(nn.Linear(6, 6), objective).with_targets(made)


def batch(size: int = 8) -> Batch:
    """Views are vectors here: the encoder is a linear layer."""
    made = Batch(torch.zeros(size, 4, 4, 3, dtype=torch.uint8), torch.arange(size) % 3, torch.zeros(2, size, 1))
    made.mixed = list(torch.randn(2, size, 6, generator=torch.Generator().manual_seed(size)))
    return made


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_is_finite_and_reaches_every_parameter(name: str) -> None:
    objective = make(name)
    features = [torch.randn(8, 6, requires_grad=True) for _ in range(2)]
    loss = Model(nn.Linear(6, 6), objective).loss(features, batch())
    loss.backward()
    assert loss.ndim == 0 and loss.isfinite()
    assert all(f.grad is not None and f.grad.abs().sum() > 0 for f in features)
    assert all(p.grad is not None for p in objective.parameters() if p.requires_grad)


def test_barlow_twins_by_hand() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 16, 5))
    columns = [(v - v.mean(0)) / v.std(0, ddof=1) for v in (a, b)]
    c = columns[0].T @ columns[1] / 16
    expected = sum((1 - c[i, i]) ** 2 for i in range(5))
    expected += 0.3 * sum(c[i, j] ** 2 for i in range(5) for j in range(5) if i != j)
    z1, z2 = torch.tensor(a, requires_grad=True), torch.tensor(b, requires_grad=True)
    assert barlow_twins_loss(z1, z2, 0.3).item() == pytest.approx(expected, abs=1e-9)
    assert torch.autograd.gradcheck(lambda z1, z2: barlow_twins_loss(z1, z2, 0.3), (z1, z2))
    z = torch.randn(8, 4)
    z[:, 2] = 3.0
    z.requires_grad_()
    loss = barlow_twins_loss(z, torch.randn(8, 4), 5e-3)
    loss.backward()
    assert loss.isfinite() and z.grad.isfinite().all()
    assert standardise_columns(z)[:, 2].abs().max() == 0


def unit(v: np.ndarray) -> np.ndarray:
    return v / np.linalg.norm(v, axis=1, keepdims=True)


def pick_own(logits: np.ndarray) -> float:
    """Mean negative log-probability of the diagonal, row by row."""
    return float(np.mean([-row[i] + np.log(np.exp(row).sum()) for i, row in enumerate(logits)]))


def passes_every_gradient(objective, z1: torch.Tensor, z2: torch.Tensor) -> bool:
    """Of the loss by finite differences, in both views: no target is held fixed."""
    inputs = (z1.clone().requires_grad_(), z2.clone().requires_grad_())
    return torch.autograd.gradcheck(lambda a, b: objective.compare([a, b], batch()), inputs)


def test_simclr_and_vicreg_by_hand() -> None:
    objective = make("simclr", temperature=0.3)
    z1, z2 = torch.randn(2, 8, 12, dtype=torch.float64)
    z = unit(np.concatenate([z1, z2]))
    similarity = z @ z.T / 0.3
    terms = []
    for i in range(16):
        others = [similarity[i, j] for j in range(16) if j != i]
        terms.append(-similarity[i, (i + 8) % 16] + np.log(np.exp(others).sum()))
    assert objective.compare([z1, z2], batch()).item() == pytest.approx(np.mean(terms), abs=1e-9)
    assert passes_every_gradient(objective, z1, z2)
    objective = make("vicreg")
    z1, z2 = 0.7 * torch.randn(2, 8, 12, dtype=torch.float64)
    expected = 25 * np.mean((z1 - z2).numpy() ** 2)
    for z in (z1.numpy(), z2.numpy()):
        expected += 25 / 2 * np.mean(np.maximum(0, 1 - np.sqrt(z.var(0, ddof=1) + 1e-4)))
        covariance = np.cov(z.T)
        expected += sum(covariance[i, j] ** 2 for i in range(12) for j in range(12) if i != j) / 12
    assert objective.compare([z1, z2], batch()).item() == pytest.approx(expected, rel=1e-9)
    assert passes_every_gradient(objective, z1, z2)


def test_moco_queue_is_first_in_first_out() -> None:
    """20 places, batches of 8, 8, 5 and 8: the oldest keys go first, partial batches included."""
    objective, encoder = make("mocov2plus"), nn.Linear(6, 6)
    start = objective.queue.clone()
    expected = [list(queue) for queue in start]
    for size in (8, 8, 5, 8):
        b = targets(objective, batch(size))
        keys = torch.stack([nn.functional.normalize(z, dim=1) for z in b.targets])
        objective.after_step(encoder, b)
        for queue, new in zip(expected, keys, strict=True):
            queue[:] = [*queue[size:], *new]  # newest last
    pointer = int(objective.pointer)
    assert pointer == 29 % 20
    for queue, wanted in zip(objective.queue, expected, strict=True):
        assert torch.equal(torch.roll(queue, -pointer, 0), torch.stack(wanted))
    assert {"queue", "pointer", "teacher.encoder.weight", "teacher.step"} <= objective.state_dict().keys()
    objective = make("mocov2plus", queue=5)
    b = targets(objective, batch(8))
    objective.after_step(nn.Linear(6, 6), b)
    assert torch.equal(objective.queue, torch.stack([nn.functional.normalize(z, dim=1)[3:] for z in b.targets]))


def test_momentum_networks_have_the_encoders_precision_and_heads_float32() -> None:
    objective = make("mocov2plus")
    model = Model(nn.Linear(6, 6), objective, torch.bfloat16)
    seen = []
    objective.teacher.encoder.register_forward_hook(lambda module, given, made: seen.append(made.dtype))
    model.compare(list(torch.randn(2, 8, 12)), batch())
    assert seen == [torch.bfloat16] * 2
    seen = []
    objective = make("barlow_twins")
    objective.projector.register_forward_hook(lambda module, given, made: seen.append((given[0].dtype, made.dtype)))
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 6))
    encoder.register_forward_hook(lambda module, given, made: seen.append(made.dtype))
    model = Model(encoder, objective, torch.bfloat16)
    model.loss(model.encode([torch.randn(8, 3, 2, 2), torch.randn(8, 3, 2, 2)]), batch())
    assert seen == [torch.bfloat16, torch.bfloat16, *[(torch.float32, torch.float32)] * 2]


def test_products_of_heads_in_bf16_have_float32_around_them() -> None:
    """Each view keeps its own statistics, and nothing but the products is rounded."""
    torch.manual_seed(0)
    head, views = mlp(32, 64, 16), list(torch.randn(2, 24, 32))
    plain = [head(view) for view in views]
    torch.testing.assert_close(each_view(head, views), plain)
    head.bf16 = True
    found = each_view(head, views)
    assert {view.dtype for view in found} == {torch.float32}
    apart = max(float(((a - b).abs().max() / b.std()).detach()) for a, b in zip(found, plain, strict=True))
    assert 1e-4 < apart < 0.05
    torch.cat(found).sum().backward()
    assert {parameter.grad.dtype for parameter in head.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", [name for name, objective in OBJECTIVES.items() if objective.can_distill()])
def test_distillation_by_hand(name: str) -> None:
    """Two views, predictions p and an earlier model's z; each objective's own kind of loss, with a gradient for p."""
    objective = make(name)
    p, z = np.random.default_rng(0).normal(size=(2, 2, 8, 12))
    cosine = np.mean([np.mean(np.sum(unit(a) * unit(b), axis=1)) for a, b in zip(p, z, strict=True)])
    logits = unit(p.reshape(16, 12)) @ unit(z.reshape(16, 12)).T / 0.2
    contrastive = (pick_own(logits) + pick_own(logits.T)) / 2
    crossed = [barlow_twins_loss(torch.tensor(a), torch.tensor(b), 5e-3).item() for a, b in zip(p, z, strict=True)]
    expected = {
        "simsiam": -cosine, "supervised": -cosine, "byol": 2 - 2 * cosine, "barlow_twins": np.mean(crossed),
        "mocov2plus": contrastive, "simclr": contrastive, "vicreg": 25 * np.mean((p - z) ** 2),
    }  # fmt: skip
    assert name in expected, f"add what {name}'s `distill` gives by hand"
    distilled = pytest.approx(expected[name], abs=1e-9)
    assert objective.distill(list(torch.tensor(p)), list(torch.tensor(z))).item() == distilled
    predicted = torch.tensor(p, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: objective.distill(list(v), list(torch.tensor(z))), (predicted,))


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_barlow_twins_distils_at_the_scale_of_its_own_loss(scale: float) -> None:
    """As in CaSSLe's code, whose two losses have the same factor."""
    objective, (p, z) = make("barlow_twins", scale=scale), torch.randn(2, 8, 12)
    plain = barlow_twins_loss(p, z, 5e-3)
    assert objective.compare([p, z], batch()).item() == pytest.approx(scale * plain.item())
    assert objective.distill([p, p], [z, z]).item() == pytest.approx(scale * plain.item())


def test_losses_and_heads_train_in_a_loop_of_one_s_own() -> None:
    """With nothing but what `ptlf.objectives` exports and plain PyTorch."""
    torch.manual_seed(0)
    images, queue = torch.rand(32, 3, 8, 8), nn.functional.normalize(torch.randn(40, 16), dim=1)

    def moco(z1, z2):
        keys = nn.functional.normalize(z2.detach())
        return objectives.moco_loss(nn.functional.normalize(z1), keys, queue)

    compared = [objectives.barlow_twins_loss, objectives.simclr_loss, objectives.vicreg_loss, moco]
    predicted = [objectives.simsiam_loss, objectives.byol_loss]
    for loss_of in (*compared, *predicted):
        encoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16))
        projector, predictor = objectives.mlp(16, 16, 16, last_norm=True), objectives.mlp(16, 8, 16)
        optimizer = torch.optim.Adam(nn.ModuleList([encoder, projector, predictor]).parameters(), lr=1e-2)
        losses = []
        for _ in range(20):
            z = objectives.each_view(projector, [encoder(images + 0.1 * torch.randn_like(images)) for _ in range(2)])
            targets = [*objectives.each_view(predictor, z), *(view.detach() for view in z)]
            loss = loss_of(*(targets if loss_of in predicted else z))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.1 * abs(losses[0]), (loss_of, losses)
