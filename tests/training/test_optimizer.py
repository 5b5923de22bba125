import copy

import numpy as np
import pytest
import torch
from ptlf.training.optimizer import LARS, OptimizerConfig, learning_rate, make_optimizer, set_rate, settle_momentum
from torch import nn

SETTINGS = [
    {"lr": 0.4, "momentum": 0.9, "weight_decay": 1e-4},
    {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.1, "clip": False},
    {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1, "decay_vectors": True, "eta": 0.5},
]


def naive(weights, gradients, lr, momentum, weight_decay, clip=True, decay_vectors=False, eta=0.02, eps=1e-8):
    """One array, one gradient per step, float64 numpy."""
    p, velocity = weights.copy(), np.zeros_like(weights)
    for g in gradients:
        decay, scale = weight_decay, 1.0
        if p.ndim > 1:
            size, slope = np.sqrt((p**2).sum()), np.sqrt((g**2).sum())
            scale = eta * size / (slope + decay * size + eps)
            scale = min(scale / lr, 1.0) if clip else scale
        elif not decay_vectors:
            decay = 0.0
        velocity = momentum * velocity + scale * (g + decay * p)
        p = p - lr * velocity
    return p


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_lars_equals_a_naive_loop(settings, tensor_lr):
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3, 3, 3), (5,), (6, 4), (1, 2), (7,)]
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    slopes = [[torch.randn(s, generator=generator, dtype=torch.float64) * 0.1 for s in shapes] for _ in range(6)]
    parameters = [nn.Parameter(tensor.clone()) for tensor in start]
    lr = torch.tensor(settings["lr"], dtype=torch.float64) if tensor_lr else settings["lr"]
    optimizer = LARS(parameters, **{**settings, "lr": lr})
    for row in slopes:
        for parameter, gradient in zip(parameters, row, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    for index, parameter in enumerate(parameters):
        expected = naive(start[index].numpy(), [row[index].numpy() for row in slopes], **settings)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=0, atol=1e-12)


def test_the_trust_ratio_is_clipped_at_the_learning_rate():
    weight = nn.Parameter(torch.full((2, 2), 1000.0))
    weight.grad = torch.full((2, 2), 1e-3)
    LARS([weight], lr=0.5, momentum=0.0).step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 1000.0 - 0.5e-3))


def test_zero_weights_and_zero_gradients_stay_finite():
    empty, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    empty.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    LARS([empty, still], lr=0.1, momentum=0.9).step()
    torch.testing.assert_close(empty.detach(), torch.full((2, 2), -0.1))
    assert torch.equal(still.detach(), torch.ones(2, 2))


def test_parameters_without_a_gradient_do_not_move_and_get_no_state():
    moving, resting = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([moving, resting], lr=0.1, weight_decay=0.1)
    moving.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(resting.detach(), torch.ones(2, 2)) and resting not in optimizer.state
    assert not torch.equal(moving.detach(), torch.ones(2, 2))


def test_state_round_trips():
    torch.manual_seed(0)
    first = nn.Linear(4, 3)
    second = copy.deepcopy(first)
    one, two = (LARS(m.parameters(), lr=0.1, weight_decay=0.01) for m in (first, second))
    x = torch.randn(8, 4)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        return optimizer.step(lambda: 1.0)

    assert step(first, one) == 1.0
    second.load_state_dict(first.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))  # torch would share the tensors
    step(first, one), step(second, two)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_negative_settings_are_refused():
    with pytest.raises(ValueError, match="momentum must not be negative, got -1"):
        LARS([nn.Parameter(torch.ones(1))], momentum=-1)


def test_momentum_starts_anew_after_a_thaw_where_it_was() -> None:
    """A captured step writes to the place it saw."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=torch.tensor(0.1), momentum=0.9)
    before: dict[torch.Tensor, torch.Tensor] = {}
    settle_momentum(optimizer, before)
    places = [optimizer.state[weight]["momentum_buffer"].data_ptr() for weight in weights]
    sum(weight.square().sum() for weight in weights).backward()
    optimizer.step()
    optimizer.state.pop(weights[0])  # frozen
    weights[0].requires_grad_(False)
    settle_momentum(optimizer, before)
    assert weights[0] not in optimizer.state
    weights[0].requires_grad_(True)
    settle_momentum(optimizer, before)
    buffers = [optimizer.state[weight]["momentum_buffer"] for weight in weights]
    assert [buffer.data_ptr() for buffer in buffers] == places
    assert [float(buffer.sum()) for buffer in buffers] == [0.0, 6.0]


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"schedule": "constant"}, {0: 0.4, 1.5: 0.4, 9.9: 0.4}),
        ({"schedule": "constant", "batch": 64}, {0: 0.1, 9.9: 0.1}),
        ({"schedule": "constant", "batch": 512}, {0: 0.8, 9.9: 0.8}),
        ({"schedule": "constant", "warmup": 2}, {0: 0.0, 0.5: 0.1, 1: 0.2, 1.5: 0.3, 2: 0.4, 9.9: 0.4}),
        ({"schedule": "cosine"}, {0: 0.4, 2.5: 0.2 + 0.2 * 0.5**0.5, 10 / 3: 0.3, 5: 0.2, 20 / 3: 0.1, 10: 0.0}),
        ({"schedule": "cosine", "warmup": 4}, {0: 0.0, 1: 0.1, 3: 0.3, 4: 0.4, 6: 0.3, 7: 0.2, 8: 0.1, 10: 0.0}),
        ({"schedule": "cosine", "warmup": 4, "batch": 128}, {1: 0.05, 4: 0.2, 7: 0.1, 10: 0.0}),
    ],
    ids=str,
)
def test_the_learning_rate_by_hand(settings, rates) -> None:
    """Of a task of ten epochs: 0.4 for a batch of 256."""
    config = OptimizerConfig(lr=0.4, **settings)
    assert {epoch: learning_rate(config, epoch, 10) for epoch in rates} == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("lars", LARS)])
def test_the_optimizer_has_what_the_settings_say(name, kind) -> None:
    config = OptimizerConfig(optimizer=name, lr=0.4, batch=64, momentum=0.7, weight_decay=0.02, warmup=3)
    optimizer = make_optimizer(config, iter([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]))
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"], len(group["params"])) == (0.1, 0.7, 0.02, 2)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_the_rate_is_set_in_place(lr) -> None:
    """A captured step reads the tensor it saw."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=lr)
    set_rate(optimizer, 0.5)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == 0.5
    assert not isinstance(lr, torch.Tensor) or optimizer.param_groups[0]["lr"] is lr
