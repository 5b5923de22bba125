"""Each method's own quantity against a naive reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ptlf.core.batch import Batch
from ptlf.methods import METHODS, Memory
from ptlf.model import Model
from ptlf.objectives import OBJECTIVES
from ptlf.run.loop import Run
from ptlf.views import apply_view, named_views

VIEW = named_views("memory", 8)[0]


def small_model(objective: str = "simsiam") -> Model:
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    kind = OBJECTIVES[objective]
    heads = kind(kind.Config(**({"projection": 6} if objective != "supervised" else {})), encoder, 4, classes=3)
    return Model(encoder, heads)


def small_batch(seed: int = 0, size: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (size, 8, 8, 3), generator=generator, dtype=torch.uint8)
    views = list(torch.randn(2, size, 3, 8, 8, generator=generator))
    return Batch(images, torch.arange(size) % 3, torch.zeros(2, size, 1), views=views, mixed=views)


def make(name: str, model: Model, memory: Memory | None = None, **settings):
    kind = METHODS[name]
    return kind(kind.Config(name=name, **settings), model, memory, torch.Generator().manual_seed(0))


def flat(tensors) -> np.ndarray:
    return torch.cat([t.detach().flatten() for t in tensors]).double().numpy()


def test_si_by_hand() -> None:
    """Two tasks of plain gradient steps; path, importance, penalty and its gradient in float64 numpy."""
    model = small_model()
    method = make("si", model, strength=3.0, damping=0.5, clip=0.02)
    parameters = list(model.encoder.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.7)
    anchor, importance = flat(parameters), 0.0
    for task in range(3):
        method.begin_task(task, model)
        path = 0.0
        for step in range(4):
            batch = small_batch(10 * task + step)
            losses = method.losses(model, batch)
            if task > 0:
                expected = 3.0 * np.sum(importance * (flat(parameters) - anchor) ** 2)
                assert losses["penalty"].item() == pytest.approx(expected, rel=1e-4, abs=1e-12)
            else:
                assert losses.keys() == {"ssl"}
            optimizer.zero_grad()
            losses["ssl"].backward()
            gradient = flat([p.grad for p in parameters])
            if task > 0:
                losses["penalty"].backward()
                gradient = gradient + 2 * 3.0 * importance * (flat(parameters) - anchor)
            method.after_backward(model, 0.7)
            clipped = np.clip(gradient, -0.02, 0.02)
            assert np.abs(gradient).max() > 0.02
            np.testing.assert_allclose(flat([p.grad for p in parameters]), clipped, atol=1e-7)
            assert max(p.grad.abs().max() for p in model.objective.parameters()) <= 0.02 + 1e-9
            path = path + 0.7 * clipped**2
            np.testing.assert_allclose(flat(method.path), path, atol=1e-9)
            optimizer.step()
        method.end_task(task, model)
        importance = importance + path / ((flat(parameters) - anchor) ** 2 + 0.5)
        anchor = flat(parameters)
        np.testing.assert_allclose(flat(method.importance), importance, atol=1e-8)
        np.testing.assert_array_equal(flat(method.anchor), anchor)
        assert not flat(method.path).any()


def test_si_leaves_frozen_parameters_alone(tiny) -> None:
    run = Run(tiny("digits/simsiam/finetune", method__name="si"))
    run.freezing.freezer.freeze(["0"])
    batch = run.trainer.load(torch.arange(32), torch.Generator().manual_seed(0), {})
    run.trainer.step(batch)
    by_name = dict(zip(dict(run.model.encoder.named_parameters()), run.method.path, strict=True))
    assert not by_name["0.weight"].any()
    assert by_name["3.weight"].any()


def test_der_stores_outputs_and_compares_with_them() -> None:
    model = small_model()
    memory = Memory(12, 8, 8, VIEW, outputs=4)
    method = make("der", model, memory, alpha=0.4)
    made: dict[int, np.ndarray] = {}
    for step in range(4):
        batch = small_batch(step)
        batch.draws = method.draw(8)
        losses = method.losses(model, batch)
        with torch.no_grad():
            outputs = model.encode(batch.mixed)[0].numpy()
            picks = batch.draws["picks"]
            fresh = apply_view(memory.images[picks], batch.draws["memory_uniforms"], VIEW, 8)
            now = model.encode([fresh])[0].numpy()
        if step == 0:
            assert losses["replay"].item() == 0
        else:
            stored = np.stack([made[int(i)] for i in picks])
            assert losses["replay"].item() == pytest.approx(0.4 * np.mean((now - stored) ** 2), abs=1e-6)
            assert losses["replay"].item() > 0
            (gradient,) = torch.autograd.grad(losses["replay"], model.encoder[0].weight)
            again = 0.4 * (model.encode([fresh])[0] - torch.from_numpy(stored)).square().mean()
            torch.testing.assert_close(gradient, torch.autograd.grad(again, model.encoder[0].weight)[0])
        method.remember(batch)
        for position, slot in enumerate(batch.draws["slots"].tolist()):
            if slot < 12:
                made[slot] = outputs[position]
        for slot, vector in made.items():
            np.testing.assert_allclose(memory.outputs[slot].numpy(), vector, atol=1e-6)
    assert len(made) == 12


def test_der_with_an_empty_memory_shows_norms_no_blank_images() -> None:
    model, twin = small_model(), small_model()
    method = make("der", model, Memory(12, 8, 8, VIEW, outputs=4))
    batch = small_batch()
    batch.draws = method.draw(8)
    method.losses(model, batch)
    twin.encode([*batch.views, batch.views[0]])
    assert torch.equal(model.encoder[1].running_var, twin.encoder[1].running_var)


def train(model: Model, method, steps: int = 3) -> None:
    trained = [p for p in (*model.parameters(), *method.parameters()) if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        sum(method.losses(model, small_batch(step)).values()).backward()
        optimizer.step()


@pytest.mark.parametrize("objective", ["simsiam", "barlow_twins", "mocov2plus", "supervised"])
@pytest.mark.parametrize("name", ["cassle", "pfr"])
def test_distillation_is_against_the_previous_model_which_does_not_move(name: str, objective: str) -> None:
    model = small_model(objective)
    method = make(name, model, weight=0.3, hidden=16)
    method.begin_task(0, model)
    assert method.losses(model, small_batch()).keys() == {"ssl"}
    train(model, method)
    method.begin_task(1, model)
    encoder, projector = (
        {k: v.clone() for k, v in m.state_dict().items()} for m in (model.encoder, model.objective.projector)
    )
    train(model, method)
    assert not torch.equal(model.encoder[0].weight, encoder["0.weight"])
    previous = method.previous
    for kept, module in ((encoder, previous.encoder), (projector, previous.projector)):
        assert all(torch.equal(value, kept[key]) for key, value in module.state_dict().items())
    assert not any(p.requires_grad for p in previous.parameters())
    # The loss by hand: the old model is rebuilt from the weights noted above, with batch statistics.
    old = small_model(objective)
    old.encoder.load_state_dict(encoder)
    old.objective.projector.load_state_dict(projector)
    batch = small_batch(9)
    with torch.no_grad():
        features, before = model.encode(batch.mixed), old.encode(batch.mixed)
        if name == "pfr":
            cosines = [
                torch.cosine_similarity(method.predictor(f), z).mean() for f, z in zip(features, before, strict=True)
            ]
            expected = -(cosines[0] + cosines[1]) / 2
        else:
            z = [model.objective.projector(f) for f in features]
            z_old = [old.objective.projector(f) for f in before]
            expected = model.objective.distill([method.predictor(v) for v in z], z_old)
    assert method.losses(model, batch)["distill"].item() == pytest.approx(0.3 * expected.item(), rel=1e-4, abs=1e-6)
    state = method.state_dict()
    assert {"previous.encoder.0.weight", "predictor.0.weight"} <= state.keys()
    other = make(name, small_model(objective), weight=0.3, hidden=16)
    other.load_state_dict(state)
    assert torch.equal(other.previous.encoder[0].weight, encoder["0.weight"])


@pytest.mark.parametrize("name", ["cassle", "pfr"])
def test_distillation_trains_encoder_and_predictor(tiny, name: str) -> None:
    """Even where the objective asks for nothing."""
    run = Run(tiny("digits/simsiam/finetune", method__name=name, training__optimizer__weight_decay=0.0))
    run.method.begin_task(1, run.model)
    run.model.objective.compare = lambda projected, batch: torch.zeros(())
    trained = [*run.model.encoder.parameters(), *run.method.predictor.parameters()]
    before = [p.clone() for p in trained]
    run.trainer.step(run.trainer.load(torch.arange(64), torch.Generator().manual_seed(0), {}))
    assert not any(torch.equal(p, start) for p, start in zip(trained, before, strict=True))


def test_the_state_of_a_method_knows_its_task() -> None:
    for name in METHODS:
        if name != "pnn":
            first, second = (make(name, small_model()) for _ in range(2))
            first.begin_task(2, small_model())
            second.load_state_dict(first.state_dict())
            assert second.task == 2
