import numpy as np
import pytest
import torch
from torch import nn

from ptlf.run.build import make_optimizer
from ptlf.run.loop import Run
from ptlf.training.optimizers import LARS, OPTIMIZERS, prepare_state
from ptlf.training.trainer import TrainingConfig, learning_rate, set_rate


def lars_by_hand(weights, gradients, lr, momentum, weight_decay, eta=0.02, eps=1e-8):
    """One array, one gradient per step, float64 numpy."""
    p, velocity = weights.copy(), np.zeros_like(weights)
    for g in gradients:
        decay, scale = weight_decay, 1.0
        if p.ndim > 1:
            size, slope = np.sqrt((p**2).sum()), np.sqrt((g**2).sum())
            scale = min(eta * size / (slope + decay * size + eps) / lr, 1.0)
        else:
            decay = 0.0
        velocity = momentum * velocity + scale * (g + decay * p)
        p = p - lr * velocity
    return p


def test_lars_where_weights_or_gradients_are_zero_or_missing():
    empty, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    empty.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    LARS([empty, still], lr=0.1, momentum=0.9).step()
    torch.testing.assert_close(empty.detach(), torch.full((2, 2), -0.1))
    assert torch.equal(still.detach(), torch.ones(2, 2))
    moving, resting = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([moving, resting], lr=0.1, weight_decay=0.1)
    moving.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(resting.detach(), torch.ones(2, 2)) and resting not in optimizer.state
    assert not torch.equal(moving.detach(), torch.ones(2, 2))


def adamw_by_hand(weights, gradients, lr, beta1, beta2, eps, weight_decay):
    """One array, one gradient per step, float64 numpy; decoupled weight decay, Loshchilov and Hutter's algorithm 2."""
    p, mean, square = weights.copy(), np.zeros_like(weights), np.zeros_like(weights)
    for step, g in enumerate(gradients, start=1):
        p = p * (1 - lr * weight_decay)
        mean = beta1 * mean + (1 - beta1) * g
        square = beta2 * square + (1 - beta2) * g**2
        p = p - lr * (mean / (1 - beta1**step)) / (np.sqrt(square / (1 - beta2**step)) + eps)
    return p


def sgd_by_hand(weights, gradients, lr, momentum, weight_decay):
    p, velocity = weights.copy(), np.zeros_like(weights)
    for g in gradients:
        velocity = momentum * velocity + g + weight_decay * p
        p = p - lr * velocity
    return p


BY_HAND = [
    ("sgd", sgd_by_hand, 0.05, {"momentum": 0.8, "weight_decay": 0.1}),
    ("lars", lars_by_hand, 0.05, {"momentum": 0.8, "weight_decay": 0.1, "eta": 0.3}),
    ("lars", lars_by_hand, 0.4, {"momentum": 0.9, "weight_decay": 1e-4, "eta": 0.02}),
    ("lars", lars_by_hand, 1e-3, {"momentum": 0.9, "weight_decay": 0.1, "eta": 0.02}),
    ("lars", lars_by_hand, 0.1, {"momentum": 0.0, "weight_decay": 0.1, "eta": 0.5}),
    ("adamw", adamw_by_hand, 0.05, {"beta1": 0.7, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize(("name", "by_hand", "lr", "settings"), BY_HAND)
def test_every_setting_of_an_optimizer_does_what_it_says(name, by_hand, lr, settings, tensor_lr) -> None:
    """With a number and, as on a GPU, with a tensor for the rate, and the state made beforehand."""
    rule = OPTIMIZERS[name]
    assert vars(rule.Config()).keys() - {"name"} == settings.keys()
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3, 3, 3), (5,), (6, 4), (1, 2), (7,)]
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    slopes = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(6)]
    parameters = [nn.Parameter(tensor.clone()) for tensor in start]
    rate = torch.tensor(lr, dtype=torch.float64) if tensor_lr else lr
    optimizer = rule.make(rule.Config(**settings), parameters, rate)
    assert prepare_state(rule, optimizer, {})
    assert bool(optimizer.state) == (tensor_lr and settings.get("momentum") != 0)
    for row in slopes:
        for parameter, gradient in zip(parameters, row, strict=True):
            parameter.grad = gradient.clone()
        assert optimizer.step(lambda: 1.0) == 1.0
    for index, parameter in enumerate(parameters):
        expected = by_hand(start[index].numpy(), [row[index].numpy() for row in slopes], lr=lr, **settings)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_starts_anew_after_a_thaw_where_it_was(name) -> None:
    """A captured step writes to the addresses it saw."""
    rule = OPTIMIZERS[name]
    weights = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizer = rule.make(rule.Config(), weights, torch.tensor(0.1))
    kept: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    assert prepare_state(rule, optimizer, kept)
    places = [{key: value.data_ptr() for key, value in optimizer.state[weight].items()} for weight in weights]
    assert all(places)
    for weight in weights:
        weight.square().sum().backward()
    optimizer.step()
    after = {key: value.clone() for key, value in optimizer.state[weights[1]].items()}
    assert all(value.abs().sum() > 0 for value in after.values())
    optimizer.state.pop(weights[0])  # frozen
    weights[0].requires_grad_(False)
    assert prepare_state(rule, optimizer, kept)
    assert weights[0] not in optimizer.state
    weights[0].requires_grad_(True)
    assert prepare_state(rule, optimizer, kept)
    found = [optimizer.state[weight] for weight in weights]
    assert [{key: value.data_ptr() for key, value in state.items()} for state in found] == places
    assert all(value.abs().sum() == 0 for value in found[0].values())
    assert all(torch.equal(found[1][key], value) for key, value in after.items())


def test_the_first_state_is_the_one_that_torch_starts_from() -> None:
    """The same bits with it as without, and the same names, shapes and types. All were checked by hand above."""
    assert {name for name, *_ in BY_HAND} == OPTIMIZERS.keys()
    for rule in OPTIMIZERS.values():
        made = []
        for prepared in (True, False):
            weight = nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3))
            optimizer = rule.make(rule.Config(), [weight], torch.tensor(0.1))
            if prepared:
                prepare_state(rule, optimizer, {})
            weight.pow(3).sum().backward()
            optimizer.step()
            made.append((weight, optimizer.state[weight]))
        (first, state), (second, other) = made
        assert torch.equal(first, second)
        assert state.keys() == other.keys()
        assert all(torch.equal(state[key], other[key]) and state[key].dtype == other[key].dtype for key in state)


def test_an_optimizer_that_names_no_first_state_replays_no_earlier_graph(tiny, monkeypatch) -> None:
    """Its state has moved: under the same name, the engine gets other places after every freeze and thaw."""
    settings = {"training__optimizer": "plugin_members:RMSprop", "freezing__policy": "ascending"}
    run = Run(tiny("digits/simsiam/finetune", **settings))
    run.trainer.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    seen: list[tuple[str, tuple[int, ...]]] = []
    monkeypatch.setattr(run.trainer.engine, "rebuild", lambda *given: seen.append(given))
    for _ in range(3):
        run.trainer.rebuild()
    assert len({name for name, _ in seen}) == 1 and len({places for _, places in seen}) == 3


def test_the_learning_rate_by_hand() -> None:
    """Of a task of ten epochs: 0.4 for a batch of 256."""
    rows = [
        ({"schedule": "constant"}, {0: 0.4, 1.5: 0.4, 9.9: 0.4}),
        ({"schedule": "constant", "batch": 64}, {0: 0.1, 9.9: 0.1}),
        ({"schedule": "constant", "batch": 512}, {0: 0.8, 9.9: 0.8}),
        ({"schedule": "constant", "warmup": 2}, {0: 0.0, 0.5: 0.1, 1: 0.2, 1.5: 0.3, 2: 0.4, 9.9: 0.4}),
        ({"schedule": "cosine"}, {0: 0.4, 2.5: 0.2 + 0.2 * 0.5**0.5, 10 / 3: 0.3, 5: 0.2, 20 / 3: 0.1, 10: 0.0}),
        ({"schedule": "cosine", "warmup": 4}, {0: 0.0, 1: 0.1, 3: 0.3, 4: 0.4, 6: 0.3, 7: 0.2, 8: 0.1, 10: 0.0}),
        (
            {"schedule": "cosine", "warmup": 4, "warmup_start": 0.1},
            {0.9: 0.1, 1: 0.2, 2.9: 0.3, 3: 0.4, 4: 0.4, 7: 0.2},
        ),
        ({"schedule": "constant", "warmup": 1, "warmup_start": 0.003}, {0: 0.003, 0.9: 0.003, 1: 0.4}),
        ({"schedule": "cosine", "warmup": 4, "batch": 128}, {1: 0.05, 4: 0.2, 7: 0.1, 10: 0.0}),
    ]
    for settings, rates in rows:
        config = TrainingConfig(lr=0.4, epochs=10, **settings)
        found = {epoch: learning_rate(config, epoch) for epoch in rates}
        assert found == pytest.approx(rates, abs=1e-12), settings


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rate_follows_the_batch(name) -> None:
    config = TrainingConfig(optimizer=OPTIMIZERS[name].Config(name), lr=0.4, batch=64, warmup=3)
    model = nn.ModuleDict({"encoder": nn.Linear(2, 1, bias=False), "objective": nn.Linear(3, 1, bias=False)})
    optimizer = make_optimizer(config, model, nn.Identity())
    (group,) = optimizer.param_groups
    assert (group["lr"], len(group["params"])) == (0.1, 2)
    for lr in (0.1, torch.tensor(0.1)):  # it is set in place: a captured step reads the tensor it saw
        optimizer = torch.optim.SGD([weight := nn.Parameter(torch.ones(1))], lr=lr)
        set_rate(optimizer, 0.5)
        weight.grad = torch.ones(1)
        optimizer.step()
        assert weight.item() == 0.5
        assert not isinstance(lr, torch.Tensor) or optimizer.param_groups[0]["lr"] is lr


def test_gradients_are_clipped_to_the_norm_that_is_set(tiny):
    """Against gradients scaled by hand; a norm below the bound stays as it is."""
    gradients = {}
    for clip in (None, 0.01, 1e6):
        run = Run(tiny(training__clip=clip, training__batch=32))
        next(run.trainer.epoch(run.stream.tasks[0].train, 0, run.trainer.new_epoch_state()))
        parameters = [p for group in run.trainer.optimizer.param_groups for p in group["params"]]
        gradients[clip] = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).double()
    norm = gradients[None].norm()
    assert norm > 0.1
    torch.testing.assert_close(gradients[0.01], gradients[None] * 0.01 / norm, rtol=1e-4, atol=1e-9)
    assert torch.equal(gradients[1e6], gradients[None])
